"""The host layer runs CUDA kernels correctly, and finds what a GPU would leave undefined."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_longlong, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from host_builds import CXX, KERNELS, Builds, host_builds, needs_cxx, run_command

from kgen.launch.host_jobs import BufferRef, HostTimeout, JobLaunch, run_job, write_job
from kgen.runtime import host
from kgen.runtime.host import HostFault

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "templates" / "include"
SOURCES = sorted(path.stem for path in KERNELS.glob("*.cu"))
HEADERS = sorted(str(p.relative_to(INCLUDE / "kgen")) for p in (INCLUDE / "kgen").rglob("*.cuh"))
ARCHITECTURES = ("sm_75", "sm_80", "sm_90a", "sm_120")
# Each takes the compiler many seconds; for newer GPUs the templates that use the same headers are
# compiled by tests/conformance, and none of them is for older ones.
LONG = {"chunk": "sm_80", "chunk_decay": "sm_80"}
RUN_TIMEOUT_S = 60.0

Floats = npt.NDArray[np.float32]

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def builds() -> Builds:
    return host_builds()


def pointer(array: npt.NDArray[Any] | torch.Tensor) -> c_void_p:
    if isinstance(array, torch.Tensor):
        return c_void_p(array.data_ptr())
    return c_void_p(array.ctypes.data)


def nans(*shape: int) -> Floats:
    return np.full(shape, np.nan, dtype=np.float32)


def small_integers(*shape: int) -> Floats:
    """Floats whose sums are exact in any order."""
    rng = np.random.default_rng(7)
    return rng.integers(-50, 50, size=shape).astype(np.float32)


# --- kernels that are right -----------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 0])
@pytest.mark.parametrize("n", [1, 255, 256, 10_001])
def test_vector_add(builds: Builds, n: int, threads: int) -> None:
    a, b, c = small_integers(n), small_integers(n)[::-1].copy(), nans(n)
    kernel = builds.kernel("vector_add", "vector_add")
    args = [pointer(a), pointer(b), pointer(c), c_longlong(n)]
    kernel.launch((math.ceil(n / 256),), (256,), 0, args, threads=threads)
    np.testing.assert_array_equal(c, a + b)


def test_coordinates_in_three_dimensions(builds: Builds) -> None:
    grid, block = (3, 2, 4), (5, 3, 2)
    out = np.full((24, 2, 3, 5, 2), -1, dtype=np.int32)
    builds.kernel("vector_add", "coordinates").launch(grid, block, 0, [pointer(out)], seed=3)
    z, y, x = np.indices((2, 3, 5))
    np.testing.assert_array_equal(out[..., 0], np.broadcast_to(100 * x + 10 * y + z, (24, 2, 3, 5)))
    np.testing.assert_array_equal(out[..., 1].reshape(24, 30), np.tile(np.arange(30), (24, 1)))


def test_arguments_of_every_width(builds: Builds) -> None:
    class Pair(ctypes.Structure):
        _fields_ = [("first", ctypes.c_short), ("second", ctypes.c_double)]

    out = np.zeros(8)
    values = [
        ctypes.c_byte(-3),
        ctypes.c_short(-300),
        c_int(-70_000),
        c_longlong(-(2**40)),
        c_float(0.5),
        ctypes.c_double(1e300),
        Pair(-9, 2.25),
    ]
    builds.kernel("vector_add", "arguments").launch((1,), (1,), 0, [pointer(out), *values])
    assert out.tolist() == [-3, -300, -70_000, -(2**40), 0.5, 1e300, -9, 2.25]
    builds.kernel("vector_add", "no_arguments").launch((2,), (3,), 0, [])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("group", [2**i for i in range(11)])
def test_group_reductions(builds: Builds, group: int, seed: int) -> None:
    values, out = small_integers(3, 1024), nans(3, 1024, 4)
    kernel = builds.kernel("reductions", f"reduce_{group}")
    kernel.launch((1,), (1024,), 0, [pointer(values), pointer(out)], seed=seed)
    groups = values.reshape(3, -1, group)
    results = (groups.sum(-1), groups.sum(-1), groups.max(-1), groups.min(-1))
    for i, want in enumerate(results):
        np.testing.assert_array_equal(out[..., i], np.repeat(want, group, axis=1))


@pytest.mark.parametrize("seed", range(3))
def test_named_barriers(builds: Builds, seed: int) -> None:
    out = nans(128)
    builds.kernel("reductions", "named_barriers").launch((1,), (128,), 0, [pointer(out)], seed)
    np.testing.assert_array_equal(out.reshape(2, 64), [np.arange(64)[::-1]] * 2)


def shuffled_lane(kind: str, lane: int, amount: int, width: int) -> int:
    """The lane read from, in the words of the CUDA programming guide."""
    first = lane // width * width
    if kind == "shfl":
        return first + amount % width
    if kind == "up":
        return lane - amount if lane - amount >= first else lane
    if kind == "down":
        return lane + amount if lane + amount < first + width else lane
    return lane ^ amount if lane ^ amount < first + width else lane


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("amount", [0, 1, 3, 7, 16, 31])
def test_shuffles(builds: Builds, width: int, amount: int) -> None:
    out = np.full((2, 32, 4), -1, dtype=np.int32)
    args = [c_int(width), c_int(amount), pointer(out)]
    builds.kernel("shuffles", "shuffle_all").launch((1,), (64,), 0, args, seed=width + amount)
    for i, kind in enumerate(("shfl", "up", "down", "xor")):
        want = [shuffled_lane(kind, lane, amount, width) for lane in range(32)]
        assert out[0, :, i].tolist() == want, kind
        assert out[1, :, i].tolist() == want, kind


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_a_warp_run_on_their_own(builds: Builds, seed: int) -> None:
    out = nans(96)
    builds.kernel("shuffles", "independent_groups").launch((1,), (96,), 0, [pointer(out)], seed)
    assert out.tolist() == [8.0 ** (lane // 8 + 1) for lane in range(32)] * 3


def test_wide_and_narrow_shuffles_and_votes(builds: Builds) -> None:
    out, votes = np.zeros((32, 2)), np.zeros((32, 3), dtype=np.uint32)
    kernel = builds.kernel("shuffles", "widths_and_votes")
    kernel.launch((1,), (32,), 0, [pointer(out), pointer(votes)])
    assert out[:, 0].tolist() == [1e300 + (lane ^ 5) * 1e290 for lane in range(32)]
    assert (out[:, 1] == -7).all()
    assert (votes == [sum(1 << i for i in range(0, 32, 3)), 1, 0]).all()


@pytest.mark.parametrize("kernel", ["transpose_static", "transpose_dynamic"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (33, 50), (1, 70)])
@pytest.mark.parametrize("seed", [0, 5])
def test_transpose(builds: Builds, kernel: str, rows: int, columns: int, seed: int) -> None:
    values, out = small_integers(rows, columns), nans(columns, rows)
    grid = (math.ceil(columns / 16), math.ceil(rows / 16))
    smem_bytes = 16 * 17 * 4 if kernel == "transpose_dynamic" else 0
    args = [pointer(values), pointer(out), c_int(rows), c_int(columns)]
    builds.kernel("transpose", kernel).launch(grid, (16, 16), smem_bytes, args, seed=seed)
    np.testing.assert_array_equal(out, values.T)


def sum_rows(builds: Builds, fault: str, columns: int, seed: int) -> tuple[Floats, Floats]:
    values, out = small_integers(5, columns), nans(5)
    args = [pointer(values), pointer(out), c_int(columns)]
    kernel = builds.kernel("double_buffer", f"sum_row_{fault}")
    kernel.launch((5,), (64,), 2 * 256 * 4, args, seed=seed)
    return out, values.sum(1)


@pytest.mark.parametrize("columns", [4, 256, 1024, 1300])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_double_buffer(builds: Builds, columns: int, seed: int) -> None:
    out, want = sum_rows(builds, "none", columns, seed)
    np.testing.assert_array_equal(out, want)


def test_functions(builds: Builds) -> None:
    x = np.geomspace(1e-4, 80.0, 1000, dtype=np.float32)
    out = nans(10, 1000)
    args = [pointer(x), pointer(out), c_longlong(1000)]
    builds.kernel("numbers", "functions").launch((8,), (128,), 0, args)
    d = x.astype(np.float64)
    rounded = (x * x).astype(np.float64)
    want = (
        1 / np.sqrt(d), np.sqrt(d), np.exp(-d), np.exp2(-d), np.log(d), np.log1p(d),
        1 / (1 + np.exp(-d)), np.exp(-d), 1 / d, d * d - rounded,
    )  # fmt: skip
    ulps = (0.51, 0.51, 2, 2, 1, 1, 4, 50, 2, 0.51)
    for row, exact, bound in zip(out, want, ulps, strict=True):
        spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        assert (np.abs(row - exact) <= bound * spacing).all()


def results_of(builds: Builds, values: Sequence[float]) -> Floats:
    """Row by row what `subnormal_numbers` of numbers.cu computes of the values."""
    x = np.array(values, dtype=np.float32)
    out = nans(8, len(x))
    args = [pointer(x), pointer(out), c_longlong(len(x))]
    builds.kernel("numbers", "subnormal_numbers").launch((1,), (128,), 0, args)
    return out


TINY = 2.0**-126  # the smallest normal number


def test_subnormal_numbers_are_flushed_as_on_a_gpu(builds: Builds) -> None:
    """`ex2.approx.ftz` and `rcp.approx.ftz`; `div.approx` flushes its divisor's reciprocal."""
    exponents = results_of(builds, [-125.0, -126.0, -126.5, -140.0, -150.0, 1e-40])
    np.testing.assert_array_equal(exponents[0], [2 * TINY, TINY, 0.0, 0.0, 0.0, 1.0])
    natural = results_of(builds, [-87.0, -87.5, -100.0])[1]
    assert natural[0] > TINY
    assert not natural[1:].any()
    of = results_of(builds, [2.0**126, 1.5 * 2.0**126, -(2.0**127), TINY, TINY / 2, -TINY / 2])
    np.testing.assert_array_equal(
        of[2], [TINY, 0.0, 0.0, 2.0**126, np.inf, -np.inf])
    assert np.signbit(of[2][2])
    np.testing.assert_array_equal(of[3][:3], [3 * TINY, 0.0, 0.0])


