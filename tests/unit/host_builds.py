"""Build kernels for the host layer, without warnings, once for all tests of a process."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build.comparisons import line_finder
from kgen.runtime import host
from kgen.runtime.host import HostFunction, HostModule

KERNELS = Path(__file__).resolve().parent / "host_kernels"
CXX = os.environ.get("CXX", "g++")

needs_cxx = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"no C++ compiler {CXX}")

needs_line_finder = pytest.mark.skipif(
    shutil.which(CXX) is None or not line_finder(CXX),
    reason=f"no comparisons are watched without g++ and addr2line; the compiler is {CXX}",
)


def run_command(command: Sequence[str]) -> None:
    """Run a compiler, which must succeed without a warning."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    assert "warning" not in done.stderr, done.stderr


class Builds:
    """Builds the runtime of the host layer and each kernel file, at most once per kind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.modules: dict[str, HostModule] = {}
        self.executables: dict[str, Path] = {}

    @cached_property
    def runtime(self) -> Path:
        """The object file of the runtime."""
        out = self.directory / "runtime.o"
        run_command(host.compile_runtime_command(CXX, include_dir(), out))
        return out

    @cached_property
    def sanitized_runtime(self) -> Path:
        """The object file of the runtime for sanitized executables."""
        out = self.directory / "sanitized.o"
        run_command(host.compile_runtime_command(CXX, include_dir(), out, sanitize=True))
        return out

    def shared_object(self, source: Path) -> Path:
        """Compile any source; a later source of the same name replaces an earlier one."""
        out = self.directory / f"{source.stem}.so"
        run_command(host.compile_module_command(CXX, source, include_dir(), self.runtime, out))
        return out

    def module(self, stem: str) -> HostModule:
        """Load a file of `host_kernels/`."""
        if stem not in self.modules:
            self.modules[stem] = HostModule(self.shared_object(KERNELS / f"{stem}.cu"))
        return self.modules[stem]

    def kernel(self, stem: str, name: str) -> HostFunction:
        """A kernel of a file of `host_kernels/`."""
        return self.module(stem).function(name)

    def executable(self, stem: str) -> Path:
        """A file of `host_kernels/` as an executable with AddressSanitizer."""
        if stem not in self.executables:
            source, out = KERNELS / f"{stem}.cu", self.directory / stem
            runtime = self.sanitized_runtime
            run_command(
                host.compile_sanitized_command(CXX, source, include_dir(), runtime, out)
            )
            self.executables[stem] = out
        return self.executables[stem]


@lru_cache
def host_builds() -> Builds:
    """The builds of this process, in a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="kgen-test-builds-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Builds(Path(folder))
