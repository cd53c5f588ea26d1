"""How far outputs are from the oracle's, whoever made them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kgen.model.record import OutputAccuracy
from kgen.verify.compare import scaled_error
from kgen.verify.fixture import Fixture, InputSet


def scaled_errors(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The largest scaled error of each output, still on the device.

    Args:
        fixture: Of the input set.
        made: The input set that the outputs were made from.
        outputs: By name; not all have to be there.
    """
    worst: dict[str, Tensor] = {}
    for slab, references in fixture.references(made):
        for t in fixture.pass_.outputs:
            if t.name not in references or t.name not in outputs:
                continue
            y = slab.of(outputs[t.name], t.dims)
            error = scaled_error(y, references[t.name], made.bounds[t.name].bound)
            known = worst.get(t.name)
            worst[t.name] = error if known is None else torch.maximum(known, error)
    return worst


def output_accuracy(
    fixture: Fixture, made: InputSet, outputs: Mapping[str, Tensor]
) -> tuple[OutputAccuracy, ...]:
    """The error of each output beside its bound; infinite if something is NaN that must not be.

    Args: as of `scaled_errors`.
    """
    errors = scaled_errors(fixture, made, outputs)
    found = []
    for name in [t.name for t in fixture.pass_.outputs if t.name in errors]:
        bound, largest = made.bounds[name], float(errors[name])
        found.append(OutputAccuracy(
            name, math.inf if math.isnan(largest) else largest, bound.bound, bound.eager_error,
            bound.loss,
        ))
    return tuple(found)
