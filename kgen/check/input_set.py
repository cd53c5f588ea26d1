"""The guarded buffers of one case, and the expected results of a launch on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from kgen.check.bounds import Bound
from kgen.check.buffers import Guarded, Together
from kgen.check.case import Case
from kgen.check.oracle import Reference, Slab
from kgen.model.problem import Problem


@dataclass(frozen=True)
class InputSet:
    """Guarded buffers with one case's inputs, and the expected outputs.

    Attributes:
        case: The case.
        problem: The problem with the case's extents.
        inputs: Input buffers by name. The oracle is evaluated from them, so a kernel that writes
            into one spoils the set. In-out inputs hold the results after a launch.
        outputs: Output buffers by name; their contents are scratch.
        prints: `prints_now` from when the set was made.
        bounds: Bounds by output.
        cached: The oracle's values per slab; None: they are evaluated at each use.
        bytes: Device memory that the set holds.
        initial: Contents of the in-out inputs before a launch, by name.
        untouched: Masks of the elements that a launch must leave as they are, by in-out input.
    """

    case: Case
    problem: Problem
    inputs: Mapping[str, Guarded]
    outputs: Mapping[str, Guarded]
    prints: Tensor
    bounds: Mapping[str, Bound]
    cached: tuple[tuple[Slab, Mapping[str, Reference]], ...] | None
    bytes: int
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    untouched: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs and outputs that a kernel gets, by name."""
        return {name: b.tensor for name, b in (*self.inputs.items(), *self.outputs.items())}

    @property
    def values(self) -> dict[str, Tensor]:
        """The inputs as they are before a launch."""
        return {name: b.tensor for name, b in self.inputs.items()} | dict(self.initial)

    @property
    def results(self) -> dict[str, Guarded]:
        """The buffers that a kernel writes: outputs, then in-out inputs."""
        return dict(self.outputs) | {name: self.inputs[name] for name in self.initial}

    def restore(self) -> None:
        """Restore the in-out inputs to their contents before a launch."""
        for name, value in self.initial.items():
            self.inputs[name].tensor.copy_(value)

    @cached_property
    def together(self) -> Together:
        """The inputs, for comparisons of their bits."""
        return Together(self.inputs)

    def prints_now(self) -> Tensor:
        """The fingerprints of all inputs' arenas, without the data of in-out inputs."""
        written = {name: self.inputs[name].tensor.clone() for name in self.initial}
        self.restore()
        found = self.together.prints()
        for name, value in written.items():
            self.inputs[name].tensor.copy_(value)
        return found
