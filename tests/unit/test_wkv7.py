"""The definition of wkv7: the formula, its gradients, exact decays, the scale of errors, peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from references import recurrence7
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kgen.model.problem import Problem, parse_problem
from kgen.operators import _wkv7_chunks, _wkv7_definition, _wkv7_scan
from kgen.operators._wkv7_chunks import definition, scale
from kgen.operators._wkv7_definition import CLAMP, decays
from kgen.operators._wkv7_inputs import CASES
from kgen.operators._wkv7_peers import peers
from kgen.operators.wkv7 import OPERATOR, STATES
from kgen.operators.wkv7 import scale as scale_step_by_step

NAMES = ("r", "w", "k", "v", "a", "b", "initial_state")
PACKED = "B=1,N=5,T=23,H=2,K=3,V=4"

DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.exp,
    "raw": lambda w: torch.exp(-w.exp()),
    "clamp": lambda w: torch.exp(-CLAMP * w.sigmoid()),
}


def problem(dims: str = "B=2,T=7,H=2,K=3,V=4", states: bool = True, form: str = "log") -> Problem:
    packed = ",cu_seqlens_dtype=int64" * ("N=" in dims)
    text = f"{dims},dtype=fp32,decay_form={form}{packed}" + f",{STATES}" * states
    return parse_problem(text, OPERATOR.signature)


def inputs(case: str, at: Problem, pass_name: str = "backward") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = OPERATOR.make_inputs(pass_name, at, case, generator, torch.device("cpu"))
    return {name: x.double() if x.is_floating_point() else x for name, x in made.items()}


def by_the_formula(x: dict[str, Tensor], factor: float, form: str) -> tuple[Tensor, Tensor]:
    """The recurrence, literally, of every sequence by itself."""
    bounds = x["cu_seqlens"].tolist() if "cu_seqlens" in x else None
    decay, v, k = DECAYS[form](x["w"]), x["v"], x["k"]
    rows = {n: x[n] for n in ("r", "k", "v", "a", "b")} | {"decay": decay}
    count = k.shape[0] if bounds is None else len(bounds) - 1
    state = x.get("initial_state", k.new_zeros(count, k.shape[2], k.shape[3], v.shape[3]))
    if bounds is None:
        y, end = recurrence7(**rows, state=state)
        return factor * y, end
    out, ends = [], []
    for n, (first, last) in enumerate(pairwise(bounds)):
        end = state[n : n + 1]
        if last > first:
            its = {name: row[:, first:last] for name, row in rows.items()}
            y, end = recurrence7(**its, state=end)
            out.append(factor * y)
        ends.append(end)
    return torch.cat(out, 1), torch.cat(ends)


@pytest.mark.parametrize(
    ("dims", "states"),
    [("B=2,T=1,H=2,K=3,V=4", False), ("B=2,T=23,H=2,K=3,V=4", True), (PACKED, True),
     (PACKED, False)],
)
@pytest.mark.parametrize("case", ["normal", "extreme_decay", "no_decay", "mixed"])
@pytest.mark.parametrize("form", DECAYS)
def test_it_is_the_formula_and_its_gradient(
    form: str, case: str, dims: str, states: bool
) -> None:
    at = problem(dims, states, form)
    scalars = OPERATOR.arguments("backward", at) | {"scale": 0.5}
    given = inputs(case, at)
    leaves = {name: given[name].clone().requires_grad_() for name in NAMES if name in given}
    y, state = by_the_formula(given | leaves, 0.5, form)
    forward = definition("forward", given, scalars)
    torch.testing.assert_close(forward["y"], y)
    torch.testing.assert_close(forward["final_state"], state)
    loss = (y * given["gy"]).sum()
    if states:
        loss = loss + (state * given["gfinal_state"]).sum()
    want = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    backward = definition("backward", given, scalars)
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
    single = definition("backward", narrow, scalars)
    for name, gradient in zip(leaves, want, strict=True):
        if name == "w" and form == "raw":  # autograd has inf * 0 where all is forgotten
            gradient = gradient.nan_to_num(0.0)
        torch.testing.assert_close(backward[f"g{name}"], gradient, rtol=1e-10, atol=1e-10)
        assert single[f"g{name}"].dtype == torch.float32
        torch.testing.assert_close(single[f"g{name}"].double(), gradient, rtol=1e-3, atol=1e-3)


@pytest.fixture(params=["as on a CPU", "as on a GPU", "few states at a time"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chunks in turn, chunks at once, and chunks at once in several groups."""
    name = str(request.param)
    held = {"as on a GPU": 1 << 20, "few states at a time": 200}.get(name, 1 << 18)
    monkeypatch.setattr(_wkv7_scan, "_STATE_ELEMENTS", {"cpu": held})
    for module in (_wkv7_scan, _wkv7_chunks):
        monkeypatch.setattr(module, "is_at_once", lambda k, v: name != "as on a CPU")
    return name


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """NaN and Inf at the same elements, and the others nearly equal."""
    assert found.keys() == want.keys()
    for name, y in want.items():
        torch.testing.assert_close(
            found[name], y, equal_nan=True, rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize(
    "dims", [f"B={b},T={t},H=2,K=3,V=4" for b, t in ((1, 0), (1, 1), (3, 2), (2, 17), (1, 100))]
    + [PACKED, "B=1,N=3,T=100,H=2,K=3,V=4", "B=1,N=4,T=2,H=2,K=3,V=4", "B=1,N=2,T=0,H=2,K=3,V=4"],
)
@pytest.mark.parametrize("case", ["normal", "extreme_decay", "no_decay", "nonfinite"])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_many_steps_at_once_are_the_steps(
    pass_name: str, case: str, dims: str, strategy: str
) -> None:
    """The definition, in float64 and fp32, and its scale, against those of one step at a time."""
    at = problem(dims)
    given = inputs(case, at, pass_name)
    scalars = OPERATOR.arguments(pass_name, at) | {"scale": 0.5}
    want = _wkv7_definition.definition(pass_name, given, scalars)
    assert_same(definition(pass_name, given, scalars), want, 1e-12)
    assert_same(
        scale(pass_name, given, want, scalars),
        scale_step_by_step(pass_name, given, want, scalars), 1e-12,
    )  # fmt: skip
    single = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
    assert_same(
        definition(pass_name, single, scalars),
        _wkv7_definition.definition(pass_name, single, scalars), 1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("dims", ["B=2,T=20,H=2,K=3,V=4", PACKED])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", [*NAMES, "gy", "gfinal_state"])
def test_one_nan_or_infinity_reaches_what_the_steps_let_it(
    name: str, value: float, dims: str, strategy: str
) -> None:
    """Padding and chunks must not carry it further: 0 times it is NaN."""
    at = problem(dims)
    scalars = OPERATOR.arguments("backward", at)
    for place in (0, -1):  # the first and the last step, or sequence
        given = inputs("normal", at)
        chosen = given[name][:, place] if given[name].shape[1] > 2 else given[name][place]
        chosen[..., -1, -1] = -value if name == "w" else value
        for pass_name in ("forward", "backward"):
            assert_same(
                definition(pass_name, given, scalars),
                _wkv7_definition.definition(pass_name, given, scalars), 1e-12,
            )  # fmt: skip


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts all torch ops but views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        self.count += not views
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["as on a GPU"], indirect=True)
@pytest.mark.parametrize(
    ("pass_name", "dtype", "most"),
    [("forward", torch.float32, 5), ("backward", torch.float32, 6),
     ("forward", torch.float64, 1), ("backward", torch.float64, 2)],
)
def test_a_step_takes_few_ops(
    pass_name: str, dtype: torch.dtype, most: int, strategy: str
) -> None:
    """On a GPU the definition is bound by launches."""
    at = problem("B=2,T=1024,H=2,K=3,V=4")
    given = {n: x.to(dtype) for n, x in inputs("normal", at, pass_name).items()}
    with Ops() as ops:  # type: ignore[no-untyped-call]
        definition(pass_name, given, OPERATOR.arguments(pass_name, at))
    assert ops.count / 1024 < most


@pytest.mark.parametrize("form", DECAYS)
def test_no_decay_is_a_decay_of_one(form: str) -> None:
    at = problem(form=form)
    scalars = OPERATOR.arguments("backward", at)
    decay, slope = decays(inputs("no_decay", at)["w"], scalars)
    assert decay.eq(1).all()
    assert slope.isfinite().all()
    strongest = decays(inputs("extreme_decay", problem("B=2,T=40,H=2,K=3,V=4", form=form))["w"],
                       scalars)[0].min()
    assert strongest == pytest.approx(math.exp(-CLAMP) if form == "clamp" else 0.0)


@pytest.mark.parametrize("case", ["normal", "no_decay"])
def test_the_scale_of_errors_does_not_grow_with_the_steps(case: str) -> None:
    """A scale that grew exponentially would let every output pass."""
    at = problem("B=1,T=1500,H=2,K=8,V=4")
    given, scalars = inputs(case, at, "forward"), OPERATOR.arguments("forward", at)
    found = definition("forward", given, scalars)
    its = scale("forward", given, found, scalars)
    for name, largest in its.items():
        typical = found[name].square().mean().sqrt()
        assert (largest >= found[name].abs()).all()
        assert largest.max() < 100 * typical


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_inputs_keep_the_state_bounded(case: str, pass_name: str) -> None:
    at = problem("B=1,T=400,H=2,K=8,V=4")
    given = inputs(case, at, pass_name)
    torch.testing.assert_close(given["a"].norm(dim=-1), torch.ones(1, 400, 2).double())
    found = definition(pass_name, given, OPERATOR.arguments(pass_name, at))
    if case == "nonfinite":
        assert any(not x.isfinite().all() for x in given.values())
        assert any(x.isfinite().any() for x in found.values())
    else:
        assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("name", ["eager", "loop"])
@pytest.mark.parametrize("form", DECAYS)
@pytest.mark.parametrize("dims", ["B=2,T=37,H=2,K=3,V=4", PACKED])
def test_peers_compute_the_same(name: str, form: str, dims: str) -> None:
    at = problem(dims, form=form)
    given = {n: x.float() if x.is_floating_point() else x
             for n, x in inputs("normal", at, "forward").items()}
    scalars = OPERATOR.arguments("forward", at) | {"scale": 0.5}
    made = peers("forward")[name](given, scalars)
    assert isinstance(made, tuple)
    want = definition("forward", given, scalars)
    torch.testing.assert_close(made[0], want["y"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made[1], want["final_state"], rtol=1e-4, atol=1e-5)


def test_the_least_work_of_one_step_without_states_is_of_a_pair() -> None:
    one = parse_problem("B=1,T=1,H=1,K=8,V=4,dtype=bf16", OPERATOR.signature)
    many = parse_problem("B=1,T=100,H=1,K=8,V=4,dtype=bf16", OPERATOR.signature)
    assert OPERATOR.cost("forward", one).flops == 2 * (8 + 4)
    assert OPERATOR.cost("forward", many).flops == 2 * 100 * 4 * 8 * 4
    assert OPERATOR.cost("forward", many).bytes == 2 * 100 * (4 * 8 + 2 * 4) + 4 * 100 * 8
