"""Sizes of the input sets, and how far some of them go beyond the problem's extents."""

from __future__ import annotations

from dataclasses import dataclass

REDUCED = 257
QUICK = 65
FEW = 2
"""Extent down to which dims that repeat the work are halved before any other dim is."""
SHORT = 321
"""Extent of a serial dim in a small set: a few chunks of steps, plus one step."""
FRESH_SEEDS = 8
"""Fresh sets in a certificate: the share of its bound that a kernel uses shall not depend on one
draw."""
BEYOND = 8193
"""A row of the published table serves larger extents than it was tuned at; so certificates test
larger extents, too."""
BEYOND_TUNED = 4
BEYOND_HEADS = 513
"""Features of a head: twice the largest number in models (256), plus one. A plain fp32 sum over
1025 features, which is what safe kernels compute, exceeds its bound."""
MANY = 67
"""Extent of a dim that repeats the work, on the host layer: more than `QUICK`."""
MANY_ROWS = 131
"""Extent of the slab dim on the host layer: a kernel that sums over rows handles 64 or 128 rows at
once."""
MANY_THREADS = 2**14
WHOLE_TILES = 512
"""A multiple of every tile size: no extent in `RAGGED` is a multiple of a tile above 64."""
WHOLE_HEADS = 128
"""The same for the features of a head. With more, a plain fp32 sum may exceed its bound."""
NARROW = 8
FURTHER = 545
"""Steps of a set beyond the problem's extents on the host layer: more than 512, and the last tile
ragged. Tensor cores truncate when they accumulate: over a thousand steps a correct kernel may
exceed the bound of a definition that rounds. A GPU's certificate has 8193 steps."""
SERIAL_WORK = 16
"""Arithmetic of a set of many steps, as a multiple of a small set's."""
STEADY_BYTES = 2**24
STEADY_FLOPS = 2**29
"""Limits of the set that reaches a kernel's steady state, on the host layer."""
WHOLE_VECTORS = 32
"""A multiple of the elements of any vector access."""
RAGGED = (0, 1, 2, 63, 64, 65)
"""64 is included: at a whole number of tiles, a loop may run one iteration too many."""

BETWEEN = (21, 24, 80, 96, 109, 240)
"""Extents that end inside tiles of 8 to 128; those of `RAGGED` are within two of a multiple of 64.
The last tile is half or a quarter full, or ends within a vector."""
BETWEEN_HEADS = BETWEEN[:-1]
BETWEEN_REPEATS = (3, 5, 7)
TILES = (4, 8, 16, 32, 128, 256)
"""Whole tiles, and extents that occur in models. Other sets have 64 and 512."""
TILES_HEADS = TILES[:-1]
"""Extents of head dims, and of rows that one CTA sums."""
TILES_REPEATS = ((4, 8, 4), (8, 8, 1), (16, 4, 2), (2, 16, 2), (32, 1, 32), (1, 32, 16))
RUN_STEPS = (192, 97, 61)
RUN_HEADS = (4, 2, 1)
"""Candidates for the set with runs of zeros: the first that fits into a small set is taken. A third
of the steps is 0."""
SAME = 6
"""Extent of all dims at once: a kernel that mixes up two dims passes where they are equal, and
fails where one is twice as long."""
LONG, WIDE = 201, 40
"""Steps of the sets with several rows or many features, and the number of those features."""
DRAWN = 2
"""Sets whose extents are drawn at random, from the fresh seed of a certificate."""
DRAWN_EXTENTS = (3, 130)
DRAWN_REPEATS = (1, 7)
SHARED_STEPS = 3
"""Steps of the set in which all inputs of one shape share memory: within three steps no recurrence
grows far."""
CUT = 5
"""Packed sequences in the sets that choose their own sequence boundaries."""
ALIGNED_STEPS = 64
"""Steps of a packed sequence that begins and ends with a chunk, whatever the steps of a chunk."""
PACKED = 3
"""Packed sequences in sets with many steps and small extents in all other dims."""
ROW_HEADS = 7
ROW_STEPS = 40
"""Extents of the sets whose rows alternate between kinds of values: seven heads, because most
operators have seven kinds of rows."""
FEW_STEPS = 5
"""Steps of a set with rows that are gigabytes apart: each row occupies its own memory pages."""

HOST_THREADS = 2**17
"""Threads in a launch of a set beyond the problem's extents, on the host layer. Each thread is a
fiber, and runs even if its tile is all padding. 8193 channels of timex at T=1 are 1.6 million
threads and 20 s, though the definition takes 16 thousand multiply-adds."""
POOL_WORK = 16
"""Arithmetic of a pool set, as a multiple of a small set's: only the definition runs on it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits on the sets other than the problem itself; bytes are those of inputs and outputs.

    Attributes:
        small: Bytes of a hard or ragged set.
        quick: Bytes of the set that every trial starts with.
        pool: Bytes of the ordinary inputs that only the definition runs on.
        flops: Largest arithmetic of a small set, in operations; None: no limit.
        rows: Largest extent of the slab dim in a hard set; if the operator declares that rows
            repeat its work, at most `QUICK`.
        steps: Largest extent of a serial dim in a set beyond the problem's extents.
        fresh: Number of fresh draws of the quick set in a certificate.
        beyond: Smallest extent of a set beyond the problem's extents.
        ragged_repeats: Extents that ragged sets give to a dim that repeats the work.
        threads: Most threads of a set beyond the problem's extents; None: any number.
        whole_tiles: Whether there are sets of a whole number of large tiles.
        inside_tiles: Whether there are sets whose extents all end inside tiles, or are random.
        far_flops: Largest arithmetic of a set of modest size (`SetLimits.is_modest`) where `flops`
            is None; None: no limit.
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
"""The host layer processes a few million elements per second. 8193 steps of timex are 400 million
operations in a single CTA: four minutes for one set."""
PROOF_SIZES = Sizes(
    small=2**18, quick=2**16, pool=2**19, flops=2**20, threads=HOST_THREADS, steps=FURTHER
)
"""Sizes of a certificate's host run, which has dozens of sets, some under AddressSanitizer, and
operators whose work may grow with the square of a dim (timex: 27 sets of HOST_SIZES took over two
minutes). Fewer bytes would not do: a persistent CTA must process several tiles, or state that it
wrongly keeps from one tile to the next goes unseen."""
