"""Host runs in parts, by several processes: they say what one process says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from host_builds import needs_cxx, needs_line_finder
from processes import is_running

from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import WorkerError
from kgen.model.artifact import Rendered
from kgen.model.digest import digest_of_text
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.model.space import Variant
from kgen.trial import HostRunner, HostRunResult, host_runs, jobs_beside
from kgen.trial.host_parts import PartEnd
from kgen.worker import Candidate, Setup, Trial, TrialOutcome

pytestmark = needs_cxx

ENTRY = open_catalogue().entry("rmsnorm")
SAFE = ENTRY.space.safe_variant("forward")
# With the 256 threads of its own config a host run takes 24 s instead of 9: each is a fiber.
VARIANT = replace(SAFE, safe=SAFE.config({"threads": 64}))
PROBLEM = parse_problem("M=300,N=16,dtype=fp32", ENTRY.operator.signature)
SETUP = Setup("rmsnorm", (), profile_named("h200"), 0, seed=3)
LOOP = "for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {"
WRONG = "if (M == {rows} && blockIdx.x == 0 && threadIdx.x == 0) y[0] = 7.0f;"
JOBS = 3


def source(*faults: str) -> Rendered:
    """The safe kernel, with statements before its loop over rows."""
    assert VARIANT.safe is not None
    rendered = Renderer(include_dir()).render(
        "rmsnorm", ENTRY.templates, VARIANT, VARIANT.safe, PROBLEM
    )
    assert rendered.source.count(LOOP) == 1
    # Behind the loop: what is written there stays.
    head, tail = rendered.source.split(LOOP)
    end = tail.rindex("}\n\nKGEN_EXPORT")
    text = f"{head}{LOOP}{tail[:end]}{' '.join(faults)}\n{tail[end:]}"
    return replace(rendered, source=text, digest=digest_of_text(text))


def start(
    runner: HostRunner, rendered: Rendered, variant: Variant = VARIANT
) -> Future[HostRunResult]:
    assert variant.safe is not None
    return runner.start(rendered, variant, variant.safe, "forward", PROBLEM)


def host_run(rendered: Rendered, jobs: int, variant: Variant = VARIANT) -> HostRunResult:
    with HostRunner(SETUP, include_dir(), jobs) as runner:
        result = start(runner, rendered, variant).result()
        assert len(runner._workers) == jobs
        return result


def without_addresses(result: HostRunResult) -> HostRunResult:
    """AddressSanitizer reports process and addresses."""
    return replace(result, fault=re.sub(r"0x[0-9a-f]+|\d{2,}", "...", result.fault.split("\n")[0]))


def test_the_evidence_is_that_of_one_process() -> None:
    alone = host_run(source(), 1)
    assert [len(run.tried) > 40 for run in alone.runs] == [True, True], alone
    assert host_run(source(), JOBS) == alone


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([WRONG.format(rows=240), WRONG.format(rows=511)], "inputs 'normal M=511 N=8'"),
        (["if (M == 63) *(volatile int*)8 = 1;", WRONG.format(rows=511)], "SIGSEGV"),
        (["if (M == 240) *(volatile int*)8 = 1;", WRONG.format(rows=511)], "M=511 N=8"),
        (["if (M == 63 && x[M * x_stride_M] == 1.5f) y[0] = 0.0f;"], "AddressSanitizer"),
    ],
    ids=["first of two", "death", "death later", "AddressSanitizer"],
)
def test_the_fault_is_that_of_one_process(faults: list[str], told: str) -> None:
    rendered = source(*faults)
    alone = host_run(rendered, 1)
    assert told in alone.fault
    assert without_addresses(host_run(rendered, JOBS)) == without_addresses(alone)


@needs_line_finder
@pytest.mark.parametrize("jobs", [1, JOBS])
def test_an_untested_branch_is_a_fault(jobs: int) -> None:
    fault = host_run(source("if (M > 20000) y[0] = 7.0f;"), jobs).fault
    assert "same result in every launch" in fault
    assert re.search(r"line \d+: if \(M > 20000\)\n", fault), fault
    assert "say why in a comment there: `// untested: WHY`" in fault
    assert f"or at {VARIANT.where}: `untested: " in fault


@needs_line_finder
def test_a_variant_may_name_conditions_that_need_no_test() -> None:
    rendered = source("if (M > 20000) y[0] = 7.0f;", "if (M % 96 == 95) y[0] = 7.0f;")
    named = replace(VARIANT, untested=(("M>20000", "no model has as many rows"),))
    fault = host_run(rendered, 1, named).fault
    assert "20000" not in fault
    assert "M % 96 == 95" in fault
    both = replace(named, untested=(*named.untested, ("M % 96 == 95", "nor these")))
    assert host_run(rendered, 1, both).fault == ""


@needs_line_finder
def test_a_comment_may_say_why_a_condition_needs_no_test() -> None:
    named = "if (M > 20000) y[0] = 7.0f;  // untested: no model has as many rows\n"
    assert host_run(source(named), 1).fault == ""
    fault = host_run(source(named, "if (M % 96 == 95) y[0] = 7.0f;"), 1).fault
    assert "20000" not in fault
    assert "M % 96 == 95" in fault


@needs_line_finder
@pytest.mark.parametrize(
    "statement",
    [
        "if (rstd == nullptr && w == nullptr && blockIdx.x == 0) y[0] = y[0];",  # options
        "for (kgen::i64 i = blockIdx.x; i < M; ++i) if (i >= M) y[0] = 7.0f;",  # an index's bound
        "if (threadIdx.x < 32 && threadIdx.x >= 4096) y[0] = 7.0f;",  # what the config fixes
    ],
)
def test_conditions_that_no_call_can_change_are_no_fault(statement: str) -> None:
    assert host_run(source(statement), 1).fault == ""


@needs_line_finder
def test_a_line_finder_that_fails_makes_a_missing_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_runs, "line_finder", lambda cxx: "/bin/false")
    result = host_run(source(), 1)
    assert result.fault == ""
    assert "comparisons: /bin/false: exit status 1" in result.missing


def test_a_part_that_hangs_is_missing_and_a_fault_beside_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_runs, "TIMEOUT_S", 20.0)  # a busy machine starts workers slowly
    hang = "if (M == 63) for (volatile int i = 1; i;) {}"
    missing = host_run(source(hang), JOBS)
    assert missing.fault == ""
    assert "no answer within 20 s; the worker was killed" in missing.missing
    faulty = host_run(source(hang.replace("63", "240"), WRONG.format(rows=511)), JOBS)
    assert "inputs 'normal M=511 N=8'" in faulty.fault


def test_a_killed_worker_is_named() -> None:
    hang = "if (M == 63) for (volatile int i = 1; i;) {}"
    with HostRunner(SETUP, include_dir(), JOBS) as runner:
        run = start(runner, source(hang))
        begun: dict[int, tuple[int | None, float]] = {}  # by process: its set, and since when
        while not run.done():
            for worker in list(runner._workers):
                child, place = worker._child, worker.set_place
                if child is None or child.pid is None or place is None:
                    continue
                if begun.setdefault(child.pid, (place, time.monotonic()))[0] != place:
                    begun[child.pid] = (place, time.monotonic())
                elif time.monotonic() - begun[child.pid][1] > 5.0:  # it hangs, or has no more parts
                    os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.1)
        assert "the worker was ended by SIGKILL" in run.result().fault


def test_a_tune_that_ends_waits_for_no_part_and_leaves_no_program() -> None:
    hang = "if (M == 63) for (volatile int i = 1; i;) {}"
    with HostRunner(SETUP, include_dir(), JOBS) as runner:
        run = start(runner, source(hang))
        while not (programs := sanitized_programs(runner)):
            assert not run.done(), run.result()
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 60.0  # not `TIMEOUT_S`
    assert run.done()
    assert not run.result().runs
    deadline = time.monotonic() + 60.0
    while any(map(is_running, programs)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def sanitized_programs(runner: HostRunner) -> list[int]:
    """Those that hang, in the set that does."""
    workers = [worker._child.pid for worker in runner._workers if worker._child is not None]
    found = []
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with contextlib.suppress(OSError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            if int(ticks[1]) in workers and int(ticks[11]) > 200:  # 2 s of CPU time
                found.append(pid)
    return found


def test_proofs_share_the_processes() -> None:
    with HostRunner(SETUP, include_dir(), 4) as runner:
        assert runner._cores() == 4
        for unfinished, cores in ((1, 4), (2, 2), (3, 1), (9, 1)):
            runner._unfinished = unfinished
            assert runner._cores() == cores
        runner._unfinished = 0


def test_a_tune_that_has_nothing_else_to_do_gives_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(3, timeout=60.0)
    asked: list[str] = []

    class Waiting:
        """A worker that waits for two others."""

        set_place = None

        def __init__(self, *_: object, **__: object) -> None: ...

        def trial(self, trial: Trial) -> TrialOutcome:
            asked.append(trial.pass_name)
            together.wait()
            return TrialOutcome(Fate.VERIFIED)

        def abort(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(host_runs, "WorkerHandle", Waiting)
    trial = cast("Trial", SimpleNamespace(pass_name="forward", problem=PROBLEM))
    with HostRunner(SETUP, include_dir(), 1, 3) as runner:
        ends = [runner._parts.submit(runner._run, trial) for _ in range(3)]
        time.sleep(0.3)
        assert len(asked) == 1
        assert runner._cores() == 1
        runner.widen()
        assert [end.result().outcome.fate for end in ends] == [Fate.VERIFIED] * 3  # type: ignore[union-attr]
        assert runner._cores() == 3


@pytest.mark.parametrize("cores", [1, 2])
def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """A launch of hundreds of blocks would have a thread for every core, in every process."""
    asked: list[int] = []

    def run(_: HostRunner, trial: Trial) -> PartEnd:
        asked.append(trial.threads)
        return PartEnd(WorkerError("not run"), None)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(HostRunner, "_run", run)
    trial = Trial("forward", PROBLEM, cast("Candidate", None), level="host", orders=(0,))
    with HostRunner(SETUP, include_dir(), 16) as runner, pytest.raises(WorkerError):
        runner._begin(trial, cores, 0).outcome()
    assert set(asked) == {64 // 16}


@pytest.mark.parametrize(("idle", "jobs"), [(0, 1), (1, 1), (2, 2), (8, 8), (99, 16)])
def test_jobs(idle: int, jobs: int) -> None:
    assert jobs_beside(idle) == jobs
