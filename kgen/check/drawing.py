"""Draws the inputs of a case and lays them out in guarded buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kgen.check.buffers import Guarded, contiguous_strides, far, guarded
from kgen.check.case import (
    APART,
    EXPANDED,
    FARS,
    NORMAL,
    ONE_GAPS,
    OVERLAPPING,
    REPEATED,
    SHARED,
    VIEWS,
    Case,
    Layout,
)
from kgen.check.hard_values import (
    NAN_WITH,
    NONFINITE,
    POWERS,
    base_of,
    weights_of,
    with_hard_values,
    with_nearby_values,
    with_one_nan,
    with_powers_of_two,
    with_shared_values,
)
from kgen.check.layouts import (
    expanded_strides,
    far_strides,
    gap,
    long_dim,
    one_gap,
    overlapping_strides,
    padded,
    permuted,
    repeated_dims,
    repeated_strides,
    side_by_side,
    write,
)
from kgen.check.lone_values import (
    ONE_STEP,
    ONES,
    with_kinds_of_decays,
    with_one_step,
    with_ones,
)
from kgen.check.precision import torch_dtype
from kgen.check.row_values import (
    BY_ROWS,
    ROW_SETS,
    SIGNS_BY_ROWS,
    cut,
    with_row_signs,
    with_row_values,
    with_special_rows,
)
from kgen.check.run_values import RUNS, cut_for_runs, with_runs
from kgen.check.shaped_values import (
    ALIKE,
    OPPOSITE,
    SHAPED,
    SHAPES,
    cut_to_last,
    cut_to_one,
    with_opposites,
    with_shapes,
    with_steps_alike,
)
from kgen.check.sizes import SHARED_STEPS
from kgen.errors import VerifyError
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.model.signature import Tensor as Declared
from kgen.operators.base import Operator


def drawn_inputs(
    operator: Operator,
    pass_: Pass,
    case: Case,
    problem: Problem,
    linear_names: Callable[[], frozenset[str]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Draw the inputs of a case, by name.

    Args:
        operator: Its `make_inputs` draws the values.
        pass_: One of the operator's passes.
        case: Its name selects the values.
        problem: The problem at the extents of the set.
        linear_names: Returns the inputs and scalars in which all outputs are linear; called only
            if the case needs them.
        device: Where kernels run.
    Raises:
        VerifyError: If `make_inputs` contradicts the signature.
    """
    generator = torch.Generator(device=device).manual_seed(case.seed)
    name = base_of(operator, case)
    drawn = operator.make_inputs(pass_.name, problem, name, generator, device)
    for t in pass_.inputs:
        value = drawn.get(t.name)
        shape, dtype = problem.shape(t.dims), torch_dtype(problem.dtype(t.dtype).torch)
        if value is None or tuple(value.shape) != shape or value.dtype != dtype:
            got = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise VerifyError(
                f"{operator.name}: make_inputs gives {got} for "
                f"'{t.name}', the signature declares {dtype} {shape}"
            )
    drawn = {t.name: drawn[t.name] for t in pass_.inputs}
    rows = _row_dims(operator, pass_)
    is_serial = bool(operator.serial_dims)
    packing = operator.signature.packing
    if case.name == name:  # ordinary values, or an operator's own case
        if name not in (NORMAL, NONFINITE):
            drawn = with_nearby_values(drawn, linear_names())
    elif case.name.startswith(NAN_WITH):
        place = operator.cases.index(name) + 1  # + 1: r, not gy, has it in wkv's `extreme_decay`
        drawn = with_one_nan(drawn, pass_, linear_names(), operator.slab_dim, place)
    elif case.name == BY_ROWS:
        drawn = with_row_values(drawn, pass_, problem, linear_names(), rows, is_serial)
    elif case.name in ROW_SETS:
        drawn = with_special_rows(
            case.name, drawn, pass_, problem, linear_names(), rows, is_serial
        )
    elif case.name == POWERS:
        drawn = with_powers_of_two(
            case, drawn, pass_, operator.slab_dim, rows, operator.serial_dims
        )
    elif case.name == SIGNS_BY_ROWS:
        drawn = with_row_signs(drawn, pass_, problem, linear_names(), rows)
    elif case.name == SHAPES:
        drawn = with_shapes(drawn, pass_, problem, linear_names(), rows, is_serial)
        if is_serial:
            drawn = with_kinds_of_decays(
                drawn, pass_, problem, linear_names(), rows, operator.serial_dims
            )
    elif case.name == ALIKE:
        steps = operator.serial_dims or rows[:1]  # without steps, rows of the slab dim are equal
        others = rows if operator.serial_dims else []
        drawn = with_steps_alike(drawn, pass_, problem, linear_names(), others, steps)
    elif case.name == OPPOSITE:
        shared, of = _shared(operator, pass_, problem, drawn, linear_names)
        drawn = with_opposites(drawn, shared, of, pass_, problem, rows)
    elif case.name in (ONES, ONE_STEP):
        weights = weights_of(pass_, operator.slab_dim)
        if packing is not None:  # a state per sequence has no slab dim, but is no weight
            weights -= {t.name for t in pass_.inputs if packing.sequences in t.dims}
        steps = operator.serial_dims
        if case.name == ONES:
            drawn = with_ones(drawn, pass_, linear_names(), rows, steps, weights)
        else:
            drawn = with_one_step(
                drawn, pass_, problem, linear_names(), rows, steps, weights
            )
    elif case.name == RUNS:
        drawn = with_runs(drawn, pass_, problem, rows, operator.serial_dims)
        if packing is not None and packing.offsets in drawn:
            drawn[packing.offsets] = cut_for_runs(drawn[packing.offsets])
    else:
        drawn = with_hard_values(
            case, drawn, pass_, problem, linear_names(), operator.slab_dim, packing
        )
    if case.name in (*ROW_SETS[1:], POWERS) and packing is not None and packing.offsets in drawn:
        drawn[packing.offsets] = cut(case.name, drawn[packing.offsets])
    if case.name in SHAPED[:2] and packing is not None and packing.offsets in drawn:
        drawn[packing.offsets] = cut_to_one(case.name, drawn[packing.offsets])
    if case.name == ONES and packing is not None and packing.offsets in drawn:
        drawn[packing.offsets] = cut_to_last(drawn[packing.offsets])
    if case.layout == SHARED:
        drawn, _ = _shared(operator, pass_, problem, drawn, linear_names)
    if case.layout == EXPANDED:
        drawn = {
            t.name: _repeated(drawn[t.name], long_dim(t, tuple(drawn[t.name].shape), place))
            if case.lays_out(t.name)
            else drawn[t.name]
            for place, t in enumerate(pass_.inputs)
        }
    if case.layout in REPEATED:
        for t in pass_.inputs:
            if case.lays_out(t.name):
                for dim in repeated_dims(t, case.layout):
                    drawn[t.name] = _repeated(drawn[t.name], dim)
    if case.layout == OVERLAPPING:
        drawn = {
            t.name: drawn[t.name].contiguous().as_strided(
                drawn[t.name].shape,
                overlapping_strides(t, tuple(drawn[t.name].shape), drawn[t.name].element_size()),
            ).contiguous()
            for t in pass_.inputs
        }
    return drawn


