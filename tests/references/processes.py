"""What Linux says of processes, for tests that kill some.

A process may end while it is read: reading then fails with FileNotFoundError or ProcessLookupError,
whichever comes first. Both mean that it is gone.
"""

from __future__ import annotations

import os
from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a process behind its name, from its state on; none if it is gone."""
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
    """Return the processes that a process has started, those that wait to be reaped too."""
    processes = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {child for child in processes if stat_fields(child)[1:2] == [str(pid)]}


def descendants_of(pid: int) -> set[int]:
    """Return the processes that a process has started, with all that these have started."""
    found = children_of(pid)
    return found | {below for child in found for below in descendants_of(child)}


def workers_of(pid: int) -> set[int]:
    """Return the workers of a tuner: spawned for a GPU, forked from a server for the host."""
    children = children_of(pid)
    servers = {child for child in children if "forkserver" in command_line(child)}
    spawned = {child for child in children if "spawn_main" in command_line(child)}
    return spawned | {worker for server in servers for worker in children_of(server)}
