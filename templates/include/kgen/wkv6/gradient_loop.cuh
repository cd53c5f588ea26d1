// Gradients of wkv5 and wkv6 by a loop over the chunks of 16 steps of a head, backward in time, on tensor cores; bf16.
//
// Groups of warps take chunks in turn; each warp of a group has 16 keys. Only the gradient G of the state is serial in
// time:
//
//     G = diag(P) G + R^T gy        R: rows of r decayed from the beginning of the chunk
//
// A group takes G from the group before it, multiplies it by v and by the state S before its chunk, which another
// kernel has stored, and hands the new G on. It computes the other products of its chunk (gradient_lane.cuh) while the
// next groups are at work. gv is a sum over all keys:
//
//     gv = K G + scores^T gy        K: rows of k decayed to the end of the chunk
//
// Therefore G, K and the scores of each warp's keys go through shared memory, and each warp computes every kWarps-th
// block of 16 value features of gv.
//
// Layout in shared memory, tiles swizzled (swizzled_tile.cuh):
//
//     float gradient[kWarps][kFragments][32][4]   G, as accumulators: keys by value features
//     of each group:
//         u16 inputs[2][kWarps][kInputs][16][16]  r, k and w of a warp's keys; later gradients of r, k and w
//         u16 values[2][2][kBlocks][16][16]       v and gy; with kRowCopies rows of all warps and blocks side by side,
//                                                 16 or a multiple of 64 values (row_copier.cuh)
//         bf16 rounded[kWarps][kTerms][kBlocks][16][16]    G by key
//         bf16 keys[kWarps][16][16]               K by key and slot
//         float scores[kWarps][5][32]             of the warp's keys
//         float slopes[kWarps][2][32][4]          exp(w), if w is raw and has steps
//         u32 states[kWarps][kBlocks][32][4]      S
//
// States are bf16 [chunks][kWarps][kBlocks][32][8], operands A (StateTile::store_rounded).
//
// Synchronisation: named barriers. The warps of a group meet at barrier 1 + group twice per chunk: when the group's
// copies have arrived, and when its operands of gv are stored. Copies run one chunk ahead. A group waits for G at
// barrier 1 + kGroups + group, where the group before it arrives. Each lane reads and writes only its own part of G.
//
// NaN and Inf: masks are products with 0. A NaN or Inf of r, k, v or gy makes gu NaN, one of w makes the decays NaN. In
// these cases, and if u is not finite, the block computes its head again, step by step.
//
// Segments of T: a block has one segment. G after it comes from what the later segments add (segment_start.cuh). If
// that or S before the segment is not finite, the block also computes its segment again.
//
// Config: W (16 bits) and U; kForm; kPerStep: whether w has a row per step; kK, kV; kGroups; kVec: elements per copy;
// kTerms: bf16 terms of G as an operand, and of rows for scores; kSegments: number of segments of T; kRowCopies: warps
// of a group copy whole rows for each other, and write whole rows of gr, gk and gw (row_copier.cuh).
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv/tensors.cuh"
#include "kgen/wkv/state_tile.cuh"
#include "kgen/wkv6/gradient_lane.cuh"
#include "kgen/wkv6/row_copier.cuh"
#include "kgen/wkv6/segment_start.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/tile_copier.cuh"

