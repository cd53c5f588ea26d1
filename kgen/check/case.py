"""One input set of a verification: its name, extents, layout and seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kgen.model.digest import digest_of
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Pass, Signature

NORMAL = "normal"

Layout = Literal[
    "contiguous", "strided", "odd strides", "permuted", "shifted", "shifted 8 bytes",
    "shifted 16 bytes", "apart", "views", "shared", "expanded", "overlapping", "far",
    "far second", "far third", "one gap", "one gap second", "one gap third", "repeated",
    "repeated first", "repeated second", "repeated third",
]
SHIFTED: tuple[Layout, ...] = ("shifted", "shifted 8 bytes", "shifted 16 bytes")
APART: Layout = "apart"
VIEWS: Layout = "views"
SHARED: Layout = "shared"
EXPANDED: Layout = "expanded"
OVERLAPPING: Layout = "overlapping"
ONE_GAPS: tuple[Layout, ...] = ("one gap", "one gap second", "one gap third")
REPEATED: tuple[Layout, ...] = (
    "repeated", "repeated first", "repeated second", "repeated third",
)
EQUAL_VALUES: tuple[Layout, ...] = (SHARED, EXPANDED, OVERLAPPING, *REPEATED)
"""Layouts in which values are equal where the memory is."""
FAR: Layout = "far"
FARS: tuple[Layout, ...] = (FAR, "far second", "far third")


@dataclass(frozen=True, slots=True)
class Case:
    """One input set to be made.

    Attributes:
        name: `normal`, or one of the operator's cases.
        dims: Extents that differ from the problem's.
        layout: Strides of the inputs that may have them: none, a multiple of 16 bytes more than
            contiguous (a vector load stays aligned), an odd number of elements more, or with the
            last two of the dims whose strides are free changing places in memory. No two inputs
            have the same gaps. `shifted`: contiguous, and every input begins one element, 8 or 16
            bytes behind an aligned address, as a view may. `apart`: `strided`, and 32 bytes behind
            one. `views`: inputs of one dtype lie side by side in the rows of one tensor. `shared`:
            inputs of one shape and dtype are the same memory. `expanded`: a stride is 0.
            `overlapping`: a row begins in the middle of the row before, as windows of a sequence
            do. `repeated`: all free strides are 0; `repeated first` and so on: that of the first
            dim with a free stride. The values of these are equal where the memory is. `one gap`:
            one dim of an input has a gap, sets and inputs take turns in which. `far`, `far second`,
            `far third`: the stride of one of the dims that may have one is beyond 32 bits.
        seed: Of the generator.
        fresh: Whether the seed is a trial's own, so that keeping the set is no use.
        scalars: Values of the pass's scalars; none for the fixture's own.
        opposite: Whether the scalars that outputs are linear in are negative and above 1.
        only: The inputs that have the layout, all others being contiguous; none for all inputs.
        shortened: Extents that the set would have if the host layer were faster.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    layout: Layout
    seed: int
    fresh: bool = False
    scalars: tuple[tuple[str, float], ...] = ()
    only: tuple[str, ...] = ()
    opposite: bool = False
    shortened: tuple[tuple[str, int], ...] = ()

    @property
    def wanted(self) -> str:
        """Of a shortened set, as in a verdict: `normal C=1 T=8193 (T=513 instead)`; else empty."""
        if not self.shortened:
            return ""
        instead = [f"{n}={v}" for n, v in self.dims if dict(self.shortened).get(n, v) != v]
        wanted = replace(self, dims=tuple({**dict(self.dims), **dict(self.shortened)}.items()))
        return f"{wanted.label} ({' '.join(instead)} instead)"

    @property
    def values(self) -> Case:
        """The case without what its values do not depend on."""
        if self.layout in EQUAL_VALUES:
            return self
        return replace(self, layout="contiguous", only=())

    def lays_out(self, name: str) -> bool:
        """Whether an input has the layout."""
        return not self.only or name in self.only

    @property
    def label(self) -> str:
        """As in a verdict: `normal M=65 strided`, `normal M=65 shifted x`."""
        parts = [self.name, *(f"{name}={value}" for name, value in (*self.dims, *self.scalars))]
        if self.opposite:
            parts.append("negative scalars")
        if self.layout != "contiguous":
            parts.append(f"{self.layout} {' '.join(self.only)}".rstrip())
        return " ".join(parts)

    def problem(self, whole: Problem, signature: Signature) -> Problem:
        """The problem that this set is an input of."""
        return with_dims(whole, dict(self.dims), signature)


def one_by_one(case: Case, pass_: Pass) -> list[Case]:
    """Split a set whose inputs all have a layout into sets where one input has it.

    Guards that refuse the set may do so for one input, and forget another.
    """
    if case.layout not in ("strided", "odd strides", EXPANDED, *SHIFTED):
        return []
    having = [t.name for t in pass_.inputs if case.layout in SHIFTED or t.free_strides]
    return [replace(case, only=(name,)) for name in having] if len(having) > 1 else []


def unlike_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of inputs such that of any two each is in a group without the other.

    A kernel that looks at the strides or the address of one input, and takes another to be like
    it, fails where the first alone is as it wants.
    """
    if len(names) < 2:
        return []
    count = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= len(names))
    codes = itertools.combinations(range(count), count // 2)  # no code is a part of another
    chosen = list(zip(names, codes, strict=False))
    return [tuple(name for name, code in chosen if group in code) for group in range(count)]


def seed_of(*parts: object) -> int:
    """A seed below 2**31 that depends on all parts."""
    return int(digest_of(list(parts)), 16) % 2**31


def other_case(case: Case) -> Case:
    """The case of ordinary values of another seed, in the same extents and layout."""
    return replace(case, name=NORMAL, seed=seed_of(case.seed, "other values"))
