"""Copies of the inputs and outputs at other addresses, used with the same workspaces.

The library gives a kernel the workspace that an earlier call with other tensors used. A kernel that
stores addresses in its workspace and reads them in the next launch is right as long as the tensors
stay where they are; launches on copies reveal it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kgen.check.buffers import Far, Fill, Guarded, Together
from kgen.check.input_set import InputSet

MOVED_BYTES = 2**26
"""Sets with more memory than this are not copied: a second copy may not fit."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Copies of a set's buffers.

    Attributes:
        inputs, outputs: The copies by name; tensors that share memory in the set share it here.
    """

    inputs: Mapping[str, Guarded]
    outputs: Mapping[str, Guarded]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs and outputs that a kernel gets, by name."""
        return {name: b.tensor for name, b in (*self.inputs.items(), *self.outputs.items())}

    def clear(self) -> None:
        """Fill the outputs with NaN."""
        for buffer in self.outputs.values():
            buffer.fill(Fill.NONFINITE)

    def prints(self, names: Iterable[str]) -> Tensor:
        """Fingerprints of the buffers with the given names, one after the other."""
        both = {**self.inputs, **self.outputs}
        return Together({name: both[name] for name in names}).prints()


def moved(made: InputSet) -> Moved | None:
    """Copy a set's buffers as they are now; None if they are too large or too far apart."""
    buffers = [*made.inputs.values(), *made.outputs.values()]
    arenas = {buffer.arena.data_ptr(): buffer.arena for buffer in buffers}
    if any(isinstance(buffer, Far) for buffer in buffers):
        return None
    if sum(arena.nbytes for arena in arenas.values()) > MOVED_BYTES:
        return None
    copies = {address: arena.clone() for address, arena in arenas.items()}

    def copied(buffer: Guarded) -> Guarded:
        arena = copies[buffer.arena.data_ptr()]
        like = buffer.tensor
        tensor = torch.empty(0, dtype=like.dtype, device=like.device).set_(
            arena.untyped_storage(), like.storage_offset(), like.shape, like.stride()
        )
        return Guarded(tensor, arena, buffer.start, buffer.stop)

    return Moved(
        {name: copied(buffer) for name, buffer in made.inputs.items()},
        {name: copied(buffer) for name, buffer in made.outputs.items()},
    )
