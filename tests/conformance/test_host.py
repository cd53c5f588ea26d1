"""Every variant of every operator, executed on the host layer against the float64 oracle.

Parametrised over the catalogue: a new operator is covered by being there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import EmptySpaceError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.model.signature import Signature
from kgen.model.space import Variant
from kgen.operators.base import Operator
from kgen.render import Renderer
from kgen.search.feasible import enumerate_feasible
from kgen.worker.messages import Candidate, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

HOST = profile_named("host")
# Extents per dim, chosen to be ragged, tiny, and a power of two; each problem takes one column.
EXTENTS = (64, 67, 1, 256)


def all_variants() -> list[tuple[str, str, str]]:
    catalogue = open_catalogue()
    return [
        (name, variant.pass_name, variant.name)
        for name in catalogue.names
        for variant in catalogue.entry(name).space.variants
    ]


def problems(signature: Signature) -> list[Problem]:
    """Every pair of dtypes, over extents that rotate so that every extent is tried."""
    found = []
    for i, dtypes in enumerate(signature.dtype_pairs()):
        for j in range(4):
            dims = tuple(
                (d.name, max(EXTENTS[(i + j + k) % len(EXTENTS)], d.smallest))
                for k, d in enumerate(signature.dims)
            )
            found.append(Problem(dims, tuple(dtypes.items())))
    return found


def spread(variant: Variant, signature: Signature, problem: Problem, count: int) -> list[Config]:
    """The first, the last and evenly spaced feasible configs."""
    pass_ = signature.pass_named(variant.pass_name)
    try:
        configs = enumerate_feasible([variant], pass_, problem, HOST).configs
    except EmptySpaceError:
        return []
    steps = max(count - 1, 1)
    return list(dict.fromkeys(configs[i * (len(configs) - 1) // steps] for i in range(count)))


def run_variant(
    operator: str,
    pass_name: str,
    name: str,
    compiler_name: str,
    configs: int,
    at_most: int,
    changed: Callable[[Operator], Operator] = lambda operator: operator,
) -> list[tuple[Problem, Config, TrialOutcome]]:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    compiler = open_compiler(compiler_name, [include_dir()])
    runner = Runner(changed(entry.operator), Setup(operator, (), HOST, 0, seed=1))
    renderer = Renderer(include_dir())
    wanted = [
        (problem, config)
        for problem in problems(entry.operator.signature)
        for config in spread(variant, entry.operator.signature, problem, configs)
    ]
    assert wanted, "no config of this variant is feasible for any problem of this suite"
    wanted = wanted[:: -(-len(wanted) // at_most)]  # of every problem some, not of some all
    requests = [
        BuildRequest(renderer.render(operator, entry.templates, variant, config, problem), "host")
        for problem, config in wanted
    ]
    outcomes = []
    for (problem, config), built in zip(wanted, compiler.build(requests), strict=True):
        assert isinstance(built, Artifact), built
        candidate = Candidate(variant, config, built)
        trial = Trial(pass_name, problem, candidate, certify=True, measure=False)
        outcomes.append((problem, config, runner.trial(trial)))
    compiler.close()
    return outcomes


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_agrees_with_the_oracle(operator: str, pass_name: str, name: str) -> None:
    outcomes = run_variant(operator, pass_name, name, "host", configs=3, at_most=30)
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
        assert len(outcome.cases) > 3, outcome.cases


def with_other_scalars(operator: Operator) -> Operator:
    """The operator with half added to each scalar's default."""
    passes = tuple(
        replace(p, scalars=tuple(replace(s, default=s.default + 0.5) for s in p.scalars))
        for p in operator.signature.passes
    )
    return replace(operator, signature=replace(operator.signature, passes=passes))


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_takes_its_scalars_from_the_call(operator: str, pass_name: str, name: str) -> None:
    for problem, config, outcome in run_variant(
        operator, pass_name, name, "host", configs=1, at_most=3, changed=with_other_scalars
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_stays_inside_its_buffers(operator: str, pass_name: str, name: str) -> None:
    """Under AddressSanitizer; fewer configs, because each launch is a process."""
    outcomes = run_variant(operator, pass_name, name, "host-asan", configs=1, at_most=2)
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
