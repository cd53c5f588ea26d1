"""Take timing samples: CUDA graph replays, CUDA events, or the host's clock."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

import torch

TimedCall = Callable[[], object]
Clock = Callable[[], int]

TRUSTED_US = 50.0
"""Event timings of single launches below this are mostly the cost of the events."""
REPLAY_US = 1500.0
"""Duration of one graph: much longer than a graph launch (5 us), much shorter than a budget."""
MAX_LAUNCHES = 512
"""Largest number of launches in a graph; capturing a launch costs several us of host time."""
_HOST_SAMPLE_US = 200.0
AGREEMENT = 0.02
"""A warm-up may end when its last `AGREEING_ESTIMATES` differ by no more than this share."""
AGREEING_ESTIMATES = 3
LIKE = 1.5
"""Calls whose estimates differ by less than this factor get samples of the same length."""
MOST_WARMUP = 5
"""A warm-up whose estimates do not agree ends after this multiple of its requested time."""
AT_ONCE = 5.0
AT_ONCE_US = 10_000.0
"""Early stop after one call: it applies if the call takes more than `AT_ONCE` times the limit and
more than this, so that the overhead of a first call or of events does not matter."""
# The GPU spins while the host queues work: at least this long, and twice the measured queueing
# time. A Triton peer needs 50 to 200 us of host time per call. Without the spinning, the time of a
# shorter kernel would be the host's time.
_HEAD_START_US = 50.0
_MAX_HEAD_START_US = 20_000.0
_CYCLES_PER_US = 2_000


class Sampler(Protocol):
    """A warmed-up contender that can be timed repeatedly.

    Attributes:
        estimate_us: First estimate of the time of one call.
        repeats: Calls per sample.
        protocol: How samples are taken, one line.
    """

    estimate_us: float
    repeats: int
    protocol: str

    def take(self, count: int) -> list[float]:
        """Return `count` samples: time per call, us. Waits for the device."""
        ...


def make_sampler(
    calls: Sequence[TimedCall],
    device: torch.device,
    warmup_ms: float = 1.0,
    early_stop_us: float | None = None,
    clock: Clock = time.perf_counter_ns,
    capture: bool = True,
    beside: Sequence[Sampler] = (),
) -> Sampler:
    """Warm up, estimate, and choose how to take samples.

    The first call is never a sample, because modules load and peers compile in it. A contender
    whose estimate exceeds the early-stop limit gets the cheapest sampler and no further warm-up. If
    its first call takes `AT_ONCE` times the limit, it is not called again.

    The warm-up lasts at least `warmup_ms`, and until its last three estimates (medians of about
    1 ms of calls) lie within 2 % of each other, but no longer than five times `warmup_ms`. If the
    estimates do not agree by then, the protocol's line says so.

    Args:
        calls: Each call does the same work on a buffer set of its own, queued on torch's current
            stream.
        device: The device that runs them.
        warmup_ms: Least time to keep the device busy before the first sample; 0 for none.
        early_stop_us: Estimates above twice this limit end the preparation.
        clock: The host's clock in ns; another one for tests.
        capture: Whether CUDA graphs may be used. A memory copy in a graph is not the copy that
            a stream runs: on an H200 it reached 2717 GB/s where the stream's reached 4278.
        beside: Samplers that the new sampler is compared with. It copies the number of calls per
            sample from a sampler of about the same speed, so that both have the same overhead per
            call (of a graph launch). From the estimates alone one of them might get twice as many
            calls as the other.
    Raises:
        ValueError: If there are no calls.
    """
    if not calls:
        raise ValueError("nothing to measure: no calls given")
    with on(device):
        if device.type == "cuda":
            return _make_cuda(calls, warmup_ms, early_stop_us, capture, beside)
        return _make_host(calls, warmup_ms, early_stop_us, clock, beside)


def stops_early(us: float, early_stop_us: float | None) -> bool:
    """Whether one call suffices for the early stop; see `AT_ONCE`."""
    return early_stop_us is not None and us > max(AT_ONCE * early_stop_us, AT_ONCE_US)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current, so that new streams and events belong to it; does nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _make_host(
    calls: Sequence[TimedCall],
    warmup_ms: float,
    early_stop_us: float | None,
    clock: Clock,
    beside: Sequence[Sampler],
) -> Sampler:
    probe = HostSampler(calls, 1, 0.0, clock)
    estimate = probe.take(1)[0]
    if not stops_early(estimate, early_stop_us):
        probe = HostSampler(calls, 1, 0.0, clock)  # begins with the first set
        estimate = probe.take(1)[0]
    if early_stop_us is not None and estimate > 2 * early_stop_us:
        return HostSampler(calls, 1, estimate, clock)
    estimate, note = _warm_up(probe, estimate, warmup_ms)
    repeats = _repeats(estimate, _HOST_SAMPLE_US, len(calls), beside)
    sampler = HostSampler(calls, repeats, estimate, clock)
    sampler.protocol += note
    return sampler


def _warm_up(probe: Sampler, first_us: float, least_ms: float) -> tuple[float, str]:
    """Keep the device busy until estimates agree; see `make_sampler`.

    Returns:
        The least time of a call, us; a note for the protocol's line, empty if the estimates agreed.
    """
    estimate = spent_us = first_us
    recent: deque[float] = deque(maxlen=AGREEING_ESTIMATES)
    while spent_us < MOST_WARMUP * least_ms * 1e3:
        now = probe.take(max(1, min(64, int(1000 / max(estimate, 1.0)))))
        estimate = min(estimate, *now)
        spent_us += max(sum(now), 1.0)
        recent.append(statistics.median(now))
        agree = len(recent) == AGREEING_ESTIMATES and max(recent) <= (1 + AGREEMENT) * min(recent)
        if agree and spent_us >= least_ms * 1e3:
            return estimate, ""
    return estimate, "; warm-up not settled" if least_ms > 0 else ""


def _repeats(estimate_us: float, target_us: float, sets: int, beside: Sequence[Sampler]) -> int:
    """Calls per sample: enough for the target time; each set is used equally often if possible."""
    for other in beside:
        ratio = estimate_us / max(other.estimate_us, 1e-3)
        if 1 / LIKE <= ratio <= LIKE:
            return other.repeats
    repeats = max(1, min(MAX_LAUNCHES, round(target_us / max(estimate_us, 1e-3))))
    if sets >= MAX_LAUNCHES or repeats == 1:
        return min(repeats, MAX_LAUNCHES)
    rounded = -(-repeats // sets) * sets
    return rounded if rounded <= MAX_LAUNCHES else MAX_LAUNCHES // sets * sets


class HostSampler:
    """Times loops of calls by the host's clock."""

    def __init__(
        self, calls: Sequence[TimedCall], repeats: int, estimate_us: float, clock: Clock
    ) -> None:
        """Prepare samples of `repeats` calls."""
        self._calls = cycle(calls)
        self.repeats = repeats
        self._clock = clock
        self.estimate_us = estimate_us
        self.protocol = f"host clock, loops of {repeats}, {_sets(calls)}"

    def take(self, count: int) -> list[float]:
        """Return samples; see `Sampler`."""
        samples = []
        for _ in range(count):
            batch = list(islice(self._calls, self.repeats))
            start = self._clock()
            for call in batch:
                call()
            samples.append((self._clock() - start) / 1e3 / self.repeats)
        return samples


