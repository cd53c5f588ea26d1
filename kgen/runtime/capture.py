"""Record the calls of a model: problems, counts, dispatch steps and times.

During a capture no call takes the fast path: each call is counted, and its launch is timed.
`kgen tune --calls FILE` tunes the problems in the file that the capture writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .dispatch import DISPATCHERS, Dispatcher
from .problems import problem_text
from .streams import capturing

if TYPE_CHECKING:  # at run time, the first call imports them
    from .arguments import BoundArguments
    from .preparing import Ready

FORMAT = 1  # format of the file, which `kgen/catalogue/captured_calls.py` reads
# Most timed launches of a problem; later launches are only counted.
MOST_TIMED = 4096
# Most pairs of CUDA events of a problem that are unread; then those that have finished are read.
MOST_PENDING = 64

Launch = Callable[..., None]


class CapturedCall(NamedTuple):
    """The calls of one problem.

    Attributes:
        operator: Name of the operator.
        pass_name: `forward` or `backward`.
        problem: The problem, in the form of `kgen tune --problem`.
        device: `NVIDIA H200`, or `cpu`.
        calls: Number of calls.
        timed: Number of timed calls. The first call is not timed, as it may compile its kernel.
        median_us: Median time of a timed call, microseconds; None if none was timed. On a GPU it is
            the time between two CUDA events around the launch. If the GPU waits for the host, that
            includes the wait.
        step: The dispatch step that served them: `exact`, `learnt`, `nearest`, `family` or `safe`.
        config: The config of the kernel that served them.
    """

    operator: str
    pass_name: str
    problem: str
    device: str
    calls: int
    timed: int
    median_us: float | None
    step: str
    config: str


class Capture:
    """Counts and times calls by problem; `capture` makes one."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], _Problem] = {}
        self._lock = threading.Lock()
        self._open = True

    @property
    def calls(self) -> tuple[CapturedCall, ...]:
        """The captured calls, most expensive first; waits for running launches."""
        with self._lock:
            found = list(self._found.values())
        made = [problem.captured() for problem in found]
        return tuple(sorted(made, key=lambda call: -call.calls * (call.median_us or 0.0)))

    def watched(self, dispatcher: Dispatcher, bound: BoundArguments, device: torch.device,
                ready: Ready) -> Launch:
        """Count the first call of a layout, and return a launch that counts and times later calls.

        Args:
            dispatcher: The dispatcher of the pass.
            bound: The checked arguments of the call.
            device: The device that ran the call.
            ready: The launch that served the call.
        """
        problem = problem_text(
            dispatcher.signature, tuple(bound.dims.values()), tuple(bound.dtypes.values()))
        key = (dispatcher.tables.operator, dispatcher.name, problem, _device_name(device),
               ready.step, ready.config)
        with self._lock:
            found = self._found.setdefault(key, _Problem(key, device))
        found.count()
        launch = ready.run

        def launch_and_watch(*arguments: Any) -> None:
            if self._open:
                found.launch(launch, arguments)
            else:  # another thread prepared this launch while the capture ended
                launch(*arguments)

        return launch_and_watch

    def end(self) -> None:
        """Stop counting calls."""
        self._open = False


class _Problem:
    """Count and times of one problem on one device."""

    def __init__(self, key: tuple[str, ...], device: torch.device) -> None:
        self._key = key
        self._device = device
        self._calls = 0
        self._times_us: list[float] = []
        self._pending: deque[tuple[Any, Any]] = deque()  # pairs of CUDA events, not read yet
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self._calls += 1

    def launch(self, launch: Launch, arguments: tuple[Any, ...]) -> None:
        """Launch, count and time."""
        self.count()
        is_cuda = self._device.type == "cuda"
        # CUDA events that are recorded into a graph have no times.
        full = len(self._times_us) + len(self._pending) >= MOST_TIMED
        if full or (is_cuda and capturing()):
            launch(*arguments)
        elif is_cuda:
            stream = torch.cuda.current_stream(self._device)
            event: Any = torch.cuda.Event
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record(stream)
            launch(*arguments)
            end.record(stream)
            with self._lock:
                self._pending.append((start, end))
                self._read(wait=False)
        else:
            started = time.perf_counter()
            launch(*arguments)
            with self._lock:
                self._times_us.append((time.perf_counter() - started) * 1e6)

    def captured(self) -> CapturedCall:
        """The count and the times of the calls so far."""
        with self._lock:
            self._read(wait=True)
            operator, pass_name, problem, device, step, config = self._key
            times = sorted(self._times_us)
            return CapturedCall(
                operator, pass_name, problem, device, self._calls, len(times),
                _median(times) if times else None, step, config)

    def _read(self, wait: bool) -> None:
        """Read the times of launches that have ended; with `wait`, of all launches."""
        while self._pending and (wait or len(self._pending) > MOST_PENDING):
            start, end = self._pending[0]
            if wait:
                end.synchronize()
            elif not end.query():
                return
            self._pending.popleft()
            self._times_us.append(start.elapsed_time(end) * 1e3)


