"""Every variant of every operator, executed on the host layer against the float64 oracle.

The tests are parametrised over the catalogue, so a new operator is covered automatically.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.check import HOST_SIZES, Sizes
from kgen.errors import EmptySpaceError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.plan import make_plan
from kgen.model.problem import Problem, parse_problem, with_dims
from kgen.model.record import Fate
from kgen.model.signature import Signature
from kgen.model.space import RuleKind, Variant
from kgen.operators.base import Operator
from kgen.search.feasible import Feasibility, enumerate_feasible, is_feasible
from kgen.verify.covering import covering_rows
from kgen.worker.messages import Candidate, Setup, Trial, TrialOutcome
from kgen.worker.runner import Runner

HOST = profile_named("host")
H200 = profile_named("h200")
# The host's profile has the least shared memory that any GPU has. Kernels with warpgroups need a
# GPU with more.
ROOMY = replace(HOST, smem_per_block=H200.smem_per_block, smem_per_sm=H200.smem_per_sm)
# Extents per dim, chosen to be ragged, tiny, and a power of two; each problem takes one column.
EXTENTS = (64, 67, 1, 256)
SMALLER_EXTENTS = (16, 67, 1, 5)  # for operators with three dims, whose work is a product of dims
SMALLEST_EXTENTS = (3, 35, 1, 8)  # for operators with more dims
# Rows of hard inputs of operators with three dims or more. Inputs of few bytes may be ten thousand
# independent blocks there, each with a few steps of a short sum.
FEW_ROWS = 4
# For the same operators: the least extent of a set beyond the problem, no larger than in other
# ragged sets (a dim of 16 or less has no such set unless it is a dim of a head's features); and the
# extents of sequences and heads in ragged sets.
BEYOND, RAGGED_REPEATS = 65, (0, 1, 2, 9)
# Number of fresh sets. Two suffice, because most configs of this suite have a problem of their own
# and therefore also other values.
FRESH = 2
# Blocks with more shared memory than the host's profile has do much work even for few rows. Largest
# number of threads of all blocks of a config together, and bytes of a set.
MOST_THREADS = 2**14
FEW_BYTES = replace(HOST_SIZES, small=2**15)
# For a variant's covering array: candidates per problem, and the largest number of rows. Three rows
# have every kind of value: the first, the last and another one (`factors`).
CANDIDATES = 16
FEW_DIMS_ROWS, ROWS = 6, 3
# The slow tests have the rows that follow, up to these numbers, and as many further configs again.
FEW_DIMS_ROWS_OF_SLOW, ROWS_OF_SLOW = 20, 10
INEFFICIENT, SANITIZED = 2, 1
# Seeds of the order of threads: by rank, and shuffled. If both are run, they must give equal bits.
BY_RANK, SHUFFLED = 0, 1


def all_variants() -> list[tuple[str, str, str]]:
    catalogue = open_catalogue()
    return [
        (name, variant.pass_name, variant.name)
        for name in catalogue.names
        for variant in catalogue.entry(name).space.variants
    ]


def last_of_families() -> set[str]:
    """The last operator by name of each family, whose members share templates.

    For instance wkv6, which has a decay for each step, and not wkv5, which has none.
    """
    catalogue = open_catalogue()
    return set({catalogue.entry(name).space.family or name: name for name in catalogue.names}
               .values())


def each_variant_of_families() -> list[object]:
    """All variants; a variant is in no tier if its operator's family has a later operator."""
    last = last_of_families()
    return [
        pytest.param(*variant, marks=[] if variant[0] in last else [pytest.mark.slow])
        for variant in all_variants()
    ]


each_variant = pytest.mark.parametrize(
    ("operator", "pass_name", "name"), each_variant_of_families()
)


def once_per_family() -> list[object]:
    """All variants; those of one operator of each family are in the quick tier.

    Kernels with grid barriers are in the full tier: each takes a minute, because all their CTAs run
    in turn.
    """
    catalogue, last = open_catalogue(), last_of_families()
    found: list[object] = []
    for operator, pass_name, name in all_variants():
        variant = catalogue.entry(operator).space.variant(pass_name, name)
        quick = operator in last and not any(
            launch.coresident for launch in variant.launches
        )
        marks = [pytest.mark.quick] if quick else []
        found.append(pytest.param(operator, pass_name, name, marks=marks))
    return found


