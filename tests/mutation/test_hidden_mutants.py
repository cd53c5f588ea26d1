"""Mistakes that show with few calls are refused; most of them are in naive kernels.

`refused` first certifies the kernel itself, so a separate test of the unmutated kernel is in no
tier.
"""

from __future__ import annotations

from collections import Counter

import pytest
from family_mutants import Family, Mistake, mutant_of, subject_of
from hidden_mutants import HIDDEN, IN_CI
from mutation_harness import passes_unmutated, refused

from kgen.catalogue import open_catalogue

CASES = [(family, mistake) for family in HIDDEN for mistake in family.mistakes]
IDS = [f"{family.name}-{mistake.operation}" for family, mistake in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("family", HIDDEN, ids=lambda family: family.name)
def test_unmutated_passes(family: Family) -> None:
    assert passes_unmutated(subject_of(family)) == ""


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        pytest.param(*case, id=name, marks=() if name in IN_CI else pytest.mark.slow)
        for case, name in zip(CASES, IDS, strict=True)
    ],
)
def test_a_mistake_is_refused(family: Family, mistake: Mistake) -> None:
    mutant = mutant_of(family, mistake)
    assert refused(mutant), f"{mutant.name} in {mutant.header or 'the template'}: it passes"


@pytest.mark.quick  # fails first after a change of a header
@pytest.mark.parametrize(("family", "mistake"), CASES, ids=IDS)
def test_the_statement_is_there(family: Family, mistake: Mistake) -> None:
    assert mutant_of(family, mistake).text


def test_every_operator_and_pass_has_some() -> None:
    catalogue = open_catalogue()
    passes = {
        (name, pass_.name)
        for name in catalogue.names
        for pass_ in catalogue.entry(name).operator.signature.passes
    }
    assert {(family.operator, family.pass_name) for family in HIDDEN} == passes


def test_names_are_of_one_mistake_each() -> None:
    assert not [name for name, count in Counter(IDS).items() if count > 1]
    assert set(IDS) >= IN_CI
