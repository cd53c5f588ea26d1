"""What a prepared launch does, written down, so that it can be done without Python.

A function of a generated table hands what it is given to its launchers as it is: addresses, the
stream, scalars; the rest of their arguments was computed when it was bound. So one run with
placeholders in place of them shows which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .allocation import Allocate
from .rows import CONSTANT, Call, Launch, Recorded, Row, SafeRow, bound_row

if TYPE_CHECKING:  # it imports the driver and compilers, which a call that is ready does not need
    from .device import KernelFile


class _Value(NamedTuple):
    """Stands for a value of a call."""

    slot: int

    def data_ptr(self) -> _Value:
        """The address of a workspace."""
        return self


class _Recorder:
    """What a plan takes for its kernel file."""

    def __init__(self, file: KernelFile, before: int) -> None:
        self._file = file
        self._before = before  # values that come before the workspaces
        self.launches: list[Launch] = []
        self.scratches: list[Allocate] = []

    def launcher(self, *args: Any, **options: Any) -> Callable[..., None]:
        launcher = self._file.launcher(*args, **options)

        def record(*arguments: object) -> None:
            self.launches.append(Launch(
                launcher,
                tuple(None if isinstance(a, _Value) else a for a in arguments),
                bytes(a.slot if isinstance(a, _Value) else CONSTANT for a in arguments),
            ))

        return record

    def scratch(self, elements: int, dtype: torch.dtype) -> Callable[[], _Value]:
        value = _Value(self._before + len(self.scratches))
        self.scratches.append(self._file.scratch(elements, dtype))
        return lambda: value


def recorded(
    row: Row | SafeRow, file: KernelFile, call: Call, facts: Mapping[str, int], tensors: int,
    scalars: int,
) -> Recorded:
    """Write down what the launch of a row does for calls like one.

    Args:
        row: Of a generated table.
        file: Its kernels.
        call: What it is bound to.
        facts: Of the GPU, for a safe row.
        tensors: How many the pass has, inputs and outputs.
        scalars: How many it has.
    """
    recorder = _Recorder(file, 1 + tensors)
    run = bound_row(row, cast("KernelFile", recorder), call, facts)
    stream, *given = (_Value(slot) for slot in range(1 + tensors))
    # Workspaces are known now, and come before the scalars.
    first = 1 + tensors + len(recorder.scratches)
    run(*cast("Any", (stream, *given, *(_Value(first + i) for i in range(scalars)))))
    return Recorded(tuple(recorder.launches), tuple(recorder.scratches), scalars)
