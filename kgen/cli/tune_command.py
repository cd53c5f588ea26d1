"""`kgen tune`."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from kgen.catalogue import load_captured_calls, open_catalogue
from kgen.cli.calls_summary import calls_summary
from kgen.cli.context import asked_operators, open_command
from kgen.cli.progress import Display
from kgen.cli.summary import tune_summary
from kgen.cli.tune_state import PeerTime, Scope
from kgen.model.record import COLD
from kgen.report import load_report
from kgen.report.names import named_rows
from kgen.tune import (
    Limits,
    PassPublished,
    PassResult,
    TuneRequest,
    default_trials,
    journal_path,
    study_path,
    tune_and_publish,
)


def run(options: argparse.Namespace) -> int:
    """Tune, emit and report; print the winners and the written files.

    Raises:
        OptionError: If options contradict each other, or no operator is named.
    """
    operators = asked_operators(options, open_catalogue(options.path))
    done: list[PassResult] = []
    # --time is for all searches together, and is divided among the passes in the same way.
    time_s = None if options.time is None else options.time / len(operators)
    for name in operators:
        done += _tune(argparse.Namespace(**{**vars(options), "op": name, "time": time_s}))
    if options.calls:
        captured = load_captured_calls(Path(options.calls).expanduser(),
                                       open_catalogue(options.path))
        print(f"\n{calls_summary(captured, done)}")
    return 0


def _tune(options: argparse.Namespace) -> list[PassResult]:
    """Tune one operator; return what was found."""
    with open_command(options) as common:
        print(
            f"tuning {common.entry.operator.name} on {common.gpu.title}, compiler "
            f"{common.compiler.name} {common.compiler.version}"
            + (f", {options.l2} L2" if options.l2 != COLD else ""),
            flush=True,
        )
        request = TuneRequest(
            entry=common.entry,
            passes=common.passes,
            problems=common.problems,
            gpu=common.gpu,
            ordinal=common.ordinal,
            compiler=common.compiler,
            journal=journal_path(common.reports, common.gpu),
            study=study_path(common.reports, common.gpu),
            trials=options.trials or default_trials(common.gpu),
            time_s=options.time,
            seed=options.seed,
            paths=common.paths,
            peers=not options.no_peers,
            l2=options.l2,
            limits=Limits(options.trial_timeout, options.device_memory),
            retry=options.retry,
        )
        display = Display(_scope(request, common.reports / f"{common.gpu.name}.yaml"))
        done: list[PassPublished] = []
        try:
            with closing(tune_and_publish(request, common.out, common.reports)) as events:
                for event in events:
                    if isinstance(event, PassPublished):
                        done.append(event)
                    else:
                        display.show(event)
        finally:
            display.close()
            if done:
                print(f"\n{tune_summary(done, display.state.dead_variants())}")
        return [one.result for one in done]


def _scope(request: TuneRequest, report: Path) -> Scope:
    """What the display needs to know of a tune, with the peers' times of the last report."""
    operator = request.entry.operator
    peers = {}
    if report.exists():
        for row in named_rows(load_report(report), operator.signature):
            if (fastest := row.fastest) is not None:
                key = (row.report.pass_name, row.label)
                peers[key] = PeerTime(fastest.name, fastest.timing.median_us)
    return Scope(
        title=f"{operator.name} on {request.gpu.title}",
        problems={name: len(request.problems[name]) for name in request.passes},
        time_s=request.time_s,
        peers=peers,
    )
