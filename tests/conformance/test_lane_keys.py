"""wkv's chunk_halving with two keys of four steps per lane.

`test_host.py` draws configs of all parameters. Here every case has this layout: each dtype and form
of w, packed sequences, states, segments, and a partial last chunk.
"""

from __future__ import annotations

import pytest
from test_host import ROOMY, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.problem import parse_problem

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
CONFIG: dict[str, Value] = {
    "chunk": 16, "value_tiles": 1, "value_warps": 2, "key_warps": 1, "stages": 4, "buffers": 2,
    "copy_bytes": 4, "segments": 1, "min_blocks": 1, "lane_keys": 2,
}  # fmt: skip
ONE_BUFFER: dict[str, Value] = {"buffers": 1, "stages": 3}
# With 67 steps the last chunk is partial; with 12 keys the last tile of 16 keys is partial.
CASES: tuple[tuple[str, str, dict[str, Value]], ...] = (
    ("wkv6", "B=1,T=67,H=2,K=64,V=32,dtype=bf16,w_dtype=fp32", {"copy_bytes": 16}),
    ("wkv6", f"B=2,T=67,H=2,K=12,V=20,dtype=bf16,w_dtype=fp32,{STATES},decay_form=raw", ONE_BUFFER),
    ("wkv6", "B=1,T=150,H=2,K=32,V=16,dtype=bf16,decay_form=decay",
     {"value_warps": 1, "key_warps": 2, "segments": 2}),
    ("wkv6", f"B=1,N=5,T=67,H=2,K=16,V=12,dtype=fp16,{STATES},cu_seqlens_dtype=int32",
     {"value_warps": 1}),
    ("wkv6", "B=1,T=67,H=1,K=36,V=16,dtype=fp32", ONE_BUFFER),
    ("wkv5", "B=1,N=3,T=67,H=2,K=16,V=8,dtype=bf16,cu_seqlens_dtype=int64,decay_form=decay", {}),
    ("wkv5", "B=1,T=67,H=2,K=32,V=16,dtype=fp16,decay_form=raw", {**ONE_BUFFER, "segments": 2}),
    ("wkv5", f"B=1,T=33,H=2,K=32,V=64,dtype=bf16,w_dtype=fp32,{STATES}", {"value_warps": 4}),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "changed"), CASES)
def test_two_keys_per_lane(operator: str, text: str, changed: dict[str, Value]) -> None:
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant("forward", "chunk_halving"), entry.operator.signature
    problem, config = parse_problem(text, signature), variant.config({**CONFIG, **changed})
    demand_verified(entry, variant, problem, config, ROOMY)
