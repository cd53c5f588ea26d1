"""Decoding in the generated library: states updated in place, by a pool's slots, in every way."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from decode_loop import DecodeLoop, decoded, largest_difference, main, random_sequences
from references import recurrence, recurrence7
from torch import Tensor

B, S, T, H, K, V = 4, 6, 2, 2, 6, 5
OPERATORS = ("wkv5_decode", "wkv6_decode", "wkv7_decode")
each_operator = pytest.mark.parametrize("name", OPERATORS)
INDICES = (4, -1, 0, S + 3)
Outputs = tuple[Tensor, Tensor]


def rows(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shape = (B, T, H, K)
    given = {"r": torch.randn(shape), "k": torch.randn(shape), "v": torch.randn(B, T, H, V)}
    w = -torch.rand(H, K) if name == "wkv5_decode" else -torch.rand(shape)
    if name == "wkv7_decode":
        unit = torch.nn.functional.normalize(torch.randn(shape), dim=-1)
        given |= {"a": -unit, "b": unit * torch.rand(shape)}
    else:
        given |= {"u": torch.randn(H, K)}
    return {n: x.to(dtype) for n, x in given.items()} | {"w": w}


def reference(given: dict[str, Tensor], pool: Tensor, indices: tuple[int, ...]) -> Outputs:
    """y and the new pool in float64."""
    x = {n: t.double() for n, t in given.items()}
    decay = x.pop("w").exp()
    decay = decay if decay.ndim == 4 else decay.expand(B, T, H, K)
    pool, out = pool.double().clone(), []
    for n, slot in enumerate(indices):
        if not 0 <= slot < pool.shape[0]:
            out.append(torch.full((1, T, H, V), 0.0 if slot < 0 else torch.nan).double())
            continue
        its = {name: t[n : n + 1] if t.ndim == 4 else t for name, t in x.items()}
        step = recurrence7 if "a" in its else recurrence
        y, state = step(decay=decay[n : n + 1], state=pool[slot : slot + 1], **its)
        pool[slot] = state[0]
        out.append(y)
    return torch.cat(out), pool


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 2e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def function_of(kgen_ops: ModuleType, name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(kgen_ops, name)
    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@each_operator
def test_slots_of_a_pool(
    kgen_ops: ModuleType, name: str, kind: torch.dtype, dtype: torch.dtype
) -> None:
    given, pool = rows(name, dtype), torch.randn(S, H, K, V)
    before = pool.clone()
    wanted_y, wanted = reference(given, pool, INDICES)
    indices = torch.tensor(INDICES, dtype=kind)
    y = function_of(kgen_ops, name)(**given, state_pool=pool, state_indices=indices)
    assert y.dtype == dtype
    close(y, wanted_y)
    close(pool, wanted)
    free = [slot for slot in range(S) if slot not in INDICES]
    assert torch.equal(pool[free], before[free])
    assert (y[1] == 0).all()
    assert y[3].isnan().all()


@each_operator
def test_a_decode_loop_in_place_without_indices(kgen_ops: ModuleType, name: str) -> None:
    """Includes the fast paths of later calls: each call updates the state of the previous call."""
    state = torch.randn(B, H, K, V)
    wanted = state.double()
    address = state.data_ptr()
    for _ in range(4):
        given = rows(name)
        wanted_y, wanted = reference(given, wanted, tuple(range(B)))
        close(function_of(kgen_ops, name)(**given, state_pool=state), wanted_y)
    close(state, wanted)
    assert state.data_ptr() == address


@each_operator
def test_layouts_of_a_pool(kgen_ops: ModuleType, name: str) -> None:
    """[S, H, V, K] as published kernels have it, rows with gaps, and steps of a larger tensor."""
    given, values = rows(name), torch.randn(S, H, K, V)
    wanted_y, wanted = reference(given, values, INDICES)
    transposed = values.mT.contiguous()
    padded = torch.full((S, H + 1, K, V + 3), 7.0)
    padded[:, :H, :, :V] = values
    for pool in (transposed.mT, padded[:, :H, :, :V]):
        close(function_of(kgen_ops, name)(
            **given, state_pool=pool, state_indices=torch.tensor(INDICES)), wanted_y)
        close(pool, wanted)
    assert (padded[:, H] == 7).all()
    assert (padded[..., V:] == 7).all()


@each_operator
def test_opcheck(kgen_ops: ModuleType, name: str) -> None:
    """Schema, mutation, fake tensors, tracing with dynamic dims."""
    given = rows(name)
    order = ("r", "w", "k", "v", "a", "b") if "a" in given else ("r", "k", "v", "w", "u")
    operator = getattr(torch.ops.kgen_ops, name).default
    arguments = [given[n] for n in order]
    slots = torch.tensor((4, -1, 0, 2))  # opcheck takes NaN for a difference
    for rest in ((torch.randn(B, H, K, V),), (torch.randn(S, H, K, V), slots)):
        torch.library.opcheck(operator, (*arguments, *rest))
    assert "Tensor(a!) state_pool" in str(operator._schema)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_graph_break(kgen_ops: ModuleType, backend: str) -> None:
    def step(given: dict[str, Tensor], pool: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        before = pool.sum()
        y = kgen_ops.wkv7_decode(**given, state_pool=pool, state_indices=indices)
        return y * 2, pool.sum() - before

    given, pool = rows("wkv7_decode"), torch.randn(S, H, K, V)
    indices = torch.tensor((2, 5, -1, 1))
    wanted_y, wanted = reference(given, pool, (2, 5, -1, 1))
    before = pool.double().sum()
    y, change = torch.compile(step, fullgraph=True, backend=backend)(given, pool, indices)
    close(y, wanted_y * 2)
    close(pool, wanted)
    assert abs(change.item() - (wanted.sum() - before).item()) < 1e-3


def test_exported_with_the_update(kgen_ops: ModuleType) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    wanted = reference(given, pool, tuple(range(B)))[1]

    class Model(torch.nn.Module):
        def forward(self, given: dict[str, Tensor], pool: Tensor) -> Tensor:
            made: Tensor = kgen_ops.wkv6_decode(**given, state_pool=pool)
            return made

    program = torch.export.export(Model(), (given, pool.clone()))
    program.module()(given, pool)
    close(pool, wanted)
    again = pool.clone()
    program.run_decompositions({}).module()(given, again)
    close(again, reference(given, pool, tuple(range(B)))[1])


def test_gradients_and_vmap_are_refused(kgen_ops: ModuleType) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    before = pool.clone()
    wanting = {**given, "r": given["r"].clone().requires_grad_()}
    for call in (kgen_ops.wkv6_decode, through_dispatcher):
        with pytest.raises(NotImplementedError, match="r requires grad, but the call updates "
                                                      "state_pool in place, which has no gradient"):
            call(**wanting, state_pool=pool)
        with pytest.raises(NotImplementedError, match="state_pool requires grad"):
            call(**given, state_pool=pool.clone().requires_grad_())
    assert torch.equal(pool, before)
    with torch.no_grad():
        kgen_ops.wkv6_decode(**wanting, state_pool=pool)
    assert not torch.equal(pool, before)

    def mapped(r: Tensor) -> Tensor:
        made: Tensor = kgen_ops.wkv6_decode(**{**given, "r": r}, state_pool=pool)
        return made

    with pytest.raises(NotImplementedError, match="it updates state_pool in place, which vmap"):
        torch.func.vmap(mapped)(torch.randn(3, B, T, H, K))


def through_dispatcher(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state_pool: Tensor
) -> Any:
    return torch.ops.kgen_ops.wkv6_decode(r, k, v, w, u, state_pool)


def test_autograd_is_told_of_the_update(kgen_ops: ModuleType) -> None:
    """A backward pass that saved the state before it was updated fails, as with PyTorch's own."""
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    for _ in range(3):  # the first call, a prepared one, a fast path
        factor = torch.ones(V, requires_grad=True)
        loss = (pool * factor).sum()
        kgen_ops.wkv6_decode(**given, state_pool=pool)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        kgen_ops.wkv6_decode(**given, state_pool=torch.randn(B, H, K, V))


