"""Chooses the extents of the input sets, within the limits on their size and work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence

from kgen.check.set_limits import Dims, SetLimits, Threads
from kgen.check.sizes import (
    BETWEEN,
    BETWEEN_HEADS,
    BETWEEN_REPEATS,
    BEYOND_HEADS,
    BEYOND_TUNED,
    CUT,
    DRAWN_EXTENTS,
    DRAWN_REPEATS,
    FEW,
    LONG,
    MANY,
    MANY_ROWS,
    POOL_WORK,
    QUICK,
    RAGGED,
    ROW_HEADS,
    ROW_STEPS,
    RUN_HEADS,
    RUN_STEPS,
    SAME,
    SERIAL_WORK,
    SHORT,
    STEADY_BYTES,
    STEADY_FLOPS,
    TILES,
    TILES_HEADS,
    TILES_REPEATS,
    WHOLE_HEADS,
    WHOLE_TILES,
    WHOLE_VECTORS,
    WIDE,
)


class Extents(SetLimits):
    """Chooses the extents of the sets of one problem."""

    __slots__ = ()

    def reduced(
        self, rows: int, budget: int, constants: Collection[str], times: int = 1, least: int = 1
    ) -> Dims:
        """Shorten the slab dim and the steps, then the other run-time dims, until a set fits.

        Args:
            rows: Most rows of the slab dim; at most `QUICK` if the operator repeats its work
                along that dim.
            budget: Most bytes of inputs and outputs.
            constants: Dims that are compile-time constants of the kernel and keep their extents.
            times: Most arithmetic, as a multiple of a small set's.
            least: Rows to keep at first, even if their bytes exceed the budget.
        """
        slab = self.operator.slab_dim
        dims = {
            name: SHORT
            for name in self.operator.serial_dims
            if name not in constants and self.problem.dim(name) > SHORT
        }
        if slab is not None and slab not in constants:
            fits = max(least, budget // max(self.bytes({**dims, slab: 1}), 1))
            if slab in self.operator.repeats:  # a row is a whole sequence there, not one vector
                rows = min(rows, QUICK)
            dims[slab] = min(rows, fits)
        smallest = {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if not self.is_implied(dim.name)
        }
        while self.bytes(dims) > budget or self.is_too_much_work(dims, times):
            extents = {**dict(self.problem.dims), **dims}
            free = [n for n, low in smallest.items() if n not in constants and extents[n] > low]
            if not free:
                break
            repeated = [n for n in free if n in self.operator.repeats and extents[n] > FEW]
            largest = max(repeated or free, key=lambda name: extents[name])
            dims[largest] = max(smallest[largest], extents[largest] // 2)
        return dims

    def pool(self) -> Dims:
        """Extents with enough elements that the largest error of ordinary inputs is stable.

        Only the definition runs on these inputs, no kernel. So the slab dim may have any extent,
        and so may every other dim where the arithmetic of a set is limited (`Sizes.flops`).
        """
        slab = self.operator.slab_dim
        if self.sizes.flops is not None:
            return self.reduced(4096, self.sizes.pool, (), times=POOL_WORK)
        if slab is not None:
            row = max(self.bytes({slab: 1}), 1)
            return {slab: max(1, min(4096, self.sizes.pool // row))}
        return {}

    def ragged(self, constants: Collection[str]) -> Iterator[Dims]:
        """One run-time dim at a time at awkward extents."""
        for dim in self.operator.signature.dims:
            if dim.name in constants or self.is_implied(dim.name):
                continue
            repeats = dim.name in self.operator.repeats
            for extent in self.sizes.ragged_repeats if repeats else RAGGED:
                if extent < self.smallest(dim):
                    continue
                dims = self.reduced(2, self.sizes.small, constants)
                dims[dim.name] = extent
                if self.bytes(dims) <= max(self.sizes.small, self.bytes({})):
                    yield dims

    def unequal(self, constants: Collection[str]) -> Iterator[Dims]:
        """Small, pairwise different extents in the dims that repeat the work, not all of them
        powers of two.
        """
        repeats = [
            name
            for name in self.operator.repeats
            if name not in constants and not self.is_implied(name)
        ]
        if len(repeats) > 1:
            dims = self.reduced(FEW, self.sizes.small, constants, times=2, least=FEW)
            middle = {name: 5 + 2 * place for place, name in enumerate(repeats[1:-1])}
            yield dims | {repeats[0]: 2, **middle, repeats[-1]: 3}

    def between(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """All run-time dims at once at extents that end inside tiles.

        Sets alternate between wide ones, with several rows and heads, and narrow ones, with one row
        and one head. A set that is too much work is shortened: a wide one in its features first, a
        narrow one in its steps first. So there are sets in which two dims are large.
        """
        free = self.smallest_extents(constants)
        for turn in range(len(BETWEEN)):
            is_wide = turn % 2 == 0
            dims = {}
            for place, name in enumerate(free):
                among = self._between(name)
                chosen = among[(turn + place) % len(among)]
                dims[name] = max(free[name], chosen if is_wide or not self.repeats(name) else 1)
            if self._fit(dims, is_wide, threads):
                yield dims

    def few_tiles(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """All run-time dims at once at one or a few whole tiles; then only the dims that repeat
        the work, with all other dims at their smallest.
        """
        for turn in range(len(TILES)):
            dims = {}
            for place, (name, smallest) in enumerate(self.smallest_extents(constants).items()):
                few = name in self.operator.head_dims or self.is_one_sum(name)
                among = TILES_HEADS if few else TILES
                extent = 1 if self.repeats(name) else among[(turn + place) % len(among)]
                dims[name] = max(smallest, extent)
            steps = [name for name in dims if name in self.operator.serial_dims]
            others = [n for n in dims if n not in steps and not self.repeats(n)]
            while not self.is_modest(dims, threads, times=4) or self.takes_many(dims, threads):
                longer = [n for n in others if dims[n] > TILES[0]] or [
                    n for n in steps if dims[n] > TILES[0]
                ]
                if not longer:
                    break
                dims[max(longer, key=lambda name: dims[name])] //= 2
            else:
                yield dims
        narrow = self.narrow_extents(constants)
        repeats = [n for n in self.operator.repeats if n in narrow]
        for extents in TILES_REPEATS if repeats else ():
            dims = narrow | dict(zip(repeats, extents, strict=False))
            while not self.is_modest(dims, threads, times=4) or self.takes_many(dims, threads):
                longer = [name for name in repeats if dims[name] > 1]
                if not longer:
                    break
                shortest = min(longer, key=lambda name: dims[name])
                dims[shortest] = 1
            else:
                yield dims

    def alike(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """All run-time dims at one extent, or alternately at that extent and at twice as much; then
        many steps with several rows, and many steps with many features.
        """
        free = self.smallest_extents(constants)
        for turns in ((1, 1), (1, 2), (2, 1)):
            dims = {
                name: max(free[name], SAME * turns[place % 2]) for place, name in enumerate(free)
            }
            if self.is_modest(dims, threads, times=4):
                yield dims
        narrow = self.narrow_extents(constants)
        steps = [name for name in self.operator.serial_dims if name in narrow]
        slab = self.operator.slab_dim
        others = [{slab: FEW + 2}] if slab in narrow and slab not in steps else []
        others += [{name: WIDE} for name in narrow if name in self.operator.head_dims][:1]
        for more in others if steps else ():
            dims = narrow | dict.fromkeys(steps, LONG) | more
            if self.is_modest(dims, threads, times=SERIAL_WORK):
                yield dims

    def runs(self, constants: Collection[str], threads: Threads | None = None) -> Iterator[Dims]:
        """The extents of the set with runs of zeros: as many steps and heads as fit.

        A third of the steps is a run of zeros, long enough to cover whole tiles.
        """
        smallest = self.narrow_extents(constants)
        steps = [name for name in self.operator.serial_dims if name in smallest]
        slab = self.operator.slab_dim
        rows = [name for name in self.operator.repeats if name in smallest]
        last = rows[-1:] or [name for name in smallest if name == slab]
        ends = {t.dims[-1] for t in self.pass_.inputs}
        others = [name for name in smallest if name in ends and name not in (*rows, slab)]
        long = steps or others
        packing = self.operator.signature.packing
        for heads, extent in itertools.product(RUN_HEADS, RUN_STEPS):
            dims = smallest | dict.fromkeys(long, extent) | dict.fromkeys(last, heads)
            if packing is not None and packing.sequences in smallest:
                dims[packing.sequences] = CUT
            if self.is_modest(dims, threads, times=4):
                yield dims
                return

    def drawn(
        self, seed: int, constants: Collection[str], threads: Threads | None = None
    ) -> Dims:
        """All run-time dims at random extents; empty if the set cannot be made small enough."""
        draw = random.Random(seed)
        dims = {}
        is_wide = draw.random() < 0.5
        for name, smallest in self.smallest_extents(constants).items():
            low, high = DRAWN_REPEATS if self.repeats(name) else DRAWN_EXTENTS
            dims[name] = max(smallest, draw.randint(low, high))
        return dims if self._fit(dims, is_wide, threads) else {}

    def _between(self, name: str) -> Sequence[int]:
        if self.repeats(name):
            return BETWEEN_REPEATS
        return BETWEEN_HEADS if name in self.operator.head_dims else BETWEEN

    def _fit(self, dims: Dims, is_wide: bool, threads: Threads | None) -> bool:
        """Shorten dims in place until a set is modest, and return whether that succeeded.

        A wide set is first shortened in the dims that are neither steps nor repetitions, any other
        set in its steps.
        """
        steps = [name for name in dims if name in self.operator.serial_dims]
        repeats = [name for name in dims if self.repeats(name)]
        others = [name for name in dims if name not in (*steps, *repeats)]
        least = dict.fromkeys(dims, BETWEEN_REPEATS[0]) | dict.fromkeys(repeats, 1)
        while not self.is_modest(dims, threads, times=1):
            for names in (others, steps, repeats) if is_wide else (steps, others, repeats):
                longer = [name for name in names if dims[name] > least[name]]
                if longer:
                    break
            else:
                return False
            longest = max(longer, key=lambda name: dims[name])
            shorter = [e for e in self._between(longest) if e < dims[longest]]
            dims[longest] = max([least[longest], *shorter])
        return True

    def rows_of_kinds(self, constants: Collection[str]) -> Dims:
        """As `unequal`, but with `ROW_HEADS` heads, one for each kind of row, and fewer steps."""
        repeats = [name for name in self.operator.repeats if name not in constants]
        dims = next(self.unequal(constants), {})
        if not dims and (not repeats or not self.operator.serial_dims):
            return {}
        last = [name for name in repeats if name in dims or not dims][-1]
        few = {
            name: min(dims.get(name, self.problem.dim(name)), ROW_STEPS)
            for name in self.operator.serial_dims
            if name not in constants
        }
        packing = self.operator.signature.packing
        is_packed = packing is not None and packing.sequences in dims
        cut = {packing.sequences: CUT} if packing is not None and is_packed else {}
        return dims | few | cut | {last: ROW_HEADS}

    def many(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """Many rows, then many of each dim that repeats the work, with all other dims small.

        Only for a host run: a GPU runs the problem itself, and the sets of `beyond`.
        """
        smallest = self.smallest_extents(constants)
        for name in dict.fromkeys([self.operator.slab_dim, *self.operator.repeats]):
            if self.sizes.flops is None or name not in smallest:
                continue
            for many in (MANY_ROWS, MANY) if name == self.operator.slab_dim else (MANY,):
                dims = self.narrow_extents(constants) | {name: many}
                if not self.takes_many(dims, threads) and self.is_modest(dims, threads, times=4):
                    yield dims
                    break  # the smaller number is tried only if the larger one takes too long

    def beyond(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[tuple[Dims, tuple[tuple[str, int], ...]]]:
        """One run-time dim at a time far beyond the problem's extent, all others small.

        Yields:
            The extents, and for a dim that had to be shortened its name and intended extent.
        """
        smallest = self.smallest_extents(constants)
        for name in smallest:
            if name in self.operator.repeats and self.sizes.flops is not None:
                continue  # on the host layer a hundred heads take a minute and add no coverage
            beyond = BEYOND_HEADS if name in self.operator.head_dims else self.sizes.beyond
            extent = max(beyond, BEYOND_TUNED * self.problem.dim(name) + 1)
            is_serial = name in self.operator.serial_dims
            if is_serial:
                extent = min(extent, self.sizes.steps)
            wanted, times = extent, SERIAL_WORK if is_serial else 1
            others = self.narrow_extents(constants) if is_serial else smallest
            while extent > RAGGED[-1]:
                dims = {**others, name: extent}
                if self.is_modest(dims, threads, times):
                    yield dims, () if extent == wanted else ((name, wanted),)
                    break
                extent -= extent // 4

    def whole_tiles(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """One run-time dim at a time at a whole number of large tiles, and at one element less."""
        others = self.narrow_extents(constants) if self.sizes.whole_tiles else {}
        for name in others:
            if name in self.operator.repeats and self.sizes.flops is not None:
                continue
            if self.is_one_sum(name):
                continue
            extent = WHOLE_HEADS if name in self.operator.head_dims else WHOLE_TILES
            while extent > RAGGED[-1]:
                sets = [{**others, name: extent}, {**others, name: extent - 1}]
                if all(self.is_modest(dims, threads, times=4) for dims in sets):
                    yield from sets
                    break
                extent //= 2

    def steady(
        self, steady: Sequence[tuple[str, int]], constants: Collection[str], whole: bool
    ) -> Dims:
        """The extents of the set that reaches the kernel's steady state; see `Schedule.steady`.

        Extents that would be too much work for a CPU are shortened; the host's certificate then
        does not reach the steady state.
        """
        dims = self.smallest_extents(constants)
        for name in dims if whole else ():
            dims[name] = dims[name] if self.repeats(name) else max(dims[name], WHOLE_VECTORS)
        dims |= dict(steady)
        while (
            self.bytes(dims) > STEADY_BYTES
            or self.operator.cost(self.pass_.name, self.problem_with(dims)).flops > STEADY_FLOPS
        ):
            name = max((name for name, _ in steady), key=lambda name: dims[name])
            if dims[name] <= SHORT:
                break
            dims[name] = dims[name] // 2 + 1
        return dims