namespace kgen::wkv6 {

// The gradient of the state after the block's steps.
template <class Config, bool Segments>
struct GradientAfter {
    const float* final_state;  // [K, V] or null
};
template <class Config>
struct GradientAfter<Config, true> : SegmentStart<Config, true> {};

// The tensors that a block reads and writes, for a head and sequence or a segment of it. The struct is in shared
// memory: pointers and strides would take a third of the registers.
template <class Config>
struct HeadGradients {
    using W = typename Config::W;
    using U = typename Config::U;
    i64 steps;
    StepPointer<bf16> gy, r, k, v;
    StepPointer<W> w;  // one row if w has no steps
    const U* u;
    GradientAfter<Config, (Config::kSegments > 1)> after;
    const u32* states;           // from the first chunk on
    StepRows<bf16> gr, gk, gv;
    StepRows<W> gw;              // if w has steps
    float *gu_parts, *gw_parts;  // [kGroups, K]; gw_parts if w has no steps
    float scale;
};

template <class Config>
class GradientLoop {
    using W = typename Config::W;
    using U = typename Config::U;
    using Lane = GradientLane<W, Config::kForm, Config::kTerms>;
    using Tile = SwizzledTile<bf16, 16>;
    using Copier = wkv7::TileCopier<bf16, Config::kVec>;
    using CopierW = wkv7::TileCopier<W, Config::kVec>;
    using Steps = typename Lane::Steps;
    using StateTile = wkv::StateTile<bf16, false, 2 * ceil_div(Config::kV, 16)>;
    static constexpr bool kPerStep = Config::kPerStep, kSegments = Config::kSegments > 1;
    static constexpr int kK = Config::kK, kV = Config::kV, kGroups = Config::kGroups;
    static constexpr int kBlocks = ceil_div(kV, 16), kFragments = 2 * kBlocks;
    static constexpr int kTile = Tile::kElements, kInputs = kPerStep ? 3 : 2, kTerms = Config::kTerms;
    static constexpr int kRowTerms = 2, kScoreTerms = 2;  // bf16 terms of R and scores; K has one
    static_assert(sizeof(W) == 2, "the gradient of w is rounded to 16 bits, or its sum is");
    static_assert(Config::kForm != DecayForm::decay, "gw is computed by the logarithm of the decay");

public:
    static constexpr int kWarps = ceil_div(kK, 16), kGroupThreads = kWarps * kWarpSize;
    static constexpr int kThreads = kGroups * kGroupThreads;

private:
    static constexpr bool kRowCopies = Config::kRowCopies;
    using KeyRows = InputTile<bf16, kK>;
    using ValueRows = InputTile<bf16, kV>;
    // Numbers of 16-bit values: from r to k and from k to w; inputs of all warps; v or gy; a chunk.
    static constexpr int kInput = kRowCopies ? KeyRows::kElements : kTile;
    static constexpr int kInputsOf = kInputs * (kRowCopies ? kInput : kWarps * kTile);
    static constexpr int kValuesOf = kRowCopies ? ValueRows::kElements : kBlocks * kTile;
    static constexpr int kStage = kInputsOf + 2 * kValuesOf;
    static constexpr int kRounded = kWarps * kTerms * kBlocks * kTile, kKeys = kWarps * kTile;
    static constexpr int kScores = 5 * kWarpSize;
    static constexpr int kStateHalves = 2 * kWarps * kBlocks * kWarpSize * 4;
    static constexpr int kSlopes = kPerStep && Config::kForm == DecayForm::raw ? 8 * kWarpSize : 0;
    static constexpr int kGroupHalves =
        2 * kStage + kRounded + kKeys + 2 * kWarps * (kScores + kSlopes) + kStateHalves;
    static constexpr int kGradient = kWarps * kFragments * kWarpSize * 4;

    using KeyCopier = RowCopier<bf16, kK, kWarps>;
    using KeyCopierW = RowCopier<W, kK, kWarps>;
    using ValueCopier = RowCopier<bf16, kV, kWarps>;

public:
    static constexpr int kBytes = 4 * kGradient + 2 * kGroups * kGroupHalves;
    static constexpr int kStateWords = kStateHalves / 2;  // of a chunk

    using Head = HeadGradients<Config>;
    const Head& x;

    KGEN_DEVICE void operator()() const {
        const int chunks = static_cast<int>(ceil_div(x.steps, i64{16}));
        const int warp = thread_rank() / kWarpSize, group = warp / kWarps;
        Group its{*this, group, warp % kWarps, chunks};
        its.loop();
        float nonfinite = its.nonfinite;
        if constexpr (kSegments) nonfinite += check_state();
        if (block_any_nonfinite<kGroups * kWarps>(nonfinite)) step_by_step();
    }

private:
    // A warp's part of a group's loop.
    struct Group {
        const GradientLoop& of;
        int group, warp, chunks;
        float nonfinite = 0.0f;  // NaN if an input was not finite
        float u[2], gu[2] = {}, gw[2] = {}, constants[2] = {};  // of the lane's keys g and g + 8
        int last_;                    // steps of the last chunk
        int place_;                   // of a word of accumulators in a tile: row g, columns 2q
        int slots_, pairs_, rows_, columns_;  // offsets of the row of 8 elements for ldmatrix
        int input_place_, input_pairs_;       // of a word of results and of such a row among inputs, with kRowCopies

