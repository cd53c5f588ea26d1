"""Families that update a tensor in place: a kernel is checked on copies before it may touch it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_library import host_library

from kgen.assets import include_dir

CALLS = """
import torch
import kgen_ops
from kgen_ops._runtime import families

torch.manual_seed(0)
B, S, H, K, V = 3, 4, 2, 24, 8
r, k = torch.randn(2, B, 1, H, K)
v, w, u = torch.randn(B, 1, H, V), -torch.rand(B, 1, H, K), torch.randn(H, K)
pool, slots = torch.randn(S, H, K, V), torch.tensor([2, 0, -1])
step = w[:2, 0, :, :, None].exp() * pool[[2, 0]] + k[:2, 0, :, :, None] * v[:2, 0, :, None]
before = pool.clone()
wanted = pool.index_copy(0, slots[:2], step)


def state(pool):
    if (pool - wanted).abs().max() < 1e-5:
        return "updated once"
    return "untouched" if torch.equal(pool, before) else "wrong"


def spoil():
    real = families.source
    def wrong(root, instance, dims, choices):
        stem, text = real(root, instance, dims, choices)
        changed = text.replace(b"step.k.at[i][j] * step.v[x]", b"step.k.at[i][j] * 1.5f")
        assert changed != text
        return stem, changed
    families.source = wrong


def call(pool):
    try:
        kgen_ops.wkv6_decode(r, k, v, w, u, pool, slots)
    except kgen_ops.CheckError as error:
        print("refused")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with one row of wkv6_decode for the host, and its families."""
    return host_library(tmp_path_factory.mktemp("families"), include_dir(), ["wkv6_decode"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(library: Path, cache: Path, script: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CALLS + script], capture_output=True, text=True, check=False,
        env={**os.environ, "KGEN_WARN": "0", "PYTHONPATH": str(library),
             "KGEN_CACHE_DIR": str(cache), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("mode", ["", "first", "0"])
def test_the_first_call_updates_once(library: Path, cache: Path, mode: str) -> None:
    printed = run(library, cache, """
call(pool)
print(state(pool))
transposed = before.mT.contiguous()
call(transposed.mT)
print(state(transposed.mT))
print(kgen_ops.misses())
print(kgen_ops.explain("wkv6_decode", B=B, S=S, T=1, H=H, K=K, V=V, dtype="fp32",
                       state_indices_dtype="int64").step)
""", KGEN_CHECK=mode)
    assert printed == ["updated once", "updated once", "()", "family"]


def test_a_refused_kernel_has_not_touched_the_states(library: Path, cache: Path) -> None:
    script = """
spoil()
call(pool)
print(state(pool))
"""
    assert run(library, cache, script, KGEN_CHECK="0") == ["wrong"]
    assert run(library, cache, script) == ["updated once"]  # the safe kernel serves the call
    assert run(library, cache, script, KGEN_CHECK="first") == ["refused", "untouched"]


def test_the_selftest_compares_rows_on_states_of_their_own(library: Path, cache: Path) -> None:
    """The row of a pool with indices cannot be made up; one without is compared."""
    printed = run(library, cache, """
from kgen_ops._runtime.rowtest import _difference
from kgen_ops.wkv6_decode import FORWARD

tables = FORWARD.tables
row = tables.of_device(torch.device("cpu")).rows[0]
safe = next(safe for safe in tables.safe_rows() if safe.dtypes == row.dtypes)
dtypes = dict(zip((f.name for f in FORWARD.signature.choices), row.dtypes))
tensors = [torch.empty(2, 1, 2, 16) for _ in range(4)] + [torch.empty(2, 16)]
tensors += [torch.empty(3, 2, 16, 16), torch.tensor([1, 2])]
print(_difference(FORWARD, row, safe, tensors, dtypes) < 1e-5)
def twice(row, tensors, *rest):
    real(row, tensors, *rest)
    return real(row, tensors, *rest)
real, FORWARD.run_row = FORWARD.run_row, lambda given, *rest: (
    twice if given is row else real)(given, *rest)
print(_difference(FORWARD, row, safe, tensors, dtypes) > 1e-2)
""")
    assert printed == ["True", "True"]
