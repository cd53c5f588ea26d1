"""Several outputs are a named tuple, whichever way a call goes; one output stays a tensor."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

B, T, H, K = 2, 3, 2, 4


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(B, H, T, K), torch.rand(B, H, T, K), torch.randn(B, H, T, K)


def wkv6_inputs() -> tuple[Tensor, ...]:
    r, k, v = (torch.randn(B, T, H, K) for _ in range(3))
    return r, k, v, -torch.rand(B, T, H, K), torch.randn(H, K)


# Name of the operator, tensors, keywords, class and fields of the result.
Call = tuple[str, Callable[[], tuple[Tensor, ...]], dict[str, Any], str, tuple[str, ...]]
CALLS: dict[str, Call] = {
    "residual": (
        "rmsnorm", lambda: (torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)), {},
        "RmsnormResultWithH", ("y", "h")),
    "rstd": (
        "rmsnorm", lambda: (torch.randn(4, 16), torch.randn(16)), {"return_rstd": True},
        "RmsnormResultWithRstd", ("y", "rstd")),
    "all": (
        "rmsnorm", lambda: (torch.randn(4, 16), torch.randn(16), torch.randn(4, 16)),
        {"return_rstd": True}, "RmsnormResultWithHAndRstd", ("y", "h", "rstd")),
    "state": (
        "linear_attention", qkv, {"return_final_state": True},
        "LinearAttentionResultWithFinalState", ("out", "final_state")),
    "norm": (
        "linear_attention", qkv, {"return_norm": True},
        "LinearAttentionResultWithNorm", ("out", "norm")),
    "one": (
        "wkv6", wkv6_inputs, {"return_final_state": True}, "Wkv6Result", ("y", "final_state")),
}
each = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def called(kgen_ops: ModuleType, call: Call, tensors: tuple[Tensor, ...]) -> Any:
    return getattr(kgen_ops, call[0])(*tensors, **call[2])


def check(made: Any, call: Call) -> None:
    _, _, _, name, fields = call
    module = importlib.import_module(f"kgen_ops.{call[0]}")
    assert type(made) is getattr(module, name), type(made)
    assert made._fields == fields
    assert [getattr(made, field) for field in fields] == list(made)
    assert all(isinstance(output, Tensor) for output in made)


@each
def test_first_and_later_calls(kgen_ops: ModuleType, call: Call) -> None:
    tensors = call[1]()
    for _ in range(3):
        check(called(kgen_ops, call, tensors), call)
    empty = tuple(x[:0] if x.dim() > 1 else x for x in tensors)
    if call[0] == "rmsnorm":
        check(called(kgen_ops, call, empty), call)


@each
def test_the_fast_path(kgen_ops: ModuleType, extensions: Any, call: Call) -> None:
    """Aligned tensors, so that every call after the second takes it."""
    forward = importlib.import_module(f"kgen_ops.{call[0]}").FORWARD
    forward.forget()
    tensors = call[1]()
    aligned = all(x.data_ptr() % 32 == 0 for x in tensors)
    for _ in range(4):
        check(called(kgen_ops, call, tensors), call)
    served = sum(path.served for paths in forward.fast_paths.values() for path in paths)
    assert served == (2 if aligned else 0)
    forward.forget()


@each
def test_with_gradients(kgen_ops: ModuleType, call: Call) -> None:
    tensors = tuple(x.requires_grad_() for x in call[1]())
    made = called(kgen_ops, call, tensors)
    check(made, call)
    torch.autograd.grad(made[0].sum(), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(called(kgen_ops, call, tensors), call)


@each
def test_fake_and_meta_tensors_and_transforms(kgen_ops: ModuleType, call: Call) -> None:
    tensors = call[1]()
    check(called(kgen_ops, call, tuple(x.to("meta") for x in tensors)), call)
    with FakeTensorMode() as mode:
        check(called(kgen_ops, call, tuple(mode.from_tensor(x) for x in tensors)), call)
    batch = tuple(torch.stack([x, x]) for x in tensors)
    check(torch.func.vmap(lambda *given: called(kgen_ops, call, given))(*batch), call)


@each
def test_the_registered_operator_makes_a_plain_list(kgen_ops: ModuleType, call: Call) -> None:
    module = importlib.import_module(f"kgen_ops.{call[0]}")
    flags = [f"return_{f.removesuffix('_dtype')}" for f in module.FORWARD.signature.flags]
    keywords = {name: call[2].get(name, False) for name in flags if name.startswith("return_")
                and "product" not in name}
    made = getattr(torch.ops.kgen_ops, call[0])(*call[1](), **keywords)
    assert type(made) is list
    assert len(made) == len(call[4])


@each
def test_compiled_code_makes_it_and_reads_its_fields(kgen_ops: ModuleType, call: Call) -> None:
    def outside(*given: Tensor) -> Any:
        return called(kgen_ops, call, given)

    def inside(*given: Tensor) -> Tensor:
        made = called(kgen_ops, call, given)
        total: Tensor = getattr(made, call[4][1]).sum()
        return made._replace(**{call[4][0]: total})[0] + made[0]  # type: ignore[no-any-return]

    tensors = call[1]()
    check(torch.compile(outside, fullgraph=True, backend="aot_eager")(*tensors), call)
    torch.testing.assert_close(
        torch.compile(inside, fullgraph=True, backend="aot_eager")(*tensors), inside(*tensors))


@pytest.mark.parametrize("strict", [True, False])
def test_export_and_save(kgen_ops: ModuleType, strict: bool) -> None:
    call = CALLS["all"]

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return called(kgen_ops, call, given)

    tensors = call[1]()
    program = torch.export.export(Model(), tensors, strict=strict)
    check(program.module()(*tensors), call)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    made = torch.export.load(file).module()(*tensors)
    check(made, call)


def test_gradients_by_name(kgen_ops: ModuleType) -> None:
    r, k, v, w, u = wkv6_inputs()
    made = kgen_ops.wkv6_backward(v, r, k, v, w, u)
    assert type(made).__name__ == "Wkv6BackwardResult"
    assert made._fields == ("gr", "gk", "gv", "gw", "gu")
    made = kgen_ops.wkv6_backward(v, r, k, v, w, u, torch.zeros(B, H, K, K))
    assert made._fields[-1] == "ginitial_state"
    made = kgen_ops.timex_backward(torch.randn(2, 4, 6), torch.randn(4, 6), torch.randn(2, 4, 6))
    assert type(made).__name__ == "TimexBackwardResult"
    gw, gk = made
    assert gw.shape == (4, 6)
    assert gk is made.gk


@each
def test_pickled(kgen_ops: ModuleType, call: Call) -> None:
    made = called(kgen_ops, call, call[1]())
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert all(map(torch.equal, again, made))


@pytest.mark.parametrize("grad", [False, True])
def test_one_output_stays_a_tensor(kgen_ops: ModuleType, grad: bool) -> None:
    x = torch.randn(4, 16, requires_grad=grad)
    for _ in range(3):
        assert type(kgen_ops.rmsnorm(x)) is Tensor
    q, k, v = qkv()
    assert type(kgen_ops.linear_attention(q.requires_grad_(grad), k, v)) is Tensor
    compiled: Any = torch.compile(kgen_ops.rmsnorm, fullgraph=True, backend="eager")
    assert type(compiled(x)) is Tensor
