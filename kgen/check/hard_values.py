"""Input values that are tried for every operator, in addition to the operator's own cases.

A linear input is one in which all outputs are linear; `linear_in` finds them with the definition.
Other inputs, such as decays, have a range of their own.

`large`: ordinary inputs times a power of two, chosen so that sums and squares stay within the
dtype's range. Only for operators that have no such case of their own.

`large and small`, `small and large`: linear inputs are alternately multiplied and divided by 2^16
(2^7 in fp16), and a quarter of their elements is 0 or -0. The product of two of them stays within
the range. So a kernel that clamps one input, or drops its small values, is detected. Scalars in
which outputs are linear are above 1 in these sets. Packed sequences begin at multiples of a tile,
which random boundaries rarely do.

`first zero`, `last zero`: the first, or the last, linear input is 0, as is the gradient of an
output that the loss does not use, or the gradient of a state. `zero weights`: linear inputs without
the slab dim are 0, in operators without steps. `large weights`: weights (inputs without the slab
dim), linear or not, are ordinary ones times 64 if these have both signs, and so no range of their
own.

In an operator's own cases every second exact zero of the other inputs becomes -0, and every second
infinity 100 or -100: where an exponential overflows, a kernel may go wrong before infinity.

`powers of two`: every value is rounded toward zero to a power of two, so that many are equal, and
many exactly 1. In each input, linear or not, a quarter of the lines along the last dim is 0.
Weights are equal along their last dim, and two of every four rows are equal.

`nan elsewhere`: one NaN in each input in which the operator's own case `nonfinite` has none; not in
weights (inputs without the slab dim), because their NaN reaches every row and hides all others.
`nan in weights`: a NaN, an Inf and a -Inf in each linear weight. Other weights, such as decays, get
none: definitions differ in what a NaN in a decay does.

`nan with CASE`: one of the operator's own cases, with a NaN in one linear input that is no weight;
another one for each case. A kernel may compute a row with NaN in another way, which must be right
for such values as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kgen.check.case import NORMAL, Case
from kgen.check.lone_values import LONE
from kgen.check.row_values import ROW_SETS, SIGNS_BY_ROWS
from kgen.check.run_values import RUNS
from kgen.check.shaped_values import SHAPED
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Packing, Pass
from kgen.operators.base import Operator

LARGE = "large"
LARGE_CASES = (LARGE, "huge")
UNEQUAL = ("large and small", "small and large")
ZEROS = ("first zero", "last zero")
ZERO_WEIGHTS = "zero weights"
LARGE_WEIGHTS = "large weights"
NANS = ("nan elsewhere", "nan in weights")
NAN_WITH = "nan with "
NONFINITE = "nonfinite"
POSITIVE = "positive"
POWERS = "powers of two"

# Extents of the problem on which `linear_in` tests linearity. Three steps would be too few: in
# packed sequences of one or two steps, an output contains at most one decay and is linear in it.
_EXTENT, _STEPS = 3, 16
_LINEAR = 1e-9  # largest difference between float64 outputs, relative to their magnitude
_ZEROS = 4  # one element in four is 0 or -0
_LARGE = 2.0**14
_SMALL = 2.0**-3  # a row of 64 standard normal values times 2^-3 has a norm of about 1
_OPPOSITE = -1.375  # replaces a scalar; -1 would not reveal that a kernel squares it
LARGE_SCALAR = 2.75


def base_of(operator: Operator, case: Case) -> str:
    """The operator's own case that a set's values are drawn from."""
    own = (
        LARGE, *UNEQUAL, *ZEROS, ZERO_WEIGHTS, LARGE_WEIGHTS, *NANS, *ROW_SETS, SIGNS_BY_ROWS,
        POWERS, RUNS, *SHAPED, *LONE,
    )
    name = case.name.removeprefix(NAN_WITH)
    if name in operator.cases or name not in own:
        return name
    if case.name in NANS and NONFINITE in operator.cases:
        return NONFINITE
    if case.name == SIGNS_BY_ROWS and POSITIVE in operator.cases:
        return POSITIVE
    return NORMAL


def with_hard_values(
    case: Case,
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    slab_dim: str | None,
    packing: Packing | None,
) -> dict[str, Tensor]:
    """Turn the values that `base_of` draws into those of a set.

    Args:
        case: The set's case; its name is `large`, `zero weights`, `large weights` or one of
            `UNEQUAL`, `ZEROS` and `NANS`.
        drawn: The inputs, by name.
        pass_, problem: The pass, and the problem at the extents of the set.
        linear: The linear inputs, from `linear_in`.
        slab_dim, packing: The operator's.
    """
    if case.name == LARGE:
        return {name: _enlarged(value) for name, value in drawn.items()}
    if case.name in NANS:
        weights = weights_of(pass_, slab_dim)
        chosen = linear & weights if case.name == NANS[1] else drawn.keys() - weights
        values = (torch.nan, torch.inf, -torch.inf) if case.name == NANS[1] else (torch.nan,)
        return dict(_with_special(drawn, chosen, values))
    if case.name == ZERO_WEIGHTS:
        weights = linear & weights_of(pass_, slab_dim)
        return {n: torch.zeros_like(v) if n in weights else v for n, v in drawn.items()}
    if case.name == LARGE_WEIGHTS:
        weights = weights_of(pass_, slab_dim)
        return {n: v * 64 if n in weights and _has_both_signs(v) else v for n, v in drawn.items()}
    if case.name in ZEROS:
        place = -ZEROS.index(case.name)
        silent = [name for name in drawn if name in linear][place : place + 1 or None]
        return {n: torch.zeros_like(v) if n in silent else v for n, v in drawn.items()}
    up = _up(pass_, problem)
    found = dict(drawn)
    for place, name in enumerate(name for name in drawn if name in linear):
        is_up = (place % 2 == 0) == (case.name == UNEQUAL[0])
        found[name] = _with_zeros(drawn[name] * 2.0 ** (up if is_up else -up), case.seed + place)
    if packing is not None and packing.offsets in found:
        found[packing.offsets] = _at_tiles(found[packing.offsets], case.name == UNEQUAL[1])
    return found


def with_one_nan(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    linear: frozenset[str],
    slab_dim: str | None,
    place: int,
) -> dict[str, Tensor]:
    """Turn the inputs of an operator's own case into those of `nan with CASE`.

    Args:
        drawn, pass_, linear, slab_dim: As in `with_hard_values`.
        place: Chooses the input that gets the NaN, so that the cases take turns.
    """
    found = with_nearby_values(drawn, linear)
    rows = [name for name in drawn if name in linear - weights_of(pass_, slab_dim)]
    chosen = rows[place % len(rows) : place % len(rows) + 1] if rows else []
    with_nan = {name: found[name] for name in chosen}
    return found | dict(_with_special(with_nan, chosen, (torch.nan,)))


def with_powers_of_two(
    case: Case,
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    slab_dim: str | None,
    row_dims: Collection[str],
    steps: Collection[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `POWERS`.

    Args:
        case: The set's case.
        drawn, pass_, slab_dim: As in `with_hard_values`.
        row_dims: The slab dim and the dims that repeat the work.
        steps: The serial dims. An input whose last dim is one of these or of `row_dims` (a norm,
            for example) may be a divisor, so it gets no zeros.
    """
    weights = weights_of(pass_, slab_dim)
    found = dict(drawn)
    for place, t in enumerate(pass_.inputs):
        value = drawn[t.name]
        if not value.is_floating_point() or value.numel() == 0:
            continue
        value = _power_below(value)
        if t.name in weights:
            value = value[..., :1].expand_as(value).contiguous()
        elif len(t.dims) > 1 and t.dims[-1] not in (*row_dims, *steps):
            lines = _with_zeros(torch.ones_like(value[..., :1]), case.seed + place)
            value = torch.where(lines == 0, torch.zeros_like(value), value)
        for axis, dim in enumerate(t.dims[:-1]):
            if dim in row_dims:
                index = torch.arange(value.shape[axis], device=value.device)
                value = value.index_select(axis, index - (index % 4 == 1).long())
        found[t.name] = value
    return found


