"""`kgen_ops.compat.fla_backend`: FLA's functions on this library's kernels, on the host.

Without FLA the tests use a stand-in of its registries; the same tests run with FLA 0.6.0 if it is
installed. FLA's own kernels need a GPU, so no test runs them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import fla_stand_in
import pytest
import references
import torch
from operator_cases import B, Case, H, K, Outputs, T, V, agree, randn
from torch import Tensor

FUNCTIONS = fla_stand_in.MODULES


@pytest.fixture(scope="module")
def backend(kgen_ops: ModuleType) -> ModuleType:
    return importlib.import_module("kgen_ops.compat.fla_backend")


@pytest.fixture(params=["stand-in", "installed"])
def fla(
    request: pytest.FixtureRequest, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Callable[..., Any]]]:
    """A function of FLA by its name, with the library registered."""
    monkeypatch.delenv("FLA_KGEN", raising=False)
    if request.param == "stand-in":
        stand_in(monkeypatch)
    else:
        installed()
    backend.register()
    yield lambda name: getattr(importlib.import_module(FUNCTIONS[name]), name)
    backend.unregister()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for module in fla_stand_in.modules():
        monkeypatch.setitem(sys.modules, module.__name__, module)


def installed() -> ModuleType:
    try:
        return importlib.import_module("fla.backends")
    except Exception as why:
        pytest.skip(f"flash-linear-attention 0.6.0 or newer cannot be imported: {why}")


def rows() -> dict[str, Tensor]:
    """Arguments of `chunk_dplr_delta_rule`, as RWKV-7 has them."""
    unit = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)
    return {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V),
            "a": (-unit).requires_grad_(),
            "b": (unit * torch.rand(B, T, H, K)).requires_grad_(),
            "gk": (-torch.rand(B, T, H, K)).requires_grad_(), "initial_state": randn(B, H, K, V)}


def qkv() -> dict[str, Tensor]:
    return {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V),
            "initial_state": randn(B, H, K, V)}


Found = Callable[[str], Callable[..., Any]]


@pytest.mark.parametrize("scale", [None, 0.7])
def test_dplr_is_served_with_gradients(fla: Found, scale: float | None) -> None:
    function = fla("chunk_dplr_delta_rule")

    def reference(q: Tensor, gk: Tensor, initial_state: Tensor, **given: Tensor) -> Outputs:
        factor = K**-0.5 if scale is None else scale
        return references.recurrence7(r=q * factor, decay=gk.exp(), state=initial_state, **given)

    given = rows()
    agree(Case("wkv7", lambda: given, {}, reference),
          lambda **x: function(**x, scale=scale, output_final_state=True, safe_gate=True,
                               chunk_size=16), given)
    plain = {name: x.detach() for name, x in given.items()}
    y, state = function(**plain, scale=scale)
    assert state is None
    assert y.equal(function(*(plain[n] for n in ("q", "k", "v", "a", "b", "gk")), scale,
                            plain["initial_state"])[0])


def test_rwkv7_of_fla_is_served(fla: Found) -> None:
    """FLA's `chunk_rwkv7` calls the dispatched function."""
    try:
        rwkv7 = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
    except ModuleNotFoundError:
        pytest.skip("the stand-in of FLA has no chunk_rwkv7")
    given = {name: x.detach() for name, x in rows().items()}
    want, end = fla("chunk_dplr_delta_rule")(**given, scale=1.0, output_final_state=True)
    given["r"], given["w"] = given.pop("q"), given.pop("gk")
    got, state = rwkv7(**given, output_final_state=True)
    assert got.equal(want)
    assert state.equal(end)


def test_packed_sequences_are_served(fla: Found) -> None:
    given = {name: x.detach()[:1] for name, x in rows().items()}
    del given["initial_state"]
    bounds = torch.tensor([0, 2, T])
    y, state = fla("chunk_dplr_delta_rule")(**given, cu_seqlens=bounds, output_final_state=True)
    for n, (first, last) in enumerate([(0, 2), (2, T)]):
        part = {name: x[:, first:last] for name, x in given.items()}
        alone, final = fla("chunk_dplr_delta_rule")(**part, output_final_state=True)
        torch.testing.assert_close(y[:, first:last], alone)
        torch.testing.assert_close(state[n : n + 1], final)


