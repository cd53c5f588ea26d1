"""Which step of dispatch serves each problem of the populations on a GPU. Needs no GPU.

    python benchmarks/population_steps.py [--gpu h200] [--op wkv6] [--library DIR] [--compile]

Prints per operator and pass how many problems each step serves, and every problem that only the
safe kernel serves. With --compile, NVRTC compiles each kernel that a family gives: prints what does
not compile, what spills registers, and the time of a compilation.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.populations import load_population, population_names
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.runtime import nvrtc

LIBRARY = Path(__file__).resolve().parents[1] / "generated"
_SPILL = re.compile(r"(\d+) bytes spill stores")


def main() -> None:
    """Parse the options, and go through the populations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--op", help="one operator; default: all")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="where `kgen emit` wrote it")
    parser.add_argument("--compile", action="store_true", help="compile what families give")
    options = parser.parse_args()
    sys.path.insert(0, str(options.library.resolve()))
    library: Any = importlib.import_module("kgen_ops")
    profile = profile_named(options.gpu)
    gpu = importlib.import_module("kgen_ops._runtime.rows").Gpu(
        profile.name, profile.title, profile.device_names, profile.arch, profile.names)
    catalogue = open_catalogue()
    compilations = Compilations(profile) if options.compile else None
    for name in population_names(catalogue):
        population = load_population(name, catalogue)
        for operator in population.operators:
            for pass_name in ("forward", "backward"):
                problems = population.problems(operator, pass_name)
                if not problems or options.op not in (None, operator):
                    continue
                steps: Counter[str] = Counter()
                for problem in problems:
                    found = library.explain(operator, gpu=gpu, pass_name=pass_name,
                                            **dict(problem.dims), **dict(problem.dtypes))
                    steps[found.step] += 1
                    if found.step == "safe":
                        print(f"  safe: {operator} {pass_name} {problem}")
                    if found.step == "family" and compilations is not None:
                        compilations.add(operator, pass_name, found.config, problem)
                counted = ", ".join(f"{step} {count}" for step, count in steps.most_common())
                print(f"{operator} {pass_name} on {options.gpu}: {counted}", flush=True)
    if compilations is not None:
        print(compilations)


class Compilations:
    """Compiles the kernels of families, each text once."""

    def __init__(self, gpu: GpuProfile) -> None:
        self._arch = gpu.arch
        self._seconds: dict[str, float] = {}
        self._failed = 0
        self._spilled = 0

    def add(self, operator: str, pass_name: str, config: str, problem: Problem) -> None:
        """Compile the kernel of a config for a problem; print what is wrong with it."""
        runtime = "kgen_ops._runtime"
        adaptation = importlib.import_module(f"{runtime}.adaptation")
        families = importlib.import_module(f"{runtime}.families")
        package = importlib.import_module(f"kgen_ops.{operator}")
        family = getattr(package, pass_name.upper()).tables.families()[config.partition("(")[0]]
        instance = families.Instance(family, adaptation.named_values(family, config))
        root = Path(importlib.import_module("kgen_ops").__path__[0])
        stem, text = families.source(root, instance, dict(problem.dims), dict(problem.dtypes))
        if stem in self._seconds:
            return
        began = time.perf_counter()
        try:
            _, log = nvrtc.nvrtc().compile_cubin(
                text.decode(), stem, self._arch, [str(root / "_include")])
        except nvrtc.CompileError as error:
            self._failed += 1
            print(f"  does not compile: {operator} {pass_name} {config} {problem}\n{error.log}")
            log = ""
        self._seconds[stem] = time.perf_counter() - began
        if any(int(count) for count in _SPILL.findall(log)):
            self._spilled += 1
            print(f"  spills: {operator} {pass_name} {config} {problem}")

    def __str__(self) -> str:
        seconds = sorted(self._seconds.values())
        if not seconds:
            return "nothing was compiled"
        return (f"{len(seconds)} kernels for {self._arch}: {self._failed} do not compile, "
                f"{self._spilled} spill; {seconds[len(seconds) // 2]:.2f} s in the median, "
                f"{seconds[-1]:.2f} s at worst")


if __name__ == "__main__":
    main()
