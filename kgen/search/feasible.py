"""Enumerate the configs that a problem and a GPU allow, before anything is searched.

Parameters are bound in order, and each rule is evaluated as soon as its last name is bound, so one
evaluation can exclude a whole subtree. The number of excluded configs is counted per rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kgen.errors import EmptySpaceError, ExprError, SpaceError
from kgen.model.config import Config, Value
from kgen.model.expr import Names, base_names, parse_expr
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Planner
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.model.space import Rule, RuleKind, Variant

_ALWAYS = parse_expr("True")
HARDWARE_LIMIT = "hardware limit"  # the `where` of CUDA's limits, which no file declares


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason why configs are infeasible, and how many it excludes."""

    variant: str
    rule: str
    why: str
    where: str
    configs: int


@dataclass(frozen=True, slots=True)
class Feasible:
    """The feasible set of one pass for one problem on one GPU.

    Attributes:
        configs: All feasible configs, in declared order.
        size: Configs before any rule.
        refusals: Per rule that refused anything, most refused first.
    """

    configs: tuple[Config, ...]
    size: int
    refusals: tuple[Refusal, ...]


def enumerate_feasible(
    variants: Sequence[Variant], pass_: Pass, problem: Problem, gpu: GpuProfile
) -> Feasible:
    """Enumerate over several variants.

    Raises:
        EmptySpaceError: If no config is feasible; its text names the rules that refused most.
    """
    configs: list[Config] = []
    refusals: list[Refusal] = []
    for variant in variants:
        enumeration = Feasibility(variant, pass_, problem, gpu)
        configs += enumeration.run()
        refusals += [
            Refusal(variant.name, _text(rule), rule.why, rule.where, count)
            for rule, count in enumeration.refused.items()
        ]
    refusals.sort(key=lambda r: -r.configs)
    if not configs:
        worst = "\n".join(f"  {r.where}: {r.why} ({r.configs} configs)" for r in refusals[:5])
        raise EmptySpaceError(
            f"no config of {', '.join(v.name for v in variants)} is feasible for {problem} on "
            f"{gpu.name}; the rules that refused most:\n{worst}\n"
            "  add choices to the search space, or tune another problem"
        )
    return Feasible(tuple(configs), sum(v.size for v in variants), tuple(refusals))


def _text(rule: Rule) -> str:
    return HARDWARE_LIMIT if rule.condition is _ALWAYS else rule.condition.text


def _holds(rule: Rule, env: Names) -> bool:
    """Whether a rule's condition is true.

    Raises:
        SpaceError: If it cannot be evaluated, for example if it compares a text with a number.
    """
    try:
        return bool(rule.condition(env))
    except ExprError as problem:
        raise SpaceError(f"{rule.where}: rule {problem}") from None


def is_feasible(
    variant: Variant,
    config: Config,
    pass_: Pass,
    problem: Problem,
    gpu: GpuProfile,
    *,
    legality_only: bool = False,
) -> bool:
    """Whether one config passes every rule, or every rule of legality."""
    return (
        refusing_rule(variant, config, pass_, problem, gpu, legality_only=legality_only) is None
    )


def refusing_rule(
    variant: Variant,
    config: Config,
    pass_: Pass,
    problem: Problem,
    gpu: GpuProfile,
    *,
    legality_only: bool = False,
) -> Rule | None:
    """The first rule that refuses a config, or None.

    Args:
        variant: The config's variant.
        config: The config.
        pass_: The pass.
        problem: The problem.
        gpu: The GPU.
        legality_only: Ignore efficiency rules, which only say whether a trial is worthwhile.
    """
    return Feasibility(variant, pass_, problem, gpu).refusing_rule(config, legality_only)