        KGEN_DEVICE void loop() {
            const Head& x = of.x;
            last_ = static_cast<int>(x.steps - 16 * i64{chunks - 1});
            place_ = opaque(Tile::offset(mma_lane().g, 0) + 2 * mma_lane().q);
            if constexpr (kRowCopies) {
                const int of_slots = wkv7::slot_step(lane_id() % 16);
                const int of_pairs = wkv7::slot_step(lane_id() % 8 + lane_id() / 16 * 8);
                slots_ = opaque(ValueRows::Tile::offset(of_slots, lane_id() / 16));
                pairs_ = opaque(ValueRows::Tile::offset(of_pairs, lane_id() / 8 % 2));
                input_place_ = opaque(KeyRows::beside(KeyRows::place(mma_lane().g, 2 * mma_lane().q), warp));
                input_pairs_ = opaque(KeyRows::beside(KeyRows::Tile::offset(of_pairs, lane_id() / 8 % 2), warp));
            } else {
                slots_ = opaque(Tile::offset(wkv7::slot_step(lane_id() % 16), lane_id() / 16));
                pairs_ = opaque(Tile::offset(wkv7::slot_step(lane_id() % 8 + lane_id() / 16 * 8), lane_id() / 8 % 2));
            }
            rows_ = opaque(Tile::offset(lane_id() % 16, lane_id() / 16));
            columns_ = opaque(Tile::offset(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = 16 * warp + mma_lane().g + 8 * half;
                u[half] = key < kK ? to_float(x.u[key]) : 0.0f;
                nonfinite = fma(u[half], 0.0f, nonfinite);
                if constexpr (!kPerStep)
                    constants[half] =
                        key < kK ? decay_of<Config::kForm>(to_float(x.w.first[key])) : 1.0f;
            }
            int stage = 0;
            copy_state(chunks - 1 - group);
            copy(chunks - 1 - group, stage);
            if (group == 0) put_final_gradient();
#pragma unroll 1
            for (int chunk = chunks - 1 - group; chunk >= 0; chunk -= kGroups) {
                run(chunk, stage);
                stage ^= 1;
            }
            cp_async_wait_all();
            finish();
        }

    private:
        KGEN_DEVICE u16* halves() const {
            return dynamic_smem<u16>() + 2 * kGradient + group * kGroupHalves;
        }
        KGEN_DEVICE u16* inputs(int stage) const {
            return halves() + stage * kStage + (kRowCopies ? 0 : warp * kInputs * kTile);
        }
        KGEN_DEVICE u16* values(int stage, int which) const {
            return halves() + stage * kStage + kInputsOf + which * kValuesOf;
        }
        // The row of 8 value features of block n whose address the lane passes to ldmatrix; place: slots_ or pairs_.
        KGEN_DEVICE u16* value_row(int stage, int which, int n, int place) const {
            return kRowCopies ? values(stage, which) + ValueRows::beside(place, n)
                              : values(stage, which) + n * kTile + place;
        }
        KGEN_DEVICE bf16* rounded(int of_warp) const {
            return reinterpret_cast<bf16*>(halves() + 2 * kStage + of_warp * kTerms * kBlocks * kTile);
        }
        KGEN_DEVICE bf16* keys(int of_warp) const {
            return reinterpret_cast<bf16*>(halves() + 2 * kStage + kRounded + of_warp * kTile);
        }
        KGEN_DEVICE float* scores(int of_warp) const {
            return reinterpret_cast<float*>(halves() + 2 * kStage + kRounded + kKeys) + of_warp * kScores;
        }
        KGEN_DEVICE float* slopes() const { return scores(kWarps) + warp * kSlopes + 4 * lane_id(); }
        KGEN_DEVICE u32* state() const {
            return reinterpret_cast<u32*>(halves() + kGroupHalves - kStateHalves) + state_part();
        }
        // Offset of the lane's part of a state: the first of its words of 16 value features.
        KGEN_DEVICE int state_part() const { return (warp * kBlocks * kWarpSize + lane_id()) * 4; }
        KGEN_DEVICE float* gradient() const {
            return dynamic_smem<float>() + (warp * kFragments * kWarpSize + lane_id()) * 4;
        }
        KGEN_DEVICE int left(int chunk) const { return chunk + 1 < chunks ? 16 : last_; }
        // Offset of a lane's word of accumulators in a tile: rows g (0) or 15 - g (1), or g + 8 where rows are keys
        // (key_word), of the first or second 8 columns.
        KGEN_DEVICE int word(int row, int columns) const {
            constexpr int kFlip = KeyRows::kRow > 16 ? 15 * KeyRows::kRow + 40 : 232;
            return kRowCopies ? input_place_ ^ kFlip * row ^ 8 * columns : place_ ^ 232 * row ^ 8 * columns;
        }
        KGEN_DEVICE int key_word(int row, int columns) const { return place_ ^ 16 * row ^ 8 * columns; }

        KGEN_DEVICE void meet() const { named_barrier_sync(1 + group, kGroupThreads); }
        KGEN_DEVICE void wait_for_gradient() const {
            named_barrier_sync(1 + kGroups + group, 2 * kGroupThreads);
        }
        KGEN_DEVICE void hand_on() const {
            const int next = 1 + kGroups + (group + 1) % kGroups;
            named_barrier_arrive<2 * kGroupThreads>(next);
        }

        // Starts the copies of the state before a chunk.
        KGEN_DEVICE void copy_state(int chunk) const {
            if (chunk < 0) return;
            const u32* from = of.x.states + i64{chunk} * kStateWords + state_part();
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
                cp_async_or_zero<16>(state() + n * kWarpSize * 4, from + n * kWarpSize * 4, true);
            cp_async_commit();
        }

        // Starts the copies of a chunk's rows, by all warps of the group.
        KGEN_DEVICE void copy_rows(int chunk, int stage) const {
            if (chunk >= 0) {
                const Head& x = of.x;
                const int there = left(chunk), rank = warp * kWarpSize + lane_id();
                u16* to = inputs(stage);
                int keys_at[KeyCopier::kCopies], values_at[ValueCopier::kCopies];
                const auto rows_from = [&](const StepPointer<bf16>& rows) {
                    return StepPointer<bf16>{rows.first + i64{chunk} * 16 * rows.stride, rows.stride};
                };
                const KeyCopier r(rows_from(x.r), rank);
                r.find(keys_at);
                r.start(to, keys_at, there);
                KeyCopier(rows_from(x.k), rank).start(to + kInput, keys_at, there);
                if constexpr (kPerStep) {
                    const StepPointer<W> w{x.w.first + i64{chunk} * 16 * x.w.stride, x.w.stride};
                    KeyCopierW(w, rank).start(to + 2 * kInput, keys_at, there);
                }
                const ValueCopier v(rows_from(x.v), rank);
                v.find(values_at);
                v.start(values(stage, 0), values_at, there);
                ValueCopier(rows_from(x.gy), rank).start(values(stage, 1), values_at, there);
            }
            cp_async_commit();
        }

        // Starts the copies of a chunk's rows.
        KGEN_DEVICE void copy(int chunk, int stage) const {
            if constexpr (kRowCopies) return copy_rows(chunk, stage);
            if (chunk >= 0) {
                const Head& x = of.x;
                const int there = left(chunk), key = 16 * warp;
                const i64 first = i64{chunk} * 16;
                u16* to = inputs(stage);
                Copier(x.r, key, first).start(to, there, kK - key);
                Copier(x.k, key, first).start(to + kTile, there, kK - key);
                if constexpr (kPerStep) CopierW(x.w, key, first).start(to + 2 * kTile, there, kK - key);
#pragma unroll
                for (int n = 0; n < ceil_div(kBlocks, kWarps); ++n) {
                    const int block = warp + n * kWarps;
                    if (kBlocks % kWarps != 0 && block >= kBlocks) break;
                    Copier(x.v, 16 * block, first).start(values(stage, 0) + block * kTile, there, kV - 16 * block);
                    Copier(x.gy, 16 * block, first).start(values(stage, 1) + block * kTile, there, kV - 16 * block);
                }
            }
            cp_async_commit();
        }

        KGEN_DEVICE void run(int chunk, int stage) {
            const Head& x = of.x;
            // 1. Copies.
            cp_async_wait<0>();
            meet();
            copy(chunk - kGroups, stage ^ 1);

            // 2. Decays; rows of r decayed from the beginning of the chunk, and rows of k decayed to its end.
            u16* tiles = inputs(stage);
            const int steps = left(chunk);
            Lane lane;
            load_rows(lane, tiles);
            if constexpr (kPerStep && kRowCopies) {
                u32 words[4];
                ldmatrix<4, true>(words, tiles + 2 * kInput + input_pairs_);
                lane.set_decays(words, steps, slopes());
            } else if constexpr (kPerStep) {
                lane.set_decays(tiles + 2 * kTile, steps, slopes());
            } else {
                lane.set_decays(constants, steps);
            }
            put_keys(lane);
            u32 rows[4][kRowTerms];
            lane.template decayed_r<kRowTerms>(rows, x.scale);
            nonfinite = fma(lane.kept[0], 0.0f, fma(lane.kept[1], 0.0f, nonfinite));

            // 3. Products with S and G; the gradient of the state before the chunk.
            Steps by_r = {}, by_k = {};
            float both[2][4] = {};
            if (kGroups > 1 && chunk + 1 < chunks) wait_for_gradient();
#pragma unroll
            for (int n = 0; n < kBlocks; ++n)
                pass_gradient(n, stage, rows, lane.kept, by_r, by_k, both);
            if (kGroups > 1 && chunk > 0) hand_on();
            copy_state(chunk - kGroups);
            load_rows(lane, tiles);  // again: their registers were free meanwhile
            const float sums[2] = {diagonal(both[0], 0), diagonal(both[1], 2)};
            lane.add_states(by_r, by_k, sums, x.scale);

            // 4. Pairs of steps.
            float n[2][4] = {}, m[2][4] = {};  // rows of gy and columns of v, and transposed
            multiply_values(stage, n, m);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                n[i / 4][i % 4] *= x.scale;
                m[i / 4][i % 4] *= x.scale;
            }
            lane.add_levels(n, m);
            lane.add_neighbours(n, u, gu);

            // 5. Results. The scores of all keys, and gv.
            put_scores(lane);
            if constexpr (kPerStep) lane.multiply_slopes(slopes());
            sync_warp();  // all lanes have read the inputs
            put(tiles, lane.gr);
            put(tiles + kInput, lane.gk);
            if constexpr (kPerStep) {
                put(tiles + 2 * kInput, lane.gw);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int step = wkv7::slot_step(8 * (i / 4) + 2 * mma_lane().q + i % 2);
                    gw[i % 4 / 2] += step < steps ? lane.gw[i / 4][i % 4] : 0.0f;
                }
            }
            meet();
            write(x.gr, chunk, tiles);
            write(x.gk, chunk, tiles + kInput);
            if constexpr (kPerStep) write(x.gw, chunk, tiles + 2 * kInput);
            write_gv(chunk, stage);
        }

