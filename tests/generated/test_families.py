"""Families on the CPU: a kernel for a call without a row is rendered, compiled and checked.

A kernel that fails is not used.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_library import host_library

from kgen.assets import include_dir

CALLS = """
import warnings
import torch
import kgen_ops

warnings.simplefilter("error")
torch.manual_seed(0)


def rmsnorm(m, n, dtype=torch.float32):
    return kgen_ops.rmsnorm(torch.randn(m, n).to(dtype), torch.randn(n).to(dtype))


def wkv6(t, k, v, dtype=torch.float32, **options):
    r, key = torch.randn(2, 1, t, 2, k).to(dtype)
    value = torch.randn(1, t, 2, v).to(dtype)
    w = -torch.rand(1, t, 2, k)
    return kgen_ops.wkv6(r, key, value, w, torch.randn(2, k).to(dtype), **options)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with one row of rmsnorm and one of wkv6 for the host, and their families."""
    return host_library(tmp_path_factory.mktemp("families"), include_dir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that these tests compile, so that each is compiled once."""
    return tmp_path_factory.mktemp("cache")


def run(library: Path, cache: Path, script: str, **environment: str) -> str:
    """Run a script in a process of its own, because a process loads one library."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS + script], capture_output=True, text=True, check=False,
        # Fixtures of other tests in this process may have silenced the library.
        env={**os.environ, "KGEN_WARN": "1", "PYTHONPATH": str(library),
             "KGEN_CACHE_DIR": str(cache), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_extents_dtypes_and_options_get_a_checked_kernel(library: Path, cache: Path) -> None:
    printed = run(library, cache, """
rmsnorm(3, 96)
rmsnorm(5, 64, torch.bfloat16)
wkv6(37, 24, 40)
wkv6(20, 16, 16, torch.bfloat16, initial_state=torch.randn(1, 2, 16, 16), return_final_state=True)
print(kgen_ops.misses())
print(kgen_ops.explain("wkv6", B=1, T=37, H=2, K=24, V=40, dtype="fp32", w_dtype="fp32"))
""", KGEN_CHECK="first")
    assert printed.startswith("()\n")
    assert ": family\n" in printed
    assert "rendered from wkv/forward_chunk_halving.cu.jinja" in printed
    assert "this problem was not measured" in printed


def test_the_check_finds_a_wrong_kernel(library: Path, cache: Path) -> None:
    script = """
from kgen_ops._runtime import families

real = families.source
def wrong(root, instance, dims, choices):
    stem, text = real(root, instance, dims, choices)
    changed = text.replace(b"kgen::rsqrt(", b"1.25f * kgen::rsqrt(")
    assert changed != text
    return stem, changed
families.source = wrong
x = torch.randn(3, 80)
try:
    y = kgen_ops.rmsnorm(x, torch.ones(80))
    want = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    print("right" if (y - want).abs().max() < 1e-4 else "wrong")
except kgen_ops.CheckError as error:
    print(error)
"""
    assert run(library, cache, script, KGEN_CHECK="0") == "wrong\n"
    # Without the variable the safe kernel serves the call.
    assert run(library, cache, script, KGEN_WARN="0") == "right\n"
    with pytest.raises(AssertionError, match="KGEN_CHECK=always: allowed are 'first'"):
        run(library, cache, script, KGEN_CHECK="always")
    printed = run(library, cache, script, KGEN_CHECK="first")
    assert "differs from the safe kernel's by 2.5" in printed


@pytest.mark.parametrize("mode", ["", "first"])
def test_the_check_refuses_no_kernel_for_its_inputs(
    library: Path, cache: Path, mode: str
) -> None:
    """Values that are no numbers, repeated and overlapping elements; the caller's random state."""
    printed = run(library, cache, """
state = torch.get_rng_state()
w = torch.ones(56)
nan = torch.full((3, 56), torch.nan)
assert kgen_ops.rmsnorm(nan, w).isnan().all()
kgen_ops.rmsnorm(torch.ones(1, 56).expand(4, 56), w)
kgen_ops.rmsnorm(torch.ones(100).as_strided((4, 56), (8, 1)), w)
assert torch.equal(state, torch.get_rng_state())
print(kgen_ops.misses(), kgen_ops.explain("rmsnorm", M=3, N=56, dtype="fp32").step)
""", KGEN_CHECK=mode)
    assert printed == "() family\n"


