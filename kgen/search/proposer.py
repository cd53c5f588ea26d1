"""The search algorithm, which chooses the next configs; independent of Optuna and the disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kgen.search.encoding import Encoding, Floats, Ints
from kgen.search.scoring import MOST_APART, Mask, Observations, Scorer
from kgen.search.surrogate import squared_distances
from kgen.search.threads import one_blas_thread

# Size of the initial design, spread over the feasible set: just enough for a first fit, because
# the model's own uncertainty explores better than a design.
DESIGN = 10
DESIGN_PER_VARIANT = 3
# Share of random proposals, in case the model is wrong about this space.
RANDOM_SHARE = 0.04
# Share of proposals taken from the neighbourhood of the best configs only.
LOCAL_SHARE = 0.33
_SPREAD_SAMPLE = 64  # random configs, of which the design takes the one farthest from all others
_MIN_TIMED = 3  # measured configs from which on the model's variance is meaningful


class Proposer:
    """Proposes members of an enumerated set, each at most once, from the times reported so far.

    The first proposals are `first`, then an initial design spread over variants and parameters,
    then the candidates with the best expected improvement under `Scorer`. Some proposals are
    restricted to the neighbours of the best configs; a few are random. The model takes the
    predicted time of a pending config as measured, so that a batch spreads out.

    Args:
        encoding: The feasible set.
        seed: Same seed and same calls: same proposals.
        first: Positions of configs to propose before any other.
        prior_us: Expected time of some positions; only ratios matter.
    """

    def __init__(
        self,
        encoding: Encoding,
        seed: int,
        first: Sequence[int] = (),
        prior_us: Mapping[int, float] | None = None,
    ) -> None:
        self._encoding = encoding
        self._seed = seed
        self._first = list(dict.fromkeys(first))
        self._seen = Observations()
        self._free = np.ones(len(encoding), dtype=bool)
        self._asked = 0
        self._prior = _prior_column(len(encoding), prior_us)
        self._scorer = Scorer(encoding, self._prior)
        per_variant = DESIGN_PER_VARIANT * len(encoding.variants)
        self._design = min(max(DESIGN, per_variant), max(2, len(encoding) // 4))

    def tell(self, i: int, median_us: float | None) -> None:
        """Report the time of config i in microseconds, or None if it failed."""
        self._free[i] = False
        self._seen.pending.pop(i, None)
        self._seen.failed.pop(i, None)
        self._seen.log_time.pop(i, None)
        if median_us is None:
            self._seen.failed[i] = None
        else:
            self._seen.log_time[i] = math.log(median_us)

    @property
    def has_first(self) -> bool:
        """Whether some configs of `first` have not been proposed yet."""
        return any(self._free[i] for i in self._first)

    def mark_pending(self, i: int) -> None:
        """Report that config i is being tried, by this or another process."""
        if self._free[i]:
            self._free[i] = False
            self._seen.pending[i] = None

    def release(self, i: int) -> None:
        """Report that config i was not tried; it may be proposed again."""
        if i in self._seen.pending or (i not in self._seen.log_time and i not in self._seen.failed):
            self._seen.pending.pop(i, None)
            self._free[i] = True

    def pass_over(self, variant: str) -> None:
        """Drop a variant's remaining `first` configs; the model may still propose them."""
        encoding = self._encoding
        self._first = [
            i for i in self._first if encoding.variants[encoding.variant_of[i]] != variant
        ]

    def best(self) -> int:
        """Return the fastest config so far; the first config if none has a time."""
        return min(self._seen.log_time, key=self._seen.log_time.__getitem__, default=0)

    def propose(self, n: int, part: Mask | None = None) -> list[int]:
        """Return up to n configs that were never proposed or reported; they become pending.

        Args:
            n: Configs, at most.
            part: The positions to choose from while one of them is free; None: all.
        """
        rng = np.random.default_rng([self._seed, self._asked])
        self._asked += n
        picks: list[int] = []
        with one_blas_thread():
            if part is not None:
                self._fill(n, part, rng, picks)
            self._fill(n, np.ones_like(self._free), rng, picks)
        return picks

    def _fill(self, n: int, part: Mask, rng: np.random.Generator, picks: list[int]) -> None:
        """Add free positions of a part to a batch until it has n."""
        for i in [i for i in self._first if part[i]]:
            if len(picks) >= n:
                return
            self._first.remove(i)
            if self._free[i]:
                self._take(i, picks)
        while len(picks) < n and (free := self._free & part).any():
            if len(self._seen) < self._design or len(self._seen.log_time) < _MIN_TIMED:
                if len(picks) >= MOST_APART:
                    left = np.flatnonzero(free)
                    rest = rng.choice(left, size=min(n - len(picks), len(left)), replace=False)
                    for i in rest.tolist():
                        self._take(i, picks)
                    break
                # With a prior, every second config of the design is the prior's fastest free one.
                favour = self._prior is not None and len(self._seen) % 2 == 0
                chosen = self._best_by_prior(free) if favour else self._spread(free, rng)
                self._take(chosen, picks)
            else:
                self._take_scored(n, part, rng, picks)

    def _take(self, i: int, picks: list[int]) -> None:
        self._free[i] = False
        self._seen.pending[i] = None
        picks.append(i)

    def _take_scored(
        self, n: int, part: Mask, rng: np.random.Generator, picks: list[int]
    ) -> None:
        """Fill the batch from one set of scored candidates until none is free."""
        scored = self._scorer.score(self._seen, self._free & part, rng)
        while len(picks) < n:
            draw = rng.random()
            if draw < RANDOM_SHARE:
                free = np.flatnonzero(self._free & part)
                if not len(free):
                    return
                self._take(int(rng.choice(free)), picks)
                continue
            i = scored.pick(self._free & part, local=draw < RANDOM_SHARE + LOCAL_SHARE)
            if i is None:
                return
            self._take(i, picks)

    def _best_by_prior(self, free: Mask) -> int:
        """Return the free config with the least prior time."""
        assert self._prior is not None
        return int(np.where(free, self._prior, np.inf).argmin())

    def _spread(self, mask: Mask, rng: np.random.Generator) -> int:
        """Return a free config of the least tried variant, far from everything tried."""
        encoding = self._encoding
        free: Ints = np.flatnonzero(mask)
        tried = self._seen.all()
        if len(encoding.variants) > 1:
            counts = np.bincount(encoding.variant_of[tried], minlength=len(encoding.variants))
            left = np.unique(encoding.variant_of[free])
            free = free[encoding.variant_of[free] == left[counts[left].argmin()]]
        sample = rng.choice(free, size=min(_SPREAD_SAMPLE, len(free)), replace=False)
        if not len(tried):
            return int(sample[0])
        far = squared_distances(encoding.features[sample], encoding.features[tried]).min(1)
        # Distance alone picks corners. Preferring rarely used values covers the axes evenly.
        shared = (encoding.codes[sample][:, None, :] == encoding.codes[tried][None]).sum(2)
        return int(sample[(far - 0.1 * shared.mean(1)).argmax()])


def _prior_column(size: int, prior_us: Mapping[int, float] | None) -> Floats | None:
    """Return the prior in [0, 1]: 0 is the fastest, 1 the median and anything slower or unknown.

    Clipped at the median like the times. An unknown config counts as slow, because a prior of a few
    configs contains the good ones.
    """
    if not prior_us:
        return None
    out = np.ones(size)
    values = np.log(np.fromiter(prior_us.values(), dtype=np.float64))
    low, middle = float(values.min()), float(np.median(values))
    index = np.fromiter(prior_us, dtype=np.int64)
    out[index] = np.minimum((values - low) / max(middle - low, 1e-6), 1.0)
    return out
