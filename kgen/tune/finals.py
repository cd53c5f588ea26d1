"""Finals of one problem: certify the best configs and time them, interleaved, with the peers."""

from __future__ import annotations

import math

from kgen.errors import TuneError
from kgen.measure.choose import Entrant, pick
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Timing
from kgen.trial import Certificate, Session, certify
from kgen.tune.results import Finalist
from kgen.tune.search_state import SearchState
from kgen.tune.second_times import FIELD_WIDTH, FINALISTS, complete_times
from kgen.worker import Finals, FinalsOutcome, TrialOutcome

MOST_OF_BOUND = 0.8
"""Finalists whose error exceeds this share of the bound rank behind all others."""


def run_finals(
    session: Session, problem: Problem, state: SearchState, against: tuple[str, ...] | None
) -> tuple[tuple[Finalist, ...], FinalsOutcome]:
    """Certify the fastest configs with the full set of inputs and order them, best first.

    Args:
        session: The session of the tune.
        problem: The problem.
        state: The state of its search; a certificate replaces its trial's record.
        against: Names of the peers to time as well; None: all that are installed.
    Raises:
        TuneError: If no config was verified.
    """
    certificates: list[Certificate] = []
    tried: set[Config] = set()
    limit_us = math.inf
    while len(certificates) < FINALISTS:
        # Repeated in each round: when a config is refused, others become finalists.
        state.timed_again += complete_times(session, problem, state)
        record = next((r for r in state.ranking() if r.config not in tried), None)
        if record is None or record.timing is None or record.timing.median_us > limit_us:
            break
        tried.add(record.config)
        found = certify(session, problem, record)
        if found is None:
            continue
        state.certify(record, found.record)
        if not found.is_verified:
            continue
        if not certificates:  # the best config that is not refused, with which others are compared
            limit_us = record.timing.median_us * FIELD_WIDTH
        certificates.append(found)
    if not certificates:
        raise TuneError(
            f"{session.entry.operator.name} {session.pass_name} {problem} on "
            f"{session.gpu.name}: no config was verified\n{state.why_nothing_verified()}"
            f"\n  trials: {session.journal.path}"
        )
    candidates = tuple(session.candidate(c.record.config, c.artifact) for c in certificates)
    outcome = session.worker.finals(
        Finals(session.pass_name, problem, candidates, against, check_outputs=True)
    )
    finalists = []
    samples_us = []
    for i, certificate in enumerate(certificates):
        if outcome.faults[i]:
            _refuse(session, problem, state, certificate, outcome.faults[i])
            continue
        timing, occupancy = outcome.timings[i], outcome.occupancy[i]
        finalists.append(finalist(session, problem, certificate, timing, occupancy))
        samples_us.append(outcome.samples_us[i])
    if not finalists:  # the ranking still has the configs that were not in these finals
        return run_finals(session, problem, state, against)
    order = pick(
        [
            Entrant(
                samples_us=samples,
                registers=max((r.registers for _, r in f.artifact.resources), default=0),
                digest=f.config.digest,
            )
            for f, samples in zip(finalists, samples_us, strict=True)
        ]
    )
    ordered = [finalists[place] for place in order]
    # Certificates use few seeds: a config close to its bound may exceed it with another seed.
    ordered.sort(key=lambda f: share_of_bound(f.record) > MOST_OF_BOUND)
    return tuple(ordered), outcome


def share_of_bound(record: Record) -> float:
    """The largest ratio of error to bound over all outputs and input sets; 0..1."""
    return max((a.error / a.bound for a in record.accuracy if a.bound > 0), default=0.0)


def _refuse(
    session: Session, problem: Problem, state: SearchState, certificate: Certificate, fault: str
) -> None:
    """Record that a certified config was wrong when it was timed."""
    outcome = TrialOutcome(
        Fate.WRONG,
        fault,
        accuracy=certificate.record.accuracy,
        evidence=certificate.record.evidence,
    )
    record = session.record(
        certificate.record.config, problem, certificate.rendered, outcome, certificate.artifact
    )
    state.certify(certificate.record, record)


def finalist(
    session: Session,
    problem: Problem,
    certificate: Certificate,
    timing: Timing,
    occupancy: float | None = None,
) -> Finalist:
    """Return a certified config as a finalist, with its time and occupancy from the finals."""
    config = certificate.record.config
    return Finalist(
        variant=session.variant_of(config),
        config=config,
        plan=session.plan(config, problem),
        rendered=certificate.rendered,
        artifact=certificate.artifact,
        record=certificate.record,
        timing=timing,
        occupancy=occupancy,
    )
