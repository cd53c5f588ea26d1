"""The whole of `kgen learn`: measure rows on more problems, fit rules, publish and judge them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.emit import TUNED, Emitted, Winner, emit_rules, published_table
from kgen.errors import TuneError
from kgen.learn import group_problems, held_out_problems
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import Record
from kgen.tune import Limits, Sweep, TuneRequest, opened_sweep
from kgen.workflow.environment import environment_of
from kgen.workflow.learn_group import GroupWork, open_group
from kgen.workflow.learning_report import (
    HeldOut,
    LearnReport,
    RuleReport,
    judged,
    write_learning,
)
from kgen.workflow.publish import winner_of
from kgen.workflow.tuning import DEFAULT_HOST_TRIALS, DEFAULT_TRIALS, check_writable

RIVALS = 3  # configs of a search that are timed beside the rule's


@dataclass(frozen=True)
class LearnJob:
    """What `kgen learn` was asked for; see `TuneJob` for the fields they share.

    Attributes:
        problems: By pass: problems to learn from besides the tuned ones, whatever their constants.
        points: Training problems per group, at most; the tuned ones are all taken.
        searches: Per rule, of training problems far from the tuned ones: what they find becomes a
            candidate.
        search_s: Seconds for each search, those of problems that are held out, too.
        time_s: Seconds for all training, or None.
        held_out: Problems to judge the rules of each pass on.
        trials: Of such a search, at most; None for a default.
        say: Told what is being done.
    """

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    out: Path
    reports: Path
    points: int
    searches: int
    search_s: float
    time_s: float | None
    held_out: int
    trials: int | None
    seed: int
    paths: tuple[str, ...]
    l2: str
    say: Callable[[str], None]
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Learnt:
    """What came of it.

    Attributes:
        report: As it was written.
        report_path: Where.
        library: The emitted library; None if nothing was learnt.
    """

    report: LearnReport
    report_path: Path
    library: Emitted | None


def learn(job: LearnJob) -> Learnt:
    """Learn the rules of each pass, publish them, and judge them on problems that are held out.

    Trials go to the journal of the operator's tunes; no row is published of what is held out.

    Raises:
        CatalogueError: If the operator was not tuned for the GPU.
        TuneError: If there is nothing to learn from.
        WorkerError, StorageError: As named.
    """
    check_writable(job.reports)
    published_table(job.out, job.entry.operator.name, job.gpu.name)
    rules: list[RuleReport] = []
    held_out: list[HeldOut] = []
    environment = None
    library = None
    with tempfile.TemporaryDirectory(prefix="kgen-learn-") as folder:
        for pass_name in job.passes:
            anchors = _anchors(job, pass_name)
            if not anchors:
                job.say(f"{pass_name}: nothing was tuned, so there is nothing to learn from")
                continue
            with opened_sweep(_request(job, pass_name, anchors, Path(folder))) as sweep:
                works = _measured(job, sweep, anchors)
                new = _rows(sweep, works, job.say)
                library = _publish(job, works, new)
                rules += [work.report(w.record.id for w in new) for work in works]
                held_out += _held_out(job, sweep, works)
                environment = environment_of(
                    sweep.session.environment, job.compiler, sweep.copy_gbps, {}
                )
    if environment is None:
        raise TuneError(
            f"{job.entry.operator.name} on {job.gpu.name}: no {' or '.join(job.passes)} rows\n"
            f"  run: kgen tune --op {job.entry.operator.name} --gpu {job.gpu.name}, or name "
            "problems with --problem"
        )
    report = LearnReport(
        job.entry.operator.name, job.gpu.name, environment, judged(held_out), tuple(held_out),
        tuple(rules),
    )
    path = job.reports / "learnt" / f"{job.gpu.name}.yaml"
    write_learning(path, report)
    return Learnt(report, path, library)


def _anchors(job: LearnJob, pass_name: str) -> tuple[Problem, ...]:
    """The problems that were tuned, then those that the user named."""
    table = published_table(job.out, job.entry.operator.name, job.gpu.name)
    rows = [r for r in table.rows if r.pass_name == pass_name and r.origin == TUNED]
    tuned = [Problem(row.dims, row.dtypes) for row in rows]
    return tuple(dict.fromkeys([*tuned, *job.problems[pass_name]]))


def _request(
    job: LearnJob, pass_name: str, anchors: tuple[Problem, ...], folder: Path
) -> TuneRequest:
    default = DEFAULT_HOST_TRIALS if job.gpu.is_host else DEFAULT_TRIALS
    return TuneRequest(
        entry=job.entry,
        pass_name=pass_name,
        problems=anchors,
        gpu=job.gpu,
        ordinal=job.ordinal,
        compiler=job.compiler,
        journal=job.reports / f"{job.gpu.name}.trials.jsonl",
        study=folder / f"{pass_name}.optuna.log",  # of no use once the rule is there
        trials=job.trials or default,
        time_s=None,
        seed=job.seed,
        paths=job.paths,
        peers=False,
        l2=job.l2,
        limits=job.limits,
    )


def _measured(job: LearnJob, sweep: Sweep, anchors: Sequence[Problem]) -> list[GroupWork]:
    """Try the candidates of each group on its training problems, as far as the time goes."""
    pass_name = sweep.session.pass_name
    table = published_table(job.out, job.entry.operator.name, job.gpu.name)
    rows = [row for row in table.rows if row.pass_name == pass_name]
    compiled_in = {c for v in job.entry.space.of_pass(pass_name) for c in v.constants}
    groups = group_problems(anchors, compiled_in)
    works = [open_group(sweep.session, job.entry, group, rows, job.points) for group in groups]
    for work in works:
        problem = work.problems[0]
        sweep.prepare(problem, [c for c in work.configs if work.is_feasible(c, problem)])
    time_s = None if job.time_s is None else job.time_s / len(job.passes)
    started = time.monotonic()
    for place, work in enumerate(works):
        now = time.monotonic()
        end = None
        if time_s is not None:  # what earlier groups left over goes to those that are left
            end = now + max(0.0, started + time_s - now) / (len(works) - place)
        for problem in work.outlying(job.searches):
            until = time.monotonic() + job.search_s
            work.explore(sweep, problem, until if end is None else min(until, end))
        for problem in work.problems:
            if end is not None and work.tried and time.monotonic() >= end:
                break
            work.measure(sweep, problem)
        job.say(
            f"{pass_name} {work.group.label}: {len(work.configs)} configs, {len(work.tried)} of "
            f"{len(work.problems)} problems in {time.monotonic() - now:.1f} s"
        )
    return [work for work in works if work.tried]


def _rows(
    sweep: Sweep, works: Sequence[GroupWork], say: Callable[[str], None]
) -> list[Winner]:
    """Certify the configs that the rules prefer and that have no row in their groups."""
    session = sweep.session
    made: list[Winner] = []
    while True:
        wanted: list[tuple[GroupWork, Problem, Record]] = [
            (work, *trial) for work in works for trial in work.wanted()
        ]
        if not wanted:
            return made
        say(f"{session.pass_name}: certifying {len(wanted)} new rows")
        found = sweep.certified([(problem, record) for _, problem, record in wanted], say)
        for (work, problem, record), finalist in zip(wanted, found, strict=True):
            work.settle(problem, record, None if finalist is None else finalist.record.id)
            if finalist is not None:
                made.append(
                    winner_of(
                        session.entry, session.pass_name, session.gpu, problem, finalist,
                        searched=False,
                    )
                )


def _publish(job: LearnJob, works: Sequence[GroupWork], new: Sequence[Winner]) -> Emitted:
    rules = [work.rule() for work in works]
    named = {record for rule in rules for record in rule.records}
    return emit_rules(
        job.out, job.entry.operator, job.gpu, rules,
        [winner for winner in new if winner.record.id in named], include_dir(),
    )


def _held_out(job: LearnJob, sweep: Sweep, works: Sequence[GroupWork]) -> list[HeldOut]:
    """Judge the rules: search problems that none was learnt from, and time the rule's choice beside
    what was found. Groups take turns.
    """
    drawn = [
        held_out_problems(
            work.group, job.entry.operator, sweep.session.pass_name, tuple(work.tried),
            job.held_out,
        )
        for work in works
    ]
    turns = [
        (work, problems[turn])
        for turn in range(job.held_out)
        for work, problems in zip(works, drawn, strict=True)
        if turn < len(problems)
    ]
    found: list[HeldOut] = []
    for work, problem in turns:
        if len(found) == job.held_out:
            break
        judgement = _judge(job, sweep, work, problem)
        if judgement is not None:
            found.append(judgement)
            job.say(f"held out: {problem}: loss {100 * judgement.loss:.1f} %")
    return found


def _judge(job: LearnJob, sweep: Sweep, work: GroupWork, problem: Problem) -> HeldOut | None:
    """Judge one problem; None if the rule has no row for it, or that row's trial failed."""
    ours, nearest = work.choice(problem), work.nearest(problem)
    if ours is None:
        return None
    likely = [ours, *([nearest] if nearest else []), *work.configs]
    books = sweep.search(problem, likely, time.monotonic() + job.search_s)
    ranking = [record.config for record in books.ranking()]
    known = sweep.try_all(problem, list(dict.fromkeys([ours, *([nearest] if nearest else [])])))
    verified = {record.config for record in known.ranking()}
    if ours not in verified:
        job.say(f"held out: {problem}: {ours.label} was not verified")
        return None
    entrants = [ours, *([nearest] if nearest in verified and nearest else []), *ranking[:RIVALS]]
    entrants = list(dict.fromkeys(entrants))
    times = dict(zip(entrants, sweep.race(problem, entrants), strict=True))
    best = min(entrants, key=times.__getitem__)
    nearest_us = times.get(nearest) if nearest else None
    return HeldOut(
        pass_name=sweep.session.pass_name,
        problem=str(problem),
        record=work.records[ours.digest],
        rule_us=times[ours],
        best_us=times[best],
        best=best.label,
        loss=times[ours] / times[best] - 1,
        nearest_us=nearest_us,
        nearest_loss=None if nearest_us is None else nearest_us / times[best] - 1,
        trials=sum(books.fates.values()),
    )
