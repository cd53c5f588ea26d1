"""A published step-by-step table, reproduced from points of the search space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kgen.bench.prepare import certified, least_us
from kgen.bench.results import LadderResult, LadderStepResult
from kgen.measure.floor import share
from kgen.measure.stats import paired_difference
from kgen.model.problem import Problem
from kgen.model.space import LadderStep
from kgen.search.feasible import refusing_rule
from kgen.trial import Session
from kgen.worker import Finals


def run_ladder(
    session: Session, problem: Problem, steps: Sequence[LadderStep], copy_gbps: float
) -> LadderResult:
    """Verify every step that is legal for the problem, then time them against each other.

    Efficiency rules are ignored: a published step is timed even if it is slow.

    Args:
        session: The session of the steps' pass, probed.
        problem: The problem.
        steps: In published order.
        copy_gbps: Measured copy bandwidth, for the floor.
    Raises:
        BenchError: If a step is wrong; nothing is timed then.
        WorkerError: If the worker died while timing.
    """
    floor = least_us(session, problem, copy_gbps)
    rungs = [_step_result(session, problem, step) for step in steps]
    running = [i for i, rung in enumerate(rungs) if not rung.refused]
    if not running:
        return LadderResult(session.pass_name, str(problem), floor, tuple(rungs), {})
    ready = certified(session, problem, [steps[i].config for i in running])
    outcome = session.worker.finals(
        Finals(session.pass_name, problem, tuple(candidate for candidate, _ in ready), peers=())
    )
    # Speed-ups are relative to step 1; if step 1 did not run, there are no speed-ups.
    base = outcome.samples_us[0] if running[0] == 0 else None
    for place, i in enumerate(running):
        timing = outcome.timings[place]
        faster = None
        if base is not None:
            faster = 1 + paired_difference(base, outcome.samples_us[place]).median
        rungs[i] = replace(
            rungs[i],
            timing=timing,
            floor_share=share(floor, timing.median_us),
            speed_up=faster,
            accuracy=ready[place][1].accuracy,
        )
    return LadderResult(session.pass_name, str(problem), floor, tuple(rungs), outcome.clocks)


def _step_result(session: Session, problem: Problem, step: LadderStep) -> LadderStepResult:
    pass_ = session.entry.operator.signature.pass_named(session.pass_name)
    variant = session.variant_of(step.config)
    rule = refusing_rule(variant, step.config, pass_, problem, session.gpu, legality_only=True)
    return LadderStepResult(
        step=step.name,
        variant=step.config.variant,
        config=step.config.as_dict(),
        published=step.published,
        note=step.note or ("" if step.is_published else "not published"),
        refused="" if rule is None else f"{rule.why} ({rule.condition.text}; {rule.where})",
    )
