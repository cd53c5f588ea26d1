"""Models that order configs by features; each learns from the searched problems of one pass.

A model predicts two natural logarithms for a config: the slowdown, its time over the best time of
the problem; and the excess, its time over the problem's floor. The slowdown separates the configs
of a problem, independent of the problem's absolute time. The excess relates problems whose times
are explained by the floor. Configs are ordered by the mean of both.
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

_RIDGE = 10.0  # number of virtual rows of value 0 for each coefficient
_GP_NOISE = 0.05  # variance of an observation, relative to a target of unit variance
_FARTHEST = 6.0  # standard scores are clipped to this range, which limits extrapolation
_MOST_ROWS = 1200  # most rows of a Gaussian process, whose time grows with their third power
_BATCH = 2000  # configs that a Gaussian process predicts at once, to limit memory


@dataclass(frozen=True)
class Training:
    """Measured configs of several problems.

    Attributes:
        rows: Features of each config.
        slowdown: [n] ln(time / best time of its problem).
        excess: [n] ln(time / floor of its problem).
        weights: [n] weights of the configs, with a mean of 1.
    """

    rows: Sequence[Features]
    slowdown: Floats
    excess: Floats
    weights: Floats


class Fitted:
    """A fitted model."""

    def __init__(self, name: str, training: Training) -> None:
        """Fit the model.

        Args:
            name: One of `MODELS`.
            training: The training data, with at least one config.
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
        """Return [n] the scores by which configs of one problem are ordered; the smallest is best.
        """
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
    # Weights only select rows: the process's distances already favour near problems.
    if len(y) > _MOST_ROWS:
        kept = np.sort(np.argsort(-weights, kind="stable")[:_MOST_ROWS])
        rows, y = rows[kept], y[kept]
    scale = math.sqrt(max(1, rows.shape[1]))
    covariance = matern52(squared_distances(rows / scale, rows / scale))
    covariance[np.diag_indices(len(y))] += _GP_NOISE
    mean, spread = float(y.mean()), float(y.std()) or 1.0
    # Only means are needed, so one linear system is solved, independent of the candidates.
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
"""Models by name: gradient-boosted trees, a linear model, a Gaussian process, and the mean of trees
and process. docs/decisions/0038-predict.md says how the default was chosen.
"""

DEFAULT = "mixed"
