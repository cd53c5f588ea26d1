"""Refuse configs by the compiler's resource report, before any launch."""

from __future__ import annotations

from kgen.model.artifact import Artifact
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Plan

# A kernel with a few spills may be the fastest, and the compiler also counts spills on rarely taken
# paths, so a trial decides. More spills than this mean local-memory traffic for every element,
# which makes a memory-bound kernel slow.
MAX_SPILL_BYTES = 512
REGISTER_GRANULARITY = 256  # registers are allocated to warps in units of 256


def resource_refusal(artifact: Artifact, plan: Plan, gpu: GpuProfile) -> str:
    """Return why a built config cannot or should not run, or an empty text."""
    by_kernel = dict(artifact.resources)
    for launch in plan.launches:
        used = by_kernel.get(launch.kernel)
        if used is None:
            continue  # the host compiler reports no resources
        smem = used.smem_bytes + launch.smem_bytes
        if smem > gpu.smem_per_block:
            return (
                f"{launch.kernel} needs {smem} bytes of shared memory per block; "
                f"{gpu.name} has {gpu.smem_per_block}"
            )
        warps = -(-launch.threads // gpu.warp_size)
        per_warp = used.registers * gpu.warp_size
        registers = warps * -(-per_warp // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
        if registers > gpu.regs_per_sm:
            return (
                f"{launch.kernel} needs {registers} registers per block; "
                f"{gpu.name} has {gpu.regs_per_sm} per SM"
            )
        if used.spill_bytes > MAX_SPILL_BYTES:
            return (
                f"{launch.kernel} spills {used.spill_bytes} bytes per thread "
                f"(more than {MAX_SPILL_BYTES})"
            )
    return ""
