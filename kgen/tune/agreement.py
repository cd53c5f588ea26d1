"""An A/A check across devices: one kernel, timed by two processes on devices of one model."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.errors import WorkerError
from kgen.model.artifact import BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.trial import Session
from kgen.tune.joint import Joint
from kgen.tune.search_state import SearchState

# Largest relative difference. A search's times have a few per cent of noise; finals resolve smaller
# differences.
BAR = 0.08


@dataclass(frozen=True, slots=True)
class Agreement:
    """The time of one kernel on this device over its time on another of the same model.

    Attributes:
        problem: The problem of the kernel.
        config: Label of its config.
        ratio: This device's time over the other's.
    """

    problem: str
    config: str
    ratio: float


def compare_devices(
    session: Session, problem: Problem, state: SearchState, joint: Joint
) -> Agreement | None:
    """Time the fastest config that another process found on this device, and tell the others.

    Args:
        session: The session of this device.
        problem: A problem whose search has ended.
        state: The state of the search.
        joint: The work with the others.
    Returns:
        None if no other process has verified a config, or if it is refused here.
    Raises:
        WorkerError: If a GPU's time differs by more than `BAR`: its times would mislead the search.
            On the host only the ratio is returned, because its cores are shared.
    """
    theirs = next((r for r in state.ranking() if r.id in joint.foreign), None)
    if theirs is None or theirs.timing is None:
        return None
    built = session.build(session.render(theirs.config, problem)).result()
    if isinstance(built, BuildFailure):
        return None
    outcome = session.run(session.candidate(theirs.config, built), problem)
    if outcome.fate is not Fate.VERIFIED or outcome.timing is None:
        return None
    # Compare on the same inputs: the other process's time may be on random inputs only.
    ours_us = outcome.timing.by_inputs_us.get(theirs.timing.inputs, outcome.timing.median_us)
    ratio = ours_us / theirs.timing.median_us
    joint.membership.publish("agreement", {"problem": str(problem), "ratio": round(ratio, 4)})
    if not session.gpu.is_host and abs(ratio - 1) > BAR:
        raise WorkerError(
            f"this device and another {session.gpu.title} disagree: {theirs.config.label} of "
            f"{problem} takes {ours_us:.4g} us here and "
            f"{theirs.timing.median_us:.4g} us there ({ratio:.3f} times; at most {1 + BAR:g})\n"
            "  next: look for other work or a lower clock (nvidia-smi), or leave the device out"
        )
    return Agreement(str(problem), theirs.config.label, ratio)
