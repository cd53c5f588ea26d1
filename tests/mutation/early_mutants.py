"""Mistakes of kernels with programmatic dependent launch: a missing wait, or a write before it.

Such a kernel does not wait for the previous kernel, or writes before its wait what the previous
kernel reads or writes. On a GPU it is wrong only if the previous kernel has not ended yet, which it
mostly has.
"""

from __future__ import annotations

from family_mutants import Family, Mistake

from kgen.catalogue import open_catalogue
from kgen.model.config import Value

_CATALOGUE = open_catalogue()
_LINEAR = "B=1,H=2,T=600,E=64,M=64,dtype=bf16"
_WKV = "B=2,T=100,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw"


def _without(pointers: str, operation: str = "no wait") -> tuple[Mistake, ...]:
    """Remove the first wait for these pointers; or let it wait for none of them, which has the
    effect of a wait after their first use."""
    wait = rf"(?:kgen::)?griddepcontrol_wait\({pointers}\)"
    gone = Mistake(operation, wait, "static_cast<void>(0)")
    if not pointers:
        return (gone,)
    return gone, Mistake(operation.replace("no", "late"), wait, "kgen::griddepcontrol_wait()")


def _writes(statement: str, pointers: str, operation: str = "a write before the wait") -> Mistake:
    """Insert a statement before the first wait for these pointers. Its write has no effect on the
    results on the host, where the previous kernel has ended and the wait changes the pointer."""
    return Mistake(operation, rf"((?:kgen::)?griddepcontrol_wait\({pointers}\);)",
                   rf"{statement} \1")  # fmt: skip


def _kernel(
    operator: str, pass_name: str, variant: str, dims: str, mistakes: tuple[Mistake, ...],
    **values: Value,
) -> Family:
    """A kernel whose config is the first that a search tries, with some values replaced."""
    found = _CATALOGUE.entry(operator).space.variant(pass_name, variant)
    return Family(operator, pass_name, variant, dims, mistakes,
                  {**found.values(found.first[0]), **values})  # fmt: skip


_SUMS = "state_sums, gradient_sums"
_NORM_SUMS = "state_sums, gradient_sums, key_sums, key_sum_gradients"
EARLY = (
    _kernel("linear_attention", "forward", "chunk_scan", _LINEAR,
            (*_without("segment_sums, segment_key_sums"),
             _writes("segment_sums[kgen::thread_rank()] = 0.0f;",
                     "segment_sums, segment_key_sums"),
             # A mistake of the output kernel; the scan before it reads the sums.
             Mistake("a write of the last kernel",
                     r"(const bool last = place\.segment == kSegments - 1;)",
                     r"\1 if (blockIdx.x == gridDim.x - 1)"
                     r" const_cast<float*>(segment_sums)[kgen::thread_rank()] = 0.0f;")),
            overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_scan", _LINEAR,
            _without(_SUMS), overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_scan_norm", _LINEAR + ",norm_dtype=fp32",
            _without(_NORM_SUMS), overlap=1, segments=4),
    _kernel("linear_attention", "backward", "chunk_parallel", _LINEAR,
            (*_without(r"state_rows_\.stored"),
             Mistake("a write before the wait", r"(const bool of_q = place\.rest < kKeyBlocks;)",
                     r"\1 if (chunks > 1 && kgen::thread_rank() == 0)"
                     r" const_cast<T*>(gradients)[kE * kM] = kgen::from_float<T>(0.0f);")),
            overlap=1),
    _kernel("linear_attention", "forward", "split_t", _LINEAR,
            (*_without("", "no wait before counters are cleared"),
             Mistake("counters cleared before the wait",
                     r"kgen::griddepcontrol_wait\(\);\s*kgen::griddepcontrol_launch_dependents"
                     r"\(\);\s*(kgen::clear_grid_barriers[^;]*;)",
                     r"\1 kgen::griddepcontrol_wait();"
                     r" kgen::griddepcontrol_launch_dependents();")), overlap=1, products="mma",
            head_ctas=2, segment=64, block_v=64),
    _kernel("wkv6", "backward", "chunk_halving", _WKV,
            (*_without("states"),
             _writes("const_cast<u32*>(states)[kgen::thread_rank()] = 0u;", "states")), pdl=True),
    _kernel("wkv6", "backward", "chunk_loop", _WKV,
            (*_without("states"), *_without("parts", "no wait of sums"),
             _writes("if (thread_rank() == 0) const_cast<float*>(parts)[0] = 0.0f;", "parts",
                     "a write before the wait of sums")), pdl=True,
            sequential_chunks=True),
    _kernel("wkv5", "backward", "chunk_loop", _WKV,
            (*_without("state, gradient", "no wait of a chunk"),
             _writes("if (thread_rank() == 0) gradient[0] = 0.0f;", "state, gradient")),
            pdl=True, sequential_chunks=False),
    _kernel("wkv5", "forward", "warp_specialized_segments",
            "B=1,T=600,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16",
            (*_without(r"states\.segment_sums, states\.segment_key_sums"),
             _writes("const_cast<float*>(states.segment_sums)[kgen::thread_rank() % 32] = 0.0f;",
                     r"states\.segment_sums, states\.segment_key_sums")),
            pdl=True, segments=2),
)  # fmt: skip

EARLY_IN_CI = frozenset(
    f"{family.name}-{mistake.operation}" for family in EARLY for mistake in family.mistakes
    if family.variant in ("chunk_scan", "chunk_halving", "split_t", "warp_specialized_segments")
)  # fmt: skip
"""Mistakes that CI tests; the others are marked slow."""
