"""Distributes the input sets of a run over its parts, so that all parts take about equally long.

Each process that runs a part computes the same distribution. The time of a set is estimated from
the threads of its launch, each of which is a fiber on the host layer, and from the definition's
arithmetic. Sets are assigned in descending order of work, each to the part with the least work.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kgen.check.case import Case
from kgen.check.set_limits import Threads
from kgen.errors import SpaceError
from kgen.model.problem import Problem
from kgen.model.set_results import Part
from kgen.operators.base import Operator

# Fitted to the 99 sets of the host run of wkv6 backward `chunk_halving`: a set takes 32 ms, 4.8 us
# for each thread and 25 ns for each operation.
_FLOPS_OF_A_SET = 1.2e6
_FLOPS_OF_A_THREAD = 190.0


def set_costs(
    operator: Operator, pass_name: str, whole: Problem, cases: Sequence[Case],
    threads: Threads | None,
) -> list[float]:
    """Estimate the work of each set, in operations of the definition.

    Args:
        operator: The operator.
        pass_name: `forward` or `backward`.
        whole: The problem at full size.
        cases: The sets.
        threads: Threads, over all CTAs, that the kernel launches for a problem; None: not counted.
    """
    return [
        _cost(operator, pass_name, case.problem(whole, operator.signature), threads)
        for case in cases
    ]


def places_of(part: Part, costs: Sequence[float]) -> frozenset[int]:
    """The indices of the sets of a part; parts are numbered in descending order of work.

    Args:
        part: The part.
        costs: Work of each set of the run.
    """
    bins: list[list[int]] = [[] for _ in range(part.count)]
    # Ordered by work, then by the number of sets, so that sets of no work are spread evenly.
    lightest = [(0.0, 0, index) for index in range(part.count)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        cost, count, index = heapq.heappop(lightest)
        bins[index].append(place)
        heapq.heappush(lightest, (cost + costs[place], count + 1, index))
    order = sorted(lightest, key=lambda one: (-one[0], one[2]))
    return frozenset(bins[order[part.index][2]])


def _cost(
    operator: Operator, pass_name: str, problem: Problem, threads: Threads | None
) -> float:
    try:
        fibers = 0 if threads is None else threads(problem)
    except SpaceError:  # a set that guards refuse
        fibers = 0
    work = operator.cost(pass_name, problem).flops
    return _FLOPS_OF_A_SET + _FLOPS_OF_A_THREAD * fibers + work
