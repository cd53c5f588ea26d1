"""The guarded buffers of one case, and the expected results of a launch on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kgen.check.bounds import Bound
from kgen.check.buffers import Guarded, fingerprint
from kgen.check.case import Case
from kgen.check.oracle import Reference, Slab
from kgen.model.problem import Problem


@dataclass(frozen=True)
class InputSet:
    """Guarded buffers with one case's inputs, and what the outputs must be.

    Attributes:
        case: What was made.
        problem: With the case's extents.
        inputs: By name; their data are the oracle's inputs, so a kernel that writes them spoils
            the set. Those that are in-out hold a launch's results after it.
        outputs: By name; scratch.
        initial: Contents of the in-out inputs before a launch, by name.
        untouched: By name of an in-out input, where a launch must leave every bit as it was.
        prints: Fingerprints of the inputs' arenas as they were made.
        bounds: By output.
        cached: References per slab, or None where they are evaluated at every use.
        bytes: Device memory held.
    """

    case: Case
    problem: Problem
    inputs: Mapping[str, Guarded]
    outputs: Mapping[str, Guarded]
    prints: Mapping[str, Tensor]
    bounds: Mapping[str, Bound]
    cached: tuple[tuple[Slab, Mapping[str, Reference]], ...] | None
    bytes: int
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    untouched: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs and outputs as a kernel gets them."""
        return {name: b.tensor for name, b in (*self.inputs.items(), *self.outputs.items())}

    @property
    def values(self) -> dict[str, Tensor]:
        """The inputs as they are before a launch."""
        return {name: b.tensor for name, b in self.inputs.items()} | dict(self.initial)

    @property
    def results(self) -> dict[str, Guarded]:
        """All that a kernel writes: outputs, then in-out inputs."""
        return dict(self.outputs) | {name: self.inputs[name] for name in self.initial}

    def restore(self) -> None:
        """Give the in-out inputs the contents that they have before a launch."""
        for name, value in self.initial.items():
            self.inputs[name].tensor.copy_(value)

    def print_of(self, name: str) -> Tensor:
        """The fingerprint of an input's arena, with what a launch may write as it was before."""
        buffer = self.inputs[name]
        if name not in self.initial:
            return fingerprint(buffer)
        written = buffer.tensor.clone()
        buffer.tensor.copy_(self.initial[name])
        found = fingerprint(buffer)
        buffer.tensor.copy_(written)
        return found
