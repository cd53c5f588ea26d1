"""Gradient-boosted oblivious trees in numpy.

All nodes of one depth of an oblivious tree share one comparison, so a tree of depth D is D
comparisons and 2^D values. Fitting is a histogram per depth, and such trees overfit little on the
hundreds of rows that a journal has.

Source: Prokhorenkova et al. 2018, arXiv:1706.09516 (oblivious trees); Friedman 2001 (boosting).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Growth:
    """The parameters of boosting: number of trees, depth, learning rate, regularisation.

    Attributes:
        trees: Number of trees.
        depth: Depth of each tree.
        rate: Learning rate: factor of each tree's values.
        ridge: Number of virtual rows of value 0 in each leaf; keeps small leaves near 0.
        columns: Share of the features that a tree may compare.
        bins: Largest number of thresholds of a feature.
        seed: Seed of the choice of features.
    """

    trees: int = 300
    depth: int = 5
    rate: float = 0.08
    ridge: float = 3.0
    columns: float = 0.4
    bins: int = 24
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Tree:
    features: Ints
    thresholds: Floats
    values: Floats


@dataclass(frozen=True)
class Ensemble:
    """A fitted sum of trees."""

    base: float
    trees: tuple[_Tree, ...]

    def predict(self, rows: Floats) -> Floats:
        """Return [n] predictions of [n, F] rows."""
        out: Floats = np.full(len(rows), self.base)
        for tree in self.trees:
            above = rows[:, tree.features] > tree.thresholds
            out += tree.values[above @ (1 << np.arange(len(tree.features)))]
        return out


def fit_trees(rows: Floats, y: Floats, weights: Floats, growth: Growth) -> Ensemble:
    """Fit an ensemble to least squares.

    Args:
        rows: [n, F] features.
        y: [n] targets.
        weights: [n] of the rows, each > 0.
        growth: The parameters of boosting.
    """
    random = np.random.default_rng(growth.seed)
    edges = [_thresholds(rows[:, f], growth.bins) for f in range(rows.shape[1])]
    useful = np.array([f for f, edge in enumerate(edges) if len(edge)], dtype=np.int64)
    base = float(np.average(y, weights=weights))
    if not len(useful):
        return Ensemble(base, ())
    codes = np.stack([np.searchsorted(edges[f], rows[:, f]) for f in useful], axis=1)
    cuts = np.array([len(edges[f]) for f in useful])
    residual = y - base
    count = max(1, round(growth.columns * len(useful)))
    trees: list[_Tree] = []
    for _ in range(growth.trees):
        chosen = np.sort(random.choice(len(useful), count, replace=False))
        tree, leaf = _grow(codes[:, chosen], cuts[chosen], residual, weights, growth)
        places = useful[chosen[[f for f, _ in tree]]]
        thresholds = np.array([edges[p][b] for p, (_, b) in zip(places, tree, strict=True)])
        leaves = 1 << len(tree)
        total = np.bincount(leaf, weights * residual, leaves)
        values = growth.rate * total / (np.bincount(leaf, weights, leaves) + growth.ridge)
        residual = residual - values[leaf]
        trees.append(_Tree(places, thresholds, values))
    return Ensemble(base, tuple(trees))


def _thresholds(column: Floats, bins: int) -> Floats:
    """Midpoints between values, at most `bins` of them at even quantiles."""
    values = np.unique(column)
    middle: Floats = (values[1:] + values[:-1]) / 2
    if len(middle) > bins:
        middle = np.unique(np.quantile(column, np.linspace(0, 1, bins + 2)[1:-1]))
    return middle


def _grow(
    codes: Ints, cuts: Ints, residual: Floats, weights: Floats, growth: Growth
) -> tuple[list[tuple[int, int]], Ints]:
    """Choose the comparisons of one tree.

    Args:
        codes: [n, F] number of thresholds below each value.
        cuts: [F] number of thresholds.
        residual: [n] the residuals that the tree is fitted to.
        weights: [n] weights of the rows.
        growth: The parameters of boosting.
    Returns:
        The (feature, threshold) of each depth, and [n] the leaf of each row.
    """
    n, features = codes.shape
    bins = int(codes.max()) + 1
    leaf = np.zeros(n, dtype=np.int64)
    tree: list[tuple[int, int]] = []
    index = codes + np.arange(features) * bins  # histogram bin of each value
    # One copy of a row's numbers for each feature, made once for all depths.
    pulls, masses = np.repeat(weights * residual, features), np.repeat(weights, features)
    for depth in range(growth.depth):
        leaves = 1 << depth
        size = leaves * features * bins
        sums = np.bincount(index.ravel(), pulls, size)
        mass = np.bincount(index.ravel(), masses, size)
        below = sums.reshape(leaves, features, bins).cumsum(axis=2)
        below_mass = mass.reshape(leaves, features, bins).cumsum(axis=2)
        above = below[:, :, -1:] - below
        above_mass = below_mass[:, :, -1:] - below_mass
        gain = below**2 / (below_mass + growth.ridge) + above**2 / (above_mass + growth.ridge)
        # A feature with fewer thresholds than others has no cut at the remaining positions.
        possible = np.arange(bins - 1) < cuts[:, None]
        score = np.where(possible, gain.sum(axis=0)[:, :-1], -np.inf)
        best = int(score.argmax())
        feature, cut = divmod(best, score.shape[1])
        # `searchsorted` gives code c to values above edge c - 1: codes above the cut are above it.
        above_cut = (codes[:, feature] > cut).astype(np.int64) << depth
        leaf += above_cut
        index += above_cut[:, None] * (features * bins)
        tree.append((feature, cut))
    return tree, leaf
