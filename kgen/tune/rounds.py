"""The rounds of a search: proposals depend on the results of complete rounds, not on timing.

Builds and trials end in an order that depends on the load of the machine. A study that saw this
order would propose other trials each time, from the same seed. So proposals come in rounds, and
round r is proposed from exactly the results of the rounds up to r - `IN_FLIGHT`, told in the order
in which they were proposed. A result that arrives earlier waits here; the journal already has it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable

from kgen.model.record import Record
from kgen.search.study import Proposal, Search
from kgen.tune.search_state import SearchState
from kgen.tune.warm_start import WarmStart, too_slow_variants, untried_variants

ROUND = 8  # configs proposed at once: each costs less in a batch, and the batch stays diverse
# One slow build holds back the next round, but not the 24 proposals in flight behind it.
IN_FLIGHT = 4


class Rounds:
    """Asks a study for configs and tells it their results, in an order that no timing changes.

    A config of the fallback variant, after the variant's first, may have to wait for the end of the
    search (see `ProblemSearch`). No round waits for it: its result is told with a later round, if
    the fallback leads by then, or last.

    Attributes:
        most_begun: Most trials that are begun and not recorded; unlimited, because no other process
            could run them.
        told: The results that the study knows, beginning with those of the journal.
        taken: The configs that have a result, or are proposed.
        passed_over: The variants that get no more trials of the warm start.
    """

    most_begun = sys.maxsize

    def __init__(
        self, study: Search, known: Iterable[Record], first: WarmStart, trials: int
    ) -> None:
        """Create it for a study that knows some results already.

        Args:
            study: The study of the problem.
            known: The results.
            first: The warm start.
            trials: Most trials, including the known results.
        """
        self._study, self._trials = study, trials
        self._fallback, self._warm = first.fallback, frozenset(first.configs)
        self.told = SearchState()
        for record in known:
            self.told.add(record)
        self.taken = set(self.told.records)
        # Warm-start configs of new variants; they do not count towards the limit on trials.
        self._on_top = untried_variants(first, self.told.records)
        self._is_exhausted = False
        self.passed_over: set[str] = set()
        self._open: deque[list[Proposal]] = deque()
        self._deferred: list[Proposal] = []
        self._results: dict[int, Record] = {}  # by the proposal's number

    def left(self) -> int:
        """Number of configs still to be proposed; 0 if the study has no more."""
        wanted = max(self._trials - len(self.taken), len(self._on_top - self.taken))
        return 0 if self._is_exhausted else wanted

    def settle(self, ending: bool) -> bool:
        """Prepare the next round, if the results allow it.

        Tells the study the oldest round, if `IN_FLIGHT` rounds are open and the oldest is complete.

        Args:
            ending: Whether no config is left to propose: then every complete round is told.
        Returns:
            Whether the study has the results that its next round depends on.
        """
        if not ending and len(self._open) < IN_FLIGHT:
            return True
        if self._open:
            oldest = self._open[0]
        elif self._deferred:
            oldest = self._deferred
        else:
            return False
        if any(proposal.number not in self._results for proposal in oldest):
            return False
        self._tell(oldest)
        if self._open:
            self._open.popleft()
        else:
            self._deferred = []
        return True

    def ask(self, wanted: int) -> list[Proposal]:
        """Propose the next round: up to `ROUND` configs, fewer if that many are not left."""
        proposals = self._study.ask(min(wanted, ROUND))
        self._is_exhausted = len(proposals) < min(wanted, ROUND)
        ranking = self.told.ranking()
        leads = bool(ranking) and ranking[0].config.variant == self._fallback
        members: list[Proposal] = []
        if leads:
            members, self._deferred = self._deferred, []
        for proposal in proposals:
            is_fallback = proposal.config.variant == self._fallback
            is_tried = any(config.variant == self._fallback for config in self.taken)
            if is_fallback and is_tried and not leads:
                self._deferred.append(proposal)
            else:
                members.append(proposal)
            self.taken.add(proposal.config)
        if members:
            self._open.append(members)
        return proposals

    def begin(self, proposal: Proposal) -> bool:
        """Return True: no other process takes a proposal away."""
        return True

    def is_deferred(self, proposal: Proposal) -> bool:
        """Whether no round waits for the proposal."""
        return proposal in self._deferred

    def finish(self, proposal: Proposal, record: Record) -> None:
        """Keep a proposal's record until its round is told."""
        self._results[proposal.number] = record

    def release(self, proposal: Proposal) -> None:
        """Give a proposal back; the study may propose its config again."""
        self._study.release(proposal.number)
        self._results.pop(proposal.number, None)
        self.taken.discard(proposal.config)
        for members in (*self._open, self._deferred):
            if proposal in members:
                members.remove(proposal)

    def pass_over(self, withdraw: Callable[[Proposal], bool]) -> None:
        """Give back the warm-start proposals of variants that the results show to be too slow.

        Proposals whose trials run or have ended are included, because which these are depends on
        timing.

        Args:
            withdraw: Cancels a proposal's trial if it has not started.
        """
        released: list[Proposal] = []
        for variant in sorted(too_slow_variants(self.told.ranking()) - self.passed_over):
            self._study.pass_over(variant)
            self.passed_over.add(variant)
            self._on_top = {config for config in self._on_top if config.variant != variant}
            released += [
                proposal
                for members in (*self._open, self._deferred)
                for proposal in members
                if proposal.config.variant == variant and proposal.config in self._warm
            ]
        for proposal in released:
            self._is_exhausted = False
            self.release(proposal)
            withdraw(proposal)

    def close(self) -> None:
        """Tell the study all remaining results, at the end of the search."""
        for members in (*self._open, self._deferred):
            self._tell([p for p in members if p.number in self._results])

    def _tell(self, members: Iterable[Proposal]) -> None:
        for proposal in members:
            record = self._results.pop(proposal.number)
            self.told.add(record)
            median_us = record.timing.median_us if record.timing else None
            self._study.tell(proposal.number, median_us, record.fate)
