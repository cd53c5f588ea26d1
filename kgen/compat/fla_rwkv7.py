"""FLA's functions for RWKV-7: [B, T, H, features], w the log decay."""

from __future__ import annotations

from torch import Tensor

from ._library import names_mistakes, refuse
from ._wkv7 import wkv7


@names_mistakes
def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `chunk_rwkv7` by `kgen_ops.wkv7`; layout, decay and states are the same.

    Args:
        r, w, k, a, b: [B, T, H, K]; w is the log decay.
        v: [B, T, H, V].
        scale: Factor of the output; None: K ** -0.5.
        initial_state: [B, H, K, V]; converted to fp32 if it has another dtype.
        output_final_state: Whether to return the final state, in fp32.
        cu_seqlens: [N + 1]; bounds of the sequences packed into T.
        cu_seqlens_cpu: Ignored: this function does not synchronise.
        safe_gate, lower_bound: Ignored: the kernels serve every decay.
        chunk_size, disable_recompute: Ignored: the tuned kernel makes its own choices.
        cp_context: Must be None.
    Returns:
        The output [B, T, H, V] and the final state or None.
    Raises:
        NotImplementedError: If the library has no wkv7, or a cp_context is given.
    """
    if cp_context is not None:
        refuse("chunk_rwkv7", "cp_context", cp_context, "None",
               "hand states on by initial_state and output_final_state")
    return _rwkv7(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


@names_mistakes
def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `fused_recurrent_rwkv7` by `kgen_ops.wkv7`.

    It is the same call as `chunk_rwkv7` with other defaults: the scale is K ** -0.5, and the final
    state is returned. The dispatch table chooses the best kernel for a problem.

    Raises:
        NotImplementedError: If the library has no wkv7.
    """
    return _rwkv7(r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


@names_mistakes
def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FLA's `fused_mul_recurrent_rwkv7` by `kgen_ops.wkv7`, which takes -kk and kk * a.

    The two products are computed before the kernel, in the dtype of kk. Unlike the published
    function this one has gradients.

    Args:
        r, w, k: [B, T, H, K]; w is the log decay.
        v: [B, T, H, V].
        kk: [B, T, H, K]; the key whose value in the state is replaced.
        a: [B, T, H, K]; the share of that value that is replaced.
        scale: Factor of the output; None: K ** -0.5.
        initial_state, output_final_state, cu_seqlens: As for `chunk_rwkv7`.
        reverse: Must be False.
    Returns:
        The output [B, T, H, V] and the final state or None.
    Raises:
        NotImplementedError: If the library has no wkv7, or `reverse` is set.
    """
    if reverse:
        refuse("fused_mul_recurrent_rwkv7", "reverse", True, "False",
               "flip the time dim of the inputs and of the output instead")
    return _rwkv7(r, w, k, v, -kk, kk * a, scale, initial_state, output_final_state, cu_seqlens)


def _rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    return wkv7(r, w, k, v, a, b, decay_form="log",
                scale=r.shape[-1] ** -0.5 if scale is None else scale,
                initial_state=initial_state, return_final_state=output_final_state,
                cu_seqlens=cu_seqlens)
