"""Lists the launches of a config for a call: its plan is bound to a list instead of a kernel."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from .rows import Call, Family


class Launched(NamedTuple):
    """A launch that is not empty."""

    ctas: int
    threads: int  # threads of a CTA
    smem_bytes: int  # dynamic shared memory of a CTA


class LaunchList:
    """Stands in for a `KernelFile` and records launches and workspaces.

    Attributes:
        prepared: (threads, bytes of dynamic shared memory) of a CTA, for each launch of the plan.
        made: The launches of a run.
        elements: Number of elements of all workspaces.
    """

    def __init__(self) -> None:
        self.prepared: list[tuple[int, int]] = []
        self.made: list[Launched] = []
        self.elements = 0

    def launcher(self, kernel: str, arguments: str, block: tuple[int, int, int], smem: int,
                 **_: object) -> Any:
        """Record a launch that the plan prepares; return a function that records that it is made.
        """
        threads = prod(block)
        self.prepared.append((threads, smem))

        def launch(stream: int, x: int, y: int, z: int, *_: object) -> None:
            if x * y * z > 0:
                self.made.append(Launched(x * y * z, threads, smem))

        return launch

    def scratch(self, elements: int, dtype: object) -> Any:
        """Count a workspace, and return an allocator that allocates nothing."""
        self.elements += elements
        return _Workspace


class _Workspace:
    def data_ptr(self) -> int:
        return 0


def launches_of(family: Family, call: Call) -> LaunchList:
    """Return the launches of a config.

    Args:
        family: The variant.
        call: The call on which the family's functions are evaluated, with the config's values.
    """
    seen = LaunchList()
    run = family.bind(seen, call)  # type: ignore[arg-type]
    run(*[0] * run.__code__.co_argcount)
    return seen


def fits_device(family: Family, call: Call) -> bool:
    """Whether a config's launches keep the device's limits on a CTA's threads and shared memory."""
    seen = LaunchList()
    try:
        family.bind(seen, call)  # type: ignore[arg-type]
    except ArithmeticError:
        return True  # a division by an extent of 0: nothing is launched
    return all(
        threads <= call.max_threads_per_block and smem <= call.smem_per_block
        for threads, smem in seen.prepared
    )
