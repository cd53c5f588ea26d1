"""The host back end: compiles for the host layer with the C++ compiler, through ninja.

The runtime of the host layer is compiled once per compiler, flags and content, into the same cache.
A kernel is then compiled and linked with the runtime into one shared object (or, sanitized, into
one executable). A sanitized build also watches comparisons, if GCC compiles it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from kgen.build.base import CachingCompiler, Compiled, Failed, Unit
from kgen.build.comparisons import WATCH_FLAGS, line_finder
from kgen.build.limits import CompileLimits
from kgen.build.ninja import Command, Done, Ninja
from kgen.errors import StorageError, ToolchainError
from kgen.model.digest import digest_of_text
from kgen.model.spread_source import SPREAD, in_source, watched, with_source
from kgen.model.whole_source import whole_source
from kgen.runtime.cache import Cache, CacheError
from kgen.runtime.host import (
    compile_module_command,
    compile_runtime_command,
    compile_sanitized_command,
    runtime_sources,
)

ARCH = "host"
# Least limits for compiling the runtime; the limits for kernels may be too tight for it.
_RUNTIME_LIMITS = CompileLimits(timeout_s=600.0, memory_bytes=4 << 30)


class HostCompiler(CachingCompiler):
    """See `kgen.build.Compiler`; builds for the architecture `host` only."""

    def __init__(
        self, include_dirs: Sequence[Path], cache: Cache, jobs: int | None = None,
        limits: CompileLimits | None = None, sanitize: bool = False,
    ) -> None:
        """Find the C++ compiler ($CXX, else g++, else clang++), ninja and timeout(1).

        Args:
            include_dirs: The first folder that holds `kgen/primitives/core.cuh` is used.
            cache: The cache for results.
            jobs: Concurrent compilations.
            limits: The limits of each compilation.
            sanitize: Build executables for `kgen.launch.host_jobs.run_job` (kind `exe`) instead of
                modules (kind `so`).
        Raises:
            ToolchainError: If a tool or the host layer is missing.
        """
        super().__init__(include_dirs, cache, jobs)
        self.kind, self.suffix = ("exe", ".exe") if sanitize else ("so", ".so")
        self._sanitize = sanitize
        self._ninja = Ninja(limits or CompileLimits())
        self._cxx = find_cxx()
        self._version = _version(self._cxx)
        self._extra = _pattern_flags(self._cxx)
        self._watches = sanitize and line_finder(self._cxx) != ""
        if self._watches:
            self._extra += WATCH_FLAGS
        self._include = _layer_folder(self.include_dirs)
        self._lock_runtime = threading.Lock()

    @property
    def name(self) -> str:
        """See `Compiler`."""
        return "host-asan" if self._sanitize else "host"

    @property
    def version(self) -> str:
        """First line of the compiler's --version."""
        return self._version

    def identity(self, arch: str) -> str:
        """See `Compiler`."""
        spread = SPREAD if self._watches else ""
        return f"{self.name} {self._version} {self._runtime_key()} {spread} " + " ".join(
            self._module_command("s", "i", "r", "o")[1:])

    def _compile(self, units: Sequence[Unit], jobs: int) -> list[Compiled | Failed]:
        for unit in units:
            if unit.request.arch != ARCH:
                raise ToolchainError(f"compiler '{self.name}' builds for '{ARCH}' only, not for "
                                     f"'{unit.request.arch}'\n  next: use nvrtc or nvcc for a GPU")
        runtime = self._runtime()
        with tempfile.TemporaryDirectory(prefix="kgen-host-") as name:
            folder = Path(name)
            (folder / "runtime.o").write_bytes(runtime)
            commands = []
            for unit in units:
                source = self._source(unit)
                (folder / f"{unit.key}.cu").write_text(watched(source) if self._watches else source)
                output = f"{unit.key}{self.suffix}"
                commands.append(Command(tuple(self._module_command(
                    f"{unit.key}.cu", str(self._include), "runtime.o", output)), output))
            ends = self._ninja.run(commands, folder, jobs)
            return [self._end(unit, folder, done) for unit, done in zip(units, ends, strict=True)]

    def _end(self, unit: Unit, folder: Path, done: Done) -> Compiled | Failed:
        """What has become of a unit, from the files in the folder of its compilation."""
        source = self._source(unit)
        if done.error:
            message = f"{self._cxx}: {done.error}\n{done.log}".strip()
            if self._watches:
                message = in_source(message, f"{unit.key}.cu", source)
            return Failed(message, done.seconds)
        content = (folder / f"{unit.key}{self.suffix}").read_bytes()
        if self._watches:
            content = with_source(content, source)
        return Compiled(content, (), done.seconds)

    def _source(self, unit: Unit) -> str:
        """The source to compile; with its headers if comparisons are watched."""
        source = unit.request.rendered.source
        return whole_source(source, self._include) if self._watches else source

    def _stop(self) -> None:
        self._ninja.close()

    def _module_command(self, source: str, include: str, runtime: str, output: str) -> list[str]:
        make = compile_sanitized_command if self._sanitize else compile_module_command
        cxx, *rest = make(self._cxx, source, include, runtime, output)
        return [cxx, *rest, *self._extra]

    def _runtime_key(self) -> str:
        """Digest of the compiler, its flags and the runtime's current sources."""
        flags = compile_runtime_command(self._cxx, "include", "out", sanitize=self._sanitize)[1:]
        texts = [hashlib.sha256(path.read_bytes()).hexdigest()
                 for path in runtime_sources(self._include)]
        return digest_of_text(self._version, *flags, *texts)

    def _runtime(self) -> bytes:
        """Return the object file of the runtime; the build of the first kernel compiles it."""
        key = self._runtime_key()
        with self._lock_runtime:
            cached = self.cache.get(key, ".o")
            if cached is not None:
                return cached
            with tempfile.TemporaryDirectory(prefix="kgen-host-") as name:
                command = Command(tuple(compile_runtime_command(
                    self._cxx, self._include, "runtime.o", sanitize=self._sanitize)), "runtime.o")
                done = self._ninja.run([command], Path(name), 1, _RUNTIME_LIMITS)[0]
                if done.error:
                    raise ToolchainError(f"the host layer does not compile with {self._cxx}: "
                                         f"{done.error}\n{done.log}".rstrip()
                                         + f"\n  next: {_set_cxx()}")
                content = Path(name, "runtime.o").read_bytes()
            try:
                self.cache.put(key, ".o", content)
            except CacheError as error:
                raise StorageError(str(error)) from None
            return content


