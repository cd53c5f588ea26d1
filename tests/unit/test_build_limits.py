"""Compilers that never end, use all memory, crash, print too much or lose their parent."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from processes import command_line, cpu_seconds, descendants_of, is_gone, is_running

from kgen.assets import include_dir
from kgen.build import CompileLimits, NvrtcCompiler, open_compiler
from kgen.build.base import CachingCompiler, Outcome
from kgen.build.children import Children, Job
from kgen.build.limits import GIB, cut, default_memory_bytes, ended_by
from kgen.build.ninja import Command, Ninja
from kgen.cli.arguments import memory_size
from kgen.errors import ToolchainError
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.runtime import nvrtc
from kgen.runtime.cache import Cache

ENDLESS = """\
#include <kgen/primitives/core.cuh>
template <int A, int B> struct F {
    static constexpr unsigned long long v = F<A - 1, B>::v + F<A - 1, B + (1 << A)>::v;
};
template <int B> struct F<0, B> { static constexpr unsigned long long v = B; };
extern "C" __global__ void endless(unsigned long long* x) { x[0] = F<28, 0>::v; }
KGEN_EXPORT(endless);
"""
_DEPTH = 2_000_000
# The compilers keep a level of parentheses for each.
HUNGRY = ('#include <kgen/primitives/core.cuh>\nextern "C" __global__ void hungry(int* x) { x[0] = '
          f'{"(" * _DEPTH}1{")" * _DEPTH}; }}\nKGEN_EXPORT(hungry);\n')
# g++ is slow over those, but makes a list of any length at once.
HUNGRY_GCC = """\
#include <kgen/primitives/core.cuh>
template <int...> struct List {};
template <int N> using Numbers = List<__integer_pack(N)...>;
extern "C" __global__ void hungry(int* x) { x[0] = sizeof(Numbers<200'000'000>); }
KGEN_EXPORT(hungry);
"""
# Every message quotes the line, which is all of the kernel.
CHATTY = ('#include <kgen/primitives/core.cuh>\nextern "C" __global__ void chatty(int* x) { '
          + "".join(f"undeclared_{i} = 1; " for i in range(400))
          + "}\nKGEN_EXPORT(chatty);\n")

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
COMPILERS = [pytest.param("nvrtc", marks=needs_nvrtc), pytest.param("nvcc", marks=needs_nvcc),
             pytest.param("host", marks=needs_cxx)]
Open = Callable[..., CachingCompiler]


def request_for(source: str, compiler: CachingCompiler) -> BuildRequest:
    arch = "host" if compiler.name.startswith("host") else "sm_90a"
    return BuildRequest(Rendered("test/limits", source, digest_of_text(source)), arch)


def healthy(compiler: CachingCompiler, number: int) -> BuildRequest:
    """A source that compiles, different for each number."""
    return request_for('#include <kgen/primitives/core.cuh>\n'
                       'extern "C" __global__ void scale(float* x) '
                       f"{{ x[threadIdx.x] *= {number}.5f; }}\nKGEN_EXPORT(scale);\n", compiler)


def failure_of(compiler: CachingCompiler, source: str) -> str:
    [outcome] = compiler.build([request_for(source, compiler)])
    assert isinstance(outcome, BuildFailure), outcome
    assert outcome.seconds > 0
    return outcome.message


def assert_works(compiler: CachingCompiler, count: int = 3) -> None:
    outcomes: list[Outcome] = compiler.build([healthy(compiler, i) for i in range(count)])
    for outcome in outcomes:
        assert isinstance(outcome, Artifact), outcome


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def working(compiler: str, parent: int) -> list[int]:
    """The processes below a parent in which a compiler has worked for longer than it starts."""
    names = {"nvrtc": ["nvrtc_child"], "nvcc": ["cicc", "cudafe"], "host": ["cc1plus"]}[compiler]
    return [pid for pid in descendants_of(parent)
            if cpu_seconds(pid) > 0.4 and any(name in command_line(pid) for name in names)]


@pytest.fixture(scope="module")
def host_runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the host layer's runtime in it, which takes seconds to compile."""
    cache = Cache(tmp_path_factory.mktemp("runtime"))
    if shutil.which("g++"):
        compiler = open_compiler("host", [include_dir()], cache)
        assert isinstance(compiler, CachingCompiler)
        compiler.build([healthy(compiler, 99)])
    return cache.directory


