"""The last round of one problem: certify the best, time them against each other and the peers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeAlias

from kgen.choose import Entrant, pick
from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Timing
from kgen.tune.request import Finalist
from kgen.tune.search_loop import Books
from kgen.worker import Finals, FinalsOutcome, Session, TrialOutcome

FINALISTS = 5
# Search times carry a few per cent of noise; beyond this no finalist can still be the best.
FIELD_WIDTH = 1.15
MAX_REASON_LINES = 16

Certified: TypeAlias = tuple[Artifact, Record, TrialOutcome]


def play_finals(
    session: Session, problem: Problem, books: Books, peers: bool
) -> tuple[tuple[Finalist, ...], FinalsOutcome]:
    """Certify the fastest configs with the full set of inputs and order them, best first.

    Raises:
        TuneError: If no config was verified.
    """
    certified: list[Certified] = []
    limit_us = math.inf
    for record in books.ranking():
        assert record.timing is not None
        if len(certified) == FINALISTS or record.timing.median_us > limit_us:
            break
        found = certify(session, problem, record, books)
        if found is not None:
            if not certified:  # a refused leader must not shut out the healthy ones behind it
                limit_us = record.timing.median_us * FIELD_WIDTH
            certified.append(found)
    if not certified:
        raise TuneError(
            f"{session.entry.operator.name} {session.pass_name} {problem} on "
            f"{session.gpu.name}: no config was verified\n"
            + "\n".join(f"  {count} x {text}" for text, count in books.reasons.most_common(5))
            + _whole_reason(books)
            + f"\n  trials: {session.journal.path}"
        )
    candidates = tuple(session.candidate(r.config, a) for a, r, _ in certified)
    wanted = None if peers else ()
    outcome = session.worker.finals(Finals(session.pass_name, problem, candidates, wanted))
    finalists = [
        finalist(session, problem, *found, timing)
        for found, timing in zip(certified, outcome.timings, strict=True)
    ]
    order = pick(
        [
            Entrant(
                samples_us=samples,
                registers=max((r.registers for _, r in f.artifact.resources), default=0),
                digest=f.config.digest,
            )
            for f, samples in zip(finalists, outcome.samples_us, strict=True)
        ]
    )
    return tuple(finalists[place] for place in order), outcome


def finalist(
    session: Session,
    problem: Problem,
    artifact: Artifact,
    record: Record,
    trial: TrialOutcome,
    timing: Timing,
) -> Finalist:
    """Put together what is known of a certified config."""
    config = record.config
    return Finalist(
        variant=session.variant_of(config),
        config=config,
        plan=session.plan(config, problem),
        rendered=session.render(config, problem),
        artifact=artifact,
        record=record,
        timing=timing,
        occupancy=trial.occupancy,
    )


def _whole_reason(books: Books) -> str:
    """The commonest refusal in full: the compiler's message with the source's path, say."""
    if not books.reasons:
        return ""
    headline = books.reasons.most_common(1)[0][0]
    lines = books.examples[headline].splitlines()
    if len(lines) > MAX_REASON_LINES:
        lines = [*lines[: MAX_REASON_LINES - 2], "...", lines[-1]]
    return "\n  for instance:\n" + "\n".join(f"    {line}" for line in lines)


def certify(
    session: Session, problem: Problem, record: Record, books: Books
) -> Certified | None:
    """Verify a config with every input case; the outcome is a record of its own, which takes the
    place of the trial's in the books.

    Returns:
        The built module, the record and the outcome; None if the config was refused.
    """
    config = record.config
    rendered = session.render(config, problem)
    built = session.build(rendered).result()
    if isinstance(built, BuildFailure):  # it did compile once: a cleared cache, a broken compiler
        return None
    candidate = session.candidate(config, built)
    outcome = session.run(candidate, problem, level="certify", measure=False)
    if outcome.fate is Fate.VERIFIED:
        outcome = replace(outcome, timing=record.timing)
    certified = session.record(config, problem, rendered, record.key, outcome, built)
    if outcome.fate is not Fate.VERIFIED:
        books.fates[record.fate] -= 1
        books.enter(certified)
        return None
    books.records[config] = certified
    return built, certified, outcome
