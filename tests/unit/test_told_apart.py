"""A kernel whose source tests which compiler compiles it is refused.

Its host run would run other code than the GPU.
"""

from __future__ import annotations

import pytest

from kgen.model.artifact import Rendered
from kgen.trial.told_apart import told_apart


def reason(source: str) -> str:
    return told_apart(Rendered("kernel", source, "digest"))


@pytest.mark.parametrize(
    "line",
    [
        "#if KGEN_HOST",
        "__attribute__((no_sanitize_coverage)) void f();",
        "#ifdef __CUDA_ARCH__",
        "#if defined(__CUDACC_RTC__)",
        "#ifndef __SANITIZE_ADDRESS__",
        "#if __has_feature(address_sanitizer)",
        "#if KGEN_\\\nHOST",
        'const char* name = __FILE__;',
        "#ifdef __ELF__",
        "#if defined(__SSE2__)",
        "#if __cplusplus > 201703L",
        "#if KGEN_ARCH == 0",
        "#ifdef _GLIBCXX_RELEASE",
        "#ifdef linux",
        "if (clock64() % 1024 == 7) return;",
        "if (clock() % 1024 == 7) return;",
        "if (__builtin_ia32_rdtsc() % 1024 == 7) return;",
        "++errno;",
        "if (sizeof(long double) == 16) kgen::sync_block();",
        "constexpr bool kHost = sizeof(wchar_t) == sizeof(__PRETTY_FUNCTION__);",
    ],
)  # fmt: skip
def test_it_is_refused(line: str) -> None:
    assert reason(f"{line}\nint x;\n#endif").startswith("the kernel asks who compiles it: ")


@pytest.mark.parametrize(
    "source",
    [
        "// KGEN_HOST is 1 here\nextern \"C\" __global__ void f() {}",
        "#if !defined(__CUDACC__)\n#include <stdio.h>\n#endif\nvoid f();",
        "#if kThreads > 32\nint x;\n#endif",
        "__device__ __forceinline__ float f(const float* __restrict__ x);",
        "extern \"C\" __global__ void __launch_bounds__(64) __cluster_dims__(2, 1, 1) f();",
        "__shared__ __align__(128) float x[4]; __syncthreads();",
    ],
)
def test_it_passes(source: str) -> None:
    assert reason(source) == ""


def test_an_include_beside_code_does_not_hide_it() -> None:
    assert reason("#if KGEN_HOST\n#include <stdio.h>\nint x;\n#endif")
