"""Search one problem: propose, build, verify and time in the worker, record, update the study.

Three activities overlap: compiler threads build the proposals, one thread waits for the worker, and
the loop in this module proposes, renders and records. The worker's queue always holds the next
candidate, so the worker waits neither for a compilation nor for Optuna's storage. Of the built
candidates the most promising one runs first. Winners of earlier problems and the order of the
search space define what is promising.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible
from kgen.search.study import Proposal, open_study
from kgen.trial import Session, failed_build
from kgen.tune.builds_ahead import BuildsAhead
from kgen.tune.pending import PendingTrial
from kgen.tune.request import TuneRequest, command_options
from kgen.tune.resources import resource_refusal
from kgen.tune.reusable_records import Today, reusable_records, reuse_records
from kgen.tune.search_state import SearchState
from kgen.tune.trial_queue import TrialQueue
from kgen.tune.warm_start import WarmStart, outclassed, untried_variants
from kgen.worker import Candidate, TrialOutcome

BUILD_AHEAD = 24  # proposals with a build or a trial pending: enough to keep 16 cores compiling
# The fallback waits this long for builds with a higher priority, while the device is idle.
PATIENCE_S = 8.0
HELD_POLL_S = 1.0  # poll interval of a held candidate
HOPELESS = 4.0  # times the best: early stop after the first samples


class ProblemSearch:
    """The search of one problem.

    Attributes:
        state: Records and totals so far, beginning with those of the journal that are still valid.
        let_go: How many of the journal's records are of no use any more, by the reason.
    """

    def __init__(
        self,
        session: Session,
        request: TuneRequest,
        problem: Problem,
        feasible: Feasible,
        first: WarmStart,
        builds_ahead: BuildsAhead,
        *,
        trials: int,
        deadline: float | None,
        retry: bool,
    ) -> None:
        """Read the journal and open the study; starts no trial.

        Args:
            session: Of the tune.
            request: The tune.
            problem: The problem.
            feasible: Its configs.
            first: The warm start.
            builds_ahead: Builds of warm-start configs that were started earlier.
            trials: Trials, at most, including those of the journal.
            deadline: When to end if there is a result, as of `time.monotonic`; None for never.
            retry: Try again the configs that crashed or timed out.
        Raises:
            TemplateError: If a template does not render.
        """
        builds_ahead.stop()
        self._known = reusable_records(
            (
                r
                for r in session.journal.read()
                if r.problem == str(problem) and r.pass_name == session.pass_name
            ),
            set(feasible.configs),
            lambda config: _text_key(session, config, problem),
            retry,
            Today(session.definition, session.guards, request.limits.trial_s),
        )
        self.let_go = self._known.let_go
        self.state = SearchState(options=command_options(request))
        for record in self._known.valid.values():
            self.state.add(record)
        room = trials - len(self._known.valid)
        for record in reuse_records(session, problem, self._known, room, deadline):
            self.state.add(record)
        # A study never proposes a config twice, so a retry needs another study.
        again = f"+retry{len(self.state.records)}" if retry or self.let_go else ""
        self._study = open_study(
            request.study,
            name=_study_name(session, problem, feasible) + again,
            feasible=feasible.configs,
            seed=request.seed,
            first=first.configs,
        )
        self._study.add_known(
            (r.config, r.timing.median_us if r.fate is Fate.VERIFIED and r.timing else None)
            for r in self.state.records.values()
        )
        self._session, self._problem = session, problem
        self._first, self._builds_ahead = first, builds_ahead
        self._trials, self._deadline = trials, deadline
        self._pending: deque[PendingTrial] = deque()
        self._same_code: dict[str, TrialOutcome] = {}
        self._places = {config: i for i, config in enumerate(first.configs)}
        self._passed_over: set[str] = set()
        # Warm-start configs of new variants; they do not count towards the limit on trials.
        self._on_top = untried_variants(first, self.state.records)
        self._exhausted = False
        # Only the trial's thread uses it; that thread has a trial's time before `state` does.
        self._least_us = self.state.best_us or math.inf

    def run(self) -> Generator[Record, None, None]:
        """Search until the trials, the time or the feasible set are used up.

        Yields:
            Each new record. Closing the generator ends the search: it starts no further trial and
            waits for the running one.
        Raises:
            TemplateError: If a template is at fault: its author has to mend it.
            StorageError: If the journal cannot be written.
        """
        with TrialQueue(self._trial) as queue:
            try:
                self._pass_over()
                while self._refill() or self._pending:
                    yield from self._feed(queue)
                    yield from self._collect()
                    self._pass_over()
            except BaseException:
                for trial in self._pending:
                    trial.withdraw()
                raise

    def _refill(self) -> bool:
        """Propose configs and start their builds; return False if no config is left."""
        pending = {trial.proposal.config for trial in self._pending}
        wanted = max(
            self._trials - sum(self.state.fates.values()) - len(pending),
            len(self._on_top - self.state.records.keys() - pending),
        )
        # A search without a verified config continues past its deadline: otherwise a problem that
        # comes late in the list would end the tune of all problems.
        late = (
            self._deadline is not None
            and time.monotonic() >= self._deadline
            and self.state.best_us is not None
        )
        if late:
            for trial in list(self._pending):
                if trial.withdraw():
                    self._release(trial)
        if wanted <= 0 or late or self._exhausted:
            return False
        room = min(wanted, BUILD_AHEAD - len(self._pending))
        if room < min(wanted, BUILD_AHEAD // 3):
            return True  # in batches: each proposal costs less, and the batch stays diverse
        proposals = self._study.ask(room)
        self._exhausted = len(proposals) < room
        self._pending += [self._start(proposal) for proposal in proposals]
        return bool(proposals)

    def _start(self, proposal: Proposal) -> PendingTrial:
        """Render a proposal and start its build."""
        config = proposal.config
        rendered = self._session.render(config, self._problem)
        is_first = config in self._places and config.variant not in self._passed_over
        rank = self._places[config] if is_first else len(self._places) + proposal.number
        return PendingTrial(
            proposal,
            rendered,
            self._builds_ahead.build(rendered),
            place=(int(config.variant == self._first.fallback), rank),
            is_first=is_first,
            since=time.monotonic(),
        )

    def _feed(self, queue: TrialQueue) -> Iterator[Record]:
        """Move built candidates to the worker's queue, except those that are held."""
        for trial in list(self._pending):
            if trial.outcome is not None or not trial.build.done():
                continue
            if trial.artifact is None:
                built = trial.build.result()
                self.state.compile_s += built.seconds
                if isinstance(built, BuildFailure):
                    yield self._finish(trial, failed_build(built))
                    continue
                trial.artifact = built
            candidate = self._session.candidate(trial.proposal.config, trial.artifact)
            plan = self._session.plan(candidate.config, self._problem)
            key = self._session.key(
                trial.rendered, trial.artifact, candidate.config, self._problem
            )
            earlier = self._known.by_code.get(key)
            if earlier is not None:
                yield self._reuse(trial, earlier)
                continue
            refusal = resource_refusal(
                trial.artifact, plan, self._session.gpu
            ) or self._session.refusal(trial.rendered, trial.artifact, candidate.config)
            trial.identity = self._session.code_identity(trial.artifact, plan)
            if refusal:
                yield self._finish(trial, TrialOutcome(Fate.REJECTED, refusal))
            elif trial.identity in self._same_code:
                yield self._finish(trial, self._same_code[trial.identity])
            elif any(o.outcome is not None and o.identity == trial.identity for o in self._pending):
                continue  # a trial of the same machine code is running: wait for its outcome
            elif not self._is_held(trial):
                trial.outcome = queue.add(trial.place, candidate)

    def _is_held(self, trial: PendingTrial) -> bool:
        """Whether a trial of the fallback variant has to wait.

        The fallback variant compiles at once, and one launch of it may take as long as a hundred
        trials of the others. So its first trial waits for other builds, at most PATIENCE_S, and it
        gets a second trial only if it is the best or no other variant is pending.
        """
        fallback = self._first.fallback
        others = [other for other in self._pending if other.variant != fallback]
        if trial.variant != fallback or not others:
            return False
        ranking = self.state.ranking()
        if ranking and ranking[0].config.variant == fallback:
            return False
        if any(config.variant == fallback for config in self.state.records) or any(
            other.variant == fallback and other.outcome is not None for other in self._pending
        ):
            return True
        now = time.monotonic()
        return any(not other.build.done() and now - other.since < PATIENCE_S for other in others)

    def _trial(self, candidate: Candidate) -> TrialOutcome:
        limit_us = HOPELESS * self._least_us if math.isfinite(self._least_us) else None
        outcome = self._session.run(candidate, self._problem, give_up_above_us=limit_us)
        if outcome.timing is not None:
            self._least_us = min(self._least_us, outcome.timing.median_us)
        return outcome

    def _collect(self) -> Iterator[Record]:
        """Wait until a build or a trial has ended; record the finished trials."""
        futures: list[Future[Any]] = [
            other.outcome for other in self._pending if other.outcome is not None
        ]
        futures += [other.build for other in self._pending if not other.build.done()]
        if futures:
            held = any(other.outcome is None and other.build.done() for other in self._pending)
            wait(futures, HELD_POLL_S if held else None, return_when=FIRST_COMPLETED)
        for trial in list(self._pending):
            if trial.outcome is not None and trial.outcome.done():
                outcome = trial.outcome.result()
                self._same_code[trial.identity] = outcome
                yield self._finish(trial, outcome)

    def _pass_over(self) -> None:
        """Drop the pending warm-start trials of variants that are outclassed.

        The study may propose their configs again.
        """
        for variant in outclassed(self.state.ranking()) - self._passed_over:
            self._passed_over.add(variant)
            self._on_top = {config for config in self._on_top if config.variant != variant}
            self._study.pass_over(variant)
            for trial in list(self._pending):
                if trial.is_first and trial.variant == variant and trial.withdraw():
                    self._release(trial)
                    self._exhausted = False

    def _release(self, trial: PendingTrial) -> None:
        """Drop a withdrawn trial; the study may propose its config again."""
        self._study.release(trial.proposal.number)
        self._pending.remove(trial)

    def _finish(self, trial: PendingTrial, outcome: TrialOutcome) -> Record:
        """Record an outcome and report it to the study."""
        config = trial.proposal.config
        record = self._session.record(
            config, self._problem, trial.rendered, outcome, trial.artifact
        )
        self.state.new_trials += 1
        return self._add(trial, record)

    def _reuse(self, trial: PendingTrial, earlier: Record) -> Record:
        """Reuse the earlier record of the same machine code; no code is tried twice."""
        config = trial.proposal.config
        return self._add(
            trial, self._session.renew(earlier, config, self._problem, trial.rendered)
        )

    def _add(self, trial: PendingTrial, record: Record) -> Record:
        self._pending.remove(trial)
        self.state.add(record)
        self._study.tell(
            trial.proposal.number,
            record.timing.median_us if record.timing else None,
            record.fate,
        )
        return record


def _text_key(session: Session, config: Config, problem: Problem) -> str:
    return session.text_key(session.render(config, problem), config, problem)


def _study_name(session: Session, problem: Problem, feasible: Feasible) -> str:
    """Return the name of a problem's study; it contains a digest of the code that is searched.

    Optuna cannot delete a finished trial. If a template, a header or the compiler changes, a new
    study starts with the records of the journal that are still valid.
    """
    samples = {config.variant: config for config in reversed(feasible.configs)}
    keys = [_text_key(session, config, problem) for _, config in sorted(samples.items())]
    return (
        f"{session.entry.operator.name}/{session.pass_name}/{session.gpu.name}/{problem}"
        f"@{digest_of(keys)}"
    )
