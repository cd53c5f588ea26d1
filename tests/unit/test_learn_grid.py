"""Which problems are measured, and which are held out."""

from __future__ import annotations

import pytest

from kgen.catalogue import open_catalogue
from kgen.learn.grid import (
    MOST_WORK,
    Group,
    features,
    group_problems,
    held_out_problems,
    training_problems,
)
from kgen.model.problem import Problem, parse_problem
from kgen.operators.base import Operator

CASES = {
    "rmsnorm": (["M=64,N=4096,dtype=bf16", "M=8192,N=4096,dtype=bf16", "M=8192,N=128,dtype=bf16"],
                ("N",)),
    "timex": (["B=32,C=768,T=768,dtype=fp32", "B=5,C=67,T=1000,dtype=fp32"], ()),
    "wkv6": (["B=8,H=32,T=4096,K=64,V=64,dtype=bf16"], ("K", "V")),
}


def groups_of(name: str) -> tuple[Operator, tuple[Group, ...]]:
    operator = open_catalogue().entry(name).operator
    texts, compiled_in = CASES[name]
    return operator, group_problems([parse_problem(t, operator.signature) for t in texts],
                                    compiled_in)


def test_groups_share_dtypes_and_constants() -> None:
    _, (wide, narrow) = groups_of("rmsnorm")
    assert wide.constants == (("N", 4096),)
    assert [p.dim("M") for p in wide.anchors] == [64, 8192]
    assert [p.dim("M") for p in narrow.anchors] == [8192]


def test_a_dim_that_follows_another_is_not_compared() -> None:
    operator, (group,) = groups_of("wkv6")
    assert features(group, operator) == (("B",), ("T",), ("H",), ("B", "H"))


@pytest.mark.parametrize("name", CASES)
def test_training_begins_with_the_anchors_and_stays_in_range(name: str) -> None:
    operator, groups = groups_of(name)
    for group in groups:
        found = training_problems(group, operator, "forward", 10)
        assert found[: len(group.anchors)] == group.anchors
        assert len(set(found)) == len(found) <= 10
        assert len(found) > len(group.anchors)
        most = MOST_WORK * max(operator.cost("forward", a).bytes for a in group.anchors)
        for problem in found:
            assert (problem.dtypes, operator.cost("forward", problem).bytes <= most) == (
                group.dtypes, True)
            assert all(problem.dim(n) == extent for n, extent in group.constants)
            assert parse_problem(str(problem), operator.signature) == problem


def test_anchors_are_all_taken() -> None:
    operator, (group, _) = groups_of("rmsnorm")
    assert training_problems(group, operator, "forward", 1) == group.anchors


@pytest.mark.parametrize("name", CASES)
def test_held_out_problems_are_new_and_the_same_each_time(name: str) -> None:
    operator, groups = groups_of(name)
    for group in groups:
        training = training_problems(group, operator, "forward", 10)

        def drawn(
            training: tuple[Problem, ...] = training, group: Group = group
        ) -> tuple[Problem, ...]:
            return held_out_problems(group, operator, "forward", training, 4)

        found = drawn()
        assert found == drawn()
        assert len(set(found)) == 4
        assert not set(found) & set(training)
        free = group.free(operator.signature)
        for problem in found:
            for dim in free:
                extents = [p.dim(dim) for p in training]
                assert min(extents) <= problem.dim(dim) <= max(extents)
        # Every second one is odd, but for what lies at the end of its range.
        assert any(problem.dim(dim) % 2 for problem in found[1::2] for dim in free)


def test_a_single_problem_leaves_nothing_to_hold_out() -> None:
    operator, (_, group) = groups_of("rmsnorm")
    assert held_out_problems(group, operator, "forward", group.anchors, 2) == ()
