"""Which input sets a kernel is verified on, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kgen.check.case import (
    APART,
    EXPANDED,
    FARS,
    NORMAL,
    ONE_GAPS,
    OVERLAPPING,
    REPEATED,
    SHARED,
    SHIFTED,
    VIEWS,
    Case,
    Layout,
    seed_of,
    unlike_groups,
)
from kgen.check.extents import Extents
from kgen.check.hard_values import (
    LARGE,
    LARGE_CASES,
    LARGE_WEIGHTS,
    NAN_WITH,
    NANS,
    NONFINITE,
    POWERS,
    UNEQUAL,
    ZERO_WEIGHTS,
    ZEROS,
    weights_of,
)
from kgen.check.lone_values import LONE, ONES
from kgen.check.row_values import ROW_SETS, SIGNS_BY_ROWS
from kgen.check.run_values import RUNS
from kgen.check.set_limits import Dims, Threads
from kgen.check.shaped_values import ALIKE, OPPOSITE, SHAPES
from kgen.check.sizes import (
    ALIGNED_STEPS,
    CUT,
    DRAWN,
    FEW,
    FEW_STEPS,
    GPU_SIZES,
    PACKED,
    QUICK,
    SHARED_STEPS,
    SHORT,
    Sizes,
)
from kgen.model.problem import Problem
from kgen.model.signature import Pass
from kgen.operators.base import Operator


class HostSets(NamedTuple):
    """The input sets of a run on the host layer.

    Attributes:
        cases: The sets, in the order in which they run.
        left_out: Labels of the sets that are too large for the host layer, and, for each shortened
            set, its label at the intended extents (`Case.wanted`).
    """

    cases: list[Case]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Chooses the cases of one problem.

    Attributes:
        operator: Declares cases, dims and the slab dim.
        pass_: One of the operator's passes.
        problem: The problem at full size.
        seed: Seed of every set that is not fresh.
        sizes: How large the sets other than the problem itself may be.
    """

    operator: Operator
    pass_: Pass
    problem: Problem
    seed: int
    sizes: Sizes = GPU_SIZES

    @property
    def extents(self) -> Extents:
        """Chooses the extents of the sets."""
        return Extents(self.operator, self.pass_, self.problem, self.sizes)

    def trial(self, seed: int, constants: Collection[str]) -> list[Case]:
        """The sets of a trial: a fresh small one, one of the hard ones (the seed selects which),
        and the problem itself.
        """
        cases = []
        extents = self.extents
        quick = extents.reduced(QUICK, self.sizes.quick, constants)
        if quick or extents.bytes({}) <= self.sizes.small:
            cases.append(_fresh(quick, seed))
        hard = [
            case
            for case in self._hard(constants)
            if extents.bytes(dict(case.dims)) <= max(self.sizes.small, extents.bytes({}))
        ]
        if hard:
            cases.append(hard[seed % len(hard)])
        cases.append(self.whole())
        return cases

    def certify(self, seed: int, constants: Collection[str]) -> list[Case]:
        """The sets of a certificate: all of them, cheap sets first, a fresh set of full size last.
        """
        extents = self.extents
        quick = extents.reduced(QUICK, self.sizes.quick, constants)
        return [
            *map(self._ordinary, extents.ragged(constants)),
            *map(self._ordinary, extents.unequal(constants)),
            *map(self._ordinary, extents.whole_tiles(constants)),
            *map(self._ordinary, extents.alike(constants)),
            *self._inside_tiles(seed, constants),
            *self._hard(constants),
            *self._beyond(constants),
            *(_fresh(quick, seed_of(seed, "fresh", i)) for i in range(self.sizes.fresh)),
            self.whole(),
            _fresh({}, seed),
        ]

    def host(
        self,
        seed: int,
        constants: Collection[str],
        steady: Sequence[tuple[str, int]] = (),
        threads: Threads | None = None,
        far: bool = False,
    ) -> HostSets:
        """The sets of a host run, all small: the host layer runs every CUDA thread as a fiber.

        All dims that the kernel takes at run time are small; compile-time dims keep their extents.
        One additional set has the extents of `steady`, and the smallest extents in all other dims.

        Args:
            seed: Seed of the fresh set.
            constants: Dims that are compile-time constants of the kernel.
            steady: (dim, extent) pairs of the set that reaches the kernel's steady state.
            threads: Number of threads that the kernel launches for a problem; sets with more than
                `Sizes.threads` are shortened. None: the number is not limited.
            far: Whether sets may have rows that are gigabytes apart.
        """
        extents = self.extents
        always = [
            _fresh(extents.reduced(QUICK, self.sizes.quick, constants), seed),
            *([self.steady(steady, constants)] if steady else ()),
        ]
        others = [
            *map(self._ordinary, extents.ragged(constants)),
            *map(self._ordinary, extents.unequal(constants)),
            *map(self._ordinary, extents.whole_tiles(constants, threads)),
            *map(self._ordinary, extents.many(constants, threads)),
            *map(self._ordinary, extents.alike(constants, threads)),
            *self._hard(constants),
            *self._beyond(constants, threads),
            *(self._far(constants) if far else ()),
        ]
        small = [extents.is_small(dict(case.dims)) for case in others]
        kept = [*always, *(case for case, fits in zip(others, small, strict=True) if fits)]
        kept += self._inside_tiles(seed, constants, threads)  # already limited in size and work
        left_out = [case.label for case, fits in zip(others, small, strict=True) if not fits]
        return HostSets(kept, [*left_out, *(case.wanted for case in kept if case.shortened)])

    def whole(self) -> Case:
        """The problem itself."""
        return self._ordinary({})

    def pool(self) -> list[Case]:
        """Ordinary inputs with enough elements that their largest error is a stable number.

        There are three sets, or one if a single row of the slab dim already has enough elements.
        """
        extents = self.extents
        dims = extents.pool()
        draws = 1 if extents.bytes(dims) > 3 * self.sizes.pool else 3
        return [
            Case(NORMAL, tuple(dims.items()), "contiguous", seed_of(self.seed, "pool", i))
            for i in range(draws)
        ]

    def steady(
        self, steady: Sequence[tuple[str, int]], constants: Collection[str], whole: bool = False
    ) -> Case:
        """The set that reaches a kernel's steady state.

        Args:
            steady: (dim, extent) pairs to reach.
            constants: Dims that are compile-time constants of the kernel.
            whole: Whether the other dims are whole vectors, for kernels that take no others; else
                they are as small as possible.
        """
        dims = self.extents.steady(steady, constants, whole)
        shortened = tuple((name, extent) for name, extent in steady if extent != dims[name])
        return replace(self._ordinary(dims), shortened=shortened)

    def _hard(self, constants: Collection[str]) -> list[Case]:
        """The operator's own cases, other layouts, other scalars and the hard values of this
        package; with few rows where the number of rows is a run-time dim.
        """
        dims = self.extents.reduced(self.sizes.rows, self.sizes.small, constants)
        hard = [self._case(name, dims) for name in self.operator.cases]
        if not set(LARGE_CASES) & set(self.operator.cases):
            hard.append(self._case(LARGE, dims))
        hard += self._layouts(constants)
        if self.pass_.scalars:
            ordinary = self._ordinary(dims)
            hard.append(replace(ordinary, scalars=other_scalars(self.pass_)))
            hard.append(replace(ordinary, opposite=True))
            hard.append(replace(ordinary, scalars=common_scalars(self.pass_)))
        hard += [self._case(name, dims) for name in (*UNEQUAL, *ZEROS, *NANS[:-1])]
        # The cases that have NaN themselves are not repeated.
        own = [name for name in self.operator.cases if not name.startswith(NONFINITE)]
        hard += [self._case(NAN_WITH + name, dims) for name in own]
        # With the default offset of 0, a weight of 0 makes the outputs 0; another offset does not.
        zero = self._case(ZEROS[0], dims)
        hard.append(replace(zero, scalars=other_scalars(self.pass_)))
        several = next(self.extents.unequal(constants), dims)
        hard += [self._case(name, several) for name in (ROW_SETS[0], SIGNS_BY_ROWS)]
        rows = self.extents.rows_of_kinds(constants) or several
        hard += [self._case(name, rows) for name in ROW_SETS[1:]]
        hard += self._shaped(rows, constants)
        packing = self.operator.signature.packing
        if packing is not None and packing.sequences in several:  # absent if it is the batch dim
            several |= {packing.sequences: CUT}
            one_step = {name: CUT for name in self.operator.serial_dims if name not in constants}
            hard.append(self._case(POWERS, several | one_step))
        powers = self._case(POWERS, several)
        hard.append(replace(powers, scalars=large_scalars(self.pass_)))
        if weights_of(self.pass_, self.operator.slab_dim):
            hard += [self._case(name, dims) for name in (NANS[-1], LARGE_WEIGHTS)]
            if not self.operator.serial_dims:
                zero = self._case(ZERO_WEIGHTS, dims)
                hard.append(zero)
                # Untrained weights that are added to an offset of 1.
                hard.append(replace(zero, scalars=common_scalars(self.pass_)))
        return hard

    def _shaped(self, dims: Dims, constants: Collection[str]) -> Iterator[Case]:
        """Inputs with structure that random values lack: shaped, mostly zero, equal or opposite."""
        steps = [name for name in self.operator.serial_dims if name not in constants]
        yield self._case(SHAPES, dims)
        packing = self.operator.signature.packing
        is_packed = packing is not None and packing.offsets in {t.name for t in self.pass_.inputs}
        # Packed sequences get no set with a single nonzero step: correct wkv6 kernels exceed the
        # bound of gw there.
        for name in (ONES,) if is_packed else LONE:
            yield self._case(name, dims)
        first = self.pass_.inputs[0]
        if first.free_strides:  # the gradient of sum() is one number, expanded by strides of 0
            few = dims | dict.fromkeys(steps, SHARED_STEPS)
            one = self._case(ONES, few, REPEATED[0])
            yield replace(one, only=(first.name,))
        yield self._case(ALIKE, dims)
        if steps:
            yield self._case(OPPOSITE, dims)
        yield self._case(OPPOSITE, dims | dict.fromkeys(steps, SHARED_STEPS))

    def _layouts(self, constants: Collection[str]) -> list[Case]:
        """Ordinary values at other strides and addresses."""
        # At least two rows, or the stride between rows is never used.
        dims = self.extents.reduced(
            self.sizes.rows, self.sizes.small, constants, times=2, least=FEW
        )
        layouts: list[Layout] = []
        if any(t.free_strides for t in self.pass_.inputs):
            layouts += ["strided", "odd strides"]
            if any(len(t.free_strides) > 1 for t in self.pass_.inputs):
                layouts.append("permuted")
            layouts += [VIEWS, EXPANDED, OVERLAPPING]
            most = self._most_strides()
            if most > 1:
                layouts += [*ONE_GAPS[:most], REPEATED[0]]
        layouts += [SHARED, *SHIFTED]
        few = {name: SHARED_STEPS for name in self.operator.serial_dims if name not in constants}
        return [
            *(self._ordinary(dims, layout) for layout in layouts),
            *(
                replace(self._ordinary(dims, layout), only=names)
                for names in unlike_groups([t.name for t in self.pass_.inputs])
                for layout in (APART, SHIFTED[0])
            ),
            *([self._ordinary(dims | few, SHARED)] if few else []),
            *self._alone(dims | few),
            *self._mixed(dims | few),
            *self._heads_of_one_key(dims),
        ]

    def _most_strides(self) -> int:
        """The largest number of free strides of an input."""
        return max((len(t.free_strides) for t in self.pass_.inputs), default=0)

    def _alone(self, dims: Dims) -> Iterator[Case]:
        """Sets in which a single input is strided or repeated and all others are contiguous: a
        kernel that uses another input's strides fails.
        """
        names = [t.name for t in self.pass_.inputs if t.free_strides]
        if len(self.pass_.inputs) > 1 and names:
            for name in names:
                yield replace(self._ordinary(dims, "strided"), only=(name,))
            yield replace(self._ordinary(dims, REPEATED[0]), only=(names[-1],))

    def _mixed(self, dims: Dims) -> Iterator[Case]:
        """Sets in which some inputs have a layout and the others do not: two dims transposed, as
        one tensor of a layer may be, or a stride of 0 in a dim that is not the batch, as keys and
        values of grouped-query attention have, or the gradient of a mean.
        """
        names = [t.name for t in self.pass_.inputs if len(t.free_strides) > 1]
        most = self._most_strides()
        repeated = REPEATED[2 : 1 + most]
        for group in unlike_groups(names):
            for layout in ("permuted", *repeated):
                yield replace(self._ordinary(dims, layout), only=group)
        if len(names) > 1:
            for layout in repeated:
                yield replace(self._ordinary(dims, layout), only=(names[0],))
        for pair in itertools.pairwise(names) if most > 2 else ():  # keys and values, among others
            yield replace(self._ordinary(dims, repeated[-1]), only=pair)

    def _heads_of_one_key(self, dims: Dims) -> Iterator[Case]:
        """All inputs but the first have a stride of 0 in one dim, as keys and values have in the
        head dim of grouped-query attention.
        """
        names = [t.name for t in self.pass_.inputs]
        most = self._most_strides()
        for layout in REPEATED[2 : 1 + most]:
            yield replace(self._ordinary(dims, layout), only=tuple(names[1:]))

    def _inside_tiles(
        self, seed: int, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Case]:
        """Ordinary values at extents that end inside tiles, at whole tiles and at random extents;
        and runs of zeros.
        """
        if not self.sizes.inside_tiles:
            return
        yield from map(self._ordinary, self.extents.between(constants, threads))
        yield from map(self._ordinary, self.extents.few_tiles(constants, threads))
        for dims in self.extents.runs(constants, threads):
            yield self._case(RUNS, dims)
            packing = self.operator.signature.packing
            if packing is not None and packing.sequences in dims:  # sequences of equal length
                serial = [n for n in self.operator.serial_dims if n not in constants]
                yield self._case(RUNS, dims | dict.fromkeys(serial, 12 * CUT))
                # Sequences that begin at multiples of every chunk, as padded ones do.
                aligned = dims | {packing.sequences: PACKED}
                aligned |= dict.fromkeys(serial, PACKED * ALIGNED_STEPS)
                if self.extents.is_modest(aligned, threads, times=4):
                    yield self._case(RUNS, aligned)
        for place in range(DRAWN):
            own = seed_of(seed, "extents", place)
            if dims := self.extents.drawn(own, constants, threads):
                yield Case(NORMAL, tuple(dims.items()), "contiguous", own)

    def _far(self, constants: Collection[str]) -> Iterator[Case]:
        """Rows that are gigabytes apart: the pages between them are never touched, so never
        allocated.
        """
        most = self._most_strides()
        dims = self.extents.reduced(FEW, self.sizes.small, constants, times=2, least=FEW)
        few = {name: FEW_STEPS for name in self.operator.serial_dims if name not in constants}
        for place, layout in enumerate(FARS[:most]):
            yield self._ordinary(dims | few if place else dims, layout)

    def _beyond(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Case]:
        packing = self.operator.signature.packing
        for dims, shortened in self.extents.beyond(constants, threads):
            yield replace(self._ordinary(dims), shortened=shortened)
            long = any(dims.get(name, 0) > SHORT for name in self.operator.serial_dims)
            if long and packing is not None and packing.sequences in dims:
                one_long = dims | {packing.sequences: CUT}  # a long sequence that is not the first
                yield replace(self._case(ROW_SETS[1], one_long), shortened=shortened)

    def _ordinary(self, dims: Dims, layout: Layout = "contiguous") -> Case:
        return self._case(NORMAL, dims, layout)

    def _case(self, name: str, dims: Dims, layout: Layout = "contiguous") -> Case:
        # The seed does not depend on the layout: sets that differ only in layout share an oracle.
        extents = tuple(dims.items())
        seed = seed_of(self.seed, name, list(extents), "contiguous")
        return Case(name, extents, layout, seed)


