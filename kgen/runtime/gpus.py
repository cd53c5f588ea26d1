"""Find the GPU whose dispatch table serves a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .errors import DispatchError
from .rows import DispatchRule, Gpu, Row


class Table(NamedTuple):
    """The rows that serve one device.

    Attributes:
        gpu: The GPU that the rows were measured on or predicted for; None if there is none.
        same_gpu: Whether the device is of that model.
        rows: The rows of that GPU.
        rules: Rules learnt on that GPU.
        facts: Hardware facts of the device itself.
        lent: Measured rows of other GPUs, whose configs may be adapted to a call; empty if the
            device has measured rows.
    """

    gpu: Gpu | None
    same_gpu: bool
    rows: tuple[Row, ...]
    rules: tuple[DispatchRule, ...]
    facts: Mapping[str, int]
    lent: tuple[Row, ...] = ()


def gpu_of(
    function: str, operator: str, gpus: Sequence[Gpu], device: torch.device | Gpu
) -> tuple[Gpu | None, bool, Mapping[str, int]]:
    """Find the GPU whose rows serve a device: the device's own model, else a similar GPU.

    A similar GPU has the same compute capability; among several, the one with the closest number of
    SMs serves.

    Args:
        function: Public function of the pass; for errors.
        operator: The operator; for errors.
        gpus: The GPUs that the operator was tuned for.
        device: The device of the call; a `Gpu` need not be in this machine.
    Returns:
        The GPU, or None; whether it is the device's own model; the facts of the device itself.
    Raises:
        DispatchError: If the library has no kernel for the device.
    """
    if (device.arch == "host") if isinstance(device, Gpu) else (device.type == "cpu"):
        host = next((gpu for gpu in gpus if gpu.arch == "host"), None)
        if host is None:
            tuned = ", ".join(gpu.name for gpu in gpus) or "nothing"
            raise DispatchError(
                f"{function}: this is a CPU tensor, but only {tuned} was tuned\n"
                f"  run: kgen tune --op {operator} --gpu host, or move the tensors"
            )
        return host, True, host.facts
    if isinstance(device, Gpu):
        names, facts = device.device_names, device.facts
    elif device.type != "cuda":
        raise DispatchError(f"{function}: tensors on {device} are not served; "
                            "move them to a CUDA GPU")
    else:
        # Importing compilers and the driver takes 10 ms; the CPU needs neither.
        from .device import gpu_facts

        names, facts = (torch.cuda.get_device_name(device),), gpu_facts(device)
    for gpu in gpus:
        if any(name in gpu.device_names for name in names):
            return gpu, True, facts
    similar = [gpu for gpu in gpus if gpu.compute_capability == facts["compute_capability"]]
    if similar:
        nearest = min(similar, key=lambda g: abs(g.facts["sm_count"] - facts["sm_count"]))
        return nearest, False, facts
    return None, False, facts
