"""RWKV-7's decoding functions of RWKV-LM and Albatross, with the state updated in place.

Unlike the published functions they take any head size, and fp32, fp16 and bf16. The state,
[B, H, V, K], is not copied. Like the published functions they have no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import names_mistakes, operator_of
from ._wkv import heads

_OPERATOR = operator_of("wkv7_decode")


@names_mistakes
def rwkv7_wkv_fp32_v2(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor,  # noqa: N803 - published
    a: Tensor, b: Tensor, y: Tensor,
) -> None:
    """Albatross's `rwkv7_wkv_fp32_v2.forward` by `kgen_ops.wkv7_decode`.

    Args:
        B, T, C, H: Number of sequences, steps, features, heads.
        state: fp32, [B, H, V, K]; updated in place.
        r, w, k, v, a, b: [B, T, C]; the decay is exp(-exp(-0.5) * sigmoid(w)).
        y: [B, T, C]; written.
    Raises:
        NotImplementedError: If the library has no wkv7_decode, or a gradient is wanted.
        ValueError: If the tensors are not of these shapes, or H does not divide C.
        TypeError: If the state is not fp32.
    """
    _decode("rwkv7_wkv_fp32_v2", (B, T, C, H), state, (r, w, k, v, a, b), y, "clamp")


@names_mistakes
def wkv7s(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor,  # noqa: N803 - published
    a: Tensor, b: Tensor, y: Tensor,
) -> None:
    """RWKV-LM's `torch.ops.wkv7s.forward` by `kgen_ops.wkv7_decode`.

    Args:
        B, T, C, H: Number of sequences (RWKV-LM has one), steps, features, heads.
        state: fp32, [B, H, V, K], or [H, V, K] if B is 1; updated in place.
        r, w, k, v, a, b: [B, T, C], or [T, C] if B is 1; the decay is exp(-exp(w)).
        y: Shape of r; written.
    Raises:
        NotImplementedError: If the library has no wkv7_decode, or a gradient is wanted.
        ValueError: If the tensors are not of these shapes, or H does not divide C.
        TypeError: If the state is not fp32.
    """
    _decode("wkv7s", (B, T, C, H), state, (r, w, k, v, a, b), y, "raw")


def _decode(
    caller: str, extents: tuple[int, int, int, int], state: Tensor, rows: tuple[Tensor, ...],
    y: Tensor, decay_form: str,
) -> None:
    batch, steps, features, count = extents
    if count < 1 or features % count:
        raise ValueError(f"{caller}: H = {count} does not divide C = {features}\n"
                         "  allowed: divisors of C")
    size = features // count
    shapes = [(batch, steps, features), *([(steps, features)] if batch == 1 else [])]
    for name, x in zip("rwkvaby", (*rows, y), strict=True):
        if tuple(x.shape) not in shapes:
            raise ValueError(f"{caller}: {name} has shape {tuple(x.shape)}; want "
                             f"{' or '.join(map(str, shapes))}, as B, T and C say")
    if tuple(state.shape[-3:]) != (count, size, size) or state.numel() != batch * features * size:
        raise ValueError(f"{caller}: state has shape {tuple(state.shape)}; want "
                         f"{(batch, count, size, size)}, as B, C and H say")
    if y.device != rows[0].device or y.layout is not torch.strided or not y.is_floating_point():
        # Checked here because an error of `copy_` would come after the state's update.
        raise ValueError(f"{caller}: y is a {y.dtype} tensor of layout {y.layout} on {y.device}, "
                         f"and the call writes into it\n  next: pass "
                         f"torch.empty_like(r), on {rows[0].device}")
    pool = state if state.ndim == 4 else state.unsqueeze(0)
    r, w, k, v, a, b = (heads(_batched(x), count) for x in rows)
    made = _OPERATOR(r, w, k, v, a, b, pool.mT, decay_form=decay_form)
    _batched(y).copy_(made.flatten(2))


def _batched(x: Tensor) -> Tensor:
    """[T, C] as [1, T, C]."""
    return x if x.ndim == 3 else x.unsqueeze(0)
