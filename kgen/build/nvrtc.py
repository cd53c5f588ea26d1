"""The default back end: NVRTC in child processes that can be killed.

A running NVRTC call cannot be interrupted, and its memory and its crashes are those of the process
that calls it. Each compiling thread therefore uses a child process (`kgen.build.children`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kgen.build.base import CachingCompiler, Compiled, Failed, Unit
from kgen.build.children import Children, Job
from kgen.build.limits import CompileLimits
from kgen.errors import ToolchainError
from kgen.runtime import nvrtc
from kgen.runtime.cache import Cache


class NvrtcCompiler(CachingCompiler):
    """See `kgen.build.Compiler`."""

    def __init__(
        self, include_dirs: Sequence[Path], cache: Cache, jobs: int | None = None,
        limits: CompileLimits | None = None,
    ) -> None:
        """Load NVRTC to read its version; the first compilation starts the children.

        Raises:
            ToolchainError: If it is missing; says what to install.
        """
        super().__init__(include_dirs, cache, jobs)
        try:
            library = nvrtc.nvrtc()
            self._release = library.release
        except nvrtc.NvrtcError as error:
            raise ToolchainError(str(error)) from None
        self.children = Children(library.path, limits or CompileLimits(), most_idle=self.jobs)

    @property
    def name(self) -> str:
        """See `Compiler`."""
        return "nvrtc"

    @property
    def version(self) -> str:
        """`13.0.88`."""
        return self._release

    def identity(self, arch: str) -> str:
        """See `Compiler`."""
        return f"nvrtc {self._release} {' '.join(nvrtc.FLAGS)} {arch}"

    def _compile(self, units: Sequence[Unit], jobs: int) -> list[Compiled | Failed]:
        if len(units) == 1:
            return [self._compile_unit(units[0])]
        with ThreadPoolExecutor(min(jobs, len(units))) as pool:
            try:
                return list(pool.map(self._compile_unit, units))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _compile_unit(self, unit: Unit) -> Compiled | Failed:
        rendered = unit.request.rendered
        return self.children.compile(Job(
            f"{rendered.name}.cu", rendered.source, unit.request.arch,
            tuple(str(folder) for folder in self.include_dirs)))

    def _stop(self) -> None:
        self.children.close()
