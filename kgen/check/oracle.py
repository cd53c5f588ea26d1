"""Evaluates the definition in float64, and the scale that errors are relative to.

docs/verification.md derives the formulas of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kgen.check.precision import (
    overflow_threshold,
    round_mantissa,
    rounding_of,
    smallest_scale,
    torch_dtype,
)
from kgen.errors import VerifyError
from kgen.model.dtypes import DType
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.operators.base import Operator

_TEMPORARIES = 10  # estimate of the float64 tensors that evaluation and comparison hold at once


@dataclass(frozen=True, slots=True)
class Slab:
    """Indices start .. start + length - 1 of the operator's slab dim; all of it if dim is None."""

    dim: str | None
    start: int
    length: int

    def of(self, tensor: Tensor, dims: tuple[str, ...]) -> Tensor:
        """Return the part of a tensor with the given dims that lies in the slab."""
        if self.dim is None or self.dim not in dims:
            return tensor
        return tensor.narrow(dims.index(self.dim), self.start, self.length)


WHOLE = Slab(None, 0, 0)


@dataclass(frozen=True, slots=True)
class Reference:
    """The oracle's values of one output in one slab, in a form that makes comparisons cheap.

    y64 = high - low / inverse to about 48 bits, which is nearly float64's precision.

    Attributes:
        high: y64 rounded to fp32.
        low: (high - y64) * inverse in fp32; None if the output's dtype is so coarse that `high`
            alone is accurate enough.
        inverse: 1 / scale in fp32.
        special: Mask of the elements where y64 is NaN, Inf, or at least half the largest number of
            the output's dtype; None if there are none.
    """

    high: Tensor
    low: Tensor | None
    inverse: Tensor
    special: Tensor | None


