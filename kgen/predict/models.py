"""Models that order configs by features: each learns from searched problems of one pass.

A model predicts two things of a config, both as natural logarithms: its slowdown, its time over the
best of its problem; and its excess, its time over the floor. The first separates configs and knows
nothing of the problem's level; the second links problems that a floor explains. Configs are ordered
by the mean of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kgen.predict.trees import Floats, Growth, fit_trees
from kgen.search.surrogate import matern52, squared_distances

Features = Mapping[str, float]
Predict = Callable[[Floats], Floats]  # [n, F] standard scores -> [n]
Fit = Callable[[Floats, Floats, Floats], Predict]  # standard scores, [n] targets, [n] weights

_RIDGE = 10.0  # rows of value 0 that each coefficient is thought to have
_GP_NOISE = 0.05  # variance of an observation, of a target of unit variance
_FARTHEST = 6.0  # standard scores: a feature far outside of what was seen extrapolates no further
_MOST_ROWS = 1200  # of a Gaussian process, whose time grows with the third power
_BATCH = 2000  # configs that a Gaussian process predicts at once, for the memory


@dataclass(frozen=True)
class Training:
    """Measured configs of several problems.

    Attributes:
        rows: Features of each config.
        slowdown: [n] ln(time / best time of its problem).
        excess: [n] ln(time / floor of its problem).
        weights: [n] of mean 1: how much a config counts.
    """

    rows: Sequence[Features]
    slowdown: Floats
    excess: Floats
    weights: Floats


class Fitted:
    """A model that has learnt."""

    def __init__(self, name: str, training: Training) -> None:
        """Learn.

        Args:
            name: One of `MODELS`.
            training: At least one config.
        """
        self._columns = {
            column: place
            for place, column in enumerate(dict.fromkeys(c for row in training.rows for c in row))
        }
        rows = self._matrix(training.rows)
        self._mean, spread = rows.mean(axis=0), rows.std(axis=0)
        self._kept = spread > 1e-12
        self._spread = np.where(self._kept, spread, 1.0)
        scores = self._scores(rows)
        fit = MODELS[name]
        self._slowdown = fit(scores, training.slowdown, training.weights)
        self._excess = fit(scores, training.excess, training.weights)

    def order(self, rows: Sequence[Features]) -> Floats:
        """Return [n] what configs of one problem are ordered by; the least is the best."""
        scores = self._scores(self._matrix(rows))
        out: Floats = self._slowdown(scores) + self._excess(scores)
        return out

    def _matrix(self, rows: Sequence[Features]) -> Floats:
        out = np.zeros((len(rows), len(self._columns)))
        for i, row in enumerate(rows):
            for name, value in row.items():
                if (place := self._columns.get(name)) is not None:
                    out[i, place] = value
        return out

    def _scores(self, rows: Floats) -> Floats:
        scores = (rows - self._mean) / self._spread
        out: Floats = np.clip(scores[:, self._kept], -_FARTHEST, _FARTHEST)
        return out


def _fit_trees(rows: Floats, y: Floats, weights: Floats) -> Predict:
    return fit_trees(rows, y, weights, Growth()).predict


def _fit_ridge(rows: Floats, y: Floats, weights: Floats) -> Predict:
    center, mean = np.average(rows, axis=0, weights=weights), float(np.average(y, weights=weights))
    x = rows - center
    weighted = (x * weights[:, None]).T
    slopes = np.linalg.solve(weighted @ x + _RIDGE * np.eye(x.shape[1]), weighted @ (y - mean))
    return lambda at: (at - center) @ slopes + mean


def _fit_gp(rows: Floats, y: Floats, weights: Floats) -> Predict:
    # Its own distances already let near problems count for more.
    if len(y) > _MOST_ROWS:
        kept = np.sort(np.argsort(-weights, kind="stable")[:_MOST_ROWS])
        rows, y = rows[kept], y[kept]
    scale = math.sqrt(max(1, rows.shape[1]))
    covariance = matern52(squared_distances(rows / scale, rows / scale))
    covariance[np.diag_indices(len(y))] += _GP_NOISE
    mean, spread = float(y.mean()), float(y.std()) or 1.0
    # Only means are wanted, so one system is solved, whatever the number of candidates.
    alpha = np.linalg.solve(covariance, (y - mean) / spread)

    def predict(at: Floats) -> Floats:
        parts = [
            matern52(squared_distances(at[i : i + _BATCH] / scale, rows / scale)) @ alpha
            for i in range(0, len(at), _BATCH)
        ]
        out: Floats = np.concatenate(parts) * spread + mean
        return out

    return predict


def _fit_mixed(rows: Floats, y: Floats, weights: Floats) -> Predict:
    trees, gp = _fit_trees(rows, y, weights), _fit_gp(rows, y, weights)
    return lambda at: (trees(at) + gp(at)) / 2


MODELS: Mapping[str, Fit] = {
    "trees": _fit_trees,
    "ridge": _fit_ridge,
    "gp": _fit_gp,
    "mixed": _fit_mixed,
}
"""By name: gradient-boosted trees, a linear model, a Gaussian process, and the mean of trees and
process. docs/decisions/0038-predict.md says how the default was chosen.
"""

DEFAULT = "mixed"
