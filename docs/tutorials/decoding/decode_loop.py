"""Decode sequences of different lengths with a pool of states, beside wkv7 of each whole sequence.

    pip install ./generated
    python docs/tutorials/decoding/decode_loop.py [--device cuda] [--sequences 7] [--batch 3]

The tutorial is docs/tutorials/decoding.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

HEADS, KEYS = 2, 16
NAMES = ("r", "w", "k", "v", "a", "b")
Rows = dict[str, Tensor]  # of one sequence: [T, H, K] each


class DecodeLoop:
    """A fixed batch of places, each empty or with a sequence that has a slot of the pool.

    Attributes:
        pool: The states, [slots, H, K, V].
        indices: The slot of each place; -1 where the place is empty.
        rows: The rows of one step, [batch, 1, H, K] by name.
        y: What the last step gave, [batch, 1, H, V].
    """

    def __init__(self, decode: Callable[..., Tensor], batch: int, slots: int, device: str) -> None:
        """Allocate; on a GPU capture the step in a CUDA graph.

        Args:
            decode: `kgen_ops.wkv7_decode`.
            batch: Places.
            slots: States in the pool, as many as places at least.
            device: Where.
        """
        self.pool = torch.zeros(slots, HEADS, KEYS, KEYS, device=device)
        self.indices = torch.full((batch,), -1, dtype=torch.int64, device=device)
        self.rows = {n: torch.zeros(batch, 1, HEADS, KEYS, device=device) for n in NAMES}
        self._decode = decode
        self._free = list(range(slots))
        self.y = self._step()  # loads the kernel; every place is empty, so no state is touched
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.startswith("cuda"):
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.y = self._step()

    def _step(self) -> Tensor:
        return self._decode(
            **self.rows, state_pool=self.pool, state_indices=self.indices, decay_form="clamp"
        )

    def begin(self, place: int) -> None:
        """Give a place a slot, and clear its state."""
        slot = self._free.pop()
        self.pool[slot] = 0
        self.indices[place] = slot

    def end(self, place: int) -> None:
        """Empty a place."""
        self._free.append(int(self.indices[place]))
        self.indices[place] = -1

    def step(self) -> Tensor:
        """Compute y of the rows, and update the states of the places that are not empty."""
        if self._graph is None:
            self.y = self._step()
        else:
            self._graph.replay()
        return self.y


def decoded(loop: DecodeLoop, sequences: Sequence[Rows]) -> list[Tensor]:
    """Run sequences through a loop, each as soon as a place is empty; returns y of each."""
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    waiting = list(range(len(sequences)))
    running: dict[int, int] = {}  # place -> sequence
    places = range(loop.indices.numel())
    while waiting or running:
        for place in places:
            if place not in running and waiting:
                running[place] = waiting.pop(0)
                loop.begin(place)
        for place, number in running.items():
            for name, row in loop.rows.items():
                row[place, 0] = sequences[number][name][len(outputs[number])]
        y = loop.step()
        for place, number in list(running.items()):
            outputs[number].append(y[place, 0].clone())
            if len(outputs[number]) == len(sequences[number]["r"]):
                del running[place]
                loop.end(place)
    return [torch.stack(steps) for steps in outputs]


def random_sequences(count: int, device: str) -> list[Rows]:
    """Rows as a model of RWKV-7 computes them, for 1 to 12 steps."""
    torch.manual_seed(0)
    made = []
    for steps in torch.randint(1, 13, (count,)).tolist():
        rows = {n: torch.randn(steps, HEADS, KEYS) for n in NAMES}
        unit = torch.nn.functional.normalize(rows["a"], dim=-1)
        rows |= {"a": -unit, "b": unit * rows["b"].sigmoid()}
        made.append({n: x.to(device) for n, x in rows.items()})
    return made


def largest_difference(
    wkv7: Callable[..., Tensor], sequences: Sequence[Rows], outputs: Sequence[Tensor]
) -> float:
    """Between the outputs of a loop and those of whole sequences."""
    worst = 0.0
    for rows, y in zip(sequences, outputs, strict=True):
        whole = wkv7(**{n: x[None] for n, x in rows.items()}, decay_form="clamp")[0]
        worst = max(worst, (whole - y).abs().max().item())
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 0 if the loop gives what the whole sequences give."""
    kgen_ops: Any = importlib.import_module("kgen_ops")
    parser = argparse.ArgumentParser(description="Decode with a pool of states.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=7)
    parser.add_argument("--batch", type=int, default=3)
    options = parser.parse_args(arguments)
    with torch.no_grad():
        loop = DecodeLoop(
            kgen_ops.wkv7_decode, options.batch, options.batch + 2, options.device)
        sequences = random_sequences(options.sequences, options.device)
        outputs = decoded(loop, sequences)
        worst = largest_difference(kgen_ops.wkv7, sequences, outputs)
    steps = sum(len(y) for y in outputs)
    print(f"{len(outputs)} sequences, {steps} steps, {options.batch} places: "
          f"largest difference {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
