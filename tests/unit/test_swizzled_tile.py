"""Swizzled tiles: every chunk has a place, no access has bank conflicts, operands are right."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import numpy as np
import pytest
import torch
from host_builds import host_builds, needs_cxx

from kgen.runtime.host import HostModule

COLUMNS = (16, 64, 128, 192, 320)  # the last two: rows that do not begin at powers of two
LINE = 64  # 16-bit values in all banks

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("swizzled_tile")


def places(module: HostModule, columns: int) -> np.ndarray:
    """[2][row][chunk]: where chunks begin, by `offset` and by `below`."""
    out = np.full((2, 16, columns // 8), -1, dtype=np.int32)
    args = [c_void_p(out.ctypes.data)]
    module.function(f"offsets_{columns}").launch((1,), (32,), smem_bytes=0, args=args)
    return out


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_chunk_has_a_place_of_its_own(module: HostModule, columns: int) -> None:
    offset, below = places(module, columns)
    assert sorted(offset.ravel()) == list(range(0, 16 * columns, 8))
    assert (below == offset).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_no_access_has_bank_conflicts(module: HostModule, columns: int) -> None:
    bank = places(module, columns)[0] % LINE
    for chunk in range(columns // 8):
        for first in (0, 8):  # a matrix of ldmatrix; words (g, 2q) of an accumulator
            assert len(set(bank[first : first + 8, chunk])) == 8
    for pair in range(0, columns // 8, 2):  # words of a producer: two chunks of four rows
        for step in range(4):
            assert len(set(bank[step::4, pair : pair + 2].ravel())) == 8
        for first in (0, 1, 8, 9):  # four keys of every other step: 16 lanes of a halving producer
            assert len(set(bank[first : first + 8 : 2, pair : pair + 2].ravel())) == 8


@pytest.mark.parametrize("columns", COLUMNS)
def test_operands(module: HostModule, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x, y = (
        torch.randint(-8, 9, (16, columns), generator=generator).bfloat16() for _ in range(2)
    )
    for square in range(columns // 16):
        out = torch.full((2, 16, 16), torch.nan)
        pointers = [c_void_p(t.data_ptr()) for t in (x, y, out)]
        launch = module.function(f"multiply_{columns}").launch
        launch((1,), (32,), smem_bytes=0, args=[*pointers, c_int(square)])
        a, b = (t[:, 16 * square : 16 * square + 16].float() for t in (x, y))
        assert torch.equal(out, torch.stack([a @ b.T, a.T @ b]))
