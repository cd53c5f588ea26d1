"""Verify the safe variant for every combination of dtypes: it answers what no table row does."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.tune.request import SafeResult
from kgen.worker import HostProver, Proof, Session, TrialOutcome, with_proof

# Small, and ragged in every power of two: the safe variant is judged on correctness alone.
SAFE_EXTENT = 67


@dataclass(frozen=True)
class _Claim:
    """The safe config for one combination of dtypes; what is known of it, or is being found out."""

    dtypes: Mapping[str, str]
    problem: Problem
    rendered: Rendered
    artifact: Artifact
    key: str
    known: Record | None
    outcome: TrialOutcome | None
    proof: Future[Proof] | None


def verify_safe(session: Session, prover: HostProver) -> tuple[SafeResult, ...]:
    """Build and certify the safe config for each dtype combination.

    Raises:
        TuneError: If one does not build or is wrong: the library would have nothing to fall
            back on.
    """
    signature = session.entry.operator.signature
    # Host runs go on in the background, so all are started before the first is waited for.
    claims = [_claim(session, prover, dtypes) for dtypes in signature.dtype_combinations()]
    return tuple(_settled(session, claim) for claim in claims)


def _claim(session: Session, prover: HostProver, dtypes: Mapping[str, str]) -> _Claim:
    signature = session.entry.operator.signature
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    dims = tuple((d.name, max(SAFE_EXTENT, d.smallest)) for d in signature.dims)
    problem = Problem(dims, tuple(dtypes.items()))
    rendered = session.render(config, problem)
    key = session.key(rendered, config, problem)
    built = session.build(rendered).result()
    if isinstance(built, BuildFailure):
        raise TuneError(
            f"{variant.where}: the safe variant does not compile for {dtypes}\n  "
            f"{built.message}\n  source: {built.source_path}"
        )
    known = next(
        (
            r
            for r in session.journal.read()
            if r.key == key and r.fate is Fate.VERIFIED and r.evidence is not None
        ),
        None,
    )
    if known is not None:
        return _Claim(dtypes, problem, rendered, built, key, known, None, None)
    outcome = session.run(
        session.candidate(config, built), problem, level="certify", measure=False
    )
    proof = None
    if outcome.fate is Fate.VERIFIED and not session.gpu.is_host:
        proof = prover.start(rendered, variant, config, session.pass_name, problem)
    return _Claim(dtypes, problem, rendered, built, key, None, outcome, proof)


def _settled(session: Session, claim: _Claim) -> SafeResult:
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    record = claim.known
    if record is None:
        assert claim.outcome is not None
        outcome = claim.outcome
        if outcome.evidence is not None:
            proof = Proof(missing="it was certified on the host itself")
            if claim.proof is not None:
                proof = claim.proof.result()
            outcome = replace(outcome, evidence=with_proof(outcome.evidence, proof))
            if proof.fault:
                outcome = replace(outcome, fate=Fate.WRONG, reason=proof.fault)
        record = session.record(
            config, claim.problem, claim.rendered, claim.key, outcome, claim.artifact
        )
    if record.fate is not Fate.VERIFIED:
        raise TuneError(
            f"{variant.where}: the safe variant is {record.fate} for {claim.problem}\n  "
            f"{record.reason}"
        )
    return SafeResult(claim.dtypes, variant, config, claim.rendered, claim.artifact, record)