        KGEN_DEVICE void load_rows(Lane& lane, const u16* tiles) const {
            const int pairs = kRowCopies ? input_pairs_ : pairs_;
            ldmatrix<4, true>(lane.r, tiles + pairs);
            ldmatrix<4, true>(lane.k, tiles + kInput + pairs);
        }

        // Stores the rows K.
        KGEN_DEVICE void put_keys(const Lane& lane) const {
            u32 words[4][1];
            lane.template decayed_k<1>(words);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<u32*>(keys(warp) + key_word(i % 2, i / 2)) = words[i][0];
        }

        // For one block of 16 value features: products with S and G, G to shared memory, then the new G.
        KGEN_DEVICE void pass_gradient(int n, int stage, const u32 (&rows)[4][kRowTerms],
                                       const float (&kept)[2], Steps& by_r, Steps& by_k,
                                       float (&both)[2][4]) const {
            float g[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto four = *reinterpret_cast<const Vec<float, 4>*>(gradient() + (2 * n + i) * kWarpSize * 4);
#pragma unroll
                for (int j = 0; j < 4; ++j) g[i][j] = four[j];
            }
            u32 terms[4][2];  // of operand A
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split_bf16(g[i / 2][i % 2 * 2], g[i / 2][i % 2 * 2 + 1], terms[i]);
            bf16* tile = rounded(warp) + n * kTile;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int term = 0; term < kTerms; ++term)
                    *reinterpret_cast<u32*>(tile + term * kBlocks * kTile + key_word(i % 2, i / 2)) = terms[i][term];
            // 1. Rows of gy and v by slots; operands B of values by slots.
            u32 gy[4], v[4];
            ldmatrix<4>(gy, value_row(stage, 1, n, pairs_));
            ldmatrix<4>(v, value_row(stage, 0, n, pairs_));
            const auto own = *reinterpret_cast<const Vec<u32, 4>*>(state() + n * kWarpSize * 4);
            const u32 s[4] = {own[0], own[1], own[2], own[3]};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                mma_m16n8k16<bf16>(by_r[half], s, {gy[2 * half], gy[2 * half + 1]});
#pragma unroll
                for (int term = kTerms - 1; term >= 0; --term) {
                    const u32 of_g[4] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
                    mma_m16n8k16<bf16>(by_k[half], of_g, {v[2 * half], v[2 * half + 1]});
                    mma_m16n8k16<bf16>(both[half], s, {of_g[half], of_g[2 + half]});
                }
            }
            // 2. The new G.
            ldmatrix<4, true>(gy, value_row(stage, 1, n, slots_));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) g[i][j] *= kept[j / 2];
