"""Code of a user of the library: type checkers find no error in it (`test_types.py`)."""

from __future__ import annotations

from typing import assert_type

import kgen_ops
import torch
from kgen_ops.compat import chunk_rwkv6, rwkv_linear_attention
from kgen_ops.linear_attention import (
    LinearAttentionBackwardResult,
    LinearAttentionResultWithFinalStateAndFinalKeySumAndNorm,
)
from kgen_ops.nn import (
    LinearAttention,
    LinearAttentionState,
    RMSNorm,
    Timex,
    Wkv4,
    Wkv5,
    Wkv6,
    Wkv7,
)
from kgen_ops.rmsnorm import RmsnormBackwardResult, RmsnormResultWithH, RmsnormResultWithHAndRstd
from kgen_ops.timex import TimexBackwardResult
from kgen_ops.wkv4 import Wkv4Result
from kgen_ops.wkv5 import Wkv5Result
from kgen_ops.wkv6 import Wkv6BackwardResultWithGinitialState, Wkv6Result
from kgen_ops.wkv7 import Wkv7Result
from torch import Tensor, nn


def operators(x: Tensor, w: Tensor, state: Tensor, maybe: Tensor | None, flag: bool) -> None:
    """Every operator, with and without optional outputs."""
    assert_type(kgen_ops.rmsnorm(x, w, eps=1e-5), Tensor)
    assert_type(kgen_ops.rmsnorm(x, w, residual=x), RmsnormResultWithH)
    y, h, rstd = kgen_ops.rmsnorm(x, w, x, return_rstd=True)
    assert_type(rstd, Tensor)
    assert_type(kgen_ops.rmsnorm(x, w, x, return_rstd=True), RmsnormResultWithHAndRstd)
    either = kgen_ops.rmsnorm(x, w, maybe)
    print(y if isinstance(either, Tensor) else either.y, h)
    assert_type(kgen_ops.timex(w, x), Tensor)
    assert_type(kgen_ops.linear_attention(x, x, x), Tensor)
    made = kgen_ops.linear_attention(
        x, x, x, state, return_final_state=True, return_final_key_sum=True, return_norm=True,
        allow_tf32=flag,
    )
    assert_type(made, LinearAttentionResultWithFinalStateAndFinalKeySumAndNorm)
    assert_type(made.final_key_sum, Tensor)
    assert_type(kgen_ops.wkv4(x, x, w, w, decay_form="raw"), Tensor)
    assert_type(kgen_ops.wkv4(x, x, w, w, return_final_state=True), Wkv4Result)
    assert_type(kgen_ops.wkv5(x, x, x, w, w, state, return_final_state=True), Wkv5Result)
    assert_type(kgen_ops.wkv6(x, x, x, x, w, decay_form="decay"), Tensor)
    assert_type(kgen_ops.wkv6(x, x, x, x, w, return_final_state=True).final_state, Tensor)
    assert_type(kgen_ops.wkv6(x, x, x, x, w, return_final_state=flag), Tensor | Wkv6Result)
    assert_type(
        kgen_ops.wkv7(x, x, x, x, x, x, return_final_state=True, decay_form="clamp"), Wkv7Result)


def gradients(x: Tensor, w: Tensor, state: Tensor) -> Tensor:
    """Backward passes that are called by hand."""
    assert_type(kgen_ops.rmsnorm_backward(x, x), Tensor)
    assert_type(kgen_ops.rmsnorm_backward(x, x, w), RmsnormBackwardResult)
    assert_type(kgen_ops.timex_backward(x, w, x), TimexBackwardResult)
    assert_type(kgen_ops.linear_attention_backward(x, x, x, x), LinearAttentionBackwardResult)
    made = kgen_ops.wkv6_backward(x, x, x, x, x, w, state)
    assert_type(made, Wkv6BackwardResultWithGinitialState)
    gr, gk, *others = made
    return gr + gk + others[0] + made.gu


class Block(nn.Module):
    """A model of the library's modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6, offset=1.0, device="cpu", dtype=torch.float32)
        self.attention = LinearAttention(width, 2, bias=False)
        self.mixers = nn.ModuleList([
            Wkv4(width), Wkv5(2, width // 2, layer=0, layers=2), Wkv6(2, width // 2),
            Wkv7(2, width // 2, dtype=torch.bfloat16), Timex(width, 128),
        ])

    def forward(self, x: Tensor, state: LinearAttentionState | None = None) -> Tensor:
        """One step of a sequence."""
        y, h = self.norm.forward(x, x)
        made = self.attention.forward(y, state, return_state=True)
        if isinstance(made, Tensor):
            return made
        out, after = made
        return out + h + after.key_sum.sum()


def around(model: nn.Module, x: Tensor, w: Tensor) -> None:
    """Functions of the library that are no operators."""
    patched = kgen_ops.patch(model)
    for swapped in patched.swapped:
        print(swapped.name, swapped.kind, swapped.function, swapped.untried)
    for left in patched.left:
        print(left.name, left.why)
    patched.undo()
    with kgen_ops.capture("calls.yaml", steps=10) as seen:
        kgen_ops.rmsnorm(x, w)
    print([call.problem for call in seen.calls], kgen_ops.misses())
    print(kgen_ops.explain("rmsnorm", M=8, N=16, dtype="fp32", device="cpu").config)
    kgen_ops.warmup("rmsnorm", M=8, N=16, dtype="fp32", device="cpu")
    out, state = chunk_rwkv6(x, x, x, x, w, output_final_state=True)
    print(out, state, rwkv_linear_attention(w, w, x, x)[0])
    try:
        kgen_ops.rmsnorm(x, w)
    except kgen_ops.DispatchError as error:
        print(error)
