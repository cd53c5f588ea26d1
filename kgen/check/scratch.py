"""Detects kernels that keep state in their workspaces from launch to launch.

There are two requirements. A launch that starts with the workspaces of a launch on the same values
must leave the same bits there. And a launch may only write what depends on its inputs: after each
launch on the same values, every word equals either its contents after the first of these launches,
or its contents before this launch (it was not written). So a kernel can count neither its launches
nor how often its inputs changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kgen.check.buffers import Fill, Guarded, fingerprint
from kgen.check.moved import MOVED_BYTES
from kgen.check.steps import Step


class ScratchState:
    """Compares the workspaces of one input set from launch to launch.

    Attributes:
        counts: Whether a workspace keeps state, by name; bool tensors on the device.
    """

    def __init__(self, scratch: Mapping[str, Guarded]) -> None:
        self.counts: dict[str, Tensor] = {}
        self._scratch = scratch
        self._repeated: dict[str, Tensor] = {}  # fingerprints after a launch on the set's values
        self._first: dict[str, Tensor] = {}  # contents after the first launch on the set's values
        self._before: dict[str, Tensor] = {}

    def before_launch(self, step: Step) -> None:
        """Save the workspaces before a launch on the set's own values."""
        if step.own and self._first:
            self.keep()

    def keep(self) -> None:
        """Save the contents of the workspaces."""
        self._before = {name: self._scratch[name].arena.clone() for name in self._first}

    def put_back(self) -> None:
        """Restore the contents that `keep` saved."""
        for name, arena in self._before.items():
            self._scratch[name].arena.copy_(arena)

    def after_launch(self, step: Step) -> None:
        """Compare the workspaces after a launch on the set's own values with earlier contents."""
        if not step.own:
            self._repeated = {}
            return
        now = {name: fingerprint(buffer) for name, buffer in self._scratch.items()}
        if step.workspaces is Fill.LEFT:
            for name in self._repeated:
                self._note(name, (now[name] != self._repeated[name]).any())
        self._repeated = now
        for name, first in self._first.items():
            left = self._scratch[name].arena
            self._note(name, ((left != first) & (left != self._before[name])).any())
        if not self._first:
            self._first = {
                name: buffer.arena.clone()
                for name, buffer in self._scratch.items()
                if buffer.bytes <= MOVED_BYTES
            }

    def _note(self, name: str, changed: Tensor) -> None:
        known = self.counts.get(name)
        self.counts[name] = changed if known is None else known | changed
