// Shared memory and barriers of the fused backward loop of wkv7 (fused_loop.cuh), in chunks of 32 steps; bf16, up to 64
// keys and value features.
//
// Pairs: a panel with the 128-byte swizzle (wgmma.cuh) has two rows of each step. Rows 16 n to 16 n + 7 hold steps 8 n
// to 8 n + 7 of one tensor, and the next eight rows hold the same steps of another tensor:
//
//     E    R and A      columns are keys          Y    gy and gsa    columns are value features
//     F    B and K                                Z    sa and v
//
// so that a lane of an accumulator has the same step of both tensors. Low terms lie in a panel of their own.
//
//     bf16 rows[kSlots][4][64][64]   a slot per chunk: E, its low terms, F, its low terms. Inputs are copied to the
//                                    places of R, A, B and K, w to the place of R's low terms
//     bf16 y[2][64][64], z[2][64][64]   two chunks
//     bf16 low_y[64][64], low_z[64][64]   zero in the rows of gy and v
//     bf16 state[2][64][64]          S before the chunk, transposed: rows are value features; both terms. Later, in
//                                    fp32, the products of R and A with their gradients
//     bf16 x[2][64][64]              diag(P) G, in the layout of S; both terms
//     bf16 scores[2][32][64]         (R B^T, R K^T): rows are late steps, columns are the rows of F; both terms
//     bf16 late_scores[32][64]       A K^T: columns 0 to 31 high terms, 32 to 63 low ones
//     bf16 inverse[32][64]           (I - A B^T)^-1, in the layout of A K^T
//     float triangle[3][320]         A B^T by blocks of 16 x 16: 0, 0 / 1, 0 / 1, 1; rows are 20 floats apart
//     float totals[3][64]            sums of logarithms of the decays of eight steps each
//     float products[2][33][64]      P before the first step (1), and through each step
//     float early[32][64]            products of K and B with their gradients
//     float ends[2][4][64]           sums of S * G before a chunk: each warp's part
//     float sums[2][4][16][4]        each warp's part of the running sums, by the warpgroups of late and of early rows
#pragma once

#include "kgen/primitives/wgmma.cuh"

namespace kgen::wkv7 {

// `first`: a multiple of 1024 bytes.
struct FusedTiles {
    static constexpr int kChunk = 32, kColumns = 64, kSlots = 3;
    using PairPanels = SwizzledPanels<64>;
    using StepPanels = SwizzledPanels<kChunk>;
    using PairOperand = PanelOperand<bf16, 64>;
    using StepOperand = PanelOperand<bf16, kChunk>;
    static constexpr int kPairs = PairPanels::kPanel, kSteps = StepPanels::kPanel;  // elements
    static constexpr int kSlot = 4 * kPairs;
    static constexpr int kYAt = kSlots * kSlot, kZAt = kYAt + 2 * kPairs, kLowAt = kZAt + 2 * kPairs;
    static constexpr int kStateAt = kLowAt + 2 * kPairs, kXAt = kStateAt + 2 * kPairs;
    static constexpr int kScoresAt = kXAt + 2 * kPairs, kFloatsAt = kScoresAt + 4 * kSteps;
    enum Score { kScoreR, kScoreRLow, kScoreAK, kInverse };
    static constexpr int kBlock = 320, kBlockRow = 20;  // of the triangle: no two rows of a block share banks
    static constexpr int kTotalsAt = 3 * kBlock, kProductsAt = kTotalsAt + 3 * kColumns;
    static constexpr int kProducts = (kChunk + 1) * kColumns;
    static constexpr int kEarlyAt = kProductsAt + 2 * kProducts, kEndsAt = kEarlyAt + kChunk * kColumns;
    static constexpr int kSumsAt = kEndsAt + 8 * kColumns, kFloats = kSumsAt + 4 * 2 * kColumns;
    static constexpr int kBytes = 2 * kFloatsAt + 4 * kFloats;

    bf16* first;

    // The row of a pair panel that holds a step of its first or second tensor.
    static KGEN_DEVICE int pair_row(int step, int second) { return 16 * (step / 8) + 8 * second + step % 8; }

