"""Chunk loops on the host layer: exact on small integers, and no NaN where none belongs."""

from __future__ import annotations

from ctypes import c_int, c_longlong, c_void_p

import pytest
import torch
from host_builds import host_builds, needs_cxx
from torch import Tensor

from kgen.runtime.host import HostModule

KEYS, VALUES, SLICES = 20, 36, 3
KINDS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

pytestmark = needs_cxx
each_kind = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("chunk")


def pointer(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def draw(steps: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """-1, 0 and 1: every sum is exact, in every type that a chunk loop rounds to."""
    generator = torch.Generator().manual_seed(seed)
    a, b, v = (torch.randint(-1, 2, (steps, n), generator=generator) for n in (KEYS, KEYS, VALUES))
    dtype = KINDS[kind]
    return a.to(dtype), b.to(dtype), v.to(dtype)


def run_chunks(
    module: HostModule,
    kind: str,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    *,
    parts: Tensor | None = None,
    outputs: bool = True,
    cut: int = 0,
    backwards: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out, end); `cut`: where outputs begin, or where a sum without outputs ends."""
    out, end = torch.full_like(v, torch.nan), torch.full((KEYS, VALUES), torch.nan)
    tensors = [pointer(t) for t in (a, b, v, parts, end, out if outputs else None)]
    numbers = [c_longlong(n) for n in (len(a), cut, int(backwards))]
    module.function(f"run_{kind}").launch(
        grid=(SLICES,), block=(64,), smem_bytes=65536, args=[*tensors, *numbers], seed=seed
    )
    return out, end


def expected(a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, in float64; outputs are halved as the kernels' factor says."""
    state = torch.zeros(KEYS, VALUES, dtype=torch.float64)
    out = torch.zeros(len(v), VALUES, dtype=torch.float64)
    for t in range(len(v)):
        state = state + b[t].double()[:, None] * v[t].double()
        out[t] = a[t].double() @ state / 2
    return out.to(v.dtype), state.float()


@each_kind
@pytest.mark.parametrize("steps", [0, 1, 16, 17, 53])
def test_chunks_are_exact_on_small_integers(module: HostModule, kind: str, steps: int) -> None:
    a, b, v = draw(steps, kind)
    for seed in range(2):
        out, end = run_chunks(module, kind, a, b, v, seed=seed)
        want, last = expected(a, b, v)
        assert torch.equal(out, want)
        assert torch.equal(end, last)


@each_kind
def test_a_loop_backwards_is_one_over_reversed_steps(module: HostModule, kind: str) -> None:
    a, b, v = draw(37, kind)
    out, end = run_chunks(module, kind, a, b, v, backwards=True)
    want, last = expected(a.flip(0), b.flip(0), v.flip(0))
    assert torch.equal(out, want.flip(0))
    assert torch.equal(end, last)


@each_kind
def test_a_segment_goes_on_from_the_sum_of_the_one_before(module: HostModule, kind: str) -> None:
    a, b, v = draw(53, kind)
    _, parts = run_chunks(module, kind, a, b, v, outputs=False, cut=32)
    assert torch.equal(parts, expected(a[:32], b[:32], v[:32])[1])
    out, end = run_chunks(module, kind, a, b, v, parts=parts, cut=32)
    want, last = expected(a, b, v)
    assert torch.equal(out[32:], want[32:])
    assert out[:32].isnan().all(), "steps of another segment were written"
    assert torch.equal(end, last)


@each_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["a", "b", "v"])
def test_what_is_not_finite_reaches_what_depends_on_it(
    module: HostModule, kind: str, value: float, where: str
) -> None:
    """Step 20 lies within a chunk, whose other steps are multiplied by its zeros."""
    a, b, v = draw(53, kind)
    {"a": a, "b": b, "v": v}[where][20, 3] = value
    out, end = run_chunks(module, kind, a, b, v)
    want, last = expected(a, b, v)
    assert torch.equal(out.nan_to_num(7e3, 8e3, 9e3), want.nan_to_num(7e3, 8e3, 9e3))
    assert torch.equal(end.nan_to_num(7e3, 8e3, 9e3), last.nan_to_num(7e3, 8e3, 9e3))
    assert want[:20].isfinite().all()
    assert not want[20:].isfinite().all()


@each_kind
def test_every_nan_is_noticed(module: HostModule, kind: str) -> None:
    """A GPU's own NaN has all bits set: rounding by an addition to its bits would make it zero."""
    a, b, v = draw(17, kind)
    for x in (a, b, v):
        bits = torch.int32 if x.dtype == torch.float32 else torch.int16
        for pattern in (torch.iinfo(bits).max, -1):
            changed = [t.clone() for t in (a, b, v)]
            target = next(t for t, old in zip(changed, (a, b, v), strict=True) if old is x)
            target.view(bits)[9, 2] = pattern
            out, _ = run_chunks(module, kind, changed[0], changed[1], changed[2])
            want, _ = expected(changed[0], changed[1], changed[2])
            assert torch.equal(out.isnan(), want.isnan())
            assert want.isnan().any()


@pytest.mark.parametrize(
    ("name", "width", "existing"),
    [
        ("copy_16", 20, 20),
        ("copy_16", 20, 12),
        ("copy_8", 14, 14),
        ("copy_8", 14, 6),
        ("copy_4", 21, 21),
        ("copy_4", 21, 1),
    ],
)
def test_copies_of_chunks(module: HostModule, name: str, width: int, existing: int) -> None:
    steps = 53
    source = torch.arange(1.0, steps * width + 1).view(steps, width)
    target = torch.zeros(4, 16, 24)
    module.function(name).launch(
        grid=(1,),
        block=(64,),
        smem_bytes=4 * 16 * 24,
        args=[pointer(source), pointer(target), c_longlong(steps), c_int(existing)],
    )
    want = torch.zeros(64, 24)
    want[:, existing:] = -1.0  # left as they were
    want[:steps, :existing] = source[:, :existing]
    assert torch.equal(target.view(64, 24), want)
