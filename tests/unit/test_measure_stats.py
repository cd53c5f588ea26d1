"""Medians, intervals, ranking and floors."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kgen.measure.floor import floor_us, share
from kgen.measure.memory import cache_state, copy_bandwidth, sets_for, sets_needed
from kgen.measure.stats import Contender, median_interval, paired_difference, quartiles, rank
from kgen.operators.base import Cost


def test_interval_of_few_samples_is_unbounded() -> None:
    interval = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.median == 3.0
    assert interval.half_width == math.inf


def test_interval_ranks_are_those_of_the_binomial() -> None:
    # Textbook table for 95 %: n=6 takes ranks 1 and 6, n=9: 2 and 8, n=20: 6 and 15.
    for n, low, high in ((6, 1, 6), (9, 2, 8), (20, 6, 15)):
        interval = median_interval([float(i) for i in range(1, n + 1)])
        assert (interval.low, interval.high) == (low, high)


def test_interval_covers_the_true_median() -> None:
    rng = random.Random(1)
    inside = 0
    for _ in range(400):
        interval = median_interval([rng.expovariate(1.0) for _ in range(25)])
        inside += interval.low <= math.log(2) <= interval.high
    assert 0.93 <= inside / 400 <= 1.0


def test_interval_of_thousands_does_not_overflow() -> None:
    interval = median_interval([float(i) for i in range(5001)])
    assert 2500 - 80 < interval.low < 2500 < interval.high < 2500 + 80


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="median of no samples"):
        median_interval([])


def test_quartiles() -> None:
    assert quartiles([4.0]) == (4.0, 4.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_pairing_cancels_drift() -> None:
    drift = [1.0 + i / 10 for i in range(20)]
    slow, fast = [102.0 * d for d in drift], [100.0 * d for d in drift]
    interval = paired_difference(slow, fast)
    assert interval.low == pytest.approx(0.02)
    assert interval.high == pytest.approx(0.02)
    with pytest.raises(ValueError, match="equally many samples, got 1 and 2"):
        paired_difference([1.0], [1.0, 2.0])


def noisy(center: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [center * (1 + rng.gauss(0, 0.003)) for _ in range(31)]


def test_rank_breaks_ties_by_registers_then_digest() -> None:
    samples = {
        "a": noisy(10.0, 1),
        "b": noisy(10.001, 2),
        "c": noisy(11.0, 3),
        "d": noisy(10.002, 4),
    }
    contenders = [
        Contender("a", 64, "aa"),
        Contender("b", 32, "cc"),
        Contender("c", 16, "00"),
        Contender("d", 32, "bb"),
    ]
    assert rank(contenders, samples) == ["d", "b", "a", "c"]
    assert rank(contenders[::-1], samples) == ["d", "b", "a", "c"]


def test_rank_does_not_let_registers_beat_time() -> None:
    samples = {"fast": noisy(10.0, 1), "slow": noisy(10.3, 2)}
    assert rank([Contender("slow", 8, "a"), Contender("fast", 255, "b")], samples) == [
        "fast",
        "slow",
    ]


def test_sets_needed() -> None:
    mib = 2**20
    assert sets_needed(10 * mib, 50 * mib, 1000 * mib) == 16
    assert sets_needed(10 * mib, 50 * mib, 70 * mib) == 7
    assert sets_needed(200 * mib, 50 * mib, 70 * mib) == 1
    assert sets_needed(8, 50 * mib, 1000 * mib) == 512
    assert sets_needed(10 * mib, 0, 1000 * mib) == 1
    # 512 sets of 64 KiB fit into L2: a few, which stay there beside those of other contenders.
    assert sets_needed(2**16, 50 * mib, 1000 * mib) == 25
    assert sets_needed(2**17, 50 * mib, 1000 * mib) == 512
    assert cache_state(16, 10 * mib, 50 * mib) == "cold L2"
    assert cache_state(7, 10 * mib, 50 * mib) == "partly warm L2"
    assert cache_state(512, 8, 50 * mib) == "warm L2"
    assert cache_state(1, 8, 0) == "L2 size unknown"


def test_floor_is_the_larger_term() -> None:
    cost = Cost(bytes=4_000_000, flops=3_000_000)
    assert floor_us(cost, bandwidth_gbps=4000.0, tflops=10.0) == pytest.approx(1.0)
    assert floor_us(cost, bandwidth_gbps=4000.0, tflops=1.0) == pytest.approx(3.0)
    assert floor_us(cost, bandwidth_gbps=4000.0, tflops=0.0) == pytest.approx(1.0)
    assert share(1.0, 2.0) == 0.5
    with pytest.raises(ValueError, match="bandwidth must be > 0"):
        floor_us(cost, 0.0, 1.0)


def test_warm_takes_one_set_whatever_its_size() -> None:
    mib = 2**20
    assert sets_for("cold", 10 * mib, 50 * mib, 1000 * mib) == 16
    assert sets_for("warm", 10 * mib, 50 * mib, 1000 * mib) == 1
    # The line names what is, not what was asked for.
    assert cache_state(1, 10 * mib, 50 * mib) == "warm L2"
    assert cache_state(1, 200 * mib, 50 * mib) == "cold L2"


def test_copy_bandwidth_runs_on_the_host() -> None:
    assert copy_bandwidth(torch.device("cpu"), copy_bytes=2**20) > 0
