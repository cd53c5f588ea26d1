"""States gathered from the sums of all blocks of a group over all rounds, exact to the bit.

On the host blocks take turns at the group's barrier, in any order. There the fences and the named
barriers of the reducer warps do nothing, and a state that is announced too early goes unnoticed.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx
from torch import Tensor

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of

GROUPS = 2
THREADS = 256
BYTES = 128 * 128 * 2 + 2048  # of dynamic shared memory: the largest state, and what is behind it
LINE = 32  # elements between two counters
# Key and value features, blocks; whether there is a state to begin with, and one to hand out.
CASES = (
    (64, 64, 4, 0, 0),
    (48, 64, 4, 1, 1),
    (128, 88, 8, 0, 1),
    (64, 128, 8, 1, 0),
    (128, 128, 8, 0, 0),
    (64, 64, 16, 1, 1),
    (64, 64, 16, 0, 0),
)
Case = tuple[int, int, int, int, int]

pytestmark = needs_cxx


def name_of(case: Case) -> str:
    keys, values, blocks, begins, ends = case
    return f"gather_{keys}_{values}_{blocks}_{begins}{ends}"


def padded(features: int) -> int:
    return -(-features // 64) * 64


def draw(case: Case, rounds: int) -> tuple[Tensor, Tensor]:
    """Sums and initial states; features that do not exist have sums that are zero."""
    keys, values, blocks, _, _ = case
    generator = torch.Generator().manual_seed(rounds)
    sums = torch.zeros(GROUPS, rounds, blocks, padded(keys), padded(values))
    sums[..., :keys, :values] = torch.randn(
        GROUPS, rounds, blocks, keys, values, generator=generator
    )
    return sums, torch.randn(GROUPS, keys, values, generator=generator)


def gather(case: Case, sums: Tensor, initial: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The states before the segments, NaN where there is none, and those behind the last round."""
    blocks, rounds = case[2], sums.shape[1]
    states = torch.full_like(sums, torch.nan)
    end = torch.full_like(initial, torch.nan)
    size = sums[0, 0, 0].numel()
    space = torch.full((GROUPS * 2 * blocks * size,), torch.nan)
    carries = torch.full((GROUPS * 4 * size,), torch.nan, dtype=torch.bfloat16)
    counters = torch.zeros(GROUPS * LINE, dtype=torch.int32)
    tensors = (sums, initial, states, end, space, carries, counters)
    module = host_builds().module("gathered")
    places = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    module.function("clear").launch((1,), (64,), 0, [places[-1], c_int64(GROUPS)])
    module.function(name_of(case)).launch(
        (GROUPS * blocks,), (THREADS,), BYTES, [*places, c_int(rounds)], seed=seed
    )
    return states, end


def upper_half(x: Tensor) -> Tensor:
    """Rounded to bf16; from halfway up, so that what is left has 16 bits."""
    bits = x.contiguous().view(torch.int32)
    past_half = torch.where(bits & 0xFFFF == 0x8000, bits | 1, bits)
    return past_half.view(torch.float32).bfloat16().float()


def wanted(case: Case, sums: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """The same, added up in the order that the exchange has."""
    keys, values, blocks, begins, ends = case
    rounds = sums.shape[1]
    states = torch.full_like(sums, torch.nan)
    carry = torch.zeros_like(sums[:, 0, 0])
    if begins:
        carry[:, :keys, :values] = initial
    for round_ in range(rounds):
        before = upper_half(carry)
        goes_on = ends or round_ < rounds - 1
        for block in range(blocks):
            if begins or round_ > 0 or block > 0:
                states[:, round_, block] = before.bfloat16().float()
            own = sums[:, round_, block]
            before = before + (upper_half(own) if goes_on else own.bfloat16().float())
            carry = carry + sums[:, round_, block]
    end = carry[:, :keys, :values] if ends else torch.full_like(initial, torch.nan)
    return states, end


def same(found: Tensor, want: Tensor) -> bool:
    return torch.equal(found.isnan(), want.isnan()) and torch.equal(
        found.nan_to_num(), want.nan_to_num()
    )


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_states_of_all_blocks(case: Case, rounds: int) -> None:
    sums, initial = draw(case, rounds)
    want = wanted(case, sums, initial)
    for seed in (0, 1):
        states, end = gather(case, sums, initial, seed)
        assert same(states, want[0])
        assert same(end, want[1])


def test_what_bf16_does_not_hold_goes_on() -> None:
    """Rounds that add what is below half a unit of bf16, which states see once there is enough."""
    case = (48, 64, 4, 1, 1)
    sums = torch.zeros(GROUPS, 6, 4, 64, 64)
    sums[..., :48, :64] = 2.0**-11
    initial = torch.ones(GROUPS, 48, 64)
    states, end = gather(case, sums, initial, seed=0)
    assert (end == 1 + 24 * 2.0**-11).all()
    assert (states[:, 1, 0, :48] == 1).all()
    assert (states[:, 5, 0, :48] == 1 + 2.0**-7).all()  # 20 of them: 1.25 units


def test_what_is_not_finite_goes_on_as_it_is() -> None:
    """Nor does what bf16 would round to infinity become so."""
    case = (48, 64, 4, 1, 1)
    sums, initial = draw(case, 3)
    largest = torch.finfo(torch.float32).max
    odd = [torch.inf, -torch.inf, torch.nan, largest, -largest, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 0.0]
    initial[:, 0, : len(odd)] = torch.tensor(odd)
    initial.view(torch.int32)[:, 1, :2] = torch.tensor([-1, 0x7F800001], dtype=torch.int32)
    sums[:, :, :, :2, : len(odd)] = 0
    _, end = gather(case, sums, initial, seed=0)
    _, want = wanted(case, sums, initial)
    assert same(end, want)
    sums[:, 1, 2, 3, 4] = torch.nan
    states, end = gather(case, sums, initial, seed=1)
    assert same(states, wanted(case, sums, initial)[0])
    assert states[:, 1, :3, 3, 4].isfinite().all()
    assert states[:, 1, 3, 3, 4].isnan().all()
    assert states[:, 2, :, 3, 4].isnan().all()
    assert end[:, 3, 4].isnan().all()


def test_cross_compilation() -> None:
    source = (KERNELS / "gathered.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("gathered", source, digest_of(source))
    [built] = compiler.build([BuildRequest(rendered, "sm_90a")])
    compiler.close()
    assert isinstance(built, Artifact), built
    found = dict(built.resources)
    assert set(found) == {"clear", *map(name_of, CASES)}
    assert all(use.spill_bytes == 0 for use in found.values()), found
