"""Host time of calls: how long Python is busy with a call, not how long the device is busy.

A call that launches kernels returns before the kernels have run. A series of calls that fits into
the device's queue therefore takes host time only. A single call followed by a wait for the device
gives the latency until the result is available.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from kgen.measure.sampler import TimedCall, on
from kgen.model.call_cost import CallCost

ROUNDS = 41
# Long compared with the clock's resolution; short enough that the queue of 1024 launches, of 3 us
# or more each, is never full.
_ROUND_US = 1000.0
_CALLS = (4, 200)


def call_costs(
    contenders: Mapping[str, TimedCall],
    device: torch.device,
    synchronize: Callable[[], None],
    rounds: int = ROUNDS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[CallCost, ...]:
    """Time calls without gradients, interleaved.

    Args:
        contenders: One call per contender, by name; each call has run before.
        device: Where the kernels run. A CPU runs them inside the call, so the time includes them.
        synchronize: Waits for the device.
        rounds: Number of rounds; each contender is timed once per round.
        clock: Returns the time in nanoseconds.
    Returns:
        One entry per contender, in their order.
    """
    took_us: dict[str, list[float]] = {name: [] for name in contenders}
    done_us: dict[str, list[float]] = {name: [] for name in contenders}
    with on(device), torch.no_grad():
        counts = {
            name: _calls_of_a_round(_stretch_us(call, 3, synchronize, clock))
            for name, call in contenders.items()
        }
        with collected():
            for _ in range(rounds):
                for name, call in contenders.items():
                    took_us[name].append(_stretch_us(call, counts[name], synchronize, clock))
                    done_us[name].append(_done_us(call, synchronize, clock))
    return tuple(
        _summary(name, samples, done_us[name], counts[name]) for name, samples in took_us.items()
    )


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage before the block and disable collection inside it.

    A full collection of a process with torch takes 7 ms, and would hit an arbitrary contender.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _stretch_us(
    call: TimedCall, count: int, synchronize: Callable[[], None], clock: Callable[[], int]
) -> float:
    """Time per call of a series of calls, after one untimed call that warms the caches."""
    call()
    synchronize()
    started = clock()
    for _ in range(count):
        call()
    ended = clock()
    synchronize()
    return (ended - started) / 1e3 / count


def _done_us(call: TimedCall, synchronize: Callable[[], None], clock: Callable[[], int]) -> float:
    """Time of a call and the wait for its result, on an idle device."""
    started = clock()
    call()
    synchronize()
    return (clock() - started) / 1e3


def _calls_of_a_round(estimate_us: float) -> int:
    least, most = _CALLS
    return max(least, min(most, round(_ROUND_US / max(estimate_us, 1e-3))))


def _summary(name: str, samples: list[float], done: list[float], calls: int) -> CallCost:
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return CallCost(
        name, statistics.median(samples), quartiles[0], quartiles[2], statistics.median(done),
        len(samples), calls,
    )
