"""Memory that one launch leaves must not change the results of the next launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from check_fakes import binding, factors
from torch import Tensor

from kgen.check import Case, Fixture, Verdict, verify
from kgen.check.buffers import Fill
from kgen.check.input_set import InputSet
from kgen.check.steps import steps_of
from kgen.errors import InexactDefinitionError
from kgen.model.plan import Workspace
from kgen.model.problem import Problem, parse_problem
from kgen.operators.rmsnorm import OPERATOR
from kgen.trial.kept_state import variables_of

Tensors = Mapping[str, Tensor]


def run(kernel: Callable[[Tensors], None], level: str = "trial") -> Verdict:
    problem = parse_problem("M=97,N=64,dtype=fp32", OPERATOR.signature)
    fixture = Fixture(OPERATOR, "forward", problem, torch.device("cpu"))
    return verify(
        fixture,
        binding(kernel),
        level,  # type: ignore[arg-type]
        workspaces=workspaces,
    )


def workspaces(problem: Problem) -> list[Workspace]:
    return [Workspace("mean", "fp32", problem.dim("M")), Workspace("flag", "fp32", 1)]


def finish(t: Tensors) -> None:
    t["y"].copy_(t["x"] * (t["mean"] + t["eps"]).rsqrt()[:, None] * factors(t))


def mean(t: Tensors) -> Tensor:
    return t["x"].square().mean(-1)


def test_a_flag_that_is_never_reset() -> None:
    def kernel(t: Tensors) -> None:
        if float(t["flag"]) != 1234.0:
            t["mean"].copy_(mean(t))
            t["flag"].fill_(1234.0)
        finish(t)

    assert "differs between launches" in run(kernel).reason


def test_a_result_that_is_kept_while_the_flag_stands() -> None:
    kept: dict[int, Tensor] = {}

    def kernel(t: Tensors) -> None:  # as the planted winner: repeats do no work at all
        if float(t["flag"]) != 1234.0 or t["y"].data_ptr() not in kept:
            t["mean"].copy_(mean(t))
            t["flag"].fill_(1234.0)
            finish(t)
            kept[t["y"].data_ptr()] = t["y"].clone()
        else:
            t["y"].copy_(kept[t["y"].data_ptr()])

    verdict = run(kernel)
    assert not verdict.ok
    assert "y differs between launches" in verdict.reason


def test_a_running_maximum_into_an_uninitialised_workspace() -> None:
    def kernel(t: Tensors) -> None:
        now = mean(t)
        t["mean"].copy_(torch.where(t["mean"] > now, t["mean"], now))  # NaN: minus infinity
        finish(t)

    assert run(kernel).reason.startswith("y differs between launches")


def test_a_running_minimum_into_an_uninitialised_workspace() -> None:
    def kernel(t: Tensors) -> None:
        now = mean(t)
        t["mean"].copy_(torch.where(t["mean"] < now, t["mean"], now))
        finish(t)

    assert run(kernel).reason.startswith("y differs between launches")


def test_writes_only_where_the_output_holds_nan() -> None:
    def kernel(t: Tensors) -> None:
        y = t["y"].clone()
        t["mean"].copy_(mean(t))
        finish(t)
        t["y"].copy_(torch.where(y.isnan(), t["y"], y))

    assert run(kernel).reason.startswith("y differs between launches")


@pytest.mark.parametrize("level", ["trial", "certify", "host"])
def test_an_honest_kernel_passes(level: str) -> None:
    def kernel(t: Tensors) -> None:
        t["mean"].copy_(mean(t))
        finish(t)

    verdict = run(kernel, level)
    assert verdict.ok, verdict.reason


def test_a_write_into_an_input_shows_although_other_values_follow() -> None:
    launches = []

    def kernel(t: Tensors) -> None:
        t["mean"].copy_(mean(t))
        finish(t)
        launches.append(0)
        if len(launches) == 1:
            t["x"][-1:, 3] += 1.0

    assert run(kernel).reason.startswith("input x was modified")


def test_a_write_into_an_input_shows_in_the_last_launch() -> None:
    launches = []
    last = 0

    def kernel(t: Tensors) -> None:
        t["mean"].copy_(mean(t))
        finish(t)
        launches.append(0)
        if len(launches) == last:
            t["x"][-1:, 3] += 1.0

    assert run(kernel).ok
    last = 2 * len(launches)
    assert run(kernel).reason.startswith("input x was modified")


def test_values_are_drawn_once_per_set_not_once_per_launch() -> None:
    draws: list[tuple[str, Problem]] = []

    def make_inputs(
        pass_name: str, problem: Problem, case: str, generator: torch.Generator,
        device: torch.device,
    ) -> dict[str, Tensor]:
        draws.append((case, problem))
        return OPERATOR.make_inputs(pass_name, problem, case, generator, device)

    problem = parse_problem("M=97,N=64,dtype=fp32", OPERATOR.signature)
    counted = replace(OPERATOR, make_inputs=make_inputs)
    fixture = Fixture(counted, "forward", problem, torch.device("cpu"))

    def kernel(t: Tensors) -> None:
        t["mean"].copy_(mean(t))
        finish(t)

    verdict = verify(fixture, binding(kernel), "certify", workspaces=workspaces)
    assert verdict.ok, verdict.reason
    # The set's own values and other ones; some for bounds and for what is linear.
    assert len(draws) <= 2 * len(verdict.cases) + 10


def test_a_counter_in_a_workspace_too_large_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.check.scratch.MOVED_BYTES", 0)

    def kernel(t: Tensors) -> None:
        count = float(t["flag"])
        t["flag"].fill_(count + 1.0 if 0.0 < count < 1000.0 else 1.0)
        t["mean"].copy_(mean(t))
        finish(t)

    assert run(kernel).reason.startswith("workspace flag is not the same after another ")


@pytest.mark.parametrize("level", ["trial", "certify"])
def test_a_counter_in_a_workspace(level: str) -> None:
    def kernel(t: Tensors) -> None:  # wrong once in a thousand launches
        count = float(t["flag"])
        t["flag"].fill_(count + 1.0 if 0.0 < count < 1000.0 else 1.0)
        t["mean"].copy_(mean(t) * (2.0 if count == 1000.0 else 1.0))
        finish(t)

    assert run(kernel, level).reason.startswith("workspace flag is not the same after another ")


def test_a_counter_of_launches_that_find_results() -> None:
    def kernel(t: Tensors) -> None:
        held, count = float(t["y"].sum()), float(t["flag"])
        is_result = 0.0 < abs(held) < 1e30
        t["flag"].fill_(count + 1.0 if 0.0 < count < 1000.0 and is_result else 1.0)
        t["mean"].copy_(mean(t))
        finish(t)

    assert "workspace flag is not the same" in run(kernel, "certify").reason


@pytest.mark.parametrize("level", ["trial", "certify"])
def test_a_count_of_changes_of_values(level: str) -> None:
    def kernel(t: Tensors) -> None:  # wrong once its inputs have changed a thousand times
        seen, count = float(t["mean"][:1].sum()), float(t["flag"])
        t["mean"].copy_(mean(t))
        is_known = 0.0 <= count < 1e6 and count == int(count)
        changed = is_known and 0.0 < seen < 1e30 and seen != float(t["mean"][:1].sum())
        t["flag"].fill_((count if is_known else 0.0) + (1.0 if changed else 0.0))
        finish(t)

    assert "workspace flag is not the same" in run(kernel, level).reason


@pytest.mark.parametrize("level", ["trial", "certify"])
def test_an_address_that_is_kept_in_a_workspace(level: str) -> None:
    def kernel(t: Tensors) -> None:  # does nothing for other tensors than those it saw first
        place = float(t["x"].data_ptr() // 64 % 2**20)
        if 0.0 < float(t["flag"]) < 2**20 and float(t["flag"]) != place:
            return
        t["flag"].fill_(place)
        t["mean"].copy_(mean(t))
        finish(t)

    assert "differs between launches" in run(kernel, level).reason


@pytest.mark.parametrize("launches", [3, 4, 5])
def test_between_launches_on_the_same_values_come_others(launches: int) -> None:
    steps = steps_of(launches)
    own = [step for step in steps if step.own]
    filled = [step for step in own if step.outputs is not Fill.SPOILED]
    assert len(filled) == launches
    first = steps.index(own[0])
    assert first == (0 if launches == 3 else 1)  # a certificate begins with other values
    assert not steps[first + 1].own
    assert {filled[0].outputs, filled[-1].outputs} == {Fill.LARGE, Fill.NONFINITE}
    if launches > 3:
        assert steps[-2].own
        assert steps[-1].outputs is steps[-1].workspaces is Fill.SPOILED


def test_four_orders_of_threads_come_to_launches_on_the_same_values() -> None:
    steps = steps_of(4)
    assert {i % 4 for i, step in enumerate(steps) if step.own} == {0, 1, 2, 3}
    assert {i % 2 for i, step in enumerate(steps_of(3)) if step.own} == {0, 1}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("static __device__ int calls;", ("calls",)),
        ("__device__ float kept[4];", ("kept",)),
        ("__managed__ int q = 1;", ("q",)),
        ("__device__ int f(int x) { static int c = 0; return c += x; }", ("c",)),
        ("// static int a;\nstatic constexpr int k = 3; constexpr static int m[2] = {1, 2};", ()),
        ("static __shared__ float s[3]; __constant__ int c[2];", ()),
        ("static __device__ __forceinline__ void run(const void* p) { (void)p; }", ()),
        ("namespace { int calls; }\nvoid f() { ++calls; }", ("calls",)),
        ("int calls = 0;\nextern \"C\" __global__ void f() { ++calls; }", ("calls",)),
        ("unsigned char kept[16] = {0}; std::atomic<int> n{0};", ("kept", "n")),
        ("struct S { int n; }; S state; int first(3);", ("state", "first")),
        ("void f(float* x) { static const float* last = nullptr; last = x; }", ("last",)),
        ("static struct { int n; } state;", ("state",)),
        ("const int a = 3; const float* const p = nullptr; int f(int x); using T = int;", ()),
        ("namespace a::b { struct S { int n; }; template <int N> struct V; enum E { one }; }", ()),
        ("template <class T> T kept = T();", ("kept",)),
        ("namespace { union { int n; float x; }; }", ("union",)),
        ("int (n) = 0; int (*f)(int) = nullptr; int g(int);", ("n", "f")),
        ("[[gnu::used]] int n; __attribute__((used)) int m; decltype(0) k = 0;", ("n", "m", "k")),
        ("struct P { int a; }; auto [first] = P{0};", ("first",)),
        ("#define KEEP static\nvoid f() { KEEP int n; }", ("macro KEEP",)),
        ("#define DECLARE int n = 0;\nDECLARE\n", ("n",)),
        ("void f() { sta\\\ntic int n; }", ("n",)),
        ("void f() { static int* const p = g(); ++*p; }", ("p",)),
        ("const struct M { mutable int n; } m{};", ("mutable int",)),
        ("auto f = 3;\n#define KEEP(x) int x;\nKGEN_EXPORT(g);", ("f",)),
        ("KGEN_DEVICE int n = 0; KGEN_DEVICE int f(int x) { return x; }", ("n",)),
        ("__constant__ int c[2] = {1, 2}; void f() { c[0] = 1; }", ("c",)),
        ("__constant__ int c = 1; int f() { return c == 1 || c <= 2; }", ()),
        ("template <class X> struct Box { int n; }; static Box< const int > b;", ("b",)),
        ("template <class X> struct Box { int n; }; Box< const int > b{0};", ("b",)),
        ("#define PASTE(a, b) a %:%: b\nvoid f() { PASTE(sta, tic) int n; }", ("macro PASTE",)),
        ('static_assert(1 > 0, ""); int f() { return static_cast<int>(2.0); }', ()),
    ],
)
def test_variables_that_outlive_a_launch(source: str, names: tuple[str, ...]) -> None:
    assert variables_of(source) == names


def test_the_seed_of_values_that_were_drawn_again_is_the_recorded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a report leads to the values that the kernel was launched on."""
    problem = parse_problem("M=9,N=16,dtype=fp32", OPERATOR.signature)
    fixture = Fixture(OPERATOR, "forward", problem, torch.device("cpu"))
    make = fixture._make
    refused: list[int] = []
    drawn: list[int] = []

    def made(case: Case) -> InputSet:
        if case.name == "large and small" and not refused:
            refused.append(case.seed)
            raise InexactDefinitionError("inexact")
        if refused and not drawn:
            drawn.append(case.seed)
        return make(case)

    def kernel(t: Tensors) -> None:
        t["mean"].copy_(mean(t))
        finish(t)

    monkeypatch.setattr(fixture, "_make", made)
    verdict = verify(fixture, binding(kernel), "certify", workspaces=workspaces)
    assert verdict.ok, verdict.reason
    assert drawn[0] in verdict.seeds
    assert refused[0] not in verdict.seeds
