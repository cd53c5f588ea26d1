"""A small library emitted for the host, from kernels written for these tests.

`rmsnorm` has a variant with N compiled in, which requires aligned rows, and a safe variant for any
N. One CUDA thread computes a row: the source is slow and short, and the same on a GPU and on the
host.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue
from kgen.emit import Emitted, SafeKernel, Winner, emit
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of_text
from kgen.model.dtypes import dtype_named
from kgen.model.expr import parse_expr
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem, parse_problem, with_dims
from kgen.model.record import Fate, Record, Timing
from kgen.model.space import LaunchSpec, Param, Rule, Variant
from kgen.operators.base import Operator
from kgen.operators.rmsnorm import OPERATOR
from kgen.runtime import nvrtc

SOURCE = """\
#include "kgen/primitives/core.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

extern "C" __global__ void rmsnorm_forward(
    const {x}* x, const {w}* w, const {residual}* residual, {x}* y, {residual}* h, {rstd}* rstd,
    kgen::i64 M, {n_arg}kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps,
    float offset) {{
    {n_const}
    const kgen::i64 m = kgen::i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (m >= M) return;
    float squares = 0.0f;
    for (kgen::i64 n = 0; n < N; ++n) {{
        float value = kgen::to_float(x[m * x_stride_M + n]);
        if (residual) {{
            value += kgen::to_float(residual[m * residual_stride_M + n]);
            h[m * N + n] = kgen::from_float<{residual}>(value);
            value = kgen::to_float(h[m * N + n]);
        }}
        y[m * N + n] = kgen::from_float<{x}>(value);
        squares += value * value;
    }}
    const float scale = kgen::rsqrt(squares / N + eps);
    if (rstd) rstd[m] = scale;
    for (kgen::i64 n = 0; n < N; ++n) {{
        const float value = kgen::to_float(y[m * N + n]) * scale;
        y[m * N + n] = kgen::from_float<{x}>(w ? value * (offset + kgen::to_float(w[n])) : value);
    }}
}}
KGEN_EXPORT(rmsnorm_forward);
"""


def _rule(text: str) -> Rule:
    return Rule(parse_expr(text), "for the test", "test.yaml:1")


def _variant(name: str, constants: tuple[str, ...], guards: tuple[str, ...]) -> Variant:
    args = ("x", "w", "residual", "y", "h", "rstd", "M", *(() if constants else ("N",)),
            "x_stride_M", "residual_stride_M", "eps", "offset")
    safe = Config.of(name, {"threads": 32}) if not constants else None
    rules = ("threads <= max_threads_per_block", "N % vec == 0", "M >= 1") if constants else ()
    return Variant(
        name=name, pass_name="forward", doc="",
        params=(Param("threads", (32, 64)), Param("vec", (1, 4))), constants=constants,
        requires=tuple(map(_rule, rules)), guards=tuple(map(_rule, guards)),
        launches=(LaunchSpec(
            "rmsnorm_forward", (parse_expr("ceil_div(M, threads)"),), (parse_expr("threads"),),
            parse_expr(0), args,
        ),),
        workspaces=(), first=(), safe=safe, where="test.yaml:1",
    )


FAST = _variant("fixed_row", ("N",),
                ("x_ptr % (vec * itemsize) == 0 and x_stride_M % vec == 0",))
SAFE = _variant("any_row", (), ())


def profile(name: str) -> GpuProfile:
    """A made-up profile: `host`, or an H200 under another name."""
    host = name == "host"
    return GpuProfile(
        name=name, title=f"Test {name}", device_names=() if host else (f"NVIDIA {name.upper()}",),
        arch="host" if host else "sm_90a", sm_count=2 if host else 132, smem_per_block=1 << 16,
        smem_per_sm=1 << 16, regs_per_sm=65536, max_threads_per_sm=2048, max_blocks_per_sm=32,
        l2_bytes=1 << 20, memory_bytes=1 << 30, bandwidth_gbps=10.0, fp32_tflops=0.1,
        tf32_tflops=0.0, half_tflops=0.0,
    )


def _rendered(dtypes: dict[str, str], n: int | None) -> Rendered:
    source = SOURCE.format(
        **{field.removesuffix("_dtype").replace("dtype", "x"): dtype_named(dtype).cuda
           for field, dtype in dtypes.items()},
        n_arg="" if n else "kgen::i64 N, ", n_const=f"constexpr kgen::i64 N = {n};" if n else "",
    )
    return Rendered("rmsnorm/test", source, digest_of_text(source))


def winner(
    problem: str, gpu: str = "host", median_us: float = 10.0, threads: int = 64,
    compiled: bool = False,
) -> Winner:
    """A winner of the `fixed_row` variant; its cubin is real only if `compiled`."""
    parsed = parse_problem(problem, OPERATOR.signature)
    config = Config.of("fixed_row", {"threads": threads, "vec": 4})
    record = Record(
        key=parsed.digest, operator="rmsnorm", pass_name="forward", problem=str(parsed), gpu=gpu,
        config=config, fate=Fate.VERIFIED, timing=Timing(median_us, 9.0, 11.0, 50, "test"),
        when="2026-01-01T00:00:00Z",
    )
    rendered = _rendered(dict(parsed.dtypes), parsed.dim("N"))
    cubin = None if gpu == "host" else b"cubin of " + rendered.digest.encode()
    if compiled:
        cubin, _ = nvrtc.compile_cubin(rendered.source, "test.cu", "sm_90a", [str(include_dir())])
    return Winner(OPERATOR, "forward", parsed, profile(gpu), FAST, config, rendered, cubin,
                  "host" if gpu == "host" else "sm_90a", record)


def safe_kernels() -> list[SafeKernel]:
    """The safe variant for every dtype combination."""
    config = SAFE.safe
    assert config is not None
    return [SafeKernel(OPERATOR, "forward", dtypes, SAFE, config, _rendered(dtypes, None))
            for dtypes in OPERATOR.signature.dtype_combinations()]


def real_kernels(
    name: str, wanted: Callable[[dict[str, str]], bool], pass_names: Sequence[str]
) -> tuple[list[Winner], list[SafeKernel]]:
    """An operator's own safe kernels, and a row per pass for the first of them.

    The kernels are for the named passes and the dtype combinations that `wanted` accepts.
    """
    entry, host = open_catalogue().entry(name), profile("host")
    operator, renderer = entry.operator, Renderer(include_dir())
    safe: list[SafeKernel] = []
    winners: list[Winner] = []
    for passed in map(operator.signature.pass_named, pass_names):
        variant = entry.space.safe_variant(passed.name)
        assert variant.safe is not None
        for dtypes in filter(wanted, operator.signature.dtype_combinations()):
            extents = tuple((d.name, 64) for d in operator.signature.dims)
            problem = with_dims(Problem(extents, tuple(dtypes.items())), {}, operator.signature)
            rendered = renderer.render(name, entry.templates, variant, variant.safe, problem)
            safe.append(SafeKernel(operator, passed.name, dtypes, variant, variant.safe, rendered))
            if any(w.pass_name == passed.name for w in winners):
                continue
            record = Record(
                key=problem.digest, operator=name, pass_name=passed.name, problem=str(problem),
                gpu="host", config=variant.safe, fate=Fate.VERIFIED,
                timing=Timing(10.0, 9.0, 11.0, 50, "test"), when="2026-01-01T00:00:00Z",
            )
            winners.append(Winner(operator, passed.name, problem, host, variant, variant.safe,
                                  rendered, None, "host", record))
    return winners, safe


def _wkv(dtypes: dict[str, str]) -> bool:
    """fp32 with any states, and with packed sequences or a form of w other than log, not both; bf16
    with u in bf16 and w in any dtype, without states, packed sequences and other forms of w.
    """
    kinds = {dtypes["dtype"], dtypes["u_dtype"]}
    packed, log = dtypes["cu_seqlens_dtype"] != "none", dtypes["decay_form"] == "log"
    if kinds == {"fp32"}:
        return dtypes["w_dtype"] == "fp32" and (log or not packed)
    states = {dtypes["initial_state_dtype"], dtypes["final_state_dtype"]}
    return kinds == {"bf16"} and states == {"none"} and log and not packed


def _wkv4(dtypes: dict[str, str]) -> bool:
    """fp32 with any other choices, and bf16 with u in bf16 and raw w."""
    return dtypes["dtype"] == "fp32" or (
        dtypes["dtype"] == "bf16" == dtypes["u_dtype"] and dtypes["decay_form"] == "raw"
    )


def _wkv7(dtypes: dict[str, str]) -> bool:
    """As `_wkv`; also bf16 with both states, because an adapter returns the state in bf16."""
    packed, log = dtypes["cu_seqlens_dtype"] != "none", dtypes["decay_form"] == "log"
    if dtypes["dtype"] == "fp32":
        return dtypes["w_dtype"] == "fp32" and (log or not packed or dtypes["decay_form"] == "raw")
    states = {dtypes["initial_state_dtype"], dtypes["final_state_dtype"]}
    return dtypes["dtype"] == "bf16" and len(states) == 1 and not packed


def _linear_attention(dtypes: dict[str, str]) -> bool:
    """All optional tensors or none of them; in fp32 also each useful subset of them."""
    def there(name: str) -> bool:
        return dtypes[f"{name}_dtype"] != "none"

    optional = [name.removesuffix("_dtype") for name in dtypes
                if name not in ("dtype", "product_dtype")]
    if len({there(name) for name in optional}) == 1:
        return True
    if dtypes["dtype"] != "fp32" or dtypes["product_dtype"] != "fp32":
        return False
    # A key sum is useful only together with a norm.
    return there("norm") or not (there("initial_key_sum") or there("final_key_sum"))


def _any_weight(dtypes: dict[str, str]) -> bool:
    """fp32 and bf16, with any other choices."""
    return dtypes["dtype"] != "fp16"


def _decode(dtypes: dict[str, str]) -> bool:
    """fp32 and bf16 with u in the same dtype, and any other choices."""
    return dtypes["dtype"] != "fp16" and dtypes.get("u_dtype", dtypes["dtype"]) == dtypes["dtype"]


BOTH = ("forward", "backward")
# Operators whose own safe kernels are also in the library.
REAL = {
    "wkv4": (_wkv4, BOTH),
    "wkv5": (_wkv, BOTH),
    "wkv6": (_wkv, BOTH),
    "wkv7": (_wkv7, BOTH),
    "wkv5_decode": (_decode, ("forward",)),
    "wkv6_decode": (_decode, ("forward",)),
    "wkv7_decode": (_decode, ("forward",)),
    "linear_attention": (_linear_attention, BOTH),
    "timex": (_any_weight, BOTH),
    "rmsnorm": (_any_weight, ("backward",)),
}


EmitInto = Callable[[Path, Sequence[Winner]], Emitted]


@pytest.fixture(scope="session")
def emit_into() -> EmitInto:
    """Emit winners and all safe kernels into a folder."""
    return lambda folder, winners: emit(folder, winners, safe_kernels(), include_dir())


@pytest.fixture(scope="session")
def make_winner() -> Callable[..., Winner]:
    """Make a winner for a problem: (problem, gpu, median_us, threads)."""
    return winner


@pytest.fixture(scope="session")
def operator() -> Operator:
    """The operator that is emitted."""
    return OPERATOR


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory, emit_into: EmitInto) -> Path:
    """A library tuned for the host: rmsnorm has the kernels above, other operators have their own.

    All tests use this library, because a process can import only one library.
    """
    folder = tmp_path_factory.mktemp("library")
    emit_into(folder, [
        winner("M=8,N=16,dtype=fp32", threads=32),
        winner("M=512,N=16,dtype=fp32", threads=64),
        winner("M=8,N=32,dtype=bf16,w_dtype=fp32"),
    ])
    for name, (wanted, pass_names) in REAL.items():
        emit(folder, *real_kernels(name, wanted, pass_names), include_dir())
    return folder


@pytest.fixture(scope="session")
def kgen_ops(
    library_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModuleType]:
    """The library, imported into this process, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("KGEN_WARN", "0")  # most calls of these tests are served by safe kernels
        patch.syspath_prepend(str(library_folder))
        # torch refuses the operators of a second library; a test that imports one must be changed.
        assert "kgen_ops" not in sys.modules, "a test imported a library; use another process"
        yield importlib.import_module("kgen_ops")
    for name in [name for name in sys.modules if name.split(".")[0] == "kgen_ops"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def compat(kgen_ops: ModuleType) -> ModuleType:
    """The library's adapters of published functions."""
    return importlib.import_module(f"{kgen_ops.__name__}.compat")


@pytest.fixture(scope="module")
def extensions(kgen_ops: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The library's extensions in C, for the tests of a single file."""
    module = sys.modules["kgen_ops._runtime.extension"]
    before = {name for name in sys.modules if name.startswith("kgen_ops._runtime._")}
    assert module.provide_extensions(tmp_path_factory.mktemp("extensions"))
    yield module
    for name in {name for name in sys.modules if name.startswith("kgen_ops._runtime._")} - before:
        del sys.modules[name]
    module.extension.cache_clear()
