"""The generated wkv5 and wkv6 on the CPU: layouts, states, dtypes, gradients, torch.compile.

Only their safe kernels are used, because the tests are about the path from a call to the kernel and
back.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kgen.operators._wkv_definition import definition

B, T, H, K, V = 2, 20, 3, 9, 5
OPERATORS = ("wkv5", "wkv6")
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def tensor(layout: str, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[B, T, H, features] in one of the layouts that callers have."""
    if layout == "BTHK":
        return torch.randn(B, T, H, features).to(dtype)
    if layout == "BTC":  # a view of channels
        return torch.randn(B, T, H * features).to(dtype).view(B, T, H, features)
    if layout == "BHTK":
        return torch.randn(B, H, T, features).to(dtype).transpose(1, 2)
    assert layout == "packed"  # r, k, v side by side
    return torch.randn(B, T, 3, H, features).to(dtype)[:, :, 1]


def dense(layout: str, features: int) -> tuple[int, ...]:
    """Strides that an output in a layout has."""
    if layout == "BHTK":
        return (H * T * features, features, T * features, 1)
    return (T * H * features, H * features, features, 1)


def inputs(
    operator: str, layout: str = "BTHK", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """r, k, v, w and u."""
    w = tensor(layout, K) if operator == "wkv6" else torch.randn(H, K)
    return {
        "r": tensor(layout, K, dtype),
        "k": tensor("BTHK", K, dtype),
        "v": tensor(layout, V, dtype),
        "w": (-w.exp()).to(dtype),
        "u": torch.randn(H, K).to(dtype),
    }


def backward(kgen_ops: ModuleType, operator: str, given: dict[str, Tensor], **scalars: float) -> (
    tuple[Tensor, ...]
):
    made = getattr(kgen_ops, f"{operator}_backward")(**given, **scalars)
    assert isinstance(made, tuple)
    return made


@each_operator
@pytest.mark.parametrize("layout", ["BTHK", "BTC", "BHTK", "packed"])
def test_outputs_take_the_layout_of_their_input(
    kgen_ops: ModuleType, operator: str, layout: str
) -> None:
    given = inputs(operator, layout)
    gy = tensor("BTHK", V)
    for _ in range(2):  # prepared at the first call
        y = getattr(kgen_ops, operator)(**given, scale=0.5)
        want = definition("forward", given, {"scale": 0.5})["y"]
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
        assert y.stride() == dense(layout, V)
        gradients = backward(kgen_ops, operator, {"gy": gy, **given}, scale=0.5)
        wanted = definition("backward", {"gy": gy, **given}, {"scale": 0.5})
        for name, got in zip(("gr", "gk", "gv", "gw", "gu"), gradients, strict=True):
            torch.testing.assert_close(got, wanted[name], rtol=1e-4, atol=1e-4)
        assert gradients[0].stride() == dense(layout, K)
        assert gradients[1].stride() == dense("BTHK", K)
        if operator == "wkv6":
            assert gradients[3].stride() == dense(layout, K)


@each_operator
def test_states_and_their_gradients(kgen_ops: ModuleType, operator: str) -> None:
    given = inputs(operator) | {"initial_state": torch.randn(B, H, K, V)}
    y, state = getattr(kgen_ops, operator)(**given, return_final_state=True)
    want = definition("forward", given, {"scale": 1.0})
    torch.testing.assert_close(y, want["y"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, want["final_state"], rtol=1e-4, atol=1e-4)
    given |= {"gy": torch.randn_like(y), "gfinal_state": torch.randn_like(state)}
    wanted = definition("backward", given, {"scale": 1.0})
    names = ("gr", "gk", "gv", "gw", "gu", "ginitial_state")
    for name, gradient in zip(names, backward(kgen_ops, operator, given), strict=True):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3)


@each_operator
@pytest.mark.parametrize("form", ["raw", "decay"])
def test_forms_of_w(kgen_ops: ModuleType, operator: str, form: str) -> None:
    """Each with steps that forget all and steps that keep all."""
    given = inputs(operator)
    raw = (-given["w"]).log()
    raw[..., 1], raw[..., 2] = torch.inf, -torch.inf
    given["w"] = raw if form == "raw" else torch.exp(-raw.exp())
    chosen = {"scale": 1.0, f"decay_form={form}": 1.0}
    y = getattr(kgen_ops, operator)(**given, decay_form=form)
    torch.testing.assert_close(y, definition("forward", given, chosen)["y"], rtol=1e-4, atol=1e-4)
    given |= {"gy": tensor("BTHK", V)}
    wanted = definition("backward", given, chosen)
    gradients = getattr(kgen_ops, f"{operator}_backward")(**given, decay_form=form)
    for name, got in zip(("gr", "gk", "gv", "gw", "gu"), gradients, strict=True):
        torch.testing.assert_close(got, wanted[name], rtol=1e-3, atol=1e-3)


@each_operator
def test_an_unknown_form_of_w_is_refused(kgen_ops: ModuleType, operator: str) -> None:
    for _ in range(2):  # nothing is prepared for it
        with pytest.raises(ValueError, match=r"decay_form = exp .*\n.*log, raw, decay"):
            getattr(kgen_ops, operator)(**inputs(operator), decay_form="exp")


CUTS = (0, 3, 3, 12, 20)  # of T steps; one sequence has none


@each_operator
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("states", [False, True])
def test_packed_sequences(
    kgen_ops: ModuleType, operator: str, dtype: torch.dtype, states: bool
) -> None:
    given = {n: x[:1] if x.ndim == 4 else x for n, x in inputs(operator).items()}
    given["cu_seqlens"] = torch.tensor(CUTS, dtype=dtype)
    count = len(CUTS) - 1
    if states:
        given["initial_state"] = torch.randn(count, H, K, V)
    made = getattr(kgen_ops, operator)(**given, return_final_state=states)
    want = definition("forward", given, {"scale": 1.0})
    y = made[0] if states else made
    torch.testing.assert_close(y, want["y"], rtol=1e-4, atol=1e-4)
    if states:
        assert made[1].shape == (count, H, K, V)
        assert made[1][1].equal(given["initial_state"][1])
        torch.testing.assert_close(made[1], want["final_state"], rtol=1e-4, atol=1e-4)
        given["gfinal_state"] = torch.randn(count, H, K, V)
    given["gy"] = torch.randn_like(y)
    wanted = definition("backward", given, {"scale": 1.0})
    names = ("gr", "gk", "gv", "gw", "gu", "ginitial_state")
    for name, got in zip(names, backward(kgen_ops, operator, given), strict=False):
        torch.testing.assert_close(got, wanted[name], rtol=1e-3, atol=1e-3)


@each_operator
@pytest.mark.parametrize("wrong", [
    (0, 3, T - 1), (0, 3, T + 4), (1, 3, T), (-1, 3, T), (0, T, 3, T), (0, 1 << 40, T),
])  # fmt: skip
def test_a_kernel_on_the_cpu_never_gets_wrong_offsets(
    kgen_ops: ModuleType, operator: str, wrong: tuple[int, ...]
) -> None:
    """It would write outside the outputs. Offsets that were right before prove nothing."""
    given = {n: x[:1] if x.ndim == 4 else x for n, x in inputs(operator).items()}
    call, right = getattr(kgen_ops, operator), torch.linspace(0, T, len(wrong)).long()
    for _ in range(2):
        call(**given, cu_seqlens=right)
    with pytest.raises(ValueError, match=rf"begin with 0, never decrease, and end with T = {T}"):
        call(**given, cu_seqlens=torch.tensor(wrong))
    with pytest.raises(ValueError, match="never decrease"):
        backward(kgen_ops, operator, {"gy": given["v"], **given,
                                      "cu_seqlens": torch.tensor(wrong)})


@each_operator
def test_packed_sequences_are_checked_without_reading_them(
    kgen_ops: ModuleType, operator: str
) -> None:
    given = {n: x[:1] if x.ndim == 4 else x for n, x in inputs(operator).items()}
    call, cuts = getattr(kgen_ops, operator), torch.tensor(CUTS)
    with pytest.raises(TypeError, match="cu_seqlens_dtype = fp32 is not supported"):
        call(**given, cu_seqlens=cuts.float())
    with pytest.raises(ValueError, match=r"N = 0; want \[N \+ 1\]"):
        call(**given, cu_seqlens=cuts[:1])
    with pytest.raises(ValueError, match="cu_seqlens has shape"):
        call(**given, cu_seqlens=cuts, initial_state=torch.zeros(3, H, K, V))
    with pytest.raises(ValueError, match=f"r says B = {B}; pass sequences"):
        call(**inputs(operator), cu_seqlens=cuts)
    with pytest.raises(ValueError, match="initial_state has N = 3 sequences, but r says B = 1"):
        call(**given, initial_state=torch.zeros(3, H, K, V))
    # On meta, as on a GPU, nothing reads them.
    meta = {n: x.to("meta") for n, x in given.items()}
    _, state = call(**meta, cu_seqlens=cuts.to("meta"), return_final_state=True)
    assert state.shape == (len(CUTS) - 1, H, K, V)


@each_operator
def test_two_calls_with_a_state_are_one_call(kgen_ops: ModuleType, operator: str) -> None:
    given = inputs(operator) | {"initial_state": torch.randn(B, H, K, V)}
    call = getattr(kgen_ops, operator)
    y, state = call(**given, return_final_state=True)
    parts, between = [], given["initial_state"]
    for cut in (slice(0, 7), slice(7, 8), slice(8, T)):
        part = {n: x[:, cut] if x.ndim == 4 and n in "rkvw" else x for n, x in given.items()}
        made, between = call(**part | {"initial_state": between}, return_final_state=True)
        parts.append(made)
    torch.testing.assert_close(torch.cat(parts, dim=1), y)
    torch.testing.assert_close(between, state)


@each_operator
def test_half_precision(kgen_ops: ModuleType, operator: str) -> None:
    given = inputs(operator, dtype=torch.bfloat16)
    y = getattr(kgen_ops, operator)(**given)
    assert y.dtype == torch.bfloat16
    want = definition("forward", {n: x.float() for n, x in given.items()}, {"scale": 1.0})["y"]
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)
    gy = tensor("BTHK", V, torch.bfloat16)
    gradients = backward(kgen_ops, operator, {"gy": gy, **given})
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 5


