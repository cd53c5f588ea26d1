"""The errors of outputs against the oracle, for kernels and for the definition."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kgen.check.case import other_case
from kgen.check.compare import explain, scaled_error, summed_errors
from kgen.check.fixture import Fixture
from kgen.check.input_set import InputSet
from kgen.model.record import OutputAccuracy


def scaled_errors(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The largest scaled error of each output, still on the device.

    Args:
        fixture: The fixture that made the input set.
        made: The input set from which the outputs were computed.
        outputs: Outputs and in-out tensors by name; some may be missing.
    """
    worst: dict[str, Tensor] = {}
    for slab, references in fixture.references(made):
        for t in fixture.pass_.results:
            if t.name not in references or t.name not in outputs:
                continue
            y = slab.of(outputs[t.name], t.dims)
            error = scaled_error(y, references[t.name], made.bounds[t.name].bound)
            known = worst.get(t.name)
            worst[t.name] = error if known is None else torch.maximum(known, error)
    return worst


MEAN_SHARE = 0.1
"""Share of an element's bound that the mean error may reach: rounding errors cancel in the mean,
systematic errors do not."""
MEAN_SHARE_16 = 0.03
"""The same for an output of 16 bits, whose bound is mostly the rounding of the result, with a mean
of 0. Rounding toward zero reaches 0.06; the kernels of all operators stay within sampling noise."""
_MEAN_NOISE = 2.0  # sampling noise allowed: this times bound / sqrt(number of elements)
_MEAN_NOISE_16 = 1.5  # the same for 16 bits; 0.6 is the largest value seen
_DIVERSE = 8  # values are taken to be independent if the last dim has at least this extent
_MEAN_ULPS = 2.0  # fp32 ulp allowed beyond that: tensor cores truncate when they accumulate


def mean_errors(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The larger of each output's two mean scaled errors (`summed_errors`), on the device.

    Args: as in `scaled_errors`.
    """
    sums: dict[str, Tensor] = {}
    for slab, references in fixture.references(made):
        for t in fixture.pass_.results:
            if t.name not in references or t.name not in outputs:
                continue
            y = slab.of(outputs[t.name], t.dims)
            found = summed_errors(y, references[t.name], made.bounds[t.name].bound)
            sums[t.name] = sums[t.name] + found if t.name in sums else found
    return {n: both.abs().amax() / max(outputs[n].numel(), 1) for n, both in sums.items()}


def largest_mean(bound: float, y: Tensor) -> float:
    """The limit on an output's mean scaled error.

    Args:
        bound: The bound on the scaled error of a single element.
        y: The output; only its shape and dtype are used.
    """
    share, noise = MEAN_SHARE, _MEAN_NOISE
    # With one column, a norm gives the same value in every row, and all rows round to one side.
    if y.element_size() == 2 and y.dim() > 0 and y.shape[-1] >= _DIVERSE:
        share, noise = MEAN_SHARE_16, _MEAN_NOISE_16
    sampled = noise * bound / math.sqrt(max(y.numel(), 1))
    return share * bound + sampled + _MEAN_ULPS * torch.finfo(torch.float32).eps


def output_accuracy(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> tuple[OutputAccuracy, ...]:
    """The error of each output beside its bound; infinite if an element is wrongly NaN.

    Args: as in `scaled_errors`.
    """
    errors = scaled_errors(fixture, made, outputs)
    found = []
    for name in [t.name for t in fixture.pass_.results if t.name in errors]:
        bound, largest = made.bounds[name], float(errors[name])
        found.append(OutputAccuracy(
            name, math.inf if math.isnan(largest) else largest, bound.bound, bound.eager_error,
            bound.loss,
        ))
    return tuple(found)


def touched_elements(made: InputSet, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whether bits changed in elements that a launch must not touch, still on the device.

    Args:
        made: The input set from which the outputs were computed.
        outputs: Outputs and in-out tensors by name; some may be missing.
    Returns:
        A 0-d bool tensor for each in-out tensor with such elements, by name.
    """
    found: dict[str, Tensor] = {}
    for name, untouched in made.untouched.items():
        if name in outputs:
            before = made.initial[name]
            word = torch.int32 if before.element_size() == 4 else torch.int16
            changed = outputs[name].view(word) != before.view(word)
            found[name] = (changed & untouched).any()
    return found


def touched_text(name: str) -> str:
    """The message for a tensor for which `touched_elements` is true."""
    return f"{name} was written where the call must leave it as it was"


def fault_of(fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]) -> str:
    """Describe the outputs out of bound, with the worst element of each; empty if there are none.

    Args: as in `scaled_errors`.
    """
    errors = scaled_errors(fixture, made, outputs)
    wrong = [n for n, error in errors.items() if not float(error) <= made.bounds[n].bound]
    touched = [touched_text(n) for n, is_so in touched_elements(made, outputs).items() if is_so]
    return "\n  ".join([
        *touched, *(explained(fixture, made, outputs[name], name) for name in wrong)
    ])


def explained(fixture: Fixture, made: InputSet, y: Tensor, name: str) -> str:
    """Describe how many elements of an output are out of bound, and the worst of them."""
    declared = next(t for t in fixture.pass_.results if t.name == name)
    parts = (
        (slab, references[name])
        for slab, references in fixture.references(made)
        if name in references
    )
    return explain(name, y, declared.dims, made.bounds[name], parts)


def other_values(fixture: Fixture, made: InputSet) -> dict[str, Tensor]:
    """Draw other values for the inputs of an input set, by name."""
    return fixture.values(other_case(made.case), made.problem)
