"""How large input sets are, and how far beyond a problem they go."""

from __future__ import annotations

from dataclasses import dataclass

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
MANY = 67
"""Of a dim that repeats the work, on the host layer: more than `QUICK`."""
MANY_ROWS = 131
"""Of the slab dim there: a kernel that adds the sums of rows takes 64 or 128 of them at once."""
MANY_THREADS = 2**14
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

BETWEEN = (21, 24, 80, 96, 109, 240)
"""Extents inside tiles of 8 to 128; those of `RAGGED` are within two of a multiple of 64. The last
tile is half or a quarter full, or ends within a vector."""
BETWEEN_HEADS = BETWEEN[:-1]
BETWEEN_REPEATS = (3, 5, 7)
TILES = (4, 8, 16, 32, 128, 256)
"""Whole tiles, and the extents that models have. Other sets have 64, and 512."""
TILES_HEADS = TILES[:-1]
"""Of heads, and of rows that one CTA adds."""
TILES_REPEATS = ((4, 8, 4), (8, 8, 1), (16, 4, 2), (2, 16, 2), (32, 1, 32), (1, 32, 16))
RUN_STEPS = (192, 97, 61)
RUN_HEADS = (4, 2, 1)
"""Of the set with runs of zeros: those of which a small set has room. A third of the steps is 0."""
SAME = 6
"""Of all dims at once: a kernel may take one for another where they are equal."""
LONG, WIDE = 201, 40
"""Steps of several rows, and of many features."""
DRAWN = 2
"""Sets whose extents are drawn at random, from the fresh seed of a certificate."""
DRAWN_EXTENTS = (3, 130)
DRAWN_REPEATS = (1, 7)
SHARED_STEPS = 3
"""Of the set in which any inputs of one shape share memory: no recurrence grows far in so many."""
CUT = 5
"""Packed sequences of the sets that cut them in a way of their own."""
PACKED = 3
"""Packed sequences of sets in which steps are many and all else is few."""
ROW_HEADS = 7
ROW_STEPS = 40
"""Of the sets whose rows take turns: as many heads as most operators have kinds of rows."""
FEW_STEPS = 5
"""Of a set with rows that are gigabytes apart: each row takes pages of its own."""

HOST_THREADS = 2**17
"""Of a launch of a set beyond the problem's extents, on the host layer: each thread is a fiber, and
has work where its tile is padding alone. 8193 channels of timex at T=1 are 1.6 million threads and
20 s, though the definition takes 16 thousand multiply-adds."""
POOL_WORK = 16
"""Arithmetic of a pool's set, in small sets': nothing but the definition runs on it."""


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
        inside_tiles: Whether there are sets whose extents all end inside tiles, and at random ones.
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
    inside_tiles: bool = True
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
