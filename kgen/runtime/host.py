"""Compile CUDA kernels for the host layer, and run them without a GPU.

A kernel written against `include/kgen/` is also C++17. Compiled with an ordinary compiler and
linked with the layer's runtime it becomes a *module*, a shared object whose kernels run on the CPU
with one fiber per CUDA thread; or a *sanitized executable*, which runs a job read from a file under
AddressSanitizer. The functions named `compile_*_command` return argument lists and run nothing.

    runtime.o    compile_runtime_command(cxx, include, runtime_o)               once
    variant.so   compile_module_command(cxx, cu, include, runtime_o, so)        per kernel
    HostModule(so).function("vector_add").launch((8,), (128,), 0, [a, b, c_longlong(n)])

Host timings are timings of the host; they say nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
Argument: TypeAlias = Any
"""A ctypes value: c_void_p, c_longlong, c_int, c_float, ... (ctypes has no public base class)."""

# Modules are cached and may travel, so no -march=native: the code must run on every CPU of its
# architecture. -ffp-contract=off then costs nothing on x86-64, which has no fused multiply-add to
# contract into, and makes the other architectures compute the same bits; kgen::fma is fused anyway.
# nvcc does not optimise by the types of pointers, and kernels rely on it (a row of floats read as
# vectors), hence -fno-strict-aliasing. -fno-math-errno lets sqrt be one instruction.
_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-pthread",
    # Static __shared__ arrays of templates must not be merged with another module's.
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",  # "#pragma unroll"
)
_RELEASE_FLAGS = ("-O2",)
# -O1 keeps the variables and lines of a report recognisable. Reports need functions and lines, -g1;
# where each variable lives at each instruction, -g, takes as long as the rest of the compilation
# does, and AddressSanitizer knows its stack variables without it. A misaligned vector access, which
# a GPU refuses and x86 does not, ends the program too.
_SANITIZE_FLAGS = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,alignment",
    "-fno-sanitize-recover=alignment",
)
_ERROR_BYTES = 4096
_RUNTIME_FILES = (
    "runtime.hpp", "fiber.hpp", "thread.hpp", "job.hpp", "block_memory.hpp", "worker.hpp",
    "worker_blocks.hpp", "worker_waits.hpp", "worker_copies.hpp", "worker_reports.hpp",
    "runtime.cpp", "main.cpp", "comparisons.cpp", "cluster.hpp", "cluster_turns.hpp",
    "deferred.hpp", "sanitizer.hpp",
)  # fmt: skip


class HostFault(RuntimeError):  # noqa: N818 - the term that GPUs use
    """A launch was refused, or a thread did something that is undefined on a GPU."""


class HostRefusal(HostFault):
    """A launch asked for more than a GPU has; no thread ran."""


def runtime_sources(include_dir: StrPath) -> tuple[Path, ...]:
    """Return the files from which the runtime objects are compiled, for a cache key."""
    host = Path(include_dir) / "kgen" / "host"
    return tuple(host / name for name in _RUNTIME_FILES)


def compile_runtime_command(
    cxx: str, include_dir: StrPath, out_object: StrPath, sanitize: bool = False
) -> list[str]:
    """Return the command that compiles the runtime; once per compiler, not per kernel.

    Args:
        cxx: A C++17 compiler that takes GCC's options: g++ or clang++.
        include_dir: The directory that holds `kgen/primitives/core.cuh`.
        out_object: The object file to write.
        sanitize: False: for `compile_module_command`. True: for `compile_sanitized_command`; the
            object then holds the stand-alone runner as well.
    """
    host = Path(include_dir) / "kgen" / "host"
    if sanitize:
        # One relocatable object from all sources.
        sources = [str(host / name) for name in ("runtime.cpp", "main.cpp", "comparisons.cpp")]
        kind = [*_SANITIZE_FLAGS, "-r", "-nostdlib", *sources]
    else:
        kind = [*_RELEASE_FLAGS, "-c", str(host / "runtime.cpp")]
    return [cxx, *_COMMON_FLAGS, *kind, "-o", str(out_object)]


def compile_module_command(
    cxx: str, source: StrPath, include_dir: StrPath, runtime_object: StrPath, out_so: StrPath
) -> list[str]:
    """Return the command that compiles one kernel source into a module for `HostModule`.

    Args:
        cxx: The compiler that made `runtime_object`.
        source: CUDA source; any suffix.
        include_dir: The directory that holds `kgen/primitives/core.cuh`.
        runtime_object: Made by `compile_runtime_command(..., sanitize=False)`.
        out_so: The shared object to write.
    """
    return [
        cxx,
        *_COMMON_FLAGS,
        *_RELEASE_FLAGS,
        "-shared",
        # Without symbols, which hold the source's name: equal code then gives equal modules.
        "-s",
        f"-I{include_dir}",
        *("-x", "c++", str(source), "-x", "none", str(runtime_object)),
        *("-o", str(out_so)),
    ]


def compile_sanitized_command(
    cxx: str,
    source: StrPath,
    include_dir: StrPath,
    runtime_object: StrPath,
    out_executable: StrPath,
) -> list[str]:
    """Return the command that compiles one kernel source into an executable for `run_job`.

    Args:
        cxx: The compiler that made `runtime_object`.
        source: CUDA source; any suffix.
        include_dir: The directory that holds `kgen/primitives/core.cuh`.
        runtime_object: Made by `compile_runtime_command(..., sanitize=True)`.
        out_executable: The executable to write.
    """
    return [
        cxx,
        *_COMMON_FLAGS,
        *_SANITIZE_FLAGS,
        f"-I{include_dir}",
        *("-x", "c++", str(source), "-x", "none", str(runtime_object)),
        # Where Linux randomises addresses by 32 bits, as on Ubuntu 24.04, a position-independent
        # executable may begin in the addresses of AddressSanitizer's allocator, and then hangs.
        "-no-pie",
        "-rdynamic",  # the runner finds kernels by name
        "-ldl",
        *("-o", str(out_executable)),
    ]


_BAD_LAUNCH = 1  # kgen::host::kBadLaunch
_MUST_WAIT, _END_AT_WAIT = 1, 2  # kgen::host::Pdl


class _Early(ctypes.Structure):
    """Mirror of `kgen::host::Early`."""

    _fields_ = [
        ("shown", ctypes.c_void_p), ("actual", ctypes.c_void_p), ("bytes", ctypes.c_uint64),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    """Mirror of `kgen::host::Launch`."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),  # 0; a module puts the size of a kernel's clusters here
        ("error", ctypes.c_char_p),
        ("error_bytes", ctypes.c_uint64),
        ("early", ctypes.POINTER(_Early)),
        ("early_count", ctypes.c_uint32),
        ("pdl", ctypes.c_uint32),
    ]


