"""Detects kernels that keep state in their workspaces from launch to launch.

There are two requirements. A launch that starts with the workspaces of a launch on the same values
must leave the same bits there. And a launch may only write what depends on its inputs: after each
launch on the same values, every word equals either its contents after the first of these launches,
or its contents before this launch (it was not written). So a kernel can count neither its launches
nor how often its inputs changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kgen.check.buffers import Fill, Guarded, Together
from kgen.check.moved import MOVED_BYTES
from kgen.check.steps import Step


class ScratchState:
    """Compares the workspaces of one input set from launch to launch."""

    def __init__(self, scratch: Mapping[str, Guarded]) -> None:
        small = {name: buffer for name, buffer in scratch.items() if buffer.bytes <= MOVED_BYTES}
        self._scratch, self._small = Together(scratch), Together(small)
        self._repeated: Tensor | None = None  # fingerprints after a launch on the set's values
        self._first: Tensor | None = None  # contents after the first launch on the set's values
        self._before: Tensor | None = None
        self._not_repeated: Tensor | None = None
        self._written_otherwise: Tensor | None = None

    def has_state(self, device: torch.device) -> Tensor:
        """Whether a workspace keeps state from launch to launch, as a 0-d bool tensor."""
        known = [mask.any() for mask in (self._not_repeated, self._written_otherwise)
                 if mask is not None]
        return torch.stack(known).any() if known else torch.zeros((), device=device)

    def keeping(self) -> list[str]:
        """The workspaces that keep state."""
        names = [*self._scratch.where(self._not_repeated),
                 *self._small.where(self._written_otherwise)]
        return list(dict.fromkeys(names))

    def before_launch(self, step: Step) -> None:
        """Save the workspaces before a launch on the set's own values."""
        if step.own and self._first is not None:
            self.keep()

    def keep(self) -> None:
        """Save the contents of the workspaces, from the first launch on the set's values on."""
        self._before = None if self._first is None else self._small.contents()

    def put_back(self) -> None:
        """Restore the contents that `keep` saved."""
        if self._before is not None:
            self._small.put_back(self._before)

    def after_launch(self, step: Step) -> None:
        """Compare the workspaces after a launch on the set's own values with earlier contents."""
        if not (step.own and self._scratch):
            self._repeated = None
            return
        now = self._scratch.prints()
        if step.workspaces is Fill.LEFT and self._repeated is not None:
            self._not_repeated = either(self._not_repeated, now != self._repeated)
        self._repeated = now
        if not self._small:
            return
        left = self._small.contents()
        if self._first is None:
            self._first = left
        elif self._before is not None:
            self._written_otherwise = either(
                self._written_otherwise, (left != self._first) & (left != self._before))


def either(known: Tensor | None, now: Tensor) -> Tensor:
    """Collect where bits differed in any of several comparisons."""
    return now if known is None else known.logical_or_(now)
