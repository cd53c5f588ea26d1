"""The recurrence of wkv7 and its gradients with few torch ops per step.

On a GPU even a tiny op takes some microseconds, so the only ops per step are those that compute the
new state. The gradient G of the state follows the same kind of recurrence, from the last step to
the first. All products that read states are computed for many steps at once.

Steps are arranged in chunks, [L, C, n, features]: step l of chunk c, for n rows (batch times
heads). States are [n, K, V]. First the states before all chunks are computed (`starts`), then all
chunks at once from these, as many at a time as `_STATE_ELEMENTS` allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# Elements of states in memory at a time: for few launches on a GPU, for the caches on a CPU.
_STATE_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 18}
# Most states in one batched product; more would not reduce the number of launches.
_MAX_STATES = 1 << 15
# With fewer steps than this, a sequential computation needs fewer ops.
_FEW_STEPS = 16
# Elements of one step's states from which on a CPU's time is arithmetic instead of op overhead.
_MANY_ELEMENTS = 1 << 13


class Rows(NamedTuple):
    """The inputs of a recurrence per step, [T, n, features].

    S_t = diag(decay_t) S_{t-1} + k_t v_t^T + write_t (read_t S_{t-1})^T

    Attributes:
        decay, read, write, k: [T, n, K].
        v: [T, n, V].
        given: [T, n, V], used instead of the sums read_t S_{t-1}; None: these are computed.
    """

    decay: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    given: torch.Tensor | None


class Part(NamedTuple):
    """Steps [L, g, features] for `advance`; `exists` is None for a step that all rows have."""

    rows: Rows
    exists: list[torch.Tensor | None]


@dataclass(frozen=True)
class _Chunks:
    """All steps in chunks, [L, C, n, features].

    Attributes:
        rows: The steps.
        exists: [L, C, n, 1, 1], whether a row has a step; None: all rows have all steps.
        full: Per step and chunk, whether all rows have that step.
    """

    rows: Rows
    exists: torch.Tensor | None
    full: list[list[bool]]

    def part(self, first: int, last: int) -> Part:
        """The rows first .. last - 1 of all C * n."""
        n = self.rows.k.shape[2]
        chunks = range(first // n, (last - 1) // n + 1)
        rows = (None if y is None else y.flatten(1, 2)[:, first:last] for y in self.rows)
        if self.exists is None:
            return Part(Rows(*rows), [None] * len(self.full))  # type: ignore[arg-type]
        exists = self.exists.flatten(1, 2)[:, first:last].unbind(0)
        there = [
            None if all(full[c] for c in chunks) else its
            for its, full in zip(exists, self.full, strict=True)
        ]
        return Part(Rows(*rows), there)  # type: ignore[arg-type]

    def flipped(self, *dims: int) -> _Chunks:
        """Steps (0), chunks (1) or both in reversed order."""
        rows = (None if y is None else y.flip(dims) for y in self.rows)
        full = [row[::-1] for row in self.full] if 1 in dims else self.full
        return _Chunks(
            Rows(*rows),  # type: ignore[arg-type]
            None if self.exists is None else self.exists.flip(dims),
            full[::-1] if 0 in dims else full,
        )

    def beside(self, other: _Chunks) -> _Chunks:
        """Concatenate the rows of both, [L, C, 2n, features]."""
        import torch

        def both(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
            return None if a is None or b is None else torch.cat([a, b], dim=2)

        full = [
            [a and b for a, b in zip(*rows, strict=True)]
            for rows in zip(self.full, other.full, strict=True)
        ]
        rows = (both(a, b) for a, b in zip(self.rows, other.rows, strict=True))
        return _Chunks(Rows(*rows), both(self.exists, other.exists), full)  # type: ignore[arg-type]


def chunked(rows: Rows, steps: int, lengths: Sequence[int] | None) -> _Chunks:
    """Cut into chunks of a number of steps; the last one is padded.

    Args:
        rows: [T, n, features].
        steps: L.
        lengths: Number of steps of each batch row; None: T. n is a multiple of the number of batch
            rows.
    """
    import torch

    total, n = rows.k.shape[:2]
    chunks = -(-total // steps)
    parts = (None if y is None else cut(y, steps) for y in rows)
    cut_rows = Rows(*parts)  # type: ignore[arg-type]
    if lengths is None and total == steps * chunks:
        return _Chunks(cut_rows, None, [[True] * chunks] * steps)
    long = torch.tensor(lengths or [total])
    exists = (torch.arange(steps * chunks)[:, None] < long).view(chunks, steps, -1).transpose(0, 1)
    full = exists.all(-1).tolist()
    of_rows = exists.repeat_interleave(n // len(long), dim=2).to(rows.k.device)
    return _Chunks(cut_rows, of_rows[..., None, None], full)


def cut(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Cut [T, n, features] into [L, C, n, features], padded with 0."""
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    chunks = -(-x.shape[0] // steps)
    if chunks == 1:
        return x[:, None]
    x = F.pad(x, (0, 0, 0, 0, 0, steps * chunks - x.shape[0]))
    return x.view(chunks, steps, *x.shape[1:]).transpose(0, 1).contiguous()


def joined(x: torch.Tensor, chunks: int, total: int) -> torch.Tensor:
    """Join [L, C * n, features] to [T, n, features]."""
    return x.view(x.shape[0], chunks, -1, x.shape[2]).transpose(0, 1).flatten(0, 1)[:total]


def column(x: torch.Tensor) -> torch.Tensor:
    return x[..., None]


def row(x: torch.Tensor) -> torch.Tensor:
    return x[..., None, :]


def read_keys(keys: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Products of rows with all states, summed over keys: [L, g, V]."""
    import torch

    made = torch.bmm(row(keys).flatten(0, 1), states.flatten(0, 1))
    return made.view(*states.shape[:2], states.shape[3])


def read_values(states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Products of rows with all states, summed over value features: [L, g, K]."""
    import torch

    made = torch.bmm(states.flatten(0, 1), column(values).flatten(0, 1))
    return made.view(states.shape[:3])


def is_at_once(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether all chunks are computed at once, with fewer ops and more arithmetic."""
    if k.shape[0] < _FEW_STEPS:
        return False
    if k.device.type != "cpu":
        return True
    return _is_float64(k) and k.shape[1:].numel() * v.shape[2] < _MANY_ELEMENTS


def _is_float64(x: torch.Tensor) -> bool:
    import torch

    return x.dtype == torch.float64


def root_steps(k: torch.Tensor) -> int:
    """Steps per chunk such that there are about as many chunks as steps in a chunk."""
    return max(1, math.isqrt(k.shape[0]))


def block_steps(k: torch.Tensor, v: torch.Tensor) -> int:
    """Steps per block, limited by the states that may be in memory."""
    return min(k.shape[0], max(1, _held(k, v.shape[2]) // k.shape[1]))


def _held(k: torch.Tensor, columns: int) -> int:
    """Number of states that may be in memory at a time."""
    elements = _STATE_ELEMENTS["cpu" if k.device.type == "cpu" else "cuda"]
    return min(_MAX_STATES, elements // (k.shape[-1] * columns))


class Room:
    """Memory for the states of a group, reused by the next group."""

    def __init__(self, like: torch.Tensor, steps: int, rows: int) -> None:
        """Allocate memory for states like `like`, [n, K, V]; at most `rows` states per step."""
        self._shape = (steps + 1, -1, *like.shape[1:])
        self._flat = like.new_empty((steps + 1) * rows * like.shape[1:].numel())

    def states(self, rows: int) -> torch.Tensor:
        """Uninitialised states [steps + 1, rows, K, V]."""
        steps, _, keys, columns = self._shape
        return self._flat[: steps * rows * keys * columns].view(self._shape)


def groups(chunks: _Chunks, columns: int, states: int) -> list[tuple[int, int]]:
    """Divide the C * n pairs of chunk and row into groups (first, last + 1).

    Args:
        chunks: The chunks.
        columns: Columns of a state.
        states: States in memory per chunk and row.
    """
    total = chunks.rows.k.shape[1] * chunks.rows.k.shape[2]
    each = max(1, _held(chunks.rows.k, columns) // states)
    return [(first, min(first + each, total)) for first in range(0, total, each)]


def starts(chunks: _Chunks, state: torch.Tensor) -> torch.Tensor:
    """The state before each chunk, and after the last: [C + 1, n, K, V].

    fp32 computes one step after the other, as a kernel does. float64 computes all chunks at once: a
    chunk is a matrix that multiplies the state before it, plus the state that it reaches from 0.
    Matrix products would spread Inf and NaN to other elements than the steps do, so with these,
    float64 also computes one step after the other.
    """
    if _is_float64(state):
        found = _starts_at_once(chunks, state)
        if bool(found.isfinite().all()):
            return found
    return starts_in_turn(chunks, state, chunks.rows.k.shape[1])


def starts_in_turn(chunks: _Chunks, state: torch.Tensor, count: int) -> torch.Tensor:
    """The states before each of the first `count` chunks and after these, computed in sequence:
    [count + 1, n, K, V].
    """
    import torch

    steps, n = chunks.rows.k.shape[0], state.shape[0]
    found = state.new_empty(count + 1, *state.shape)
    found[0] = state
    spare = [torch.empty_like(state), torch.empty_like(state)]
    for c in range(count):
        into = [spare[i % 2] for i in range(steps - 1)]
        advance(chunks.part(c * n, (c + 1) * n), found[c], [*into, found[c + 1]])
    return found


def _starts_at_once(chunks: _Chunks, state: torch.Tensor) -> torch.Tensor:
    import torch

    steps, count, n, keys = chunks.rows.k.shape
    is_diagonal = chunks.rows.given is not None
    columns = state.shape[2] + (0 if is_diagonal else keys)
    made = state.new_empty(count * n, keys, columns)
    for first, last in groups(chunks, columns, 1):
        its = made[first:last]
        spare = [its.new_zeros(its.shape), torch.empty_like(its)]
        if not is_diagonal:
            spare[0][:, :, :keys].diagonal(dim1=1, dim2=2).fill_(1.0)
        into = [*(spare[(i + 1) % 2] for i in range(steps - 1)), its]
        advance(chunks.part(first, last), spare[0], into)
    own = made[:, :, columns - state.shape[2] :].view(count, n, *state.shape[1:])
    found = state.new_empty(count + 1, *state.shape)
    found[0] = state
    if is_diagonal:
        decay = chunks.rows.decay
        if chunks.exists is not None:
            decay = torch.where(chunks.exists[..., 0], decay, 1.0)
        kept = column(decay.prod(0))
        for c in range(count):
            torch.addcmul(own[c], kept[c], found[c], out=found[c + 1])
    else:
        kept = made[:, :, :keys].view(count, n, keys, keys)
        for c in range(count):
            torch.baddbmm(own[c], kept[c], found[c], out=found[c + 1])
    return found


def advance(
    part: Part, state: torch.Tensor, into: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Write the state after each step into a tensor; return the sums over keys, [L, g, columns].

    `_starts_at_once` has states with more columns than v: v belongs to the last columns, and is 0
    in the others. A tensor of `into` must not be the state before its step. If a row does not have
    a step, its state stays unchanged, including Inf and NaN.
    """
    import torch

    x = part.rows
    columns, width = state.shape[2], x.v.shape[2]
    sums = state.new_empty(*x.k.shape[:2], columns) if x.given is None else x.given
    each = (column(x.decay), row(x.read), column(x.write), column(x.k), row(x.v), row(sums))
    by_step = zip(*(y.unbind(0) for y in each), part.exists, into, strict=True)
    for decay, read, write, k, v, total, exists, after in by_step:
        if x.given is None:
            torch.bmm(read, state, out=total)
        torch.mul(decay, state, out=after)
        last = after if columns == width else after[:, :, columns - width :]
        last.addcmul_(k, v)
        after.addcmul_(write, total)
        if exists is not None:
            torch.where(exists, after, state, out=after)
        state = after
    return sums
