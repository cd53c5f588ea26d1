"""RWKV-6: linear attention with a bonus, and a decay per step and key feature."""

from __future__ import annotations

from kgen.operators._wkv import STATES, operator

_TRAINED = (
    "B=8,T=4096,H=32,K=64,V=64,dtype=bf16",
    "B=1,T=16384,H=32,K=64,V=64,dtype=bf16",
    "B=8,T=512,H=64,K=64,V=64,dtype=bf16",
    "B=1,T=54,H=32,K=64,V=64,dtype=fp16",
    "B=2,T=1000,H=4,K=100,V=72,dtype=fp32",
)
_PACKED = "B=1,N=8,T=8192,H=32,K=64,V=64,dtype=bf16,cu_seqlens_dtype=int32"

OPERATOR = operator(
    name="wkv6",
    summary="RWKV-6 time mixing: a matrix state with a decay per step and feature, and a bonus.",
    source="Peng et al. 2024, arXiv:2404.05892.",
    per_step=True,
    problems={
        "cuda": (
            *_TRAINED, f"B=128,T=1,H=32,K=64,V=64,dtype=bf16,{STATES}",
            f"B=4,T=2048,H=32,K=64,V=64,dtype=bf16,{STATES}", _PACKED,
        ),
        "cuda backward": (
            *_TRAINED, "B=4,T=2048,H=8,K=256,V=256,dtype=bf16",
            _PACKED, f"{_PACKED},w_dtype=bf16",
            "B=8,T=4096,H=32,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw",
            "B=1,T=16384,H=32,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw",
        ),
        "host": (
            "B=1,T=33,H=2,K=16,V=16,dtype=fp32",
            f"B=1,T=20,H=1,K=9,V=5,dtype=bf16,{STATES}",
        ),
    },
    aliases=("rwkv6",),
)
SIGNATURE = OPERATOR.signature
