"""`kgen learn` as a whole: measure rows on more problems, fit rules, publish and judge them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.emit import TUNED, Emitted, RowState, Winner, emit_rules, published_table
from kgen.errors import TuneError, WorkerError
from kgen.learn.grid import group_problems, held_out_problems
from kgen.learn.group import GroupWork, open_group
from kgen.learn.report import (
    SAFE,
    HeldOut,
    LearnReport,
    RuleReport,
    judged,
    load_learning,
    merge_learning,
    write_learning,
)
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.report.environment import environment_of
from kgen.tune import (
    Limits,
    Sweep,
    TuneRequest,
    check_folder_writable,
    default_trials,
    journal_path,
    open_sweep,
    winner_of,
)

LEAST_GROUP_S = 4.0  # seconds that each group gets at least, if there is enough time left
SEARCH_SHARE = 0.4  # share of a group's time; the rest is for measuring the candidates
RIVALS = 3  # configs of a search that are timed against the rule's choice


@dataclass(frozen=True)
class LearnJob:
    """The request of `kgen learn`; see `TuneRequest` for shared fields.

    Attributes:
        problems: Problems by pass to learn from, in addition to the tuned ones.
        only: Values that a problem must have: (name of a dim, dtype or option, value).
        points: Largest number of training problems per group; all tuned ones are taken.
        searches: Searches per rule, of training problems far from tuned ones; their best configs
            become candidates.
        search_s: Seconds for each search, also of held-out problems.
        time_s: Seconds for all training, or None.
        held_out: Number of problems on which the rules of each pass are judged.
        trials: Largest number of trials of a search; None for the default.
        say: Called with a line about each step.
    """

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    out: Path
    reports: Path
    only: tuple[tuple[str, str], ...]
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
    """The result of `kgen learn`.

    Attributes:
        report: The report of this run.
        report_path: File of the report, merged with earlier results about other rules.
        library: The emitted library; None if nothing was learnt.
    """

    report: LearnReport
    report_path: Path
    library: Emitted | None


def learn(job: LearnJob) -> Learnt:
    """Learn the rules of each pass, publish them, and judge them on problems that are held out.

    Trials are recorded in the journal of the operator's tunes. Held-out problems get no rows.

    Raises:
        CatalogueError: If the operator was not tuned for the GPU.
        RecordError: If an earlier report, or the table, does not have the format that kgen
            writes.
        TuneError: If there is nothing to learn from.
        WorkerError, StorageError: As named.
    """
    check_folder_writable(job.reports)
    table = published_table(job.out, job.entry.operator.name, job.gpu.name)
    path = job.reports / "learnt" / f"{job.gpu.name}.yaml"
    before = load_learning(path) if path.exists() else None
    rules: list[RuleReport] = []
    held_out: list[HeldOut] = []
    environment = None
    library = None
    with tempfile.TemporaryDirectory(prefix="kgen-learn-") as folder:
        for pass_name in job.passes:
            # The rows of this pass; publishing one pass leaves the other unchanged.
            rows = [row for row in table.rows if row.pass_name == pass_name]
            anchors = _anchors(job, pass_name, rows)
            if not anchors:
                job.say(f"{pass_name}: no such problem was tuned: nothing to learn from")
                continue
            request = _request(job, pass_name, anchors, Path(folder))
            with open_sweep(request, pass_name) as sweep:
                works = _measured(job, sweep, anchors, rows)
                new, judgements = _confirmed(job, sweep, works)
                library = _publish(job, works, new)
                rules += [work.report([w.record.id for w in new]) for work in works]
                held_out += judgements
                environment = environment_of(
                    sweep.session.environment, job.compiler, sweep.copy_gbps, {}
                )
    if environment is None:
        raise TuneError(
            f"{job.entry.operator.name} on {job.gpu.name}: no {' or '.join(job.passes)} rows"
            + "".join(f" of {name}={value}" for name, value in job.only) + "\n"
            f"  run: kgen tune --op {job.entry.operator.name} --gpu {job.gpu.name}, or name "
            "problems with --problem"
        )
    report = LearnReport(
        job.entry.operator.name, job.gpu.name, environment, judged(held_out), tuple(held_out),
        tuple(rules),
    )
    write_learning(path, merge_learning(before, report))
    return Learnt(report, path, library)


def _anchors(job: LearnJob, pass_name: str, rows: Sequence[RowState]) -> tuple[Problem, ...]:
    """Tuned problems, then those given by the user, filtered by `only`."""
    tuned = [Problem(row.dims, row.dtypes) for row in rows if row.origin == TUNED]
    return tuple(
        problem
        for problem in dict.fromkeys([*tuned, *job.problems[pass_name]])
        if all(str(problem.names[name]) == value for name, value in job.only)
    )


def _request(
    job: LearnJob, pass_name: str, anchors: tuple[Problem, ...], folder: Path
) -> TuneRequest:
    return TuneRequest(
        entry=job.entry,
        passes=(pass_name,),
        problems={pass_name: anchors},
        gpu=job.gpu,
        ordinal=job.ordinal,
        compiler=job.compiler,
        journal=journal_path(job.reports, job.gpu),
        study=folder / f"{pass_name}.optuna.log",  # peers are not needed for a rule
        trials=job.trials or default_trials(job.gpu),
        time_s=None,
        seed=job.seed,
        paths=job.paths,
        against=(),
        l2=job.l2,
        limits=job.limits,
    )


def _measured(
    job: LearnJob, sweep: Sweep, anchors: Sequence[Problem], rows: Sequence[RowState]
) -> list[GroupWork]:
    """Try the candidates of each group on its training problems within the time limit."""
    pass_name = sweep.session.pass_name
    compiled_in = {c for v in job.entry.space.of_pass(pass_name) for c in v.constants}
    groups = group_problems(anchors, compiled_in)
    works = [open_group(sweep.session, job.entry, group, rows, job.points) for group in groups]
    works.sort(key=lambda work: -len(work.tuned))  # stable: groups with the most anchors first
    time_s = None if job.time_s is None else job.time_s / len(job.passes)
    started = time.monotonic()
    for place, work in enumerate(works):
        now = time.monotonic()
        end = None
        if time_s is not None:  # unused time of earlier groups is shared among the remaining ones
            left = started + time_s - now
            if place and left <= 0:
                job.say(f"{pass_name}: no time for {len(works) - place} other groups")
                break
            end = now + max(left / (len(works) - place), min(left, LEAST_GROUP_S))
        for other in works[place + (place > 0) : place + 2]:  # this one's, if it is the first
            _prepare(sweep, other)
        _measure(job, sweep, work, end)
        job.say(
            f"{pass_name} {work.group.label}: {len(work.configs)} configs, {len(work.tried)} of "
            f"{len(work.problems)} problems in {time.monotonic() - now:.1f} s"
        )
    return [work for work in works if work.tried]


def _prepare(sweep: Sweep, work: GroupWork) -> None:
    """Build a group's candidates while the device works on the group before."""
    sweep.prepare(work.problems[0], work.feasible(work.problems[0]))


