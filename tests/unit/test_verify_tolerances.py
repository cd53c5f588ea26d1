"""The tolerances and exemptions of a proof apply to the input sets that they are meant for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_proof_room import TwoPerSm

from kgen.catalogue import open_catalogue, profile_named
from kgen.check import Fixture
from kgen.check.case import Case, Layout
from kgen.check.compare import summed_errors
from kgen.check.errors import largest_mean
from kgen.check.oracle import Reference
from kgen.check.precision import smallest_scale
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.runtime.comparison import made_up_like
from kgen.runtime.signature import Argument
from kgen.trial import WorkerHandle
from kgen.trial.handle import CERTIFICATE_TRIALS, WorkerTimeoutError
from kgen.worker import Setup, proof

CPU = torch.device("cpu")


def fixture(operator: str, text: str) -> Fixture:
    declared = open_catalogue().operator(operator)
    return Fixture(declared, "forward", parse_problem(text, declared.signature), CPU)


@pytest.mark.parametrize(("name", "enlarged"), [("normal", 1.0), ("large and small", 2.0**16)])
def test_zeros_have_the_scale_of_flushed_terms(name: str, enlarged: float) -> None:
    """Of one step, y is v: where that is 0, the scale is the least one."""
    made = fixture("wkv4", "B=1,T=1,C=4096,dtype=bf16")
    case = Case(name, (), "contiguous", 1)
    sets = made.input_set(case)
    inverse = torch.cat([
        reference.inverse.flatten() for _, found in made.references(sets)
        for reference in found.values()])
    least = smallest_scale(torch.bfloat16, enlarged)
    if name == "normal":
        assert float(inverse.max()) < 1 / least  # no zero is drawn
    else:
        assert float(inverse.max()) == pytest.approx(1 / least)


@pytest.mark.parametrize(("layout", "times"), [("strided", 1), ("shared", 8), ("expanded", 8)])
def test_equal_inputs_have_the_bound_of_equal_rows(layout: Layout, times: int) -> None:
    made = fixture("linear_attention", "B=1,H=1,T=5,E=16,M=16,dtype=bf16")
    (bound,) = made.input_set(Case("normal", (), layout, 1)).bounds.values()
    (ordinary,) = made.input_set(Case("normal", (), "contiguous", 1)).bounds.values()
    assert bound.bound == pytest.approx(times * ordinary.bound, rel=0.5)


def test_rounding_to_one_side_is_no_mean_error() -> None:
    """gv of wkv with one key and one step is c * gy: c decides to which side elements round."""
    bound = 2.0**-6
    x = torch.linspace(1.0, 2.0, 512).bfloat16().double()

    def mean(y: torch.Tensor, exact: torch.Tensor) -> float:
        reference = Reference(exact.float(), None, torch.ones(()), None)
        return float(summed_errors(y, reference, bound).abs().max()) / y.numel()

    exact = 1.0019 * x
    rounded = exact.bfloat16()
    allowed = largest_mean(bound, rounded)
    assert float((rounded.double() - exact).mean().abs()) > allowed
    assert mean(rounded, exact) == 0.0
    assert mean((1.004 * exact).bfloat16(), exact) > allowed
    exact = torch.rand(1 << 16, dtype=torch.float64) + 1.0
    toward_zero = (exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert mean(toward_zero, exact) > largest_mean(bound, toward_zero)
    infinite = Reference(torch.tensor([6e38, torch.nan, 2.0], dtype=torch.float64).float(), None,
                         torch.tensor([0.0, torch.inf, 1.0]), torch.tensor([True, True, False]))
    y = torch.tensor([torch.inf, torch.nan, 2.0]).bfloat16()
    of_infinite = summed_errors(y, infinite, bound)
    assert of_infinite.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("level", "times"), [("trial", 1), ("host", 1),
                                              ("certify", CERTIFICATE_TRIALS)])
def test_a_certificate_has_several_trials_time(
    level: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def late(self: WorkerHandle, request: object, outcome: object, timeout_s: float) -> None:
        given.append(timeout_s)
        raise WorkerTimeoutError("no answer")

    child = SimpleNamespace(drain=lambda: None, printed_bytes=0)
    monkeypatch.setattr(WorkerHandle, "_ask", late)
    monkeypatch.setattr(WorkerHandle, "_ready_child", lambda self: child)
    setup = Setup("rmsnorm", (), profile_named("host"), 0, seed=1)
    with WorkerHandle(setup, trial_timeout_s=7.0, spare=False) as worker:
        outcome = worker.trial(cast(Any, SimpleNamespace(level=level)))
    assert given == [7.0 * times]
    assert outcome.fate is Fate.TIMED_OUT
    assert ("limit of a trial, 7 s" in outcome.reason) == (times > 1)


def test_made_up_states_of_several_numbers_are_positive() -> None:
    signature = SimpleNamespace(inputs=(
        Argument("k", ("B", "C")), Argument("initial_state", ("B", "C", "3"))))
    k, state = made_up_like(cast(Any, signature), [torch.empty(2, 5), torch.empty(2, 5, 3)], 1.0)
    assert k is not None
    assert state is not None
    assert bool((k < 0).all())
    assert bool((state > 0).all())


@pytest.mark.parametrize("on_host", [False, True])
def test_sets_without_room_are_not_launched(
    on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, gpu = open_catalogue().entry("linear_attention"), profile_named("h200")
    variant = entry.space.variant("forward", "split_t")
    problem = parse_problem("B=64,H=8,T=4096,E=128,M=128,dtype=bf16", entry.operator.signature)
    trial = SimpleNamespace(
        candidate=SimpleNamespace(variant=variant, config=variant.first[0]), pass_name="forward",
        problem=problem, level="certify", seeds=None, orders=(), part=None,
        comparisons="")
    monkeypatch.setattr(proof, "verify", lambda *_, **given: given["admits"])
    monkeypatch.setattr(proof, "admission", lambda *_: lambda numbers, tensors: True)
    monkeypatch.setattr(proof, "_sm_count", lambda device: gpu.sm_count)
    admits: Any = proof.verdict_of(
        cast(Any, SimpleNamespace(device=CPU)), TwoPerSm(), cast(Any, trial), entry.operator, gpu,
        on_host=on_host)
    assert admits(dict(problem.dims), {}), "the problem itself is launched, or refused there"
    assert admits(dict(problem.dims) | {"B": 1}, {})
    assert admits(dict(problem.dims) | {"B": 63}, {}) == on_host
