"""Times as text, the same in every report and on the terminal."""

from __future__ import annotations


def format_us(us: float) -> str:
    """Four digits, or whole microseconds from 1000 on: `0.247`, `33.07`, `1979`."""
    if us >= 999.95:
        return f"{us:.0f}"
    return f"{us:.4g}" if us >= 1 else f"{us:.3g}"
