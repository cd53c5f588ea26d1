"""The library and its process: modules that its import loads, forks, threads, memory of many calls.

The tests use the host's kernels; launches that are counted are stubs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from operator_cases import CASES, Case, close, weighed
from torch import Tensor

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

IMPORT = """
import sys
import torch
before = set(sys.modules)
import kgen_ops
new = set(sys.modules) - before
print(*sorted(name for name in new if name.split(".")[0] != "kgen_ops"))
print(*sorted(name for name in new if name.split(".")[0] == "kgen_ops"))
print(torch.cuda.is_initialized())
"""
# Beside the operators themselves. What compiles, loads, checks and caches comes with a first call.
AT_IMPORT = {
    "allocation", "argument_kinds", "arguments", "autocast", "batching", "capture", "dispatch",
    "errors", "explain", "extension", "fast_path", "gpus", "gradients", "integrity", "layout",
    "notices", "pass_tables", "patching", "problems", "registration", "rows", "signature",
    "streams", "warmup",
}


def run(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the library in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": str(folder), **env},
    )


def test_importing_loads_what_a_call_needs_and_no_more(library_folder: Path) -> None:
    done = run(IMPORT, library_folder)
    assert done.returncode == 0, done.stderr
    others, own, cuda = done.stdout.split("\n")[:3]
    assert others == "", "everything else is torch's own business"
    operators = {path.parent.name for path in library_folder.glob("kgen_ops/*/safe.py")}
    assert len(operators) == 10
    assert set(own.split()) == {
        "kgen_ops", "kgen_ops._runtime", *(f"kgen_ops._runtime.{name}" for name in AT_IMPORT),
        *(f"kgen_ops.{name}" for name in operators),
    }
    assert cuda == "False"


def test_what_a_shipped_cubin_needs(library_folder: Path) -> None:
    """The first call of a shipped cubin needs neither a compiler nor the host layer."""
    done = run(
        "import sys, kgen_ops, kgen_ops._runtime.device\n"
        "print(*(n.split('.')[-1] for n in sys.modules if n.startswith('kgen_ops._runtime.')))",
        library_folder,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - AT_IMPORT == {"cuda", "device", "launcher"}


def test_a_first_call_imports_nothing_that_only_builds(library_folder: Path) -> None:
    """These are Python's own, but PyTorch does not load them, so that a first call would."""
    done = run(
        "import sys, torch\nbefore = set(sys.modules)\n"
        "import kgen_ops, kgen_ops._runtime.device\n"
        "print(*(n for n in set(sys.modules) - before if not n.startswith('kgen_ops')))",
        library_folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# In the child: a call that was prepared before the fork, one that was not, and one that loads a
# kernel. os._exit: the child has no business in the parent's atexit functions.
FORK = """
import os
import torch
import kgen_ops

def check(m, n, dtype=torch.float32):
    x, w = torch.randn(m, n).to(dtype), torch.randn(n)
    y = kgen_ops.rmsnorm(x, w).double()
    want = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    torch.testing.assert_close(y, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)

def forked(body):
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException as why:
            print(repr(why), flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def again():
    check(8, 16)
    check(3, 17)
    check(8, 32, torch.bfloat16)

print(forked(lambda: check(8, 16)))  # nothing was called before
check(8, 16)
print(forked(again))
check(8, 16)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork_after_import(library_folder: Path, tmp_path: Path) -> None:
    done = run(FORK, library_folder, KGEN_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["0", "0"]


def test_threads_that_all_call_first(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is prepared: every thread meets the same missing kernels."""
    forward = sys.modules[f"{kgen_ops.__name__}.rmsnorm"].FORWARD
    device = importlib.import_module(f"{kgen_ops.__name__}._runtime.device")
    kgen_ops.rmsnorm(torch.ones(8, 16), torch.ones(16))  # in the cache, compiled
    forward.forget()
    monkeypatch.setattr(forward.tables, "files", {})
    monkeypatch.setattr(forward.tables, "_tables", {})
    loaded: list[str] = []
    whole = device.KernelFile

    def counted(root: Path, folder: Path, stem: str, where: torch.device, text: None) -> Any:
        loaded.append(stem)
        return whole(root, folder, stem, where, text)

    monkeypatch.setattr(device, "KernelFile", counted)
    start = threading.Barrier(8)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            start.wait()
            for i in range(50):
                x = torch.randn(1 + i % 8, 16, generator=generator)
                y = kgen_ops.rmsnorm(x, torch.ones(16))
                close(y, x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        except BaseException as why:
            errors.append(why)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert len(loaded) == len(set(loaded)), "a kernel was loaded twice"
    assert len(forward.prepared) == 8


def test_a_launch_goes_to_the_tensors_gpu(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearsed on the CPU with two GPUs that are not there."""
    streams = sys.modules[f"{kgen_ops.__name__}._runtime.streams"]
    current = [0]
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        entered.append(index)
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(streams, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    seen: list[tuple[int, tuple[float, ...]]] = []
    run = streams.on_device(lambda *given: seen.append((current[0], given)), 1)
    run(64, 3, 0.5)
    assert (seen, entered, current) == ([(1, (64, 3, 0.5))], [1], [0])
    current[0] = 1
    run(64, 4)
    assert (seen[1], entered) == ((1, (64, 4)), [1]), "it was current: nothing to change"


@pytest.fixture
def launches(kgen_ops: ModuleType) -> Iterator[Callable[[str], Callable[[], int]]]:
    """Stub an operator's prepared launches; returns what tells how many there were."""
    stubbed: list[Any] = []

    def stub(operator: str) -> Callable[[], int]:
        module, count = sys.modules[f"{kgen_ops.__name__}.{operator}"], 0

        def launch(*_: object) -> None:
            nonlocal count
            count += 1

        for served in (module.FORWARD, module.BACKWARD):
            stubbed.append(served)
            served.fast_paths.clear()
            for key, prepared in served.prepared.items():
                served.prepared[key] = prepared._replace(launch=launch)
        return lambda: count

    yield stub
    for served in stubbed:
        served.forget()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(call: Callable[[], object], times: int) -> tuple[int, int]:
    """By how many Python objects and bytes of memory the process grows over so many calls."""
    for _ in range(times // 10):  # free lists, the allocator's arenas
        call()
    gc.collect()
    objects, memory = sys.getallocatedblocks(), resident_bytes()
    for _ in range(times):
        call()
    gc.collect()
    return sys.getallocatedblocks() - objects, resident_bytes() - memory


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@each_case
def test_calls_leave_nothing_behind(
    kgen_ops: ModuleType, case: Case, launches: Callable[[str], Callable[[], int]]
) -> None:
    """A tensor that is left behind costs 300 bytes at least, an argument of a launch 32."""
    inputs = case.inputs()
    plain = {name: x.detach() for name, x in inputs.items()}

    def trained() -> None:
        outputs = case.call(kgen_ops, **inputs)
        torch.autograd.grad(weighed(outputs, [torch.ones(())] * 2), list(inputs.values()))

    def dispatched() -> None:
        getattr(torch.ops.kgen_ops, case.operator)(**plain, **case.keywords)

    ways: list[tuple[Callable[[], object], int, int]] = [  # calls, launches of each
        (lambda: case.call(kgen_ops, **plain), 20_000, 1), (dispatched, 10_000, 1),
        (trained, 5_000, 2),
    ]
    trained()
    case.call(kgen_ops, **plain)
    count = launches(case.operator)
    for call, times, each in ways:
        before = count()
        objects, memory = growth(call, times)
        assert count() - before == each * (times + times // 10), "other launches were prepared"
        assert objects < times // 10
        assert memory < 100 * times


def test_errors_leave_nothing_behind(kgen_ops: ModuleType) -> None:
    x, wrong = torch.ones(8, 16), torch.ones(17)

    def refused() -> Tensor | None:
        try:
            return kgen_ops.rmsnorm(x, wrong)  # type: ignore[no-any-return]
        except ValueError:
            return None

    objects, memory = growth(refused, 5_000)
    assert objects < 500
    assert memory < 500_000
