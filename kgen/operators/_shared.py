"""The common parts of operators: byte counts, input cases, error scales and scans over time.

Tensors of a scan have the layout [B, H, T, features].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Pass

if TYPE_CHECKING:
    import torch

# Steps per chunk in the chunked float64 scan; about the square root of a typical T.
CHUNK_STEPS = 64


def moved_bytes(pass_: Pass, problem: Problem) -> int:
    """Return the bytes of all tensors of a problem, each read or written once."""
    total = 0
    for tensor in problem.present(pass_).tensors:
        elements = problem.dtype(tensor.dtype).itemsize
        for extent in problem.shape(tensor.dims):
            elements *= extent
        total += elements
    return total


def case_factor(case: str, dtype: torch.dtype) -> float:
    """Return the factor of the values of an input case: `tiny` 1e-4, `huge` 1e4 (fp16: 1e2)."""
    import torch

    if case == "huge":
        return 1e2 if dtype == torch.float16 else 1e4
    return 1e-4 if case == "tiny" else 1.0


def rare_decays(uniform: torch.Tensor) -> torch.Tensor:
    """Return log decays that random ones seldom are: nearly 0, exactly 0, and of -9 to -20.

    Args:
        uniform: Random numbers between 0 and 1, in the shape of the decays. The kinds take turns
            along its elements, so that neighbours differ.
    """
    import torch

    kind = torch.arange(uniform.numel(), device=uniform.device).view(uniform.shape) % 4
    strong = torch.where(kind == 1, -9.0 - 11.0 * uniform, 0.0)
    digits = torch.where(kind == 2, 6.0 + uniform, 2.0 + 4.0 * uniform)
    return torch.where(kind % 2 == 0, -(10.0**-digits), strong)


def plant_at_ends(inputs: dict[str, torch.Tensor]) -> None:
    """Plant NaN in all rows of the first and the last step of every second sequence.

    Args:
        inputs: Changed in place. Rows are [B, T, H, features]; sequences are batch rows, or those
            of `cu_seqlens` if that is given.
    """
    import torch

    rows = [inputs[name] for name in ("r", "k", "v", "gy") if name in inputs]
    length = rows[0].shape[1]
    if "cu_seqlens" in inputs:
        ends = inputs["cu_seqlens"].long()
        pairs = torch.stack((ends[:-1], ends[1:]), dim=1)[1::2]
        steps = pairs[pairs[:, 0] < pairs[:, 1]] - torch.tensor([0, 1], device=ends.device)
        for x in rows:
            x[:, steps.flatten()] = torch.nan
    elif length > 0:
        for x in rows:
            x[1::2, :: max(length - 1, 1)] = torch.nan


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor in fp32, or unchanged if its dtype is wider."""
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def root_sum_square_scale(
    outputs: Mapping[str, torch.Tensor], squares: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return max(|y|, root of the sum of the terms' squares) of each output y.

    Rounding errors of terms are independent, so their squares add. The sum of the terms' magnitudes
    would be larger by the root of the number of terms, and would admit errors that are larger by
    this factor in 16-bit outputs.

    Args:
        outputs: The outputs in float64.
        squares: The definition evaluated on squared inputs: the sums of the terms' squares.
    """
    return {name: y.abs().maximum(squares[name].sqrt()) for name, y in outputs.items()}


def outer_product_scan(
    a: torch.Tensor, b: torch.Tensor, v: torch.Tensor, start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S_t = S_{t-1} + b_t v_t^T and out_t = a_t S_t.

    fp32 adds one step after the other, as a kernel does. float64 scans the chunks in parallel; the
    order of its sums is irrelevant at that precision.

    Args:
        a: [B, H, T, E].
        b: [B, H, T, E].
        v: [B, H, T, M].
        start: S_0, [B, H, E, M]; None: 0.
    Returns:
        out [B, H, T, M], and S_T.
    """
    import torch

    if start is None:
        start = b.new_zeros(*b.shape[:2], b.shape[-1], v.shape[-1])
    if a.shape[2] == 0:
        return v, start
    if a.dtype == torch.float64 and a.shape[2] > CHUNK_STEPS:
        return _chunked_scan(a, b, v, start)
    state, out = start, []
    for a_t, b_t, v_t in zip(a.unbind(2), b.unbind(2), v.unbind(2), strict=True):
        state = torch.addcmul(state, b_t[..., None], v_t[..., None, :])
        out.append((a_t[..., None, :] @ state).squeeze(-2))
    return torch.stack(out, dim=2), state


def _chunked_scan(
    a: torch.Tensor, b: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`outer_product_scan`: scan all chunks from zero, then add the state before each chunk."""
    import torch

    steps = a.shape[2]
    chunks = [in_chunks(x, CHUNK_STEPS) for x in (a, b, v)]
    inside = torch.zeros_like(start)[:, :, None].repeat(1, 1, chunks[0].shape[2], 1, 1)
    out = []
    for a_t, b_t, v_t in zip(*(x.unbind(3) for x in chunks), strict=True):
        inside.addcmul_(b_t[..., None], v_t[..., None, :])
        out.append((a_t[..., None, :] @ inside).squeeze(-2))
    after = start[:, :, None] + inside.cumsum(2)
    before = torch.cat([start[:, :, None], after[:, :, :-1]], dim=2)
    found = torch.stack(out, dim=3) + chunks[0] @ before
    return found.flatten(2, 3)[:, :, :steps], after[:, :, -1]


def in_chunks(x: torch.Tensor, steps: int, pad: float = 0.0) -> torch.Tensor:
    """Return [B, H, chunks, steps, features]; the last chunk is padded with `pad`."""
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    x = F.pad(x, (0, 0, 0, -x.shape[2] % steps), value=pad)
    return x.reshape(*x.shape[:2], x.shape[2] // steps, steps, x.shape[-1])


def reversed_scan(
    a: torch.Tensor, b: torch.Tensor, v: torch.Tensor, end: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`outer_product_scan` from the last step to the first."""
    out, state = outer_product_scan(a.flip(2), b.flip(2), v.flip(2), end)
    return out.flip(2), state


def running_sum(
    x: torch.Tensor, start: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute z_t = z_{t-1} + x_t; fp32 adds one step after the other.

    Args:
        x: [B, H, T, E].
        start: z_0, [B, H, E]; None: 0.
    Returns:
        (z_1 .. z_T) as [B, H, T, E], and z_T.
    """
    import torch

    if start is None:
        start = x.new_zeros(x.shape[0], x.shape[1], x.shape[-1])
    if x.shape[2] == 0:
        return x, start
    if x.dtype == torch.float64:
        sums = start[:, :, None] + x.cumsum(2)
        return sums, sums[:, :, -1]
    total, found = start, []
    for x_t in x.unbind(2):
        total = total + x_t
        found.append(total)
    return torch.stack(found, dim=2), total