#pragma unroll
                for (int term = kRowTerms - 1; term >= 0; --term)
                    mma_m16n8k16<bf16>(g[i], {rows[0][term], rows[1][term], rows[2][term], rows[3][term]},
                                       {gy[2 * i], gy[2 * i + 1]});
                *reinterpret_cast<Vec<float, 4>*>(gradient() + (2 * n + i) * kWarpSize * 4) = {
                    {g[i][0], g[i][1], g[i][2], g[i][3]}};
            }
        }

        // Stores the lane's part of G after the last step.
        KGEN_DEVICE void put_final_gradient() {
            if constexpr (kSegments) {
                StateTile tile;
                if (!of.x.after(tile, 16 * warp)) nonfinite = infinity();
                tile.store_fragments(dynamic_smem<float>() + warp * kFragments * kWarpSize * 4, kFragments);
            } else {
                put_final_state(of.x.after.final_state);
            }
        }
        KGEN_DEVICE void put_final_state(const float* from) const {
            const MmaLane at = mma_lane();
#pragma unroll 1
            for (int i = 0; i < 4 * kFragments; ++i) {
                const int key = 16 * warp + at.g + i % 4 / 2 * 8, value = i / 4 * 8 + 2 * at.q + i % 2;
                const bool there = from != nullptr && key < kK && value < kV;
                gradient()[i / 4 * kWarpSize * 4 + i % 4] = there ? from[key * kV + value] : 0.0f;
            }
        }

        // sum_v S * G of key g (from = 0) or g + 8 (from = 2): the diagonal of products of 16 keys by 8 keys.
        static KGEN_DEVICE float diagonal(const float (&products)[4], int from) {
            const int g = mma_lane().g;
            return shfl(g % 2 == 0 ? products[from] : products[from + 1], 4 * g + g / 2);
        }

        KGEN_DEVICE void multiply_values(int stage, float (&n)[2][4], float (&m)[2][4]) const {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                u32 gy[4], v[4], of_gy[4], of_v[4];  // operands A, and two operands B each
                ldmatrix<4>(gy, value_row(stage, 1, block, slots_));
                ldmatrix<4>(v, value_row(stage, 0, block, slots_));
                ldmatrix<4>(of_gy, value_row(stage, 1, block, pairs_));
                ldmatrix<4>(of_v, value_row(stage, 0, block, pairs_));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_m16n8k16<bf16>(n[half], gy, {of_v[2 * half], of_v[2 * half + 1]});
                    mma_m16n8k16<bf16>(m[half], v, {of_gy[2 * half], of_gy[2 * half + 1]});
                }
            }
        }

        KGEN_DEVICE void put_scores(const Lane& lane) const {
            float found[4], last;
            lane.scores(found, last);
            float* to = scores(warp);
            *reinterpret_cast<Vec<float, 4>*>(to + 4 * lane_id()) = {{found[0], found[1], found[2], found[3]}};
            to[4 * kWarpSize + lane_id()] = last;
        }

        // The factor d log(d)/dw that turns gw with respect to the decay's logarithm into gw with respect to w.
        static KGEN_DEVICE float slope(float w) {
            return Config::kForm == DecayForm::raw ? wkv7::log_decay_slope<wkv7::DecayForm::raw>(w) : 1.0f;
        }

        // put: stores results of 16 keys and steps in a tile of the warp; write: copies them from there to a tensor.
        KGEN_DEVICE void put(u16* tile, const Steps& results) const {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int key = 0; key < 2; ++key) {
                    const u32 pair = transpose_matrix(
                        pack2<bf16>(results[half][2 * key], results[half][2 * key + 1]));
                    *reinterpret_cast<u32*>(tile + word(half, key)) = pair;
                }
        }
        template <class T>
        KGEN_DEVICE void write_rows(const StepRows<T>& to, int chunk, const u16* tile) const {
            const int steps = left(chunk), rank = warp * kWarpSize + lane_id();
#pragma unroll
            for (int n = 0; n < KeyCopier::kCopies; ++n) {
                const int step = KeyCopier::step_at(rank, n), column = KeyCopier::column_at(rank);
                if (!KeyCopier::is_used(rank) || step >= steps || column >= kK) continue;
                store_vec(to.at(i64{chunk} * 16 + step) + column,
                          *reinterpret_cast<const Vec<T, 8>*>(tile + KeyCopier::place_at(rank, n)));
            }
        }
        template <class T>
        KGEN_DEVICE void write(const StepRows<T>& to, int chunk, const u16* tile) const {
            if constexpr (kRowCopies) return write_rows(to, chunk, tile);
            constexpr int kVec = Config::kVec, kPerRow = 16 / kVec;
            const int steps = left(chunk), key = 16 * warp;
#pragma unroll
            for (int n = 0; n < ceil_div(16 * kPerRow, kWarpSize); ++n) {
                const int i = lane_id() + n * kWarpSize, step = i / kPerRow, column = i % kPerRow * kVec;
                if (step >= steps || key + column >= kK) continue;
                store_vec(to.at(i64{chunk} * 16 + step) + key + column,
                          *reinterpret_cast<const Vec<T, kVec>*>(tile + Copier::place(step, column)));
            }
        }

        KGEN_DEVICE void write_gv(int chunk, int stage) const {
            // 1. Scores over all keys.
            auto sums = *reinterpret_cast<const Vec<float, 4>*>(scores(0) + 4 * lane_id());
            float last = scores(0)[4 * kWarpSize + lane_id()];
#pragma unroll
            for (int i = 1; i < kWarps; ++i) {
                const auto four = *reinterpret_cast<const Vec<float, 4>*>(scores(i) + 4 * lane_id());
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[j] += four[j];
                last += scores(i)[4 * kWarpSize + lane_id()];
            }
            const float scale = of.x.scale;
            u32 terms[kScoreTerms][4];
            Lane::score_operands(terms, {sums[0] * scale, sums[1] * scale, sums[2] * scale, sums[3] * scale},
                                 last * scale);
            // 2. Products, low terms first.
#pragma unroll
            for (int part = 0; part < ceil_div(kBlocks, kWarps); ++part) {
                const int block = warp + part * kWarps;
                if (kBlocks % kWarps != 0 && block >= kBlocks) break;
                float gv[2][4] = {};
                u32 gy[4];
                ldmatrix<4, true>(gy, value_row(stage, 1, block, slots_));
#pragma unroll
                for (int term = kScoreTerms - 1; term >= 0; --term)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        mma_m16n8k16<bf16>(gv[half], terms[term], {gy[2 * half], gy[2 * half + 1]});
#pragma unroll
                for (int i = 0; i < kWarps; ++i) {
                    u32 k[4];
                    ldmatrix<4, true>(k, keys(i) + columns_);
#pragma unroll
                    for (int term = kTerms - 1; term >= 0; --term) {
                        u32 g[4];
                        ldmatrix<4, true>(g, rounded(i) + (term * kBlocks + block) * kTile + rows_);
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            mma_m16n8k16<bf16>(gv[half], k, {g[2 * half], g[2 * half + 1]});
                    }
                }
                store_gv(gv, chunk, 16 * block);
            }
        }

        // Stores accumulators whose rows are slots, and whose columns are value features from `first` on.
        KGEN_DEVICE void store_gv(const float (&gv)[2][4], int chunk, int first) const {
            const int g = mma_lane().g, steps = left(chunk);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = wkv7::slot_step(g + 8 * half);
                bf16* row = of.x.gv.at(i64{chunk} * 16 + step);
                if constexpr (Config::kVec % 4 == 0) {
                    const int column = first + column_of_quad();
                    const Vec<u32, 2> quad = quad_of_row<bf16>(gv[0], gv[1], half);
                    if (step < steps && column < kV) *reinterpret_cast<Vec<u32, 2>*>(row + column) = quad;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int column = first + 8 * (i / 2) + 2 * mma_lane().q + i % 2;
                        if (step < steps && column < kV)
                            row[column] = from_float<bf16>(gv[i / 2][2 * half + i % 2]);
                    }
                }
            }
        }

        // Stores the group's parts of gu, and of gw if w has no steps.
        KGEN_DEVICE void finish() {
            const MmaLane at = mma_lane();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = 16 * warp + at.g + 8 * half;
                const float of_u = lanes_sum<4>(gu[half]), of_w = kPerStep ? 0.0f : lanes_sum<4>(gw[half]);
                nonfinite = fma(of_u, 0.0f, nonfinite);
                if (at.q != 0 || key >= kK) continue;
                of.x.gu_parts[group * kK + key] = of_u;
                if constexpr (!kPerStep)
                    of.x.gw_parts[group * kK + key] = of_w * slope(to_float(of.x.w.first[key]));
            }
        }
    };

    // For a segment: returns NaN if S before it is not finite. A thread checks a word per round.
    KGEN_DEVICE float check_state() const {
        float nonfinite = 0.0f;
        if (x.steps > 0) {
#pragma unroll 1
            for (int i = thread_rank(); i < kStateWords; i += kThreads) {
                const f32x2 two = unpack2<bf16>(x.states[i]);
                nonfinite = fma(two.x, 0.0f, fma(two.y, 0.0f, nonfinite));
            }
        }
        return nonfinite;
    }

    // Computes all gradients by definition, with a thread per key or value feature. It takes hundreds of times as long.
    KGEN_DEVICE void step_by_step() const {
        float* gradient = dynamic_smem<float>();  // [K, V]
        const int rank = thread_rank();
        sync_block();
        if constexpr (kSegments) {
            const int key = rank / kWarpSize * 16;
            if (rank < kGroupThreads) {
                StateTile tile;
                x.after(tile, key);
                tile.store_rows(gradient + key * kV, kV, kK - key, kV);
            }
        } else {
            for (int i = rank; i < kK * kV; i += kThreads)
                gradient[i] = x.after.final_state != nullptr ? x.after.final_state[i] : 0.0f;
        }
        float gu = 0.0f, by_w = 0.0f;  // of key `rank`, if there is one
#pragma unroll 1
        for (i64 chunk = ceil_div(x.steps, i64{16}) - 1; chunk >= 0; --chunk) {
            const i64 begin = 16 * chunk, end = min(x.steps, begin + 16);
            sync_block();
#pragma unroll 1
            for (int value = rank; value < kV; value += kThreads) write_gv(begin, end, value, gradient);
            if (rank < kK) write_key(begin, end, rank, gradient, gu, by_w);
            sync_block();
#pragma unroll 1
            for (int i = rank; i < kK * kV; i += kThreads)
                gradient[i] = behind(begin - 1, end, i / kV, i % kV, gradient);
        }
        if (rank >= kK) return;
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
            x.gu_parts[group * kK + rank] = group == 0 ? gu : 0.0f;
            if constexpr (!kPerStep) x.gw_parts[group * kK + rank] = group == 0 ? by_w : 0.0f;
        }
    }

    KGEN_DEVICE void write_gv(i64 begin, i64 end, int value, const float* gradient) const {
#pragma unroll 1
        for (i64 t = begin; t < end; ++t) {
            float sum = 0.0f, bonus = 0.0f;
#pragma unroll 1
            for (int key = 0; key < kK; ++key) {
                sum = fma(at(x.k, t, key), behind(t, end, key, value, gradient), sum);
                bonus = fma(at(x.r, t, key) * to_float(x.u[key]), at(x.k, t, key), bonus);
            }
            x.gv.at(t)[value] = from_float<bf16>(fma(bonus, x.scale * at(x.gy, t, value), sum));
        }
    }

    KGEN_DEVICE void write_key(i64 begin, i64 end, int key, const float* gradient, float& gu, float& sum_w) const {
        const float u = to_float(x.u[key]);
#pragma unroll 1
        for (i64 t = begin; t < end; ++t) {
            float by_r = 0.0f, by_k = 0.0f, by_w = 0.0f, n = 0.0f;
#pragma unroll 1
            for (int value = 0; value < kV; ++value) {
                const float v = at(x.v, t, value), gy = x.scale * at(x.gy, t, value);
                float s = state_at(begin / 16, key, value);
                for (i64 i = begin; i < t; ++i) s = fma(decay(i, key), s, at(x.k, i, key) * at(x.v, i, value));
                const float g = behind(t, end, key, value, gradient);
                by_r = fma(s, gy, by_r);
                by_k = fma(g, v, by_k);
                by_w = fma(s, g, by_w);
                n = fma(v, gy, n);
            }
            const float r = at(x.r, t, key), k = at(x.k, t, key);
            x.gr.at(t)[key] = from_float<bf16>(fma(n * u, k, by_r));
            x.gk.at(t)[key] = from_float<bf16>(fma(n * u, r, by_k));
            by_w *= decay_slope<Config::kForm>(w_at(t, key), decay(t, key));
            if constexpr (kPerStep) {
                x.gw.at(t)[key] = from_float<W>(by_w);
            } else {
                sum_w += by_w;
            }
            gu = fma(n * r, k, gu);
        }
    }

    // The gradient of the state after step t. `gradient`: that of the state after the chunk, which ends before step
    // `end`.
    KGEN_DEVICE float behind(i64 t, i64 end, int key, int value, const float* gradient) const {
        float g = gradient[key * kV + value];
#pragma unroll 1
        for (i64 i = end - 1; i > t; --i)
            g = fma(decay(i, key), g, x.scale * at(x.r, i, key) * at(x.gy, i, value));
        return g;
    }
    KGEN_DEVICE float state_at(i64 chunk, int key, int value) const {
        const int lane = key % 8 * 4 + value % 8 / 2, word = key % 16 / 8 + value % 16 / 8 * 2;
        const f32x2 two = unpack2<bf16>(
            x.states[chunk * kStateWords + ((key / 16 * kBlocks + value / 16) * kWarpSize + lane) * 4 + word]);
        return value % 2 == 0 ? two.x : two.y;
    }
    KGEN_DEVICE float w_at(i64 t, int key) const { return at(x.w, kPerStep ? t : 0, key); }
    KGEN_DEVICE float decay(i64 t, int key) const { return decay_of<Config::kForm>(w_at(t, key)); }
    template <class T>
    static KGEN_DEVICE float at(const StepPointer<T>& rows, i64 t, int feature) {
        return to_float(rows.first[t * rows.stride + feature]);
    }
};

}  // namespace kgen::wkv6
