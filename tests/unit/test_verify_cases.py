"""How small the small input sets are."""

from __future__ import annotations

from kgen.catalogue import open_catalogue
from kgen.check.case import Case
from kgen.check.schedule import Schedule
from kgen.check.sizes import (
    FEW,
    GPU_SIZES,
    HOST_THREADS,
    MANY,
    MANY_ROWS,
    NARROW,
    PROOF_SIZES,
    QUICK,
    SHORT,
    Sizes,
)
from kgen.model.problem import Problem, parse_problem

LONG = "B=8,H=16,T=4096,E=64,M=64,dtype=fp32"


def schedule(sizes: Sizes, text: str = LONG) -> Schedule:
    operator = open_catalogue().entry("linear_attention").operator
    problem = parse_problem(text, operator.signature)
    return Schedule(operator, operator.signature.pass_named("forward"), problem, 0, sizes)


def extents(case: Case, made: Schedule) -> dict[str, int]:
    return dict(case.problem(made.problem, made.operator.signature).dims)


def test_a_host_run_has_few_heads_rather_than_few_steps() -> None:
    made = schedule(PROOF_SIZES)
    hard = [extents(c, made) for c in made.host(1, {"E", "M"}).cases if c.name == "alternating"]
    assert hard
    for dims in hard:
        assert dims["H"] <= FEW
        assert dims["T"] >= 32, "a walk over chunks would have one"


def test_a_host_run_has_many_of_each_dim_that_repeats_the_work() -> None:
    made = schedule(PROOF_SIZES)
    sets = [extents(c, made) for c in made.host(1, {"E", "M"}).cases]
    for name, other in (("B", "H"), ("H", "B")):
        assert any(d[name] == MANY and d[other] == 1 and d["T"] <= NARROW for d in sets)
    operator = open_catalogue().entry("rmsnorm").operator
    problem = parse_problem("M=8192,N=64,dtype=bf16", operator.signature)
    rows = Schedule(operator, operator.signature.pass_named("forward"), problem, 0, PROOF_SIZES)
    assert any(dict(c.dims).get("M") == MANY_ROWS for c in rows.host(1, {"N"}).cases)
    crowded = made.host(1, {"E", "M"}, (), lambda problem: 2**10 * problem.dim("H")).cases
    many = {MANY, MANY_ROWS}
    assert [extents(c, made) for c in crowded if many & {*dict(c.dims).values()}] == [
        {"B": MANY, "H": 1, "T": NARROW, "E": 64, "M": 64}
    ], "a launch of 67 CTAs of 1024 threads takes too long there"
    assert all(
        not many & {*dict(c.dims).values()} for c in schedule(GPU_SIZES).certify(1, ())
    )


def test_small_sets_are_short_where_the_definition_walks() -> None:
    made = schedule(GPU_SIZES)
    cases = made.certify(1, {"E", "M"})
    hard = [extents(c, made)["T"] for c in cases if c.name == "alternating"]
    assert hard == [SHORT]
    assert extents(cases[-1], made)["T"] == 4096, "a fresh set of full size is last"


def test_hard_sets_have_fewer_rows_where_a_row_is_a_sequence() -> None:
    made = schedule(GPU_SIZES, "B=3,H=3,T=67,E=67,M=67,dtype=fp32")
    hard = [extents(c, made) for c in made.certify(1, {"E", "M"}) if c.name == "alternating"]
    assert [dims["B"] for dims in hard] == [QUICK]


def test_the_pool_is_one_draw_where_a_row_is_large() -> None:
    assert len(schedule(GPU_SIZES).pool()) == 1
    assert len(schedule(GPU_SIZES, "B=8,H=2,T=64,E=16,M=16,dtype=fp32").pool()) == 3


def timex(sizes: Sizes = PROOF_SIZES) -> Schedule:
    operator = open_catalogue().entry("timex").operator
    problem = parse_problem("B=1,C=768,T=1024,dtype=fp32", operator.signature)
    return Schedule(operator, operator.signature.pass_named("backward"), problem, 0, sizes)


def many_threads(problem: Problem) -> int:
    """Of a kernel with a CTA for each channel."""
    return 256 * problem.dim("C")


def channels(cases: list[Case]) -> int:
    return max(dict(case.dims).get("C", 1) for case in cases)


def test_a_host_run_is_short_where_a_kernel_takes_many_threads() -> None:
    made = timex()
    shortened = made.host(1, (), (), many_threads).cases
    assert HOST_THREADS // 512 < channels(shortened) <= HOST_THREADS // 256
    assert channels(made.host(1, ()).cases) == 8193, "no kernel is known, so nothing is too much"
    gpu = timex(GPU_SIZES)
    assert channels(gpu.host(1, (), (), many_threads).cases) == 8193, "a GPU has no fibers"


def test_what_a_host_run_leaves_out_or_shortens_is_listed() -> None:
    made = timex()
    cases, left_out = made.host(1, (), (), many_threads)
    [given] = [dict(c.dims)["C"] for c in cases if dict(c.shortened).get("C")]
    assert f"normal B=1 C=8193 T=1 (C={given} instead)" in left_out
    [steps] = [dict(c.dims)["T"] for c in cases if dict(c.shortened).get("T")]
    assert 513 < steps < 1025, "steps fall by quarters until the work is little enough"
    assert f"normal B=1 C=1 T=8193 (T={steps} instead)" in left_out
    assert not {case.label for case in cases} & set(left_out)


def test_a_steady_state_that_is_out_of_reach_is_listed() -> None:
    made = schedule(PROOF_SIZES)
    near = made.host(1, {"E", "M"}, (("T", 641),))
    assert not any("instead" in label for label in near.left_out)
    cases, left_out = made.host(1, {"E", "M"}, (("T", 10**6),))
    [label] = [label for label in left_out if "T=1000000" in label]
    [reached] = [dict(c.dims)["T"] for c in cases if dict(c.shortened).get("T") == 10**6]
    assert label.endswith(f"(T={reached} instead)")
    assert reached < 10**6
