// What the gradients of one chunk of 16 steps of wkv7 need of its value features: the rows of gy, gsa, v and sa, and
// their products of two steps each, in the order in which halving reads them. TF32 operands, tensors of 16 bits.
//
// Precise: a product of fp32 operands is 3xTF32, and short chains of products are added in fp32. gy and v, of 16 bits,
// are exact in TF32, so only gsa, sa and the scores have low terms.
//
//     r_t k_s: scale * gy_t . v_s     r_t b_s: scale * gy_t . sa_s     a_t k_s: gsa_t . v_s     a_t b_s: gsa_t . sa_s
//
// The chunk is halved down to adjacent steps (kgen/wkv7/chunk_rows.cuh). Step t lies in slot t, or from t = 8 on in
// slot 23 - t. A lane has the slots 2q, 2q + 1, 8 + 2q and 9 + 2q of a fragment, which are two steps t and their
// complements 15 - t. At every level two of a lane's steps are thus in early halves, E0 and E1, and two in late halves,
// L0 and L1.
//
// Layout in shared memory (struct RowScoreBuffers):
//
//     float values[4][16][kPitch]    gy, gsa, v, sa by slots, rounded to TF32 when they are written
//     float low[2][16][kPitch]       Precise: the low terms of gsa, sa
//     float scores[32][kScores]      row: r, a by slot; column: k, b by slot
//     float parts[8][2][32][4]       2 * level + direction, half, lane: operands B of products with
//                                    direction 0: k E0, E1, b E0, E1 of a lane, for late steps of r, then of a
//                                    direction 1: r L0, L1, a L0, L1 of a lane, for early steps of k, then of b
//     float low_parts[8][2][32][4]   Precise: their low terms
//
// Bank conflicts: none in loads of 16 bytes from `values` and `parts`, none in stores to `scores`.
//
// Synchronisation: none here. All warps call put_values, put_scores and put_parts, with a block barrier after each.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/recurrent/recurrence.cuh"
#include "kgen/wkv7/halved_steps.cuh"

namespace kgen::wkv7 {

// Early or late step `which` (0 or 1) of lane group q, at the level of halves of kHalf steps.
template <int kHalf>
KGEN_DEVICE int early_step(int q, int which) {
    if constexpr (kHalf == 1) return which == 0 ? 2 * q : 14 - 2 * q;
    const bool flip = kHalf < 8 && (2 * q & kHalf) != 0;
    return flip ? 15 - 2 * q - which : 2 * q + which;
}
template <int kHalf>
KGEN_DEVICE int late_step(int q, int which) {
    if constexpr (kHalf == 1) return which == 0 ? 2 * q + 1 : 15 - 2 * q;
    return 15 - early_step<kHalf>(q, which);
}

enum ValueRow { kRowGy, kRowGsa, kRowV, kRowSa };

template <int Values, bool Precise>
struct RowScoreBuffers {
    static constexpr int kBlocks = ceil_div(Values, 16);  // of 16 value features
    static constexpr int kPitch = 16 * kBlocks + (kBlocks % 2 == 0 ? 16 : 0);
    static constexpr int kScores = 40, kTile = 16 * kPitch, kTiles = Precise ? 6 : 4, kParts = 8;
    static constexpr int kLowParts = 64 * kParts;  // vectors from a part to its low terms
    static constexpr int kBytes = 4 * (kTiles * kTile + 32 * kScores + (Precise ? 2 : 1) * kParts * 2 * 128);

    float* first;

    KGEN_DEVICE float* values(int which) const { return first + which * kTile; }
    KGEN_DEVICE float* low(int which) const { return first + (4 + which / 2) * kTile; }  // of gsa or sa
    KGEN_DEVICE float* scores() const { return first + kTiles * kTile; }
    // The calling lane's vector of a part (level and direction). The second half is 32 vectors further on, low terms
    // kLowParts.
    KGEN_DEVICE Vec<float, 4>* parts(int part) const {
        return reinterpret_cast<Vec<float, 4>*>(scores() + 32 * kScores) + part * 64 + lane_id();
    }
};

// Loads four adjacent elements of a row by loads of at most kVec elements; elements from `width` on are zero.
template <int kVec, class T>
KGEN_DEVICE Vec<float, 4> load_four(const T* from, int width) {
    constexpr int kEach = min(kVec, 4);
    float found[4] = {};
#pragma unroll
    for (int x = 0; x < 4; x += kEach) {
        if (x >= width) break;
        float some[kEach];
        to_floats(load_vec<kEach>(from + x), some);
#pragma unroll
        for (int i = 0; i < kEach; ++i) found[x + i] = some[i];
    }
    return {{found[0], found[1], found[2], found[3]}};
}

// Runs on Warps warps. CopyVec: elements per load.
template <class Value, int Values, int Warps, int CopyVec, bool Precise>
class RowScores {
    static_assert(sizeof(Value) == 2, "gy and v are exact in TF32");

public:
    using Buffers = RowScoreBuffers<Values, Precise>;
    using Four = Vec<float, 4>;

