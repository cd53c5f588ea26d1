"""linear_attention's kernels with programmatic dependent launch (PDL).

The host layer runs one kernel after the other. These tests check the results of kernels that
compute something before `griddepcontrol_wait`, and of kernels that wait first. Only a GPU can show
that a kernel waits where it must: `tests/gpu/test_overlap_gpu.py`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping

import pytest
from test_host import H200, HOST, ROOMY, demand_verified

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config, Value
from kgen.model.plan import make_plan
from kgen.model.problem import Problem, parse_problem
from kgen.model.space import Variant
from kgen.runtime import nvrtc
from kgen.search.feasible import is_feasible
from kgen.tune.resources import MAX_SPILL_BYTES

ENTRY = open_catalogue().entry("linear_attention")
SIGNATURE = ENTRY.operator.signature
STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
KEY_SUMS = "initial_key_sum_dtype=fp32,final_key_sum_dtype=fp32,norm_dtype=fp32"
CHUNKS = {
    "chunk": 32, "step_tiles": 1, "block_v": 32, "min_blocks": 1, "copy_bytes": 16,
    "state_keys": 32, "state_values": 16, "state_key_warps": 2, "state_value_warps": 1,
    "batch": 32, "stages": 3,
}  # fmt: skip
SEGMENTS = {
    "chunk": 16, "value_tiles": 1, "value_warps": 2, "key_warps": 1, "stages": 3, "copy_bytes": 16,
    "segments": 4, "min_blocks": 1, "scan_vec": 2,
}  # fmt: skip
SPLIT_T: dict[str, Value] = {
    "head_ctas": 4, "segment": 64, "block_v": 32, "batch": 32, "copy_bytes": 16, "score_terms": 2,
    "min_blocks": 1, "products": "mma",
}  # fmt: skip
WGMMA: dict[str, Value] = {"segment": 128, "block_v": 64, "batch": 64, "products": "wgmma"}
CASES: tuple[tuple[str, str, str, dict[str, Value]], ...] = (
    ("backward", "chunk_parallel", f"B=1,H=1,T=70,E=32,M=64,dtype=bf16,{STATES}",
     {**CHUNKS, "overlap": 2}),
    ("forward", "chunk_scan", f"B=1,H=2,T=150,E=32,M=32,dtype=fp32,{STATES},{KEY_SUMS}",
     {**SEGMENTS, "overlap": 1}),
    ("backward", "chunk_scan", f"B=1,H=1,T=150,E=32,M=32,dtype=bf16,{STATES}",
     {**SEGMENTS, "overlap": 1}),
    ("forward", "split_t", "B=1,H=2,T=150,E=32,M=32,dtype=bf16", {**SPLIT_T, "overlap": 1}),
    ("forward", "split_t", f"B=1,H=2,T=300,E=64,M=64,dtype=bf16,{STATES}",
     {**SPLIT_T, **WGMMA, "overlap": 1}),
)  # fmt: skip
IDS = ["-".join([p, n, *([str(v["products"])] if "products" in v else [])]) for p, n, _, v in CASES]
each_case = pytest.mark.parametrize(("pass_name", "name", "text", "values"), CASES, ids=IDS)


def opened(
    pass_name: str, name: str, text: str, values: Mapping[str, Value]
) -> tuple[Variant, Problem, Config]:
    """A case's variant, problem and config."""
    variant = ENTRY.space.variant(pass_name, name)
    return variant, parse_problem(text, SIGNATURE), variant.config(values)


def needs_sm_90a(values: Mapping[str, Value]) -> bool:
    """Whether a config runs on sm_90a only, neither on older nor on newer architectures."""
    return values.get("products") == "wgmma"


@each_case
def test_is_right_on_the_host(
    pass_name: str, name: str, text: str, values: Mapping[str, Value]
) -> None:
    variant, problem, config = opened(pass_name, name, text, values)
    pass_ = SIGNATURE.pass_named(pass_name)
    gpu = ROOMY if needs_sm_90a(values) else HOST
    assert is_feasible(variant, config, pass_, problem, gpu, legality_only=True)
    plan = make_plan(variant, config, problem, gpu)
    assert [launch.pdl for launch in plan.launches] == [
        name == "split_t", *(True for _ in plan.launches[1:])
    ]  # fmt: skip
    demand_verified(ENTRY, variant, problem, config)


@each_case
def test_is_allowed_from_sm_90_on(
    pass_name: str, name: str, text: str, values: Mapping[str, Value]
) -> None:
    variant, problem, config = opened(pass_name, name, text, values)
    pass_ = SIGNATURE.pass_named(pass_name)
    for gpu, has_pdl in (("a100", False), ("l40s", False), ("h200", True), ("rtx_5090", True)):
        runs = not needs_sm_90a(values) or gpu == "h200"
        for overlap in (0, values["overlap"]):
            tried = variant.config({**values, "overlap": overlap})
            assert is_feasible(
                variant, tried, pass_, problem, profile_named(gpu), legality_only=True
            ) is (runs and (has_pdl or overlap == 0))
    assert config.as_dict()["overlap"] == values["overlap"]


