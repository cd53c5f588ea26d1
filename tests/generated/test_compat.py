"""The adapters of published functions, on the host's kernels, against plain loops in float64."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from operator_cases import agree_with, close, randn
from references import attention, recurrence
from torch import Tensor

from kgen.emit import Winner

B, T, H, K, V = 2, 11, 3, 6, 5
X = torch.ones(B, T, H, K)
EmitInto = Callable[[Path, list[Winner]], Any]


def raw_decay(raw: Tensor) -> Tensor:
    return torch.exp(-torch.exp(raw))


def rwkv6_inputs() -> dict[str, Tensor]:
    given = {"r": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V)}
    w = -torch.rand(B, T, H, K)
    return given | {"w": w.requires_grad_(), "u": randn(H, K), "initial_state": randn(B, H, K, V)}


@pytest.mark.parametrize("name", ["chunk_rwkv6", "fused_recurrent_rwkv6"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_fla_rwkv6(compat: ModuleType, name: str, scale: float | None) -> None:
    def function(initial_state: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = getattr(compat, name)(
            **given, scale=scale, initial_state=initial_state, output_final_state=True
        )
        return made

    def reference(
        r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial_state: Tensor
    ) -> tuple[Tensor, ...]:
        factor = K**-0.5 if scale is None else scale
        return recurrence(r * factor, k, v, w.exp(), u, initial_state)

    agree_with(reference, function, rwkv6_inputs())


def test_fla_rwkv6_without_states(compat: ModuleType) -> None:
    given = rwkv6_inputs()
    zeros = torch.zeros_like(given.pop("initial_state"))
    y, state = compat.chunk_rwkv6(**given, scale=1.0)
    assert state is None
    decay = given["w"].exp()
    close(y, recurrence(given["r"], given["k"], given["v"], decay, given["u"], zeros)[0])
    y.sum().backward()  # the gradient of a sum has no strides of its own
    assert all(x.grad is not None for x in given.values())
    with torch.no_grad():
        plain, state = compat.chunk_rwkv6(**given, scale=1.0, output_final_state=True)
    assert plain.equal(y)
    assert state.dtype == torch.float32


def test_a_loss_of_the_state_alone(compat: ModuleType) -> None:
    given = rwkv6_inputs()
    _, state = compat.chunk_rwkv6(**given, output_final_state=True)
    gradients = torch.autograd.grad(state.sum(), list(given.values()))
    assert not gradients[0].any()  # of r, which no state depends on
    assert gradients[1].any()


def test_half_precision_and_its_fp32_decay(compat: ModuleType) -> None:
    given = {name: x.detach() for name, x in rwkv6_inputs().items() if name != "initial_state"}
    given = {n: (x if n == "w" else x.bfloat16()).requires_grad_() for n, x in given.items()}
    y, _ = compat.chunk_rwkv6(**given)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert [x.grad.dtype for x in given.values() if x.grad is not None] == [
        torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fla_rwkv6_compiles_without_a_break(compat: ModuleType, backend: str) -> None:
    given = list(rwkv6_inputs().values())[:5]

    def loss(*inputs: Tensor) -> Tensor:
        made: Tensor = compat.chunk_rwkv6(*inputs)[0].square().sum()
        return made

    want = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for gradient, expected in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        close(gradient, expected)


def rwkv_reference(operator: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The recurrence on [B, T, C] with a raw decay; the state is [B, H, K, V]."""

    def reference(
        receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        r, k, v = (x.view(B, T, H, K) for x in (receptance, key, value))
        decay = raw_decay(time_decay)
        decay = decay.view(H, K).expand(B, T, H, K) if operator == "rwkv5" else decay.view(r.shape)
        return recurrence(r, k, v, decay, time_first.view(H, K), state)

    return reference


def rwkv_inputs(operator: str, flat: bool) -> dict[str, Tensor]:
    given = {name: randn(B, T, H * K) for name in ("receptance", "key", "value")}
    per_head = (H * K,) if flat else (H, K)
    given["time_decay"] = randn(*per_head) if operator == "rwkv5" else randn(B, T, H * K)
    return given | {"time_first": randn(*per_head), "state": randn(B, H, K, K)}


@pytest.mark.parametrize("operator", ["rwkv5", "rwkv6"])
@pytest.mark.parametrize("flat", [False, True])
def test_flash_rwkv(compat: ModuleType, operator: str, flat: bool) -> None:
    """The adapter is right for B > 1 and has gradients, unlike the published function."""
    function = getattr(compat, f"{operator}_cuda_linear_attention")

    def reference(state: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        out, final = rwkv_reference(operator)(**given, state=state.mT)  # the state is [B, H, V, K]
        return (out.flatten(2) if operator == "rwkv5" else out), final.mT

    agree_with(reference, function, rwkv_inputs(operator, flat))


def test_flash_rwkv_goes_on_from_its_own_state_without_a_copy(compat: ModuleType) -> None:
    given = {name: x.detach() for name, x in rwkv_inputs("rwkv6", flat=True).items()}
    before = given["state"].clone()
    out, state = compat.rwkv6_cuda_linear_attention(**given)
    assert given["state"].equal(before)
    assert state.mT.is_contiguous()
    parts = []
    for piece in (slice(0, 4), slice(4, T)):
        some = {n: x[:, piece] if x.ndim == 3 else x for n, x in given.items()}
        made, given["state"] = compat.rwkv6_cuda_linear_attention(**some)
        parts.append(made)
    torch.testing.assert_close(torch.cat(parts, 1), out)
    torch.testing.assert_close(given["state"], state)


@pytest.mark.parametrize("operator", ["rwkv5", "rwkv6"])
def test_hugging_face(compat: ModuleType, operator: str) -> None:
    function = getattr(compat, f"{operator}_linear_attention")
    given = rwkv_inputs(operator, flat=False)
    agree_with(rwkv_reference(operator), lambda **x: function(True, **x), given)
    # A layer's slice of the models' state has no contiguous dim.
    state = torch.randn(B, H, K, K, 2)
    plain = {name: x.detach() for name, x in given.items()}
    close(function(False, **plain | {"state": state[..., 1]})[0],
          function(False, **plain | {"state": state[..., 1].contiguous()})[0])
    close(function(False, **plain | {"state": None})[0],
          function(False, **plain | {"state": torch.zeros(B, H, K, K)})[0])


@pytest.mark.parametrize("operator", ["rwkv5", "rwkv6"])
@pytest.mark.parametrize("flat", [False, True])
def test_rwkv_cuda(compat: ModuleType, operator: str, flat: bool) -> None:
    given = rwkv_inputs(operator, flat)
    del given["state"]
    published = getattr(compat, operator.upper().replace("RWKV", "WKV_"))

    def function(**x: Tensor) -> tuple[Tensor, ...]:
        return (published.apply(B, T, H * K, H, *x.values()),)

    def reference(**x: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.zeros(B, H, K, K, dtype=torch.float64)
        return (rwkv_reference(operator)(**x, state=zeros)[0].flatten(2),)

    agree_with(reference, function, given)


def test_rwkv_cuda_checks_the_extents_that_it_is_told(compat: ModuleType) -> None:
    given = [x.detach() for x in list(rwkv_inputs("rwkv6", flat=True).values())[:5]]
    with pytest.raises(ValueError, match=r"B, T, C = \(2, 12, 18\)"):
        compat.WKV_6.apply(B, T + 1, H * K, H, *given)
    with pytest.raises(ValueError, match="H = 4 does not divide C = 18"):
        compat.WKV_6.apply(B, T, H * K, 4, *given)


LINEAR = ("chunk_linear_attn", "fused_recurrent_linear_attn")


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("normalize", [False, True])
def test_fla_linear_attention(compat: ModuleType, name: str, normalize: bool) -> None:
    given = {
        "q": torch.rand(B, T, H, K).requires_grad_(),
        "k": torch.rand(B, T, H, K).requires_grad_(),
        "v": randn(B, T, H, V),
        "state": torch.rand(B, H, K, V).requires_grad_(),
    }
    if normalize:
        given["key_sum"] = torch.rand(B, 1, H, K).requires_grad_()

    def function(
        q: Tensor, k: Tensor, v: Tensor, state: Tensor, key_sum: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        initial = state if key_sum is None else (state, key_sum)
        out, final = getattr(compat, name)(
            q, k, v, initial_state=initial, output_final_state=True, normalize=normalize
        )
        assert out.is_contiguous()
        return (out, *final) if normalize else (out, final)

    def reference(
        q: Tensor, k: Tensor, v: Tensor, state: Tensor, key_sum: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return attention(q, k, v, state, key_sum, K**-0.5)

    agree_with(reference, function, given)


def test_fla_linear_attention_without_states(compat: ModuleType) -> None:
    """The published functions disagree on whether they normalize unless told otherwise."""
    q, k, v = torch.rand(B, T, H, K), torch.rand(B, T, H, K), torch.randn(B, T, H, V)
    zeros, no_keys = torch.zeros(B, H, K, V), torch.zeros(B, 1, H, K)
    wants = {"chunk_linear_attn": no_keys, "fused_recurrent_linear_attn": None}
    for name, keys in wants.items():
        out, state = getattr(compat, name)(q, k, v, scale=0.5)
        assert state is None
        close(out, attention(q, k, v, zeros, keys, 0.5)[0])
    x = q.requires_grad_()
    assert torch.autograd.grad(compat.chunk_linear_attn(x, k, v)[0].sum(), x)[0].any()
    # A state without a sum of keys starts that sum from 0.
    state = torch.rand(B, H, K, V)
    out, final = compat.chunk_linear_attn(q.detach(), k, v, initial_state=state,
                                          output_final_state=True)
    want = attention(q.detach(), k, v, state, no_keys, K**-0.5)
    for got, expected in zip((out, *final), want, strict=True):
        close(got, expected)


def test_what_no_kernel_serves_is_refused_by_name(compat: ModuleType) -> None:
    x = torch.randn(1, T, H, K)
    bounds = torch.tensor([0, 4, T])
    for name in LINEAR:
        with pytest.raises(NotImplementedError, match=f"{name}: cu_seqlens = tensor of shape"):
            getattr(compat, name)(x, x, x, cu_seqlens=bounds)
    with pytest.raises(NotImplementedError, match="reverse = True is not supported"):
        compat.fused_recurrent_linear_attn(x, x, x, reverse=True)
    with pytest.raises(NotImplementedError, match="fused_recurrent_rwkv6: reverse = True"):
        compat.fused_recurrent_rwkv6(x, x, x, x, x[0, 0], reverse=True)
    with pytest.raises(ValueError, match="initial_state is a pair, but normalize = False"):
        compat.chunk_linear_attn(x, x, x, normalize=False, initial_state=(x, x))


@pytest.mark.parametrize(("function", "arguments", "error", "message"), [
    ("chunk_rwkv6", (None, *(X,) * 3, X[0, 0]), TypeError, "r must be a tensor, not NoneType"),
    ("chunk_rwkv6", (*(X,) * 4, X[0, 0], None, [X]), TypeError, "initial_state must be a tensor"),
    ("chunk_rwkv6", (*(X,) * 4, X[0, 0], "1"), TypeError, "wkv6: scale must be a number, not str"),
    ("chunk_linear_attn", (X.sum(), X, X), ValueError, r"do not fit: q \[\], k \[2, 11"),
    ("chunk_linear_attn", (X, X, X, None, (X,)), ValueError, "initial_state has 1 parts"),
    ("rwkv5_cuda_linear_attention", (X,) * 6, ValueError, "the shapes do not fit: receptance"),
    ("rwkv_linear_attention", (None, X, X, X), TypeError, "time_decay must be a tensor"),
    ("chunk_rwkv7", (X, None, X, X, X, X), TypeError, "w must be a tensor, not NoneType"),
    ("WKV.apply", (B, T, H * K, None, X, *(X.flatten(2),) * 2), TypeError,
     "WKV.apply: w must be a tensor"),
])
def test_a_mistake_names_the_argument(
    compat: ModuleType, function: str, arguments: tuple[Any, ...], error: type[Exception],
    message: str,
) -> None:
    name, _, method = function.partition(".")
    called = getattr(compat, name)
    with pytest.raises(error, match=message):
        (getattr(called, method) if method else called)(*arguments)


def test_packed_sequences_are_served(compat: ModuleType) -> None:
    given = {name: x.detach()[:1] if name != "u" else x.detach()
             for name, x in rwkv6_inputs().items() if name != "initial_state"}
    bounds = torch.tensor([0, 4, T])
    y, state = compat.chunk_rwkv6(**given, cu_seqlens=bounds, output_final_state=True)
    for n, piece in enumerate((slice(0, 4), slice(4, T))):
        part = {name: x[:, piece] if name != "u" else x for name, x in given.items()}
        alone, final = compat.chunk_rwkv6(**part, output_final_state=True)
        close(y[:, piece], alone)
        close(state[n], final[0])


def test_the_published_names_take_the_published_arguments(compat: ModuleType) -> None:
    def names(function: str) -> list[str]:
        return list(inspect.signature(getattr(compat, function)).parameters)

    rwkv = ["receptance", "key", "value", "time_decay", "time_first", "state"]
    rwkv6 = ["r", "k", "v", "w", "u", "scale", "initial_state", "output_final_state"]
    linear = ["q", "k", "v", "scale", "initial_state", "output_final_state"]
    assert names("chunk_rwkv6")[:9] == [*rwkv6, "cu_seqlens"]
    assert names("fused_recurrent_rwkv6") == [*rwkv6, "reverse", "cu_seqlens"]
    assert names("chunk_linear_attn") == [*linear, "normalize", "cu_seqlens"]
    assert names("fused_recurrent_linear_attn") == [*linear, "reverse", "normalize", "cu_seqlens"]
    for version in (5, 6):
        assert names(f"rwkv{version}_cuda_linear_attention") == rwkv
        assert names(f"rwkv{version}_linear_attention") == ["training", *rwkv]
    assert set(compat.__all__) <= set(dir(compat))


def test_a_library_without_the_operator_says_what_to_run(
    tmp_path: Path, emit_into: EmitInto
) -> None:
    emit_into(tmp_path, [])
    script = (
        "import torch; from kgen_ops.compat import chunk_rwkv6\n"
        "x = torch.zeros(1, 1, 1, 1)\n"
        "try: chunk_rwkv6(x, x, x, x, x[0, 0])\n"
        "except NotImplementedError as problem: print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "kgen_ops has no function 'wkv6'" in done.stdout
    assert "kgen tune --op wkv6" in done.stdout
