"""`kgen package`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.catalogue import load_population, open_catalogue
from kgen.model.population import PopulationProblem
from kgen.package import package


def run(options: argparse.Namespace) -> int:
    """Write a wheel of the library and print its content.

    Raises:
        KgenError: As for `kgen.package.package`.
    """
    population: tuple[PopulationProblem, ...] = ()
    if options.population:
        population = load_population(options.population, open_catalogue(options.path)).entries
    done = package(Path(options.source), options.arch, Path(options.wheel), _say_start, population)
    print(done.path)
    print(f"  version   {done.version}")
    print(f"  content   {done.content}")
    print(f"  size      {done.size_bytes / 1e6:.1f} MB")
    for found in done.cubins:
        ahead = f", {found.families} of them for {options.population}" if found.families else ""
        print(f"  {found.arch:<9} {found.kept + found.compiled} cubins: {found.kept} from the "
              f"library, {found.compiled} compiled{ahead}")
        if found.failed:
            print(f"            {found.failed} kernels for {options.population} do not compile for "
                  "it; such calls take the next kernel")
    print("  after installing it, check it: python -m kgen_ops.selftest")
    return 0


def _say_start(arch: str, count: int) -> None:
    if count:
        print(f"compiling {count} kernels for {arch}", flush=True)
