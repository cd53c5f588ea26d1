"""The context of `tune`, `verify`, `bench` and `learn`: operator, device, compiler, paths."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import CompileLimits, Compiler, open_compiler
from kgen.catalogue import (
    Catalogue,
    Entry,
    load_captured_calls,
    load_population,
    open_catalogue,
    profile_named,
)
from kgen.cli.arguments import (
    chosen_passes,
    chosen_problems,
    population_problems,
    print_counts,
)
from kgen.errors import OptionError, ProblemError
from kgen.launch.select import select_device
from kgen.model.gpu import GpuProfile
from kgen.model.population import Population
from kgen.model.problem import Problem

LIBRARY = "kgen_ops"


@dataclass(frozen=True)
class CommandContext:
    """The operator, device, compiler and paths of a command."""

    entry: Entry
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]  # by pass
    paths: tuple[str, ...]
    out: Path

    @property
    def reports(self) -> Path:
        """Folder of this operator's reports and journals."""
        return reports_dir(self.out, self.entry.operator.name)


def reports_dir(out: Path, operator: str) -> Path:
    """The folder of an operator's reports and journals under an output folder."""
    return out / LIBRARY / operator / "reports"


def folder_options(options: argparse.Namespace) -> tuple[str, ...]:
    """`--path` and `--out` of this command, for other commands that it prints."""
    words = [word for folder in options.path for word in ("--path", folder)]
    if Path(options.out) != Path("generated"):
        words += ["--out", str(options.out)]
    return tuple(words)


def _back_end(options: argparse.Namespace, gpu: GpuProfile) -> str:
    if gpu.is_host:
        return "host-asan" if getattr(options, "sanitize", False) else "host"
    return str(options.compiler)


def compile_limits(options: argparse.Namespace) -> CompileLimits:
    """`--compile-timeout` and `--compile-memory`, or their defaults."""
    limits = CompileLimits()
    return CompileLimits(
        options.compile_timeout or limits.timeout_s, options.compile_memory or limits.memory_bytes
    )


def asked_population(options: argparse.Namespace, catalogue: Catalogue) -> Population | None:
    """The population of `--population` or of `--calls`; None if neither is given.

    Raises:
        OptionError: If more than one option chooses problems.
    """
    chosen = [name for name in ("problem", "population", "calls") if getattr(options, name, "")]
    if len(chosen) > 1:
        raise OptionError(
            f"{' and '.join(f'--{name}' for name in chosen)} choose problems; choose one")
    if getattr(options, "calls", ""):
        return load_captured_calls(Path(options.calls).expanduser(), catalogue).population
    if getattr(options, "population", ""):
        return load_population(options.population, catalogue)
    return None


def asked_operators(options: argparse.Namespace, catalogue: Catalogue) -> tuple[str, ...]:
    """`--op`, or all operators of a population that have problems of the chosen passes.

    Raises:
        OptionError: If neither `--op` nor a population is given.
        ProblemError: If the population has no problems of the passes.
    """
    population = asked_population(options, catalogue)
    if options.op:
        return (options.op,)
    if population is None:
        raise OptionError("no operator\n  add --op OP (see 'kgen ops'), --population NAME (see "
                          "'kgen populations'), or --calls FILE")
    chosen = [
        name
        for name in population.operators
        if options.pass_name == "all" or population.problems(name, options.pass_name)
    ]
    if not chosen:
        raise ProblemError(f"'{population.name}' has no {options.pass_name} problems\n"
                           f"  it has: {print_counts(population)}\n  next: leave out --pass, or "
                           "capture a step that calls backward()")
    return tuple(chosen)


@contextlib.contextmanager
def open_command(
    options: argparse.Namespace, gpu_needed: bool = True
) -> Iterator[CommandContext]:
    """Resolve the common options to a context; close the compiler at the end.

    Args:
        options: Options of the command line.
        gpu_needed: Whether the GPU must be in this machine; otherwise a profile is enough.
    Raises:
        UserError: If an option is wrong; all options are checked before any work.
    """
    catalogue = open_catalogue(options.path)
    entry = catalogue.entry(options.op)
    operator = entry.operator
    passes = chosen_passes(operator.signature, options.pass_name)
    device = getattr(options, "device", None)
    gpu, ordinal = (select_device(options.gpu, device) if gpu_needed
                    else (profile_named(options.gpu), 0))
    population = asked_population(options, catalogue)
    if population is not None:
        problems = population_problems(population, operator, passes)
    else:
        problems = {p: chosen_problems(operator, p, options.problem, gpu.is_host) for p in passes}
    limits = compile_limits(options)
    compiler = open_compiler(_back_end(options, gpu), [include_dir()], limits=limits)
    try:
        yield CommandContext(
            entry,
            gpu,
            ordinal,
            compiler,
            tuple(problems),
            problems,
            tuple(str(Path(p).resolve()) for p in options.path),
            Path(options.out),
        )
    finally:
        compiler.close()