@pytest.fixture
def opened(tmp_path: Path, host_runtime: Path) -> Iterator[Open]:
    """Opens compilers; when the test is over they are closed, and have left nothing behind."""
    shutil.copytree(host_runtime, tmp_path / "cache")
    all_of_them: list[CachingCompiler] = []

    def opener(
        name: str, timeout_s: float = 60.0, memory_bytes: int = 4 * GIB, jobs: int = 2
    ) -> CachingCompiler:
        compiler = open_compiler(name, [include_dir()], Cache(tmp_path / "cache"), jobs,
                                 CompileLimits(timeout_s, memory_bytes))
        assert isinstance(compiler, CachingCompiler)
        all_of_them.append(compiler)
        return compiler

    before = descendants_of(os.getpid())
    files = len(list(Path("/proc/self/fd").iterdir()))
    yield opener
    for compiler in all_of_them:
        compiler.close()
    assert descendants_of(os.getpid()) <= before
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


@pytest.mark.parametrize("name", COMPILERS)
def test_an_endless_compilation_is_ended(name: str, opened: Open) -> None:
    compiler = opened(name, timeout_s=0.7 if name == "nvrtc" else 0.3)
    message = failure_of(compiler, ENDLESS)
    assert f"ended after {0.7 if name == 'nvrtc' else 0.3} s (limit on compile time" in message
    assert_works(opened(name))


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compilation_that_takes_all_memory_is_ended(name: str, opened: Open) -> None:
    compiler = opened(name, memory_bytes=500 << 20)
    message = failure_of(compiler, HUNGRY_GCC if name == "host" else HUNGRY)
    if name == "nvcc" and "SIGSEGV" in message:  # of its programs, only the end is known
        assert "the compiler was ended by SIGSEGV" in message
    else:
        assert "needs more than 0.488 GiB of memory (limit on compile memory" in message
    assert_works(compiler)


@needs_nvrtc
def test_nvrtc_that_says_itself_that_memory_ran_out(opened: Open) -> None:
    compiler = opened("nvrtc", memory_bytes=100 << 20)
    message = failure_of(compiler, ENDLESS)
    assert "needs more than 0.0977 GiB of memory" in message
    assert "catastrophic error: out of memory" in message
    assert_works(compiler, 5)


@needs_nvrtc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_compiler_that_crashes_is_replaced(number: signal.Signals, opened: Open) -> None:
    compiler = opened("nvrtc")
    assert isinstance(compiler, NvrtcCompiler)
    future = compiler.submit(request_for(ENDLESS, compiler))
    wait_until(lambda: bool(working("nvrtc", os.getpid())))
    [pid] = compiler.children.pids()
    os.kill(pid, number)
    outcome = future.result(20)
    assert isinstance(outcome, BuildFailure)
    assert f"nvrtc: the compiler was ended by {number.name}" in outcome.message
    assert pid not in compiler.children.pids()
    assert_works(compiler, 5)


@needs_nvrtc
def test_healthy_compilations_share_processes(opened: Open) -> None:
    compiler = opened("nvrtc")
    assert isinstance(compiler, NvrtcCompiler)
    assert compiler.children.pids() == []
    assert_works(compiler, 1)
    [first] = compiler.children.pids()
    assert isinstance(compiler.submit(healthy(compiler, 7)).result(20), Artifact)
    assert compiler.children.pids() == [first]
    assert os.getsid(first) != os.getsid(0), "Ctrl-C would read as a failed build"
    [broken] = compiler.build([request_for("broken", compiler)])
    assert isinstance(broken, BuildFailure)
    assert compiler.children.pids() == [first]


@needs_nvrtc
def test_a_process_that_has_grown_is_replaced(opened: Open) -> None:
    compiler = opened("nvrtc", memory_bytes=90 << 20)  # half of it is less than NVRTC itself takes
    assert isinstance(compiler, NvrtcCompiler)
    assert_works(compiler, 2)
    assert compiler.children.pids() == []


@needs_nvrtc
def test_an_idle_process_that_died_is_no_failed_build(opened: Open) -> None:
    compiler = opened("nvrtc")
    assert isinstance(compiler, NvrtcCompiler)
    assert_works(compiler, 1)
    for number in (5, 6, 7):
        [pid] = compiler.children.pids()
        os.kill(pid, signal.SIGKILL)
        if number == 5:  # else it may still hold its pipes, and look as if it waited
            wait_until(partial(is_gone, pid))
        assert isinstance(compiler.build([healthy(compiler, number)])[0], Artifact)
        assert pid not in compiler.children.pids()


