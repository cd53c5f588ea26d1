"""Resolve `--gpu` to a device of this machine."""

from __future__ import annotations

from collections.abc import Sequence

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
        GpuError: If the name is unknown or that GPU is not in this machine; the text lists the GPUs
            of this machine.
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


def absent_gpu(name: str) -> GpuProfile | None:
    """The profile that `--gpu` names, if that GPU is not in this machine; else None.

    Raises:
        GpuError: If there is no such profile.
    """
    if name in ("auto", HOST):
        return None
    profile = profile_named(name)
    present = any(device in profile.device_names for device in detect_gpus())
    return None if present else profile


def select_device(name: str, ordinal: int | None) -> tuple[GpuProfile, int]:
    """Resolve `--gpu` and a CUDA device number.

    Args:
        name: As for `select_gpu`.
        ordinal: CUDA device number; None: the first device of that GPU model. The host takes any
            number: its "devices" are processes on the same cores.
    Raises:
        GpuError: If there is no such device, or if it is of another model than `name` says.
    """
    if ordinal is None:
        return select_gpu(name)
    present = detect_gpus()
    if name == HOST or (name == "auto" and not present):
        return profile_named(HOST), ordinal
    if ordinal >= len(present):
        raise GpuError(f"no CUDA device {ordinal} in this machine\n  here: {_listed(present)}")
    profile = profile_of_device(present[ordinal])
    if profile is None or name not in ("auto", profile.name):
        raise GpuError(
            f"CUDA device {ordinal} is no {name if name != 'auto' else 'GPU with a profile'}\n"
            f"  here: {_listed(present)}"
        )
    return profile, ordinal


def select_devices(name: str, chosen: Sequence[int] | None) -> dict[GpuProfile, list[int]]:
    """Resolve `--gpu` and `--devices`.

    Args:
        name: As for `select_gpu`; `auto` takes devices of every model.
        chosen: CUDA device numbers; None: all devices of the named GPU model.
    Returns:
        Device numbers by profile, in the order in which they were chosen.
    Raises:
        GpuError: If a device does not exist, has no profile, or is of another model than `name`
            says.
    """
    present = detect_gpus()
    if chosen is None:
        on_host = name == HOST or (name == "auto" and not present)
        chosen = [0] if on_host else [
            ordinal
            for ordinal, device in enumerate(present)
            if (profile := profile_of_device(device)) is not None
            and name in ("auto", profile.name)
        ]
        if not chosen:
            select_gpu(name)  # raises the error that says what is wrong
    found: dict[str, list[int]] = {}
    for ordinal in chosen:
        found.setdefault(select_device(name, ordinal)[0].name, []).append(ordinal)
    return {profile_named(profile): ordinals for profile, ordinals in found.items()}


def _listed(devices: list[str]) -> str:
    if not devices:
        return "no CUDA GPU (--gpu host works)"
    known = [(device, profile_of_device(device)) for device in devices]
    return ", ".join(f"{d} (--gpu {p.name})" if p else f"{d} (no profile)" for d, p in known)
