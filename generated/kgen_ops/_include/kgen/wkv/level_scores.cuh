// Attention scores of 16 steps by halves of 8, 4 and 2 steps, and gv from them, on tensor cores; wkv5 and wkv6
// backward.
//
//     a_js = sum over keys of (r_j * decays from the middle to j) (k_s * decays from s to the middle)
//     gv_s = inter-chunk part + scale * sum_{j>=s} a_js g_j
//
// j is in the late half of a block of two halves, s in its early half: no exponent is above 0. For each size of halves
// every step is in one half, so the factors of a size are 16 rows. Scores of adjacent steps, and of steps with
// themselves, are sums over a warp's keys that come from scores.cuh.
//
// Shared memory (chunk_memory.cuh): the factors of 8 steps lie in state_g, those of 4 in decays, those of 2 in
// decayed_r; float level_scores[subs][16 steps j][kLevelStride], columns are steps s, times the scale.
//
// NaN and Inf: if a g_j is not finite, the matrix product makes NaN also for steps s > j, whose scores with it are
// zeros. A warp whose results are not all finite computes them again from the steps j >= s alone.
//
// Synchronisation: a block barrier before products(), one between products() and write_gv(); none inside.
#pragma once

#include "kgen/wkv/chunk_memory.cuh"

namespace kgen::wkv {

template <class C>
class LevelScores {
    using Memory = ChunkMemory<C>;
    using Index = typename Memory::Index;
    using T = typename C::T;
    using Gradient = typename C::Gradient;
    static constexpr bool kSplit = !detail::kIsBf16<T>;  // bf16 needs no more than one TF32 term
    using KeyOperands = Tf32Operands<kSplit>;
    using Products = StateProducts<T, kSplit>;
    static constexpr int kSubs = Memory::kSubs, kKeys = C::kKeys, kWarps = C::kWarps;
    static constexpr int kStride = Memory::kStride, kSub = Memory::kSub;
    static constexpr int kLevelStride = Memory::kLevelStride;
    static constexpr int kPairs = C::kTiles / 2;  // fragments of 16 values
    // Warps that share the values of 16 steps, if there are more warps than sets of steps.
    static constexpr int kParts = ceil_div(kWarps, kSubs), kPairsOfPart = ceil_div(kPairs, kParts);

public:
    const Memory& at;
    float scale;

    // Computes the scores of each 16 steps, with a warp for each set.
    KGEN_DEVICE void products() const {
        const int rank = read_thread_rank(), lane = rank % kWarpSize;
#pragma unroll 1
        for (int sub = rank / kWarpSize; sub < kSubs; sub += kWarps) {
            float* to = at.level_scores + sub * Memory::kLevelFloats;
            // 1. Zeros; those above the diagonal stay.
#pragma unroll
            for (int i = 4 * lane; i < Memory::kLevelFloats; i += 4 * kWarpSize)
                *reinterpret_cast<Vec<float, 4>*>(to + i) = {};
            sync_warp();
            // 2. Steps with themselves and adjacent steps: sums over groups of keys.
            if (lane < kNearScores) {
                const float* near = at.scores + sub * Memory::kSubScores + lane;
                float sum = near[0];
#pragma unroll
                for (int group = 1; group < Memory::kGroups; ++group)
                    sum += near[group * Memory::kGroupScores];
                const int first = lane / 3 * 2, kind = lane % 3;
                to[(first + (kind > 0 ? 1 : 0)) * kLevelStride + first + (kind > 1 ? 1 : 0)] =
                    sum * scale;
            }
            // 3. Halves.
            halves<8>(at.state_g + sub * kSub, to, lane);
            halves<4>(at.decays + sub * kSub, to, lane);
            halves<2>(at.decayed_r + sub * kSub, to, lane);
        }
    }