def test_results_that_overflow_are_compared_at_a_smaller_size(library: Path, cache: Path) -> None:
    printed = run(library, cache, """
from kgen_ops._runtime import preparing

sizes = []
made_up, demand = preparing.made_up_like, preparing.demand_agreement
preparing.made_up_like = lambda *given: sizes.append(given[-1]) or made_up(*given)
preparing.demand_agreement = lambda *given: len(sizes) > 1 and demand(*given)
rmsnorm(3, 40)
rmsnorm(4, 40)
print(sizes)
""")
    assert printed == "[1.0, 0.015625]\n"


def test_a_kernel_is_compared_once(library: Path, cache: Path) -> None:
    printed = run(library, cache, """
from kgen_ops._runtime import preparing

compared = []
real = preparing.demand_agreement
preparing.demand_agreement = lambda *given: compared.append(given[3]) or real(*given)
for m in (300, 500, 900):  # M is no constant of the kernel
    rmsnorm(m, 48)
print(len(compared))
rmsnorm(300, 44)
print(len(compared))
""")
    assert printed == "1\n2\n"


def test_what_does_not_compile_leaves_the_call_to_the_safe_kernel(
    library: Path, cache: Path
) -> None:
    printed = run(library, cache, """
from kgen_ops._runtime import families

families.source = lambda *_: ("broken", b"this is not C++;")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        y = rmsnorm(3, 72)
(warning,) = seen
assert warning.category is kgen_ops.KgenPerformanceWarning
print(warning.message)
(miss,) = kgen_ops.misses()
print("calls", miss.calls, miss.function, len(miss.refused) > 0)
""")
    assert "no tuned kernel serves M=3,N=72,dtype=fp32" in printed
    assert "refused: " in printed
    assert "run: kgen tune --op rmsnorm --pass forward --gpu host --problem M=3,N=72" in printed
    assert "calls 3 rmsnorm True" in printed


def test_a_row_that_does_not_fit_the_device_leaves_its_problem_to_a_family(
    library: Path, cache: Path
) -> None:
    script = """
from kgen_ops._runtime import cuda, pass_tables

def fails(*_):
    raise cuda.CudaError("cuLaunchKernel failed", CODE)
pass_tables.PassTables.file = fails
try:
    rmsnorm(8, 64)
    print(kgen_ops.explain("rmsnorm", M=8, N=64, dtype="fp32").step)
except RuntimeError as error:
    print(error)
"""
    out_of_resources, no_room_for_the_grid, illegal_address = "701", "720", "700"
    assert run(library, cache, script.replace("CODE", out_of_resources)) == "family\n"
    assert run(library, cache, script.replace("CODE", no_room_for_the_grid)) == "family\n"
    assert run(library, cache, script.replace("CODE", illegal_address)) == "cuLaunchKernel failed\n"


def test_silence(library: Path, cache: Path) -> None:
    run(library, cache, """
from kgen_ops._runtime import families

families.source = lambda *_: ("broken", b"this is not C++;")
rmsnorm(3, 72)  # a warning would be an error
assert len(kgen_ops.misses()) == 1
""", KGEN_WARN="0")


def test_without_jinja_the_next_step_serves(library: Path, cache: Path) -> None:
    printed = run(library, cache, """
import sys

sys.modules["jinja2"] = None
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    rmsnorm(3, 88)
print(seen[0].message)
""")
    assert "no family can be rendered" in printed
    assert "pip install jinja2" in printed


def test_a_compiled_family_comes_from_the_cache(library: Path, cache: Path) -> None:
    script = """
from kgen_ops._runtime import device

ran = []
real = device._run
device._run = lambda *given: ran.append(given[0]) or real(*given)
rmsnorm(4, 104)
print(sum("-shared" in command for command in ran))
"""
    run(library, cache, "rmsnorm(4, 120)")  # its check compiles the safe kernel of all extents
    assert [run(library, cache, script) for _ in range(2)] == ["1\n", "0\n"]


def test_families_of_other_headers_are_not_used(tmp_path: Path, cache: Path) -> None:
    """A later tune of another operator may bring newer headers, which old families do not know."""
    folder = host_library(tmp_path / "library", include_dir())
    headers = tmp_path / "include"
    for path in include_dir().rglob("*"):
        if path.is_file():
            new = headers / path.relative_to(include_dir())
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(path.read_bytes())
    math = headers / "kgen" / "primitives" / "math.cuh"
    math.write_text(math.read_text() + "\n// newer\n")
    host_library(folder, headers, operators=["rmsnorm"])
    printed = run(folder, cache, """
print(sorted(kgen_ops.rmsnorm.__globals__["FORWARD"].tables.families()),
      kgen_ops.wkv6.__globals__["FORWARD"].tables.families())
""")
    assert printed.endswith("] {}\n")
    assert not printed.startswith("[]")
