"""PyTorch's features with operators on a GPU: streams, CUDA graphs, opcheck, torch.compile, memory.

There are also tests of compiled code with dynamic dims, strided inputs, threads and several GPUs.
They use all operators of the library of the CPU tests. It has no row for this GPU, so NVRTC
compiles the safe kernels, which serve the calls.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from operator_cases import CASES, Case, Outputs, agree, close, weighed, wide
from torch import Tensor

from kgen.runtime import nvrtc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine"),
    pytest.mark.skipif(nvrtc.find() is None, reason="no NVRTC"),
]

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Long enough that a launch on the wrong stream reads its inputs before they are written.
LATE_CYCLES = 20_000_000


def passes(kgen_ops: ModuleType, case: Case) -> tuple[Any, Any]:
    """The pass objects of a case's operator."""
    module = sys.modules[f"{kgen_ops.__name__}.{case.operator}"]
    return module.FORWARD, module.BACKWARD


def gradients(outputs: Outputs, inputs: dict[str, Tensor]) -> Outputs:
    """Of the sum of what is differentiable."""
    differentiable = [y for y in outputs if y.requires_grad]
    loss = weighed(tuple(differentiable), [torch.ones((), device="cuda")] * len(differentiable))
    return torch.autograd.grad(loss, list(inputs.values()))


def wanted(case: Case, inputs: dict[str, Tensor]) -> tuple[Outputs, Outputs]:
    """Outputs and gradients of the reference, in float64."""
    given = wide(inputs)
    outputs = case.reference(**given)
    loss = weighed(outputs, [torch.ones((), device="cuda")] * len(outputs))
    return outputs, torch.autograd.grad(loss, list(given.values()))


def all_close(got: Outputs, want: Outputs) -> None:
    for one, other in zip(got, want, strict=False):
        close(one, other)


@each_case
def test_gradients(kgen_ops: ModuleType, case: Case) -> None:
    agree(case, lambda **given: case.call(kgen_ops, **given), case.inputs_on("cuda"))


