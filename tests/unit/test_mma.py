"""Tensor-core products and their loads on the host layer, lane by lane, and in every rounding."""

from __future__ import annotations

from ctypes import c_void_p
from typing import Any

import numpy as np
import pytest
import torch
from host_builds import host_builds, needs_cxx

from kgen.runtime.host import HostFault, HostModule

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("mma")


def launch(module: HostModule, name: str, *tensors: Any, seed: int = 0, **shape: Any) -> None:
    args = [
        c_void_p(t.data_ptr() if isinstance(t, torch.Tensor) else t.ctypes.data) for t in tensors
    ]
    fields = {"grid": (1,), "block": (64,), **shape}
    module.function(name).launch(smem_bytes=0, args=args, seed=seed, **fields)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small enough that every product and sum is exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


@pytest.mark.parametrize("seed", range(3))
def test_tf32_product(module: HostModule, seed: int) -> None:
    a, b, c = integers(2, 16, 8, seed=1), integers(2, 8, 8, seed=2), integers(2, 16, 8, seed=3)
    out = torch.full((2, 2, 16, 8), torch.nan)
    launch(module, "mma_tf32", a, b, c, out, seed=seed)
    assert torch.equal(out, torch.stack([c + a @ b, c + 2 * (a @ b)], 1))


@pytest.mark.parametrize("loads", ["", "_ldmatrix"])
@pytest.mark.parametrize("dtype", list(HALVES))
@pytest.mark.parametrize("seed", range(2))
def test_half_product(module: HostModule, dtype: str, loads: str, seed: int) -> None:
    a, b, c = integers(2, 16, 16, seed=4), integers(2, 16, 8, seed=5), integers(2, 16, 8, seed=6)
    out = torch.full((2, 2, 16, 8), torch.nan)
    kind = HALVES[dtype]
    launch(module, f"mma_{dtype}{loads}", a.to(kind), b.to(kind), c, out, seed=seed)
    assert torch.equal(out, torch.stack([c + a @ b, c + 2 * (a @ b)], 1))


def test_every_element_of_a_meets_its_own_of_b(module: HostModule) -> None:
    """One element of each at a time: a swap of two lanes could hide in a sum."""
    for k in range(8):
        for row, column in ((0, 0), (7, 3), (8, 4), (15, 7), (k, k), (15 - k, 7 - k)):
            a, b = torch.zeros(2, 16, 8), torch.zeros(2, 8, 8)
            a[:, row, k], b[:, k, column] = 3.0, 5.0
            out = torch.full((2, 2, 16, 8), torch.nan)
            launch(module, "mma_tf32", a, b, torch.zeros(2, 16, 8), out)
            want = torch.zeros(16, 8)
            want[row, column] = 15.0
            assert torch.equal(out[0, 0], want)
            assert torch.equal(out[1, 0], want)


def test_sums_are_cut_off_towards_zero(module: HostModule) -> None:
    a, b, c = torch.zeros(2, 16, 8), torch.zeros(2, 8, 8), torch.zeros(2, 16, 8)
    a[:, :, 0], b[:, 0, :] = 1.5 * 2.0**-12, 2.0**-12
    c[0], c[1] = 1.0, -1.0
    a[1] *= -1
    out = torch.full((2, 2, 16, 8), torch.nan)
    launch(module, "mma_tf32", a, b, c, out)
    # 1 + 1.5 * 2^-24 would round to 1 + 2^-23.
    assert torch.equal(out, c[:, None].expand_as(out))


def test_products_carry_nan_and_inf(module: HostModule) -> None:
    a, b, c = integers(2, 16, 8, seed=1), integers(2, 8, 8, seed=2).abs() + 1, torch.zeros(2, 16, 8)
    a[0, 3, 5], a[1, 12, 0] = torch.nan, torch.inf
    out = torch.zeros(2, 2, 16, 8)
    launch(module, "mma_tf32", a, b, c, out)
    assert out[0, 0].isnan().any(1).tolist() == [row == 3 for row in range(16)]
    assert (out[1, 0] == torch.inf).all(1).tolist() == [row == 12 for row in range(16)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_ldmatrix(module: HostModule, matrices: int, transposed: bool, seed: int) -> None:
    values = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((matrices, 32), dtype=np.uint32)
    name = f"ldmatrix_{matrices}{'_trans' if transposed else ''}"
    launch(module, name, values, out, block=(32,), seed=seed)
    for m in range(matrices):
        matrix = values[m].T if transposed else values[m]
        for lane in range(32):
            first, second = matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert out[m, lane] == int(first) | int(second) << 16, (m, lane)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(module: HostModule, transposed: bool, seed: int) -> None:
    values = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    words = np.ascontiguousarray(values).view(np.uint32).reshape(4, 32)
    out = np.zeros((4, 8, 8), dtype=np.uint16)
    name = "stmatrix_trans" if transposed else "stmatrix_plain"
    launch(module, name, words, out, block=(32,), seed=seed)
    assert (out == (values.transpose(0, 2, 1) if transposed else values)).all()


@pytest.mark.parametrize("seed", range(2))
def test_transpose_matrix(module: HostModule, seed: int) -> None:
    values = np.arange(1, 65, dtype=np.uint16).reshape(8, 8)
    out = np.zeros(32, dtype=np.uint32)
    launch(module, "movmatrix", values, out, block=(32,), seed=seed)
    for lane in range(32):
        first, second = values.T[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
        assert out[lane] == int(first) | int(second) << 16, lane


def test_rounding_and_splitting(module: HostModule) -> None:
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-100, 100, (4096,), generator=generator)
    x = torch.randn(4096, generator=generator) * torch.pow(2.0, exponents)
    halfway = torch.tensor([1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-11 - 2.0**-23, 0.0])
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4028235e38])
    x[:8] = torch.cat([halfway, special])
    found = [torch.zeros(4096, dtype=torch.int32) for _ in range(3)]
    launch(module, "split", x, *found, grid=(64,))
    rounded = found[0].view(torch.float32)
    assert ((found[0] & 0x1FFF)[~x.isnan()] == 0).all()
    assert rounded[:4].tolist() == [1 + 2.0**-10, -1 - 2.0**-10, 1.0, 0.0]
    assert rounded[4].isnan()
    assert rounded[5:8].tolist() == [torch.inf, -torch.inf, torch.inf]

    exact = x[8:].double()
    assert ((rounded[8:].double() - exact).abs() <= 2.0**-11 * exact.abs()).all()
    high, low = ((f & ~0x1FFF).view(torch.float32)[8:].double() for f in found[1:])
    assert torch.equal(high, rounded[8:].double())
    assert ((high + low - exact).abs() <= 2.0**-22 * exact.abs()).all()


def test_a_lane_that_stays_away_is_reported(module: HostModule) -> None:
    with pytest.raises(HostFault, match="threads 0-30 wait in sync_warp"):
        launch(module, "diverged", torch.ones(1), torch.zeros(32), block=(32,))


def test_a_misaligned_row_is_reported(module: HostModule) -> None:
    with pytest.raises(HostFault, match="misaligned row of ldmatrix"):
        launch(module, "misaligned_rows", torch.zeros(32), block=(32,))
