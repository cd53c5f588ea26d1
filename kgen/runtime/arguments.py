"""Check the arguments of a call against the signature of its pass.

This runs once per combination of shapes, strides and dtypes. A later call finds its prepared launch
by that combination and skips this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .argument_kinds import check_scalars, check_tensors
from .layout import dense_strides
from .signature import (
    ABSENT,
    ROUNDS,
    Argument,
    DTypeField,
    Option,
    Packing,
    PassSignature,
    extent_of,
)

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class BoundArguments(NamedTuple):
    """Checked arguments of one call.

    Attributes:
        dims: Extent of every dim, in declared order.
        dtypes: Dtype name of every field, then the choice of every option, in declared order.
        strides: (`x_stride_M`, elements) of every free stride; 0 for an absent tensor.
        shapes: Shape of every output, including absent ones.
        layouts: Strides of every output that takes an argument's layout; None for other outputs.
        copies: Names of the inputs whose leading dims have no common stride.
    """

    dims: dict[str, int]
    dtypes: dict[str, str]
    strides: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[tuple[int, ...] | None, ...]
    copies: tuple[str, ...]


def bind_arguments(
    signature: PassSignature, tensors: Sequence[Tensor | None], scalars: Sequence[float],
    flags: Sequence[bool | str] = (),
) -> BoundArguments:
    """Check the arguments of a call and name their extents, dtypes and strides.

    Args:
        signature: The declared arguments.
        tensors: One per input; None for one that is left out.
        scalars: One per scalar.
        flags: The choice of each of the signature's `flags`, then of each option.
    Raises:
        TypeError: If an argument is no tensor or has a dtype that is not supported.
        ValueError: If shapes, devices, strides, scalars or options contradict the signature.
    """
    check_tensors(signature, tensors)
    given = [(a, t) for a, t in zip(signature.inputs, tensors, strict=True) if t is not None]
    _check_devices(signature, given)
    dims, leading = _extents(signature, given)
    dtypes = _dtypes(signature, tensors, flags)
    check_scalars(signature, scalars)
    for argument, tensor in given:
        if argument.in_out:
            _check_written(signature, argument, tensor)
    strides, copies = _strides(signature, given, dims)
    shapes = tuple(
        (*leading[output.dims[0]], *(extent_of(name, dims) for name in output.dims[1:]))
        if output.leading and output.dims[0] in leading
        else tuple(extent_of(name, dims) for name in output.dims)
        for output in signature.outputs
    )
    layouts = _layouts(signature, given, dtypes, strides)
    return BoundArguments(dims, dtypes, strides, shapes, layouts, copies)


def has_own_values(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its values; that of a `Tensor.clone` always does.

    The memory of a tensor with the negative bit (`torch._neg_view(x)`, `z.conj().imag`) holds the
    negated values. A `ZeroTensor` has no memory.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def complete_dtypes(
    signature: PassSignature, given: dict[str, str], carriers: dict[str, str] | None = None
) -> dict[str, str]:
    """Fill in default dtypes and options, and check that each is allowed.

    Args:
        signature: The declared arguments.
        given: Dtype field or option -> its choice.
        carriers: Dtype field -> the tensor with this dtype, for errors.
    Raises:
        TypeError: If a dtype is missing or not allowed.
        ValueError: If an option's choice is not allowed.
    """
    chosen: dict[str, str] = {}
    for field in signature.choices:
        allowed = _allowed(field, chosen)
        default = chosen.get(field.default, field.default) if field.default else None
        value = given.get(field.name, default)
        if value not in allowed:
            got = "is missing" if value is None else f"= {value} is not supported"
            error = ValueError if isinstance(field, Option) else TypeError
            carrier = (carriers or {}).get(field.name)
            raise error(f"{signature.function}: {field.name} {got}\n"
                        f"  allowed here: {', '.join(allowed)}"
                        + (f"\n  next: pass {carrier} in an allowed dtype" if carrier else ""))
        chosen[field.name] = value
    return chosen


def _allowed(field: DTypeField | Option, chosen: dict[str, str]) -> tuple[str, ...]:
    """The values that a field may have, given the choices of earlier fields."""
    if isinstance(field, Option):
        return field.allowed
    names = dict.fromkeys(chosen.get(name, name) for name in field.allowed)
    return tuple(name for name in names if ROUNDS.get(name, name) in names)


Given = Sequence[tuple[Argument, Tensor]]


def _check_written(signature: PassSignature, argument: Argument, tensor: Tensor) -> None:
    """Refuse a tensor that a call cannot update because several elements share memory."""
    span = 1
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and step < span:
            raise ValueError(
                f"{signature.function}: {argument.name} has shape {tuple(tensor.shape)} and "
                f"strides {tensor.stride()}: elements share memory, and the call writes each\n"
                f"  pass {argument.name}.clone(), and read the new values there"
            )
        span += (extent - 1) * step


def _check_devices(signature: PassSignature, given: Given) -> None:
    first = given[0][1].device
    for argument, tensor in given:
        if tensor.device != first:
            raise ValueError(
                f"{signature.function}: {argument.name} is on {tensor.device}, but "
                f"{signature.inputs[0].name} is on {first}; move one of them, all tensors of a "
                "call must share a device"
            )


def _extents(
    signature: PassSignature, given: Given
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Return the extent of every dim, and the shape that each flattened dim stands for."""
    dims: dict[str, int] = {}
    leading: dict[str, tuple[int, ...]] = {}
    origin: dict[str, str] = {}
    for argument, tensor in given:
        shape = tuple(tensor.shape)
        expected = len(argument.dims)
        if argument.leading and len(shape) >= expected - 1:
            outer = shape[: len(shape) - expected + 1]
            first = argument.dims[0]
            if leading.setdefault(first, outer) != outer:
                raise ValueError(
                    f"{signature.function}: {argument.name} has leading dims {outer}, but "
                    f"{origin[first]} has {leading[first]}"
                )
            extents = (prod(outer), *shape[len(outer):])
        else:
            extents = shape
        if len(extents) != expected:
            raise ValueError(f"{signature.function}: {argument.name} has shape {shape}; "
                             f"want {argument}")
        for text, found in zip(argument.dims, extents, strict=True):
            if text.isdigit():
                if found != int(text):
                    raise ValueError(f"{signature.function}: {argument.name} has shape {shape}; "
                                     f"want {argument}")
                continue
            name = text.removesuffix(" + 1")
            extent = found - (name != text)
            if dims.setdefault(name, extent) != extent:
                raise ValueError(
                    f"{signature.function}: {argument.name} has shape {shape}, so {name} = "
                    f"{extent}, but {origin[name]} says {name} = {dims[name]}; want "
                    f"{', '.join(str(argument) for argument, _ in given)}"
                )
            origin.setdefault(name, argument.name)
    if signature.packing is not None:
        _check_packing(signature, signature.packing, given, dims, origin)
    for dim in signature.dims:
        if dims[dim.name] < dim.smallest:
            raise ValueError(f"{signature.function}: {dim.name} = {dims[dim.name]} (from "
                             f"{origin[dim.name]}) must be at least {dim.smallest}")
    return {dim.name: dims[dim.name] for dim in signature.dims}, leading


