"""wkv5's and wkv6's backward pass in slices of a head's keys and values.

Heads here are smaller than those that `chunk_loop_slices` is for, and their slices have as few
features as one product takes. The cases cover each dtype and form of w, packed sequences with empty
ones, states, a partial last chunk, unequal K and V, and slices whose number of features is no
multiple of 16.
"""

from __future__ import annotations

import pytest
from test_host import H200, demand_verified
from test_sequential_chunks import LARGE, STATES
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.problem import parse_problem
from kgen.search.feasible import enumerate_feasible

PACKED = "cu_seqlens_dtype=int32"
# Operator, problem, number of key slices and of value slices, parameters that differ from the
# config of the test below.
CASES: tuple[tuple[str, str, int, int, dict[str, Value]], ...] = (
    ("wkv6", f"B=2,T=75,H=2,K=32,V=32,dtype=bf16,w_dtype=fp32,{STATES}", 2, 2, {}),
    ("wkv6", f"B=1,T=70,H=3,K=48,V=32,dtype=fp16,decay_form=raw,{STATES}", 3, 1,
     {"level_scores": True}),
    ("wkv6", "B=1,T=66,H=2,K=16,V=96,dtype=fp32,decay_form=decay", 1, 3, {}),
    ("wkv6", f"B=1,N=5,T=90,H=2,K=32,V=64,dtype=bf16,{PACKED},{STATES}", 2, 2, {}),
    ("wkv6", f"B=1,N=4,T=90,H=2,K=40,V=48,dtype=bf16,{PACKED},{STATES}", 2, 2,
     {"sequential_chunks": True, "copy_bytes": 8}),
    ("wkv6", f"B=1,T=130,H=1,K=64,V=64,dtype=bf16,{STATES}", 4, 2,
     {"sequential_chunks": True, "level_scores": True, "pdl": True, "chunk": 64}),
    ("wkv6", "B=1,T=40,H=1,K=34,V=66,dtype=bf16,w_dtype=bf16,decay_form=raw", 2, 3,
     {"copy_bytes": 2, "level_scores": True}),
    ("wkv5", f"B=2,T=75,H=2,K=32,V=32,dtype=bf16,w_dtype=fp32,{STATES}", 2, 2,
     {"level_scores": True}),
    ("wkv5", "B=1,T=70,H=2,K=32,V=48,dtype=fp32,decay_form=decay", 2, 3,
     {"sequential_chunks": True}),
    ("wkv5", f"B=1,N=6,T=80,H=2,K=32,V=32,dtype=fp16,decay_form=raw,{PACKED}", 2, 1, {}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "text", "key_slices", "value_slices", "changed"), one_of(2, CASES)
)
def test_slices_of_heads(
    operator: str, text: str, key_slices: int, value_slices: int, changed: dict[str, Value]
) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("backward", "chunk_loop_slices")
    problem = parse_problem(text, entry.operator.signature)
    choices: dict[str, Value] = {
        "chunk": 32, "block_v": 16, "stages": 2, "min_blocks": 1, "copy_bytes": 16,
        "sequential_chunks": False, "key_slices": key_slices, "value_slices": value_slices,
    }  # fmt: skip
    demand_verified(entry, variant, problem, variant.config(choices | changed), LARGE)


@pytest.mark.parametrize("operator", ["wkv5", "wkv6"])
@pytest.mark.parametrize(
    "text",
    [
        "B=2,T=1024,H=64,K=256,V=256,dtype=bf16,w_dtype=fp32",
        "B=4,T=512,H=8,K=192,V=192,dtype=bf16,decay_form=raw",
        f"B=1,N=8,T=4096,H=16,K=256,V=256,dtype=bf16,{PACKED},{STATES}",
        "B=4,T=512,H=8,K=160,V=256,dtype=fp16",
        "B=4,T=512,H=8,K=256,V=256,dtype=fp32",
        "B=1,T=100,H=4,K=132,V=200,dtype=bf16",
    ],
)
def test_large_heads_have_tensor_core_configs(operator: str, text: str) -> None:
    entry = open_catalogue().entry(operator)
    signature = entry.operator.signature
    problem = parse_problem(text, signature)
    variant = entry.space.variant("backward", "chunk_loop_slices")
    found = enumerate_feasible([variant], signature.pass_named("backward"), problem, H200)
    assert found.configs
