"""The timing protocol on a GPU: it agrees with itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from kgen.measure.clocks import clocks
from kgen.measure.compare import compare
from kgen.measure.memory import copy_bandwidth, sets_needed
from kgen.measure.sampler import EventSampler, GraphSampler, make_sampler
from kgen.measure.stats import Contender, median_interval, paired_difference, rank
from kgen.measure.timing import BUDGETS, gave_up, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

CUDA = torch.device("cuda", 0)
Call = Callable[[], object]


def copies(megabytes: float) -> list[Call]:
    """Copies over enough buffer sets that none is in L2."""
    words = int(megabytes * 2**18)
    l2 = torch.cuda.get_device_properties(CUDA).L2_cache_size
    sets = sets_needed(8 * words, l2, 8 * 2**30)
    pairs = [
        (torch.randn(words, device=CUDA), torch.empty(words, device=CUDA)) for _ in range(sets)
    ]
    return [lambda a=a, b=b: b.copy_(a) for a, b in pairs]  # type: ignore[misc]


@pytest.mark.parametrize("megabytes", [1.0, 16.0])
def test_same_kernel_twice_differs_by_little(megabytes: float) -> None:
    calls = copies(megabytes)
    first, second = (measure(calls, CUDA, BUDGETS["final"]) for _ in range(2))
    assert first.median_us == pytest.approx(second.median_us, rel=0.03)
    assert first.low_us <= first.median_us <= first.high_us


def test_same_kernel_interleaved_ties() -> None:
    calls = copies(8.0)
    found = compare({"a": calls, "b": calls}, CUDA, rounds=41)
    difference = paired_difference(found.samples["a"], found.samples["b"])
    assert abs(difference.median) < 0.02
    tied = rank(
        [Contender("a", 40, "x"), Contender("b", 32, "y")], found.samples, indifference=0.02
    )
    assert tied == ["b", "a"]


def test_short_and_long_kernels_take_graphs() -> None:
    short = measure(copies(1.0), CUDA, BUDGETS["search"], cache="cold L2")
    assert short.protocol.startswith("graph of ")
    assert "buffer sets, cold L2" in short.protocol
    assert "median +-" in short.protocol
    slow = torch.randn(2**28, device=CUDA)
    long = measure([lambda: slow.mul_(1.0)], CUDA, BUDGETS["search"])
    assert int(long.protocol.removeprefix("graph of ").partition(",")[0]) <= 8


def test_graph_and_events_agree_on_a_kernel_that_both_can_measure() -> None:
    calls = copies(256.0)
    by_events = statistics.median(EventSampler(calls, 0.0).take(31)[1:])
    by_graph = statistics.median(GraphSampler(calls, 16, 0.0).take(11))
    assert by_graph == pytest.approx(by_events, rel=0.05)


def test_work_that_cannot_be_captured_is_timed_by_events() -> None:
    data = torch.randn(1000, device=CUDA)
    timing = measure([lambda: data.sum().item()], CUDA, BUDGETS["search"])
    assert timing.protocol.startswith("events per launch, 1 buffer set")
    assert "; not capturable (" in timing.protocol
    assert timing.median_us > 0
    # The failed capture leaves the device, the allocator and later captures usable,
    assert measure([lambda: data.mul_(1.0)], CUDA, BUDGETS["search"]).protocol.startswith("graph")
    assert float(torch.ones(10, device=CUDA).sum()) == 10.0
    assert torch.randn(10, device=CUDA).isfinite().all()  # and the generator


def test_work_that_allocates_is_captured() -> None:
    data = torch.randn(4096, device=CUDA)
    timing = measure([lambda: torch.nn.functional.rms_norm(data, (4096,))], CUDA, BUDGETS["search"])
    assert timing.protocol.startswith("graph of ")


def test_slow_work_is_stopped_early() -> None:
    data = torch.randn(2**28, device=CUDA)
    timing = measure([lambda: data.mul_(1.0)], CUDA, BUDGETS["final"], give_up_above_us=5.0)
    assert gave_up(timing)
    assert timing.samples <= 3


def test_copy_bandwidth_is_that_of_memory() -> None:
    first, second = copy_bandwidth(CUDA), copy_bandwidth(CUDA)
    assert 100 < first < 20_000
    assert first == pytest.approx(second, rel=0.03)


def test_clocks() -> None:
    state = clocks(CUDA)
    if state is None:
        pytest.skip("NVML does not answer here")
    assert 0 < state.sm_mhz <= state.sm_max_mhz
    assert state.power_w > 0


def test_warm_l2_is_not_slower_than_cold() -> None:
    """Four MiB stay in the L2 of every GPU that has a profile."""
    cold = copies(2.0)
    found = compare({"cold": cold, "warm": cold[:1]}, CUDA, rounds=21)
    assert paired_difference(found.samples["warm"], found.samples["cold"]).median < 0.05


def test_precision_asked_for_is_reached_or_the_budget_used() -> None:
    sampler = make_sampler(copies(1.0), CUDA, 25.0)
    interval = median_interval(sampler.take(101))
    assert interval.half_width < 0.05 * interval.median