def slabs(operator: Operator, pass_: Pass, problem: Problem, budget_bytes: int) -> Iterator[Slab]:
    """Cut the problem along the slab dim so that evaluating one slab takes about budget_bytes."""
    dim = operator.slab_dim
    if dim is None:
        yield WHOLE
        return
    extent = problem.dim(dim)
    sliced = sum(math.prod(problem.shape(t.dims)) for t in pass_.tensors if dim in t.dims)
    row_bytes = sliced // max(extent, 1) * 8 * _TEMPORARIES
    step = min(max(1, budget_bytes // max(row_bytes, 1)), max(extent, 1))
    for start in range(0, max(extent, 1), step):
        yield Slab(dim, start, min(step, extent - start))


def _rounded(inputs: Mapping[str, Tensor], to: DType | None) -> Mapping[str, Tensor]:
    """Round the inputs whose storage dtype is that of `to` to the mantissa of `to`; None: no
    rounding.
    """
    if to is None:
        return inputs
    stored = torch_dtype(to.torch)
    return {
        name: round_mantissa(t.contiguous(), to.mantissa_bits) if t.dtype == stored else t
        for name, t in inputs.items()
    }


def _in(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the floating-point tensors; integer tensors stay as they are."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The oracle and the definition's errors on one slab of one input set.

    Attributes:
        references: The oracle's values, per output that has the slab dim.
        eager: Per output, the largest scaled error of the definition in the problem's dtypes.
        ranged: Per output, the error that arithmetic with the problem's precision but fp32's range
            would have.
    """

    references: dict[str, Reference]
    eager: dict[str, float]
    ranged: dict[str, float]


class Sums:
    """Accumulates, slab by slab, the outputs without the slab dim, which are sums over it.

    The error of an output is the sum of the slabs' errors. Scales add in quadrature, as independent
    errors do: a plain sum of scales would grow so far beyond the output itself that a bound
    relative to it would allow anything.

    Attributes:
        names: The outputs.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], enlarged: float) -> None:
        """Start empty.

        Args:
            dtypes: Dtypes of the outputs that are sums, by name.
            enlarged: As in `Oracle`.
        """
        self.names = tuple(dtypes)
        self._dtypes = dtypes
        self._enlarged = enlarged
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Add a slab's float64 value and scale; `losses` also needs its eager and fp32 values."""
        new = [part.double() for part in parts]
        if old := self._parts.get(name):
            new = [a + b for a, b in zip(old, new, strict=True)]
            new[1] = torch.hypot(old[1], parts[1].double())
        self._parts[name] = new

    def references(self) -> dict[str, Reference]:
        """The oracle's values, after all slabs have been added."""
        return {
            name: reference_of(parts[0], parts[1], self._dtypes[name], self._enlarged)
            for name, parts in self._parts.items()
        }

    def losses(self) -> dict[str, tuple[float, float]]:
        """Per output the definition's (eager, fp32) losses, after all slabs have been added."""
        found: dict[str, tuple[float, float]] = {}
        for name, (y64, scale, native, single) in self._parts.items():
            dtype = self._dtypes[name]
            usable = _usable_scale(y64, scale, dtype, self._enlarged)
            found[name] = (_loss(native, y64, usable, dtype), _loss(single, y64, usable, dtype))
        return found


@dataclass(frozen=True, slots=True)
class Oracle:
    """Evaluates one pass of one operator with given scalars.

    Attributes:
        enlarged: The factor between the inputs and ordinary ones (`smallest_scale`).
    """

    operator: Operator
    pass_: Pass
    scalars: Mapping[str, float]
    enlarged: float = 1.0

    def sums(self, problem: Problem) -> Sums:
        """An empty accumulator for the outputs that are sums over the slab dim."""
        dim = self.operator.slab_dim
        return Sums(
            {
                t.name: self._dtype(problem, t.dtype)
                for t in self.pass_.results
                if dim is not None and dim not in t.dims
            },
            self.enlarged,
        )

    def references(
        self, problem: Problem, inputs: Mapping[str, Tensor], slab: Slab, sums: Sums
    ) -> dict[str, Reference]:
        """Evaluate the oracle on a slab; outputs without the slab dim are added to `sums`."""
        exact, scales = self._exact(inputs, slab)
        found: dict[str, Reference] = {}
        for t in self.pass_.results:
            if self._is_sum(t.dims):
                sums.add(t.name, exact[t.name], scales[t.name])
            else:
                dtype = self._dtype(problem, t.dtype)
                found[t.name] = reference_of(
                    exact[t.name], scales[t.name], dtype, self.enlarged)
        return found

    def evaluate(
        self, problem: Problem, inputs: Mapping[str, Tensor], slab: Slab, sums: Sums
    ) -> Evaluation:
        """Evaluate the oracle and the definition's losses on a slab.

        Outputs without the slab dim are added to `sums`.

        Raises:
            VerifyError: If the definition does not return what the signature declares.
        """
        exact, scales = self._exact(inputs, slab)
        # Both runs below get inputs that are rounded beforehand: that loses the same precision as
        # rounding the operands of each product, and keeps fp32's range.
        part = _rounded(self._slice(inputs, slab), rounding_of(self.operator, problem))
        used = [problem.dtype(t.dtype) for t in self.pass_.tensors]
        coarsest = max(dtype.eps for dtype in used if not dtype.integral)
        references: dict[str, Reference] = {}
        eager: dict[str, float] = {}
        ranged: dict[str, float] = {}
        native, single = self._native_and_single(problem, part)
        growth = coarsest / torch.finfo(torch.float32).eps
        for t in self.pass_.results:
            dtype = self._dtype(problem, t.dtype)
            if native[t.name].dtype != dtype:
                raise VerifyError(
                    f"{self.operator.name}: the definition returns '{t.name}' as "
                    f"{native[t.name].dtype}, the signature declares {dtype}\n"
                    "  end the definition with .to() of the declared output's dtype"
                )
            if self._is_sum(t.dims):
                # The fp32 error, scaled up to the coarsest dtype's eps, estimates the error of
                # coarser arithmetic.
                amplified = exact[t.name] + growth * (single[t.name].double() - exact[t.name])
                sums.add(t.name, exact[t.name], scales[t.name], native[t.name], amplified)
                continue
            y64 = exact[t.name]
            scale = _usable_scale(y64, scales[t.name], dtype, self.enlarged)
            eager[t.name] = _loss(native[t.name], y64, scale, dtype)
            # fp32 may by chance be exact here. At least one rounding by the coarsest dtype counts.
            single_loss = _loss(single[t.name], y64, scale, dtype)
            ranged[t.name] = growth * max(single_loss, torch.finfo(torch.float32).eps / 2)
            references[t.name] = reference_of(y64, scales[t.name], dtype, self.enlarged)
        return Evaluation(references, eager, ranged)

    def exact(
        self, inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The definition's outputs in float64, and the scale of each output."""
        values, scales = self._exact(inputs, WHOLE)
        return values, {
            name: _usable_scale(y, scales[name], torch.float32, self.enlarged)
            for name, y in values.items()
        }

    def _exact(
        self, inputs: Mapping[str, Tensor], slab: Slab
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        part = _in(torch.float64, self._slice(inputs, slab))
        outputs = self._define(part)
        if self.operator.scale is None:
            return outputs, {name: default_scale(y) for name, y in outputs.items()}
        return outputs, self.operator.scale(self.pass_.name, part, outputs, self.scalars)

    def _native_and_single(
        self, problem: Problem, part: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The definition's outputs in the problem's dtypes, and in fp32."""
        if all(t.dtype == torch.float32 for t in part.values() if t.is_floating_point()):
            native = self._define(part)
            return native, native
        single = self._define(_in(torch.float32, part))
        if not self.operator.widens:
            return self._define(part), single
        fields = {t.name: t.dtype for t in self.pass_.results}
        rounded = {n: y.to(self._dtype(problem, fields[n])) for n, y in single.items()}
        return rounded, single

    def _define(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = self.operator.definition(self.pass_.name, inputs, self.scalars)
        declared = {t.name for t in self.pass_.results}
        whole = self.operator.signature.pass_named(self.pass_.name)
        if not declared <= set(outputs) <= {t.name for t in whole.results}:
            raise VerifyError(
                f"{self.operator.name}: the definition returns "
                f"{sorted(outputs)}, the signature declares {sorted(declared)}"
            )
        self._demand_shapes(inputs, outputs)
        return {name: outputs[name] for name in declared}

    def _demand_shapes(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, object]) -> None:
        extents = {dim: int(dim) for t in self.pass_.results for dim in t.dims if dim.isdigit()}
        for t in self.pass_.inputs:
            extents |= dict(zip(t.dims, inputs[t.name].shape, strict=True))
        for t in self.pass_.results:
            found = outputs[t.name]
            if not isinstance(found, Tensor):
                raise VerifyError(
                    f"{self.operator.name}: the definition returns '{t.name}' as a "
                    f"{type(found).__name__}, and the signature declares a tensor"
                )
            shape = tuple(found.shape)
            is_right = len(shape) == len(t.dims) and all(
                extents.get(dim, extent) == extent
                for dim, extent in zip(t.dims, shape, strict=True)
            )
            if not is_right:
                wanted = ", ".join(f"{dim}={extents.get(dim, '?')}" for dim in t.dims)
                raise VerifyError(
                    f"{self.operator.name}: the definition returns '{t.name}' of shape {shape}, "
                    f"the signature declares [{wanted}]\n"
                    "  next: mend the definition, or the output's dims in the signature"
                )

    def _slice(self, inputs: Mapping[str, Tensor], slab: Slab) -> dict[str, Tensor]:
        return {t.name: slab.of(inputs[t.name], t.dims) for t in self.pass_.inputs}

    def _is_sum(self, dims: tuple[str, ...]) -> bool:
        return self.operator.slab_dim is not None and self.operator.slab_dim not in dims

    @staticmethod
    def _dtype(problem: Problem, field: str) -> torch.dtype:
        return torch_dtype(problem.dtype(field).torch)


def default_scale(y: Tensor) -> Tensor:
    """Return max(|y|, rms of y over its last dim); NaN and Inf count as 0 in the rms."""
    magnitude = torch.where(y.isfinite(), y, 0.0).abs()
    if y.ndim == 0:
        return magnitude
    return torch.maximum(magnitude, magnitude.square().mean(dim=-1, keepdim=True).sqrt())


def _usable_scale(y64: Tensor, scale: Tensor, dtype: torch.dtype, enlarged: float) -> Tensor:
    """Broadcast a scale to the output; where it is NaN or Inf, use |y64|; limit it from below."""
    scale = scale.to(torch.float64).expand_as(y64)
    scale = torch.where(scale.isfinite(), scale, y64.abs())
    return scale.clamp_min(smallest_scale(dtype, enlarged))


def _loss(y: Tensor, y64: Tensor, scale: Tensor, dtype: torch.dtype) -> float:
    """Return the largest scaled error among the elements that the dtype can represent."""
    comparable = y64.isfinite() & (y64.abs() < overflow_threshold(dtype))
    error = torch.where(comparable, (y.double() - y64).abs() / scale, 0.0)
    if error.numel() == 0:
        return 0.0
    worst = float(error.amax())  # NaN propagates
    return worst if math.isfinite(worst) else math.inf


def reference_of(
    y64: Tensor, scale: Tensor, dtype: torch.dtype, enlarged: float = 1.0
) -> Reference:
    """Convert the float64 values of an output into the form that comparisons use."""
    inverse64 = _usable_scale(y64, scale, dtype, enlarged).reciprocal()
    high = y64.float()
    low = None
    if dtype == torch.float32:
        low = ((high.double() - y64) * inverse64).float()
    near_end = ~(y64.abs() < torch.finfo(dtype).max / 2)  # true for NaN, too
    special = near_end if bool(near_end.any()) else None
    return Reference(high, low, inverse64.float(), special)
