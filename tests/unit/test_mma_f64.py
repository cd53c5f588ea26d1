"""Tensor-core products in fp64 on the host layer, lane by lane."""

from __future__ import annotations

import pytest
import torch
from host_builds import host_builds, needs_cxx
from test_mma import launch

from kgen.runtime.host import HostModule

pytestmark = needs_cxx
each_depth = pytest.mark.parametrize("depth", [4, 8, 16])


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("mma_f64")


def product(module: HostModule, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int = 0
            ) -> torch.Tensor:  # fmt: skip
    out = torch.full((2, 2, 16, 8), torch.nan, dtype=torch.float64)
    launch(module, f"mma_f64_{a.shape[2]}", a, b, c, out, seed=seed)
    return out


@each_depth
@pytest.mark.parametrize("seed", range(3))
def test_product(module: HostModule, depth: int, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(2, *shape, generator=drawn, dtype=torch.float64)
               for shape in ((16, depth), (depth, 8), (16, 8)))  # fmt: skip
    want = torch.stack([c + a @ b, c + 2 * (a @ b)], 1)
    torch.testing.assert_close(product(module, a, b, c, seed), want, rtol=1e-14, atol=1e-14)


@each_depth
def test_every_element_of_a_meets_its_own_of_b(module: HostModule, depth: int) -> None:
    """One element of each at a time: a swap of two lanes could hide in a sum."""
    for k in range(depth):
        for row, column in ((0, 0), (7, 3), (8, 4), (15, 7), (k, k % 8), (15 - k, 7 - k % 8)):
            a = torch.zeros(2, 16, depth, dtype=torch.float64)
            b = torch.zeros(2, depth, 8, dtype=torch.float64)
            a[:, row, k], b[:, k, column] = 3.0, 5.0
            out = product(module, a, b, torch.zeros(2, 16, 8, dtype=torch.float64))
            want = torch.zeros(16, 8, dtype=torch.float64)
            want[row, column] = 15.0
            assert torch.equal(out[0, 0], want)
            assert torch.equal(out[1, 0], want)


@each_depth
def test_sums_are_in_fp64(module: HostModule, depth: int) -> None:
    """2^40 and 2^-12 are in one sum: fp32 would lose the second one."""
    a = torch.ones(2, 16, depth, dtype=torch.float64)
    b = torch.full((2, depth, 8), 2.0**-12, dtype=torch.float64)
    c = torch.full((2, 16, 8), 2.0**40, dtype=torch.float64)
    out = product(module, a, b, c)
    assert torch.equal(out[:, 0], c + depth * 2.0**-12)
