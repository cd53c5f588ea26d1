"""Choose the training problems of a rule, and the problems that are held out to judge it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations
from math import exp, isqrt, log

from kgen.model.digest import digest_of
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Signature
from kgen.operators.base import Operator

STEP = 4  # ratio of neighbouring grid problems in one dim
REACH = 8  # largest number of steps from an anchor
# Most work of a problem, relative to the largest anchor's: a rule covers the range in use.
MOST_WORK = 2.0
TRIES = 200  # attempts per held-out problem


@dataclass(frozen=True, slots=True)
class Group:
    """Problems that the same compiled kernels can serve; a rule covers one group.

    Attributes:
        dtypes: Dtypes and options, as in a problem.
        constants: (dim, extent) of the dims that are compiled into the kernels.
        anchors: Problems in use: tuned, or given by the user.
    """

    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    anchors: tuple[Problem, ...]

    def free(self, signature: Signature) -> tuple[str, ...]:
        """The dims that vary, in the operator's order."""
        implied = signature.implied(dict(self.dtypes))
        fixed = {name for name, _ in self.constants} | ({implied[0]} if implied else set())
        return tuple(dim.name for dim in signature.dims if dim.name not in fixed)

    @property
    def label(self) -> str:
        """`N=4096,dtype=bf16,...`."""
        return ",".join(f"{name}={value}" for name, value in (*self.constants, *self.dtypes))


def group_problems(anchors: Iterable[Problem], compiled_in: Iterable[str]) -> tuple[Group, ...]:
    """Sort problems into groups.

    Args:
        anchors: The problems.
        compiled_in: Dims that some variant of the pass has as constants.
    """
    fixed = set(compiled_in)
    found: dict[tuple[object, ...], list[Problem]] = {}
    for problem in dict.fromkeys(anchors):
        constants = tuple((name, value) for name, value in problem.dims if name in fixed)
        found.setdefault((problem.dtypes, constants), []).append(problem)
    return tuple(
        Group(
            mine[0].dtypes, tuple((n, v) for n, v in mine[0].dims if n in fixed), tuple(mine)
        )
        for mine in found.values()
    )


def features(group: Group, operator: Operator) -> tuple[tuple[str, ...], ...]:
    """The features that a rule may compare: each varying dim, and the product of the repeated dims.

    The product of the dims that repeat the same work determines the number of blocks.
    """
    free = group.free(operator.signature)
    repeats = tuple(name for name in free if name in operator.repeats)
    singles = tuple((name,) for name in free)
    return (*singles, repeats) if len(repeats) > 1 else singles


def training_problems(
    group: Group, operator: Operator, pass_name: str, count: int
) -> tuple[Problem, ...]:
    """Choose problems around and between a group's anchors.

    First the anchors; then problems halfway between two anchors; then steps from each anchor in one
    dim; then steps up in one dim and down in another, which keep the work constant; then larger
    steps. Problems with far more work than any anchor are excluded.

    Args:
        group: The group.
        operator: The operator.
        pass_name: `forward` or `backward`.
        count: Largest number of problems, anchors included. All anchors are taken.
    """
    allowed = _bound(group, operator, pass_name)
    wanted = chain(_between(group, operator), _around(group, operator))
    chosen = dict.fromkeys(group.anchors)
    for problem in wanted:
        if len(chosen) >= count:
            break
        if problem not in chosen and allowed(problem):
            chosen[problem] = None
    return tuple(chosen)


def held_out_problems(
    group: Group, operator: Operator, pass_name: str, training: Sequence[Problem], count: int
) -> tuple[Problem, ...]:
    """Choose problems that are not in training, between its smallest and largest extents.

    Every second problem has ragged extents. The choice is deterministic.

    Args:
        group: The group.
        operator: The operator.
        pass_name: `forward` or `backward`.
        training: The group's training problems.
        count: Largest number of problems.
    """
    allowed = _bound(group, operator, pass_name)
    dice = random.Random(digest_of([pass_name, group.label]))
    ranges = {
        name: (min(p.dim(name) for p in training), max(p.dim(name) for p in training))
        for name in group.free(operator.signature)
    }
    chosen: dict[Problem, None] = {}
    for _ in range(TRIES * count):
        if len(chosen) == count:
            break
        ragged = len(chosen) % 2 == 1
        extents = {}
        for name, (low, high) in ranges.items():
            drawn = round(exp(dice.uniform(log(max(low, 1)), log(max(high, 1)))))
            rounded = drawn | 1 if ragged else _rounded(drawn)
            extents[name] = min(max(rounded, low), high)
        problem = with_dims(training[0], extents, operator.signature)
        if problem not in training and problem not in chosen and allowed(problem):
            chosen[problem] = None
    return tuple(chosen)


def _rounded(extent: int) -> int:
    """Round to a multiple of a quarter of the largest power of two that is not larger."""
    step = max(1, 1 << max(0, extent.bit_length() - 3))
    return extent // step * step


def _bound(group: Group, operator: Operator, pass_name: str) -> Callable[[Problem], bool]:
    """A filter for problems whose bytes and operations do not exceed an anchor's by too much."""
    costs = [operator.cost(pass_name, anchor) for anchor in group.anchors]
    most_bytes = MOST_WORK * max(cost.bytes for cost in costs)
    most_flops = MOST_WORK * max(cost.flops for cost in costs)

    def allowed(problem: Problem) -> bool:
        cost = operator.cost(pass_name, problem)
        return cost.bytes <= most_bytes and cost.flops <= most_flops

    return allowed


def _between(group: Group, operator: Operator) -> Iterator[Problem]:
    free = group.free(operator.signature)
    for one, other in combinations(group.anchors, 2):
        middle = {name: isqrt(one.dim(name) * other.dim(name)) for name in free}
        yield with_dims(one, middle, operator.signature)


def _around(group: Group, operator: Operator) -> Iterator[Problem]:
    signature = operator.signature
    free = group.free(signature)
    least = {dim.name: max(dim.smallest, 1) for dim in signature.dims}
    for factor in (STEP**power for power in range(1, REACH + 1)):
        moves: list[dict[str, bool]] = [{n: up} for n in free for up in (False, True)]
        moves += [{up: True, down: False} for up, down in permutations(free, 2)]
        for move in moves:
            for anchor in group.anchors:
                extents = {
                    name: anchor.dim(name) * factor if up else anchor.dim(name) // factor
                    for name, up in move.items()
                }
                if all(value >= least[name] for name, value in extents.items()):
                    yield with_dims(anchor, extents, signature)
