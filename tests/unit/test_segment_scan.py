"""The scan over segments on the host layer: exact on small integers, and who takes part."""

from __future__ import annotations

from ctypes import c_int, c_longlong, c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

from kgen.runtime.host import HostModule

SIZE, STATES, THREADS = 12, 5, 32

pytestmark = needs_cxx
each_scan = pytest.mark.parametrize(
    ("parts", "width"), [(1, 1), (3, 4), (33, 4), (33, 2), (127, 1)]
)


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("segment_scan")


def draw(parts: int) -> tuple[Tensor, Tensor]:
    """Sums and initial states, small integers; behind the last sums lie NaN."""
    generator = torch.Generator().manual_seed(parts)
    sums = torch.randint(-9, 10, (STATES + 1, parts, SIZE), generator=generator).float()
    sums[STATES] = torch.nan
    return sums, torch.randint(-9, 10, (STATES, SIZE), generator=generator).float()


def scan(
    module: HostModule, sums: Tensor, initial: Tensor | None, width: int, first: int = 0
) -> Tensor:
    """`sums` after the scan, by whole blocks, more threads than are needed."""
    found = sums.clone()
    module.function(f"scan_{sums.shape[1]}_by_{width}").launch(
        grid=(-(-(first + STATES * SIZE // width) // THREADS) + 1,), block=(THREADS,), smem_bytes=0,
        seed=1,
        args=[
            c_void_p(found.data_ptr()),
            c_void_p(None if initial is None else initial.data_ptr()),
            c_longlong(STATES),
            c_longlong(first),
        ],
    )
    return found


@each_scan
@pytest.mark.parametrize("with_initial", [False, True])
def test_sums_become_the_states_behind_them(
    module: HostModule, parts: int, width: int, with_initial: bool
) -> None:
    sums, initial = draw(parts)
    found = scan(module, sums, initial if with_initial else None, width)
    want = sums[:STATES].cumsum(1) + (initial[:, None] if with_initial else 0)
    assert torch.equal(found[:STATES], want)
    assert found[STATES].isnan().all(), "a thread behind the last state wrote"


@each_scan
def test_threads_before_the_first_one_do_nothing(
    module: HostModule, parts: int, width: int
) -> None:
    sums, initial = draw(parts)
    shifted = scan(module, sums, initial, width, first=7)
    assert torch.equal(shifted[:STATES], scan(module, sums, initial, width)[:STATES])


def test_nan_stays_with_its_value_and_the_segments_behind(module: HostModule) -> None:
    sums, initial = draw(33)
    sums[2, 20, 5] = torch.nan
    found = scan(module, sums, initial, 4)[:STATES]
    assert found[2, 20:, 5].isnan().all()
    assert int(found.isnan().sum()) == 13


@pytest.mark.parametrize("with_initial", [False, True])
def test_where_the_state_before_a_segment_is(module: HostModule, with_initial: bool) -> None:
    parts, initial = torch.zeros(2, 3, SIZE), torch.zeros(2, SIZE)
    found = torch.full((8,), -2, dtype=torch.int32)
    module.function("find_states").launch(
        grid=(1,), block=(8,), smem_bytes=0, seed=0,
        args=[
            c_void_p(parts.data_ptr()),
            c_void_p(initial.data_ptr() if with_initial else None),
            c_void_p(found.data_ptr()),
            c_int(parts.numel()),
        ],
    )
    start = [72, 84] if with_initial else [-1, -1]
    assert found.tolist() == [start[0], 0, 12, 24, start[1], 36, 48, 60]
