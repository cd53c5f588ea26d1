"""The parent's side of a worker: ask with a deadline; kill and replace what hangs or dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import signal
import time
from types import TracebackType
from typing import TypeVar

from kgen.errors import LaunchError, VerifyError, WorkerError
from kgen.model.record import Fate
from kgen.worker.messages import (
    Failure,
    Finals,
    FinalsOutcome,
    PeerNames,
    PeerNamesOutcome,
    Probe,
    ProbeOutcome,
    Request,
    Setup,
    Trial,
    TrialOutcome,
)
from kgen.worker.process import worker_main

Outcome = TypeVar("Outcome", ProbeOutcome, PeerNamesOutcome, TrialOutcome, FinalsOutcome)

START_TIMEOUT_S = 180.0  # importing torch from a cold network file system is slow
MAX_RESTARTS_IN_A_ROW = 3


class WorkerDiedError(Exception):
    """The worker ended while it owed an answer; the text says how."""


class WorkerTimeoutError(Exception):
    """The worker did not answer in time and was killed."""


class WorkerHandle:
    """One worker process at a time, replaced when it dies. Use as a context manager."""

    def __init__(self, setup: Setup, trial_timeout_s: float = 30.0) -> None:
        self._setup = setup
        self._trial_timeout_s = trial_timeout_s
        self._context = multiprocessing.get_context("spawn")  # fork would copy CUDA state
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: multiprocessing.connection.Connection | None = None
        self._starts = 0

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """How often a worker was replaced."""
        return max(0, self._starts - 1)

    def probe(self) -> ProbeOutcome:
        """Ask for the facts of the machine.

        Raises:
            WorkerError: If the worker cannot be started or the device cannot be used.
        """
        try:
            return self._ask(Probe(), ProbeOutcome, START_TIMEOUT_S)
        except (WorkerDiedError, WorkerTimeoutError, LaunchError) as problem:
            raise WorkerError(
                f"the worker for {self._setup.gpu.name} cannot use its device: {problem}\n"
                "  see 'kgen doctor'"
            ) from None

    def peer_names(self, request: PeerNames) -> PeerNamesOutcome:
        """Ask which peers there are.

        Raises:
            WorkerError: If the worker died over it, or the operator's `peers` raised.
        """
        try:
            return self._ask(request, PeerNamesOutcome, START_TIMEOUT_S)
        except (WorkerDiedError, WorkerTimeoutError, LaunchError) as problem:
            raise WorkerError(
                f"the {request.pass_name} peers of {self._setup.operator} are not known: {problem}"
            ) from None

    def trial(self, trial: Trial) -> TrialOutcome:
        """Run one trial; whatever happens to the worker becomes the trial's fate.

        Raises:
            VerifyError: If the operator's own module is at fault.
        """
        try:
            return self._ask(trial, TrialOutcome, self._trial_timeout_s)
        except WorkerTimeoutError as problem:
            return TrialOutcome(Fate.TIMED_OUT, str(problem))
        except (WorkerDiedError, LaunchError) as problem:
            return TrialOutcome(Fate.CRASHED, str(problem))

    def finals(self, finals: Finals) -> FinalsOutcome:
        """Time finalists and peers.

        Raises:
            WorkerError: If the worker died or hung over it.
        """
        deadline = START_TIMEOUT_S + 60.0 * (len(finals.candidates) + 3)
        try:
            return self._ask(finals, FinalsOutcome, deadline)
        except (WorkerDiedError, WorkerTimeoutError, LaunchError) as problem:
            raise WorkerError(
                f"timing the finalists of {finals.problem} failed: {problem}"
            ) from None

    def close(self) -> None:
        """End the worker: politely, then by force."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        if process is not None:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, request: Request, outcome: type[Outcome], timeout_s: float) -> Outcome:
        pipe = self._ready_pipe()
        try:
            pipe.send(request)
            if not pipe.poll(timeout_s):
                self._kill()
                raise WorkerTimeoutError(
                    f"no answer within {timeout_s:.0f} s; the worker was killed"
                )
            answer = pipe.recv()
        except (EOFError, OSError):
            raise WorkerDiedError(self._reap()) from None
        if isinstance(answer, Failure):
            if answer.fatal:  # the context is poisoned; the worker ends by itself
                self._reap()
            raise (VerifyError if answer.operator else LaunchError)(answer.message)
        assert isinstance(answer, outcome), type(answer)
        return answer

    def _ready_pipe(self) -> multiprocessing.connection.Connection:
        failures: list[str] = []
        while self._pipe is None:
            if len(failures) == MAX_RESTARTS_IN_A_ROW:
                raise WorkerError(
                    f"the worker process died {len(failures)} times at its start\n  last: "
                    f"{failures[-1]}\n  see 'kgen doctor'"
                )
            self._starts += 1
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=worker_main, args=(theirs, self._setup), name="kgen-worker", daemon=True
            )
            process.start()
            theirs.close()
            self._process, self._pipe = process, ours
            started = time.monotonic()
            try:
                if not ours.poll(START_TIMEOUT_S):
                    self._kill()
                    failures.append(f"not ready after {time.monotonic() - started:.0f} s")
                    continue
                ready = ours.recv()
            except (EOFError, OSError):
                failures.append(self._reap())
                continue
            if isinstance(ready, Failure):
                self._reap()
                raise WorkerError(ready.message)
        return self._pipe

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._reap()

    def _reap(self) -> str:
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return "the worker is gone"
        process.join(timeout=10.0)
        if process.is_alive():
            process.kill()
            process.join()
        code = process.exitcode
        if code is not None and code < 0:
            return f"the worker was ended by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"