def _make_cuda(
    calls: Sequence[TimedCall],
    warmup_ms: float,
    early_stop_us: float | None,
    capture: bool,
    beside: Sequence[Sampler],
) -> Sampler:
    events = EventSampler(calls, 0.0)
    torch.cuda.synchronize()  # finish filling the buffers before the first call is timed
    start = time.perf_counter_ns()
    calls[0]()
    torch.cuda.synchronize()
    estimate = (time.perf_counter_ns() - start) / 1e3
    if not stops_early(estimate, early_stop_us):
        estimate = events.take(1)[0]
    events.estimate_us = estimate
    # Events and a first launch cost several us; a shorter estimate is meaningless.
    stops = early_stop_us is not None and estimate > max(2 * early_stop_us, TRUSTED_US)
    if stops:
        return events
    estimate, note = _warm_up(events, estimate, warmup_ms)
    events.estimate_us = estimate
    events.protocol += note
    if not capture:
        return events
    try:
        graphs = [other for other in beside if isinstance(other, GraphSampler)]
        repeats = _repeats(estimate, REPLAY_US, len(calls), graphs)
        sampler = GraphSampler(calls, repeats, estimate)
    except RuntimeError as failure:  # a peer that synchronises, or allocates outside the capture
        torch.cuda.synchronize()
        reason = str(failure).strip().splitlines()[0][:80]
        events.protocol += f"; not capturable ({reason})"
        return events
    sampler.protocol += note
    return sampler


