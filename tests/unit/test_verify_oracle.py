"""Bounds, special values, slabs, buffers and caching, on small operators made for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from check_fakes import binding, factors
from torch import Tensor

from kgen.catalogue import open_catalogue
from kgen.check import Case, Fixture, verify
from kgen.check.bounds import Bound
from kgen.check.buffers import GUARD_BYTES, contiguous_strides, fingerprint, guarded
from kgen.check.compare import explain, scaled_error
from kgen.check.errors import mean_errors, scaled_errors
from kgen.check.oracle import Reference, Slab, default_scale, reference_of, slabs
from kgen.check.precision import floor_of, overflow_threshold, smallest_scale, torch_dtype
from kgen.errors import VerifyError
from kgen.model.problem import Problem, parse_problem, with_dims
from kgen.model.signature import Dim, DTypeField, Pass, Signature
from kgen.model.signature import Tensor as Declared
from kgen.operators.base import Cost, Operator
from kgen.operators.rmsnorm import OPERATOR as RMSNORM

CPU = torch.device("cpu")
Tensors = Mapping[str, Tensor]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def scaling_operator(factor: float, cases: tuple[str, ...] = (), middle: float = 1.0) -> Operator:
    """y = x * middle * (factor / middle), and the sum s of y over columns; no scale declared."""

    def definition(
        pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        y = inputs["x"] * middle * (factor / middle)
        return {"y": y, "s": y.sum(dim=-1)}

    def make_inputs(
        pass_name: str,
        problem: Problem,
        case: str,
        generator: torch.Generator,
        device: torch.device,
    ) -> dict[str, Tensor]:
        shape = problem.shape(("N", "M"))
        dtype = getattr(torch, problem.dtype("dtype").torch)
        x = torch.rand(shape, generator=generator, device=device).add_(0.5).to(dtype)
        if case == "nan":
            x[:, ::5] = math.nan
        return {"x": x.mT.contiguous().mT if case == "transposed" else x}

    return Operator(
        name="scaling",
        summary="",
        source="",
        doc="",
        signature=Signature(
            dims=(Dim("M", "columns"), Dim("N", "rows")),
            dtypes=(DTypeField("dtype", ("fp32", "fp16", "bf16")),),
            passes=(
                Pass(
                    "forward",
                    (Declared("x", ("N", "M")),),
                    (Declared("y", ("N", "M")), Declared("s", ("N",))),
                ),
            ),
        ),
        definition=definition,
        make_inputs=make_inputs,
        cases=cases,
        cost=lambda pass_name, problem: Cost(0, 0),
        problems={},
        peers=lambda pass_name: {},
        slab_dim="N",
    )


def fixture_of(
    operator: Operator, text: str, cache_bytes: int | None = None, slab_bytes: int | None = None
) -> Fixture:
    problem = parse_problem(text, operator.signature)
    return Fixture(
        operator, "forward", problem, CPU, cache_bytes=cache_bytes, slab_bytes=slab_bytes
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_the_dtypes(dtype: torch.dtype) -> None:
    threshold = overflow_threshold(dtype)
    below = math.nextafter(threshold, 0.0)
    assert torch.tensor(threshold, dtype=torch.float64).to(dtype).isinf()
    if dtype == torch.float32:  # torch rounds float64 to the 16-bit types through fp32
        assert torch.tensor(below, dtype=torch.float64).to(dtype).isfinite()
    assert floor_of(dtype) >= torch.finfo(dtype).eps
    assert 0 < smallest_scale(dtype) < 1e-4
    assert 1.0 / smallest_scale(dtype) < torch.finfo(torch.float32).max


def test_overflow_threshold_of_fp16() -> None:
    assert overflow_threshold(torch.float16) == 65520.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 7), None),
        ((5, 7), (11, 1)),
        ((0, 7), None),
        ((), None),
        ((3, 0), (4, 1)),
    ],
)
def test_guarded_buffer(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    buffer = guarded(shape, dtype, CPU, strides)
    assert buffer.tensor.shape == shape
    assert buffer.tensor.stride() == (strides or contiguous_strides(shape))
    assert bool(buffer.tensor.isnan().all())
    if buffer.tensor.numel():
        assert buffer.tensor.data_ptr() - buffer.arena.data_ptr() == GUARD_BYTES
        assert buffer.tensor.data_ptr() % 64 == 0
    buffer.tensor.fill_(1.0)
    assert not any(bool(flag) for flag in buffer.damage())
    before = fingerprint(buffer)
    assert torch.equal(before, fingerprint(buffer))
    buffer.arena[-1] = 0
    assert [bool(flag) for flag in buffer.damage()] == [False, True]
    assert not torch.equal(before, fingerprint(buffer))


def test_fingerprint_of_a_large_buffer_sees_single_bits_and_swaps() -> None:
    buffer = guarded((3_000_001,), torch.bfloat16, CPU)
    buffer.tensor.copy_(torch.arange(3_000_001).remainder(251))
    before = fingerprint(buffer)
    assert before.numel() < 300_000
    for change in (0, 1_500_000, 3_000_000):
        value = buffer.tensor[change].clone()
        buffer.tensor[change] = value + 1
        assert not torch.equal(before, fingerprint(buffer))
        buffer.tensor[change] = value
    assert torch.equal(before, fingerprint(buffer))
    buffer.tensor[[10, 2_000_000]] = buffer.tensor[[2_000_000, 10]]
    assert not torch.equal(before, fingerprint(buffer))


def test_default_scale_is_the_row_unless_the_element_is_larger() -> None:
    y = torch.tensor(
        [[3.0, 4.0, 0.0], [math.nan, 1.0, math.inf], [0.0, 0.0, 0.0]], dtype=torch.float64
    )
    rms = math.sqrt(25 / 3)
    small = math.sqrt(1 / 3)
    want = torch.tensor(
        [[3.0, 4.0, rms], [small, 1.0, small], [0.0, 0.0, 0.0]], dtype=torch.float64
    )
    assert torch.allclose(
        default_scale(y),
        torch.maximum(want, torch.tensor([[rms], [small], [0.0]], dtype=torch.float64)),
    )


def reference_to(values: list[float], dtype: torch.dtype) -> Reference:
    y64 = torch.tensor(values, dtype=torch.float64)
    return reference_of(y64, y64.abs(), dtype)


@pytest.mark.parametrize(
    ("want", "got", "ok"),
    [
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (math.nan, math.inf, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, math.nan, False),
        (math.inf, 65504.0, False),
        (1.0, math.nan, False),
        (1.0, math.inf, False),
        (1.0, 1.0, True),
        (1.0, 1.02, False),
        (70000.0, math.inf, True),  # rounds beyond fp16
        (70000.0, -math.inf, False),
        (70000.0, math.nan, False),
        (70000.0, 65504.0, False),  # saturated, 6 % off
        (65600.0, 65504.0, True),  # within the bound
        (65000.0, math.inf, True),  # a value within the bound rounds to Inf
        (-65000.0, -math.inf, True),
        (60000.0, math.inf, False),
        (0.0, 0.0, True),
        (0.0, -0.0, True),
        (0.0, 6e-8, True),  # one step of the subnormals
        (0.0, 1e-5, False),
        (3e-8, 0.0, True),
        (1e-6, 0.0, False),
    ],
)
def test_special_values_in_fp16(want: float, got: float, ok: bool) -> None:
    reference = reference_to([want, 1.0], torch.float16)
    y = torch.tensor([got, 1.0], dtype=torch.float16)
    assert bool(scaled_error(y, reference, 0.01) <= 0.01) == ok


@pytest.mark.parametrize(
    ("want", "got", "ok"),
    [
        (1e-39, 0.0, True),  # subnormals may be flushed
        (1e-36, 0.0, True),  # and summed, or multiplied by more than 1
        (1e-34, 0.0, False),
        (1.0, 1.0 + 2**-22, True),
        (1.0, 1.0 + 2**-20, False),
        (1.0 + 2**-30, 1.0, True),
        (3e38, math.inf, False),
        (1e39, math.inf, True),
        (1e39, 3e38, False),
    ],
)
def test_special_values_in_fp32(want: float, got: float, ok: bool) -> None:
    bound = floor_of(torch.float32)
    reference = reference_to([want], torch.float32)
    y = torch.tensor([got], dtype=torch.float32)
    assert bool(scaled_error(y, reference, bound) <= bound) == ok


@pytest.mark.parametrize(
    ("dtype", "is_larger"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
)
def test_flushed_weights_of_large_values(dtype: torch.dtype, is_larger: bool) -> None:
    """A subnormal weight of fp32 that is flushed is missed 2^16 times in a value of 2^16. What fp16
    holds is far above that."""
    ratio = smallest_scale(dtype, 2.0**16) / smallest_scale(dtype)
    assert ratio == (2.0**16 if is_larger else 1.0)


def test_fp32_error_is_measured_to_float64s_accuracy() -> None:
    y64 = 1.0 + 0.3 * 2.0**-23
    reference = reference_to([y64], torch.float32)
    error = scaled_error(torch.tensor([1.0]), reference, 1e-6)
    assert float(error) == pytest.approx(0.3 * 2.0**-23, rel=1e-6)


def test_explain_finds_the_worst_over_slabs() -> None:
    y = torch.ones(4, 3)
    y[3, 1] = 9.0
    y[0, 2] = 5.0
    one = torch.ones(2, 3, dtype=torch.float64)
    parts = [(Slab("M", start, 2), reference_of(one, one, torch.float32)) for start in (0, 2)]
    text = explain("y", y, ("M", "N"), Bound(0.5, 0.1, 0.1), parts)
    assert text == ("2 of 12 elements of y out of bound\n  worst y[3, 1] = 9, want 1 +- 0.5")


def test_slabs_cover_the_dim() -> None:
    problem = parse_problem("M=100,N=64,dtype=fp32", RMSNORM.signature)
    pass_ = problem.present(RMSNORM.signature.pass_named("forward"))
    row = 2 * 64 * 8 * 10
    found = list(slabs(RMSNORM, pass_, problem, 33 * row))
    assert [(s.start, s.length) for s in found] == [(0, 33), (33, 33), (66, 33), (99, 1)]
    assert [s.length for s in slabs(RMSNORM, pass_, problem, 1)] == [1] * 100


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_verdict_does_not_depend_on_slabs_or_cache(dtype: str) -> None:
    def honest(t: Tensors) -> None:
        x = t["x"].float()
        y = x * (x.square().mean(-1, keepdim=True) + t["eps"]).rsqrt() * factors(t)
        t["y"].copy_(y)

    verdicts = []
    for cache_bytes, slab_bytes in ((2**30, 2**30), (2**30, 50_000), (0, 2**30), (0, 50_000)):
        fixture = fixture_of(RMSNORM, f"M=130,N=65,dtype={dtype}", cache_bytes, slab_bytes)
        verdicts.append(verify(fixture, binding(honest), "certify", seed=3))
    assert all(v.ok for v in verdicts), [v.reason for v in verdicts]
    # Torch's CPU reductions differ by shape, so the losses may by an ulp.
    first = verdicts[0].accuracy[0]
    for v in verdicts[1:]:
        # Of the set where the share is largest, which may be another one: a first slab loses less.
        share = v.accuracy[0].error / v.accuracy[0].bound
        assert share == pytest.approx(first.error / first.bound, rel=0.35)


def test_cache_keeps_within_its_bytes_and_forgets_the_oldest() -> None:
    fixture = fixture_of(RMSNORM, "M=64,N=64,dtype=fp32", cache_bytes=100_000)
    cases = [Case("normal", (), "contiguous", seed) for seed in range(3)]
    sets = [fixture.input_set(case) for case in cases]
    assert sets[0].cached is not None
    assert 0 < fixture.kept_bytes <= 100_000
    assert fixture.input_set(cases[2]) is sets[2]
    assert fixture.input_set(cases[0]) is not sets[0]
    fixture.release()
    assert fixture.kept_bytes == 0


def test_second_output_and_inner_slab_dim_are_checked() -> None:
    operator = scaling_operator(3.0, cases=("nan", "transposed"))

    def kernel(t: Tensors, spoil: bool) -> None:
        y = t["x"].float() * 3.0
        t["y"].copy_(y)
        t["s"].copy_(y.sum(-1))
        if spoil and t["s"].numel() > 3:
            t["s"][3] += 1.0

    fixture = fixture_of(operator, "M=20,N=40,dtype=bf16", slab_bytes=10_000)
    good = verify(fixture, binding(lambda t: kernel(t, False)), "certify")
    assert good.ok, good.reason
    assert [a.output for a in good.accuracy] == ["y", "s"]
    bad = verify(fixture, binding(lambda t: kernel(t, True)), "certify")
    assert "elements of s out of bound\n  worst s[3] = " in bad.reason


def test_fp16_results_beyond_the_range_must_be_inf() -> None:
    operator = scaling_operator(50_000.0, middle=0.5)

    def kernel(t: Tensors, saturate: bool) -> None:
        y = t["x"].float() * 50_000.0
        s = y.sum(-1)
        t["y"].copy_(y.clamp_max(65504.0) if saturate else y)
        t["s"].copy_(s)

    fixture = fixture_of(operator, "M=20,N=40,dtype=fp16")
    assert verify(fixture, binding(lambda t: kernel(t, False)), "certify").ok
    refused = verify(fixture, binding(lambda t: kernel(t, True)), "certify")
    assert "= 65504, want" in refused.reason


def test_definition_that_overflows_fp16_midway_does_not_widen_the_bound() -> None:
    operator = scaling_operator(1.0, middle=1e6)  # x * 1e6 is Inf in fp16
    fixture = fixture_of(operator, "M=20,N=40,dtype=fp16")
    made = fixture.input_set(fixture.schedule.whole())
    assert made.bounds["y"].bound < 0.01
    assert math.isfinite(made.bounds["y"].eager_error)


def test_case_that_tells_nothing_is_refused() -> None:
    def definition(
        pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        x = inputs["x"]
        return {"y": (x + 1e12) - 1e12 - x, "s": x.sum(-1)}  # nothing but cancellation

    broken = scaling_operator(1.0)
    operator = Operator(**{**vars(broken), "definition": definition})
    with pytest.raises(VerifyError, match=r"the definition itself loses .* of 'y'"):
        verify(fixture_of(operator, "M=20,N=40,dtype=fp32"), lambda t, s: lambda: None)


def test_operator_that_contradicts_its_signature_is_named() -> None:
    good = scaling_operator(1.0)
    wide = Operator(
        **{**vars(good), "definition": lambda p, i, s: {"y": i["x"].double(), "s": i["x"].sum(-1)}}
    )
    with pytest.raises(VerifyError, match=r"returns 'y' as torch.float64, .* torch.bfloat16"):
        verify(fixture_of(wide, "M=2,N=4,dtype=bf16"), lambda t, s: lambda: None)
    missing = Operator(**{**vars(good), "definition": lambda p, i, s: {"y": i["x"]}})
    with pytest.raises(VerifyError, match=r"returns \['y'\], the signature declares"):
        verify(fixture_of(missing, "M=2,N=4,dtype=bf16"), lambda t, s: lambda: None)
    inputs = Operator(**{**vars(good), "make_inputs": lambda *a: {"x": torch.zeros(1)}})
    with pytest.raises(VerifyError, match=r"make_inputs gives torch\.float32"):
        verify(fixture_of(inputs, "M=2,N=4,dtype=bf16"), lambda t, s: lambda: None)


WIDENING = [
    (operator, declared.name)
    for operator in map(open_catalogue().operator, open_catalogue().names)
    if operator.widens
    for declared in operator.signature.passes
]


@pytest.mark.parametrize(
    ("operator", "pass_name"), WIDENING, ids=[f"{o.name}-{p}" for o, p in WIDENING]
)
def test_a_definition_that_widens_rounds_only_what_it_returns(
    operator: Operator, pass_name: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    for choices in operator.signature.dtype_pairs():
        dims = tuple((dim.name, max(5, dim.smallest)) for dim in operator.signature.dims)
        problem = with_dims(Problem(dims, tuple(choices.items())), {}, operator.signature)
        given = operator.make_inputs(pass_name, problem, "normal", generator, CPU)
        scalars = operator.arguments(pass_name, problem)
        wide = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
        single = operator.definition(pass_name, wide, scalars)
        native = operator.definition(pass_name, given, scalars)
        declared = operator.signature.pass_named(pass_name)
        for t in problem.present(declared).outputs:
            dtype = torch_dtype(problem.dtype(t.dtype).torch)
            assert native[t.name].dtype == dtype
            assert native[t.name].equal(single[t.name].to(dtype))


@pytest.mark.parametrize(("value", "what"), [(0.0, "zero"), (float("nan"), "NaN")])
def test_inputs_that_tell_nothing_are_an_error(value: float, what: str) -> None:
    def make_inputs(*args: Any) -> dict[str, Tensor]:
        return {name: torch.full_like(t, value) for name, t in RMSNORM.make_inputs(*args).items()}

    operator = replace(RMSNORM, make_inputs=make_inputs)
    problem = parse_problem("M=97,N=64,dtype=fp32", RMSNORM.signature)
    fixture = Fixture(operator, "forward", problem, torch.device("cpu"))
    with pytest.raises(VerifyError, match=f"nothing but {what} for the case 'normal'"):
        fixture.input_set(fixture.schedule.whole())


def test_a_definition_that_writes_into_its_input_is_at_fault_itself() -> None:
    def definition(pass_name: str, inputs: Tensors, scalars: Mapping[str, float]) -> Any:
        outputs = RMSNORM.definition(pass_name, inputs, scalars)
        inputs["x"].add_(1.0)
        return outputs

    operator = replace(RMSNORM, definition=definition)
    problem = parse_problem("M=97,N=64,dtype=fp32", RMSNORM.signature)
    fixture = Fixture(operator, "forward", problem, CPU)
    with pytest.raises(VerifyError, match="the definition writes into its input 'x'"):
        fixture.input_set(fixture.schedule.whole())


def test_a_fresh_set_is_evaluated_once() -> None:
    """Its errors and their means ask for the same values; the next set has others."""
    calls: list[torch.dtype] = []
    plain = scaling_operator(3.0)

    def counted(
        pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        calls.append(inputs["x"].dtype)
        return plain.definition(pass_name, inputs, scalars)

    operator = replace(plain, definition=counted)
    problem = parse_problem("N=64,M=32,dtype=fp32", operator.signature)
    fixture = Fixture(operator, "forward", problem, CPU)
    cases = [Case("normal", (("N", 8),), "contiguous", seed, fresh=True) for seed in (1, 2, 3)]
    fixture.input_set(cases[0])  # tells what the definition loses
    for case in cases[1:]:
        made = fixture.input_set(case)
        outputs = dict.fromkeys(("y",), 3.0 * made.values["x"])
        calls.clear()
        errors = scaled_errors(fixture, made, outputs)
        means = mean_errors(fixture, made, outputs)
        assert calls == [torch.float64]
        assert float(errors["y"]) <= made.bounds["y"].bound
        assert float(means["y"]) <= made.bounds["y"].bound
        wrong = {"y": 3.1 * made.values["x"]}
        assert float(scaled_errors(fixture, made, wrong)["y"]) > made.bounds["y"].bound
        assert calls == [torch.float64]
    without_room = Fixture(operator, "forward", problem, CPU, cache_bytes=0)
    without_room.input_set(cases[0])
    made = without_room.input_set(cases[1])
    calls.clear()
    for _ in range(2):
        list(without_room.references(made))
    assert calls == [torch.float64] * 2, "what does not fit is evaluated at each use"
