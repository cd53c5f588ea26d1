"""Score free configs by the expected improvement of a Gaussian process on log time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kgen.search.encoding import Encoding, Floats, Ints
from kgen.search.surrogate import (
    Hyper,
    Posterior,
    fit,
    log_expected_improvement,
    squared_distances,
)

Mask = NDArray[np.bool_]

# Times above this quantile are clipped to it. A config 50 times slower than the best carries no
# more information than "slow", and would otherwise set the scale of the model.
CLIP_QUANTILE = 0.5
MAX_TRAIN = 300  # observations the model is conditioned on: the best half and a random half
POOL = 3000  # candidates scored per batch, besides the neighbours of the best configs
ELITES = 6  # best configs whose neighbours are always candidates
FIRST_STEPS, LATER_STEPS = 30, 25  # gradient steps of a hyperparameter fit
MAX_FAILED = 150  # latest failures the model is conditioned on
FAILURE_SHARPNESS = 8.0  # at two steps of a four-valued parameter the weight is 1/35
MANY = 150  # number of measured configs from which on a fit takes a third of the steps
MOST_APART = 128  # configs of a batch that are chosen far from each other; joint tunes take more
REFIT_AFTER = 4  # new times that trigger a new fit; a tenth of the fitted times, if that is more


@dataclass
class Observations:
    """Results of configs by position; dicts keep the order of arrival."""

    log_time: dict[int, float] = field(default_factory=dict)
    failed: dict[int, None] = field(default_factory=dict)
    pending: dict[int, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.log_time) + len(self.failed) + len(self.pending)

    def all(self) -> Ints:
        """Return the positions of everything tried or being tried."""
        return _positions([*self.log_time, *self.failed, *self.pending])


class Scored:
    """Candidates with a posterior; picking one lowers the scores around it."""

    def __init__(
        self, candidates: Ints, local: Mask, posterior: Posterior, bonus: Floats, best: float
    ) -> None:
        self._candidates = candidates
        self._local = local
        self._posterior = posterior
        self._bonus = bonus
        self._best = best
        self._picked = 0
        self._score = self._now()

    def pick(self, free: Mask, local: bool) -> int | None:
        """Return the free candidate of highest score; None if no candidate is free."""
        allowed = free[self._candidates]
        if local and (allowed & self._local).any():
            allowed = allowed & self._local
        if not allowed.any():
            return None
        j = int(np.where(allowed, self._score, -np.inf).argmax())
        self._picked += 1
        if self._picked <= MOST_APART:
            self._posterior.believe(j)
            self._score = self._now()
        return int(self._candidates[j])

    def _now(self) -> Floats:
        """The score of each candidate, given the observations and the believed values."""
        posterior = self._posterior
        score = log_expected_improvement(posterior.mean, posterior.variance, self._best)
        out: Floats = score + self._bonus
        return out


class Scorer:
    """Keeps the hyperparameters and neighbour lists from one batch to the next."""

    def __init__(self, encoding: Encoding, prior: Floats | None = None) -> None:
        self._encoding = encoding
        self._features, self._groups = encoding.features, encoding.groups
        if prior is not None:
            # The prior is one more coordinate, not the model's mean. If measurements follow it,
            # the fit gives it a short length scale and much weight; otherwise a long one.
            self._features = np.column_stack([self._features, prior])
            self._groups = np.append(self._groups, self._groups.max() + 1)
        self._hyper = Hyper.prior(int(self._groups.max()) + 1)
        self._fitted_at = 0
        self._near: dict[int, Ints] = {}

    def score(self, seen: Observations, free: Mask, rng: np.random.Generator) -> Scored:
        """Fit the model if a fit is due, and condition it on all observations."""
        features, groups = self._features, self._groups
        known = _positions(seen.log_time)
        times = np.fromiter(seen.log_time.values(), dtype=np.float64)
        known, times = _subsample(known, times, rng)
        y = np.minimum(times, np.quantile(times, CLIP_QUANTILE))
        y = (y - y.mean()) / max(float(y.std()), 1e-6)
        count = len(seen.log_time)
        if self._fitted_at == 0 or count >= self._fitted_at + max(REFIT_AFTER, count // 10):
            # A step costs O(n^3). With many times the previous fit is a good start.
            steps = FIRST_STEPS if self._fitted_at == 0 else LATER_STEPS
            steps = steps if count < MANY else steps // 3
            self._hyper = fit(features[known], groups, y, self._hyper, steps)
            self._fitted_at = count
        local = self._neighbours(known[np.argsort(times, kind="stable")[:ELITES]], free)
        if len(free) > POOL:
            pool = np.unique(rng.integers(0, len(free), POOL))
            pool = pool[free[pool]]
        else:
            pool = np.flatnonzero(free)
        pending = _positions(seen.pending)
        candidates = np.union1d(pool, np.concatenate([local, pending]))
        failed = _positions(seen.failed)[-MAX_FAILED:]
        # The model is conditioned on a failed config as if it had the median time. Otherwise it
        # keeps proposing configs near failures: without this, 52 of 64 proposals failed in a space
        # whose fast side fails. The fit above ignores failures: a jump in the data would shorten
        # every length scale.
        posterior = Posterior(
            features[np.concatenate([known, failed])],
            np.append(y, np.full(len(failed), y.max())),
            features[candidates],
            groups,
            self._hyper,
        )
        posterior.believe_all(np.searchsorted(candidates, pending))
        bonus = self._log_success(candidates, known, failed)
        is_local = np.isin(candidates, local)
        return Scored(candidates, is_local, posterior, bonus, float(y.min()))

    def _neighbours(self, elites: Ints, free: Mask) -> Ints:
        near = []
        for i in elites.tolist():
            if i not in self._near:
                self._near[i] = np.concatenate(self._encoding.neighbours(i))
            near.append(self._near[i])
        out = np.unique(np.concatenate(near))
        return out[free[out]]

    def _log_success(self, candidates: Ints, known: Ints, failed: Ints) -> Floats:
        """Return the log probability that a candidate yields a time at all.

        It is the success rate of tried configs, weighted by proximity, plus half a count of the
        overall rate. Proximity uses plain distances instead of the model's length scales: a
        parameter with little effect on the time may still decide whether the config builds.
        """
        if not len(failed):
            return np.zeros(len(candidates))
        features = self._encoding.features
        x = features[candidates]
        bad, good = (
            np.exp(-FAILURE_SHARPNESS * squared_distances(x, features[i])).sum(1)
            for i in (failed, known)
        )
        rate = (len(failed) + 0.5) / (len(failed) + len(known) + 1.0)
        share = (bad + 0.5 * rate) / (bad + good + 0.5)
        out: Floats = np.log1p(-np.minimum(share, 0.999))
        return out


def _subsample(known: Ints, times: Floats, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Keep the fastest half and a random half of `MAX_TRAIN`, in order of arrival."""
    if len(known) <= MAX_TRAIN:
        return known, times
    order = np.argsort(times, kind="stable")
    half = MAX_TRAIN // 2
    keep = np.sort(np.concatenate([order[:half], rng.choice(order[half:], half, replace=False)]))
    return known[keep], times[keep]


def _positions(items: Iterable[int]) -> Ints:
    return np.fromiter(items, dtype=np.int64)
