"""Bulk copies and mbarriers: right on the host, every planted fault found, sm_90 and later only."""

from __future__ import annotations

import re
from ctypes import c_int, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from host_builds import KERNELS, host_builds, needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.launch.host_jobs import BufferRef, JobLaunch, run_job, write_job
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault, HostModule

COLUMNS = 256
SMEM_BYTES = 3 * COLUMNS * 4
RUN_TIMEOUT_S = 60.0

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("bulk_copy")


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return host_builds().executable("bulk_copy")


def aligned(*shape: int) -> Floats:
    """NaNs at a multiple of 64 bytes: NumPy promises 16 only by accident."""
    count = int(np.prod(shape))
    memory = np.full(count + 16, np.nan, dtype=np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + count].reshape(shape)


def rows_of(count: int) -> Floats:
    values = aligned(count, COLUMNS)
    values[:] = np.random.default_rng(3).standard_normal(values.shape)
    return values


def run(module: HostModule, name: str, rows: int, seed: int = 0) -> tuple[Floats, Floats]:
    values, out = rows_of(rows), aligned(rows, COLUMNS)
    args = [c_void_p(values.ctypes.data), c_void_p(out.ctypes.data), c_int(rows)]
    module.function(name).launch((2,), (64,), SMEM_BYTES, args, seed=seed, threads=1)
    return values, out


@needs_cxx
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 11])
def test_rings_of_bulk_copies(module: HostModule, rows: int, seed: int) -> None:
    values, out = run(module, "double_rows_none", rows, seed)
    np.testing.assert_array_equal(out, 2 * values)
    values, out = run(module, "copy_rows", rows, seed)
    np.testing.assert_array_equal(out, values)


@needs_cxx
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_wait", "nobody has waited for"),
        ("too_many_bytes", "wait for phase 0 of mbarrier 0: 1 of 1 arrivals, 1024 of 1040 bytes"),
        ("too_few_bytes", "phase 0 expects 1008 bytes, its copies bring 1024"),
        ("no_arrival", "0 of 1 arrivals, 1024 of 0 bytes"),
        ("no_init", "was not made by mbarrier_init"),
        ("no_init_fence", "bulk_load to mbarrier 0 without an mbarrier_init_fence"),
        ("no_fence", "written after the last fence_proxy_async"),
        ("overwrite", "overwritten before a bulk_store of 1024 bytes had read it"),
        ("scribble", "overwritten before a bulk_store of 1024 bytes had read it"),
        ("no_wait_at_end", "returned before 1 of its bulk stores had read shared memory"),
        ("abandoned_load", "returned with bulk loads under way"),
    ],
)
def test_planted_faults_are_reported(module: HostModule, fault: str, words: str) -> None:
    with pytest.raises(HostFault, match=re.escape(words)):
        run(module, f"double_rows_{fault}", 11)


@needs_cxx
def test_reading_before_the_phase_has_ended_gives_nan(module: HostModule) -> None:
    # With at most one round of the ring no phase is armed again, which would be reported.
    with pytest.raises(HostFault, match="bulk loads under way"):
        run(module, "double_rows_no_wait", 3)
    values, out = rows_of(3), aligned(3, COLUMNS)
    args = [c_void_p(values.ctypes.data), c_void_p(out.ctypes.data), c_int(3)]
    with pytest.raises(HostFault):
        module.function("double_rows_wrong_parity").launch((1,), (64,), SMEM_BYTES, args)
    assert np.isnan(out).all()


@needs_cxx
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_store_ahead_of_the_writers_is_found(module: HostModule, seed: int) -> None:
    try:
        values, out = run(module, "double_rows_early_store", 11, seed)
    except HostFault:
        return
    assert not (out == 2 * values).all()


@needs_cxx
def test_a_module_works_after_a_fault(module: HostModule) -> None:
    for fault in ("too_many_bytes", "scribble", "abandoned_load"):
        with pytest.raises(HostFault):
            run(module, f"double_rows_{fault}", 5)
        values, out = run(module, "double_rows_none", 5, seed=4)
        np.testing.assert_array_equal(out, 2 * values)


@needs_cxx
@pytest.mark.parametrize(
    ("shift", "size", "words"),
    [
        (1, 64, "misaligned bulk_load"),
        (0, 24, "bulk_load of 24 bytes: want a multiple of 16"),
        (0, 0, "bulk_load of 0 bytes"),
        (0, 1 << 20, "expects 1048576 bytes, the most are 2^20 - 1"),
    ],
)
def test_sizes_and_alignment(module: HostModule, shift: int, size: int, words: str) -> None:
    values, out = rows_of(1), aligned(1)
    args = [c_void_p(values.ctypes.data), c_void_p(out.ctypes.data), c_int(shift), c_int(size)]
    with pytest.raises(HostFault, match=re.escape(words)):
        module.function("load_some").launch((1,), (1,), SMEM_BYTES, args)


@needs_cxx
def test_under_address_sanitizer(sanitized: Path, tmp_path: Path) -> None:
    values = rows_of(7)
    args = [BufferRef(0), BufferRef(1), c_int(7)]
    launch = JobLaunch("double_rows_none", (2,), (64,), SMEM_BYTES, args, seed=3)
    job = write_job(tmp_path / "right", [values.tobytes(), values.nbytes], [launch])
    _, out = run_job(sanitized, job, RUN_TIMEOUT_S)
    assert out == (2 * values).tobytes()


@needs_cxx
@pytest.mark.parametrize(
    ("sizes", "smem_bytes", "access"),
    [((48, 64), 64, "READ"), ((64, 64), 48, "WRITE")],
    ids=["past the source", "past shared memory"],
)
def test_overruns_are_found(
    sanitized: Path, tmp_path: Path, sizes: tuple[int, int], smem_bytes: int, access: str
) -> None:
    args = [BufferRef(0), BufferRef(1), c_int(0), c_int(64)]
    launch = JobLaunch("load_some", (1,), (1,), smem_bytes, args)
    job = write_job(tmp_path / "overrun", list(sizes), [launch])
    with pytest.raises(HostFault) as caught:
        run_job(sanitized, job, RUN_TIMEOUT_S)
    text = str(caught.value)
    assert all(word in text for word in ("heap-buffer-overflow", access, "bulk_load")), text


def compile_for(arch: str, source: str) -> Artifact | BuildFailure:
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("bulk_copy", source, digest_of(source))
    (built,) = compiler.build([BuildRequest(rendered, arch)])
    compiler.close()
    return built


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "sm_100a", "sm_120"])
def test_cross_compilation(arch: str) -> None:
    built = compile_for(arch, (KERNELS / "bulk_copy.cu").read_text(encoding="utf-8"))
    assert isinstance(built, Artifact), built
    assert all(used.spill_bytes == 0 for _, used in built.resources)


def test_older_architectures_are_refused_in_words() -> None:
    kernel = (
        "#include <kgen/primitives/bulk_copy.cuh>\n"
        'extern "C" __global__ void wait_for_stores() { kgen::bulk_wait<0>(); }\n'
    )
    assert isinstance(compile_for("sm_90", kernel), Artifact)
    assert "need sm_90" in str(compile_for("sm_80", kernel))
