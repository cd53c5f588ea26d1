"""Translate calls of the functions that FLA dispatches to calls of this library's operators.

Each function here has the name and the arguments of the function in FLA 0.6.0. It returns the call
of the operator and computes nothing. It raises `DeclinedError` for a call that the operator does
not serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class DeclinedError(Exception):
    """The library declines a call, which FLA's own function then serves; the message says why."""


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        operator: Name of the operator.
        tensors: One entry per input; None for an input that is left out.
        scalars: The value of each scalar.
        flags: The choice of each of the signature's `flags`, then of each option.
        results: Converts the operator's results to the results of FLA's function.
        backward: Whether the call is of the operator's backward pass.
    """

    operator: str
    tensors: tuple[Tensor | None, ...]
    scalars: tuple[float, ...]
    flags: tuple[bool | str, ...]
    results: Callable[[Any], tuple[Any, ...]]
    backward: bool = False


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object = None,
    lower_bound: float | None = None,
    **others: object,
) -> Call:
    """The delta rule with a diagonal plus low-rank transition, by wkv7.

    `cu_seqlens_cpu`, `safe_gate`, `chunk_size` and `disable_recompute` choose FLA's implementation
    and have no effect here.
    """
    _only(others, cp_context=(cp_context, None))
    if lower_bound is not None and lower_bound >= 0:  # FLA's function raises an error
        raise DeclinedError(f"lower_bound = {lower_bound} is not negative")
    return Call("wkv7", (q, gk, k, v, a, b, initial_state, cu_seqlens), (_scale(scale, k),),
                (bool(output_final_state), "log"), _with_state(output_final_state, lambda y: y))


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: object,
) -> Call:
    """Linear attention without a gate, by linear_attention."""
    _only(others, g=(g, None), g_gamma=(g_gamma, None), reverse=(reverse, False),
          state_v_first=(state_v_first, False), cu_seqlens=(cu_seqlens, None))
    return _linear_attention(q, k, v, scale, initial_state, output_final_state)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: object,
) -> Call:
    """The same call as `fused_recurrent_simple_gla`: the dispatch table chooses the kernel."""
    _only(others, g=(g, None), g_gamma=(g_gamma, None), cu_seqlens=(cu_seqlens, None))
    return _linear_attention(q, k, v, scale, initial_state, output_final_state)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
    **others: object,
) -> Call:
    """Rows normalised by their root mean square, by rmsnorm."""
    _only(others, is_rms_norm=(is_rms_norm, True), num_groups=(num_groups, 1), bias=(bias, None))
    _same_dtype(x, out_dtype=out_dtype, residual_dtype=residual_dtype)

    def results(made: Any) -> tuple[Any, ...]:
        return made.y, None, made.rstd, x if residual is None else made.h

    return Call("rmsnorm", (x, weight, residual), (eps, 0.0), (True,), results)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
    **others: object,
) -> Call:
    """The gradients of `layer_norm_fwd`, by rmsnorm_backward; x is the input of the norm."""
    _only(others, is_rms_norm=(is_rms_norm, True), num_groups=(num_groups, 1), bias=(bias, None),
          mean=(mean, None), recompute_output=(recompute_output, False))
    _same_dtype(x, x_dtype=x_dtype)
    if rstd is None:
        raise DeclinedError("rstd = None is not supported")  # needs eps, which FLA does not pass

    def results(made: Any) -> tuple[Any, ...]:
        dx, dw = (made, None) if weight is None else made
        return dx, dw, None, dx if has_residual else None

    # With rstd the kernels do not read eps.
    return Call("rmsnorm", (dy, x, weight, rstd, dres), (1e-6, 0.0), (), results, backward=True)


def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: Tensor | None,
    output_final_state: bool,
) -> Call:
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    return Call("linear_attention", (*by_head, initial_state, None), (_scale(scale, k), 0.0),
                (bool(output_final_state), False, False, False),
                _with_state(output_final_state, lambda out: out.transpose(1, 2)))


def _with_state(
    final: bool, output: Callable[[Tensor], Tensor]
) -> Callable[[Any], tuple[Any, ...]]:
    """Convert results to the output and the final state, or None if the state is not wanted."""
    return lambda made: (output(made[0]), made[1]) if final else (output(made), None)


def _scale(scale: float | None, k: Tensor) -> float:
    if scale is None:
        return float(k.shape[-1] ** -0.5)
    if not isinstance(scale, int | float):  # to read a tensor's value, the host would have to wait
        raise DeclinedError(f"scale is a {type(scale).__name__}")
    return float(scale)


def _only(others: dict[str, object], **pairs: tuple[object, object]) -> None:
    """Decline arguments that FLA 0.6.0 does not have, and values that no operator serves.

    Args:
        others: Unknown arguments, by name.
        pairs: By name: the given value, and the only value that is served.
    """
    for name in others:
        raise DeclinedError(f"argument {name} is not known")
    for name, (given, served) in pairs.items():
        alike = given is None if served is None else not isinstance(given, Tensor) and (
            given == served)
        if not alike:
            what = f"a {type(given).__name__}" if isinstance(given, Tensor) else given
            raise DeclinedError(f"{name} = {what} is not supported, only {served}")


def _same_dtype(x: Tensor, **dtypes: torch.dtype | None) -> None:
    for name, dtype in dtypes.items():
        if dtype not in (None, x.dtype):
            raise DeclinedError(f"{name} = {dtype}, but x has {x.dtype}")
