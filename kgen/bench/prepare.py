"""Prepare a bench: build every kernel, verify it on all inputs, compute the floor."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.errors import BenchError
from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.artifact import Artifact, BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.trial import Session, failed_build
from kgen.worker import Candidate, TrialOutcome


def certified(
    session: Session, problem: Problem, configs: Sequence[Config]
) -> list[tuple[Candidate, TrialOutcome]]:
    """Build and verify configs again, even if a report says that they are verified.

    Raises:
        BenchError: If a config does not compute the operator's outputs.
    """
    builds = [session.build(session.render(config, problem)) for config in configs]
    ready = []
    for config, build in zip(configs, builds, strict=True):
        built = build.result()
        if isinstance(built, BuildFailure):
            raise _refusal(session, problem, config, failed_build(built))
        assert isinstance(built, Artifact)
        candidate = session.candidate(config, built)
        outcome = session.run(candidate, problem, level="certify", measure=False)
        if outcome.fate is not Fate.VERIFIED:
            raise _refusal(session, problem, config, outcome)
        ready.append((candidate, outcome))
    return ready


def least_us(session: Session, problem: Problem, copy_gbps: float) -> float:
    """Least time of a problem on this GPU, us."""
    cost = session.entry.operator.cost(session.pass_name, problem)
    return floor_us(cost, copy_gbps, rate_tflops(cost, session.gpu))


def _refusal(
    session: Session, problem: Problem, config: Config, outcome: TrialOutcome
) -> BenchError:
    operator, gpu = session.entry.operator.name, session.gpu.name
    reason = outcome.reason.replace("\n", "\n  ")
    return BenchError(
        f"{operator} {session.pass_name} {problem} on {gpu}: {config.label} is "
        f"{outcome.fate.value.replace('_', ' ')}, so nothing was timed\n  {reason}\n"
        f"  check the other variants: kgen verify --op {operator} --gpu {gpu} --pass "
        f"{session.pass_name} --problem {problem}"
    )
