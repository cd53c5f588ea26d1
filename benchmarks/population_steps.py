"""Compile the kernels that families give for the problems of the populations. Needs no GPU.

    python benchmarks/population_steps.py [--gpu h200] [--op wkv6] [--library DIR]

NVRTC compiles each kernel once. Prints the kernels that do not compile or that spill registers, and
the time of a compilation. `kgen coverage --steps` shows which dispatch step serves each problem.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.populations import load_population, population_names
from kgen.emit import LoadedLibrary
from kgen.runtime import nvrtc

LIBRARY = Path(__file__).resolve().parents[1] / "generated"
_SPILL = re.compile(r"(\d+) bytes spill stores")


def main() -> None:
    """Parse the options, and go through the populations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--op", help="one operator; default: all")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="where `kgen emit` wrote it")
    options = parser.parse_args()
    gpu, catalogue = profile_named(options.gpu), open_catalogue()
    compilations = Compilations(gpu.arch, options.library / "kgen_ops" / "_include")
    with LoadedLibrary.open(options.library, "--library") as library:
        for name in population_names(catalogue):
            for entry in load_population(name, catalogue).entries:
                if options.op not in (None, entry.operator):
                    continue
                called = (entry.operator, entry.pass_name, entry.problem)
                served = library.served(*called, gpu)
                if served is not None and served.step == "family":
                    stem, text = library.rendered(*called, served.config)
                    compilations.add(stem, text, " ".join(map(str, (*called, served.config.label))))
    print(compilations)


class Compilations:
    """Compiles kernels for an architecture, each text once."""

    def __init__(self, arch: str, include: Path) -> None:
        self._arch = arch
        self._include = include
        self._seconds: dict[str, float] = {}
        self._failed = 0
        self._spilled = 0

    def add(self, stem: str, text: str, what: str) -> None:
        """Compile a kernel unless its text was compiled before; print what is wrong with it."""
        if stem in self._seconds:
            return
        began = time.perf_counter()
        try:
            _, log = nvrtc.nvrtc().compile_cubin(text, stem, self._arch, [str(self._include)])
        except nvrtc.CompileError as error:
            self._failed += 1
            print(f"  does not compile: {what}\n{error.log}")
            log = ""
        self._seconds[stem] = time.perf_counter() - began
        if spilled := max(map(int, _SPILL.findall(log)), default=0):
            self._spilled += 1
            print(f"  spills {spilled} bytes: {what}", flush=True)

    def __str__(self) -> str:
        seconds = sorted(self._seconds.values())
        if not seconds:
            return "nothing was compiled"
        return (f"{len(seconds)} kernels for {self._arch}: {self._failed} do not compile, "
                f"{self._spilled} spill; {seconds[len(seconds) // 2]:.2f} s in the median, "
                f"{seconds[-1]:.2f} s at worst")


if __name__ == "__main__":
    main()
