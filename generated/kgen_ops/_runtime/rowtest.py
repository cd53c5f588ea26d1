"""A tuned kernel beside the safe kernel of the same problem, on the device at hand.

Both were verified against the operator's float64 definition when the library was tuned; that
definition is not shipped. What is left to ask on another machine is whether the shipped binaries
still do there what they did: two kernels of different designs that agree on random inputs. It is no
second verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import ABSENT, ROUNDS, TORCH_DTYPES, Argument, Signature
from .dispatch import Pass
from .ladder import DispatchError
from .problems import contiguous_call
from .rows import Row

# Of all tensors of a problem together. Rows of larger problems are run at smaller ones that their
# conditions allow: the safe kernel is slow, and on the CPU everything is.
_MOST_ELEMENTS = {"cuda": 1 << 23, "cpu": 1 << 15}
# Of the norm of the difference, over that of the safe kernel's result. Seen on the CPU, over all
# rows of an H200: at most 6e-4 in 16 bits, 9e-7 in fp32. A kernel that went wrong is off by much.
_TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2}


class Comparison(NamedTuple):
    """What came of one row.

    Attributes:
        dims: The problem that was run.
        error: The largest relative error of its outputs; None if it was not run.
        trouble: Why the row failed; empty if it did not.
        skipped: Why it was not run; empty if it was.
    """

    row: Row
    dims: Mapping[str, int]
    error: float | None = None
    trouble: str = ""
    skipped: str = ""


def compare_rows(passed: Pass, device: torch.device) -> Iterator[Comparison]:
    """Run every measured row that serves a device, beside the safe kernel of its dtypes.

    Raises:
        DispatchError: If the library has no kernel for the device.
        IntegrityError: If a file is not what the library's list says.
    """
    safe = {row.dtypes: row for row in passed.safe_rows()}
    for row in passed.rows_on(device):
        dims = _small_dims(passed.signature, row, _MOST_ELEMENTS[device.type])
        dtypes = dict(zip((f.name for f in passed.signature.choices), row.dtypes, strict=True))
        tensors = _tensors(passed.signature, dims, dtypes, device)
        if row.dtypes not in safe:
            yield Comparison(row, dims, skipped="there is no safe kernel of its dtypes")
        elif any(t is not None and not t.is_floating_point() for t in tensors):
            yield Comparison(row, dims, skipped="what its integer inputs must be is not known here")
        else:
            arguments = (tensors, [s.default for s in passed.signature.scalars],
                         _flags(passed.signature, dtypes))
            try:
                error = _difference(passed.run_row(row, *arguments),
                                    passed.run_row(safe[row.dtypes], *arguments))
            except (RuntimeError, ValueError, TypeError) as problem:
                yield Comparison(row, dims, trouble=f"{type(problem).__name__}: {problem}")
                continue
            bound = max(_TOLERANCES.get(name, 0.0) for name in row.dtypes)
            bad = "" if error <= bound else (
                f"differs from the safe kernel by {error:.2e} of its norm; allowed are {bound:.0e}")
            yield Comparison(row, dims, error, bad)


def is_served(passed: Pass, device: torch.device) -> bool:
    """Whether the library has kernels of a pass for a device."""
    try:
        passed.rows_on(device)
    except DispatchError:
        return False
    return True


def _small_dims(signature: Signature, row: Row, most: int) -> dict[str, int]:
    """Halve the dims that are not compiled in, the largest first, as far as the row serves them."""
    dims = dict(zip((d.name for d in signature.dims), row.dims, strict=True))
    least = {d.name: max(d.smallest, 1) for d in signature.dims}
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


def _with(signature: Signature, dims: dict[str, int], name: str, extent: int) -> dict[str, int]:
    """Change an extent, and with it that of sequences, of which each batch row is one."""
    changed = {**dims, name: extent}
    packing = signature.packing
    if packing is not None and name in (packing.batch, packing.sequences):
        changed |= {packing.batch: extent, packing.sequences: extent}
    return changed


def _shape(argument: Argument, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(dims[text.removesuffix(" + 1")] + text.endswith(" + 1") for text in argument.dims)


def _tensors(
    signature: Signature, dims: Mapping[str, int], dtypes: Mapping[str, str], device: torch.device
) -> list[Tensor | None]:
    """Random inputs that suit every operator: all of one sign, so that sums do not cancel, and
    negative, so that what is taken for the logarithm of a decay decays.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: list[Tensor | None] = []
    for argument in signature.inputs:
        name = dtypes.get(argument.dtype, argument.dtype)
        if name == ABSENT:
            tensors.append(None)
            continue
        values = torch.rand(_shape(argument, dims), generator=generator).mul_(-0.9).sub_(0.1)
        tensors.append(values.to(device, TORCH_DTYPES[name]))
    return tensors


def _flags(signature: Signature, dtypes: Mapping[str, str]) -> list[bool | str]:
    fields = {field.name: field for field in signature.dtypes}
    flags: list[bool | str] = [
        dtypes[name] != ABSENT if ABSENT in fields[name].allowed else dtypes[name] in ROUNDS
        for name in signature.flags
    ]
    return [*flags, *(dtypes[option.name] for option in signature.options)]


def _difference(found: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    """The largest relative difference of two lists of outputs, by norms; inf for what is no number.
    """
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a is None or b is None:
            continue
        scale = b.double().norm().item()
        error = (a.double() - b.double()).norm().item() / (scale or 1.0)
        worst = max(worst, error if error == error else float("inf"))
    return worst