FIRST_WITH_PDL = [
    (entry, variant)
    for entry in map(open_catalogue().entry, open_catalogue().names)
    for variant in entry.space.variants
    if variant.launches[0].pdl is not None
]


@pytest.mark.parametrize(
    ("entry", "variant"),
    FIRST_WITH_PDL,
    ids=[f"{e.operator.name}-{v.pass_name}-{v.name}" for e, v in FIRST_WITH_PDL],
)
def test_a_first_kernel_with_pdl_waits_before_all_else(entry: Entry, variant: Variant) -> None:
    """The unknown kernel before it may use any memory that the first kernel touches."""
    signature = entry.operator.signature
    pass_ = signature.pass_named(variant.pass_name)
    tried = set()
    for text in entry.operator.default_problems(variant.pass_name, on_host=False):
        problem = parse_problem(text, signature)
        for config in variant.first:
            if not is_feasible(variant, config, pass_, problem, H200, legality_only=True):
                continue
            launch = make_plan(variant, config, problem, H200).launches[0]
            rendered = Renderer(include_dir()).render(
                entry.operator.name, entry.templates, variant, config, problem
            )
            first, *others = statements(rendered.source, launch.kernel)
            waits = first.startswith("kgen::griddepcontrol_wait(")
            assert waits is launch.pdl, f"{config.label} begins with {first}"
            lets_go_on = any("griddepcontrol_launch_dependents" in other for other in others)
            assert lets_go_on is launch.pdl, config.label
            tried.add(launch.pdl)
    assert True in tried


def statements(source: str, kernel: str) -> list[str]:
    """The statements of a kernel's body, without comments."""
    code = re.sub(r"//.*", "", source)
    found = re.search(rf"__global__[^;{{]*\b{kernel}\([^{{]*\{{\n(.*?)\n\}}", code, re.DOTALL)
    assert found is not None, kernel
    return [statement.strip() for statement in found[1].split(";")]


@pytest.mark.parametrize(
    ("pass_name", "text"),
    [(p, t) for p, n, t, _ in CASES if n == "chunk_scan"],
    ids=["forward", "backward"],
)
def test_a_kernel_without_pdl_keeps_its_text(pass_name: str, text: str) -> None:
    """Rows and records that are older than the parameter `overlap` remain valid."""
    variant, problem, plain = opened(pass_name, "chunk_scan", text, SEGMENTS)
    overlapping = variant.config({**SEGMENTS, "overlap": 1})
    renderer = Renderer(include_dir())
    before, after = (
        renderer.render("linear_attention", ENTRY.templates, variant, config, problem)
        for config in (plain, overlapping)
    )
    assert "overlap" not in before.source
    assert "kgen::griddepcontrol" not in before.source
    added = [
        line
        for line in after.source.splitlines()
        if "kgen::griddepcontrol" in line or line == '#include "kgen/primitives/pdl.cuh"'
    ]
    calls = [line.partition("(")[0].strip() for line in added]
    assert calls.count("kgen::griddepcontrol_launch_dependents") == 2
    assert calls.count("kgen::griddepcontrol_wait") == 2
    kept = [line for line in after.source.splitlines()[3:] if line not in added]
    assert kept == before.source.splitlines()[3:]


# Kernels with PDL: operator, pass, variant, problem, and the values that differ from the variant's
# first config. chunk_parallel and split_t are not listed: one condition decides in which of two
# places they wait, and an analysis of single branches cannot follow that.
WKV = {"pdl": True, "chunk": 32, "block_v": 32, "stages": 2}
WAITING: tuple[tuple[str, str, str, str, dict[str, Value]], ...] = (
    ("linear_attention", "forward", "chunk_scan", "B=1,H=2,T=2048,E=64,M=64,dtype=bf16",
     {"overlap": 1}),
    ("linear_attention", "backward", "chunk_scan", "B=1,H=2,T=2048,E=64,M=64,dtype=bf16",
     {"overlap": 1}),
    ("wkv6", "backward", "chunk_loop", "B=1,T=256,H=2,K=64,V=64,dtype=bf16",
     {**WKV, "sequential_chunks": False}),
    ("wkv6", "backward", "chunk_loop", "B=1,T=256,H=2,K=64,V=64,dtype=bf16",
     {**WKV, "sequential_chunks": True}),
    ("wkv6", "backward", "chunk_loop_packed",
     "B=1,N=3,T=256,H=2,K=64,V=64,dtype=bf16,cu_seqlens_dtype=int64",
     {**WKV, "sequential_chunks": False}),
    ("wkv6", "backward", "chunk_loop_packed",
     "B=1,N=3,T=256,H=2,K=64,V=64,dtype=bf16,cu_seqlens_dtype=int64",
     {**WKV, "sequential_chunks": True}),
    ("wkv6", "backward", "chunk_halving_segments",
     "B=1,T=2048,H=32,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw", {"pdl": True}),
    ("wkv6", "forward", "warp_specialized_segments", "B=1,T=2048,H=32,K=64,V=64,dtype=bf16",
     {"pdl": True}),
    ("wkv5", "forward", "warp_specialized_segments", "B=1,T=2048,H=32,K=64,V=64,dtype=bf16",
     {"pdl": True, "fixed_parts": False}),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "pass_name", "name", "text", "values"), WAITING)
