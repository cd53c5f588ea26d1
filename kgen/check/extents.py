"""The extents of input sets: each as large as a set may be, and no larger."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kgen.check.sizes import (
    BEYOND_HEADS,
    BEYOND_TUNED,
    FEW,
    MANY,
    MANY_THREADS,
    NARROW,
    POOL_WORK,
    QUICK,
    RAGGED,
    SERIAL_WORK,
    SHORT,
    STEADY_BYTES,
    STEADY_FLOPS,
    WHOLE_HEADS,
    WHOLE_TILES,
    Sizes,
)
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Dim, Pass
from kgen.operators.base import Operator

Dims = dict[str, int]
"""The extents of a set that are not the problem's own."""

Threads = Callable[[Problem], int]
"""Threads of all CTAs that a kernel takes for a problem."""


def tensor_bytes(pass_: Pass, problem: Problem) -> int:
    """Bytes of all inputs and outputs."""
    return sum(
        math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize for t in pass_.tensors
    )


@dataclass(frozen=True, slots=True)
class Extents:
    """Chooses the extents of the sets of one problem.

    Attributes:
        operator: Declares dims and the slab dim.
        pass_: One of its passes.
        problem: At full size.
        sizes: How large sets other than the problem itself may be.
    """

    operator: Operator
    pass_: Pass
    problem: Problem
    sizes: Sizes

    def bytes(self, dims: Dims) -> int:
        """Bytes of all inputs and outputs of a set."""
        return tensor_bytes(self.pass_, self._with(dims))

    def reduced(
        self, rows: int, budget: int, constants: Collection[str], times: int = 1, least: int = 1
    ) -> Dims:
        """Few rows of the slab dim, few steps; where that is not enough, less of the other run-time
        dims. At least `least` rows, if one fits.
        """
        slab = self.operator.slab_dim
        dims = {
            name: SHORT
            for name in self.operator.serial_dims
            if name not in constants and self.problem.dim(name) > SHORT
        }
        if slab is not None and slab not in constants:
            fits = max(least, budget // max(self.bytes({**dims, slab: 1}), 1))
            if slab in self.operator.repeats:  # a row is a whole sequence there, not a line
                rows = min(rows, QUICK)
            dims[slab] = min(rows, fits)
        smallest = {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if not self._is_implied(dim.name)
        }
        while self.bytes(dims) > budget or self._is_too_much_work(dims, times):
            extents = {**dict(self.problem.dims), **dims}
            free = [n for n, low in smallest.items() if n not in constants and extents[n] > low]
            if not free:
                break
            repeated = [n for n in free if n in self.operator.repeats and extents[n] > FEW]
            largest = max(repeated or free, key=lambda name: extents[name])
            dims[largest] = max(smallest[largest], extents[largest] // 2)
        return dims

    def pool(self) -> Dims:
        """Enough elements that the largest error of ordinary inputs is a stable number.

        The definition alone runs on them, so the slab dim may have any extent; and every dim,
        where all sets are small.
        """
        slab = self.operator.slab_dim
        if self.sizes.flops is not None:
            return self.reduced(4096, self.sizes.pool, (), times=POOL_WORK)
        if slab is not None:
            row = max(self._row_bytes(slab), 1)
            return {slab: max(1, min(4096, self.sizes.pool // row))}
        return {}

    def ragged(self, constants: Collection[str]) -> Iterator[Dims]:
        """One run-time dim at a time at awkward extents."""
        for dim in self.operator.signature.dims:
            if dim.name in constants or self._is_implied(dim.name):
                continue
            repeats = dim.name in self.operator.repeats
            for extent in self.sizes.ragged_repeats if repeats else RAGGED:
                if extent < self._smallest(dim):
                    continue
                dims = self.reduced(2, self.sizes.small, constants)
                dims[dim.name] = extent
                if self.bytes(dims) <= max(self.sizes.small, self.bytes({})):
                    yield dims

    def unequal(self, constants: Collection[str]) -> Iterator[Dims]:
        """Several of every dim that repeats the work, no two the same, not all powers of two."""
        repeats = [
            name
            for name in self.operator.repeats
            if name not in constants and not self._is_implied(name)
        ]
        if len(repeats) > 1:
            dims = self.reduced(FEW, self.sizes.small, constants, times=2, least=FEW)
            middle = {name: 5 + 2 * place for place, name in enumerate(repeats[1:-1])}
            yield dims | {repeats[0]: 2, **middle, repeats[-1]: 3}

    def many(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """Of a host's proof: many rows, then many of each dim that repeats the work, with all else
        as small as can be. A GPU has the dims of the problem itself, and sets beyond them.
        """
        smallest = self._smallest_extents(constants)
        for name in dict.fromkeys([self.operator.slab_dim, *self.operator.repeats]):
            if self.sizes.flops is None or name not in smallest:
                continue
            dims = self._narrow_extents(constants) | {name: MANY}
            takes = threads(self._with(dims)) if threads is not None else 0
            if takes <= MANY_THREADS and self._is_modest(dims, threads, times=4):
                yield dims

    def beyond(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[tuple[Dims, tuple[tuple[str, int], ...]]]:
        """One run-time dim at a time far beyond the problem's extent, all others small.

        Yields:
            The extents, and of a dim that is not as long as it should be how long that is.
        """
        smallest = self._smallest_extents(constants)
        for name in smallest:
            if name in self.operator.repeats and self.sizes.flops is not None:
                continue  # on the host layer a hundred heads take a minute, and are all the same
            beyond = BEYOND_HEADS if name in self.operator.head_dims else self.sizes.beyond
            extent = max(beyond, BEYOND_TUNED * self.problem.dim(name) + 1)
            is_serial = name in self.operator.serial_dims
            if is_serial:
                extent = min(extent, self.sizes.steps)
            wanted, times = extent, SERIAL_WORK if is_serial else 1
            others = self._narrow_extents(constants) if is_serial else smallest
            while extent > RAGGED[-1]:
                dims = {**others, name: extent}
                if self._is_modest(dims, threads, times):
                    yield dims, () if extent == wanted else ((name, wanted),)
                    break
                extent -= extent // 4

    def whole_tiles(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Dims]:
        """One run-time dim at a time at a whole number of large tiles, and one less."""
        others = self._narrow_extents(constants) if self.sizes.whole_tiles else {}
        for name in others:
            if name in self.operator.repeats and self.sizes.flops is not None:
                continue
            # On the host layer one CTA has all rows; a plain fp32 sum of 256 may miss its bound.
            if name == self.operator.slab_dim and self._is_summed(name) and self._is_on_host:
                continue
            extent = WHOLE_HEADS if name in self.operator.head_dims else WHOLE_TILES
            while extent > RAGGED[-1]:
                sets = [{**others, name: extent}, {**others, name: extent - 1}]
                if all(self._is_modest(dims, threads, times=4) for dims in sets):
                    yield from sets
                    break
                extent //= 2

    def steady(self, steady: Sequence[tuple[str, int]], constants: Collection[str]) -> Dims:
        """The extents of the set that reaches the steady state, or as far as a CPU gets.

        Where that is not as far as `steady` says, no certificate of the host reaches it.
        """
        dims = {**self._smallest_extents(constants), **dict(steady)}
        while (
            self.bytes(dims) > STEADY_BYTES
            or self.operator.cost(self.pass_.name, self._with(dims)).flops > STEADY_FLOPS
        ):
            name = max((name for name, _ in steady), key=lambda name: dims[name])
            if dims[name] <= SHORT:
                break
            dims[name] = dims[name] // 2 + 1
        return dims

    def is_small(self, dims: Dims) -> bool:
        """Whether a set is not too large for a host run.

        A dim compiled in may make even one row of some sets large. Sets of many steps may take
        more, and were chosen by that.
        """
        serial = any(dims.get(name, 0) > SHORT for name in self.operator.serial_dims)
        times = SERIAL_WORK if serial else 4
        return self.bytes(dims) <= 4 * self.sizes.small and not self._is_too_much_work(dims, times)

    def _is_modest(self, dims: Dims, threads: Threads | None, times: int) -> bool:
        """Whether a set is neither too large nor too much work, `times` a small set's at most."""
        return (
            self.bytes(dims) <= self.sizes.small * min(times, 4)
            and not self._is_too_much_work(dims, times, self.sizes.far_flops)
            and not self._are_too_many(dims, threads)
        )

    def _smallest_extents(self, constants: Collection[str]) -> Dims:
        """Every run-time dim as small as it may be."""
        return {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if dim.name not in constants and not self._is_implied(dim.name)
        }

    def _narrow_extents(self, constants: Collection[str]) -> Dims:
        """Every run-time dim as small as it may be, but the last of an output: errors are relative
        to the values along it, and one value may be nearly 0 where its terms are not.
        """
        last = {t.dims[-1] for t in self.pass_.results}
        return {
            name: min(max(extent, NARROW), self.problem.dim(name)) if name in last else extent
            for name, extent in self._smallest_extents(constants).items()
        }

    def _smallest(self, dim: Dim) -> int:
        packing = self.operator.signature.packing
        is_count = packing is not None and dim.name == packing.sequences
        return max(dim.smallest, 1) if is_count else dim.smallest

    def _row_bytes(self, slab: str) -> int:
        return self.bytes({slab: 1})

    def _is_summed(self, dim: str) -> bool:
        """Whether an output is a sum over a dim."""
        return any(dim not in t.dims for t in self.pass_.results)

    @property
    def _is_on_host(self) -> bool:
        return self.sizes.flops is not None or self.sizes.far_flops is not None

    def _is_too_much_work(
        self, dims: Dims, times: int = 1, far_flops: int | None = None
    ) -> bool:
        most = far_flops if self.sizes.flops is None else times * self.sizes.flops
        if most is None:
            return False
        return self.operator.cost(self.pass_.name, self._with(dims)).flops > most

    def _are_too_many(self, dims: Dims, threads: Threads | None) -> bool:
        most = self.sizes.threads
        return most is not None and threads is not None and threads(self._with(dims)) > most

    def _with(self, dims: Dims) -> Problem:
        return with_dims(self.problem, dims, self.operator.signature)

    def _is_implied(self, dim: str) -> bool:
        """Whether other dims say what a dim is."""
        implied = self.operator.signature.implied(dict(self.problem.dtypes))
        return implied is not None and dim == implied[0]
