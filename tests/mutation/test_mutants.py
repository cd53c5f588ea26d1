"""Mutation tests of the verifier: a certificate refuses every mutant that it must refuse.

By default one mutant of each edit is run, taken from the subjects in turn. All of them are run by
`pytest tests/mutation -m "slow or not slow" -n auto`, which prints the table of
docs/verification.md.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from mutants import SAME_CODE, Mutant, mutants
from mutation_excuses import EXCUSES
from mutation_harness import mechanism_of, passes_unmutated, refused, same_code
from mutation_operators import OPERATORS, Fate
from mutation_subjects import SUBJECTS, Subject
from mutation_table import documented

from kgen.search.feasible import is_feasible

MUTANTS = mutants()


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_unmutated_passes(subject: Subject) -> None:
    pass_ = subject.entry.operator.signature.pass_named(subject.pass_name)
    assert is_feasible(subject.space, subject.config, pass_, subject.problem, subject.host)
    assert passes_unmutated(subject) == ""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=() if m.by_default else pytest.mark.slow)
        for m in MUTANTS
    ],
)
def test_fate(mutant: Mutant, record_property: Callable[[str, object], None]) -> None:
    if mutant.fate is Fate.SAME_CODE and same_code(mutant):
        record_property("mutant", [mutant.operator.name, str(mutant.fate), ""])
        return
    reason = refused(mutant)
    mechanism = mechanism_of(reason) if reason else ""
    record_property("mutant", [mutant.operator.name, str(mutant.fate), str(mechanism)])
    if mutant.fate is Fate.REFUSED:
        assert reason, "a harmful mutant passes: mend the verifier, or say in EXCUSES why it may"
        assert mechanism in mutant.operator.caught_by, reason
    else:
        assert not reason, f"refused, though: {mutant.why}"


@pytest.mark.slow
def test_same_code_list() -> None:
    found = [m.name for m in MUTANTS if same_code(m)]
    if os.environ.get("KGEN_UPDATE_GOLDEN"):
        SAME_CODE.write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
    assert found == SAME_CODE.read_text(encoding="utf-8").splitlines()


def test_every_edit_applies() -> None:
    applied = {(m.operator.name, m.edit) for m in MUTANTS}
    for operator in OPERATORS:
        wanted = [*operator.edits, *operator.plan]
        missing = [w for i, w in enumerate(wanted) if (operator.name, i) not in applied]
        assert not missing, f"{operator.name}: nothing left to spoil, so it proves nothing"


def test_every_excuse_is_needed_and_has_a_reason() -> None:
    for excuse in EXCUSES:
        covered = [m for m in MUTANTS if excuse.covers(m.name)]
        assert any(m.fate is not Fate.SAME_CODE for m in covered), excuse
        assert excuse.fate is not Fate.REFUSED
    for mutant in MUTANTS:
        assert (mutant.fate is Fate.REFUSED) == (mutant.why == ""), mutant.name


def test_mutants_are_distinct_and_many() -> None:
    assert not [name for name, n in Counter(m.name for m in MUTANTS).items() if n > 1]
    by_default = [m for m in MUTANTS if m.by_default]
    assert sum(m.fate is Fate.REFUSED for m in by_default) >= 48
    assert {m.subject.variant for m in by_default} == {s.variant for s in SUBJECTS}


def test_document_counts_them() -> None:
    """Only the counts are checked; the mechanisms in the table are those of the last full run."""
    counts = {}
    for operator in OPERATORS:
        fates = Counter(m.fate for m in MUTANTS if m.operator is operator)
        counts[operator.name] = fates
    counts["all"] = sum(counts.values(), Counter())
    assert documented() == {
        name: tuple(f[fate] for fate in Fate)
        for name, f in counts.items()
    }, "copy the table that a full run prints into docs/verification.md"