each_variant_once = pytest.mark.parametrize(
    ("operator", "pass_name", "name"), once_per_family()
)


def few_dims(signature: Signature) -> bool:
    """Whether kernels do little work: with more than two dims it grows as the product of dims."""
    return len(signature.dims) <= 2


def problems(signature: Signature, every: bool = False) -> list[Problem]:
    """Problems with every pair of dtypes; their extents rotate so that every extent is tried.

    With `every`, problems with all combinations of dtypes instead of pairs.
    """
    found = []
    dims = len(signature.dims)
    extents = EXTENTS if dims <= 2 else SMALLER_EXTENTS if dims == 3 else SMALLEST_EXTENTS
    chosen = signature.dtype_combinations() if every else signature.dtype_pairs()
    for i, dtypes in enumerate(chosen):
        for j in range(len(extents)):
            shape = tuple(
                (d.name, max(extents[(i + j + k) % len(extents)], d.smallest))
                for k, d in enumerate(signature.dims)
            )
            found.append(with_dims(Problem(shape, tuple(dtypes.items())), {}, signature))
    return found


@cache  # four tests of each variant ask
def problems_of(variant: Variant, signature: Signature) -> list[Problem]:
    """The problems with pairs of dtypes; those with all combinations if no pair allows a config.

    A variant may require one certain value each of more than two dtypes and options.
    """
    pairs = problems(signature)
    fits = any(spread(variant, signature, problem, 1, ROOMY) for problem in pairs)
    return pairs if fits else problems(signature, every=True)


def profile_of(variant: Variant, signature: Signature) -> GpuProfile:
    """The host's profile, or ROOMY for a variant all of whose configs need more shared memory."""
    tried = problems_of(variant, signature)
    fits = any(spread(variant, signature, problem, 1) for problem in tried)
    return HOST if fits else ROOMY


def sizes_of(variant: Variant, signature: Signature) -> Sizes:
    """Sizes of the input sets that the variant is certified on."""
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
    """Number of threads in all blocks of all launches."""
    launches = make_plan(variant, config, problem, HOST).launches
    return sum(math.prod(x.grid) * x.threads for x in launches)


def inefficient(
    variant: Variant, signature: Signature, count: int
) -> list[tuple[Problem, Config]]:
    """Random configs that only efficiency rules refuse, each config for different rules.

    The rules are also evaluated for a GPU, because most of them are lenient on the host. Of several
    configs with the same rules the one with the fewest threads is taken: each thread is a fiber.
    """
    pass_ = signature.pass_named(variant.pass_name)
    host = profile_of(variant, signature)
    tried = problems_of(variant, signature)
    rules = {
        (problem, gpu): Feasibility(variant, pass_, problem, gpu)
        for problem in tried for gpu in (host, H200)
    }
    draw = random.Random(0)
    found: dict[frozenset[str], tuple[int, Problem, Config]] = {}
    for _ in range(3000):
        problem = draw.choice(tried)
        config = variant.config({p.name: draw.choice(p.choices) for p in variant.params})
        if rules[problem, host].refusing_rule(config, legality_only=True):
            continue
        refusing = [rules[problem, gpu].refusing_rule(config) for gpu in (host, H200)]
        why = frozenset(r.why for r in refusing if r and r.kind is RuleKind.EFFICIENCY)
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


def candidates(variant: Variant, signature: Signature) -> list[tuple[Problem, Config]]:
    """Feasible configs of every problem of this suite, evenly spaced."""
    return list(_candidates(variant, signature))


@cache  # four tests of each variant ask
def _candidates(variant: Variant, signature: Signature) -> tuple[tuple[Problem, Config], ...]:
    gpu = profile_of(variant, signature)
    return tuple(
        (problem, config)
        for problem in problems_of(variant, signature)
        for config in spread(variant, signature, problem, CANDIDATES, gpu)
        if gpu is HOST or threads_of(variant, config, problem) <= MOST_THREADS
    )


