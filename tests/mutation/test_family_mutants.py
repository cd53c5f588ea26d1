"""One mistake per operation of each kernel family is refused; the kernels themselves pass.

`refused` first certifies the kernel itself, so a separate test of the unmutated kernel is in no
tier.
"""

from __future__ import annotations

import pytest
from family_mutants import FAMILIES, Family, Mistake, mutant_of, subject_of
from mutation_harness import mechanism_of, passes_unmutated, refused

from kgen.catalogue import open_catalogue

CASES = [(family, mistake) for family in FAMILIES for mistake in family.mistakes]


def every(family: Family) -> int:
    """How many mistakes of a family there are for each one in the tiers; the rest is slow."""
    count = len(family.mistakes)
    if count > 40:
        return 6
    return 3 if count > 8 or family.thirds else 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_unmutated_passes(family: Family) -> None:
    assert passes_unmutated(subject_of(family)) == ""


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        pytest.param(
            family, mistake, id=f"{family.name}-{mistake.operation}",
            marks=[pytest.mark.slow] if place % every(family) else [],
        )
        for family in FAMILIES for place, mistake in enumerate(family.mistakes)
    ],
)
def test_a_mistake_is_refused(family: Family, mistake: Mistake) -> None:
    mutant = mutant_of(family, mistake)
    reason = refused(mutant)
    assert reason, f"{mutant.name} in {mutant.header or 'the template'}: it passes"
    assert mechanism_of(reason) in mutant.operator.caught_by


@pytest.mark.quick  # fails first after a change of a header
@pytest.mark.parametrize(
    ("family", "mistake"), CASES, ids=[f"{f.name}-{m.operation}" for f, m in CASES]
)
def test_the_statement_is_there(family: Family, mistake: Mistake) -> None:
    assert mutant_of(family, mistake).text


def test_every_operator_has_mistakes() -> None:
    """The mistakes of rmsnorm are in `mutants.py`."""
    assert {family.operator for family in FAMILIES} | {"rmsnorm"} == set(open_catalogue().names)
