"""Measure several candidates interleaved, in random order."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from kgen.measure.sampler import Clock, Sampler, TimedCall, make_sampler, on
from kgen.measure.timing import summary
from kgen.model.record import Timing


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of candidates measured together.

    Attributes:
        timings: Timings by name.
        samples: By name, us per call; the i-th samples of all candidates are of the same round.
        order: Names in the order of sampling, round after round.
    """

    timings: Mapping[str, Timing]
    samples: Mapping[str, tuple[float, ...]]
    order: tuple[tuple[str, ...], ...]


def compare(
    candidates: Mapping[str, Sequence[TimedCall]],
    device: torch.device,
    *,
    rounds: int = 31,
    budget_ms: float | None = None,
    warmup_ms: float = 5.0,
    seed: int = 0,
    cache: str = "",
    clock: Clock = time.perf_counter_ns,
    uncaptured: Collection[str] = (),
) -> Comparison:
    """Sample every candidate once per round, in a new random order each round.

    Drift of clocks and temperature then affects all candidates equally, and no candidate always
    runs after the same other candidate.

    Args:
        candidates: By name, one call per buffer set as for `measure`, of a kernel or of a peer.
        device: The device that runs them.
        rounds: Samples per candidate.
        budget_ms: Time for the samples: stop after the round that uses it up, but not before 7
            rounds.
        warmup_ms: Warm-up time per candidate, before the first round.
        seed: The seed of the orders.
        cache: State of L2 for the protocol's line.
        clock: The host's clock in ns; another one for tests.
        uncaptured: Names of candidates to be timed without CUDA graphs, such as memory copies.
    Raises:
        ValueError: If there is nothing to compare.
    """
    if not candidates or rounds < 1:
        raise ValueError(f"nothing to compare: {len(candidates)} candidates, {rounds} rounds")
    samplers: dict[str, Sampler] = {}
    for name, calls in candidates.items():
        samplers[name] = make_sampler(
            calls,
            device,
            warmup_ms,
            clock=clock,
            capture=name not in uncaptured,
            beside=tuple(samplers.values()),
        )
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    orders: list[tuple[str, ...]] = []
    shuffler = random.Random(seed)
    start = clock()
    for done in range(rounds):
        if budget_ms is not None and done >= 7 and (clock() - start) / 1e6 >= budget_ms:
            break
        order = sorted(candidates)
        shuffler.shuffle(order)
        with on(device):
            for name in order:
                samples[name] += samplers[name].take(1)
        orders.append(tuple(order))
    asked = f" of {rounds}, budget used up" if len(orders) < rounds else ""
    note = f"interleaved over {len(orders)} rounds{asked}, seed {seed}"
    timings = {
        name: summary(
            taken, ", ".join(part for part in (samplers[name].protocol, cache, note) if part)
        )
        for name, taken in samples.items()
    }
    return Comparison(timings, {name: tuple(s) for name, s in samples.items()}, tuple(orders))
