"""`kgen_ops.nn`: what the modules compute, their parameters, states and habits."""

from __future__ import annotations

import copy
import importlib
import math
from types import ModuleType
from typing import Any

import pytest
import references
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

B, T, H, K = 2, 6, 2, 4
C = H * K

# Arguments of the constructor, and of a call.
MODULES: dict[str, tuple[tuple[Any, ...], int, int]] = {
    # name: constructor, number of inputs, features
    "RMSNorm": ((C,), 1, C),
    "LinearAttention": ((C, H), 1, C),
    "Wkv4": ((C, 1, 3), 2, C),
    "Wkv5": ((H, K, 1, 3), 3, C),
    "Wkv6": ((H, K, 1, 3), 4, C),
    "Wkv7": ((H, K, 1, 3), 5, C),
}
each = pytest.mark.parametrize("name", [*MODULES, "Timex"])
with_states = pytest.mark.parametrize("name", [name for name in MODULES if name != "RMSNorm"])


@pytest.fixture(scope="module")
def modules(kgen_ops: ModuleType) -> ModuleType:
    return importlib.import_module("kgen_ops.nn")


def made(modules: ModuleType, name: str, **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A module, and inputs for it."""
    torch.manual_seed(0)
    if name == "Timex":
        return modules.Timex(C, T, **options), (torch.randn(B, C, T),)
    arguments, count, features = MODULES[name]
    inputs = [torch.randn(B, T, features) for _ in range(count)]
    if name == "Wkv7":
        inputs[4] = inputs[4].sigmoid()
    return getattr(modules, name)(*arguments, **options), tuple(inputs)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-3, atol=1e-4)


def heads(x: Tensor) -> Tensor:
    return x.double().view(*x.shape[:-1], H, K)


@pytest.mark.parametrize("options", [
    {}, {"eps": 1e-2}, {"elementwise_affine": False}, {"dtype": torch.bfloat16},
])
def test_rmsnorm_is_torchs(modules: ModuleType, options: dict[str, Any]) -> None:
    mine, torchs = modules.RMSNorm(16, **options), nn.RMSNorm(16, **options)
    assert isinstance(mine, nn.RMSNorm)
    assert repr(mine) == repr(torchs)
    assert mine.state_dict().keys() == torchs.state_dict().keys()
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    mine.load_state_dict(torchs.state_dict())
    x = (torch.randn(3, 16) * 1e-3).to(options.get("dtype", torch.float32))
    tolerance = 2e-2 if "dtype" in options else 1e-4
    torch.testing.assert_close(mine(x), torchs(x), rtol=tolerance, atol=tolerance)


def test_rmsnorm_with_an_offset_and_a_residual(modules: ModuleType) -> None:
    norm = modules.RMSNorm([16], eps=1e-6, offset=1.0)
    assert norm.weight.abs().sum() == 0
    assert "offset=1" in repr(norm)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    made = norm(x, residual)
    close(made.h, x + residual)
    close(made.y, F.rms_norm(x + residual, (16,), eps=1e-6))
    with pytest.raises(ValueError, match=r"normalized_shape = \(4, 16\) has 2 dims"):
        modules.RMSNorm((4, 16))


def test_timex_is_a_depthwise_convolution(modules: ModuleType) -> None:
    module, (x,) = made(modules, "Timex")
    conv = nn.Conv1d(C, C, T, groups=C, padding=T - 1, bias=False)
    with torch.no_grad():
        conv.weight[:, 0] = module.weight
    assert module.weight.abs().max() <= T**-0.5
    for steps in (T, T - 2, 1):
        close(module(x[..., :steps]), conv(x[..., :steps])[..., :steps])
    with pytest.raises(ValueError, match=f"x has {T + 1} time steps, but the filter has {T}"):
        module(torch.randn(B, C, T + 1))


def test_linear_attention(modules: ModuleType) -> None:
    module, (x,) = made(modules, "LinearAttention")
    q, k, v = (layer(x).unflatten(-1, (H, K)).transpose(1, 2).double()
               for layer in (module.q_proj, module.k_proj, module.v_proj))
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    out = (weights @ v) / (weights.sum(-1, keepdim=True) + module.eps)
    close(module(x), module.out_proj(out.float().transpose(1, 2).flatten(2)))
    with pytest.raises(ValueError, match="num_heads = 3 does not divide embed_dim = 8"):
        modules.LinearAttention(8, 3)


def test_wkv4(modules: ModuleType) -> None:
    module, (k, v) = made(modules, "Wkv4")
    want, _ = references.wkv4(
        k=k.double(), v=v.double(), w=-module.time_decay.double().exp(),
        u=module.time_first.double(),
        state=torch.tensor([0.0, 0.0, -1e38]).double().expand(B, C, 3))
    close(module(k, v), want)
    with pytest.raises(ValueError, match="Wkv4: layer = 3 of layers = 3"):
        modules.Wkv4(C, 3, 3)


@pytest.mark.parametrize("name", ["Wkv5", "Wkv6"])
def test_wkv5_and_wkv6(modules: ModuleType, name: str) -> None:
    module, inputs = made(modules, name)
    r, k, v = map(heads, inputs[:3])
    w = module.time_decay.double().expand(B, T, H, K) if name == "Wkv5" else heads(inputs[3])
    want, _ = references.recurrence(
        r=r, k=k, v=v, decay=(-w.exp()).exp(), u=module.time_faaaa.double(),
        state=torch.zeros(B, H, K, K).double())
    close(module(*inputs), want.flatten(2))
    assert list(module.state_dict()) == ["time_faaaa", *["time_decay"] * (name == "Wkv5")]


def test_wkv7(modules: ModuleType) -> None:
    module, inputs = made(modules, "Wkv7")
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    r, w, k, v, a = map(heads, inputs)
    k_k, k_a = heads(module.k_k), heads(module.k_a)
    kk = F.normalize(k * k_k, dim=-1)
    k = k * (1 + (a - 1) * k_a)
    decay = (-math.exp(-0.5) * w.sigmoid()).exp()
    y, _ = references.recurrence7(r=r, k=k, v=v, a=-kk, b=kk * a, decay=decay,
                                  state=torch.zeros(B, H, K, K).double())
    normal = F.group_norm(y.flatten(0, 1).flatten(1), H, module.ln_x.weight.double(),
                          module.ln_x.bias.double(), 64e-5).view(B, T, C)
    bonus = (r * k * module.r_k.double()).sum(-1, keepdim=True) * v
    close(module(*inputs), normal + bonus.flatten(2))


# Place of the layer in the model, with its depth as RWKV-LM counts it: 0 first, 1 last.
PLACES = [(0, 3, 0.0), (1, 3, 0.5), (2, 3, 1.0), (3, 12, 3 / 11), (0, 1, 0.0)]
placed = pytest.mark.parametrize(("layer", "layers", "depth"), PLACES)


def spread(first: float, last: float, power: float) -> list[float]:
    """From the first to the last over C channels, along c^power, by its logarithm."""
    inner = [math.exp(power * (math.log(c) - math.log(C - 1))) for c in range(1, C)]
    return [first + (last - first) * share for share in (0.0, *inner)]


@placed
def test_initial_values_of_wkv4(
    modules: ModuleType, layer: int, layers: int, depth: float
) -> None:
    """Written from the numbers of RWKV-v4/src/model.py in RWKV-LM: decays from -5 to 3, and a bonus
    of ln 0.3 with 0, 0.5, -0.5 in turn.
    """
    module = modules.Wkv4(C, layer, layers)
    close(module.time_decay, torch.tensor(spread(-5, 3, (7 + 13 * depth) / 10)))
    turns = torch.tensor([0.0, 0.5, -0.5]).repeat(C)[:C]
    close(module.time_first.exp(), 0.3 * turns.exp())


@placed
@pytest.mark.parametrize("name", ["Wkv5", "Wkv6"])
def test_initial_values_of_wkv5_and_wkv6(
    modules: ModuleType, name: str, layer: int, layers: int, depth: float
) -> None:
    """Written from the numbers of RWKV-v5/src/model.py: decays from -6 to -1, and a bonus from
    depth to 0 with 0, 0.1, -0.1 in turn.
    """
    module = getattr(modules, name)(H, K, layer, layers)
    if name == "Wkv5":
        close(module.time_decay, torch.tensor(spread(-6, -1, (7 + 13 * depth) / 10)).view(H, K))
    turns = torch.tensor([0.0, 0.1, -0.1]).repeat(C)[:C]
    close(module.time_faaaa, (torch.tensor(spread(depth, 0, 1)) + turns).view(H, K))


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_initial_values_of_wkv7(modules: ModuleType, layer: int, layers: int) -> None:
    """Written from the numbers of RWKV-v7/train_temp/src/model.py."""
    module = modules.Wkv7(H, K, layer, layers)
    close(module.k_k, torch.tensor(spread(0.76, 0.66, 1)))
    close(module.k_a, torch.full((C,), 1.02))
    close(module.r_k, torch.full((H, K), -0.04))
    close(module.ln_x.weight ** (10 / 7), torch.full((C,), (1 + layer) / layers))
    assert not module.ln_x.bias.any()
    assert module.ln_x.eps == pytest.approx(0.00064), "whatever the head size"
    assert modules.Wkv7(H, K, eps=1e-5 * K).ln_x.eps == pytest.approx(4e-5)


@with_states
def test_decoding_goes_on_from_a_state(modules: ModuleType, name: str) -> None:
    module, inputs = made(modules, name)
    whole = module(*inputs)
    first, state = module(*(x[:, :2] for x in inputs), return_state=True)
    steps = [first]
    for t in range(2, T):
        step, state = module(*(x[:, t : t + 1] for x in inputs), state=state, return_state=True)
        steps.append(step)
    close(torch.cat(steps, 1), whole)
    last, _ = module(*inputs, return_state=True)
    close(last, whole)


@pytest.mark.parametrize("name", ["Wkv5", "Wkv6", "Wkv7"])
def test_packed_sequences(
    kgen_ops: ModuleType, modules: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The library of the tests has kernels of packed sequences for log decays alone."""
    operator, place = getattr(kgen_ops, name.lower()), {"Wkv5": 3, "Wkv6": 3, "Wkv7": 1}[name]

    def with_log_decay(*given: Tensor, decay_form: str, **keywords: Any) -> Any:
        w = given[place]
        log = -w.exp() if decay_form == "raw" else -math.exp(-0.5) * w.sigmoid()
        return operator(*given[:place], log, *given[place + 1:], **keywords)

    module, inputs = made(modules, name)
    want = module(*inputs)
    home = importlib.import_module(type(module).__module__)
    monkeypatch.setattr(home, f"_{name.upper()}", with_log_decay)
    rows = tuple(x.reshape(1, B * T, -1) for x in inputs)
    offsets = torch.tensor([0, T, B * T])
    close(module(*rows, cu_seqlens=offsets).view(B, T, -1), want)
    y, state = module(*rows, cu_seqlens=offsets, return_state=True)
    close(y.view(B, T, -1), want)
    assert state.shape == (B, H, K, K)


@each
def test_habits_of_a_module(modules: ModuleType, name: str) -> None:
    module, inputs = made(modules, name)
    want = module(*inputs)
    torch.autograd.backward(want.square().sum())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    twin = copy.deepcopy(module)
    close(twin(*inputs), want)
    blank, _ = made(modules, name, device="meta")
    assert all(p.is_meta for p in blank.parameters())
    blank = blank.to_empty(device="cpu")
    blank.reset_parameters()
    if name not in ("LinearAttention", "Timex"):  # their initial values are random
        close(blank(*inputs), want)
    blank.load_state_dict(module.state_dict())
    close(blank(*inputs), want)
    assert repr(module).startswith(f"{name}(")
    assert "=" in module.extra_repr() or name == "RMSNorm"
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    close(compiled(*inputs), want)
    half, _ = made(modules, name, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@with_states
def test_compiled_with_a_state(modules: ModuleType, name: str) -> None:
    module, inputs = made(modules, name)
    _, state = module(*inputs, return_state=True)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    got, got_state = compiled(*inputs, state=state, return_state=True)
    want, want_state = module(*inputs, state=state, return_state=True)
    close(got, want)
    assert type(got_state) is type(want_state)
