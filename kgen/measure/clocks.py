"""Read the state of a GPU from NVML; kgen never changes it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_SM, _MEMORY = 1, 2
_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
    0x100: "display clock setting",
}
_HARMLESS = {"idle", "application clocks setting", "display clock setting"}


@dataclass(frozen=True, slots=True)
class ClockState:
    """The state of a GPU at one moment.

    Attributes:
        sm_mhz: SM clock.
        memory_mhz: Memory clock.
        sm_max_mhz: Highest SM clock of the GPU.
        temperature_c: Temperature of the die, degrees Celsius.
        power_w: Board power.
        throttle: Reasons why the clocks are not higher; empty if there is none.
    """

    sm_mhz: int
    memory_mhz: int
    sm_max_mhz: int
    temperature_c: int
    power_w: float
    throttle: tuple[str, ...]

    @property
    def slowed_by(self) -> tuple[str, ...]:
        """The reasons in `throttle` that make times suspect: power, heat, hardware."""
        return tuple(reason for reason in self.throttle if reason not in _HARMLESS)

    @property
    def slowed(self) -> bool:
        """Whether power, heat or hardware limits reduce the clocks, so that times are suspect."""
        return bool(self.slowed_by)


def clocks(device: torch.device) -> ClockState | None:
    """Read a GPU's clocks, throttle reasons, temperature and power; None if NVML cannot read them.

    It takes a few hundred microseconds of host time: call it before or after measurements, not
    during them.
    """
    if device.type != "cuda":
        return None
    library = _nvml()
    if library is None:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return read_clocks(library, uuid)


def read_clocks(library: Any, uuid: str) -> ClockState | None:
    """Read the state of the GPU with a UUID through an initialised NVML library."""
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    handle = c_void_p()
    if library.nvmlDeviceGetHandleByUUID(name.encode(), byref(handle)):
        return None
    numbers: list[int] = []
    for question, *extra in (
        ("nvmlDeviceGetClockInfo", _SM),
        ("nvmlDeviceGetClockInfo", _MEMORY),
        ("nvmlDeviceGetMaxClockInfo", _SM),
        ("nvmlDeviceGetTemperature", 0),
        ("nvmlDeviceGetPowerUsage",),
    ):
        value = c_uint()
        if getattr(library, str(question))(handle, *extra, byref(value)):
            return None
        numbers.append(value.value)
    bits = c_ulonglong()
    if library.nvmlDeviceGetCurrentClocksThrottleReasons(handle, byref(bits)):
        return None
    reasons = tuple(text for bit, text in _REASONS.items() if bits.value & bit)
    sm, memory, sm_max, temperature, milliwatts = numbers
    return ClockState(sm, memory, sm_max, temperature, milliwatts / 1e3, reasons)


def driver_version() -> str:
    """Return the version of the GPU driver that NVML reports, or an empty text."""
    library = _nvml()
    text = ctypes.create_string_buffer(80)
    if library is None or library.nvmlSystemGetDriverVersion(text, c_uint(len(text))):
        return ""
    return text.value.decode(errors="replace")


@cache
def _nvml() -> Any:
    """Load and initialise NVML once per process; None on a machine without NVML."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None
