"""Compile CUDA source to a cubin in this process with NVRTC. Needs no GPU, driver or C++ compiler.

NVRTC is a shared library that comes with every CUDA build of PyTorch. It runs with the GIL
released, and threads may compile at the same time. A compilation cannot be interrupted: one that
never finishes stops only with its process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cached_property
from pathlib import Path
from typing import Any

FLAGS = ("--std=c++17", "--ptxas-options=-v")
"""Flags of every compilation besides architecture and include paths. There is no fast math: a
kernel names the approximations that it uses."""

# Out of memory, compilation failed, internal error: errors of this source, not of the installation.
_SOURCE_FAILED = (1, 6, 11)
_BUILTINS_FAILED = 7
# Names to load through the dynamic linker if no file is found; newest first.
_LINKER_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*")
_RELEASE = re.compile(r"Cuda compilation tools, release [\d.]+, V([\d.]+)")


class NvrtcError(RuntimeError):
    """NVRTC is missing, too old for an architecture, or broken."""


class CompileError(RuntimeError):
    """The source does not compile.

    Attributes:
        log: The compiler's messages.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def find() -> str | None:
    """Return the NVRTC to use, or None.

    Searched in this order: the `nvidia` packages of the running environment, torch's library
    folder, $CUDA_HOME (else /usr/local/cuda), the dynamic linker's path.
    """
    for folder in _folders():
        names = sorted(p for p in folder.glob("libnvrtc.so*") if _LIBRARY.fullmatch(p.name))
        if names:
            return str(names[-1])
    for name in _LINKER_NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def _folders() -> Iterator[Path]:
    for root in _package_folders("nvidia"):
        # Packages of CUDA 13 and later install into cu13, those of CUDA 12 into cuda_nvrtc.
        preferred = [root / "cu13" / "lib", root / "cuda_nvrtc" / "lib"]
        yield from preferred
        yield from (f for f in sorted(root.glob("*/lib"), reverse=True) if f not in preferred)
    for root in _package_folders("torch"):
        yield root / "lib"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    yield Path(home) / "lib64"


def _package_folders(name: str) -> list[Path]:
    """Folders of a package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


class Nvrtc:
    """One loaded NVRTC.

    Attributes:
        path: The path from which it was loaded.
        version: (13, 0).
        architectures: Compute capabilities for which it can compile, times ten: (75, 80, 90, ...).
    """

    def __init__(self, path: str) -> None:
        """Load the library.

        Raises:
            NvrtcError: If it does not load.
        """
        self.path = path
        try:
            # NVRTC opens its builtins by bare file name. The linker finds them in a pip package's
            # folder only if they are already loaded.
            for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins))
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NvrtcError(f"{path} does not load: {error}") from None
        self._library.nvrtcGetErrorString.restype = c_char_p
        major, minor, count = c_int(), c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self.version = (major.value, minor.value)
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        numbers = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        self.architectures: tuple[int, ...] = tuple(numbers)

    @cached_property
    def release(self) -> str:
        """The full version, `13.0.88`, read from generated PTX; no function returns it."""
        program = _Program(self, "", "release.cu")
        with program:
            program.compile([])
            size = c_size_t()
            self._call("nvrtcGetPTXSize", program.handle, byref(size))
            text = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetPTX", program.handle, text)
        found = _RELEASE.search(text.value.decode(errors="replace"))
        return found.group(1) if found else ".".join(map(str, self.version))

    def check_arch(self, arch: str) -> None:
        """Check that NVRTC can compile for an architecture such as `sm_90a`.

        Raises:
            NvrtcError: If it cannot; lists the supported architectures.
        """
        number = re.fullmatch(r"sm_(\d+)[af]?", arch)
        if not number or int(number.group(1)) not in self.architectures:
            known = ", ".join(f"sm_{n}" for n in self.architectures)
            raise NvrtcError(
                f"NVRTC {self.release} ({self.path}) cannot compile for '{arch}'\n"
                f"  known: {known}\n"
                "  next: install a newer (or, for an old GPU, older) nvidia-cuda-nvrtc")

    def compile_cubin(
        self, source: str, name: str, arch: str, include_dirs: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> tuple[bytes, str]:
        """Compile a source for one architecture.

        Args:
            source: CUDA C++17.
            name: Name of the source in messages.
            arch: `sm_90a`.
            include_dirs: Folders that are searched for headers.
            options: Options in addition to `FLAGS`.
        Returns:
            The cubin, and the log with each kernel's resources.
        Raises:
            CompileError: If the source does not compile.
            NvrtcError: If the architecture is unknown to this NVRTC, or the installation broken.
        """
        self.check_arch(arch)
        program = _Program(self, source, name)
        with program:
            log = program.compile([
                *FLAGS, f"--gpu-architecture={arch}",
                *(f"--include-path={folder}" for folder in include_dirs), *options,
            ])
            size = c_size_t()
            self._call("nvrtcGetCUBINSize", program.handle, byref(size))
            cubin = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetCUBIN", program.handle, cubin)
            return cubin.raw, log

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            raise NvrtcError(f"{name}: {self.error_text(code)}")

    def error_text(self, code: int) -> str:
        """Return NVRTC's name for a result code."""
        text: bytes = self._library.nvrtcGetErrorString(c_int(code))
        return text.decode()