def test_other_functions_keep_subnormal_numbers(builds: Builds) -> None:
    found = results_of(builds, [-126.5, -140.0, -148.0])
    assert (found[4] > 0).all()
    assert found[4][1] == 2.0**-140
    assert (results_of(builds, [-87.5, -100.0])[5] > 0).all()
    small = results_of(builds, [TINY, 3 * 2.0**-148, -3 * 2.0**-148])
    assert 0 < small[6][0] < TINY
    np.testing.assert_array_equal(small[6][1:], [2.0**-148, -(2.0**-148)])
    np.testing.assert_array_equal(small[7], [TINY / 2, 3 * 2.0**-149, -3 * 2.0**-149])


def test_atomics_over_os_threads(builds: Builds) -> None:
    total, amount = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    args = [pointer(total), pointer(amount)]
    builds.kernel("numbers", "count_threads").launch((400,), (96,), 0, args, threads=4)
    assert total[0] == 400 * 96
    assert amount[0] == 200 * 96


def test_concurrent_launches(builds: Builds) -> None:
    values = small_integers(33, 50)
    kernel = builds.kernel("transpose", "transpose_static")

    def launch(seed: int) -> bool:
        out = nans(50, 33)
        args = [pointer(values), pointer(out), c_int(33), c_int(50)]
        kernel.launch((4, 3), (16, 16), 0, args, seed=seed, threads=2)
        return bool((out == values.T).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(launch, range(40)))


