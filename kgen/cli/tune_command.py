"""`kgen tune`."""

from __future__ import annotations

import argparse

from kgen.cli.opening import opened
from kgen.cli.progress import Display
from kgen.model.record import COLD
from kgen.tune import Limits, ProblemResult, TuneResult
from kgen.workflow import Published, TuneJob, run_job


def run(options: argparse.Namespace) -> int:
    """Tune, emit, report; print what won and where everything is."""
    with opened(options) as common:
        print(
            f"tuning {common.entry.operator.name} on {common.gpu.title}, compiler "
            f"{common.compiler.name} {common.compiler.version}"
            + (f", {options.l2} L2" if options.l2 != COLD else ""),
            flush=True,
        )
        job = TuneJob(
            entry=common.entry,
            passes=common.passes,
            problems=common.problems,
            gpu=common.gpu,
            ordinal=common.ordinal,
            compiler=common.compiler,
            out=common.out,
            reports=common.reports,
            trials=options.trials,
            time_s=options.time,
            seed=options.seed,
            paths=common.paths,
            peers=not options.no_peers,
            l2=options.l2,
            on_progress=Display(),
            limits=Limits(options.trial_timeout, options.device_memory),
            retry=options.retry,
        )
        for result, published in run_job(job):
            _print(result, published)
    return 0


def _print(result: TuneResult, published: Published) -> None:
    request = result.request
    print(
        f"\n{request.entry.operator.name} {request.pass_name} on {request.gpu.name}: "
        f"{len(result.results)} problems tuned in {result.seconds:.0f} s"
    )
    for found in result.results:
        _print_problem(found)
    if request.gpu.is_host:
        print(
            "  (a CPU that runs each CUDA thread as a fiber: times for checking kernels, not speed)"
        )
    if result.worker_restarts:
        print(
            f"  the worker was replaced {result.worker_restarts} times; "
            "see the reasons in the report"
        )
    root = published.library.root
    print(
        f"\nlibrary  {root}  (pip install ./{root.name}; import kgen_ops)"
        if not root.is_absolute()
        else f"\nlibrary  {root}  (pip install {root}; import kgen_ops)"
    )
    print(f"report   {published.report_path}  (kgen report)")
    print(f"trials   {request.journal}")
    print(f"study    {request.study}  (optuna-dashboard {request.study})")


def _print_problem(found: ProblemResult) -> None:
    median = found.winner.timing.median_us
    print(f"  {found.problem}\n    {found.winner.config.label}")
    facts = [f"{median:.4g} us", f"{100 * found.floor_us / median:.0f} % of the floor"]
    facts += [f"{timing.median_us / median:.2f} x {name}" for name, timing in found.peers.items()]
    facts += [f"{name} failed: {why}" for name, why in found.peer_errors.items()]
    print(f"    {', '.join(facts)}; {sum(found.fates.values())} trials in {found.search_s:.1f} s")
    for remark in found.winner.artifact.remarks:
        print(f"    the compiler says of it: {remark}")
    if slowed := found.clocks.get("slowed"):
        print(
            f"    suspect: the GPU was slowed ({slowed}) while the finalists were timed, twice\n"
            "    let it cool, or stop what shares its power, and tune again"
        )
