"""Device buffers between canaries, filled with chosen patterns, and fingerprints of their bits."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

GUARD_BYTES = 4096
"""Size of the guard on each side of a buffer; a multiple of 512 keeps torch's alignment."""

# The canaries and the nonfinite fill use the same 16-bit pattern. In fp16, bf16 and (repeated) fp32
# its exponent bits are all ones and its fraction is not zero. So a read past the end of a buffer or
# before the first write returns NaN. Arithmetic does not produce this NaN, so a NaN that a kernel
# wrote differs from an element that it did not write.
PATTERN = 0xFFA5 - 0x10000
LARGE = 0x7777
"""A pattern that is a large finite number: 3e4 in fp16, 5e33 in bf16 and fp32, 2e9 in int32."""
_WORD = int.from_bytes((0xFFA5).to_bytes(2, "little") * 4, "little", signed=True)


class Fill(Enum):
    """The contents of a buffer before a launch: a repeated 16-bit pattern, or its old contents.

    The patterns mean the same in fp16, bf16 and fp32: NaN, a large finite number, its negative,
    zero. In int32 `NONFINITE` is a small negative number. `LEFT` keeps the old contents; `SPOILED`
    keeps them except for one 16-bit word in 61.
    """

    NONFINITE = PATTERN
    LARGE = LARGE
    NEGATIVE = 0xF777 - 0x10000
    ZERO = 0
    LEFT = None
    SPOILED = "spoiled"


_SPOILED_STEP = 61  # odd, so that the words occur at every position of a vector
# A prime, so that wrong writes at a power-of-two stride do not all fall into one column.
_COLUMNS = 262_139


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor in the middle of an arena; all other bytes of the arena hold `PATTERN`.

    Attributes:
        tensor: The tensor that a kernel gets.
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
        """Fill the data but not the guards, so that damage to the guards stays visible."""
        if kind is Fill.SPOILED:
            data = self.arena[self.start : self.stop]
            # The first spoiled word depends on the size of the buffer: so buffers differ, and the
            # first element is spoiled in some of them.
            first = min(data.numel() * 7 // 16 % _SPOILED_STEP, max(data.numel() - 1, 0))
            data[first::_SPOILED_STEP].fill_(LARGE)
        elif isinstance(kind.value, int):
            self.arena[self.start : self.stop].fill_(kind.value)

    def damage(self) -> tuple[Tensor, Tensor]:
        """Whether the guard before and the guard after were overwritten; two 0-d bool tensors."""
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
        dtype: A dtype of 2 bytes or more.
        device: Where to allocate.
        strides: Strides in elements; None: contiguous.
        shift: Elements between an aligned address and the first element.
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
    """The address space has no room for a tensor whose rows are gigabytes apart."""


@dataclass(frozen=True, slots=True)
class Far(Guarded):
    """A tensor on the CPU whose rows are gigabytes apart; only touched pages take memory.

    It has no guards, and writes between its rows are not detected.
    """

    def damage(self) -> tuple[Tensor, Tensor]:
        """See `Guarded`; always false, as there are no guards."""
        return torch.tensor(False), torch.tensor(False)


def far(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> Far:
    """Allocate a tensor of zeros with a stride beyond 32 bits.

    Raises:
        NoRoomError: If the system refuses to map that much address space.
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
    """Return an int64 vector that identifies the arena's bits.

    A small arena is copied, so the comparison is exact. In a larger arena, the 8-byte words that
    are a prime number of words apart are summed modulo 2**64: this reads the data once and needs no
    second buffer of that size. Any single change is detected; several changes go undetected only if
    they cancel exactly within one sum.
    """
    return Together({"": buffer}).prints()


def _words(buffer: Guarded) -> Tensor:
    """The words of a fingerprint; those of a small arena are not copied."""
    if isinstance(buffer, Far):
        return buffer.tensor.contiguous().view(torch.int16).flatten().long()
    words = buffer.arena.view(torch.int64)
    rows = words.numel() // _COLUMNS
    if rows < 2:
        return words
    body = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(dim=0)
    rest = words[rows * _COLUMNS :]
    body[: rest.numel()] += rest
    return body


class Together:
    """Several buffers, whose bits are read and compared together.

    On a GPU, the launches of small operations take most of a certificate's time. So all buffers
    share one operation, and results are told apart by buffer at the end only.
    """

    def __init__(self, buffers: Mapping[str, Guarded]) -> None:
        self._buffers = dict(buffers)
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def prints(self) -> Tensor:
        """The fingerprints of all buffers, one after the other."""
        words = [_words(buffer) for buffer in self._buffers.values()]
        self._lengths = [part.numel() for part in words]
        return torch.cat(words) if words else torch.zeros(0, dtype=torch.int64)

    def contents(self) -> Tensor:
        """A copy of all arenas, one after the other."""
        arenas = [buffer.arena for buffer in self._buffers.values()]
        self._lengths = [arena.numel() for arena in arenas]
        return torch.cat(arenas) if arenas else torch.zeros(0, dtype=torch.int16)

    def put_back(self, contents: Tensor) -> None:
        """Overwrite all arenas with an earlier `contents`."""
        lengths = [buffer.arena.numel() for buffer in self._buffers.values()]
        parts = torch.split(contents, lengths)
        for buffer, part in zip(self._buffers.values(), parts, strict=True):
            buffer.arena.copy_(part)

    def where(self, differs: Tensor | None) -> list[str]:
        """The buffers of which an element differs.

        Args:
            differs: A bool for each element of the last `prints` or `contents`; None: nothing was
                compared.
        """
        if differs is None:
            return []
        parts = torch.split(differs, self._lengths)
        return [name for name, part in zip(self._buffers, parts, strict=True) if bool(part.any())]

    def is_damaged(self, device: torch.device) -> Tensor:
        """Whether any guard was overwritten, as a 0-d bool tensor."""
        guards = [
            guard
            for buffer in self._buffers.values()
            if not isinstance(buffer, Far)
            for guard in (buffer.arena[: buffer.start], buffer.arena[buffer.stop :])
        ]
        if not guards:
            return torch.zeros((), dtype=torch.bool, device=device)
        return (torch.cat(guards) != PATTERN).any()

    def damages(self) -> list[str]:
        """Describe which guards were overwritten."""
        told = []
        for name, buffer in self._buffers.items():
            before, after = buffer.damage()
            if bool(before):
                told.append(f"wrote before the start of {name}")
            if bool(after):
                told.append(f"wrote past the end of {name}")
        return told
