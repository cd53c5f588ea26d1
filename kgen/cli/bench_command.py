"""`kgen bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.bench import Climb, Contest, print_climb, print_contest
from kgen.cli.opening import opened
from kgen.workflow import BenchJob, run_bench, write_bench


def run(options: argparse.Namespace) -> int:
    """Print a table per problem; write them as YAML if asked to."""
    with opened(options) as common:
        what = "published ladder" if options.ladder else "kernels beside their peers"
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
                tune_options=_tune_options(options),
                on_result=_print,
            )
        )
        copy_gbps = report.environment.copy_gbps
        print(f"device copy {copy_gbps:.4g} GB/s, read plus write: the floor of what moves bytes")
        if common.gpu.is_host:
            print("(a CPU that runs each CUDA thread as a fiber: these times say nothing of speed)")
    if options.yaml:
        write_bench(options.yaml, report)
        print(f"written  {options.yaml}")
    return 0


def _print(result: Contest | Climb) -> None:
    text = print_contest(result) if isinstance(result, Contest) else print_climb(result)
    print(text, flush=True)


def _tune_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Options that lead a tune to the report that this bench reads."""
    more = [word for folder in options.path for word in ("--path", folder)]
    if Path(options.out) != Path("generated"):
        more += ["--out", options.out]
    return tuple(more)
