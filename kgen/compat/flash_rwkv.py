"""Functions of flash-rwkv: [B, T, C], raw decays, states [B, H, V, K].

Unlike the published functions they are correct for B > 1, differentiable, and accept any head size.
"""

from __future__ import annotations

from torch import Tensor

from ._library import names_mistakes
from ._wkv import heads, per_head, wkv


@names_mistakes
def rwkv5_cuda_linear_attention(
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """flash-rwkv's `rwkv5_cuda_linear_attention` by `kgen_ops.wkv5`.

    Args:
        receptance, key, value: [B, T, C].
        time_decay: [C] or [H, N]; raw: the decay is exp(-exp(time_decay)).
        time_first: [C] or [H, N].
        state: [B, H, V, K] in fp32. kgen_ops has [B, H, K, V], so the state is copied unless an
            earlier call returned it.
    Returns:
        The output [B, T, C], and the state [B, H, V, K] as a view. `state` itself is not changed.
    Raises:
        NotImplementedError: If the library has no wkv5.
    """
    count = state.shape[1]
    out, final = wkv(
        "wkv5", heads(receptance, count), heads(key, count),
        heads(value, count), per_head(time_decay, count), per_head(time_first, count),
        initial_state=state.mT, return_final_state=True, raw=True,
    )
    assert final is not None  # return_final_state=True
    return out.flatten(2), final.mT


@names_mistakes
def rwkv6_cuda_linear_attention(
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """flash-rwkv's `rwkv6_cuda_linear_attention` by `kgen_ops.wkv6`.

    As `rwkv5_cuda_linear_attention`, but `time_decay` is [B, T, C] and the output [B, T, H, N].

    Raises:
        NotImplementedError: If the library has no wkv6.
    """
    count = state.shape[1]
    out, final = wkv(
        "wkv6", heads(receptance, count), heads(key, count),
        heads(value, count), heads(time_decay, count), per_head(time_first, count),
        initial_state=state.mT, return_final_state=True, raw=True,
    )
    assert final is not None
    return out, final.mT
