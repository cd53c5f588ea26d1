"""Search one problem: propose, build ahead, verify and time in the worker, write down, tell.

Three things go on at once: compiler threads build what was proposed, one thread waits for the
worker, and this loop proposes, renders and keeps the books. The worker always has the next
candidate ready, so neither compilation nor Optuna's storage stands between two trials. Of what is
built it tries first what the space's author, or an earlier problem, holds most promising.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible
from kgen.search.study import Proposal, Search, open_study
from kgen.tune.ahead import Ahead
from kgen.tune.first import FirstTrials, outclassed, owed
from kgen.tune.known import still_valid
from kgen.tune.request import TuneRequest
from kgen.tune.resources import resource_refusal
from kgen.tune.trial_queue import Place, TrialQueue
from kgen.worker import Candidate, Session, TrialOutcome, failed_build

BUILD_AHEAD = 24  # proposals in flight: enough to keep 16 cores compiling
# The fallback waits so long for a better-placed build to end, rather than let the device idle on.
PATIENCE_S = 8.0
HELD_POLL_S = 1.0  # between two looks at whether what is held back may go
HOPELESS = 4.0  # times the best: not worth a full measurement


@dataclass
class Books:
    """Running totals of one problem's search."""

    records: dict[Config, Record] = field(default_factory=dict)
    fates: Counter[Fate] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # headline -> one whole reason
    compile_s: float = 0.0
    new_trials: int = 0

    def enter(self, record: Record) -> None:
        """Count a record."""
        self.records[record.config] = record
        self.fates[record.fate] += 1
        if record.reason:
            headline = f"{record.fate}: {_headline(record.reason)}"
            self.reasons[headline] += 1
            self.examples.setdefault(headline, record.reason + _reproduce(record))

    def ranking(self) -> list[Record]:
        """Verified records, fastest first; ties by config for a stable order."""
        timed = [
            (r.timing.median_us, r.config.digest, r)
            for r in self.records.values()
            if r.fate is Fate.VERIFIED and r.timing
        ]
        return [r for _, _, r in sorted(timed, key=lambda item: item[:2])]

    @property
    def best_us(self) -> float | None:
        """Best time so far."""
        ranking = self.ranking()
        return ranking[0].timing.median_us if ranking and ranking[0].timing else None


def _headline(reason: str) -> str:
    """The line that says most: a compiler's first error, else the first line."""
    lines = reason.splitlines()
    return next((line[line.index("error:") :] for line in lines if "error:" in line), lines[0])


def _reproduce(record: Record) -> str:
    if record.fate is Fate.BUILD_FAILED:
        return ""  # the compiler's message names the source
    return (
        f"\nreproduce: kgen verify --op {record.operator} --gpu {record.gpu} --record {record.id}"
    )


@dataclass
class _Flight:
    """A proposal on its way."""

    proposal: Proposal
    rendered: Rendered
    key: str
    build: Future[Artifact | BuildFailure]
    place: Place  # in the order of trials; the smallest is next
    is_first: bool  # one that the search begins with, not the study's own
    since: float  # as of `time.monotonic`
    artifact: Artifact | None = None
    identity: str = ""
    trial: Future[TrialOutcome] | None = None

    @property
    def variant(self) -> str:
        """Of its config."""
        return self.proposal.config.variant

    def withdraw(self) -> bool:
        """Cancel it; False if its trial runs or is over."""
        if self.trial is not None and not self.trial.cancel():
            return False
        self.build.cancel()
        return True


