"""The timing protocol for one kernel."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kgen.measure.sampler import Clock, Sampler, TimedCall, make_sampler, on, stops_early
from kgen.measure.stats import median_interval, quartiles
from kgen.model.record import Timing

_GAVE_UP = "gave up"


@dataclass(frozen=True, slots=True)
class Budget:
    """The conditions under which a measurement ends.

    Attributes:
        ms: Limit on device time for samples; one batch of samples may exceed it.
        warmup_ms: Device time before the first sample.
        precision: Stop once the half-width of the median's 95 % interval is below this share
            of the median.
        least: Least number of samples; from 6 samples on there is an interval.
    """

    ms: float
    warmup_ms: float
    precision: float
    least: int


BUDGETS = {
    "search": Budget(ms=15.0, warmup_ms=2.0, precision=0.01, least=6),
    "final": Budget(ms=200.0, warmup_ms=25.0, precision=0.001, least=20),
}
"""Presets: rough ranking of configs, and comparison of finalists."""

_FIRST_BATCH = 3


def measure(
    calls: Sequence[TimedCall],
    device: torch.device,
    budget: Budget,
    *,
    give_up_above_us: float | None = None,
    cache: str = "",
    clock: Clock = time.perf_counter_ns,
) -> Timing:
    """Time a kernel.

    Args:
        calls: `calls[i]` queues the same work on buffer set i, on torch's current stream.
        device: The device that runs it.
        budget: When to stop.
        give_up_above_us: Early stop: drop a kernel whose first samples are all slower than this.
            One call suffices if it takes five times as long and more than 10 ms.
        cache: State of L2 for the protocol's line (see `cache_state`).
        clock: The host's clock in ns; another one for tests.
    Returns:
        Median and quartiles, us per call. See `gave_up`.
    Raises:
        ValueError: If there are no calls.
    """
    sampler = make_sampler(calls, device, budget.warmup_ms, give_up_above_us, clock)
    notes = [sampler.protocol, *([cache] if cache else [])]
    start = clock()
    with on(device):
        if stops_early(sampler.estimate_us, give_up_above_us):
            samples = [sampler.estimate_us]  # of the one call that was timed
        else:
            samples = sampler.take(1 if sampler.estimate_us > budget.ms * 1e3 else _FIRST_BATCH)
        if give_up_above_us is not None and min(samples) > give_up_above_us:
            notes.append(f"{_GAVE_UP} above {give_up_above_us:.6g} us")
        else:
            agreed = _complete(samples, sampler, budget, lambda: (clock() - start) / 1e6)
            if not agreed:
                notes.append(f"budget used up before {100 * budget.precision:g} %")
    return summary(samples, ", ".join(notes))


def _complete(
    samples: list[float], sampler: Sampler, budget: Budget, spent: Callable[[], float]
) -> bool:
    """Add samples until they agree (True) or the budget is used up; `spent` returns ms so far."""
    while True:
        if len(samples) >= budget.least:
            interval = median_interval(samples)
            if interval.half_width <= budget.precision * interval.median:
                return True
        if (spent_ms := spent()) >= budget.ms:
            return False
        # A quarter more samples each time: few synchronisations, little overshoot of the budget.
        wanted = max(budget.least - len(samples), len(samples) // 4, 1)
        fits = math.ceil((budget.ms - spent_ms) / max(spent_ms / len(samples), 1e-6))
        samples += sampler.take(min(wanted, fits))


def gave_up(timing: Timing) -> bool:
    """Whether `measure` dropped the kernel after its first samples."""
    return f"{_GAVE_UP} above" in timing.protocol


def summary(samples: Sequence[float], protocol: str) -> Timing:
    """Return median and quartiles of samples in us.

    If there are enough samples for an interval, the protocol's line ends with the half-width of the
    median's 95 % interval, as a share of the median.
    """
    low, high = quartiles(samples)
    interval = median_interval(samples)
    if math.isfinite(interval.half_width) and interval.median > 0:
        percent = 100 * interval.half_width / interval.median
        protocol += f", median +-{percent:.{2 if percent < 99 else 4}g} %"
    return Timing(statistics.median(samples), low, high, len(samples), protocol)
