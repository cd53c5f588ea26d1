"""Concrete dims and dtypes of one call: `M=8192,N=4096,dtype=bf16`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.errors import ProblemError, shortened, suggest
from kgen.model.digest import digest_of
from kgen.model.dtypes import DType, dtype_named
from kgen.model.signature import Pass, Signature
from kgen.runtime.spelling import itemsizes

MOST_DIGITS = 18  # an extent fits 64 bits


def read_extent(text: str) -> int | None:
    """Read a whole number in ASCII digits that fits 64 bits; None if the text is no such number."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one operator.

    Attributes:
        dims: (name, extent) in the operator's order.
        dtypes: (field, dtype name) of every field, then (option, choice) of every option, in the
            operator's order.
    """

    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]

    def dim(self, name: str) -> int:
        """Return an extent.

        Raises:
            ProblemError: If there is no such dim.
        """
        return self._extent(dict(self.dims), name)

    def dtype(self, field: str) -> DType:
        """Return the dtype that a field chose, or the fixed dtype of that name."""
        return dtype_named(dict(self.dtypes).get(field, field))

    def shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """Return the extents of several dims.

        Raises:
            ProblemError: If one of the dims does not exist.
        """
        table = dict(self.dims)
        return tuple(
            self._extent(table, name.removesuffix(" + 1")) + name.endswith(" + 1") for name in dims
        )

    def _extent(self, table: Mapping[str, int], name: str) -> int:
        if name.isdigit():
            return int(name)
        try:
            return table[name]
        except KeyError:
            raise ProblemError(
                f"problem '{self}' has no dim '{name}'\n  known: {', '.join(table)}"
            ) from None

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


def with_dims(problem: Problem, dims: Mapping[str, int], signature: Signature) -> Problem:
    """Replace extents, and the extents that the new ones imply (`Signature.implied`)."""
    extents = {**dict(problem.dims), **dims}
    implied = signature.implied(dict(problem.dtypes))
    if implied is not None:
        name, like = implied
        extents[name] = extents.get(like, 1)
    return Problem(tuple(extents.items()), problem.dtypes)


def parse_problem(text: str, signature: Signature) -> Problem:
    """Parse `M=8192,N=4096,dtype=bf16`; omitted fields have their defaults.

    An omitted dim has the extent of the dim that it is declared to be `like`. If the signature
    declares one name for both dims (`D` for K and V), that name sets both.

    Raises:
        ProblemError: If a name is unknown, repeated or missing, or a value is not legal.
    """
    given: dict[str, str] = {}
    both = {dim.both: (dim.like, dim.name) for dim in signature.dims if dim.both}
    known = (*signature.field_names, *both)
    for part in (p.strip() for p in text.split(",") if p.strip()):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not value:
            raise ProblemError(
                f"problem '{text}': '{part}' is not name=value\n  example: {_example(signature)}"
            )
        if name not in known:
            raise ProblemError(
                f"problem '{text}': unknown name '{name}'\n  {suggest(name, known)}"
            )
        for meant in both.get(name, (name,)):
            if meant in given:
                raise ProblemError(f"problem '{text}': '{meant}' is given twice")
            given[meant] = value
    for dim in signature.dims:
        if dim.like in given:
            given.setdefault(dim.name, given[dim.like])
    dims: list[tuple[str, int]] = []
    packing = signature.packing
    for dim in signature.dims:
        if dim.name not in given:
            if packing is not None and dim.name == packing.sequences:
                dims.append((dim.name, -1))  # set below to the number of batch rows
                continue
            raise ProblemError(
                f"problem '{text}': '{dim.name}' ({dim.doc}) is missing\n  "
                f"example: {_example(signature)}"
            )
        value = given.pop(dim.name)
        extent = read_extent(value)
        if extent is None or extent < dim.smallest:
            raise ProblemError(
                f"problem '{shortened(text)}': {dim.name}={shortened(value)} is not a whole number "
                f">= {dim.smallest} of at most {MOST_DIGITS} digits\n"
                f"  example: {_example(signature)}"
            )
        dims.append((dim.name, extent))
    try:
        dtypes = signature.complete_dtypes(given)
    except ProblemError as problem:
        raise ProblemError(f"problem '{text}': {problem}") from None
    found = Problem(tuple(dims), tuple(dtypes.items()))
    complete = with_dims(found, {}, signature)
    for (name, is_given), (_, wanted) in zip(found.dims, complete.dims, strict=True):
        if is_given not in (-1, wanted):
            raise ProblemError(
                f"problem '{text}': {name}={is_given}, but {_implied(signature, dtypes)}\n"
                f"  here {name}={wanted}"
            )
    if -1 in complete.shape(tuple(given_name for given_name, _ in complete.dims)):
        assert packing is not None
        raise ProblemError(
            f"problem '{text}': '{packing.sequences}' is missing, the number of sequences that "
            f"{packing.offsets} cuts"
        )
    return complete


def _implied(signature: Signature, dtypes: Mapping[str, str]) -> str:
    packing = signature.packing
    assert packing is not None
    if signature.implied(dtypes) == (packing.batch, "1"):
        return f"with {packing.offsets} all sequences lie in one batch row"
    return f"without {packing.offsets} every batch row is a sequence"


def _example(signature: Signature) -> str:
    dims = ",".join(f"{dim.name}=4096" for dim in signature.dims)
    return f"{dims},dtype=bf16"
