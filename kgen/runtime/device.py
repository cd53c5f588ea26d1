"""Load the kernel files of the library on a device: a GPU through the driver, or the CPU.

A shipped cubin is loaded as it is. If there is none, the shipped source is compiled once into the
user's cache: by NVRTC for a GPU, by a C++ compiler for the CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref, c_int
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import cuda
from .allocation import Allocate, allocator
from .integrity import checked_bytes, checked_cubin, digest_of, digest_of_files, listed_files
from .launcher import make_launcher

# The compilers and the CPU's modules are imported in functions: the first call of a shipped cubin
# on a GPU needs neither, and they take half of the import time.
if TYPE_CHECKING:
    from .host import HostFunction, HostModule

Launcher = Callable[..., None]  # (stream, grid_x, grid_y, grid_z, *kernel arguments)

_C_TYPES: dict[str, Callable[[Any], Any]] = {
    "p": ctypes.c_void_p, "q": ctypes.c_longlong, "f": ctypes.c_float,
}
# Hardware facts that plans use -> number of the driver's device attribute.
_ATTRIBUTES = {
    "sm_count": 16,
    "smem_per_block": 97,
    "smem_per_sm": 81,
    "regs_per_sm": 82,
    "max_threads_per_sm": 39,
    "max_blocks_per_sm": 106,
    "l2_bytes": 38,
    "max_threads_per_block": 1,
    "warp_size": 10,
}


def gpu_facts(device: torch.device) -> dict[str, int]:
    """Return the hardware facts of a GPU, by the names that launch plans use."""
    driver = cuda.driver()
    ordinal = _index(device)
    facts = driver.device(ordinal)
    handle = c_int()
    driver.call("cuDeviceGet", byref(handle), c_int(ordinal))
    values: dict[str, int] = {}
    for name, number in _ATTRIBUTES.items():
        value = c_int()
        driver.call("cuDeviceGetAttribute", byref(value), c_int(number), handle)
        values[name] = value.value
    major, minor = facts.compute_capability
    return {**values, "memory_bytes": facts.memory_bytes, "compute_capability": 10 * major + minor}


class KernelFile:
    """One kernel source of the library, loaded on one device."""

    def __init__(self, root: Path, folder: Path, stem: str, device: torch.device,
                 text: bytes | None = None) -> None:
        """Load the cubin for the device, or compile the source.

        Args:
            root: The library's folder; holds `_include`.
            folder: Holds `<stem>.cu` and its cubins.
            stem: Digest of the source.
            device: The device that will run the kernels.
            text: The source, if it was rendered now; otherwise it is read from the folder.
        Raises:
            IntegrityError: If a required file differs from the library's list of files.
            RuntimeError: If a source must be compiled and does not compile, or there is no
                compiler for it.
        """
        self.device = device
        self._host: HostModule | None = None
        self._cuda: cuda.CudaModule | None = None
        source = folder / f"{stem}.cu"
        if device.type == "cpu":
            from .host import HostModule

            self._host = HostModule(_host_module(root, source, text))
        else:
            image = _cubin(root, source, _index(device), text)
            self._cuda = cuda.CudaModule(image, _index(device), f"{folder.parent.name}/{stem}")

    def launcher(self, kernel: str, arguments: str, block: tuple[int, int, int],
                 smem: int, pdl: bool = False, coresident: int = 0) -> Launcher:
        """Prepare launches of a kernel.

        Args:
            kernel: Its name.
            arguments: One letter each: p (address), q (int64), f (float32).
            block: Threads in x, y, z.
            smem: Dynamic shared memory, bytes.
            pdl: Whether to use programmatic dependent launch; the CPU ignores it.
            coresident: Number of CTAs in the grid if they wait for each other at grid barriers,
                else 0. The CPU runs such CTAs in turns.
        Raises:
            CudaError: If the device does not have that much shared memory, or no room for all CTAs
                that wait for each other.
        """
        if self._cuda is not None:
            function = self._cuda.function(kernel)
            function.allow_smem(smem)
            if coresident:
                function.demand_room(coresident, block[0] * block[1] * block[2], smem)
            return make_launcher(function, arguments, block, smem, pdl, coresident > 0)
        assert self._host is not None
        return _host_launcher(self._host.function(kernel), arguments, block, smem)

    def scratch(self, elements: int, dtype: torch.dtype) -> Allocate:
        """Return an allocator of a workspace. Each call allocates a new one, unless it is empty."""
        allocate = allocator((elements,), (1,), dtype, self.device)
        if elements:
            return allocate
        empty = allocate()
        return lambda: empty


def _host_launcher(function: HostFunction, arguments: str, block: tuple[int, int, int],
                   smem: int) -> Launcher:
    types = [_C_TYPES[letter] for letter in arguments]

    def launch(stream: int, grid_x: int, grid_y: int, grid_z: int, *values: float) -> None:
        if grid_x and grid_y and grid_z:
            packed = [make(value) for make, value in zip(types, values, strict=True)]
            function.launch((grid_x, grid_y, grid_z), block, smem, packed)

    return launch


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _cubin(root: Path, source: Path, ordinal: int, text: bytes | None = None) -> bytes:
    major, minor = cuda.driver().device(ordinal).compute_capability
    arch = f"sm_{major}{minor}"
    for suffix in ("a", "f", ""):  # architecture-specific, family-specific, plain
        shipped = source.with_suffix(f".{arch}{suffix}.cubin")
        if shipped.exists():
            return checked_cubin(root, shipped)
    from . import nvrtc
    from .cache import Cache, CacheError

    if major >= 9:  # the kernel may use instructions of the architecture-specific target only
        arch += "a"
    compiler = nvrtc.nvrtc()
    cache = Cache()
    text = checked_bytes(root, source) if text is None else text
    key = digest_of([text, headers_digest(root).encode(), arch.encode(),
                     repr(nvrtc.FLAGS).encode(), repr(compiler.version).encode()])
    image = cache.get(key, ".cubin")
    if image is None:
        image, _ = compiler.compile_cubin(
            text.decode(), source.name, arch, include_dirs=[str(root / "_include")]
        )
        with suppress(CacheError):  # for example a full disk; the next process compiles again
            cache.put(key, ".cubin", image)
    return image


def _host_module(root: Path, source: Path, text: bytes | None) -> Path:
    """Compile a source for the CPU, or find it in the cache; return the shared object's path."""
    from . import host
    from .cache import Cache

    asked = os.environ.get("CXX")
    cxx = shutil.which(asked) if asked else shutil.which("g++") or shutil.which("clang++")
    if asked and not cxx:
        raise RuntimeError(f"CPU kernels need a C++17 compiler, and CXX={asked} names no program "
                           "on PATH\n  next: unset CXX, or set it to g++ or clang++, without "
                           "options")
    if not cxx:
        raise RuntimeError("CPU kernels need a C++17 compiler, and there is neither g++ nor "
                           "clang++ on PATH\n  next: install g++, or set CXX")
    include = root / "_include"
    version = _run([cxx, "--version"])
    common = digest_of([cxx.encode(), version.encode(), platform.machine().encode(),
                        headers_digest(root).encode()])
    cache = Cache()
    key = digest_of([common.encode(), checked_bytes(root, source) if text is None else text])
    if cache.get(key, ".so") is not None:
        return cache.path(key, ".so")
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        runtime = Path(folder, "runtime.o")
        content = cache.get(common, ".o")
        if content is None:
            _run(host.compile_runtime_command(cxx, include, runtime), runtime)
            cache.put(common, ".o", runtime.read_bytes())
        else:
            runtime.write_bytes(content)
        built = Path(folder, "kernel.so")
        if text is not None:
            source = Path(folder, source.name)
            source.write_bytes(text)
        _run(host.compile_module_command(cxx, source, include, runtime, built), built)
        return cache.put(key, ".so", built.read_bytes())


def headers_digest(root: Path) -> str:
    """Return a digest of every device header's path and checked content, part of a cache key."""
    return digest_of_files((name, checked_bytes(root, root / "_include" / name))
                           for name in listed_files(root / "_include"))


def _run(command: list[str], output: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as problem:
        raise RuntimeError(f"{command[0]} cannot be run: {problem.strerror}\n  next: unset CXX, or "
                           "set it to g++ or clang++") from None
    if done.returncode == 0 and output is not None and not output.is_file():
        raise RuntimeError(f"{command[0]} wrote no {output.name}, and reported no error\n"
                           "  next: set CXX to a C++17 compiler that works")
    if done.returncode != 0:
        said = f"\n{done.stderr.strip()}" if done.stderr.strip() else ""
        raise RuntimeError(f"{' '.join(command)} failed: exit status {done.returncode}{said}\n"
                           "  next: set CXX to a C++17 compiler that works")
    return done.stdout
