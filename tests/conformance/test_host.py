"""Every variant of every operator, executed on the host layer against the float64 oracle.

Parametrised over the catalogue: a new operator is covered by being there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.errors import EmptySpaceError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.plan import make_plan
from kgen.model.problem import Problem, with_dims
from kgen.model.record import Fate
from kgen.model.signature import Signature
from kgen.model.space import RuleKind, Variant
from kgen.operators.base import Operator
from kgen.render import Renderer
from kgen.search.feasible import enumerate_feasible, is_feasible, refusing_rule
from kgen.verify import HOST_SIZES, Sizes
from kgen.worker.messages import Candidate, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

HOST = profile_named("host")
H200 = profile_named("h200")
# The host's profile has the least shared memory that any GPU has. Warpgroups are of one with more.
ROOMY = replace(HOST, smem_per_block=H200.smem_per_block, smem_per_sm=H200.smem_per_sm)
# Extents per dim, chosen to be ragged, tiny, and a power of two; each problem takes one column.
EXTENTS = (64, 67, 1, 256)
SMALLER_EXTENTS = (16, 67, 1, 5)  # of operators with three dims, whose products add up
SMALLEST_EXTENTS = (3, 35, 1, 8)  # of operators with more
# Of hard inputs of operators with three dims or more: what is small in bytes may be ten thousand
# blocks there, each with a few steps of a short sum, and each on its own.
FEW_ROWS = 4
# Blocks with more shared memory than the host's profile has compute much however few rows they
# have. Of all blocks of a config together, and bytes of a set.
MOST_THREADS = 2**14
FEW_BYTES = replace(HOST_SIZES, small=2**15)
# Of threads: by rank, and shuffled. Where both are run they must give the same bits.
BY_RANK, SHUFFLED = 0, 1


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
    dims = len(signature.dims)
    extents = EXTENTS if dims <= 2 else SMALLER_EXTENTS if dims == 3 else SMALLEST_EXTENTS
    for i, dtypes in enumerate(signature.dtype_pairs()):
        for j in range(len(extents)):
            shape = tuple(
                (d.name, max(extents[(i + j + k) % len(extents)], d.smallest))
                for k, d in enumerate(signature.dims)
            )
            found.append(with_dims(Problem(shape, tuple(dtypes.items())), {}, signature))
    return found


def profile_of(variant: Variant, signature: Signature) -> GpuProfile:
    """The host's, but for variants whose blocks need more shared memory whatever the config."""
    fits = any(spread(variant, signature, problem, 1) for problem in problems(signature))
    return HOST if fits else ROOMY


def sizes_of(variant: Variant, signature: Signature) -> Sizes:
    """Of the sets that the variant is certified on."""
    return HOST_SIZES if profile_of(variant, signature) is HOST else FEW_BYTES


