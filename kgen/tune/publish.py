"""Write the result of a tune into the library and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.assets import include_dir
from kgen.catalogue import Entry
from kgen.emit import Emitted, SafeKernel, Winner, emit
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Tried
from kgen.report import (
    Chosen,
    HostProof,
    Peer,
    ProblemReport,
    Proof,
    Report,
    RuleCount,
    RunnerUp,
    SpaceSummary,
    Trials,
    update_report,
)
from kgen.report.environment import environment_of
from kgen.report.kernels import kernel_reports
from kgen.runtime.cache import read_file
from kgen.tune.results import Finalist, PassResult, ProblemResult


@dataclass(frozen=True, slots=True)
class Published:
    """The files that were written.

    Attributes:
        library: The emitted library.
        report_path: Its report for this GPU.
        report: The content of that file.
    """

    library: Emitted
    report_path: Path
    report: Report


def publish(result: PassResult, out: Path, reports: Path) -> Published:
    """Emit the winners into the library under `out`, and merge the report.

    If the result lacks problems of its request, their rows and reports stay as they are. If it
    lacks safe kernels, the library keeps those that it has; a kernel that is not certified is never
    written. Publishing problem by problem leaves the same bytes as publishing everything at once.

    Raises:
        StorageError: If a file cannot be written; the earlier files then stay intact.
    """
    request = result.request
    operator, pass_name, gpu = request.entry.operator, result.pass_name, request.gpu
    winners = [
        winner_of(request.entry, pass_name, gpu, r.problem, r.winner) for r in result.results
    ]
    # A combination that was not run shares the source of one that was.
    codes = {s.rendered.digest: s.record.code for s in result.safe if s.record is not None}
    safe = [
        SafeKernel(
            operator,
            pass_name,
            s.dtypes,
            s.variant,
            s.config,
            s.rendered,
            ((gpu.arch, codes[s.rendered.digest]),) if s.rendered.digest in codes else (),
        )
        for s in result.safe
    ]
    library = emit(
        out, winners, safe, include_dir(), request.entry, is_whole=not result.safe_missing
    )
    path = reports / f"{gpu.name}.yaml"
    return Published(library, path, update_report(path, to_report(result)))


def winner_of(
    entry: Entry,
    pass_name: str,
    gpu: GpuProfile,
    problem: Problem,
    finalist: Finalist,
    searched: bool = True,
) -> Winner:
    """Convert a finalist to a `Winner` of the library; arguments as in `Winner`."""
    return Winner(
        operator=entry.operator,
        pass_name=pass_name,
        problem=problem,
        gpu=gpu,
        variant=finalist.variant,
        config=finalist.config,
        rendered=finalist.rendered,
        cubin=None if gpu.is_host else read_file(finalist.artifact.path),
        arch=gpu.arch,
        record=replace(finalist.record, timing=finalist.timing),
        searched=searched,
    )


def to_report(result: PassResult) -> Report:
    """Convert a result to a report."""
    request = result.request
    identity = result.results[0].winner.record.environment
    return Report(
        operator=request.entry.operator.name,
        gpu=request.gpu.name,
        environments={
            identity: environment_of(
                result.environment,
                request.compiler,
                result.copy_gbps,
                result.results[-1].clocks,
            )
        },
        problems=tuple(_problem(r, result.pass_name, request.l2, identity) for r in result.results),
    )


def _problem(r: ProblemResult, pass_name: str, l2: str, environment: str) -> ProblemReport:
    winner, second = r.winner, r.runner_up
    return ProblemReport(
        pass_name=pass_name,
        problem=str(r.problem),
        environment=environment,
        space=SpaceSummary(
            r.space_size,
            r.feasible,
            tuple(RuleCount(x.rule, x.why, x.where, x.configs) for x in r.refusals),
        ),
        trials=Trials(
            count=sum(r.fates.values()),
            fates={fate.value: count for fate, count in r.fates.items() if count},
            reasons=dict(r.reasons),
            search_seconds=r.search_s,
            compile_seconds=r.compile_s,
        ),
        chosen=Chosen(
            variant=winner.config.variant,
            config=winner.config.as_dict(),
            record=winner.record.id,
            source=winner.rendered.digest,
            code=winner.record.code,
            timing=winner.timing,
            kernels=kernel_reports(
                winner.plan,
                dict(winner.artifact.resources),
                lambda launch, _: winner.occupancy if launch is winner.plan.launches[0] else None,
            ),
            remarks=winner.artifact.remarks,
        ),
        floor_us=r.floor_us,
        floor_share=r.floor_us / winner.timing.median_us,
        peers=tuple(Peer(name, timing) for name, timing in r.peers.items()),
        accuracy=winner.record.accuracy,
        runner_up=None
        if second is None
        else RunnerUp(
            second.config.variant,
            second.config.as_dict(),
            second.record.id,
            second.timing.median_us,
            second.timing.median_us / winner.timing.median_us,
        ),
        evidence=_proof(winner.record.evidence),
        l2=l2,
        slowed=r.clocks.get("slowed", ""),
    )


def _proof(evidence: Evidence | None) -> Proof | None:
    if evidence is None:
        return None
    return Proof(
        seed=evidence.seed,
        inputs=_inputs(evidence.tried),
        skipped=evidence.skipped,
        launches=evidence.launches,
        same_bits=evidence.bitwise,
        host=tuple(
            HostProof(run.compiler, run.orders, _inputs(run.tried))
            for run in evidence.host
        ),
        host_missing=evidence.host_missing,
    )


def _inputs(tried: Sequence[Tried]) -> tuple[str, ...]:
    return tuple(f"{t.case} @ {t.seed}" for t in tried)
