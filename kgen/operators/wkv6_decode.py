"""Decoding with RWKV-6: wkv6 of a few steps, with states in a pool that are updated in place."""

from __future__ import annotations

from kgen.operators._decode import INDICES
from kgen.operators._wkv_decode import operator

OPERATOR = operator(
    name="wkv6_decode",
    summary="RWKV-6 time mixing of a few steps, with the states of a pool updated in place.",
    source="Peng et al. 2024, arXiv:2404.05892.",
    per_step=True,
    problems={
        "cuda": (
            "B=128,S=128,T=1,H=32,K=64,V=64,dtype=bf16",
            f"B=128,S=1024,T=1,H=32,K=64,V=64,dtype=bf16,{INDICES}",
            f"B=1,S=1024,T=1,H=32,K=64,V=64,dtype=bf16,{INDICES}",
            f"B=32,S=64,T=4,H=32,K=64,V=64,dtype=fp16,{INDICES}",
            "B=2,S=3,T=5,H=4,K=100,V=72,dtype=fp32",
        ),
        "host": (
            "B=2,S=2,T=1,H=2,K=16,V=16,dtype=fp32",
            f"B=3,S=5,T=3,H=1,K=9,V=5,dtype=bf16,{INDICES}",
        ),
    },
    aliases=("rwkv6_decode",),
)
SIGNATURE = OPERATOR.signature
