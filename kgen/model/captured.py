"""Calls that `kgen_ops.capture` recorded: a program's problems, with counts and times."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.model.population import Population, PopulationProblem
from kgen.model.problem import Problem


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """The calls of one problem.

    Attributes:
        operator: Name of the operator.
        pass_name: `forward` or `backward`.
        problem: Dims, dtypes and options.
        device: The driver's name of the GPU, or `cpu`.
        calls: Number of calls.
        median_us: Median time of a call, microseconds; None if no call was timed.
        step: The dispatch step that served the calls.
        config: The config that served the calls.
    """

    operator: str
    pass_name: str
    problem: Problem
    device: str
    calls: int
    median_us: float | None
    step: str
    config: str

    @property
    def cost_us(self) -> float:
        """Time of all calls together, microseconds; 0 if none was timed."""
        return self.calls * (self.median_us or 0.0)


@dataclass(frozen=True, slots=True)
class CapturedCalls:
    """A captured file.

    Attributes:
        name: The file's name.
        steps: How many steps of the model were captured.
        calls: The most costly first.
    """

    name: str
    steps: int
    calls: tuple[CapturedCall, ...]

    @property
    def population(self) -> Population:
        """The captured problems, the most costly first; operators by their total cost."""
        whole: dict[str, float] = {}
        costs: dict[tuple[str, str, Problem], float] = {}
        for call in self.calls:
            key = (call.operator, call.pass_name, call.problem)
            costs[key] = costs.get(key, 0.0) + call.cost_us
            whole[call.operator] = whole.get(call.operator, 0.0) + call.cost_us
        ordered = sorted(costs, key=lambda key: (-whole[key[0]], -costs[key]))
        entries = tuple(PopulationProblem(*key, models=()) for key in ordered)
        return Population(self.name, f"captured calls, {self.steps} steps", (), entries)
