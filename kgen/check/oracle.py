"""Evaluates the definition in float64, and the scale that errors are relative to.

docs/verification.md derives the formulas of this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
        return _references({
            name: (parts[0], self._usable(name), self._dtypes[name])
            for name, parts in self._parts.items()
        })

    def losses(self) -> dict[str, tuple[float, float]]:
        """Per output the definition's (eager, fp32) losses, after all slabs have been added."""
        return _losses({
            name: (y64, self._usable(name), self._dtypes[name], native, single)
            for name, (y64, _, native, single) in self._parts.items()
        })

    def _usable(self, name: str) -> Tensor:
        y64, scale = self._parts[name][:2]
        return _usable_scale(y64, scale, self._dtypes[name], self._enlarged)


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
        found: dict[str, _Exact] = {}
        for t in self.pass_.results:
            if self._is_sum(t.dims):
                sums.add(t.name, exact[t.name], scales[t.name])
                continue
            y64, dtype = exact[t.name], self._dtype(problem, t.dtype)
            found[t.name] = (y64, _usable_scale(y64, scales[t.name], dtype, self.enlarged), dtype)
        return _references(found)

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
        by_slab: dict[str, _Exact] = {}
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
            by_slab[t.name] = (y64, scale, dtype)
        losses = _losses({name: (*of, native[name], single[name]) for name, of in by_slab.items()})
        # fp32 may by chance be exact here. At least one rounding by the coarsest dtype counts.
        least = torch.finfo(torch.float32).eps / 2
        return Evaluation(
            _references(by_slab),
            {name: eager for name, (eager, _) in losses.items()},
            {name: growth * max(single_loss, least) for name, (_, single_loss) in losses.items()},
        )

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
    scale = torch.where(scale.abs() < math.inf, scale, y64.abs())  # `isfinite` takes twice the ops
    return scale.clamp_min(smallest_scale(dtype, enlarged))


_Exact = tuple[Tensor, Tensor, torch.dtype]
"""An output's float64 values, their usable scale, and the output's dtype."""

_Compared = tuple[Tensor, Tensor, torch.dtype, Tensor, Tensor]
"""The same, and the outputs of the definition in the problem's dtypes and in fp32."""


def _losses(outputs: Mapping[str, _Compared]) -> dict[str, tuple[float, float]]:
    """Return the largest scaled errors of both runs of the definition, by output.

    Only elements that the output's dtype can represent count.
    """
    worst: list[Tensor] = []
    for y64, scale, dtype, native, single in outputs.values():
        # False for NaN and Inf, too.
        comparable = y64.abs() < overflow_threshold(dtype)
        worst.append(_worst_error(native, y64, scale, comparable))
        of_single = worst[-1]
        if single is not native:
            of_single = _worst_error(single, y64, scale, comparable)
        worst.append(of_single)
    finite = iter([x if math.isfinite(x) else math.inf for x in read(worst)])
    return {name: (next(finite), next(finite)) for name in outputs}


def _worst_error(y: Tensor, y64: Tensor, scale: Tensor, comparable: Tensor) -> Tensor:
    if y64.numel() == 0:
        return y64.new_zeros(())
    error = torch.where(comparable, (y.double() - y64).abs() / scale, 0.0)
    return error.amax()  # NaN propagates


def read(values: Sequence[Tensor]) -> list[float]:
    """Read 0-d tensors back together, because each read waits for the device."""
    if not values:
        return []
    if len({value.dtype for value in values}) > 1:
        values = [value.double() for value in values]
    found: list[float] = torch.stack([*values]).tolist()
    return found


def reference_of(
    y64: Tensor, scale: Tensor, dtype: torch.dtype, enlarged: float = 1.0
) -> Reference:
    """Convert the float64 values of an output into the form that comparisons use."""
    usable = _usable_scale(y64, scale, dtype, enlarged)
    return _references({"": (y64, usable, dtype)})[""]


def _references(outputs: Mapping[str, _Exact]) -> dict[str, Reference]:
    """As `reference_of`, for several outputs."""
    near_ends = {  # true for NaN, too
        name: ~(y64.abs() < torch.finfo(dtype).max / 2) for name, (y64, _, dtype) in outputs.items()
    }
    are_special = read([near_end.any() for near_end in near_ends.values()])
    found: dict[str, Reference] = {}
    for (name, (y64, usable, dtype)), is_special in zip(outputs.items(), are_special, strict=True):
        inverse64, high = usable.reciprocal(), y64.float()
        low = None
        if dtype == torch.float32:
            low = ((high.double() - y64) * inverse64).float()
        special = near_ends[name] if is_special else None
        found[name] = Reference(high, low, inverse64.float(), special)
    return found
