"""Evaluate models on recorded searches: leave one problem out, choose, compare with its best time.

A model learns from all searched problems of a pass except one, and chooses a config for that one.
If several GPUs have records, there is a second evaluation without all records of the problem's GPU.
The loss of a choice is its measured time over the shortest measured time of the problem, minus 1.

The model sees no time of the left-out problem. Finals repeat the measurements of a search, so they
are not read at all.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from kgen.catalogue import Entry
from kgen.predict.models import MODELS
from kgen.predict.training import Predictor, TrainingSearch, features_of, read_training_searches
from kgen.search.feasible import enumerate_feasible

PROBLEM, GPU = "problem", "GPU"
LEAST_CONFIGS = 15
"""Fewest measured configs of a problem on which a model is judged; with fewer, the best of them
says little."""
BARS = {PROBLEM: (0.10, 0.35), GPU: (0.15, 0.50)}
"""(median loss, worst loss) that choices should not exceed, by what is left out."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice for one problem that was left out.

    Attributes:
        problem: The problem.
        gpu: The GPU on which it was measured.
        measured: Number of its measured configs.
        loss: The loss of the choice among the measured configs, with known registers and spills.
        feasible: Number of its feasible configs.
        free_loss: The loss of the choice among all feasible configs, without compiling them; None
            if the chosen config was not measured.
        level: Estimated time of the best config over its measured time.
    """

    problem: str
    gpu: str
    measured: int
    loss: float
    feasible: int
    free_loss: float | None
    level: float


@dataclass(frozen=True)
class Judgement:
    """The choices of one model for one pass.

    Attributes:
        operator: The operator.
        pass_name: `forward` or `backward`.
        model: The model's name.
        left_out: `problem`, or `GPU`: all problems of the GPU were left out at once.
        gpus: The GPUs with records.
        too_small: Number of problems with fewer than `LEAST_CONFIGS` measured configs, which are
            used for learning but not judged.
        choices: One for each problem that was left out.
    """

    operator: str
    pass_name: str
    model: str
    left_out: str
    gpus: tuple[str, ...]
    too_small: int
    choices: tuple[Choice, ...] = field(default=())

    @property
    def losses(self) -> list[float]:
        """The losses of the choices among measured configs."""
        return [choice.loss for choice in self.choices]


def judge(
    entry: Entry,
    passes: Sequence[str],
    library: Path,
    relatives: Sequence[Entry] = (),
    models: Sequence[str] = tuple(MODELS),
    processes: int = 1,
) -> Iterator[Judgement]:
    """Judge models on the records of an operator; passes with fewer than two problems are left out.

    Args:
        entry: The operator.
        passes: Names of passes.
        library: Folder of the library that has the records.
        relatives: Operators of its family; their problems are used for learning but not judged.
        models: Names of models.
        processes: Number of processes, each of which leaves out one problem at a time; it does not
            change the results.
    Raises:
        StorageError, RecordError: If a journal cannot be read.
    """
    for pass_name in passes:
        own = read_training_searches((entry,), (library,), pass_name)
        searches = [*own, *read_training_searches(relatives, (library,), pass_name)]
        judged = [one for one in own if len(one.times_us) >= LEAST_CONFIGS]
        if not judged or len(searches) < 2:
            continue
        gpus = tuple(sorted({one.searched.gpu.name for one in searches}))
        cases = tuple(
            (model, left_out)
            for model in models
            for left_out in ((PROBLEM, GPU) if len(gpus) > 1 else (PROBLEM,))
        )
        choices = _choices_of_all(_Bench(entry, tuple(searches), cases), judged, processes)
        for place, (model, left_out) in enumerate(cases):
            yield Judgement(
                entry.operator.name, pass_name, model, left_out, gpus, len(own) - len(judged),
                tuple(found[place] for found in choices),
            )


@dataclass(frozen=True)
class _Bench:
    """The data with which left-out problems are judged: all searches, and pairs of a model and
    what is left out.
    """

    entry: Entry
    searches: tuple[TrainingSearch, ...]
    cases: tuple[tuple[str, str], ...]

    def choices(self, left_out: TrainingSearch) -> list[Choice]:
        """The choices of all cases; the features of feasible configs are computed once."""
        searched = left_out.searched
        pass_ = self.entry.operator.signature.pass_named(searched.pass_name)
        configs = enumerate_feasible(
            self.entry.space.of_pass(searched.pass_name), pass_, searched.problem, searched.gpu
        ).configs
        rows, floor_us = features_of(
            self.entry, searched.pass_name, searched.problem, searched.gpu, configs
        )
        of_config = {o.config: o.median_us for o in searched.observations}
        times = left_out.times_us
        best_us = float(times.min())
        found = []
        for model, how in self.cases:
            predictor = Predictor(
                model, self.entry, searched.problem, self._others(how, left_out))
            chosen = predictor.order(left_out.compiled, compiled=True)[0]
            free = configs[predictor.order(rows, compiled=False)[0]]
            found.append(Choice(
                str(searched.problem),
                searched.gpu.name,
                len(times),
                float(times[chosen]) / best_us - 1,
                len(configs),
                of_config[free] / best_us - 1 if free in of_config else None,
                predictor.best_us(floor_us) / best_us,
            ))
        return found

    def _others(self, how: str, left_out: TrainingSearch) -> list[TrainingSearch]:
        if how == GPU:
            return [one for one in self.searches if one.searched.gpu != left_out.searched.gpu]
        return [one for one in self.searches if not _same_problem(one, left_out)]


def _choices_of_all(
    bench: _Bench, judged: Sequence[TrainingSearch], processes: int
) -> list[list[Choice]]:
    """The choices of each problem, in order."""
    if processes < 2:
        return [bench.choices(one) for one in judged]
    # A forked process has the bench without copying; some operators' cost functions cannot be
    # pickled.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        min(processes, len(judged)), context, initializer=_set_bench, initargs=(bench, judged)
    ) as pool:
        try:
            return list(pool.map(_choices_at, range(len(judged))))
        except BaseException:
            # The pool would wait for the problems in progress, up to a minute each.
            for child in multiprocessing.active_children():
                child.terminate()
            raise


_in_worker: list[tuple[_Bench, Sequence[TrainingSearch]]] = []


def _set_bench(bench: _Bench, judged: Sequence[TrainingSearch]) -> None:
    # A terminal's signal reaches this process as well. It inherits handlers that raise.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _in_worker[:] = [(bench, judged)]


def _choices_at(place: int) -> list[Choice]:
    ((bench, judged),) = _in_worker
    return bench.choices(judged[place])


def _same_problem(one: TrainingSearch, other: TrainingSearch) -> bool:
    """Whether two searches are of one problem, on whatever GPU."""
    return (one.searched.operator, one.searched.problem) == (
        other.searched.operator, other.searched.problem)


def print_judgements(found: Sequence[Judgement]) -> str:
    """Return a table of judgements, the bars that they meet, and what could not be judged."""
    head = f"{'operator':<17}{'pass':<10}{'model':<13}{'problems':>8}{'median':>9}{'worst':>9}" \
           f"{'free choice':>16}{'median':>9}{'level':>8}"
    lines = []
    for title, left_out, some in _sections(found):
        lines += [f"{title}: loss of the choice against the best measured config",
                  "", head, *(_row(one) for one in some), ""]
        for model in dict.fromkeys(one.model for one in some):
            losses = [loss for one in some if one.model == model for loss in one.losses]
            lines.append(
                f"{model}, all {len(losses)} problems: {_verdict(losses, BARS[left_out])}")
        lines.append("")
    gpus = sorted({gpu for one in found for gpu in one.gpus})
    lines += _notes(found, gpus)
    return "\n".join(lines) + "\n"


def _sections(found: Sequence[Judgement]) -> Iterator[tuple[str, str, list[Judgement]]]:
    """The parts of the table: title, what is left out, judgements.

    If a GPU is left out, each GPU has its own part, because one of two GPUs may have far fewer
    records to learn from.
    """
    if some := [one for one in found if one.left_out == PROBLEM]:
        yield "leave one problem out", PROBLEM, some
    for gpu in sorted({c.gpu for one in found if one.left_out == GPU for c in one.choices}):
        own = [replace(one, choices=tuple(c for c in one.choices if c.gpu == gpu))
               for one in found if one.left_out == GPU]
        yield f"leave {gpu} out", GPU, [one for one in own if one.choices]


def _row(one: Judgement) -> str:
    measured = [c.free_loss for c in one.choices if c.free_loss is not None]
    free = f"{len(measured)} of {len(one.choices)} seen"
    return (
        f"{one.operator:<17}{one.pass_name:<10}{one.model:<13}{len(one.choices):>8}"
        f"{_percent(median(one.losses)):>9}{_percent(max(one.losses)):>9}"
        f"{free:>16}{_percent(median(measured)) if measured else '-':>9}"
        f"{median(c.level for c in one.choices):>8.2f}"
    )


def _verdict(losses: Sequence[float], bars: tuple[float, float]) -> str:
    middle, worst = median(losses), max(losses)
    median_bar, worst_bar = bars
    beyond = sum(loss > worst_bar for loss in losses)
    return (
        f"median loss {_percent(middle)} (bar {_percent(median_bar)}: "
        f"{'met' if middle <= median_bar else 'missed'}), worst {_percent(worst)} (bar "
        f"{_percent(worst_bar)}: {'met' if worst <= worst_bar else f'missed by {beyond}'})"
    )


def _notes(found: Sequence[Judgement], gpus: Sequence[str]) -> list[str]:
    small = sum({(o.operator, o.pass_name): o.too_small for o in found}.values())
    notes = [
        "median, worst: choice among the measured configs, whose registers and spills are known",
        "free choice: among all feasible configs; 'seen' counts choices that a search measured",
        "level: estimated time of the best config over its measured time",
        f"{small} problems with fewer than {LEAST_CONFIGS} measured configs taught, and were not "
        "judged",
    ]
    if len(gpus) < 2:
        notes.append(f"leave one GPU out: not judged, because all records are of {gpus[0]}")
    return notes


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
