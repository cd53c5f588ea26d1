"""Tunes of the operator `planted`, whose configs carry faults; helpers of the fault suite."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import CompileLimits, Compiler, open_compiler
from kgen.catalogue import open_catalogue
from kgen.journal import Journal
from kgen.launch.select import select_gpu
from kgen.model.problem import parse_problem
from kgen.model.record import Fate, Record
from kgen.tune import (
    Limits,
    PassResult,
    ProblemStarted,
    Progress,
    TrialRecorded,
    TuneEvent,
    TuneRequest,
    pass_results,
    tune,
)

PLANTED = Path(__file__).parent / "planted"
# Far below the default limits, and far above the needs of a healthy config on a loaded machine.
COMPILE_LIMITS = CompileLimits(timeout_s=20.0, memory_bytes=2**30)
TRIAL_S = 15.0

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
DEVICES = [
    pytest.param("host", id="host"),
    pytest.param("auto", id="gpu", marks=[pytest.mark.gpu, _NO_GPU]),
]


def plant(folder: Path, faults: list[str], threads: tuple[int, ...] = (64,)) -> Path:
    """Make a copy of the operator whose search space has these faults."""
    mine = folder / "mine"
    if mine.exists():
        shutil.rmtree(mine)
    shutil.copytree(PLANTED, mine)
    space = mine / "search_spaces" / "planted.yaml"
    text = space.read_text()
    listed = list(dict.fromkeys([*faults, "none"]))  # `safe` names the config without a fault
    text = text.replace("threads: [64, 128]", f"threads: {sorted({*threads, 128})}")
    text = text.replace("fault: [none]", f"fault: [{', '.join(listed)}]")
    wanted = f"fault in [{', '.join(repr(f) for f in faults)}] and threads in {list(threads)}"
    rule = f"      require:\n        - rule: ({wanted}) or N == 67\n          why: planted\n"
    space.write_text(text.replace("      workspace:", rule + "      workspace:"))
    return mine


def compiler_for(device: str, limits: CompileLimits = COMPILE_LIMITS) -> Compiler:
    """The device's default compiler, with tight limits."""
    gpu, _ = select_gpu(device)
    name = "host" if gpu.is_host else "nvrtc"
    return open_compiler(name, [include_dir()], limits=limits)


def request(
    folder: Path,
    mine: Path,
    compiler: Compiler,
    device: str = "host",
    *,
    problem: str = "M=9,N=64",
    retry: bool = False,
    limits: Limits = Limits(TRIAL_S),  # noqa: B008 - frozen
) -> TuneRequest:
    """A tune of all configs."""
    entry = open_catalogue([mine]).entry("planted")
    gpu, ordinal = select_gpu(device)
    return TuneRequest(
        entry=entry,
        passes=("forward",),
        problems={"forward": (parse_problem(problem, entry.operator.signature),)},
        gpu=gpu,
        ordinal=ordinal,
        compiler=compiler,
        journal=journal_path(folder),
        study=folder / "optuna.log",
        trials=60,
        time_s=None,
        seed=0,
        paths=(str(mine),),
        against=(),
        limits=limits,
        retry=retry,
    )


def run_tune(
    asked: TuneRequest, on_progress: Callable[[Progress], None] | None = None
) -> PassResult:
    """Run a tune of one pass to its end; `on_progress` receives the progress of its searches."""
    with closing(tune(asked)) as events:
        (result,) = pass_results(_followed(events, on_progress))
    return result


def _followed(
    events: Iterable[TuneEvent], on_progress: Callable[[Progress], None] | None
) -> Iterator[TuneEvent]:
    for event in events:
        if on_progress is not None and isinstance(event, ProblemStarted | TrialRecorded):
            on_progress(event.progress)
        yield event


def journal_path(folder: Path) -> Path:
    """The path of the journal of `request`."""
    return folder / "trials.jsonl"


def records(folder: Path) -> list[Record]:
    """All records, oldest first."""
    return list(Journal(journal_path(folder)).read())


def by_fault(folder: Path) -> dict[str, list[Record]]:
    """Records by planted fault."""
    found: dict[str, list[Record]] = {}
    for record in records(folder):
        found.setdefault(str(record.config.as_dict()["fault"]), []).append(record)
    return found


def what_became_of_all(folder: Path) -> str:
    """A line for each record, for the message of a failed assertion."""
    return "\n".join(
        f"{r.config.as_dict()['fault']} {r.problem}: {r.fate} {r.timing} {r.reason}"
        for r in records(folder)
    )


def fates(folder: Path) -> dict[str, set[Fate]]:
    """Fates by planted fault."""
    return {fault: {r.fate for r in found} for fault, found in by_fault(folder).items()}
