"""The compilers: their results, their messages about failed builds, and their cache."""

from __future__ import annotations

import ctypes
import shutil
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kgen.build import CompileLimits, Compiler, open_compiler
from kgen.build.base import CachingCompiler, Compiled, Failed, Unit
from kgen.build.ninja import Command, Ninja
from kgen.errors import StorageError, ToolchainError
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.record import Resources
from kgen.runtime import nvrtc
from kgen.runtime.cache import Cache, read_file

INCLUDE = Path(__file__).parents[2] / "templates" / "include"

# Static shared memory, a parameter of each kind, and only what the host layer has as well.
SCALE = """\
#include <kgen/primitives/core.cuh>
#include <kgen/primitives/block.cuh>

extern "C" __global__ void __launch_bounds__(256) scale(const float* x, float* y, long long n,
                                                        float a) {
    __shared__ float tile[256];
    const long long i = 256ll * blockIdx.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    kgen::sync_block();
    if (i < n) y[i] = a * tile[threadIdx.x];
}
KGEN_EXPORT(scale);
"""
BROKEN = 'extern "C" __global__ void broken(float* x) { x[0] = undeclared; }\n'

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
CUDA_COMPILERS = [pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc)]
ALL_COMPILERS = [*CUDA_COMPILERS, pytest.param("host", marks=needs_cxx)]


def request_for(source: str, arch: str, name: str = "test/scale") -> BuildRequest:
    return BuildRequest(Rendered(name, source, digest_of_text(source)), arch)


def arch_of(compiler: str) -> str:
    return "host" if compiler.startswith("host") else "sm_90a"


@pytest.fixture(scope="module")
def host_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the host layer's runtime in it, which takes seconds to compile."""
    cache = Cache(tmp_path_factory.mktemp("runtime"))
    if shutil.which("g++"):
        opened("host", cache).build([request_for(SCALE, "host")])
        for kernel in cache.directory.rglob("*.so"):
            kernel.unlink()
    return cache.directory


@pytest.fixture
def cache(tmp_path: Path, host_runtime: Path) -> Cache:
    shutil.copytree(host_runtime, tmp_path / "cache")
    return Cache(tmp_path / "cache")


def opened(name: str, cache: Cache, timeout_s: float = 60.0) -> Compiler:
    return open_compiler(name, [INCLUDE], cache, jobs=2, limits=CompileLimits(timeout_s))


def built(outcome: Artifact | BuildFailure) -> Artifact:
    assert isinstance(outcome, Artifact), outcome
    return outcome


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", CUDA_COMPILERS)
def test_cubins(name: str, arch: str, cache: Cache) -> None:
    artifact = built(opened(name, cache).build([request_for(SCALE, arch)])[0])
    cubin = read_file(artifact.path)
    assert artifact.kind == "cubin"
    assert cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin, 18)[0] == 190  # e_machine: EM_CUDA
    assert artifact.seconds > 0
    [(kernel, resources)] = artifact.resources
    assert kernel == "scale"
    assert 4 <= resources.registers <= 32
    # sm_90 and later reserve 1 KB of shared memory; ptxas does not count it for all of them.
    assert resources.smem_bytes in (1024, 2048)
    assert (resources.spill_bytes, resources.stack_bytes) == (0, 0)


@pytest.mark.parametrize("name", ALL_COMPILERS)
def test_a_second_build_comes_from_the_cache(name: str, cache: Cache) -> None:
    request = request_for(SCALE, arch_of(name))
    first = built(opened(name, cache).build([request])[0])
    again = built(opened(name, Cache(cache.directory)).build([request])[0])
    assert again.seconds == 0.0
    assert (again.path, again.key, again.resources) == (first.path, first.key, first.resources)
    path = Path(first.path)
    path.write_bytes(path.read_bytes()[:-1])
    assert built(opened(name, cache).build([request])[0]).seconds > 0


@pytest.mark.parametrize("name", ALL_COMPILERS)
def test_failures_keep_their_place_and_their_source(name: str, cache: Cache) -> None:
    arch = arch_of(name)
    compiler = opened(name, cache)
    good, bad = request_for(SCALE, arch), request_for(BROKEN, arch, "test/broken")
    outcomes = compiler.build([bad, good, bad])
    assert isinstance(outcomes[1], Artifact)
    failure = outcomes[0]
    assert isinstance(failure, BuildFailure)
    assert outcomes[2] == failure
    assert "undeclared" in failure.message
    assert failure.key == compiler.key(bad)
    assert failure.seconds > 0
    kept = Path(failure.source_path)
    assert kept == cache.directory / "failed" / f"{failure.key}.cu"
    assert kept.read_text() == BROKEN


