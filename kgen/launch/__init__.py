"""Load built modules and launch plans, on a GPU or on the host layer."""

from __future__ import annotations

from kgen.errors import GpuError
from kgen.launch.base import Device, Module
from kgen.model.gpu import GpuProfile

# Not imported as `cuda`: importing the submodule `kgen.launch.cuda` would replace that name.
from kgen.runtime import cuda as runtime_cuda

__all__ = ["Device", "Module", "detect_gpus", "open_device"]


def open_device(gpu: GpuProfile, ordinal: int = 0) -> Device:
    """Open the device that a profile describes.

    Args:
        gpu: Profile; the host's profile gives the host layer.
        ordinal: Number of the GPU as torch counts.
    Raises:
        GpuError: If that GPU is missing, or is another model than the profile's.
    """
    # Imported here because both modules import torch, and `kgen doctor` needs only detect_gpus.
    if gpu.is_host:
        from kgen.launch.host import HostDevice

        return HostDevice()
    _check_gpu(gpu, ordinal)
    from kgen.launch.cuda import CudaDevice

    return CudaDevice(ordinal)


def detect_gpus() -> list[str]:
    """Return the names of the GPUs that the driver lists, without torch; empty if it lists none."""
    return [facts.name for facts in runtime_cuda.devices()]


def _check_gpu(gpu: GpuProfile, ordinal: int) -> None:
    seen = runtime_cuda.devices()
    names = ", ".join(f"cuda:{facts.ordinal} {facts.name}" for facts in seen) or "(none)"
    next_step = "next: choose the profile of a GPU in this machine, or --gpu host"
    if not 0 <= ordinal < len(seen):
        raise GpuError(f"'{gpu.name}' was asked for on cuda:{ordinal}, which is not in this "
                       f"machine\n  seen: {names}\n  {next_step}")
    facts = seen[ordinal]
    major, minor = facts.compute_capability
    if 10 * major + minor != gpu.compute_capability or (
        gpu.device_names and facts.name not in gpu.device_names
    ):
        raise GpuError(
            f"cuda:{ordinal} is {facts.name} (compute capability {major}.{minor}), but profile "
            f"'{gpu.name}' is {gpu.title} ({gpu.arch})\n  seen: {names}\n  {next_step}")
