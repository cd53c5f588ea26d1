"""`kgen worker`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue
from kgen.cli.context import compile_limits, reports_dir
from kgen.cli.storage_option import shared_storage
from kgen.errors import OptionError
from kgen.launch.select import select_device
from kgen.model.gpu import GpuProfile
from kgen.model.problem import parse_problem
from kgen.tune import (
    Agreement,
    Limits,
    ProblemStarted,
    TrialRecorded,
    TuneJoined,
    TuneLeft,
    TuneRequest,
    TuneSpec,
    help_tunes,
    journal_path,
    study_path,
)


def run(options: argparse.Namespace) -> int:
    """Help tunes until interrupted, or until there was nothing to do for the time of `--idle`.

    Raises:
        OptionError: If no storage is named.
    """
    shared = shared_storage(options)
    if shared is None:
        raise OptionError(
            "no storage\n  add --storage URL, as of the 'kgen tune' to help, or set KGEN_STORAGE"
        )
    gpu, ordinal = select_device(options.gpu, options.device)

    @contextmanager
    def open_request(spec: TuneSpec) -> Iterator[TuneRequest]:
        with _open_request(options, gpu, ordinal, spec) as request:
            yield request

    print(f"helping the tunes of {shared.url} on {gpu.title}; Ctrl-C ends the worker", flush=True)
    trials = 0
    try:
        with closing(help_tunes(shared, gpu.name, ordinal, open_request, options.idle)) as events:
            for event in events:
                match event:
                    case TuneJoined(request):
                        print(f"joined: {request.entry.operator.name} on {gpu.title}", flush=True)
                    case TuneLeft(spec, why_not):
                        print(f"cannot help {spec.operator}: {why_not}" if why_not
                              else f"done: {spec.operator}", flush=True)
                    case ProblemStarted(progress):
                        print(f"  {progress.pass_name} {progress.name}", flush=True)
                    case Agreement(problem, config, ratio):
                        print(f"  A/A: {config} of {problem} takes {ratio:.3f} times as long as on "
                              "another device", flush=True)
                    case TrialRecorded():
                        trials += 1
    finally:
        print(f"{trials} trials were recorded, by this worker and by others", flush=True)
    return 0


@contextmanager
def _open_request(
    options: argparse.Namespace, gpu: GpuProfile, ordinal: int, spec: TuneSpec
) -> Iterator[TuneRequest]:
    """The request of a tune on this machine.

    Raises:
        UserError: If this machine lacks the operator, or the operator here has no such problem.
    """
    entry = open_catalogue(options.path).entry(spec.operator)
    signature = entry.operator.signature
    problems = {
        name: tuple(parse_problem(text, signature) for text in texts)
        for name, texts in spec.problems.items()
    }
    back_end = "host" if gpu.is_host else spec.compiler
    compiler = open_compiler(back_end, [include_dir()], limits=compile_limits(options))
    reports = reports_dir(Path(options.out), spec.operator)
    try:
        yield TuneRequest(
            entry=entry,
            passes=spec.passes,
            problems=problems,
            gpu=gpu,
            ordinal=ordinal,
            compiler=compiler,
            journal=journal_path(reports, gpu),
            study=study_path(reports, gpu),
            trials=spec.trials,
            time_s=None,
            seed=spec.seed,
            paths=tuple(str(Path(p).resolve()) for p in options.path),
            l2=spec.l2,
            limits=Limits(spec.trial_s, spec.memory_bytes),
            retry=bool(spec.retry),
            retry_name=spec.retry,
        )
    finally:
        compiler.close()
