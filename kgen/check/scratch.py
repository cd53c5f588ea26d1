"""Whether launches keep state in their workspaces.

A launch that finds what a launch on the same values left must leave the same bits. And whatever a
launch writes must depend on its inputs alone: a word that is not as after the first launch on the
same values has to be as it was before this launch, not written. So a kernel can count neither its
launches nor how often its inputs have changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kgen.check.buffers import Fill, Guarded, fingerprint
from kgen.check.moved import MOVED_BYTES
from kgen.check.steps import Step


class ScratchState:
    """Follows the workspaces of one input set from launch to launch.

    Attributes:
        counts: By name, whether a workspace keeps state, on the device.
    """

    def __init__(self, scratch: Mapping[str, Guarded]) -> None:
        self.counts: dict[str, Tensor] = {}
        self._scratch = scratch
        self._repeated: dict[str, Tensor] = {}  # fingerprints after a launch on the set's values
        self._first: dict[str, Tensor] = {}  # what the first launch on these values left
        self._before: dict[str, Tensor] = {}

    def before_launch(self, step: Step) -> None:
        """Keep what a launch on the set's own values finds."""
        if step.own and self._first:
            self.keep()

    def keep(self) -> None:
        """Keep what the workspaces hold."""
        self._before = {name: self._scratch[name].arena.clone() for name in self._first}

    def put_back(self) -> None:
        """Give the workspaces what they held at `keep`."""
        for name, arena in self._before.items():
            self._scratch[name].arena.copy_(arena)

    def after_launch(self, step: Step) -> None:
        """Compare what a launch on the set's own values left."""
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
