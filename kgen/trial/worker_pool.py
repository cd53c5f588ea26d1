"""Several worker processes on one device that verify kernels in parallel.

Most of a verification's time is the oracle, a loop over time steps of small tensors. It is bound by
the one CPU core that launches, so the device is nearly idle. Nothing is timed during these
verifications, so workers may disturb each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from kgen.errors import WorkerError
from kgen.model.record import Fate
from kgen.trial.handle import WorkerHandle
from kgen.worker.messages import Trial, TrialOutcome

# Fates that other workers on the same device may have caused. The main worker repeats such a trial
# after all others.
_REPEATED = (Fate.TIMED_OUT, Fate.CRASHED, Fate.REJECTED)


class WorkerPool:
    """The session's own worker and its helpers. Use as a context manager."""

    def __init__(
        self, main: WorkerHandle, open_helper: Callable[[], WorkerHandle], helpers: int
    ) -> None:
        """Prepare; starts nothing.

        Args:
            main: The session's own worker. It stays open.
            open_helper: Returns a further worker for the same device; the pool closes it.
            helpers: Number of further workers, at most.
        """
        self._main, self._open_helper, self._most = main, open_helper, helpers
        self._helpers: list[WorkerHandle] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def preload(self, trials: int) -> None:
        """Let the helpers for a number of trials load their modules, for instance during builds."""
        for helper in self._open_helpers(trials):
            helper.preload()

    def dismiss(self) -> None:
        """End the helpers until the next run, because a waiting helper holds device memory."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []

    def run(self, trials: Sequence[Trial]) -> Generator[tuple[int, TrialOutcome], None, None]:
        """Run trials; yield (index in `trials`, outcome) as they end.

        A caller that closes the generator early cannot use the main worker any more.

        Raises:
            VerifyError: If the operator's own module is at fault.
            WorkerError: If the main worker cannot be started.
        """
        work = _Work(list(enumerate(trials)))
        helpers = self._open_helpers(len(trials))
        threads = [threading.Thread(target=work.main, args=(self._main,), daemon=True)]
        threads += [
            threading.Thread(target=work.help, args=(helper,), daemon=True) for helper in helpers
        ]
        work.helping = len(helpers)
        for thread in threads:
            thread.start()
        is_over = False
        try:
            for _ in trials:
                place, outcome = work.ended.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield place, outcome
            is_over = True
        finally:
            work.stop()
            if not is_over:
                for worker in (self._main, *helpers):
                    worker.abort()
            for thread in threads:
                thread.join()


    def _open_helpers(self, trials: int) -> list[WorkerHandle]:
        """Open the helpers for a number of trials; the main worker runs the first trial itself."""
        wanted = min(self._most, max(0, trials - 1))
        while len(self._helpers) < wanted:
            self._helpers.append(self._open_helper())
        return self._helpers[:wanted]


@dataclass
class _Work:
    """The remaining trials of a pool, and the loops of its threads.

    Attributes:
        left: Trials that no worker has begun.
        helping: Helpers that may still hand a trial back.
        ended: The outcomes of the trials.
    """

    left: list[tuple[int, Trial]]
    helping: int = 0
    ended: queue.SimpleQueue[tuple[int, TrialOutcome | BaseException]] = field(
        default_factory=queue.SimpleQueue
    )
    _handed_back: list[tuple[int, Trial]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: bool = False

    def stop(self) -> None:
        """Begin no further trial."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def main(self, worker: WorkerHandle) -> None:
        """The loop of the main worker: its own trials, then the trials that helpers handed back."""
        while (mine := self._next(is_main=True)) is not None:
            place, trial = mine
            try:
                self.ended.put((place, worker.trial(trial)))
            except BaseException as problem:  # for the thread that waits
                self.ended.put((place, problem))

    def help(self, worker: WorkerHandle) -> None:
        """The loop of a helper.

        If a helper cannot start, the other workers run its trials: a device in exclusive mode
        admits one process.
        """
        try:
            while (mine := self._next(is_main=False)) is not None:
                place, trial = mine
                try:
                    outcome = worker.trial(trial)
                except WorkerError:
                    self._hand_back(mine)
                    return
                except BaseException as problem:  # for the thread that waits
                    self.ended.put((place, problem))
                    continue
                if outcome.fate in _REPEATED:
                    self._hand_back(mine)
                else:
                    self.ended.put((place, outcome))
        finally:
            with self._changed:
                self.helping -= 1
                self._changed.notify_all()

    def _hand_back(self, mine: tuple[int, Trial]) -> None:
        with self._changed:
            self._handed_back.append(mine)

    def _next(self, *, is_main: bool) -> tuple[int, Trial] | None:
        with self._changed:
            if self._stopped:
                return None
            if self.left:
                return self.left.pop(0)
            if not is_main:
                return None
            while self.helping and not self._stopped:
                self._changed.wait()
            if self._stopped or not self._handed_back:
                return None
            return self._handed_back.pop(0)