def _measure(job: LearnJob, sweep: Sweep, work: GroupWork, end: float | None) -> None:
    """Search a few problems of a group for candidates, then try all candidates on all problems."""
    explored: list[Problem] = []
    while len(explored) < job.searches and (problem := work.outlying(explored)) is not None:
        explored.append(problem)
        now = time.monotonic()
        most_s = job.search_s
        if end is not None:
            most_s = min(most_s, max(0.0, end - now) * SEARCH_SHARE / job.searches)
        work.explore(sweep, problem, now + most_s)
    for problem in dict.fromkeys([*work.tuned, *explored, *work.problems]):
        if end is not None and work.tried and time.monotonic() >= end:
            break
        work.measure(sweep, problem)


def _confirmed(
    job: LearnJob, sweep: Sweep, works: Sequence[GroupWork]
) -> tuple[list[Winner], list[HeldOut]]:
    """Certify configs that the rules prefer and that have no row in their groups.

    The rules are judged while the host runs continue. A refused config is not chosen again.
    """
    session = sweep.session
    made: list[Winner] = []
    while True:
        wanted = [(work, *trial) for work in works for trial in work.wanted()]
        if wanted:
            job.say(f"{session.pass_name}: certifying {len(wanted)} new rows")
        certified = [sweep.certify(problem, record) for _, problem, record in wanted]
        if job.gpu.is_host:  # a concurrent host run would disturb the timings
            wait([waiting.host_run for waiting in certified if waiting is not None])
        held_out = _held_out(job, sweep, works)
        refused = False
        for (work, problem, record), waiting in zip(wanted, certified, strict=True):
            finalist = None if waiting is None else sweep.confirm(waiting)
            if finalist is None or finalist.record.fate is not Fate.VERIFIED:
                job.say(f"refused: {record.config.label} at {problem}; see {session.journal.path}")
                work.decide(problem, record, None)
                refused = True
                continue
            work.decide(problem, record, finalist.record.id)
            made.append(
                winner_of(
                    session.entry, session.pass_name, session.gpu, problem, finalist,
                    searched=False,
                )
            )
        if not refused:
            return made, [
                replace(found, record=work.records.get(digest, SAFE))
                for work, digest, found in held_out
            ]