@pytest.mark.parametrize("name", ["fused_recurrent_simple_gla", "fused_chunk_simple_gla"])
def test_linear_attention_is_served_with_gradients(fla: Found, name: str) -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor) -> Outputs:
        made = references.attention(q, k, v, initial_state, None, K**-0.5)
        return made[0], made[1]

    given = qkv()
    agree(Case("linear_attention", lambda: given, {}, reference),
          lambda **x: fla(name)(**x, output_final_state=True), given)
    y, state = fla(name)(*(given[n].detach() for n in "qkv"), scale=1.0)
    assert y.shape == (B, T, H, V)
    assert state is None


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_rmsnorm_is_served(fla: Found, weighted: bool, residual: bool) -> None:
    """Both stages as FLA's autograd function calls them."""
    x, dy, dh = (torch.randn(6, 16) for _ in range(3))
    weight = torch.randn(16) if weighted else None
    before = torch.randn(6, 16) if residual else None
    with torch.no_grad():
        y, mean, rstd, h = fla("layer_norm_fwd")(
            x, weight, None, 1e-3, before, residual_dtype=x.dtype if residual else None,
            is_rms_norm=True)
        dx, dw, db, dres = fla("layer_norm_bwd")(
            dy, h, weight, None, mean, rstd, dh if residual else None, residual, True,
            x_dtype=x.dtype)
    wanted = [z.clone().double().requires_grad_() for z in (x, weight, before) if z is not None]
    summed = wanted[0] + wanted[-1] if residual else wanted[0]
    want = torch.nn.functional.rms_norm(
        summed, (16,), wanted[1] if weighted else None, eps=1e-3)
    loss = (want * dy).sum() + ((summed * dh).sum() if residual else 0)
    grads = torch.autograd.grad(loss, wanted)
    assert mean is None
    assert db is None
    assert (h is x) is not residual
    torch.testing.assert_close(rstd, (summed.square().mean(-1) + 1e-3).rsqrt().float())
    for got, wants in ((y, want), (h, summed), (dx, grads[0])):
        torch.testing.assert_close(got, wants.float(), rtol=1e-4, atol=1e-5)
    assert (dw is None) is not weighted
    if weighted:
        torch.testing.assert_close(dw, grads[1].float(), rtol=1e-4, atol=1e-5)
    if residual:
        torch.testing.assert_close(dres, grads[-1].float(), rtol=1e-4, atol=1e-5)
    else:
        assert dres is None


def call_of(name: str) -> dict[str, Any]:
    """A call that is served."""
    if name == "chunk_dplr_delta_rule":
        return {**rows()}
    if name == "layer_norm_fwd":
        return {"x": torch.randn(6, 16), "weight": torch.randn(16), "bias": None,
                "is_rms_norm": True}
    if name == "layer_norm_bwd":
        return {"dy": torch.randn(6, 16), "x": torch.randn(6, 16), "weight": torch.randn(16),
                "bias": None, "rstd": torch.rand(6), "is_rms_norm": True}
    return {**qkv()}


