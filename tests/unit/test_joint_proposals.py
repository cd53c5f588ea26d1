"""What a search that shares its study proposes, gives back and tells, call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_fakes import PROBLEM, FakeSession, config

from kgen.errors import StorageError
from kgen.model.artifact import Rendered
from kgen.model.record import Fate, Record, Timing
from kgen.search.share import Share
from kgen.search.study import Proposal
from kgen.tune.joint_proposals import JointProposals
from kgen.tune.search_state import SearchState
from kgen.tune.warm_start import WarmStart
from kgen.worker import TrialOutcome

FAST = [config("fast", i) for i in range(20)]
POOR = [config("poor", i) for i in range(4)]
AHEAD = 6


class FakeStudy:
    """Proposes the configs in order, and notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = list(enumerate((*POOR, *FAST)))
        self.is_gone = False
        self.taken_away: set[int] = set()

    def ask(self, n: int, at_most: int, share: Share) -> list[Proposal]:
        taken, self.left = self.left[:n], self.left[n:]
        self.calls.append(f"ask {n} in part {share.place} of {share.parts}, at most {at_most}")
        return [Proposal(number, config) for number, config in taken]

    def begin(self, number: int) -> bool:
        return number not in self.taken_away

    def tell(self, number: int, median_us: float | None, fate: str) -> None:
        self.calls.append(f"tell {number}: {median_us}")

    def release(self, number: int) -> None:
        if self.is_gone:
            raise StorageError("the database is gone")
        self.calls.append(f"release {number}")

    def pass_over(self, variant: str) -> None:
        self.calls.append(f"pass over {variant}")


class FakeCrew:
    """Two processes, of which the other runs trials. Is `Joint` and `OtherProcesses` at once."""

    elsewhere = 0

    def ahead(self, name: str, wanted: int) -> int:
        return min(AHEAD, wanted)

    def share(self, name: str, wanted: int) -> Share:
        return Share(1, 2)

    def running(self) -> int:
        return self.elsewhere


class Search:
    """The proposals of a search, with its records."""

    def __init__(self, folder: Path, trials: int = 20, fallback: str = "") -> None:
        self.study, self.membership, self.state = FakeStudy(), FakeCrew(), SearchState()
        self.session = FakeSession(folder, {})
        study: Any = self.study
        membership: Any = self.membership
        first = WarmStart(tuple(POOR), fallback)
        self.proposals = JointProposals(
            membership, "p", study, membership, self.state, first, trials
        )

    def ask(self) -> list[Proposal]:
        assert self.proposals.settle(ending=False)
        found = self.proposals.ask(self.proposals.left())
        assert not self.proposals.settle(ending=False)  # the loop goes on, to build and to run
        return found

    def record(self, proposal: Proposal, us: float) -> Record:
        rendered = Rendered("op", "", proposal.config.label)
        outcome = TrialOutcome(Fate.VERIFIED, timing=Timing(us, us, us, 1, ""))
        record = self.session.record(proposal.config, PROBLEM, rendered, outcome)
        self.state.add(record)
        return record


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path)


def test_a_result_is_told_at_once_and_batches_follow(search: Search) -> None:
    asked = search.ask()
    assert search.study.calls == ["ask 6 in part 1 of 2, at most 20"]
    search.proposals.finish(asked[5], search.record(asked[5], 7.0))
    assert search.study.calls[1:] == ["tell 5: 7.0"]
    assert search.ask() == []  # one place is free: the next batch waits for a third of them
    search.proposals.finish(asked[2], search.record(asked[2], 8.0))
    assert [proposal.number for proposal in search.ask()] == [6, 7]


def test_what_others_run_and_have_recorded_is_not_left(search: Search) -> None:
    asked = search.ask()
    assert search.proposals.left() == 14
    search.membership.elsewhere = 5
    assert search.proposals.left() == 9
    search.record(Proposal(99, FAST[19]), 5.0)  # of another process
    assert search.proposals.left() == 8
    search.proposals.release(asked[0])
    assert search.proposals.left() == 9
    assert not search.proposals.settle(ending=True)


def test_a_study_that_has_nothing_for_now_is_asked_again(search: Search) -> None:
    later, search.study.left = search.study.left, []
    assert search.ask() == []
    search.study.left = later
    assert len(search.ask()) == AHEAD


def test_only_waiting_trials_of_outclassed_variants_are_given_back(search: Search) -> None:
    poor = search.ask()[:4]
    for proposal, us in zip(poor[:2], (5000.0, 6000.0), strict=True):
        search.proposals.finish(proposal, search.record(proposal, us))
    search.record(Proposal(99, FAST[19]), 5.0)
    search.study.calls.clear()
    search.proposals.pass_over(lambda proposal: proposal != poor[2])  # that one runs
    assert search.study.calls == ["pass over poor", "release 3"]
    assert search.proposals.passed_over == {"poor"}
    search.proposals.pass_over(lambda proposal: True)
    assert search.study.calls == ["pass over poor", "release 3"]


def test_a_proposal_that_was_taken_away_is_open_no_more(search: Search) -> None:
    asked = search.ask()
    search.study.taken_away = {1}
    assert search.proposals.begin(asked[0])
    before = search.proposals.left()
    assert not search.proposals.begin(asked[1])
    assert search.proposals.left() == before + 1


def test_the_fallback_waits_once_it_has_begun_or_another_process_has_tried_it(
    tmp_path: Path,
) -> None:
    search = Search(tmp_path, fallback="poor")
    asked = search.ask()
    assert not search.proposals.is_deferred(asked[1])
    search.proposals.begin(asked[0])
    assert search.proposals.is_deferred(asked[1])
    assert not search.proposals.is_deferred(asked[4])  # of another variant
    search.proposals.release(asked[0])
    assert not search.proposals.is_deferred(asked[1])
    search.record(Proposal(99, POOR[3]), 5.0)
    assert search.proposals.is_deferred(asked[1])


def test_closing_frees_what_has_no_result_if_the_storage_is_there(search: Search) -> None:
    asked = search.ask()
    search.proposals.finish(asked[0], search.record(asked[0], 7.0))
    search.study.calls.clear()
    search.study.is_gone = True
    search.proposals.close()
    assert search.study.calls == []
    search.study.is_gone = False
    search.proposals.close()
    assert search.study.calls == [f"release {number}" for number in range(1, AHEAD)]


