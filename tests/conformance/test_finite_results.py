"""Finite results come from tensor cores, not from the step-by-step fallback.

Kernels on tensor cores recompute results that are not finite step by step, so that NaN and Inf
spread as in the definition. On the host a word of shared memory that no thread wrote may be NaN. A
kernel that reads such a word would recompute every sequence and be right on the host, but slow or
wrong on a GPU. These tests therefore remove the fallback from the headers; then only inputs that
are not finite may fail.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_host import BY_RANK, run_configs

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.model.config import Config, Value
from kgen.model.problem import parse_problem
from kgen.model.record import Fate

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
HALVES = "dtype=bf16,w_dtype=bf16"
REPEATS = re.compile(r"if \(((?:Base::)?block_any_nonfinite(?:<[^>]*>)?\(nonfinite\))\)")


@dataclass(frozen=True)
class Kernel:
    """A variant whose kernels recompute results that are not finite.

    Attributes:
        headers: Headers in `kgen/`, each with a fallback.
        problems: Dtypes and options of small problems.
        values: A config.
    """

    operator: str
    pass_name: str
    variant: str
    headers: tuple[str, ...]
    problems: tuple[str, ...]
    values: dict[str, Value]


ROLES: dict[str, Value] = {"warps": 2, "row_warps": 4, "stages": 2, "vec": 8, "min_blocks": 1}
ROWS: dict[str, Value] = {"chunk_warps": 2, "chunk_blocks": 1}
HALVING: dict[str, Value] = {
    "chunk": 16, "value_tiles": 1, "value_warps": 2, "key_warps": 1, "stages": 5, "buffers": 2,
    "copy_bytes": 16, "min_blocks": 1, "segments": 1, "lane_keys": 2,
}  # fmt: skip
GROUPS: dict[str, Value] = {
    "groups": 2, "stages": 2, "copy_bytes": 16, "min_blocks": 1, "gradient_terms": 1, "pdl": False,
}  # fmt: skip
LOOP: dict[str, Value] = {
    "chunk": 16, "value_tiles": 1, "value_warps": 2, "key_warps": 1, "stages": 3, "copy_bytes": 16,
    "min_blocks": 1, "segments": 1,
}  # fmt: skip
KERNELS = (
    Kernel("wkv7", "forward", "warp_specialized", ("wkv7/specialized_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEFORE}", "dtype=bf16,decay_form=clamp"), ROLES),
    Kernel("wkv7", "forward", "warp_specialized_segments", ("wkv7/specialized_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEFORE}", "dtype=bf16,decay_form=clamp"),
           ROLES | {"segments": 3, "state_warps": 4}),
    Kernel("wkv7", "forward", "warp_specialized_segments", ("wkv7/group_loop.cuh",),
           (f"{HALVES},decay_form=clamp,{BEFORE}", "dtype=bf16,decay_form=clamp"),
           ROLES | {"warps": 4, "segments": 3, "state_warps": 4, "quotients": 1, "warpgroups": 1}),
    Kernel("wkv7", "forward", "warp_specialized_tf32", ("wkv7/tf32_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEHIND}",
            f"dtype=fp16,w_dtype=fp16,decay_form=clamp,{BEFORE},{BEHIND}",
            "dtype=bf16,decay_form=log"), ROLES),
    Kernel("wkv7", "forward", "warp_specialized_tf32", ("wkv7/tf32_loop.cuh",),
           (f"dtype=fp32,decay_form=log,{BEFORE},{BEHIND}", "dtype=fp32,decay_form=raw"),
           ROLES | {"vec": 4}),
    Kernel("wkv7", "forward", "warpgroups", ("wkv7/group_loop.cuh",),
           (f"{HALVES},decay_form=clamp,{BEFORE}", "dtype=bf16,decay_form=clamp"),
           {"vec": 8, "min_blocks": 1}),
    Kernel("wkv7", "backward", "warp_specialized",
           ("wkv7/specialized_loop.cuh", "wkv7/chunk_rows.cuh"),
           (f"{HALVES},decay_form=log,{BEHIND}",), ROLES | ROWS),
    Kernel("wkv7", "backward", "warp_specialized_fp64",
           ("wkv7/f64_loop.cuh", "wkv7/f64_rows.cuh"),
           (f"dtype=bf16,decay_form=log,{BEFORE},{BEHIND}", "dtype=fp16,decay_form=clamp"),
           {"warps": 2, "row_warps": 2, "vec": 8, "min_blocks": 1} | ROWS),
    Kernel("wkv7", "backward", "warpgroups_fused",
           ("wkv7/group_loop.cuh", "wkv7/fused_loop.cuh"),
           (f"{HALVES},decay_form=clamp,{BEHIND}", f"{HALVES},decay_form=clamp"),
           {"vec": 8, "min_blocks": 1}),
    Kernel("wkv6", "forward", "warp_specialized", ("wkv6/specialized_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEFORE}", "dtype=bf16,decay_form=log"),
           ROLES | {"stages": 4}),
    Kernel("wkv5", "forward", "warp_specialized", ("wkv6/specialized_loop.cuh",),
           ("dtype=bf16,decay_form=raw",), ROLES | {"stages": 4}),
    Kernel("wkv6", "forward", "warp_specialized_segments", ("wkv6/specialized_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEFORE}", "dtype=bf16,decay_form=log"),
           ROLES | {"segments": 3}),
    Kernel("wkv6", "backward", "chunk_halving", ("wkv6/gradient_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEHIND}",), GROUPS),
    Kernel("wkv6", "backward", "chunk_halving_segments", ("wkv6/gradient_loop.cuh",),
           (f"{HALVES},decay_form=raw,{BEHIND}",), GROUPS | {"segments": 3}),
    Kernel("wkv6", "forward", "chunk_halving", ("chunked/chunk_halving.cuh",),
           (f"dtype=bf16,decay_form=log,{BEFORE}", f"dtype=fp16,decay_form=raw,{BEHIND}"), HALVING),
    Kernel("linear_attention", "forward", "chunk_loop", ("chunked/chunk_loop.cuh",),
           ("dtype=bf16", "dtype=fp32"), LOOP),
)  # fmt: skip


@pytest.mark.parametrize(
    "kernel", KERNELS, ids=[f"{k.operator}-{k.pass_name}-{k.variant}" for k in KERNELS]
)
def test_only_inputs_that_are_not_finite_need_the_repetition(
    kernel: Kernel, tmp_path: Path
) -> None:
    headers = tmp_path / "include"
    shutil.copytree(include_dir(), headers)
    for name in kernel.headers:
        header = headers / "kgen" / name
        text, count = REPEATS.subn(
            r"if (\1 && blockDim.x == 0)", header.read_text(encoding="utf-8")
        )
        assert count >= 1, name
        header.write_text(text, encoding="utf-8")
    entry = open_catalogue().entry(kernel.operator)
    variant = entry.space.variant(kernel.pass_name, kernel.variant)
    config = Config.of(variant.name, kernel.values)
    features = "E=64,M=32" if kernel.operator == "linear_attention" else "K=64,V=32"
    wanted = [
        (parse_problem(f"B=1,H=1,T=100,{features},{more}", entry.operator.signature), config)
        for more in kernel.problems
    ]
    for problem, _, outcome in run_configs(
        entry, variant, "host", wanted, (BY_RANK,), include=headers
    ):
        assert outcome.fate is Fate.WRONG, f"{problem}: inputs that are not finite passed"
        assert re.search(r"inputs '(nonfinite|nan )", outcome.reason), (
            f"{problem}\n{outcome.reason}"
        )