@each_case
def test_opcheck(kgen_ops: ModuleType, case: Case) -> None:
    torch.library.opcheck(
        getattr(torch.ops.kgen_ops, case.operator).default, case.arguments(kgen_ops, "cuda")
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_case
def test_compiled_with_dynamic_dims(kgen_ops: ModuleType, case: Case, backend: str) -> None:
    torch._dynamo.reset()

    def function(**tensors: Tensor) -> Outputs:
        first, *rest = case.call(kgen_ops, **tensors)
        return first * 1.0, *rest

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    agree(case, compiled, case.inputs_on("cuda"))
    forward, _ = passes(kgen_ops, case)
    batched = {a.name for a in forward.signature.inputs if a.dims[0] in ("B", "N", "M")}
    more = {n: torch.cat([x] * 4)[:7].detach().requires_grad_()
            if n in batched - set(case.unmapped) else x
            for n, x in case.inputs_on("cuda").items()}
    with torch.compiler.set_stance("fail_on_recompile"):
        agree(case, compiled, more)


@pytest.mark.parametrize("name", ["rmsnorm-residual", "wkv6"])
def test_compiled_to_cuda_graphs(kgen_ops: ModuleType, name: str) -> None:
    """torch.compile's own graphs: a run as it is, a capture, then replays with new values."""
    torch._dynamo.reset()
    case = CASES[name]

    def function(**tensors: Tensor) -> Outputs:
        first, *rest = case.call(kgen_ops, **tensors)
        return first * 1.0, *rest

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        agree(case, compiled, case.inputs_on("cuda"))


@each_case
def test_any_stream(kgen_ops: ModuleType, case: Case) -> None:
    """Inputs that are written late on a side stream are read after that, in both passes."""
    inputs = case.inputs_on("cuda")
    made = case.call(kgen_ops, **inputs)
    gradients(made, inputs)  # loaded and prepared
    late = {n: torch.zeros_like(x).requires_grad_() for n, x in inputs.items()}
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for n, x in late.items():
                x.copy_(inputs[n])
        outputs = case.call(kgen_ops, **late)
        found = gradients(outputs, late)
    stream.synchronize()
    want = wanted(case, inputs)
    all_close(outputs, want[0])
    all_close(found, want[1])


@each_case
def test_a_graph_of_both_passes(kgen_ops: ModuleType, case: Case) -> None:
    inputs = case.inputs_on("cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch's notes on CUDA graphs say
        for _ in range(3):
            gradients(case.call(kgen_ops, **inputs), inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.call(kgen_ops, **inputs)
        found = gradients(outputs, inputs)
    with torch.no_grad():
        for x in inputs.values():
            x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    want = wanted(case, inputs)
    all_close(outputs, want[0])
    all_close(found, want[1])


@each_case
def test_a_miss_in_a_capture_names_warmup(
    kgen_ops: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _ = passes(kgen_ops, case)
    inputs = {n: x.detach() for n, x in case.inputs_on("cuda").items()}
    case.call(kgen_ops, **inputs)  # so that the kernel alone is missing, not tables or driver
    forward.forget()
    monkeypatch.setattr(forward.tables, "files", {})
    with (
        pytest.raises(kgen_ops.DispatchError, match=rf'warmup\("{case.operator}", '),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        case.call(kgen_ops, **inputs)
    assert forward.tables.files == {}
    torch.cuda.synchronize()
    all_close(case.call(kgen_ops, **inputs), wanted(case, inputs)[0])


def peak_bytes(call: Callable[[], object]) -> int:
    """Device memory that a call had at once, beyond what was there before; its results freed."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@each_case
def test_calls_that_are_fast_path(kgen_ops: ModuleType, extensions: ModuleType, case: Case) -> None:
    """Served in C from the third on: on another stream, in a capture, replayed with new values."""
    forward, _ = passes(kgen_ops, case)
    forward.forget()
    inputs = {n: x.detach() for n, x in case.inputs_on("cuda").items()}
    want = wanted(case, inputs)[0]
    for _ in range(4):
        all_close(case.call(kgen_ops, **inputs), want)
    assert sum(len(paths) for paths in forward.fast_paths.values()) == 1
    forward.prepared.clear()
    with torch.inference_mode():
        all_close(case.call(kgen_ops, **inputs), want)
    forward.prepared.clear()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    late = {n: torch.zeros_like(x) for n, x in inputs.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        for n, x in late.items():
            x.copy_(inputs[n])
        outputs = case.call(kgen_ops, **late)
    side.synchronize()
    all_close(outputs, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.call(kgen_ops, **late)
    assert not forward.prepared, "only the fast path served these calls"
    for n, x in late.items():
        x.copy_(inputs[n] * 0.5)
    graph.replay()
    all_close(outputs, wanted(case, late)[0])


@each_case
def test_strides_are_taken_without_a_copy(kgen_ops: ModuleType, case: Case) -> None:
    """A strided call needs the memory of a contiguous one: its outputs, and scratch if any."""
    forward, _ = passes(kgen_ops, case)
    free = {a.name for a in forward.signature.inputs if a.free_strides}
    if not free:
        pytest.skip(f"{case.operator} declares no free strides")
    plain = {n: x.detach() for n, x in case.inputs_on("cuda").items()}
    strided = {n: torch.cat([x, x], -1)[..., : x.shape[-1]] if n in free else x
               for n, x in plain.items()}
    assert any(not x.is_contiguous() for x in strided.values())
    before = case.call(kgen_ops, **plain)
    all_close(case.call(kgen_ops, **strided), before)
    del before
    needed = [peak_bytes(lambda given=given: case.call(kgen_ops, **given))  # type: ignore[misc]
              for given in (plain, strided)]
    assert needed[1] <= needed[0]


@each_case
def test_threads_on_streams_of_their_own(kgen_ops: ModuleType, case: Case) -> None:
    inputs = {n: x.detach() for n, x in case.inputs_on("cuda").items()}
    want = wanted(case, inputs)[0]
    forward, _ = passes(kgen_ops, case)
    forward.forget()
    torch.cuda.synchronize()
    start = threading.Barrier(4)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(own):
                start.wait()
                for _ in range(50):
                    made = case.call(kgen_ops, **inputs)
                torch.cuda.current_stream().synchronize()
                all_close(made, want)
        except BaseException as why:
            errors.append(why)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_case
def test_the_tensors_say_which_gpu(kgen_ops: ModuleType, case: Case) -> None:
    """Whatever GPU is current: both passes, and no device is changed for the caller."""
    for current, device in ((0, "cuda:1"), (1, "cuda:0"), (1, "cuda:1")):
        with torch.cuda.device(current):
            inputs = case.inputs_on(device)
            agree(case, lambda **given: case.call(kgen_ops, **given), inputs)
            assert torch.cuda.current_device() == current


@each_case
def test_calls_leave_no_device_memory(kgen_ops: ModuleType, case: Case) -> None:
    inputs = case.inputs_on("cuda")
    plain = {n: x.detach() for n, x in inputs.items()}

    def rounds(times: int) -> int:
        for _ in range(times):
            case.call(kgen_ops, **plain)
            gradients(case.call(kgen_ops, **inputs), inputs)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    before = rounds(20)
    assert rounds(2000) == before


@each_case
def test_meta_and_empty(kgen_ops: ModuleType, case: Case) -> None:
    """An empty batch on the GPU launches nothing and has outputs of the right shape."""
    forward, _ = passes(kgen_ops, case)
    batched = {a.name for a in forward.signature.inputs if a.dims[0] in ("B", "N", "M")}
    batched -= set(case.unmapped)
    empty = {n: x.detach()[:0] if n in batched else x.detach()
             for n, x in case.inputs_on("cuda").items()}
    made = case.call(kgen_ops, **empty)
    meta = case.call(kgen_ops, **{n: x.to("meta") for n, x in empty.items()})
    assert [(y.shape, y.dtype) for y in made] == [(y.shape, y.dtype) for y in meta]
    assert all(y.device.type == "cuda" and y.numel() == 0 for y in made)


# Importing touches no GPU, so that a child may use it; after a call PyTorch itself refuses.
FORK = """
import os
import torch
import kgen_ops

child = os.fork()
if child == 0:
    status = 1
    try:
        x = torch.randn(8, 16, device="cuda")
        y = kgen_ops.rmsnorm(x, torch.ones(16, device="cuda"))
        want = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
        status = 0
    except BaseException as why:
        print(repr(why), flush=True)
    os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_uses_the_gpu(library_folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": str(library_folder), "KGEN_CACHE_DIR": str(tmp_path)},
    )
    assert done.stdout.split() == ["0"], done.stdout + done.stderr
