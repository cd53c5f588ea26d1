"""Launches in a process of their own: jobs for executables that are built with a sanitizer."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kgen.runtime.host import Argument, HostFault, StrPath, padded_extents

# No leak detection: the process ends after one job, and the detection fails under ptrace. No
# detection of returned stack frames, which GCC 13 and newer turn on: each fiber would get a second
# stack, and a launch with 65 thousand threads would take 0.3 s instead of 6 ms.
_ASAN_OPTIONS = ":".join((
    "detect_leaks=0",
    "detect_stack_use_after_return=0",
    "exitcode=99",
    "abort_on_error=0",
))
_UBSAN_OPTIONS = "print_stacktrace=1"
_MAX_REPORT_LINES = 14
# If the operating system randomises addresses by 32 bits, the sanitizer of GCC 12 and older
# sometimes finds its shadow memory occupied and dies before main. Another start has other
# addresses.
_MAX_STARTS = 8
_SHADOW_TAKEN = b"Shadow memory range interleaves"


class HostTimeout(HostFault):
    """A sanitized executable did not end in time."""


@dataclass(frozen=True)
class BufferRef:
    """A pointer argument of a job: `offset` bytes into buffer number `index`."""

    index: int
    offset: int = 0


@dataclass(frozen=True)
class JobLaunch:
    """One launch of a job; fields as in `HostFunction.launch`, pointers given as `BufferRef`."""

    kernel: str
    grid: Sequence[int]
    block: Sequence[int]
    smem_bytes: int = 0
    args: Sequence[BufferRef | Argument] = field(default_factory=tuple)
    seed: int = 0


def write_job(
    directory: StrPath,
    buffers: Sequence[bytes | int],
    launches: Sequence[JobLaunch],
    constant: Collection[int] = (),
) -> Path:
    """Write a job for a sanitized executable, and return the path for `run_job`.

    Args:
        directory: Receives the job and its buffers; created if missing. One job per directory.
        buffers: Initial content of each buffer as any object with the buffer protocol, or the size
            of the buffer in bytes, which fills it with 0xFF. The executable allocates exactly this
            size, so that the sanitizer finds an access one byte beyond it.
        launches: Launches, which run in this order.
        constant: Indices of buffers that no launch may write. A write ends the executable, even if
            a later write would undo it.

    Raises:
        ValueError: If an argument refers to a buffer that does not exist.
    """
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    lines = ["kgen-job 1"]
    for index, buffer in enumerate(buffers):
        word = "constant" if index in constant else "buffer"
        if isinstance(buffer, int):
            lines.append(f"{word} {buffer} -")
        else:
            content = bytes(buffer)
            path = directory / f"buffer_{index}.in"
            path.write_bytes(content)
            lines.append(f"{word} {len(content)} {path}")
    for launch in launches:
        grid, block = padded_extents("grid", launch.grid), padded_extents("block", launch.block)
        numbers = (*grid, *block, launch.smem_bytes, launch.seed, len(launch.args))
        lines.append(f"launch {launch.kernel} {' '.join(map(str, numbers))}")
        for arg in launch.args:
            if not isinstance(arg, BufferRef):
                lines.append(f"value {bytes(arg).hex()}")
            elif 0 <= arg.index < len(buffers):
                lines.append(f"pointer {arg.index} {arg.offset}")
            else:
                raise ValueError(f"{launch.kernel}: {arg}, but there are {len(buffers)} buffers")
    lines += [f"output {i} {directory / f'buffer_{i}.out'}" for i in range(len(buffers))]
    job = directory / "job.txt"
    job.write_text("\n".join(lines) + "\n")
    return job


def run_job(
    executable: StrPath, job: StrPath, timeout_s: float, comparisons: Path | None = None
) -> list[bytes]:
    """Run a job with a sanitized executable.

    Args:
        executable: Made by `compile_sanitized_command`.
        job: Returned by `write_job`.
        timeout_s: Seconds after which the executable is killed.
        comparisons: File to which the executable adds the comparisons of the job, if it was built
            to watch them (kgen/host/comparisons.cpp). Jobs may share it. None: no file.

    Returns:
        The content of every buffer after the last launch, in the order given to `write_job`.

    Raises:
        HostTimeout: If the executable did not end in time.
        HostFault: If the sanitizer found a fault (the text has the head of its report), a launch
            was refused, or a thread did something undefined.
    """
    environment = {
        **os.environ,
        "ASAN_OPTIONS": _ASAN_OPTIONS,
        "UBSAN_OPTIONS": _UBSAN_OPTIONS,
        "KGEN_COMPARISONS": str(comparisons or ""),
    }
    command = [str(Path(executable).resolve()), str(job)]
    for _ in range(_MAX_STARTS):
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise HostTimeout(f"{command[0]}: did not end within {timeout_s} s") from None
        silent_crash = done.returncode == -signal.SIGSEGV and not done.stderr
        if not silent_crash and _SHADOW_TAKEN not in done.stderr:
            break
    if done.returncode != 0:
        report = _head_of_report(done.stderr.decode(errors="replace"))
        raise HostFault(report or f"{command[0]}: exit status {done.returncode}")
    outputs = []
    for line in Path(job).read_text().splitlines():
        if line.startswith("output "):
            outputs.append(Path(line.split(" ", 2)[2]).read_bytes())
    return outputs


def _head_of_report(stderr: str) -> str:
    """Return the lines that say what happened and where; a report has a hundred lines more."""
    lines = [line for line in stderr.splitlines() if line.strip("= ")]
    for index, line in enumerate(lines):
        if "Sanitizer" in line or "runtime error:" in line:
            lines = lines[index:]
            break
    for index, line in enumerate(lines):
        if line.startswith(("SUMMARY:", "Shadow bytes")):
            lines = lines[:index]
            break
    return "\n".join(lines[:_MAX_REPORT_LINES])