@each_operator
def test_no_steps(kgen_ops: ModuleType, operator: str) -> None:
    given = inputs(operator)
    given = {n: x[:, :0] if x.ndim == 4 else x for n, x in given.items()}
    state = torch.randn(B, H, K, V)
    y, final = getattr(kgen_ops, operator)(**given, initial_state=state, return_final_state=True)
    assert y.shape == (B, 0, H, V)
    assert final.equal(state)
    gradients = backward(kgen_ops, operator, {"gy": tensor("BTHK", V)[:, :0], **given})
    assert (gradients[4] == 0).all()


@each_operator
def test_compiles_without_a_break(kgen_ops: ModuleType, operator: str) -> None:
    given = tuple(inputs(operator).values())
    call = getattr(kgen_ops, operator)
    compiled = torch.compile(lambda *x: call(*x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), 2 * call(*given))
    cuts = torch.tensor([0, 5, T])
    one = (*(x[:1] if x.ndim == 4 else x for x in given), torch.randn(2, H, K, V), cuts)
    packed = torch.compile(
        lambda *x: call(*x, return_final_state=True), fullgraph=True, backend="aot_eager"
    )
    want = call(*one, return_final_state=True)
    for got, wanted in zip(packed(*one), want, strict=True):
        torch.testing.assert_close(got, wanted)
    raw = torch.compile(lambda *x: call(*x, decay_form="raw"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(raw(*given), call(*given, decay_form="raw"))
