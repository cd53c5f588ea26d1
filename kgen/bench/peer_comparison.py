"""Compare kgen's kernel with its peers on one problem, in one interleaved run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kgen.bench.prepare import certified, least_us
from kgen.bench.results import ChosenConfig, PeerComparison, PeerTime, TimedKernel
from kgen.measure.floor import share
from kgen.measure.stats import paired_difference
from kgen.model.problem import Problem
from kgen.model.record import OutputAccuracy, Timing
from kgen.trial import Session
from kgen.worker import Finals


def compare_with_peers(
    session: Session,
    problem: Problem,
    choice: ChosenConfig,
    against: tuple[str, ...] | None,
    copy_gbps: float,
) -> PeerComparison:
    """Verify the chosen kernel, then time it and its peers against each other.

    Args:
        session: The session of the pass, probed.
        problem: The problem.
        choice: The config of kgen's kernel.
        against: Names of peers; None: all peers. A named peer that the pass lacks counts as failed.
        copy_gbps: Measured copy bandwidth, for the floor.
    Raises:
        BenchError: If the kernel is wrong; nothing is timed then.
        WorkerError: If the worker died while timing.
    """
    ((candidate, verdict),) = certified(session, problem, [choice.config])
    outcome = session.worker.finals(
        Finals(session.pass_name, problem, (candidate,), against, compare_peers=True)
    )
    (timing,), (ours,) = outcome.timings, outcome.samples_us
    floor = least_us(session, problem, copy_gbps)
    missing = {
        name: f"no peer of {session.pass_name}"
        for name in against or ()
        if name not in outcome.peers and name not in outcome.peer_errors
    }
    return PeerComparison(
        pass_name=session.pass_name,
        problem=str(problem),
        origin=choice.origin,
        remark=choice.remark,
        floor_us=floor,
        kernel=TimedKernel(
            choice.config.variant,
            choice.config.as_dict(),
            timing,
            share(floor, timing.median_us),
            verdict.accuracy,
        ),
        peers=tuple(
            _peer(
                name, peer, outcome.peer_samples_us[name], ours, floor,
                outcome.peer_accuracy.get(name, ()),
            )
            for name, peer in outcome.peers.items()
        ),
        failed={**outcome.peer_errors, **missing},
        clocks=outcome.clocks,
    )


def _peer(
    name: str,
    timing: Timing,
    samples: Sequence[float],
    ours: Sequence[float],
    floor: float,
    accuracy: tuple[OutputAccuracy, ...],
) -> PeerTime:
    slower = paired_difference(samples, ours)
    return PeerTime(
        name=name,
        timing=timing,
        floor_share=share(floor, timing.median_us),
        ratio=1 + slower.median,
        ratio_low=1 + slower.low if math.isfinite(slower.low) else None,
        ratio_high=1 + slower.high if math.isfinite(slower.high) else None,
        accuracy=accuracy,
    )
