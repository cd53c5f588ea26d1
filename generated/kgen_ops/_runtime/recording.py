"""Record the plan of a prepared launch as data, so that `_fast_path.c` can run it without Python.

A plan function of a generated table passes the stream, the addresses and the scalars of a call to
its launchers unchanged. All other launch arguments were computed when the plan was bound to the
call. So one run of the function with placeholders for stream, addresses and scalars shows the
source of each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from .allocation import Allocate
from .rows import CONSTANT, Call, RecordedLaunch, RecordedPlan, Row, SafeRow, bound_row

if TYPE_CHECKING:  # at run time, this import would load the driver and compilers
    from .device import KernelFile


class _Value(NamedTuple):
    """A placeholder of one value of a call."""

    slot: int

    def data_ptr(self) -> _Value:
        """The placeholder of a workspace's address."""
        return self


class _Recorder:
    """Stands in for a plan's kernel file and records what the plan does with it."""

    def __init__(self, file: KernelFile, before: int) -> None:
        self._file = file
        self._before = before  # number of values before the workspaces
        self.launches: list[RecordedLaunch] = []
        self.scratches: list[Allocate] = []

    def launcher(self, *args: Any, **options: Any) -> Callable[..., None]:
        launcher = self._file.launcher(*args, **options)

        def record(*arguments: object) -> None:
            self.launches.append(RecordedLaunch(
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
) -> RecordedPlan:
    """Record the plan of a row, bound to a call.

    Args:
        row: The row of a generated table.
        file: The row's kernels.
        call: The call.
        facts: Hardware facts of the GPU, for a safe row.
        tensors: Number of inputs and outputs of the pass.
        scalars: Number of scalars of the pass.
    """
    recorder = _Recorder(file, 1 + tensors)
    run = bound_row(row, cast("KernelFile", recorder), call, facts)
    stream, *given = (_Value(slot) for slot in range(1 + tensors))
    # Binding the row has counted the workspaces, which come before the scalars.
    first = 1 + tensors + len(recorder.scratches)
    run(*cast("Any", (stream, *given, *(_Value(first + i) for i in range(scalars)))))
    return RecordedPlan(tuple(recorder.launches), tuple(recorder.scratches), scalars)
