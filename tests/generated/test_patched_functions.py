"""`kgen_ops.patch` on modules that call published functions: FLA's layers, RWKV of transformers.

FLA's kernels need a GPU. Stand-ins call functions of the same names and conventions in plain
PyTorch, and FLA's own layers are tried as far as they run without one.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

H, K = 2, 8


def chunk_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A loop over the steps, with the conventions of FLA's function."""
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    size = (r.shape[0], r.shape[2], r.shape[3], v.shape[3])
    state = r.new_zeros(size, dtype=torch.float32) if initial_state is None else initial_state
    steps = []
    for t in range(r.shape[1]):
        new = k[:, t, :, :, None] * v[:, t, :, None]
        seen = state + u[..., None] * new
        steps.append((scale * r[:, t, :, :, None] * seen).sum(2))
        state = state * w[:, t].exp()[..., None] + new
    return torch.stack(steps, 1).to(v.dtype), state if output_final_state else None


published = chunk_rwkv6


def calls_of_the_library(kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The adapters that are called."""
    compat, calls = importlib.import_module("kgen_ops.compat"), []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(real.__name__)
            return real(*arguments, **keywords)

        return call

    for name in ("chunk_rwkv6", "rwkv_linear_attention"):
        monkeypatch.setattr(compat, name, counted(getattr(compat, name)))
    return calls


@pytest.fixture
def calls(kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return calls_of_the_library(kgen_ops, monkeypatch)


@pytest.fixture(autouse=True)
def own_function() -> Iterator[None]:
    """Tests put other functions in the place of this module's."""
    yield
    globals()["chunk_rwkv6"] = published


class Base(nn.Module):
    """Projections; a subclass calls the function in a method that is not `forward`."""

    def __init__(self, width: int = H * K) -> None:
        super().__init__()
        self.mixed = nn.Linear(width, 4 * width, bias=False)
        self.bonus = nn.Parameter(torch.randn(H, K))

    def forward(self, x: Tensor, cache: Tensor | None = None, **keywords: Any) -> Tensor:
        r, w, k, v = self.mixed(x).unflatten(-1, (4, H, K)).unbind(-3)
        return self.attend(r, -w.exp(), k, v, cache, **keywords).flatten(2)

    def attend(self, *given: Any, **keywords: Any) -> Tensor:
        raise NotImplementedError


class LikeRWKV6(Base):
    def attend(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, state: Tensor | None,
               **keywords: Any) -> Tensor:
        o, _ = chunk_rwkv6(r=r, k=k, v=v, w=w, u=self.bonus, scale=1.0, initial_state=state,
                           **keywords)
        return o


class Derived(LikeRWKV6):
    """`super()` needs the method's closure."""

    def attend(self, *given: Any, **keywords: Any) -> Tensor:
        return 2 * super().attend(*given, **keywords) + 0 * (chunk_rwkv6 is None)


def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def around(*given: Any, **keywords: Any) -> Any:
        return method(*given, **keywords)

    return around


class Decorated(LikeRWKV6):
    @decorated
    def attend(self, *given: Any, **keywords: Any) -> Tensor:
        return chunk_rwkv6(*given, **keywords)[0]


def test_a_module_calls_the_library_and_can_be_undone(
    kgen_ops: ModuleType, calls: list[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LikeRWKV6(), nn.Linear(16, 16), LikeRWKV6())
    x = torch.randn(2, 5, 16, requires_grad=True)
    before = model(x)
    (wanted,) = torch.autograd.grad(before.square().sum(), x)
    patched = kgen_ops.patch(model)
    assert [(s.name, s.kind, s.function, s.untried) for s in patched.swapped] == [
        (name, "LikeRWKV6", "chunk_rwkv6 by wkv6", "") for name in ("0", "2")]
    assert "0 (LikeRWKV6): chunk_rwkv6 by wkv6" in str(patched)
    after = model(x)
    (found,) = torch.autograd.grad(after.square().sum(), x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert calls == ["chunk_rwkv6"] * 2
    assert chunk_rwkv6 is published, "other modules go on as they were"
    LikeRWKV6()(x)
    assert len(calls) == 2
    assert kgen_ops.patch(model).left[0].why == "its attend was replaced before"
    patched.undo()
    assert torch.equal(model(x), before)
    assert len(calls) == 2


def test_copies_and_derived_classes(kgen_ops: ModuleType, calls: list[str]) -> None:
    model = Derived()
    x = torch.randn(2, 5, 16)
    wanted = model(x)
    assert len(kgen_ops.patch(model).swapped) == 1
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.bonus.zero_()
    torch.testing.assert_close(twin(x), wanted, rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_swapped_norm_has_its_own_weight(kgen_ops: ModuleType) -> None:
    norm = nn.RMSNorm(16)
    model = nn.Sequential(norm)
    kgen_ops.patch(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(norm.weight)
    assert twin(torch.ones(2, 16)).abs().sum() > 0


def test_compiled(kgen_ops: ModuleType, calls: list[str]) -> None:
    model = LikeRWKV6()
    x = torch.randn(2, 5, 16)
    wanted = model(x)
    kgen_ops.patch(model)
    calls.clear()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
    graphs: list[str] = []

    def seen(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=seen)(x)
    assert any("kgen_ops.wkv6" in text for text in graphs)


@pytest.mark.parametrize("way", ["unknown keyword", "double", "mixed", "empty"])
def test_calls_that_the_library_does_not_serve(
    kgen_ops: ModuleType, calls: list[str], way: str
) -> None:
    model, x, keywords = LikeRWKV6(), torch.randn(2, 5, 16), {}
    kgen_ops.patch(model)
    if way == "unknown keyword":
        keywords = {"head_first": False}
    elif way == "double":
        model, x = model.double(), x.double()
    elif way == "mixed":
        r, w, k, v = (torch.randn(2, 3, H, K) for _ in range(4))
        model.attend(r.half(), -w.exp(), k, v, None)
    else:
        x = x[:0]
    if way != "mixed":
        model(x, **keywords)
    assert calls == []


def other(name: str) -> Callable[..., Any]:
    def shifted(*given: Any, **keywords: Any) -> Any:
        y, state = published(*given, **keywords)
        return y * 1.02, state

    def stateless(*given: Any, **keywords: Any) -> Any:
        return published(*given, **keywords)[0]

    def failing(*given: Any, **keywords: Any) -> Any:
        raise RuntimeError("needs a GPU\nand more")

    made = {"shifted": shifted, "stateless": stateless, "failing": failing}[name]
    made.__signature__ = inspect.signature(published)  # type: ignore[attr-defined]
    return made


def with_more(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, head_first: bool = True
) -> Any: ...


def in_another_order(k: Tensor, r: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Any: ...


@pytest.mark.parametrize(("function", "why"), [
    (other("shifted"), "a trial shows that its chunk_rwkv6 computes something else"),
    (other("stateless"), "a trial shows that its chunk_rwkv6 computes something else"),
    (other("failing"), "its chunk_rwkv6 failed in a trial: RuntimeError: needs a GPU"),
    (with_more, "its chunk_rwkv6 has arguments that chunk_rwkv6 of compat does not know: "
                "head_first"),
    (in_another_order,
     "its chunk_rwkv6 has the arguments of chunk_rwkv6 of compat in another order"),
])
def test_what_is_left_alone(
    kgen_ops: ModuleType, function: Callable[..., Any], why: str
) -> None:
    globals()["chunk_rwkv6"] = function
    model = nn.ModuleDict({"mix": LikeRWKV6()})
    patched = kgen_ops.patch(model)
    assert patched.swapped == ()
    assert [(found.name, found.why) for found in patched.left] == [("mix", why)]


def test_a_function_of_fla_that_does_not_run_here_is_known_by_its_name(
    kgen_ops: ModuleType, calls: list[str]
) -> None:
    failing = other("failing")
    failing.__module__ = "fla.ops.rwkv6.chunk"
    globals()["chunk_rwkv6"] = failing
    model = LikeRWKV6()
    (swapped,) = kgen_ops.patch(model).swapped
    assert swapped.untried == (
        "chunk_rwkv6 of fla.ops.rwkv6.chunk was not tried, because it does not run on cpu")
    model(torch.randn(2, 5, 16))
    assert calls == ["chunk_rwkv6"]


def test_a_wrapped_method_is_left_alone(kgen_ops: ModuleType) -> None:
    (left,) = kgen_ops.patch(Decorated()).left
    assert left.why == "its attend, which calls chunk_rwkv6, is wrapped by a decorator"


def test_the_rwkv_model_of_transformers(kgen_ops: ModuleType, calls: list[str]) -> None:
    """Two layers of RWKV-4 with random weights: a whole sequence, then step by step."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.RwkvConfig(
        vocab_size=32, context_length=16, hidden_size=16, num_hidden_layers=2)
    torch.manual_seed(0)
    model = transformers.RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        before = model(tokens, use_cache=True)
        patched = kgen_ops.patch(model)
        assert [(s.kind, s.function, s.untried) for s in patched.swapped] == [
            ("RwkvSelfAttention", "rwkv_linear_attention by wkv4", "")] * 2
        assert patched.left == ()
        after = model(tokens, use_cache=True)
        torch.testing.assert_close(after.logits, before.logits, rtol=1e-3, atol=1e-4)
        assert len(calls) == 2
        state, steps = None, []
        for t in range(tokens.shape[1]):
            # One row: the model itself mixes the rows of a batch in steps of one token.
            made = model(tokens[:1, t : t + 1], state=state, use_cache=True)
            state = made.state
            steps.append(made.logits)
        torch.testing.assert_close(torch.cat(steps, 1), before.logits[:1], rtol=1e-3, atol=1e-3)
        assert len(calls) == 2 + 2 * tokens.shape[1]
    model.train()
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "time" in name)


@pytest.mark.parametrize(("layer", "options", "functions"), [
    ("RWKV6Attention", {"num_heads": 2},
     "fused_recurrent_rwkv6 by wkv6, chunk_rwkv6 by wkv6"),
    ("RWKV7Attention", {"head_dim": 16, "layer_idx": 0, "num_hidden_layers": 2},
     "chunk_rwkv7 by wkv7, fused_mul_recurrent_rwkv7 by wkv7"),
    ("LinearAttention", {"num_heads": 2},
     "chunk_linear_attn by linear_attention, fused_chunk_linear_attn by linear_attention, "
     "fused_recurrent_linear_attn by linear_attention"),
])
def test_layers_of_fla(
    kgen_ops: ModuleType, layer: str, options: dict[str, Any], functions: str
) -> None:
    """As far as they run without a GPU: which of their functions are swapped."""
    try:
        fla = importlib.import_module("fla.layers")
    except Exception as why:
        pytest.skip(f"flash-linear-attention cannot be imported: {why}")
    with pytest.warns() if "RWKV" in layer else pytest.MonkeyPatch.context():
        model = getattr(fla, layer)(hidden_size=32, **options)
    patched = kgen_ops.patch(nn.ModuleDict({"attention": model}))
    swapped = {s.name: s for s in patched.swapped}
    assert set(swapped["attention"].function.split(", ")) == set(functions.split(", "))
    assert "forward" in model.__dict__
    if not torch.cuda.is_available():
        assert "was not tried" in swapped["attention"].untried
