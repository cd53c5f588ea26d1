"""`kgen measure-check`."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

from kgen.cli.context import open_command
from kgen.cli.progress import Display
from kgen.measure_check import (
    MeasureCheck,
    Quality,
    check_file_writable,
    check_quality,
    judge_bars,
    print_bars,
    print_problem,
    write_quality,
)
from kgen.tune import (
    PassPublished,
    PublishEvent,
    TuneRequest,
    default_trials,
    journal_path,
    study_path,
)


def run(options: argparse.Namespace) -> int:
    """Measure repeatability; return 1 if a bar is missed and --strict is given."""
    if options.yaml:
        check_file_writable(Path(options.yaml))
    with open_command(options) as common:
        print(
            f"checking measurements of {common.entry.operator.name} on {common.gpu.title}, "
            f"{options.l2} L2",
            flush=True,
        )
        check = MeasureCheck(
            tune=TuneRequest(
                entry=common.entry,
                passes=common.passes,
                problems=common.problems,
                gpu=common.gpu,
                ordinal=common.ordinal,
                compiler=common.compiler,
                journal=journal_path(common.reports, common.gpu),
                study=study_path(common.reports, common.gpu),
                trials=options.trials or default_trials(common.gpu),
                time_s=None,
                seed=options.seed,
                paths=common.paths,
                against=(),
                l2=options.l2,
            ),
            tunes=options.tunes,
            runs=options.runs,
        )
        with closing(check_quality(check)) as events:
            quality = _show(events)
        for found in quality.problems:
            print(f"\n{print_problem(found)}")
        judged = judge_bars(quality)
        print(f"\n{print_bars(judged)}")
        if common.gpu.is_host:
            print("  (times of a shared CPU: they do not predict a GPU's)")
    if options.yaml:
        write_quality(Path(options.yaml), quality)
        print(f"written  {options.yaml}")
    missed = [v for v in judged if v.kept is False]
    return 1 if missed and options.strict else 0


def _show(events: Generator[PublishEvent | str, None, Quality]) -> Quality:
    """Show the events; return the results."""
    display = Display()
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            display.close()
            found: Quality = end.value
            return found
        if isinstance(event, str):
            print(event, flush=True)
        elif not isinstance(event, PassPublished):
            display.show(event)
