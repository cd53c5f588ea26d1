"""The signature of an operator: the declaration of its arguments that all layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from kgen.errors import ProblemError, suggest
from kgen.model.dtypes import DTYPES
from kgen.runtime.signature import ABSENT, Dim, DTypeField, Option, Packing, Scalar

__all__ = [
    "DTypeField",
    "Dim",
    "Option",
    "Packing",
    "Pass",
    "Scalar",
    "Signature",
    "Tensor",
]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument or result.

    Attributes:
        name: Name in the Python call and in kernels' argument lists.
        dims: Extents, outermost first. The first may stand for all leading dims of the
            tensor that a user passes (`flatten_leading`). `N + 1`: one more than dim N.
            `3`: a fixed extent of 3.
        dtype: A `DTypeField` name or a fixed dtype.
        free_strides: Dims whose stride the caller chooses; kernels may take the stride as
            `<tensor>_stride_<dim>` (in elements). All other dims are contiguous. An output has
            free strides only with `layout_of`.
        layout_of: For an output: the name of an input of the same dims and dtype. The output is
            allocated without gaps, with its dims in the memory order of that input. Empty: the
            output is contiguous.
        flatten_leading: Whether a user may pass any number of leading dims for dims[0].
        in_out: For an input: whether kernels read it and write its new values into the same memory.
            The definition then returns the new values under the same name.
        doc: One line for the generated docstring.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = "dtype"
    free_strides: tuple[str, ...] = ()
    flatten_leading: bool = False
    layout_of: str = ""
    doc: str = ""
    in_out: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction of an operator: `forward` or `backward`."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs, then outputs, including those that a problem leaves out."""
        return self.inputs + self.outputs

    @property
    def in_outs(self) -> tuple[Tensor, ...]:
        """The inputs that a kernel writes as well."""
        return tuple(t for t in self.inputs if t.in_out)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """All tensors that a kernel writes: outputs, then the inputs that it updates."""
        return self.outputs + self.in_outs

    def present(self, dtypes: Mapping[str, str]) -> Pass:
        """The pass without the tensors whose dtype is `none`.

        Args:
            dtypes: Dtype name of every field.
        """

        def there(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(t for t in tensors if dtypes.get(t.dtype, t.dtype) != ABSENT)

        return replace(self, inputs=there(self.inputs), outputs=there(self.outputs))


@dataclass(frozen=True, slots=True)
class Signature:
    """Dims, dtype fields, passes and options of an operator."""

    dims: tuple[Dim, ...]
    dtypes: tuple[DTypeField, ...]
    passes: tuple[Pass, ...]
    options: tuple[Option, ...] = ()
    packing: Packing | None = None

    def __post_init__(self) -> None:
        """Refuse tensors with a dim or a dtype that nothing declares.

        Raises:
            ProblemError: The text names the tensor and what is declared.
        """
        dims = [dim.name for dim in self.dims]
        dtypes = [*(field.name for field in self.dtypes), *DTYPES]
        for pass_ in self.passes:
            for tensor in pass_.tensors:
                where = f"tensor '{tensor.name}' of {pass_.name}"
                for dim in tensor.dims:
                    if dim.removesuffix(" + 1") not in dims and not dim.isdigit():
                        raise ProblemError(f"{where} has unknown dim '{dim}'\n  "
                                           f"{suggest(dim, dims)}")
                for dim in tensor.free_strides:
                    if dim not in tensor.dims:
                        raise ProblemError(f"{where} has no dim '{dim}' whose stride is free\n  "
                                           f"{suggest(dim, tensor.dims)}")
                if tensor.in_out and (tensor.flatten_leading or tensor in pass_.outputs):
                    raise ProblemError(
                        f"{where} is in_out, and must be an input whose dims are not flattened: a "
                        "call may copy the others\n  next: declare it among the inputs, without "
                        "flatten_leading"
                    )
                if tensor.in_out and len(self.passes) > 1:
                    raise ProblemError(
                        f"{where} is in_out, but there is another pass: what a call overwrites has "
                        "no gradient\n  next: declare an operator of one pass for it"
                    )
                if tensor.dtype not in dtypes:
                    raise ProblemError(f"{where} has unknown dtype '{tensor.dtype}'\n  "
                                       f"{suggest(tensor.dtype, dtypes)}")

    @property
    def choices(self) -> tuple[DTypeField | Option, ...]:
        """The choices of a problem besides extents: dtype fields, then options."""
        return (*self.dtypes, *self.options)

    def pass_named(self, name: str) -> Pass:
        """Look up a pass.

        Raises:
            ProblemError: If the operator has no such pass.
        """
        for candidate in self.passes:
            if candidate.name == name:
                return candidate
        raise ProblemError(
            f"unknown pass '{name}'\n  {suggest(name, [p.name for p in self.passes])}"
        )

    def implied(self, choices: Mapping[str, str]) -> tuple[str, str] | None:
        """The dim that a problem may not choose, as (dim, the dim or `1` that it equals), or None.

        Args:
            choices: The choices of every dtype field.
        """
        if self.packing is None:
            return None
        if self._is_packed(choices):
            return self.packing.batch, "1"
        return self.packing.sequences, self.packing.batch

    def as_batch(self, pass_: Pass, choices: Mapping[str, str]) -> Pass:
        """The pass of a problem: unless it packs sequences, batch is the dim of the sequences."""
        packing = self.packing
        if packing is None or self._is_packed(choices):
            return pass_
        names = {packing.sequences: packing.batch}

        def renamed(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(
                replace(t, dims=tuple(names.get(name, name) for name in t.dims)) for t in tensors
            )

        return replace(pass_, inputs=renamed(pass_.inputs), outputs=renamed(pass_.outputs))

    def _is_packed(self, choices: Mapping[str, str]) -> bool:
        assert self.packing is not None
        offsets = next(
            t for p in self.passes for t in p.inputs if t.name == self.packing.offsets
        )
        return choices[offsets.dtype] != ABSENT

    def asked_for(self, pass_: Pass) -> tuple[Tensor, ...]:
        """Outputs that are computed on request: optional outputs whose dtype field no input has.

        Args:
            pass_: The pass as declared, with the tensors that a problem may leave out.
        """
        optional = {f.name for f in self.dtypes if f.optional} - {t.dtype for t in pass_.inputs}
        return tuple(o for o in pass_.outputs if o.dtype in optional)

    def rounding_fields(self) -> tuple[DTypeField, ...]:
        """Fields without tensors, which say how the operands of products may be rounded."""
        used = {t.dtype for p in self.passes for t in p.tensors}
        return tuple(f for f in self.dtypes if f.name not in used)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Dims, then dtype fields, then options."""
        return tuple(d.name for d in self.dims) + tuple(f.name for f in self.choices)

    def complete_dtypes(self, given: Mapping[str, str]) -> dict[str, str]:
        """Fill in defaults and check every dtype field and option.

        Raises:
            ProblemError: If a field is missing, unknown or not allowed.
        """
        chosen: dict[str, str] = {}
        for f in self.choices:
            value = given.get(f.name, f.default)
            if value is None:
                raise ProblemError(f"'{f.name}' is missing\n  allowed: {', '.join(f.allowed)}")
            value = chosen.get(value, value)
            allowed = _resolved(f, chosen)
            is_dtype = isinstance(f, DTypeField)
            if is_dtype and value not in DTYPES and value != ABSENT:
                raise ProblemError(
                    f"unknown dtype '{value}' for '{f.name}'\n  {suggest(value, allowed)}"
                )
            if value not in allowed:
                raise ProblemError(
                    f"'{f.name}={value}' is not supported\n  allowed here: {', '.join(allowed)}"
                )
            chosen[f.name] = value
        return chosen

    def dtype_combinations(self) -> list[dict[str, str]]:
        """All legal choices of the dtype fields and options, in declared order."""
        found: list[dict[str, str]] = [{}]
        for f in self.choices:
            grown: list[dict[str, str]] = []
            for chosen in found:
                grown.extend({**chosen, f.name: value} for value in _resolved(f, chosen))
            found = grown
        return found

    def dtype_pairs(self) -> list[dict[str, str]]:
        """A small set of legal choices of the dtype fields and options that covers all pairs.

        It contains every pair of values that two fields can have together. Each optional tensor
        doubles the number of combinations, but faults mostly involve two fields. The choice is
        greedy: each step takes the combination with the most uncovered pairs, and of several such
        combinations the first.
        """

        def pairs(chosen: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
            return set(combinations(chosen.items(), min(2, len(chosen))))

        every = self.dtype_combinations()
        missing = set().union(*map(pairs, every))
        taken: list[dict[str, str]] = []
        while missing:
            best = max(every, key=lambda chosen: len(pairs(chosen) & missing))
            missing -= pairs(best)
            taken.append(best)
        return taken


def _resolved(field: DTypeField | Option, chosen: Mapping[str, str]) -> list[str]:
    """The values that a field may have, given the choices of earlier fields."""
    if isinstance(field, Option):
        return list(field.allowed)
    names = dict.fromkeys(chosen.get(a, a) for a in field.allowed)
    rounds = {n: DTYPES[n].rounds for n in names if n in DTYPES}
    return [n for n in names if not rounds.get(n) or rounds[n] in names]
