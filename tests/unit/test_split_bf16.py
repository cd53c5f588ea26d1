"""fp32 as sums of bf16: the error of the parts, their layout, and the products that are used."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of

THREADS = 512
PRODUCTS = {2: [(0, 1), (1, 0), (0, 0)], 3: [(0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)]}
# By the number of parts: relative error of a number as a sum of parts, and the size of the products
# that are left out, relative to the whole product.
LOST = {2: 2.0**-17, 3: 0.0}
LEFT_OUT = {2: 2.0**-15, 3: 2.0**-23.9}

pytestmark = needs_cxx


def launch(name: str, *tensors: torch.Tensor, threads: int = THREADS) -> None:
    places = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    host_builds().module("split_bf16").function(name).launch((1,), (threads,), 0, places)


def split(x: torch.Tensor, parts: int) -> torch.Tensor:
    """[parts, numbers]: a word has the parts of two neighbours, the first one's in its low half."""
    words = torch.full((THREADS, parts), -1, dtype=torch.int32)
    launch(f"split_{parts}", x, words)
    return words.view(torch.bfloat16).view(THREADS, parts, 2).transpose(0, 1).flatten(1).double()


def numbers(seed: int) -> torch.Tensor:
    """From 2^-110 to 2^127, with the mantissas that rounding is worst for among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(1 << 23, (2 * THREADS,), generator=generator)
    bits[::8] = 1 << 15  # half of bf16's last digit
    bits[1::8] = (1 << 15) + (1 << 6)
    exponents = torch.randint(-110, 127, (2 * THREADS,), generator=generator)
    signs = 1 - 2 * torch.randint(2, (2 * THREADS,), generator=generator)
    return (signs * (1 + bits * 2.0**-23) * torch.exp2(exponents.double())).float()


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_add_up(parts: int) -> None:
    x = numbers(seed=0)
    found = split(x, parts)
    lost = (found.sum(0) - x.double()).abs() / x.double().abs()
    assert float(lost.max()) <= LOST[parts]
    assert parts == 3 or float(lost.max()) > 0.9 * LOST[parts]  # the bound is no better than that
    assert torch.equal(found[0], x.bfloat16().double())
    for i, bound in ((1, 2.0**-8), (2, 2.0**-17))[: parts - 1]:
        assert (found[i].abs() <= bound * x.double().abs()).all()


@pytest.mark.parametrize("parts", [2, 3])
def test_products_that_count(parts: int) -> None:
    """Small products come first, and the left-out products are within the bound `LEFT_OUT`."""
    pairs = torch.full((len(PRODUCTS[parts]) + 1, 2), -1, dtype=torch.int32)
    launch(f"products_{parts}", pairs, threads=1)
    assert pairs.tolist() == [*map(list, PRODUCTS[parts]), [-1, -1]]
    x, y = numbers(seed=1), numbers(seed=2)
    of_x, of_y = split(x, parts), split(y, parts)
    product = x.double() * y.double()
    found = sum(of_x[i] * of_y[j] for i, j in PRODUCTS[parts])
    assert ((found - product).abs() <= LEFT_OUT[parts] * product.abs()).all()


@pytest.mark.parametrize("parts", [2, 3])
def test_smallest_numbers(parts: int) -> None:
    x = torch.zeros(2 * THREADS)
    x[::2] = torch.linspace(-1, 1, THREADS) * 2.0**-111
    x[1::8], x[3::8] = 2.0**-149, 2.0**-126
    assert ((split(x, parts).sum(0) - x.double()).abs() < 2.0**-126).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
@pytest.mark.parametrize("parts", [2, 3])
def test_what_is_not_finite_in_bf16_stays_not_finite(bad: float, parts: int) -> None:
    """And its neighbour, with which it shares words, has parts of its own."""
    x = numbers(seed=3)
    wanted = split(x, parts)
    at = torch.arange(2 * THREADS) == 5
    x[at] = bad
    found = split(x, parts)
    assert torch.equal(found[:, ~at], wanted[:, ~at])
    assert not found.sum(0)[at].isfinite()
    if not torch.tensor(bad).isnan():
        assert found[0, at].isinf()


def test_cross_compilation() -> None:
    source = (KERNELS / "split_bf16.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("split_bf16", source, digest_of(source))
    for built in compiler.build([BuildRequest(rendered, arch) for arch in ("sm_80", "sm_90a")]):
        assert isinstance(built, Artifact), built
        assert all(use.spill_bytes == 0 for _, use in built.resources)
    compiler.close()
