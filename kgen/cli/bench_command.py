"""`kgen bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.bench import Climb, Contest, Profile, print_climb, print_contest, print_profile
from kgen.cli.opening import Opened, opened
from kgen.errors import OptionError
from kgen.workflow import BenchJob, run_bench, write_bench


def run(options: argparse.Namespace) -> int:
    """Print a table per problem; write them as YAML if asked to.

    Raises:
        OptionError: If options contradict each other.
    """
    if options.trace and not options.profile:
        raise OptionError("--trace FILE is where --profile writes; add --profile")
    if options.ladder and options.profile:
        raise OptionError("--ladder and --profile are two tables; ask for one at a time")
    with opened(options) as common:
        what = "published ladder" if options.ladder else "kernels beside their peers"
        if options.profile:
            what = "profile of kernels and their peers"
        print(
            f"{common.entry.operator.name} on {common.gpu.title}, {what}, compiler "
            f"{common.compiler.name} {common.compiler.version}\n",
            flush=True,
        )
        report = run_bench(
            BenchJob(
                entry=common.entry,
                passes=common.passes,
                problems=common.problems,
                gpu=common.gpu,
                ordinal=common.ordinal,
                compiler=common.compiler,
                reports=common.reports,
                seed=options.seed,
                paths=common.paths,
                against=options.against,
                ladder=options.ladder,
                trace=_trace_path(options, common) if options.profile else None,
                tune_options=_tune_options(options),
                on_result=_print,
            )
        )
        copy_gbps = report.environment.copy_gbps
        if options.profile:
            print("traces open in ui.perfetto.dev, chrome://tracing, and TensorBoard's profiler")
        print(f"device copy {copy_gbps:.4g} GB/s, read plus write: the floor of what moves bytes")
        if common.gpu.is_host:
            print("(a CPU that runs each CUDA thread as a fiber: these times say nothing of speed)")
    if options.yaml:
        write_bench(options.yaml, report)
        print(f"written  {options.yaml}")
    return 0


def _trace_path(options: argparse.Namespace, common: Opened) -> Path:
    """TensorBoard finds traces by this ending; browsers open any."""
    if options.trace:
        return Path(options.trace)
    return Path(f"{common.entry.operator.name}-{common.gpu.name}.pt.trace.json")


def _print(result: Contest | Climb | Profile) -> None:
    if isinstance(result, Contest):
        text = print_contest(result)
    elif isinstance(result, Climb):
        text = print_climb(result)
    else:
        text = print_profile(result)
    print(text, flush=True)


def _tune_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Options that lead a tune to the report that this bench reads."""
    more = [word for folder in options.path for word in ("--path", folder)]
    if Path(options.out) != Path("generated"):
        more += ["--out", options.out]
    return tuple(more)
