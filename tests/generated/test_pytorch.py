"""PyTorch's features with all operators of the library, on the host's kernels.

They are autograd, autocast, torch.compile, torch.export, torch.func, opcheck, meta and empty
tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import references
import torch
from operator_cases import CASES, Case, H, K, Outputs, T, V, agree, close, randn, weighed, wide
from torch import Tensor
from torch.autograd import forward_ad

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_gradients(kgen_ops: ModuleType, case: Case) -> None:
    agree(case, lambda **given: case.call(kgen_ops, **given), case.inputs())


@each_case
def test_a_loss_of_each_output_alone(kgen_ops: ModuleType, case: Case) -> None:
    """What the others lack is a gradient of 0, given as an expanded number."""
    inputs = case.inputs()
    given = wide(inputs)
    got, want = case.call(kgen_ops, **inputs), case.reference(**given)
    for y, y64 in zip(got, want, strict=False):
        gradients = torch.autograd.grad(y.sum(), list(inputs.values()), retain_graph=True)
        wanted = torch.autograd.grad(y64.sum(), list(given.values()), retain_graph=True,
                                     materialize_grads=True)
        for gradient, gradient64 in zip(gradients, wanted, strict=True):
            close(gradient, gradient64)


@each_case
def test_gradients_through_the_dispatcher(kgen_ops: ModuleType, case: Case) -> None:
    operator = getattr(torch.ops.kgen_ops, case.operator)

    def function(**tensors: Tensor) -> Outputs:
        found = operator(**tensors, **case.keywords)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    agree(case, function, case.inputs())


@each_case
def test_opcheck(kgen_ops: ModuleType, case: Case) -> None:
    """Both passes: schema, fake tensors, autograd registration, tracing with dynamic dims."""
    module = sys.modules[f"{kgen_ops.__name__}.{case.operator}"]
    arguments = case.arguments(kgen_ops)
    torch.library.opcheck(getattr(torch.ops.kgen_ops, case.operator).default, arguments)
    asked: list[tuple[Any, ...]] = []
    gradient = module.FORWARD.gradient

    def spy(*given: Any) -> Any:
        asked.append(given)
        return module.BACKWARD.run(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient, "_run", spy)
        inputs = case.inputs()
        loss = weighed(case.call(kgen_ops, **inputs), [torch.ones(())] * 2)
        torch.autograd.grad(loss, list(inputs.values()))
    ((*given,),) = asked
    plain = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in given)
    torch.library.opcheck(
        getattr(torch.ops.kgen_ops, f"{case.operator}_backward").default, plain
    )


@pytest.mark.parametrize("dynamic", [False, True])
@each_case
def test_compiled_forward_and_backward(
    kgen_ops: ModuleType, case: Case, dynamic: bool
) -> None:
    torch._dynamo.reset()

    def function(**tensors: Tensor) -> Outputs:
        first, *rest = case.call(kgen_ops, **tensors)
        return first * 1.0, *rest

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    agree(case, compiled, case.inputs())
    if dynamic:
        signature = sys.modules[f"{kgen_ops.__name__}.{case.operator}"].FORWARD.signature
        batched = {a.name for a in signature.inputs if a.dims[0] in ("B", "N", "M")}
        batched -= set(case.unmapped)
        more = {n: torch.cat([x] * 4)[:7].detach().requires_grad_() if n in batched else x
                for n, x in case.inputs().items()}
        with torch.compiler.set_stance("fail_on_recompile"):
            agree(case, compiled, more)


# Two stand for all: Inductor compiles C++ for each.
@pytest.mark.parametrize("name", ["rmsnorm-residual", "wkv6"])
def test_compiles_with_inductor(kgen_ops: ModuleType, name: str) -> None:
    torch._dynamo.reset()
    case = CASES[name]

    def function(**tensors: Tensor) -> Outputs:
        first, *rest = case.call(kgen_ops, **tensors)
        return first.transpose(0, 1).sin(), *rest

    inputs = case.inputs()
    compiled = torch.compile(function, fullgraph=True)
    got, want = compiled(**inputs), function(**inputs)
    for one, other in zip(torch.autograd.grad(got[0].sum(), list(inputs.values())),
                          torch.autograd.grad(want[0].sum(), list(inputs.values())), strict=True):
        close(one, other)


@pytest.mark.parametrize("strict", [False, True])
@each_case
def test_export(kgen_ops: ModuleType, case: Case, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> Outputs:
            return case.call(kgen_ops, **tensors)

    inputs = {name: x.detach() for name, x in case.inputs().items()}
    program = torch.export.export(Model(), (inputs,), strict=strict)
    assert f"kgen_ops.{case.operator}" in str(program.graph)
    for got, want in zip(program.module()(inputs), case.call(kgen_ops, **inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_export_with_a_dynamic_dim(kgen_ops: ModuleType) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = kgen_ops.rmsnorm(x * 2, self.w)
            return y

    model = Model()
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (torch.randn(4, 16),), dynamic_shapes=({0: rows},))
    x = torch.randn(9, 16)
    torch.testing.assert_close(program.module()(x), model(x))


@each_case
def test_a_second_derivative_is_refused(kgen_ops: ModuleType, case: Case) -> None:
    inputs = case.inputs()
    first = case.call(kgen_ops, **inputs)[0]
    gradients = torch.autograd.grad(first.sum(), list(inputs.values()), create_graph=True)
    name = next(iter(inputs))
    assert gradients[0].requires_grad, "it must not be dropped silently"
    with pytest.raises(NotImplementedError, match=f"{case.operator}: a second derivative"):
        torch.autograd.grad([g.sum() for g in gradients], inputs[name])


def test_gradients_of_a_gradient_function_are_refused(kgen_ops: ModuleType) -> None:
    x, w = torch.ones(8, 16, requires_grad=True), torch.ones(16)
    for function in (kgen_ops.rmsnorm_backward, torch.ops.kgen_ops.rmsnorm_backward):
        with pytest.raises(NotImplementedError,
                           match=r"rmsnorm_backward: x requires grad.*differentiable once"):
            function(x.detach(), x, w)
        with torch.no_grad():
            assert len(function(x.detach(), x, w)) == 2


@each_case
def test_vmap(kgen_ops: ModuleType, case: Case) -> None:
    """Mapped where an element of a batch may be, and everywhere."""
    single = {name: x.detach() for name, x in case.inputs().items()}
    for unmapped in (case.unmapped, ()):
        stacked = {
            n: x if n in unmapped else torch.stack([x, x.flip(0) / 2, x * 3], 1)
            for n, x in single.items()
        }
        dims = {n: None if n in unmapped else 1 for n in stacked}

        def function(given: dict[str, Tensor]) -> Outputs:
            return case.call(kgen_ops, **given)

        got = torch.func.vmap(function, in_dims=(dims,))(stacked)
        for index in range(3):
            one = {n: x if n in unmapped else x.select(1, index).contiguous()
                   for n, x in stacked.items()}
            for y, want in zip(got, case.call(kgen_ops, **one), strict=True):
                torch.testing.assert_close(y[index], want)


def test_vmap_launches_once_where_it_can(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = sys.modules[f"{kgen_ops.__name__}.rmsnorm"].FORWARD
    batching = sys.modules[f"{kgen_ops.__name__}._runtime.batching"]
    monkeypatch.setattr(batching, "_one_by_one", None)
    x, w = torch.randn(3, 4, 16), torch.randn(16)
    before = set(forward.prepared)
    y = torch.func.vmap(kgen_ops.rmsnorm, in_dims=(1, None), out_dims=1)(x, w)
    close(y, references.rmsnorm(x, w)[0])
    assert {key[0] for key in set(forward.prepared) - before} <= {torch.Size([4, 3, 16])}


@each_case
def test_func_gradients_of_each_element(kgen_ops: ModuleType, case: Case) -> None:
    """vmap over grad: what training with gradients of each sample does."""
    single = {name: x.detach() for name, x in case.inputs().items()}
    stacked = {n: torch.stack([x, x / 2]) for n, x in single.items()}

    def loss(function: Callable[..., Outputs]) -> Callable[[dict[str, Tensor]], Tensor]:
        return lambda given: function(**given)[0].sin().sum()

    got = torch.func.vmap(torch.func.grad(loss(
        lambda **given: case.call(kgen_ops, **given))))(stacked)
    want = torch.func.vmap(torch.func.grad(loss(case.reference)))(
        {n: x.double() for n, x in stacked.items()})
    for name in single:
        close(got[name], want[name])


def test_forward_mode_is_refused(kgen_ops: ModuleType) -> None:
    x = torch.ones(8, 16)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(kgen_ops.rmsnorm, (x,), (x,))
    w = torch.ones(16)
    kgen_ops.rmsnorm(x, w)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, w)  # type: ignore[no-untyped-call]
        for call in (kgen_ops.rmsnorm, torch.ops.kgen_ops.rmsnorm):
            with pytest.raises(NotImplementedError, match="w is a dual tensor"):
                call(x, dual)
        close(kgen_ops.rmsnorm(x, w), kgen_ops.rmsnorm(x))


def test_an_operator_inside_a_transform_says_what_to_call(kgen_ops: ModuleType) -> None:
    def loss(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.kgen_ops.rmsnorm(x)[0]
        return y.sum()

    with pytest.raises(NotImplementedError, match=r"next: call kgen_ops\.rmsnorm"):
        torch.func.grad(loss)(torch.ones(8, 16))


@pytest.mark.parametrize("way", ["direct", "dispatcher"])
def test_autocast_makes_dtypes_agree(kgen_ops: ModuleType, way: str) -> None:
    """To the widest among those that must agree; what agrees stays as it is."""
    def call(**given: Tensor) -> Outputs:
        made = (kgen_ops if way == "direct" else torch.ops.kgen_ops).rmsnorm(**given)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    x, w, half = randn(8, 32), randn(32), torch.randn(8, 32).bfloat16().requires_grad_()
    with pytest.raises(TypeError, match="residual_dtype = bf16 is not supported"):
        call(x=x, w=w, residual=half)
    with torch.autocast("cpu", torch.bfloat16):
        y, h = call(x=x, w=w, residual=half)
        assert (y.dtype, h.dtype) == (torch.float32, torch.float32)
        with torch.no_grad():
            assert call(x=x, w=w, residual=half)[0].equal(y)
            assert call(x=half, w=w)[0].dtype == torch.bfloat16
            assert call(x=half, w=w.half())[0].dtype == torch.bfloat16
    close(y, references.rmsnorm(x, w, half.float())[0])
    gradients = torch.autograd.grad(y.sum(), (x, w, half))
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32, torch.bfloat16]


def test_autocast_of_states_and_in_compiled_code(kgen_ops: ModuleType) -> None:
    torch._dynamo.reset()
    given = {name: x.detach() for name, x in CASES["wkv6"].inputs().items()}
    mixed = given | {"r": given["r"].bfloat16(), "initial_state": given["initial_state"].half()}

    def block(given: dict[str, Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return kgen_ops.wkv6(**given, return_final_state=True)

    y, state = block(mixed)
    assert (y.dtype, state.dtype) == (torch.float32, torch.float32)
    close(y, kgen_ops.wkv6(**{n: x.float() for n, x in mixed.items()}))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mixed), (y, state))


@each_case
def test_meta_tensors(kgen_ops: ModuleType, case: Case) -> None:
    inputs = case.inputs()
    meta = {n: x.detach().to("meta").requires_grad_() for n, x in inputs.items()}
    made, real = case.call(kgen_ops, **meta), case.call(kgen_ops, **inputs)
    assert [(y.shape, y.stride(), y.dtype, y.device.type) for y in made] == [
        (y.shape, y.stride(), y.dtype, "meta") for y in real]
    gradients = torch.autograd.grad(made[0].sum(), list(meta.values()))
    assert [g.shape for g in gradients] == [x.shape for x in inputs.values()]


EMPTY: dict[str, dict[str, tuple[int, ...]]] = {
    "rmsnorm": {"x": (0, 16), "w": (16,)},
    "timex": {"w": (4, T), "k": (0, 4, T)},
    "linear_attention": {"q": (0, H, T, K), "k": (0, H, T, K), "v": (0, H, T, V)},
    "wkv5": {"r": (0, T, H, K), "k": (0, T, H, K), "v": (0, T, H, V), "w": (H, K), "u": (H, K)},
    "wkv6": {"r": (0, T, H, K), "k": (0, T, H, K), "v": (0, T, H, V), "w": (0, T, H, K),
             "u": (H, K)},
}


@pytest.mark.parametrize("operator", EMPTY)
def test_an_empty_batch_has_gradients_of_zero(kgen_ops: ModuleType, operator: str) -> None:
    inputs = {name: randn(*shape) for name, shape in EMPTY[operator].items()}
    y = getattr(kgen_ops, operator)(**inputs)
    y = y if isinstance(y, Tensor) else y[0]
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, gradient in zip(inputs, gradients, strict=True):
        assert (gradient == 0).all(), name


@each_case
def test_strided_inputs(kgen_ops: ModuleType, case: Case) -> None:
    """Every dim but the last may have any stride where the signature says so."""
    signature = sys.modules[f"{kgen_ops.__name__}.{case.operator}"].FORWARD.signature
    free = {a.name for a in signature.inputs if a.free_strides}
    strided = {n: torch.cat([x, x], -1).detach()[..., : x.shape[-1]].requires_grad_()
               if n in free else x for n, x in case.inputs().items()}
    assert not free or not all(x.is_contiguous() for x in strided.values())
    agree(case, lambda **given: case.call(kgen_ops, **given), strided)


def test_a_capture_compiles_and_loads_nothing(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearsed on the CPU: there is no CUDA graph to capture."""
    forward = sys.modules[f"{kgen_ops.__name__}.rmsnorm"].FORWARD
    tables = sys.modules[f"{kgen_ops.__name__}._runtime.pass_tables"]
    monkeypatch.setattr(tables, "capturing", lambda: True)
    monkeypatch.setattr(forward.tables, "files", {})
    with pytest.raises(tables.DispatchError, match=(
        r'(?s)a CUDA graph is being captured.*kgen_ops\.warmup\("rmsnorm", M=8, N=16, dtype="fp32"'
    )):
        forward.tables.file("0", torch.device("cuda", 0), "M=8,N=16,dtype=fp32")


def test_warmup_loads_the_kernel_of_a_problem(
    kgen_ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = sys.modules[f"{kgen_ops.__name__}.rmsnorm"].FORWARD
    monkeypatch.setattr(forward.tables, "files", {})
    why = kgen_ops.warmup("rmsnorm", M=8, N=16, dtype=torch.float32, device="cpu")
    assert why.step == "exact"
    assert [stem for stem, *_ in forward.tables.files] == [why.kernel]
    with pytest.raises(ValueError, match="has dims M, N; got M"):
        kgen_ops.warmup("rmsnorm", M=8, dtype="fp32", device="cpu")
