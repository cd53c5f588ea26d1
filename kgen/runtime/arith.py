"""Integer helpers that launch expressions may call, in kgen and in the generated library alike."""

from __future__ import annotations

# Largest exponent that an expression or a template may write, against 9**9**9.
MAX_POWER = 64


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer >= a / b."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Return the smallest multiple of b that is >= a."""
    return ceil_div(a, b) * b


def next_pow2(a: int) -> int:
    """Return the smallest power of two >= a (1 for a <= 1)."""
    return 1 if a <= 1 else 1 << (a - 1).bit_length()


def is_pow2(a: int) -> bool:
    """Return whether a is a positive power of two."""
    return a > 0 and a & (a - 1) == 0
