"""The parent's handle of a worker: requests with a deadline; kill and replace on failure."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TypeVar

from kgen.errors import LaunchError, LaunchRefusedError, VerifyError, WorkerError
from kgen.model.record import Fate
from kgen.trial.child import Child
from kgen.worker.messages import (
    CallCosts,
    CallCostsOutcome,
    Failure,
    Finals,
    FinalsOutcome,
    PeerNames,
    PeerNamesOutcome,
    Probe,
    ProbeOutcome,
    Request,
    SetBegun,
    Setup,
    Trace,
    TraceOutcome,
    Trial,
    TrialOutcome,
)

Outcome = TypeVar(
    "Outcome",
    ProbeOutcome,
    PeerNamesOutcome,
    TrialOutcome,
    FinalsOutcome,
    TraceOutcome,
    CallCostsOutcome,
)

START_TIMEOUT_S = 180.0  # importing torch from a cold network file system is slow
TRIAL_TIMEOUT_S = 30.0
# A certificate's time limit, in time limits of a trial. A certificate has some fifty sets of inputs
# where a trial has few, and the definition of a recurrence evaluates them step by step.
CERTIFICATE_TRIALS = 6
TRACE_TIMEOUT_S = 900.0  # peers compile, and a slow one leaves the profiler many events to sort
MAX_RESTARTS_IN_A_ROW = 3


class WorkerDiedError(Exception):
    """The worker ended before it answered; the text says how."""


class WorkerTimeoutError(Exception):
    """The worker did not answer in time and was killed."""


class WorkerHandle:
    """One worker process at a time, replaced when it dies. Use as a context manager.

    A spare process has already loaded its modules, which is most of the start-up time, but has not
    opened the device. So replacing a killed worker takes well under a second.

    Attributes:
        set_place: Index of the input set that the last trial with a `part` began last; None if it
            began none.
    """

    def __init__(
        self, setup: Setup, trial_timeout_s: float = TRIAL_TIMEOUT_S, spare: bool = True
    ) -> None:
        """Prepare; starts nothing.

        Args:
            setup: The setup that every worker receives.
            trial_timeout_s: A trial that takes longer ends with its worker; a certificate, if it
                takes `CERTIFICATE_TRIALS` times as long.
            spare: Whether to keep a spare once the first worker runs.
        """
        self._setup = setup
        self._trial_timeout_s = trial_timeout_s
        self._wants_spare = spare
        self._child: Child | None = None
        self._spare: Child | None = None
        self._newest: Child | None = None  # the latest child, even if it is not ready yet
        self._aborted = False
        self._lock = threading.Lock()  # guards `_newest`, `_aborted` and the spare
        self._starts = 0
        self.set_place: int | None = None
        self._reapers: list[threading.Thread] = []
        self.replacement_s: list[float] = []

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """Number of times that a worker was replaced."""
        return max(0, self._starts - 1)

    def preload(self) -> None:
        """Start the first worker's process now, so that it loads its modules early.

        It opens the device only at the first request.
        """
        with self._lock:
            if self._child is None and self._spare is None and not self._aborted:
                self._spare = Child(self._setup)

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
        """Ask for the names of the available peers.

        Raises:
            WorkerError: If the worker died or timed out, or the operator's `peers` raised.
        """
        try:
            return self._ask(request, PeerNamesOutcome, START_TIMEOUT_S)
        except (WorkerDiedError, WorkerTimeoutError, LaunchError) as problem:
            raise WorkerError(
                f"the {request.pass_name} peers of {self._setup.operator} are not known: {problem}"
            ) from None

    def trial(self, trial: Trial) -> TrialOutcome:
        """Run one trial; whatever happens to the worker becomes the trial's fate.

        A kernel that prints is rejected. For a trial with a `part`, the outcome holds the number of
        printed bytes instead, and whoever joins the parts rejects the kernel.

        Raises:
            VerifyError: If the operator's own module is at fault.
            WorkerError: If no worker can be started.
        """
        self.set_place = None
        child = self._ready_child()
        child.drain()
        before = child.printed_bytes
        try:
            times = CERTIFICATE_TRIALS if trial.level == "certify" else 1
            outcome = self._ask(trial, TrialOutcome, times * self._trial_timeout_s)
        except WorkerTimeoutError as problem:
            limit = (f"; a certificate has {times} times the limit of a trial, "
                     f"{self._trial_timeout_s:g} s" if times > 1 else "")
            return TrialOutcome(Fate.TIMED_OUT, f"{problem}{limit}")
        except LaunchRefusedError as problem:
            return TrialOutcome(Fate.REJECTED, f"the launch was refused: {problem}")
        except (WorkerDiedError, LaunchError) as problem:
            return TrialOutcome(Fate.CRASHED, str(problem))
        child.drain()
        printed = child.printed_bytes - before
        if printed and outcome.fate is Fate.VERIFIED:
            head, child.printed_head = child.printed_head, b""
            if trial.part is not None:
                return replace(outcome, printed=printed, printed_head=head)
            return printing_refused(printed, head)
        return outcome

    def finals(self, finals: Finals) -> FinalsOutcome:
        """Time finalists and peers.

        Raises:
            WorkerError: If the worker died or hung over it.
        """
        deadline = START_TIMEOUT_S + 60.0 * (len(finals.candidates) + 3)
        doing = f"timing the finalists of {finals.problem}"
        return self._ask_or_fail(doing, finals, FinalsOutcome, deadline)

    def trace(self, request: Trace) -> TraceOutcome:
        """Trace a candidate and peers.

        Raises:
            WorkerError: If the worker died or hung over it, or the trace cannot be written.
        """
        doing = f"profiling {request.finals.problem}"
        return self._ask_or_fail(doing, request, TraceOutcome, TRACE_TIMEOUT_S)

    def call_costs(self, request: CallCosts) -> CallCostsOutcome:
        """Measure the host time of calls.

        Raises:
            WorkerError: If the worker died or hung over it, or the library cannot be used.
        """
        doing = f"timing calls of {request.problem}"
        return self._ask_or_fail(doing, request, CallCostsOutcome, TRACE_TIMEOUT_S)

    def abort(self) -> None:
        """Kill the worker and start no other one; may be called from any thread.

        A thread that waits for an answer gets an error, or a crashed trial. `close` must still be
        called.
        """
        with self._lock:
            self._aborted = True
            if self._newest is not None:
                self._newest.kill()

    def close(self) -> None:
        """End the worker: ask it to stop, then kill it."""
        child, spare = self._child, self._spare
        self._child = self._spare = None
        if spare is not None:  # it has not opened the device, and may still be loading modules
            spare.kill()
            spare.reap()
        if child is not None:
            child.dismiss()
        for reaper in self._reapers:
            reaper.join()

    def _ask_or_fail(
        self, doing: str, request: Request, outcome: type[Outcome], timeout_s: float
    ) -> Outcome:
        try:
            return self._ask(request, outcome, timeout_s)
        except (WorkerDiedError, WorkerTimeoutError, LaunchError) as problem:
            raise WorkerError(f"{doing} failed: {problem}") from None

    def _ask(self, request: Request, outcome: type[Outcome], timeout_s: float) -> Outcome:
        child = self._ready_child()
        deadline = time.monotonic() + timeout_s
        try:
            child.pipe.send(request)
            answer: object = None
            while answer is None:
                if not child.poll(deadline - time.monotonic()):
                    self._kill_and_reap(child)
                    raise WorkerTimeoutError(
                        f"no answer within {timeout_s:g} s; the worker was killed"
                    )
                received = child.pipe.recv()
                if isinstance(received, SetBegun):
                    self.set_place = received.place
                else:
                    answer = received
        except (EOFError, OSError):
            raise WorkerDiedError(self._reap(child)) from None
        if isinstance(answer, Failure):
            if answer.fatal:  # the context is corrupt; the worker ends by itself
                self._kill_and_reap(child)
            if answer.operator:
                raise VerifyError(answer.message)
            raise (LaunchRefusedError if answer.refused else LaunchError)(answer.message)
        assert isinstance(answer, outcome), type(answer)
        self._keep_spare()
        return answer

    def _keep_spare(self) -> None:
        if self._wants_spare and self._spare is None:
            self._spare = Child(self._setup)

    def _ready_child(self) -> Child:
        if self._child is not None:
            return self._child
        started = time.monotonic()
        failures: list[str] = []
        while len(failures) < MAX_RESTARTS_IN_A_ROW:
            child = self._next_child()
            self._starts += 1
            try:
                child.pipe.send("go")
                if not child.poll(START_TIMEOUT_S):
                    child.kill()
                    child.reap()
                    failures.append(f"not ready after {START_TIMEOUT_S:.0f} s")
                    continue
                ready = child.pipe.recv()
            except (EOFError, OSError):
                failures.append(child.reap())
                continue
            if isinstance(ready, Failure):
                child.reap()
                raise WorkerError(ready.message)
            if self._starts > 1:
                self.replacement_s.append(time.monotonic() - started)
                self._keep_spare()  # after one crash, another one is likely
            self._child = child
            return child
        raise WorkerError(
            f"the worker process died {len(failures)} times at its start\n  last: "
            f"{failures[-1]}\n  see 'kgen doctor'"
        )

    def _next_child(self) -> Child:
        with self._lock:
            if self._aborted:
                raise WorkerError(f"the worker for {self._setup.gpu.name} was aborted")
            child, self._spare = self._spare or Child(self._setup), None
            self._newest = child
            return child

    def _reap(self, child: Child) -> str:
        self._child = None
        return child.reap()

    def _kill_and_reap(self, child: Child) -> None:
        """Kill a worker, and wait for its end in the background: tearing down a context with an
        endless kernel in it can take the driver seconds, which the next worker need not wait."""
        self._child = None
        child.kill()
        reaper = threading.Thread(target=child.reap, daemon=True)
        reaper.start()
        self._reapers.append(reaper)


def printing_refused(printed: int, head: bytes) -> TrialOutcome:
    """The outcome of a trial whose kernel printed something."""
    lines = head.decode(errors="replace").splitlines()
    first = f"; it begins: {lines[0][:80]}" if lines else ""
    return TrialOutcome(
        Fate.REJECTED, f"the kernel prints: {printed} bytes in one trial{first}"
    )
