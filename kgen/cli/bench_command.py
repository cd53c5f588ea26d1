"""`kgen bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.bench import (
    CallTable,
    Climb,
    Contest,
    Profile,
    print_calls,
    print_climb,
    print_contest,
    print_profile,
)
from kgen.cli.opening import Opened, opened
from kgen.errors import OptionError
from kgen.model.problem import Problem
from kgen.workflow import BenchJob, run_bench, write_bench


def run(options: argparse.Namespace) -> int:
    """Print a table per problem; write them as YAML if asked to.

    Raises:
        OptionError: If options contradict each other.
    """
    if options.trace and not options.profile:
        raise OptionError("--trace FILE is where --profile writes; add --profile")
    chosen = [f for f in ("ladder", "profile", "call_cost") if getattr(options, f)]
    if len(chosen) > 1:
        first, second = (f"--{flag.replace('_', '-')}" for flag in chosen[:2])
        raise OptionError(f"{first} and {second} are two tables; ask for one at a time")
    with opened(options) as common:
        what = "published ladder" if options.ladder else "kernels beside their peers"
        if options.profile:
            what = "profile of kernels and their peers"
        if options.call_cost:
            what = "host time of calls of kgen_ops and its peers"
        print(
            f"{common.entry.operator.name} on {common.gpu.title}, {what}, compiler "
            f"{common.compiler.name} {common.compiler.version}\n",
            flush=True,
        )
        report = run_bench(
            BenchJob(
                entry=common.entry,
                passes=common.passes,
                problems=_problems(options, common),
                gpu=common.gpu,
                ordinal=common.ordinal,
                compiler=common.compiler,
                reports=common.reports,
                seed=options.seed,
                paths=common.paths,
                against=options.against,
                ladder=options.ladder,
                trace=_trace_path(options, common) if options.profile else None,
                call_cost=options.call_cost,
                tune_options=_tune_options(options),
                on_result=_print,
            )
        )
        copy_gbps = report.environment.copy_gbps
        if options.profile:
            print("traces open in ui.perfetto.dev, chrome://tracing, and TensorBoard's profiler")
        if not options.call_cost:
            print(
                f"device copy {copy_gbps:.4g} GB/s, read plus write: the floor of what moves "
                "bytes"
            )
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


def _problems(options: argparse.Namespace, common: Opened) -> dict[str, tuple[Problem, ...]]:
    """What is benched: of an operator's own problems a call's cost needs the smallest alone."""
    if options.problem or not options.call_cost:
        return dict(common.problems)
    cost = common.entry.operator.cost
    return {
        name: (min(problems, key=lambda problem: cost(name, problem).bytes),)
        for name, problems in common.problems.items()
    }


def _print(result: Contest | Climb | Profile | CallTable) -> None:
    if isinstance(result, Contest):
        text = print_contest(result)
    elif isinstance(result, Climb):
        text = print_climb(result)
    elif isinstance(result, Profile):
        text = print_profile(result)
    else:
        text = print_calls(result)
    print(text, flush=True)


def _tune_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Options that lead a tune to the report that this bench reads."""
    more = [word for folder in options.path for word in ("--path", folder)]
    if Path(options.out) != Path("generated"):
        more += ["--out", options.out]
    return tuple(more)
