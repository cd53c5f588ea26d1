"""wkv5's and wkv6's backward pass in chunks with scores by halves, and gv, on tensor cores.

`test_host.py` draws configs of all parameters. Here every case has `level_scores`: each dtype and
form of w, packed sequences, states, padding of keys and values, and a partial last chunk.
"""

from __future__ import annotations

import pytest
from test_host import demand_verified
from test_sequential_chunks import CASES, LARGE, PACKED, STATES
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem

# One block per chunk. With 16 value features the scores do not fit in the memory of v.
PARALLEL = (
    ("wkv6", f"B=1,T=150,H=2,K=64,V=64,dtype=bf16,w_dtype=fp32,{STATES}", 64, 64),
    ("wkv6", "B=1,T=70,H=2,K=128,V=32,dtype=bf16,decay_form=raw", 32, 32),
    ("wkv6", "B=1,T=70,H=2,K=32,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw", 64, 64),
    ("wkv6", "B=1,T=70,H=1,K=32,V=16,dtype=fp16,w_dtype=fp32", 64, 16),
    ("wkv5", "B=1,T=100,H=2,K=48,V=33,dtype=bf16,decay_form=decay", 32, 32),
    ("wkv5", "B=1,T=40,H=2,K=16,V=16,dtype=fp32", 32, 16),
)
SCORES = (
    *((*case, "chunk_loop", True) for case in CASES),
    *((*case, "chunk_loop", False) for case in PARALLEL),
    *((*case[:4], "chunk_loop_packed", case[4]) for case in PACKED),
)


@pytest.mark.parametrize(
    ("operator", "text", "chunk", "values", "name", "sequential"), one_of(3, SCORES)
)
def test_scores_by_halves(
    operator: str, text: str, chunk: int, values: int, name: str, sequential: bool
) -> None:
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant("backward", name), entry.operator.signature
    packed = ",cu_seqlens_dtype=int64" if name == "chunk_loop_packed" else ""
    problem = parse_problem(text + packed, signature)
    choices = {"chunk": chunk, "block_v": values, "stages": 2, "min_blocks": 1}
    odd = problem.dim("V") % 2 != 0
    config = variant.config(
        choices | {"copy_bytes": 2 if odd else 16, "sequential_chunks": sequential,
                   "level_scores": True}
    )  # fmt: skip
    demand_verified(entry, variant, problem, config, LARGE)
