"""Compile rendered sources to loadable modules: several back ends, one interface, one cache.

`nvrtc` (default) compiles in child processes, `nvcc` through ninja, `host` with the C++ compiler
for the host layer, and `host-asan` likewise with AddressSanitizer. All back ends limit the time and
memory of a compilation (`CompileLimits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgen.build.base import CachingCompiler, Compiler, Outcome
from kgen.build.host import HostCompiler
from kgen.build.limits import CompileLimits
from kgen.build.nvcc import NvccCompiler
from kgen.build.nvrtc import NvrtcCompiler
from kgen.build.resources import parse_remarks, parse_resources
from kgen.errors import StorageError, ToolchainError, suggest
from kgen.runtime.cache import Cache, CacheError

COMPILERS = ("nvrtc", "nvcc", "host", "host-asan")

__all__ = [
    "COMPILERS", "CachingCompiler", "CompileLimits", "Compiler", "HostCompiler", "NvccCompiler",
    "NvrtcCompiler", "Outcome", "open_compiler", "parse_remarks", "parse_resources",
]


def open_compiler(
    name: str, include_dirs: Sequence[str | Path], cache: Cache | None = None,
    jobs: int | None = None, limits: CompileLimits | None = None,
) -> Compiler:
    """Find a compiler and open it.

    Args:
        name: One of `COMPILERS`.
        include_dirs: Searched for `kgen/primitives/core.cuh` and other included headers.
        cache: Default: the user's (`KGEN_CACHE_DIR`).
        jobs: Concurrent compilations; default: the number of cores that this process may use.
        limits: Limits of time and memory; a compilation beyond them is killed and fails.
    Raises:
        ToolchainError: If the name is unknown, or a tool is missing; the text says what to install.
        StorageError: If the cache directory cannot be used.
    """
    try:
        store = Cache() if cache is None else cache
    except CacheError as error:
        raise StorageError(str(error)) from None
    folders = tuple(Path(folder).resolve() for folder in include_dirs)
    if name == "nvrtc":
        return NvrtcCompiler(folders, store, jobs, limits)
    if name == "nvcc":
        return NvccCompiler(folders, store, jobs, limits)
    if name in ("host", "host-asan"):
        return HostCompiler(folders, store, jobs, limits, sanitize=name == "host-asan")
    raise ToolchainError(f"unknown compiler '{name}'\n  {suggest(name, COMPILERS)}")