    // gv of the chunk.
    template <class R>
    KGEN_DEVICE void write_gv(const Index& index, const R& rows_of_gv) const {
        const int rank = read_thread_rank();
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int unit = rank / kWarpSize; unit < kSubs * kParts; unit += kWarps) {
            const int sub = unit / kParts, first = unit % kParts * kPairsOfPart * 16;
            const typename Products::State scores = Products::of_factors(
                at.level_scores + sub * Memory::kLevelFloats, kLevelStride);
            const T* g = at.rows_of(at.g, sub) + first;
            const float* inter = at.decayed_k + sub * Memory::kWideSub +
                                 lane.g * Memory::kWideStride + first + 2 * lane.q;
            const StepRows<Gradient> rows = index.steps(rows_of_gv);
            Gradient* gv = rows.at(index.first(C::kChunk) + sub * kSubSteps + lane.g) + first + 2 * lane.q;
            Gradient* late_gv = gv + 8 * rows.stride;
            const int left = index.left - sub * kSubSteps - lane.g;
            float nonfinite = 0.0f;  // NaN once a sum is not finite
#pragma unroll
            for (int pair = 0; pair < kPairsOfPart; ++pair) {
                if (kPairs % kParts != 0 && first + 16 * pair >= C::kValues) break;
                const typename Products::Rows b =
                    Products::along(g + 16 * pair, Memory::kRowStride);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    float sums[4];
                    Products::multiply(sums, scores, b, n);
                    const int value = 16 * pair + 8 * n;
#pragma unroll
                    for (int i = 0; i < 4; ++i) nonfinite = fma(sums[i], 0.0f, nonfinite);
                    const int values_left = C::kV - first - value - 2 * lane.q;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const Vec<float, 2> before = *reinterpret_cast<const Vec<float, 2>*>(
                            inter + 8 * half * Memory::kWideStride + value);
                        if (left > 8 * half)
                            store_pair((half == 0 ? gv : late_gv) + value, values_left,
                                       before[0] + sums[2 * half], before[1] + sums[2 * half + 1]);
                    }
                }
            }
            if (any(nonfinite != 0.0f)) {
#pragma unroll 1
                for (int i = 0; i < 4 * kPairsOfPart; ++i) {
                    const int value = i / 2 * 8, half = i % 2;
                    // untested: the config decides whether a part reaches beyond the block's features
                    if (left > 8 * half && first + value < C::kValues)
                        store_causal(at.level_scores + sub * Memory::kLevelFloats,
                                     lane.g + 8 * half, g + value + 2 * lane.q,
                                     inter + 8 * half * Memory::kWideStride + value,
                                     (half == 0 ? gv : late_gv) + value,
                                     C::kV - first - value - 2 * lane.q);
                }
            }
        }
    }

private:
    // Stores two adjacent values, of which `left` exist. gv has no gaps, so that its pairs are aligned if V is even.
    static KGEN_DEVICE void store_pair(Gradient* to, int left, float x, float y) {
        const Gradient first = from_float<Gradient>(x), second = from_float<Gradient>(y);
        if constexpr (C::kV % 2 == 0) {
            if (C::kValues == C::kV || left > 0)
                *reinterpret_cast<Vec<Gradient, 2>*>(to) = {{first, second}};
        } else {
            if (left > 0) to[0] = first;
            if (left > 1) to[1] = second;
        }
    }

    // Stores two adjacent values of step s, from the steps j >= s alone.
    static KGEN_DEVICE void store_causal(const float* scores, int s, const T* g,
                                         const float* inter, Gradient* to, int values_left) {
        float sums[2] = {};
#pragma unroll 1
        for (int j = s; j < kSubSteps; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                sums[i] = fma(scores[j * kLevelStride + s],
                              to_float(g[j * Memory::kRowStride + i]), sums[i]);
        store_pair(to, values_left, inter[0] + sums[0], inter[1] + sums[1]);
    }

    // Scores between late and early halves of Steps steps. A fragment has the late rows of all blocks, eight in all,
    // and likewise the early rows; only products of rows of the same block are scores.
    template <int Steps>
    KGEN_DEVICE void halves(const float* rows, float* to, int lane) const {
        constexpr int kDeep = kSplit ? 4 : kKeys / 8;  // fragments of a chain
        const auto early = [](int i) { return i / Steps * 2 * Steps + i % Steps; };
        const float* from =
            rows + (early(lane % 8) + (lane < 16 ? Steps : 0)) * kStride + lane / 8 % 2 * 4;
        float sums[2] = {};
#pragma unroll
        for (int first = 0; first < kKeys; first += 8 * kDeep) {
            float chain[4] = {};
#pragma unroll
            for (int key = first; key < min(first + 8 * kDeep, kKeys); key += 8) {
                u32 words[4];  // keys q and q + 4 of late rows, then of early rows
                ldmatrix<4>(words, from + key);
                typename KeyOperands::A a = {};
                typename KeyOperands::B b = {};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if constexpr (kSplit) {
                        KeyOperands::put(a, 2 * i, bit_cast<float>(words[i]));
                        KeyOperands::put(b, i, bit_cast<float>(words[2 + i]));
                    } else {  // truncated; the factor below compensates the mean error
                        a.hi[2 * i] = words[i];
                        b.hi[i] = words[2 + i];
                    }
                }
                KeyOperands::template multiply<0>(chain, a, b);
                if constexpr (kSplit) {
                    KeyOperands::template multiply<1>(chain, a, b);
                    KeyOperands::template multiply<2>(chain, a, b);
                }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) sums[j] += chain[j];
        }
        const int g = lane / 4, column = 2 * (lane % 4);
        const float factor = kSplit ? scale : scale * (kNearTf32 * kNearTf32);
        if (g / Steps == column / Steps)
            *reinterpret_cast<Vec<float, 2>*>(to + (early(g) + Steps) * kLevelStride +
                                              early(column)) = {
                {sums[0] * factor, sums[1] * factor}};
    }
};

}  // namespace kgen::wkv
