"""The generated wkv5 and wkv6 on the CPU: layouts, states, dtypes, gradients, torch.compile.

Their safe kernels alone: what is tested is the way from a call to the kernel and back.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue, profile_named
from kgen.emit import SafeKernel, Winner, emit
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Timing
from kgen.operators._wkv_definition import definition
from kgen.render import Renderer

B, T, H, K, V = 2, 20, 3, 9, 5
WANTED = [
    {"dtype": "fp32", "w_dtype": "fp32", "u_dtype": "fp32", "states": "none"},
    {"dtype": "fp32", "w_dtype": "fp32", "u_dtype": "fp32", "states": "fp32"},
    {"dtype": "bf16", "w_dtype": "bf16", "u_dtype": "bf16", "states": "none"},
]
OPERATORS = ("wkv5", "wkv6")
each_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A library with the safe kernels of three combinations of dtypes, and one row per pass."""
    host, renderer = profile_named("host"), Renderer(include_dir())
    safe: list[SafeKernel] = []
    winners: list[Winner] = []
    for name in OPERATORS:
        entry = open_catalogue().entry(name)
        operator = entry.operator
        for passed in operator.signature.passes:
            variant = entry.space.safe_variant(passed.name)
            assert variant.safe is not None
            for at, wanted in enumerate(WANTED):
                states = wanted["states"]
                dtypes = {n: x for n, x in wanted.items() if n != "states"}
                dtypes |= {"initial_state_dtype": states, "final_state_dtype": states}
                problem = Problem(
                    tuple((d.name, 64) for d in operator.signature.dims), tuple(dtypes.items())
                )
                made = renderer.render(name, entry.templates, variant, variant.safe, problem)
                safe.append(SafeKernel(operator, passed.name, dtypes, variant, variant.safe, made))
                if at:
                    continue
                record = Record(
                    key=problem.digest, operator=name, pass_name=passed.name,
                    problem=str(problem), gpu="host", config=variant.safe, fate=Fate.VERIFIED,
                    timing=Timing(10.0, 9.0, 11.0, 50, "test"), when="2026-01-01T00:00:00Z",
                )
                winners.append(Winner(operator, passed.name, problem, host, variant, variant.safe,
                                      made, None, "host", record))
    folder = tmp_path_factory.mktemp("library")
    emit(folder, winners, safe, include_dir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.syspath_prepend(str(folder))
        assert "kgen_ops" not in sys.modules, "only one library fits into a process"
        yield importlib.import_module("kgen_ops")
    for name in [name for name in sys.modules if name.split(".")[0] == "kgen_ops"]:
        del sys.modules[name]


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


def backward(library: ModuleType, operator: str, given: dict[str, Tensor], **scalars: float) -> (
    tuple[Tensor, ...]
):
    made = getattr(library, f"{operator}_backward")(**given, **scalars)
    assert isinstance(made, tuple)
    return made


@each_operator
@pytest.mark.parametrize("layout", ["BTHK", "BTC", "BHTK", "packed"])
def test_outputs_take_the_layout_of_their_input(
    library: ModuleType, operator: str, layout: str
) -> None:
    given = inputs(operator, layout)
    gy = tensor("BTHK", V)
    for _ in range(2):  # prepared at the first call
        y = getattr(library, operator)(**given, scale=0.5)
        want = definition("forward", given, {"scale": 0.5})["y"]
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
        assert y.stride() == dense(layout, V)
        gradients = backward(library, operator, {"gy": gy, **given}, scale=0.5)
        wanted = definition("backward", {"gy": gy, **given}, {"scale": 0.5})
        for name, got in zip(("gr", "gk", "gv", "gw", "gu"), gradients, strict=True):
            torch.testing.assert_close(got, wanted[name], rtol=1e-4, atol=1e-4)
        assert gradients[0].stride() == dense(layout, K)
        assert gradients[1].stride() == dense("BTHK", K)
        if operator == "wkv6":
            assert gradients[3].stride() == dense(layout, K)


@each_operator
def test_states_and_their_gradients(library: ModuleType, operator: str) -> None:
    given = inputs(operator) | {"initial_state": torch.randn(B, H, K, V)}
    y, state = getattr(library, operator)(**given, return_final_state=True)
    want = definition("forward", given, {"scale": 1.0})
    torch.testing.assert_close(y, want["y"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, want["final_state"], rtol=1e-4, atol=1e-4)
    given |= {"gy": torch.randn_like(y), "gfinal_state": torch.randn_like(state)}
    wanted = definition("backward", given, {"scale": 1.0})
    names = ("gr", "gk", "gv", "gw", "gu", "ginitial_state")
    for name, gradient in zip(names, backward(library, operator, given), strict=True):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3)


@each_operator
def test_two_calls_with_a_state_are_one_call(library: ModuleType, operator: str) -> None:
    given = inputs(operator) | {"initial_state": torch.randn(B, H, K, V)}
    call = getattr(library, operator)
    y, state = call(**given, return_final_state=True)
    parts, between = [], given["initial_state"]
    for cut in (slice(0, 7), slice(7, 8), slice(8, T)):
        part = {n: x[:, cut] if x.ndim == 4 and n in "rkvw" else x for n, x in given.items()}
        made, between = call(**part | {"initial_state": between}, return_final_state=True)
        parts.append(made)
    torch.testing.assert_close(torch.cat(parts, dim=1), y)
    torch.testing.assert_close(between, state)


@each_operator
def test_half_precision(library: ModuleType, operator: str) -> None:
    given = inputs(operator, dtype=torch.bfloat16)
    y = getattr(library, operator)(**given)
    assert y.dtype == torch.bfloat16
    want = definition("forward", {n: x.float() for n, x in given.items()}, {"scale": 1.0})["y"]
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)
    gy = tensor("BTHK", V, torch.bfloat16)
    gradients = backward(library, operator, {"gy": gy, **given})
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 5


@each_operator
def test_no_steps(library: ModuleType, operator: str) -> None:
    given = inputs(operator)
    given = {n: x[:, :0] if x.ndim == 4 else x for n, x in given.items()}
    state = torch.randn(B, H, K, V)
    y, final = getattr(library, operator)(**given, initial_state=state, return_final_state=True)
    assert y.shape == (B, 0, H, V)
    assert final.equal(state)
    gradients = backward(library, operator, {"gy": tensor("BTHK", V)[:, :0], **given})
    assert (gradients[4] == 0).all()


@each_operator
def test_compiles_without_a_break(library: ModuleType, operator: str) -> None:
    given = tuple(inputs(operator).values())
    call = getattr(library, operator)
    compiled = torch.compile(lambda *x: call(*x) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), 2 * call(*given))
    torch.library.opcheck(
        getattr(torch.ops.kgen_ops, operator).default, given,
        test_utils=("test_schema", "test_faketensor"),
    )
