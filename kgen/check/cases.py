"""The input sets that a kernel is tried on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kgen.check.case import NORMAL, SHIFTED, Case, Layout, seed_of
from kgen.check.hard_values import LARGE, LARGE_CASES, NANS, UNEQUAL, weights_of
from kgen.model.problem import Problem, with_dims
from kgen.model.signature import Dim, Pass
from kgen.operators.base import Operator

REDUCED = 257
QUICK = 65
FEW = 2
"""Of a dim along which a kernel repeats itself, before other dims are made shorter."""
SHORT = 321
"""Extent of a serial dim in a small set: a few chunks of steps, and one step more."""
FRESH_SEEDS = 8
"""Of a certificate: how much of its bound a kernel uses is not left to one draw."""
BEYOND = 8193
"""A row of the table serves larger extents than it was tuned at; so proofs go beyond those."""
BEYOND_TUNED = 4
BEYOND_HEADS = 513
"""Of the features of a head: twice the largest that models have (256). A plain fp32 sum over
1025 of them, which is what safe kernels compute, exceeds its bound."""
WHOLE_TILES = 512
"""A multiple of every tile: no extent of `RAGGED` is a whole number of tiles of more than 64."""
WHOLE_HEADS = 128
"""The same of the features of a head. Beyond, a plain fp32 sum may exceed its bound."""
NARROW = 8
FURTHER = 545
"""Steps of a set beyond the problem's extents on the host layer: more than 512, and the last tile
ragged. Where tensor cores add, they cut off: on sums of a thousand steps an honest kernel may leave
the bound of a definition that rounds. A GPU's certificate has 8193."""
SERIAL_WORK = 16
"""Arithmetic of that set, in small sets'."""
STEADY_BYTES = 2**24
STEADY_FLOPS = 2**29
"""Of the set that reaches a kernel's steady state, on the host layer."""
RAGGED = (0, 1, 2, 63, 64, 65)
"""64, too: where the extent is a whole number of tiles, a loop may go round once too often."""

HOST_THREADS = 2**17
"""Of a launch of a set beyond the problem's extents, on the host layer: each thread is a fiber, and
has work where its tile is padding alone. 8193 channels of timex at T=1 are 1.6 million threads and
20 s, though the definition takes 16 thousand multiply-adds."""

