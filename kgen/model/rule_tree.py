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
        rows: Records of rows, the preferred first. A later row serves the calls that the conditions
            of the earlier rows refuse.
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
    """The dispatch rule for problems of one pass with one choice of dtypes and some fixed extents.

    Attributes:
        pass_name: `forward` or `backward`.
        dtypes: (field, dtype name) of every field and (option, choice) of every option, in the
            operator's order.
        constants: (dim, extent) that a problem must have, because the extents are compiled into
            the kernels.
        tree: The comparisons and the rows.
        problems: Number of problems that the rule was learnt from.
        mean_loss: Mean loss over these problems. The loss of a problem is the time of the chosen
            row over the time of the best known config, minus 1.
        worst_loss: The largest of these losses.
        extents: (dim, least, largest) extent of these problems, for the other dims. The rule
            serves no problem far outside these ranges, because it was learnt from none there. Empty
            in tables of older versions, whose rules serve every extent.
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
        """The key of a rule: a later rule with the same key replaces it. Rules are sorted by it."""
        extents = tuple(value for _, value in self.constants)
        return (self.pass_name, tuple(value for _, value in self.dtypes), extents)

    @property
    def records(self) -> frozenset[str]:
        """Records of all rows that the rule may choose."""
        return frozenset(record for leaf in leaves(self.tree) for record in leaf.rows)


def leaves(tree: RuleTree) -> Iterator[Leaf]:
    """Yield the leaves of a tree, from low extents to high ones."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.below)
        yield from leaves(tree.above)


def leaf_of(tree: RuleTree, dims: Mapping[str, int]) -> Leaf:
    """The leaf that the extents of a problem lead to."""
    while isinstance(tree, Split):
        tree = tree.below if extent(tree.dims, dims) <= tree.at_most else tree.above
    return tree


def extent(names: tuple[str, ...], dims: Mapping[str, int]) -> int:
    """The product of some extents."""
    return prod(dims[name] for name in names)


def with_names(tree: RuleTree, names: Mapping[str, str]) -> RuleTree:
    """The tree with the records at its leaves renamed."""
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
