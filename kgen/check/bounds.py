"""The bound on the errors of each output, derived from the errors of the definition itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kgen.check.precision import floor_of, torch_dtype
from kgen.errors import InexactDefinitionError
from kgen.model.dtypes import DType
from kgen.model.problem import Problem
from kgen.model.signature import Pass

LARGEST_BOUND = 0.5
"""A larger bound would let wrong outputs pass, so a case that needs one is a mistake."""

_WIDER = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit on |y - y64| / scale.

    Attributes:
        bound: Twice `loss`, plus the floor of the output's dtype.
        loss: The largest scaled error of the definition itself.
        eager_error: The error of the definition run in the problem's dtypes; differs from
            `loss` where that run leaves its dtype's range.
    """

    bound: float
    loss: float
    eager_error: float


def combine(
    losses: Mapping[str, tuple[float, float]],
    pool: Mapping[str, Bound],
    pass_: Pass,
    problem: Problem,
    what: str,
    rounding: DType | None = None,
) -> dict[str, Bound]:
    """Compute the bounds of an input set from its losses and those of the pool.

    Args:
        losses: Per output (eager, ranged) as in `Evaluation`, largest over the slabs.
        pool: Bounds of the problem's ordinary inputs; empty while they are being made.
        pass_: Declares the results.
        problem: Gives their dtypes.
        what: Name of the inputs in error messages.
        rounding: The dtype that operands of products may be rounded to; its eps is added to the
            floor.
    Raises:
        InexactDefinitionError: If a bound would exceed `LARGEST_BOUND`.
    """
    bounds: dict[str, Bound] = {}
    for t in pass_.results:
        eager, ranged = losses[t.name]
        loss = min(eager, ranged)
        if t.name in pool:
            loss = max(loss, pool[t.name].loss)
        bound = 2 * loss + floor_of(torch_dtype(problem.dtype(t.dtype).torch))
        bound += rounding.eps if rounding is not None else 0.0
        if not bound <= LARGEST_BOUND:
            raise InexactDefinitionError(
                f"{what}: the definition itself loses {loss:.3g} of the scale of '{t.name}'\n"
                f"  eager in the problem's dtypes {eager:.3g}, with fp32's range {ranged:.3g}; "
                f"a bound above {LARGEST_BOUND} would tell nothing\n"
                "  give the operator a `scale` that knows its cancellation, or milder inputs"
            )
        bounds[t.name] = Bound(bound, loss, eager if math.isfinite(eager) else loss)
    return bounds


def widened(bounds: Mapping[str, Bound]) -> dict[str, Bound]:
    """Widen the bounds of a set whose errors do not average out.

    - If an input is 0, most terms of an output vanish, and the output's scale with them. The
      rounding of an exponent, which the other terms would hide, then shows in the remaining terms.
    - Equal rows round alike, so the errors of a sum over them add up.
    - If inputs are equal, sums of their products are sums of squares. These grow with the number of
      terms instead of its square root, and so do their rounding errors.
    - An exponential of a large weight has the rounding error of its exponent.

    Such sets are meant to find kernels that omit a result or use another row. The error of such a
    kernel is as large as the result.
    """
    return {
        name: replace(one, bound=min(_WIDER * one.bound, LARGEST_BOUND))
        for name, one in bounds.items()
    }
