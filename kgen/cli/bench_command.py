"""`kgen bench`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from kgen.bench import (
    BenchJob,
    CallTable,
    LadderResult,
    PeerComparison,
    Profile,
    print_calls,
    print_comparison,
    print_ladder,
    print_profile,
    run_bench,
    write_bench,
)
from kgen.cli.arguments import check_output
from kgen.cli.context import CommandContext, folder_options, open_command
from kgen.errors import OptionError
from kgen.model.names import short_name
from kgen.model.problem import Problem, parse_problem
from kgen.model.signature import Signature


def run(options: argparse.Namespace) -> int:
    """Print a table per problem; with `--yaml` also write the results as YAML.

    Raises:
        OptionError: If options contradict each other.
        StorageError: If a file could not be written.
    """
    if options.trace and not options.profile:
        raise OptionError("--trace FILE names the trace of --profile; add --profile")
    chosen = [f for f in ("ladder", "profile", "call_cost") if getattr(options, f)]
    if len(chosen) > 1:
        first, second = (f"--{flag.replace('_', '-')}" for flag in chosen[:2])
        raise OptionError(f"{first} and {second} are two tables; choose one")
    check_output("--yaml", options.yaml)
    check_output("--trace", options.trace)
    with open_command(options) as common:
        what = "published ladder" if options.ladder else "kernels and their peers"
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
                tune_options=folder_options(options),
                on_result=partial(_print, common.entry.operator.signature),
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
            print("(a CPU that runs each CUDA thread as a fiber: these are no speeds)")
    if options.yaml:
        write_bench(options.yaml, report)
        print(f"written  {options.yaml}")
    return 0


def _trace_path(options: argparse.Namespace, common: CommandContext) -> Path:
    """The default trace file, with the ending by which TensorBoard finds traces."""
    if options.trace:
        return Path(options.trace)
    return Path(f"{common.entry.operator.name}-{common.gpu.name}.pt.trace.json")


def _problems(
    options: argparse.Namespace, common: CommandContext
) -> dict[str, tuple[Problem, ...]]:
    """The problems to time; for the host cost of calls only the operator's smallest problem."""
    if options.problem or not options.call_cost:
        return dict(common.problems)
    cost = common.entry.operator.cost
    return {
        name: (min(problems, key=lambda problem: cost(name, problem).bytes),)
        for name, problems in common.problems.items()
    }


def _print(
    signature: Signature, result: PeerComparison | LadderResult | Profile | CallTable
) -> None:
    """Print a table under the problem's short name; `--yaml` writes the full key instead."""
    short = short_name(parse_problem(result.problem, signature), signature)
    result = replace(result, problem=short)
    if isinstance(result, PeerComparison):
        text = print_comparison(result)
    elif isinstance(result, LadderResult):
        text = print_ladder(result)
    elif isinstance(result, Profile):
        text = print_profile(result)
    else:
        text = print_calls(result)
    print(text, flush=True)
