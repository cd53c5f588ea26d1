"""The adapters of RWKV-7's published functions, on the host's kernels, against loops in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from operator_cases import Case, Outputs, close, randn
from operator_cases import agree as agree_with_case
from references import recurrence7
from torch import Tensor

B, T, H, K, V = 2, 7, 2, 6, 5


def agree(
    function: Callable[..., Outputs], reference: Callable[..., Outputs], inputs: dict[str, Tensor]
) -> None:
    """Outputs and gradients of all inputs are those of the reference."""
    agree_with_case(Case("wkv7", lambda: inputs, {}, reference), function, inputs)


def raw_decay(w: Tensor) -> Tensor:
    return torch.exp(-w.exp())


def clamped_decay(w: Tensor) -> Tensor:
    """As RWKV-LM's models write it: exp(-exp(-0.5 - softplus(-w)))."""
    return torch.exp(-torch.exp(-torch.nn.functional.softplus(-w) - 0.5))


def rows(values: int = V, log: bool = True) -> dict[str, Tensor]:
    unit = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)
    w = -torch.rand(B, T, H, K) if log else torch.randn(B, T, H, K)
    return {"r": randn(B, T, H, K), "w": w.requires_grad_(), "k": randn(B, T, H, K),
            "v": randn(B, T, H, values), "a": (-unit).requires_grad_(),
            "b": (unit * torch.rand(B, T, H, K)).requires_grad_()}


