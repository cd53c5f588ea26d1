"""Check the tools, packages and GPUs that a tune needs on this machine.

This module does not import torch or Optuna: it reads their versions from package metadata, so that
the check is fast and works even if one of them is broken.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import load_profiles
from kgen.catalogue.gpus import profile_of_device
from kgen.errors import KgenError
from kgen.launch import detect_gpus
from kgen.runtime.cache import Cache, CacheError

PACKAGES = ("torch", "optuna", "jinja2", "pyyaml", "ninja", "rich")
# Purpose of each compiler; a tune needs one for its kind of device.
COMPILER_KINDS = {
    "nvrtc": "CUDA GPUs (default)",
    "nvcc": "CUDA GPUs (--compiler nvcc)",
    "host": "--gpu host",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        what: The tool, package or device.
        ok: Whether the item can be used.
        needed: Whether kgen cannot work without the item.
        detail: Version or path; or the problem and the next step.
    """

    what: str
    ok: bool
    needed: bool
    detail: str


def examine() -> Iterator[Finding]:
    """Yield findings in the order in which a tune needs the items."""
    yield Finding(
        "python",
        sys.version_info >= (3, 11),
        True,
        f"{platform.python_version()} ({sys.executable})",
    )
    for package in PACKAGES:
        yield _package(package)
    for name, purpose in COMPILER_KINDS.items():
        yield _guarded(f"compiler {name}", False, partial(_compiler, name, purpose))
    yield _gpus()
    yield _cache()
    yield _guarded("device library", True, _library)


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, True, f"missing; pip install {name}")


def _guarded(what: str, needed: bool, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, needed, look())
    except (KgenError, OSError) as problem:
        return Finding(what, False, needed, str(problem))


def _compiler(name: str, purpose: str) -> str:
    return f"{open_compiler(name, [include_dir()]).version}, for {purpose}"


def _gpus() -> Finding:
    seen = detect_gpus()
    if not seen:
        return Finding(
            "CUDA GPUs", True, False, "none seen; 'kgen tune --gpu host' runs kernels on the CPU"
        )
    described = []
    for ordinal, name in enumerate(seen):
        profile = profile_of_device(name)
        known = (
            f"--gpu {profile.name}"
            if profile
            else (
                "no profile: add search_spaces/gpus/<name>.yaml with this name under device_names"
            )
        )
        described.append(f"cuda:{ordinal} {name} ({known})")
    return Finding("CUDA GPUs", True, False, "; ".join(described))


def _cache() -> Finding:
    try:
        cache = Cache()
    except CacheError as problem:
        return Finding("cache", False, True, f"{problem}\n  next: set KGEN_CACHE_DIR")
    files = [f for f in Path(cache.directory).rglob("*") if f.is_file()]
    megabytes = sum(f.stat().st_size for f in files) / 1e6
    return Finding(
        "cache",
        True,
        True,
        f"{cache.directory}, {len(files)} files, {megabytes:.1f} MB (safe to delete)",
    )


def _library() -> str:
    headers = sorted(include_dir().rglob("*.cuh"))
    if not headers:
        raise OSError(f"{include_dir()} holds no headers; reinstall kgen")
    return f"{include_dir()}, {len(headers)} headers, {len(load_profiles())} GPU profiles"
