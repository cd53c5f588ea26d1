"""Fit a small decision tree to measured times: nested thresholds, a few rows at each leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from kgen.model.rule_tree import Leaf, RuleTree, Split, extent, leaf_of

# Reduction of the mean loss that justifies a further leaf: for a dozen problems, 12 % of one
# problem. Trials do not resolve much less, and one problem alone may be an exception.
LEAF_COST = 0.01
# Loss of a candidate without a time on a problem: it did not run, or was stopped early.
ABSENT_LOSS = 10.0
MAX_DEPTH = 3
LOOK_AHEAD = 2  # levels that are searched exhaustively before the first one is fixed
CHOICES = 3  # rows at a leaf


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured problem.

    Attributes:
        dims: The problem's extents.
        times_us: Times by candidate, of the candidates that ran.
    """

    dims: Mapping[str, int]
    times_us: Mapping[str, float]

    @property
    def losses(self) -> dict[str, float]:
        """Time over the least time, minus 1, by candidate."""
        best = min(self.times_us.values())
        return {name: us / best - 1 for name, us in self.times_us.items()}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A tree and its losses.

    Attributes:
        tree: The tree, whose leaves name candidates.
        losses: The loss of each sample, in order, for the leaf's first choice that ran.
    """

    tree: RuleTree
    losses: tuple[float, ...]

    @property
    def mean_loss(self) -> float:
        """Mean loss."""
        return sum(self.losses) / len(self.losses)

    @property
    def worst_loss(self) -> float:
        """Largest loss."""
        return max(self.losses)


def fit_tree(
    samples: Sequence[Sample],
    features: Sequence[tuple[str, ...]],
    handicaps: Mapping[str, float] | None = None,
) -> Fitted:
    """Find the tree of least mean loss, with a penalty per leaf.

    Among equal trees, the one with fewer leaves is chosen, then the one that compares the earlier
    feature with the smaller number; among equal candidates, the first by name.

    Args:
        samples: At least one sample; each has at least one time.
        features: Products of dims that may be compared.
        handicaps: By candidate, the share by which it must be better than others to be chosen.
    """
    search = _Search(samples, features, handicaps or {})
    tree = search.grown(tuple(range(len(samples))), MAX_DEPTH)
    return Fitted(tree, tuple(_loss(sample, leaf_of(tree, sample.dims)) for sample in samples))


def _loss(sample: Sample, leaf: Leaf) -> float:
    found = sample.losses
    return next((found[name] for name in leaf.rows if name in found), ABSENT_LOSS)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best tree of a set of samples; `cost` is the sum of losses and leaf penalties."""

    cost: float
    tree: RuleTree


class _Search:
    """The search of a tree; a set of samples is a sorted tuple of their indices."""

    def __init__(
        self,
        samples: Sequence[Sample],
        features: Sequence[tuple[str, ...]],
        handicaps: Mapping[str, float],
    ) -> None:
        self._samples, self._handicaps = samples, handicaps
        self._losses = [sample.losses for sample in samples]
        self._candidates = sorted({name for losses in self._losses for name in losses})
        self._leaf_cost = LEAF_COST * len(samples)
        self._values = {f: [extent(f, sample.dims) for sample in samples] for f in features}
        self._known: dict[tuple[tuple[int, ...], int], _Found] = {}

    def grown(self, places: tuple[int, ...], depth: int) -> RuleTree:
        """The tree of a set: the first split of the best shallow tree, and so on below it."""
        tree = self._best(places, min(depth, LOOK_AHEAD)).tree
        if isinstance(tree, Leaf):
            return tree
        below, above = self._parts(places, tree.dims, tree.at_most)
        return Split(
            tree.dims, tree.at_most, self.grown(below, depth - 1), self.grown(above, depth - 1)
        )

    def _best(self, places: tuple[int, ...], depth: int) -> _Found:
        key = (places, depth)
        if key not in self._known:
            best = self._leaf(places)
            for feature in self._values if depth else ():
                for at_most in self._thresholds(places, feature):
                    below, above = (
                        self._best(part, depth - 1)
                        for part in self._parts(places, feature, at_most)
                    )
                    cost = below.cost + above.cost
                    if cost < best.cost - 1e-9:
                        best = _Found(cost, Split(feature, at_most, below.tree, above.tree))
            self._known[key] = best
        return self._known[key]

    def _leaf(self, places: tuple[int, ...]) -> _Found:
        def cost(name: str) -> float:
            lost = sum(self._losses[p].get(name, ABSENT_LOSS) for p in places)
            return lost + self._handicaps.get(name, 0.0) * len(places)

        order = sorted(self._candidates, key=lambda name: (cost(name), name))
        ran = {name for p in places for name in self._losses[p]}
        # A candidate with a handicap is used only as a first choice.
        others = [n for n in order[1:] if n in ran and n not in self._handicaps]
        leaf = Leaf((order[0], *others[: CHOICES - 1]))
        lost = sum(_loss(self._samples[p], leaf) for p in places)
        handicap = self._handicaps.get(order[0], 0.0) * len(places)
        return _Found(lost + handicap + self._leaf_cost, leaf)

    def _thresholds(self, places: tuple[int, ...], feature: tuple[str, ...]) -> list[int]:
        values = sorted({self._values[feature][p] for p in places})
        return [threshold(low, high) for low, high in pairwise(values)]

    def _parts(
        self, places: tuple[int, ...], feature: tuple[str, ...], at_most: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        values = self._values[feature]
        return (
            tuple(p for p in places if values[p] <= at_most),
            tuple(p for p in places if values[p] > at_most),
        )


def threshold(low: int, high: int) -> int:
    """A number t with low <= t < high near their geometric mean, with two digits if possible."""
    middle = max(low, isqrt(low * high))
    step = 10 ** max(0, len(str(middle)) - 2)
    rounded = middle // step * step
    return rounded if low <= rounded < high else middle
