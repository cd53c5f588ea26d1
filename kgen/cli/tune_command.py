"""`kgen tune`. For a GPU that is not in this machine it predicts (`kgen predict`)."""

from __future__ import annotations

import argparse
import uuid
from contextlib import closing
from pathlib import Path

from kgen.catalogue import load_captured_calls, open_catalogue
from kgen.cli import predict_command
from kgen.cli.calls_summary import calls_summary
from kgen.cli.context import asked_operators, open_command
from kgen.cli.devices import (
    asked_devices,
    shared_by_devices,
    side_by_side,
    workers_beside,
)
from kgen.cli.progress import Display
from kgen.cli.storage_option import shared_storage
from kgen.cli.summary import tune_summary
from kgen.cli.tune_state import PeerTime, Scope
from kgen.errors import OptionError
from kgen.launch.select import absent_gpu
from kgen.model.gpu import GpuProfile
from kgen.model.record import COLD
from kgen.predict.models import DEFAULT
from kgen.predict.request import DEFAULT_COMPILED
from kgen.report import load_report
from kgen.report.names import named_rows
from kgen.tune import (
    Limits,
    PassPublished,
    PassResult,
    TuneRequest,
    default_trials,
    journal_path,
    served_configs,
    study_path,
    tune_and_publish,
)


def run(options: argparse.Namespace) -> int:
    """Tune, emit and report; print the winners and the written files.

    Raises:
        OptionError: If options contradict each other, or no operator is named.
    """
    operators = asked_operators(options, open_catalogue(options.path))
    if (absent := absent_gpu(options.gpu)) is not None:
        return _predict(options, absent)
    done: list[PassResult] = []
    options, commands = asked_devices(options)
    # --time is for all searches together: it is divided among the operators here, and among the
    # passes in the same way.
    time_s = None if options.time is None else options.time / len(operators)
    with side_by_side(commands) as others:
        for name in operators:
            done += _tune(argparse.Namespace(**{**vars(options), "op": name, "time": time_s}))
    if options.calls:
        captured = load_captured_calls(Path(options.calls).expanduser(),
                                       open_catalogue(options.path))
        print(f"\n{calls_summary(captured, done)}")
    return max((int(other.returncode) for other in others), default=0)


def _predict(options: argparse.Namespace, gpu: GpuProfile) -> int:
    """Predict rows for a GPU that is not here.

    Raises:
        OptionError: If an option asks for a measurement.
    """
    if options.l2 != COLD:
        raise OptionError(
            f"--l2 {options.l2}: no {gpu.title} is in this machine, and predictions are of times "
            f"with a {COLD} L2\n  next: leave --l2 out, or tune on a machine with that GPU"
        )
    for option, value in (("--storage", options.storage), ("--devices", options.devices)):
        if value is not None:  # the message omits the value: a storage's URL may hold a password
            raise OptionError(
                f"{option} shares measured trials, and no {gpu.title} is in this machine\n"
                f"  next: leave {option} out to predict rows, or tune on a machine with that GPU"
            )
    print(
        f"no {gpu.title} in this machine: rows are predicted, not measured (see kgen predict); "
        "the first tune on that GPU replaces them",
        flush=True,
    )
    searching = {"--trials": options.trials, "--time": options.time, "--retry": options.retry}
    if unused := [option for option, value in searching.items() if value]:
        print(f"a prediction has no search: {', '.join(unused)} not used", flush=True)
    return predict_command.predict_rows(
        options, predict_command.RECORDS, DEFAULT_COMPILED, DEFAULT
    )


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
            against=() if options.no_peers else options.against,
            l2=options.l2,
            limits=Limits(options.trial_timeout, options.device_memory),
            retry=options.retry,
            shared=shared_storage(options),
            retry_name=f"retry{uuid.uuid4().hex[:8]}" if options.retry else "",
            certificates=(_committed_journal(common.entry.operator.name, common.gpu),),
            served=served_configs(common.out, common.entry, common.problems, common.gpu),
        )
        request = shared_by_devices(request, options)
        display = Display(_scope(request, common.reports / f"{common.gpu.name}.yaml"))
        done: list[PassPublished] = []
        try:
            with (
                workers_beside(request, options),
                closing(tune_and_publish(request, common.out, common.reports)) as events,
            ):
                for event in events:
                    if isinstance(event, PassPublished):
                        done.append(event)
                    else:
                        display.show(event)
        finally:
            display.close()
            if done:
                print(f"\n{tune_summary(done, display.state.dead_variants())}")
            if missing := display.state.missing_text():
                print(missing)
        return [one.result for one in done]


def _committed_journal(operator: str, gpu: GpuProfile) -> Path:
    """The journal of the committed library, the default of `--out`.

    A kernel with a certificate there need not be proven again for another folder.
    """
    return journal_path(Path(predict_command.RECORDS, "kgen_ops", operator, "reports"), gpu)


def _scope(request: TuneRequest, report: Path) -> Scope:
    """The scope of a tune for the display, with the peers' times of the last report."""
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
