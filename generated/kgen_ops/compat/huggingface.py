"""Functions of the RWKV models for Hugging Face transformers: [B, T, C], raw decays, states
[B, H, K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import names_mistakes
from ._wkv import heads, per_head, wkv
from ._wkv4 import wkv4


@names_mistakes
def rwkv_linear_attention(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: list[Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, list[Tensor] | None]:
    """The `rwkv_linear_attention` of `modeling_rwkv` (RWKV-4) by `kgen_ops.wkv4`.

    Args:
        time_decay: [C]; raw: the log decay is -exp(time_decay).
        time_first: [C].
        key, value: [B, T, C].
        state: num, den and max, [B, C] each, or None; copied to [B, C, 3] in fp32.
        return_state: Whether to return the state; a call with a state always returns one.
    Returns:
        The output [B, T, C] in the dtype of `key`, and the state in fp32, three views [B, C], or
        None. Unlike the published function, gradients also flow through the states.
    Raises:
        NotImplementedError: If the library has no wkv4.
    """
    initial = None if state is None else torch.stack([x.float() for x in state], dim=-1)
    out, final = wkv4(time_decay, time_first, key, value, initial,
                      return_final_state=return_state or state is not None)
    return out, None if final is None else list(final.unbind(-1))


@names_mistakes
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
        state: [B, H, K, V], or None for zeros; copied if its dtype is not fp32 or its layout
            differs.
    Returns:
        The output [B, T, H, N] in the dtype of `value`, like the output of the published CUDA
        kernel (the published loop returns fp32), and the state [B, H, K, V] in fp32.
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


@names_mistakes
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
