"""The distance between two problems, for the choice of a row that was tuned for another problem."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from .signature import ABSENT, PassSignature
from .spelling import ITEM_BYTES, is_dtype_field

# Weights of differences in dtypes or options, in the unit of `distance`, in which 0.7 is a factor
# of two in one extent. docs/decisions/0028 has the losses with these weights on committed records.
_SAME_BYTES = 0.2  # dtypes of the same size: bf16 and fp16
_OTHER_BYTES = 2.0  # dtypes of different sizes change the balance of bytes and operations
_PRESENCE = 0.7  # an optional tensor that only one of the problems has
_OPTION = 0.3


def distance(extents: Iterable[int], others: Iterable[int]) -> float:
    """Sum over dims of |log(extent / other extent)|."""
    return sum(abs(log(max(a, 1) / max(b, 1))) for a, b in zip(extents, others, strict=True))


def problem_distance(
    signature: PassSignature, dims: tuple[int, ...], dtypes: tuple[str, ...],
    other_dims: tuple[int, ...], other_dtypes: tuple[str, ...],
) -> float:
    """The distance of the extents of two problems, plus a weight for each different choice.

    Only the number of sequences counts, not the batch, which is equal to it unless sequences are
    packed.
    """
    batch = signature.packing.batch if signature.packing is not None else ""
    counted = [i for i, dim in enumerate(signature.dims) if dim.name != batch]
    total = distance([dims[i] for i in counted], [other_dims[i] for i in counted])
    for field, a, b in zip(signature.choices, dtypes, other_dtypes, strict=True):
        if a == b:
            continue
        if not is_dtype_field(field.name):
            total += _OPTION
        elif ABSENT in (a, b):
            total += _PRESENCE
        else:
            total += _SAME_BYTES if ITEM_BYTES[a] == ITEM_BYTES[b] else _OTHER_BYTES
    return total
