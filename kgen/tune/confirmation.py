"""Confirm winners: a problem is confirmed when the host runs of its winner found no fault.

If they find a fault, the next finalist becomes the winner. If no finalist is left, the problem goes
through finals again without the refused configs.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import replace
from typing import TypeAlias

from kgen.errors import TuneError
from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.trial import HostRunner, HostRunResult, Session, record_host_runs
from kgen.tune.events import TuneEvent
from kgen.tune.results import Finalist, ProblemResult

_EarlyRuns: TypeAlias = dict[tuple[Problem, Config], "Future[HostRunResult]"]
"""Host runs that began before finals."""


class Confirmations:
    """The problems of a pass after their finals, while their winners' host runs go on."""

    def __init__(
        self,
        session: Session,
        host_runner: HostRunner,
        confirmed_event: Callable[[tuple[ProblemResult, ...]], TuneEvent | None],
    ) -> None:
        """Start with none.

        Args:
            session: Records the certificates.
            host_runner: Makes the host runs.
            confirmed_event: Returns the event that lists the confirmed problems, or None while the
                event cannot be used yet; it is called again until it returns an event.
        """
        self._session, self._host_runner = session, host_runner
        self._confirmed_event = confirmed_event
        self._told = 0  # number of confirmed problems in the last event
        self._all: list[_Confirmation] = []
        self._early: _EarlyRuns = {}

    @property
    def confirmed(self) -> tuple[ProblemResult, ...]:
        """The problems with a confirmed winner, in the order of the tune."""
        return tuple(c.result for c in self._all if c.is_confirmed)

    @property
    def host_runs(self) -> list[Future[HostRunResult]]:
        """The host runs under way."""
        return [c.host_run for c in self._all if c.host_run is not None]

    def start_early(self, problem: Problem, leader: Record) -> None:
        """Start the host run of the config that leads at the end of a search, before its finals.

        Finals occupy one worker process. The result is not used if another config wins them.
        """
        session, config = self._session, leader.config
        rendered = session.render(config, problem)
        built = session.build(rendered).result()
        if isinstance(built, BuildFailure):
            return
        known = session.certificate(rendered, built, config, problem)
        self._early[problem, config] = self._host_runner.start(
            rendered,
            session.variant_of(config),
            config,
            session.pass_name,
            problem,
            None if known is None else known.evidence,
        )

    def add(self, result: ProblemResult) -> None:
        """Start the host run of a problem's winner, in the background, unless `start_early` has."""
        self._all.append(_Confirmation(self._session, self._host_runner, result, self._early))

    def advance(self, wait: bool = False) -> Iterator[TuneEvent]:
        """Confirm the problems whose host run has ended; with `wait`, all problems."""
        while True:
            for confirmation in self._all:
                confirmation.advance()
                confirmed = self.confirmed
                if len(confirmed) > self._told:
                    event = self._confirmed_event(confirmed)
                    if event is not None:
                        self._told = len(confirmed)
                        yield event
            if not wait or not self.host_runs:
                return
            concurrent.futures.wait(self.host_runs, return_when=FIRST_COMPLETED)

    def finish(
        self, finals_again: Callable[[ProblemResult], Generator[TuneEvent, None, ProblemResult]]
    ) -> Generator[TuneEvent, None, tuple[ProblemResult, ...]]:
        """Confirm all problems, and return them.

        Args:
            finals_again: Returns a problem's result with finalists that no host run has refused
                yet, or raises TuneError if there are none. Called for problems without a finalist.
        Raises:
            TuneError: If a problem ends without a winner; the others are confirmed.
        """
        yield from self.advance(wait=True)
        # One after the other: on the host a host run would disturb the timings of finals.
        for confirmation in self._all:
            while confirmation.is_refused:
                try:
                    again = yield from finals_again(confirmation.result)
                except TuneError:
                    break  # `failure` describes it
                confirmation.restart(again)
                yield from self.advance(wait=True)
        failures = [c.failure for c in self._all if not c.is_confirmed]
        if failures:
            raise TuneError("\n".join(failures))
        return self.confirmed


class _Confirmation:
    """One problem: its finalists get host runs, best first, until one is not refused.

    Attributes:
        result: The result; once there is a winner, with the remaining finalists.
        is_confirmed: Whether there is a winner.
        host_run: The host run under way.
    """

    def __init__(
        self,
        session: Session,
        host_runner: HostRunner,
        result: ProblemResult,
        early: _EarlyRuns,
    ) -> None:
        self.result = result
        self.is_confirmed = False
        self._session, self._host_runner, self._early = session, host_runner, early
        self._waiting = list(result.finalists)
        self._refused: list[str] = []
        self.host_run: Future[HostRunResult] | None = self._start()

    def advance(self) -> None:
        """Use the host run's result if there is one.

        Raises:
            StorageError: If the host run could not be built. No host run is under way then.
        """
        while self.host_run is not None and self.host_run.done():
            ended, self.host_run = self.host_run, None
            found = ended.result()
            finalist = self._waiting.pop(0)
            record = finalist.record
            if not found.kept:  # otherwise the record already contains the host runs
                record = record_host_runs(
                    self._session,
                    self.result.problem,
                    finalist.rendered,
                    finalist.artifact,
                    finalist.record,
                    found,
                )
            if not found.fault:
                self.is_confirmed = True
                winner = replace(finalist, record=record)
                self.result = replace(self.result, finalists=(winner, *self._waiting))
                return
            self._refuse(finalist, found.fault)
            if self._waiting:
                self.host_run = self._start()

    @property
    def is_refused(self) -> bool:
        """Whether no finalist is left."""
        return self.host_run is None and not self.is_confirmed

    def restart(self, again: ProblemResult) -> None:
        """Start over with the finalists of another round; add the cost of earlier rounds."""
        before = self.result
        self.result = replace(
            again,
            search_s=before.search_s + again.search_s,
            compile_s=before.compile_s + again.compile_s,
            new_trials=before.new_trials + again.new_trials,
            timed_again=before.timed_again + again.timed_again,
        )
        self._waiting = list(again.finalists)
        self.host_run = self._start()

    @property
    def failure(self) -> str:
        """Why no finalist is left."""
        return (
            f"{self._session.entry.operator.name} {self._session.pass_name} {self.result.problem} "
            f"on {self._session.gpu.name}: every finalist was refused by its host run, and no "
            "other config was verified\n  "
            + "\n  ".join(self._refused)
            + "\n  next: fix the variant, or raise --trials"
            f"\n  trials: {self._session.journal.path}"
        )

    def _start(self) -> Future[HostRunResult]:
        next_best = self._waiting[0]
        begun = self._early.pop((self.result.problem, next_best.config), None)
        return begun or self._host_runner.start(
            next_best.rendered,
            next_best.variant,
            next_best.config,
            self._session.pass_name,
            self.result.problem,
            next_best.record.evidence,
        )

    def _refuse(self, finalist: Finalist, fault: str) -> None:
        """Count the finalist as wrong."""
        self._refused.append(f"{finalist.config.label}: {fault}")
        fates, reasons = dict(self.result.fates), dict(self.result.reasons)
        fates[Fate.VERIFIED] = fates.get(Fate.VERIFIED, 0) - 1
        fates[Fate.WRONG] = fates.get(Fate.WRONG, 0) + 1
        headline = f"{Fate.WRONG}: {fault.splitlines()[0]}"
        reasons[headline] = reasons.get(headline, 0) + 1
        self.result = replace(self.result, fates=fates, reasons=reasons)