def _publish(job: LearnJob, works: Sequence[GroupWork], new: Sequence[Winner]) -> Emitted:
    rules = [work.rule() for work in works]
    named = {record for rule in rules for record in rule.records}
    return emit_rules(
        job.out, job.entry.operator, job.gpu, rules,
        [winner for winner in new if winner.record.id in named], include_dir(),
        job.entry,
    )


def _held_out(
    job: LearnJob, sweep: Sweep, works: Sequence[GroupWork]
) -> list[tuple[GroupWork, str, HeldOut]]:
    """Judge the rules: search held-out problems, and time the library's choice against the results.

    The groups alternate.

    Returns:
        The group, the digest of the library's choice, and the judgement, which has no record yet.
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
    safe = job.entry.space.safe_variant(sweep.session.pass_name).safe
    assert safe is not None
    found: list[tuple[GroupWork, str, HeldOut]] = []
    for work, problem in turns:
        if len(found) == job.held_out:
            break
        ours = work.choice(problem) or safe
        try:
            judgement = _judge(job, sweep, work, problem, ours)
        except WorkerError as trouble:  # a failed judgement must not discard the rules
            job.say(f"held out: {problem}: not judged: {trouble}")
            continue
        if judgement is not None:
            found.append((work, ours.digest, judgement))
            job.say(f"held out: {problem}: loss {100 * judgement.loss:.1f} %")
    return found


def _judge(
    job: LearnJob, sweep: Sweep, work: GroupWork, problem: Problem, ours: Config
) -> HeldOut | None:
    """Judge the library's choice for one problem; None if it was not verified there."""
    nearest = work.nearest(problem)
    served = [ours] if nearest is None else [ours, nearest]
    likely = [*served, *work.likely(problem)]
    state = sweep.search(problem, likely, time.monotonic() + job.search_s)
    verified = [r.config for r in sweep.try_all(problem, list(dict.fromkeys(served))).ranking()]
    if ours not in verified:
        job.say(f"held out: {problem}: {ours.label} was not verified")
        return None
    entrants = list(dict.fromkeys([*verified, *(r.config for r in state.ranking()[:RIVALS])]))
    times = dict(zip(entrants, sweep.compare(problem, entrants), strict=True))
    best = min(entrants, key=times.__getitem__)
    nearest_us = None if nearest is None else times.get(nearest)
    return HeldOut(
        pass_name=sweep.session.pass_name,
        problem=str(problem),
        covers=work.group.label,
        record="",
        rule_us=times[ours],
        best_us=times[best],
        best=best.label,
        loss=times[ours] / times[best] - 1,
        nearest_us=nearest_us,
        nearest_loss=None if nearest_us is None else nearest_us / times[best] - 1,
        trials=sum(state.fates.values()),
    )