# --- types ----------------------------------------------------------------------------------------

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("name", list(TYPES))
def test_every_16_bit_pattern_widens_exactly(builds: Builds, name: str) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(TYPES[name])
    out = torch.zeros(65536 // 2, 2, 2)
    args = [pointer(patterns), pointer(out), c_longlong(65536)]
    builds.kernel("conversions", f"widen_{name}").launch((128,), (256,), 0, args)
    want = patterns.float().reshape(-1, 2)
    for got in (out[:, 0], out[:, 1]):  # one by one, and as a pair
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        bits = want.view(torch.int32)
        if name == "fp16":  # cvt gives one NaN; for bf16 the conversion is a shift
            bits = torch.where(want.isnan(), 0x7FFFFFFF, bits)
        assert (got.view(torch.int32) == bits).all()


def edge_cases(dtype: torch.dtype) -> torch.Tensor:
    """Every value of the type, its neighbours, and the halfway points between them, in fp32."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    # Halfway between adjacent patterns, in double because the last step is beyond fp32 for bf16.
    halfway = ((values.double() + values.double().roll(-1)) / 2).float()
    points = torch.cat([values, halfway])
    bits = points.view(torch.int32)
    return torch.cat([points, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])


@pytest.mark.parametrize("name", list(TYPES))
def test_narrowing_rounds_to_nearest_even(builds: Builds, name: str) -> None:
    generator = torch.Generator().manual_seed(11)
    random_bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    values = torch.cat(
        [
            edge_cases(TYPES[name]),
            random_bits.to(torch.int32).view(torch.float32),
            torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 3.4e38, -3.4e38]),
        ]
    )
    n = values.numel()
    out = torch.zeros(n // 2, 2, 2, dtype=TYPES[name])
    args = [pointer(values), pointer(out), c_longlong(n)]
    builds.kernel("conversions", f"narrow_{name}").launch((math.ceil(n / 512),), (256,), 0, args)
    want = values.to(TYPES[name]).reshape(-1, 2)
    for got in (out[:, 0], out[:, 1]):
        bits = torch.where(want.isnan(), 0x7FFF, want.view(torch.int16))
        assert (got.view(torch.int16) == bits).all()


def test_loads_and_stores_of_every_size_and_hint(builds: Builds) -> None:
    values = torch.randint(0, 256, (20 * 64,), dtype=torch.uint8)
    out = torch.zeros_like(values)
    builds.kernel("conversions", "copy_with_hints").launch(
        (1,), (32,), 0, [pointer(values), pointer(out)]
    )
    assert torch.equal(values, out)


# --- kernels that are wrong -----------------------------------------------------------------------


def fault_of(builds: Builds, name: str, args: Sequence[Any], **launch: Any) -> str:
    fields = {"grid": (1,), "block": (64,), "smem_bytes": 0, **launch}
    with pytest.raises(HostFault) as caught:
        builds.kernel("faults", name).launch(args=args, **fields)
    return str(caught.value)


@pytest.mark.parametrize("seed", [0, 1])
def test_divergent_shuffle(builds: Builds, seed: int) -> None:
    text = fault_of(builds, "divergent_shuffle", [pointer(nans(64))], grid=(3,), seed=seed)
    first = {0: 0, 1: 2}[seed]  # the order of blocks is reversed, too
    assert f"block ({first}, 0, 0): divergent warp exchange: 32 of 64 threads" in text
    assert "threads 0-15 wait in shfl_xor with mask 0xffffffff for lanes 16-31 of warp 0" in text
    assert "threads 16-31 returned from the kernel" in text


def test_shuffle_against_barrier(builds: Builds) -> None:
    text = fault_of(builds, "shuffle_against_barrier", [pointer(nans(64))])
    assert "threads 0-15 wait in shfl_xor" in text
    assert "threads 16-31 wait at the block barrier" in text


def test_divergent_barrier(builds: Builds) -> None:
    text = fault_of(builds, "divergent_barrier", [pointer(nans(64))])
    assert "divergent barrier: 32 of 64 threads" in text
    assert "threads 0-31 wait at the block barrier" in text
    assert "threads 32-63 returned from the kernel" in text


def test_different_masks(builds: Builds) -> None:
    text = fault_of(builds, "different_masks", [pointer(nans(64))])
    assert "threads 0-15 wait in shfl_xor with mask 0xffffffff for lanes 16-31" in text


def test_mask_that_leaves_out_the_caller(builds: Builds) -> None:
    text = fault_of(builds, "mask_without_self", [pointer(nans(64))])
    assert "block (0, 0, 0), thread (16, 0, 0): shfl with mask 0x0000ffff" in text


def test_reading_a_lane_outside_the_mask_gives_nan(builds: Builds) -> None:
    out = np.zeros(32, dtype=np.float32)
    builds.kernel("faults", "source_outside_mask").launch((1,), (32,), 0, [pointer(out)])
    assert np.isnan(out[:16]).all()
    assert (out[16:] == 1).all()


def test_bad_shuffle_width(builds: Builds) -> None:
    assert "shuffle width 12" in fault_of(builds, "bad_width", [pointer(nans(64))])


def test_named_barrier_with_different_counts(builds: Builds) -> None:
    text = fault_of(builds, "named_barrier_count", [pointer(nans(96))], block=(96,))
    assert "thread (32, 0, 0): barrier 1: this thread expects 96 threads, an earlier one 64" in text


def test_a_module_works_after_a_fault(builds: Builds) -> None:
    for _ in range(20):
        fault_of(builds, "divergent_barrier", [pointer(nans(64))], threads=2, grid=(8,))
        values, out = small_integers(64), nans(64)
        args = [pointer(values), pointer(out), c_int(1)]
        builds.kernel("faults", "reverse").launch((1,), (64,), 0, args)
        np.testing.assert_array_equal(out, values[::-1])


@pytest.mark.parametrize("fault", ["no_wait", "no_barrier", "overwrite"])
@pytest.mark.parametrize("seed", [0, 1])
def test_broken_pipelines_show(builds: Builds, fault: str, seed: int) -> None:
    """NaN in some orders, other numbers in others: a kernel may do its work again for a NaN."""
    out, want = sum_rows(builds, fault, 1024, seed)
    assert np.isnan(out).all() if seed == 0 else (np.isfinite(out) & (out != want)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_write_to_where_a_copy_will_land(builds: Builds, seed: int) -> None:
    """A GPU may land the copy behind the write, also where nobody waits for it."""
    values, out = small_integers(1), nans(1)

    def launch(when: int) -> None:
        builds.kernel("faults", "write_over_copy").launch(
            (1,), (64,), 4, [pointer(values), pointer(out), c_int(when)], seed=seed
        )

    launch(0)
    assert out[0] == 2
    with pytest.raises(HostFault, match="was written while an asynchronous copy to it was in"):
        launch(1)
    with pytest.raises(HostFault, match="byte 0 of dynamic shared memory was written while an"):
        launch(2)


@pytest.mark.parametrize(("seed", "value"), [(0, np.nan), (1, 0.747), (2, np.nan), (3, -1.498)])
def test_shared_memory_begins_with_what_no_kernel_wrote(
    builds: Builds, seed: int, value: float
) -> None:
    values, out = small_integers(64), nans(64)
    args = [pointer(values), pointer(out), c_int(0)]
    builds.kernel("faults", "reverse").launch((1,), (64,), 0, args, seed=seed)
    assert np.isclose(out, np.float32(value), atol=1e-3, equal_nan=True).any()


def test_missing_barrier_gives_nan(builds: Builds) -> None:
    values, out = small_integers(64), nans(64)
    args = [pointer(values), pointer(out), c_int(0)]
    builds.kernel("faults", "reverse").launch((1,), (64,), 0, args)
    assert np.isnan(out).any()


def test_a_seed_finds_the_barrier_that_rank_order_hides(builds: Builds) -> None:
    values = small_integers(64)
    want = np.concatenate([values[:1], values[:-1]])

    def right(seed: int, sync: int) -> bool:
        out = nans(64)
        args = [pointer(values), pointer(out), c_int(sync)]
        builds.kernel("faults", "from_lower_neighbour").launch((1,), (64,), 0, args, seed=seed)
        return bool((out == want).all())

    assert all(right(seed, sync=1) for seed in range(5))
    assert right(seed=0, sync=0)
    assert not any(right(seed, sync=0) for seed in range(1, 5))


@pytest.mark.parametrize("threads", [1, 2])
def test_uninitialised_shared_memory_is_nan(builds: Builds, threads: int) -> None:
    for _ in range(3):
        out = np.zeros((16, 3), dtype=np.float32)
        kernel = builds.kernel("faults", "uninitialised")
        kernel.launch((16,), (1,), 32, [pointer(out)], threads=threads)
        assert np.isnan(out).all()


def test_write_past_dynamic_shared_memory(builds: Builds) -> None:
    builds.kernel("faults", "write_past_smem").launch((1,), (1,), 40, [c_int(9)])
    text = fault_of(builds, "write_past_smem", [c_int(10)], smem_bytes=40)
    assert "write to byte 40 of 40 bytes of dynamic shared memory" in text


def test_misaligned_load(builds: Builds) -> None:
    values = torch.zeros(8)
    with pytest.raises(HostFault, match=r"thread \(0, 0, 0\): misaligned load: .* of 16 bytes"):
        builds.kernel("conversions", "misaligned_load").launch(
            (1,), (1,), 0, [pointer(values), pointer(nans(1))]
        )


@pytest.mark.parametrize("block", [(32,), (1024,)])
def test_stacks_are_large_and_separate(builds: Builds, block: tuple[int]) -> None:
    out = nans(block[0])
    args = [pointer(out), c_int(2)]
    builds.kernel("faults", "use_stack").launch((1,), block, 0, args, seed=1)
    np.testing.assert_array_equal(out, 4096.0 * np.arange(block[0]))


@pytest.mark.parametrize(
    ("grid", "block", "smem_bytes", "reason"),
    [
        ((0,), (1,), 0, "grid.x is 0, allowed are 1 to 2147483647"),
        ((1, 65536), (1,), 0, "grid.y is 65536, allowed are 1 to 65535"),
        ((1,), (1025,), 0, "block.x is 1025, allowed are 1 to 1024"),
        ((1,), (1, 1, 65), 0, "block.z is 65, allowed are 1 to 64"),
        ((1,), (64, 17), 0, "a block of 1088 threads, allowed are 1024"),
        ((1,), (1,), 300_000, "300000 bytes of dynamic shared memory"),
    ],
)
def test_launches_beyond_the_limits(
    builds: Builds, grid: Sequence[int], block: Sequence[int], smem_bytes: int, reason: str
) -> None:
    text = fault_of(
        builds, "write_past_smem", [c_int(0)], grid=grid, block=block, smem_bytes=smem_bytes
    )
    assert reason in text


def test_bad_extents_and_unknown_kernels(builds: Builds) -> None:
    kernel = builds.kernel("faults", "never_ends")
    with pytest.raises(ValueError, match="grid has 4 extents"):
        kernel.launch((1, 1, 1, 1), (1,), 0, [])
    with pytest.raises(ValueError, match="does not fit"):
        kernel.launch((1,), (-1,), 0, [])
    with pytest.raises(HostFault, match=r"KGEN_EXPORT\(missing\)"):
        builds.kernel("faults", "missing")


# --- under AddressSanitizer -----------------------------------------------------------------------


def run_sanitized(
    builds: Builds, stem: str, buffers: Sequence[bytes | int], launch: JobLaunch, path: Path
) -> list[bytes]:
    job = write_job(path / "a job", buffers, [launch])
    return run_job(builds.executable(stem), job, RUN_TIMEOUT_S)


def test_sanitized_run_of_a_right_kernel(builds: Builds, tmp_path: Path) -> None:
    values = small_integers(5, 1300)
    args = [BufferRef(0), BufferRef(1, 4), c_int(1300)]
    launch = JobLaunch("sum_row_none", (5,), (64,), 2048, args, seed=3)
    _, out = run_sanitized(builds, "double_buffer", [values.tobytes(), 24], launch, tmp_path)
    sums = np.frombuffer(out, dtype=np.float32)
    assert np.isnan(sums[0])  # never written
    np.testing.assert_array_equal(sums[1:], values.sum(1))


def test_sanitized_job_of_several_launches(builds: Builds, tmp_path: Path) -> None:
    values = small_integers(64)
    first = JobLaunch("reverse", (1,), (64,), 0, [BufferRef(0), BufferRef(1), c_int(1)])
    second = JobLaunch("reverse", (1,), (64,), 0, [BufferRef(1), BufferRef(2), c_int(1)], seed=9)
    job = write_job(tmp_path, [values.tobytes(), 256, 256], [first, second])
    outputs = run_job(builds.executable("faults"), job, RUN_TIMEOUT_S)
    assert outputs == [values.tobytes(), values[::-1].tobytes(), values.tobytes()]


def out_of_bounds(kernel: str, *args: Any, smem_bytes: int = 0, threads: int = 1) -> JobLaunch:
    return JobLaunch(kernel, (1,), (threads,), smem_bytes, args)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (out_of_bounds("write_at", BufferRef(0), c_int(16)), ("heap-buffer-overflow", "WRITE")),
        (out_of_bounds("write_at", BufferRef(0), c_int(-1)), ("heap-buffer-overflow", "WRITE")),
        (
            out_of_bounds("read_at", BufferRef(0), BufferRef(1), c_int(16), threads=64),
            ("heap-buffer-overflow", "READ", "faults.cu"),
        ),
        (
            out_of_bounds("copy_past_end", BufferRef(0), BufferRef(1), c_int(16)),
            ("heap-buffer-overflow", "READ", "copy_past_end"),
        ),
        (
            out_of_bounds("read_past_smem", BufferRef(0), c_int(10), smem_bytes=40),
            ("heap-buffer-overflow", "READ"),
        ),
        (
            out_of_bounds("write_past_static", BufferRef(0), c_int(8)),
            ("global-buffer-overflow", "WRITE"),
        ),
        (
            out_of_bounds("write_past_local", BufferRef(0), c_int(4), threads=8),
            ("stack-buffer-overflow", "WRITE"),
        ),
    ],
    ids=lambda value: value.kernel if isinstance(value, JobLaunch) else "",
)
def test_out_of_bounds(
    builds: Builds, launch: JobLaunch, words: Sequence[str], tmp_path: Path
) -> None:
    with pytest.raises(HostFault) as caught:
        run_sanitized(builds, "faults", [64, 64], launch, tmp_path)
    text = str(caught.value)
    assert all(word in text for word in ("AddressSanitizer", launch.kernel, *words)), text
    assert len(text.splitlines()) <= 14


@pytest.mark.parametrize(
    ("launch", "constant", "message"),
    [
        # Memory behind a buffer of 64 bytes, within its page.
        (out_of_bounds("read_at", BufferRef(0), BufferRef(1), c_int(16)), 0, "use-after-poison"),
        (out_of_bounds("copy_past_end", BufferRef(0), BufferRef(1), c_int(16)), 0, "READ"),
        (out_of_bounds("write_at", BufferRef(0), c_int(3)), 0, "WRITE"),
    ],
    ids=lambda value: value.kernel if isinstance(value, JobLaunch) else "",
)
def test_buffers_that_no_launch_may_write(
    builds: Builds, launch: JobLaunch, constant: int, message: str, tmp_path: Path
) -> None:
    """One element behind them is seen all the same, and every write to them."""
    job = write_job(tmp_path, [64, 64], [launch], [constant])
    with pytest.raises(HostFault, match=message):
        run_job(builds.executable("faults"), job, RUN_TIMEOUT_S)


def test_sanitized_misaligned_dereference(builds: Builds, tmp_path: Path) -> None:
    launch = out_of_bounds("misaligned_dereference", BufferRef(0), BufferRef(1))
    with pytest.raises(HostFault, match="misaligned address"):
        run_sanitized(builds, "conversions", [64, 64], launch, tmp_path)


def test_sanitized_divergence(builds: Builds, tmp_path: Path) -> None:
    launch = JobLaunch("divergent_barrier", (1,), (64,), 0, [BufferRef(0)])
    with pytest.raises(HostFault, match="divergent barrier: 32 of 64"):
        run_sanitized(builds, "faults", [256], launch, tmp_path)


def test_sanitized_endless_loop_is_killed(builds: Builds, tmp_path: Path) -> None:
    job = write_job(tmp_path, [], [JobLaunch("never_ends", (1,), (32,))])
    with pytest.raises(HostTimeout, match=r"did not end within 0\.5 s"):
        run_job(builds.executable("faults"), job, 0.5)


def test_a_sanitized_executable_has_a_fixed_address(builds: Builds) -> None:
    """Elsewhere its addresses may be those of AddressSanitizer's allocator; then it never ends."""
    executable = builds.executable("faults").read_bytes()
    assert executable[:4] == b"\x7fELF"
    assert int.from_bytes(executable[16:18], sys.byteorder) == 2  # ET_EXEC


def test_fibers_of_a_sanitized_launch_have_one_stack_each(tmp_path: Path) -> None:
    """GCC 13 turns on what would give each a second one, unless this option turns it off."""
    echo = tmp_path / "echo"
    echo.write_text('#!/bin/sh\necho "$ASAN_OPTIONS" >&2\nexit 1\n')
    echo.chmod(0o755)
    with pytest.raises(HostFault, match="detect_stack_use_after_return=0"):
        run_job(echo, write_job(tmp_path, [], []), RUN_TIMEOUT_S)


def test_job_with_unknown_buffer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 1 buffers"):
        write_job(tmp_path, [4], [JobLaunch("k", (1,), (1,), 0, [BufferRef(1)])])


# --- the sources also compile for GPUs ------------------------------------------------------------


def load_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from its wheel; it finds its built-ins only if they are loaded already."""
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        return None
    nvrtc = None
    for prefix in ("libnvrtc-builtins.so", "libnvrtc.so"):
        for file in files:
            if file.name.startswith(prefix):
                nvrtc = ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
    return nvrtc


Compile = Callable[[str, str], str]


@pytest.fixture(scope="module")
def nvrtc_compile() -> Compile:
    """A function from source and architecture to the compiler's log; fails the test on errors."""
    nvrtc = load_nvrtc()
    if nvrtc is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")

    def compile_source(source: str, architecture: str) -> str:
        program = c_void_p()
        options = [f"-arch={architecture}", "-std=c++17", f"-I{INCLUDE}"]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        status = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        assert status == 0, log.value.decode()
        return log.value.decode()

    return compile_source


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cross_compilation(nvrtc_compile: Compile, architecture: str) -> None:
    wanted = [stem for stem in SOURCES if LONG.get(stem, architecture) == architecture]
    sources = {stem: (KERNELS / f"{stem}.cu").read_text() for stem in wanted}
    for header in HEADERS:  # each alone: it includes what it needs
        sources[header] = f'#include <kgen/{header}>\nextern "C" __global__ void empty() {{}}\n'
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda source: nvrtc_compile(source, architecture), sources.values())
    for name, log in zip(sources, logs, strict=True):
        assert "warning" not in log, f"{name}: {log}"


def test_headers_compile_alone_on_the_host(tmp_path: Path) -> None:
    for header in HEADERS:
        source = tmp_path / f"{Path(header).stem}.cu"
        source.write_text(f"#include <kgen/{header}>\n")
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", f"-I{INCLUDE}"]
        run_command([CXX, *flags, "-fsyntax-only", "-x", "c++", str(source)])


def test_runtime_sources_are_all_there_is() -> None:
    files = {path for path in (INCLUDE / "kgen" / "host").iterdir() if path.suffix != ".md"}
    assert files == set(host.runtime_sources(INCLUDE))


def test_host_runner_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import kgen.runtime.host;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'kgen'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=INCLUDE.parents[1],
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