@pytest.mark.parametrize("name", CUDA_COMPILERS)
def test_too_much_shared_memory_is_a_failure(name: str, cache: Cache) -> None:
    source = ('extern "C" __global__ void big(float* x) { __shared__ float s[100000]; '
              "s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[0]; }")
    [failure] = opened(name, cache).build([request_for(source, "sm_90a")])
    assert isinstance(failure, BuildFailure)
    assert "shared data" in failure.message or "static shared memory" in failure.message


@pytest.mark.parametrize("name", CUDA_COMPILERS)
def test_an_unknown_architecture_is_the_toolchains_fault(name: str, cache: Cache) -> None:
    with pytest.raises(ToolchainError, match="next: install"):
        opened(name, cache).build([request_for(SCALE, "sm_35")])


@needs_cxx
def test_the_host_compiler_builds_for_the_host_only(cache: Cache) -> None:
    with pytest.raises(ToolchainError, match="builds for 'host' only, not for 'sm_90a'"):
        opened("host", cache).build([request_for(SCALE, "sm_90a")])


@needs_cxx
def test_a_host_module_loads_from_the_cache_and_the_runtime_is_compiled_once(cache: Cache) -> None:
    compiler = opened("host", cache)
    artifact = built(compiler.build([request_for(SCALE, "host")])[0])
    assert artifact.kind == "so"
    assert artifact.resources == ()
    assert hasattr(ctypes.CDLL(artifact.path), "scale__host")
    [runtime] = cache.directory.rglob("*.o")
    stamp = runtime.stat().st_mtime_ns
    built(compiler.build([request_for(SCALE + "// other\n", "host")])[0])
    assert [p.stat().st_mtime_ns for p in cache.directory.rglob("*.o")] == [stamp]
    runtime.unlink()
    built(compiler.build([request_for(SCALE + "// third\n", "host")])[0])
    assert runtime.exists()


@needs_cxx
def test_a_sanitized_build_is_a_program(cache: Cache) -> None:
    artifact = built(opened("host-asan", cache).build([request_for(SCALE, "host")])[0])
    assert artifact.kind == "exe"
    assert Path(artifact.path).stat().st_mode & 0o100


@pytest.mark.parametrize("name", ALL_COMPILERS)
def test_keys_differ_where_results_do(name: str, cache: Cache) -> None:
    compiler = opened(name, cache)
    archs = ["host"] if name == "host" else ["sm_80", "sm_90a"]
    requests = [request_for(source, arch) for source in (SCALE, BROKEN) for arch in archs]
    keys = [compiler.key(request) for request in requests]
    assert len(set(keys)) == len(keys)
    assert keys == [opened(name, cache).key(request) for request in requests]
    assert compiler.version in compiler.identity(archs[0])


@needs_nvrtc
def test_nvrtc_and_nvcc_do_not_share_entries(cache: Cache) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    request = request_for(SCALE, "sm_90a")
    assert opened("nvrtc", cache).key(request) != opened("nvcc", cache).key(request)


@needs_nvrtc
def test_nvrtc_names_the_template_in_its_messages(cache: Cache) -> None:
    [failure] = opened("nvrtc", cache).build([request_for(BROKEN, "sm_90a", "op/variant")])
    assert isinstance(failure, BuildFailure)
    assert 'op/variant.cu(1): error: identifier "undeclared" is undefined' in failure.message


def test_unknown_compiler(cache: Cache) -> None:
    with pytest.raises(ToolchainError, match=r"unknown compiler 'nvc'\n.*did you mean 'nvcc'"):
        open_compiler("nvc", [INCLUDE], cache)


@needs_cxx
def test_missing_pieces_are_named(cache: Cache, monkeypatch: pytest.MonkeyPatch,
                                  tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=f"(?s)the host layer .*searched: {tmp_path}"):
        open_compiler("host", [tmp_path], cache)
    monkeypatch.setenv("CXX", "no-such-g++")
    with pytest.raises(ToolchainError,
                       match="CXX=no-such-g\\+\\+ names no program on PATH\n  next: unset"):
        open_compiler("host", [INCLUDE], cache)
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    monkeypatch.setattr(nvrtc, "_loaded", None)
    with pytest.raises(ToolchainError, match="next: pip install nvidia-cuda-nvrtc"):
        open_compiler("nvrtc", [INCLUDE], cache)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(ToolchainError, match="'ninja' is missing"):
        open_compiler("nvcc", [INCLUDE], cache)


@needs_nvrtc
def test_a_cache_that_cannot_be_used_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "file" / "c"))
    with pytest.raises(StorageError, match=r"cannot use .*: Not a directory\n  next: set KGEN"):
        open_compiler("nvrtc", [INCLUDE])
    cache = Cache(tmp_path / "cache")
    compiler = open_compiler("nvrtc", [INCLUDE], cache)
    cache.directory.write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*\n  next: free some space"):
        compiler.build([request_for(SCALE, "sm_90a")])


