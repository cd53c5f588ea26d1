"""A dispatch rule as a tree: nested thresholds on extents, with rows at the leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Leaf:
    """The end of a path.

    Attributes:
        rows: Records of rows, the preferred first. A later row serves calls whose conditions the
            earlier ones refuse.
    """

    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A comparison: `dims[0] * dims[1] ... <= at_most`."""

    dims: tuple[str, ...]
    at_most: int
    below: RuleTree
    above: RuleTree

    @property
    def text(self) -> str:
        """`B * H <= 64`."""
        return f"{' * '.join(self.dims)} <= {self.at_most}"


RuleTree: TypeAlias = Leaf | Split


@dataclass(frozen=True, slots=True)
class LearntRule:
    """The rule for the problems of one pass, one choice of dtypes, and some extents.

    Attributes:
        pass_name: `forward` or `backward`.
        dtypes: (field, dtype name) and (option, choice), complete, in the operator's order.
        constants: (dim, extent) that a problem must have, because kernels have them compiled in.
        tree: The comparisons and the rows.
        problems: Number of problems that it was learnt from.
        mean_loss: Mean over these problems of the time of the chosen row over that of the best
            known config, minus 1.
        worst_loss: The largest of these losses.
        extents: (dim, least, largest) extent of these problems, for the other dims. The rule
            serves no problem far outside: it knows nothing of it. Empty in tables of older
            versions, whose rules serve all.
    """

    pass_name: str
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    tree: RuleTree
    problems: int
    mean_loss: float
    worst_loss: float
    extents: tuple[tuple[str, int, int], ...] = ()

    @property
    def covers(self) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
        """The key of a rule: a later rule with the same key replaces it. Also the sort key."""
        extents = tuple(value for _, value in self.constants)
        return (self.pass_name, tuple(value for _, value in self.dtypes), extents)

    @property
    def records(self) -> frozenset[str]:
        """Records of all rows that it may choose."""
        return frozenset(record for leaf in leaves(self.tree) for record in leaf.rows)


def leaves(tree: RuleTree) -> Iterator[Leaf]:
    """Yield the leaves of a tree, from low extents to high ones."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.below)
        yield from leaves(tree.above)


def leaf_of(tree: RuleTree, dims: Mapping[str, int]) -> Leaf:
    """Follow a tree for some extents."""
    while isinstance(tree, Split):
        tree = tree.below if extent(tree.dims, dims) <= tree.at_most else tree.above
    return tree


def extent(names: tuple[str, ...], dims: Mapping[str, int]) -> int:
    """The product of some extents."""
    return prod(dims[name] for name in names)


def with_names(tree: RuleTree, names: Mapping[str, str]) -> RuleTree:
    """The tree with other names at its leaves."""
    if isinstance(tree, Leaf):
        return Leaf(tuple(names[row] for row in tree.rows))
    return replace(
        tree, below=with_names(tree.below, names), above=with_names(tree.above, names)
    )


def tree_lines(tree: RuleTree, margin: str = "") -> Iterator[str]:
    """Yield a tree as lines of text."""
    if isinstance(tree, Leaf):
        yield f"{margin}{', else '.join(tree.rows)}"
    else:
        yield f"{margin}{tree.text}:"
        yield from tree_lines(tree.below, margin + "  ")
        yield f"{margin}else:"
        yield from tree_lines(tree.above, margin + "  ")
