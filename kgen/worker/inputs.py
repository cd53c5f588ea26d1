"""The inputs that a kernel is timed on: random ones, and those of a trained model.

A kernel that branches on values, or whose power consumption depends on them, may be slower on one
of the two. The slower time counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kgen.errors import VerifyError
from kgen.model.problem import Problem
from kgen.model.record import RANDOM, TRAINED, OtherTime, Timing
from kgen.operators.base import Operator
from kgen.worker.binding import Tensors
from kgen.worker.facts import is_out_of_memory

SEED_STEP = 0x5EED  # seed of the trained inputs minus that of the random ones


def inputs_of(operator: Operator) -> tuple[str, ...]:
    """The names of the inputs that an operator is timed on; random ones first."""
    return (RANDOM,) if operator.trained is None else (RANDOM, TRAINED)


def trained_sets(
    operator: Operator, pass_name: str, problem: Problem, sets: Sequence[Tensors], seed: int
) -> list[Tensors]:
    """Make the buffer sets of the trained inputs from those of the random ones.

    The sets share outputs with the random ones, but no inputs: peers identify a set by the address
    of a tensor.

    Args:
        operator: Declares the trained inputs.
        pass_name: `forward` or `backward`.
        problem: The problem of the sets.
        sets: From `buffer_sets`.
        seed: The seed of the random inputs.
    Raises:
        VerifyError: If the operator's `trained` contradicts the signature, or if memory is short.
    """
    declared = problem.present(operator.signature.pass_named(pass_name))
    names = {t.name for t in declared.inputs}
    try:
        return [
            {**given, **_drawn(operator, pass_name, problem, given, names, seed + place)}
            for place, given in enumerate(sets, start=SEED_STEP)
        ]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise VerifyError(
            f"{problem} does not fit: there is no memory for its trained inputs beside the random "
            "ones\n  choose a smaller problem, or a larger --device-memory"
        ) from None


def _drawn(
    operator: Operator, pass_name: str, problem: Problem, given: Tensors, names: set[str], seed: int
) -> Tensors:
    """Draw the trained inputs of one set."""
    assert operator.trained is not None
    inputs = {name: given[name] for name in names}
    generator = torch.Generator(device=_device(inputs)).manual_seed(seed)
    try:
        found = operator.trained(pass_name, problem, inputs, generator)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise VerifyError(
            f"{operator.name}: trained raised {type(error).__name__}: {error}\n"
            f"  inputs: {pass_name} {problem}"
        ) from None
    made: Tensors = {}
    for name, tensor in inputs.items():
        made[name] = torch.empty_like(tensor)
        new = found.pop(name, tensor)
        if new.shape != tensor.shape or new.dtype != tensor.dtype:
            raise VerifyError(
                f"{operator.name}: trained gives {new.dtype} {tuple(new.shape)} for '{name}', "
                f"whose random input is {tensor.dtype} {tuple(tensor.shape)}\n"
                "  next: return tensors of the same shape and dtype"
            )
        made[name].copy_(new)
    if found:
        raise VerifyError(
            f"{operator.name}: trained gives '{next(iter(found))}', which is no input of "
            f"{pass_name} {problem}\n  inputs: {', '.join(sorted(names))}"
        )
    return made


def _device(inputs: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(inputs.values())).device


def slower_of(by_inputs: Mapping[str, Timing]) -> Timing:
    """The timing with the largest median, which also records the medians on the other inputs.

    Args:
        by_inputs: Timings by inputs, at least one; among equal medians the first counts.
    """
    name = max(by_inputs, key=lambda inputs: by_inputs[inputs].median_us)
    others = (
        OtherTime(inputs, t.median_us, t.low_us, t.high_us)
        for inputs, t in by_inputs.items()
        if inputs != name
    )
    return replace(by_inputs[name], inputs=name, others=tuple(others))
