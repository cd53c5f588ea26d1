"""`kgen coverage`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from kgen.catalogue import (
    Catalogue,
    Entry,
    load_population,
    open_catalogue,
    population_names,
    profile_named,
)
from kgen.cli.arguments import (
    check_output,
    chosen_passes,
    chosen_problems,
    population_problems,
)
from kgen.cli.context import asked_operators, asked_population, open_command
from kgen.coverage import (
    CoverageReport,
    CoverageRequest,
    Timing,
    coverage,
    print_coverage,
    print_problem,
    write_coverage,
)
from kgen.errors import OptionError, ProblemError
from kgen.launch.select import select_gpu
from kgen.model.problem import Problem


def run(options: argparse.Namespace) -> int:
    """Print each problem when its result is known, then a table; `--yaml` also writes YAML.

    Raises:
        OptionError: If options contradict each other.
        ProblemError: If no population has problems of the operator.
        StorageError: If the file of `--yaml` could not be written.
    """
    catalogue = open_catalogue(options.path)
    operators = asked_operators(options, catalogue)
    if options.yaml and len(operators) > 1:
        raise OptionError(f"--yaml holds one operator, and there are {', '.join(operators)}\n"
                          "  add --op OP")
    timed = [f"--{name.replace('_', '-')}" for name in ("against", "sample", "first_calls", "time")
             if getattr(options, name)]
    if options.steps and timed:
        raise OptionError(f"--steps times nothing, so {timed[0]} has no meaning; remove one")
    check_output("--yaml", options.yaml)
    for name in operators:
        report = _run(argparse.Namespace(**{**vars(options), "op": name}), catalogue)
        print(f"\n{print_coverage(report)}", flush=True)
        if options.yaml:
            write_coverage(options.yaml, report)
            print(f"written  {options.yaml}")
    return 0


def _run(options: argparse.Namespace, catalogue: Catalogue) -> CoverageReport:
    entry = catalogue.entry(options.op)
    passes = chosen_passes(entry.operator.signature, options.pass_name)
    problems, populations = _asked(options, catalogue, entry, passes)
    paths = tuple(str(Path(p).resolve()) for p in options.path)
    if options.steps:
        gpu = profile_named(options.gpu) if options.gpu != "auto" else select_gpu("auto")[0]
        return _shown(CoverageRequest(
            entry, tuple(problems), problems, populations, gpu, None, Path(options.out),
            options.seed, paths))
    with open_command(options) as common:
        timing = Timing(common.ordinal, common.compiler, options.against, options.sample,
                        options.search_time, options.first_calls, options.time)
        return _shown(CoverageRequest(
            entry, tuple(problems), problems, populations, common.gpu, timing, common.out,
            options.seed, paths), options.yaml)


def _shown(request: CoverageRequest, written: str | None = None) -> CoverageReport:
    """Print each problem when its result is known; return the report.

    If `written` is given, the report is written after each problem that was timed, which takes
    seconds. A coverage that is ended early therefore leaves its results so far.
    """
    for report in coverage(request):
        newest = report.problems[-1]
        print(print_problem(newest, request.entry.operator.signature), flush=True)
        if written and newest.kernel_us is not None:
            write_coverage(written, report)
    return report


def _asked(
    options: argparse.Namespace, catalogue: Catalogue, entry: Entry, passes: list[str]
) -> tuple[Mapping[str, tuple[Problem, ...]], tuple[str, ...]]:
    """The problems by pass, and their sources; by default the problems of all populations."""
    if options.problem:
        return ({p: chosen_problems(entry.operator, p, options.problem, False) for p in passes},
                ("--problem",))
    one = asked_population(options, catalogue)
    known = [one] if one is not None else [
        load_population(name, catalogue) for name in population_names(catalogue)]
    named = [p for p in known if any(p.problems(entry.operator.name, name) for name in passes)]
    if one is not None:
        return population_problems(one, entry.operator, passes), (one.name,)
    if not named:
        raise ProblemError(f"no population has problems of {entry.operator.name}\n"
                           "  add --problem, or --population FILE with a file of your own")
    found = {
        name: tuple(dict.fromkeys(
            problem for population in named
            for problem in population.problems(entry.operator.name, name)))
        for name in passes
    }
    return {name: some for name, some in found.items() if some}, tuple(p.name for p in named)
