"""Chunk loops with decays on the host layer: exact where decays are 0 or 1, right in between."""

from __future__ import annotations

from ctypes import c_longlong, c_void_p
from dataclasses import dataclass

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

from kgen.runtime.host import HostModule

KEYS, VALUES, SLICES = 20, 36, 3


@dataclass(frozen=True, slots=True)
class Kind:
    """A kernel of the source: types of its tensors, threads, and the errors that are allowed."""

    dtype: torch.dtype
    w_dtype: torch.dtype
    threads: int
    bound: float
    state_bound: float


KINDS = {
    "halving_fp32": Kind(torch.float32, torch.float32, 64, 2e-6, 2e-6),
    "halving_fp16": Kind(torch.float16, torch.float32, 64, 2**-11 + 5e-4, 2e-3),
    "halving_bf16": Kind(torch.bfloat16, torch.bfloat16, 64, 2**-8 + 1e-3, 2e-3),
    "halving_bf16_state": Kind(torch.bfloat16, torch.float32, 32, 2**-8 + 1e-3, 2e-6),
    "pairs_fp32": Kind(torch.float32, torch.float32, 64, 2e-6, 2e-6),
    "pairs_fp16": Kind(torch.float16, torch.float32, 32, 2**-11 + 5e-4, 2e-3),
    "pairs_bf16": Kind(torch.bfloat16, torch.float32, 64, 2**-8 + 1e-3, 2e-3),
    "pairs_bf16_state": Kind(torch.bfloat16, torch.bfloat16, 32, 2**-8 + 1e-3, 2e-6),
}

pytestmark = needs_cxx
each_kind = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("chunk_decay")


@dataclass(frozen=True, slots=True)
class Rows:
    """What a chunk loop reads."""

    a: Tensor
    b: Tensor
    v: Tensor
    w: Tensor
    u: Tensor


def integers(steps: int, kind: str, decays: str) -> Rows:
    """-1, 0 and 1 with decays of 0 or 1: every sum is exact in every type."""
    generator = torch.Generator().manual_seed(steps)
    a, b, v = (torch.randint(-1, 2, (steps, n), generator=generator) for n in (KEYS, KEYS, VALUES))
    w = torch.zeros(steps, KEYS)
    if decays == "some 0":
        w[torch.rand(steps, KEYS, generator=generator) < 0.2] = -torch.inf
    elif decays == "0":
        w[:] = -torch.inf
    u = torch.randint(-2, 3, (KEYS,), generator=generator).float()
    its = KINDS[kind]
    return Rows(a.to(its.dtype), b.to(its.dtype), v.to(its.dtype), w.to(its.w_dtype), u)


def reals(steps: int, kind: str, strongest: float, seed: int = 0) -> Rows:
    """Ordinary inputs whose log decays reach from 0 to `strongest`."""
    generator = torch.Generator().manual_seed(seed)
    a, b, v = (torch.randn(steps, n, generator=generator) for n in (KEYS, KEYS, VALUES))
    w = strongest * torch.rand(steps, KEYS, generator=generator) ** 3
    its = KINDS[kind]
    u = torch.randn(KEYS, generator=generator)
    return Rows(a.to(its.dtype), b.to(its.dtype), v.to(its.dtype), w.to(its.w_dtype), u)


