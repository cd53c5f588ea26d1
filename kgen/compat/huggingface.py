"""Functions of the RWKV models for Hugging Face transformers: [B, T, C], raw decays, states
[B, H, K, V].
"""

from __future__ import annotations

from torch import Tensor

from ._wkv import heads, per_head, wkv


def rwkv5_linear_attention(
    training: bool,
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The `rwkv5_linear_attention` of `modeling_rwkv5` by `kgen_ops.wkv5`.

    Args:
        training: Ignored: the same kernels serve training and inference.
        receptance, key, value: [B, T, C].
        time_decay: [H, N] or [C]; raw: the decay is exp(-exp(time_decay)).
        time_first: [H, N].
        state: [B, H, K, V], or None for zeros; another dtype than fp32, or another layout, is
            copied.
    Returns:
        The output [B, T, H, N] in the dtype of `value`, as the published CUDA kernel's (the
        published loop returns fp32), and the state [B, H, K, V] in fp32.
    Raises:
        NotImplementedError: If the library has no wkv5.
    """
    count = time_first.shape[0]
    out, final = wkv(
        "wkv5", heads(receptance, count), heads(key, count),
        heads(value, count), per_head(time_decay, count), time_first, initial_state=state,
        return_final_state=True, raw=True,
    )
    assert final is not None  # return_final_state=True
    return out, final


def rwkv6_linear_attention(
    training: bool,
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The `rwkv6_linear_attention` of `modeling_rwkv6` by `kgen_ops.wkv6`.

    As `rwkv5_linear_attention`, but `time_decay` is [B, T, C].

    Raises:
        NotImplementedError: If the library has no wkv6.
    """
    count = time_first.shape[0]
    out, final = wkv(
        "wkv6", heads(receptance, count), heads(key, count),
        heads(value, count), heads(time_decay, count), time_first, initial_state=state,
        return_final_state=True, raw=True,
    )
    assert final is not None
    return out, final
