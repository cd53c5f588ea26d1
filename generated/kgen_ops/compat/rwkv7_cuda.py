"""RWKV-7's functions of RWKV-CUDA, RWKV-LM and wind_rwkv: raw decays, states [B, H, V, K].

Unlike the published functions they take any T, any head size, and fp32, fp16 and bf16.
"""

from __future__ import annotations

from torch import Tensor

from ._library import names_mistakes
from ._wkv import heads
from ._wkv7 import wkv7


@names_mistakes
def RWKV7_CLAMPW_CUDA(  # noqa: N802 - the published name
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, HEAD_SIZE: int = 64  # noqa: N803 - published
) -> Tensor:
    """RWKV-CUDA's `RWKV7_CLAMPW_CUDA` by `kgen_ops.wkv7`.

    Args:
        r, w, k, v, a, b: [B, T, C]; the decay is exp(-exp(-0.5) * sigmoid(w)).
        HEAD_SIZE: Number of features of a head.
    Returns:
        y [B, T, C].
    Raises:
        NotImplementedError: If the library has no wkv7.
        ValueError: If HEAD_SIZE does not divide C.
    """
    return _clamped("RWKV7_CLAMPW_CUDA", (r, w, k, v, a, b), HEAD_SIZE, None, False)[0]


@names_mistakes
def RWKV7_STATE_CLAMPW_CUDA(  # noqa: N802 - the published name
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> Tensor:
    """RWKV-CUDA's `RWKV7_STATE_CLAMPW_CUDA`: as `RWKV7_CLAMPW_CUDA`, with an initial state.

    Args:
        s0: [B, H, V, K]; converted to fp32. kgen_ops has [B, H, K, V], so the state is copied.
        r, w, k, v, a, b: [B, T, C]; a head has K features.
    Returns:
        y [B, T, C].
    Raises:
        NotImplementedError: If the library has no wkv7.
        ValueError: If K does not divide C.
    """
    return _clamped("RWKV7_STATE_CLAMPW_CUDA", (r, w, k, v, a, b), s0.shape[-1], s0, False)[0]


@names_mistakes
def RWKV7_STATE_PASSING_CLAMPW_CUDA(  # noqa: N802 - the published name
    s0: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """RWKV-CUDA's `RWKV7_STATE_PASSING_CLAMPW_CUDA`: the final state as well.

    Args:
        s0: [B, H, V, K]; converted to fp32, and copied unless an earlier call returned it.
        r, w, k, v, a, b: [B, T, C]; a head has K features.
    Returns:
        y [B, T, C], and the final state [B, H, V, K] in fp32 as a view.
    Raises:
        NotImplementedError: If the library has no wkv7.
        ValueError: If K does not divide C.
    """
    y, final = _clamped(
        "RWKV7_STATE_PASSING_CLAMPW_CUDA", (r, w, k, v, a, b), s0.shape[-1], s0, True
    )
    assert final is not None  # a final state was asked for
    return y, final.mT


@names_mistakes
def attn_chunked_cuda(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """wind_rwkv's `attn_chunked_cuda` by `kgen_ops.wkv7`.

    Args:
        r, w, k, v, a, b: [B, T, H, C]; the decay is exp(-exp(w)).
        s0: [B, H, V, K] or None for zeros; copied if its dtype is not fp32, or its layout is not
            the layout of a returned state.
    Returns:
        y [B, T, H, C], and the final state [B, H, V, K] in the dtype of w, as published.
    Raises:
        NotImplementedError: If the library has no wkv7.
    """
    return _wind(r, w, k, v, a, b, s0, None)


@names_mistakes
def attn_chunked_cuda_varlen(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """wind_rwkv's `attn_chunked_cuda_varlen` by `kgen_ops.wkv7`: packed sequences.

    Args:
        r, w, k, v, a, b: [T, H, C]; the decay is exp(-exp(w)).
        s0: [N, H, V, K] or None for zeros.
        cu_seqlens: [N + 1]; bounds of the sequences, of any lengths.
    Returns:
        y [T, H, C], and the final states [N, H, V, K] in the dtype of w.
    Raises:
        NotImplementedError: If the library has no wkv7.
    """
    rows = [x.unsqueeze(0) for x in (r, w, k, v, a, b)]
    y, final = _wind(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], s0, cu_seqlens)
    return y.squeeze(0), final


def _wind(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, s0: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    y, final = wkv7(r, w, k, v, a, b, decay_form="raw",
                    initial_state=None if s0 is None else s0.mT, return_final_state=True,
                    cu_seqlens=cu_seqlens)
    assert final is not None
    return y, final.mT.to(w.dtype)


def _clamped(
    caller: str, rows: tuple[Tensor, ...], size: int, s0: Tensor | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    features = rows[0].shape[-1]
    if size < 1 or features % size:
        raise ValueError(f"{caller}: the head size {size} does not divide C = {features}\n"
                         "  allowed: divisors of C")
    r, w, k, v, a, b = (heads(x, features // size) for x in rows)
    y, state = wkv7(r, w, k, v, a, b, decay_form="clamp",
                    initial_state=None if s0 is None else s0.mT, return_final_state=final)
    return y.flatten(2), state
