"""Times on the kinds of inputs, as text, with the one that counts."""

from __future__ import annotations

from kgen.model.record import Timing


def by_inputs(timing: Timing) -> str:
    """`random 480.1 us, trained 1892 us (counts)`; empty if it was timed on one kind of inputs."""
    if not timing.others:
        return ""
    return ", ".join(
        f"{inputs} {us:.4g} us{' (counts)' if inputs == timing.inputs else ''}"
        for inputs, us in timing.by_inputs_us.items()
    )
