"""Certify a mutant in the same way as kgen certifies a kernel: on the host layer, then under ASan.

The run under ASan also shows which branches nothing tested.

`refused` returns the verdict. A mutant may do anything, so it runs in a forked child, which also
inherits the input sets that the unmutated kernel was certified on.

A certificate is made in stretches of its input sets, each first with the unmutated kernel: most
mutants are refused on one of the first sets, and then neither kernel runs on the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
from mutants import Mutant
from mutation_operators import Mechanism
from mutation_subjects import Subject

from kgen.assets import include_dir
from kgen.build import Compiler, open_compiler
from kgen.build.comparisons import line_finder
from kgen.build.host import find_cxx
from kgen.check import check
from kgen.errors import LaunchError
from kgen.launch import Module
from kgen.launch.host import HostDevice
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan
from kgen.model.set_results import Part, fresh_seed
from kgen.runtime.cache import read_file
from kgen.trial.host_runs import RUNS
from kgen.trial.untested import untested_branches, untested_fault
from kgen.worker.messages import Candidate, Setup, Trial
from kgen.worker.runner import Runner

DAMAGED_TENSOR = "RuntimeError: Unknown device"
"""PyTorch's message if a mutant wrote over a tensor of its process."""
TIME_LIMIT_S = 30.0
# Ends of the stretches of a certificate's input sets; the last stretch has all sets that follow.
ENDS = (4, 16, 48)
# Seeds of the fixture and of the fresh inputs, for both kernels.
SEEDS = (1, fresh_seed(1, 2))


class NotAMutantError(Exception):
    """A mutation does not compile, so it says nothing about the verifier."""


def refused(mutant: Mutant) -> str:
    """Certify a mutant.

    Returns:
        Why the mutant is refused, headed by the part of the certificate; empty if it passes.
    Raises:
        NotAMutantError: If the mutant does not compile.
    """
    return next((reason for stage in STAGES if (reason := stage(mutant))), "")


def mechanism_of(reason: str) -> Mechanism:
    """The part of the certificate that a reason of `refused` comes from: the first one it names."""
    stage, _, text = reason.partition(": ")
    if stage == "asan":
        return Mechanism.ASAN
    if stage == "branches":
        return Mechanism.UNTESTED
    signs = {
        "died of signal": Mechanism.CRASH,
        DAMAGED_TENSOR: Mechanism.CRASH,
        "did not end": Mechanism.HANG,
        "fault: ": Mechanism.FAULT,
        "wrote past the end of": Mechanism.CANARY,
        "wrote before the start of": Mechanism.CANARY,
        "was modified": Mechanism.INPUT,
        "differs between launches": Mechanism.DIFFERS,
        "out of bound": Mechanism.NUMBERS,
        "is off on average": Mechanism.NUMBERS,
    }
    return next(mechanism for sign, mechanism in signs.items() if sign in text)


def same_code(mutant: Mutant) -> bool:
    """Whether a mutant compiles to the same module as the unmutated kernel."""
    if mutant.plan:
        return False
    own, other = _build(mutant, "host"), _build_unmutated(mutant.subject)
    return read_file(own.path) == read_file(other.path)


def passes_unmutated(subject: Subject) -> str:
    """Certify the unmutated subject; the result is empty if it passes, as it must."""
    if reason := next(filter(None, map(_unmutated(subject).reason, STRETCHES)), ""):
        return reason
    artifact = _build_unmutated(subject, "host-asan")
    with tempfile.TemporaryDirectory(prefix="kgen-comparisons-") as folder:
        comparisons = Path(folder, "comparisons")
        reason = _trial(_unmutated(subject).runner, subject, artifact, "", None, comparisons)
        return reason or _untested(subject, artifact, comparisons)


def _on_host(mutant: Mutant) -> str:
    """Run every input set in rank order and in three shuffled orders; all must give equal bits."""
    artifact = _build(mutant, "host")
    for stretch in STRETCHES:
        runner = _passing(mutant.subject, stretch)
        reason = _in_child(partial(_certify, runner, mutant, artifact, stretch))
        if reason:
            return f"host: {reason}"
    return ""


