"""Several workers verify at the same time; a worker that dies or never starts changes no result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from kgen.errors import VerifyError, WorkerError
from kgen.model.record import Fate
from kgen.trial import WorkerHandle, WorkerPool
from kgen.worker import Trial, TrialOutcome

TRIALS = [cast(Trial, number) for number in range(12)]
SECONDS = 10.0


class Worker:
    """Answers as the test says; remembers what it was asked."""

    def __init__(self, answer: Callable[[int], TrialOutcome]) -> None:
        self.answer = answer
        self.asked: list[int] = []
        self.calls: list[str] = []

    def trial(self, trial: Trial) -> TrialOutcome:
        self.asked.append(cast(int, trial))
        return self.answer(cast(int, trial))

    def preload(self) -> None:
        self.calls.append("preload")

    def abort(self) -> None:
        self.calls.append("abort")

    def close(self) -> None:
        self.calls.append("close")


def pool(main: Worker, helpers: list[Worker]) -> WorkerPool:
    left = list(helpers)
    return WorkerPool(
        cast(WorkerHandle, cast(Any, main)),
        lambda: cast(WorkerHandle, cast(Any, left.pop(0))),
        len(helpers),
    )


def verified(number: int) -> TrialOutcome:
    return TrialOutcome(Fate.VERIFIED, str(number))


def failing(error: Exception) -> Callable[[int], TrialOutcome]:
    def answer(number: int) -> TrialOutcome:
        raise error

    return answer


def test_each_trial_is_run_once_and_all_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=SECONDS)

    def first_together(number: int) -> TrialOutcome:
        if number < 3:
            together.wait()
        return verified(number)

    main, helpers = Worker(first_together), [Worker(first_together) for _ in range(2)]
    its = pool(main, helpers)
    its.preload(len(TRIALS))
    assert [helper.calls for helper in helpers] == [["preload"], ["preload"]]
    ended = dict(its.run(TRIALS))
    assert {place: outcome.reason for place, outcome in ended.items()} == {
        number: str(number) for number in range(12)
    }
    asked = [number for worker in (main, *helpers) for number in worker.asked]
    assert sorted(asked) == list(range(12))
    its.dismiss()
    assert [helper.calls for helper in helpers] == [["preload", "close"], ["preload", "close"]]
    assert main.calls == []


def test_few_trials_need_few_helpers() -> None:
    main = Worker(verified)
    assert dict(pool(main, [Worker(failing(AssertionError()))]).run(TRIALS[:1])).keys() == {0}
    assert dict(pool(main, []).run([])) == {}


def test_a_helper_that_cannot_start_leaves_its_part_to_the_others() -> None:
    """The device is in exclusive mode, or its memory is full."""
    main, helper = Worker(verified), Worker(failing(WorkerError("no second context")))
    ended = dict(pool(main, [helper]).run(TRIALS))
    assert sorted(ended) == list(range(12))
    assert len(helper.asked) <= 1
    assert sorted(main.asked) == list(range(12))


@pytest.mark.parametrize("fate", [Fate.CRASHED, Fate.TIMED_OUT, Fate.REJECTED])
def test_what_a_neighbour_may_have_caused_is_repeated_alone(fate: Fate) -> None:
    helper_has_begun = threading.Event()

    def slow(number: int) -> TrialOutcome:
        assert helper_has_begun.wait(SECONDS)
        return verified(number)

    def doomed(number: int) -> TrialOutcome:
        helper_has_begun.set()
        return TrialOutcome(fate)

    main, helper = Worker(slow), Worker(doomed)
    ended = dict(pool(main, [helper]).run(TRIALS))
    assert helper.asked
    assert sorted(main.asked) == list(range(12))
    assert {outcome.fate for outcome in ended.values()} == {Fate.VERIFIED}
    # A wrong kernel stays wrong, even if other workers run at the same time.
    wrong = Worker(lambda number: TrialOutcome(Fate.WRONG))
    ended = dict(pool(Worker(verified), [wrong]).run(TRIALS))
    assert sum(outcome.fate is Fate.WRONG for outcome in ended.values()) == len(wrong.asked)


def test_a_fault_of_the_operator_ends_it() -> None:
    main = Worker(failing(VerifyError("the definition")))
    helper = Worker(verified)
    with pytest.raises(VerifyError, match="the definition"):
        list(pool(main, [helper]).run(TRIALS))
    assert main.calls == ["abort"]


def test_who_stops_early_waits_for_nobody() -> None:
    not_reused = threading.Event()

    class Hanging(Worker):
        def abort(self) -> None:
            super().abort()
            not_reused.set()

    def hang(number: int) -> TrialOutcome:
        if number > 1:
            assert not_reused.wait(SECONDS)
        return verified(number)

    main, helper = Hanging(hang), Hanging(hang)
    ended = pool(main, [helper]).run(TRIALS)
    next(ended)
    ended.close()
    assert main.calls == helper.calls == ["abort"]
    assert len(main.asked) + len(helper.asked) < len(TRIALS)
