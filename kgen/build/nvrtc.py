"""The default back end: NVRTC, in threads of this process.

NVRTC cannot be interrupted. A source that makes it run forever blocks one thread of the pool until
the process ends; whoever must survive that opens the compiler in a process that can be killed.
Nothing here depends on which process it is: an outcome is plain data, and the cache is shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kgen.build.base import CachingCompiler, Compiled, Failed, Unit
from kgen.build.resources import parse_resources
from kgen.errors import ToolchainError
from kgen.runtime import nvrtc
from kgen.runtime.cache import Cache


class NvrtcCompiler(CachingCompiler):
    """See `kgen.build.Compiler`."""

    def __init__(
        self, include_dirs: Sequence[Path], cache: Cache, jobs: int | None = None
    ) -> None:
        """Load NVRTC.

        Raises:
            ToolchainError: If it is missing; tells what to install.
        """
        super().__init__(include_dirs, cache, jobs)
        try:
            self._nvrtc = nvrtc.nvrtc()
            self._release = self._nvrtc.release
        except nvrtc.NvrtcError as error:
            raise ToolchainError(str(error)) from None

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
        start = time.perf_counter()
        try:
            cubin, log = self._nvrtc.compile_cubin(
                rendered.source, f"{rendered.name}.cu", unit.request.arch,
                [str(folder) for folder in self.include_dirs])
        except nvrtc.CompileError as error:
            return Failed(error.log, time.perf_counter() - start)
        except nvrtc.NvrtcError as error:
            raise ToolchainError(str(error)) from None
        return Compiled(cubin, parse_resources(log), time.perf_counter() - start)
