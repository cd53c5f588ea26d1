"""The tree that is fitted to times: a planted one is found, small ones are preferred."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kgen.learn.fit import ABSENT_LOSS, Sample, fit_tree, threshold
from kgen.model.rule_tree import Leaf, LearntRule, Split, leaf_of, leaves, tree_lines, with_names

GRID = [(b, t) for b in (1, 2, 4, 8, 16, 32) for t in (64, 128, 256, 512, 1024, 2048)]
BOTH = (("B",), ("T",), ("B", "T"))


def planted(best: Callable[[int, int], str], others: str = "abc") -> list[Sample]:
    """Samples in which one candidate is twice as fast as the others."""
    return [
        Sample({"B": b, "T": t}, {c: 10.0 if c == best(b, t) else 20.0 for c in others})
        for b, t in GRID
    ]


def test_a_planted_tree_is_found() -> None:
    def best(b: int, t: int) -> str:
        return ("a" if t <= 300 else "b") if b <= 5 else "c"

    fitted = fit_tree(planted(best), BOTH)
    assert fitted.losses == (0.0,) * len(GRID)
    assert len(list(leaves(fitted.tree))) == 3
    for b, t in GRID:
        assert leaf_of(fitted.tree, {"B": b, "T": t}).rows[0] == best(b, t)


def test_a_product_is_compared_where_it_says_more() -> None:
    fitted = fit_tree(planted(lambda b, t: "a" if b * t <= 1024 else "b"), BOTH)
    assert fitted.tree == Split(("B", "T"), 1400, Leaf(("a", "b", "c")), Leaf(("b", "a", "c")))


def test_three_thresholds_in_one_dim() -> None:
    """Deeper than what is searched at once."""
    def best(b: int, t: int) -> str:
        return "abcd"[sum(t > limit for limit in (100, 400, 900))]

    fitted = fit_tree(planted(best, "abcd"), BOTH)
    assert fitted.mean_loss == 0.0
    assert len(list(leaves(fitted.tree))) == 4


def test_a_split_must_be_worth_a_leaf() -> None:
    """One of forty problems gains 10 %, a quarter of a per cent on average."""
    samples = [Sample({"B": b}, {"a": 10.0, "b": 11.0 if b < 40 else 9.0}) for b in range(1, 41)]
    fitted = fit_tree(samples, (("B",),))
    assert fitted.tree == Leaf(("a", "b"))
    assert fitted.worst_loss == pytest.approx(1 / 9)


def test_one_problem_and_ties() -> None:
    fitted = fit_tree([Sample({"B": 3}, {"b": 5.0, "a": 5.0})], (("B",),))
    assert fitted.tree == Leaf(("a", "b"))
    assert (fitted.mean_loss, fitted.worst_loss) == (0.0, 0.0)


def test_what_did_not_run_somewhere_has_a_second() -> None:
    """An absence costs much, so who is a little faster elsewhere does not come first."""
    def samples(fast_us: float) -> list[Sample]:
        ran = [Sample({"B": b}, {"a": fast_us, "b": 10.0}) for b in range(1, 100)]
        return [*ran, Sample({"B": 100}, {"b": 10.0})]

    assert fit_tree(samples(9.9), ()).tree == Leaf(("b", "a"))
    fitted = fit_tree(samples(5.0), ())
    assert fitted.tree == Leaf(("a", "b"))
    assert fitted.losses[-1] == 0.0  # of the second, which ran there
    alone = fit_tree([Sample({"B": 1}, {"a": 1.0}), Sample({"B": 2}, {"new": 1.0})], (),
                     {"new": 0.02})
    assert alone.tree == Leaf(("a",))
    assert alone.losses == (0.0, ABSENT_LOSS)


def test_a_handicap_is_asked_for_once_and_never_a_second_choice() -> None:
    samples = [Sample({"B": 1}, {"new": 9.9, "old": 10.0, "older": 11.0})]
    assert fit_tree(samples, (), {"new": 0.02}).tree == Leaf(("old", "older"))
    assert fit_tree(samples, (), {"new": 0.005}).tree == Leaf(("new", "old", "older"))


@pytest.mark.parametrize(
    ("low", "high", "between"), [(1, 2, 1), (64, 8192, 720), (4095, 4097, 4095), (1024, 2048, 1400),
                                 (99, 101, 99), (8, 64, 22)]
)
def test_thresholds_are_round_and_between(low: int, high: int, between: int) -> None:
    assert threshold(low, high) == between
    assert low <= between < high


def test_a_tree_is_renamed_and_spelled() -> None:
    tree = Split(("B", "H"), 64, Leaf(("x", "y")), Leaf(("y",)))
    renamed = with_names(tree, {"x": "1a", "y": "2b"})
    assert list(tree_lines(renamed)) == ["B * H <= 64:", "  1a, else 2b", "else:", "  2b"]
    rule = LearntRule("forward", (("dtype", "bf16"),), (("N", 8),), renamed, 3, 0.0, 0.0)
    assert rule.records == {"1a", "2b"}
    assert rule.covers == ("forward", ("bf16",), (8,))
