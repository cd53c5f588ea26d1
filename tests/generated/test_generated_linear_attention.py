"""The generated linear_attention on the CPU: layouts, optional tensors, allow_tf32, torch.compile.

Only its safe kernels are used, because the tests are about the path from a call to the kernel and
back.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kgen.operators.linear_attention import definition

B, H, T, E, M = 2, 3, 20, 9, 5


def tensor(layout: str, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, H, T, features] in one of the layouts that callers have."""
    if layout == "BHTE":
        return torch.randn(B, H, T, features).to(dtype)
    if layout == "BTHE":
        return torch.randn(B, T, H, features).to(dtype).transpose(1, 2)
    if layout == "packed":  # q, k and v side by side
        return torch.randn(B, T, 3, H, features).to(dtype)[:, :, 1].transpose(1, 2)
    assert layout == "expanded"
    return torch.randn(B, H, 1, features).to(dtype).expand(B, H, T, features)


def dense(layout: str, features: int) -> tuple[int, ...]:
    """Strides that an output in a layout has."""
    if layout in ("BTHE", "packed"):
        return (T * H * features, features, H * features, 1)
    return (H * T * features, T * features, features, 1)


@pytest.mark.parametrize("v_layout", ["BHTE", "BTHE", "packed"])
@pytest.mark.parametrize("q_layout", ["BHTE", "BTHE", "packed", "expanded"])
def test_outputs_take_the_layout_of_their_input(
    kgen_ops: ModuleType, q_layout: str, v_layout: str
) -> None:
    q, k, v = tensor(q_layout, E), tensor("BTHE", E), tensor(v_layout, M)
    gout = tensor("BHTE", M)
    for _ in range(2):  # prepared at the first call
        out = kgen_ops.linear_attention(q, k, v, scale=0.5)
        want = definition("forward", {"q": q, "k": k, "v": v}, {"scale": 0.5, "eps": 0.0})["out"]
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        assert out.stride() == dense(v_layout, M)
        gradients = kgen_ops.linear_attention_backward(gout, q, k, v, scale=0.5)
        wanted = definition("backward", {"gout": gout, "q": q, "k": k, "v": v}, {"scale": 0.5})
        for name, got, layout, features in zip(
            ("gq", "gk", "gv"), gradients, (q_layout, "BTHE", v_layout), (E, E, M), strict=True
        ):
            torch.testing.assert_close(got, wanted[name], rtol=1e-4, atol=1e-4)
            if layout != "expanded":
                assert got.stride() == dense(layout, features)


def test_everything_that_there_may_be(kgen_ops: ModuleType) -> None:
    q, k, v = (tensor("BTHE", n).abs() for n in (E, E, M))
    state, keys = torch.randn(B, H, E, M), torch.rand(B, H, E)
    given = {"q": q, "k": k, "v": v, "initial_state": state, "initial_key_sum": keys}
    got = kgen_ops.linear_attention(
        **given, eps=0.5, return_final_state=True, return_final_key_sum=True, return_norm=True
    )
    want = definition("forward", given, {"scale": 1.0, "eps": 0.5, "return_norm": 1.0})
    for tensor_, name in zip(got, ("out", "final_state", "final_key_sum", "norm"), strict=True):
        torch.testing.assert_close(tensor_, want[name], rtol=1e-4, atol=1e-4)
    given |= {
        "gout": tensor("BHTE", M), "norm": got[3], "gout_dot_out": torch.randn(B, H, T),
        "gfinal_state": torch.randn(B, H, E, M), "gfinal_key_sum": torch.randn(B, H, E),
    }
    wanted = definition("backward", given, {"scale": 1.0})
    names = ("gq", "gk", "gv", "ginitial_state", "ginitial_key_sum")
    gradients = kgen_ops.linear_attention_backward(**given)
    for gradient, name in zip(gradients, names, strict=True):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)
    del given["gout_dot_out"]
    with pytest.raises(ValueError, match="gout_dot_out is None"):
        kgen_ops.linear_attention_backward(**given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tf32_may_be_allowed(kgen_ops: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = (tensor("BHTE", n, dtype) for n in (E, E, M))
    plain = kgen_ops.linear_attention(q, k, v)
    assert kgen_ops.linear_attention(q, k, v, allow_tf32=True).equal(plain)  # the naive kernel's


def test_without_a_row_for_rounded_products_an_exact_one_serves(kgen_ops: ModuleType) -> None:
    """The one row is of fp32."""
    dims = {"B": 64, "H": 64, "T": 64, "E": 64, "M": 64}
    steps = {
        dtypes: kgen_ops.explain(
            "linear_attention", **dims, dtype=dtypes[0], product_dtype=dtypes[1], device="cpu"
        ).step
        for dtypes in (("fp32", "fp32"), ("fp32", "tf32"), ("bf16", "bf16"))
    }
    assert list(steps.values()) == ["exact", "nearest", "safe"]


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps(kgen_ops: ModuleType, steps: int) -> None:
    q, k, v = (tensor("BTHE", n)[:, :, :steps] for n in (E, E, M))
    state, keys = torch.randn(B, H, E, M), torch.rand(B, H, E)
    got = kgen_ops.linear_attention(
        q, k, v, state, keys, return_final_state=True, return_final_key_sum=True, return_norm=True
    )
    torch.testing.assert_close(got[1], state + k.transpose(-1, -2) @ v)
    torch.testing.assert_close(got[2], keys + k.sum(2))


def test_compiles_without_a_break(kgen_ops: ModuleType) -> None:
    q, k, v = tensor("BTHE", E), tensor("BTHE", E), tensor("BTHE", M)
    compiled = torch.compile(
        lambda *qkv: kgen_ops.linear_attention(*qkv) * 2, fullgraph=True, backend="aot_eager"
    )
    out = compiled(q, k, v)
    torch.testing.assert_close(out, 2 * kgen_ops.linear_attention(q, k, v))
    assert out.stride() == dense("BTHE", M)
