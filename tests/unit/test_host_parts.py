"""A run cut into parts: each set is in one part, and the joined parts say what the run says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from check_fakes import binding, factors
from torch import Tensor

from kgen.check import Fixture, Verdict, verify
from kgen.check.parts import places_of
from kgen.check.sizes import PROOF_SIZES
from kgen.errors import VerifyError, WorkerError
from kgen.model.problem import parse_problem
from kgen.model.record import Evidence, Fate, OutputAccuracy, Tried
from kgen.model.set_results import Part, SetResult, SetResults, joined
from kgen.operators.rmsnorm import OPERATOR
from kgen.trial.host_parts import PartEnd, joined_outcome
from kgen.worker import TrialOutcome

Tensors = Mapping[str, Tensor]
PROBLEM = parse_problem("M=300,N=64,dtype=bf16", OPERATOR.signature)
SEED = 5


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("seed", range(5))
def test_each_set_is_in_one_part(count: int, seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([0.0, 1.0, draw.random() * 100]) for _ in range(30)]
    parts = [places_of(Part(index, count), costs) for index in range(count)]
    assert sorted(place for part in parts for place in part) == list(range(30))
    work = [sum(costs[place] for place in part) for part in parts]
    assert work == sorted(work, reverse=True)
    # No part has more than a share and one set.
    assert work[0] <= sum(costs) / count + max(costs)


def test_a_large_set_is_alone() -> None:
    costs = [1.0] * 10 + [10.0] + [1.0] * 10
    assert places_of(Part(0, 3), costs) == {10}
    assert len(places_of(Part(1, 3), costs)) == len(places_of(Part(2, 3), costs)) == 10


def test_sets_that_cost_nothing_are_shared_out_too() -> None:
    assert [len(places_of(Part(index, 4), [0.0] * 8)) for index in range(4)] == [2, 2, 2, 2]


# --- the verifier ---


def honest(t: Tensors) -> None:
    x = t["x"].float()
    t["y"].copy_(x * (x.square().mean(-1, keepdim=True) + t["eps"]).rsqrt() * factors(t))


def wrong_with(rows: int) -> Callable[[Tensors], None]:
    """Leaves a row undone where there are so many."""

    def kernel(t: Tensors) -> None:
        honest(t)
        if t["x"].shape[0] == rows:
            t["y"][-1] = 3.0

    return kernel


def verdict(kernel: Callable[[Tensors], None], part: Part | None, **options: object) -> Verdict:
    fixture = Fixture(OPERATOR, "forward", PROBLEM, torch.device("cpu"), sizes=PROOF_SIZES)
    return verify(
        fixture, binding(kernel), "host", seed=SEED, part=part, launches=3,
        **options,  # type: ignore[arg-type]
    )


def admits_no_gaps(numbers: Mapping[str, int | str], tensors: Mapping[str, Tensor]) -> bool:
    return numbers["x_stride_M"] in (0, 64)


def threads(problem: object) -> int:
    return 100


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (honest, {}),
        (honest, {"admits": admits_no_gaps, "threads": threads}),
        (honest, {"admits": lambda *_: False}),
        (wrong_with(65), {}),
        (wrong_with(131), {"threads": threads}),
    ],
    ids=["honest", "guards", "nothing admitted", "a ragged set", "many rows"],
)
def test_the_parts_joined_are_the_run(
    kernel: Callable[[Tensors], None], options: dict[str, object], count: int
) -> None:
    whole = verdict(kernel, None, **options)
    parts = [verdict(kernel, Part(index, count), **options) for index in range(count)]
    assert joined(part.results for part in parts) == whole.results
    assert whole.results.reason == whole.reason
    # A part is ok if its own sets are.
    assert whole.ok or "admit none" in whole.reason or any(not part.ok for part in parts)


def test_the_place_of_each_set_is_told_before_it_is_made() -> None:
    told: list[int] = []
    part = verdict(honest, Part(1, 3), begins=told.append)
    assert told == sorted(told)
    assert told == [one.place for one in part.results.sets]


# --- the ends of parts ---


def accuracy(error: float) -> tuple[OutputAccuracy, ...]:
    return (OutputAccuracy("y", error, 1.0, 0.5),)


def result(place: int, error: float = 0.1, fault: str = "") -> SetResult:
    return SetResult(place, f"set {place}", place, accuracy(error), fault)


def ended(*sets: SetResult, **options: object) -> PartEnd:
    results = SetResults(9, ("too large",), sets)
    evidence = Evidence(
        1, tuple(Tried(s.label, s.seed) for s in results.tried), results.skipped, 4, True)
    outcome = TrialOutcome(
        Fate.WRONG if results.fault else Fate.VERIFIED, results.fault, None, results.accuracy,
        evidence, sets=results,
    )
    return PartEnd(
        replace(outcome, **options),  # type: ignore[arg-type]
        sets[-1].place if sets else None,
    )


def failed(fate: Fate, place: int | None, reason: str = "it failed") -> PartEnd:
    return PartEnd(TrialOutcome(fate, reason), place)


def both_ways(ends: Sequence[PartEnd]) -> list[TrialOutcome]:
    return [joined_outcome(ends), joined_outcome(ends[::-1])]


def test_sets_are_in_the_order_of_the_run() -> None:
    skipped = SetResult(2, "set 2", 2, skipped=True)
    for outcome in both_ways([
        ended(result(0), skipped, result(2, 0.7)), ended(result(1, 0.3), result(3, 0.7)), ended()
    ]):
        assert outcome.fate is Fate.VERIFIED
        assert outcome.accuracy == accuracy(0.7)
        assert outcome.evidence is not None
        assert [t.case for t in outcome.evidence.tried] == ["set 0", "set 1", "set 2", "set 3"]
        assert outcome.evidence.skipped == ("too large", "set 2")
        assert outcome.sets is None


def test_the_first_fault_in_the_order_of_the_run_counts() -> None:
    late, early = ended(result(0), result(5, 9.0, "late")), ended(result(3, 2.0, "early"))
    for outcome in both_ways([late, early, ended(result(1, 0.2), result(4, 8.0))]):
        assert (outcome.fate, outcome.reason) == (Fate.WRONG, "early")
        assert outcome.accuracy == accuracy(2.0)  # nothing of what comes later
        assert outcome.evidence is not None
        assert [t.case for t in outcome.evidence.tried] == ["set 0", "set 1", "set 3"]


@pytest.mark.parametrize(("place", "fate"), [(2, Fate.CRASHED), (4, Fate.WRONG)])
def test_a_dead_worker_has_the_place_of_the_set_that_it_had_begun(place: int, fate: Fate) -> None:
    for outcome in both_ways([ended(result(3, 2.0, "wrong")), failed(Fate.CRASHED, place)]):
        assert outcome.fate is fate


def test_a_fault_comes_before_parts_that_did_not_end() -> None:
    fault = ended(result(7, 2.0, "wrong"))
    for other in (
        failed(Fate.TIMED_OUT, 0), PartEnd(WorkerError("no worker"), None),
        PartEnd(VerifyError("a definition"), 1),
    ):
        for outcome in both_ways([ended(result(2)), other, fault]):
            assert outcome.reason == "wrong"


def test_a_part_that_did_not_end_is_no_proof() -> None:
    for outcome in both_ways([ended(result(2)), failed(Fate.TIMED_OUT, 1, "too slow")]):
        assert (outcome.fate, outcome.reason) == (Fate.TIMED_OUT, "too slow")
    for error in (WorkerError("no worker"), VerifyError("a definition")):
        with pytest.raises(type(error), match=str(error)):
            joined_outcome([ended(result(2)), PartEnd(error, None)])


def test_what_the_parts_print_is_added_up() -> None:
    ends = [ended(result(1), printed=3, printed_head=b"me\n"), ended(), ended(result(2), printed=4)]
    outcome = joined_outcome(ends)
    assert outcome.fate is Fate.REJECTED
    assert outcome.reason == "the kernel prints: 7 bytes in one trial; it begins: me"
    wrong = joined_outcome([*ends, ended(result(3, 2.0, "wrong"))])
    assert wrong.reason == "wrong"


def test_of_no_set_that_is_tried_there_is_no_proof() -> None:
    skipped = [SetResult(place, f"set {place}", 0, skipped=True) for place in range(2)]
    outcome = joined_outcome([ended(skipped[1]), ended(skipped[0])])
    assert outcome.fate is Fate.WRONG
    assert outcome.reason == (
        "the variant's guards admit none of the 9 input sets\n"
        "  skipped: too large, set 0, set 1"
    )
