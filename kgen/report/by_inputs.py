"""The times of a kernel on several kinds of inputs, as text that says which time counts."""

from __future__ import annotations

from kgen.model.record import Timing
from kgen.model.units import format_us


def by_inputs(timing: Timing) -> str:
    """For instance `480.1 us on random inputs, 1892 us on trained inputs (counts, the slower)`.

    The text is empty if the kernel was timed on one kind of inputs.
    """
    if not timing.others:
        return ""
    return ", ".join(
        f"{format_us(us)} us on {inputs} inputs"
        + (" (counts, the slower)" if inputs == timing.inputs else "")
        for inputs, us in timing.by_inputs_us.items()
    )
