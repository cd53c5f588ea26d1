"""The number of buffer sets to rotate, the state of L2, and the bandwidth of a large copy."""

from __future__ import annotations

import statistics

import torch

from kgen.measure.sampler import make_sampler, on
from kgen.model.record import WARM

MAX_SETS = 512
WARM_SHARE = 32
"""Sets that cannot leave L2 take at most this part of it, so that the sets and outputs of all
contenders of one run stay in L2 together."""
_HOST_COPY_BYTES = 256 * 2**20
_CUDA_COPY_BYTES = 2 * 2**30


def sets_needed(bytes_per_set: int, l2_bytes: int, memory_limit: int) -> int:
    """Return how many buffer sets to rotate so that each set has left L2 before its next use.

    All sets together take more than three times the size of L2. Strict least-recently-used
    replacement would need twice the size, but the hardware's replacement is less strict.

    If even `MAX_SETS` sets fit into L2, they are never cold. Then there are so few that nothing
    evicts them while contenders take turns.

    Args:
        bytes_per_set: Inputs and outputs of one call.
        l2_bytes: Size of L2; 0 if unknown, which gives one set.
        memory_limit: Bytes that all sets may take; the result is at least 1 nevertheless.
    """
    size = max(bytes_per_set, 1)
    wanted = 3 * l2_bytes // size + 1
    if MAX_SETS * size <= l2_bytes:
        wanted = l2_bytes // (WARM_SHARE * size)
    return max(1, min(wanted, memory_limit // size, MAX_SETS))


def sets_for(l2: str, bytes_per_set: int, l2_bytes: int, memory_limit: int) -> int:
    """Return the number of buffer sets for a state of L2: one for `warm`, else `sets_needed`."""
    return 1 if l2 == WARM else sets_needed(bytes_per_set, l2_bytes, memory_limit)


def cache_state(sets: int, bytes_per_set: int, l2_bytes: int) -> str:
    """Name the actual state of L2 in a rotation, for `Timing.protocol`."""
    if l2_bytes <= 0:
        return "L2 size unknown"
    turnover = sets * bytes_per_set / l2_bytes
    if turnover > 3:
        return "cold L2"
    return "warm L2" if turnover <= 1 else "partly warm L2"


def copy_bandwidth(device: torch.device, copy_bytes: int | None = None) -> float:
    """Measure the bandwidth of a large copy on the device, GB/s, counting bytes read and written.

    The best of three medians: other work can only make a copy slower.

    Args:
        device: The device.
        copy_bytes: Size of the source; None for 2 GiB or an eighth of the free memory (CUDA), or
            256 MiB (host).
    """
    if copy_bytes is None:
        copy_bytes = _HOST_COPY_BYTES
        if device.type == "cuda":
            copy_bytes = min(_CUDA_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 8)
    words = max(copy_bytes // 4, 1)
    # Random values, because some memories compress zeros.
    source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    sampler = make_sampler([lambda: target.copy_(source)], device, capture=False)
    with on(device):
        medians = [statistics.median(sampler.take(7)) for _ in range(3)]
    return 2 * words * 4 / min(medians) / 1e3
