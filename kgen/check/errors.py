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
        fixture: Of the input set.
        made: The input set that the outputs were made from.
        outputs: By name, in-out tensors among them; not all have to be there.
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
"""Of the bound of an element that a mean error may use: errors that round cancel, others do not."""
MEAN_SHARE_16 = 0.03
"""The same of an output of 16 bits. There the bound is nearly all rounding of the result, whose
mean is 0. Rounding toward zero uses 0.06; the kernels of all operators use sampling noise alone."""
_MEAN_NOISE = 2.0  # times the bound over the square root of the elements
_MEAN_NOISE_16 = 1.5  # at most 0.6 was seen
_DIVERSE = 8  # least extent of the last dim of an output whose values are taken to be independent
_MEAN_ULPS = 2.0  # of fp32: tensor cores cut off where they add


def mean_errors(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The larger of each output's two mean scaled errors (`summed_errors`), on the device.

    Args: as of `scaled_errors`.
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
    """What is allowed of an output's mean scaled error, beside the bound of an element.

    Args:
        bound: Of an element.
        y: The output; only its shape and dtype are looked at.
    """
    share, noise = MEAN_SHARE, _MEAN_NOISE
    # A norm of one column gives the same value in every row, which is rounded to one side.
    if y.element_size() == 2 and y.dim() > 0 and y.shape[-1] >= _DIVERSE:
        share, noise = MEAN_SHARE_16, _MEAN_NOISE_16
    sampled = noise * bound / math.sqrt(max(y.numel(), 1))
    return share * bound + sampled + _MEAN_ULPS * torch.finfo(torch.float32).eps


def output_accuracy(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> tuple[OutputAccuracy, ...]:
    """The error of each output beside its bound; infinite if something is NaN that must not be.

    Args: as of `scaled_errors`.
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
    """Whether bits changed where a launch must leave them as they were, on the device.

    Args:
        made: The input set that the outputs were made from.
        outputs: By name; not all have to be there.
    Returns:
        By name of an in-out tensor, a 0-d bool tensor.
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
    """What to say of a tensor for which `touched_elements` is true."""
    return f"{name} was written where the call must leave it as it was"


def fault_of(fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]) -> str:
    """Say which outputs are out of bound, with the worst element of each; empty if none is.

    Args: as of `scaled_errors`.
    """
    errors = scaled_errors(fixture, made, outputs)
    wrong = [n for n, error in errors.items() if not float(error) <= made.bounds[n].bound]
    touched = [touched_text(n) for n, is_so in touched_elements(made, outputs).items() if is_so]
    return "\n  ".join([
        *touched, *(explained(fixture, made, outputs[name], name) for name in wrong)
    ])


def explained(fixture: Fixture, made: InputSet, y: Tensor, name: str) -> str:
    """Say how much of an output is out of bound, and the worst element."""
    declared = next(t for t in fixture.pass_.results if t.name == name)
    parts = (
        (slab, references[name])
        for slab, references in fixture.references(made)
        if name in references
    )
    return explain(name, y, declared.dims, made.bounds[name], parts)


def other_values(fixture: Fixture, made: InputSet) -> dict[str, Tensor]:
    """Inputs like those of an input set, with other values."""
    return fixture.values(other_case(made.case), made.problem)
