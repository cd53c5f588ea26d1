"""`kgen bench` as a whole: choose kernels, verify and time them, write the results."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.bench.calls import run_call_costs
from kgen.bench.ladder import run_ladder
from kgen.bench.peer_comparison import compare_with_peers
from kgen.bench.profile import run_profile
from kgen.bench.results import CallTable, ChosenConfig, LadderResult, PeerComparison, Profile
from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.errors import RecordError, SpaceError, why_unreadable
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.report import Environment, Report, decode_as, encode_as, load_report, write_whole
from kgen.report.environment import environment_of
from kgen.search.declared import as_declared
from kgen.search.feasible import is_feasible
from kgen.trial import Session, WorkerHandle, check_peer_names
from kgen.worker import Setup

SCHEMA = 1


@dataclass(frozen=True)
class BenchJob:
    """The request of `kgen bench`.

    Attributes:
        entry: The operator with its space and templates.
        passes: Passes, in order.
        problems: By pass, in order.
        gpu: Profile of the device.
        ordinal: CUDA device ordinal.
        compiler: Back end.
        reports: Folder of the operator's reports and journals.
        seed: The seed of inputs and of the order of sampling.
        paths: The `--path` folders, for the worker.
        against: Names of peers; None: all peers.
        ladder: Whether to run the published ladder instead of the comparison with peers.
        trace: File for the trace of a profile. If given, a profile is made instead of the
            comparison. With several problems each file name contains the pass and a number.
        call_cost: Whether to measure the host cost of library calls instead.
        tune_options: Further options of the `kgen tune` command that a remark suggests.
        on_result: Called with every result.
    """

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    reports: Path
    seed: int
    paths: tuple[str, ...]
    against: tuple[str, ...] | None
    ladder: bool
    trace: Path | None
    call_cost: bool
    tune_options: tuple[str, ...]
    on_result: Callable[[PeerComparison | LadderResult | Profile | CallTable], None]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All results of a bench. The field names are the keys of the YAML; docs/bench.md.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        environment: Where the results were measured; the keys are those of a tuning report.
        contests: Comparisons of kgen's kernels with their peers.
        ladders: Published ladders.
        profiles: Kernels and peers under torch.profiler.
        calls: Host costs of calls.
    """

    operator: str
    gpu: str
    environment: Environment
    contests: tuple[PeerComparison, ...]
    ladders: tuple[LadderResult, ...]
    profiles: tuple[Profile, ...] = ()
    calls: tuple[CallTable, ...] = ()
    schema: int = SCHEMA


def run_bench(job: BenchJob) -> BenchReport:
    """Bench every pass and problem.

    Raises:
        CatalogueError: If `against` names a peer that no pass has.
        SpaceError: If a ladder is requested and the space declares none.
        BenchError: If a kernel is wrong.
        WorkerError: If the device cannot be used.
    """
    operator, space = job.entry.operator.name, job.entry.space
    passes = job.passes
    if job.ladder:
        declared = {step.pass_name for step in space.ladder}
        passes = tuple(p for p in passes if p in declared)
        if not passes:
            raise SpaceError(
                f"{space.path}: declares no ladder of {' or '.join(job.passes)}\n"
                "  a published table goes under the key 'ladder'; see "
                "docs/tutorials/new-operator.md"
            )
    tuned_path = job.reports / f"{job.gpu.name}.yaml"
    tuned = load_report(tuned_path) if tuned_path.exists() and not job.ladder else None
    contests: list[PeerComparison] = []
    ladders: list[LadderResult] = []
    profiles: list[Profile] = []
    calls: list[CallTable] = []
    setup = Setup(operator, job.paths, job.gpu, job.ordinal, job.seed)
    with WorkerHandle(setup) as worker:
        if job.against is not None:
            check_peer_names(job.against, operator, passes, worker)
        journal = job.reports / f"{job.gpu.name}.trials.jsonl"
        sessions = [Session(job.entry, p, job.gpu, job.compiler, journal, worker) for p in passes]
        copy_gbps = sessions[0].probe()
        for session in sessions:
            for problem in job.problems[session.pass_name]:
                if job.ladder:
                    steps = [s for s in space.ladder if s.pass_name == session.pass_name]
                    ladders.append(run_ladder(session, problem, steps, copy_gbps))
                    job.on_result(ladders[-1])
                elif job.call_cost:
                    calls.append(run_call_costs(session, problem, job.against, _library(job)))
                    job.on_result(calls[-1])
                elif job.trace is not None:
                    profiles.append(_profile(job, session, problem, tuned, len(profiles)))
                    job.on_result(profiles[-1])
                else:
                    choice = _choice(job, session.pass_name, problem, tuned)
                    contests.append(
                        compare_with_peers(session, problem, choice, job.against, copy_gbps)
                    )
                    job.on_result(contests[-1])
    facts = sessions[0].environment
    seen = [{}, *(c.clocks for c in contests), *(c.clocks for c in ladders)]
    environment = environment_of(facts, job.compiler, copy_gbps, seen[-1])
    return BenchReport(
        operator, job.gpu.name, environment, tuple(contests), tuple(ladders), tuple(profiles),
        tuple(calls),
    )