def _median(ordered: list[float]) -> float:
    # Importing `statistics` would slow down the library's import.
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2


_active = threading.Lock()


@contextlib.contextmanager
def capture(path: str | os.PathLike[str], *, steps: int = 1) -> Iterator[Capture]:
    """Record the problems that are called inside the block, with counts, dispatch steps and times.

        with kgen_ops.capture("calls.yaml", steps=10):
            for _ in range(10):
                train_step()

    Then `kgen tune --calls calls.yaml` tunes these problems, the most expensive first. The capture
    includes the calls of all threads, of autograd and of `torch.compile`. It does not include
    replays of a CUDA graph, only the calls that the graph was recorded from. A captured call takes
    some microseconds more of host time.

    Args:
        path: The file to write; an existing file is replaced. It is written when the block ends,
            also by an exception.
        steps: Number of steps of the model in the block; `kgen tune` reports the saved time per
            step.
    Yields:
        The capture; its `calls` are the calls captured so far.
    Raises:
        TypeError: If `path` is no path.
        ValueError: If `steps` is not a whole number > 0.
        RuntimeError: If another capture is running.
        OSError: If the file cannot be written; checked before the block runs.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"capture: steps={steps!r} is not a whole number > 0\n  next: pass how "
                         "many steps of the model the block runs")
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise TypeError(f"capture: path={path!r} is no path\n  next: name the file to write, such "
                        "as capture(\"calls.yaml\")")
    file = Path(path)
    _check_writable(file)
    if not _active.acquire(blocking=False):
        raise RuntimeError("capture: another capture is on\n  next: end it first")
    seen = Capture()
    try:
        _observe(seen)
        yield seen
    finally:
        _observe(None)
        seen.end()
        _active.release()
        _write(file, seen.calls, steps)


def _observe(seen: Capture | None) -> None:
    for dispatcher in DISPATCHERS:
        dispatcher.observer = seen.watched if seen is not None else None
        # Launches and fast paths that were prepared before the capture would not be counted; those
        # prepared during the capture would count after its end.
        dispatcher.forget()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _check_writable(file: Path) -> None:
    """Check that a file can be written.

    Raises:
        OSError: If it cannot.
    """
    try:
        is_folder, existed = file.is_dir(), file.exists()
    except OSError as problem:
        raise _not_written(file, problem, "give it another name") from None
    if is_folder:
        raise IsADirectoryError(f"capture: {file} is a folder\n  next: name a file in it")
    if existed and not file.is_file():  # a device such as /dev/null must not be replaced
        raise FileExistsError(f"capture: {file} is a device or a pipe\n  next: name a file")
    try:
        with file.open("a"):
            pass
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the path
        raise _not_written(file, problem, "name a file that you may write, in a folder that "
                           "exists") from None
    if not existed:
        file.unlink()


def _write(file: Path, calls: tuple[CapturedCall, ...], steps: int) -> None:
    """Write the file whole or not at all.

    Strings are written as JSON, which is YAML too.
    """
    lines = [
        "# Calls of kgen_ops that a model made, the most costly first.",
        f"# Tune for them: kgen tune --calls {file.name}",
        f"format: {FORMAT}",
        f"steps: {steps}",
        "calls:" if calls else "calls: []",
    ]
    for call in calls:
        time_us = "null" if call.median_us is None else f"{call.median_us:.3f}"
        lines += [
            f"  - operator: {call.operator}",
            f"    pass: {call.pass_name}",
            f"    problem: {json.dumps(call.problem)}",
            f"    device: {json.dumps(call.device)}",
            f"    calls: {call.calls}",
            f"    timed: {call.timed}",
            f"    median_us: {time_us}",
            f"    step: {call.step}",
            f"    config: {json.dumps(call.config)}",
        ]
    file = file.resolve()  # write to the target of a link, and keep the link
    partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as problem:
        raise _not_written(file, problem, "check the folder and its free space; the capture still "
                           "has the calls, in `calls`") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _not_written(file: Path, problem: OSError | ValueError, step: str) -> OSError:
    why = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
    kind = type(problem) if isinstance(problem, OSError) else OSError
    error = kind(f"capture: {file} cannot be written: {why}\n  next: {step}")
    error.errno = problem.errno if isinstance(problem, OSError) else None
    return error
