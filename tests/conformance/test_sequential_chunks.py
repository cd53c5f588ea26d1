"""wkv5's and wkv6's backward pass where one block passes the gradient over all chunks.

`test_host.py` has sequences of few chunks. Here a block loops over many chunks, the last of them
partial, with initial and final states. Some packed sequences have no steps, and some slots of
blocks have no sequence, both with a block per head and with a block per slot.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_host import H200, HOST, demand_verified
from tiers import one_of

from kgen.catalogue import open_catalogue, profile_named
from kgen.model.config import Config
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.search.feasible import is_feasible

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
INITIAL, FINAL = STATES.split(",")
# Lets the host layer run the chunks that fit an H200.
LARGE = replace(HOST, smem_per_block=H200.smem_per_block)
# Operator, problem, steps of a chunk, and value features of a block of the forward loop.
CASES = (
    ("wkv6", f"B=2,T=300,H=2,K=64,V=64,dtype=bf16,w_dtype=fp32,{STATES}", 64, 32),
    ("wkv6", f"B=1,T=200,H=2,K=32,V=48,dtype=fp16,w_dtype=fp32,decay_form=raw,{FINAL}", 32, 16),
    ("wkv6", "B=1,T=131,H=2,K=24,V=40,dtype=bf16,decay_form=decay", 32, 48),
    ("wkv6", f"B=1,T=161,H=1,K=48,V=16,dtype=fp32,{INITIAL}", 32, 16),
    ("wkv6", f"B=2,T=1,H=2,K=16,V=32,dtype=bf16,{STATES}", 32, 32),
    ("wkv5", f"B=2,T=300,H=2,K=64,V=64,dtype=bf16,w_dtype=fp32,{STATES}", 64, 64),
    ("wkv5", "B=1,T=260,H=2,K=40,V=24,dtype=fp16,decay_form=decay", 128, 16),
    ("wkv5", f"B=1,T=97,H=2,K=32,V=64,dtype=fp32,decay_form=raw,{STATES}", 32, 64),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "chunk", "values"), one_of(3, CASES))
def test_a_block_loops_backward_over_all_chunks(
    operator: str, text: str, chunk: int, values: int
) -> None:
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant("backward", "chunk_loop"), entry.operator.signature
    problem = parse_problem(text, signature)
    choices = {"chunk": chunk, "block_v": values, "stages": 2, "min_blocks": 1}
    config = Config.of(variant.name, choices | {"copy_bytes": 16, "sequential_chunks": True})
    demand_verified(entry, variant, problem, config, LARGE)


# The same values, and whether a block loops over the chunks of a sequence.
PACKED = (
    ("wkv6", f"B=1,N=7,T=260,H=2,K=32,V=64,dtype=bf16,w_dtype=fp32,{STATES}", 64, 64, True),
    ("wkv6", "B=1,N=9,T=200,H=3,K=32,V=48,dtype=fp16,decay_form=raw", 32, 16, False),
    ("wkv6", "B=1,N=4,T=3,H=1,K=16,V=16,dtype=fp32,decay_form=decay", 32, 16, True),
    ("wkv5", f"B=1,N=5,T=150,H=2,K=24,V=40,dtype=bf16,{FINAL}", 32, 16, False),
    ("wkv5", f"B=1,N=5,T=150,H=2,K=16,V=16,dtype=fp16,decay_form=raw,{INITIAL}", 64, 16, True),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "chunk", "values", "sequential"), one_of(2, PACKED))
def test_chunks_of_packed_sequences(
    operator: str, text: str, chunk: int, values: int, sequential: bool
) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("backward", "chunk_loop_packed")
    problem = parse_problem(f"{text},cu_seqlens_dtype=int32", entry.operator.signature)
    config = variant.config(
        {"chunk": chunk, "block_v": values, "stages": 2, "min_blocks": 1, "copy_bytes": 16,
         "sequential_chunks": sequential}
    )  # fmt: skip
    demand_verified(entry, variant, problem, config, LARGE)


@pytest.mark.parametrize(
    ("operator", "sequential"),
    one_of(2, [("wkv5", False), ("wkv5", True), ("wkv6", True), ("wkv6", False)]),
)
def test_dependent_launch_and_staggered_blocks(operator: str, sequential: bool) -> None:
    """On the host both change only the text of the kernels, which must remain correct."""
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant("backward", "chunk_loop"), entry.operator.signature
    problem = parse_problem(f"B=1,T=70,H=2,K=16,V=32,dtype=bf16,{STATES}", signature)
    config = variant.config(
        {"chunk": 32, "block_v": 32, "stages": 2, "min_blocks": 1, "copy_bytes": 16,
         "sequential_chunks": sequential, "stagger_kcycles": 40, "pdl": True}
    )  # fmt: skip
    pass_ = signature.pass_named("backward")
    for gpu, allowed in (("a100", False), ("h200", True)):
        legal = is_feasible(
            variant, config, pass_, problem, profile_named(gpu), legality_only=True
        )
        assert legal is allowed
    plan = make_plan(variant, config, problem, H200)
    assert [launch.pdl for launch in plan.launches] == [False, True, True]
    demand_verified(entry, variant, problem, config)
