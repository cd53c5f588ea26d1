"""Certify the safe variant, which serves calls that no table row serves.

The safe kernels that the tuned problems need are certified after the first search, so that their
rows can be published; the other ones after the last search (`kgen.tune.safe_claims` lists them). A
certificate is appended to the journal when its device part is complete, and again with its host
runs. Kernels whose certificate is in the journal are not certified again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import closing
from dataclasses import dataclass, replace

from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.trial import (
    HostRunner,
    HostRunResult,
    Session,
    WorkerPool,
    record_host_runs,
    with_host_runs,
)
from kgen.tune.events import StageAdvanced
from kgen.tune.results import SafeResult
from kgen.tune.safe_claims import Claim, Combination, built, claims, combinations, safe_config
from kgen.worker import Trial, TrialOutcome

_ON_HOST = "it was certified on the host itself"
_NO_PAIR = "other combinations of the same dtypes, two by two, have one"


@dataclass
class _Proof:
    """The state of a claim's certificate.

    Attributes:
        claim: The kernel to certify.
        build: The kernel's build.
        artifact: The build's result; None until it has been awaited.
        record: The certificate; None until its device part is in the journal.
        host_run: The host run, if one is running or has ended without being recorded.
        is_whole: Whether the certificate is complete.
        failure: Why the kernel is refused; empty if it is not.
    """

    claim: Claim
    build: Future[Artifact | BuildFailure]
    artifact: Artifact | None = None
    record: Record | None = None
    host_run: Future[HostRunResult] | None = None
    is_whole: bool = False
    failure: str = ""

    @property
    def is_left(self) -> bool:
        """Whether the kernel must still be verified on the device."""
        return self.record is None and not self.failure


class SafeCertificates:
    """The safe kernels of a pass. They are certified on the device on request; their host runs
    overlap the next steps of the tune.
    """

    def __init__(
        self,
        session: Session,
        host_runner: HostRunner,
        pool: WorkerPool,
        tuned: Sequence[Problem],
    ) -> None:
        """Start the builds.

        Args:
            session: The session of the tune.
            host_runner: Makes the host runs; on the host, all runs.
            pool: The workers that verify on the device.
            tuned: The problems of the pass.
        """
        self._session, self._host_runner, self._pool = session, host_runner, pool
        self._every = combinations(session)
        self._proofs = [
            _Proof(claim, session.build(claim.combination.rendered))
            for claim in claims(session, self._every, tuned)
        ]

    def certify_tuned(self) -> Generator[StageAdvanced, None, None]:
        """Certify the kernels that the tuned problems need; exhaust this generator first.

        Raises:
            TuneError: If one of them is wrong, because the library would lack its fallback.
        """
        self._pool.preload(sum(map(self._may_be_left, self._proofs)))
        yield from self._certify([proof for proof in self._proofs if proof.claim.is_tuned])
        self.raise_failures()

    def certify_rest(self) -> Generator[StageAdvanced, None, None]:
        """Certify the other kernels; `raise_failures` reports the refused ones afterwards."""
        self._pool.preload(sum(map(self._may_be_left, self._proofs)))
        yield from self._certify([proof for proof in self._proofs if not proof.claim.is_tuned])

    def advance(self) -> None:
        """Start host runs of kernels that are compiled, and record those that have ended."""
        for proof in self._proofs:
            is_new = proof.artifact is None and not proof.failure
            if not self._session.gpu.is_host and is_new and proof.build.done():
                self._look_up(proof)
            if proof.record is not None and not proof.is_whole and proof.host_run is not None:
                self._finish(proof, proof.record, proof.host_run)

    @property
    def host_runs(self) -> list[Future[HostRunResult]]:
        """The host runs that `advance` waits for."""
        return [
            proof.host_run
            for proof in self._proofs
            if proof.host_run is not None and proof.record is not None and not proof.is_whole
        ]

    @property
    def is_ready(self) -> bool:
        """Whether the kernels are certified that the tuned problems need."""
        return all(proof.is_whole for proof in self._proofs if proof.claim.is_tuned)

    @property
    def whole(self) -> int:
        """Number of kernels that are certified."""
        return sum(proof.is_whole for proof in self._proofs)

    def raise_failures(self) -> None:
        """Raise TuneError if a kernel was refused."""
        failures = [proof.failure for proof in self._proofs if proof.failure]
        if failures:
            raise TuneError("\n".join(failures))

    def results(self) -> tuple[SafeResult, ...]:
        """The combinations whose kernel, or a kernel of the same source, is certified so far."""
        variant, config = safe_config(self._session)
        records = {p.claim.combination: p.record for p in self._proofs if p.is_whole}
        return tuple(
            SafeResult(one.dtypes, variant, config, one.rendered, records.get(one))
            for one in self._every
            if self._is_certified(one)
        )

    def missing(self) -> tuple[Combination, ...]:
        """The combinations that `results` lacks."""
        return tuple(one for one in self._every if not self._is_certified(one))

    def _is_certified(self, combination: Combination) -> bool:
        if all(proof.is_whole for proof in self._proofs):
            return True  # including combinations that are not run: see `kgen.tune.safe_claims`
        sources = {p.claim.combination.rendered.digest for p in self._proofs if p.is_whole}
        return combination.rendered.digest in sources

    def _certify(self, proofs: Sequence[_Proof]) -> Iterator[StageAdvanced]:
        for compiled, proof in enumerate(proofs, start=1):
            self._look_up(proof)
            yield StageAdvanced("compiled", compiled)
        left = [proof for proof in proofs if proof.is_left]
        with closing(self._outcomes(left)) as outcomes:
            for done, (proof, outcome) in enumerate(outcomes, start=1):
                self._record(proof, outcome)
                self.advance()
                yield StageAdvanced("verified", done, len(left))

    def _may_be_left(self, proof: _Proof) -> bool:
        """Whether the kernel may still need the device; known once it is compiled."""
        if proof.build.done():
            self._look_up(proof)
        return proof.is_left

    def _look_up(self, proof: _Proof) -> None:
        """Wait for a build, find its certificate in the journal, and start its host run.

        A later call may find a certificate that another process has made meanwhile.
        """
        if not proof.is_left:
            return
        session, claim = self._session, proof.claim
        variant, config = safe_config(session)
        problem, rendered = claim.combination.problem, claim.combination.rendered
        try:
            proof.artifact = built(session, claim, proof.build)
        except TuneError as refusal:
            proof.failure = str(refusal)
            return
        known = session.certificate(rendered, proof.artifact, config, problem)
        if known is not None and not session.holds(known):
            # This journal takes over the evidence, but not a time that was measured elsewhere.
            known = session.renew(replace(known, timing=None), config, problem, rendered)
        proof.record = known
        if session.gpu.is_host or not claim.shows_a_pair:
            proof.is_whole = known is not None
            return
        if known is None and proof.host_run is not None:
            return  # the host run is still running
        proof.host_run = self._host_runner.start(
            rendered, variant, config, session.pass_name, problem,
            None if known is None else known.evidence,
        )

    def _outcomes(
        self, proofs: Sequence[_Proof]
    ) -> Generator[tuple[_Proof, TrialOutcome], None, None]:
        """Verify kernels on the device, by the worker pool.

        In a tune for the CPU, kernels get the host run of a GPU kernel instead: small inputs and
        two thread orders, on all cores, because nothing is timed at this point.
        """
        session, on_host = self._session, self._session.gpu.is_host
        _, config = safe_config(session)
        trials = []
        for proof in proofs:
            assert proof.artifact is not None
            trials.append(
                Trial(
                    session.pass_name,
                    proof.claim.combination.problem,
                    session.candidate(config, proof.artifact),
                    level="host" if on_host else "certify",
                    measure=False,
                    orders=(0, 1) if on_host else (0,),
                )
            )
        if on_host:
            running = {
                self._host_runner.trial(trial): proof
                for trial, proof in zip(trials, proofs, strict=True)
            }
            for ended in as_completed(running):
                yield running[ended], ended.result()
            return
        with closing(self._pool.run(trials)) as proven:
            for place, outcome in proven:
                yield proofs[place], outcome

    def _record(self, proof: _Proof, outcome: TrialOutcome) -> None:
        """Record the device part; for a kernel without a host run, this completes the certificate.
        """
        session, claim = self._session, proof.claim
        _, config = safe_config(session)
        if outcome.evidence is not None and proof.host_run is None:
            missing = _ON_HOST if session.gpu.is_host else _NO_PAIR
            its = with_host_runs(outcome.evidence, HostRunResult(missing=missing))
            outcome = replace(outcome, evidence=its)
        proof.record = session.record(
            config, claim.combination.problem, claim.combination.rendered, outcome, proof.artifact
        )
        self._judge(proof, proof.record)
        proof.is_whole = proof.host_run is None and not proof.failure

    def _finish(self, proof: _Proof, record: Record, host_run: Future[HostRunResult]) -> None:
        """Record the host run if it has ended."""
        if not host_run.done() or proof.failure:
            return
        proof.host_run = None  # also if its build raises an error, which ends the tune
        found = host_run.result()
        if not found.kept:
            assert proof.artifact is not None
            combination = proof.claim.combination
            proof.record = record_host_runs(
                self._session, combination.problem, combination.rendered, proof.artifact,
                record, found,
            )
        assert proof.record is not None
        self._judge(proof, proof.record)
        proof.is_whole = not proof.failure

    def _judge(self, proof: _Proof, record: Record) -> None:
        if record.fate is Fate.VERIFIED:
            return
        variant, _ = safe_config(self._session)
        proof.host_run = None
        proof.failure = (
            f"{variant.where}: the safe variant is {record.fate} for "
            f"{proof.claim.combination.problem}\n  {record.reason}"
        )
