"""Checks that an operator's own functions distinguish right kernels from wrong ones.

All kernels pass, or none, if the definition ignores its inputs, if `make_inputs` always draws the
same values, or if the scale is so large that every error is small. The checks run in float64 on a
problem of a few elements, so they cost a few calls.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kgen.check.bounds import Bound
from kgen.check.case import NORMAL
from kgen.check.hard_values import few_elements
from kgen.check.oracle import Oracle
from kgen.errors import VerifyError
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.operators.base import Operator

_SAME = 1e-9  # scaled difference allowed between runs in float64: a GPU sums in any order


def demand_sound(
    operator: Operator,
    pass_: Pass,
    problem: Problem,
    oracle: Oracle,
    device: torch.device,
    before: Mapping[str, object],
) -> dict[str, float]:
    """Refuse an operator whose definition or inputs would let a wrong kernel pass.

    Args:
        operator, pass_, problem: The operator, pass and problem to verify.
        oracle: Evaluates the definition.
        device: Where to evaluate.
        before: `global_state` before any function of the operator was called.
    Returns:
        Per output, its scaled distance from zeros or from the output of other inputs, whichever is
        smaller. `demand_narrow` compares it with the bounds.
    Raises:
        VerifyError: If a wrong kernel would pass; the text says how to repair the operator.
    """
    small = few_elements(operator, problem)

    def drawn(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(device=device).manual_seed(seed)
        found = operator.make_inputs(pass_.name, small, NORMAL, generator, device)
        return {t.name: found[t.name] for t in pass_.inputs if t.name in found}

    one, again, other = drawn(1), drawn(1), drawn(2)
    _demand_state(operator, "make_inputs", before, device)
    floating = [name for name, value in one.items() if value.is_floating_point() and value.numel()]
    changed = [name for name in one if not _is_same(one[name], again[name])]
    if changed:
        raise VerifyError(
            f"{operator.name}: make_inputs draws another '{changed[0]}' from the same seed\n"
            "  next: draw with the generator that it is given, and keep nothing between calls"
        )
    if floating and all(_is_same(one[name], other[name]) for name in floating):
        raise VerifyError(
            f"{operator.name}: make_inputs draws the same values for the case '{NORMAL}' from "
            "every seed, so that a kernel may return what it once returned\n"
            "  next: draw random values there, with the generator that it is given"
        )
    values, scales = oracle.exact(one)
    repeated, _ = oracle.exact(one)
    others, _ = oracle.exact(other)
    _demand_state(operator, "the definition", before, device)
    nearest: dict[str, float] = {}
    for t in pass_.results:
        y = values[t.name]
        if y.numel() == 0:
            continue
        if not bool(y.isfinite().any()):
            raise VerifyError(
                f"{operator.name}: the definition gives '{t.name}' without a finite value on "
                f"ordinary inputs, which says nothing of a kernel\n"
                "  next: mend the definition, or draw milder inputs"
            )
        scale = scales[t.name]
        if _difference(y, repeated[t.name], scale) > _SAME:
            raise VerifyError(
                f"{operator.name}: the definition gives another '{t.name}' for the same inputs\n"
                "  next: draw nothing in it, and keep nothing between calls"
            )
        apart = _difference(y, others[t.name], scale)
        # An output may be 0: the gradient of a state on which no output of the problem depends.
        is_zero = not bool(y.any()) and not bool(others[t.name].any())
        if apart <= _SAME and not is_zero:
            raise _constant(operator, t.name)
        if not is_zero:
            nearest[t.name] = min(apart, _difference(y, torch.zeros_like(y), scale))
    filled = [t.name for t in pass_.results if values[t.name].numel()]
    if filled and not nearest:
        raise _constant(operator, filled[0])
    return nearest


def _constant(operator: Operator, output: str) -> VerifyError:
    return VerifyError(
        f"{operator.name}: the definition gives the same '{output}' for all inputs, so "
        "that a kernel need not compute it\n"
        "  next: mend the definition, or leave this output out"
    )


def demand_narrow(
    operator: Operator, nearest: Mapping[str, float], bounds: Mapping[str, Bound]
) -> None:
    """Refuse a scale so large that zeros or the outputs of other inputs would be within the bound.

    Args:
        operator: The operator to verify.
        nearest: From `demand_sound`.
        bounds: Bounds of ordinary inputs, by output.
    Raises:
        VerifyError: If a bound is that wide.
    """
    for name, distance in nearest.items():
        if distance <= bounds[name].bound:
            raise VerifyError(
                f"{operator.name}: a kernel that returned zeros, or '{name}' of other inputs, "
                f"would be within the bound of {bounds[name].bound:.3g}\n"
                "  next: give the operator a smaller `scale`, or none"
            )


def _difference(one: Tensor, other: Tensor, scale: Tensor) -> float:
    """The largest scaled difference; Inf where one value is finite and the other is not."""
    both = one.isfinite() & other.isfinite()
    if bool((one.isfinite() != other.isfinite()).any()):
        return float("inf")
    return float(torch.where(both, (one - other).abs() / scale, 0.0).max())


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def global_state(device: torch.device) -> dict[str, object]:
    """torch's global settings that a user's function may change, by the names used in errors."""
    generator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "global generator": bytes(torch.get_rng_state().numpy()),
        "global generator of the GPU": None if generator is None else bytes(generator.numpy()),
    }


def _demand_state(
    operator: Operator, what: str, before: Mapping[str, object], device: torch.device
) -> None:
    after = global_state(device)
    changed = [name for name, value in before.items() if after[name] != value]
    if changed:
        raise VerifyError(
            f"{operator.name}: {what} changes torch's {changed[0]}\n"
            "  next: leave it; random values come from the generator that make_inputs is given"
        )
