"""Certificates: the records of configs that were verified with every input case.

The device runs come first and are recorded on their own. The runs on the host layer (`HostRunner`)
follow in the background; a second record adds them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.trial.host_runs import HostRunResult, with_host_runs
from kgen.trial.session import Session
from kgen.worker import TrialOutcome


@dataclass(frozen=True, slots=True)
class Certificate:
    """A config that went through every input case on the device.

    Attributes:
        rendered: The config's source.
        artifact: The built module.
        record: The record; its fate says whether the config was verified.
    """

    rendered: Rendered
    artifact: Artifact
    record: Record

    @property
    def is_verified(self) -> bool:
        """Whether the config passed on every input case."""
        return self.record.fate is Fate.VERIFIED


def certify(session: Session, problem: Problem, trial: Record) -> Certificate | None:
    """Verify the config of a verified trial with every input case, and record the outcome.

    A config whose code has a certificate already (`Session.certificate`) is not verified again.

    Args:
        session: The session of the trial.
        problem: The trial's problem.
        trial: The trial's record, whose time the certificate takes over.
    Returns:
        The certificate; None if the config no longer builds, for example because the cache was
        cleared and the compiler is broken.
    """
    config = trial.config
    rendered = session.render(config, problem)
    built = session.build(rendered).result()
    if isinstance(built, BuildFailure):
        return None
    known = session.certificate(rendered, built, config, problem)
    if known is not None and known.id == trial.id:
        return Certificate(rendered, built, trial)
    if known is not None:
        outcome = TrialOutcome(Fate.VERIFIED, "", None, known.accuracy, evidence=known.evidence)
    else:
        outcome = certified_outcome(session, config, problem, rendered, built)
    if outcome.fate is Fate.VERIFIED:
        outcome = replace(outcome, timing=trial.timing, trained=trial.trained)
    record = session.record(config, problem, rendered, outcome, built)
    return Certificate(rendered, built, record)


def certified_outcome(
    session: Session,
    config: Config,
    problem: Problem,
    rendered: Rendered,
    built: Artifact,
    seeds: tuple[int, int] | None = None,
) -> TrialOutcome:
    """Verify a build with every input case, unless the session refuses to run it.

    Args:
        session: The session of the trials.
        config: The config.
        problem: The problem.
        rendered: The config's source.
        built: The built module.
        seeds: As in `Trial`.
    """
    if refusal := session.refusal(rendered, built, config):
        return TrialOutcome(Fate.REJECTED, refusal)
    return session.run(
        session.candidate(config, built), problem, level="certify", measure=False, seeds=seeds
    )


def record_host_runs(
    session: Session,
    problem: Problem,
    rendered: Rendered,
    artifact: Artifact,
    certificate: Record,
    host: HostRunResult,
) -> Record:
    """Record a certificate again, now with its host runs; `wrong` if they found a fault.

    Args:
        session: The session of the trials.
        problem: The problem.
        rendered: The config's source.
        artifact: The built module.
        certificate: The record of the device's part.
        host: The results of the host runs.
    """
    assert certificate.evidence is not None
    outcome = TrialOutcome(
        fate=Fate.WRONG if host.fault else Fate.VERIFIED,
        reason=host.fault,
        timing=None if host.fault else certificate.timing,
        accuracy=certificate.accuracy,
        evidence=with_host_runs(certificate.evidence, host),
        trained="" if host.fault else certificate.trained,
    )
    return session.record(certificate.config, problem, rendered, outcome, artifact)
