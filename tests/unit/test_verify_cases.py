"""How small the small input sets are."""

from __future__ import annotations

from kgen.catalogue import open_catalogue
from kgen.check.cases import FEW, GPU_SIZES, PROOF_SIZES, QUICK, SHORT, Case, Schedule, Sizes
from kgen.model.problem import parse_problem

LONG = "B=8,H=16,T=4096,E=64,M=64,dtype=fp32"


def schedule(sizes: Sizes, text: str = LONG) -> Schedule:
    operator = open_catalogue().entry("linear_attention").operator
    problem = parse_problem(text, operator.signature)
    return Schedule(operator, operator.signature.pass_named("forward"), problem, 0, sizes)


def extents(case: Case, made: Schedule) -> dict[str, int]:
    return dict(case.problem(made.problem, made.operator.signature).dims)


def test_a_host_run_has_few_heads_rather_than_few_steps() -> None:
    made = schedule(PROOF_SIZES)
    hard = [extents(c, made) for c in made.host(1, {"E", "M"}) if c.name == "alternating"]
    assert hard
    for dims in hard:
        assert dims["H"] <= FEW
        assert dims["T"] >= 32, "a walk over chunks would have one"


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
