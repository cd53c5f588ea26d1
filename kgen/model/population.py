"""A population: the problems that published models call, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.model.problem import Problem


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model whose published configuration gives extents.

    Attributes:
        name: The authors' name of the model.
        source: Where the configuration is published: a URL, or a paper.
    """

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class PopulationProblem:
    """One problem of one pass, with the models that call it.

    Attributes:
        operator: Name of the operator.
        pass_name: `forward` or `backward`.
        problem: Dims, dtypes and options.
        models: Names of models, in the order of the file.
    """

    operator: str
    pass_name: str
    problem: Problem
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Population:
    """A named list of real problems.

    Attributes:
        name: The file's name without its ending.
        doc: One line about the population.
        models: All models, in the order of the file.
        entries: All problems, in the order of the file; no two are equal.
    """

    name: str
    doc: str
    models: tuple[PublishedModel, ...]
    entries: tuple[PopulationProblem, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of operators, in the order of the file."""
        return tuple(dict.fromkeys(entry.operator for entry in self.entries))

    def of_pass(self, operator: str, pass_name: str) -> tuple[PopulationProblem, ...]:
        """The entries of one pass of an operator; empty if there are none."""
        return tuple(
            entry
            for entry in self.entries
            if entry.operator == operator and entry.pass_name == pass_name
        )

    def problems(self, operator: str, pass_name: str) -> tuple[Problem, ...]:
        """The problems of one pass of an operator; empty if there are none."""
        return tuple(entry.problem for entry in self.of_pass(operator, pass_name))
