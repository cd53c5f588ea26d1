"""Random untuned problems, with extents of known problems or near them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Dim, Signature

# Beside the known extents: the least ones, odd ones, and one past a power of two.
RAGGED = (1, 2, 3, 17, 67, 129)
# A known extent is drawn as it is, or with this added: what is divisible by 8 no longer is.
STEPS = (0, 0, 0, -1, 1, 5)


def drawn_problems(
    signature: Signature, known: Sequence[Problem], count: int, seed: int
) -> Iterator[Problem]:
    """Draw distinct problems; the same for the same arguments.

    Every field is drawn by itself: dtypes and options of all that the signature allows, extents
    from those of the known problems, beside them, and from `RAGGED`.

    Args:
        signature: The signature of the operator.
        known: Problems whose extents are worth a kernel, such as a population's.
        count: How many; fewer if there are not as many.
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
