"""A closed host module gives its fiber stacks back, and works again when it is used again."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from host_builds import host_builds, needs_cxx

from kgen.launch.host import HostDevice
from kgen.model.artifact import Artifact
from kgen.runtime.host import HostFault, HostModule

THREADS = 1024  # of a block, each with a stack of its own: all of them wait at the barrier
MODULES = 40
# The segments of one shared object and what the C library keeps for it; 2048 would be its stacks.
CODE_MAPPINGS = 16
RUN_TIMEOUT_S = 60.0
SOURCE = """
#include <kgen/primitives/block.cuh>

extern "C" __global__ void reverse(float* out) {
    __shared__ float values[1024];
    values[threadIdx.x] = static_cast<float>(threadIdx.x);
    kgen::sync_block();
    out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}
KGEN_EXPORT(reverse);

extern "C" __global__ void lost(float* out) {
    if (threadIdx.x == 0) return;
    kgen::sync_block();
    out[threadIdx.x] = 1.0f;
}
KGEN_EXPORT(lost);

// Read downwards from the stack of a thread whose lower neighbour has a stack too.
extern "C" __global__ void read_below(float* out, int kib) {
    kgen::sync_block();
    char here = 0;
    const unsigned long long top = reinterpret_cast<unsigned long long>(&here);
    if (threadIdx.x == 500)
        for (int i = 0; i < kib; ++i)
            out[0] += *reinterpret_cast<volatile char*>(top - 1024ull * i);
}
KGEN_EXPORT(read_below);
"""

pytestmark = [
    needs_cxx,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("host_stacks") / "stacks.cu"
    source.write_text(SOURCE)
    return host_builds().shared_object(source)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A module that no other test has loaded: the loader knows files, not names."""
    return Path(shutil.copy(built, tmp_path / "copy.so"))


def launch(module: HostModule, kernel: str = "reverse", os_threads: int = 1) -> None:
    out = np.full(THREADS, np.nan, dtype=np.float32)
    args = [ctypes.c_void_p(out.ctypes.data)]
    module.function(kernel).launch((4,), (THREADS,), 0, args, threads=os_threads)
    assert out.tolist() == list(range(THREADS - 1, -1, -1))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def mapped_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))


def test_closed_modules_keep_only_their_code(built: Path, tmp_path: Path) -> None:
    modules = []
    counts = [mappings()]
    sizes = [mapped_kib()]
    for i in range(MODULES):
        module = HostModule(shutil.copy(built, tmp_path / f"module_{i}.so"))
        launch(module, os_threads=2)
        module.close()
        modules.append(module)
        counts.append(mappings())
        sizes.append(mapped_kib())
    grown = [after - before for before, after in pairwise(counts)]
    assert max(grown) <= CODE_MAPPINGS, grown
    stacks_kib = THREADS * 128
    assert sizes[-1] - sizes[1] < MODULES * stacks_kib // 4, sizes

    for module in modules:  # stacks are made anew
        launch(module)
        module.close()
    assert mappings() <= counts[-1] + CODE_MAPPINGS


def test_a_module_that_never_ran_closes_more_than_once(copy: Path) -> None:
    module = HostModule(copy)
    module.close()
    module.close()
    launch(module)
    module.close()
    launch(module)


def test_a_fault_leaves_no_stacks_behind(copy: Path) -> None:
    module = HostModule(copy)
    launch(module)
    module.close()
    before = mapped_kib()
    with pytest.raises(HostFault, match="divergent barrier"):
        launch(module, "lost")
    module.close()
    assert mapped_kib() - before < THREADS * 128 // 4
    launch(module)


def test_a_loaded_artifact_gives_its_stacks_back(copy: Path) -> None:
    loaded = HostDevice().load(Artifact("so", str(copy), "", (), 0.0))
    launch(HostModule(copy))
    before = mapped_kib()
    loaded.close()
    assert before - mapped_kib() > THREADS * 128 * 3 // 4
    loaded.close()


def test_a_guard_lies_between_two_stacks(copy: Path) -> None:
    code = (
        "import sys; from ctypes import *; from kgen.runtime.host import HostModule;"
        f"out = (c_float * {THREADS})();"
        "args = [c_void_p(addressof(out)), c_int(int(sys.argv[2]))];"
        f"HostModule(sys.argv[1]).function('read_below').launch((1,), ({THREADS},), 0, args)"
    )
    ends = {}
    for kib in (64, 160):  # of 128
        command = [sys.executable, "-c", code, str(copy), str(kib)]
        ends[kib] = subprocess.run(
            command, capture_output=True, check=False, timeout=RUN_TIMEOUT_S
        ).returncode
    assert ends == {64: 0, 160: -signal.SIGSEGV}