def _check_packing(
    signature: PassSignature, packing: Packing, given: Given, dims: dict[str, int],
    origin: dict[str, str],
) -> None:
    """Determine the number of sequences, and check that it equals the number of states."""
    n, b = packing.sequences, packing.batch
    if all(argument.name != packing.offsets for argument, _ in given):
        if dims.setdefault(n, dims[b]) != dims[b]:
            raise ValueError(
                f"{signature.function}: {origin[n]} has {n} = {dims[n]} sequences, but "
                f"{origin[b]} says {b} = {dims[b]}; without {packing.offsets} every batch row is "
                "one"
            )
        return
    if dims[b] != 1:
        raise ValueError(
            f"{signature.function}: {packing.offsets} is given, and {origin[b]} says {b} = "
            f"{dims[b]}; pass sequences of different lengths one behind the other in one batch "
            f"row, {b} = 1"
        )
    if dims[n] < 1:
        raise ValueError(
            f"{signature.function}: {packing.offsets} has {dims[n] + 1} elements, so {n} = "
            f"{dims[n]}; want [{n} + 1], where each of {n} >= 1 sequences begins and the last ends"
        )


def has_offsets_on_cpu(signature: PassSignature, tensors: Sequence[Tensor | None]) -> bool:
    """Check the offsets of packed sequences on the CPU; return whether a call has such offsets.

    With wrong offsets a kernel on the CPU would access memory outside the tensors. Offsets on a GPU
    are not checked, because reading them would synchronise.

    Raises:
        ValueError: If the offsets do not begin with 0, decrease, or do not end with the last time
            step.
    """
    if signature.packing is None:
        return False
    given = {argument.name: (argument, tensor)
             for argument, tensor in zip(signature.inputs, tensors, strict=True)}
    _, offsets = given[signature.packing.offsets]
    if offsets is None or offsets.device.type != "cpu":
        return False
    batch = signature.packing.batch
    argument, rows = next(pair for pair in given.values() if batch in pair[0].dims[:-1])
    assert rows is not None  # every pass has a tensor with batch rows and steps
    axis = argument.dims.index(batch) + 1
    steps = rows.shape[axis]
    values = offsets.tolist()
    pairs = pairwise(values)
    if values[0] != 0 or values[-1] != steps or any(a > b for a, b in pairs):
        shown = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
        raise ValueError(
            f"{signature.function}: {signature.packing.offsets} = [{shown}]; it must begin with 0, "
            f"never decrease, and end with {argument.dims[axis]} = {steps}"
        )
    return True


