"""The first call of a kernel, also by several ranks at once.

It loads a shipped cubin; without one NVRTC compiles the kernel once, into the user's cache. Tests
of GPUs use a fake driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from kgen.emit import Emitted, Winner
from kgen.runtime import cuda, device, nvrtc
from kgen.runtime.integrity import cubin_sm

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="no NVRTC")
PROBLEM = "M=8,N=16,dtype=fp32"


@pytest.fixture
def library(tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner) -> Path:
    """A library with a cubin for Hopper; returns its package."""
    emit_into(tmp_path / "lib", [make_winner(PROBLEM, gpu="h200", compiled=True)])
    return tmp_path / "lib" / "kgen_ops"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Architectures that were compiled for, in an empty cache."""
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    seen: list[str] = []
    if nvrtc.find() is None:
        return seen
    real = nvrtc.nvrtc()

    def compile_cubin(
        source: str, name: str, arch: str, include_dirs: Sequence[str]
    ) -> tuple[bytes, str]:
        seen.append(arch)
        return real.compile_cubin(source, name, arch, include_dirs=include_dirs)

    fake = SimpleNamespace(version=real.version, compile_cubin=compile_cubin)
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: fake)
    return seen


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    facts = SimpleNamespace(compute_capability=(major, minor))
    monkeypatch.setattr(
        cuda, "driver", lambda: SimpleNamespace(device=lambda ordinal: facts)
    )


def source_of(library: Path, make_winner: MakeWinner) -> Path:
    digest = make_winner(PROBLEM, gpu="h200").rendered.digest
    return library / "rmsnorm" / "kernels" / f"{digest}.cu"


@needs_nvrtc
def test_a_shipped_cubin_is_not_compiled(
    library: Path, make_winner: MakeWinner, compilations: list[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    on_gpu(monkeypatch, 9, 0)
    source = source_of(library, make_winner)
    shipped = source.with_suffix(".sm_90a.cubin").read_bytes()
    assert device._cubin(library, source, 0) == shipped
    assert compilations == []
    assert not (tmp_path / "cache").exists()


@needs_nvrtc
@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((10, 0), "sm_100a")]
)
def test_another_architecture_is_compiled_once(
    library: Path, make_winner: MakeWinner, compilations: list[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], arch: str,
) -> None:
    on_gpu(monkeypatch, *capability)
    source = source_of(library, make_winner)
    image = device._cubin(library, source, 0)
    assert cubin_sm(image) == 10 * capability[0] + capability[1]
    assert device._cubin(library, source, 0) == image
    assert compilations == [arch]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    # What another header or another compiler would make is another entry.
    monkeypatch.setattr(device, "headers_digest", lambda root: "changed")
    assert device._cubin(library, source, 0) == image
    assert compilations == [arch, arch]


RANK = """
import sys
import torch
import kgen_ops
print("ready", flush=True)
sys.stdin.readline()
x, w = torch.randn(8, 16), torch.randn(16)
want = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
torch.testing.assert_close(kgen_ops.rmsnorm(x, w), want, rtol=1e-5, atol=1e-6)
"""


def test_ranks_that_all_compile_first(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    """All meet an empty cache at once; each gets a whole kernel, and one entry is left."""
    emit_into(tmp_path / "lib", [make_winner(PROBLEM)])
    cache = tmp_path / "cache"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "KGEN_CACHE_DIR": str(cache)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env=env, text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    errors = [rank.communicate("go\n", timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
    kernels = list(cache.rglob("*.so"))
    assert len(kernels) == 1
    assert list((cache / "tmp").iterdir()) == []
