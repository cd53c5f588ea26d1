"""One assignment of a variant's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kgen.model.digest import digest_of
from kgen.runtime.rows import Value
from kgen.runtime.spelling import spell

__all__ = ["Config", "Value"]


@dataclass(frozen=True, slots=True)
class Config:
    """A point of the search space of one pass.

    Attributes:
        variant: Name of the variant.
        values: (parameter, value) in declared order, without parameters that have their default
            value (`Variant.config`).
    """

    variant: str
    values: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, variant: str, values: Mapping[str, Value]) -> Config:
        """Build a config from a mapping; the mapping's order is kept."""
        return cls(variant, tuple(values.items()))

    def as_dict(self) -> dict[str, Value]:
        """Return the parameters as a new dict, in declared order."""
        return dict(self.values)

    def __iter__(self) -> Iterator[tuple[str, Value]]:
        return iter(self.values)

    @property
    def digest(self) -> str:
        """Short stable identity of variant and values (independent of the order of values)."""
        return digest_of({"variant": self.variant, "values": self.as_dict()})

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`."""
        inner = ", ".join(f"{name}={spell(value)}" for name, value in self.values)
        return f"{self.variant}({inner})"
