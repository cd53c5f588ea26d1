"""Configs that serve calls far from all rows on an H200, where wrong choices cost most (0057)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "generated"
STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
WKV7 = "dtype=bf16,w_dtype=bf16"
# Operator; problem; a text that its config contains, and a text that it does not contain.
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
    # Some hundred steps with states, few heads: tensor cores; two segments take as long as one.
    ("wkv6", f"B=1,T=256,H=40,D=64,dtype=fp16,decay_form=raw,{STATES}", "chunk_halving", "=2)"),
    ("wkv5", f"B=1,T=100,H=32,D=64,dtype=fp16,{STATES}", "chunk_halving", "block_per_head"),
    ("wkv6", "B=1,T=4096,H=64,D=64,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
     "segments=", "segments=2)"),
    ("linear_attention", "B=4,H=32,T=2048,D=256,dtype=fp32", "chunk_loop", "block_per_head"),
    ("wkv7", "B=1,T=1024,H=6,D=64,dtype=bf16,decay_form=clamp", "segments=", "chunk_loop"),
    ("wkv7", "B=1,N=1,T=8192,H=40,D=64,dtype=fp16,initial_state_dtype=fp32,cu_seqlens_dtype=int32,"
     "decay_form=clamp", "warp_specialized_tf32", "chunk_loop"),
    ("wkv7", "B=8,T=2048,H=32,D=192,dtype=fp32", "columns=64", "columns=8,"),
    # Blocks of a head would compute the same rows: one block, where a block's registers suffice.
    ("wkv7", f"B=8,T=4096,H=16,D=128,{WKV7},decay_form=log", "(warps=8,", "block_per_head"),
    ("wkv7", "B=8,T=4096,H=16,D=128,dtype=fp16,decay_form=log", "warp_specialized_tf32(warps=4,",
     "block_per_head"),
    # fp32: 3xTF32, one block per SM; not for few steps, or few keys.
    ("wkv7", "B=8,T=4096,H=32,D=64,dtype=fp32,decay_form=log", "tf32(warps=4,", "min_blocks=2"),
    ("wkv7", f"B=1,T=16384,H=32,D=64,dtype=fp32,decay_form=raw,{STATES}", "tf32(warps=4,",
     "min_blocks=2"),
    ("wkv7", "B=1,N=8,T=32768,H=32,D=64,dtype=fp32,decay_form=clamp,cu_seqlens_dtype=int64",
     "tf32(warps=4,", "min_blocks=2"),
    ("wkv7", "B=4,T=2048,H=16,D=128,dtype=fp32", "tf32(warps=4,", "block_per_head"),
    ("wkv7", f"B=64,T=1,H=32,D=64,dtype=fp32,{STATES}", "block_per_head", "tf32"),
    ("wkv7", "B=8,T=2048,H=32,K=4,V=64,dtype=fp32", "block_per_head", "tf32"),
    # Clamped decays of whole heads: wgmma, unless few heads leave SMs without blocks.
    ("wkv7", f"B=3,T=777,H=12,D=64,{WKV7},decay_form=clamp", "warpgroups(", "warp_specialized"),
    ("wkv7", "B=4,T=1024,H=16,K=48,V=64,dtype=bf16,decay_form=clamp,initial_state_dtype=fp32",
     "warpgroups(", "segments="),
    ("wkv7", f"B=2,T=2048,H=24,D=64,{WKV7},decay_form=clamp", "warpgroups(", "segments="),
    ("wkv7", f"B=1,T=4096,H=32,D=64,{WKV7},decay_form=clamp", "warpgroups=1", "warpgroups("),
    ("wkv7", f"B=8,T=4096,H=32,D=64,{WKV7},decay_form=log", "warp_specialized(", "warpgroups("),
    # Copies of whole rows.
    ("wkv6", "B=4,T=1000,H=40,D=64,dtype=bf16", "row_copies=true", "segments="),
    # Few heads and many steps: segments of T.
    ("wkv6", "B=8,T=6679,H=3,D=128,dtype=fp32", "segments=", "segments=1)"),
    ("wkv6", "B=1,T=1024,H=64,D=64,dtype=bf16", "segments=", "warp_specialized("),
    ("wkv5", "B=1,T=8192,H=24,D=64,dtype=bf16", "segments=", "warp_specialized("),
    # Few short rows: no more threads than a row has vectors, and no fewer lanes of a warp.
    ("rmsnorm", "M=32,N=256,dtype=bf16", "lanes_per_row=32,", "lanes_per_row=512"),
    ("rmsnorm", "M=1,N=640,dtype=bf16", "row_per_block(threads=32,", "lanes_per_row=16"),
    ("rmsnorm", "M=32768,N=256,dtype=bf16", "lanes_per_row=8,", "lanes_per_row=4,"),
    # Final states in bf16: the first kernel computes them; not without one.
    ("wkv6", f"B=4,T=2048,H=40,D=64,{WKV7},decay_form=raw,{STATES}", "warp_specialized_states",
     "chunk_halving"),
    ("wkv5", "B=2,T=4096,H=24,D=64,dtype=bf16,final_state_dtype=fp32", "warp_specialized_states",
     "chunk_halving"),
    ("wkv6", f"B=16,T=512,H=48,D=64,{WKV7},decay_form=raw", "warp_specialized(", "chunk_halving"),
    ("timex", "B=1,C=96,T=12000,dtype=fp32", "fft(points=16384", "column_chunks"),
    ("linear_attention", "B=4,H=3,T=65536,D=160,dtype=bf16,initial_state_dtype=fp32", "chunk_scan",
     "chunk_loop"),
)  # fmt: skip
BACKWARD_CASES = (
    # Vectors of whole rows of other lengths leave more than a quarter of the lanes idle.
    ("rmsnorm", "M=20207,N=2176,dtype=bf16,w_dtype=fp32,rstd_dtype=fp32", "rows_in_registers",
     "naive"),
    # A head's slices of keys and values fit a block, the whole head does not.
    ("wkv6", "B=2,T=2048,H=4,K=256,V=512,dtype=bf16", "chunk_loop_slices", "naive"),
    ("wkv5", f"B=6,T=1403,H=1,D=512,dtype=fp32,{STATES}", "chunk_loop_slices", "naive"),
    # Slices of the keys alone, since the value features are few.
    ("wkv6", "B=8,T=4096,H=16,K=256,V=32,dtype=bf16,w_dtype=bf16", "value_slices=1", "block_per"),
    ("wkv5", "B=8,T=2048,H=16,K=32,V=192,dtype=fp32", "key_slices=1", "block_per_head"),
    ("wkv5", "B=8,T=4096,H=40,D=64,dtype=bf16,w_dtype=bf16", "row_copies=true", "segments="),
    # Few heads and many steps: segments of T, not where w is in fp32.
    ("wkv6", "B=1,T=4096,H=24,D=64,dtype=bf16,w_dtype=bf16,decay_form=raw", "segments=", "loop"),
    ("wkv5", "B=1,T=8192,H=24,D=64,dtype=bf16,w_dtype=bf16", "segments=", "loop"),
    ("wkv6", "B=1,T=16384,H=24,D=64,dtype=bf16", "chunk_loop", "halving"),
    # The same of wkv7, which has no gradient of an initial state there.
    ("wkv7", f"B=1,T=8192,H=24,D=64,{WKV7},decay_form=clamp", "segments=5,", "min_blocks=1"),
    ("wkv7", f"B=4,T=2048,H=8,D=64,{WKV7},decay_form=log", "segments=4,", "chunk_rows"),
    ("wkv7", f"B=1,T=16384,H=4,D=64,{WKV7},decay_form=raw", "_segments(", "segments=4,"),
    ("wkv7", f"B=1,T=500,H=32,D=64,{WKV7},decay_form=clamp", "warp_specialized(", "segments="),
    ("wkv7", f"B=1,T=4096,H=40,D=64,{WKV7},decay_form=clamp", "warp_specialized(", "segments="),
    ("wkv7", f"B=1,T=8192,H=24,D=64,{WKV7},decay_form=clamp,initial_state_dtype=fp32", "chunk_",
     "segments="),
    ("wkv7", f"B=8,T=4096,H=16,D=128,{WKV7},decay_form=clamp", "(warps=8,", "segments="),
    # Results finer than bf16: fp64 tensor cores, with as many blocks as fill the SMs.
    ("wkv7", "B=4,T=2048,H=32,D=64,dtype=bf16,decay_form=log", "fp64(warps=4,", "block_per_head"),
    ("wkv7", "B=1,T=4096,H=32,D=64,dtype=bf16,decay_form=raw", "fp64(warps=2,", "block_per_head"),
    ("wkv7", "B=4,T=1024,H=16,D=64,dtype=fp32", "fp64(", "block_per_head"),
    ("wkv7", "B=4,T=2048,H=32,D=64,dtype=fp16,w_dtype=fp16", "fp64(", "chunk_rows("),
    ("wkv7", "B=4,T=2048,H=32,D=128,dtype=fp16,w_dtype=fp16", "chunk_rows(", "block_per_head"),
    # One loop for all gradients, where a block per head fills the SMs, round by round.
    ("wkv7", f"B=4,T=1000,H=32,D=64,{WKV7},decay_form=clamp", "warpgroups_fused(", "chunk="),
    ("wkv7", f"B=4,T=1000,H=40,D=64,{WKV7},decay_form=clamp", "warp_specialized(", "fused"),
    ("linear_attention", "B=4,H=32,T=2048,D=256,dtype=fp32", "chunk_scan_norm", "block_per_head"),
    # Rounds of 64 steps would be padding.
    ("wkv4", "B=64,T=2,C=2048,dtype=bf16", "segments=1, steps=4", "segments=8"),
)


@pytest.mark.parametrize(("operator", "problem", "has", "has_not"), CASES)
def test_forward(operator: str, problem: str, has: str, has_not: str) -> None:
    check("forward", operator, problem, has, has_not)


@pytest.mark.parametrize(("operator", "problem", "has", "has_not"), BACKWARD_CASES)
def test_backward(operator: str, problem: str, has: str, has_not: str) -> None:
    check("backward", operator, problem, has, has_not)


def check(pass_name: str, operator: str, problem: str, has: str, has_not: str) -> None:
    # In a process of its own: only one library fits into one.
    done = subprocess.run(
        [sys.executable, "-m", "kgen", "explain", "--op", operator, "--pass", pass_name,
         "--gpu", "h200", "--problem", problem, "--from", LIBRARY],
        capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (kernel,) = (line for line in done.stdout.splitlines() if line.startswith("  kernel"))
    assert has in kernel
    assert has_not not in kernel
