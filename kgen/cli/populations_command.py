"""`kgen populations`."""

from __future__ import annotations

import argparse

from kgen.catalogue import Catalogue, load_population, open_catalogue, population_names
from kgen.cli.arguments import print_counts
from kgen.errors import OptionError, ProblemError
from kgen.model.names import short_name
from kgen.model.population import Population, PopulationProblem


def run(options: argparse.Namespace) -> int:
    """Print all populations, or the models and problems of one population.

    Raises:
        OptionError: If a filter is given without the name of a population.
        ProblemError: If the population has no problems that the filters select.
    """
    catalogue = open_catalogue(options.path)
    if options.name:
        operator = catalogue.operator(options.op).name if options.op else None
        _print_one(load_population(options.name, catalogue), catalogue, operator, options.pass_name)
        return 0
    if options.op or options.pass_name:
        raise OptionError("--op and --pass choose problems of one population; add its name")
    for name in population_names(catalogue):
        _print_summary(load_population(name, catalogue))
    return 0


def _print_summary(population: Population) -> None:
    models = population.models
    print(f"{population.name}: {population.doc}")
    print(f"  problems: {print_counts(population)}")
    print(f"  {len(models)} models, from {models[0].name} to {models[-1].name}")


def _print_one(
    population: Population, catalogue: Catalogue, operator: str | None, pass_name: str | None
) -> None:
    wanted = [
        entry
        for entry in population.entries
        if operator in (None, entry.operator) and pass_name in (None, entry.pass_name)
    ]
    if not wanted:
        raise ProblemError(f"population '{population.name}' has no such problems\n"
                           f"  it has: {print_counts(population)}\n"
                           "  next: choose --op and --pass among these")
    print(f"{population.name}: {population.doc}")
    called = {name for entry in wanted for name in entry.models}
    models = [model for model in population.models if model.name in called]
    width = max(len(model.name) for model in models)
    print(f"\n{len(models)} models")
    for model in models:
        print(f"  {model.name:<{width}}  {model.source}")
    groups: dict[tuple[str, str], list[PopulationProblem]] = {}
    for entry in wanted:
        groups.setdefault((entry.operator, entry.pass_name), []).append(entry)
    for (name, pass_), entries in groups.items():
        signature = catalogue.operator(name).signature
        print(f"\n{name} {pass_}: {len(entries)} problems")
        for entry in entries:
            print(f"  {short_name(entry.problem, signature)}")
