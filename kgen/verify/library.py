"""Checks a library's kernels: every row, and families and safe kernels over a covering array."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kgen.build import Compiler
from kgen.build.host import ARCH as HOST_ARCH
from kgen.build.render import Renderer
from kgen.catalogue import Entry
from kgen.check.set_limits import tensor_bytes
from kgen.emit import LoadedLibrary, Served
from kgen.errors import VerifyError
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.search.declared import as_declared
from kgen.trial import HostRunner, Session, certified_outcome, failed_build
from kgen.verify.checker import Checked
from kgen.verify.covering import covering_rows
from kgen.verify.drawn import drawn_problems
from kgen.worker import Candidate, Trial, TrialOutcome

ROOM = 6  # a drawn problem's tensors take at most 1 / ROOM of the GPU's memory
ORDERS = (0, 1)  # orders of a CTA's threads on the CPU: by rank, and shuffled
DRAWS = 400  # drawn problems per pass, from which the covering array is chosen


@dataclass(frozen=True, slots=True)
class Subject:
    """One kernel to check.

    Attributes:
        problem: The problem of a call.
        served: The kernel that the library chooses for the problem.
    """

    problem: Problem
    served: Served


def served_subjects(
    library: LoadedLibrary, entry: Entry, pass_name: str, gpu: GpuProfile,
    known: Sequence[Problem], count: int, seed: int,
) -> tuple[list[Subject], list[Problem]]:
    """Find the rows of a GPU, each with its own problem, then a covering array of other problems.

    The array is chosen from drawn problems. Its problems together contain every pair of dtypes,
    options, kinds of extents and variants that occurs among the drawn ones, as far as `count`
    allows.

    Args:
        library: The library.
        entry: The operator.
        pass_name: `forward` or `backward`.
        gpu: The GPU; it need not be in this machine.
        known: Problems whose extents are worth a kernel.
        count: Most problems of the array; 0: only the rows.
        seed: The seed of the draws.
    Returns:
        The subjects, and the drawn problems that the library refuses.
    """
    name, signature = entry.operator.name, entry.operator.signature
    rows = library.row_problems(name, pass_name, gpu, signature)
    pass_ = signature.pass_named(pass_name)
    drawn = [p for p in drawn_problems(signature, known, DRAWS if count else 0, seed)
             if p not in rows and tensor_bytes(p.present(pass_), p) <= gpu.memory_bytes // ROOM]
    answers = [(p, library.served(name, pass_name, p, gpu)) for p in (*rows, *drawn)]
    subjects = [Subject(p, served) for p, served in answers if served is not None]
    others = subjects[len(rows):]
    chosen = covering_rows([_factors(subject) for subject in others], count)
    refused = [p for p, served in answers if served is None]
    return [*subjects[:len(rows)], *(others[index] for index in chosen)], refused


def _factors(subject: Subject) -> dict[str, Hashable]:
    """The factors of the covering array: dtypes, options, kinds of extents, the variant."""
    factors: dict[str, Hashable] = dict(subject.problem.dtypes)
    factors |= {name: _kind(extent) for name, extent in subject.problem.dims}
    factors["served by"] = (subject.served.step, subject.served.config.variant)
    return factors


def _kind(extent: int) -> tuple[int, bool]:
    """The size of an extent by powers of 8, and whether 8 divides it."""
    return (extent.bit_length() - 1) // 3, extent % 8 == 0


class Runs(Protocol):
    """Builds sources and runs each with many input sets."""

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        """Start a build of a source, on the compiler's threads."""

    def outcome(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> TrialOutcome:
        """Run a build on the input sets and return the outcome."""


class OnDevice:
    """Certifies kernels on the GPU."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        """Start to build a source for the GPU."""
        return self._session.build(rendered)

    def outcome(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> TrialOutcome:
        """Run every input set on the GPU."""
        return certified_outcome(self._session, config, problem, rendered, artifact)


class OnHost:
    """Runs kernels on the CPU with the small input sets of a host run, if the GPU is absent."""

    def __init__(
        self, entry: Entry, pass_name: str, compiler: Compiler, runner: HostRunner
    ) -> None:
        self._entry = entry
        self._pass_name = pass_name
        self._compiler = compiler
        self._runner = runner

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        """Start to build a source for the CPU."""
        return self._compiler.submit(BuildRequest(rendered, HOST_ARCH))

    def outcome(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> TrialOutcome:
        """Run each input set on the CPU, with the threads of a block in two orders."""
        variant = self._entry.space.variant(self._pass_name, config.variant)
        return self._runner.trial(Trial(
            self._pass_name, problem, Candidate(variant, config, artifact), level="host",
            measure=False, orders=ORDERS)).result()


@dataclass(frozen=True, slots=True)
class _Started:
    """A subject whose build has begun; `build` is None if the space no longer has its config."""

    subject: Subject
    build: tuple[Config, Rendered, Future[Artifact | BuildFailure]] | None


@dataclass(frozen=True)
class LibraryCheck:
    """Checks the kernels of one pass in the form in which the library contains them.

    Attributes:
        library: The library.
        entry: The operator.
        pass_name: `forward` or `backward`.
        runs: The device that runs kernels.
        renderer: Reads the library's headers, once for all subjects.
    """

    library: LoadedLibrary
    entry: Entry
    pass_name: str
    runs: Runs
    renderer: Renderer

    def check(self, subjects: Sequence[Subject]) -> Iterator[Checked]:
        """Check subjects in their order; reject a config that the search space no longer has.

        All builds start at once, so the CPU compiles kernels while the GPU runs earlier ones.
        """
        for started in [self._start(subject) for subject in subjects]:
            yield self._finish(started)

    def _start(self, subject: Subject) -> _Started:
        name, problem, served = self.entry.operator.name, subject.problem, subject.served
        config = as_declared(self.entry, self.pass_name, served.config)
        if config is None:
            return _Started(subject, None)
        text = self.library.source(name, self.pass_name, problem, served)
        rendered = self.renderer.of_text(
            f"{name}/{self.pass_name}_{config.variant}", text, self.library.headers)
        return _Started(subject, (config, rendered, self.runs.build(rendered)))

    def _finish(self, started: _Started) -> Checked:
        subject = started.subject
        if started.build is None:
            return Checked(subject.problem, subject.served.config, TrialOutcome(
                Fate.REJECTED, "the search space no longer has this config; run kgen emit"))
        config, rendered, future = started.build
        built = future.result()
        if isinstance(built, BuildFailure):
            return Checked(subject.problem, config, failed_build(built))
        try:
            outcome = self.runs.outcome(rendered, built, config, subject.problem)
        except VerifyError as problem:  # too little memory, for example; the others are checked
            outcome = TrialOutcome(Fate.REJECTED, str(problem))
        return Checked(subject.problem, config, outcome)
