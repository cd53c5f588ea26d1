"""Resolve `--gpu` to a device of this machine."""

from __future__ import annotations

from kgen.catalogue import load_profiles, profile_named
from kgen.catalogue.gpus import profile_of_device
from kgen.errors import GpuError
from kgen.launch import detect_gpus
from kgen.model.gpu import GpuProfile

HOST = "host"


def select_gpu(name: str) -> tuple[GpuProfile, int]:
    """Resolve `auto`, `host` or a profile's name to a profile and a CUDA ordinal.

    `auto` is the first CUDA GPU that has a profile, else the host.

    Raises:
        GpuError: If the name is unknown or that GPU is not in this machine; lists what is.
    """
    if name == HOST:
        return profile_named(HOST), 0
    present = detect_gpus()
    if name == "auto":
        if not present:
            return profile_named(HOST), 0
        for ordinal, device in enumerate(present):
            profile = profile_of_device(device)
            if profile is not None:
                return profile, ordinal
        raise GpuError(
            f"no profile lists this machine's GPU: {_listed(present)}\n"
            f"  profiles: {', '.join(load_profiles())}\n"
            "  add search_spaces/gpus/<name>.yaml with the device's name under device_names, or "
            "tune with --gpu host"
        )
    profile = profile_named(name)
    for ordinal, device in enumerate(present):
        if device in profile.device_names:
            return profile, ordinal
    raise GpuError(
        f"no {profile.title} in this machine (--gpu {name})\n  here: {_listed(present)}\n"
        "  use --gpu auto for what is here; 'kgen doctor' shows why a GPU may not be seen"
    )


def _listed(devices: list[str]) -> str:
    if not devices:
        return "no CUDA GPU (--gpu host works)"
    known = [(device, profile_of_device(device)) for device in devices]
    return ", ".join(f"{d} (--gpu {p.name})" if p else f"{d} (no profile)" for d, p in known)
