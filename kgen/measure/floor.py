"""The least possible time of a call on a GPU, and the share of it that a measured time reaches."""

from __future__ import annotations

from kgen.model.gpu import GpuProfile
from kgen.operators.base import Cost


def floor_us(cost: Cost, bandwidth_gbps: float, tflops: float) -> float:
    """Return the least time of a call, us: the larger of the times of its bytes and of its flops.

    Args:
        cost: Least work of the call.
        bandwidth_gbps: Memory bandwidth that a large copy reaches, 1e9 bytes per second.
        tflops: Rate of the unit that does the arithmetic, 1e12 operations per second; 0 or
            less to ignore arithmetic.
    Raises:
        ValueError: If the bandwidth is not positive.
    """
    if bandwidth_gbps <= 0:
        raise ValueError(f"bandwidth must be > 0 GB/s, got {bandwidth_gbps}")
    moving = cost.bytes / bandwidth_gbps / 1e3
    computing = cost.flops / tflops / 1e6 if tflops > 0 else 0.0
    return max(moving, computing)


def rate_tflops(cost: Cost, gpu: GpuProfile) -> float:
    """Return the peak rate of the fastest unit that can do a call's arithmetic at its accuracy.

    The rate of the host is unknown: the result is 0, which makes `floor_us` ignore arithmetic.
    """
    tensor_cores = {
        "fp32": 0.0,
        "3xhalf": gpu.half_tflops / 3,
        "tf32": gpu.tf32_tflops,
        "half": gpu.half_tflops,
    }[cost.unit]
    return max(gpu.fp32_tflops, tensor_cores)


def share(least_us: float, measured_us: float) -> float:
    """Return the floor's time over a measured time: 1 at the floor, 0.5 at twice its time."""
    return least_us / measured_us if measured_us > 0 else 0.0
