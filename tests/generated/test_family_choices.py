"""Configs that serve calls far from all rows on an H200, where wrong choices cost most (0057)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "generated"
STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
# Operator; problem; what its config has, and what it does not have.
CASES = (
    # A decode step has no work for several segments, and a long sequence has work for many.
    ("wkv4", f"B=64,T=1,C=2560,dtype=bf16,decay_form=raw,{STATES}", "segments=1,", "naive"),
    ("wkv4", f"B=17,T=1,C=2559,dtype=bf16,decay_form=raw,{STATES}", "segments=1,", "naive"),
    ("wkv4", "B=8,T=1024,C=5120,dtype=fp32,decay_form=raw", "segments=", "segments=1,"),
    # Few blocks: T in parts.
    ("wkv4", "B=1,T=4096,C=768,dtype=bf16,final_state_dtype=fp32", "splits=", "splits=1)"),
    ("wkv5", f"B=1,T=1,H=16,D=64,dtype=bf16,{STATES}", "block_per_head", "chunk"),
    ("wkv6", f"B=1,T=3,H=64,D=64,dtype=bf16,{STATES}", "block_per_head", "chunk"),
    # Large heads in fp32, and in fp16 with states: tensor cores.
    ("wkv6", "B=4,T=2048,H=16,D=128,dtype=fp32", "chunk_halving", "block_per_head"),
    ("wkv5", f"B=2,T=1024,H=12,D=192,dtype=fp32,{STATES}", "chunk_halving", "block_per_head"),
    ("wkv6", f"B=4,T=1024,H=16,D=128,dtype=fp16,{STATES}", "chunk_halving", "block_per_head"),
    ("wkv7", "B=1,T=1024,H=6,D=64,dtype=bf16,decay_form=clamp", "segments=", "chunk_loop"),
    ("wkv7", "B=1,N=1,T=8192,H=40,D=64,dtype=fp16,initial_state_dtype=fp32,cu_seqlens_dtype=int32,"
     "decay_form=clamp", "warp_specialized_tf32", "chunk_loop"),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "problem", "has", "has_not"), CASES)
def test_forward(operator: str, problem: str, has: str, has_not: str) -> None:
    # In a process of its own: only one library fits into one.
    done = subprocess.run(
        [sys.executable, "-m", "kgen", "explain", "--op", operator, "--gpu", "h200",
         "--problem", problem, "--from", LIBRARY],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (kernel,) = (line for line in done.stdout.splitlines() if line.startswith("  kernel"))
    assert has in kernel
    assert has_not not in kernel
