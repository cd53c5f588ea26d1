"""Arguments of a wrong kind end in kgen's error, which names the argument and the next step.

No such argument may reach a kernel, and the checks must not slow a correct call down.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

N = 16


def _freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


KINDS: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "list": (lambda x: x.tolist(), TypeError, r"must be a tensor, not list\n  next: .*as_tensor"),
    "array": (lambda x: x.numpy(), TypeError, "must be a tensor, not ndarray"),
    "text": (lambda x: "x", TypeError, "must be a tensor, not str"),
    "sparse": (lambda x: x.to_sparse(), TypeError, r"torch.sparse_coo.*\n  next: .*to_dense"),
    "csr": (lambda x: x.to_sparse_csr(), TypeError, r"torch.sparse_csr.*\n  next: .*to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), TypeError,
               r"is a nested tensor.*\n  next: .*to_padded_tensor"),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), TypeError,
               "is a nested tensor"),
    "quantised": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), TypeError,
                  r"is quantised .*\n  next: .*dequantize"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), TypeError,
               r"is a MaskedTensor.*\n  next: pass the plain tensor"),
    "freed": (_freed, ValueError, r"storage has 0 of 128 bytes.*\n  next: "),
    "meta": (lambda x: x.to("meta"), ValueError, "on meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["x", "residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_a_wrong_kind(kgen_ops: ModuleType, kind: str, name: str) -> None:
    make, error, said = KINDS[kind]
    good = {"x": torch.randn(2, N), "w": torch.randn(N), "residual": torch.randn(2, N)}
    for _ in range(3):  # the layouts have a fast path, which must not serve the wrong one
        kgen_ops.rmsnorm(**good)
    with pytest.raises(error, match=f"(?s)^rmsnorm: .*{said}") as raised:
        kgen_ops.rmsnorm(**(good | {name: make(good[name])}))
    assert name in str(raised.value)


NO_NUMBERS = {
    "None": None, "str": "a", "bytes": b"1", "list": [1.0], "dict": {}, "complex": 1j,
    "object": object(), "beyond float": 10**400, "two elements": torch.ones(2),
    "complex tensor": torch.tensor(1j), "meta": torch.tensor(1.0, device="meta"),
}


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize("name", ["eps", "offset"])
@pytest.mark.parametrize("prepared", [False, True], ids=["first", "later"])
def test_scalars_that_are_no_numbers(
    kgen_ops: ModuleType, name: str, value: object, prepared: bool
) -> None:
    x, w = torch.randn(2 if prepared else 3, N), torch.randn(N)
    if prepared:
        for _ in range(3):
            kgen_ops.rmsnorm(x, w)
    for given in (x, x.clone().requires_grad_()):
        with pytest.raises(TypeError, match=rf"^rmsnorm: {name} must be a number, not .*\n"
                                            rf"  next: pass a float, such as {name}="):
            kgen_ops.rmsnorm(given, w, **{name: value})


def test_a_scalar_that_vmap_maps(kgen_ops: ModuleType) -> None:
    x = torch.randn(2, N)
    with pytest.raises(TypeError, match="eps must be a number, not a tensor that vmap maps"):
        torch.func.vmap(lambda eps: kgen_ops.rmsnorm(x, eps=eps))(torch.rand(3))


def test_dtypes_and_flags_name_the_tensor_and_the_next_step(kgen_ops: ModuleType) -> None:
    x = torch.randn(1, 4, 2, N)
    u = torch.randn(2, N)
    with pytest.raises(TypeError, match=r"k is bf16, but r is fp32; .*\n  next: pass k.to\(r.dtyp"):
        kgen_ops.wkv6(x, x.bfloat16(), x, -x.abs(), u)
    with pytest.raises(TypeError, match=r"u_dtype = int32.*\n.*\n  next: pass u in an allowed"):
        kgen_ops.wkv6(x, x, x, -x.abs(), u.int())
    wrongs: tuple[object, ...] = ([], {}, torch.ones(2))
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"final_state.* must be True or False, not "):
            kgen_ops.wkv6(x, x, x, -x.abs(), u, return_final_state=wrong)
    with pytest.raises(TypeError, match=r"decay_form = \[\] is not supported\n  allowed here: log"):
        kgen_ops.wkv6(x, x, x, -x.abs(), u, decay_form=[])


def test_errors_that_are_not_about_arguments_stay(kgen_ops: ModuleType) -> None:
    x = torch.randn(2, N, requires_grad=True)
    with torch.inference_mode():
        inference = torch.randn(N)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        kgen_ops.rmsnorm(x, inference)


def test_forward_mode_of_torch_func_is_refused(kgen_ops: ModuleType) -> None:
    x = torch.randn(2, N)
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(NotImplementedError, match=r"rmsnorm: a forward-mode.*\n  next: take"):
            transform(lambda x: kgen_ops.rmsnorm(x).sum())(x)


def test_a_sparse_gradient_is_made_dense(kgen_ops: ModuleType) -> None:
    gradient = torch.randn(2, N)
    x = torch.randn(2, N)
    found = []
    for given in (gradient, gradient.to_sparse()):
        leaf = x.clone().requires_grad_()
        kgen_ops.rmsnorm(leaf, torch.ones(N)).backward(given)
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls", [0, 4], ids=["first", "fast path"])
def test_a_trace_is_refused(kgen_ops: ModuleType, calls: int) -> None:
    x = torch.randn(5 + calls, N)
    for _ in range(calls):
        kgen_ops.rmsnorm(x)
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace cannot.*\n  next: use torch"):
        torch.jit.trace(kgen_ops.rmsnorm, (x,))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("value", "said"), [
    ("nosuch", r"CXX=nosuch names no program on PATH\n  next: unset CXX"),
    ("false", r"failed: exit status 1\n  next: set CXX"),
    ("true", r"wrote no runtime.o, and reported no error\n  next: set CXX"),
])
def test_a_compiler_that_is_none(
    library_folder: Path, tmp_path: Path, value: str, said: str
) -> None:
    """In a process of its own, since this one may have loaded the kernel before."""
    call = "import torch, kgen_ops\nkgen_ops.timex(torch.randn(3, 7), torch.randn(2, 3, 7))"
    done = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False,
        env={**os.environ, "CXX": value, "KGEN_CACHE_DIR": str(tmp_path),
             "PYTHONPATH": str(library_folder)},
    )
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr


def test_explain_suggests_names(kgen_ops: ModuleType) -> None:
    problem: dict[str, Any] = {"M": 2, "N": N, "dtype": "fp32"}
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("rmsnorm", {"gpu": "hots"}, "gpu = 'hots' is no name of a GPU .*\n  did you mean 'host'"),
        ("rmsnorm", {"gpu": 5}, "gpu = 5 is no name"),
        ("rmsnorm", {"device": "cdua"}, "device = 'cdua' is no device: .*\n  next: pass device="),
        ("rmsnorm", {"pass_name": "bakward"}, "did you mean 'backward'"),
        ("rmsnorm", {"w_dtpye": "fp32"}, "did you mean 'w_dtype'"),
        ("RMSNorm", {}, "did you mean 'rmsnorm'"),
    ]
    for operator, more, said in mistakes:
        with pytest.raises(ValueError, match=said):
            kgen_ops.explain(operator, **problem, **more)


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"initial_state": torch.zeros(1, 2, N, N).to_sparse()}, TypeError,
     "initial_state has the layout torch.sparse_coo"),
    ({"r": torch.zeros(1, 4, 2, N, device="meta")}, ValueError, "on meta"),
    ({"v": [1.0]}, TypeError, "v must be a tensor, not list\n  next: "),
    ({"output_final_state": []}, TypeError, "output_final_state must be True or False, not list"),
    ({"scale": "a"}, TypeError, "scale must be a number, not str 'a'"),
    ({"kk": torch.zeros(1, 4, 2, 5)}, ValueError, r"do not fit each other: .*\n  given: r \[1, 4"),
    ({"kk": torch.zeros(1, 4, 2, N, dtype=torch.bool)}, ValueError, "kk .* torch.bool"),
    ({"r": torch.zeros(1, 4, 2, 0), "scale": None}, ValueError, "the shapes do not fit"),
])
def test_adapters_name_the_argument(
    compat: ModuleType, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    names = ("r", "w", "k", "v", "kk", "a")
    call = {name: -torch.rand(1, 4, 2, N) for name in names} | change
    with pytest.raises(error, match=f"(?s)fused_mul_recurrent_rwkv7: .*{said}"):
        compat.fused_mul_recurrent_rwkv7(**call)


def test_a_state_is_not_updated_for_an_output_that_cannot_be_written(compat: ModuleType) -> None:
    rows = [torch.randn(1, 3, 2 * N) for _ in range(6)]
    state = torch.zeros(1, 2, N, N)
    for y in (torch.empty(1, 3, 2 * N, device="meta"), torch.zeros(1, 3, 2 * N, dtype=torch.int)):
        with pytest.raises(ValueError, match=r"wkv7s: y is .*\n  next: pass torch.empty_like"):
            compat.wkv7s(1, 3, 2 * N, 2, state, *rows, y)
    assert not state.any()


def test_modules_name_extents_and_tensors(kgen_ops: ModuleType) -> None:
    import importlib

    nn = importlib.import_module(f"{kgen_ops.__name__}.nn")
    extents: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: nn.RMSNorm("16"), TypeError, "RMSNorm: normalized_shape = '16' is no whole"),
        (lambda: nn.RMSNorm(None), TypeError, "normalized_shape = None is no whole"),
        (lambda: nn.RMSNorm(-1), ValueError, "normalized_shape = -1 is no extent"),
        (lambda: nn.Wkv6(2, True), TypeError, "Wkv6: head_size = True is no whole"),
        (lambda: nn.Wkv4(8, "a", 2), ValueError, "layer = 'a'"),
        (lambda: nn.Timex(0, 4), ValueError, "Timex: channels = 0 is no extent"),
        (lambda: nn.LinearAttention(10**30, 2), ValueError, "embed_dim = .* is no extent"),
    ]
    for make, error, said in extents:
        with pytest.raises(error, match=f"{said}.*\n  next: |{said}"):
            make()
    x, layer = torch.randn(1, 4, 32), nn.Wkv6(2, N)
    for wrong, error, said in [
        (None, TypeError, "Wkv6: k must be a tensor, not NoneType\n  next: "),
        (torch.randn(1, 4, 33), ValueError, r"Wkv6: k has shape \(1, 4, 33\)\n  next: "),
    ]:
        with pytest.raises(error, match=said):
            layer(x, wrong, x, x)
    with pytest.raises(ValueError, match=r"Wkv7: .*fit the module.*\n  next: |Wkv7: k has shape"):
        nn.Wkv7(2, N)(x, x, torch.randn(1, 4, 64), x, x)
    attention = nn.LinearAttention(32, 2)
    for wrong in (None, torch.randn(1, 4, 33), x.double()):
        with pytest.raises(ValueError, match=r"LinearAttention: x is .*\n  next: pass x \[B, T"):
            attention(wrong)
    with pytest.raises(ValueError, match="state has 4 parts\n  next: "):
        attention(x, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"Timex: x is NoneType\n  next: "):
        nn.Timex(4, 8)(None)