def test_the_fast_path_tells_autograd(kgen_ops: ModuleType, extensions: Any) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    forward = sys.modules[f"{kgen_ops.__name__}.wkv6_decode"].FORWARD
    forward.forget()
    versions = []
    for _ in range(4):
        kgen_ops.wkv6_decode(**given, state_pool=pool)
        versions.append(pool._version)
    assert [after - before for before, after in itertools.pairwise(versions)] == [1, 1, 1]
    assert forward.fast_paths


def test_what_would_update_a_copy_is_refused(kgen_ops: ModuleType) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    call = kgen_ops.wkv6_decode
    with pytest.raises(ValueError, match="elements share memory, and the call writes each"):
        call(**given, state_pool=torch.randn(1, H, K, V).expand(B, H, K, V))
    with pytest.raises(ValueError, match="state_pool is a view whose memory does not hold"):
        call(**given, state_pool=torch._neg_view(pool))
    with pytest.raises(TypeError, match=r"state_pool has dtype torch\.bfloat16; supported: fp32"):
        call(**given, state_pool=pool.bfloat16())
    with pytest.raises(TypeError, match="state_indices_dtype = fp32 is not supported"):
        call(**given, state_pool=pool, state_indices=torch.zeros(B))
    with pytest.raises(ValueError, match=r"state_pool has shape \(4, 2, 5, 6\)"):
        call(**given, state_pool=pool.mT.contiguous())
    negated = {**given, "r": torch._neg_view(given["r"])}
    wanted_y, wanted = reference({**given, "r": -given["r"]}, pool, tuple(range(B)))
    close(call(**negated, state_pool=pool), wanted_y)  # copies are made of the other inputs
    close(pool, wanted)