def factors(
    variant: Variant, signature: Signature, problem: Problem, config: Config
) -> dict[str, Hashable]:
    """The factors of a covering array: dtypes and options, the first extent, and the choice of each
    parameter; for a parameter with many choices only whether it is the first, last or another."""
    found: dict[str, Hashable] = dict(problem.dtypes)
    found["shape"] = problem.dims[0]
    chosen = config.as_dict()
    for param in variant.params:
        value = chosen.get(param.name, param.default)
        few = len(param.choices) <= 3 or value in (param.choices[0], param.choices[-1])
        found[param.name] = value if few else "another"
    return found


def covering(variant: Variant, signature: Signature, at_most: int) -> list[tuple[Problem, Config]]:
    """Candidates that together have every value, and as many pairs of values as fit."""
    found = candidates(variant, signature)
    assert found, "no config of this variant is feasible for any problem of this suite"
    rows = [factors(variant, signature, problem, config) for problem, config in found]
    return [found[index] for index in covering_rows(rows, at_most)]


def run_configs(
    entry: Entry,
    variant: Variant,
    compiler_name: str,
    wanted: list[tuple[Problem, Config]],
    orders: tuple[int, ...],
    changed: Callable[[Operator], Operator] = lambda operator: operator,
    sizes: Sizes = HOST_SIZES,
    include: Path | None = None,
    whole_range: bool = False,
    many_steps: bool = False,
) -> list[tuple[Problem, Config, TrialOutcome]]:
    """Certify each config on the host, with the headers in `include` (default: kgen's own).

    `whole_range` adds a set with thousands of rows, a set with thousands of sequences, and so on,
    sets with extents inside tiles, and as many fresh sets as a certificate has. One config of a
    variant is enough for that: all these blocks do the same, and they take most of the time of a
    kernel with several dims.
    `many_steps` adds sets with hundreds of steps, and with whole numbers of large tiles.
    """
    operator, pass_name = entry.operator.name, variant.pass_name
    headers = include or include_dir()
    compiler = open_compiler(compiler_name, [headers])
    if not few_dims(entry.operator.signature):
        sizes = replace(sizes, rows=FEW_ROWS)
        if not whole_range:
            sizes = replace(sizes, beyond=BEYOND, ragged_repeats=RAGGED_REPEATS)
    if not whole_range:
        sizes = replace(sizes, fresh=FRESH, inside_tiles=False)
    if not many_steps:
        sizes = replace(sizes, steps=0, whole_tiles=False)
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
    """The kernels, built by NVRTC for an H200."""
    renderer, compiler = Renderer(include_dir()), open_compiler("nvrtc", [include_dir()])
    rendered = renderer.render(entry.operator.name, entry.templates, variant, config, problem)
    [built] = compiler.build([BuildRequest(rendered, H200.arch)])
    compiler.close()
    assert isinstance(built, Artifact), built
    return built