@pytest.mark.parametrize("name", ["chunk_rwkv7", "fused_recurrent_rwkv7"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_fla(compat: ModuleType, name: str, scale: float | None) -> None:
    def function(initial_state: Tensor, **given: Tensor) -> Outputs:
        made: Outputs = getattr(compat, name)(
            **given, scale=scale, initial_state=initial_state, output_final_state=True)
        return made

    def reference(r: Tensor, w: Tensor, initial_state: Tensor, **given: Tensor) -> Outputs:
        factor = K**-0.5 if scale is None else scale
        return recurrence7(r=r * factor, decay=w.exp(), state=initial_state, **given)

    agree(function, reference, rows() | {"initial_state": randn(B, H, K, V)})


def test_fla_multiplies_kk_by_the_gate(compat: ModuleType) -> None:
    given = rows()
    unit = -given.pop("a").detach()
    given |= {"kk": unit.requires_grad_(), "a": torch.rand(B, T, H, K).requires_grad_()}
    del given["b"]

    def reference(w: Tensor, kk: Tensor, a: Tensor, **rest: Tensor) -> Outputs:
        zeros = w.new_zeros(B, H, K, V)
        return recurrence7(decay=w.exp(), a=-kk, b=kk * a, state=zeros, **rest)

    agree(lambda **x: compat.fused_mul_recurrent_rwkv7(**x, output_final_state=True), reference,
          given)
    with pytest.raises(NotImplementedError, match="fused_mul_recurrent_rwkv7: reverse = True"):
        compat.fused_mul_recurrent_rwkv7(**given, reverse=True)


def test_fla_accepts_what_its_layer_passes(compat: ModuleType) -> None:
    given = {name: x.detach() for name, x in rows().items()}
    y, state = compat.chunk_rwkv7(**given, safe_gate=True, lower_bound=-0.6065306597,
                                  chunk_size=64, cu_seqlens_cpu=None)
    assert state is None
    plain, final = compat.fused_recurrent_rwkv7(**given, scale=1.0)
    assert y.equal(plain)
    assert final.shape == (B, H, K, V)
    with pytest.raises(NotImplementedError, match="chunk_rwkv7: cp_context"):
        compat.chunk_rwkv7(**given, cp_context="group")


def test_packed_sequences_are_alone(compat: ModuleType) -> None:
    given = {name: x.detach()[:1] for name, x in rows().items()}
    bounds = torch.tensor([0, 3, 3, T])
    y, state = compat.chunk_rwkv7(**given, cu_seqlens=bounds, output_final_state=True)
    for n, (first, last) in enumerate([(0, 3), (3, T)]):
        part = {name: x[:, first:last] for name, x in given.items()}
        alone, final = compat.chunk_rwkv7(**part, output_final_state=True)
        close(y[:, first:last], alone)
        close(state[2 * n : 2 * n + 1], final)
    assert not state[1].any()


def test_clamped_decays_and_states_of_values_times_keys(compat: ModuleType) -> None:
    given = {name: x.detach().flatten(2).requires_grad_() for name, x in rows(K, False).items()}
    state = randn(B, H, K, K)

    def reference(s0: Tensor, w: Tensor, **rest: Tensor) -> Outputs:
        its = {name: x.view(B, T, H, K) for name, x in rest.items()}
        y, end = recurrence7(decay=clamped_decay(w.view(B, T, H, K)), state=s0.mT, **its)
        return y.flatten(2), end.mT

    agree(compat.RWKV7_STATE_PASSING_CLAMPW_CUDA, reference, {"s0": state} | given)
    agree(lambda **x: (compat.RWKV7_STATE_CLAMPW_CUDA(**x),),
          lambda **x: reference(**x)[:1], {"s0": state} | given)
    agree(lambda **x: (compat.RWKV7_CLAMPW_CUDA(**x, HEAD_SIZE=K),),
          lambda **x: reference(s0=torch.zeros(B, H, K, K).double(), **x)[:1], given)
    with pytest.raises(ValueError, match=f"the head size 64 does not divide C = {H * K}"):
        compat.RWKV7_CLAMPW_CUDA(**given)


def test_wind_rwkv(compat: ModuleType) -> None:
    def reference(s0: Tensor, w: Tensor, **rest: Tensor) -> Outputs:
        y, end = recurrence7(decay=raw_decay(w), state=s0.mT, **rest)
        return y, end.mT

    given = rows(K, False)
    agree(compat.attn_chunked_cuda, reference, given | {"s0": randn(B, H, K, K)})
    plain = {name: x.detach() for name, x in given.items()}
    zeros = torch.zeros(B, H, K, K)
    close(compat.attn_chunked_cuda(**plain)[0], compat.attn_chunked_cuda(**plain, s0=zeros)[0])


def test_wind_rwkv_of_packed_sequences(compat: ModuleType) -> None:
    given = {name: x.detach()[0] for name, x in rows(K, False).items()}
    state, bounds = torch.randn(2, H, K, K), torch.tensor([0, 4, T])
    y, final = compat.attn_chunked_cuda_varlen(**given, s0=state, cu_seqlens=bounds)
    assert y.shape == (T, H, K)
    for n, (first, last) in enumerate([(0, 4), (4, T)]):
        part = {name: x[None, first:last] for name, x in given.items()}
        alone, end = compat.attn_chunked_cuda(**part, s0=state[n : n + 1])
        close(y[first:last], alone[0])
        close(final[n : n + 1], end)


def test_wind_rwkv_returns_the_state_in_bf16(compat: ModuleType) -> None:
    given = {name: x.detach().bfloat16() for name, x in rows(K, False).items()}
    y, state = compat.attn_chunked_cuda(**given, s0=torch.zeros(B, H, K, K).bfloat16())
    assert y.dtype == state.dtype == torch.bfloat16
    wide = {name: x.double() for name, x in given.items()}
    want, end = recurrence7(decay=raw_decay(wide.pop("w")), state=torch.zeros(B, H, K, K).double(),
                            **wide)
    torch.testing.assert_close(y.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(state.double(), end.mT, rtol=2e-2, atol=2e-2)


def test_the_strongest_clamped_decay() -> None:
    """Both spellings of the clamp agree, so that an adapter passes w as it is."""
    w = torch.tensor([-80.0, -1.0, 0.0, 3.0, 80.0]).double()
    close(clamped_decay(w), torch.exp(-math.exp(-0.5) * w.sigmoid()))


def test_the_published_names_take_the_published_arguments(compat: ModuleType) -> None:
    def names(function: str) -> list[str]:
        return list(inspect.signature(getattr(compat, function)).parameters)

    ours = ["r", "w", "k", "v", "a", "b"]
    fla = ["scale", "initial_state", "output_final_state"]
    assert names("chunk_rwkv7")[:10] == [*ours, *fla, "cu_seqlens"]
    assert names("fused_recurrent_rwkv7") == [*ours, *fla, "cu_seqlens"]
    assert names("fused_mul_recurrent_rwkv7") == [
        "r", "w", "k", "v", "kk", "a", *fla, "reverse", "cu_seqlens"]
    assert names("RWKV7_CLAMPW_CUDA") == [*ours, "HEAD_SIZE"]
    assert names("RWKV7_STATE_CLAMPW_CUDA") == ["s0", *ours]
    assert names("RWKV7_STATE_PASSING_CLAMPW_CUDA") == ["s0", *ours]
    assert names("attn_chunked_cuda") == [*ours, "s0"]
    assert names("attn_chunked_cuda_varlen") == [*ours, "s0", "cu_seqlens"]
