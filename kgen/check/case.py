"""The description of one input set of a verification: its name, extents, layout and seed."""

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
    "far second", "far third", "far fourth", "one gap", "one gap second", "one gap third",
    "repeated", "repeated first", "repeated second", "repeated third",
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
"""Layouts in which several elements occupy the same memory and so have equal values."""
FAR: Layout = "far"
FARS: tuple[Layout, ...] = (FAR, "far second", "far third", "far fourth")


@dataclass(frozen=True, slots=True)
class Case:
    """The description of one input set.

    Strides only differ from contiguous ones in dims with free strides. Gaps differ between inputs.

    - `contiguous`: no gaps.
    - `strided`: strides exceed contiguous ones by multiples of 16 bytes (vector loads stay
      aligned); `odd strides`: by an odd number of elements.
    - `permuted`: the last two dims with free strides are transposed in memory.
    - `shifted`, `shifted 8 bytes`, `shifted 16 bytes`: contiguous, and every input begins one
      element, 8 or 16 bytes after an aligned address, as a view may. `apart`: `strided`, and begins
      32 bytes after an aligned address.
    - `views`: inputs of one dtype lie side by side in the rows of one tensor.
    - `shared`: inputs of one shape and dtype are the same memory.
    - `expanded`: one stride is 0. `repeated`: all free strides are 0; `repeated first` and so on:
      the stride of the first (second, third) dim with a free stride is 0.
    - `overlapping`: a row begins in the middle of the row before, as windows of a sequence do.
    - `one gap`, `one gap second`, `one gap third`: a single dim of each input has a gap; it differs
      between these layouts and between inputs.
    - `far`, `far second` and so on: the stride of one dim with a free stride exceeds 32 bits.

    Attributes:
        name: `normal`, one of the operator's cases, or a set of hard values of this package.
        dims: Extents that differ from the problem's.
        layout: Strides and addresses of the inputs, see above.
        seed: Seed of the generator.
        fresh: Whether the seed is a trial's own, so that caching the set is useless.
        scalars: Values of the pass's scalars; empty: the fixture's.
        opposite: Whether the scalars in which outputs are linear are replaced by negative values
            with magnitudes above 1.
        only: The inputs that have the layout, while all others are contiguous; empty: all inputs.
        shortened: The intended extents of dims that were shortened for the host layer.
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
        """A shortened set in a verdict: `normal C=1 T=8193 (T=513 instead)`; else empty."""
        if not self.shortened:
            return ""
        instead = [f"{n}={v}" for n, v in self.dims if dict(self.shortened).get(n, v) != v]
        wanted = replace(self, dims=tuple({**dict(self.dims), **dict(self.shortened)}.items()))
        return f"{wanted.label} ({' '.join(instead)} instead)"

    @property
    def values(self) -> Case:
        """The case without the attributes that have no influence on the values."""
        if self.layout in EQUAL_VALUES:
            return self
        return replace(self, layout="contiguous", only=())

    def lays_out(self, name: str) -> bool:
        """Whether an input has the layout."""
        return not self.only or name in self.only

    @property
    def label(self) -> str:
        """The set's name in a verdict: `normal M=65 strided`, `normal M=65 shifted x`."""
        parts = [self.name, *(f"{name}={value}" for name, value in (*self.dims, *self.scalars))]
        if self.opposite:
            parts.append("negative scalars")
        if self.layout != "contiguous":
            parts.append(f"{self.layout} {' '.join(self.only)}".rstrip())
        return " ".join(parts)

    def problem(self, whole: Problem, signature: Signature) -> Problem:
        """The problem with the extents of this set."""
        return with_dims(whole, dict(self.dims), signature)


def one_by_one(case: Case, pass_: Pass) -> list[Case]:
    """Split a set whose inputs all have a layout into sets where one input has it.

    A guard may refuse the whole set because of one input, and fail to test another input.
    """
    if case.layout not in ("strided", "odd strides", EXPANDED, *SHIFTED):
        return []
    having = [t.name for t in pass_.inputs if case.layout in SHIFTED or t.free_strides]
    return [replace(case, only=(name,)) for name in having] if len(having) > 1 else []


def unlike_groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups of inputs such that each of any two inputs is in a group without the other.

    A kernel may check the strides or the address of one input and assume that another input is
    alike. It fails on a set in which the first input is as assumed and the other is not.
    """
    if len(names) < 2:
        return []
    count = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= len(names))
    codes = itertools.combinations(range(count), count // 2)  # no code is a subset of another
    chosen = list(zip(names, codes, strict=False))
    return [tuple(name for name, code in chosen if group in code) for group in range(count)]


def seed_of(*parts: object) -> int:
    """A seed below 2**31 that depends on all parts."""
    return int(digest_of(list(parts)), 16) % 2**31


def other_case(case: Case) -> Case:
    """The case of ordinary values of another seed, in the same extents and layout."""
    return replace(case, name=NORMAL, seed=seed_of(case.seed, "other values"))
