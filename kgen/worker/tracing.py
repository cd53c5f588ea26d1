"""Traces the contenders of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from kgen.errors import StorageError
from kgen.measure.sampler import TimedCall
from kgen.measure.trace import trace
from kgen.worker.messages import TraceOutcome

KERNEL = "kgen"  # the kernel, launched as in timing
LIBRARY_CALL = "kgen_ops"  # the library's function, as a user calls it


def traced(
    contenders: Mapping[str, Sequence[TimedCall]],
    errors: Mapping[str, str],
    device: torch.device,
    path: str,
    synchronize: Callable[[], None],
) -> TraceOutcome:
    """Trace contenders; each must have run before, so that nothing is prepared in the trace.

    Raises:
        StorageError: If the trace cannot be written.
    """
    try:
        found = trace(contenders, device, Path(path), synchronize)
    except (OSError, RuntimeError) as problem:  # the profiler's writer raises RuntimeError
        raise StorageError(
            f"{path}: no trace can be recorded and written there: {problem}\n"
            "  choose another file with --trace"
        ) from None
    return TraceOutcome(found, dict(errors))
