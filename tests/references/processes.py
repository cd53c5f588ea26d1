"""Facts about processes from Linux's /proc, for tests that kill processes.

A process may end while its files are read. Reading then fails with FileNotFoundError or
ProcessLookupError; both mean that the process is gone.
"""

from __future__ import annotations

import os
from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a process after its name, from its state on; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """Whether a process exists; one that only waits to be reaped does not count."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return not is_running(pid)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; 0 if it is gone."""
    fields = stat_fields(pid)
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> str:
    """Return a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def children_of(pid: int) -> set[int]:
    """Return the child processes of a process, including those that wait to be reaped."""
    processes = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {child for child in processes if stat_fields(child)[1:2] == [str(pid)]}


def descendants_of(pid: int) -> set[int]:
    """Return the child processes of a process, with all their descendants."""
    found = children_of(pid)
    return found | {below for child in found for below in descendants_of(child)}


def workers_of(pid: int) -> set[int]:
    """Return the workers of a tuner: spawned for a GPU, or forked from a server for the host."""
    children = children_of(pid)
    servers = {child for child in children if "forkserver" in command_line(child)}
    spawned = {child for child in children if "spawn_main" in command_line(child)}
    return spawned | {worker for server in servers for worker in children_of(server)}
