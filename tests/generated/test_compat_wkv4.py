"""The adapters of RWKV-4's published functions, on the host's kernels, against a float64 loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import references
import torch
from operator_cases import Outputs, agree_with, close, randn
from torch import Tensor

B, T, C = 2, 11, 6


def given() -> dict[str, Tensor]:
    """w raw; the state [B, C, 3]."""
    state = torch.stack([torch.randn(B, C), 1 + torch.rand(B, C), torch.randn(B, C)], dim=-1)
    return {"w": randn(C), "u": randn(C), "k": randn(B, T, C), "v": randn(B, T, C),
            "state": state.requires_grad_()}


def reference(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> Outputs:
    return references.wkv4(k, v, -w.exp(), u, state)


def test_fla(compat: ModuleType) -> None:
    def function(state: Tensor, **x: Tensor) -> Outputs:
        y, final = compat.fused_recurrent_rwkv4(**x, state=state.mT.unsqueeze(2))
        assert final.shape == (B, 3, 1, C)
        return y, final[:, :, 0].mT

    agree_with(reference, function, given())


def test_hugging_face(compat: ModuleType) -> None:
    def function(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Outputs:
        y, final = compat.rwkv_linear_attention(w, u, k, v, state=list(state.unbind(-1)))
        return y, torch.stack(final, dim=-1)

    inputs = given()
    agree_with(reference, function, inputs)
    plain = [x.detach() for x in list(inputs.values())[:4]]
    y, state = compat.rwkv_linear_attention(*plain)
    assert state is None
    want = reference(*(x.double() for x in plain))
    close(y, want[0])
    y, state = compat.rwkv_linear_attention(*plain, return_state=True)
    close(torch.stack(state, dim=-1), want[1])


def test_hugging_face_decodes_step_by_step(compat: ModuleType) -> None:
    w, u, k, v, _ = (x.detach().bfloat16() for x in given().values())
    whole, end = compat.rwkv_linear_attention(w, u, k, v, return_state=True)
    parts: list[Tensor] = []
    state: list[Tensor] | None = None
    for t in range(T):
        y, state = compat.rwkv_linear_attention(w, u, k[:, t, None], v[:, t, None], state, True)
        parts.append(y)
    assert whole.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert state is not None
    for got, want in zip(state, end, strict=True):
        torch.testing.assert_close(got, want)


def test_rwkv_lm(compat: ModuleType) -> None:
    inputs = given()
    del inputs["state"]
    agree_with(lambda **x: reference(**x)[:1],
               lambda **x: (compat.WKV.apply(B, T, C, *x.values()),), inputs)
    with pytest.raises(ValueError, match=r"k has shape \(2, 11, 6\), but B, T, C = \(2, 12, 6\)"):
        compat.WKV.apply(B, T + 1, C, *(x.detach() for x in inputs.values()))


def test_parameters_of_another_dtype_are_converted(compat: ModuleType) -> None:
    w, u, k, v, _ = (x.detach() for x in given().values())
    y = compat.WKV.apply(B, T, C, w.double(), u.bfloat16(), k, v)
    close(y, compat.WKV.apply(B, T, C, w, u.bfloat16().float(), k, v))


def test_a_state_of_another_shape_is_refused(kgen_ops: ModuleType) -> None:
    w, u, k, v, state = (x.detach() for x in given().values())
    with pytest.raises(ValueError, match=r"initial_state has shape \(2, 6, 2\); want .*B, C, 3"):
        kgen_ops.wkv4(k, v, -w.exp(), u, state[..., :2].contiguous())
    made = kgen_ops.wkv4(k[:, :0], v[:, :0], -w.exp(), u, state, return_final_state=True)
    assert made[1].equal(state)


def test_the_published_names_take_the_published_arguments(compat: ModuleType) -> None:
    def names(function: Callable[..., object]) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(compat.fused_recurrent_rwkv4) == ["w", "u", "k", "v", "state"]
    assert names(compat.WKV.apply) == ["B", "T", "C", "w", "u", "k", "v"]
    assert names(compat.rwkv_linear_attention) == [
        "time_decay", "time_first", "key", "value", "state", "return_state"
    ]