    KGEN_DEVICE RowScores(const Buffers& buffers, int warp) : buffers_(buffers), warp_(warp) {}

    // Stores the rows of `steps` steps; the other rows are zero.
    KGEN_DEVICE void put_values(const StepPointer<Value>& gy, const StepPointer<float>& gsa,
                                const StepPointer<Value>& v, const StepPointer<float>& sa,
                                int steps) const {
        constexpr int kQuads = 4 * Buffers::kBlocks, kThreads = Warps * kWarpSize;
#pragma unroll 2
        for (int i = thread_rank(); i < 16 * kQuads; i += kThreads) {
            const int slot = i / kQuads, column = i % kQuads * 4, step = slot_step(slot);
            const int width = step < steps ? Values - column : 0;
            const int place = slot * Buffers::kPitch + column;
            put<kRowGy>(place, load_four<CopyVec>(gy.first + step * gy.stride + column, width));
            put<kRowGsa>(place, load_four<CopyVec>(gsa.first + step * gsa.stride + column, width));
            put<kRowV>(place, load_four<CopyVec>(v.first + step * v.stride + column, width));
            put<kRowSa>(place, load_four<CopyVec>(sa.first + step * sa.stride + column, width));
        }
    }

    // Stores four adjacent elements of a slot's row, rounded.
    template <int kWhich>
    KGEN_DEVICE void put(int place, const Four& x) const {
        Four rounded;
        if constexpr (Precise && kWhich % 2 == 1) {
            Four low;
#pragma unroll
            for (int i = 0; i < 4; ++i) split(x[i], rounded[i], low[i]);
            *reinterpret_cast<Four*>(buffers_.low(kWhich) + place) = low;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) rounded[i] = bit_cast<float>(near_tf32(x[i]));
        }
        *reinterpret_cast<Four*>(buffers_.values(kWhich) + place) = rounded;
    }

    // Computes the scores in eight parts: each has the products of 16 steps of gy or gsa with eight steps of v or sa.
    KGEN_DEVICE void put_scores(float scale) const {
#pragma unroll 1
        for (int part = warp_; part < 8; part += Warps) {
            const int row = part / 4, column = part % 4;
            const float* a = rows(row == 0 ? kRowGy : kRowGsa);
            const float* b = rows(column < 2 ? kRowV : kRowSa, column % 2);
            float sums[2][4] = {};
            if constexpr (Precise) {
                const float* low_a = low_rows(kRowGsa);
                const float* low_b = low_rows(kRowSa, column % 2);
#pragma unroll
                for (int block = 0; block < Buffers::kBlocks; ++block) {
                    const Four of_a[2] = {four(a, block), four(a + 8 * Buffers::kPitch, block)};
                    const Four of_b = four(b, block);
                    float part[4] = {};
                    if (row == 1)
                        add(part, {four(low_a, block), four(low_a + 8 * Buffers::kPitch, block)}, of_b);
                    if (column >= 2) add(part, of_a, four(low_b, block));
                    add(part, of_a, of_b);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[0][i] += part[i];
                }
            } else {
#pragma unroll
                for (int block = 0; block < Buffers::kBlocks; ++block) {
                    const auto low = four(a, block), high = four(a + 8 * Buffers::kPitch, block);
                    const auto of = four(b, block);
                    multiply<0>(sums[0], low, high, of);
                    multiply<1>(sums[1], low, high, of);
                }
            }
            const float factor = row == 0 ? scale : 1.0f;
            const MmaLane lane = mma_lane();
            float* to = buffers_.scores() + (16 * row + lane.g) * Buffers::kScores + 8 * column +
                        2 * lane.q;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<Vec<float, 2>*>(to + 8 * half * Buffers::kScores) = {
                    {factor * (sums[0][2 * half] + sums[1][2 * half]),
                     factor * (sums[0][2 * half + 1] + sums[1][2 * half + 1])}};
        }
    }

    // Stores the scores of all levels as operands.
    KGEN_DEVICE void put_parts() const {
#pragma unroll 1
        for (int part = warp_; part < 8; part += Warps) {
            if (part < 2) {
                put_part<8>(part);
            } else if (part < 4) {
                put_part<4>(part);
            } else if (part < 6) {
                put_part<2>(part);
            } else {
                put_part<1>(part);
            }
        }
    }