def _dtypes(
    signature: PassSignature, tensors: Sequence[Tensor | None], flags: Sequence[bool | str]
) -> dict[str, str]:
    count = len(signature.flags)
    given = {
        option.name: str(choice)
        for option, choice in zip(signature.options, flags[count:], strict=True)
    }
    rounded: list[DTypeField] = []
    carriers: dict[str, str] = {}
    for name_, wanted_ in zip(signature.flags, flags[:count], strict=True):
        field = next(f for f in signature.dtypes if f.name == name_)
        if ABSENT in field.allowed:
            given[field.name] = next(n for n in field.allowed if (n != ABSENT) == bool(wanted_))
        elif wanted_:
            rounded.append(field)
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        if tensor is None:
            if given.setdefault(argument.dtype, ABSENT) != ABSENT:
                raise ValueError(f"{signature.function}: {argument.name} is None, but another "
                                 f"tensor of the same {argument.dtype} is given; pass both or none")
            continue
        name = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        fixed = argument.dtype in TORCH_DTYPES
        if name not in TORCH_DTYPES or (fixed and name != argument.dtype):
            wanted = [argument.dtype] if fixed else _named_dtypes(signature, argument.dtype)
            raise TypeError(f"{signature.function}: {argument.name} has dtype {tensor.dtype}; "
                            f"supported: {', '.join(wanted)}")
        if not fixed and given.setdefault(argument.dtype, name) != name:
            other = carriers.get(argument.dtype)
            if other is None:
                raise ValueError(f"{signature.function}: {argument.name} is given, but another "
                                 f"tensor of the same {argument.dtype} is None; pass both or none")
            raise TypeError(f"{signature.function}: {argument.name} is {name}, but {other} is "
                            f"{given[argument.dtype]}; they must have one dtype\n  next: pass "
                            f"{argument.name}.to({other}.dtype), or call under torch.autocast")
        carriers.setdefault(argument.dtype, argument.name)
    plain = complete_dtypes(signature, given, carriers)
    for field in rounded:  # a rounding flag has no effect on dtypes that are not rounded
        given[field.name] = next((n for n in _allowed(field, plain) if n in ROUNDS),
                                 plain[field.name])
    return complete_dtypes(signature, given) if rounded else plain


def _named_dtypes(signature: PassSignature, name: str) -> list[str]:
    """The dtypes that the tensors of a dtype field may have."""
    fields = {field.name: field.allowed for field in signature.dtypes}
    found = [n for each in fields[name] for n in fields.get(each, (each,))]
    return [n for n in dict.fromkeys(found) if n in TORCH_DTYPES]


def _strides(
    signature: PassSignature, given: Given, dims: dict[str, int]
) -> tuple[dict[str, int], tuple[str, ...]]:
    strides = {f"{a.name}_stride_{name}": 0 for a in signature.inputs for name in a.free_strides}
    copies: list[str] = []
    for argument, tensor in given:
        inner = len(argument.dims) - 1 if argument.leading else len(argument.dims)
        sizes, steps = tuple(tensor.shape), tuple(tensor.stride())
        outer = len(sizes) - inner
        # Strides of dims[1:] (or of all dims): each is either free or must be contiguous.
        contiguous = 1
        for axis in range(len(sizes) - 1, outer - 1, -1):
            name = argument.dims[axis - len(sizes)]
            actual = steps[axis] if sizes[axis] != 1 else contiguous
            if name in argument.free_strides:
                strides[f"{argument.name}_stride_{name}"] = actual
            elif actual != contiguous and tensor.numel():
                raise ValueError(
                    f"{signature.function}: {argument.name} has shape {sizes} and strides {steps}, "
                    f"but dim {name} must be contiguous (stride {contiguous}); "
                    f"pass {argument.name}.contiguous()"
                )
            contiguous = actual * sizes[axis]
        if argument.leading:
            stride = _common_stride(sizes[:outer], steps[:outer], contiguous)
            free = argument.dims[0] in argument.free_strides
            if stride is None or (not free and stride != contiguous):
                copies.append(argument.name)
                stride = contiguous
            if free:
                strides[f"{argument.name}_stride_{argument.dims[0]}"] = stride
    return strides, tuple(copies)


def _layouts(
    signature: PassSignature, given: Given, dtypes: dict[str, str], strides: dict[str, int]
) -> tuple[tuple[int, ...] | None, ...]:
    """Strides of the outputs that take an argument's layout; free strides are added to `strides`.
    """
    tensors = {argument.name: tensor for argument, tensor in given}
    layouts: list[tuple[int, ...] | None] = []
    for output in signature.outputs:
        strides |= {f"{output.name}_stride_{name}": 0 for name in output.free_strides}
        if not output.layout_of or dtypes.get(output.dtype) == ABSENT:
            layouts.append(None)
            continue
        like = tensors[output.layout_of]
        dense = dense_strides(like.shape, like.stride())
        layouts.append(dense)
        for name in output.free_strides:
            strides[f"{output.name}_stride_{name}"] = dense[output.dims.index(name)]
    return tuple(layouts)


def _common_stride(
    sizes: tuple[int, ...], steps: tuple[int, ...], contiguous: int
) -> int | None:
    """The stride of these dims flattened to one, or None if they cannot be flattened."""
    stride: int | None = None
    expected = 0
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * size
    return contiguous if stride is None else stride
