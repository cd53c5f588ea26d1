"""The definition in float64, and the magnitude errors are relative to.

docs/verification.md derives what is computed here.
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

_TEMPORARIES = 10  # float64 tensors alive while a definition and the comparison run, about


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
    """The oracle's values of one output in one slab, in the form that comparing is cheap in.

    y64 = high - low / inverse to float64's precision or nearly (48 bits).

    Attributes:
        high: y64 rounded to fp32.
        low: (high - y64) * inverse in fp32; None where the output's dtype is so coarse that
            fp32 is an exact enough oracle.
        inverse: 1 / scale in fp32.
        special: Where y64 is NaN, Inf, or near the end of the output dtype's range; None if
            nowhere.
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
    """Round the inputs of the dtype that `to` rounds; None: as they are."""
    if to is None:
        return inputs
    stored = torch_dtype(to.torch)
    return {
        name: round_mantissa(t.contiguous(), to.mantissa_bits) if t.dtype == stored else t
        for name, t in inputs.items()
    }


def _in(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert; whole numbers stay as they are."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One slab of one input set, evaluated.

    Attributes:
        references: Per output that has the slab dim.
        eager: Per output, the error of the definition in the problem's dtypes.
        ranged: Per output, what the same precision would lose with fp32's range.
    """

    references: dict[str, Reference]
    eager: dict[str, float]
    ranged: dict[str, float]


class Sums:
    """Outputs without the slab dim, which are sums over it, gathered slab by slab.

    Errors of the slabs' sums add up to the error of the whole. Scales add in quadrature, as
    independent errors do: a sum of magnitudes would grow so far beyond the sum itself that a bound
    relative to it allows anything.

    Attributes:
        names: The outputs.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype], enlarged: float) -> None:
        """Start with nothing; `dtypes` has the outputs that are sums. `enlarged`: `Oracle`'s."""
        self.names = tuple(dtypes)
        self._dtypes = dtypes
        self._enlarged = enlarged
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Add a slab's float64 value and scale, and for `losses` its eager and fp32 values."""
        new = [part.double() for part in parts]
        if old := self._parts.get(name):
            new = [a + b for a, b in zip(old, new, strict=True)]
            new[1] = torch.hypot(old[1], parts[1].double())
        self._parts[name] = new

    def references(self) -> dict[str, Reference]:
        """The oracle's values, once all slabs are in."""
        return {
            name: reference_of(parts[0], parts[1], self._dtypes[name], self._enlarged)
            for name, parts in self._parts.items()
        }

    def losses(self) -> dict[str, tuple[float, float]]:
        """Per output (eager, fp32) losses of the definition, once all slabs are in."""
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
        enlarged: What the inputs are multiplied by beyond ordinary ones (`smallest_scale`).
    """

    operator: Operator
    pass_: Pass
    scalars: Mapping[str, float]
    enlarged: float = 1.0

    def sums(self, problem: Problem) -> Sums:
        """What gathers the outputs that are sums over the slab dim."""
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
        """Evaluate the oracle on a slab; outputs without the slab dim go into `sums`."""
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
        """Evaluate the oracle on a slab, and what the definition loses there; outputs without the
        slab dim go into `sums`.

        Raises:
            VerifyError: If the definition does not return what the signature declares.
        """
        exact, scales = self._exact(inputs, slab)
        # Operands rounded beforehand lose what rounding them in the products does, and keep fp32's
        # range: both runs below are on them.
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
                # The rounding of a slab's fp32 sum is not what coarser arithmetic would lose.
                amplified = exact[t.name] + growth * (single[t.name].double() - exact[t.name])
                sums.add(t.name, exact[t.name], scales[t.name], native[t.name], amplified)
                continue
            y64 = exact[t.name]
            scale = _usable_scale(y64, scales[t.name], dtype, self.enlarged)
            eager[t.name] = _loss(native[t.name], y64, scale, dtype)
            # fp32 may by luck round nothing; the coarsest dtype rounds an intermediate tensor once.
            single_loss = _loss(single[t.name], y64, scale, dtype)
            ranged[t.name] = growth * max(single_loss, torch.finfo(torch.float32).eps / 2)
            references[t.name] = reference_of(y64, scales[t.name], dtype, self.enlarged)
        return Evaluation(references, eager, ranged)

    def exact(
        self, inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The definition in float64, and the scale of each output."""
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
        """The definition run in the problem's dtypes, and in fp32."""
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
    """Broadcast a scale; where an operator's formula gives no number, take |y64|."""
    scale = scale.to(torch.float64).expand_as(y64)
    scale = torch.where(scale.isfinite(), scale, y64.abs())
    return scale.clamp_min(smallest_scale(dtype, enlarged))


def _loss(y: Tensor, y64: Tensor, scale: Tensor, dtype: torch.dtype) -> float:
    """Return the largest scaled error where the dtype can hold the oracle's value."""
    comparable = y64.isfinite() & (y64.abs() < overflow_threshold(dtype))
    error = torch.where(comparable, (y.double() - y64).abs() / scale, 0.0)
    if error.numel() == 0:
        return 0.0
    worst = float(error.amax())  # NaN propagates
    return worst if math.isfinite(worst) else math.inf


def reference_of(
    y64: Tensor, scale: Tensor, dtype: torch.dtype, enlarged: float = 1.0
) -> Reference:
    """Prepare the oracle's values of an output of a dtype for comparing."""
    inverse64 = _usable_scale(y64, scale, dtype, enlarged).reciprocal()
    high = y64.float()
    low = None
    if dtype == torch.float32:
        low = ((high.double() - y64) * inverse64).float()
    near_end = ~(y64.abs() < torch.finfo(dtype).max / 2)  # true for NaN, too
    special = near_end if bool(near_end.any()) else None
    return Reference(high, low, inverse64.float(), special)
