"""The definition of wkv5 and wkv6: the formula, its gradients, exact decays, its peers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kgen.errors import ProblemError
from kgen.model.problem import Problem, parse_problem
from kgen.operators import _wkv_definition, wkv5, wkv6
from kgen.operators._wkv import STATES
from kgen.operators._wkv_definition import decays, definition
from kgen.operators._wkv_peers import peers
from kgen.operators.base import Operator

OPERATORS = {"wkv5": wkv5.OPERATOR, "wkv6": wkv6.OPERATOR}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
STEPS = ("r", "k", "v", "w", "gy")
NAMES = ("r", "k", "v", "w", "u", "initial_state")


def problem(
    of: Operator, dims: str = "B=2,T=7,H=2,K=3,V=4", states: bool = True, form: str = "log"
) -> Problem:
    text = f"{dims},dtype=fp32,decay_form={form}" + f",{STATES}" * states
    return parse_problem(text, of.signature)


DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": torch.exp,
    "raw": lambda w: torch.exp(-w.exp()),
    "decay": lambda w: w.clone(),
}
each_form = pytest.mark.parametrize("form", DECAYS)


def inputs(of: Operator, case: str, at: Problem, pass_name: str = "backward") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = of.make_inputs(pass_name, at, case, generator, torch.device("cpu"))
    return {name: x.double() if x.is_floating_point() else x for name, x in made.items()}


def by_the_formula(
    x: dict[str, Tensor], scale: float, form: str = "log"
) -> tuple[Tensor, Tensor]:
    """The recurrence, literally, one step after the other."""
    r, k, v, w, u = (x[name] for name in NAMES[:5])
    state = x.get("initial_state", k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3]))
    out = []
    for t in range(k.shape[1]):
        term = k[:, t, :, :, None] * v[:, t, :, None, :]
        now = state + u[None, :, :, None] * term
        out.append(scale * (r[:, t, :, :, None] * now).sum(2))
        w_t = w if w.ndim == 2 else w[:, t]
        state = DECAYS[form](w_t)[..., None] * state + term
    return torch.stack(out, dim=1), state


@each_operator
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("steps", [1, 7, 64, 150])
@pytest.mark.parametrize("case", ["normal", "extreme_decay", "no_decay", "mixed"])
@each_form
def test_it_is_the_formula_and_its_gradient(
    operator: Operator, form: str, case: str, steps: int, states: bool
) -> None:
    at = problem(operator, f"B=2,T={steps},H=2,K=3,V=4", states, form)
    scalars = operator.arguments("backward", at) | {"scale": 0.5}
    given = inputs(operator, case, at)
    leaves = {name: given[name].clone().requires_grad_() for name in NAMES if name in given}
    y, state = by_the_formula(leaves, 0.5, form)
    forward = definition("forward", given, scalars)
    torch.testing.assert_close(forward["y"], y)
    torch.testing.assert_close(forward["final_state"], state)
    loss = (y * given["gy"]).sum()
    if states:
        loss = loss + (state * given["gfinal_state"]).sum()
    want = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    backward = definition("backward", given, scalars)
    single = definition("backward", {n: x.float() for n, x in given.items()}, scalars)
    for name, gradient in zip(leaves, want, strict=True):
        if name == "w" and form == "raw":  # autograd has inf * 0 where all is forgotten
            gradient = gradient.nan_to_num(0.0)
        torch.testing.assert_close(backward[f"g{name}"], gradient, rtol=1e-10, atol=1e-10)
        assert single[f"g{name}"].dtype == torch.float32
        torch.testing.assert_close(single[f"g{name}"].double(), gradient, rtol=1e-3, atol=1e-3)


@each_operator
def test_a_decay_of_zero_forgets_and_a_small_one_keeps_its_accuracy(operator: Operator) -> None:
    at = problem(operator, "B=1,T=130,H=1,K=2,V=2")
    given = inputs(operator, "normal", at)
    given["w"][..., 0] = -torch.inf
    given["w"][..., 1] = -50.0
    backward = definition("backward", given, {"scale": 1.0})
    assert (backward["gw"][..., 0] == 0).all()
    small = backward["gw"][..., 1].abs() / torch.tensor(-50.0).double().exp()
    assert 1e-3 < small.max() < 1e4
    forward = definition("forward", given, {"scale": 1.0})
    want = given["k"][:, -1, :, 0, None] * given["v"][:, -1]
    assert forward["final_state"][:, :, 0].equal(want)


@each_operator
def test_the_forms_of_w_say_the_same_decays(operator: Operator) -> None:
    """The same draws in each form, those that forget all and those that keep all among them."""
    made = {}
    for form in DECAYS:
        at = problem(operator, "B=2,T=70,H=2,K=3,V=4", form=form)
        given = inputs(operator, "mixed", at)
        scalars = operator.arguments("backward", at)
        decay, slope = decays(given["w"], scalars)
        assert (decay == 0).any()
        assert (decay == 1).any()
        assert slope.isfinite().all()
        outputs = definition("forward", given, scalars) | definition("backward", given, scalars)
        made[form] = outputs | {"gw": outputs["gw"] / slope, "forgotten": decay == 0, "d": decay}
    for form in ("raw", "decay"):
        assert made[form]["d"].allclose(made["log"]["d"], rtol=1e-5)
        for name in ("y", "final_state", "gr", "gk", "gv", "gu", "ginitial_state"):
            torch.testing.assert_close(made[form][name], made["log"][name], rtol=1e-4, atol=1e-4)
    # By the decay itself: where all is forgotten, the other forms' gradients are 0.
    assert (made["decay"]["gw"][made["decay"]["forgotten"]] != 0).any()


@each_operator
@pytest.mark.parametrize("cuts", [(0, 7), (0, 0, 3, 3, 150, 150), (0, 64, 65, 150), (0, 0)])
def test_packed_sequences_are_calls_of_their_own(
    operator: Operator, cuts: tuple[int, ...]
) -> None:
    n, steps = len(cuts) - 1, cuts[-1]
    at = problem(operator, f"B=1,N={n},T={steps},H=2,K=3,V=4,cu_seqlens_dtype=int64")
    given = inputs(operator, "mixed", at) | {"cu_seqlens": torch.tensor(cuts)}
    for dtype in (torch.float64, torch.float32):
        all_of_them = {
            name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()
        }
        made = definition("forward", all_of_them, {"scale": 0.5})
        made |= definition("backward", all_of_them, {"scale": 0.5})
        shared = {name: torch.zeros_like(made[name]) for name in ("gu", "gw")}
        for i, (first, last) in enumerate(pairwise(cuts)):
            own = {
                name: x[:, first:last] if x.ndim == 4 and name in STEPS else x
                for name, x in all_of_them.items()
                if name != "cu_seqlens"
            }
            own |= {name: own[name][i : i + 1] for name in ("initial_state", "gfinal_state")}
            want = definition("forward", own, {"scale": 0.5})
            want |= definition("backward", own, {"scale": 0.5})
            for name in ("y", "gr", "gk", "gv"):
                same(made[name][:, first:last], want[name])
            for name in ("final_state", "ginitial_state"):
                same(made[name][i : i + 1], want[name])
            shared["gu"] += want["gu"]
            if operator is wkv5.OPERATOR:
                shared["gw"] += want["gw"]
            else:
                same(made["gw"][:, first:last], want["gw"])
        torch.testing.assert_close(made["gu"], shared["gu"])
        if operator is wkv5.OPERATOR:
            torch.testing.assert_close(made["gw"], shared["gw"])


def same(got: Tensor, want: Tensor) -> None:
    """Bit by bit; but where float64 is cut into chunks depends on the longest sequence beside."""
    if got.dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    else:
        assert got.equal(want)


@each_operator
@pytest.mark.parametrize("case", ["normal", "mixed", "nonfinite"])
def test_fp32_takes_one_step_after_the_other(operator: Operator, case: str) -> None:
    at = problem(operator, "B=2,T=150,H=2,K=3,V=4")
    given = {name: x.float() for name, x in inputs(operator, case, at, "forward").items()}
    r, k, v, w = (x.transpose(1, 2) if x.ndim == 4 else x for x in (given[n] for n in NAMES[:4]))
    decay = w.exp() if w.ndim == 4 else w.exp()[None, :, None].expand(k.shape)
    state, read = given["initial_state"], []
    for t in range(150):
        read.append((r[:, :, t, None] @ state)[:, :, 0])
        term = k[:, :, t, :, None] * v[:, :, t, None]
        state = torch.addcmul(term, decay[:, :, t, :, None], state)
    given["u"] = torch.zeros_like(given["u"])
    made = definition("forward", given, {"scale": 1.0})
    bonus = (r * 0.0 * k).sum(-1, keepdim=True) * v
    for got, want in (
        (made["y"].transpose(1, 2), torch.stack(read, dim=2) + bonus),
        (made["final_state"], state),
    ):
        assert got.isnan().equal(want.isnan())
        assert got.nan_to_num().equal(want.nan_to_num())


@each_operator
@pytest.mark.parametrize("packed", [False, True])
def test_block_size_of_states_changes_no_bit(
    operator: Operator, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = "B=1,N=5,T=150,H=2,K=3,V=4,cu_seqlens_dtype=int32" if packed else "B=3,T=150,H=2,K=3,V=4"
    at = problem(operator, dims)
    given = {
        name: x.float() if x.is_floating_point() else x
        for name, x in inputs(operator, "mixed", at).items()
    }
    exact = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}

    def made() -> list[Tensor]:
        return [
            y
            for x in (given, exact)
            for pass_name in ("forward", "backward")
            for y in definition(pass_name, x, {"scale": 0.5}).values()
        ]

    at_once = made()
    monkeypatch.setattr(_wkv_definition, "_STATE_ELEMENTS", {"cpu": 200})
    for some, whole in zip(made(), at_once, strict=True):
        assert some.equal(whole)


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ops that are not views: on a GPU each is a launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pass_name", "operator", "per_step"),
    [
        ("forward", wkv6.OPERATOR, 1),
        ("forward", wkv5.OPERATOR, 1),
        ("backward", wkv6.OPERATOR, 2),  # both states in one; and the sum that is gu
        ("backward", wkv5.OPERATOR, 2),
    ],
)
def test_a_step_is_one_launch(pass_name: str, operator: Operator, per_step: int) -> None:
    counts = []
    for steps in (2048, 4096):
        at = problem(operator, f"B=1,T={steps},H=1,K=2,V=2")
        given = {name: x.float() for name, x in inputs(operator, "normal", at, pass_name).items()}
        with Ops() as ops:
            definition(pass_name, given, {"scale": 1.0})
        counts.append(ops.count)
    # Beside the steps there are some ops for each chunk, of which there are about sqrt(T).
    assert counts[1] - counts[0] <= (per_step + 0.1) * 2048


@each_operator
def test_float64_takes_about_the_root_of_the_steps(operator: Operator) -> None:
    at = problem(operator, "B=1,T=4096,H=1,K=2,V=2")
    for pass_name in ("forward", "backward"):
        given = inputs(operator, "normal", at, pass_name)
        with Ops() as ops:
            definition(pass_name, given, {"scale": 1.0})
        assert ops.count < 6 * 64


@each_operator
def test_drawn_cuts_are_legal_and_some_sequences_are_empty(operator: Operator) -> None:
    at = problem(operator, "B=1,N=9,T=6,H=1,K=2,V=2,cu_seqlens_dtype=int32")
    cuts = inputs(operator, "normal", at)["cu_seqlens"]
    assert (cuts.dtype, len(cuts)) == (torch.int32, 10)
    assert (int(cuts[0]), int(cuts[-1])) == (0, 6)
    assert (cuts.diff() >= 0).all()
    assert (cuts.diff() == 0).any()


def test_the_number_of_sequences_follows_from_the_batch_unless_they_are_packed() -> None:
    assert problem(wkv6.OPERATOR, "B=3,T=7,H=2,K=3,V=4").dim("N") == 3
    packed = ",cu_seqlens_dtype=int32"
    with pytest.raises(ProblemError, match="N=2, but without cu_seqlens every batch row is a seq"):
        problem(wkv6.OPERATOR, "B=3,N=2,T=7,H=2,K=3,V=4")
    with pytest.raises(ProblemError, match="B=3, but with cu_seqlens all sequences lie in one"):
        problem(wkv6.OPERATOR, f"B=3,N=2,T=7,H=2,K=3,V=4{packed}")
    with pytest.raises(ProblemError, match="'N' is missing, the number of sequences"):
        problem(wkv6.OPERATOR, f"B=1,T=7,H=2,K=3,V=4{packed}")


def test_an_unknown_form_names_those_that_there_are() -> None:
    with pytest.raises(ProblemError, match=r"decay_form=exp.*\n.*log, raw, decay"):
        problem(wkv6.OPERATOR, form="exp")


@each_operator
@pytest.mark.parametrize("name", ["r", "k", "v", "gy"])
def test_nan_reaches_only_the_steps_that_depend_on_it(operator: Operator, name: str) -> None:
    at = problem(operator)
    given = inputs(operator, "normal", at)
    given[name][0, 4, 0] = torch.nan
    backward = definition("backward", given, {"scale": 1.0})
    if name != "gy":
        y = definition("forward", given, {"scale": 1.0})["y"]
        assert y[0, :4].isfinite().all()
        assert y[1:].isfinite().all()
        assert y[0, 4, 0].isnan().all()
    assert backward["gr"][0, :4].isfinite().all()
    assert backward["gk"][0, 5:].isfinite().all()
    assert backward["gv"][0, 5:].isfinite().all()
    assert any(x.isnan().any() for x in backward.values())


@pytest.mark.parametrize(
    ("operator", "case", "pass_name"),
    list(product(OPERATORS.values(), wkv6.OPERATOR.cases, ("forward", "backward"))),
)
@each_form
def test_scale_is_the_magnitude_of_what_is_summed(
    operator: Operator, case: str, pass_name: str, form: str
) -> None:
    at = problem(operator, form=form)
    scalars = operator.arguments(pass_name, at) | {"scale": 0.5}
    given = inputs(operator, case, at, pass_name)
    outputs = definition(pass_name, given, scalars)
    assert operator.scale is not None
    magnitude = operator.scale(pass_name, given, outputs, scalars)
    magnitudes = {name: x if name == "w" else x.abs() for name, x in given.items()}
    terms = definition(pass_name, magnitudes, scalars)
    if "gw" in terms and form == "raw":  # which may err by as much as the exponent does
        terms["gw"] = terms["gw"] * (1 + given["w"].exp().clamp_max(1e3))
    for name, output in outputs.items():
        finite = output.isfinite() & magnitude[name].isfinite()
        assert finite.any() or case in ("nonfinite", "nonfinite_ends")
        assert (magnitude[name] >= output.abs())[finite].all()
        reached = 1 + at.dim("T") if operator is wkv5.OPERATOR else 1  # times, by a decay's error
        assert (magnitude[name] <= terms[name].abs() * (1 + 1e-9) * reached)[finite].all()


def test_cost_is_of_the_cheapest_form() -> None:
    six, five = wkv6.OPERATOR, wkv5.OPERATOR
    dims = "B=8,T=4096,H=32,K=64,V=64"
    rows = 8 * 4096 * 32 * 64 * 4
    assert six.cost("forward", problem(six, dims, False)).flops == 2 * 8 * 32 * 4096 * 2 * 64 * 64
    assert six.cost("forward", problem(six, dims, False)).bytes == 5 * rows + 32 * 64 * 4
    assert five.cost("forward", problem(five, dims, False)).bytes == 4 * rows + 2 * 32 * 64 * 4
    assert six.cost("backward", problem(six, dims, False)).bytes == 9 * rows + 2 * 32 * 64 * 4
    assert six.cost("backward", problem(six, dims, False)).unit == "3xhalf"


@each_operator
@pytest.mark.parametrize("steps", [1, 50])
def test_the_eager_peer_computes_the_same(operator: Operator, steps: int) -> None:
    at = problem(operator, f"B=2,T={steps},H=2,K=3,V=4")
    for case in ("normal", "mixed"):
        given = {name: x.float() for name, x in inputs(operator, case, at).items()}
        made = peers("forward")["eager"](given, {"scale": 0.5})
        assert isinstance(made, tuple)
        want = definition("forward", given, {"scale": 0.5})
        torch.testing.assert_close(made[0], want["y"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made[1], want["final_state"], rtol=1e-4, atol=1e-4)
        gradients = peers("backward")["eager"](given, {"scale": 0.5})
        assert isinstance(gradients, tuple)
        wanted = definition("backward", given, {"scale": 0.5})
        for name, gradient in zip(NAMES, gradients, strict=True):
            if case == "mixed" and name == "w":
                continue  # the peer clamps w
            torch.testing.assert_close(gradient, wanted[f"g{name}"], rtol=1e-3, atol=1e-3)


def test_one_name_gives_both_features_and_values_are_as_many_as_keys() -> None:
    signature = wkv6.OPERATOR.signature
    wanted = parse_problem("B=2,T=5,H=3,K=64,V=64,dtype=bf16", signature)
    assert parse_problem("B=2,T=5,H=3,D=64,dtype=bf16", signature) == wanted
    assert parse_problem("B=2,T=5,H=3,K=64,dtype=bf16", signature) == wanted
    for twice in ("D=64,K=64", "V=64,D=64", "D=64,D=64"):
        with pytest.raises(ProblemError, match=r"'[DKV]' is given twice"):
            parse_problem(f"B=2,T=5,H=3,{twice},dtype=bf16", signature)