def _sanitized(mutant: Mutant) -> str:
    """Run with buffers of the exact size, which also finds a read past the end that is not used."""
    artifact = _build(mutant, "host-asan")
    runner = _unmutated(mutant.subject).runner
    with tempfile.TemporaryDirectory(prefix="kgen-comparisons-") as folder:
        comparisons = Path(folder, "comparisons")
        reason = _in_child(partial(_certify, runner, mutant, artifact, None, comparisons))
        return (reason and f"asan: {reason}") or _untested(mutant.subject, artifact, comparisons)


def _untested(subject: Subject, artifact: Artifact, comparisons: Path) -> str:
    """Why a sanitized build is refused for its comparisons; empty if it is not."""
    tool = line_finder(find_cxx())
    assert tool, "the tests need g++ and addr2line"
    fault = untested_fault(untested_branches(artifact, comparisons, tool), subject.space)
    return fault and f"branches: {fault}"


STAGES: tuple[Callable[[Mutant], str], ...] = (_on_host, _sanitized)


# --- stretches of input sets ---


@dataclass(frozen=True, slots=True)
class Stretch(Part):
    """A part of a run with adjacent input sets.

    Attributes:
        first: Index of the first set in the run's schedule.
        end: Index behind the last set; None: the run's last set.
    """

    first: int
    end: int | None


STRETCHES = tuple(
    Stretch(index, len(ENDS) + 1, first, end)
    for index, (first, end) in enumerate(zip((0, *ENDS), (*ENDS, None), strict=True))
)


def _places(part: Stretch, costs: Sequence[float]) -> frozenset[int]:
    return frozenset(range(len(costs))[part.first:part.end])


# --- building ---


@lru_cache
def _compiler(name: str, include: Path) -> Compiler:
    return open_compiler(name, [include], jobs=1)


def _build(mutant: Mutant, compiler: str) -> Artifact:
    rendered = mutant.subject.render()
    if mutant.plan:
        return _built(mutant, compiler, rendered, include_dir())
    digest = digest_of_text(rendered.digest, mutant.header, mutant.text)
    if not mutant.header:
        changed = Rendered(rendered.name, mutant.text, digest)
        return _built(mutant, compiler, changed, include_dir())
    with tempfile.TemporaryDirectory(prefix="kgen-mutant-") as folder:
        include = Path(folder)
        shutil.copytree(include_dir(), include, dirs_exist_ok=True)
        (include / mutant.header).write_text(mutant.text, encoding="utf-8")
        return _built(mutant, compiler, replace(rendered, digest=digest), include)


def _built(mutant: Mutant, compiler: str, rendered: Rendered, include: Path) -> Artifact:
    opened = _compiler(compiler, include) if include == include_dir() else open_compiler(
        compiler, [include], jobs=1
    )
    built = opened.build([BuildRequest(rendered, "host")])[0]
    if isinstance(built, BuildFailure):
        raise NotAMutantError(f"{mutant.name} does not compile\n{built.message}")
    return built


def _build_unmutated(subject: Subject, compiler: str = "host") -> Artifact:
    built = _compiler(compiler, include_dir()).build([BuildRequest(subject.render(), "host")])[0]
    assert isinstance(built, Artifact), built
    return built


# --- running ---


class _Unmutated:
    """A subject without a mistake: a runner with its input sets, and the stretches that it passes.

    Attributes:
        runner: The runner.
    """

    def __init__(self, subject: Subject) -> None:
        torch.set_num_threads(1)  # a forked child has no other thread
        self.runner = Runner(
            subject.entry.operator, Setup(subject.operator, (), subject.host, 0, seed=SEEDS[0])
        )
        self._subject = subject
        self._reasons: dict[Stretch, str] = {}

    def reason(self, stretch: Stretch) -> str:
        """Why the certificate refuses the kernel on a stretch; empty if it passes."""
        if stretch not in self._reasons:
            artifact = _build_unmutated(self._subject)
            self._reasons[stretch] = _trial(self.runner, self._subject, artifact, "", stretch)
        return self._reasons[stretch]


@lru_cache(maxsize=2)
def _unmutated(subject: Subject) -> _Unmutated:
    return _Unmutated(subject)


