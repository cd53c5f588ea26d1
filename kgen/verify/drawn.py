"""Draws random untuned problems, with extents of known problems or close to them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Dim, Signature

# Extents besides the known ones: the smallest, odd ones, and one more than a power of two.
RAGGED = (1, 2, 3, 17, 67, 129)
# Added to a known extent; after a nonzero step, an extent that 8 divides is no longer divisible.
STEPS = (0, 0, 0, -1, 1, 5)


def drawn_problems(
    signature: Signature, known: Sequence[Problem], count: int, seed: int
) -> Iterator[Problem]:
    """Draw distinct problems; the same arguments give the same problems.

    Dtypes and options come from all combinations that the signature allows. Each extent is drawn
    independently: a known problem's, one close to it, or one of `RAGGED`.

    Args:
        signature: The signature of the operator.
        known: Problems whose extents are worth a kernel, such as a population's.
        count: Number of problems; fewer are drawn if there are too few distinct ones.
        seed: The seed of the draws.
    """
    draw = random.Random(seed)
    choices = [tuple(chosen.items()) for chosen in signature.dtype_combinations()]
    extents = {dim.name: _extents(dim, known) for dim in signature.dims}
    drawn: set[Problem] = set()
    for _ in range(20 * count):
        if len(drawn) == count:
            return
        dims = tuple((dim.name, _drawn(dim, extents[dim.name], draw)) for dim in signature.dims)
        problem = with_dims(Problem(dims, draw.choice(choices)), {}, signature)
        if problem not in drawn:
            drawn.add(problem)
            yield problem


def _extents(dim: Dim, known: Sequence[Problem]) -> list[int]:
    return sorted({problem.dim(dim.name) for problem in known})


def _drawn(dim: Dim, extents: Sequence[int], draw: random.Random) -> int:
    if not extents or draw.random() < 0.25:
        extent = draw.choice(RAGGED)
    else:
        extent = draw.choice(extents) + draw.choice(STEPS)
    return max(extent, dim.smallest, 1)