class _Program:
    """An nvrtcProgram; destroyed at the end of the `with` block."""

    def __init__(self, nvrtc: Nvrtc, source: str, name: str) -> None:
        self.nvrtc = nvrtc
        self.name = name
        self.handle = c_void_p()
        nvrtc._call("nvrtcCreateProgram", byref(self.handle), c_char_p(source.encode()),
                    c_char_p(name.encode()), c_int(0), None, None)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.nvrtc._call("nvrtcDestroyProgram", byref(self.handle))

    def compile(self, options: Sequence[str]) -> str:
        """Compile and return the log."""
        array = (c_char_p * max(len(options), 1))(*(o.encode() for o in options))
        code = self.nvrtc._library.nvrtcCompileProgram(self.handle, c_int(len(options)), array)
        size = c_size_t()
        self.nvrtc._call("nvrtcGetProgramLogSize", self.handle, byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        self.nvrtc._call("nvrtcGetProgramLog", self.handle, text)
        log = text.value.decode(errors="replace").strip()
        if code in _SOURCE_FAILED:
            if "error" not in log and "fatal" not in log:
                # The message of ptxas does not reach the log in this case.
                log = (f"{self.nvrtc.error_text(code)} without a message, as for a kernel with "
                       f"more than 48 KB of static shared memory\n{log}").strip()
            raise CompileError(f"{self.name} does not compile:\n{log}", log)
        if code != 0:
            hint = ""
            if code == _BUILTINS_FAILED:
                hint = "\n  next: install libnvrtc-builtins of the same version beside libnvrtc"
            raise NvrtcError(f"{self.nvrtc.path}: {self.nvrtc.error_text(code)}: {log}{hint}")
        return log


_loaded: Nvrtc | None = None
_lock = threading.Lock()


def nvrtc() -> Nvrtc:
    """Return the process's NVRTC, found and loaded at the first call.

    Raises:
        NvrtcError: If there is none; says what to install.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = find()
            if path is None:
                raise NvrtcError(
                    "NVRTC (libnvrtc.so) is missing; looked in the nvidia packages and torch of "
                    "this environment, in CUDA_HOME and on the dynamic linker's path\n"
                    "  next: pip install nvidia-cuda-nvrtc, or install a CUDA build of torch")
            _loaded = Nvrtc(path)
        return _loaded


def compile_cubin(
    source: str, name: str, arch: str, include_dirs: Sequence[str] = (),
    options: Sequence[str] = (),
) -> tuple[bytes, str]:
    """Compile with the process's NVRTC; see `Nvrtc.compile_cubin`."""
    return nvrtc().compile_cubin(source, name, arch, include_dirs, options)