@pytest.mark.parametrize("name", COMPILERS)
def test_a_flood_of_messages_is_cut(name: str, opened: Open) -> None:
    message = failure_of(opened(name), CHATTY)
    assert len(message) < 20_000
    assert "undeclared_0" in message
    assert "characters left out ...]" in message


@needs_nvrtc
def test_many_threads(opened: Open) -> None:
    compiler = opened("nvrtc", memory_bytes=200 << 20, jobs=8)
    wanted = [request_for(f"// {i}\n{ENDLESS}", compiler) if i in (3, 11)
              else healthy(compiler, i) for i in range(16)]
    with ThreadPoolExecutor(8) as threads:
        futures = list(threads.map(compiler.submit, wanted))
    outcomes = [future.result(60) for future in futures]
    assert [i for i, o in enumerate(outcomes) if isinstance(o, BuildFailure)] == [3, 11]


@pytest.mark.parametrize("name", COMPILERS)
def test_close_ends_what_runs(name: str, opened: Open) -> None:
    compiler = opened(name, timeout_s=3600)
    before = descendants_of(os.getpid())
    endless = compiler.submit(request_for(ENDLESS, compiler))
    wait_until(lambda: bool(working(name, os.getpid())))
    started = descendants_of(os.getpid()) - before
    compiler.close()
    wait_until(lambda: not any(is_running(pid) for pid in started))
    with pytest.raises(ToolchainError, match="was closed before or while it compiled"):
        endless.result(0)
    with pytest.raises(ToolchainError, match="was closed before or while it compiled"):
        compiler.build([healthy(compiler, 1)])


