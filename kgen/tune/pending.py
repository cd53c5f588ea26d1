"""A proposal whose build or trial is pending."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.search.study import Proposal
from kgen.tune.trial_queue import Place
from kgen.worker import TrialOutcome


@dataclass
class PendingTrial:
    """A config from its proposal by the study until its record.

    Attributes:
        proposal: The proposal of the study.
        rendered: Its source.
        build: The build.
        place: Priority in the trial queue; the smallest is next.
        since: When it was proposed, as of `time.monotonic`.
        artifact: The built module, once there is one.
        identity: Key of the machine code and its launches, once built.
        outcome: The trial in the worker's queue, once queued.
    """

    proposal: Proposal
    rendered: Rendered
    build: Future[Artifact | BuildFailure]
    place: Place
    since: float
    artifact: Artifact | None = None
    identity: str = ""
    outcome: Future[TrialOutcome] | None = None

    @property
    def variant(self) -> str:
        """The variant of its config."""
        return self.proposal.config.variant

    @property
    def has_ended(self) -> bool:
        """Whether its trial has an outcome."""
        done = self.outcome
        return bool(done and done.done() and not done.cancelled() and done.exception() is None)

    def withdraw(self) -> bool:
        """Cancel it; return False if its trial runs or has ended."""
        if self.outcome is not None and not self.outcome.cancel():
            return False
        self.build.cancel()
        return True