class Feasibility:
    """Evaluates the rules of one variant on configs, for one problem on one GPU."""

    def __init__(self, variant: Variant, pass_: Pass, problem: Problem, gpu: GpuProfile) -> None:
        self.variant, self.gpu = variant, gpu
        self.planner = Planner(variant, gpu)
        self.lets = dict(variant.lets)
        self.env: dict[str, Any] = {**gpu.names, **problem.names, **_tuning_call(pass_, problem)}
        self.refused: dict[Rule, int] = {}
        names = [p.name for p in variant.params]
        # levels[i] holds the rules that can be decided once the first i parameters are bound.
        self.levels: list[list[Rule]] = [[] for _ in range(len(names) + 1)]
        for rule in (*variant.requires, *variant.guards):
            used = base_names(rule.condition, self.lets)
            last = max((names.index(n) + 1 for n in used if n in names), default=0)
            self.levels[last].append(rule)
        # A let may depend on a parameter, so its value changes with it.
        self.stale: dict[str, list[str]] = {name: [] for name in names}
        for let, expr in variant.lets:
            for name in base_names(expr, self.lets) & self.stale.keys():
                self.stale[name].append(let)

    def refusing_rule(self, config: Config, legality_only: bool = False) -> Rule | None:
        """The first rule that refuses a config, or None; see the function of this name."""
        env = Names({**self.env, **self.variant.values(config)}, self.lets)
        for level in self.levels:
            for rule in level:
                if legality_only and rule.kind is RuleKind.EFFICIENCY:
                    continue
                if not _holds(rule, env):
                    return rule
        return self.plan_refusal(env)

    def run(self) -> list[Config]:
        """Return the feasible configs in declared order, depth first."""
        found: list[Config] = []
        self._descend(0, Names(self.env, self.lets), [], found)
        return found

    def _descend(
        self, depth: int, env: Names, chosen: list[tuple[str, Value]], found: list[Config]
    ) -> None:
        params = self.variant.params
        for rule in self.levels[depth]:
            if not _holds(rule, env):
                lost = math.prod(len(p.choices) for p in params[depth:])
                self.refused[rule] = self.refused.get(rule, 0) + lost
                return
        if depth == len(params):
            refusal = self.plan_refusal(env)
            if refusal is None:
                found.append(self.variant.config(dict(chosen)))
            else:
                self.refused[refusal] = self.refused.get(refusal, 0) + 1
            return
        param = params[depth]
        for choice in param.choices:
            env[param.name] = choice
            for let in self.stale[param.name]:
                env.pop(let, None)
            chosen.append((param.name, choice))
            self._descend(depth + 1, env, chosen, found)
            chosen.pop()
        for name in (param.name, *self.stale[param.name]):
            env.pop(name, None)

    def plan_refusal(self, env: Names) -> Rule | None:
        """The reason why the launch of the config in `env` is illegal, or None."""
        gpu = self.gpu
        try:
            plan = self.planner.plan(env)
        except SpaceError as problem:
            return self._limit(str(problem).partition(": ")[2])
        for launch in plan.launches:
            if launch.threads > gpu.max_threads_per_block:
                return self._limit(f"a block has at most {gpu.max_threads_per_block} threads")
            if launch.smem_bytes > gpu.smem_per_block:
                return self._limit(
                    f"a block has at most {gpu.smem_per_block} bytes of shared memory"
                )
        return None

    def _limit(self, why: str) -> Rule:
        return Rule(_ALWAYS, why, self.variant.where)


def _tuning_call(pass_: Pass, problem: Problem) -> Mapping[str, int]:
    """Pointers and strides of a tune's tensors: aligned and contiguous; 0 for absent tensors."""
    names: dict[str, int] = {}
    present = problem.present(pass_).tensors
    for tensor in pass_.tensors:
        names[f"{tensor.name}_ptr"] = 0  # divisible by every alignment
        shape = problem.shape(tensor.dims)
        for i, dim in enumerate(tensor.dims):
            if dim in tensor.free_strides:
                contiguous = math.prod(shape[i + 1 :])
                names[f"{tensor.name}_stride_{dim}"] = contiguous if tensor in present else 0
    return names