def run_chunks(
    module: HostModule,
    kind: str,
    rows: Rows,
    *,
    first: int = 0,
    last: int | None = None,
    before: tuple[Tensor, Tensor] | None = None,
    outputs: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, end, product of the decays); the product is left as NaN with outputs."""
    out = torch.full_like(rows.v, torch.nan)
    end, key_end = torch.full((KEYS, VALUES), torch.nan), torch.full((KEYS,), torch.nan)
    parts, key_parts = before or (None, None)
    tensors = (rows.a, rows.b, rows.v, rows.w, rows.u, parts, key_parts, end, key_end)
    pointers = [c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    last = len(rows.a) if last is None else last
    module.function(f"run_{kind}").launch(
        grid=(SLICES,),
        block=(KINDS[kind].threads,),
        smem_bytes=131072,
        args=[
            *pointers,
            c_void_p(out.data_ptr() if outputs else None),
            *(c_longlong(n) for n in (first, last, KEYS if len(rows.w) > 1 else 0)),
        ],
        seed=1,
    )
    return out, end, key_end


def expected(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """(out, end, root of the sum of the terms' squares), in float64; outputs are halved."""
    state = torch.zeros(KEYS, VALUES, dtype=torch.float64)
    squares = torch.zeros_like(state)
    a, b, v, u = (x.double() for x in (rows.a, rows.b, rows.v, rows.u))
    w = rows.w.double().expand(len(a), KEYS)
    out, scale = torch.zeros_like(v), torch.zeros_like(v)
    for t in range(len(v)):
        product = b[t][:, None] * v[t]
        out[t] = a[t] @ (state + u[:, None] * product) / 2
        scale[t] = (a[t].square() @ (squares + (u[:, None] * product).square())).sqrt() / 2
        state = w[t].exp()[:, None] * state + product
        squares = (2 * w[t]).exp()[:, None] * squares + product.square()
    return out, state, scale.maximum(out.abs())


@each_kind
@pytest.mark.parametrize("decays", ["1", "some 0", "0"])
@pytest.mark.parametrize("steps", [0, 1, 17, 75])
def test_decays_of_0_and_1_are_exact(
    module: HostModule, kind: str, decays: str, steps: int
) -> None:
    rows = integers(steps, kind, decays)
    out, end, _ = run_chunks(module, kind, rows)
    want, last, _ = expected(rows)
    assert torch.equal(out.double(), want)
    assert torch.equal(end.double(), last)


@each_kind
@pytest.mark.parametrize("strongest", [-1e-3, -1.0, -5.0, -12.0, -40.0, -1e4])
def test_decays_of_all_strengths(module: HostModule, kind: str, strongest: float) -> None:
    """Quotients of products would hold up to -60 in half a chunk; halving has one way for all."""
    rows = reals(90, kind, strongest)
    out, end, _ = run_chunks(module, kind, rows)
    want, last, scale = expected(rows)
    assert ((out.double() - want).abs() / scale).max().item() < KINDS[kind].bound
    assert (end.double() - last).abs().max().item() < 10 * KINDS[kind].state_bound


@each_kind
def test_every_key_decays_at_a_rate_of_its_own(module: HostModule, kind: str) -> None:
    """As learnt decays do: from 0.998 to 0.0006 a step."""
    rows = reals(90, kind, -1.0)
    rows.w[:] = -torch.linspace(-6, 2, KEYS).exp()
    out, end, _ = run_chunks(module, kind, rows)
    want, last, scale = expected(rows)
    assert ((out.double() - want).abs() / scale).max().item() < KINDS[kind].bound
    assert (end.double() - last).abs().max().item() < 10 * KINDS[kind].state_bound


@each_kind
def test_a_step_that_forgets_nearly_all(module: HostModule, kind: str) -> None:
    """All of a half's decay in one step: neighbours of that step are far apart, others are near."""
    rows = reals(64, kind, -1e-2)
    for step in (3, 8, 16, 24, 31, 47, 50):
        rows.w[step] = -59.0
    out, _, _ = run_chunks(module, kind, rows)
    want, _, scale = expected(rows)
    assert ((out.double() - want).abs() / scale).max().item() < KINDS[kind].bound


@pytest.mark.parametrize("kind", ["halving_fp32", "pairs_fp32"])
def test_products_of_fp32_are_as_accurate_as_one_exponential(
    module: HostModule, kind: str
) -> None:
    """The sum of a chunk's logarithms is near -20, where numbers of fp32 are 2^-19 apart."""
    worst = 0.0
    for seed in range(8):
        rows = reals(16, kind, -5.0, seed)
        _, _, product = run_chunks(module, kind, rows, outputs=False)
        want = rows.w.double().sum(0).exp()
        worst = max(worst, ((product.double() - want).abs() / want).max().item())
    assert worst < 2**-22


@each_kind
@pytest.mark.parametrize("strongest", [-0.5, -30.0])
def test_one_decay_for_all_steps(module: HostModule, kind: str, strongest: float) -> None:
    rows = reals(53, kind, strongest)
    rows = Rows(rows.a, rows.b, rows.v, rows.w[:1], rows.u)
    out, end, _ = run_chunks(module, kind, rows)
    want, last, scale = expected(rows)
    assert ((out.double() - want).abs() / scale).max().item() < KINDS[kind].bound
    assert (end.double() - last).abs().max().item() < 10 * KINDS[kind].state_bound


@each_kind
@pytest.mark.parametrize("strongest", [-0.1, -30.0])
def test_a_segment_goes_on_from_the_one_before(
    module: HostModule, kind: str, strongest: float
) -> None:
    rows = reals(90, kind, strongest)
    begun = reals(1, kind, -1.0, seed=1)
    initial = begun.b.float().T @ begun.v.float()
    zero = torch.zeros(KEYS)
    _, part, product = run_chunks(module, kind, rows, last=64, outputs=False)
    torch.testing.assert_close(product, rows.w[:64].float().sum(0).exp(), rtol=1e-4, atol=0.0)
    _, whole, _ = run_chunks(module, kind, rows, last=64, before=(initial, zero))
    joined = part + product[:, None] * initial
    assert (joined - whole).abs().max().item() < 10 * KINDS[kind].state_bound
    out, _, _ = run_chunks(module, kind, rows, first=64, before=(part, product))
    want, _, scale = expected(rows)
    assert out[:64].isnan().all(), "steps of another segment were written"
    assert ((out.double() - want).abs() / scale)[64:].max().item() < KINDS[kind].bound


@each_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "v", "w"])
@pytest.mark.parametrize("decays", ["1", "some 0"])
def test_what_is_not_finite_reaches_what_depends_on_it(
    module: HostModule, kind: str, value: float, where: str, decays: str
) -> None:
    """Step 20 lies within a chunk, whose other steps are multiplied by its zeros."""
    rows = integers(53, kind, decays)
    getattr(rows, where)[20, 3] = value
    out, end, _ = run_chunks(module, kind, rows)
    want, last, _ = expected(rows)
    for got, right in ((out, want), (end, last)):
        assert torch.equal(got.double().nan_to_num(7e3, 8e3, 9e3), right.nan_to_num(7e3, 8e3, 9e3))
    assert want[:20].isfinite().all()


@each_kind
def test_a_bonus_that_is_not_finite(module: HostModule, kind: str) -> None:
    rows = integers(37, kind, "1")
    rows.u[5] = torch.nan
    out, end, _ = run_chunks(module, kind, rows)
    assert out.isnan().all()
    assert torch.equal(end.double(), expected(rows)[1])