def _library(job: BenchJob) -> Path:
    """The folder of the library, which contains its reports."""
    return job.reports.parents[2]


def _profile(
    job: BenchJob, session: Session, problem: Problem, tuned: Report | None, index: int
) -> Profile:
    assert job.trace is not None
    choice = _choice(job, session.pass_name, problem, tuned)
    path = job.trace
    if sum(len(job.problems[p]) for p in job.passes) > 1:
        stem, _, suffixes = path.name.partition(".")
        path = path.with_name(f"{stem}.{session.pass_name}-{index + 1}.{suffixes or 'json'}")
    # The library serves a config only if its report has it.
    library = _library(job) if choice.origin == "tuned" else None
    return run_profile(session, problem, choice, job.against, path, library)


def write_bench(path: str | Path, report: BenchReport) -> None:
    """Write a bench as YAML.

    Raises:
        StorageError: If it cannot be written.
    """
    header = f"Bench of {report.operator} on {report.gpu}, written by kgen."
    write_whole(path, encode_as(report, header, report.schema))


def load_bench(path: str | Path) -> BenchReport:
    """Read and check a file that `write_bench` wrote.

    Raises:
        RecordError: If it cannot be read or deviates from the schema; the text names line and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: cannot be read: {why_unreadable(problem)}") from None
    return decode_as(BenchReport, text, str(path), SCHEMA, "run 'kgen bench' again")


def _choice(job: BenchJob, pass_name: str, problem: Problem, tuned: Report | None) -> ChosenConfig:
    """The winner in the report; without one the safe variant, with the reason."""
    found = None if tuned is None else _winner(tuned, pass_name, problem)
    why = "not tuned"
    if found is not None:
        config = as_declared(job.entry, pass_name, found)
        pass_ = job.entry.operator.signature.pass_named(pass_name)
        if config is not None and is_feasible(
            job.entry.space.variant(pass_name, config.variant),
            config,
            pass_,
            problem,
            job.gpu,
            legality_only=True,
        ):
            return ChosenConfig(config, "tuned")
        why = f"tuned to {found.label}, which the search space no longer contains"
    safe = job.entry.space.safe_variant(pass_name).safe
    assert safe is not None
    command = ["kgen", "tune", "--op", job.entry.operator.name, "--gpu", job.gpu.name]
    command += ["--pass", pass_name, "--problem", str(problem), *job.tune_options]
    return ChosenConfig(
        safe, "safe", f"{why}, so this is the safe variant; to tune: {_spelled(command)}"
    )


def _winner(tuned: Report, pass_name: str, problem: Problem) -> Config | None:
    for entry in tuned.problems:
        if (entry.pass_name, entry.problem) == (pass_name, str(problem)):
            return Config.of(entry.chosen.variant, entry.chosen.config)
    return None


def _spelled(command: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in command)
