"""The last word on a problem: its winner's host run, or the next finalist's."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from kgen.errors import TuneError
from kgen.model.record import Fate
from kgen.tune.request import Finalist, ProblemResult
from kgen.worker import HostProver, Proof, Session, TrialOutcome, with_proof


def start_proof(
    session: Session, prover: HostProver, result: ProblemResult
) -> Future[Proof]:
    """Start the host run of a problem's winner, in the background of the next search."""
    return _start(session, prover, result, result.winner)


def settle(
    session: Session, prover: HostProver, result: ProblemResult, proof: Future[Proof]
) -> ProblemResult:
    """Wait for the winner's host run, and record it; a refused winner gives way to the next.

    Raises:
        TuneError: If every finalist is refused.
    """
    refused: list[str] = []
    fates, reasons = dict(result.fates), dict(result.reasons)
    for place, finalist in enumerate(result.finalists):
        found = proof.result() if place == 0 else _start(session, prover, result, finalist).result()
        settled = _record(session, result, finalist, found)
        if not found.fault:
            return replace(
                result,
                finalists=(settled, *result.finalists[place + 1 :]),
                fates=fates,
                reasons=reasons,
            )
        refused.append(f"{finalist.config.label}: {found.fault}")
        fates[Fate.VERIFIED] = fates.get(Fate.VERIFIED, 0) - 1
        fates[Fate.WRONG] = fates.get(Fate.WRONG, 0) + 1
        headline = f"{Fate.WRONG}: {found.fault.splitlines()[0]}"
        reasons[headline] = reasons.get(headline, 0) + 1
    raise TuneError(
        f"{session.entry.operator.name} {session.pass_name} {result.problem} on "
        f"{session.gpu.name}: every finalist was refused by its host run\n  "
        + "\n  ".join(refused)
        + "\n  the same command goes on with the others"
    )


def _start(
    session: Session, prover: HostProver, result: ProblemResult, finalist: Finalist
) -> Future[Proof]:
    return prover.start(
        finalist.rendered, finalist.variant, finalist.config, session.pass_name, result.problem
    )


def _record(
    session: Session, result: ProblemResult, finalist: Finalist, proof: Proof
) -> Finalist:
    """Write the certificate down, now with its host runs."""
    certificate = finalist.record
    assert certificate.evidence is not None
    record = session.record(
        finalist.config,
        result.problem,
        finalist.rendered,
        certificate.key,
        TrialOutcome(
            fate=Fate.WRONG if proof.fault else Fate.VERIFIED,
            reason=proof.fault,
            timing=None if proof.fault else certificate.timing,
            accuracy=certificate.accuracy,
            evidence=with_proof(certificate.evidence, proof),
        ),
        finalist.artifact,
    )
    return replace(finalist, record=record)