def _power_below(value: Tensor) -> Tensor:
    """Round toward zero to a power of two of the same sign; a subnormal becomes 0."""
    word, exponents = {
        torch.float32: (torch.int32, -(2**23)),
        torch.float16: (torch.int16, -(2**10)),
        torch.bfloat16: (torch.int16, -(2**7)),
    }[value.dtype]
    return (value.contiguous().view(word) & exponents).view(value.dtype)


def enlarged_by(case: Case, pass_: Pass, problem: Problem) -> float:
    """The factor between the inputs of a set and those of an ordinary one; at least 1."""
    if case.name in UNEQUAL:
        return 2.0 ** _up(pass_, problem)
    return _LARGE if case.name.removeprefix(NAN_WITH) in LARGE_CASES else 1.0


def _up(pass_: Pass, problem: Problem) -> int:
    """The exponent of the factor of `UNEQUAL`."""
    is_fp16 = any(problem.dtype(t.dtype).torch == "float16" for t in pass_.tensors)
    return 7 if is_fp16 else 16


def few_elements(operator: Operator, problem: Problem) -> Problem:
    """The problem with a few elements in each dim, enough to test properties of the definition."""
    signature = operator.signature
    implied = signature.implied(dict(problem.dtypes))
    few = {
        dim.name: max(dim.smallest, _STEPS if dim.name in operator.serial_dims else _EXTENT)
        for dim in signature.dims
        if implied is None or dim.name != implied[0]
    }
    return with_dims(problem, few, signature)


