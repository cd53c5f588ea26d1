"""Functions of published libraries, with their names and conventions, on this library's kernels.

A model switches with one import: `from kgen_ops.compat import chunk_rwkv6`. The docstring of each
adapter says what it converts. Layouts become strides and factors become scalars; a tensor is copied
only where the docstring says so. All adapters support gradients, except those that update a state
in place.

kgen copies this package into the library that it generates; it needs torch and that library.
"""

from .fla import (
    chunk_linear_attn,
    chunk_rwkv6,
    fused_recurrent_linear_attn,
    fused_recurrent_rwkv4,
    fused_recurrent_rwkv6,
)
from .fla_rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
from .flash_rwkv import rwkv5_cuda_linear_attention, rwkv6_cuda_linear_attention
from .huggingface import rwkv5_linear_attention, rwkv6_linear_attention, rwkv_linear_attention
from .rwkv7_cuda import (
    RWKV7_CLAMPW_CUDA,
    RWKV7_STATE_CLAMPW_CUDA,
    RWKV7_STATE_PASSING_CLAMPW_CUDA,
    attn_chunked_cuda,
    attn_chunked_cuda_varlen,
)
from .rwkv7_decode import rwkv7_wkv_fp32_v2, wkv7s
from .rwkv_cuda import WKV, WKV_5, WKV_6

__all__ = [
    "RWKV7_CLAMPW_CUDA",
    "RWKV7_STATE_CLAMPW_CUDA",
    "RWKV7_STATE_PASSING_CLAMPW_CUDA",
    "WKV",
    "WKV_5",
    "WKV_6",
    "attn_chunked_cuda",
    "attn_chunked_cuda_varlen",
    "chunk_linear_attn",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_linear_attn",
    "fused_recurrent_rwkv4",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "rwkv5_cuda_linear_attention",
    "rwkv5_linear_attention",
    "rwkv6_cuda_linear_attention",
    "rwkv6_linear_attention",
    "rwkv7_wkv_fp32_v2",
    "rwkv_linear_attention",
    "wkv7s",
]
