"""The proposals of a search that shares its study with other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kgen.errors import StorageError
from kgen.model.config import Config
from kgen.model.record import Record
from kgen.search.study import Proposal, Search
from kgen.tune.joint import Joint
from kgen.tune.other_processes import OtherProcesses
from kgen.tune.search_state import SearchState
from kgen.tune.warm_start import WarmStart, too_slow_variants, untried_variants

JOINT_QUEUE = 2  # trials in the worker's queue: the running one and the next


class JointProposals:
    """Asks a shared study for configs and tells it each result at once.

    It has the methods of `Rounds`, but no rounds: results of other processes arrive at any time, so
    proposals depend on timing in any case. The study gets each result at once, because the other
    processes use it, and variants are judged by all records so far.

    Attributes:
        most_begun: Most trials that are begun and not recorded; if this process is killed, all of
            them are interrupted.
        passed_over: The variants that get no more trials of the warm start.
    """

    most_begun = JOINT_QUEUE

    def __init__(
        self,
        joint: Joint,
        name: str,
        study: Search,
        others: OtherProcesses,
        state: SearchState,
        first: WarmStart,
        trials: int,
    ) -> None:
        """Create it for a study that knows the records of the search.

        Args:
            joint: The work with the other processes.
            name: The study's name, which all processes share.
            study: The study of the problem.
            others: The trials of other processes on the problem.
            state: The state of the search, which the search keeps up to date.
            first: The warm start.
            trials: Most trials of all processes together.
        """
        self._joint, self._name, self._study, self._others = joint, name, study, others
        self._state, self._trials = state, trials
        self._fallback, self._warm = first.fallback, frozenset(first.configs)
        self._on_top = untried_variants(first, state.records)
        self.passed_over: set[str] = set()
        self._open: dict[Config, Proposal] = {}
        self._begun: set[Config] = set()
        self._has_asked = False

    def left(self) -> int:
        """Number of configs still to be proposed; other processes may take some of them."""
        done = sum(self._state.fates.values())
        on_top = self._on_top - self._state.records.keys() - self._open.keys()
        return max(self._trials - done - len(self._open) - self._others.running(), len(on_top))

    def settle(self, ending: bool) -> bool:
        """Whether a batch may be requested now; False directly after a request.

        A request may return nothing while other processes hold the last configs. These may become
        free again, so an empty batch does not end the search.

        Args:
            ending: Whether nothing is left to propose.
        """
        may_ask = not ending and not self._has_asked
        self._has_asked = False
        return may_ask

    def ask(self, wanted: int) -> list[Proposal]:
        """Propose a batch; [] while enough proposals are open."""
        self._has_asked = True
        ahead = self._joint.ahead(self._name, wanted)
        room = min(wanted, ahead - len(self._open))
        if room < min(wanted, max(1, ahead // 3)):
            return []  # in batches: each proposal costs less, and the batch stays diverse
        proposals = self._study.ask(
            room,
            at_most=self._trials + len(self._on_top),
            share=self._joint.share(self._name, wanted),
        )
        self._open.update((proposal.config, proposal) for proposal in proposals)
        return proposals

    def begin(self, proposal: Proposal) -> bool:
        """Note that a proposal's trial begins; return False if it was taken away."""
        if self._study.begin(proposal.number):
            self._begun.add(proposal.config)
            return True
        self._close(proposal)
        return False

    def is_deferred(self, proposal: Proposal) -> bool:
        """Whether the proposal belongs to the fallback variant and that variant has had a trial,
        so that this trial has to wait for others.
        """
        return proposal.config.variant == self._fallback and any(
            config.variant == self._fallback for config in (*self._state.records, *self._begun)
        )

    def finish(self, proposal: Proposal, record: Record) -> None:
        """Tell the study a proposal's record."""
        self._close(proposal)
        median_us = record.timing.median_us if record.timing else None
        self._study.tell(proposal.number, median_us, record.fate)

    def release(self, proposal: Proposal) -> None:
        """Give a proposal back; the study may propose its config again."""
        self._study.release(proposal.number)
        self._close(proposal)

    def pass_over(self, withdraw: Callable[[Proposal], bool]) -> None:
        """Give back the warm-start proposals of variants that are too slow.

        Proposals that run are kept: another process would run them again.

        Args:
            withdraw: Cancels a proposal's trial; returns False if it runs or has ended.
        """
        for variant in too_slow_variants(self._state.ranking()) - self.passed_over:
            self._study.pass_over(variant)
            self.passed_over.add(variant)
            self._on_top = {config for config in self._on_top if config.variant != variant}
            for config, proposal in list(self._open.items()):
                if config.variant == variant and config in self._warm and withdraw(proposal):
                    self.release(proposal)

    def close(self) -> None:
        """Free the proposals without a result, at the end of the search."""
        # If the storage is gone, other members free them once this process is gone.
        with contextlib.suppress(StorageError):
            for proposal in list(self._open.values()):
                self.release(proposal)

    def _close(self, proposal: Proposal) -> None:
        self._open.pop(proposal.config, None)
        self._begun.discard(proposal.config)
