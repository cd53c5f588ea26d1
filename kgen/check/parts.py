"""Which input sets are tried in which part of a run, so that all parts take about as long.

Every process that runs a part finds the same cut by itself. How long a set takes is estimated: on
the host layer every thread of a launch is a fiber, and each takes what the definition's arithmetic
takes. The largest sets are given out first, each to the part that has least to do.
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
    """How much work sets are, in operations of the definition.

    Args:
        operator: Has the pass.
        pass_name: `forward` or `backward`.
        whole: The problem that the sets are of.
        cases: The sets.
        threads: Of all CTAs for a problem; None: few.
    """
    return [
        _cost(operator, pass_name, case.problem(whole, operator.signature), threads)
        for case in cases
    ]


def places_of(part: Part, costs: Sequence[float]) -> frozenset[int]:
    """The places of the sets of a part; the parts with the most work come first.

    Args:
        part: The part.
        costs: Work of each set of the run.
    """
    bins: list[list[int]] = [[] for _ in range(part.count)]
    # By work, then by how many sets: of sets that cost nothing each part gets some.
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
