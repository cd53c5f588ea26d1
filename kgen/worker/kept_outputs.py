"""Calls that keep their outputs, so that outputs rotate through memory as buffer sets do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kgen.worker.binding import Call


def keeping_outputs(function: Callable[[], object]) -> Call:
    """Return a call of a function that allocates its outputs, for one buffer set.

    The call keeps its outputs until it is called again. If they were freed at once, the next set's
    call would get the same memory, and would write to lines that are still in L2, where a kernel
    with an output tensor per set writes to lines that are not.
    """
    outputs: list[object] = []

    def call() -> None:
        outputs.clear()  # this call may take their memory, which is as cold as the set's inputs
        with torch.no_grad():
            outputs.append(function())

    return call
