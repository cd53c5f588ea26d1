"""Limits of a compilation, and the messages about exceeding them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from kgen.errors import ToolchainError

GIB = 1 << 30
_MEMORY_AT_LEAST, _MEMORY_AT_MOST = 4 * GIB, 16 * GIB
# Files with the memory limit of a container. Without a limit they hold "max", or a value larger
# than the machine's memory.
_CONTAINER_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_LOG_HEAD, _LOG_TAIL = 12_000, 3_000  # characters of a long log that are kept

# Messages of NVRTC, nvcc's programs, g++ and clang++ about failed allocations. "out of memory"
# alone does not count: it may be source that a message quotes.
_NO_MEMORY = re.compile(
    r"catastrophic error: out of memory|virtual memory exhausted|LLVM ERROR: out of memory|"
    r"std::bad_alloc|NVRTC_ERROR_OUT_OF_MEMORY|Memory allocation failure|out of memory allocating|"
    r"^MemoryError\b", re.MULTILINE)
_SIGNAL_OF_A_PROGRAM = re.compile(
    r"died due to signal (\d+)|(Killed|Segmentation fault|Aborted) signal terminated program")
_SIGNAL_WORDS = {"Killed": signal.SIGKILL, "Segmentation fault": signal.SIGSEGV,
                 "Aborted": signal.SIGABRT}


def default_memory_bytes() -> int:
    """A quarter of the memory of the machine (or the container), between 4 and 16 GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CONTAINER_MEMORY:
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(name).read_text()))
    return min(max(total // 4, _MEMORY_AT_LEAST), _MEMORY_AT_MOST)


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of one compilation. A compilation that exceeds one is ended and its build fails.

    Attributes:
        timeout_s: Wall-clock time; > 0.
        memory_bytes: Address space of one compiler process (for NVRTC, in addition to the space of
            the loaded library); > 0.
    """

    timeout_s: float = 120.0
    memory_bytes: int = field(default_factory=default_memory_bytes)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ToolchainError: If a limit is not above 0.
        """
        for name in ("timeout_s", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise ToolchainError(f"a compilation cannot be limited to {name} = "
                                     f"{getattr(self, name)}\n  allowed: above 0")

    @property
    def too_slow(self) -> str:
        """The message about a compilation that took too long."""
        return (f"ended after {self.timeout_s:g} s (limit on compile time; "
                "--compile-timeout raises it)")

    @property
    def too_big(self) -> str:
        """The message about a compilation that needed too much memory."""
        return (f"needs more than {self.memory_bytes / GIB:.3g} GiB of memory (limit on compile "
                "memory; --compile-memory raises it)")


def ran_out_of_memory(log: str) -> bool:
    """Whether a compiler's messages report that an allocation failed."""
    return _NO_MEMORY.search(log) is not None


def ended_by(number: int) -> str:
    """The message about a compiler that a signal ended."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    more = ", as when the machine runs out of memory" if number == signal.SIGKILL else ""
    return f"the compiler was ended by {name}{more}"


def ended_program(log: str) -> str:
    """The message of `ended_by` if the compiler driver reports a killed program; else empty."""
    found = _SIGNAL_OF_A_PROGRAM.search(log)
    if found is None:
        return ""
    return ended_by(int(found[1]) if found[1] else _SIGNAL_WORDS[found[2]])


def cut(log: str) -> str:
    """Shorten a long log to its head, which contains the cause, a note, and its tail."""
    left_out = len(log) - _LOG_HEAD - _LOG_TAIL
    if left_out <= 0:
        return log
    return (f"{log[:_LOG_HEAD]}\n[... {left_out} of {len(log)} characters left out ...]\n"
            f"{log[-_LOG_TAIL:]}")
