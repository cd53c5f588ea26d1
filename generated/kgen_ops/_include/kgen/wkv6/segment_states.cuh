// What a segment of T adds to the state of wkv5 and wkv6, or to the state's gradient, for inputs with few heads; bf16
// operands (mma, sm_80).
//
// Transition matrices are diagonal. With S_s the state before segment s, G_s its gradient, and sums over the segment's
// steps t:
//
//     S_{s+1} = diag(P) S_s + L     P = the product of all d_t    L = sum_t diag(d_{t+1} ... d_last) k_t v_t^T
//     G_s = diag(P) G_{s+1} + L     the same P                    L = scale sum_t diag(d_first ... d_{t-1}) r_t gy_t^T
//
// A block loops over chunks of 32 steps. Each warp has 16 keys and all of the block's value features, with L in
// registers:
//
//     L = diag(d_0 ... d_31) L + K^T V     K_t = k_t d_{t+1} ... d_31
//     L = L + R^T gy                       R_t = scale r_t d_first ... d_{t-1}, for the gradient
//
// All decays are running products, so every factor is at most 1. Each lane has two keys and four consecutive steps of
// each 16, in the order in which operand A has them, so that rows K never leave registers. Neighbouring lanes exchange
// the products of their four steps. Rows K have a high and a low term, so that a segment begins with a state closer to
// the exact one than the state of a loop over all steps.
//
// kExact, for a state that the kernel returns in fp32: rows K have three terms, each chunk's products are summed from
// zero and then added to L, and decays are exponentials of sums of logarithms. Tensor cores truncate their sums, and a
// product of decays repeats its rounding error in each chunk; in a state of thousands of steps both add up.
//
// Steps beyond the last one have k and v of zero. Their decays are not 1, but nothing reads a state after them. For the
// gradient, and with kExact, their decays are 1.
//
// Layout: sums [K][V], decays [K] of the segment, in fp32.
//
// Shared memory: a ring of chunks u16 [kStages]{k[2][kWarps], w[2][kWarps], v[2][kValueTiles]} of tiles of 16 steps and
// 16 columns (kgen/wkv7/tile_copier.cuh); no w if it is one row per head.
//
// Synchronisation: one block barrier per chunk. Copies by cp.async, kStages - 1 chunks ahead, one group per chunk.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv6/part_copier.cuh"

namespace kgen::wkv6 {

// Config: W; kForm: of the decays; kPerStep: whether w has a row per step; kK, kV: features of a head; kColumns: value
// features of the block; kStages: chunks of inputs in shared memory; kVec: elements per copy. Gradient: whether the
// gradient is computed; k is then r, and v is gy. kExact: see above.
template <class Config, bool Gradient = false>
struct SegmentStates {
    using W = typename Config::W;
    using Tile = SwizzledTile<bf16, 16>;
    using Half = HalfOperands<bf16>;
    using Copier = PartCopier<bf16, Config::kVec>;
    using CopierW = PartCopier<W, Config::kVec>;
    static constexpr int kBlocks = 2, kChunk = 16 * kBlocks;  // of 16 steps
    static constexpr bool kExact = Config::kExact;
    static_assert(!kExact || !Gradient && Config::kForm != DecayForm::decay, "logarithms would have to be computed");
    static constexpr int kTerms = kExact ? 3 : 2;  // of rows K
    static constexpr int kWarps = ceil_div(Config::kK, 16), kThreads = kWarpSize * kWarps;
    static constexpr int kMinBlocks = max((kExact ? 384 : 512) / kThreads, 1);  // per SM: up to 168 or 128 registers
    static constexpr int kValueTiles = ceil_div(Config::kColumns, 16);
    static constexpr int kTile = Copier::kElements, kTileW = Config::kPerStep ? CopierW::kElements : 0;
    static constexpr int kOfW = kBlocks * kWarps * kTile, kOfV = kOfW + kBlocks * kWarps * kTileW;
    static constexpr int kStage = kOfV + kBlocks * kValueTiles * kTile;  // 16-bit values
    static constexpr int kStages = Config::kStages, kSmemBytes = 2 * kStages * kStage;

    StepPointer<bf16> k, v;  // v: from the block's first value feature on
    StepPointer<W> w;
    i64 steps;
    int values;     // number of value features from the block's first one on
    float* sums;    // from the block's first value feature on
    float* decays;  // or null
    float scale;    // for the gradient