def find_cxx() -> str:
    """Return the C++ compiler's path: $CXX, else g++, else clang++.

    Raises:
        ToolchainError: If there is none.
    """
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "clang++"]:
        if found := shutil.which(name):
            return found
    if asked:
        options = len(asked.split()) > 1 and shutil.which(asked.split()[0]) is not None
        raise ToolchainError(
            f"no C++ compiler: CXX={asked} names no program on PATH\n  next: "
            + (f"set CXX={asked.split()[0]}, without options" if options else
               "unset CXX, or set it to g++ or clang++, or to the path of one"))
    raise ToolchainError(
        "no C++ compiler: neither g++ nor clang++ is on PATH\n"
        "  next: install g++ (Debian, Ubuntu: apt-get install g++), or set CXX to a program")


def _set_cxx() -> str:
    """The next step of a message about a compiler that does not work."""
    return ("unset CXX, or set it to g++ or clang++" if os.environ.get("CXX")
            else "install it again, or set CXX to another compiler")


@lru_cache
def _pattern_flags(cxx: str) -> tuple[str, ...]:
    """Flags that fill uninitialised variables with a pattern, if the compiler has them.

    Without them an uninitialised accumulator is often 0, which hides the fault. g++ has the flag
    from version 12 on, clang++ from version 8 on.
    """
    flag = "-ftrivial-auto-var-init=pattern"
    done = subprocess.run([cxx, flag, "-x", "c++", "-fsyntax-only", os.devnull],
                          capture_output=True, check=False)
    return (flag,) if done.returncode == 0 else ()


def _version(cxx: str) -> str:
    command = f"{'CXX=' if os.environ.get('CXX') else ''}{cxx}: `{cxx} --version`"
    try:
        done = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False,
                              errors="replace", stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "does not end"
        raise ToolchainError(f"{command}: {why}\n  next: {_set_cxx()}") from None
    if done.returncode != 0 or not done.stdout.strip():
        said = f"\n{done.stderr.strip()}" if done.stderr.strip() else ""
        raise ToolchainError(f"{command}: exit status {done.returncode}, and no version{said}\n"
                             f"  next: {_set_cxx()}")
    return done.stdout.splitlines()[0].strip()


def _layer_folder(include_dirs: Sequence[Path]) -> Path:
    for folder in include_dirs:
        if all(path.is_file() for path in runtime_sources(folder)):
            return folder
    searched = ", ".join(map(str, include_dirs)) or "(none)"
    raise ToolchainError(f"the host layer (kgen/host/) is in none of the include directories\n"
                         f"  searched: {searched}")
