"""The generated linear_attention on the CPU: layouts, optional tensors, allow_tf32, torch.compile.

Its safe kernels alone: what is tested is the way from a call to the kernel and back.
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
from kgen.operators.linear_attention import OPERATOR, definition
from kgen.render import Renderer

B, H, T, E, M = 2, 3, 20, 9, 5
FIELDS = ("initial_state", "initial_key_sum", "final_state", "final_key_sum", "norm")
WANTED = [dict.fromkeys(FIELDS, "none"), dict.fromkeys(FIELDS, "fp32")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A library with the safe kernels of two combinations per dtype, and one row."""
    entry, host = open_catalogue().entry("linear_attention"), profile_named("host")
    renderer = Renderer(include_dir())
    safe: list[SafeKernel] = []
    winners: list[Winner] = []
    for passed in OPERATOR.signature.passes:
        variant = entry.space.safe_variant(passed.name)
        assert variant.safe is not None
        for dtypes in OPERATOR.signature.dtype_combinations():
            if {f: dtypes[f"{f}_dtype"] for f in FIELDS} not in WANTED:
                continue
            problem = Problem(tuple((d.name, 64) for d in OPERATOR.signature.dims),
                              tuple(dtypes.items()))
            rendered = renderer.render(
                "linear_attention", entry.templates, variant, variant.safe, problem
            )
            safe.append(SafeKernel(OPERATOR, passed.name, dtypes, variant, variant.safe, rendered))
            if any(w.pass_name == passed.name for w in winners):
                continue
            record = Record(
                key=problem.digest, operator="linear_attention", pass_name=passed.name,
                problem=str(problem), gpu="host", config=variant.safe, fate=Fate.VERIFIED,
                timing=Timing(10.0, 9.0, 11.0, 50, "test"), when="2026-01-01T00:00:00Z",
            )
            winners.append(Winner(OPERATOR, passed.name, problem, host, variant, variant.safe,
                                  rendered, None, "host", record))
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
    """[B, H, T, features] in one of the layouts that callers have."""
    if layout == "BHTE":
        return torch.randn(B, H, T, features).to(dtype)
    if layout == "BTHE":
        return torch.randn(B, T, H, features).to(dtype).transpose(1, 2)
    if layout == "packed":  # q, k and v side by side
        return torch.randn(B, T, 3, H, features).to(dtype)[:, :, 1].transpose(1, 2)
    assert layout == "expanded"
    return torch.randn(B, H, 1, features).to(dtype).expand(B, H, T, features)


def dense(layout: str, features: int) -> tuple[int, ...]:
    """Strides that an output in a layout has."""
    if layout in ("BTHE", "packed"):
        return (T * H * features, features, H * features, 1)
    return (H * T * features, T * features, features, 1)


@pytest.mark.parametrize("v_layout", ["BHTE", "BTHE", "packed"])
@pytest.mark.parametrize("q_layout", ["BHTE", "BTHE", "packed", "expanded"])
def test_outputs_take_the_layout_of_their_input(
    library: ModuleType, q_layout: str, v_layout: str
) -> None:
    q, k, v = tensor(q_layout, E), tensor("BTHE", E), tensor(v_layout, M)
    gout = tensor("BHTE", M)
    for _ in range(2):  # prepared at the first call
        out = library.linear_attention(q, k, v, scale=0.5)
        want = definition("forward", {"q": q, "k": k, "v": v}, {"scale": 0.5, "eps": 0.0})["out"]
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
        assert out.stride() == dense(v_layout, M)
        gradients = library.linear_attention_backward(gout, q, k, v, scale=0.5)
        wanted = definition("backward", {"gout": gout, "q": q, "k": k, "v": v}, {"scale": 0.5})
        for name, got, layout, features in zip(
            ("gq", "gk", "gv"), gradients, (q_layout, "BTHE", v_layout), (E, E, M), strict=True
        ):
            torch.testing.assert_close(got, wanted[name], rtol=1e-4, atol=1e-4)
            if layout != "expanded":
                assert got.stride() == dense(layout, features)


def test_everything_that_there_may_be(library: ModuleType) -> None:
    q, k, v = (tensor("BTHE", n).abs() for n in (E, E, M))
    state, keys = torch.randn(B, H, E, M), torch.rand(B, H, E)
    given = {"q": q, "k": k, "v": v, "initial_state": state, "initial_key_sum": keys}
    got = library.linear_attention(
        **given, eps=0.5, return_final_state=True, return_final_key_sum=True, return_norm=True
    )
    want = definition("forward", given, {"scale": 1.0, "eps": 0.5, "return_norm": 1.0})
    for tensor_, name in zip(got, ("out", "final_state", "final_key_sum", "norm"), strict=True):
        torch.testing.assert_close(tensor_, want[name], rtol=1e-4, atol=1e-4)
    given |= {
        "gout": tensor("BHTE", M), "norm": got[3], "gout_dot_out": torch.randn(B, H, T),
        "gfinal_state": torch.randn(B, H, E, M), "gfinal_key_sum": torch.randn(B, H, E),
    }
    wanted = definition("backward", given, {"scale": 1.0})
    names = ("gq", "gk", "gv", "ginitial_state", "ginitial_key_sum")
    gradients = library.linear_attention_backward(**given)
    for gradient, name in zip(gradients, names, strict=True):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)
    del given["gout_dot_out"]
    with pytest.raises(ValueError, match="gout_dot_out is None"):
        library.linear_attention_backward(**given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tf32_may_be_allowed(library: ModuleType, dtype: torch.dtype) -> None:
    q, k, v = (tensor("BHTE", n, dtype) for n in (E, E, M))
    plain = library.linear_attention(q, k, v)
    assert library.linear_attention(q, k, v, allow_tf32=True).equal(plain)  # the naive kernel's


def test_without_a_row_for_rounded_products_an_exact_one_serves(library: ModuleType) -> None:
    """The one row is of fp32."""
    dims = {"B": 64, "H": 64, "T": 64, "E": 64, "M": 64}
    steps = {
        dtypes: library.explain(
            "linear_attention", **dims, dtype=dtypes[0], product_dtype=dtypes[1], device="cpu"
        ).step
        for dtypes in (("fp32", "fp32"), ("fp32", "tf32"), ("bf16", "bf16"))
    }
    assert list(steps.values()) == ["exact", "nearest", "safe"]


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps(library: ModuleType, steps: int) -> None:
    q, k, v = (tensor("BTHE", n)[:, :, :steps] for n in (E, E, M))
    state, keys = torch.randn(B, H, E, M), torch.rand(B, H, E)
    got = library.linear_attention(
        q, k, v, state, keys, return_final_state=True, return_final_key_sum=True, return_norm=True
    )
    torch.testing.assert_close(got[1], state + k.transpose(-1, -2) @ v)
    torch.testing.assert_close(got[2], keys + k.sum(2))


def test_compiles_without_a_break(library: ModuleType) -> None:
    q, k, v = tensor("BTHE", E), tensor("BTHE", E), tensor("BTHE", M)
    compiled = torch.compile(
        lambda *qkv: library.linear_attention(*qkv) * 2, fullgraph=True, backend="aot_eager"
    )
    out = compiled(q, k, v)
    torch.testing.assert_close(out, 2 * library.linear_attention(q, k, v))
    assert out.stride() == dense("BTHE", M)
    torch.library.opcheck(
        torch.ops.kgen_ops.linear_attention.default, (q, k, v),
        test_utils=("test_schema", "test_faketensor"),
    )