def search_problem(
    session: Session,
    request: TuneRequest,
    problem: Problem,
    feasible: Feasible,
    first: FirstTrials,
    ahead: Ahead,
    deadline: float | None,
    on_trial: Callable[[Books], None],
) -> Books:
    """Search until the trials, the time or the feasible set are used up.

    Args:
        session: Of the tune.
        request: The tune.
        problem: One of the request's.
        feasible: Its configs.
        first: What to begin with.
        ahead: Where some of that may be built already.
        deadline: When to end if there is a result, as of `time.monotonic`; None for never.
        on_trial: Called at the beginning and after every trial.
    Raises:
        TemplateError: If a template is at fault: that is for its author, not a config's fate.
        StorageError: If the journal cannot be written.
    """
    ahead.stop()
    books = Books()
    known = still_valid(
        (
            r
            for r in session.journal.read()
            if r.problem == str(problem) and r.pass_name == session.pass_name
        ),
        set(feasible.configs),
        lambda config: _key(session, config, problem),
        request.retry,
    )
    for record in known.values():
        books.enter(record)
    # A study never proposes a config twice, so those that are to be tried again need another.
    again = f"+retry{len(known)}" if request.retry else ""
    study = open_study(
        request.study,
        name=_study_name(session, problem, feasible) + again,
        feasible=feasible.configs,
        seed=request.seed,
        first=first.configs,
    )
    study.add_known(
        (r.config, r.timing.median_us if r.fate is Fate.VERIFIED and r.timing else None)
        for r in known.values()
    )
    on_trial(books)
    _Loop(
        session, problem, study, books, first, ahead, request.trials, deadline, on_trial
    ).run()
    return books


def _key(session: Session, config: Config, problem: Problem) -> tuple[str, Rendered]:
    rendered = session.render(config, problem)
    return session.key(rendered, config, problem), rendered


def _study_name(session: Session, problem: Problem, feasible: Feasible) -> str:
    """Name a study after its problem and the code it searches.

    Optuna cannot forget a finished trial, so when a template, a header or the compiler changes,
    a new study starts; it is given the journal's records that are still valid.
    """
    samples = {config.variant: config for config in reversed(feasible.configs)}
    keys = [_key(session, config, problem)[0] for _, config in sorted(samples.items())]
    return (
        f"{session.entry.operator.name}/{session.pass_name}/{session.gpu.name}/{problem}"
        f"@{digest_of(keys)}"
    )


