"""Certificates reach the steady state of every kernel: rings used again, exchanges repeated."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from host_builds import needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.check import PROOF_SIZES
from kgen.check.schedule import Schedule
from kgen.check.steady import steady_extents
from kgen.model.artifact import BuildFailure, BuildRequest
from kgen.model.config import Config, Value
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.model.space import Variant
from kgen.search.feasible import is_feasible
from kgen.worker import Candidate, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

CATALOGUE = open_catalogue()
H200 = profile_named("h200")
ONE_SM = replace(H200, sm_count=1)  # as host runs are planned for
OPERATORS = ("rmsnorm", "timex", "linear_attention", "wkv4", "wkv5", "wkv6")


def variants() -> Iterator[tuple[str, Variant]]:
    for name in OPERATORS:
        for variant in CATALOGUE.entry(name).space.variants:
            if variant.safe is None:
                yield name, variant


def first_problem(operator: str, variant: Variant, config: Config) -> Problem | None:
    """The first default problem that the config is feasible for."""
    found = CATALOGUE.entry(operator).operator
    pass_ = found.signature.pass_named(variant.pass_name)
    for text in found.default_problems(variant.pass_name, on_host=False):
        problem = parse_problem(text, found.signature)
        if is_feasible(variant, config, pass_, problem, H200):
            return problem
    return None


@pytest.mark.parametrize(
    ("operator", "variant"), [pytest.param(o, v, id=f"{o}-{v.pass_name}-{v.name}")
                              for o, v in variants()]
)
def test_the_certificate_of_a_first_config_reaches_its_steady_state(
    operator: str, variant: Variant
) -> None:
    found = CATALOGUE.entry(operator).operator
    proven = 0
    for config in variant.first[:3]:
        problem = first_problem(operator, variant, config)
        if problem is None:
            continue
        proven += 1
        steady = steady_extents(found, variant, config, problem, ONE_SM)
        pass_ = problem.present(found.signature.pass_named(variant.pass_name))
        schedule = Schedule(found, pass_, problem, 0, PROOF_SIZES)
        cases = [dict(case.dims) for case in schedule.host(0, variant.constants, steady).cases]
        for dim, extent in steady:
            assert any(case.get(dim, 0) >= extent for case in cases), (config.label, dim, extent)
        for dim in found.serial_dims:
            assert dim in dict(steady), f"{variant.name} walks along {dim}"
    if variant.first and not proven:
        pytest.skip("no default problem takes its first configs")


@dataclass(frozen=True)
class Mutation:
    """A kernel at small extents, and an edit of one of its headers."""

    operator: str
    problem: str
    small: Mapping[str, Value]  # of the variant that has these parameters; fewest lanes of each
    header: str
    pattern: str
    becomes: str


# The copy of the next chunk is started before the barrier that frees its slot.
EARLY_COPY = Mutation(
    "wkv6", "B=8,T=4096,H=32,K=16,V=32,dtype=bf16",
    {"chunk": 16, "stages": 4, "buffers": 2, "segments": 1, "value_tiles": 1, "value_warps": 2,
     "key_warps": 1, "min_blocks": 1},
    "kgen/chunked/chunk_halving.cuh",
    r"(sync_block\(\);)(\s*// 1\. Decayed rows.*?)(if \(kBuffers == 2[^;]*stage<true>\(\);)",
    r"\3\2\1",
)
# Every CTA adds the sum of the first one.
FIRST_SUM = Mutation(
    "linear_attention", "B=1,H=4,T=4096,E=16,M=16,dtype=bf16",
    {"head_ctas": 4, "segment": 64, "block_v": 16, "batch": 32, "score_terms": 1,
     "min_blocks": 1, "products": "mma", "overlap": 0},
    "kgen/linear_attention/split_t_exchange_scan.cuh",
    r"load_vec<4>\(sum_of_tile\(first \+ \w+, ",
    "load_vec<4>(sum_of_tile(0, ",
)
MUTATIONS = {"copy before the barrier": EARLY_COPY, "sum of the first CTA": FIRST_SUM}


def variant_with(operator: str, small: Mapping[str, Value]) -> tuple[Variant, Config]:
    """The forward variant that has these parameters, and its smallest such config."""
    for variant in CATALOGUE.entry(operator).space.of_pass("forward"):
        for config in variant.first:
            values = variant.values(config)
            if set(small) <= set(values):
                return variant, variant.config({**values, **small})
    raise AssertionError(f"no variant of {operator} has {', '.join(small)}")


def host_run(folder: Path, mutation: Mutation, *, mutated: bool) -> TrialOutcome:
    """The orders of threads of a certificate."""
    entry = CATALOGUE.entry(mutation.operator)
    variant, config = variant_with(mutation.operator, mutation.small)
    problem = parse_problem(mutation.problem, entry.operator.signature)
    include = folder / "include"
    shutil.copytree(include_dir(), include)
    path = include / mutation.header
    text, count = re.subn(mutation.pattern, mutation.becomes, path.read_text(), flags=re.DOTALL)
    assert count == 1, f"{mutation.header} has other words by now"
    if mutated:
        path.write_text(text)
    renderer = Renderer(include)
    rendered = renderer.render(mutation.operator, entry.templates, variant, config, problem)
    compiler = open_compiler("host", [include], jobs=1)
    try:
        (built,) = compiler.build([BuildRequest(rendered, "host")])
    finally:
        compiler.close()
    assert not isinstance(built, BuildFailure), built.message
    setup = Setup(mutation.operator, (), ONE_SM, 0, 0, on_host=True)
    return Runner(entry.operator, setup).trial(Trial(
        "forward", problem, Candidate(variant, config, built), level="host", measure=False,
        orders=(0, 1, 2, 3),
    ))


@needs_cxx
@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_of_the_steady_state_are_refused(tmp_path: Path, name: str) -> None:
    outcome = host_run(tmp_path, MUTATIONS[name], mutated=True)
    assert outcome.fate in (Fate.WRONG, Fate.CRASHED), outcome


@needs_cxx
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_kernels_themselves_pass(tmp_path: Path, name: str) -> None:
    outcome = host_run(tmp_path, MUTATIONS[name], mutated=False)
    assert outcome.fate is Fate.VERIFIED, outcome.reason
