"""The machine code of a library's rows, without names: a rename must not change this output.

    python tests/references/library_codes.py generated/kgen_ops > FILE

A line has operator, GPU, pass, dims and dtypes of a row, then the digest of its kernel's machine
code (`kgen.runtime.code_digest`). Variants, parameters and file names are left out. Safe kernels
serve all dims: there is a line for each distinct code of a pass, with the number and a digest of
the dtype combinations that the code serves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kgen.build import open_compiler
from kgen.emit.state import read_safe, read_tables
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import code_of

SAFE_ARCH = "sm_90a"


def codes_of_library(library: Path) -> list[str]:
    """Return the lines of all operators."""
    operators = sorted(path.parent.name for path in library.glob("*/safe.yaml"))
    return [line for operator in operators for line in codes_of_operator(library, operator)]


def codes_of_operator(library: Path, operator: str) -> list[str]:
    """Return the sorted lines of an operator, from shipped cubins or sources compiled with NVRTC.

    Rows of the host are left out, because no machine code is shipped for them.
    """
    folder = library / operator
    tables = [t for t in read_tables(folder / "tables").values() if t.gpu.arch != "host"]
    safe = read_safe(folder / "safe.yaml")
    wanted = {(row.kernel, table.gpu.arch) for table in tables for row in table.rows}
    wanted |= {(row.kernel, SAFE_ARCH) for row in safe}
    codes = _codes(library, folder / "kernels", wanted)
    tuned = [
        f"{operator} {table.gpu.name} {row.pass_name} {_named((*row.dims, *row.dtypes))} "
        f"{codes[row.kernel, table.gpu.arch]}"
        for table in tables
        for row in table.rows
    ]
    served: dict[tuple[str, str], list[str]] = {}
    for row in safe:
        key = row.pass_name, codes[row.kernel, SAFE_ARCH]
        served.setdefault(key, []).append(_named(row.dtypes))
    return sorted(tuned) + sorted(
        f"{operator} safe {pass_name} {len(dtypes)} {digest_of_text(*sorted(dtypes))} {code}"
        for (pass_name, code), dtypes in served.items()
    )


def _named(values: Sequence[tuple[str, object]]) -> str:
    return ",".join(f"{name}={value}" for name, value in values)


def _codes(
    library: Path, kernels: Path, wanted: set[tuple[str, str]]
) -> dict[tuple[str, str], str]:
    """Digests by kernel and architecture."""
    codes = {}
    requests: dict[tuple[str, str], BuildRequest] = {}
    include = library / "_include"
    headers = [text for path in sorted(include.rglob("*.cuh"))
               for text in (str(path.relative_to(include)), path.read_text(encoding="utf-8"))]
    for kernel, arch in sorted(wanted):
        cubin = kernels / f"{kernel}.{arch}.cubin"
        if cubin.exists():
            codes[kernel, arch] = code_of(cubin.read_bytes()).digest
        else:
            text = (kernels / f"{kernel}.cu").read_text(encoding="utf-8")
            digest = digest_of_text(text, *headers)
            rendered = Rendered(f"{kernels.parent.name}/{kernel}", text, digest)
            requests[kernel, arch] = BuildRequest(rendered, arch)
    if requests:
        compiler = open_compiler("nvrtc", [include])
        try:
            built = compiler.build(list(requests.values()))
        finally:
            compiler.close()
        for key, artifact in zip(requests, built, strict=True):
            assert isinstance(artifact, Artifact), f"{key}: {artifact}"
            codes[key] = code_of(read_file(artifact.path)).digest
    return codes


if __name__ == "__main__":
    print("\n".join(codes_of_library(Path(sys.argv[1]))))