class SlowCompiler(CachingCompiler):
    """Counts what it compiles, and takes its time."""

    def __init__(self, cache: Cache, jobs: int) -> None:
        super().__init__([], cache, jobs)
        self.compiled: list[str] = []
        self.go = threading.Event()

    @property
    def name(self) -> str:
        return "slow"

    @property
    def version(self) -> str:
        return "1"

    def identity(self, arch: str) -> str:
        return "slow 1"

    def _compile(self, units: Sequence[Unit], jobs: int) -> list[Compiled | Failed]:
        self.compiled += [unit.request.rendered.source for unit in units]
        assert self.go.wait(10)
        return [Failed("bad", 0.1) if unit.request.rendered.source == "bad"
                else Compiled(b"x", (("k", Resources(1, 2, 3, 4)),), 0.1, ("C1: slow",))
                for unit in units]


def test_submit_shares_what_is_under_way(cache: Cache) -> None:
    compiler = SlowCompiler(cache, jobs=2)
    first = compiler.submit(request_for("a", "sm_90a"))
    assert compiler.submit(request_for("a", "sm_90a")) is first
    other = compiler.submit(request_for("bad", "sm_90a"))
    compiler.go.set()
    artifact = built(first.result(10))
    assert artifact.resources == (("k", Resources(1, 2, 3, 4)),)
    assert isinstance(other.result(10), BuildFailure)
    cached = compiler.submit(request_for("a", "sm_90a")).result(10)
    assert built(cached).seconds == 0.0
    assert sorted(compiler.compiled) == ["a", "bad"]
    compiler.close()


def test_the_cache_keeps_what_the_compiler_said(cache: Cache) -> None:
    compiler = SlowCompiler(cache, jobs=1)
    compiler.go.set()
    for _ in range(2):
        artifact = built(compiler.submit(request_for("a", "sm_90a")).result(10))
        assert artifact.resources == (("k", Resources(1, 2, 3, 4)),)
        assert artifact.remarks == ("C1: slow",)
    assert compiler.compiled == ["a"]
    cache.put(artifact.key, ".json", b'[["k", {"registers": 1}]]')  # from before there were remarks
    artifact = built(compiler.submit(request_for("a", "sm_90a")).result(10))
    assert artifact.remarks == ("C1: slow",)
    assert compiler.compiled == ["a", "a"]
    compiler.close()


def test_what_the_cache_has_does_not_wait_for_a_thread(cache: Cache) -> None:
    compiler = SlowCompiler(cache, jobs=1)
    compiler.go.set()
    built(compiler.submit(request_for("a", "sm_90a")).result(10))
    compiler.go.clear()
    running = compiler.submit(request_for("b", "sm_90a"))
    again = compiler.submit(request_for("a", "sm_90a"))
    assert again.done()
    assert not running.done()
    assert built(again.result()).seconds == 0.0
    compiler.go.set()
    compiler.close()


def test_build_compiles_equal_requests_once(cache: Cache) -> None:
    compiler = SlowCompiler(cache, jobs=2)
    compiler.go.set()
    sources = ["b", "a", "b", "c", "a"]
    outcomes = compiler.build([request_for(source, "sm_90a") for source in sources])
    assert compiler.compiled == ["b", "a", "c"]
    keys = [outcome.key for outcome in outcomes]
    assert keys[0] == keys[2]
    assert keys[1] == keys[4]
    assert len(set(keys)) == 3
    assert compiler.build([]) == []


def test_close_cancels_what_waits(cache: Cache) -> None:
    compiler = SlowCompiler(cache, jobs=1)
    running, waiting = (compiler.submit(request_for(s, "sm_90a")) for s in "ab")
    while not compiler.compiled:
        time.sleep(0.01)
    compiler.go.set()
    compiler.close()
    assert running.done()
    assert waiting.done()  # cancelled, or it had begun before


def test_ninja_batches(tmp_path: Path) -> None:
    folder = tmp_path / "with $pecial: name"
    folder.mkdir()
    shell = shutil.which("sh") or "/bin/sh"
    commands = [
        Command((shell, "-c", "echo hello '$HOME' > a.out; echo said"), "a.out"),
        Command((shell, "-c", "echo no >&2; exit 3"), "b.out"),
        Command((shell, "-c", "sleep 60 & wait"), "c.out"),
        Command((shell, "-c", "true"), "d.out"),
    ]
    start = time.monotonic()
    done = Ninja(CompileLimits(timeout_s=0.5)).run(commands, folder, jobs=4)
    assert time.monotonic() - start < 20
    assert [d.error for d in done] == [
        "", "exit status 3", CompileLimits(timeout_s=0.5).too_slow, "wrote no d.out"]
    assert (folder / "a.out").read_text() == "hello $HOME\n"
    assert [done[0].log, done[1].log] == ["said", "no"]
    assert done[2].seconds >= 0.4
