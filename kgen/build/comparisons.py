"""Builds for the host that watch a kernel's comparisons: flags and tools."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache

# Only the sanitized build has these flags. Each comparison of the kernel calls a function of
# kgen/host/comparisons.cpp. `a && b` stays two comparisons, and -Og, which is about as fast here as
# -O1, leaves them where they are. With DWARF 5 the lines of some headers' functions have the
# kernel's file name.
WATCH_FLAGS = (
    "-fsanitize-coverage=trace-cmp",
    "--param=logical-op-non-short-circuit=0",
    "-fno-jump-tables",  # `switch` becomes comparisons with its cases
    "-Og",
    "-gdwarf-4",
    # The device library's functions, which are inline, are not watched: that would take thrice the
    # time. The kernel's own functions are declared as __inline (`watched`).
    "-Dinline=inline __attribute__((no_sanitize_coverage))",
)


@lru_cache
def line_finder(cxx: str) -> str:
    """Path of the program that finds the lines of addresses (addr2line of GNU binutils).

    Empty if builds by this C++ compiler watch no comparisons: clang++ would leave out those of
    floats.
    """
    try:
        done = subprocess.run(
            [cxx, "--version"], capture_output=True, text=True, errors="replace", check=False,
            timeout=60, stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if "clang" in done.stdout else shutil.which("addr2line") or ""
