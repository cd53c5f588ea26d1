"""Check a kernel's outputs after timing, to find kernels that do no work when repeated.

Timed launches use other buffers than the verification, and share workspaces that initially hold a
large number. During timing, the first buffer set holds other values than the verification used.
Afterwards that set gets the values of the verification, its outputs are filled with NaN, and one
more launch must match the oracle.

In-out tensors are not restored during timing: each launch updates the result of the launch before,
as in a decode loop. The last launch starts from the contents of the verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kgen.check import Fixture, InputSet, fault_of, other_values
from kgen.check.buffers import LARGE, PATTERN
from kgen.worker.binding import Call, Tensors


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel to be timed, with the buffers of its launches.

    Attributes:
        calls: One call per buffer set.
        tensors: The tensors of the first buffer set.
        scratch: The workspaces, which all sets share.
    """

    calls: Sequence[Call]
    tensors: Tensors
    scratch: Tensors

    def prepare(self, fixture: Fixture, made: InputSet) -> None:
        """Fill the workspaces, and give the first buffer set other values than the input set's."""
        for workspace in self.scratch.values():
            _fill(workspace, LARGE)
        for name, value in other_values(fixture, made).items():
            self.tensors[name].copy_(value)

    def fault(self, fixture: Fixture, made: InputSet) -> str:
        """Launch once more on the input set's values, and describe errors of the outputs; empty if
        they are right.
        """
        for name, value in made.values.items():
            self.tensors[name].copy_(value)
        for name in made.outputs:
            _fill(self.tensors[name], PATTERN)
        outputs = {name: self.tensors[name] for name in made.results}
        self.calls[0]()
        fault = fault_of(fixture, made, outputs)
        if not fault:
            return ""
        return (
            f"after it was timed, on values that were not timed:\n  {fault}\n"
            f"  inputs '{made.case.label}', seed {made.case.seed}"
        )


def _fill(tensor: torch.Tensor, pattern: int) -> None:
    """Fill a tensor that has no gaps between its elements."""
    tensor.view(-1).view(torch.int16).fill_(pattern)