# FLA's function, what is changed in a call that is served, and why the library declines.
DECLINED: list[tuple[str, dict[str, Any], str]] = [
    ("chunk_dplr_delta_rule", {"cp_context": object()}, "cp_context = .* is not supported"),
    ("chunk_dplr_delta_rule", {"lower_bound": 0.5}, "lower_bound = 0.5 is not negative"),
    ("chunk_dplr_delta_rule", {"head_first": True}, "argument head_first is not known"),
    ("chunk_dplr_delta_rule", {"q": None}, "r must be a tensor, not NoneType"),
    ("chunk_dplr_delta_rule", {"scale": torch.ones(())}, "scale is a Tensor"),
    ("chunk_dplr_delta_rule", {"cu_seqlens": torch.tensor([0, T])}, "N = 1"),
    ("chunk_dplr_delta_rule", {"initial_state": torch.zeros(B, H, K, V).half()}, "float16|fp16"),
    ("chunk_dplr_delta_rule", {"initial_state": torch.zeros(1, H, K, V)}, "B = 2"),
    ("chunk_dplr_delta_rule", {"k": torch.zeros(B, T, H, K).half()}, "k is fp16"),
    ("chunk_dplr_delta_rule", {"v": torch.zeros(B, T, H, V, dtype=torch.float64)}, "float64"),
    ("chunk_dplr_delta_rule", {"q": torch.zeros(B, T, K, H).mT}, "dim K must be contiguous"),
    ("chunk_dplr_delta_rule", {"k": torch.zeros(B, T, H, K, device="meta")}, "k is on meta"),
    ("fused_recurrent_simple_gla", {"g": torch.zeros(B, T, H)}, "g = a Tensor is not supported"),
    ("fused_recurrent_simple_gla", {"g_gamma": torch.zeros(H)}, "g_gamma = a Tensor"),
    ("fused_recurrent_simple_gla", {"reverse": True}, "reverse = True is not supported"),
    ("fused_recurrent_simple_gla", {"state_v_first": True}, "state_v_first = True"),
    ("fused_recurrent_simple_gla", {"transpose_state_layout": True}, "transpose_state_layout"),
    ("fused_recurrent_simple_gla", {"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens = a Tensor"),
    ("fused_chunk_simple_gla", {"g": torch.zeros(B, T, H)}, "g = a Tensor is not supported"),
    ("fused_chunk_simple_gla", {"g_gamma": torch.zeros(H)}, "g_gamma = a Tensor"),
    ("fused_chunk_simple_gla", {"cu_seqlens": torch.tensor([0, T])}, "cu_seqlens = a Tensor"),
    ("layer_norm_fwd", {"is_rms_norm": False}, "is_rms_norm = False is not supported"),
    ("layer_norm_fwd", {"bias": torch.zeros(16)}, "bias = a Tensor is not supported"),
    ("layer_norm_fwd", {"num_groups": 2}, "num_groups = 2 is not supported"),
    ("layer_norm_fwd", {"out_dtype": torch.float16}, "out_dtype = torch.float16, but x has"),
    ("layer_norm_fwd", {"residual_dtype": torch.float16}, "residual_dtype = torch.float16"),
    ("layer_norm_fwd", {"residual": torch.zeros(6, 16).half()}, "fp16"),
    ("layer_norm_fwd", {"eps": 0.0}, "eps = 0.0 must be greater than 0"),
    ("layer_norm_bwd", {"is_rms_norm": False}, "is_rms_norm = False is not supported"),
    ("layer_norm_bwd", {"bias": torch.zeros(16)}, "bias = a Tensor is not supported"),
    ("layer_norm_bwd", {"mean": torch.zeros(6)}, "mean = a Tensor is not supported"),
    ("layer_norm_bwd", {"num_groups": 2}, "num_groups = 2 is not supported"),
    ("layer_norm_bwd", {"recompute_output": True}, "recompute_output = True is not supported"),
    ("layer_norm_bwd", {"x_dtype": torch.float16}, "x_dtype = torch.float16, but x has"),
    ("layer_norm_bwd", {"rstd": None}, "rstd = None is not supported"),
    ("layer_norm_bwd", {"dy": torch.zeros(6, 16).half()}, "fp16"),
]


@pytest.mark.parametrize(("name", "changed", "why"), DECLINED)
def test_declined_calls_go_to_fla(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, changed: dict[str, Any],
    why: str,
) -> None:
    stand_in(monkeypatch)
    backend.register()
    function = getattr(importlib.import_module(FUNCTIONS[name]), name)
    try:
        function(**call_of(name))
        with pytest.raises(fla_stand_in.OwnFunctionError, match=name):
            function(**call_of(name) | changed)
    finally:
        backend.unregister()
    assert_declined(backend, name, why, **call_of(name) | changed)


def assert_declined(backend: ModuleType, name: str, why: str, **call: Any) -> None:
    (known,) = (f for f in backend._FUNCTIONS if f.name == name)
    accepted, reason = backend._methods(known)[f"{name}_verifier"](**call)
    assert not accepted
    assert "\n" not in reason
    assert re.search(why, reason), reason


def test_other_reasons_to_decline(
    backend: ModuleType, kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, package = "chunk_dplr_delta_rule", sys.modules["kgen_ops.wkv7"]
    serving = importlib.import_module("kgen_ops._runtime.serving")
    call = call_of(name)
    meta = {key: x.to("meta") for key, x in call.items()}
    assert_declined(backend, name, "wkv7: the library was not tuned for meta", **meta)
    sub: Any = torch.Tensor._make_subclass(type("Own", (Tensor,), {}), call["q"].detach())
    assert_declined(backend, name, "an argument is a Own", **call | {"q": sub})
    with monkeypatch.context() as patch:
        patch.setattr(serving, "_REASONS", {})
        patch.setattr(package.FORWARD, "gradient", None)
        assert_declined(backend, name, "no backward pass", **call)
        with torch.no_grad():
            assert not serving.why_not("wkv7", "forward", (
                *(call[n] for n in ("q", "gk", "k", "v", "a", "b")), None, None), (1.0,),
                (False, "log"))
    with monkeypatch.context() as patch:
        patch.setattr(serving, "_REASONS", {})
        patch.setattr(package.FORWARD.tables, "tuned_for_host", lambda: False)
        assert_declined(backend, name, "the library was not tuned for cpu", **call)
    safe = package.FORWARD.explain({"B": B, "T": T, "H": H, "K": K, "V": V},
                                   {"dtype": "fp32"}, torch.device("cpu"))._replace(step="safe")
    assert serving._slow("wkv7", safe, torch.device("cuda")).startswith(
        "wkv7: only the safe kernel, which is slow, serves B=2")
    assert not serving._slow("wkv7", safe, torch.device("cpu"))
    assert not serving._slow("wkv7", safe._replace(step="family"), torch.device("cuda"))


def test_what_is_registered(fla: Found, backend: ModuleType) -> None:
    made = backend.register()
    assert made.served == {
        "chunk_dplr_delta_rule": "wkv7", "fused_recurrent_simple_gla": "linear_attention",
        "fused_chunk_simple_gla": "linear_attention", "layer_norm_fwd": "rmsnorm",
        "layer_norm_bwd": "rmsnorm"}
    assert made.left == {}
    assert "  chunk_dplr_delta_rule: by wkv7\n" in str(made)
    assert "layers that call them: kgen_ops.patch(model)" in str(made)


def test_switched_off(fla: Found, backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    served = importlib.import_module("kgen_ops").wkv7

    def counted(*given: Any) -> Any:
        called.append("wkv7")
        return served(*given)

    monkeypatch.setattr(sys.modules["kgen_ops"], "wkv7", counted)

    def calls() -> int:
        before = len(called)
        with contextlib.suppress(Exception):  # FLA's own kernel needs a GPU
            fla("chunk_dplr_delta_rule")(**rows())
        return len(called) - before

    assert calls() == 1
    backend.unregister()
    assert calls() == 0
    backend.unregister()
    backend.register()
    assert calls() == 1
    monkeypatch.setenv("FLA_KGEN", "0")
    assert calls() == 0


def test_operators_that_are_missing(
    fla: Found, backend: ModuleType, kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kgen_ops, "wkv7")
    made = backend.register()
    assert made.left == {"chunk_dplr_delta_rule": "the library has no wkv7"}
    assert "left alone: chunk_dplr_delta_rule: the library has no wkv7" in str(made)
    monkeypatch.delattr(kgen_ops, "linear_attention")
    monkeypatch.delattr(kgen_ops, "rmsnorm")
    with pytest.raises(NotImplementedError, match=r"no function of FLA:\n.*no wkv7"):
        backend.register()


def test_a_fla_that_dispatches_less(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    norm = sys.modules["fla.modules.norm.layernorm"]
    monkeypatch.setattr(norm, "layer_norm_fwd", lambda *given: None)
    monkeypatch.delitem(sys.modules, "fla.ops.simple_gla.fused_chunk")
    made = backend.register()
    backend.unregister()
    assert made.left == {
        "fused_chunk_simple_gla":
            "this FLA has no fla.ops.simple_gla.fused_chunk.fused_chunk_simple_gla",
        "layer_norm_fwd": "this FLA does not dispatch it"}


def test_errors_of_register(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
        with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1 is set"):
            backend.register()
    monkeypatch.delitem(sys.modules, "fla.backends")
    sys.modules["fla"].__version__ = "0.5.2"  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"0\.5\.2 has no fla\.backends\n  needed: 0\.6\.0"):
        backend.register()
    real = importlib.import_module

    def failing(missing: str) -> Callable[[str], Any]:
        def imported(name: str) -> Any:
            if name == "fla":
                raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
            return real(name)

        return imported

    for missing, said in (("fla", "is not installed\n  run: pip install"),
                          ("triton", "cannot be imported: No module named 'triton'")):
        with monkeypatch.context() as patch:
            patch.setattr(backend.importlib, "import_module", failing(missing))
            with pytest.raises(ImportError, match=f"flash-linear-attention {said}"):
                backend.register()
    backend.unregister()


def test_arguments_are_those_of_fla(backend: ModuleType) -> None:
    installed()
    calls = importlib.import_module("kgen_ops.compat._fla_calls")
    for name, module in FUNCTIONS.items():
        theirs, ours = (
            {p.name: p.default for p in inspect.signature(f).parameters.values()
             if p.kind is not p.VAR_KEYWORD}
            for f in (getattr(importlib.import_module(module), name), getattr(calls, name)))
        assert ours == theirs
        assert list(ours) == list(theirs)
