"""Plans give the same bits with and without programmatic dependent launch, however they are called.

The same cubin is launched with and without the attribute, so any difference comes from a kernel
that read before its wait, or wrote memory that was still read. The other kernel is the previous one
of the plan or, if the plan's first launch has `pdl`, any kernel that precedes the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.launch.cuda import CudaDevice, LoadedCubin
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan, make_plan
from kgen.model.problem import parse_problem
from kgen.worker.binding import Tensors, bind_sets, buffer_sets, shared_scratch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (9, 0),
        reason="programmatic dependent launch takes sm_90",
    ),
]

SETS = 3  # of inputs and outputs; all calls share one scratch memory
CALLS = 200  # back to back
BEFORE = "initial_state_dtype=fp32"
LINEAR = "linear_attention"


@dataclass(frozen=True)
class Case:
    """Kernels of one problem.

    Attributes:
        operator: Its name.
        pass_name: `forward` or `backward`.
        variant: Its name.
        problem: As on a command line.
        products: What multiplies, where the variant has a choice.
    """

    operator: str
    pass_name: str
    variant: str
    problem: str
    products: str | None = None

    def __str__(self) -> str:
        words = (self.operator, self.pass_name, self.variant, self.products, self.problem)
        return "-".join(word for word in words if word)


CASES = [
    Case(LINEAR, "backward", "chunk_parallel", "B=2,H=8,T=2048,E=128,M=128,dtype=bf16"),
    Case(LINEAR, "backward", "chunk_parallel", f"B=1,H=3,T=1000,E=128,M=128,dtype=bf16,{BEFORE}"),
    *(
        Case(LINEAR, "forward", "split_t", text, products)
        for text in (
            "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
            f"B=1,H=3,T=5000,E=128,M=128,dtype=bf16,{BEFORE}",
        )
        for products in ("mma", "wgmma")
    ),
    Case(LINEAR, "forward", "chunk_scan", "B=1,H=8,T=4096,E=64,M=64,dtype=fp32,product_dtype=tf32"),
    Case(LINEAR, "backward", "chunk_scan", "B=1,H=8,T=4096,E=64,M=64,dtype=bf16"),
    Case("wkv5", "backward", "chunk_loop", "B=2,T=512,H=4,K=64,V=64,dtype=bf16"),
    Case("wkv6", "backward", "chunk_loop", f"B=2,T=1000,H=4,K=64,V=64,dtype=bf16,{BEFORE}"),
    Case("wkv6", "backward", "chunk_loop", "B=1,T=54,H=32,K=64,V=64,dtype=fp16"),
]


def skip_unless_it_runs(case: Case) -> None:
    """Leave out products that the GPU does not have."""
    if case.products == "wgmma" and torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("wgmma is of sm_90a alone")


class Calls:
    """One kernel file with its buffers, called with overlapping kernels or without."""

    def __init__(self, case: Case) -> None:
        entry, pass_name = open_catalogue().entry(case.operator), case.pass_name
        self.operator = operator = entry.operator
        variant = entry.space.variant(pass_name, case.variant)
        problem = parse_problem(case.problem, operator.signature)
        gpu = profile_named("h200")
        passed = operator.signature.pass_named(pass_name)
        config = next(
            c
            for c in variant.first
            if (c.as_dict().get("overlap") or c.as_dict().get("pdl"))
            and c.as_dict().get("products") == case.products
        )
        major, minor = torch.cuda.get_device_capability(0)
        compiler = open_compiler("nvrtc", [include_dir()])
        rendered = Renderer(include_dir()).render(
            operator.name, entry.templates, variant, config, problem
        )
        [built] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
        compiler.close()
        assert isinstance(built, Artifact), built
        plan = make_plan(variant, config, problem, gpu)
        assert any(launch.pdl for launch in plan.launches)
        apart = Plan(tuple(replace(x, pdl=False) for x in plan.launches), plan.workspaces)
        self._plan, self._pass_name, self._problem = plan, pass_name, problem
        device = CudaDevice(0)
        self.module = device.load(built)
        self.outputs = [t.name for t in passed.outputs]
        self.sets = [
            made
            for seed in range(SETS)
            for made in buffer_sets(
                operator, gpu, pass_name, problem, "warm", seed, device.torch_device
            )[0]
        ]
        self.scratch = shared_scratch(plan, problem, device.torch_device)
        self.overlapping = self._bound(plan, self.sets)
        self.apart = self._bound(apart, self.sets)

    def _bound(self, plan: Plan, sets: list[Tensors]) -> list[Callable[[], None]]:
        return bind_sets(
            self.module, plan, self.operator, self._pass_name, self._problem, sets, self.scratch
        )

    def inputs(self) -> list[Tensors]:
        """Of each set."""
        return [
            {name: t for name, t in tensors.items() if name not in self.outputs}
            for tensors in self.sets
        ]

    def of_inputs(self, inputs: Tensors) -> list[Callable[[], None]]:
        """Overlapping calls that leave the outputs of all sets, but take the same inputs."""
        return self._bound(self._plan, [{**tensors, **inputs} for tensors in self.sets])

    def fill_with_nan(self) -> None:
        """Fill outputs and scratch with NaN."""
        for tensors in self.sets:
            for name in self.outputs:
                if name in tensors:
                    tensors[name].fill_(torch.nan)
        for tensor in self.scratch.values():
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, and of counters -1

    def results(self) -> list[torch.Tensor]:
        """The outputs of all sets, as bits."""
        torch.cuda.synchronize()
        return [
            tensors[name].clone().view(torch.uint8)
            for tensors in self.sets
            for name in self.outputs
            if name in tensors
        ]


@pytest.fixture(scope="module", params=CASES, ids=str)
def calls(request: pytest.FixtureRequest) -> Calls:
    skip_unless_it_runs(request.param)
    return Calls(request.param)


@pytest.fixture
def wanted(calls: Calls) -> list[torch.Tensor]:
    """What the kernels give one after the other."""
    calls.fill_with_nan()
    for call in calls.apart:
        call()
        torch.cuda.synchronize()
    found = calls.results()
    assert not any(
        tensors[name].isnan().any()
        for tensors in calls.sets for name in calls.outputs if name in tensors
    )  # fmt: skip
    return found


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_call_by_itself(calls: Calls, wanted: list[torch.Tensor]) -> None:
    calls.fill_with_nan()
    for call in calls.overlapping:
        call()
        torch.cuda.synchronize()
    assert equal(calls.results(), wanted)


def test_many_calls_back_to_back(calls: Calls, wanted: list[torch.Tensor]) -> None:
    calls.fill_with_nan()
    for _ in range(CALLS):
        for call in calls.overlapping:
            call()
    assert equal(calls.results(), wanted)


@pytest.mark.parametrize("products", ["mma", "wgmma"])
def test_several_streams_at_once(products: str) -> None:
    """Blocks of several kernels that wait for blocks of their own have room between them all."""
    case = Case(LINEAR, "forward", "split_t", "B=2,H=8,T=2048,E=128,M=128,dtype=bf16", products)
    skip_unless_it_runs(case)
    several = [Calls(case) for _ in range(6)]
    streams = [torch.cuda.Stream() for _ in several]  # type: ignore[no-untyped-call]
    for each in several:
        each.fill_with_nan()
    torch.cuda.synchronize()
    for _ in range(CALLS // 4):
        for each, stream in zip(several, streams, strict=True):
            with torch.cuda.stream(stream):
                for call in each.overlapping:
                    call()
    found = [each.results() for each in several]
    for each, results in zip(several, found, strict=True):
        each.fill_with_nan()
        for call in each.apart:
            call()
            torch.cuda.synchronize()
        assert equal(results, each.results())


def test_inputs_that_are_made_right_before_on_another_stream(
    calls: Calls, wanted: list[torch.Tensor]
) -> None:
    """The first kernel of a plan reads nothing before what made its inputs has ended."""
    kept = [{name: t.clone() for name, t in inputs.items()} for inputs in calls.inputs()]
    calls.fill_with_nan()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(20):
            for tensors, inputs, call in zip(calls.sets, kept, calls.overlapping, strict=True):
                for name, value in inputs.items():
                    tensors[name].zero_()
                    tensors[name].copy_(value)
                call()
    stream.synchronize()
    assert equal(calls.results(), wanted)


# Spoils an input, makes it long after that, and lets the next kernel begin before both.
MAKER = """\
#include "kgen/primitives/pdl.cuh"

