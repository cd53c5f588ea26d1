"""Kernels with a planted fault are refused for the right reason; correct kernels pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from check_fakes import binding, factors
from torch import Tensor

from kgen.check import Fixture, Level, Verdict, verify
from kgen.check.case import Case
from kgen.model.plan import Workspace
from kgen.model.problem import Problem, parse_problem
from kgen.operators.rmsnorm import EPS, OPERATOR

CPU = torch.device("cpu")
Tensors = Mapping[str, Tensor]
Kernel = Callable[[Tensors], None]


DEFAULTS = {"eps": torch.tensor(EPS), "offset": torch.tensor(0.0)}


def fixture_for(text: str) -> Fixture:
    return Fixture(OPERATOR, "forward", parse_problem(text, OPERATOR.signature), CPU)


def run(kernel: Kernel, text: str, level: Level = "certify", **options: object) -> Verdict:
    fixture = fixture_for(text)
    return verify(fixture, binding(kernel), level, **options)  # type: ignore[arg-type]


def normalised(t: Tensors, eps: float | None = None) -> Tensor:
    """fp32 arithmetic throughout, one rounding at the end."""
    x = t["x"].float()
    added = t["eps"] if eps is None else eps
    return x * (x.square().mean(-1, keepdim=True) + added).rsqrt() * factors(t)


def honest(t: Tensors) -> None:
    t["y"].copy_(normalised(t))


DTYPES = ["fp32", "fp16", "bf16"]
COMBINATIONS = [  # of what the functions below compute: with a weight, and nothing more
    f"dtype={c['dtype']},w_dtype={c['w_dtype']}"
    for c in OPERATOR.signature.dtype_combinations()
    if c["w_dtype"] != "none" and c["residual_dtype"] == c["rstd_dtype"] == "none"
]


@pytest.mark.parametrize("n", [1, 2, 63, 65, 509, 4096])
@pytest.mark.parametrize("dtypes", COMBINATIONS)
def test_honest_kernel_passes(n: int, dtypes: str) -> None:
    verdict = run(honest, f"M=97,N={n},{dtypes}")
    assert verdict.ok, verdict.reason
    assert verdict.reason == ""
    (accuracy,) = verdict.accuracy
    assert accuracy.output == "y"
    assert accuracy.error <= accuracy.bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_order_of_operations_passes(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        x = t["x"].float()
        total = torch.zeros(x.shape[0])
        for part in x.view(-1, x.shape[1] // 32, 32).unbind(1):  # partial sums one after another
            total += part.square().sum(1)
        y = x / (total / x.shape[1] + t["eps"]).sqrt()[:, None] * factors(t)
        t["y"].copy_(y)

    verdict = run(kernel, f"M=97,N=4096,dtype={dtype}")
    assert verdict.ok, verdict.reason


def test_certify_covers_cases_layouts_and_ragged_rows() -> None:
    verdict = run(honest, "M=300,N=64,dtype=bf16")
    assert {
        "tiny M=257",
        "huge M=257",
        "nonfinite M=257",
        "zero_rows M=257",
        "normal M=0",
        "normal M=1",
        "normal M=65",
        "normal M=257 strided",
        "normal M=257 odd strides",
        "normal",
    } <= set(verdict.cases)
    assert len(verdict.seeds) == len(verdict.cases)
    assert verdict.skipped == ()


def test_trial_is_shorter_and_fresh_each_time() -> None:
    fixture = fixture_for("M=300,N=64,dtype=bf16")
    verdicts = [verify(fixture, binding(honest)) for _ in range(2)]
    assert [len(v.cases) for v in verdicts] == [3, 3]
    assert verdicts[0].seeds[0] != verdicts[1].seeds[0]
    assert verdicts[0].seeds[-1] == verdicts[1].seeds[-1]
    again = verify(fixture, binding(honest), seed=verdicts[0].seeds[0])
    assert again.seeds == verdicts[0].seeds


def test_wrong_element_of_a_million() -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        if t["y"].numel() >= 2**20:
            t["y"][1000, 77] = 0.0

    verdict = run(kernel, "M=1024,N=1024,dtype=bf16", "trial")
    assert not verdict.ok
    assert verdict.reason.startswith(
        "1 of 1048576 elements of y out of bound\n  worst y[1000, 77] = 0, want "
    )
    assert verdict.reason.endswith(f"\n  inputs 'normal', seed {verdict.seeds[-1]}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_element(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        y = t["y"].clone()
        honest(t)
        if t["y"].shape[0] > 3:
            t["y"][3, 5] = y[3, 5]

    verdict = run(kernel, f"M=97,N=64,dtype={dtype}")
    assert "out of bound, 1 of them never written\n  worst y[3, 5] = nan, want " in verdict.reason


def test_unwritten_place_where_nan_is_due() -> None:
    """Poison is NaN, and a NaN is asked for there: excused by value, but not written."""

    def kernel(t: Tensors) -> None:
        y = t["y"].clone()
        honest(t)
        t["y"][...] = torch.where(t["y"].isnan(), y, t["y"])

    verdict = run(kernel, "M=97,N=64,dtype=fp32")
    assert "never written" in verdict.reason


def past_the_end(name: str, offset: int) -> Kernel:
    def kernel(t: Tensors) -> None:
        honest(t)
        tensor = t[name]
        base = tensor.storage_offset()
        index = base + offset if offset < 0 else base + tensor.numel() + offset
        tensor.as_strided((1,), (1,), index).fill_(1.0)

    return kernel


@pytest.mark.parametrize(
    ("name", "offset", "reason"),
    [
        ("y", 0, "wrote past the end of y"),
        ("y", -1, "wrote before the start of y"),
        ("w", 0, "wrote past the end of input w"),
        ("w", -1, "wrote before the start of input w"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_canaries(name: str, offset: int, reason: str, dtype: str) -> None:
    verdict = run(past_the_end(name, offset), f"M=97,N=63,dtype={dtype}", "trial")
    assert verdict.reason.startswith(reason)


def test_write_into_the_gap_of_a_strided_input() -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        x = t["x"]
        if x.stride(0) > x.shape[1]:
            x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).fill_(0.0)

    assert run(kernel, "M=97,N=64,dtype=bf16").reason.startswith("input x was modified")


@pytest.mark.parametrize("ignored", ["eps", "offset"])
@pytest.mark.parametrize("level", ["certify", "host"])
def test_a_kernel_that_ignores_a_scalar(ignored: str, level: Level) -> None:
    """With the default it is right."""
    def kernel(t: Tensors) -> None:
        t["y"].copy_(normalised({**t, ignored: DEFAULTS[ignored]}))

    verdict = run(kernel, "M=97,N=64,dtype=bf16", level)
    assert not verdict.ok
    assert verdict.cases[-1].endswith("eps=0.6875 offset=0.75")


def is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def has_aligned_rows(tensor: Tensor) -> bool:
    return tensor.stride(0) * tensor.element_size() % 16 == 0


@pytest.mark.parametrize(
    ("forgotten", "assumed", "label"),
    [
        ("w", is_aligned, "shifted w"),
        ("residual", is_aligned, "shifted residual"),
        ("residual", has_aligned_rows, "odd strides residual"),
    ],
)
def test_a_guard_that_forgets_an_input(
    forgotten: str, assumed: Callable[[Tensor], bool], label: str
) -> None:
    """Where all inputs are awkward at once, the guard of x refuses the set for all of them."""
    def kernel(t: Tensors) -> None:
        x = t["x"] + t["residual"]
        t["h"].copy_(x)
        t["y"].copy_(normalised({**t, "x": x}) if assumed(t[forgotten]) else torch.zeros(()))

    text = "M=97,N=64,dtype=fp32,residual_dtype=fp32"
    verdict = run(kernel, text, admits=lambda _, t: assumed(t["x"]))
    assert verdict.cases[-1].endswith(label)
    assert "out of bound" in verdict.reason
    whole = run(kernel, text, admits=lambda _, t: assumed(t["x"]) and assumed(t[forgotten]))
    assert whole.ok, whole.reason
    assert any(case.endswith(label) for case in whole.skipped)


def test_trials_meet_other_scalars_in_turn() -> None:
    schedule = fixture_for("M=97,N=64,dtype=fp32").schedule
    turns = [any(case.scalars for case in schedule.trial(seed, {"N"})) for seed in range(30)]
    assert any(turns)
    assert not all(turns)


def test_read_of_a_gap_or_past_an_end_gives_nan() -> None:
    def kernel(t: Tensors) -> None:  # takes x for contiguous
        x = t["x"]
        flat = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())
        t["y"].copy_(normalised({**t, "x": flat}))

    verdict = run(kernel, "M=97,N=64,dtype=bf16")
    assert "= nan, want" in verdict.reason
    assert "strided" in verdict.cases[-1]


def test_modified_input_is_refused_and_the_set_is_made_anew() -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        t["x"][-1:, 7] += 1.0

    fixture = fixture_for("M=97,N=64,dtype=fp32")
    verdict = verify(fixture, binding(kernel))
    assert verdict.reason.startswith("input x was modified\n")
    assert verdict.reason.endswith("\n  inputs 'normal M=65', seed 1")
    hard = verify(fixture, binding(kernel), admits=lambda n, t: n["M"] == 97)
    assert hard.reason.startswith("input x was modified")
    assert verify(fixture, binding(honest)).ok


def scratch(problem: Problem) -> list[Workspace]:
    return [Workspace("partial", "fp32", problem.dim("M"))]


def test_workspace_assumed_zero() -> None:
    def kernel(t: Tensors) -> None:
        t["partial"] += t["x"].float().square().mean(-1)
        t["y"].copy_(t["x"].float() * (t["partial"] + t["eps"]).rsqrt()[:, None] * factors(t))
        t["partial"].zero_()  # leaves it as the next launch wants it

    verdict = run(kernel, "M=97,N=64,dtype=fp32", "trial", workspaces=scratch)
    assert verdict.reason.startswith(
        "y differs between launches on the same inputs\n"
        "  with NaN in workspaces 4160 of 4160 elements of y out of bound\n"
        "  worst y[0, 0] = nan, want "
    )


def test_workspace_stale_at_the_second_launch() -> None:
    def kernel(t: Tensors) -> None:
        mean = t["x"].float().square().mean(-1)
        t["partial"].copy_(torch.where(t["partial"].isnan(), mean, t["partial"] + mean))
        t["y"].copy_(t["x"].float() * (t["partial"] + t["eps"]).rsqrt()[:, None] * factors(t))

    verdict = run(kernel, "M=97,N=64,dtype=fp32", "trial", workspaces=scratch)
    assert verdict.reason.startswith("y differs between launches on the same inputs")


def test_workspace_dtype_may_be_a_field() -> None:
    def kernel(t: Tensors) -> None:
        assert t["copy"].dtype == t["x"].dtype
        honest(t)

    verdict = run(
        kernel,
        "M=97,N=64,dtype=bf16",
        "trial",
        workspaces=lambda problem: [Workspace("copy", "dtype", 7)],
    )
    assert verdict.ok, verdict.reason


def test_workspace_overrun() -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        p = t["partial"]
        p.as_strided((1,), (1,), p.storage_offset() + p.numel()).fill_(0.0)

    verdict = run(kernel, "M=97,N=64,dtype=fp32", "trial", workspaces=scratch)
    assert verdict.reason.startswith("wrote past the end of partial")


def test_right_but_not_deterministic() -> None:
    calls = [0]

    def kernel(t: Tensors) -> None:
        calls[0] += 1
        t["y"].copy_(normalised(t) * (1.0 + calls[0] % 2 * 2.0**-23))

    verdict = run(kernel, "M=97,N=64,dtype=fp32", "trial")
    assert verdict.reason.startswith("y differs between launches on the same inputs\n  inputs")
    assert run(kernel, "M=97,N=64,dtype=fp32", "trial", bitwise=False).ok


def test_wrong_in_one_launch_only_is_refused_without_bitwise_equality_too() -> None:
    calls = [0]

    def kernel(t: Tensors) -> None:
        calls[0] += 1
        t["y"].copy_(normalised(t) * (2.0 if calls[0] % 2 else 1.0))

    verdict = run(kernel, "M=97,N=64,dtype=fp32", "trial", bitwise=False)
    assert verdict.reason.startswith("y was out of bound in an earlier launch")


def test_wrong_for_ragged_rows_only() -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        m = t["y"].shape[0]
        t["y"][m // 4 * 4 :] = 0.0

    verdict = run(kernel, "M=96,N=64,dtype=bf16")
    assert "normal M=1" in verdict.reason
    assert not run(kernel, "M=96,N=64,dtype=bf16", "trial").ok


def test_wrong_for_huge_scale_only() -> None:
    def kernel(t: Tensors) -> None:
        x = t["x"].float()
        mean = x.square().mean(-1, keepdim=True).clamp_max(65504.0)
        t["y"].copy_(x * (mean + t["eps"]).rsqrt() * factors(t))

    verdict = run(kernel, "M=97,N=64,dtype=bf16")
    assert "inputs 'huge M=257'" in verdict.reason


def test_bf16_accumulation() -> None:
    def kernel(t: Tensors) -> None:
        x = t["x"]
        total = torch.zeros(x.shape[0], dtype=torch.bfloat16)
        for column in x.square().bfloat16().unbind(1):
            total += column
        mean = total.float()[:, None] / x.shape[1]
        t["y"].copy_(x.float() * (mean + t["eps"]).rsqrt() * factors(t))

    for dtype in DTYPES:
        verdict = run(kernel, f"M=97,N=1024,dtype={dtype}", "trial")
        assert "out of bound" in verdict.reason, dtype


def test_fp16_intermediate_that_overflows() -> None:
    """The fp16 definition itself overflows on `huge`, which must not widen the bound."""

    def kernel(t: Tensors) -> None:
        square = t["x"].half().square().float()
        mean = square.mean(-1, keepdim=True)
        t["y"].copy_(t["x"].float() * (mean + t["eps"]).rsqrt() * factors(t))

    verdict = run(kernel, "M=97,N=64,dtype=fp16")
    assert not verdict.ok
    (accuracy,) = verdict.accuracy
    assert accuracy.bound < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_index(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        honest(t)
        t["y"][:, [2, 3]] = t["y"][:, [3, 2]]

    assert "out of bound" in run(kernel, f"M=97,N=64,dtype={dtype}", "trial").reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_omitted(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        t["y"].copy_(normalised(t, eps=0.0))

    assert not run(kernel, f"M=97,N=64,dtype={dtype}").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_ignored_in_the_tail(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        w = t["w"].clone()
        w[w.numel() // 8 * 8 :] = 1.0
        t["y"].copy_(normalised({**t, "w": w}))

    assert "out of bound" in run(kernel, f"M=97,N=65,dtype={dtype}", "trial").reason
    assert run(kernel, f"M=97,N=64,dtype={dtype}").ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_swallowed(dtype: str) -> None:
    def kernel(t: Tensors) -> None:
        t["y"].copy_(normalised(t).nan_to_num(0.0))

    verdict = run(kernel, f"M=97,N=64,dtype={dtype}")
    assert ", want nan +- 0" in verdict.reason
    assert "'nonfinite M=257'" in verdict.reason


def test_nan_invented() -> None:
    def kernel(t: Tensors) -> None:  # Inf in a row makes all of it NaN
        x = t["x"].float()
        y = normalised(t)
        t["y"].copy_(torch.where(x.isinf().any(1, keepdim=True), torch.nan, y))

    assert "= nan, want 0" in run(kernel, "M=97,N=64,dtype=fp32").reason


def test_off_by_one_mean() -> None:
    def kernel(t: Tensors) -> None:
        x = t["x"].float()
        mean = x.square().sum(-1, keepdim=True) / (x.shape[1] + 1)
        t["y"].copy_(x * (mean + t["eps"]).rsqrt() * factors(t))

    assert not run(kernel, "M=97,N=4096,dtype=fp32", "trial").ok
    assert not run(kernel, "M=97,N=63,dtype=fp16", "trial").ok
    assert not run(kernel, "M=97,N=2,dtype=bf16", "trial").ok


def test_guards_skip_sets_and_refusing_everything_is_no_verdict() -> None:
    def vectorised(numbers: Mapping[str, int | str], tensors: Tensors) -> bool:
        stride = numbers["x_stride_M"]
        assert isinstance(stride, int)
        return stride % 8 == 0 and tensors["x"].data_ptr() % 16 == 0

    verdict = run(honest, "M=97,N=64,dtype=bf16", admits=vectorised)
    assert verdict.ok
    assert verdict.skipped == (
        "normal M=257 odd strides", "normal M=257 shifted", "normal M=257 shifted x",
        "normal M=257 shifted 8 bytes", "normal M=257 shifted 8 bytes x",
        "normal M=257 shifted x")
    assert "normal M=257 shifted w" in verdict.cases
    nothing = run(honest, "M=97,N=64,dtype=bf16", admits=lambda n, t: False)
    assert not nothing.ok
    assert "guards admit none" in nothing.reason


def test_compile_time_rows_are_kept() -> None:
    def kernel(t: Tensors) -> None:
        assert t["x"].shape == (97, 64)
        honest(t)

    assert run(kernel, "M=97,N=64,dtype=bf16", constants={"M", "N"}).ok
    assert run(kernel, "M=97,N=64,dtype=bf16", "trial", constants={"M", "N"}).ok


def test_run_time_columns_are_varied() -> None:
    verdict = run(honest, "M=97,N=64,dtype=fp32", constants=())
    assert verdict.ok
    assert {"normal M=2 N=1", "normal M=2 N=65"} <= set(verdict.cases)
    assert "normal M=2 N=0" not in verdict.cases  # N's smallest is 1


@pytest.mark.parametrize("m", [0, 1])
def test_hardly_any_rows(m: int) -> None:
    assert run(honest, f"M={m},N=64,dtype=bf16").ok
    assert run(honest, f"M={m},N=64,dtype=bf16", "trial").ok


def test_a_trials_own_sets_cost_the_definition_in_the_problems_dtypes_once() -> None:
    dtypes: list[torch.dtype] = []

    def counting(name: str, inputs: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
        dtypes.append(inputs["x"].dtype)
        return OPERATOR.definition(name, inputs, scalars)

    operator = replace(OPERATOR, definition=counting)
    problem = parse_problem("M=9,N=32,dtype=bf16", OPERATOR.signature)
    fixture = Fixture(operator, "forward", problem, CPU)
    first, second = (
        fixture.input_set(Case("normal", (), "contiguous", seed, fresh=True)) for seed in (1, 2)
    )
    before = len(dtypes)
    assert torch.bfloat16 in dtypes
    assert not torch.equal(first.tensors["x"], second.tensors["x"])
    exact = {n: y for _, found in fixture.references(second) for n, y in found.items()}
    assert torch.allclose(exact["y"].high, normalised({**second.tensors, **DEFAULTS}), rtol=1e-5)
    third = fixture.input_set(Case("normal", (), "contiguous", 3, fresh=True))
    assert third.bounds == second.bounds == first.bounds
    assert set(dtypes[before:]) == {torch.float64}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gain", [1.02, 0.98])
def test_a_gain_that_no_element_shows(dtype: str, gain: float) -> None:
    """In bf16 the definition loses 1.5 %, so that 2 % more of everything is within the bound."""

    def kernel(t: Tensors) -> None:
        t["y"].copy_(gain * normalised(t))

    verdict = run(kernel, f"M=97,N=4096,dtype={dtype}")
    assert not verdict.ok
    if dtype == "bf16":
        assert "y is off on average" in verdict.reason


def test_a_guard_that_refuses_the_smallest_steady_set_gets_whole_vectors() -> None:
    steady = (("M", 500),)
    verdict = run(honest, "M=97,N=64,dtype=fp32", "host", constants=(), steady=steady,
                  admits=lambda _, t: t["x"].shape[1] % 8 == 0)
    assert verdict.ok, verdict.reason
    assert "normal M=500 N=1" in verdict.skipped
    assert "normal M=500 N=32" in verdict.cases


def test_a_steady_set_without_other_dims_is_refused_once() -> None:
    verdict = run(honest, "M=97,N=64,dtype=fp32", "host", constants=("N",), steady=(("M", 500),),
                  admits=lambda _, t: t["x"].shape[0] != 500)
    assert verdict.ok, verdict.reason
    assert verdict.skipped.count("normal M=500") == 1
