"""Functions of flash-linear-attention (FLA): [B, T, H, features], w the log decay."""

from __future__ import annotations

from torch import Tensor

from ._library import names_mistakes, refuse
from ._linear_attention import linear_attention
from ._wkv import wkv
from ._wkv4 import wkv4

# The epsilon that FLA adds to the norm.
_EPS = 1e-10

KeyValueState = Tensor | tuple[Tensor, Tensor]


@names_mistakes
def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `chunk_rwkv6` by `kgen_ops.wkv6`; layout, decay and states are the same.

    Args:
        r, k, w: [B, T, H, K]; w is the log decay.
        v: [B, T, H, V].
        u: [H, K].
        scale: Factor of the output; None: K ** -0.5 (the default of kgen_ops is 1).
        initial_state: [B, H, K, V]; converted to fp32 if it has another dtype.
        output_final_state: Whether to return the final state, in fp32.
        cu_seqlens: [N + 1]; bounds of the sequences packed into T.
        cu_seqlens_cpu: Ignored: this function does not synchronise.
        chunk_size: Ignored: the tuned kernel has its own chunk size.
    Returns:
        The output [B, T, H, V] and the final state or None.
    Raises:
        NotImplementedError: If the library has no wkv6.
    """
    return _rwkv6(r, k, v, w, u, scale, initial_state, output_final_state,
                  cu_seqlens)


@names_mistakes
def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `fused_recurrent_rwkv6` by `kgen_ops.wkv6`.

    It is the same call as `chunk_rwkv6`: the dispatch table chooses the best kernel for a problem.

    Arguments, results and errors are those of `chunk_rwkv6`. `reverse` must be False.
    """
    if reverse:
        _refuse_reverse("fused_recurrent_rwkv6")
    return _rwkv6(r, k, v, w, u, scale, initial_state,
                  output_final_state, cu_seqlens)


@names_mistakes
def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: KeyValueState | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, KeyValueState | None]:
    """FLA's `chunk_linear_attn` by `kgen_ops.linear_attention`.

    kgen_ops has the layout [B, H, T, E], of which [B, T, H, E] is a view: nothing is copied.

    Args:
        q, k: [B, T, H, E].
        v: [B, T, H, M].
        scale: Factor of the products; None: E ** -0.5 (the default of kgen_ops is 1).
        initial_state: [B, H, E, M]; with `normalize` a pair of this tensor and the sum of the keys
            so far, [B, 1, H, E]. Dtypes other than fp32 are converted.
        output_final_state: Whether to return the final state, in fp32, in the form of
            `initial_state`.
        normalize: Divide by q_t . (sum of the keys up to t) * scale + 1e-10.
        cu_seqlens: Must be None.
    Returns:
        The output [B, T, H, M] and the final state or None.
    Raises:
        NotImplementedError: If the library has no linear_attention, or cu_seqlens are given.
        ValueError: If `initial_state` is a pair without `normalize`.
    """
    return _linear_attn("chunk_linear_attn", q, k, v, scale, initial_state, output_final_state,
                        normalize, cu_seqlens)


@names_mistakes
def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: KeyValueState | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, KeyValueState | None]:
    """FLA's `fused_recurrent_linear_attn` by `kgen_ops.linear_attention`.

    Arguments, results and errors are those of `chunk_linear_attn`, but `normalize` is False by
    default. `reverse` must be False.
    """
    if reverse:
        _refuse_reverse("fused_recurrent_linear_attn")
    return _linear_attn("fused_recurrent_linear_attn", q, k, v, scale, initial_state,
                        output_final_state, normalize, cu_seqlens)


@names_mistakes
def fused_recurrent_rwkv4(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """FLA's `fused_recurrent_rwkv4` by `kgen_ops.wkv4`.

    Args:
        w: [C]; raw: the log decay is -exp(w).
        u: [C].
        k, v: [B, T, C].
        state: [B, 3, 1, C], (num, den, max); copied to [B, C, 3] in fp32.
    Returns:
        The output [B, T, C], and the state [B, 3, 1, C] in fp32 as a view. Gradients are those of
        kgen_ops.wkv4: a gradient with respect to the final max has no effect.
    Raises:
        NotImplementedError: If the library has no wkv4.
    """
    out, final = wkv4(w, u, k, v, state[:, :, 0].mT, return_final_state=True)
    assert final is not None  # return_final_state=True
    return out, final.mT.unsqueeze(2)


def _rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    return wkv("wkv6", r, k, v, w, u,
               scale=r.shape[-1] ** -0.5 if scale is None else scale,
               initial_state=initial_state, return_final_state=output_final_state,
               cu_seqlens=cu_seqlens)


def _linear_attn(
    caller: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: KeyValueState | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, KeyValueState | None]:
    if cu_seqlens is not None:
        refuse(caller, "cu_seqlens", f"tensor of shape {tuple(cu_seqlens.shape)}", "None",
               "linear_attention does not support packed sequences: call it once per sequence")
    state, key_sum = _parts(caller, initial_state, normalize)
    out, final, final_key_sum = linear_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        eps=_EPS if normalize else 0.0,
        initial_state=None if state is None else state.float().contiguous(),
        initial_key_sum=None if key_sum is None else key_sum.squeeze(1).float().contiguous(),
        return_final_state=output_final_state,
        return_final_key_sum=output_final_state and normalize,
        normalize=normalize,
    )
    out = out.transpose(1, 2)
    if final is None or final_key_sum is None:
        return out, final
    return out, (final, final_key_sum.unsqueeze(1))


def _parts(
    caller: str, initial_state: KeyValueState | None, normalize: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The state and the sum of keys; a caller may give neither, the state alone, or both."""
    if not isinstance(initial_state, tuple | list):
        return initial_state, None
    if not normalize:
        raise ValueError(
            f"{caller}: initial_state is a pair, but normalize = False\n"
            "  allowed: a tensor [B, H, E, M], or normalize=True with (state, sum of keys)"
        )
    if len(initial_state) != 2:
        raise ValueError(
            f"{caller}: initial_state has {len(initial_state)} parts\n"
            "  allowed: a tensor [B, H, E, M], or a pair (state, sum of keys)"
        )
    state, key_sum = initial_state
    return state, key_sum


def _refuse_reverse(caller: str) -> None:
    refuse(caller, "reverse", True, "False",
           "flip the time dim of the inputs and of the output instead")
