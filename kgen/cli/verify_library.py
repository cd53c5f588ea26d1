"""`kgen verify --library`: check the kernels of an emitted library."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import (
    Catalogue,
    Entry,
    load_population,
    open_catalogue,
    population_names,
)
from kgen.cli.arguments import chosen_passes, chosen_problems
from kgen.cli.context import compile_limits, reports_dir
from kgen.cli.tuning_options import ARRAY_PROBLEMS
from kgen.emit import LoadedLibrary
from kgen.errors import OptionError
from kgen.launch.select import absent_gpu, select_gpu
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.trial import HostRunner, Session, WorkerHandle, jobs_beside
from kgen.verify import Checked, LibraryCheck, OnDevice, OnHost, served_subjects
from kgen.verify.library import Runs
from kgen.worker import Setup


def run(options: argparse.Namespace, show: Callable[[Checked], None]) -> int:
    """Check every row and a covering array of other problems; 1 if a kernel is wrong or refused.

    Args:
        options: Options of the command.
        show: Prints a verdict.
    Raises:
        OptionError: If options contradict each other.
    """
    if options.record or options.problem or options.sanitize:
        raise OptionError("--library chooses its problems, and takes neither --record nor "
                          "--problem nor --sanitize\n  --array N: how many beside the rows")
    catalogue = open_catalogue(options.path)
    entry = catalogue.entry(options.op)
    gpu, ordinal = _gpu(options.gpu)
    wrong = 0
    with LoadedLibrary.open(Path(options.out), "--out") as library:
        for name in chosen_passes(entry.operator.signature, options.pass_name):
            begun = time.monotonic()
            subjects, refused = served_subjects(
                library, entry, name, gpu, _known(catalogue, entry, name),
                ARRAY_PROBLEMS if options.array is None else options.array, options.seed)
            with _runs(options, entry, name, gpu, ordinal, library) as runs:
                check = LibraryCheck(library, entry, name, runs, Renderer(library.headers))
                results = []
                checks = check.check(subjects)
                for subject in subjects:
                    print(f"{name} {subject.served.step}", end=" ", flush=True)
                    results.append(next(checks))
                    show(results[-1])
            for problem in refused:
                print(f"{name} REFUSED: the library has no kernel for {problem}")
            good = sum(result.ok for result in results)
            steps = Counter(subject.served.step for subject in subjects)
            counted = ", ".join(f"{count} {step}" for step, count in steps.most_common())
            where = f"on {gpu.title}" if ordinal is not None or gpu.is_host else (
                f"on the CPU as for {gpu.title}, which is not in this machine")
            print(f"{name}: {good} of {len(results)} kernels compute {options.op} {where} "
                  f"({counted}) in {time.monotonic() - begun:.0f} s; {len(refused)} calls refused",
                  flush=True)
            wrong += len(results) - good + len(refused)
    return 1 if wrong else 0


def _gpu(name: str) -> tuple[GpuProfile, int | None]:
    """The profile, and the number of the GPU; None if the GPU is not in this machine."""
    if (absent := absent_gpu(name)) is not None:
        return absent, None
    gpu, ordinal = select_gpu(name)
    return gpu, None if gpu.is_host else ordinal


def _known(catalogue: Catalogue, entry: Entry, pass_name: str) -> list[Problem]:
    """All problems of populations; if there are none, the operator's own problems."""
    operator = entry.operator
    found = [problem for name in population_names(catalogue)
             for problem in load_population(name, catalogue).problems(operator.name, pass_name)]
    return found or list(chosen_problems(operator, pass_name, [], False))


@contextmanager
def _runs(
    options: argparse.Namespace, entry: Entry, pass_name: str, gpu: GpuProfile,
    ordinal: int | None, library: LoadedLibrary,
) -> Iterator[Runs]:
    name = entry.operator.name
    paths = tuple(str(Path(p).resolve()) for p in options.path)
    setup = Setup(name, paths, gpu, ordinal or 0, options.seed)
    back_end = "host" if ordinal is None else options.compiler
    with ExitStack() as stack:
        compiler = open_compiler(back_end, [library.headers], limits=compile_limits(options))
        stack.callback(compiler.close)
        if ordinal is None:
            jobs = jobs_beside(len(os.sched_getaffinity(0)) - 1)
            runner = stack.enter_context(HostRunner(setup, library.headers, jobs))
            yield OnHost(entry, pass_name, compiler, runner)
            return
        worker = stack.enter_context(WorkerHandle(setup))
        journal = reports_dir(Path(options.out), name) / f"{gpu.name}.trials.jsonl"
        yield OnDevice(Session(entry, pass_name, gpu, compiler, journal, worker))