@needs_nvrtc
def test_an_interrupted_build_leaves_no_process(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = opened("nvrtc")
    assert isinstance(compiler, NvrtcCompiler)
    assert_works(compiler, 1)

    def interrupted(body: bytes) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("kgen.build.nvrtc_child.unpack_message", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiler.build([healthy(compiler, 1)])
    assert compiler.children.pids() == []


@needs_nvrtc
def test_a_compiler_that_nobody_closed_leaves_no_process(tmp_path: Path) -> None:
    compiler = NvrtcCompiler([include_dir()], Cache(tmp_path))
    assert_works(compiler, 1)
    [pid] = compiler.children.pids()
    del compiler
    gc.collect()
    assert not is_running(pid)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_killed_parent_takes_its_compilers_along(
    name: str, tmp_path: Path, host_runtime: Path
) -> None:
    if name != "nvrtc" and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not on PATH")
    shutil.copytree(host_runtime, tmp_path / "cache")
    (tmp_path / "endless.cu").write_text(ENDLESS)
    program = (
        "import sys; from pathlib import Path; from kgen.build import open_compiler;"
        "from kgen.assets import include_dir; from kgen.runtime.cache import Cache;"
        "from kgen.model.artifact import BuildRequest, Rendered\n"
        "name, arch, folder = sys.argv[1:]\n"
        "source = Path(folder, 'endless.cu').read_text()\n"
        "compiler = open_compiler(name, [include_dir()], Cache(Path(folder, 'cache')))\n"
        # More than one, so that it is not the main thread that starts the compiler.
        "compiler.build([BuildRequest(Rendered('a', source + f'// {i}', str(i)), arch)"
        " for i in range(2)], jobs=2)\n")
    arch = "host" if name == "host" else "sm_90a"
    with subprocess.Popen([sys.executable, "-c", program, name, arch, str(tmp_path)],
                          env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
        wait_until(lambda: len(working(name, parent.pid)) >= 2)
        started = descendants_of(parent.pid)
        parent.kill()
    wait_until(lambda: not any(is_running(pid) for pid in started))


def test_a_library_that_does_not_load_is_the_toolchains_fault(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so").write_text("no library")
    children = Children(str(tmp_path / "libnvrtc.so"), CompileLimits(), 1)
    with pytest.raises(ToolchainError, match=r"libnvrtc.so does not load"):
        children.compile(Job("a.cu", "", "sm_90a", ()))
    assert children.pids() == []


def test_a_process_that_does_not_start_is_the_toolchains_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kgen.build.nvrtc_child.__file__", str(tmp_path / "gone.py"))
    children = Children("libnvrtc.so", CompileLimits(), 1)
    with pytest.raises(ToolchainError, match=r"(?s)does not start: .* exit status 1\n.*gone.py"):
        children.compile(Job("a.cu", "", "sm_90a", ()))


@needs_nvrtc
def test_limits_do_not_change_keys(opened: Open) -> None:
    small, large = opened("nvrtc", 1.0, 1 << 30), opened("nvrtc", 2.0, 2 << 30)
    assert small.key(healthy(small, 1)) == large.key(healthy(large, 1))
    assert small.identity("sm_90a") == (
        f"nvrtc {small.version} --std=c++17 --ptxas-options=-v sm_90a")


def test_commands_that_signals_end(tmp_path: Path) -> None:
    shell = shutil.which("sh") or "/bin/sh"
    commands = [
        Command((shell, "-c", "kill -SEGV $$"), "a.out"),
        Command((shell, "-c", "echo \"nvcc error   : 'cicc' died due to signal 9\"; exit 9"),
                "b.out"),
        Command((shell, "-c", "echo 'g++: fatal error: Killed signal terminated program cc1plus'; "
                              "exit 1"), "c.out"),
        Command((shell, "-c", "ulimit -v > d.out; ulimit -c >> d.out"), "d.out"),
    ]
    done = Ninja(CompileLimits(30.0, 300 << 20)).run(commands, tmp_path, jobs=4)
    assert [d.error for d in done] == [
        "the compiler was ended by SIGSEGV", ended_by(9), ended_by(9), ""]
    assert (tmp_path / "d.out").read_text().split() == [str(300 << 10), "0"]


@pytest.mark.parametrize("how", ["time", "close"])
def test_commands_whose_children_ignore_signals(how: str, tmp_path: Path) -> None:
    """cicc catches SIGTERM, and nvcc does not wait for it."""
    shell = shutil.which("sh") or "/bin/sh"
    deaf = "trap '' INT TERM; echo $$ > deaf; while :; do sleep 0.1; done"
    command = Command((shell, "-c", f"{shell} -c {shlex.quote(deaf)}; exit 1"), "a.out")
    ninja = Ninja(CompileLimits(1.0 if how == "time" else 600.0))
    file = tmp_path / "deaf"

    def close_when_started() -> None:
        wait_until(lambda: file.exists() and file.read_text().strip() != "")
        ninja.close()

    if how == "time":
        [done] = ninja.run([command], tmp_path, jobs=1)
        assert "ended after 1 s" in done.error
    else:
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(close_when_started)
            with pytest.raises(ToolchainError, match="closed"):
                ninja.run([command], tmp_path, jobs=1)
            closing.result()
    wait_until(lambda: is_gone(int(file.read_text())))


def test_limits() -> None:
    assert 4 * GIB <= default_memory_bytes() <= 16 * GIB
    assert CompileLimits().memory_bytes == default_memory_bytes()
    assert CompileLimits().timeout_s == 120.0
    assert "ended after 90 s" in CompileLimits(90.0).too_slow
    assert "more than 1.5 GiB" in CompileLimits(1.0, 3 << 29).too_big
    with pytest.raises(ToolchainError, match=r"timeout_s = 0\n  allowed: above 0"):
        CompileLimits(0)
    with pytest.raises(ToolchainError, match="memory_bytes = -1"):
        CompileLimits(1.0, -1)


def test_cutting() -> None:
    assert cut("short") == "short"
    text = cut("a" * 15_000 + "b" * 15_000)
    assert text.startswith("aaa")
    assert "[... 15000 of 30000 characters left out ...]" in text
    assert text.endswith("bbb")


@pytest.mark.parametrize(("text", "size"), [
    ("8G", 8 << 30), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2 GiB", 2 << 30),
    ("300MB", 300 << 20),
])
def test_sizes_of_memory(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize(("text", "part"), [
    ("8", "is not a memory size; examples: 8G"), ("lots", "is not a"), ("-1G", "is not a memory"),
    ("100M", "is below 256M; examples"), ("0G", "is below 256M"),
])
def test_sizes_that_are_refused(text: str, part: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=part):
        memory_size(text)