    KGEN_DEVICE void operator()() const {
        const int chunks = static_cast<int>(ceil_div(max(steps, i64{0}), i64{kChunk}));
        Copies copies(*this);
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copies.start(chunk);
        Factors factors;
        if constexpr (Gradient) factors.before[0] = factors.before[1] = scale;
        if constexpr (!Config::kPerStep) factors.of_head(w.first, own_key(), kChunk);
        float state[2 * kValueTiles][4] = {}, all[2] = {kNone, kNone};
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            cp_async_wait<kStages - 2>();
            sync_block();  // all copies of the chunk are there, and all warps have read the slot that is filled next
            copies.start(chunk + kStages - 1);
            const u16* stage = stage_of(chunk);
            const int left = static_cast<int>(min(steps - i64{chunk} * kChunk, i64{kChunk}));
            if constexpr (Config::kPerStep) {
                factors.of_steps(stage + kOfW + warp() * kTileW, left);
            } else if (Gradient && left < kChunk) {
                factors.shorten(w.first, own_key(), left);
            } else if (kExact && left < kChunk) {
                factors.of_head(w.first, own_key(), left);
            }
            add_chunk(state, factors, stage);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                all[half] = join(all[half], kExact ? factors.logs[half] : factors.chunk[half]);
            if constexpr (Gradient) factors.advance();
        }
        cp_async_wait_all();
        store(state, all);
    }

private:
    // Decays of several steps: a product, or with kExact a sum of logarithms.
    static constexpr float kNone = kExact ? 0.0f : 1.0f;  // of no steps
    using Product = DecayProduct<Config::kForm, kExact>;
    static KGEN_DEVICE float join(float x, float y) { return kExact ? x + y : x * y; }

    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }
    static KGEN_DEVICE int own_key() { return 16 * warp() + mma_lane().g; }
    static KGEN_DEVICE u16* stage_of(int chunk) {
        return dynamic_smem<u16>() + (chunk & (kStages - 1)) * kStage;
    }
    // The first step of the lane's four in a block of 16.
    static KGEN_DEVICE int own_step() { return 4 * mma_lane().q; }
    // The row of 8 elements whose address a lane passes to ldmatrix, for four matrices. Rows are steps 4q and 4q + 1,
    // or with `late` 4q + 2 and 4q + 3, columns the first or the second 8.
    static KGEN_DEVICE int matrix_row(int late, int columns) {
        const int row = lane_id() % 8;
        return Tile::offset(row / 2 * 4 + row % 2 + 2 * late, columns);
    }
    // load_keys: operand A^T of a tile, whose rows are keys. load_values: two operands B, whose columns are value
    // features. Steps are in the lanes' order.
    static KGEN_DEVICE void load_keys(u32 (&pairs)[4], const u16* tile) {
        const int matrix = lane_id() / 8;
        ldmatrix<4, true>(pairs, reinterpret_cast<const bf16*>(tile) + matrix_row(matrix / 2, matrix % 2));
    }
    static KGEN_DEVICE void load_values(Half::B (&b)[2], const u16* tile) {
        const int matrix = lane_id() / 8;
        u32 words[4];
        ldmatrix<4, true>(words, reinterpret_cast<const bf16*>(tile) + matrix_row(matrix % 2, matrix / 2));
        Half::split(b, words);
    }

    // The copies of a warp: its tiles of k and w, and every kWarps-th tile of v.
    struct Copies {
        Copier k, v;
        CopierW w;
        const SegmentStates& of;

        KGEN_DEVICE explicit Copies(const SegmentStates& segment)
            : k({segment.k.first + 16 * warp(), segment.k.stride}),
              v(segment.v),
              w({segment.w.first + (Config::kPerStep ? 16 * warp() : 0), segment.w.stride}),
              of(segment) {}

        // Starts the copies of a chunk; called for one chunk after the other.
        KGEN_DEVICE void start(int chunk) {
            u16* stage = stage_of(chunk);
            const int keys = Config::kK - 16 * warp();
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const i64 first = i64{chunk} * kChunk + 16 * block;
                const int left = static_cast<int>(max(min(of.steps - first, i64{16}), i64{0}));
                k.start(stage + (block * kWarps + warp()) * kTile, left, keys, 0);
                if constexpr (Config::kPerStep)
                    w.start(stage + kOfW + (block * kWarps + warp()) * kTileW, left, keys, 0);
#pragma unroll
                for (int first_tile = 0; first_tile < kValueTiles; first_tile += kWarps) {
                    const int tile = first_tile + warp();
                    if (kValueTiles % kWarps != 0 && tile >= kValueTiles) break;
                    v.start(stage + kOfV + (block * kValueTiles + tile) * kTile, left,
                            of.values - 16 * tile, 16 * tile);
                }
                k.advance(0, 16);
                v.advance(0, 16);
                if constexpr (Config::kPerStep) w.advance(0, 16);
            }
            cp_async_commit();
        }
    };

    // The factors of the lane's rows of k, for keys g and g + 8, and the products of a chunk's decays; with kExact also
    // the logarithms of these products.
    struct Factors {
        float row[kBlocks][2][4], chunk[2], logs[2];
        float before[2];  // for the gradient: scale times the decays of earlier chunks

        // Sets the factors from w [K], which is the same for all steps; with kExact for a chunk of `left` steps.
        KGEN_DEVICE void of_head(const W* w, int key, int left) {
            float decay[kBlocks][2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float d = of_key(w, key + 8 * half);
#pragma unroll
                for (int i = 0; i < 4 * kBlocks; ++i) {
                    decay[i / 4][half][i % 4] = d;
                    if constexpr (kExact)
                        if (i / 4 * 16 + own_step() + i % 4 >= left) decay[i / 4][half][i % 4] = kNone;
                }
            }
            multiply(decay);
        }

        // The same for a last chunk of `left` steps, after all other chunks.
        KGEN_DEVICE void shorten(const W* w, int key, int left) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float d = of_key(w, key + 8 * half);
                chunk[half] = 1.0f;
#pragma unroll 1
                for (int i = 0; i < left; ++i) chunk[half] *= d;
            }
        }

        // For the gradient: goes to the next chunk.
        KGEN_DEVICE void advance() {
            if constexpr (Config::kPerStep) {
#pragma unroll
                for (int half = 0; half < 2; ++half) before[half] *= chunk[half];
            } else {
#pragma unroll
                for (int i = 0; i < 8 * kBlocks; ++i) row[i / 8][i / 4 % 2][i % 4] *= chunk[i / 4 % 2];
            }
        }

        // Sets the factors from w per step. tile: the warp's first tile of w in a stage, of `left` steps.
        KGEN_DEVICE void of_steps(const u16* tile, int left) {
            float decay[kBlocks][2][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block, tile += kWarps * kTileW) {
                if constexpr (sizeof(W) == 2) {
                    u32 pairs[4];
                    load_keys(pairs, tile);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const f32x2 two = unpack2<W>(pairs[i]);
                        decay[block][i % 2][i / 2 * 2] = two.x;
                        decay[block][i % 2][i / 2 * 2 + 1] = two.y;
                    }
                } else {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int place =
                            wkv7::TileCopier<W, Config::kVec>::place(own_step(), mma_lane().g + 8 * half);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            decay[block][half][i] =
                                *reinterpret_cast<const float*>(tile + Tile::below(place, i));
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float& d = decay[block][i / 4][i % 4];
                    d = kExact ? log_of(d) : decay_of<Config::kForm, false>(d);
                    if constexpr (Gradient || kExact)
                        d = 16 * block + own_step() + i % 4 < left ? d : kNone;
                }
            }
            multiply(decay);
        }

    private:
        static KGEN_DEVICE float of_key(const W* w, int key) {
            if (key >= Config::kK) return kNone;
            return kExact ? log_of(to_float(w[key])) : decay_of<Config::kForm>(to_float(w[key]));
        }
        // The logarithm of a decay, with kExact.
        static KGEN_DEVICE float log_of(float w) {
            Product decay;
            decay.times(w);
            return decay.exponent();
        }

        // Sets the factors from the decays of the lane's steps.
        KGEN_DEVICE void multiply(const float (&decay)[kBlocks][2][4]) {
            const int q = mma_lane().q;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& all = kExact ? logs[half] : chunk[half];
                all = kNone;
#pragma unroll
                for (int place = 0; place < kBlocks; ++place) {
                    const int block = Gradient ? place : kBlocks - 1 - place;
                    const float(&d)[4] = decay[block][half];
                    const float own = join(join(d[0], d[1]), join(d[2], d[3]));
                    const float neighbour = shfl_xor(own, 1), pair = join(own, neighbour);
                    const float others = shfl_xor(pair, 2);
                    float(&f)[4] = row[block][half];
                    if constexpr (Gradient) {
                        // Decays of earlier steps, in the mirrored order of the branch below.
                        float earlier = before[half] * all;
                        earlier = q & 2 ? earlier * others : earlier;
                        f[0] = q & 1 ? earlier * neighbour : earlier;
#pragma unroll
                        for (int i = 1; i < 4; ++i) f[i] = f[i - 1] * d[i - 1];
                    } else {
                        // Decays of later steps: those of later blocks, then those of later lanes in this block.
                        float later = q & 2 ? all : join(all, others);
                        later = q & 1 ? later : join(later, neighbour);
                        f[3] = later;
#pragma unroll
                        for (int i = 2; i >= 0; --i) f[i] = join(f[i + 1], d[i + 1]);
                    }
                    all = join(all, join(pair, others));
                }
                if constexpr (!kExact) continue;
                chunk[half] = Product::value_of(all);
#pragma unroll
                for (int i = 0; i < 4 * kBlocks; ++i) {
                    float& factor = row[i / 4][half][i % 4];
                    factor = Product::value_of(factor);
                }
            }
        }
    };

    static KGEN_DEVICE void add_chunk(float (&state)[2 * kValueTiles][4], const Factors& factors,
                                      const u16* stage) {
        Half::A terms[kBlocks][kTerms];  // of rows K, the highest first
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            u32 pairs[4];
            load_keys(pairs, stage + (block * kWarps + warp()) * kTile);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const f32x2 two = unpack2<bf16>(pairs[i]);
                const float* factor = factors.row[block][i % 2] + i / 2 * 2;
                u32 split[kTerms];
                split_bf16(two.x * factor[0], two.y * factor[1], split);
#pragma unroll
                for (int term = 0; term < kTerms; ++term) terms[block][term].pair[i] = split[term];
            }
        }
        if constexpr (kExact) {
            add_exactly(state, terms, factors, stage);
            return;
        }
        if constexpr (!Gradient) {
#pragma unroll
            for (int i = 0; i < 8 * kValueTiles; ++i)
                state[i / 4][i % 4] *= factors.chunk[i % 4 / 2];
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int tile = 0; tile < kValueTiles; ++tile) {
                Half::B values[2];
                load_values(values, stage + kOfV + (block * kValueTiles + tile) * kTile);
#pragma unroll
                for (int term = 1; term >= 0; --term)
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        Half::multiply<0>(state[2 * tile + n], terms[block][term], values[n]);
            }
    }

    // For one tile of values after the other: the chunk's products, summed from zero, are added to the state.
    static KGEN_DEVICE void add_exactly(float (&state)[2 * kValueTiles][4], const Half::A (&terms)[kBlocks][kTerms],
                                        const Factors& factors, const u16* stage) {
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
            float sums[2][4] = {};
            Half::B values[kBlocks][2];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                load_values(values[block], stage + kOfV + (block * kValueTiles + tile) * kTile);
#pragma unroll
            for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
                for (int i = 0; i < 2 * kBlocks; ++i)
                    Half::multiply<0>(sums[i % 2], terms[i / 2][term], values[i / 2][i % 2]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& element = state[2 * tile + i / 4][i % 4];
                element = fma(element, factors.chunk[i % 4 / 2], sums[i / 4][i % 4]);
            }
        }
    }

    KGEN_DEVICE void store(const float (&state)[2 * kValueTiles][4], const float (&all)[2]) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = own_key() + 8 * half;
            if (key >= Config::kK) break;
            float* row = sums + key * Config::kV;
#pragma unroll
            for (int tile = 0; tile < 2 * kValueTiles; ++tile)
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int value = 8 * tile + 2 * lane.q + x;
                    if (value < values) row[value] = state[tile][2 * half + x];
                }
            if (decays != nullptr && lane.q == 0) decays[key] = kExact ? Product::value_of(all[half]) : all[half];
        }
    }
};

}  // namespace kgen::wkv6