def _row_dims(operator: Operator, pass_: Pass) -> list[str]:
    """The slab dim and the dims that repeat the work, as far as the pass's inputs have them."""
    slab = () if operator.slab_dim is None else (operator.slab_dim,)
    candidates = dict.fromkeys((*slab, *operator.repeats))
    return [dim for dim in candidates if any(dim in t.dims for t in pass_.inputs)]


def _shared(
    operator: Operator,
    pass_: Pass,
    problem: Problem,
    drawn: Mapping[str, Tensor],
    linear_names: Callable[[], frozenset[str]],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    few_steps = all(problem.dim(name) <= SHARED_STEPS for name in operator.serial_dims)
    return with_shared_values(
        drawn, pass_, linear_names(), bool(operator.serial_dims), few_steps
    )


def _repeated(value: Tensor, dim: int | None) -> Tensor:
    """Repeat the first slice along a dim, as a stride of 0 does; None: return the value as it is.
    """
    return value if dim is None else value.narrow(dim, 0, 1).expand_as(value).contiguous()


def demand_values(
    operator: Operator, pass_: Pass, case: Case, drawn: Mapping[str, Tensor]
) -> None:
    """Refuse ordinary inputs that are all zero or all NaN: they do not distinguish kernels.

    Raises:
        VerifyError: If the inputs are all zero or all NaN.
    """
    # A trial's fresh set is not checked: it is drawn like the others, and the check synchronises.
    if case.name != NORMAL or case.fresh:
        return
    values = [drawn[t.name] for t in pass_.inputs if drawn[t.name].is_floating_point()]
    values = [value for value in values if value.numel() > 0]
    for what, is_vacuous in (("NaN", torch.isnan), ("zero", _is_zero)):
        if values and all(bool(is_vacuous(value).all()) for value in values):
            raise VerifyError(
                f"{operator.name}: make_inputs gives nothing but {what} for the case "
                f"'{NORMAL}', which every kernel passes or none\n"
                "  next: draw random values there"
            )


def laid_out(
    operator: Operator,
    pass_: Pass,
    case: Case,
    problem: Problem,
    drawn: Mapping[str, Tensor],
    linear_names: Callable[[], frozenset[str]],
    device: torch.device,
) -> dict[str, Guarded]:
    """Copy the inputs of a case into guarded memory, in its layout.

    Args:
        operator: The operator that drew them.
        pass_: One of the operator's passes.
        case: Its layout says how the inputs lie in memory.
        problem: The problem at the extents of the set.
        drawn: The inputs by name, in the order of the pass.
        linear_names: As in `drawn_inputs`.
        device: Where kernels run.
    """
    together: dict[str, Guarded] = {}
    of: dict[str, str] = {}
    if case.layout == VIEWS:
        together = side_by_side(pass_.inputs, drawn, device)
        for name, buffer in together.items():
            write(buffer.tensor, drawn[name])
    elif case.layout == SHARED:
        _, of = _shared(operator, pass_, problem, drawn, linear_names)
    inputs: dict[str, Guarded] = {}
    for place, t in enumerate(pass_.inputs):
        layout = case.layout if case.lays_out(t.name) else "contiguous"
        if t.name in together:
            inputs[t.name] = together[t.name]
        elif t.name in of:
            inputs[t.name] = inputs[of[t.name]]
        else:
            inputs[t.name] = _laid_out(t, drawn[t.name], layout, place, device)
    return inputs


def _laid_out(
    declared: Declared, value: Tensor, layout: Layout, place: int, device: torch.device
) -> Guarded:
    """Copy an input into a guarded buffer.

    Args:
        declared: The input's declaration.
        value: The input's value.
        layout: The buffer's layout.
        place: The input's index in the pass; the gap between rows depends on it.
        device: Where kernels run.
    """
    shape = tuple(value.shape)
    strides = contiguous_strides(shape)
    if layout == "permuted":
        strides = permuted(declared, shape)
    elif layout == OVERLAPPING:
        strides = overlapping_strides(declared, shape, value.element_size())
    elif layout in REPEATED:
        strides = repeated_strides(shape, repeated_dims(declared, layout))
    elif layout in ONE_GAPS:
        pad = gap(value.element_size(), place, False)
        strides = one_gap(declared, shape, pad, place + ONE_GAPS.index(layout))
    elif layout == EXPANDED:
        dim = None if declared.in_out else long_dim(declared, shape, place)
        strides = expanded_strides(shape, dim)
    elif layout in FARS and long_dim(declared, shape) is not None:
        strides = far_strides(declared, shape, FARS.index(layout))
        buffer: Guarded = far(shape, value.dtype, strides)
        buffer.tensor.copy_(value)
        return buffer
    elif layout in ("strided", "odd strides", APART) and declared.free_strides:
        pad = gap(value.element_size(), place, layout == "odd strides")
        strides = padded(declared, shape, pad, layout != "odd strides")
    begin = {"shifted": 1, "shifted 8 bytes": 8, "shifted 16 bytes": 16, APART: 32}.get(layout, 0)
    shift = -(-begin // value.element_size())
    buffer = guarded(shape, value.dtype, device, strides, shift)
    write(buffer.tensor, value)
    return buffer


def _is_zero(value: Tensor) -> Tensor:
    return value == 0