def spread(
    variant: Variant,
    signature: Signature,
    problem: Problem,
    count: int,
    gpu: GpuProfile = HOST,
) -> list[Config]:
    """The first, the last and evenly spaced feasible configs."""
    pass_ = signature.pass_named(variant.pass_name)
    try:
        configs = enumerate_feasible([variant], pass_, problem, gpu).configs
    except EmptySpaceError:
        return []
    steps = max(count - 1, 1)
    return list(dict.fromkeys(configs[i * (len(configs) - 1) // steps] for i in range(count)))


def threads_of(variant: Variant, config: Config, problem: Problem) -> int:
    """Of all blocks of all launches."""
    launches = make_plan(variant, config, problem, HOST).launches
    return sum(math.prod(x.grid) * x.threads for x in launches)


def inefficient(
    variant: Variant, signature: Signature, count: int
) -> list[tuple[Problem, Config]]:
    """Random configs that only rules of efficiency refuse, each for a reason of its own.

    Rules are read for a GPU too: most of them are lenient on the host. Of the draws with the same
    reasons the one with the fewest threads: each is a fiber.
    """
    pass_ = signature.pass_named(variant.pass_name)
    host = profile_of(variant, signature)
    tried = problems(signature)
    draw = random.Random(0)
    found: dict[frozenset[str], tuple[int, Problem, Config]] = {}
    for _ in range(3000):
        problem = draw.choice(tried)
        config = variant.config({p.name: draw.choice(p.choices) for p in variant.params})
        if not is_feasible(variant, config, pass_, problem, host, legality_only=True):
            continue
        rules = [refusing_rule(variant, config, pass_, problem, gpu) for gpu in (host, H200)]
        why = frozenset(r.why for r in rules if r and r.kind is RuleKind.EFFICIENCY)
        threads = threads_of(variant, config, problem)
        if why and (why not in found or threads < found[why][0]):
            found[why] = (threads, problem, config)
    wanted: list[tuple[Problem, Config]] = []
    reasons: set[str] = set()
    for why, (_, problem, config) in found.items():
        if why - reasons and len(wanted) < count:
            reasons |= why
            wanted.append((problem, config))
    return wanted


def run_variant(
    operator: str,
    pass_name: str,
    name: str,
    compiler_name: str,
    configs: int,
    at_most: int,
    orders: tuple[int, ...],
    changed: Callable[[Operator], Operator] = lambda operator: operator,
) -> list[tuple[Problem, Config, TrialOutcome]]:
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    gpu = profile_of(variant, signature)
    wanted = [
        (problem, config)
        for problem in problems(signature)
        for config in spread(variant, signature, problem, configs, gpu)
        if gpu is HOST or threads_of(variant, config, problem) <= MOST_THREADS
    ]
    assert wanted, "no config of this variant is feasible for any problem of this suite"
    dims = len(signature.dims)
    if dims > 2:  # each has more sets to be certified on, too
        at_most = -(-at_most // dims)
    wanted = wanted[:: -(-len(wanted) // at_most)]  # of every problem some, not of some all
    sizes = sizes_of(variant, signature)
    return run_configs(entry, variant, compiler_name, wanted, orders, changed, sizes)


def run_configs(
    entry: Entry,
    variant: Variant,
    compiler_name: str,
    wanted: list[tuple[Problem, Config]],
    orders: tuple[int, ...],
    changed: Callable[[Operator], Operator] = lambda operator: operator,
    sizes: Sizes = HOST_SIZES,
    include: Path | None = None,
) -> list[tuple[Problem, Config, TrialOutcome]]:
    """Certify each on the host, with the headers in `include` (default: kgen's own)."""
    operator, pass_name = entry.operator.name, variant.pass_name
    headers = include or include_dir()
    compiler = open_compiler(compiler_name, [headers])
    if len(entry.operator.signature.dims) > 2:
        sizes = replace(sizes, rows=FEW_ROWS)
    runner = Runner(changed(entry.operator), Setup(operator, (), HOST, 0, seed=1), sizes)
    renderer = Renderer(headers)
    requests = [
        BuildRequest(renderer.render(operator, entry.templates, variant, config, problem), "host")
        for problem, config in wanted
    ]
    outcomes = []
    for (problem, config), built in zip(wanted, compiler.build(requests), strict=True):
        assert isinstance(built, Artifact), built
        candidate = Candidate(variant, config, built)
        trial = Trial(
            pass_name, problem, candidate, level="certify", measure=False, orders=orders
        )
        outcomes.append((problem, config, runner.trial(trial)))
    compiler.close()
    return outcomes


def compiled(entry: Entry, variant: Variant, config: Config, problem: Problem) -> Artifact:
    """The kernels as NVRTC builds them for an H200."""
    renderer, compiler = Renderer(include_dir()), open_compiler("nvrtc", [include_dir()])
    rendered = renderer.render(entry.operator.name, entry.templates, variant, config, problem)
    [built] = compiler.build([BuildRequest(rendered, H200.arch)])
    compiler.close()
    assert isinstance(built, Artifact), built
    return built


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_agrees_with_the_oracle(operator: str, pass_name: str, name: str) -> None:
    orders = (BY_RANK, SHUFFLED)
    outcomes = run_variant(operator, pass_name, name, "host", 3, at_most=30, orders=orders)
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
        assert outcome.evidence is not None
        assert len(outcome.evidence.tried) > 3, outcome.evidence


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_what_efficiency_refuses_is_right_all_the_same(
    operator: str, pass_name: str, name: str
) -> None:
    """Else the rule is one of legality: ladders and dispatch run such configs."""
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    wanted = inefficient(variant, signature, count=4)
    if not wanted:
        pytest.skip("no rule of efficiency refuses anything for the problems of this suite")
    sizes = sizes_of(variant, signature)
    for problem, config, outcome in run_configs(
        entry, variant, "host", wanted, (SHUFFLED,), sizes=sizes
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


def always_nonfinite(operator: Operator) -> Operator:
    """The operator with NaN and Inf among the inputs of every case."""

    def inputs(
        pass_name: str, problem: Problem, case: str, drawn: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return operator.make_inputs(pass_name, problem, "nonfinite", drawn, device)

    return replace(operator, make_inputs=inputs)


def with_other_scalars(operator: Operator) -> Operator:
    """The operator with half added to each scalar's default."""
    passes = tuple(
        replace(p, scalars=tuple(replace(s, default=s.default + 0.5) for s in p.scalars))
        for p in operator.signature.passes
    )
    return replace(operator, signature=replace(operator.signature, passes=passes))


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_takes_its_scalars_from_the_call(operator: str, pass_name: str, name: str) -> None:
    outcomes = run_variant(
        operator, pass_name, name, "host", 1, 3, orders=(BY_RANK,), changed=with_other_scalars
    )
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_stays_inside_its_buffers(operator: str, pass_name: str, name: str) -> None:
    """Under AddressSanitizer; fewer configs, because each launch is a process."""
    outcomes = run_variant(operator, pass_name, name, "host-asan", 1, 2, orders=(BY_RANK,))
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