def common_scalars(pass_: Pass) -> tuple[tuple[str, float], ...]:
    """Scalar values that models use and that a kernel may treat as a special case.

    1, or 0 where 1 is the default; a scalar that must be above 0 is 2^-40.
    """
    return tuple(
        (s.name, 2.0**-40 if s.above == 0.0 else 0.0 if s.default == 1.0 else 1.0)
        for s in pass_.scalars
        if s.above is None or s.above == 0.0
    )


def large_scalars(pass_: Pass) -> tuple[tuple[str, float], ...]:
    """Values above 1, no two equal."""
    return tuple((s.name, 3.0 + place / 16) for place, s in enumerate(pass_.scalars))


def _fresh(dims: Dims, seed: int) -> Case:
    return Case(NORMAL, tuple(dims.items()), "contiguous", seed, fresh=True)


def other_scalars(pass_: Pass) -> tuple[tuple[str, float], ...]:
    """Scalar values other than the defaults, each with a visible effect on the outputs.

    A kernel that ignores eps, an offset or a scale passes with the defaults (offset 0, scale 1).
    A kernel that rounds a product with a scalar passes if the scalar is a power of two.
    """
    found = []
    for place, scalar in enumerate(pass_.scalars):
        value = 0.6875 + place / 16  # all different: a kernel may mix up two scalars
        if value == scalar.default:
            value += 1 / 32
        if scalar.above is not None and value <= scalar.above:
            value = 2.0 * scalar.above
        found.append((scalar.name, value))
    return tuple(found)