def check(
    entry: Entry,
    variant: Variant,
    wanted: list[tuple[Problem, Config]],
    orders: tuple[int, ...],
    compiler: str = "host",
    changed: Callable[[Operator], Operator] = lambda operator: operator,
    whole_range: bool = False,
    many_steps: bool = False,
) -> None:
    """Certify each config, and check that it was tried on many input sets."""
    sizes = sizes_of(variant, entry.operator.signature)
    for problem, config, outcome in run_configs(
        entry, variant, compiler, wanted, orders, changed, sizes, None, whole_range, many_steps
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
        assert outcome.evidence is not None
        assert len(outcome.evidence.tried) > 3, outcome.evidence


def demand_verified(
    entry: Entry, variant: Variant, problem: Problem, config: Config, gpu: GpuProfile | None = None
) -> None:
    """Certify one config, with threads in order of rank and shuffled.

    Args:
        entry: The operator.
        variant: A variant of the operator.
        problem: The problem.
        config: The config.
        gpu: A profile on which the config must be legal; None: legality is not checked.
    """
    if gpu is not None:
        pass_ = entry.operator.signature.pass_named(variant.pass_name)
        assert is_feasible(variant, config, pass_, problem, gpu, legality_only=True)
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK, SHUFFLED)
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@each_variant_once
def test_one_config_agrees_with_the_oracle(operator: str, pass_name: str, name: str) -> None:
    """The scalars differ from the defaults, so that a kernel cannot have them compiled in."""
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    found = candidates(variant, entry.operator.signature)
    wanted, both = [found[len(found) // 2]], (BY_RANK, SHUFFLED)
    check(entry, variant, wanted, both, changed=with_other_scalars, whole_range=True)


@each_variant
def test_one_config_agrees_over_many_steps(operator: str, pass_name: str, name: str) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    found = candidates(variant, entry.operator.signature)
    check(entry, variant, [found[len(found) // 2]], (SHUFFLED,), many_steps=True)


@each_variant
def test_agrees_with_the_oracle(operator: str, pass_name: str, name: str) -> None:
    """A covering array of configs and problems; every second row has scalars of its own."""
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    wanted = covering(variant, signature, FEW_DIMS_ROWS if few_dims(signature) else ROWS)
    check(entry, variant, wanted[0::2], (SHUFFLED,))
    check(entry, variant, wanted[1::2], (SHUFFLED,), changed=with_other_scalars)


@pytest.mark.parametrize("name", ["chunk_loop", "chunk_scan"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_scale_that_is_no_power_of_two(name: str, dtype: str) -> None:
    """If q * scale were rounded to 16 bits, the gradient of an fp32 state would be wrong."""
    entry = open_catalogue().entry("linear_attention")
    variant = entry.space.variant("backward", name)
    problem = parse_problem(
        f"B=1,H=3,T=35,E=1,M=8,dtype={dtype},initial_state_dtype=fp32,final_state_dtype=fp32",
        entry.operator.signature,
    )
    [config] = spread(variant, entry.operator.signature, problem, 1, HOST)
    check(entry, variant, [(problem, config)], (SHUFFLED,), changed=with_other_scalars)


@each_variant
def test_what_efficiency_refuses_is_right_all_the_same(
    operator: str, pass_name: str, name: str
) -> None:
    """If not, the rule must be a legality rule: ladders and dispatch run such configs."""
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    wanted = inefficient(variant, signature, count=INEFFICIENT)
    if not wanted:
        pytest.skip("no rule of efficiency refuses anything for the problems of this suite")
    check(entry, variant, wanted, (SHUFFLED,))


def always_nonfinite(operator: Operator) -> Operator:
    """The operator with NaN and Inf among the inputs of every case."""

    def inputs(
        pass_name: str, problem: Problem, case: str, drawn: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return operator.make_inputs(pass_name, problem, "nonfinite", drawn, device)

    return replace(operator, make_inputs=inputs)


def with_other_scalars(operator: Operator) -> Operator:
    """The operator with 0.6875 added to each scalar's default; the sum is no power of two."""
    passes = tuple(
        replace(p, scalars=tuple(s._replace(default=s.default + 0.6875) for s in p.scalars))
        for p in operator.signature.passes
    )
    return replace(operator, signature=replace(operator.signature, passes=passes))


@each_variant
def test_stays_inside_its_buffers(operator: str, pass_name: str, name: str) -> None:
    """Run one config under AddressSanitizer; only one, because each launch is a process."""
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    wanted = covering(variant, entry.operator.signature, at_most=SANITIZED)
    check(entry, variant, wanted, (BY_RANK,), compiler="host-asan")


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "pass_name", "name"), all_variants())
def test_more_of_all_that(operator: str, pass_name: str, name: str) -> None:
    """Repeat the tests above with further rows and configs."""
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    few = few_dims(signature)
    rows, most = (FEW_DIMS_ROWS, FEW_DIMS_ROWS_OF_SLOW) if few else (ROWS, ROWS_OF_SLOW)
    wanted = covering(variant, signature, most)
    check(entry, variant, wanted[rows:], (SHUFFLED,))
    refused = inefficient(variant, signature, count=2 * INEFFICIENT)
    check(entry, variant, refused[INEFFICIENT:], (SHUFFLED,))
    check(entry, variant, wanted[SANITIZED : 2 * SANITIZED], (BY_RANK,), compiler="host-asan")