@dataclass(frozen=True, slots=True)
class _Marks:
    """CUDA events around consecutive pieces of work, and the host's time to queue one piece."""

    events: list[torch.cuda.Event]
    host_us: float

    @staticmethod
    def around(count: int, work: Callable[[], object], host_us: float = 0.0) -> _Marks:
        """Queue `work` count times, with an event before, between and after.

        The GPU first spins while the host queues the work. On an idle GPU the first event would
        fire at once, and the wait for the first launch would count as time of the work.

        Args:
            count: Pieces of work.
            work: Queues one piece.
            host_us: Host time to queue a piece, measured before; 0 if unknown.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        head_start = min(max(_HEAD_START_US, 2 * count * host_us), _MAX_HEAD_START_US)
        torch.cuda._sleep(int(head_start * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
        start = time.perf_counter_ns()
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        return _Marks(events, (time.perf_counter_ns() - start) / 1e3 / count)

    def read_us(self) -> list[float]:
        """Wait, and return the time of each piece."""
        self.events[-1].synchronize()
        pairs = zip(self.events, self.events[1:], strict=False)
        return [float(a.elapsed_time(b)) * 1e3 for a, b in pairs]


class EventSampler:
    """Times each call between two CUDA events."""

    def __init__(self, calls: Sequence[TimedCall], estimate_us: float) -> None:
        """Prepare; launches nothing."""
        self._calls = cycle(calls)
        self._host_us = 0.0
        self.repeats = 1
        self.estimate_us = estimate_us
        self.protocol = f"events per launch, {_sets(calls)}"

    def take(self, count: int) -> list[float]:
        """Return samples; see `Sampler`."""
        marks = _Marks.around(count, lambda: next(self._calls)(), self._host_us)
        # The least queueing time so far: the GPU would spin for a compilation in the first call.
        self._host_us = min(self._host_us or marks.host_us, marks.host_us)
        return marks.read_us()


class GraphSampler:
    """Times replays of one CUDA graph of many launches."""

    def __init__(self, calls: Sequence[TimedCall], launches: int, estimate_us: float) -> None:
        """Capture the graph and replay it once.

        Raises:
            RuntimeError: If the calls cannot be captured.
        """
        self.repeats = launches
        self._graph = _capture([calls[i % len(calls)] for i in range(launches)])
        self._graph.replay()
        torch.cuda.synchronize()
        self.estimate_us = estimate_us
        self.protocol = f"graph of {launches}, {_sets(calls)}"

    def take(self, count: int) -> list[float]:
        """Return samples; see `Sampler`."""
        replays = _Marks.around(count, self._graph.replay).read_us()
        return [us / self.repeats for us in replays]


def _capture(calls: Sequence[TimedCall]) -> torch.cuda.CUDAGraph:
    # `torch.cuda.graph` is not used: it collects garbage and empties the allocator's cache, which
    # takes tens of milliseconds, more than a trial. The capture is thread-local, so that a compile
    # thread that uses CUDA meanwhile does not invalidate it.
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that unloads a module would invalidate the capture
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
            graph.capture_end()
        except BaseException:
            _abandon(graph)
            raise
        finally:
            if collecting:
                gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a failed capture; ending it may fail as well.

    After such a failure torch's allocator assumes that the capture continues, and would run out of
    memory instead of releasing its cache. The generator of random numbers assumes the same, and
    every later draw raises RuntimeError until a capture succeeds.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), graph.pool())
    empty = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), warnings.catch_warnings(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        warnings.simplefilter("ignore")  # about the empty graph
        empty.capture_begin(capture_error_mode="thread_local")
        empty.capture_end()


def _sets(calls: Sequence[TimedCall]) -> str:
    return f"{len(calls)} buffer set{'s' if len(calls) > 1 else ''}"
