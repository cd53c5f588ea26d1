"""A library for the host with families of kgen's own operators, from rows without measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgen.build.render import Renderer
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.emit import SafeKernel, Winner, emit
from kgen.emit.untuned import untuned_safe_kernels
from kgen.model.config import Config, Value
from kgen.model.problem import parse_problem
from kgen.model.record import Fate, Record, Timing

# By operator: the problem and the variant of the row, and a config that is legal on the host.
ROWS: dict[str, tuple[str, str, dict[str, Value]]] = {
    "rmsnorm": (
        "M=8,N=64,dtype=fp32", "two_pass", {"threads": 32, "vec": 1, "unroll": 1},
    ),
    "wkv6": (
        "B=1,T=40,H=2,K=16,V=16,dtype=fp32,w_dtype=fp32", "chunk_halving",
        {"copy_bytes": 16, "min_blocks": 1, "chunk": 16, "value_tiles": 1, "value_warps": 1,
         "key_warps": 1, "stages": 3, "buffers": 1, "lane_keys": 1, "segments": 1},
    ),
    "wkv6_decode": (
        "B=2,S=3,T=1,H=2,K=16,V=16,dtype=fp32,state_indices_dtype=int64", "warp_state",
        {"threads": 32, "split": 8, "tile": 4, "run": 2, "order": "values"},
    ),
}


def host_library(
    folder: Path, include_dir: Path, operators: Sequence[str] = ("rmsnorm", "wkv6")
) -> Path:
    """Emit the forward passes of operators, each with a row and families; return the folder."""
    for name in operators:
        entry = open_catalogue().entry(name)
        emit(folder, [_winner(entry, include_dir)], _safe(entry, include_dir), include_dir, entry)
    return folder


def _winner(entry: Entry, include_dir: Path) -> Winner:
    text, variant_name, values = ROWS[entry.operator.name]
    problem = parse_problem(text, entry.operator.signature)
    variant = entry.space.variant("forward", variant_name)
    config = variant.config({p.name: values.get(p.name, p.default or p.choices[0])
                             for p in variant.params})
    rendered = Renderer(include_dir).render(
        entry.operator.name, entry.templates, variant, config, problem)
    record = Record(
        key=problem.digest, operator=entry.operator.name, pass_name="forward",
        problem=str(problem), gpu="host", config=Config(config.variant, config.values),
        fate=Fate.VERIFIED, timing=Timing(10.0, 9.0, 11.0, 50, "test"),
        when="2026-01-01T00:00:00Z",
    )
    return Winner(entry.operator, "forward", problem, profile_named("host"), variant, config,
                  rendered, None, "host", record)


def _safe(entry: Entry, include_dir: Path) -> list[SafeKernel]:
    """The safe kernels of the forward pass, without the unused fp16 and packed sequences."""
    return [
        kernel for kernel in untuned_safe_kernels(entry, include_dir)
        if kernel.pass_name == "forward" and kernel.dtypes["dtype"] != "fp16"
        and kernel.dtypes.get("cu_seqlens_dtype", "none") == "none"
    ]