extern "C" __global__ void make_late(const int* from, volatile int* to, long long words,
                                     long long cycles) {
    kgen::griddepcontrol_wait();
    kgen::griddepcontrol_launch_dependents();
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long i = first; i < words; i += threads) to[i] = -1;  // NaN in every dtype
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
    for (long long i = first; i < words; i += threads) to[i] = from[i];
}
"""
CYCLES = 40_000  # that the makers wait, 20 us and more: what overlaps them could be over by then


@pytest.fixture(scope="module")
def maker() -> LoadedCubin:
    major, minor = torch.cuda.get_device_capability(0)
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("test/make_late", MAKER, digest_of_text(MAKER))
    [built] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
    compiler.close()
    assert isinstance(built, Artifact), built
    return CudaDevice(0).load(built)


def make_late(maker: LoadedCubin, wanted: torch.Tensor, made: torch.Tensor) -> Callable[[], None]:
    """What leaves `wanted` in `made`. Its few small blocks leave room for other kernels."""
    assert wanted.is_contiguous()
    assert made.is_contiguous()
    words, odd = divmod(wanted.numel() * wanted.element_size(), 4)
    assert odd == 0
    launch = Launch("make_late", (64, 1, 1), (256, 1, 1), 0, ("wanted", "made", words, CYCLES),
                    pdl=True)  # fmt: skip
    return maker.bind(Plan((launch,), ()), {"wanted": wanted, "made": made}, {})


@pytest.mark.parametrize("in_graph", [False, True], ids=["stream", "graph"])
def test_inputs_that_kernels_right_before_make_while_all_overlap(
    calls: Calls, wanted: list[torch.Tensor], maker: LoadedCubin, in_graph: bool
) -> None:
    """No launch is an ordinary one, so nothing but their waits keeps kernels from stale inputs.

    All calls take the same inputs, which are made anew for each of them: a line that an L1 cache
    has kept from the call before would show, too.
    """
    inputs = {name: torch.empty_like(t) for name, t in calls.inputs()[0].items()}
    steps = []
    for kept, call in zip(calls.inputs(), calls.of_inputs(inputs), strict=True):
        steps += [make_late(maker, t, inputs[name]) for name, t in kept.items()] + [call]

    def run() -> None:
        for _ in range(10):
            for step in steps:
                step()

    graph = torch.cuda.CUDAGraph()
    if in_graph:
        with torch.cuda.graph(graph):
            run()
    for _ in range(5):
        calls.fill_with_nan()
        torch.cuda.synchronize()
        graph.replay() if in_graph else run()
        assert equal(calls.results(), wanted)


def test_a_graph(calls: Calls, wanted: list[torch.Tensor]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            for call in calls.overlapping:
                call()
    for replays in (1, CALLS):
        calls.fill_with_nan()
        for _ in range(replays):
            graph.replay()
        assert equal(calls.results(), wanted)
