"""Concrete dims and dtypes of one call: `M=8192,N=4096,dtype=bf16`."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.errors import ProblemError, suggest
from kgen.model.digest import digest_of
from kgen.model.dtypes import DType, dtype_named, itemsizes
from kgen.model.signature import Pass, Signature


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one operator.

    Attributes:
        dims: (name, extent) in the operator's order.
        dtypes: (field, dtype name), then (option, choice), in the operator's order, complete.
    """

    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]

    def dim(self, name: str) -> int:
        """Return an extent."""
        return dict(self.dims)[name]

    def dtype(self, field: str) -> DType:
        """Return the dtype that a field chose, or the fixed dtype of that name."""
        return dtype_named(dict(self.dtypes).get(field, field))

    def shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """Return the extents of several dims."""
        table = dict(self.dims)
        return tuple(table[name] for name in dims)

    def present(self, pass_: Pass) -> Pass:
        """A pass without the tensors that this problem leaves out."""
        return pass_.present(dict(self.dtypes))

    @property
    def names(self) -> dict[str, int | str]:
        """Values of the problem's names in expressions: dims, dtypes with itemsizes, options."""
        return {**dict(self.dims), **dict(self.dtypes), **itemsizes(self.dtypes)}

    @property
    def digest(self) -> str:
        """Short stable identity."""
        return digest_of([list(self.dims), list(self.dtypes)])

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in (*self.dims, *self.dtypes))


def parse_problem(text: str, signature: Signature) -> Problem:
    """Parse `M=8192,N=4096,dtype=bf16`; fields may be left to their defaults.

    Raises:
        ProblemError: If a name is unknown, repeated or missing, or a value is not legal.
    """
    given: dict[str, str] = {}
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not value:
            raise ProblemError(
                f"problem '{text}': '{part}' is not name=value\n  example: {_example(signature)}"
            )
        if name not in signature.field_names:
            raise ProblemError(
                f"problem '{text}': unknown name '{name}'\n  {suggest(name, signature.field_names)}"
            )
        if name in given:
            raise ProblemError(f"problem '{text}': '{name}' is given twice")
        given[name] = value
    dims: list[tuple[str, int]] = []
    for dim in signature.dims:
        if dim.name not in given:
            raise ProblemError(
                f"problem '{text}': '{dim.name}' ({dim.doc}) is missing\n  "
                f"example: {_example(signature)}"
            )
        value = given.pop(dim.name)
        if not value.isdecimal() or int(value) < dim.smallest:
            raise ProblemError(
                f"problem '{text}': {dim.name}={value} is not a whole number >= {dim.smallest}"
            )
        dims.append((dim.name, int(value)))
    try:
        dtypes = signature.complete_dtypes(given)
    except ProblemError as problem:
        raise ProblemError(f"problem '{text}': {problem}") from None
    return Problem(tuple(dims), tuple(dtypes.items()))


def _example(signature: Signature) -> str:
    dims = ",".join(f"{dim.name}=4096" for dim in signature.dims)
    return f"{dims},dtype=bf16"
