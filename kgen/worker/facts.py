"""Facts about the worker's machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from kgen.measure.clocks import ClockState, driver_version
from kgen.model.digest import digest_of_text
from kgen.runtime import extension
from kgen.runtime.cache import Cache

_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")


def is_out_of_memory(problem: Exception) -> bool:
    """Whether an error of torch means out of memory; on the CPU only its text says so.

    The error for a tensor of more than 2**63 bytes counts as well.
    """
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(problem, kinds) or any(part in str(problem) for part in _OUT_OF_MEMORY)


def total_memory(device: torch.device) -> int:
    """Total bytes of the device's memory.

    Memory that torch's allocator caches counts, because torch releases it before an allocation
    fails.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def extension_folder() -> Path:
    """The folder of this version's C extensions."""
    folder_of_sources = Path(extension.__file__).parent
    sources = "".join((folder_of_sources / f"{name}.c").read_text(encoding="utf-8")
                      for name in extension.EXTENSIONS)
    folder = Cache().directory / "launcher" / digest_of_text(sources)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clock_texts(state: ClockState | None) -> dict[str, str]:
    """The state of the clocks, as texts for a report; empty where it cannot be read."""
    if state is None:
        return {}
    return {
        "sm_mhz": f"{state.sm_mhz} of {state.sm_max_mhz}",
        "memory_mhz": str(state.memory_mhz),
        "temperature_c": str(state.temperature_c),
        "power_w": f"{state.power_w:.0f}",
        "throttle": ", ".join(state.throttle) or "none",
    }


def device_facts(device: torch.device) -> dict[str, str]:
    """The facts about the machine for a report."""
    if device.type != "cuda":
        return {
            "device": platform.processor() or platform.machine(),
            "threads": str(torch.get_num_threads()),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "sms": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        "driver": driver_version(),
    }
