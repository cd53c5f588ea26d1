"""`kgen predict`."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from pathlib import Path

from kgen.catalogue import open_catalogue, profile_named
from kgen.cli.arguments import chosen_passes
from kgen.cli.context import asked_operators, open_command
from kgen.errors import OptionError, PredictError
from kgen.model.names import short_name
from kgen.predict import (
    Compiling,
    HostRunStarted,
    PassStarted,
    Predicted,
    PredictEvent,
    PredictRequest,
    Skipped,
    judge,
    predict,
    print_judgements,
    relatives,
)
from kgen.predict.models import DEFAULT, MODELS

RECORDS = "generated"  # the committed library, the default of --out


def run(options: argparse.Namespace) -> int:
    """Predict rows, or judge the models.

    Raises:
        OptionError: If no GPU is named.
        PredictError: If there is nothing to learn from, or nothing was verified.
    """
    if options.judge:
        return _judge(options)
    if options.gpu in ("auto", "host"):
        raise OptionError(
            f"--gpu {options.gpu}: a prediction is for a GPU that is named\n"
            "  next: --gpu NAME, a name of 'kgen gpus'; what is in this machine can be tuned"
        )
    return predict_rows(options, options.source, options.compiled, options.model or DEFAULT)


def predict_rows(options: argparse.Namespace, source: str, compiled: int, model: str) -> int:
    """Predict the rows that the common options select, and print each row when it is published.

    Args:
        options: Options of `kgen predict` or `kgen tune`.
        source: Folder of a library with recorded searches, used in addition to that of `--out`.
        compiled: Configs to compile for each problem.
        model: Name of the model.
    """
    for name in asked_operators(options, open_catalogue(options.path)):
        _predict_one(
            argparse.Namespace(**{**vars(options), "op": name}), source, compiled, model
        )
    return 0


def _predict_one(options: argparse.Namespace, source: str, compiled: int, model: str) -> None:
    with open_command(options, gpu_needed=False) as common:
        operator = common.entry.operator
        print(
            f"predicting {operator.name} for {common.gpu.title}, compiler "
            f"{common.compiler.name} {common.compiler.version}",
            flush=True,
        )
        request = PredictRequest(
            entry=common.entry,
            problems=common.problems,
            gpu=common.gpu,
            compiler=common.compiler,
            out=common.out,
            reports=common.reports,
            relatives=relatives(open_catalogue(options.path), common.entry),
            libraries=(common.out, Path(source)),
            paths=common.paths,
            seed=options.seed,
            compiled=compiled,
            model=model,
        )
        with closing(predict(request)) as events:
            for event in events:
                print(_line(event, request), flush=True)
    print(f"\nlibrary  {common.out}\n  predicted rows serve until a tune on that GPU measures "
          "their problems")


def _line(event: PredictEvent, request: PredictRequest) -> str:
    signature = request.entry.operator.signature
    if isinstance(event, PassStarted):
        return (f"{event.pass_name}: {request.model} has learnt from {event.configs} measured "
                f"configs of {event.searched} problems on {' and '.join(event.gpus)}")
    if isinstance(event, Skipped):
        return (f"{event.pass_name} {short_name(event.problem, signature)}: measured on "
                f"{request.gpu.name}, so nothing is predicted")
    if isinstance(event, Compiling):
        return (f"{event.pass_name} {short_name(event.problem, signature)}: compiling "
                f"{event.compiled} of {event.feasible} feasible configs")
    if isinstance(event, HostRunStarted):
        return f"  verifying on the CPU: {event.config}"
    assert isinstance(event, Predicted)
    found = event.prediction
    return (f"  predicted: about {found.predicted_us:.4g} us (floor {found.floor_us:.4g}), "
            f"{found.label}, record {found.record}\n  report {event.report}")


def _judge(options: argparse.Namespace) -> int:
    catalogue = open_catalogue(options.path)
    if options.gpu not in ("auto", "host"):
        profile_named(options.gpu)  # a name that does not exist is an error
    names = [options.op] if options.op else catalogue.names
    found = []
    for name in names:
        entry = catalogue.entry(name)
        passes = chosen_passes(entry.operator.signature, options.pass_name)
        found_in = Path(options.source)
        models = [options.model] if options.model else tuple(MODELS)
        for one in judge(entry, passes, found_in, relatives(catalogue, entry), models,
                         processes=len(os.sched_getaffinity(0))):
            print(f"judged {one.operator} {one.pass_name} by {one.model}", flush=True)
            found.append(one)
    if not found:
        raise PredictError(
            "no model can be judged: no pass has two searched problems on a GPU in "
            f"{options.source}\n"
            "  next: name a library with the reports of searches (--from)"
        )
    print(f"\n{print_judgements(found)}", end="")
    return 0
