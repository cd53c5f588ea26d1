"""Modules of the operators that have learnable parameters: `from kgen_ops.nn import RMSNorm`.

A module holds an operator's parameters, initialises them as the published models do, and takes and
returns states for decoding. Operators without parameters are called as functions.

kgen copies this package into the library that it generates; it needs torch and that library.
"""

from .linear_attention import LinearAttention, LinearAttentionState
from .norm import RMSNorm
from .timex import Timex
from .wkv import Wkv4, Wkv5, Wkv6
from .wkv7 import Wkv7

__all__ = [
    "LinearAttention",
    "LinearAttentionState",
    "RMSNorm",
    "Timex",
    "Wkv4",
    "Wkv5",
    "Wkv6",
    "Wkv7",
]