def _passing(subject: Subject, stretch: Stretch) -> Runner:
    """The runner of a subject that passes a stretch, as it must."""
    if reason := _unmutated(subject).reason(stretch):
        raise AssertionError(f"{subject.name} itself is refused: {reason}")
    return _unmutated(subject).runner


def _certify(
    runner: Runner,
    mutant: Mutant,
    artifact: Artifact,
    stretch: Stretch | None,
    comparisons: Path | None = None,
) -> str:
    return _trial(runner, mutant.subject, artifact, mutant.plan, stretch, comparisons)


def _trial(
    runner: Runner,
    subject: Subject,
    artifact: Artifact,
    plan: str,
    stretch: Stretch | None,
    comparisons: Path | None = None,
) -> str:
    """The host run of a certificate, or a stretch of it, made in the same way as by kgen."""
    name = "host-asan" if artifact.kind == "exe" else "host"
    runner._device = _SpoilingDevice(plan)
    trial = Trial(
        pass_name=subject.pass_name,
        problem=subject.problem,
        candidate=Candidate(subject.space, subject.config, artifact),
        level="host",
        measure=False,
        orders=dict(RUNS)[name],
        seeds=SEEDS,
        part=stretch,
        comparisons=str(comparisons or ""),
    )
    try:
        with patch.object(check, "places_of", _places):
            return runner.trial(trial).reason
    except LaunchError as error:
        return f"fault: {error}"


class _SpoilingDevice(HostDevice):
    """The host, with launches changed as the mutant prescribes."""

    def __init__(self, plan: str) -> None:
        super().__init__(threads=1)
        self._plan = plan

    def load(self, artifact: Artifact) -> Module:
        return _SpoilingModule(super().load(artifact), self._plan)


class _SpoilingModule(Module):
    def __init__(self, module: Module, plan: str) -> None:
        super().__init__(module.artifact)
        self._module = module
        self._plan = plan

    def bind(
        self,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor | None],
        numbers: Mapping[str, int | float],
    ) -> Callable[[], None]:
        self._module.constant = self.constant
        return self._module.bind(spoiled_plan(plan, self._plan), tensors, numbers)

    def occupancy(self, kernel: str, threads: int, smem_bytes: int) -> int:
        return self._module.occupancy(kernel, threads, smem_bytes)

    def close(self) -> None:
        self._module.close()


def spoiled_plan(plan: Plan, change: str) -> Plan:
    """Change every launch; the empty string leaves the plan as it is."""
    return replace(plan, launches=tuple(_spoiled(launch, change) for launch in plan.launches))


def _spoiled(launch: Launch, change: str) -> Launch:
    (gx, gy, gz), (bx, by, bz) = launch.grid, launch.block
    match change:
        case "":
            return launch
        case "one block fewer":
            return replace(launch, grid=(max(gx - 1, 0), gy, gz))
        case "one block more":
            return replace(launch, grid=(gx + 1, gy, gz))
        case "half the threads":
            return replace(launch, block=(bx // 2, by, bz))
        case "less shared memory":
            return replace(launch, smem_bytes=max(launch.smem_bytes - 16, 0))
    raise AssertionError(change)


def _in_child(work: Callable[[], str]) -> str:
    """Run in a forked child; a crash or a hang also counts as an answer."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        answer = ""
        try:
            os.close(source)
            faulthandler.disable()  # a crash is an expected answer
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            answer = json.dumps({"reason": work()})
        except BaseException as error:  # the parent reports it
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        finally:
            with os.fdopen(sink, "w") as pipe:
                pipe.write(answer)
                pipe.flush()
            os._exit(0)
    os.close(sink)
    received = b""
    deadline = time.monotonic() + TIME_LIMIT_S
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while left := max(deadline - time.monotonic(), 0.0):
            if select.select([pipe], [], [], left)[0]:
                part = pipe.read(65536)
                if not part:
                    break
                received += part
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"did not end within {TIME_LIMIT_S:g} s"
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of signal {os.WTERMSIG(status)}"
    answer = json.loads(received)
    if "error" in answer:
        raise AssertionError(answer["error"])
    reason: str = answer["reason"]
    return reason
