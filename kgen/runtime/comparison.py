"""Compare the outputs of a kernel with those of the safe kernel on one problem.

The bounds hold for inputs of one sign (`made_up`). On a caller's own inputs sums may cancel, so
that two correct kernels differ by more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .errors import CheckError
from .signature import PassSignature

# Bounds of norm(difference) / norm(result of the safe kernel). Measured on the CPU over all rows of
# an H200: at most 6e-4 in 16 bits, 9e-7 in fp32. A wrong kernel exceeds these by orders of
# magnitude.
_TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2}
# Sizes of made-up values. The second is used if the safe kernel's results for the first are not
# finite: the state of wkv7 grows by a^T b in each step.
SIZES = (1.0, 1 / 64)


def made_up(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device,
    generator: torch.Generator, size: float = 1.0, positive: bool = False,
) -> Tensor:
    """Return random values in (-size, -size / 10).

    Values of one sign avoid cancellation in sums; a negative logarithm of a decay makes it decay.

    Args:
        shape: Extents.
        strides: The strides of each dim, in elements; 0 repeats an element.
        dtype: A floating-point dtype.
        device: The device of the tensor and the generator.
        generator: A generator; not PyTorch's default one, whose state belongs to the caller.
        size: One of SIZES.
        positive: Whether the values are positive instead.
    Raises:
        RuntimeError: If elements overlap other than by strides of 0.
    """
    extents = [1 if step == 0 else extent for extent, step in zip(shape, strides, strict=True)]
    made = torch.empty_strided(extents, strides, dtype=dtype, device=device)
    made.uniform_(-size, -size / 10, generator=generator)
    return (made.neg_() if positive else made).expand(*shape)


def made_up_like(
    signature: PassSignature, tensors: Sequence[Tensor | None], size: float
) -> list[Tensor | None]:
    """Return `made_up` inputs of the same layouts and a given size, which suit every operator.

    An input with a fixed extent, as the numerator, denominator and exponent of wkv4's state, is
    positive: a negative denominator would cancel with the exponentials that are added to it.
    Integers, overlapping views and None stay as they are.
    """
    made: list[Tensor | None] = []
    generators: dict[torch.device, torch.Generator] = {}
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        if tensor is None or not tensor.is_floating_point():
            made.append(tensor)
            continue
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        try:
            made.append(made_up(tensor.shape, tensor.stride(), tensor.dtype, tensor.device,
                                generators[tensor.device], size,
                                positive=any(dim.isdigit() for dim in argument.dims)))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            made.append(tensor)
    return made


def updated_copies(
    signature: PassSignature, tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the inputs of a call; those that it updates are replaced by copies of equal strides.
    """
    found = list(tensors)
    for index in signature.in_outs:
        tensor = found[index]
        if tensor is not None:
            found[index] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
    return found


def results(
    signature: PassSignature, tensors: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return all tensors that a call writes: its outputs, then the inputs that it updates."""
    return [*outputs, *(tensors[index] for index in signature.in_outs)]


def tolerance(dtypes: Iterable[str]) -> float:
    """The bound of `difference` for a problem of these dtypes."""
    return max(_TOLERANCES.get(name, 0.0) for name in dtypes)


def are_finite(outputs: Sequence[Tensor | None]) -> bool:
    """Whether all outputs are finite; outputs with Inf or NaN cannot be compared."""
    return all(output is None or bool(output.isfinite().all()) for output in outputs)


def difference(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The largest norm(a - b) / norm(b) of two lists of outputs; inf if it is NaN."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a is None or b is None:
            continue
        scale = b.double().norm().item()
        error = (a.double() - b.double()).norm().item() / (scale or 1.0)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def demand_agreement(
    found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], dtypes: Iterable[str],
    what: str,
) -> bool:
    """Compare outputs with those of the safe kernel, unless these are not finite.

    Args:
        found: Outputs; None for an absent one.
        wanted: The outputs of the safe kernel.
        dtypes: The dtypes of the problem.
        what: Name of the compared kernel, for the error.
    Returns:
        Whether the outputs were compared; False if those of the safe kernel are not finite.
    Raises:
        CheckError: If they differ by more than rounding explains.
    """
    if not are_finite(wanted):
        return False
    error, bound = difference(found, wanted), tolerance(dtypes)
    if not error <= bound:
        raise CheckError(
            f"{what} differs from the safe kernel's by {error:.2e} of its norm; allowed are "
            f"{bound:.0e}\n  next: report it with this text; without KGEN_CHECK the call is not "
            "compared"
        )
    return True
