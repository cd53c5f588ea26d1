"""A proposal whose build or trial is pending."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.search.study import Proposal
from kgen.tune.trial_queue import Place
from kgen.worker import Candidate, TrialOutcome


@dataclass(frozen=True, slots=True)
class BuiltCandidate:
    """A build with the data that decide about its trial, computed once: the trial may wait long.

    Attributes:
        candidate: The config with its build.
        key: Identity of the trial by its code, as in the journal.
        identity: Key of the machine code and its launches.
        refusal: Why the build must not run; empty if it may.
    """

    candidate: Candidate
    key: str
    identity: str
    refusal: str


@dataclass
class PendingTrial:
    """A config from its proposal by the study until its record.

    Attributes:
        proposal: The proposal of the study.
        rendered: Its source.
        build: The build.
        place: Priority in the trial queue; the smallest runs next.
        since: When the config was proposed, as of `time.monotonic`.
        built: The built candidate, once the build has succeeded.
        outcome: The future of the trial, once it is in the worker's queue.
    """

    proposal: Proposal
    rendered: Rendered
    build: Future[Artifact | BuildFailure]
    place: Place
    since: float
    built: BuiltCandidate | None = None
    outcome: Future[TrialOutcome] | None = None

    @property
    def variant(self) -> str:
        """The variant of its config."""
        return self.proposal.config.variant

    @property
    def artifact(self) -> Artifact | None:
        """The built module, once there is one."""
        return None if self.built is None else self.built.candidate.artifact

    @property
    def identity(self) -> str:
        """Key of the machine code and its launches, once built; empty before."""
        return "" if self.built is None else self.built.identity

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
