"""No problem of a population is left to the safe kernel of the committed library on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.populations import load_population, population_names
from kgen.emit import LoadedLibrary

LIBRARY = Path(__file__).resolve().parents[2] / "generated"
CATALOGUE = open_catalogue()


@pytest.mark.parametrize("operator", CATALOGUE.names)
def test_no_problem_is_left_to_the_safe_kernel(operator: str) -> None:
    h200 = profile_named("h200")
    populations = [load_population(name, CATALOGUE) for name in population_names(CATALOGUE)]
    asked, left = 0, []
    with LoadedLibrary.open(LIBRARY, "--out") as library:
        for pass_ in CATALOGUE.operator(operator).signature.passes:
            problems = {p for each in populations for p in each.problems(operator, pass_.name)}
            asked += len(problems)
            for problem in problems:
                served = library.served(operator, pass_.name, problem, h200)
                if served is None or served.step == "safe":
                    left.append(f"{pass_.name} {problem}")
    assert asked >= 10
    assert not left, "\n".join(left)
