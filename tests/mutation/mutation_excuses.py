"""Mutants that pass a certificate, each with the reason why they may or must pass."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from mutation_operators import Fate


@dataclass(frozen=True, slots=True)
class Excuse:
    """Mutants whose fate differs from the fate of their mutation operator.

    Attributes:
        subjects: Shell pattern for names of subjects.
        operator: Name of the mutation operator.
        what: Part of the rest of the mutant's name; a `$` stands for its end.
        why: Reason of the fate, in a sentence.
        fate: Fate of these mutants.
    """

    subjects: str
    operator: str
    what: str
    why: str
    fate: Fate = Fate.EQUIVALENT

    def covers(self, name: str) -> bool:
        """Whether the excuse applies to the mutant of this name."""
        subject, operator, what = name.split(" / ", 2)
        return (
            fnmatchcase(subject, self.subjects)
            and operator == self.operator
            and self.what in f"{what}$"
        )


_VECTORS = "columns come in whole vectors, of which none starts at the row's last element"
_SHORTCUT = "the clause only spares the compiler the exact test behind it"
_NO_ROW = "one more turn, in which every row is past the end and is left out"
_NAN_STAYS = "a NaN in x makes the row's scale NaN, so the product is NaN all the same"
_SAME_ORDER = "rows that the loop of eight loads leaves out, the next loop adds, in the same order"
_WHOLE_SWEEPS = "N is a multiple of 32, and each thread has as many vectors of a chunk: no tail"
_ONE_GROUP = "the block is one group"
_ONCE = "each scratch is used by one call per launch"
_COARSE = (
    "16-bit outputs: the definition in that dtype loses as much, which is the bound; found in fp32"
)
_ONE_CHUNK = (
    "a row is one chunk: the barrier in the next row's sums comes before its stage is filled anew"
)
_RSTD_GIVEN = "rstd is an input, so nobody asks for the sum of squares"

_ALIGNMENT = "of the address only its last bits are used: which columns come in whole vectors"
_FAR_ROWS = "the set of rows that are gigabytes apart has two, and no thread has both"

EXCUSES = (
    # addresses
    Excuse("*", "truncate an offset", "= columns_of(lane, x + [", _ALIGNMENT),
    Excuse("unaligned", "truncate an offset", "next_row = x + [", _FAR_ROWS, Fate.UNSEEN),
    # loops and guards
    Excuse("*", "tighten bound", "first < [kN => kN - 1]", _VECTORS),
    Excuse("*two_*", "tighten bound", "column < [kN => kN - 1]", _VECTORS),
    Excuse("back_two_pass", "tighten bound", "column >= [kN => kN - 1]", _VECTORS),
    Excuse("*", "tighten bound", "[own.vectors_end => own.vectors_end - 1]", _VECTORS),
    Excuse("*", "tighten bound", "[<= => <] kN ||", _SHORTCUT),
    Excuse("per_block", "tighten bound", "column_of(step) < [kN => kN - 1]", _VECTORS),
    Excuse("*", "loosen bound", "for (; block_row [< => <=] M", _NO_ROW),
    Excuse("*", "loosen bound", "for (; block_row < [M => M + 1]", _NO_ROW),
    Excuse("registers*", "loosen bound", "Persistent || block_row [< => <=] M", _NO_ROW),
    Excuse("registers*", "loosen bound", "rsistent || block_row < [M => M + 1]", _NO_ROW),
    Excuse("*two_*", "loosen bound", "int tile = 0; tile [< => <=] kTiles", _NO_ROW),
    Excuse("*two_*", "loosen bound", "int tile = 0; tile < [kTiles => kTiles + 1]", _NO_ROW),
    Excuse("back_two_pass", "loosen bound", "row0 [< => <=] M", _NO_ROW),
    Excuse("back_two_pass", "loosen bound", "row0 < [M => M + 1]", _NO_ROW),
    Excuse("back_bulk", "loosen bound", "kN", _WHOLE_SWEEPS),
    Excuse("back_bulk", "drop guard", "[ && n < kN => ]", _WHOLE_SWEEPS),
    Excuse("back_bulk", "drop guard", "[inside(step) => true]", _WHOLE_SWEEPS),
    Excuse("*unaligned", "wrong row stride", "(lane, x + row [* x_stride_M => * kN]",
           "only the address modulo a vector counts there, and the guard makes that the same"),
    Excuse("back_registers", "tighten bound", "RowLanes < [rows => rows - 1]", _SAME_ORDER),
    # places
    Excuse("softmax", "wrong column or place", "=> scratch_.partial[half_];]", _ONE_GROUP),
    Excuse("softmax", "stale value", "[half_ ^= 1; => ;]", _ONCE),
    Excuse("back_bulk*", "drop barrier", "[kgen::sync_warp(); => ;] #2",
           "it only brings the warp together again behind its elected thread's wait"),
    Excuse("back_bulk_warps", "drop barrier", "[kgen::sync_warp(); => ;]", _ONE_CHUNK),
    Excuse("back_bulk_warps", "drop wait", "mbarrier_wait(ring.empty", _ONE_CHUNK),
    Excuse("back_bulk_warps", "weaken wait", "(wraps ? 1u : 0u)",
           "a row of one chunk never goes on in the ring's first stage"),
    Excuse("softmax", "drop barrier", "[sync_block(); => ;] #2$", _ONCE),
    # launches
    Excuse("*naive", "wrong row", "[row += gridDim.x => row += gridDim.x + 1]",
           "up to 2^31 - 1 rows there is a block per row, and no second turn"),
    Excuse("*naive", "wrong launch", "one block more", _NO_ROW),
    Excuse("registers_prefetch", "wrong launch", "one block more", _NO_ROW),
    # values
    Excuse("*", "drop special values", "[value * scale => (value", _NAN_STAYS),
    Excuse("softmax", "drop special values", "kgen/primitives/warp.cuh",
           "a NaN that the maximum drops still makes its own exponential and the sum NaN"),
    Excuse("two_pass", "forget an addend or a result", "[rstd[row] = scale;",
           "nobody asks for rstd"),
    Excuse("back_registers", "drop special values", "? [kgen::fma(x_edge, x_edge,",
           "whole vectors cover the row, so x_edge is always zero"),
    Excuse("back_bulk", "drop special values", "[kgen::fma(values[i], values[i],", _RSTD_GIVEN),
    Excuse("back_unaligned", "drop special values", "[kgen::fma(values[i], values[i],",
           _RSTD_GIVEN),
    Excuse("back_unaligned", "round the accumulator", "squares[i % 2])", _RSTD_GIVEN),
    Excuse("back_bulk_warps", "round the result", "", "bf16's definition rounds there as well"),
    Excuse("back_bulk_warps", "wrong divisor", "[1.0f / kN => 1.0f / (kN - 1)]", _COARSE,
           Fate.UNSEEN),
    Excuse("back_bulk_warps", "wrong conversion", "[if ((bits & 0x7fffffffu) > 0x7f800000u)",
           "the NaN that fp32 arithmetic makes is still NaN when it is rounded like a number"),
    # differences that the host layer cannot see
    Excuse("back_bulk", "drop barrier", "[kgen::sync_warp(); => ;]$",
           "a lane would have to fall a chunk behind its warp's first one, and the host layer's "
           "orders are fair: each thread has its turn before any has a second", Fate.UNSEEN),
)  # fmt: skip
