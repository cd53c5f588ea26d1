"""The recurrence of wkv7 and its gradients with few torch ops per step.

On a GPU an op costs some microseconds however small it is, so the only ops per step are those that
compute a new state. The gradient G of the state is such a recurrence, too, from the last step to
the first. Everything that is read from states is computed for many steps at once.

Steps are in chunks, [L, C, n, features]: step l of chunk c, of n rows of batch and heads. States
are [n, K, V]. First the states before all chunks are computed (`starts`), then all chunks at once
from these, as many as `_STATE_ELEMENTS` allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# Elements of states held at a time: few launches on a GPU, the size of a cache on a CPU.
_STATE_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 18}
# States in one batched product; more are no fewer launches.
_MAX_STATES = 1 << 15
# Fewer steps than these one after the other are fewer ops.
_FEW_STEPS = 16
# Elements of one step's states from which a CPU is busy with them, and not with launching ops.
_MANY_ELEMENTS = 1 << 13


class Rows(NamedTuple):
    """What a recurrence takes per step, [T, n, features].

    S_t = diag(decay_t) S_{t-1} + k_t v_t^T + write_t (read_t S_{t-1})^T

    Attributes:
        decay, read, write, k: [T, n, K].
        v: [T, n, V].
        given: [T, n, V], in place of the sums read_t S_{t-1}; None: they are computed.
    """

    decay: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    given: torch.Tensor | None


class Part(NamedTuple):
    """Steps [L, g, features] that `advance` computes; `exists` is None where all rows have one."""

    rows: Rows
    exists: list[torch.Tensor | None]


@dataclass(frozen=True)
class _Chunks:
    """All steps in chunks, [L, C, n, features].

    Attributes:
        rows: The steps.
        exists: [L, C, n, 1, 1], whether a row has a step; None: always.
        full: Per step and chunk, whether all rows have it.
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
        """The rows of both, [L, C, 2n, features]."""
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
        lengths: Of each batch row, its number of steps; None: T. n is a multiple of their number.
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
    """[T, n, features] as [L, C, n, features], 0 after the end."""
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    chunks = -(-x.shape[0] // steps)
    if chunks == 1:
        return x[:, None]
    x = F.pad(x, (0, 0, 0, 0, 0, steps * chunks - x.shape[0]))
    return x.view(chunks, steps, *x.shape[1:]).transpose(0, 1).contiguous()


def joined(x: torch.Tensor, chunks: int, total: int) -> torch.Tensor:
    """[L, C * n, features] as [T, n, features]."""
    return x.view(x.shape[0], chunks, -1, x.shape[2]).transpose(0, 1).flatten(0, 1)[:total]


def column(x: torch.Tensor) -> torch.Tensor:
    return x[..., None]


def row(x: torch.Tensor) -> torch.Tensor:
    return x[..., None, :]


def read_keys(keys: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """A sum over keys, of all states: [L, g, V]."""
    import torch

    made = torch.bmm(row(keys).flatten(0, 1), states.flatten(0, 1))
    return made.view(*states.shape[:2], states.shape[3])


def read_values(states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sum over value features, of all states: [L, g, K]."""
    import torch

    made = torch.bmm(states.flatten(0, 1), column(values).flatten(0, 1))
    return made.view(states.shape[:3])


def is_at_once(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether chunks are computed at once: fewer ops, and more arithmetic."""
    if k.shape[0] < _FEW_STEPS:
        return False
    if k.device.type != "cpu":
        return True
    return _is_float64(k) and k.shape[1:].numel() * v.shape[2] < _MANY_ELEMENTS


def _is_float64(x: torch.Tensor) -> bool:
    import torch

    return x.dtype == torch.float64


def root_steps(k: torch.Tensor) -> int:
    """About as many steps as there are chunks of them."""
    return max(1, math.isqrt(k.shape[0]))


def block_steps(k: torch.Tensor, v: torch.Tensor) -> int:
    """As many steps as states of them may be held."""
    return min(k.shape[0], max(1, _held(k, v.shape[2]) // k.shape[1]))


def _held(k: torch.Tensor, columns: int) -> int:
    """States that may be held at a time."""
    elements = _STATE_ELEMENTS["cpu" if k.device.type == "cpu" else "cuda"]
    return min(_MAX_STATES, elements // (k.shape[-1] * columns))


class Room:
    """Memory for the states of groups, one group after the other."""

    def __init__(self, like: torch.Tensor, steps: int, rows: int) -> None:
        """Of states like the given ones, [n, K, V]; at most `rows` of them after each step."""
        self._shape = (steps + 1, -1, *like.shape[1:])
        self._flat = like.new_empty((steps + 1) * rows * like.shape[1:].numel())

    def states(self, rows: int) -> torch.Tensor:
        """[steps + 1, rows, K, V], of any values."""
        steps, _, keys, columns = self._shape
        return self._flat[: steps * rows * keys * columns].view(self._shape)


def groups(chunks: _Chunks, columns: int, states: int) -> list[tuple[int, int]]:
    """The chunks of all rows, some at a time: (first, last + 1) of C * n.

    Args:
        chunks: Of which.
        columns: Of a state.
        states: Held per chunk and row.
    """
    total = chunks.rows.k.shape[1] * chunks.rows.k.shape[2]
    each = max(1, _held(chunks.rows.k, columns) // states)
    return [(first, min(first + each, total)) for first in range(0, total, each)]


def starts(chunks: _Chunks, state: torch.Tensor) -> torch.Tensor:
    """The state before each chunk, and after the last: [C + 1, n, K, V].

    In fp32 one step after the other, as in a kernel. In float64 all chunks at once, each as a
    matrix that multiplies the state before it, plus its own state from 0. Inf and NaN would
    multiply other elements of that matrix than those that the steps multiply: then, too, one step
    after the other.
    """
    if _is_float64(state):
        found = _starts_at_once(chunks, state)
        if bool(found.isfinite().all()):
            return found
    return starts_in_turn(chunks, state, chunks.rows.k.shape[1])


def starts_in_turn(chunks: _Chunks, state: torch.Tensor, count: int) -> torch.Tensor:
    """The states before the first `count` chunks, and after these: [count + 1, n, K, V]."""
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

    `_starts_at_once` has states with more columns than v: v is of the last ones, elsewhere 0.
    A tensor of `into` may not be the state before its step. Where a row has no step its state
    stays, also where it is Inf or NaN.
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
