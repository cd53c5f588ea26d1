"""The last word on a problem: its winner's host run, or the next finalist's."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import replace

from kgen.errors import TuneError
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.tune.request import Finalist, ProblemResult
from kgen.worker import HostProver, Proof, Session, TrialOutcome, with_proof


class Settlements:
    """The problems of a tune after their finals, each on its way through its winner's host run.

    Attributes:
        settled: Those with a proven winner, in the order of the tune.
    """

    def __init__(
        self,
        session: Session,
        prover: HostProver,
        on_settled: Callable[[tuple[ProblemResult, ...]], bool],
    ) -> None:
        """Start with none.

        Args:
            session: Where certificates are written down.
            prover: Makes the host runs.
            on_settled: Called with `settled` once it has grown, and again until it says that it
                could use it.
        """
        self._session, self._prover, self._on_settled = session, prover, on_settled
        self._told = 0  # how many settled problems `on_settled` has used
        self._all: list[_Settlement] = []

    @property
    def settled(self) -> tuple[ProblemResult, ...]:
        return tuple(s.result for s in self._all if s.is_settled)

    def add(self, result: ProblemResult) -> None:
        """Start the host run of a problem's winner, in the background."""
        self._all.append(_Settlement(self._session, self._prover, result))

    def collect(self, wait: bool = False) -> None:
        """Settle the problems whose host run is done; with `wait`, all, each as soon as it is."""
        while True:
            for settlement in self._all:
                settlement.advance()
                settled = self.settled
                if len(settled) > self._told and self._on_settled(settled):
                    self._told = len(settled)
            proofs = [s.proof for s in self._all if s.proof is not None]
            if not wait or not proofs:
                return
            concurrent.futures.wait(proofs, return_when=FIRST_COMPLETED)

    def finish(
        self, play_again: Callable[[ProblemResult], ProblemResult]
    ) -> tuple[ProblemResult, ...]:
        """Settle all, and return them.

        Args:
            play_again: Returns a problem's result with finalists that nobody has refused yet, or
                raises TuneError if there are none. Called for problems that have lost all theirs.
        Raises:
            TuneError: If nobody is left for a problem; the others are settled.
        """
        self.collect(wait=True)
        # One after the other: on the host, finals would be disturbed by another's host run.
        for settlement in self._all:
            while settlement.is_refused:
                try:
                    again = play_again(settlement.result)
                except TuneError:
                    break  # its failure says what was refused, and why
                settlement.go_on(again)
                self.collect(wait=True)
        failures = [s.failure for s in self._all if not s.is_settled]
        if failures:
            raise TuneError("\n".join(failures))
        return self.settled


class _Settlement:
    """One problem: the finalist whose host run is under way, until one of them is not refused.

    Attributes:
        result: With the finalists that are left, once there is a winner.
        is_settled: Whether there is a winner.
        proof: The host run under way.
    """

    def __init__(self, session: Session, prover: HostProver, result: ProblemResult) -> None:
        self.result = result
        self.is_settled = False
        self._session, self._prover = session, prover
        self._waiting = list(result.finalists)
        self._refused: list[str] = []
        self.proof: Future[Proof] | None = self._start()

    def advance(self) -> None:
        """Use what is known of the host run."""
        while self.proof is not None and self.proof.done():
            finalist = self._waiting.pop(0)
            proof = self.proof.result()
            recorded = with_host_run(self._session, self.result.problem, finalist, proof)
            if not proof.fault:
                self.proof, self.is_settled = None, True
                self.result = replace(self.result, finalists=(recorded, *self._waiting))
                return
            self._refuse(finalist, proof.fault)
            self.proof = self._start() if self._waiting else None

    @property
    def is_refused(self) -> bool:
        """Whether no finalist is left."""
        return self.proof is None and not self.is_settled

    def go_on(self, again: ProblemResult) -> None:
        """Start over with the finalists of another round, which cost what it did on top."""
        before = self.result
        self.result = replace(
            again,
            search_s=before.search_s + again.search_s,
            compile_s=before.compile_s + again.compile_s,
            new_trials=before.new_trials + again.new_trials,
        )
        self._waiting = list(again.finalists)
        self.proof = self._start()

    @property
    def failure(self) -> str:
        """Why nobody is left."""
        return (
            f"{self._session.entry.operator.name} {self._session.pass_name} {self.result.problem} "
            f"on {self._session.gpu.name}: every finalist was refused by its host run, and no "
            "other config was verified\n  "
            + "\n  ".join(self._refused)
            + "\n  next: mend the variant, or ask for more --trials"
            f"\n  trials: {self._session.journal.path}"
        )

    def _start(self) -> Future[Proof]:
        next_best = self._waiting[0]
        return self._prover.start(
            next_best.rendered,
            next_best.variant,
            next_best.config,
            self._session.pass_name,
            self.result.problem,
        )

    def _refuse(self, finalist: Finalist, fault: str) -> None:
        """Book the finalist as wrong."""
        self._refused.append(f"{finalist.config.label}: {fault}")
        fates, reasons = dict(self.result.fates), dict(self.result.reasons)
        fates[Fate.VERIFIED] = fates.get(Fate.VERIFIED, 0) - 1
        fates[Fate.WRONG] = fates.get(Fate.WRONG, 0) + 1
        headline = f"{Fate.WRONG}: {fault.splitlines()[0]}"
        reasons[headline] = reasons.get(headline, 0) + 1
        self.result = replace(self.result, fates=fates, reasons=reasons)


def with_host_run(
    session: Session, problem: Problem, finalist: Finalist, proof: Proof
) -> Finalist:
    """Write a certificate down, now with its host runs; its record is wrong if they found a fault.

    Args:
        session: Of the trials.
        problem: The problem.
        finalist: With its certificate as record.
        proof: What the host runs said.
    """
    certificate = finalist.record
    assert certificate.evidence is not None
    record = session.record(
        finalist.config,
        problem,
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
