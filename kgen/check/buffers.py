"""Guarded device buffers: filled with chosen patterns, canaries around, fingerprints of bits."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

GUARD_BYTES = 4096
"""On each side of a buffer; a multiple of 512 keeps the alignment that torch allocates with."""

# One 16-bit pattern for canaries and the nonfinite fill alike. Its exponent bits are all ones and
# its fraction is not zero in fp16, bf16 and (twice in a row) fp32, so whatever reads past an end or
# before a write gets NaN. It is not the NaN that arithmetic produces, so a NaN written is told from
# a place never written.
PATTERN = 0xFFA5 - 0x10000
LARGE = 0x7777
"""A pattern that is a large finite number: 3e4 in fp16, 5e33 in bf16 and fp32, 2e9 in int32."""
_WORD = int.from_bytes((0xFFA5).to_bytes(2, "little") * 4, "little", signed=True)


class Fill(Enum):
    """What a buffer holds before a launch: a 16-bit pattern, repeated, or what it held.

    The patterns mean the same in fp16, bf16 and fp32: NaN, a large finite number, its negative,
    zero. In int32 the first is a small negative number. `SPOILED` is what it held, but for one
    word of two bytes in 61.
    """

    NONFINITE = PATTERN
    LARGE = LARGE
    NEGATIVE = 0xF777 - 0x10000
    ZERO = 0
    LEFT = None
    SPOILED = "spoiled"


_SPOILED_STEP = 61  # odd, so that the words fall on every place of a vector
# A prime, so that no power-of-two stride of a kernel's bug folds onto one column.
_COLUMNS = 262_139


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor in the middle of an arena whose every other byte holds `PATTERN`.

    Attributes:
        tensor: What a kernel gets.
        arena: All bytes as int16: guard, data (with the gaps of a strided tensor), guard.
        start: Index in `arena` of the first data element.
        stop: Index in `arena` just past the last data element.
    """

    tensor: Tensor
    arena: Tensor
    start: int
    stop: int

    @property
    def bytes(self) -> int:
        """Size of the arena."""
        return self.arena.numel() * 2

    def reset(self) -> None:
        """Fill data and guards with the nonfinite pattern."""
        self.arena.view(torch.int64).fill_(_WORD)

    def fill(self, kind: Fill) -> None:
        """Fill the data alone, so that damage to the guards stays to be seen."""
        if kind is Fill.SPOILED:
            data = self.arena[self.start : self.stop]
            # Which words: from one buffer to the next not the same; the first element is not always
            # among them, nor always left out.
            first = min(data.numel() * 7 // 16 % _SPOILED_STEP, max(data.numel() - 1, 0))
            data[first::_SPOILED_STEP] = LARGE
        elif isinstance(kind.value, int):
            self.arena[self.start : self.stop].fill_(kind.value)

    def damage(self) -> tuple[Tensor, Tensor]:
        """Whether the guard before and the guard after were written; two 0-d bool tensors."""
        before = (self.arena[: self.start] != PATTERN).any()
        after = (self.arena[self.stop :] != PATTERN).any()
        return before, after


def guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
    shift: int = 0,
) -> Guarded:
    """Allocate a guarded tensor that holds the nonfinite pattern.

    Args:
        shape: Extents.
        dtype: Of 2 bytes or more.
        device: Where.
        strides: In elements; None for contiguous.
        shift: Elements between an aligned address and the first one.
    """
    strides = contiguous_strides(shape) if strides is None else strides
    span = 0
    if 0 not in shape:
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    data_bytes = span * dtype.itemsize
    before = GUARD_BYTES + shift * dtype.itemsize
    words = -(-(before + GUARD_BYTES + data_bytes) // 8)
    arena = torch.empty(words, dtype=torch.int64, device=device).view(torch.int16)
    start, stop = before // 2, (before + data_bytes) // 2
    whole = arena[: arena.numel() // 4 * 4].view(dtype)
    tensor = whole.as_strided(shape, strides, before // dtype.itemsize)
    buffer = Guarded(tensor, arena, start, stop)
    buffer.reset()
    return buffer


class NoRoomError(Exception):
    """There are no addresses for a tensor of far rows."""


@dataclass(frozen=True, slots=True)
class Far(Guarded):
    """A tensor on the CPU whose rows are gigabytes apart; memory is taken where they are.

    Nothing watches what lies between them.
    """

    def damage(self) -> tuple[Tensor, Tensor]:
        """See `Guarded`; never any."""
        return torch.tensor(False), torch.tensor(False)


def far(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> Far:
    """Allocate a tensor of zeros with a stride beyond 32 bits.

    Raises:
        NoRoomError: If the system does not give that many addresses.
    """
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(
            -1, span * dtype.itemsize, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | no_reserve
        )
    except (OSError, ValueError, OverflowError) as problem:
        raise NoRoomError(str(problem)) from None
    whole = torch.frombuffer(memory, dtype=dtype, count=span)
    return Far(whole.as_strided(shape, strides), whole[:0], 0, 0)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def fingerprint(buffer: Guarded) -> Tensor:
    """Return an int64 vector that tells the arena's bits from other bits.

    Small arenas are copied, which makes the comparison exact. Larger ones are summed, modulo
    2**64, over the 8-byte words that lie a prime number of words apart: one pass of reading and
    no second buffer of the size of the data. Any single change shows; several changes hide only
    if they cancel exactly within one such sum.
    """
    if isinstance(buffer, Far):
        return buffer.tensor.contiguous().view(torch.int16)
    words = buffer.arena.view(torch.int64)
    rows = words.numel() // _COLUMNS
    if rows < 2:
        return words.clone()
    body = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(dim=0)
    rest = words[rows * _COLUMNS :]
    body[: rest.numel()] += rest
    return body
