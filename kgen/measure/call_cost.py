"""Host time of calls: how long Python is busy with one, not how long the device is.

A call that launches kernels returns before they have run. So many calls in a row, fewer than the
device's queue holds, take the host's time alone. A single call and a wait for the device take what
somebody waits for whose next step needs the result.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from kgen.measure.sampler import Call, on
from kgen.model.call_cost import CallCost

ROUNDS = 41
# Long against the clock; short enough that a full queue, 1024 launches of 3 us or more, is never
# reached. A device that is slower than the host fills memory, not the queue, meanwhile.
_ROUND_US = 1000.0
_CALLS = (4, 200)


def call_costs(
    contenders: Mapping[str, Call],
    device: torch.device,
    synchronize: Callable[[], None],
    rounds: int = ROUNDS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[CallCost, ...]:
    """Time calls without gradients, interleaved.

    Args:
        contenders: One call each, by name; each has run before.
        device: Where their kernels run. A CPU runs them in the call, so that they are timed, too.
        synchronize: Waits for the device.
        rounds: How often each contender has its turn.
        clock: Nanoseconds.
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
    """Have Python collect garbage before the block, and none within: a full collection of a process
    with torch takes 7 ms, and falls on whoever allocates when it is due.
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
    call: Call, count: int, synchronize: Callable[[], None], clock: Callable[[], int]
) -> float:
    """Time per call of some in a row. One before them is not timed: the caches have seen others."""
    call()
    synchronize()
    started = clock()
    for _ in range(count):
        call()
    ended = clock()
    synchronize()
    return (ended - started) / 1e3 / count


def _done_us(call: Call, synchronize: Callable[[], None], clock: Callable[[], int]) -> float:
    """Time of a call and of the wait for it. The device has nothing else to do."""
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
