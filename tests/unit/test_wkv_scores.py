"""kgen/wkv/scores.cuh on the host layer, against sums written out; strong decays, NaN."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

from kgen.runtime.host import HostModule

STEPS, KEYS, HALF = 16, 32, 8
NAMES = ("r", "k", "d", "read", "back", "u", "inner", "n")

pytestmark = needs_cxx
each_type = pytest.mark.parametrize("kernel", ["scores_fp32", "scores_fp64"])


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("wkv_scores")


def drawn(weakest: float) -> dict[str, Tensor]:
    """Random; a third of the decays is `weakest`."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"u": (KEYS,), "inner": (KEYS,), "n": (STEPS, STEPS)}
    x = {n: torch.randn(shapes.get(n, (STEPS, KEYS)), generator=generator) for n in NAMES}
    x["d"] = x["d"].sigmoid()
    x["d"][torch.rand(STEPS, KEYS, generator=generator) < 1 / 3] = weakest
    return x


def run(module: HostModule, kernel: str, x: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: torch.full((STEPS, KEYS), torch.nan) for name in ("gr", "gk", "gw")}
    found |= {"gu": torch.full((KEYS,), torch.nan), "sums": torch.full((80,), torch.nan)}
    found["crosses"] = torch.full((STEPS, KEYS), torch.nan)
    tensors = [x[name] for name in NAMES] + list(found.values())
    module.function(kernel).launch(
        grid=(1,),
        block=(32,),
        smem_bytes=4096,
        args=[c_void_p(t.data_ptr()) for t in tensors],
    )
    return found


def between(d: Tensor, first: int, last: int) -> Tensor:
    """Product of the decays of steps first .. last - 1."""
    return d[first:last].prod(0)


def written_out(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same from sums over pairs, in fp64."""
    x = {name: y.double() for name, y in given.items()}
    r, k, d, n = x["r"], x["k"], x["d"], x["n"]
    rows: dict[str, list[Tensor]] = {"gr": [], "gk": [], "gw": []}
    for t in range(STEPS):
        gr = between(d, 0, t) * x["read"][t] + n[t, t] * x["u"] * k[t]
        gk = between(d, t + 1, STEPS) * x["back"][t] + n[t, t] * x["u"] * r[t]
        gw = between(d, 0, STEPS) * x["inner"]
        for s in range(t):
            gr = gr + between(d, s + 1, t) * k[s] * n[s, t]
            gw = gw + between(d, s + 1, STEPS) * k[s] * x["back"][s]
            for j in range(t + 1, STEPS):
                gw = gw + between(d, s + 1, j) * k[s] * r[j] * n[s, j]
        for j in range(t + 1, STEPS):
            gk = gk + between(d, t + 1, j) * r[j] * n[t, j]
            gw = gw + between(d, 0, j) * r[j] * x["read"][j]
        for name, row in zip(rows, (gr, gk, gw), strict=True):
            rows[name].append(row)
    found = {name: torch.stack(parts) for name, parts in rows.items()}
    return found | {"gu": (n.diagonal()[:, None] * r * k).sum(0)}


@each_type
@pytest.mark.parametrize("weakest", [1.0, 1e-3, 1e-22, 0.0])
def test_gradients_are_the_sums(module: HostModule, kernel: str, weakest: float) -> None:
    x = drawn(weakest)
    found, want = run(module, kernel, x), written_out(x)
    for name, y in want.items():
        # gw of a step with a strong decay is as small as that, and must be right all the same.
        scale = (x["d"] if name == "gw" else 1.0) * y.abs().amax().clamp_min(1.0)
        assert ((found[name] - y).abs() <= 1e-5 * scale + 1e-37).all(), name


@each_type
def test_pairs_are_summed_over_keys(module: HostModule, kernel: str) -> None:
    x = drawn(0.5)
    found = run(module, kernel, x)
    index = 0
    for s in range(STEPS):
        for j in range(s, HALF if s < HALF else STEPS):
            of_pair = x["u"] if s == j else between(x["d"], s + 1, j)
            want = (x["r"][j] * x["k"][s] * of_pair).double().sum()
            assert abs(found["sums"][index] - want) < 1e-4, (s, j)
            index += 1
    assert index == 72
    early, late = found["crosses"][:HALF], found["crosses"][HALF:]
    for s in range(HALF):
        for j in range(HALF):
            want = x["r"][HALF + j] * x["k"][s] * between(x["d"], s + 1, HALF + j)
            torch.testing.assert_close(early[s] * late[j], want, rtol=1e-5, atol=1e-7)


@each_type
def test_nan_of_a_step_stays_where_it_belongs(module: HostModule, kernel: str) -> None:
    """gy of step 5: n of column 5 and what the state before all steps reads with it."""
    x = drawn(0.5)
    x["n"][:, 5] = torch.nan
    x["read"][5] = torch.nan
    found = run(module, kernel, x)
    steps = torch.arange(STEPS)
    assert torch.equal(found["gr"].isnan().any(1), steps == 5)
    assert torch.equal(found["gk"].isnan().any(1), steps <= 5)
    assert torch.equal(found["gw"].isnan().any(1), steps < 5)
