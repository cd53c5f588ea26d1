"""Kernels that update a tensor in place: correct ones pass, those with a planted fault do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from check_fakes import binding
from torch import Tensor

from kgen.check import Fixture, Verdict, fault_of, verify
from kgen.errors import ProblemError
from kgen.model.problem import Problem, parse_problem
from kgen.model.signature import Dim, DTypeField, Pass, Signature
from kgen.model.signature import Tensor as Declared
from kgen.operators._shared import moved_bytes
from kgen.operators.base import Cost, Operator
from kgen.trial.definition import definition_digest
from kgen.worker.timed import Timed

CPU = torch.device("cpu")
Tensors = Mapping[str, Tensor]

POOL = Declared("pool", ("S", "D"), "fp32", free_strides=("S",), in_out=True)
FORWARD = Pass(
    "forward",
    inputs=(Declared("x", ("B", "D")), POOL, Declared("index", ("B",), "int32")),
    outputs=(Declared("y", ("B", "D")),),
)
SIGNATURE = Signature(
    dims=(Dim("B", "rows"), Dim("S", "slots"), Dim("D", "features", smallest=1)),
    dtypes=(DTypeField("dtype", ("fp32", "bf16")),),
    passes=(FORWARD,),
)


def define(pass_name: str, inputs: Tensors, scalars: Mapping[str, float]) -> dict[str, Tensor]:
    """A row of the pool is halved and added to; an index below 0 touches no row."""
    x, pool, index = inputs["x"], inputs["pool"].clone(), inputs["index"].long()
    used = index >= 0
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide)
    if bool(used.any()):
        new = pool[index[used]].to(wide) / 2 + x[used].to(wide)
        pool[index[used]] = new.to(pool.dtype)
        y[used] = new
    return {"y": y.to(x.dtype), "pool": pool}


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    b, s, d = problem.shape(("B", "S", "D"))
    dtype = getattr(torch, problem.dtype("dtype").torch)
    order = torch.randperm(s, generator=generator)[:b]
    index = torch.full((b,), -1).index_copy(0, torch.arange(order.numel()), order)
    index[::3] = -1
    return {
        "x": torch.randn(b, d, generator=generator).to(dtype),
        "pool": torch.randn(s, d, generator=generator),
        "index": index.int(),
    }


def untouched(pass_name: str, inputs: Tensors) -> dict[str, Tensor]:
    index = inputs["index"].long()
    found = torch.ones(inputs["pool"].shape[0], 1, dtype=torch.bool)
    found[index[index >= 0]] = False
    return {"pool": found}


OPERATOR = Operator(
    name="update_rows", summary="Updates rows.", source="here", doc="", signature=SIGNATURE,
    definition=define, make_inputs=make_inputs, cases=(),
    cost=lambda name, problem: Cost(moved_bytes(FORWARD, problem), 0),
    problems={"cuda": (), "host": ()}, peers=lambda name: {}, repeats=("B",), widens=True,
    untouched=untouched,
)
PROBLEM = parse_problem("B=5,S=9,D=8,dtype=fp32", SIGNATURE)


def honest(t: Tensors) -> None:
    made = define("forward", t, {})
    t["pool"].copy_(made["pool"])
    t["y"].copy_(made["y"])


def verdict_of(kernel: Callable[[Tensors], None], operator: Operator = OPERATOR) -> Verdict:
    fixture = Fixture(operator, "forward", PROBLEM, CPU)
    return verify(fixture, binding(kernel), "certify")


def test_an_honest_kernel_passes_and_both_results_are_compared() -> None:
    verdict = verdict_of(honest)
    assert verdict.ok, verdict.reason
    assert [accuracy.output for accuracy in verdict.accuracy] == ["y", "pool"]
    assert "normal B=5 strided" in " ".join(verdict.cases) or "normal strided" in verdict.cases


def not_updated(t: Tensors) -> None:
    before = t["pool"].clone()
    honest(t)
    t["pool"].copy_(before)


def updated_twice(t: Tensors) -> None:
    honest(t)
    before = t["y"].clone()
    honest(t)
    t["y"].copy_(before)


def next_slot(t: Tensors) -> None:
    index = t["index"].clone()
    t["index"].copy_(torch.where(index >= 0, (index + 1) % max(t["pool"].shape[0], 1), index))
    honest(t)
    t["index"].copy_(index)


def sign_of_an_unnamed_zero(t: Tensors) -> None:
    honest(t)
    unnamed = untouched("forward", t)["pool"][:, 0]
    if bool(unnamed.any()):
        t["pool"][unnamed] = -(-t["pool"][unnamed] * (1 + 2.0**-23))


def reads_the_pool_after_the_update(t: Tensors) -> None:
    honest(t)
    pool = t["pool"].clone()
    honest(t)
    t["pool"].copy_(pool)


def writes_between_rows(t: Tensors) -> None:
    honest(t)
    pool = t["pool"]
    if pool.stride(0) > pool.shape[1] and pool.shape[0] > 1:
        pool.as_strided((1,), (1,), pool.storage_offset() + pool.shape[1]).fill_(1.0)


def writes_past_the_end(t: Tensors) -> None:
    honest(t)
    pool = t["pool"]
    last = pool.storage_offset() + (pool.shape[0] - 1) * pool.stride(0) + pool.shape[1]
    if pool.shape[0]:
        pool.as_strided((1,), (1,), last).fill_(1.0)


@pytest.mark.parametrize(("kernel", "said"), [
    (not_updated, "elements of pool out of bound"),
    (updated_twice, "elements of pool out of bound"),
    (next_slot, "pool was written where the call must leave it as it was"),
    (sign_of_an_unnamed_zero, "pool was written where the call must leave it as it was"),
    (reads_the_pool_after_the_update, "elements of y out of bound"),
    (writes_between_rows, "wrote between the rows of pool"),
    (writes_past_the_end, "wrote past the end of input pool"),
])
def test_a_planted_fault_is_refused(kernel: Callable[[Tensors], None], said: str) -> None:
    verdict = verdict_of(kernel)
    assert not verdict.ok
    assert said in verdict.reason, verdict.reason


def test_a_launch_that_finds_what_the_one_before_left_would_be_wrong() -> None:
    """Every launch starts from restored content: counting launches shows it."""
    seen: list[Tensor] = []

    def kernel(t: Tensors) -> None:
        seen.append(t["pool"].clone())
        honest(t)

    fixture = Fixture(OPERATOR, "forward", PROBLEM, CPU)
    assert verify(fixture, binding(kernel), "trial").ok
    same = [pool for pool in seen if pool.shape == seen[-1].shape]
    assert len(same) >= 4
    assert sum(bool(torch.equal(pool, same[-1])) for pool in same) >= 3  # the set's own values
    assert any(not torch.equal(pool, same[-1]) for pool in same)  # launches on other values


def test_without_a_mask_an_unnamed_row_is_compared_within_its_bound() -> None:
    operator = replace(OPERATOR, untouched=None)
    assert verdict_of(sign_of_an_unnamed_zero, operator).ok
    assert not verdict_of(next_slot, operator).ok
    assert definition_digest(operator) != definition_digest(OPERATOR)


@pytest.mark.parametrize("kernel", [honest, not_updated, next_slot])
def test_after_timing_the_last_launch_starts_from_the_first_content(
    kernel: Callable[[Tensors], None],
) -> None:
    fixture = Fixture(OPERATOR, "forward", PROBLEM, CPU)
    made = fixture.input_set(fixture.schedule.whole())
    tensors = {name: torch.empty_like(t.contiguous()) for name, t in made.tensors.items()}
    timed = Timed([lambda: kernel(tensors)], tensors, {})
    timed.prepare(fixture, made)
    for _ in range(5):
        timed.calls[0]()
    assert (timed.fault(fixture, made) == "") == (kernel is honest)


def test_fault_of_names_the_rows_that_no_index_names() -> None:
    fixture = Fixture(OPERATOR, "forward", PROBLEM, CPU)
    made = fixture.input_set(fixture.schedule.whole())
    tensors = {name: t.clone() for name, t in (made.tensors | made.values).items()}
    sign_of_an_unnamed_zero(tensors)
    said = fault_of(fixture, made, {"pool": tensors["pool"], "y": tensors["y"]})
    assert said == "pool was written where the call must leave it as it was"


def test_signatures_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ProblemError, match="tensor 'pool' of forward is in_out, and must be"):
        replace(SIGNATURE, passes=(replace(FORWARD, outputs=(POOL,)),))
    with pytest.raises(ProblemError, match="is in_out, but there is another pass"):
        replace(SIGNATURE, passes=(FORWARD, Pass("backward", (), ())))