class _Loop:
    """The pipeline of one problem."""

    def __init__(
        self,
        session: Session,
        problem: Problem,
        study: Search,
        books: Books,
        first: FirstTrials,
        ahead: Ahead,
        trials: int,
        deadline: float | None,
        on_trial: Callable[[Books], None],
    ) -> None:
        self.session, self.problem, self.study, self.books = session, problem, study, books
        self.first, self.ahead = first, ahead
        self.trials, self.deadline, self.on_trial = trials, deadline, on_trial
        self.flights: deque[_Flight] = deque()
        self.same_code: dict[str, TrialOutcome] = {}
        self.places = {config: i for i, config in enumerate(first.configs)}
        self.passed_over: set[str] = set()
        self.owed = owed(first, books.records)
        self.exhausted = False
        # Of the trial's thread alone: it knows of the trial before sooner than the books do.
        self.least_us = books.best_us or math.inf

    def run(self) -> None:
        """Run to the end; on an error nothing new is started and the worker's thread is joined."""
        with TrialQueue(self._trial) as queue:
            try:
                self._pass_over()
                while self._refill() or self.flights:
                    self._feed(queue)
                    self._collect()
                    self._pass_over()
            except BaseException:
                for flight in self.flights:
                    flight.withdraw()
                raise

    def _refill(self) -> bool:
        """Propose and start builds; False when there is nothing left to propose."""
        flying = {flight.proposal.config for flight in self.flights}
        wanted = max(
            self.trials - sum(self.books.fates.values()) - len(flying),
            len(self.owed - self.books.records.keys() - flying),
        )
        # Out of time with nothing verified, a search goes on to its first result: a problem that
        # comes late in a list would otherwise end the tune of all of them.
        late = (
            self.deadline is not None
            and time.monotonic() >= self.deadline
            and self.books.best_us is not None
        )
        if late:
            for flight in list(self.flights):
                if flight.withdraw():
                    self._release(flight)
        if wanted <= 0 or late or self.exhausted:
            return False
        room = min(wanted, BUILD_AHEAD - len(self.flights))
        if room < min(wanted, BUILD_AHEAD // 3):
            return True  # ask in batches: a proposal costs less, and stays as diverse
        proposals = self.study.ask(room)
        self.exhausted = len(proposals) < room
        self.flights += [self._flight(proposal) for proposal in proposals]
        return bool(proposals)

    def _flight(self, proposal: Proposal) -> _Flight:
        """Render a proposal and start its build."""
        config = proposal.config
        key, rendered = _key(self.session, config, self.problem)
        is_first = config in self.places and config.variant not in self.passed_over
        rank = self.places[config] if is_first else len(self.places) + proposal.number
        return _Flight(
            proposal,
            rendered,
            key,
            self.ahead.build(rendered),
            place=(int(config.variant == self.first.fallback), rank),
            is_first=is_first,
            since=time.monotonic(),
        )

    def _feed(self, queue: TrialQueue) -> None:
        """Hand built candidates to the worker's queue, except those that others go before."""
        for flight in list(self.flights):
            if flight.trial is not None or not flight.build.done():
                continue
            if flight.artifact is None:
                built = flight.build.result()
                self.books.compile_s += built.seconds
                if isinstance(built, BuildFailure):
                    self._finish(flight, failed_build(built))
                    continue
                flight.artifact = built
            candidate = self.session.candidate(flight.proposal.config, flight.artifact)
            plan = self.session.plan(candidate.config, self.problem)
            refusal = resource_refusal(flight.artifact, plan, self.session.gpu)
            flight.identity = self.session.code_identity(flight.artifact, plan)
            if refusal:
                self._finish(flight, TrialOutcome(Fate.REJECTED, refusal))
            elif flight.identity in self.same_code:
                self._finish(flight, self.same_code[flight.identity])
            elif any(f.trial is not None and f.identity == flight.identity for f in self.flights):
                continue  # its twin is running: wait for that outcome
            elif not self._is_held(flight):
                flight.trial = queue.add(flight.place, candidate)

    def _is_held(self, flight: _Flight) -> bool:
        """Whether a trial of the fallback variant has to wait.

        It compiles in no time, and one launch may take as long as a hundred trials of the others.
        So the first one waits for builds, within reason, and there is no second one unless it is
        the best or there is nothing else.
        """
        fallback = self.first.fallback
        others = [f for f in self.flights if f.variant != fallback]
        if flight.variant != fallback or not others:
            return False
        ranking = self.books.ranking()
        if ranking and ranking[0].config.variant == fallback:
            return False
        if any(config.variant == fallback for config in self.books.records) or any(
            f.variant == fallback and f.trial is not None for f in self.flights
        ):
            return True
        now = time.monotonic()
        return any(not f.build.done() and now - f.since < PATIENCE_S for f in others)

    def _trial(self, candidate: Candidate) -> TrialOutcome:
        limit_us = HOPELESS * self.least_us if math.isfinite(self.least_us) else None
        outcome = self.session.run(candidate, self.problem, give_up_above_us=limit_us)
        if outcome.timing is not None:
            self.least_us = min(self.least_us, outcome.timing.median_us)
        return outcome

    def _collect(self) -> None:
        """Wait for something to finish, and enter what did."""
        pending: list[Future[Any]] = [f.trial for f in self.flights if f.trial is not None]
        pending += [f.build for f in self.flights if not f.build.done()]
        if pending:
            held = any(f.trial is None and f.build.done() for f in self.flights)
            wait(pending, HELD_POLL_S if held else None, return_when=FIRST_COMPLETED)
        for flight in list(self.flights):
            if flight.trial is not None and flight.trial.done():
                outcome = flight.trial.result()
                self.same_code[flight.identity] = outcome
                self._finish(flight, outcome)

    def _pass_over(self) -> None:
        """Drop the first trials of variants that are outclassed by now.

        Their configs are as if never proposed: the study may come back to them.
        """
        for variant in outclassed(self.books.ranking()) - self.passed_over:
            self.passed_over.add(variant)
            self.owed = {config for config in self.owed if config.variant != variant}
            self.study.pass_over(variant)
            for flight in list(self.flights):
                if flight.is_first and flight.variant == variant and flight.withdraw():
                    self._release(flight)
                    self.exhausted = False

    def _release(self, flight: _Flight) -> None:
        """Let go of a flight that did not get to its trial; its config may be proposed again."""
        self.study.release(flight.proposal.number)
        self.flights.remove(flight)

    def _finish(self, flight: _Flight, outcome: TrialOutcome) -> None:
        config = flight.proposal.config
        record = self.session.record(
            config, self.problem, flight.rendered, flight.key, outcome, flight.artifact
        )
        self.flights.remove(flight)
        self.books.enter(record)
        self.books.new_trials += 1
        self.study.tell(
            flight.proposal.number,
            outcome.timing.median_us if outcome.timing else None,
            outcome.fate,
        )
        self.on_trial(self.books)
