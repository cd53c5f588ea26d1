"""Representative configs of every variant cross-compile for three generations of GPUs."""

from __future__ import annotations

import pytest
from tiers import one_of

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.errors import EmptySpaceError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem, parse_problem
from kgen.model.space import Variant
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import code_of
from kgen.search.feasible import enumerate_feasible
from kgen.tune.resources import MAX_SPILL_BYTES

GPUS = ("a100", "h200", "rtx_5090")
CONFIGS = 3
# Kernels that may spill as much as a tune admits. The spills of the chunk loops are in the path for
# the last steps, which one chunk of a sequence takes. Without these spills all other chunks take
# longer (decision 0015). The transforms of `fft` hold all points of a block in registers; with more
# threads each would hold fewer points and exchange them more often (decision 0030). wkv7's
# `warp_specialized`, its form with segments and `warp_specialized_tf32` have 128 registers for two
# blocks per SM; they spill in the producers, whose warps are not the slower ones (decisions 0043,
# 0047, 0048 and 0053).
MAY_SPILL = {
    ("chunk_loop", "wkv_backward_chunks"),
    ("chunk_loop_packed", "wkv_backward_chunks"),
    ("chunk_loop_slices", "wkv_backward_chunks"),
    ("fft", "timex_forward"),
    ("warp_specialized", "wkv7_forward"),
    ("warp_specialized", "wkv7_backward_columns"),
    ("warp_specialized_segments", "wkv7_forward"),
    ("warp_specialized_segments", "wkv7_backward_columns"),
    ("warp_specialized_tf32", "wkv7_forward"),
    ("fft", "timex_backward_k"),
    ("fft", "timex_backward_w"),
}
# Kernels with arrays in local memory that only steps outside the usual path read. In other kernels
# such an array is a mistake: the compiler put a whole class into local memory because it had a
# reference to one of its own members, and every access to the class was a memory access (decision
# 0029).
MAY_HAVE_LOCAL_ARRAYS = {
    ("anchored", "wkv4_backward"),
    ("anchored", "wkv4_part_gradients"),
    ("naive", "wkv4_backward"),
    ("split_t", "linear_attention_forward"),
}
LOCAL_BYTES = 64  # allowed stack frame besides spills: a few addresses are not such an array

each_operator = pytest.mark.parametrize("operator", open_catalogue().names)


def configs_of(
    entry: Entry, variant: Variant, gpu: GpuProfile, count: int
) -> list[tuple[Problem, Config]]:
    """A config for each of the first `count` default problems that allow one."""
    pass_ = entry.operator.signature.pass_named(variant.pass_name)
    found: list[tuple[Problem, Config]] = []
    for text in entry.operator.default_problems(variant.pass_name, on_host=False):
        problem = parse_problem(text, entry.operator.signature)
        try:
            configs = enumerate_feasible([variant], pass_, problem, gpu).configs
        except EmptySpaceError:
            continue
        found.append((problem, configs[len(found) * len(configs) // CONFIGS]))
        if len(found) == count:
            break
    return found


def cross_compile(operator: str, gpu_name: str, configs: slice) -> None:
    """Compile the chosen configs of each variant; none may spill."""
    entry, gpu = open_catalogue().entry(operator), profile_named(gpu_name)
    renderer = Renderer(include_dir())
    requests, variants = [], []
    for variant in entry.space.variants:
        found = configs_of(entry, variant, gpu, configs.stop)
        # A variant may need hardware of newer GPUs, but each variant must have a config on an H200.
        assert found or gpu_name != "h200", f"{variant.name}: no default problem allows it"
        for problem, config in found[configs]:
            rendered = renderer.render(operator, entry.templates, variant, config, problem)
            requests.append(BuildRequest(rendered, gpu.arch))
            variants.append(variant.name)
    compiler = open_compiler("nvrtc", [include_dir()])
    builds = zip(requests, variants, compiler.build(requests), strict=True)
    for request, variant_name, built in builds:
        assert isinstance(built, Artifact), f"{request.rendered.name}: {built}"
        assert built.resources, "the compiler's resource report was not understood"
        digests = code_of(read_file(built.path)).functions
        assert digests.keys() == {kernel for kernel, _ in built.resources}
        for kernel, used in built.resources:
            most = MAX_SPILL_BYTES if (variant_name, kernel) in MAY_SPILL else 0
            assert used.spill_bytes <= most, f"{request.rendered.source[:400]}\n{kernel}: {used}"
            assert 0 < used.registers <= 255
            frame = used.stack_bytes - used.spill_bytes
            assert frame <= LOCAL_BYTES or (variant_name, kernel) in MAY_HAVE_LOCAL_ARRAYS, (
                f"{request.rendered.source[:400]}\n{kernel}: {used}")
    compiler.close()


# The quick tier has one architecture, because each takes minutes to compile.
@pytest.mark.parametrize(
    "gpu_name",
    [pytest.param(gpu, marks=[pytest.mark.quick] if gpu == "h200" else []) for gpu in GPUS],
)
@each_operator
def test_one_config_cross_compiles_without_spills(operator: str, gpu_name: str) -> None:
    cross_compile(operator, gpu_name, slice(0, 1))


# More kernels of the same templates: the tiers have them for one architecture.
@pytest.mark.parametrize("gpu_name", one_of(len(GPUS), sorted(GPUS, key="h200".__ne__)))
@each_operator
def test_more_configs_cross_compile_without_spills(operator: str, gpu_name: str) -> None:
    cross_compile(operator, gpu_name, slice(1, CONFIGS))
