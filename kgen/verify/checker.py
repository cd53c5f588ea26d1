"""Chooses configs of a space, and checks each with the full set of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kgen.errors import RecordError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Evidence, Fate, Record
from kgen.search.feasible import enumerate_feasible, is_feasible
from kgen.trial import (
    ComputeSanitizer,
    HostRunner,
    Session,
    certified_outcome,
    failed_build,
    with_host_runs,
)
from kgen.trial.sanitizer import TOOLS
from kgen.worker import Setup, Trial, TrialOutcome

SPREAD = 3  # configs per variant, evenly spaced over its feasible set


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of checking one config."""

    problem: Problem
    config: Config
    outcome: TrialOutcome
    tools: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the kernel computed the operator's outputs."""
        return self.outcome.fate is Fate.VERIFIED


@dataclass(frozen=True)
class Checker:
    """Checks configs with the full set of inputs.

    Attributes:
        session: Runs certificates.
        setup: Setup of the session's worker.
        host_runner: Makes host runs; None: certificates only on the device.
        sanitizer: Also runs candidates under compute-sanitizer; None: without it.
    """

    session: Session
    setup: Setup
    host_runner: HostRunner | None = None
    sanitizer: ComputeSanitizer | None = None

    def problem(self, problem: Problem) -> Iterator[Checked]:
        """Check, for every variant, its first trials, its safe config and a spread of the others,
        and the fastest verified config of the journal.

        Raises:
            EmptySpaceError: If no config is feasible.
        """
        for config in _chosen(self.session, problem):
            yield self._check(problem, config, None)

    def find(self, record_id: str) -> Record | None:
        """The record of this pass in the journal that has the id; None if there is none."""
        session = self.session
        for record in session.journal.read():
            if record.id == record_id and record.pass_name == session.pass_name:
                return record
        return None

    def record(self, record: Record) -> Checked:
        """Check the config of a record again, as it renders today, with the inputs that its
        evidence names.

        Raises:
            RecordError: If the record's config is no longer feasible.
        """
        session = self.session
        problem = parse_problem(record.problem, session.entry.operator.signature)
        variant = session.variant_of(record.config)
        pass_ = session.entry.operator.signature.pass_named(session.pass_name)
        if not is_feasible(variant, record.config, pass_, problem, session.gpu):
            raise RecordError(
                f"record {record.id}: {record.config.label} is no longer feasible for {problem}; "
                f"see {variant.where}"
            )
        return self._check(problem, record.config, record.evidence)

    def _check(self, problem: Problem, config: Config, known: Evidence | None) -> Checked:
        session = self.session
        rendered = session.render(config, problem)
        built = session.build(rendered).result()
        if isinstance(built, BuildFailure):
            return Checked(problem, config, failed_build(built))
        outcome = certified_outcome(session, config, problem, rendered, built, _seeds(known))
        if outcome.fate is Fate.VERIFIED and self.host_runner is not None:
            outcome = self._with_host_runs(self.host_runner, outcome, rendered, problem, config)
        if outcome.fate is Fate.VERIFIED and self.sanitizer is not None:
            return self._sanitized(self.sanitizer, outcome, built, problem, config)
        return Checked(problem, config, outcome)

    def _with_host_runs(
        self,
        host_runner: HostRunner,
        outcome: TrialOutcome,
        rendered: Rendered,
        problem: Problem,
        config: Config,
    ) -> TrialOutcome:
        variant = self.session.variant_of(config)
        host_run = host_runner.start(
            rendered, variant, config, self.session.pass_name, problem
        ).result()
        if host_run.fault:
            return replace(outcome, fate=Fate.WRONG, reason=host_run.fault)
        assert outcome.evidence is not None
        return replace(outcome, evidence=with_host_runs(outcome.evidence, host_run))

    def _sanitized(
        self,
        sanitizer: ComputeSanitizer,
        outcome: TrialOutcome,
        artifact: Artifact,
        problem: Problem,
        config: Config,
    ) -> Checked:
        trial = Trial(
            pass_name=self.session.pass_name,
            problem=problem,
            candidate=self.session.candidate(config, artifact),
            level="host",
            measure=False,
            orders=(0,),  # one launch; the sanitizer would find no more in a second one
        )
        for tool in TOOLS:
            found = sanitizer.check(self.setup, trial, tool)
            if found.fault:
                wrong = replace(
                    outcome, fate=Fate.WRONG, reason=f"compute-sanitizer {tool}: {found.fault}"
                )
                return Checked(problem, config, wrong)
        return Checked(problem, config, outcome, TOOLS)


def _seeds(known: Evidence | None) -> tuple[int, int] | None:
    """The fixture's seed, and the seed of the certificate's fresh inputs, which run last."""
    if known is None or not known.tried:
        return None
    return known.seed, known.tried[-1].seed


def _chosen(session: Session, problem: Problem) -> list[Config]:
    pass_ = session.entry.operator.signature.pass_named(session.pass_name)
    variants = session.entry.space.of_pass(session.pass_name)
    ordered = enumerate_feasible(variants, pass_, problem, session.gpu).configs
    feasible = set(ordered)
    chosen: list[Config] = []
    for variant in variants:
        own = [c for c in ordered if c.variant == variant.name]
        wanted = [*variant.first, *([variant.safe] if variant.safe else [])]
        wanted += [own[i * (len(own) - 1) // (SPREAD - 1)] for i in range(SPREAD) if own]
        chosen += [c for c in wanted if c in feasible]
    timed = [
        r
        for r in session.journal.read()
        if r.problem == str(problem)
        and r.timing
        and r.pass_name == session.pass_name
        and r.config in feasible
    ]
    if timed:
        chosen.append(min(timed, key=lambda r: r.timing.median_us if r.timing else 0.0).config)
    return list(dict.fromkeys(chosen))
