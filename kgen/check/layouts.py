"""The strides of input tensors that a kernel is tried with."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.check.buffers import Guarded, contiguous_strides
from kgen.model.signature import Tensor as Declared
from kgen.runtime.layout import dense_strides


def gap(itemsize: int, place: int, odd: bool) -> int:
    """Elements that each free stride of an input is larger than it need be.

    No two inputs have the same, or a kernel could take a stride of one for that of another.

    Args:
        itemsize: Bytes of an element.
        place: Of the input among the inputs.
        odd: An odd number; else a multiple of 16 bytes.
    """
    return 1 + 2 * place if odd else max(1, 16 // itemsize) * (1 + place)


def padded(
    declared: Declared, shape: tuple[int, ...], pad: int, whole_rows: bool
) -> tuple[int, ...]:
    """Contiguous strides, but each free one `pad` elements larger than it need be.

    With `whole_rows` the last dim of an in-out tensor stays contiguous: kernels that update one
    access it by vectors.
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
    """Strides without gaps, the last two dims of free strides having changed places in memory."""
    order = list(range(len(shape)))
    free = [i for i, dim in enumerate(declared.dims) if dim in declared.free_strides]
    if len(free) > 1:
        order[free[-2]], order[free[-1]] = order[free[-1]], order[free[-2]]
    dense = contiguous_strides(tuple(shape[axis] for axis in order))
    return tuple(dense[order.index(axis)] for axis in range(len(shape)))


def output_strides(
    declared: Declared, inputs: Mapping[str, Guarded]
) -> tuple[int, ...] | None:
    """Strides of an output that takes an input's layout; None: contiguous."""
    if not declared.layout_of:
        return None
    like = inputs[declared.layout_of].tensor
    return dense_strides(like.shape, like.stride())
