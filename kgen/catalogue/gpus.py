"""GPU profiles from `search_spaces/gpus/<name>.yaml`."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from kgen.assets import gpu_dir
from kgen.catalogue.yaml_tree import Tree, read_yaml
from kgen.errors import GpuError, SpaceError, suggest
from kgen.model.gpu import GpuProfile

_NUMBER_FIELDS = {"bandwidth_gbps", "fp32_tflops", "tf32_tflops", "half_tflops"}


@cache
def load_profiles() -> dict[str, GpuProfile]:
    """All profiles by name, sorted.

    Raises:
        SpaceError: If a file is malformed.
    """
    files = sorted(gpu_dir().glob("*.yaml"))
    if not files:
        raise SpaceError(f"{gpu_dir()}: no GPU profiles; the installation is incomplete")
    return {file.stem: _profile(file) for file in files}


def profile_named(name: str) -> GpuProfile:
    """Look up a profile.

    Raises:
        GpuError: If there is no profile of that name; the text lists all profiles.
    """
    profiles = load_profiles()
    if name not in profiles:
        raise GpuError(f"unknown GPU '{name}'\n  {suggest(name, ['auto', *profiles])}")
    return profiles[name]


def profile_of_device(device_name: str) -> GpuProfile | None:
    """The profile that lists a driver's device name, or None."""
    for profile in load_profiles().values():
        if device_name in profile.device_names:
            return profile
    return None


def _profile(path: Path) -> GpuProfile:
    tree = read_yaml(path)
    declared = [f for f in fields(GpuProfile) if f.name != "name"]
    entries = tree.fields(
        required=[f.name for f in declared if f.default is MISSING],
        optional=[f.name for f in declared if f.default is not MISSING],
    )
    return GpuProfile(name=path.stem, **{key: _value(key, tree) for key, tree in entries.items()})


def _value(key: str, tree: Tree) -> Any:
    if key == "device_names":
        return tuple(item.text() for item in tree.sequence())
    if key in ("title", "arch"):
        return tree.text()
    value = tree.scalar()
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise tree.fail(f"'{key}' must be a number >= 0, not '{tree.text()}'")
    if key in _NUMBER_FIELDS:
        return float(value)
    if not isinstance(value, int):
        raise tree.fail(f"'{key}' must be a whole number, not '{tree.text()}'")
    return value
