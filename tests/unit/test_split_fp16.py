"""fp32 as pairs of fp16: which rows can be split, the error, and the scaling by powers of two."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx

from kgen.runtime.host import HostModule

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("split_fp16")


def split(module: HostModule, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tame, splits, exponent) of each of 4n rows of 64 numbers, and the rows from their pairs."""
    found = torch.full((len(rows), 3), -1, dtype=torch.int32)
    out = torch.full_like(rows, torch.nan)
    module.function("split_rows").launch(
        grid=(len(rows) // 4,), block=(128,), smem_bytes=0, seed=0,
        args=[c_void_p(t.data_ptr()) for t in (rows, found, out)],
    )
    return found, out


def test_ordinary_rows_keep_22_bits_at_every_scale(module: HostModule) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([2.0**e for e in range(-100, 124, 2)])
    rows = torch.randn(112, 64, generator=generator) * scales[:, None]
    found, out = split(module, rows)
    assert found[:, :2].all()
    largest = rows.abs().amax(1).double()
    scaled = largest * torch.exp2(found[:, 2].double())
    assert ((scaled >= 2**13) & (scaled < 2**14)).all()
    # 22 bits of each number, and the constant part: 2^-36 where the largest is 2^13 or more.
    allowed = rows.double().abs() * 2.0**-22 + largest[:, None] * 2.0**-49
    assert ((out.double() - rows.double()).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("least", "splits"), [(2.0**-27, True), (2.0**-29, True), (2.0**-30, False), (0.0, True)]
)
def test_what_lies_too_far_apart_does_not_split(
    module: HostModule, least: float, splits: bool
) -> None:
    rows = torch.ones(4, 64)
    rows[1, 17] = least
    rows[3] = 0.0  # nothing but zeros splits
    found, out = split(module, rows)
    assert found[:, 0].tolist() == [1] * 4
    assert found[:, 1].tolist() == [1, int(splits), 1, 1]
    if splits:
        assert torch.allclose(out, rows, rtol=2.0**-20, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_not_finite_is_wild(module: HostModule, bad: float) -> None:
    rows = torch.ones(4, 64)
    rows[2, 63] = bad
    found, _ = split(module, rows)
    assert found[:, 0].tolist() == [1, 1, 0, 1]
    assert found[2, 1] == 0


def test_scaling_neither_overflows_nor_vanishes_on_the_way(module: HostModule) -> None:
    x = torch.tensor([1.0, 2.0**-126, 2.0**127, -3.0, 0.0, 1.5, 2.0**-120, 2.0**100])
    exponents = torch.tensor([0, 252, -252, -126, 254, 254, 240, -249], dtype=torch.int32)
    out = torch.full_like(x, torch.nan)
    module.function("scale_all").launch(
        grid=(1,), block=(8,), smem_bytes=0, seed=0,
        args=[c_void_p(t.data_ptr()) for t in (x, exponents, out)],
    )
    assert torch.equal(out, torch.ldexp(x.double(), exponents).float())