    KGEN_DEVICE bf16* late_rows(int slot) const { return first + slot * kSlot; }                // E
    KGEN_DEVICE bf16* early_rows(int slot) const { return first + slot * kSlot + 2 * kPairs; }  // F
    KGEN_DEVICE bf16* y(int chunk) const { return first + kYAt + (chunk & 1) * kPairs; }
    KGEN_DEVICE bf16* z(int chunk) const { return first + kZAt + (chunk & 1) * kPairs; }
    KGEN_DEVICE bf16* low_y() const { return first + kLowAt; }
    KGEN_DEVICE bf16* low_z() const { return first + kLowAt + kPairs; }
    KGEN_DEVICE bf16* state() const { return first + kStateAt; }
    KGEN_DEVICE bf16* x() const { return first + kXAt; }
    KGEN_DEVICE bf16* scores(int which) const { return first + kScoresAt + which * kSteps; }
    KGEN_DEVICE float* triangle(int block) const { return floats() + block * kBlock; }
    KGEN_DEVICE float* totals(int warp) const { return floats() + kTotalsAt + warp * kColumns; }
    // Rows of products, of_r, of_a and of_early are swizzled (float_place).
    KGEN_DEVICE float* products(int chunk) const { return floats() + kProductsAt + (chunk & 1) * kProducts; }
    // The products with their gradients: of R, of A, and the sum of those of K and of B.
    KGEN_DEVICE float* of_r() const { return reinterpret_cast<float*>(state()); }
    KGEN_DEVICE float* of_a() const { return of_r() + kChunk * kColumns; }
    KGEN_DEVICE float* of_early() const { return floats() + kEarlyAt; }
    KGEN_DEVICE float* ends(int chunk) const { return floats() + kEndsAt + (chunk & 1) * 4 * kColumns; }
    KGEN_DEVICE float* sums() const { return floats() + kSumsAt; }

    // Offset of a column in rows of fp32. tile_place: offset of column + 8 * tile, from the offset of a column below 8.
    // Four of eight tiles need an address of their own.
    static KGEN_DEVICE int float_place(int row, int column) { return kColumns * row + (column ^ row % 4 * 8); }
    static KGEN_DEVICE int tile_place(int place, int tile) { return (place ^ tile % 4 * 8) + tile / 4 * 32; }

    static KGEN_DEVICE int slot_of(int chunk) { return chunk % kSlots; }

private:
    KGEN_DEVICE float* floats() const { return reinterpret_cast<float*>(first + kFloatsAt); }
};

// The named barriers of a block of four warpgroups: producer, gradient (which holds G), late rows and early rows.
// Barriers with two numbers alternate from chunk to chunk, as an arrival may come before the wait for the previous
// chunk.
enum FusedBarrier {
    kFusedProducers = 1,
    kFusedFull,       // a chunk's rows and scores are in shared memory
    kFusedConsumed,   // the gradient warpgroup has read them
    kFusedBegun,      // X, sa and S of a chunk are in shared memory
    kFusedSolved,     // gsa is in shared memory
    kFusedRead,       // the warpgroups of rows have read X, S, Y and Z of a chunk
    kFusedSummed,     // products of rows with their gradients are read, each warp's sums are stored
    kFusedStateRead,  // the late and the gradient warpgroup have read S
    kFusedDone,                        // nothing of a chunk's rows is read any more
    kFusedExchanged = kFusedDone + 2,  // products of rows with their gradients, and sums of S * G, are stored
    kFusedGradient = kFusedExchanged + 2,
    kFusedState,                       // S of a chunk is in shared memory, for the gradient warpgroup
};

// A fragment of operands A, 16 of 64 columns, that is read from or written to 16 rows of a panel. `rows`: the first
// row, a multiple of 8.
struct PanelRows {
    bf16* rows;
    int first;

    KGEN_DEVICE PanelRows(bf16* rows, int lane)
        : rows(rows), first(FusedTiles::PairPanels::offset(lane % 16, lane / 16)) {}
    KGEN_DEVICE void read(u32 (&x)[4], int fragment) const { ldmatrix<4>(x, rows + (first ^ 16 * fragment)); }
    KGEN_DEVICE void write(const u32 (&x)[4], int fragment) const { stmatrix(x, rows + (first ^ 16 * fragment)); }
};

// The fp32 values of a pair that has two terms.
KGEN_DEVICE f32x2 sum_pair(u32 high, u32 low) {
    const f32x2 x = unpack2<bf16>(high), y = unpack2<bf16>(low);
    return {x.x + y.x, x.y + y.y};
}

}  // namespace kgen::wkv7
