"""Rows of 16 words of wkv7's TF32 tiles: every word has a place, no access has bank conflicts."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import numpy as np
import pytest
from host_builds import host_builds, needs_cxx

ROWS, BANKS = 64, 32

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def places() -> np.ndarray:
    """[2][row][column]: where words lie, by `place` and by `below`."""
    out = np.full((2, ROWS, 16), -1, dtype=np.int32)
    module = host_builds().module("step_tile")
    args = [c_void_p(out.ctypes.data), c_int(ROWS)]
    module.function("places").launch((1,), (32,), smem_bytes=0, args=args)
    return out


def test_every_word_has_a_place_of_its_own(places: np.ndarray) -> None:
    assert sorted(places[0].ravel()) == list(range(16 * ROWS))
    assert (places[0] == places[1]).all()


def test_no_access_has_bank_conflicts(places: np.ndarray) -> None:
    bank = places[0] % BANKS
    for first in range(0, ROWS, 8):  # a matrix of ldmatrix: four words of eight rows
        for column in range(0, 16, 4):
            words = bank[first : first + 8, column : column + 4]
            assert len(set(words.ravel())) == BANKS
    for first in range(0, ROWS, 16):  # a store of a producer: keys 4 apart, early or late steps
        for key in range(4):
            for step in (0, 8):
                words = bank[first + key : first + 16 : 4, step : step + 8]
                assert len(set(words.ravel())) == BANKS
    for row in range(ROWS):  # a store of the inverse: a row
        assert len(set(bank[row])) == 16
