"""Filling in a variant's expressions, and laying out what is generated."""

from __future__ import annotations

import ast

import pytest

from kgen.emit.binding import bound, bound_plan, functions_in, literals, names_in
from kgen.emit.layout import fold, paragraph, quoted, wrapped
from kgen.errors import SpaceError
from kgen.model.expr import parse_expr
from kgen.model.signature import Pass, Scalar, Tensor
from kgen.model.space import LaunchSpec, Rule, Variant, WorkspaceSpec

PASS = Pass(
    "forward",
    inputs=(Tensor("x", ("M", "N"), free_strides=("M",)),),
    outputs=(Tensor("y", ("M",), dtype="fp32"),),
    scalars=(Scalar("eps", 1e-6),),
)


def variant(*, requires: tuple[str, ...] = (), guards: tuple[str, ...] = ()) -> Variant:
    """A chain of two kernels with scratch memory."""

    def rules(texts: tuple[str, ...]) -> tuple[Rule, ...]:
        return tuple(Rule(parse_expr(text), "", "space.yaml:7") for text in texts)

    def launch(kernel: str, grid: tuple[str, ...], args: tuple[str, ...]) -> LaunchSpec:
        return LaunchSpec(kernel, tuple(map(parse_expr, grid)), (parse_expr("threads"),),
                          parse_expr("N * itemsize"), args)

    return Variant(
        name="split", pass_name="forward", doc="", params=(), constants=("N",),
        requires=rules(requires), guards=rules(guards),
        launches=(
            launch("first", ("min(ceil_div(M, rows), 2 * sm_count)",), ("x", "partial", "M")),
            launch("second", ("1", "M // rows"), ("partial", "y", "M", "N", "x_stride_M", "eps")),
        ),
        workspaces=(WorkspaceSpec("partial", "dtype", parse_expr("M * parts")),),
        first=(), safe=None, where="space.yaml:1",
    )


FIXED = literals(
    {"N": 4096}, {"dtype": "bf16"},
    {"threads": 128, "rows": 4, "parts": 2, "mode": "warp", "loop": True},
    {"sm_count": 132},
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("ceil_div(M, rows) * 2", "ceil_div(M, 4) * 2"),
        ("N * itemsize + 1", "8193"),
        ("M if loop else N", "M"),
        ("mode == 'warp' and M > 1", "M > 1"),
        ("mode == 'block' and M > 1", "False"),
        ("mode == 'warp' or M > 1", "True"),
        ("not loop or M % rows == 0", "M % 4 == 0"),
        ("min(M, N, 2 ** 3)", "min(M, 4096, 8)"),
        ("N in (1024, 4096)", "True"),
        ("-rows", "-4"),
        ("ceil_div(M + 1, rows - 3)", "M + 1"),
        ("M % (rows - 3) == 0", "True"),
    ],
)
def test_fixed_names_are_folded(source: str, text: str) -> None:
    assert bound(parse_expr(source), FIXED) == text


@pytest.mark.parametrize("source", ["ceil_div(M, rows) + N", "M % (rows * itemsize) == 0"])
def test_folding_keeps_the_value(source: str) -> None:
    expr = parse_expr(source)
    for m in (0, 1, 7, 64):
        assert parse_expr(bound(expr, FIXED))({"M": m}) == expr({**FIXED, "M": m})


def test_plan_of_two_kernels() -> None:
    plan = bound_plan(variant(), PASS, FIXED)
    first, second = plan.launches
    assert first.grid == ("min(ceil_div(M, 4), 264)", "1", "1")
    assert first.smem == "8192"
    assert (first.args, first.kinds) == (("x", "partial", "M"), "ppq")
    assert second.args == ("partial", "y", "M", "4096", "x_stride_M", "eps")
    assert second.kinds == "ppqqqf"
    assert plan.workspaces[0].dtype == "bfloat16"
    assert plan.workspaces[0].elements == "M * 2"


def test_grid_limits_become_conditions() -> None:
    assert bound_plan(variant(), PASS, FIXED).conditions == ("M // 4 <= 65535",)


def test_conditions_are_split_and_decided() -> None:
    conditions = bound_plan(
        variant(requires=("N % rows == 0", "M >= rows"),
                guards=("x_ptr % (rows * itemsize) == 0 and x_stride_M % rows == 0",)),
        PASS, FIXED,
    ).conditions
    assert conditions == (
        "M >= 4", "x_ptr % 8 == 0", "x_stride_M % 4 == 0", "M // 4 <= 65535",
    )


@pytest.mark.parametrize("guard", ["x_ptr % 48 == 0", "x_ptr < M", "x_ptr % 128 == 0",
                                   "x_ptr // 2 % 8 == 0"])
def test_guards_beyond_alignment_are_refused(guard: str) -> None:
    with pytest.raises(SpaceError, match=r"space\.yaml:7: guard .* uses 'x_ptr'"):
        bound_plan(variant(guards=(guard,)), PASS, FIXED)


def test_a_call_must_make_a_modulus_an_alignment() -> None:
    conditions = bound_plan(variant(guards=("x_ptr % M == 0",)), PASS, FIXED).conditions
    assert conditions[:2] == ("M in (0, 1, 2, 4, 8, 16, 32)", "x_ptr % M == 0")


def test_names_and_functions() -> None:
    text = "min(ceil_div(M, 4), x_stride_M)"
    assert names_in(text) == {"M", "x_stride_M"}
    assert functions_in(text) == {"ceil_div"}


def test_fold_breaks_only_long_lines() -> None:
    assert fold("f(", ["a", "b"], ")") == "f(a, b)"
    names = [f"argument_{i}: Tensor" for i in range(20)]
    text = fold("def f(", names, ") -> None:")
    assert all(len(line) <= 100 for line in text.splitlines())
    tree = ast.parse(text + "\n    pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert len(tree.args.args) == 20


def test_paragraph_and_literals() -> None:
    assert all(len(line) <= 100 for line in paragraph("word " * 60, 8, 4).splitlines())
    for value in ("it's", 'say "x"', (1,), ("a", 2), {"k": (1, 2)}, 1e-6, True, None):
        assert ast.literal_eval(quoted(value)) == value


def test_guards_may_relate_pointers() -> None:
    conditions = bound_plan(variant(guards=("(x_ptr - y_ptr + 2 * M) % 16 == 0",)), PASS, FIXED)
    assert "(x_ptr - y_ptr + 2 * M) % 16 == 0" in conditions.conditions


def test_long_expressions_are_wrapped() -> None:
    text = " and ".join(f"call.M % {n} == 0" for n in range(2, 30))
    broken = wrapped(text, 4, 7)
    assert all(len(line) <= 100 for line in broken.splitlines())
    assert ast.dump(ast.parse(broken, mode="eval")) == ast.dump(ast.parse(text, mode="eval"))
    assert wrapped("call.M == 1", 4, 7) == "call.M == 1"
    literal = f'call.M == "{"a b " * 40}"'
    assert wrapped(literal, 4, 7) == literal
