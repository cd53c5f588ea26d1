"""A small operator, `scale`, for tests of search-space files: y[m, n] = a * x[m, n] * w[n]."""

from __future__ import annotations

from pathlib import Path

from kgen.catalogue.spaces import load_space
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.model.space import Space

SIGNATURE = Signature(
    dims=(Dim("M", "rows"), Dim("N", "columns")),
    dtypes=(DTypeField("dtype", ("fp32", "fp16", "bf16")),),
    passes=(
        Pass(
            "forward",
            inputs=(
                Tensor("x", ("M", "N"), free_strides=("M",)),
                Tensor("w", ("N",), dtype="fp32"),
            ),
            outputs=(Tensor("y", ("M", "N")),),
            scalars=(Scalar("a", 1.0),),
        ),
    ),
)

PARAMETERS = "const T* x, const float* w, T* y, kgen::i64 N, kgen::i64 x_stride_M, float a"
TEMPLATE = f"""\
using T = ${{dtype}};

extern "C" __global__ void __launch_bounds__(${{threads}})
scale_forward({PARAMETERS}) {{
}}
"""

# The variant that every pass needs, the last variant of a file.
NAIVE = """\
    naive:
      doc: An element per thread.
      params:
        threads: [128]
      launch:
        - {kernel: scale_forward, grid: M, block: threads}
      safe: {threads: 128}
"""


def load(
    folder: Path, text: str, *, family: str = "", templates: dict[str, str] | None = None
) -> Space:
    """Load `search_spaces/scale.yaml` with this text.

    Args:
        folder: Where files are written.
        text: Text of the file.
        family: Text of `families/scales.yaml`; the file is not written if the text is empty.
        templates: Variant -> text of its template. Other variants have `TEMPLATE`.
    """
    file = folder / "search_spaces" / "scale.yaml"
    (file.parent / "families").mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if family:
        (file.parent / "families" / "scales.yaml").write_text(family, encoding="utf-8")
    for name in ("scale", "scales"):
        (folder / "templates" / name).mkdir(parents=True, exist_ok=True)
        for variant in ("naive", "example", "other"):
            template = folder / "templates" / name / f"forward_{variant}.cu.jinja"
            template.write_text((templates or {}).get(variant, TEMPLATE), encoding="utf-8")
    return load_space(file, "scale", SIGNATURE, templates=folder / "templates")


def with_variant(entries: str, *, head: str = "", name: str = "example") -> str:
    """The text of a file with a variant that has these entries, and the naive variant.

    `doc`, `params` (threads) and `launch` (a block per row) have defaults if they are left out.
    """
    keys = {line.partition(":")[0] for line in entries.splitlines() if line[:1].isalpha()}
    added = {
        "doc": "doc: An example.\n",
        "params": "params: {threads: [128, 256]}\n",
        "launch": "launch: [{kernel: scale_forward, grid: M, block: threads}]\n",
    }
    body = entries + "".join(text for key, text in added.items() if key not in keys)
    indented = "".join(f"      {line}" if line.strip() else line for line in body.splitlines(True))
    return f"operator: scale\n{head}passes:\n  forward:\n    {name}:\n{indented}{NAIVE}"
