"""Search one problem: propose, build, verify and time in the worker, record, update the study.

Three activities overlap: compiler threads build the proposals, one thread waits for the worker, and
the loop in this module proposes, renders and records. The worker's queue always holds the next
candidate, so the worker waits neither for a compilation nor for Optuna's storage. Of the built
candidates the most promising one runs first: promising are winners of earlier problems, then
configs in the order of the search space. `kgen.tune.rounds` hides the order of execution from the
study, so equal results give equal proposals, unless other processes share the study.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

from kgen.errors import StorageError
from kgen.model.artifact import Artifact, BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible
from kgen.search.study import Proposal, open_study
from kgen.trial import Session, failed_build
from kgen.tune.builds_ahead import BuildsAhead
from kgen.tune.joint import Joint
from kgen.tune.joint_proposals import JointProposals
from kgen.tune.other_processes import POLL_S, OtherProcesses, SharedSearch
from kgen.tune.pending import BuiltCandidate, PendingTrial
from kgen.tune.request import TuneRequest, command_options
from kgen.tune.resources import resource_refusal
from kgen.tune.reusable_records import CurrentDigests, reusable_records, reuse_records
from kgen.tune.rounds import IN_FLIGHT, ROUND, Rounds
from kgen.tune.search_state import SearchState
from kgen.tune.second_times import FIELD_WIDTH, complete_times
from kgen.tune.study_names import study_name, text_key_of_config
from kgen.tune.trial_queue import TrialQueue
from kgen.tune.warm_start import WarmStart
from kgen.worker import Candidate, TrialOutcome

# Proposals with a build or a trial pending: enough to keep 16 cores compiling.
BUILD_AHEAD = ROUND * IN_FLIGHT
# The fallback waits this long for builds with a higher priority, while the device is idle.
PATIENCE_S = 8.0
HELD_POLL_S = 1.0  # poll interval of a held candidate
EARLY_STOP_RATIO = 4.0  # times the best: early stop after the first samples
# Past their deadlines the searches of a pass wait this long, together, for the first config of a
# variant that has no time yet. The fastest variants compile for 5 to 20 s; without them a short
# search ends with a slow kernel.
OVERTIME_S = 20.0


class ProblemSearch:
    """The search of one problem.

    Attributes:
        state: Records and totals so far, beginning with those of the journal that are still valid.
        not_reused: Number of the journal's records that cannot be reused, by reason.
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
        joint: Joint | None = None,
        every_time: bool = False,
        overtime_s: float = OVERTIME_S,
    ) -> None:
        """Read the journal and open the study.

        The only trials that start here are of records that lack the time on trained inputs and
        could win: they would mislead the search.

        Args:
            session: The session of the tune.
            request: The tune.
            problem: The problem.
            feasible: The problem's configs.
            first: The warm start.
            builds_ahead: Builds of warm-start configs that were started earlier.
            trials: Most trials, including those of the journal.
            deadline: When to end if there is a result, as of `time.monotonic`; None for never.
            retry: Try again the configs that crashed or timed out.
            joint: The work with other processes; None: this one works alone.
            every_time: Time all verified configs on trained inputs, not only those that could win.
            overtime_s: How long to wait past the deadline for the first config of a variant.
        Raises:
            TemplateError: If a template does not render.
        """
        builds_ahead.stop()
        self._session, self._problem, self._joint = session, problem, joint
        self._current = CurrentDigests(session.definition, session.guards, request.limits.trial_s)
        allowed = set(feasible.configs)
        text_key_of = partial(text_key_of_config, session, problem)
        records, read_up_to = session.journal.follow()
        self._known = reusable_records(
            (
                r
                for r in records
                if r.problem == str(problem) and r.pass_name == session.pass_name
            ),
            allowed,
            text_key_of,
            retry,
            self._current,
        )
        self.not_reused = self._known.not_reused
        self.state = SearchState(options=command_options(request))
        for record in self._known.valid.values():
            self.state.add(record)
        room = trials - len(self._known.valid)
        for record in reuse_records(session, problem, self._known, room, deadline):
            self.state.add(record)
        self._field_width = math.inf if every_time else FIELD_WIDTH
        if joint is None or joint.is_tuner:  # only one process needs to time them
            self.state.timed_again = complete_times(
                session, problem, self.state, deadline=deadline, every=every_time
            )
        # A study never proposes a config twice, so a retry needs another study.
        again = f"+retry{len(self.state.records)}" if retry or self.not_reused else ""
        if joint is not None:  # all processes must use the same name
            again = f"+{request.retry_name}" if retry else ""
        name = study_name(session, problem, feasible, self._current, joint) + again
        study = open_study(
            request.study if joint is None else joint.storage,
            name=name,
            feasible=feasible.configs,
            seed=request.seed if joint is None else joint.seed(request.seed),
            first=first.configs,
            membership=None if joint is None else joint.membership,
        )
        study.add_known(
            (r.config, r.timing.median_us if r.fate is Fate.VERIFIED and r.timing else None)
            for r in self.state.records.values()
        )
        self._others: OtherProcesses | None = None
        self._proposals: Rounds | JointProposals
        if joint is None:
            self._proposals = Rounds(study, self.state.records.values(), first, trials)
        else:
            joint.at(name)
            shared = SharedSearch(
                session, problem, allowed, study, text_key_of, self._current
            )
            self._others = OtherProcesses(joint, shared, read_up_to)
            self._proposals = JointProposals(
                joint, name, study, self._others, self.state, first, trials
            )
        self._first, self._builds_ahead, self._deadline = first, builds_ahead, deadline
        self._overtime_s = overtime_s
        self._pending: deque[PendingTrial] = deque()
        self._same_code: dict[str, TrialOutcome] = {}
        self._places = {config: i for i, config in enumerate(first.configs)}
        leads = {c.variant: c for c in reversed(first.configs) if c.variant != first.fallback}
        self._leads = frozenset(leads.values())  # the first config of each variant
        # Used only by the thread that runs trials, which knows a trial's time before `state` does.
        self._least_us = self.state.best_us or math.inf

    def run(self) -> Generator[Record, None, None]:
        """Search until the trials, the time or the feasible set are used up.

        Yields:
            Each new record. Closing the generator ends the search: it starts no further trial and
            waits for the running one.
        Raises:
            TemplateError: If a template has an error.
            StorageError: If the journal cannot be written.
        """
        try:
            with TrialQueue(self._trial) as queue:
                try:
                    while self._refill() or self._pending or self._waits_for_others():
                        yield from self._feed(queue)
                        yield from self._collect()
                        yield from self._take_over()
                    yield from self._take_over()
                except BaseException:
                    for trial in self._pending:
                        trial.withdraw()
                    raise
        finally:
            self._leave()

    def _refill(self) -> bool:
        """Propose configs and start their builds; return False if none was proposed."""
        # A search without a verified config continues past its deadline: otherwise a problem that
        # comes late in the list would end the tune of all problems.
        late = (
            self._deadline is not None
            and time.monotonic() >= self._deadline
            and self.state.best_us is not None
        ) or (self._joint is not None and self._joint.stop())
        self._proposals.pass_over(self._withdraw)
        if late:
            for trial in list(self._pending):
                if not self._is_awaited(trial) and self._withdraw(trial.proposal):
                    self._proposals.release(trial.proposal)
        is_proposed = False
        while self._proposals.settle(ending=late or self._proposals.left() <= 0):
            self._proposals.pass_over(self._withdraw)  # based on the results told just now
            left = 0 if late else self._proposals.left()
            if left <= 0:
                continue
            proposals = self._proposals.ask(left)
            for proposal in proposals:
                self._begin(proposal)
            is_proposed = is_proposed or bool(proposals)
        return is_proposed

    def _is_awaited(self, trial: PendingTrial) -> bool:
        """Whether the search goes on past its deadline for this trial."""
        return (
            self._joint is None
            and self._deadline is not None
            and time.monotonic() < self._deadline + self._overtime_s
            and trial.proposal.config in self._leads
            and all(r.config.variant != trial.variant for r in self.state.ranking())
        )

    def _begin(self, proposal: Proposal) -> None:
        """Start a proposal, unless its config has a record or a trial already.

        That happens after an earlier proposal of the config was released, or if a process died
        between writing the record and finishing the study's trial.
        """
        record = self.state.records.get(proposal.config)
        if record is not None:
            self._proposals.finish(proposal, record)
            return
        for trial in self._pending:
            if trial.proposal.config == proposal.config:
                trial.proposal = proposal
                return
        self._pending.append(self._start(proposal))

    def _take_over(self) -> Iterator[Record]:
        """Take over the records of other processes."""
        if self._others is not None:
            for record in self._others.take_over(self.state, self._known):
                if record.timing is not None:
                    self._least_us = min(self._least_us, record.timing.median_us)
                yield record

    def _waits_for_others(self) -> bool:
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._others is not None and not late and self._others.are_awaited()

    def _leave(self) -> None:
        """Close the study's proposals. In a joint search, record first the trials that ended while
        the search was being closed: another process would run them again.
        """
        ended = [t for t in self._pending if self._joint is not None and t.has_ended]
        try:
            for trial in ended:
                assert trial.outcome is not None
                self._finish(trial, trial.outcome.result())
        except StorageError:
            return  # other members free them when this process is gone
        self._proposals.close()

    def _start(self, proposal: Proposal) -> PendingTrial:
        """Render a proposal and start its build."""
        config = proposal.config
        rendered = self._session.render(config, self._problem)
        is_first = config in self._places and config.variant not in self._proposals.passed_over
        rank = self._places[config] if is_first else len(self._places) + proposal.number
        return PendingTrial(
            proposal,
            rendered,
            self._builds_ahead.build(rendered),
            place=(int(config.variant == self._first.fallback), rank),
            since=time.monotonic(),
        )

    def _feed(self, queue: TrialQueue) -> Iterator[Record]:
        """Move built candidates to the worker's queue, except those that are held."""
        for trial in list(self._pending):
            if trial.outcome is not None or not trial.build.done():
                continue
            if trial.built is None:
                artifact = trial.build.result()
                self.state.compile_s += artifact.seconds
                if isinstance(artifact, BuildFailure):
                    yield self._finish(trial, failed_build(artifact))
                    continue
                trial.built = self._examine(trial, artifact)
            earlier = self._known.by_code.get(trial.built.key)
            if earlier is not None:
                yield self._reuse(trial, earlier)
            elif trial.built.refusal:
                yield self._finish(trial, TrialOutcome(Fate.REJECTED, trial.built.refusal))
            elif trial.identity in self._same_code:
                yield self._finish(trial, self._same_code[trial.identity])
            elif any(o.outcome is not None and o.identity == trial.identity for o in self._pending):
                continue  # a trial of the same machine code is running: wait for its outcome
            elif not self._is_held(trial) and self._may_begin(trial):
                trial.outcome = queue.add(trial.place, trial.built.candidate)

    def _examine(self, trial: PendingTrial, artifact: Artifact) -> BuiltCandidate:
        session, config = self._session, trial.proposal.config
        plan = session.plan(config, self._problem)
        return BuiltCandidate(
            session.candidate(config, artifact),
            session.key(trial.rendered, artifact, config, self._problem),
            session.code_identity(artifact, plan),
            resource_refusal(artifact, plan, session.gpu)
            or session.refusal(trial.rendered, artifact, config),
        )

    def _may_begin(self, trial: PendingTrial) -> bool:
        """Whether a trial may enter the queue; drops a trial that another process has taken over.
        """
        # Ended trials count until they are recorded, because a kill would lose them, too.
        begun = [other for other in self._pending if other.outcome is not None]
        if len(begun) >= self._proposals.most_begun:
            return False
        if self._proposals.begin(trial.proposal):
            return True
        self._pending.remove(trial)
        return False

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
        if self._proposals.is_deferred(trial.proposal):
            return True
        now = time.monotonic()
        return any(not other.build.done() and now - other.since < PATIENCE_S for other in others)

    def _trial(self, candidate: Candidate) -> TrialOutcome:
        least_us = self._least_us
        outcome = self._session.run(
            candidate,
            self._problem,
            give_up_above_us=EARLY_STOP_RATIO * least_us if math.isfinite(least_us) else None,
            trained_below_us=self._field_width * least_us,
        )
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
            late = self._deadline is not None and time.monotonic() >= self._deadline
            poll_s = HELD_POLL_S if held or late else None
            wait(futures, poll_s, return_when=FIRST_COMPLETED)
        elif self._joint is not None and not self._pending:
            time.sleep(POLL_S)  # other processes run the last trials
        for trial in list(self._pending):
            if trial.outcome is not None and trial.outcome.done():
                outcome = trial.outcome.result()
                self._same_code[trial.identity] = outcome
                yield self._finish(trial, outcome)

    def _withdraw(self, proposal: Proposal) -> bool:
        """Drop a proposal's trial; return False if it runs or has ended."""
        for trial in list(self._pending):
            if trial.proposal == proposal and trial.withdraw():
                self._pending.remove(trial)
                return True
        return False

    def _finish(self, trial: PendingTrial, outcome: TrialOutcome) -> Record:
        """Record an outcome and report it to the study."""
        config = trial.proposal.config
        record = self._session.record(
            config, self._problem, trial.rendered, outcome, trial.artifact
        )
        self.state.new_trials += 1
        return self._add(trial, record)

    def _reuse(self, trial: PendingTrial, earlier: Record) -> Record:
        """Reuse the earlier record of the same machine code, so that no code runs twice."""
        config = trial.proposal.config
        return self._add(
            trial, self._session.renew(earlier, config, self._problem, trial.rendered)
        )

    def _add(self, trial: PendingTrial, record: Record) -> Record:
        self._pending.remove(trial)
        self.state.add(record)
        self._proposals.finish(trial.proposal, record)
        return record
