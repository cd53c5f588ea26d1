"""Outputs in an input's layout, and products that may be rounded: declarations, oracle, calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.check.fixture import Fixture
from kgen.check.precision import floor_of, round_mantissa, rounding_of
from kgen.errors import ProblemError
from kgen.model.dtypes import DTYPES
from kgen.model.problem import parse_problem
from kgen.model.signature import Dim, DTypeField, Pass, Signature
from kgen.model.signature import Tensor as Declared
from kgen.operators.base import Cost, Operator
from kgen.runtime import arguments, signature
from kgen.runtime.layout import dense_like, dense_strides

SIGNATURE = Signature(
    dims=(Dim("B", "batch"), Dim("T", "steps"), Dim("N", "features")),
    dtypes=(
        DTypeField("dtype", ("fp32", "bf16")),
        DTypeField("product_dtype", ("dtype", "tf32"), default="dtype"),
    ),
    passes=(
        Pass(
            "forward",
            inputs=(Declared("x", ("B", "T", "N"), free_strides=("B", "T")),),
            outputs=(
                Declared("y", ("B", "T", "N"), free_strides=("B", "T"), layout_of="x"),
            ),
        ),
    ),
)

OPERATOR = Operator(
    name="squares",
    summary="",
    source="",
    doc="",
    signature=SIGNATURE,
    definition=lambda pass_name, inputs, scalars: {"y": inputs["x"] * inputs["x"]},
    make_inputs=lambda pass_name, problem, case, generator, device: {
        "x": torch.randn(problem.shape(("B", "T", "N")), generator=generator)
    },
    cases=(),
    cost=lambda pass_name, problem: Cost(1, 1),
    problems={"cuda": (), "host": ()},
    peers=lambda pass_name: {},
    slab_dim="B",
)


def test_a_rounding_dtype_is_allowed_only_beside_what_it_rounds() -> None:
    names = [tuple(c.values()) for c in SIGNATURE.dtype_combinations()]
    assert names == [("fp32", "fp32"), ("fp32", "tf32"), ("bf16", "bf16")]
    with pytest.raises(ProblemError, match="'product_dtype=tf32' is not supported"):
        parse_problem("B=1,T=1,N=1,dtype=bf16,product_dtype=tf32", SIGNATURE)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (1.0, 1.0),
        (1.0 + 2.0**-11, 1.0 + 2.0**-10),  # a tie goes away from zero
        (-1.0 - 2.0**-11, -1.0 - 2.0**-10),
        (1.0 + 2.0**-12, 1.0),
        (2.0 - 2.0**-23, 2.0),
        (float("inf"), float("inf")),
        (3.4028e38, float("inf")),
    ],
)
def test_tf32_rounds_to_ten_bits(value: float, want: float) -> None:
    x = torch.tensor([value, torch.nan])
    rounded = round_mantissa(x, DTYPES["tf32"].mantissa_bits)
    assert float(rounded[0]) == want
    assert rounded[1].isnan()


def test_the_bound_of_rounded_products_is_tf32s() -> None:
    bounds = {}
    for name in ("fp32", "tf32"):
        problem = parse_problem(f"B=4,T=64,N=64,dtype=fp32,product_dtype={name}", SIGNATURE)
        fixture = Fixture(OPERATOR, "forward", problem, torch.device("cpu"))
        bounds[name] = fixture.input_set(fixture.schedule.whole()).bounds["y"]
    eps = DTYPES["tf32"].eps
    # x rounded loses up to half an ulp relative to it, x * x twice that.
    assert eps / 2 < bounds["tf32"].loss < 1.01 * eps
    assert bounds["tf32"].bound == 2 * bounds["tf32"].loss + floor_of(torch.float32) + eps
    assert bounds["fp32"].bound < 1e-6


def test_only_a_field_without_tensors_rounds() -> None:
    problem = parse_problem("B=1,T=1,N=1,dtype=bf16", SIGNATURE)
    assert rounding_of(OPERATOR, problem) is None
    assert [f.name for f in SIGNATURE.rounding_fields()] == ["product_dtype"]


def views() -> list[Tensor]:
    return [
        torch.randn(2, 3, 4),
        torch.randn(3, 2, 4).transpose(0, 1),
        torch.randn(2, 3, 8)[..., :4],  # gaps
        torch.randn(3, 2, 8).transpose(0, 1)[..., :4],
        torch.randn(2, 1, 4).expand(2, 3, 4),
        torch.randn(4).expand(2, 3, 4),
        torch.randn(2, 0, 4),
        torch.randn(1, 3, 4),
    ]


@pytest.mark.parametrize("index", range(len(views())))
def test_dense_strides_have_no_gaps_and_keep_the_order(index: int) -> None:
    x = views()[index]
    strides = dense_strides(x.shape, x.stride())
    y = dense_like(x)
    assert y.stride() == strides
    assert strides[-1] == 1
    if x.numel():
        last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
        assert last + 1 == x.numel()
    if x.stride(0) != x.stride(1) and 1 not in x.shape and x.numel():
        assert (strides[0] > strides[1]) == (x.stride(0) > x.stride(1))


RUNTIME = signature.PassSignature(
    function="squares",
    dims=(signature.Dim("B"), signature.Dim("T"), signature.Dim("N")),
    dtypes=(
        signature.DTypeField("dtype", ("fp32", "bf16")),
        signature.DTypeField("product_dtype", ("dtype", "tf32"), default="dtype"),
    ),
    inputs=(signature.Argument("x", ("B", "T", "N"), free_strides=("B", "T")),),
    outputs=(
        signature.Argument("y", ("B", "T", "N"), free_strides=("B", "T"), layout_of="x"),
    ),
    flags=("product_dtype",),
)


@pytest.mark.parametrize(
    ("dtype", "allowed", "want"),
    [
        (torch.float32, False, "fp32"),
        (torch.float32, True, "tf32"),
        (torch.bfloat16, True, "bf16"),  # of no effect
    ],
)
def test_a_call_allows_rounding(dtype: torch.dtype, allowed: bool, want: str) -> None:
    bound = arguments.bind_arguments(RUNTIME, [torch.zeros(2, 3, 4, dtype=dtype)], [], [allowed])
    assert bound.dtypes["product_dtype"] == want


def test_a_call_gives_the_strides_of_its_outputs() -> None:
    x = torch.zeros(3, 2, 8).transpose(0, 1)[..., :4]
    bound = arguments.bind_arguments(RUNTIME, [x], [], [False])
    assert bound.layouts == ((4, 8, 1),)
    assert bound.strides == {"x_stride_B": 8, "x_stride_T": 16, "y_stride_B": 4, "y_stride_T": 8}


def test_fixtures_permute_inputs_and_lay_outputs_out_alike() -> None:
    problem = parse_problem("B=4,T=6,N=8,dtype=fp32", SIGNATURE)
    fixture = Fixture(OPERATOR, "forward", problem, torch.device("cpu"))
    cases = {c.layout: c for c in fixture.schedule.certify(1, ())}
    made = fixture.input_set(cases["permuted"])
    x, y = made.inputs["x"].tensor, made.outputs["y"].tensor
    b, _, n = x.shape
    assert x.stride() == (n, b * n, 1)
    assert y.stride() == x.stride()
    strided = fixture.input_set(cases["strided"])
    assert strided.inputs["x"].tensor.stride(1) > n
    assert strided.outputs["y"].tensor.is_contiguous()
