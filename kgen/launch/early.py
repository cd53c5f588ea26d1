"""Check on the host layer what a kernel with programmatic dependent launch does before its wait.

Until a kernel's `griddepcontrol_wait` the earlier kernels may still run. The kernel may therefore
not read what they write: until the wait its arguments that are workspaces of earlier kernels point
to other memory. Nor may it write what they read or write: in the first call with a set of inputs
the kernel also runs alone up to its wait, and the memory that it shares with earlier kernels must
be unchanged afterwards. In a workspace only the bytes that earlier kernels have written are
compared, because these kernels can have read nothing else there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from kgen.errors import LaunchError
from kgen.model.plan import Launch, Plan

if TYPE_CHECKING:
    from kgen.launch.base import Tensors

_FILL = 0x5B  # byte in watched workspaces; it reveals a kernel that clears or repeats what is there


def early_memory(plan: Plan, place: int, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Memory that a launch with `pdl` finds in place of earlier results until it has waited.

    Workspaces of integers are left out: they are counters, not results.

    Args:
        plan: The plan.
        place: Index of the launch in the plan.
        tensors: The call's tensors by name.
    Returns:
        A tensor for each workspace that is also an argument of an earlier kernel, by name.
    """
    launch = plan.launches[place]
    if not launch.pdl:
        return {}
    earlier = {name for before in plan.launches[:place] for name in before.args}
    found: dict[str, torch.Tensor] = {}
    for workspace in plan.workspaces:
        actual = tensors.get(workspace.name)
        if actual is None or not actual.is_floating_point() or not actual.numel():
            continue
        if workspace.name in launch.args and workspace.name in earlier:
            found[workspace.name] = torch.empty_like(actual)
    return found


def unended_kernels(plan: Plan, place: int) -> tuple[Launch, ...] | None:
    """The kernels that may still run when a launch with `pdl` begins.

    Returns:
        The previous kernel, and each kernel before it as long as the one after has `pdl`. None for
        the first kernel of a plan: a kernel of an earlier call may use any memory of this call.
    """
    found: list[Launch] = []
    for before in reversed(plan.launches[:place]):
        if before.is_empty:
            continue
        found.append(before)
        if not before.pdl:
            break
    return tuple(found) or None  # a first kernel with pdl waits before it lets the next one begin


class EarlyWrites:
    """Finds what a launch with `pdl` writes before its wait.

    Attributes:
        watched: Memory that the launch shares with kernels that may still run, by name.
    """

    def __init__(
        self, plan: Plan, place: int, tensors: Tensors, shown: Mapping[str, torch.Tensor]
    ) -> None:
        """Find the memory to watch.

        Args:
            plan, place, tensors: As for `early_memory`.
            shown: Result of `early_memory`.
        """
        launch = plan.launches[place]
        earlier = unended_kernels(plan, place) if launch.pdl else ()
        workspaces = {workspace.name for workspace in plan.workspaces}
        self._launch = launch
        self._actual: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()  # workspaces, which a kernel must not read before its wait
        self._before: dict[str, torch.Tensor] = {}
        self._are_all = earlier is None
        for name in launch.args:
            tensor = tensors.get(name) if isinstance(name, str) else None
            if tensor is None or not isinstance(name, str) or not tensor.numel():
                continue
            if earlier is None or any(name in before.args for before in earlier):
                self._actual[name] = tensor
                if name in workspaces:
                    self._filled.add(name)
        self.watched = {name: shown.get(name, actual) for name, actual in self._actual.items()}

    def begin(self) -> None:
        """Remember the content of the workspaces before the plan's first launch."""
        if not self._are_all:
            self._before = {name: _bits(self._actual[name]).clone() for name in self._filled}

    def demand_none(self, run_to_wait: Callable[[], None]) -> None:
        """Launch the kernel up to its wait, and check that it wrote nothing; restore workspaces.

        Args:
            run_to_wait: Launches the kernel so that its threads end at their wait.
        Raises:
            LaunchError: If the kernel wrote to the watched memory.
        """
        if not self.watched:
            return
        used = {n: _bits(self._actual[n]) != bits for n, bits in self._before.items()}
        kept = {name: tensor.clone() for name, tensor in self.watched.items()}
        for name in self._filled:
            self.watched[name].view(torch.uint8).fill_(_FILL)
        before = {name: _bits(tensor).clone() for name, tensor in self.watched.items()}
        run_to_wait()
        written = []
        for name, tensor in self.watched.items():
            changed = _bits(tensor) != before[name]
            if bool((changed & used[name] if name in used else changed).any()):
                written.append(name)
        for name in self._filled:
            self.watched[name].copy_(kept[name])
        if written:
            raise LaunchError(
                f"{self._launch.kernel}: writes {', '.join(written)} before griddepcontrol_wait; "
                "on a GPU a kernel before it may still read or write there"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(words[tensor.element_size()])