def tensor_bytes(pass_: Pass, problem: Problem) -> int:
    """Bytes of all inputs and outputs."""
    return sum(
        math.prod(problem.shape(t.dims)) * problem.dtype(t.dtype).itemsize for t in pass_.tensors
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of inputs and outputs that sets other than the problem itself are kept below.

    Attributes:
        small: Hard and ragged sets.
        quick: The set that every trial starts with.
        pool: Ordinary inputs that the definition alone runs on.
        flops: Arithmetic of a small set, at most; None: whatever its bytes ask for.
        steps: Largest extent of a serial dim in a set beyond the problem's extents.
        rows: Of the slab dim in a hard set, at most; no more than of a quick set where the
            operator says that rows repeat its work.
        fresh: Fresh draws of the quick set in a certificate.
        beyond: Extent of a set beyond the problem's extents, at least.
        ragged_repeats: Extents of ragged sets, of a dim along which a kernel repeats itself.
        threads: Of a set beyond the problem's extents, at most; None: any number.
        whole_tiles: Whether there are sets of a whole number of large tiles.
        far_flops: Arithmetic of such a set, at most, where `flops` is None; None: any.
    """

    small: int
    quick: int
    pool: int
    flops: int | None = None
    rows: int = REDUCED
    steps: int = 0
    fresh: int = FRESH_SEEDS
    beyond: int = BEYOND
    ragged_repeats: tuple[int, ...] = RAGGED
    threads: int | None = None
    whole_tiles: bool = True
    far_flops: int | None = None


GPU_SIZES = Sizes(small=64 * 2**20, quick=4 * 2**20, pool=4 * 2**20, steps=8193)
HOST_SIZES = Sizes(
    small=2**18, quick=2**16, pool=2**19, steps=FURTHER, far_flops=2**24
)
"""A kernel on the host layer handles a few million elements per second. 8193 steps of timex are 400
million operations, all of one CTA: four minutes for one set."""
PROOF_SIZES = Sizes(
    small=2**18, quick=2**16, pool=2**19, flops=2**20, threads=HOST_THREADS, steps=FURTHER
)
"""Of a certificate's host run: dozens of sets, some under AddressSanitizer, of operators whose work
may grow with the square of a dim (timex: 27 sets of HOST_SIZES took over two minutes). Fewer bytes
would not do: a persistent block must come round, or what it keeps too long goes unseen."""


_POOL_WORK = 16
"""Arithmetic of a pool's set, in small sets': nothing but the definition runs on it."""


Threads = Callable[[Problem], int]
"""Threads of all CTAs that a kernel takes for a problem."""


class HostSets(NamedTuple):
    """The sets of a host run.

    Attributes:
        cases: In the order of their trial.
        left_out: Labels of the sets that are too large for it, and what the shortened ones were.
    """

    cases: list[Case]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Chooses cases for one problem.

    Attributes:
        operator: Declares cases, dims and the slab dim.
        pass_: One of its passes.
        problem: At full size.
        seed: Seeds every set that is not fresh.
        sizes: How large the other sets may be.
    """

    operator: Operator
    pass_: Pass
    problem: Problem
    seed: int
    sizes: Sizes = GPU_SIZES

    def trial(self, seed: int, constants: Collection[str]) -> list[Case]:
        """A fresh small set, one of the hard ones in turn, then the problem itself."""
        cases = []
        quick = self._reduced(QUICK, self.sizes.quick, constants)
        if quick or self._bytes({}) <= self.sizes.small:
            cases.append(Case(NORMAL, quick, "contiguous", seed, fresh=True))
        hard = [
            case
            for case in self._hard(constants)
            if self._bytes(dict(case.dims)) <= max(self.sizes.small, self._bytes({}))
        ]
        if hard:
            cases.append(hard[seed % len(hard)])
        cases.append(self.whole())
        return cases

    def certify(self, seed: int, constants: Collection[str]) -> list[Case]:
        """Everything, cheap sets first, and a fresh set of full size last."""
        whole = self.whole()
        ragged = list(self._ragged(constants))
        quick = self._reduced(QUICK, self.sizes.quick, constants)
        return [
            *ragged,
            *self._whole_tiles(constants),
            *self._hard(constants),
            *self._beyond(constants),
            *(
                Case(NORMAL, quick, "contiguous", seed_of(seed, "fresh", i), fresh=True)
                for i in range(self.sizes.fresh)
            ),
            whole,
            Case(NORMAL, (), "contiguous", seed, fresh=True),
        ]

    def host(
        self,
        seed: int,
        constants: Collection[str],
        steady: Sequence[tuple[str, int]] = (),
        threads: Threads | None = None,
    ) -> HostSets:
        """Small sets only: what a CPU that runs every CUDA thread as a fiber gets through.

        All dims that the kernel takes at run time are small; those compiled in stay as they are.
        One set more goes as far as `steady` says, with all else as small as can be.

        Args:
            seed: Of the fresh set.
            constants: Dims that are compile-time constants of the kernel.
            steady: How far the set of the steady state goes.
            threads: Threads that a problem takes, of which `Sizes.threads` are allowed; None: few.
        """
        quick = self._reduced(QUICK, self.sizes.quick, constants)
        always = [
            Case(NORMAL, quick, "contiguous", seed, fresh=True),
            *self._steady(steady, constants),
        ]
        others = [
            *self._ragged(constants),
            *self._whole_tiles(constants, threads),
            *self._hard(constants),
            *self._beyond(constants, threads),
        ]
        kept = [*always, *filter(self._is_small, others)]
        left_out = [case.label for case in others if not self._is_small(case)]
        return HostSets(kept, [*left_out, *(case.wanted for case in kept if case.shortened)])

    def _is_small(self, case: Case) -> bool:
        """Whether a set is not too large for a host run.

        A dim compiled in may make even one row of some sets large. Sets of many steps may take
        more, and were chosen by that.
        """
        dims = dict(case.dims)
        serial = any(dims.get(name, 0) > SHORT for name in self.operator.serial_dims)
        times = SERIAL_WORK if serial else 4
        return self._bytes(dims) <= 4 * self.sizes.small and not self._is_too_much_work(dims, times)

    def steady(
        self, steady: Sequence[tuple[str, int]], constants: Collection[str]
    ) -> dict[str, int]:
        """The extents of the set that reaches the steady state, or as far as a CPU gets.

        Where that is not as far as `steady` says, no certificate of the host reaches it.
        """
        dims = {**self._smallest_extents(constants), **dict(steady)}
        while (
            self._bytes(dims) > STEADY_BYTES
            or self.operator.cost(self.pass_.name, self._with(dims)).flops > STEADY_FLOPS
        ):
            name = max((name for name, _ in steady), key=lambda name: dims[name])
            if dims[name] <= SHORT:
                break
            dims[name] = dims[name] // 2 + 1
        return dims

    def _steady(
        self, steady: Sequence[tuple[str, int]], constants: Collection[str]
    ) -> Iterator[Case]:
        if steady:
            dims = self.steady(steady, constants)
            shortened = tuple((name, extent) for name, extent in steady if extent != dims[name])
            yield replace(self._case(NORMAL, tuple(dims.items())), shortened=shortened)

    def _smallest_extents(self, constants: Collection[str]) -> dict[str, int]:
        """Every run-time dim as small as it may be."""
        return {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if dim.name not in constants and not self._is_implied(dim.name)
        }

    def _narrow_extents(self, constants: Collection[str]) -> dict[str, int]:
        """Every run-time dim as small as it may be, but the last of an output: errors are relative
        to the values along it, and one value may be nearly 0 where its terms are not.
        """
        last = {t.dims[-1] for t in self.pass_.results}
        return {
            name: min(max(extent, NARROW), self.problem.dim(name)) if name in last else extent
            for name, extent in self._smallest_extents(constants).items()
        }

    def whole(self) -> Case:
        """The problem itself."""
        return self._case(NORMAL, ())

    def pool(self) -> list[Case]:
        """Ordinary inputs of enough elements that their largest error is a stable number: three
        sets, or one where a row of the slab dim is as many.

        The definition alone runs on them, so the slab dim may have any extent; and every dim,
        where all sets are small.
        """
        dims: tuple[tuple[str, int], ...] = ()
        slab = self.operator.slab_dim
        if self.sizes.flops is not None:
            dims = self._reduced(4096, self.sizes.pool, (), times=_POOL_WORK)
        elif slab is not None:
            row = max(self._row_bytes(slab), 1)
            dims = ((slab, max(1, min(4096, self.sizes.pool // row))),)
        draws = 1 if self._bytes(dict(dims)) > 3 * self.sizes.pool else 3
        return [
            Case(NORMAL, dims, "contiguous", seed_of(self.seed, "pool", i)) for i in range(draws)
        ]

    def _hard(self, constants: Collection[str]) -> list[Case]:
        """The operator's own cases and strided inputs, with few rows if they may be few."""
        dims = self._reduced(self.sizes.rows, self.sizes.small, constants)
        hard = [self._case(name, dims) for name in self.operator.cases]
        if not set(LARGE_CASES) & set(self.operator.cases):
            hard.append(self._case(LARGE, dims))
        if any(t.free_strides for t in self.pass_.inputs):
            hard += [self._case(NORMAL, dims, "strided"), self._case(NORMAL, dims, "odd strides")]
        if any(len(t.free_strides) > 1 for t in self.pass_.inputs):
            hard.append(self._case(NORMAL, dims, "permuted"))
        hard += [self._case(NORMAL, dims, shifted) for shifted in SHIFTED]
        if self.pass_.scalars:
            ordinary = self._case(NORMAL, dims)
            hard.append(replace(ordinary, scalars=other_scalars(self.pass_)))
            hard.append(replace(ordinary, opposite=True))
        hard += [self._case(name, dims) for name in (*UNEQUAL, *NANS[:-1])]
        if weights_of(self.pass_, self.operator.slab_dim):
            hard.append(self._case(NANS[-1], dims))
        return hard

    def _ragged(self, constants: Collection[str]) -> Iterator[Case]:
        """One run-time dim at a time at awkward extents."""
        for dim in self.operator.signature.dims:
            if dim.name in constants or self._is_implied(dim.name):
                continue
            repeats = dim.name in self.operator.repeats
            for extent in self.sizes.ragged_repeats if repeats else RAGGED:
                if extent < self._smallest(dim):
                    continue
                dims = dict(self._reduced(2, self.sizes.small, constants))
                dims[dim.name] = extent
                if self._bytes(dims) <= max(self.sizes.small, self._bytes({})):
                    yield self._case(NORMAL, tuple(dims.items()))

    def _beyond(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Case]:
        """One run-time dim at a time far beyond the problem's extent, all others small."""
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
                    case = self._case(NORMAL, tuple(dims.items()))
                    yield case if extent == wanted else replace(case, shortened=((name, wanted),))
                    break
                extent = extent // 2 + 1

    def _whole_tiles(
        self, constants: Collection[str], threads: Threads | None = None
    ) -> Iterator[Case]:
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
                    yield from (self._case(NORMAL, tuple(dims.items())) for dims in sets)
                    break
                extent //= 2

    def _is_modest(self, dims: dict[str, int], threads: Threads | None, times: int) -> bool:
        """Whether a set is neither too large nor too much work, `times` a small set's at most."""
        return (
            self._bytes(dims) <= self.sizes.small * min(times, 4)
            and not self._is_too_much_work(dims, times, self.sizes.far_flops)
            and not self._are_too_many(dims, threads)
        )

    def _reduced(
        self, rows: int, budget: int, constants: Collection[str], times: int = 1
    ) -> tuple[tuple[str, int], ...]:
        """Few rows of the slab dim, few steps; where that is not enough, less of the other run-time
        dims.
        """
        slab = self.operator.slab_dim
        dims = {
            name: SHORT
            for name in self.operator.serial_dims
            if name not in constants and self.problem.dim(name) > SHORT
        }
        if slab is not None and slab not in constants:
            fits = max(1, budget // max(self._row_bytes(slab), 1))
            if slab in self.operator.repeats:  # a row is a whole sequence there, not a line
                rows = min(rows, QUICK)
            dims[slab] = min(rows, fits)
        smallest = {
            dim.name: max(1, dim.smallest)
            for dim in self.operator.signature.dims
            if not self._is_implied(dim.name)
        }
        while self._bytes(dims) > budget or self._is_too_much_work(dims, times):
            extents = {**dict(self.problem.dims), **dims}
            free = [n for n, low in smallest.items() if n not in constants and extents[n] > low]
            if not free:
                break
            repeated = [n for n in free if n in self.operator.repeats and extents[n] > FEW]
            largest = max(repeated or free, key=lambda name: extents[name])
            dims[largest] = max(smallest[largest], extents[largest] // 2)
        return tuple(dims.items())

    def _smallest(self, dim: Dim) -> int:
        packing = self.operator.signature.packing
        is_count = packing is not None and dim.name == packing.sequences
        return max(dim.smallest, 1) if is_count else dim.smallest

    def _row_bytes(self, slab: str) -> int:
        return self._bytes({slab: 1})

    def _is_summed(self, dim: str) -> bool:
        """Whether an output is a sum over a dim."""
        return any(dim not in t.dims for t in self.pass_.results)

    @property
    def _is_on_host(self) -> bool:
        return self.sizes.flops is not None or self.sizes.far_flops is not None

    def _is_too_much_work(
        self, dims: dict[str, int], times: int = 1, far_flops: int | None = None
    ) -> bool:
        most = far_flops if self.sizes.flops is None else times * self.sizes.flops
        if most is None:
            return False
        return self.operator.cost(self.pass_.name, self._with(dims)).flops > most

    def _are_too_many(self, dims: dict[str, int], threads: Threads | None) -> bool:
        most = self.sizes.threads
        return most is not None and threads is not None and threads(self._with(dims)) > most

    def _bytes(self, dims: dict[str, int]) -> int:
        return tensor_bytes(self.pass_, self._with(dims))

    def _with(self, dims: dict[str, int]) -> Problem:
        return with_dims(self.problem, dims, self.operator.signature)

    def _is_implied(self, dim: str) -> bool:
        """Whether other dims say what a dim is."""
        implied = self.operator.signature.implied(dict(self.problem.dtypes))
        return implied is not None and dim == implied[0]

    def _case(
        self, name: str, dims: tuple[tuple[str, int], ...], layout: Layout = "contiguous"
    ) -> Case:
        # Values do not depend on the layout, so that sets which differ in it alone have one oracle.
        return Case(name, dims, layout, seed_of(self.seed, name, list(dims), "contiguous"))


def other_scalars(pass_: Pass) -> tuple[tuple[str, float], ...]:
    """Values beside the defaults, each of which shows in the outputs.

    A kernel that takes no notice of eps, an offset of 0 or a scale of 1 is right with the defaults.
    One that rounds a product with a scalar is right where the scalar is a power of two.
    """
    found = []
    for place, scalar in enumerate(pass_.scalars):
        value = 0.6875 + place / 16  # no two the same: one may be used in another's place
        if value == scalar.default:
            value += 1 / 32
        if scalar.above is not None and value <= scalar.above:
            value = 2.0 * scalar.above
        found.append((scalar.name, value))
    return tuple(found)
