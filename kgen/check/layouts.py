"""The strides of the input tensors on which a kernel is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kgen.check.buffers import Guarded, contiguous_strides, guarded
from kgen.model.signature import Tensor as Declared
from kgen.runtime.layout import dense_strides


def gap(itemsize: int, place: int, odd: bool) -> int:
    """The number of elements by which each free stride of an input exceeds the contiguous one.

    It differs between inputs, or a kernel that uses another input's strides would pass.

    Args:
        itemsize: Bytes of an element.
        place: Index of the input in the pass.
        odd: Whether the gap is an odd number of elements; else it is a multiple of 16 bytes.
    """
    return 1 + 2 * place if odd else max(1, 16 // itemsize) * (1 + place)


def padded(
    declared: Declared, shape: tuple[int, ...], pad: int, whole_rows: bool
) -> tuple[int, ...]:
    """Contiguous strides, with `pad` elements added at each dim with a free stride.

    With `whole_rows` the last dim of an in-out tensor stays contiguous: kernels access in-out
    tensors by vectors.
    """
    strides: list[int] = []
    step = 1
    for dim, extent in zip(reversed(declared.dims), reversed(shape), strict=True):
        is_row = whole_rows and declared.in_out and dim == declared.dims[-1]
        if dim in declared.free_strides and not is_row:
            step += pad
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def permuted(declared: Declared, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps; the last two dims with free strides are transposed in memory."""
    order = list(range(len(shape)))
    free = [i for i, dim in enumerate(declared.dims) if dim in declared.free_strides]
    if len(free) > 1:
        order[free[-2]], order[free[-1]] = order[free[-1]], order[free[-2]]
    dense = contiguous_strides(tuple(shape[axis] for axis in order))
    return tuple(dense[order.index(axis)] for axis in range(len(shape)))


def output_strides(
    declared: Declared, inputs: Mapping[str, Guarded]
) -> tuple[int, ...] | None:
    """Strides of an output that is declared to have an input's layout; None: contiguous."""
    if not declared.layout_of:
        return None
    like = inputs[declared.layout_of].tensor
    return dense_strides(like.shape, like.stride())


def long_dim(declared: Declared, shape: tuple[int, ...], place: int = 0) -> int | None:
    """One of the dims that have a free stride and several elements; None if there is none.

    Args:
        declared, shape: The input's declaration and shape.
        place: Index of the input in the pass: the choice differs between inputs.
    """
    free = [i for i, dim in enumerate(declared.dims) if dim in declared.free_strides]
    long = [i for i in free if shape[i] > 1]
    return long[place % len(long)] if long else None


def expanded_strides(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """Strides of a contiguous tensor with one element in a dim, expanded along that dim."""
    if dim is None:
        return contiguous_strides(shape)
    strides = list(contiguous_strides((*shape[:dim], 1, *shape[dim + 1 :])))
    strides[dim] = 0
    return tuple(strides)


def overlapping_strides(
    declared: Declared, shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Contiguous strides, except that each row begins in the middle of the row before.

    The distance is a multiple of 16 bytes, so that vector loads stay aligned.
    """
    strides = list(contiguous_strides(shape))
    unit = max(1, 16 // itemsize)
    free = [i for i, dim in enumerate(declared.dims) if dim in declared.free_strides]
    if free and not declared.in_out and free[-1] < len(shape) - 1 and shape[free[-1]] > 1:
        half = strides[free[-1]] // (2 * unit) * unit
        strides[free[-1]] = half or strides[free[-1]]
    return tuple(strides)


def repeated_dims(declared: Declared, layout: str) -> list[int]:
    """Dims with a stride of 0 in a layout of `REPEATED`: all with a free stride, or one of them."""
    free = [i for i, dim in enumerate(declared.dims) if dim in declared.free_strides]
    if declared.in_out:
        return []
    number = ("repeated first", "repeated second", "repeated third")
    if layout in number:
        place = number.index(layout)
        return free[place : place + 1]
    return free


def repeated_strides(shape: tuple[int, ...], dims: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor with one element in some dims, expanded along these."""
    one = tuple(1 if dim in dims else extent for dim, extent in enumerate(shape))
    return tuple(
        0 if dim in dims else stride for dim, stride in enumerate(contiguous_strides(one))
    )


def one_gap(
    declared: Declared, shape: tuple[int, ...], pad: int, place: int
) -> tuple[int, ...]:
    """Contiguous strides, with `pad` elements added at one of the dims with a free stride."""
    free = [dim for dim in declared.dims if dim in declared.free_strides]
    if not free or declared.in_out:
        return contiguous_strides(shape)
    chosen = free[place % len(free)]
    strides: list[int] = []
    step = 1
    for dim, extent in zip(reversed(declared.dims), reversed(shape), strict=True):
        step += pad if dim == chosen else 0
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_FAR = 2**32 + 64


def far_strides(
    declared: Declared, shape: tuple[int, ...], place: int = 0
) -> tuple[int, ...]:
    """Contiguous strides, except that the stride of `long_dim` exceeds 32 bits."""
    dim = long_dim(declared, shape, place)
    strides = list(contiguous_strides(shape))
    if dim is not None:
        strides[dim] += _FAR
    return tuple(strides)


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values into a tensor; elements with equal values may share memory."""
    for dim, (extent, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if extent > 1 and stride == 0:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def side_by_side(
    declared: Sequence[Declared], values: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, Guarded]:
    """Put inputs side by side into the rows of one tensor, as a fused projection produces them.

    Inputs are grouped if they have the same dtype, the same dims except the last, and free strides
    in exactly those dims. Each input begins at a multiple of 16 bytes in a row, or the guards of
    some kernels would refuse the set. An input without a partner is left out.
    """
    groups: dict[tuple[object, ...], list[Declared]] = {}
    for t in declared:
        if not t.in_out and len(t.dims) > 1 and set(t.free_strides) == set(t.dims[:-1]):
            groups.setdefault((t.dims[:-1], values[t.name].dtype), []).append(t)
    found: dict[str, Guarded] = {}
    for group in (group for group in groups.values() if len(group) > 1):
        first = values[group[0].name]
        unit = max(1, 16 // first.element_size())
        widths = [-(-values[t.name].shape[-1] // unit) * unit for t in group]
        whole = guarded((*first.shape[:-1], sum(widths)), first.dtype, device)
        begin = 0
        for t, width in zip(group, widths, strict=True):
            view = whole.tensor.narrow(-1, begin, values[t.name].shape[-1])
            found[t.name] = Guarded(view, whole.arena, whole.start, whole.stop)
            begin += width
    return found
