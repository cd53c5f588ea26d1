"""Check a kernel's outputs after timing, to find kernels that do no work when repeated.

What is timed runs on other buffers than the proof, and all its launches share their workspaces,
which hold a large number at first. While it is timed, the first buffer set holds other values than
the proof had. Then that set gets the proof's values, its outputs are filled with NaN, and the last
launch has to give what the oracle says.

In-out tensors are not restored while a kernel is timed: each launch updates what the one before
left, as a decode loop does. The last launch begins from the proof's content.
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
    """A kernel that is timed, with what its launches read and write.

    Attributes:
        calls: One per buffer set.
        tensors: The tensors of the first set.
        scratch: The workspaces of all sets.
    """

    calls: Sequence[Call]
    tensors: Tensors
    scratch: Tensors

    def prepare(self, fixture: Fixture, made: InputSet) -> None:
        """Fill the workspaces, and give the first set other values than an input set's."""
        for workspace in self.scratch.values():
            _fill(workspace, LARGE)
        for name, value in other_values(fixture, made).items():
            self.tensors[name].copy_(value)

    def fault(self, fixture: Fixture, made: InputSet) -> str:
        """Launch once more, on the input set's values, and say what is wrong with the outputs;
        empty if nothing is.
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
    """Fill a tensor without gaps."""
    tensor.view(-1).view(torch.int16).fill_(pattern)
