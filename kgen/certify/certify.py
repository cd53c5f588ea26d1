"""Choose which configs of a space to check, and check each with the full set of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kgen.errors import RecordError
from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import enumerate_feasible, is_feasible
from kgen.worker import Session, TrialOutcome, failed_build

SPREAD = 3  # configs per variant, evenly spaced over its feasible set


@dataclass(frozen=True, slots=True)
class Checked:
    """One verdict."""

    problem: Problem
    config: Config
    outcome: TrialOutcome

    @property
    def ok(self) -> bool:
        """Whether the kernel computed the operator's outputs."""
        return self.outcome.fate is Fate.VERIFIED


def check_problem(session: Session, problem: Problem) -> Iterator[Checked]:
    """Check, for every variant, its first trials, its safe config and a spread of the others,
    and the fastest verified config of the journal.

    Raises:
        EmptySpaceError: If nothing is feasible.
    """
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
    for config in dict.fromkeys(chosen):
        yield _check(session, problem, config)


def check_record(session: Session, record_id: str) -> Checked:
    """Check the config of one record again, as it renders today.

    Raises:
        RecordError: If the journal has no such record, or its config is no longer feasible.
    """
    for record in session.journal.read():
        if record.id == record_id and record.pass_name == session.pass_name:
            problem = parse_problem(record.problem, session.entry.operator.signature)
            variant = session.variant_of(record.config)
            pass_ = session.entry.operator.signature.pass_named(session.pass_name)
            if not is_feasible(variant, record.config, pass_, problem, session.gpu):
                raise RecordError(
                    f"record {record_id}: {record.config.label} is no longer "
                    f"feasible for {problem}; see {variant.where}"
                )
            return _check(session, problem, record.config)
    raise RecordError(
        f"{session.journal.path} has no {session.pass_name} record '{record_id}'\n"
        "  record ids stand in the report and in the generated tables"
    )


def _check(session: Session, problem: Problem, config: Config) -> Checked:
    rendered = session.render(config, problem)
    built = session.build(rendered).result()
    if isinstance(built, BuildFailure):
        return Checked(problem, config, failed_build(built))
    candidate = session.candidate(config, built)
    return Checked(problem, config, session.run(candidate, problem, certify=True, measure=False))
