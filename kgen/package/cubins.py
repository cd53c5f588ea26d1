"""Compile a library's kernels for architectures that need not be in this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.build import Compiler
from kgen.errors import BuildError, OptionError, ToolchainError
from kgen.model.artifact import BuildFailure, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.runtime import nvrtc
from kgen.runtime.cache import read_file
from kgen.runtime.integrity import cubin_sm

_SUFFIXES_FROM = {"": 0, "a": 90, "f": 100}  # suffix -> the first architecture that has it


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A CUDA source of the library.

    Attributes:
        operator: Name of the operator.
        stem: File name in `kernels/` without its ending.
        text: The source.
    """

    operator: str
    stem: str
    text: str


def check_arch(arch: str) -> int:
    """Return ten times the compute capability of an architecture, after checking that NVRTC has it.

    Raises:
        OptionError: If there is no such architecture.
        ToolchainError: If this NVRTC does not support the architecture, or NVRTC is missing.
    """
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    if match is None or int(match[1]) < _SUFFIXES_FROM[match[2]]:
        raise OptionError(f"--arch: '{arch}' is not an architecture\n  examples: sm_80, sm_90a, "
                          "sm_100f; the suffix a exists from sm_90 on, f from sm_100 on")
    try:
        nvrtc.nvrtc().check_arch(arch)
    except nvrtc.NvrtcError as error:
        raise ToolchainError(str(error)) from None
    return int(match[1])


def compile_cubins(
    kernels: Sequence[KernelSource], arch: str, headers: Mapping[str, bytes], compiler: Compiler,
    skip_failures: bool = False,
) -> dict[str, bytes]:
    """Compile sources for one architecture, in the given order.

    Args:
        kernels: The kernels to compile.
        arch: `sm_80`, `sm_90a`.
        headers: Headers by relative path; part of the cache key of a source.
        compiler: NVRTC, opened with these headers.
        skip_failures: Whether to leave out kernels that do not compile.
    Returns:
        Cubins by stem.
    Raises:
        BuildError: If a kernel does not compile for the architecture.
        ToolchainError: If the compiler made code for another architecture.
    """
    wanted = check_arch(arch)
    common = digest_of_text(*(digest_of_text(name, content.hex())
                              for name, content in sorted(headers.items())))
    requests = [
        BuildRequest(
            Rendered(f"{k.operator}/{k.stem}", k.text, digest_of_text(k.text, common)), arch
        )
        for k in kernels
    ]
    cubins: dict[str, bytes] = {}
    for kernel, outcome in zip(kernels, compiler.build(requests), strict=True):
        if isinstance(outcome, BuildFailure) and skip_failures:
            continue
        if isinstance(outcome, BuildFailure):
            raise BuildError(
                f"{kernel.operator}/kernels/{kernel.stem}.cu does not compile for {arch}:\n"
                f"{outcome.message}\n  source: {outcome.source_path}\n"
                f"  next: package without {arch}; such a GPU compiles kernels at their first call"
            )
        image = read_file(Path(outcome.path))
        if cubin_sm(image) != wanted:
            raise ToolchainError(f"NVRTC made code for sm_{cubin_sm(image)} of "
                                 f"{kernel.operator}/{kernel.stem}, but {arch} was requested")
        cubins[kernel.stem] = image
    return cubins
