"""The nvcc back end, through ninja."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kgen.build.base import CachingCompiler, Compiled, Failed, Unit
from kgen.build.limits import CompileLimits
from kgen.build.ninja import Command, Ninja
from kgen.build.resources import parse_remarks, parse_resources
from kgen.errors import ToolchainError
from kgen.runtime.cache import Cache

FLAGS = ("-cubin", "-std=c++17", "-Xptxas", "-v")
_UNSUPPORTED = re.compile(r"nvcc fatal\s+: (Unsupported gpu architecture|"
                          r"Value '[^']*' is not defined for option 'gpu-architecture').*")


class NvccCompiler(CachingCompiler):
    """See `kgen.build.Compiler`."""

    def __init__(
        self, include_dirs: Sequence[Path], cache: Cache, jobs: int | None = None,
        limits: CompileLimits | None = None,
    ) -> None:
        """Find nvcc, ninja and timeout(1).

        Raises:
            ToolchainError: If one is missing; says what to install.
        """
        super().__init__(include_dirs, cache, jobs)
        self._ninja = Ninja(limits or CompileLimits())
        self._nvcc = find_nvcc()
        self._release = _release(self._nvcc)

    @property
    def name(self) -> str:
        """See `Compiler`."""
        return "nvcc"

    @property
    def version(self) -> str:
        """`13.0.88`."""
        return self._release

    def identity(self, arch: str) -> str:
        """See `Compiler`."""
        return f"nvcc {self._release} {' '.join(FLAGS)} {arch}"

    def _compile(self, units: Sequence[Unit], jobs: int) -> list[Compiled | Failed]:
        with tempfile.TemporaryDirectory(prefix="kgen-nvcc-") as name:
            folder = Path(name)
            commands = []
            for unit in units:
                # A relative name, because the folder is removed before messages are shown.
                (folder / f"{unit.key}.cu").write_text(unit.request.rendered.source)
                commands.append(Command(
                    (self._nvcc, *FLAGS, f"-arch={unit.request.arch}",
                     *(f"-I{include}" for include in self.include_dirs),
                     f"{unit.key}.cu", "-o", f"{unit.key}.cubin"),
                    f"{unit.key}.cubin"))
            results: list[Compiled | Failed] = []
            for command, done in zip(
                commands, self._ninja.run(commands, folder, jobs), strict=True
            ):
                if done.error:
                    if unsupported := _UNSUPPORTED.search(done.log):
                        raise ToolchainError(
                            f"{self._nvcc} {self._release}: {unsupported.group(0)}\n"
                            "  next: install a CUDA toolkit that knows this GPU")
                    results.append(Failed(f"nvcc: {done.error}\n{done.log}".strip(), done.seconds))
                else:
                    results.append(Compiled((folder / command.output).read_bytes(),
                                            parse_resources(done.log), done.seconds,
                                            parse_remarks(done.log)))
            return results

    def _stop(self) -> None:
        self._ninja.close()


def find_nvcc() -> str:
    """Return nvcc's path: on PATH, else under $CUDA_HOME, else /usr/local/cuda.

    Raises:
        ToolchainError: If there is no nvcc.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = shutil.which("nvcc") or next(
        (path for home in homes if home and (path := shutil.which(str(Path(home, "bin", "nvcc"))))),
        None)
    if found is None:
        raise ToolchainError("nvcc is missing: neither on PATH nor under CUDA_HOME\n"
                             "  next: install the CUDA toolkit, or use --compiler nvrtc, which "
                             "needs none")
    return found


def _release(nvcc: str) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if done.returncode != 0 or not found:
        raise ToolchainError(f"{nvcc} --version: exit status {done.returncode}\n"
                             f"{(done.stderr or done.stdout).strip()}")
    return found.group(1)