def test_every_thread_of_a_kernel_with_pdl_waits(
    operator: str, pass_name: str, name: str, text: str, values: dict[str, Value]
) -> None:
    """Every path to the end of the kernel waits, also in threads without work: see pdl.cuh."""
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    problem = parse_problem(text, entry.operator.signature)
    config = variant.config({**variant.first[0].as_dict(), **values})
    plan = make_plan(variant, config, problem, H200)
    renderer = Renderer(include_dir())
    rendered = renderer.render(operator, entry.templates, variant, config, problem)
    kernels = ptx_kernels(rendered.source)
    waiting = [launch.kernel for launch in plan.launches if launch.pdl]
    assert waiting
    for kernel in waiting:
        assert way_around(kernels[kernel], "griddepcontrol.wait") is None, kernel


def ptx_kernels(source: str) -> dict[str, list[str]]:
    """The instructions and labels of each kernel."""
    compiler = nvrtc.nvrtc()
    with nvrtc._Program(compiler, source, "kernel.cu") as program:
        program.compile([
            "--std=c++17", "--gpu-architecture=compute_90a", f"--include-path={include_dir()}"
        ])
        size = ctypes.c_size_t()
        compiler._call("nvrtcGetPTXSize", program.handle, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        compiler._call("nvrtcGetPTX", program.handle, text)
    found = re.findall(
        r"\.visible \.entry (\w+)\(.*?\n\{\n(.*?)\n\}\n", text.value.decode(), re.DOTALL
    )
    return {
        name: [s.strip() for s in re.findall(r"[^;\n]+(?:;|$)", body, re.MULTILINE) if s.strip()]
        for name, body in found
    }


def way_around(body: list[str], needed: str) -> str | None:
    """The last instructions of a path to the kernel's end that lacks `needed`, or None."""
    places = {line[:-1]: i for i, line in enumerate(body) if re.fullmatch(r"\$\w+:", line)}
    assert not any(line.startswith("brx") for line in body)
    waiting, been = [0], set()
    while waiting:
        i = waiting.pop()
        while i < len(body) and i not in been:
            been.add(i)
            line = body[i]
            if line.startswith(needed):
                break
            jump = re.fullmatch(r"(@!?%p\d+ +)?bra(?:\.uni)?[ \t]+(\$\w+);", line)
            if jump:
                waiting.append(places[jump[2]])
                if jump[1] is None:
                    break
            if re.fullmatch(r"(@!?%p\d+ +)?(ret|exit);", line):
                return " ".join(body[max(0, i - 4) : i + 1])
            i += 1
    return None


def test_a_way_around_is_found() -> None:
    """The test above would detect a kernel that ends early."""
    early = """
extern "C" __global__ void kernel(int* out, int n) {
    if (blockIdx.x >= n) return;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    out[blockIdx.x] = 1;
}
"""
    late = early.replace("    if (blockIdx.x >= n) return;\n", "")
    for source, waits in ((early, False), (late, True)):
        way = way_around(ptx_kernels(source)["kernel"], "griddepcontrol.wait")
        assert (way is None) is waits, way


def test_cross_compiles_for_gpus_with_and_without_pdl() -> None:
    renderer = Renderer(include_dir())
    problems = {
        "chunk_parallel": "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
        "chunk_scan": "B=1,H=8,T=4096,E=64,M=64,dtype=fp32,product_dtype=tf32",
        "split_t": "B=1,H=8,T=4096,E=64,M=64,dtype=bf16",
    }
    requests = []
    # wgmma kernels may spill as much as a tune admits: their step-by-step path for segments with
    # NaN or infinity spills, the fast path does not.
    may_spill = []
    for pass_name, name, _, values in CASES:
        variant = ENTRY.space.variant(pass_name, name)
        problem = parse_problem(problems[name], SIGNATURE)
        pass_ = SIGNATURE.pass_named(pass_name)
        config = next(
            c
            for c in variant.first
            if "overlap" in c.as_dict()
            and c.as_dict().get("products") == values.get("products")
            and is_feasible(variant, c, pass_, problem, H200)
        )
        rendered = renderer.render("linear_attention", ENTRY.templates, variant, config, problem)
        archs = ["sm_90a"]
        if needs_sm_90a(values):
            may_spill.append(rendered)
        else:
            archs.append("sm_80")
        requests += [BuildRequest(rendered, arch) for arch in archs]
    compiler = open_compiler("nvrtc", [include_dir()])
    for request, built in zip(requests, compiler.build(requests), strict=True):
        assert isinstance(built, Artifact), f"{request.rendered.name} {request.arch}: {built}"
        for kernel, used in built.resources:
            most = MAX_SPILL_BYTES if request.rendered in may_spill else 0
            assert used.spill_bytes <= most, f"{request.arch} {kernel}: {used}"
    compiler.close()
