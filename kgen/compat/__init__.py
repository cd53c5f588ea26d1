"""Functions of published libraries, by their own names and conventions, on this library's kernels.

A model switches by one import: `from kgen_ops.compat import chunk_rwkv6`. Each adapter names what
it converts. Layouts become strides and factors become scalars; a tensor is copied only where its
docstring says so. Gradients flow through all of them.

kgen copies this package into the library that it generates; it needs torch and that library.
"""

from .fla import (
    chunk_linear_attn,
    chunk_rwkv6,
    fused_recurrent_linear_attn,
    fused_recurrent_rwkv6,
)
from .flash_rwkv import rwkv5_cuda_linear_attention, rwkv6_cuda_linear_attention
from .huggingface import rwkv5_linear_attention, rwkv6_linear_attention
from .rwkv_cuda import WKV_5, WKV_6

__all__ = [
    "WKV_5",
    "WKV_6",
    "chunk_linear_attn",
    "chunk_rwkv6",
    "fused_recurrent_linear_attn",
    "fused_recurrent_rwkv6",
    "rwkv5_cuda_linear_attention",
    "rwkv5_linear_attention",
    "rwkv6_cuda_linear_attention",
    "rwkv6_linear_attention",
]
