"""The digest of machine code: blind to names and comments, not to anything that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem
from kgen.runtime import nvrtc
from kgen.runtime.code_digest import Code, CubinError, code_of, globals_used

pytestmark = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")

KERNELS = """\
#include "part.cuh"
struct Shape { static constexpr int kWidth = 4; static constexpr int kUnread = 7; };
__device__ const float table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__constant__ float weights[4] = {1, 2, 3, 4};

extern "C" __global__ __launch_bounds__(128) void scale(float* y, long long i, float by) {
    __shared__ float staged[128];
    staged[threadIdx.x] = y[i] * by + table[threadIdx.x & 7] + weights[threadIdx.x & 3];
    __syncthreads();
    y[i] = halved(staged[127 - threadIdx.x]) + Shape::kWidth;
}

extern "C" __global__ void divide(float* y, long long i) {
    for (long long k = 0; k < i; ++k) y[k] = y[k] * y[i / (k + 3)];
}
"""
PART = "__device__ inline float halved(float x) { return 0.5f * x; }\n"


def compiled(folder: Path, source: str = KERNELS, part: str = PART, arch: str = "sm_90a") -> Code:
    """The digest of a source that includes `part.cuh`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = source.partition('"')[2].partition('"')[0]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(part)
    return code_of(nvrtc.compile_cubin(source, "test.cu", arch, [str(folder)])[0])


SAME: dict[str, Callable[[str], str]] = {
    "a kernel's name": lambda s: s.replace("scale", "multiply_and_add"),
    "the order of kernels by name": lambda s: s.replace("divide", "zz").replace("scale", "aa"),
    "other order by name": lambda s: s.replace("divide", "aa").replace("scale", "zz"),
    "a variable's name": lambda s: s.replace("staged", "first_in_the_alphabet"),
    "names of globals": lambda s: s.replace("table", "zero").replace("weights", "alpha"),
    "a class's name": lambda s: s.replace("Shape", "Problem"),
    "a comment": lambda s: "// says something\n\n" + s.replace("{\n", "{  // and more\n"),
    "a constant that nobody reads": lambda s: s.replace("kUnread = 7", "kUnread = 9"),
    "a header's place": lambda s: s.replace('"part.cuh"', '"deeper/half.cuh"'),
    "who includes whom": lambda s: s.replace('#include "part.cuh"', PART),
}
CHANGED: dict[str, Callable[[str], str]] = {
    "an instruction": lambda s: s.replace("y[k] * y[i", "y[k] + y[i"),
    "an immediate": lambda s: s.replace("kWidth = 4", "kWidth = 5"),
    "a value in memory": lambda s: s.replace("{1, 2, 3, 4, 5, 6,", "{1, 2, 3, 4, 5, 7,"),
    "a value in a constant bank": lambda s: s.replace("{1, 2, 3, 4}", "{1, 2, 3, 5}"),
    "the length of a global": lambda s: s.replace("table[8]", "table[9]"),
    "shared memory": lambda s: s.replace("staged[128]", "staged[160]"),
    "launch bounds": lambda s: s.replace("bounds__(128)", "bounds__(256)"),
    "registers": lambda s: s.replace("bounds__(128)", "bounds__(128, 12)"),
    "a parameter's type": lambda s: s.replace("float* y, long long i)", "float* y, int i)"),
    "one kernel less": lambda s: s[: s.index('extern "C" __global__ void divide')],
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_names_do_not_count(tmp_path: Path, arch: str) -> None:
    wanted = compiled(tmp_path / "before", arch=arch)
    for place, (what, change) in enumerate(SAME.items()):
        assert change(KERNELS) != KERNELS, what
        found = compiled(tmp_path / str(place), change(KERNELS), arch=arch)
        assert found.digest == wanted.digest, what
        assert sorted(found.functions.values()) == sorted(wanted.functions.values()), what


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_what_runs_counts(tmp_path: Path, arch: str) -> None:
    seen = {compiled(tmp_path / "before", arch=arch).digest: "nothing"}
    for place, (what, change) in enumerate(CHANGED.items()):
        assert change(KERNELS) != KERNELS, what
        found = compiled(tmp_path / str(place), change(KERNELS), arch=arch)
        assert found.digest not in seen, f"{what}: as with {seen.get(found.digest)}"
        seen[found.digest] = what


def test_a_header_counts_and_a_change_names_its_function(tmp_path: Path) -> None:
    before = compiled(tmp_path / "before")
    after = compiled(tmp_path / "after", part=PART.replace("0.5f", "0.25f"))
    assert before.digest != after.digest
    assert before.functions["scale"] != after.functions["scale"]
    assert before.functions["divide"] == after.functions["divide"]


def test_architectures_differ(tmp_path: Path) -> None:
    digests = {compiled(tmp_path, arch=arch).digest for arch in ("sm_80", "sm_90a", "sm_120a")}
    assert len(digests) == 3


def test_a_rendered_kernel_survives_a_comment_in_every_header(tmp_path: Path) -> None:
    """The device library as it is, each header with a comment on top and one at its end."""
    for header in include_dir().rglob("*.cuh"):
        copy = tmp_path / header.relative_to(include_dir())
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(f"// more\n{header.read_text()}/* and\n more */\n")
    entry = open_catalogue().entry("linear_attention")
    variant = entry.space.safe_variant("forward")
    assert variant.safe is not None
    problem = parse_problem("B=1,H=1,T=64,E=32,M=32,dtype=bf16", entry.operator.signature)
    rendered = Renderer(include_dir()).render(
        "linear_attention", entry.templates, variant, variant.safe, problem)
    found = [code_of(nvrtc.compile_cubin(rendered.source, "x.cu", "sm_90a", [str(folder)])[0])
             for folder in (include_dir(), tmp_path)]
    assert found[0] == found[1]


@pytest.mark.parametrize("image", [b"", b"no ELF at all", b"\x7fELF" + bytes(200)])
def test_what_is_no_cubin_is_refused(image: bytes) -> None:
    with pytest.raises(CubinError):
        code_of(image)


def test_a_cut_cubin_is_refused() -> None:
    cubin, _ = nvrtc.compile_cubin('extern "C" __global__ void k(float* y) { *y = 1; }', "k.cu",
                                   "sm_90a")
    with pytest.raises(CubinError):
        code_of(cubin[: len(cubin) // 2])


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("static int calls; y[0] = ++calls;", 1),
        ("y[0] = atomicAdd(&kept, 1);", 1),
        ("y[0] = weights[i];", 0),
        ("constexpr int table[3] = {1, 2, 3}; y[0] = table[i];", 0),
        # Encoded like an operand of bank 4, in which addresses of globals are.
        ('asm volatile("bar.sync 4, 256;"); y[0] = i;', 0),
        ('asm volatile("bar.sync 4, 256;"); y[0] = atomicAdd(&kept, 1);', 1),
    ],
)
def test_globals_that_instructions_refer_to(tmp_path: Path, body: str, names: int) -> None:
    source = (
        "static __device__ int kept = 3;\n__constant__ int weights[4];\n"
        f'extern "C" __global__ void f(int* y, int i) {{ {body} }}'
    )
    cubin = nvrtc.compile_cubin(source, "test.cu", "sm_90a", [str(tmp_path)])[0]
    assert len(globals_used(cubin)) == names
    assert list(code_of(cubin).functions) == ["f"]
