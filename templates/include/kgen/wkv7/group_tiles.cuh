// Shared memory and barriers of the forward loop of wkv7 by warpgroups (group_loop.cuh), in chunks of 32 steps; bf16,
// up to 64 keys and value features.
//
// Layout: panels with the 128-byte swizzle (wgmma.cuh), 64 columns each.
//
//     bf16 rows[kSlots][192][64]   a slot per chunk; rows are steps, columns are keys
//
//         rows        inputs    rows scaled (group_producer.cuh)          without r
//         0 - 31      a         A                                         A, high term
//         32 - 63     r         R, high term                              A, low term
//         64 - 95     w         R, low term                               K, low term
//         96 - 127    (w)       K, low term                               B, low term
//         128 - 159   k         K, high term                              K, high term
//         160 - 191   b         B                                         B, high term
//
//     bf16 scores[4][32][64]       A K^T, R K^T, R B^T and the inverse: columns 0 to 31 high terms, 32 to 63 low ones
//     bf16 values[2][32][64]       v of two chunks
//     float triangle[3][324]       A B^T by blocks of 16 x 16: 0, 0 / 1, 0 / 1, 1; rows are 20 floats apart.
//                                  block 1, 0 is instead stored in the inverse's panel, in two terms
//     float totals[4][64]          sums of logarithms of the decays of eight steps each
//     float decay[kSlots][64]      P through the last step of a chunk
//
// A row of w in fp32 has 256 bytes, from row 64 on, without swizzle.
#pragma once

#include "kgen/primitives/wgmma.cuh"
#include "kgen/wkv7/loop_passes.cuh"

namespace kgen::wkv7 {

// `first`: a multiple of 1024 bytes.
struct GroupTiles {
    static constexpr int kChunk = 32, kColumns = 64, kSlots = 3;
    static constexpr int kA = 0, kR = 32, kW = 64, kK = 128, kB = 160, kRows = 192;  // rows of a slot
    // The first row of a tensor's low terms. Where both K and B have low terms they are adjacent, as their high terms
    // are.
    template <class Pass, Row Which>
    static constexpr int kLow = Which == kRowA   ? 32
                                : Which == kRowR ? 64
                                : Which == kRowB ? 96
                                                 : (Pass::kReadsR ? 96 : 64);
    enum Score { kScoreAK, kScoreRK, kScoreRB, kInverse };
    using RowPanels = SwizzledPanels<kRows>;
    using ScorePanels = SwizzledPanels<kChunk>;
    using RowOperand = PanelOperand<bf16, kRows>;
    using ScoreOperand = PanelOperand<bf16, kChunk>;
    static constexpr int kBlock = 324, kBlockRow = 20;  // of the triangle: no two rows of a block share banks
    static constexpr int kScoresAt = kSlots * RowPanels::kPanel, kValuesAt = kScoresAt + 4 * ScorePanels::kPanel;
    static constexpr int kFloatsAt = kValuesAt + 2 * ScorePanels::kPanel;
    static constexpr int kTotalsAt = 3 * kBlock, kDecayAt = kTotalsAt + 4 * kColumns;
    static constexpr int kBytes = 2 * kFloatsAt + 4 * (kDecayAt + kSlots * kColumns);

    bf16* first;

    KGEN_DEVICE bf16* rows(int slot) const { return first + slot * RowPanels::kPanel; }
    KGEN_DEVICE RowOperand row_operand(int slot, int row) const { return {rows(slot), row, 0}; }
    KGEN_DEVICE bf16* scores(int which) const { return first + kScoresAt + which * ScorePanels::kPanel; }
    KGEN_DEVICE ScoreOperand score_operand(int which) const { return {scores(which), 0, 0}; }
    KGEN_DEVICE bf16* values(int chunk) const { return first + kValuesAt + (chunk & 1) * ScorePanels::kPanel; }
    KGEN_DEVICE float* triangle(int block) const { return floats() + block * kBlock; }
    KGEN_DEVICE float* totals(int warp) const { return floats() + kTotalsAt + warp * kColumns; }
    KGEN_DEVICE float* decay(int slot) const { return floats() + kDecayAt + slot * kColumns; }

    static KGEN_DEVICE int next_slot(int slot) { return slot == kSlots - 1 ? 0 : slot + 1; }

private:
    KGEN_DEVICE float* floats() const { return reinterpret_cast<float*>(first + kFloatsAt); }
};

// The named barriers of a block of two warpgroups. A chunk is full when its rows, scores and triangle are in shared
// memory. It is consumed when nothing of its scores and rows is read any more. kInverseBarrier: a consumer warp has
// stored the inverse.
enum GroupBarrier { kProducersBarrier = 1, kInverseBarrier, kFullBarrier, kConsumedBarrier };

// The first or the last Count tiles of accumulators, as accumulators of a narrower product.
template <int Count, int Tiles>
KGEN_DEVICE float (&first_tiles(float (&sums)[Tiles][4]))[Count][4] {
    static_assert(Count <= Tiles, "tiles that exist");
    return reinterpret_cast<float (&)[Count][4]>(sums);
}
template <int Count, int Tiles>
KGEN_DEVICE float (&last_tiles(float (&sums)[Tiles][4]))[Count][4] {
    static_assert(Count <= Tiles, "tiles that exist");
    return reinterpret_cast<float (&)[Count][4]>(sums[Tiles - Count]);
}

}  // namespace kgen::wkv7
