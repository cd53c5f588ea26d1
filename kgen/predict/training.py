"""Training data of the models from recorded searches, and predicted times from a fitted model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kgen.catalogue import Catalogue, Entry
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.predict.features import Featurizer
from kgen.predict.models import Features, Fitted, Training
from kgen.predict.observations import Searched, read_searches
from kgen.predict.trees import Floats
from kgen.runtime.distance import problem_distance
from kgen.runtime.signature import PassSignature

NEIGHBOURS = 3
"""Number of nearest searched problems whose ratio of time to floor sets a predicted time."""
NEARNESS = 4.0
"""Distance at which a searched problem has the weight 1/e; a factor of two in one extent is a
distance of 0.7."""
FAR = 1e-3  # added to every weight, so that even the farthest problem counts


@dataclass(frozen=True)
class TrainingSearch:
    """A recorded search of a problem, with the features of its configs, as training data.

    Attributes:
        searched: The problem and the measured configs.
        bare: Features of each config that need no compiler.
        compiled: Features with the compiler's report.
        times_us: [n] measured times, microseconds.
        floor_us: Floor of the problem on its GPU, microseconds.
    """

    searched: Searched
    bare: tuple[Features, ...]
    compiled: tuple[Features, ...]
    times_us: Floats
    floor_us: float

    @property
    def excess(self) -> float:
        """ln(best time / floor)."""
        return math.log(float(self.times_us.min()) / self.floor_us)


def training_search(entry: Entry, searched: Searched) -> TrainingSearch:
    """Compute the features of a searched problem."""
    features = Featurizer(entry.operator, searched.pass_name, searched.problem, searched.gpu)
    bare, compiled = [], []
    for seen in searched.observations:
        variant = entry.space.variant(searched.pass_name, seen.config.variant)
        bare.append(features.of(variant, seen.config, None))
        # A record from before resources were recorded counts as not compiled.
        compiled.append(features.of(variant, seen.config, seen.resources or None))
    return TrainingSearch(
        searched,
        tuple(bare),
        tuple(compiled),
        np.array([seen.median_us for seen in searched.observations]),
        features.floor_us,
    )


def relatives(catalogue: Catalogue, entry: Entry) -> tuple[Entry, ...]:
    """The other operators of an entry's family whose problems have the same fields.

    They share variants and templates, so their searches contain the same configs.
    """
    if not entry.space.family:
        return ()
    names = entry.operator.signature.field_names
    others = [catalogue.entry(name) for name in catalogue.names if name != entry.operator.name]
    return tuple(
        other for other in others
        if other.space.family == entry.space.family
        and other.operator.signature.field_names == names
    )


def read_training_searches(
    entries: Sequence[Entry], libraries: Sequence[Path], pass_name: str
) -> list[TrainingSearch]:
    """Read the recorded searches of a pass of some operators from libraries.

    If several libraries have a problem, the search of the first library is used.
    """
    found: dict[tuple[str, str, str], TrainingSearch] = {}
    for library in dict.fromkeys(path.resolve() for path in libraries):
        for entry in entries:
            for searched in read_searches(entry, library):
                key = (entry.operator.name, searched.gpu.name, str(searched.problem))
                if searched.pass_name == pass_name and key not in found:
                    found[key] = training_search(entry, searched)
    return list(found.values())


def training(
    searches: Sequence[TrainingSearch], gaps: Sequence[float], *, compiled: bool
) -> Training:
    """Join searches into one training set.

    Args:
        searches: The searches; at least one.
        gaps: Distance of each search's problem from the problem to predict.
        compiled: Whether to use the features that need compilation.
    """
    times = np.concatenate([one.times_us for one in searches])
    counts = [len(one.times_us) for one in searches]
    best = np.repeat([one.times_us.min() for one in searches], counts)
    floors = np.repeat([one.floor_us for one in searches], counts)
    weights = np.repeat([math.exp(-gap / NEARNESS) + FAR for gap in gaps], counts)
    return Training(
        [row for one in searches for row in (one.compiled if compiled else one.bare)],
        np.log(times / best),
        np.log(times / floors),
        weights / weights.mean(),
    )


class Predictor:
    """A model for one problem of one pass, which learns from searches of other problems."""

    def __init__(
        self, name: str, entry: Entry, problem: Problem, searches: Sequence[TrainingSearch]
    ) -> None:
        """Prepare; the first call of `order` fits the model.

        Args:
            name: The name of the model, one of `MODELS`.
            entry: The operator.
            problem: The problem to predict for.
            searches: The searches to learn from; at least one.
        """
        self._name, self._searches = name, tuple(searches)
        self._gaps = [problem_gap(entry, one.searched, problem) for one in searches]
        self._fitted: dict[bool, Fitted] = {}

    def order(self, rows: Sequence[Features], *, compiled: bool) -> list[int]:
        """Return the indices of configs of the problem, the most promising first."""
        if compiled not in self._fitted:
            self._fitted[compiled] = Fitted(
                self._name, training(self._searches, self._gaps, compiled=compiled)
            )
        found = self._fitted[compiled].order(rows)
        return [int(place) for place in np.argsort(found, kind="stable")]

    def best_us(self, floor_us: float) -> float:
        """Estimate the time of the problem's best config, microseconds.

        It is the problem's floor times the ratio of best time to floor in the nearest searched
        problems, but at least the least time of all searches: a tiny problem takes as long as a
        launch, whatever its floor.
        """
        least = min(float(one.times_us.min()) for one in self._searches)
        near = sorted(zip(self._gaps, self._searches, strict=True), key=lambda pair: pair[0])
        excess = [one.excess for _, one in near[:NEIGHBOURS]]
        return max(least, floor_us * math.exp(float(np.median(excess))))


def problem_gap(entry: Entry, searched: Searched, problem: Problem) -> float:
    """The distance between a searched problem and another problem, as dispatch measures it."""
    declared = entry.operator.signature
    signature = PassSignature(
        "", declared.dims, declared.dtypes, (), (), options=declared.options,
        packing=declared.packing,
    )
    return problem_distance(signature, *_values(problem), *_values(searched.problem))


def _values(problem: Problem) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(e for _, e in problem.dims), tuple(c for _, c in problem.dtypes)


def features_of(
    entry: Entry, pass_name: str, problem: Problem, gpu: GpuProfile, configs: Sequence[Config]
) -> tuple[list[Features], float]:
    """Return the features of configs that are not compiled, and the problem's floor."""
    features = Featurizer(entry.operator, pass_name, problem, gpu)
    space = entry.space
    return [
        features.of(space.variant(pass_name, c.variant), c, None) for c in configs
    ], features.floor_us