    // Columns from 16 * block + 4q on, of row g of a tile.
    static KGEN_DEVICE Four four(const float* row, int block) {
        return *reinterpret_cast<const Four*>(row + 16 * block);
    }
    // Row g of the slots from 8 * half on of a tensor, from column 4q on.
    KGEN_DEVICE const float* rows(int which, int half = 0) const {
        return buffers_.values(which) + place_of_row(half);
    }
    // The same of the low terms of gsa or sa.
    KGEN_DEVICE const float* low_rows(int which, int half = 0) const {
        return buffers_.low(which) + place_of_row(half);
    }

    // Splits x into two terms; the second is NaN if x is not finite.
    static KGEN_DEVICE void split(float x, float& high, float& low) {
        u32 terms[2];
        split_tf32_finite(x, terms[0], terms[1]);
        high = bit_cast<float>(terms[0]);
        low = bit_cast<float>(terms[1]);
    }

    // Precise: adds the products of two rows of a state, in two terms, with block `block` of a tensor's rows.
    template <int kWhich>
    KGEN_DEVICE void add_rows(float (&sums)[4], const Four (&a)[2], const Four (&low_a)[2], int half,
                              int block) const {
        const Four of_b = four(rows(kWhich, half), block);
        float part[4] = {};
        if constexpr (kWhich % 2 == 1) add(part, a, four(low_rows(kWhich, half), block));
        add(part, low_a, of_b);
        add(part, a, of_b);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += part[i];
    }

    // Adds the products of 16 columns.
    static KGEN_DEVICE void add(float (&sums)[4], const Four (&a)[2], const Four& b) {
        multiply<0>(sums, a[0], a[1], b);
        multiply<1>(sums, a[0], a[1], b);
    }

    // Adds the products of eight of 16 columns: k = q and q + 4 of a fragment are columns 4q + 2 * kPart and
    // 4q + 2 * kPart + 1.
    template <int kPart>
    static KGEN_DEVICE void multiply(float (&sums)[4], const Four& a_low, const Four& a_high, const Four& b) {
        constexpr int x = 2 * kPart;
        const u32 a[4] = {bit_cast<u32>(a_low[x]), bit_cast<u32>(a_high[x]),
                          bit_cast<u32>(a_low[x + 1]), bit_cast<u32>(a_high[x + 1])};
        const u32 of[2] = {bit_cast<u32>(b[x]), bit_cast<u32>(b[x + 1])};
        mma_tf32_m16n8k8(sums, a, of);
    }

private:
    static KGEN_DEVICE int place_of_row(int half) {
        const MmaLane lane = mma_lane();
        return (8 * half + lane.g) * Buffers::kPitch + 4 * lane.q;
    }

    template <int kHalf>
    KGEN_DEVICE void put_part(int part) const {
        const MmaLane lane = mma_lane();
        const bool reverse = part % 2 == 1;
        // The fragment's column: a late step, or (reverse) an early one.
        const int column = reverse ? early_step<kHalf>(lane.g / 2, lane.g % 2)
                                   : late_step<kHalf>(lane.g / 2, lane.g % 2);
        Four found[2], low[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int row = reverse ? late_step<kHalf>(lane.q, which) : early_step<kHalf>(lane.q, which);
            const bool same = ((row ^ column) & ~(2 * kHalf - 1)) == 0;  // same block
            const float* at = buffers_.scores() +
                              slot_step(reverse ? row : column) * Buffers::kScores +
                              slot_step(reverse ? column : row);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool of_a = reverse ? i % 2 == 1 : i / 2 == 1;
                const bool of_b = reverse ? i / 2 == 1 : i % 2 == 1;
                const float x = at[(of_a ? 16 * Buffers::kScores : 0) + (of_b ? 16 : 0)];
                float& high = found[i / 2][i % 2 * 2 + which];
                if constexpr (Precise) {
                    split(same ? x : 0.0f, high, low[i / 2][i % 2 * 2 + which]);
                } else {
                    high = same ? bit_cast<float>(near_tf32(x)) : 0.0f;
                }
            }
        }
        buffers_.parts(part)[0] = found[0];
        buffers_.parts(part)[32] = found[1];
        if constexpr (Precise) {
            buffers_.parts(part)[Buffers::kLowParts] = low[0];
            buffers_.parts(part)[Buffers::kLowParts + 32] = low[1];
        }
    }

    Buffers buffers_;
    int warp_;
};

}  // namespace kgen::wkv7
