"""`kgen_ops.patch`: which modules it swaps, with what, and what it leaves alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class LikeLlama(nn.Module):
    """Weight times the rounded norm; eps under another name."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)
        made: Tensor = self.weight * y.to(x.dtype)
        return made


class RMSNormLikeGemma(nn.Module):
    """A weight that is stored minus 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        made: Tensor = (y * (1 + self.weight.float())).type_as(x)
        return made


class UnweightedRMSNorm(nn.Module):
    """No weight."""

    eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class RMSNormGated(LikeLlama):
    """As LikeLlama without a gate."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * torch.sigmoid(gate))


class RMSNormInGroups(LikeLlama):
    """Something else: each half has a mean of its own."""

    def forward(self, x: Tensor) -> Tensor:
        halves = x.reshape(*x.shape[:-1], 2, -1)
        y = halves * torch.rsqrt(halves.square().mean(-1, keepdim=True) + self.variance_epsilon)
        made: Tensor = self.weight * y.flatten(-2)
        return made


class RMSNormThatIgnoresItsWeight(RMSNormLikeGemma):
    """Its weight is all zeros, as RMSNormLikeGemma's is before training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class LlamaRMSNorm(LikeLlama):
    """A name that is looked at."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.llama = LlamaRMSNorm(16)
        self.gemma = RMSNormLikeGemma(16)
        self.unweighted = UnweightedRMSNorm()
        self.gated = RMSNormGated(16)
        self.torch = nn.RMSNorm(16)
        self.groups = RMSNormInGroups(16)
        self.ignores = RMSNormThatIgnoresItsWeight(16)
        self.layer = nn.LayerNorm(16)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("ignores"):
                    parameter.copy_(torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.children():
            x = x + norm(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def count_calls(kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call that `patch` makes."""
    import importlib

    package, calls = importlib.import_module("kgen_ops.rmsnorm"), []
    real = package.rmsnorm

    def counted(x: Tensor, weight: Tensor | None, **options: float) -> Any:
        calls.append({"weight": weight is not None, **options})
        return real(x, weight, **options)

    monkeypatch.setattr(package, "rmsnorm", counted)
    return calls


def test_what_is_swapped_computes_the_same(
    kgen_ops: ModuleType, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(kgen_ops, monkeypatch)
    x = torch.randn(2, 3, 16, requires_grad=True)
    before = model(x)
    (wanted,) = torch.autograd.grad(before.sum(), x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    patched = kgen_ops.patch(model)
    after = model(x)
    (found,) = torch.autograd.grad(after.sum(), x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls == [
        {"weight": True, "eps": 1e-5, "offset": 0.0}, {"weight": True, "eps": 1e-6, "offset": 1.0},
        {"weight": False, "eps": 1e-3, "offset": 0.0}, {"weight": True, "eps": 1e-5, "offset": 0.0},
        {"weight": True, "eps": torch.finfo(torch.float32).eps, "offset": 0.0},
    ]
    assert [s.name for s in patched.swapped] == ["llama", "gemma", "unweighted", "gated", "torch"]
    assert "gemma (RMSNormLikeGemma): rmsnorm(eps=1e-06, offset=1)" in str(patched)
    assert [(found.name, found.why) for found in patched.left] == [
        (name, "a trial shows that it computes something else than RMSNorm")
        for name in ("groups", "ignores")]
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    patched.undo()
    calls.clear()
    assert torch.equal(model(x), before)
    assert not calls


def test_other_calls_take_the_modules_own_forward(
    kgen_ops: ModuleType, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(kgen_ops, monkeypatch)
    x, gate = torch.randn(3, 16), torch.randn(3, 16)
    own = model.gated(x, gate)
    kgen_ops.patch(model)
    assert torch.equal(model.gated(x, gate), own)
    mixed = model.llama(x.bfloat16())
    assert mixed.dtype is torch.float32, "as the module itself promotes"
    assert model.llama(torch.empty(0, 16)).shape == (0, 16)
    assert not calls
    again = kgen_ops.patch(model)
    assert not again.swapped
    assert all("replaced before" in found.why for found in again.left
               if found.name in ("llama", "gemma"))


def test_hooks_do_not_see_the_trial(kgen_ops: ModuleType) -> None:
    seen: list[object] = []
    norm = LlamaRMSNorm(16)
    norm.register_forward_hook(lambda *given: seen.append(given))
    kgen_ops.patch(nn.Sequential(norm))
    assert not seen
    norm(torch.randn(2, 16))
    assert len(seen) == 1


def test_what_is_no_model_is_refused(kgen_ops: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"got Tensor, which is no torch\.nn\.Module"):
        kgen_ops.patch(torch.randn(2))


@pytest.mark.parametrize(
    ("family", "swapped", "offset"),
    [("Llama", 5, 0.0), ("Qwen3", 9, 0.0), ("Gemma", 5, 1.0), ("Gemma3", 13, 1.0),
     ("Mistral", 5, 0.0), ("Phi3", 5, 0.0)],
)
def test_models_of_transformers(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch, family: str, swapped: int, offset: float
) -> None:
    """Two layers of published models, with random weights, before and after."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    calls = count_calls(kgen_ops, monkeypatch)
    name = f"{family}Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    tokens = torch.arange(12).reshape(2, 6)
    before = model(tokens).logits
    patched = kgen_ops.patch(model)
    assert len(patched.swapped) == swapped, patched
    assert patched.left == ()
    after = model(tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    assert len(calls) == swapped
    assert {call["offset"] for call in calls} == {offset}
