"""The host run of a certificate: the source of a GPU kernel, run on the CPU.

A GPU does not reveal a race that happened to go well, an out-of-bounds read whose value is masked
away, or a read of shared memory that only an earlier block wrote. The host layer reveals them: it
runs a block's threads in orders that no GPU would choose, fills shared memory with NaN, and
AddressSanitizer watches every access. So winners are run there too, at small sizes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.build import Compiler, open_compiler
from kgen.build.host import ARCH
from kgen.errors import ToolchainError, VerifyError, WorkerError
from kgen.model.artifact import BuildFailure, BuildRequest, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Fate, HostRun
from kgen.model.space import Variant
from kgen.trial.handle import WorkerHandle
from kgen.worker.messages import Candidate, Setup, Trial, TrialOutcome

# (compiler, orders of threads, one launch each). The plain build fills static shared memory with
# NaN, and must give the same bits in every order; the sanitized one has red zones around
# everything, and starts a process for each launch.
RUNS = (("host", (0, 1, 2, 3)), ("host-asan", (0,)))
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class HostRunResult:
    """The results of the host runs of one config.

    Attributes:
        runs: The runs that found no fault.
        missing: Why there are none or not all; empty if all were made.
        fault: The fault that was found; empty if there is none.
        kept: Whether an earlier tune made the runs, so that a record has them already.
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

    def __init__(self, setup: Setup, include: Path, jobs: int = 1) -> None:
        """Find the compilers; starts nothing.

        Args:
            setup: The setup of the tune; its device is replaced by the host layer.
            include: Folder of the device library.
            jobs: Proofs at once.
        """
        # The limit on device memory is of the GPU; here it would be of a process that loads torch.
        # One SM: there persistent blocks take several batches of few rows each.
        gpu = replace(setup.gpu, sm_count=1)
        self._setup = replace(setup, gpu=gpu, on_host=True, memory_bytes=None)
        self._compilers: dict[str, Compiler] = {}
        self._missing = ""
        try:
            for name in dict.fromkeys(name for name, _ in RUNS):
                self._compilers[name] = open_compiler(name, [include])
        except ToolchainError as problem:
            self._missing = str(problem).splitlines()[0]
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="kgen-host-run")
        self._idle: queue.SimpleQueue[WorkerHandle] = queue.SimpleQueue()
        self._workers: list[WorkerHandle] = []
        self._closed = False
        self._lock = threading.Lock()  # of the two above

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
        """Build and run in the background, unless that is done.

        Args:
            rendered, variant, config, pass_name, problem: What is to be run.
            known: What an earlier certificate of the same code has. Its host runs count if they
                were made of the same text by the same compilers: host branches of headers are no
                part of the machine code.
        """
        if known is not None and self._are_todays(known.host, rendered):
            done: Future[HostRunResult] = Future()
            done.set_result(HostRunResult(known.host, kept=True))
            return done
        claim = _Claim(rendered, variant, config, pass_name, problem)
        return self._pool.submit(self._run_claim, claim)

    def trial(self, trial: Trial) -> Future[TrialOutcome]:
        """Run a trial of the host's own build in the background, beside others."""
        return self._pool.submit(self._run, trial)

    def close(self) -> None:
        """Drop what waits and end what runs: Ctrl-C need not wait for a sanitized build."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        for compiler in self._compilers.values():
            compiler.close()
        for worker in self._workers:
            worker.abort()
        self._pool.shutdown(wait=True)
        for worker in self._workers:
            worker.close()

    def _are_todays(self, runs: Sequence[HostRun], rendered: Rendered) -> bool:
        """Whether the runs are the same as those that would be made now."""
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
        host_run = HostRunResult()
        for name, orders in RUNS:
            built = builds[name].result()
            if isinstance(built, BuildFailure):
                headline = built.message.splitlines()[0]
                return replace(host_run, missing=f"does not compile for the host: {headline}")
            trial = Trial(
                pass_name=claim.pass_name,
                problem=claim.problem,
                candidate=Candidate(claim.variant, claim.config, built),
                level="host",
                measure=False,
                orders=orders,
            )
            where = self._where(name)
            try:
                outcome = self._run(trial)
            except (WorkerError, VerifyError) as problem:  # of the host; the kernel is not to blame
                return replace(host_run, missing=f"on the host, {where}: {problem}")
            host_run = _add(host_run, where, orders, self._key(name, claim.rendered), outcome)
            if host_run.fault or host_run.missing:
                break
        return host_run

    def _run(self, trial: Trial) -> TrialOutcome:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                if self._closed:
                    raise WorkerError("the host run was dropped: its tune has ended") from None
                worker = WorkerHandle(self._setup, TIMEOUT_S, spare=False)
                self._workers.append(worker)
        try:
            return worker.trial(trial)
        finally:
            self._idle.put(worker)


def _add(
    host_run: HostRunResult,
    compiler: str,
    orders: tuple[int, ...],
    key: str,
    outcome: TrialOutcome,
) -> HostRunResult:
    where = f"on the host, {compiler}, thread orders {', '.join(map(str, orders))}"
    if outcome.fate is Fate.TIMED_OUT:  # slow is not wrong: the CPU runs a thread after the other
        return replace(host_run, missing=f"{where}: {outcome.reason}")
    if outcome.fate is not Fate.VERIFIED:
        return replace(host_run, fault=f"{where}: {outcome.reason}")
    evidence = outcome.evidence
    assert evidence is not None
    run = HostRun(compiler, orders, evidence.tried, key)
    return replace(host_run, runs=(*host_run.runs, run))


def with_host_runs(evidence: Evidence, host_run: HostRunResult) -> Evidence:
    """Add host runs to what is known of a certificate."""
    return replace(evidence, host=host_run.runs, host_missing=host_run.missing)
