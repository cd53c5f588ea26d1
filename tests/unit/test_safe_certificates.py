"""The safe variant's certificates are kept: what did not change is not proven again."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import TuneError
from kgen.journal import Journal
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.problem import parse_problem
from kgen.model.record import Evidence, Fate, HostRun, Timing, Tried
from kgen.runtime.code_digest import Code
from kgen.trial import (
    HostRunner,
    HostRunResult,
    Session,
    WorkerPool,
    host_runs,
    proof_rules,
    session,
)
from kgen.tune.safe import SafeCertificates
from kgen.worker import Setup, Trial, TrialOutcome

ENTRY = open_catalogue().entry("rmsnorm")
H200 = profile_named("h200")
TUNED = parse_problem("M=64,N=128,dtype=bf16", ENTRY.operator.signature)
EVIDENCE = Evidence(0, (Tried("normal", 1),), (), 5, True)


class Nvrtc:
    """Says which compiler it is; nothing is compiled."""

    name, version = "nvrtc", "13.0"

    def identity(self, arch: str) -> str:
        return f"nvrtc 13.0 {arch}"

    def key(self, request: Any) -> str:
        return digest_of_text(request.rendered.digest, request.arch)


class GpuSession(Session):
    """A session of an H200 whose builds are there at once; `edition` is of all machine codes."""

    edition = ""

    def __init__(self, folder: Path, others: Sequence[Path] = ()) -> None:
        super().__init__(
            ENTRY, "forward", H200, cast(Any, Nvrtc()), folder / "h200.trials.jsonl",
            cast(Any, None), certificates=others,
        )
        self.text = ""  # of all sources, without the comments

    def render(self, *args: Any) -> Rendered:
        rendered = super().render(*args)
        return replace(rendered, bare=rendered.bare + self.text)

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        build: Future[Artifact | BuildFailure] = Future()
        build.set_result(Artifact("cubin", rendered.digest, rendered.digest, (), 0.1))
        return build

    def code(self, rendered: Rendered, artifact: Artifact) -> Code:
        return Code(f"{rendered.digest}{self.edition}", {})

    def refusal(self, *args: Any) -> str:
        return ""


class Runner(HostRunner):
    """Host runs that find what the test says."""

    def __init__(self) -> None:
        super().__init__(Setup("rmsnorm", (), H200, 0, 0), include_dir())
        self.ran: list[dict[str, str]] = []
        self.fault_of: dict[str, str] = {}  # by dtype

    def _run_claim(self, claim: host_runs._Claim) -> HostRunResult:
        dtypes = dict(claim.problem.dtypes)
        self.ran.append(dtypes)
        runs = tuple(
            HostRun(self._where(name), orders, (), self._key(name, claim.rendered))
            for name, orders in host_runs.RUNS
        )
        return HostRunResult(runs, fault=self.fault_of.get(dtypes["dtype"], ""))


class Pool:
    """Proves whatever it is asked to, unless the test says that it is wrong; counts."""

    def __init__(self) -> None:
        self.proven: list[dict[str, str]] = []
        self.preloaded: list[int] = []
        self.wrong = ""  # a dtype

    def preload(self, trials: int) -> None:
        self.preloaded.append(trials)

    def run(self, trials: Sequence[Trial]) -> Generator[tuple[int, TrialOutcome], None, None]:
        for place, trial in enumerate(trials):
            dtypes = dict(trial.problem.dtypes)
            self.proven.append(dtypes)
            fate = Fate.WRONG if dtypes["dtype"] == self.wrong else Fate.VERIFIED
            yield place, TrialOutcome(fate, "off by one", evidence=EVIDENCE)


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    with made:
        yield made


def opened(its: Session, runner: Runner, pool: Pool) -> SafeCertificates:
    return SafeCertificates(its, runner, cast(WorkerPool, cast(Any, pool)), [TUNED])


def certified(its: Session, runner: Runner) -> tuple[SafeCertificates, Pool]:
    """Certify all, as a tune does."""
    pool = Pool()
    safe = opened(its, runner, pool)
    list(safe.certify_tuned())
    list(safe.certify_rest())
    finished(safe)
    return safe, pool


def finished(safe: SafeCertificates) -> None:
    safe.advance()
    while safe.host_runs:
        wait(safe.host_runs)
        safe.advance()


def lines(folder: Path) -> list[str]:
    return (folder / "h200.trials.jsonl").read_text().splitlines()


def test_a_tune_that_is_run_again_proves_nothing_again(tmp_path: Path, runner: Runner) -> None:
    first, pool = certified(GpuSession(tmp_path), runner)
    claims, pairs = len(pool.proven), len(runner.ran)
    assert claims > pairs > 0
    assert pool.preloaded[0] == claims
    # A line for each device part, and another one with the host runs.
    assert len(lines(tmp_path)) == claims + pairs
    before = lines(tmp_path)
    again, pool = certified(GpuSession(tmp_path), runner)
    assert pool.proven == []
    assert pool.preloaded == [0, 0]
    assert len(runner.ran) == pairs
    assert lines(tmp_path) == before
    assert again.missing() == first.missing() == ()
    records = [one.record for one in again.results() if one.record is not None]
    assert len(records) == claims
    assert sum(bool(r.evidence and r.evidence.host) for r in records) == pairs
    assert [r.id for r in records] == [
        one.record.id for one in first.results() if one.record is not None
    ]


@pytest.mark.parametrize("ended_after", [1, 3])
def test_a_killed_tune_keeps_what_it_proved(
    tmp_path: Path, runner: Runner, ended_after: int
) -> None:
    """Nothing is written at the end: what is killed leaves what a generator leaves that stops."""
    pool = Pool()
    safe = opened(GpuSession(tmp_path), runner, pool)
    list(safe.certify_tuned())
    tuned = len(pool.proven)
    with closing(safe.certify_rest()) as events:
        for event in events:
            if (event.what, event.done) == ("verified", ended_after):
                break
    assert len(pool.proven) == tuned + ended_after
    _, rest = certified(GpuSession(tmp_path), runner)
    assert not [dtypes for dtypes in rest.proven if dtypes in pool.proven]
    _, whole = certified(GpuSession(tmp_path / "other"), runner)
    assert len(pool.proven) + len(rest.proven) == len(whole.proven)


def test_device_parts_are_kept_while_host_runs_go_on(tmp_path: Path, runner: Runner) -> None:
    pool = Pool()
    safe = opened(GpuSession(tmp_path), runner, pool)
    list(safe.certify_tuned())
    list(safe.certify_rest())
    wait(safe.host_runs)  # of which nothing is written; how far they are would depend on threads
    its = len(runner.ran)
    records = [r for r in Journal(tmp_path / "h200.trials.jsonl").read() if r.evidence is not None]
    assert len({r.key for r in records}) == len(pool.proven), "killed here"
    _, again = certified(GpuSession(tmp_path), runner)
    assert again.proven == []
    assert len(runner.ran) <= 2 * its


@pytest.mark.parametrize("what", ["definition", "guards", "rules", "code"])
def test_what_changed_is_proven_again(
    tmp_path: Path, runner: Runner, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = certified(GpuSession(tmp_path), runner)
    its = GpuSession(tmp_path)
    match what:
        case "definition":
            its.definition = "another"
        case "guards":
            monkeypatch.setattr(session, "guards_digest", lambda variant: "another")
        case "rules":
            for module in (session, proof_rules):
                monkeypatch.setattr(module, "proof_rules", lambda: "another")
        case "code":
            its.edition = "another"
    ran = len(runner.ran)
    _, again = certified(its, runner)
    assert again.proven == before.proven
    # Host runs belong to the text, whatever the device's code; but not to another way to prove.
    assert len(runner.ran) == 2 * ran


def test_a_text_of_the_same_code_needs_its_host_run_alone(tmp_path: Path, runner: Runner) -> None:
    """A host branch of a header is no part of the machine code."""
    certified(GpuSession(tmp_path), runner)
    ran = len(runner.ran)
    its = GpuSession(tmp_path)
    its.text = " with another host branch"
    _, pool = certified(its, runner)
    assert pool.proven == []
    assert len(runner.ran) == 2 * ran
    _, pool = certified(its, runner)
    assert len(runner.ran) == 2 * ran


def test_a_kernel_that_its_host_run_refuses_is_never_kept(tmp_path: Path, runner: Runner) -> None:
    runner.fault_of["fp16"] = "a race"
    for _ in range(2):
        safe, pool = certified(GpuSession(tmp_path), runner)
        with pytest.raises(TuneError, match="a race"):
            safe.raise_failures()
        assert any(dtypes["dtype"] == "fp16" for dtypes in pool.proven)
        assert all(dict(one)["dtype"] == "fp16" for one in (c.dtypes for c in safe.missing()))
        assert safe.missing()
    runner.fault_of.clear()
    safe, pool = certified(GpuSession(tmp_path), runner)
    safe.raise_failures()
    assert {dtypes["dtype"] for dtypes in pool.proven} == {"fp16"}, "the others are kept"
    assert safe.missing() == ()


def test_a_wrong_kernel_costs_itself_alone(tmp_path: Path, runner: Runner) -> None:
    pool = Pool()
    pool.wrong = "fp32"
    safe = opened(GpuSession(tmp_path), runner, pool)
    list(safe.certify_tuned())
    list(safe.certify_rest())
    finished(safe)
    with pytest.raises(TuneError, match="off by one"):
        safe.raise_failures()
    assert safe.is_ready, "bf16 was tuned"
    assert {one.dtypes["dtype"] for one in safe.missing()} == {"fp32"}
    pool.wrong = "bf16"
    with pytest.raises(TuneError, match="off by one"):
        list(opened(GpuSession(tmp_path / "other"), runner, pool).certify_tuned())


def test_the_tuned_dtypes_come_first(tmp_path: Path, runner: Runner) -> None:
    pool = Pool()
    safe = opened(GpuSession(tmp_path), runner, pool)
    assert not safe.is_ready
    list(safe.certify_tuned())
    assert 0 < len(pool.proven) < safe_count(safe)
    finished(safe)
    assert safe.is_ready
    assert dict(TUNED.dtypes) in [dict(one.dtypes) for one in safe.results()]
    assert safe.missing()
    assert all(one.record is not None or one.rendered for one in safe.results())
    sources = {one.rendered.digest for one in safe.results() if one.record is not None}
    assert {one.rendered.digest for one in safe.results()} == sources, "none that is not certified"


def safe_count(safe: SafeCertificates) -> int:
    return len(safe._proofs)


def test_another_journal_answers_too(tmp_path: Path, runner: Runner) -> None:
    """The committed library, for a tune into another folder; its times are not copied."""
    committed = GpuSession(tmp_path / "committed")
    _, before = certified(committed, runner)
    journal = Journal(committed.journal.path)
    with_time = [
        replace(record, timing=Timing(1.0, 1.0, 1.0, 3, "of another tune"))
        for record in journal.read()
    ]
    journal.path.unlink()
    for record in with_time:
        journal.append(record)
    ran = len(runner.ran)
    its = GpuSession(tmp_path / "mine", [journal.path, tmp_path / "none.trials.jsonl"])
    safe, pool = certified(its, runner)
    assert pool.proven == []
    assert len(runner.ran) == ran
    mine = list(Journal(its.journal.path).read())
    assert len(mine) == len(before.proven)
    assert all(record.timing is None for record in mine)
    assert {record.id for record in mine} <= {record.id for record in with_time}
    # From here on the folder's own journal is enough.
    _, pool = certified(GpuSession(tmp_path / "mine"), runner)
    assert pool.proven == []
    assert safe.missing() == ()


def test_another_process_may_add_certificates(tmp_path: Path, runner: Runner) -> None:
    its = GpuSession(tmp_path)
    pool = Pool()
    safe = opened(its, runner, pool)
    list(safe.certify_tuned())
    certified(GpuSession(tmp_path), runner)
    proven = len(pool.proven)
    list(safe.certify_rest())
    assert len(pool.proven) == proven


def test_a_predicted_row_and_a_search_certify_nothing(tmp_path: Path, runner: Runner) -> None:
    """A predicted row ran on the CPU alone: zero launches."""
    _, before = certified(GpuSession(tmp_path / "whole"), runner)
    records = list(Journal(tmp_path / "whole" / "h200.trials.jsonl").read())
    for name, evidence in (("predicted", replace(EVIDENCE, launches=0)), ("search", None)):
        journal = Journal(tmp_path / name / "h200.trials.jsonl")
        for record in records:
            rules = record.evidence.rules if record.evidence else ""
            its = None if evidence is None else replace(evidence, rules=rules)
            journal.append(replace(record, evidence=its))
        _, pool = certified(GpuSession(tmp_path / name), runner)
        assert len(pool.proven) == len(before.proven)


def test_certificates_of_older_formats_are_made_again(tmp_path: Path, runner: Runner) -> None:
    """Nobody knows by which rules they were made."""
    _, before = certified(GpuSession(tmp_path / "whole"), runner)
    journal = Journal(tmp_path / "h200.trials.jsonl")
    for record in Journal(tmp_path / "whole" / "h200.trials.jsonl").read():
        assert record.evidence is not None
        journal.append(replace(record, evidence=replace(record.evidence, rules="")))
    _, pool = certified(GpuSession(tmp_path), runner)
    assert len(pool.proven) == len(before.proven)


def test_a_certificate_serves_cold_and_warm_tunes(tmp_path: Path, runner: Runner) -> None:
    certified(GpuSession(tmp_path), runner)
    warm = GpuSession(tmp_path)
    warm.l2 = "warm"
    _, pool = certified(warm, runner)
    assert pool.proven == []


def test_finalists_are_not_proven_again(tmp_path: Path) -> None:
    from kgen.trial import certify

    its = GpuSession(tmp_path)
    asked: list[str] = []

    def run(*args: object, **level: object) -> TrialOutcome:
        asked.append(str(level["level"]))
        return TrialOutcome(Fate.VERIFIED, evidence=EVIDENCE)

    its.run = run  # type: ignore[method-assign]
    its.candidate = lambda *_: cast(Any, SimpleNamespace())  # type: ignore[method-assign]
    config = ENTRY.space.safe_variant("forward").safe
    assert config is not None
    rendered = its.render(config, TUNED)
    timing = Timing(2.0, 2.0, 2.0, 3, "")
    built = its.build(rendered).result()
    assert isinstance(built, Artifact)
    trial = its.record(config, TUNED, rendered, TrialOutcome(Fate.VERIFIED, timing=timing), built)
    first = certify(its, TUNED, trial)
    assert first is not None
    assert asked == ["certify"]
    # The certificate itself, as a resumed search finds it; and a trial that was timed anew.
    again = certify(its, TUNED, first.record)
    assert again is not None
    assert again.record.id == first.record.id
    faster = replace(trial, id="", timing=Timing(1.0, 1.0, 1.0, 3, ""), when="later")
    timed_anew = certify(its, TUNED, faster)
    assert asked == ["certify"]
    assert timed_anew is not None
    assert timed_anew.record.evidence == first.record.evidence
    assert timed_anew.record.timing == faster.timing
    # Finals that find a fault end that.
    its.record(config, TUNED, rendered, TrialOutcome(Fate.WRONG, "when timed", evidence=EVIDENCE),
               built)
    certify(its, TUNED, trial)
    assert asked == ["certify", "certify"]