def padded_extents(name: str, extents: Sequence[int]) -> tuple[int, int, int]:
    """Pad to three extents with 1."""
    if not 1 <= len(extents) <= 3:
        raise ValueError(f"{name} has {len(extents)} extents, want 1 to 3")
    if any(not 0 <= extent < 2**32 for extent in extents):
        raise ValueError(f"{name} {tuple(extents)} does not fit in 32 bits")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


class HostModule:
    """A shared object made by `compile_module_command`; its code stays loaded."""

    def __init__(self, path: StrPath) -> None:
        """Load the module.

        Raises:
            OSError: If the file is missing or is no shared object for this machine.
        """
        self.path = Path(path).resolve()
        self._library = ctypes.CDLL(str(self.path))

    def function(self, name: str) -> HostFunction:
        """Return kernel `name`.

        Raises:
            HostFault: If the module exports no such kernel.
        """
        try:
            entry = self._library[f"{name}__host"]
        except AttributeError:
            raise HostFault(
                f"{self.path}: no kernel '{name}'\n"
                f"  a source exports one with KGEN_EXPORT({name}); at its end"
            ) from None
        return HostFunction(name, entry)

    def close(self) -> None:
        """Free the stacks of the fibers, up to 1024 for each OS thread that ran CTAs.

        On Linux before 6.13 each stack takes two of the process's 65530 memory mappings. A later
        launch allocates new stacks; a running launch on another thread keeps its own. The code,
        which takes a few mappings, stays loaded: unloading it would leave every `HostFunction` with
        a dangling address, and C++ libraries may refuse to be unloaded.
        """
        self._library.kgen_host_release_stacks()


class HostFunction:
    """One kernel of a module."""

    def __init__(self, name: str, entry: Any) -> None:
        """Wrap the exported entry point; use `HostModule.function`."""
        self.name = name
        self._entry = entry
        self._entry.argtypes = [ctypes.POINTER(_Launch), ctypes.POINTER(ctypes.c_void_p)]
        self._entry.restype = ctypes.c_int

    def parameter_bytes(self) -> tuple[int, ...]:
        """Sizes of the kernel's parameters, in order."""
        listed = ctypes.create_string_buffer(_ERROR_BYTES)
        asked = _Launch(error=ctypes.cast(listed, ctypes.c_char_p), error_bytes=_ERROR_BYTES)
        self._entry(ctypes.byref(asked), None)
        return tuple(map(int, listed.value.split()))

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        smem_bytes: int,
        args: Sequence[Argument],
        seed: int = 0,
        threads: int = 0,
        pdl: bool = False,
        early: Sequence[tuple[int, int, int]] = (),
        end_at_wait: bool = False,
    ) -> None:
        """Run the kernel to its end. The interpreter lock is released meanwhile.

        Args:
            grid: Blocks in x, y, z; one to three extents.
            block: Threads in x, y, z; one to three extents, at most 1024 threads.
            smem_bytes: Dynamic shared memory of a block; filled with 0xFF (NaN) before each block.
            args: One ctypes value per kernel parameter, of exactly the parameter's type.
            seed: 0 starts the threads of a block in order; any other value shuffles them, at the
                start and again at each barrier and exchange, the same way every time.
            threads: OS threads that share the blocks; 0 uses all cores.
            pdl: Whether the launch uses programmatic dependent launch: a block in which no thread
                calls `griddepcontrol_wait` is then a fault.
            early: Memory that the kernel may use only after `griddepcontrol_wait`: the address in
                `args`, the address to which the wait changes it, and the size in bytes.
            end_at_wait: Whether each thread ends at its `griddepcontrol_wait`. The launch then runs
                only the part of the kernel that may overlap earlier kernels, and reports no fault.

        Raises:
            HostFault: If the launch is refused (limits) or a thread did something undefined. The
                buffers are then in an unspecified state.
        """
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        launch = _Launch(
            grid=padded_extents("grid", grid),
            block=padded_extents("block", block),
            smem_bytes=smem_bytes,
            seed=seed,
            threads=threads,
            reserved=0,
            error=ctypes.cast(error, ctypes.c_char_p),
            error_bytes=_ERROR_BYTES,
            early=(_Early * len(early))(*(_Early(*one) for one in early)),
            early_count=len(early),
            pdl=_END_AT_WAIT if end_at_wait else _MUST_WAIT if pdl else 0,
        )
        values = list(args)  # keeps the storage alive during the call
        addresses = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        status = self._entry(ctypes.byref(launch), addresses)
        if status != 0:
            kind = HostRefusal if status == _BAD_LAUNCH else HostFault
            raise kind(f"{self.name}: {error.value.decode(errors='replace')}")
