"""The host run of a certificate: the source of a GPU kernel, run on the CPU.

A GPU does not reveal a race that happened to go well, an out-of-bounds read whose value is masked
away, or a read of shared memory that only an earlier block wrote. The host layer reveals them: it
runs a block's threads in orders that no GPU would choose, fills shared memory with NaN, and
AddressSanitizer watches every access. So winners are run there too, at small sizes.

A run occupies a core for a minute or more. If other cores are idle, its input sets are distributed
over several processes (`kgen.check.parts`), and `kgen.trial.host_parts` joins their outcomes.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from kgen.build import Compiler, open_compiler
from kgen.build.comparisons import line_finder
from kgen.build.host import ARCH, find_cxx
from kgen.errors import ToolchainError, VerifyError, WorkerError
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Fate, HostRun
from kgen.model.set_results import Part, fresh_seed
from kgen.model.space import Variant
from kgen.trial.handle import WorkerHandle
from kgen.trial.host_parts import PartEnd, joined_outcome
from kgen.trial.untested import untested_branches, untested_fault
from kgen.worker.messages import Candidate, Setup, Trial, TrialOutcome

Result = TypeVar("Result")

# (compiler, orders of a CTA's threads; one launch per order). The plain build fills static shared
# memory with NaN, and must give the same bits in every order. The sanitized build has red zones
# around all memory, and starts a process for each launch.
SANITIZED = "host-asan"
RUNS = (("host", (0, 1, 2, 3)), (SANITIZED, (0,)))
TIMEOUT_S = 300.0
# More parts than idle cores even out errors in the estimated times of the sets.
PARTS_PER_CORE = 2
# Most worker processes of a runner: the largest set of a run is a tenth of it or more, so further
# processes would not shorten it.
MOST_JOBS = 16
# OS threads that run a launch's CTAs, at least: CTAs that exchange data must run concurrently even
# if other parts occupy the cores.
LEAST_THREADS = 2


@dataclass(frozen=True, slots=True)
class HostRunResult:
    """The results of the host runs of one config.

    Attributes:
        runs: The runs that found no fault.
        missing: Why some or all runs are missing; empty if all were made.
        fault: The fault that was found; empty if there is none.
        kept: Whether the runs come from an earlier tune, so that a record already has them.
    """

    runs: tuple[HostRun, ...] = ()
    missing: str = ""
    fault: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True)
class _Claim:
    """The kernel to verify: source, config and problem."""

    rendered: Rendered
    variant: Variant
    config: Config
    pass_name: str
    problem: Problem


class HostRunner:
    """Runs proofs in the background, each in a worker process. Use as a context manager."""

    def __init__(
        self, setup: Setup, include: Path, jobs: int = 1, most_jobs: int | None = None
    ) -> None:
        """Find the compilers; starts nothing.

        Args:
            setup: The setup of the tune; its device is replaced by the host layer.
            include: Folder of the device library.
            jobs: Worker processes at once. When a host run begins, it gets an equal share of them:
                their number divided by the number of host runs that run or wait.
            most_jobs: The number after `widen`; None: the same.
        """
        # The memory limit is meant for the GPU; here it would apply to a process that loads torch.
        # One SM, so that persistent CTAs process several batches even with few rows.
        gpu = replace(setup.gpu, sm_count=1)
        self._setup = replace(setup, gpu=gpu, on_host=True, memory_bytes=None)
        self._compilers: dict[str, Compiler] = {}
        self._missing = ""
        try:
            for name in dict.fromkeys(name for name, _ in RUNS):
                self._compilers[name] = open_compiler(name, [include])
        except ToolchainError as problem:
            self._missing = str(problem).splitlines()[0]
        self._jobs = jobs
        self._most_jobs = max(jobs, most_jobs or jobs)
        # Two pools, to avoid deadlock: threads of proofs wait for their parts, never vice versa.
        self._proofs = ThreadPoolExecutor(jobs, thread_name_prefix="kgen-host-run")
        self._parts = ThreadPoolExecutor(self._most_jobs, thread_name_prefix="kgen-host-part")
        self._idle: list[_Worker] = []
        self._workers: list[WorkerHandle] = []
        self._unfinished = 0  # proofs
        self._busy = 0  # workers
        self._closed = False
        self._lock = threading.Lock()  # guards the five attributes above, and `_jobs`
        self._may_run = threading.Condition(self._lock)

    def __enter__(self) -> HostRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        rendered: Rendered,
        variant: Variant,
        config: Config,
        pass_name: str,
        problem: Problem,
        known: Evidence | None = None,
    ) -> Future[HostRunResult]:
        """Build and run in the background, unless the runs have been made already.

        Args:
            rendered, variant, config, pass_name, problem: The kernel to run.
            known: The evidence of an earlier certificate of the same machine code. Its host runs
                are reused if they were made from the same text by the same compilers. The machine
                code alone is no proof of that, as it lacks the headers' branches for the host.
        """
        if known is not None and self._are_todays(known.host, rendered):
            done: Future[HostRunResult] = Future()
            done.set_result(HostRunResult(known.host, kept=True))
            return done
        claim = _Claim(rendered, variant, config, pass_name, problem)
        return self._submit(lambda: self._run_claim(claim))

    def trial(self, trial: Trial) -> Future[TrialOutcome]:
        """Run a trial of a build for the host in the background."""
        return self._submit(lambda: self._begin(trial, self._cores(), 0).outcome())

    def widen(self) -> None:
        """Use `most_jobs` worker processes, because the work that used the other cores has ended.
        """
        with self._may_run:
            self._jobs = self._most_jobs
            self._may_run.notify_all()

    def close(self) -> None:
        """Cancel waiting runs and kill running ones, so that Ctrl-C need not wait for them."""
        for pool in (self._proofs, self._parts):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._may_run:
            self._closed = True
            self._may_run.notify_all()
        for compiler in self._compilers.values():
            compiler.close()
        for worker in self._workers:
            worker.abort()
        for pool in (self._proofs, self._parts):
            pool.shutdown(wait=True)
        for worker in self._workers:
            worker.close()

    def _submit(self, run: Callable[[], Result]) -> Future[Result]:
        """Run a proof on the threads of proofs."""

        def counted() -> Result:
            try:
                return run()
            finally:
                with self._lock:
                    self._unfinished -= 1

        with self._lock:
            self._unfinished += 1
        return self._proofs.submit(counted)

    def _cores(self) -> int:
        """Number of worker processes for a host run that begins now."""
        with self._lock:
            return max(1, self._jobs // max(1, self._unfinished))

    def _are_todays(self, runs: Sequence[HostRun], rendered: Rendered) -> bool:
        """Whether earlier runs are identical to those that would be made now."""
        if self._missing:
            return False
        wanted = [(self._where(name), orders, self._key(name, rendered)) for name, orders in RUNS]
        return [(run.compiler, run.orders, run.key) for run in runs] == wanted

    def _where(self, name: str) -> str:
        return f"{name} {self._compilers[name].version}"

    def _key(self, name: str, rendered: Rendered) -> str:
        """Digest of what a compiler makes of a text."""
        return digest_of([rendered.bare, self._compilers[name].identity(ARCH)])

    def _run_claim(self, claim: _Claim) -> HostRunResult:
        if self._missing:
            return HostRunResult(missing=self._missing)
        builds = {
            name: compiler.submit(BuildRequest(claim.rendered, ARCH))
            for name, compiler in self._compilers.items()
        }
        cores = self._cores()
        begun: dict[str, _Begun | BuildFailure] = {}
        host_run = HostRunResult()
        folder = tempfile.TemporaryDirectory(prefix="kgen-comparisons-")
        comparisons = Path(folder.name, "comparisons")
        begin = partial(self._begin_built, claim, cores=cores, comparisons=comparisons)
        try:
            if cores > 1:  # both runs concurrently; else one after the other, in one process
                for place, (name, orders) in enumerate(RUNS):
                    begun[name] = begin(builds[name], orders, place=place)
            for place, (name, orders) in enumerate(RUNS):
                if name not in begun:
                    begun[name] = begin(builds[name], orders, place=place)
                run = begun[name]
                if isinstance(run, BuildFailure):
                    headline = run.message.splitlines()[0]
                    return replace(
                        host_run, missing=f"does not compile for the host: {headline}")
                where = self._where(name)
                try:
                    outcome = run.outcome()
                except (WorkerError, VerifyError) as problem:  # the kernel is not to blame
                    return replace(host_run, missing=f"on the host, {where}: {problem}")
                host_run = _add(host_run, where, orders, self._key(name, claim.rendered), outcome)
                if host_run.fault or host_run.missing:
                    break
            else:
                try:
                    fault = self._untested(claim, builds, comparisons)
                except VerifyError as problem:
                    return replace(host_run, missing=f"on the host, comparisons: {problem}")
                host_run = replace(host_run, fault=fault)
        finally:
            for run in begun.values():
                if isinstance(run, _Begun):
                    run.drop()
            folder.cleanup()
        return host_run

    def _untested(
        self,
        claim: _Claim,
        builds: Mapping[str, Future[Artifact | BuildFailure]],
        comparisons: Path,
    ) -> str:
        """Why the comparisons of the sanitized build refuse a kernel that passed."""
        build, tool = builds[SANITIZED].result(), line_finder(find_cxx())
        if isinstance(build, BuildFailure) or not tool:
            return ""
        return untested_fault(untested_branches(build, comparisons, tool), claim.variant)

    def _begin_built(
        self,
        claim: _Claim,
        build: Future[Artifact | BuildFailure],
        orders: tuple[int, ...],
        cores: int,
        place: int,
        comparisons: Path,
    ) -> _Begun | BuildFailure:
        built = build.result()
        if isinstance(built, BuildFailure):
            return built
        trial = Trial(
            pass_name=claim.pass_name,
            problem=claim.problem,
            candidate=Candidate(claim.variant, claim.config, built),
            level="host",
            measure=False,
            orders=orders,
            comparisons=str(comparisons),
        )
        return self._begin(trial, cores, place)

    def _begin(self, trial: Trial, cores: int, place: int) -> _Begun:
        """Begin a run, in parts if it has several cores.

        Args:
            trial: The whole run.
            cores: Worker processes for it.
            place: Index of the run in `RUNS`. The fresh inputs depend on it, as they do in a single
                worker, which counts the trials of a problem.
        """
        trial = replace(
            trial, threads=max(LEAST_THREADS, len(os.sched_getaffinity(0)) // self._most_jobs))
        if cores == 1:
            return _Begun((self._parts.submit(self._run, trial),))
        count = cores * PARTS_PER_CORE
        shared = replace(
            trial,
            seeds=trial.seeds or (self._setup.seed, fresh_seed(self._setup.seed, place + 1)),
        )
        parts = [replace(shared, part=Part(index, count)) for index in range(count)]
        return _Begun(tuple(self._parts.submit(self._run, part) for part in parts))

    def _run(self, trial: Trial) -> PartEnd:
        worker = self._free_worker((trial.pass_name, trial.problem))
        outcome: TrialOutcome | WorkerError | VerifyError
        try:
            outcome = worker.handle.trial(trial)
        except (WorkerError, VerifyError) as problem:
            outcome = problem
        finally:
            with self._may_run:
                self._idle.append(worker)
                self._busy -= 1
                self._may_run.notify()
        return PartEnd(outcome, worker.handle.set_place)

    def _free_worker(self, subject: tuple[str, Problem]) -> _Worker:
        """Wait for a free worker; prefer an idle one that has cached the subject's input sets.

        Raises:
            WorkerError: If the runner is closed.
        """
        with self._may_run:
            self._may_run.wait_for(lambda: self._closed or self._busy < self._jobs)
            if self._closed:
                raise WorkerError("the host run was dropped: its tune has ended")
            self._busy += 1
            worker = next(
                (worker for worker in self._idle if worker.subject == subject),
                self._idle[0] if self._idle else None,
            )
            if worker is not None:
                self._idle.remove(worker)
            else:
                worker = _Worker(WorkerHandle(self._setup, TIMEOUT_S, spare=False))
                self._workers.append(worker.handle)
            worker.subject = subject
            return worker


@dataclass(eq=False)
class _Worker:
    """A worker process.

    Attributes:
        handle: Its handle.
        subject: Pass and problem of its last trial, whose input sets it keeps.
    """

    handle: WorkerHandle
    subject: tuple[str, Problem] | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A running host run: the whole run, or its parts in their order."""

    ends: tuple[Future[PartEnd], ...]

    def outcome(self) -> TrialOutcome:
        """Wait for the outcome.

        Raises:
            WorkerError, VerifyError: As in `WorkerHandle.trial`.
        """
        try:
            ends = [end.result() for end in self.ends]
        except CancelledError:
            raise WorkerError("the host run was dropped: its tune has ended") from None
        if len(ends) > 1:
            return joined_outcome(ends)
        if not isinstance(ends[0].outcome, TrialOutcome):
            raise ends[0].outcome
        return ends[0].outcome

    def drop(self) -> None:
        """Cancel the parts that have not begun."""
        for end in self.ends:
            end.cancel()


def jobs_beside(idle_cores: int) -> int:
    """Worker processes for host runs, given the cores that nothing else needs."""
    return max(1, min(MOST_JOBS, idle_cores))


def _add(
    host_run: HostRunResult,
    compiler: str,
    orders: tuple[int, ...],
    key: str,
    outcome: TrialOutcome,
) -> HostRunResult:
    where = f"on the host, {compiler}, thread orders {', '.join(map(str, orders))}"
    if outcome.fate is Fate.TIMED_OUT:  # no fault: the CPU runs threads one after the other
        return replace(host_run, missing=f"{where}: {outcome.reason}")
    if outcome.fate is not Fate.VERIFIED:
        return replace(host_run, fault=f"{where}: {outcome.reason}")
    evidence = outcome.evidence
    assert evidence is not None
    run = HostRun(compiler, orders, evidence.tried, key)
    return replace(host_run, runs=(*host_run.runs, run))


def with_host_runs(evidence: Evidence, host_run: HostRunResult) -> Evidence:
    """Add host runs to the evidence of a certificate."""
    return replace(evidence, host=host_run.runs, host_missing=host_run.missing)