def test_autocast_casts_rows_and_never_the_state(kgen_ops: ModuleType) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    wanted = reference(given, pool, tuple(range(B)))[1]
    mixed = {**given, "v": given["v"].bfloat16().float(), "u": given["u"].bfloat16()}
    wanted = reference({**mixed, "u": mixed["u"].float()}, pool, tuple(range(B)))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kgen_ops.wkv6_decode(**mixed, state_pool=pool)
        with pytest.raises(TypeError, match="state_pool has dtype"):
            kgen_ops.wkv6_decode(**given, state_pool=pool.bfloat16())
    close(pool, wanted)


def test_empty_calls(kgen_ops: ModuleType) -> None:
    given, pool = rows("wkv6_decode"), torch.randn(B, H, K, V)
    before = pool.clone()
    no_steps = {n: x[:, :0] if x.ndim == 4 else x for n, x in given.items()}
    assert kgen_ops.wkv6_decode(**no_steps, state_pool=pool).shape == (B, 0, H, V)
    assert torch.equal(pool, before)
    y = kgen_ops.wkv6_decode(
        **given, state_pool=pool[:0], state_indices=torch.full((B,), -1, dtype=torch.int32))
    assert (y == 0).all()


def test_rwkv7_adapters_update_the_callers_state(kgen_ops: ModuleType) -> None:
    compat = importlib.import_module(f"{kgen_ops.__name__}.compat")
    decays: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        (compat.wkv7s, lambda w: torch.exp(-w.exp())),
        (compat.rwkv7_wkv_fp32_v2, lambda w: torch.exp(-math.exp(-0.5) * w.sigmoid())),
    ]
    for function, decay in decays:
        given = {n: torch.randn(B, T, H, K) for n in "rkv"}
        unit = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)
        given |= {"a": -unit, "b": unit * 0.5}
        w, state = torch.randn(B, T, H, K), torch.randn(B, H, K, K)
        wanted_y, wanted = recurrence7(
            decay=decay(w).double(), state=state.mT.double(),
            **{n: x.double() for n, x in given.items()})
        flat = [x.flatten(2) for x in (given["r"], w, given["k"], given["v"], given["a"],
                                       given["b"])]
        y = torch.empty(B, T, H * K)
        assert function(B, T, H * K, H, state, *flat, y) is None
        close(y, wanted_y.flatten(2))
        close(state.mT, wanted)
        one, last = torch.empty(T, H * K), state[0].clone()
        function(1, T, H * K, H, last, *(x[0] for x in flat), one)
        assert not torch.equal(last, state[0])
        with pytest.raises(ValueError, match="H = 5 does not divide C = 12"):
            function(B, T, H * K, 5, state, *flat, y)
        with pytest.raises(ValueError, match="y has shape"):
            function(B, T, H * K, H, state, *flat, y[:1])
        with pytest.raises(ValueError, match="state has shape"):
            function(B, T, H * K, H, state[:1], *flat, y)


def agree(kgen_ops: ModuleType, device: str) -> None:
    with torch.no_grad():
        loop = DecodeLoop(kgen_ops.wkv7_decode, 3, 5, device)
        sequences = random_sequences(7, device)
        outputs = decoded(loop, sequences)
        assert largest_difference(kgen_ops.wkv7, sequences, outputs) < 1e-4
        assert (loop.indices == -1).all()
        spoiled = [*outputs[:-1], outputs[-1] + 1]
        assert largest_difference(kgen_ops.wkv7, sequences, spoiled) > 0.5


def test_the_decode_loop_of_the_tutorial(
    kgen_ops: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    agree(kgen_ops, "cpu")
    assert main(["--device", "cpu", "--sequences", "2", "--batch", "4"]) == 0
    assert capsys.readouterr().out.startswith("2 sequences, ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
def test_the_decode_loop_in_a_cuda_graph(kgen_ops: ModuleType) -> None:
    """Replays read the indices that the loop has written since the capture."""
    agree(kgen_ops, "cuda")
