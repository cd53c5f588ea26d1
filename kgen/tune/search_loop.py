"""Search one problem: propose, build ahead, verify and time in the worker, write down, tell.

Three things go on at once: compiler threads build what was proposed, one thread waits for the
worker, and this loop proposes, renders and keeps the books. The worker always has the next
candidate ready, so neither compilation nor Optuna's storage stands between two trials.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible
from kgen.search.study import Proposal, Search, open_study
from kgen.tune.known import still_valid
from kgen.tune.request import TuneRequest
from kgen.tune.resources import resource_refusal
from kgen.worker import Candidate, Session, TrialOutcome, failed_build

BUILD_AHEAD = 24  # proposals in flight: enough to keep 16 cores compiling
WORKER_QUEUE = 10  # the running trial and those that follow while this thread proposes
INTERRUPTED = "interrupted"  # the fate that leaves a config free to be proposed again
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
    artifact: Artifact | None = None
    identity: str = ""
    trial: Future[TrialOutcome] | None = None


def search_problem(
    session: Session,
    request: TuneRequest,
    problem: Problem,
    feasible: Feasible,
    first: list[Config],
    deadline: float | None,
    on_trial: Callable[[Books], None],
) -> Books:
    """Search until the trials, the time or the feasible set are used up.

    Raises:
        TemplateError: If a template is at fault: that is for its author, not a config's fate.
        StorageError: If the journal cannot be written.
    """
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
        first=first,
    )
    study.add_known(
        (r.config, r.timing.median_us if r.fate is Fate.VERIFIED and r.timing else None)
        for r in known.values()
    )
    on_trial(books)
    _Loop(session, problem, study, books, request.trials, deadline, on_trial).run()
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
        trials: int,
        deadline: float | None,
        on_trial: Callable[[Books], None],
    ) -> None:
        self.session, self.problem, self.study, self.books = session, problem, study, books
        self.trials, self.deadline, self.on_trial = trials, deadline, on_trial
        self.flights: deque[_Flight] = deque()
        self.same_code: dict[str, TrialOutcome] = {}
        self.exhausted = False
        # Read by the trial's thread, while this one goes on changing the books.
        self.best_us = books.best_us

    def run(self) -> None:
        """Run to the end; on an error nothing new is started and the worker's thread is joined."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kgen-trial") as trials:
            try:
                while self._refill() or self.flights:
                    self._feed(trials)
                    self._collect()
            except BaseException:
                for flight in self.flights:
                    flight.build.cancel()
                    if flight.trial is not None:
                        flight.trial.cancel()
                raise

    def _refill(self) -> bool:
        """Propose and start builds; False when there is nothing left to propose."""
        wanted = self.trials - sum(self.books.fates.values()) - len(self.flights)
        # Out of time with nothing verified, a search goes on to its first result: a problem that
        # comes late in a list would otherwise end the tune of all of them.
        late = (
            self.deadline is not None
            and time.monotonic() >= self.deadline
            and self.best_us is not None
        )
        if late:
            for flight in list(self.flights):
                if flight.trial is None or flight.trial.cancel():
                    flight.build.cancel()
                    self.study.tell(flight.proposal.number, None, INTERRUPTED)
                    self.flights.remove(flight)
        if wanted <= 0 or late or self.exhausted:
            return False
        room = min(wanted, BUILD_AHEAD - len(self.flights))
        if room < min(wanted, BUILD_AHEAD // 3):
            return True  # ask in batches: a proposal costs less, and stays as diverse
        proposals = self.study.ask(room)
        self.exhausted = len(proposals) < room
        for proposal in proposals:
            key, rendered = _key(self.session, proposal.config, self.problem)
            self.flights.append(_Flight(proposal, rendered, key, self.session.build(rendered)))
        return bool(proposals)

    def _feed(self, trials: ThreadPoolExecutor) -> None:
        """Hand built candidates to the worker, in order of completion."""
        running = sum(f.trial is not None for f in self.flights)
        for flight in list(self.flights):
            if running >= WORKER_QUEUE:
                return
            if flight.trial is not None or not flight.build.done():
                continue
            built = flight.build.result()
            self.books.compile_s += built.seconds
            if isinstance(built, BuildFailure):
                self._finish(flight, failed_build(built))
                continue
            flight.artifact = built
            candidate = self.session.candidate(flight.proposal.config, built)
            plan = self.session.plan(candidate.config, self.problem)
            refusal = resource_refusal(built, plan, self.session.gpu)
            flight.identity = self.session.code_identity(built, plan)
            if refusal:
                self._finish(flight, TrialOutcome(Fate.REJECTED, refusal))
            elif flight.identity in self.same_code:
                self._finish(flight, self.same_code[flight.identity])
            elif any(f.trial is not None and f.identity == flight.identity for f in self.flights):
                continue  # its twin is running: wait for that outcome
            else:
                flight.trial = trials.submit(self._trial, candidate)
                running += 1

    def _trial(self, candidate: Candidate) -> TrialOutcome:
        best = self.best_us
        return self.session.run(
            candidate, self.problem, give_up_above_us=HOPELESS * best if best else None
        )

    def _collect(self) -> None:
        """Wait for something to finish, and enter what did."""
        running = [f.trial for f in self.flights if f.trial is not None]
        pending: list[Future[Any]] = list(running)
        if len(running) < WORKER_QUEUE:
            pending += [f.build for f in self.flights if not f.build.done()]
        if pending:
            wait(pending, return_when=FIRST_COMPLETED)
        for flight in list(self.flights):
            if flight.trial is not None and flight.trial.done():
                outcome = flight.trial.result()
                self.same_code[flight.identity] = outcome
                self._finish(flight, outcome)

    def _finish(self, flight: _Flight, outcome: TrialOutcome) -> None:
        config = flight.proposal.config
        record = self.session.record(
            config, self.problem, flight.rendered, flight.key, outcome, flight.artifact
        )
        self.flights.remove(flight)
        self.books.enter(record)
        self.books.new_trials += 1
        self.best_us = self.books.best_us
        self.study.tell(
            flight.proposal.number,
            outcome.timing.median_us if outcome.timing else None,
            outcome.fate,
        )
        self.on_trial(self.books)
