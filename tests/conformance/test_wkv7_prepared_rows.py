"""wkv7's backward kernel of rows on CUDA cores with inputs prepared in shared memory; w in fp32."""

from __future__ import annotations

import pytest
from test_host import H200, compiled, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.search.feasible import is_feasible

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int64"
BF16, FP16 = "dtype=bf16,w_dtype=fp32", "dtype=fp16,w_dtype=fp32"
# Problem; elements per copy; steps of a chunk; in the second kernel, threads per key and keys per
# block.
CASES = (
    (f"B=1,H=2,T=37,K=64,V=64,{BF16},decay_form=clamp", 8, 16, 8, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{BF16},decay_form=raw,{STATES},{PACKED}", 8, 16, 8, 8),
    (f"B=2,H=1,T=19,K=20,V=36,{FP16},decay_form=log,{STATES}", 4, 8, 4, 8),
    (f"B=2,H=1,T=19,K=18,V=18,{BF16},decay_form=clamp", 2, 8, 8, 8),
    (f"B=1,H=1,T=17,K=7,V=5,{FP16},decay_form=log", 1, 16, 4, 8),
    (f"B=1,H=1,T=67,K=16,V=128,{BF16},decay_form=clamp,{STATES}", 8, 32, 32, 16),
    (f"B=1,N=3,H=1,T=41,K=12,V=40,dtype=fp32,decay_form=raw,{PACKED}", 4, 16, 16, 32),
)  # fmt: skip
FIRST = {"split": 8, "tile": 1, "columns": 8, "tokens": 4, "stages": 2}


@pytest.mark.parametrize(
    ("text", "vec", "chunk", "key_split", "keys"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 3 else ()) for i, case in enumerate(CASES)],
)
def test_prepared_rows(text: str, vec: int, chunk: int, key_split: int, keys: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "block_per_head")
    problem = parse_problem(text, entry.operator.signature)
    values = {"vec": vec, "chunk": chunk, "key_split": key_split, "keys": keys, "prepared": 1}
    demand_verified(entry, variant, problem, Config.of(variant.name, FIRST | values))


@pytest.mark.parametrize(
    "decay_form", ["clamp", *(pytest.param(x, marks=pytest.mark.slow) for x in ("log", "raw"))]
)
def test_three_blocks_per_sm_spill_nothing(decay_form: str) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "block_per_head")
    text = f"B=8,T=4096,H=32,K=64,V=64,{BF16},decay_form={decay_form}"
    problem = parse_problem(text, entry.operator.signature)
    values = {"split": 4, "tile": 4, "columns": 64, "tokens": 8, "stages": 2, "vec": 8}
    rows = {"chunk": 16, "key_split": 8, "keys": 16, "prepared": 3}
    config = Config.of(variant.name, values | rows)
    pass_ = entry.operator.signature.pass_named("backward")
    # Legality only: on an H200 a search prefers fp64 tensor cores.
    assert is_feasible(variant, config, pass_, problem, H200, legality_only=True)
    used = dict(compiled(entry, variant, config, problem).resources)["wkv7_backward_rows"]
    assert used.registers <= 168
    assert used.spill_bytes == 0
