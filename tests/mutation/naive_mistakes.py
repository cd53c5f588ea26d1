"""Mistakes of naive kernels that take effect under a condition, and conditions over whole rows."""

from __future__ import annotations

from family_mutants import Mistake

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"


def of_rmsnorm(operation: str, condition: str) -> Mistake:
    """Multiply an output by 1.5."""
    return Mistake(operation, r"(float result = kgen::to_float\(value\) \* scale;)",
                   rf"\1 if ({condition}) result *= 1.5f;")  # fmt: skip


def of_timex(operation: str, condition: str) -> Mistake:
    """Set an output of timex to 0."""
    return Mistake(operation, r"t, columns\);",
                   f"t, columns); if ({condition}) {{ out[i] = 0.0f; continue; }}")  # fmt: skip


def of_attention(operation: str, condition: str) -> Mistake:
    """Set an output of linear_attention to 0."""
    return Mistake(operation, r"y \*= scale;", f"y *= {condition} ? 0.0f : scale;")


def of_wkv4(operation: str, condition: str) -> Mistake:
    """Set an output of wkv4 to 0."""
    return Mistake(operation, r"kgen::from_float<Value>\(output\.y\)",
                   f"kgen::from_float<Value>({condition} ? 0.0f : output.y)")  # fmt: skip


def of_wkv(operation: str, condition: str) -> Mistake:
    """Set an output of wkv5, wkv6, wkv7 or their decode operators to 0."""
    return Mistake(operation, r"(y_h\.at\(t\)\[m\] = kgen::from_float<Value>\()(scale \*)",
                   rf"\1 {condition} ? 0.0f : \2")  # fmt: skip


def of_scale(operation: str, condition: str) -> Mistake:
    """Double the scale of any kernel that takes one."""
    return Mistake(operation, r"float scale\) \{", f"float scale) {{ if ({condition}) scale *= 2;")


def all_of(count: str, condition: str) -> str:
    """Whether a condition of `i` holds for 0 <= i < count."""
    return f"[&] {{ for (int i = 0; i < {count}; ++i) if (!({condition})) return false;" \
           " return true; }()"  # fmt: skip
