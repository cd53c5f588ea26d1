"""Traces by torch.profiler: contenders run one after the other, each in a time span of its own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kgen.measure.sampler import TimedCall, on
from kgen.model.traced import Traced

# Length of a span: long compared with the profiler's overhead per call, and short enough for a
# browser to open the trace.
_STRETCH_MS = 20.0
_CALLS = (3, 50)
# Pause between two spans: longer than the possible offset between the clocks of GPU and CPU.
_PAUSE_S = 0.002
_MARK = "contender: "


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a trace.

    Attributes:
        name: The name of a span, a kernel or an operator.
        start_us, end_us: On the clock of the trace.
        own_us: Duration without nested events.
        on_device: Whether it ran on a GPU.
    """

    name: str
    start_us: float
    end_us: float
    own_us: float
    on_device: bool


def trace(
    contenders: Mapping[str, Sequence[TimedCall]],
    device: torch.device,
    path: Path,
    synchronize: Callable[[], None],
) -> tuple[Traced, ...]:
    """Run the contenders under torch.profiler and keep the trace.

    Args:
        contenders: Calls by name, one per buffer set; each has run before.
        device: Where the calls run. On a CPU, PyTorch operators count as kernels.
        path: Receives the trace as Chrome's JSON.
        synchronize: Waits for the device.
    Returns:
        One entry per contender, in their order.
    Raises:
        OSError: If the trace cannot be written.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with on(device):
        counts = {name: _enough(calls, synchronize) for name, calls in contenders.items()}
        with profile(activities=activities):  # the first profile loads the profiler
            next(iter(contenders.values()))[0]()
            synchronize()
        with profile(activities=activities) as found:
            for name, calls in contenders.items():
                time.sleep(_PAUSE_S)
                with record_function(_MARK + name):
                    for i in range(counts[name]):
                        calls[i % len(calls)]()
                    synchronize()
            time.sleep(_PAUSE_S)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    return trace_summary(list(_events(found)), counts, on_gpu)


def trace_summary(
    events: Sequence[Event], counts: Mapping[str, int], on_gpu: bool
) -> tuple[Traced, ...]:
    """Summarise a trace by contender.

    An event belongs to the span that contains its middle.

    Args:
        events: All of the trace.
        counts: Number of calls of each contender, in the order of the contenders.
        on_gpu: Whether to count kernels of a GPU; otherwise operators of the CPU.
    """
    stretches = {
        event.name.removeprefix(_MARK): event
        for event in events
        if event.name.startswith(_MARK) and not event.on_device
    }
    return tuple(
        _traced(name, calls, stretches[name], events, on_gpu) for name, calls in counts.items()
    )


def _traced(
    name: str, calls: int, stretch: Event, events: Sequence[Event], on_gpu: bool
) -> Traced:
    took: dict[str, float] = defaultdict(float)
    kernels = 0
    for event in events:
        middle = (event.start_us + event.end_us) / 2
        # The trace has a copy of every span on the GPU; the copy is no kernel.
        if (
            event.on_device == on_gpu
            and not event.name.startswith(_MARK)
            and stretch.start_us <= middle <= stretch.end_us
        ):
            took[event.name] += event.own_us
            kernels += 1
    largest = max(took, key=lambda key: took[key], default="")
    return Traced(
        name=name,
        calls=calls,
        end_to_end_us=(stretch.end_us - stretch.start_us) / calls,
        kernels=kernels / calls,
        busy_us=sum(took.values()) / calls,
        largest=largest,
        largest_us=took[largest] / calls if largest else 0.0,
    )


def _enough(calls: Sequence[TimedCall], synchronize: Callable[[], None]) -> int:
    """Number of calls in a span."""
    synchronize()
    started = time.perf_counter()
    calls[0]()
    synchronize()
    took_ms = max((time.perf_counter() - started) * 1e3, 1e-6)
    least, most = _CALLS
    return max(least, min(most, round(_STRETCH_MS / took_ms)))


def _events(found: Any) -> Iterator[Event]:
    for event in found.events():
        span = event.time_range
        on_device = event.device_type.name != "CPU"
        took = span.end - span.start
        own = took if on_device else event.self_cpu_time_total
        yield Event(event.name, span.start, span.end, own, on_device)
