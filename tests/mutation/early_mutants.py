"""Kernels with programmatic dependent launch that do not wait for the kernel before them.

On a GPU they are wrong only if the kernel before has not ended yet, which it mostly has.
"""

from __future__ import annotations

from family_mutants import Family, Mistake

from kgen.catalogue import open_catalogue
from kgen.model.config import Value

_CATALOGUE = open_catalogue()
_LINEAR = "B=1,H=2,T=600,E=64,M=64,dtype=bf16"
_WKV = "B=2,T=100,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw"


def _without(pointers: str, operation: str = "no wait") -> tuple[Mistake, ...]:
    """Takes the first wait for these pointers away; or has it wait for none of them, as a wait
    behind their first use would."""
    wait = rf"(?:kgen::)?griddepcontrol_wait\({pointers}\)"
    gone = Mistake(operation, wait, "static_cast<void>(0)")
    if not pointers:
        return (gone,)
    return gone, Mistake(operation.replace("no", "late"), wait, "kgen::griddepcontrol_wait()")


def _kernel(
    operator: str, pass_name: str, variant: str, dims: str, mistakes: tuple[Mistake, ...],
    **values: Value,
) -> Family:
    """A kernel whose config is the first one that a search tries, with other values."""
    found = _CATALOGUE.entry(operator).space.variant(pass_name, variant)
    return Family(operator, pass_name, variant, dims, mistakes,
                  {**found.values(found.first[0]), **values})  # fmt: skip


_SUMS = "state_sums, gradient_sums"
_NORM_SUMS = "state_sums, gradient_sums, key_sums, key_sum_gradients"
EARLY = (
    _kernel("linear_attention", "forward", "chunk_scan", _LINEAR,
            _without("segment_sums, segment_key_sums"), overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_scan", _LINEAR,
            _without(_SUMS), overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_scan_norm", _LINEAR + ",norm_dtype=fp32",
            _without(_NORM_SUMS), overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_parallel", _LINEAR,
            _without(r"state_rows_\.stored"), overlap=1),
    _kernel("linear_attention", "forward", "split_t", _LINEAR,
            _without("", "no wait before counters are cleared"), overlap=1, products="mma",
            head_ctas=2, segment=64, block_v=64),
    _kernel("wkv6", "backward", "chunk_halving", _WKV, _without("states"), pdl=True),
    _kernel("wkv6", "backward", "chunk_loop", _WKV,
            _without("states") + _without("parts", "no wait of sums"), pdl=True,
            sequential_chunks=True),
    _kernel("wkv5", "backward", "chunk_loop", _WKV,
            _without("state, gradient", "no wait of a chunk"), pdl=True, sequential_chunks=False),
    _kernel("wkv5", "forward", "warp_specialized_segments",
            "B=1,T=600,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16",
            _without(r"states\.segment_sums, states\.segment_key_sums"), pdl=True, segments=2),
)  # fmt: skip

EARLY_IN_CI = frozenset(
    f"{family.name}-{mistake.operation}" for family in EARLY for mistake in family.mistakes
    if family.variant in ("chunk_scan", "chunk_halving", "split_t", "warp_specialized_segments")
)  # fmt: skip
"""The others are marked slow."""
