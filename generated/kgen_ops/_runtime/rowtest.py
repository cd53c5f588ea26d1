"""Compare each tuned kernel with the safe kernel of the same dtypes on this machine's device.

Both kernels were verified against the operator's float64 definition when the library was tuned. The
library does not ship that definition. This test checks that the shipped binaries still compute the
same here: two kernels of different designs must agree on random inputs. It does not replace the
verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import TORCH_DTYPES
from .comparison import (
    SIZES,
    are_finite,
    difference,
    made_up_like,
    results,
    tolerance,
    updated_copies,
)
from .dispatch import Dispatcher
from .errors import DispatchError
from .problems import contiguous_call
from .rows import Row, SafeRow
from .signature import ABSENT, ROUNDS, Argument, PassSignature, extent_of

# Limit on the elements of all tensors of a problem. A row of a larger problem is run on a smaller
# problem that its conditions allow, because the safe kernel and every kernel on the CPU is slow.
_MOST_ELEMENTS = {"cuda": 1 << 23, "cpu": 1 << 15}


class RowComparison(NamedTuple):
    """The result of one row.

    Attributes:
        row: The row.
        dims: The problem that was run.
        error: The largest relative error of the outputs; None if the row was not run.
        trouble: Why the row failed; empty if it passed.
        skipped: Why the row was not run; empty if it was.
    """

    row: Row
    dims: Mapping[str, int]
    error: float | None = None
    trouble: str = ""
    skipped: str = ""


def compare_rows(passed: Dispatcher, device: torch.device) -> Iterator[RowComparison]:
    """Run every measured row that serves a device, and the safe kernel of its dtypes.

    Raises:
        DispatchError: If the library has no kernel for the device.
        IntegrityError: If a file differs from the library's list of files.
    """
    safe = {row.dtypes: row for row in passed.tables.safe_rows()}
    for row in passed.tables.of_device(device).rows:
        dims = small_dims(passed.signature, row, _MOST_ELEMENTS[device.type])
        dtypes = dict(zip((f.name for f in passed.signature.choices), row.dtypes, strict=True))
        tensors = _tensors(passed.signature, dims, dtypes, device)
        if row.dtypes not in safe:
            yield RowComparison(row, dims, skipped="there is no safe kernel of its dtypes")
        elif any(t is not None and not t.is_floating_point() for t in tensors):
            yield RowComparison(row, dims, skipped="its integer inputs cannot be made up")
        else:
            try:
                error = _difference(passed, row, safe[row.dtypes], tensors, dtypes)
            except (RuntimeError, ValueError, TypeError) as problem:
                yield RowComparison(row, dims, trouble=f"{type(problem).__name__}: {problem}")
                continue
            bound = tolerance(row.dtypes)
            bad = "" if error <= bound else (
                f"differs from the safe kernel by {error:.2e} of its norm; allowed are {bound:.0e}")
            yield RowComparison(row, dims, error, bad)


def _difference(
    passed: Dispatcher, row: Row, safe: SafeRow, tensors: list[Tensor | None],
    dtypes: Mapping[str, str],
) -> float:
    """The difference between the results of a row and of the safe kernel, on inputs without
    overflow.
    """
    rest = ([s.default for s in passed.signature.scalars], _flags(passed.signature, dtypes))
    def run(given: Row | SafeRow, sized: list[Tensor | None]) -> list[Tensor | None]:
        own = updated_copies(passed.signature, sized)
        return results(passed.signature, own, passed.run_row(given, own, *rest))

    for size in SIZES:
        sized = made_up_like(passed.signature, tensors, size)
        wanted = run(safe, sized)
        if are_finite(wanted):
            break
    return difference(run(row, sized), wanted)


def is_served(passed: Dispatcher, device: torch.device) -> bool:
    """Whether the library has kernels of a pass for a device."""
    try:
        passed.tables.of_device(device)
    except DispatchError:
        return False
    return True


def small_dims(
    signature: PassSignature, row: Row, most: int, floors: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Halve run-time dims, the largest first, until the problem is small enough.

    Stops early where the row's conditions would no longer hold.

    Args:
        signature: The signature of the pass.
        row: The row, whose problem is the starting point.
        most: Most elements of all tensors together.
        floors: Smallest extents of some dims.
    """
    dims = dict(zip((d.name for d in signature.dims), row.dims, strict=True))
    least = {d.name: max(d.smallest, (floors or {}).get(d.name, 1)) for d in signature.dims}
    arguments = (*signature.inputs, *signature.outputs)
    while sum(prod(_shape(a, dims)) for a in arguments) > most:
        free = (name for name in dims if name not in row.constants)
        for name in sorted(free, key=dims.__getitem__, reverse=True):
            halved = _with(signature, dims, name, dims[name] // 2)
            if halved[name] >= least[name] and row.fits(contiguous_call(signature, halved)):
                dims = halved
                break
        else:
            break
    return dims


def _with(signature: PassSignature, dims: dict[str, int], name: str, extent: int) -> dict[str, int]:
    """Change an extent. The batch and the number of sequences, if equal, change together."""
    changed = {**dims, name: extent}
    packing = signature.packing
    if packing is not None and name in (packing.batch, packing.sequences) and (
        dims[packing.batch] == dims[packing.sequences]
    ):
        changed |= {packing.batch: extent, packing.sequences: extent}
    return changed


def _shape(argument: Argument, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(extent_of(text, dims) for text in argument.dims)


def _tensors(
    signature: PassSignature, dims: Mapping[str, int], dtypes: Mapping[str, str],
    device: torch.device,
) -> list[Tensor | None]:
    """Allocate contiguous inputs without filling them."""
    tensors: list[Tensor | None] = []
    for argument in signature.inputs:
        name = dtypes.get(argument.dtype, argument.dtype)
        if name == ABSENT:
            tensors.append(None)
            continue
        tensors.append(
            torch.empty(_shape(argument, dims), dtype=TORCH_DTYPES[name], device=device))
    return tensors


def _flags(signature: PassSignature, dtypes: Mapping[str, str]) -> list[bool | str]:
    fields = {field.name: field for field in signature.dtypes}
    flags: list[bool | str] = [
        dtypes[name] != ABSENT if ABSENT in fields[name].allowed else dtypes[name] in ROUNDS
        for name in signature.flags
    ]
    return [*flags, *(dtypes[option.name] for option in signature.options)]
