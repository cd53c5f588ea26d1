"""Times the entrants of finals, each on all kinds of inputs, and collects the result.

Every entrant is timed on every kind of inputs in the same interleaved rounds. For each entrant, the
samples on the inputs where it is slower count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kgen.measure.compare import Comparison
from kgen.model.record import Timing
from kgen.worker.binding import Call
from kgen.worker.inputs import slower_of
from kgen.worker.messages import FinalsOutcome

Calls = Mapping[str, Sequence[Call]]  # the calls of an entrant, by the name of the inputs
Compare = Callable[[Mapping[str, Sequence[Call]]], tuple[Comparison, dict[str, str]]]


LIBRARY, PEER = "library", "peer "  # an entrant's name, a prefix of names; kernels are numbered


def compared(entrants: Mapping[str, Calls], compare: Compare) -> FinalsOutcome:
    """Time entrants side by side, and take the slower inputs of each.

    Args:
        entrants: Calls by name: kernels by number, in the order of the finalists; peers; the
            library's function.
        compare: Times several entrants in interleaved rounds.
    """
    flat = {
        f"{name} on {inputs}": calls
        for name, by_inputs in entrants.items()
        for inputs, calls in by_inputs.items()
    }
    result, clocks = compare(flat)
    timings: dict[str, Timing] = {}
    samples: dict[str, tuple[float, ...]] = {}
    for name, by_inputs in entrants.items():
        timings[name] = slower_of({i: result.timings[f"{name} on {i}"] for i in by_inputs})
        samples[name] = result.samples[f"{name} on {timings[name].inputs}"]
    kernels = [name for name in entrants if name.isdigit()]
    peers = [name for name in entrants if name.startswith(PEER)]
    return FinalsOutcome(
        timings=tuple(timings[name] for name in kernels),
        samples_us=tuple(samples[name] for name in kernels),
        peers={name.removeprefix(PEER): timings[name] for name in peers},
        peer_samples_us={name.removeprefix(PEER): samples[name] for name in peers},
        clocks=clocks,
        library=timings.get(LIBRARY),
        library_us=samples.get(LIBRARY, ()),
    )


def split_by_inputs(
    calls: Sequence[Call], sets: Mapping[str, Sequence[object]]
) -> dict[str, Sequence[Call]]:
    """Split a sequence of calls, one per buffer set, by the kind of inputs of the sets."""
    found: dict[str, Sequence[Call]] = {}
    begin = 0
    for inputs, its in sets.items():
        found[inputs] = calls[begin : begin + len(its)]
        begin += len(its)
    return found
