"""`kgen measure-check`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.cli.opening import opened
from kgen.cli.progress import Display
from kgen.workflow import TuneJob
from kgen.workflow.quality import (
    QualityJob,
    check_quality,
    check_writable,
    print_problem,
    print_verdicts,
    verdicts,
    write_quality,
)


def run(options: argparse.Namespace) -> int:
    """Measure how measurements agree; 1 if a bar is missed and --strict was given."""
    if options.yaml:
        check_writable(Path(options.yaml))
    with opened(options) as common:
        print(
            f"checking measurements of {common.entry.operator.name} on {common.gpu.title}, "
            f"{options.l2} L2",
            flush=True,
        )
        quality = check_quality(
            QualityJob(
                tune=TuneJob(
                    entry=common.entry,
                    passes=common.passes,
                    problems=common.problems,
                    gpu=common.gpu,
                    ordinal=common.ordinal,
                    compiler=common.compiler,
                    out=common.out,
                    reports=common.reports,
                    trials=options.trials,
                    time_s=None,
                    seed=options.seed,
                    paths=common.paths,
                    peers=False,
                    l2=options.l2,
                    on_progress=Display(),
                ),
                tunes=options.tunes,
                runs=options.runs,
                say=lambda text: print(text, flush=True),
            )
        )
        for found in quality.problems:
            print(f"\n{print_problem(found)}")
        judged = verdicts(quality)
        print(f"\n{print_verdicts(judged)}")
        if common.gpu.is_host:
            print("  (times of the CPU, which others share: they say nothing of a GPU's)")
    if options.yaml:
        write_quality(Path(options.yaml), quality)
        print(f"written  {options.yaml}")
    missed = [v for v in judged if v.kept is False]
    return 1 if missed and options.strict else 0
