"""Learn from recorded searches to rank configs for a call, as the generated library does.

The features are those that the library computes without a compiler (`kgen/runtime/ranking.py`), so
the library can evaluate the model at a first call. docs/decisions/0045 has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kgen.catalogue import Catalogue, Entry
from kgen.emit import LoadedLibrary
from kgen.model.problem import Problem
from kgen.predict.observations import Searched, read_searches
from kgen.predict.training import relatives
from kgen.predict.trees import Ensemble, Floats, Growth, fit_trees
from kgen.runtime.adaptation import named_values, with_values
from kgen.runtime.families import Instance, family_call
from kgen.runtime.problems import contiguous_call
from kgen.runtime.ranking import Ranking, Tree, Winner, features_of

GROWTH = Growth(trees=150, depth=4, rate=0.1, ridge=10.0)
LEAST_CONFIGS = 3  # fewest configs of a problem that is used for learning
LEAST_RIVALS = 2  # fewest configs of a search whose fastest config counts as a winner
LEAST_PROBLEMS = 5  # fewest problems, including the family's; models from fewer were not judged
_SLOWEST = math.log(4)  # ln(slowdown) is clipped here: slower configs only count as slow
_FADE = 0.5  # ln(slowdown) at which a config's weight is 1/e of the best config's
_LEAST_WEIGHT = 0.1  # added to every weight, so that slow configs count, too
_MOST_WEIGHT = 60.0  # largest weight of all configs of a problem together
_DIGITS = 5  # digits of each number that is written


@dataclass(frozen=True)
class Sample:
    """The recorded configs of one problem.

    Attributes:
        operator: The operator.
        problem: The problem.
        configs: The configs, as they are written in rows.
        features: The features of each config.
        slowdowns: [n] ln(time / shortest time of the problem).
    """

    operator: str
    problem: Problem
    configs: tuple[str, ...]
    features: tuple[Mapping[str, float], ...]
    slowdowns: Floats


def rankings(
    library: LoadedLibrary, catalogue: Catalogue, entry: Entry
) -> dict[str, dict[str, Ranking]]:
    """Learn the models of an operator.

    Args:
        library: The library with the records, and with the families that evaluate features.
        catalogue: The catalogue, which has the other operators of the family.
        entry: The operator.
    Returns:
        The models by GPU and pass; those with too few searched problems are left out.
    """
    found: dict[str, dict[str, Ranking]] = {}
    for gpu in library.tuned(entry.operator.name):
        if gpu.arch == "host":
            continue
        for passed in entry.operator.signature.passes:
            known = samples(library, catalogue, entry, passed.name, gpu)
            if sum(len(one.configs) >= LEAST_CONFIGS for one in known) >= LEAST_PROBLEMS:
                found.setdefault(gpu.name, {})[passed.name] = ranking_from(known)
    return found


def samples(
    library: LoadedLibrary, catalogue: Catalogue, entry: Entry, pass_name: str, gpu: Any
) -> list[Sample]:
    """Read the recorded searches of a pass, of an operator and the others of its family.

    The searches are those on the GPU itself and on other GPUs of its architecture. A sample has
    times relative to the best time of its problem; on an H100 and an H200 these are very similar.

    Args:
        library: The library with the records.
        catalogue: The catalogue, which has the other operators of the family.
        entry: The operator.
        pass_name: `forward` or `backward`.
        gpu: The GPU, as an object of the library.
    """
    found: list[Sample] = []
    # The order is the same for all operators of a family, so that they learn the same model.
    for each in sorted((entry, *relatives(catalogue, entry)), key=lambda e: e.operator.name):
        if (library.folder / each.operator.name / "families.py").exists():
            searches = sorted(read_searches(each, library.folder.parent),
                              key=lambda searched: searched.gpu.name == gpu.name)
            found += (
                one for searched in searches
                if searched.pass_name == pass_name and searched.gpu.arch == gpu.arch
                for one in _sample(library, searched, gpu)
            )
    return found


def _sample(library: LoadedLibrary, searched: Searched, gpu: Any) -> Iterator[Sample]:
    """The sample of a problem; none if too few of its configs belong to families."""
    passed = library.passed(searched.operator, searched.pass_name)
    families = passed.tables.families()
    dims, choices = dict(searched.problem.dims), dict(searched.problem.dtypes)
    call = family_call(contiguous_call(passed.signature, dims), choices.items(), gpu.facts)
    configs: list[str] = []
    rows: list[Mapping[str, float]] = []
    times: list[float] = []
    for seen in searched.observations:
        family = families.get(seen.config.variant)
        values = None if family is None else named_values(family, seen.config.label)
        if family is not None and values is not None:
            configs.append(Instance(family, values).config)
            rows.append(features_of(
                family, values, with_values(call, family, values), dims, choices))
            times.append(seen.median_us)
    if len(rows) >= LEAST_RIVALS:
        slowdowns = np.log(np.array(times) / searched.best_us)
        yield Sample(searched.operator, searched.problem, tuple(configs), tuple(rows), slowdowns)


def ranking_from(known: Sequence[Sample], growth: Growth = GROWTH) -> Ranking:
    """Learn a model. The weight of a problem grows with its number of configs; fast configs weigh
    more.

    The fastest config of each problem is a winner. If a problem has several searches, the last one
    counts: samples of the GPU itself come after those of other GPUs.
    """
    winners = {(one.operator, one.problem): _winner(one) for one in known}
    known = [one for one in known if len(one.configs) >= LEAST_CONFIGS]
    names = sorted({name for one in known for row in one.features for name in row})
    places = {name: place for place, name in enumerate(names)}
    rows = np.zeros((sum(len(one.features) for one in known), len(names)))
    for at, row in enumerate(row for one in known for row in one.features):
        for name, value in row.items():
            rows[at, places[name]] = value
    weights = np.concatenate([_weights(one.slowdowns) for one in known])
    targets = np.minimum(np.concatenate([one.slowdowns for one in known]), _SLOWEST)
    fitted = fit_trees(rows, targets, weights / weights.mean(), growth)
    return _as_ranking(fitted, names, len(known), winners.values())


def _winner(one: Sample) -> Winner:
    return Winner(one.operator, one.configs[int(one.slowdowns.argmin())],
                  tuple(extent for _, extent in one.problem.dims),
                  tuple(choice for _, choice in one.problem.dtypes))


def _weights(slowdowns: Floats) -> Floats:
    weights: Floats = np.exp(-slowdowns / _FADE) + _LEAST_WEIGHT
    weights *= min(len(weights), _MOST_WEIGHT) / float(weights.sum())
    return weights


def _as_ranking(
    fitted: Ensemble, names: Sequence[str], problems: int, winners: Iterable[Winner]
) -> Ranking:
    """Convert an ensemble to the library's type. Thresholds keep all digits."""
    trees = tuple(
        Tree(tuple(names[place] for place in tree.features.tolist()),
             tuple(tree.thresholds.tolist()),
             tuple(float(f"{value:.{_DIGITS}g}") for value in tree.values.tolist()))
        for tree in fitted.trees
    )
    return Ranking(problems, float(f"{fitted.base:.{_DIGITS}g}"), trees, tuple(winners))