def with_nearby_values(
    drawn: Mapping[str, Tensor], linear: frozenset[str]
) -> dict[str, Tensor]:
    """In the inputs that are not linear, turn every second 0 into -0 and every second +-Inf into
    +-100.
    """
    found = dict(drawn)
    for name, value in drawn.items():
        if name not in linear and value.is_floating_point():
            zeros, infinite = value == 0, value.isinf()
            changed = torch.where(_every_second(zeros), -torch.zeros_like(value), value)
            found[name] = torch.where(
                _every_second(infinite), value.sign() * torch.full_like(value, 100.0), changed
            )
    return found


def _every_second(chosen: Tensor) -> Tensor:
    """Select the second, fourth, sixth ... of the true elements, in row-major order."""
    return chosen & (chosen.reshape(-1).cumsum(0).view(chosen.shape) % 2 == 0)


def with_shared_values(
    drawn: Mapping[str, Tensor], pass_: Pass, linear: frozenset[str], is_serial: bool,
    few_steps: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give inputs of one shape and dtype the values of the first of them.

    A linear input may have any values. Other inputs may need values of a certain kind, such as a
    decay below 0 or the vector of a rotation. So they share values in two cases only: in an
    operator without steps, if the signs and magnitudes of both inputs are alike; and with few
    steps, in which no recurrence grows far. In the second case the shared values are made small: a
    state that each step multiplies by a product of equal rows would grow by the square of their
    norm, and so would the rounding errors of a correct kernel.

    Returns:
        The values; and, by name of an input, the input whose memory it shares.
    """
    found, of = dict(drawn), dict[str, str]()
    for place, t in enumerate(pass_.inputs):
        value = drawn[t.name]
        if t.in_out or not value.is_floating_point() or value.numel() == 0:
            continue
        for other in pass_.inputs[:place]:
            if other.name in of or other.in_out or drawn[other.name].dtype != value.dtype:
                continue
            if drawn[other.name].shape != value.shape:
                continue
            may_share = few_steps if is_serial else _are_alike(drawn[other.name], value)
            if t.name in linear or may_share:
                found[t.name], of[t.name] = drawn[other.name], other.name
                break
    if is_serial and few_steps:
        for name in {*of, *of.values()}:
            found[name] = found[name] * _SMALL
    return found, of


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may come from one distribution around 0: both have both signs, and their
    mean squares differ by a factor of 4 at most.
    """
    both = [x.double() for x in (one, other)]
    if not all(map(_has_both_signs, both)):
        return False
    first, second = (float(x.square().mean()) for x in both)
    return 0.25 * first <= second <= 4.0 * first


def _has_both_signs(value: Tensor) -> bool:
    return value.is_floating_point() and bool((value > 0).any() and (value < 0).any())


def linear_in(
    operator: Operator,
    pass_: Pass,
    problem: Problem,
    arguments: Mapping[str, float],
    device: torch.device,
) -> frozenset[str]:
    """Return the inputs and scalars in which all outputs of a pass are linear.

    Linear includes affine: f(3 x) - 2 f(2 x) + f(x) = 0, where f maps one input x to the outputs
    and all other inputs are fixed. The definition evaluates f in float64 on a few elements.

    Args:
        operator, pass_, problem: The computation to test.
        arguments: Scalars and options of the definition.
        device: Where to evaluate.
    """
    small = few_elements(operator, problem)
    generator = torch.Generator(device=device).manual_seed(0)
    drawn = operator.make_inputs(pass_.name, small, NORMAL, generator, device)
    inputs = {
        t.name: drawn[t.name].double() if drawn[t.name].is_floating_point() else drawn[t.name]
        for t in pass_.inputs
        if t.name in drawn
    }
    results = [t.name for t in pass_.results]

    def outputs(times: float, name: str) -> list[Tensor]:
        given = {n: t.clone() * times if n == name else t.clone() for n, t in inputs.items()}
        scalars = {n: v * times if n == name else v for n, v in arguments.items()}
        found = operator.definition(pass_.name, given, scalars)
        return [found[result].double() for result in results]

    def is_linear(name: str) -> bool:
        return all(
            bool(((three - 2 * two + one).abs() <= _LINEAR * (one.abs() + three.abs())).all())
            for one, two, three in zip(
                outputs(1.0, name), outputs(2.0, name), outputs(3.0, name), strict=True)
        )

    scalars = [s.name for s in pass_.scalars if s.above is None]
    floating = [name for name, value in inputs.items() if value.is_floating_point()]
    # Multiplying a scalar of 0 changes nothing, so the test replaces it.
    arguments = dict(arguments) | {s: 0.6875 for s in scalars if not arguments[s]}
    with torch.no_grad():
        return frozenset(name for name in (*floating, *scalars) if is_linear(name))


def opposite_of(
    pass_: Pass, scalars: Mapping[str, float], linear: frozenset[str]
) -> dict[str, float]:
    """The scalars; those in which outputs are linear become negative, with a magnitude above 1."""
    return scalars_times(_OPPOSITE, pass_, scalars, linear)


def scalars_times(
    value: float, pass_: Pass, scalars: Mapping[str, float], linear: frozenset[str]
) -> dict[str, float]:
    """The scalars; those in which outputs are linear become `value` times 1, 1 + 1/16, 1 + 2/16 ...
    so that no two are equal.
    """
    changed = [s.name for s in pass_.scalars if s.name in linear]
    return {
        **scalars, **{name: value * (1.0 + place / 16) for place, name in enumerate(changed)}
    }


def _at_tiles(offsets: Tensor, one_each: bool) -> Tensor:
    """Move sequence boundaries to multiples of 64 or, with fewer than 192 steps, of 16.

    Args:
        offsets: The boundaries as drawn.
        one_each: Whether every sequence gets one tile of steps, until no steps are left.
    """
    if offsets.numel() == 0:
        return offsets
    steps = int(offsets[-1])
    tile = 64 if steps >= 192 else 16
    cut = offsets // tile * tile
    if one_each:
        cut = (torch.arange(len(cut), device=cut.device) * tile).clamp_max(steps).to(cut.dtype)
    cut[-1] = steps
    return cut


def _enlarged(value: Tensor) -> Tensor:
    """Multiply by 2^14, or by 2^6 in fp16."""
    if not value.is_floating_point():
        return value
    return value * (2.0**6 if value.dtype == torch.float16 else _LARGE)


def _with_zeros(value: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(device=value.device).manual_seed(seed)
    chosen = torch.randint(
        0, 2 * _ZEROS, value.shape, generator=generator, device=value.device
    )
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    return torch.where(chosen == 0, zero, torch.where(chosen == 1, -zero, value))


def weights_of(pass_: Pass, slab_dim: str | None) -> frozenset[str]:
    """The inputs without the slab dim."""
    return frozenset(t.name for t in pass_.inputs if slab_dim and slab_dim not in t.dims)


def _with_special(
    drawn: Mapping[str, Tensor], chosen: Collection[str], values: Sequence[float]
) -> Iterator[tuple[str, Tensor]]:
    """Replace NaN and Inf by 1, then put each of `values` at one element of each chosen input.

    An input that had nonfinite values as drawn gets no NaN. The places differ between inputs,
    because one NaN may hide the effect of another.
    """
    for place, (name, value) in enumerate(drawn.items()):
        if not value.is_floating_point() or value.numel() == 0:
            yield name, value
            continue
        finite = value.isfinite()
        planted = torch.where(finite, value, torch.ones_like(value)).contiguous()
        first = value.numel() * (2 * place + 1) // (2 * len(drawn))
        wanted = values if name in chosen else ()
        for i, special in reversed(list(enumerate(wanted))):  # the first value is written last
            if not math.isnan(special) or bool(finite.all()):
                at = first + i * value.numel() // len(values)
                planted.view(-1)[at % value.numel()] = special
        yield name, planted
