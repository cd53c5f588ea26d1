// Outputs of a linear recurrence by a cluster of 8 blocks, which have a segment of the steps each.
//
//     S_t = S_{t-1} + b_t v_t^T,  out_t = factor * a_t S_t
//
// No block walks: it sums its segment's b v^T, and the cluster exchanges the sums while each block makes
// what its steps read of the same half of the segment. Then each block has the state before its segment,
// and rows of outputs are finished as they lie in registers. What half a segment adds is a state for the
// other half, so that no step looks back farther than half a segment.
//
//     warps              two fragments of 16 steps, one of each half (paired_rows.cuh)
//     sums, in fp32      to global memory, where a block scans an eighth of a state over 8 segments
//     states, as T       from there to shared memory of the block whose segment they are before
//
// A sequence that is longer than 8 segments takes several rounds. What is not finite is noticed by its
// effect on outputs, and then a block does its segment again step by step.
//
// Barriers of the cluster, two a round: the sums are written; the states are. A block reads its state,
// and reads of the next round's are written, only behind its arrival at the first barrier of the next
// round, which it comes to with its products done. Sums of the next round are written behind the second
// barrier, to which all come with theirs read.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_outputs.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "chunk_stage.cuh"
#include "cluster.cuh"
#include "math.cuh"
#include "paired_rows.cuh"
#include "state_tile.cuh"
#include "state_walk.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block; Segment: its
// steps, for 32 of which it has a warp; Batch: steps per group of copies, and per barrier of the sums;
// CopyBytes: of one copy. T has 16 bits and the range of fp32 (bf16).
template <class T, int Keys, int Values, int Slice, int Segment, int Batch, int CopyBytes>
class ClusterWalk {
    static constexpr int kWarps = Segment / 32;
    static constexpr int kHalf = Segment / 2;
    static constexpr int kBatches = Segment / Batch;
    static constexpr int kKeys = whole_fragments(Keys);
    using Rows = PairedRows<T, Keys, Values, Slice, CopyBytes>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    // Warps along the features of a sum, and their fragments of 16.
    static constexpr int kValueWarps = kWarps >= 16 ? 4 : kWarps >= 4 ? 2 : 1;
    static constexpr int kKeyWarps = kWarps / kValueWarps;
    static constexpr int kAcross = kKeys / 16, kAlong = Slice / 16;  // of a whole sum
    static constexpr int kKeyTiles = (kAcross + kKeyWarps - 1) / kKeyWarps;
    static constexpr int kValuePairs = (kAlong + kValueWarps - 1) / kValueWarps;
    using Sums = StateTile<T, kKeyTiles, kValuePairs, Batch>;

public:
    static constexpr int kBlocks = 8;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kSlices = (Values + Slice - 1) / Slice;
    static constexpr int kSum = kKeys * Slice;  // values

private:
    // A unit of the scan is 16 x 16 values of a sum: eight per lane.
    static constexpr int kUnits = kAcross * kAlong;
    static constexpr int kUnitsPerWarp = (kUnits + kBlocks * kWarps - 1) / (kBlocks * kWarps);
    // Elements of shared memory.
    static constexpr int kRows = Segment * (kKeyStride + kValueStride);
    static constexpr int kState = kKeys * kValueStride;

    static_assert(is_power_of_two(kWarps) && kWarps >= 2, "warps are rows and columns of a sum");
    static_assert(kHalf % Batch == 0 && Batch % 16 == 0, "half a segment is whole batches");
    static_assert((kRows + kState) * static_cast<int>(sizeof(T)) >= plain_walk_bytes(Keys, Slice),
                  "a walk step by step must leave the state before it alone");

public:
    static constexpr int kSmemBytes = (kRows + 2 * kState) * static_cast<int>(sizeof(T));

    // Rows of all steps; of v, out and the states the slice's features alone. sums: fp32 of the cluster,
    // [kBlocks][kSum].
    KGEN_DEVICE ClusterWalk(const WalkRows<T>& rows, const WalkStates& states, float* sums)
        : rows_(rows), states_(states), sums_(sums), rank_(cluster_rank()) {
        // Shared memory: T b[Segment][kKeyStride], v[Segment][kValueStride], and [kKeys][kValueStride]
        // what the segment's first half adds, and the state before the segment.
        b_ = dynamic_smem<T>();
        v_ = b_ + Segment * kKeyStride;
        middle_ = b_ + kRows;
        before_ = middle_ + kState;
        warp_ = thread_rank() / kWarpSize;
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                const bool there =
                    states_.state != nullptr && key < Keys && value < rows_.values;
                carried_[i][j / 4][j % 4] = there ? states_.state[key * states_.key_stride + value] : 0.0f;
            }
        });
    }

    KGEN_DEVICE void walk() {
#pragma unroll 1
        for (i64 start = 0; start < rows_.end; start += kBlocks * Segment) take_round(start);
        if (states_.end == nullptr) return;
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                if (key < Keys && value < rows_.values) states_.store_end(key, value, carried_[i][j / 4][j % 4]);
            }
        });
    }

private:
    // The 8 segments from step `start` on; those behind the last step only take part in the exchange.
    KGEN_DEVICE void take_round(i64 start) {
        const i64 first = start + rank_ * Segment;
        const i64 behind = max(rows_.end - first, i64{0});
        const int left = static_cast<int>(min(behind, i64{Segment}));
        const int early = warp_, late = kWarps - 1 - warp_;  // fragments of a half: as many looks for all
        const i64 early_step = first + 16 * early, late_step = first + kHalf + 16 * late;
        const int early_left = left - 16 * early, late_left = left - kHalf - 16 * late;
        const bool follows = rank_ > 0 || start > 0 || states_.state != nullptr;

        Rows outputs;
        if (left > 0) {
            stage(start > 0, first, left);
            outputs.template read<0>(rows_.a, early_step, early_left);
            ask_for(late_step, late_left);
            Sums sums;
            add_batches<0>(sums);
            hand_out(sums);
        }
        arrive_at_cluster();
        if (early_left > 0) {
            outputs.template arrange<0>();
            outputs.template look_back<0>(b_, v_, early);
        }
        wait_for_cluster();
        scan(static_cast<int>(min(ceil_div(rows_.end - start, i64{Segment}), i64{kBlocks})));
        outputs.template read<1>(rows_.a, late_step, late_left);
        arrive_at_cluster();
        if (late_left > 0) {
            outputs.template arrange<1>();
            outputs.template look_back<1>(b_ + kHalf * kKeyStride, v_ + kHalf * kValueStride, late);
            outputs.template carry<1>(middle_);
        }
        wait_for_cluster();
        if (left == 0) return;
        if (follows) outputs.template carry<0>(before_);
        float poison = outputs.template write<0>(rows_, early_step, early_left);
        poison += outputs.template write<1>(rows_, late_step, late_left);
        if (block_has<kWarps>(poison)) {
            WalkRows<T> segment = rows_;
            segment.first = first;
            segment.end = first + left;
            StoredState<T> state{};
            state.stored = follows ? before_ : nullptr;
            state.row_stride = kValueStride;
            walk_plainly<T, Keys, Values, Slice, kThreads, false, false, false, true>(
                segment, state, NoDecayRows{});
        }
    }

    // Start all copies of the segment's rows, a group for each batch.
    KGEN_DEVICE void stage(bool again, i64 first, int left) {
        const bool ragged = kKeys > Keys || rows_.values < Slice;
        if (again) sync_block();  // the last round's rows have been read
        if (ragged) {             // features that do not exist are zeros
            for (int i = thread_rank(); i < kRows; i += kThreads) b_[i] = from_float<T>(0.0f);
            sync_block();
        }
        ChunkCopier<T, Batch, Keys, CopyBytes, kThreads> copy_b(rows_.b, first, Keys);
        ChunkCopier<T, Batch, Slice, CopyBytes, kThreads> copy_v(rows_.v, first, rows_.values);
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            const int there = left - batch * Batch;
            T* b = b_ + batch * Batch * kKeyStride;
            T* v = v_ + batch * Batch * kValueStride;
            if (there >= Batch) {
                copy_b.template start<true>(b, kKeyStride, Batch);
                copy_v.template start<true>(v, kValueStride, Batch);
            } else {
                copy_b.template start<false>(b, kKeyStride, there);
                copy_v.template start<false>(v, kValueStride, there);
            }
            cp_async_commit();
        }
    }

    // Have L2 fetch the late fragment's rows of `a`.
    KGEN_DEVICE void ask_for(i64 first, int left) const {
        constexpr int kLine = 128 / static_cast<int>(sizeof(T));
        constexpr int kLines = (Keys + kLine - 1) / kLine;  // of a row
#pragma unroll
        for (int i = lane_id(); i < 16 * kLines; i += kWarpSize)
            if (i / kLines < left) prefetch_line(rows_.a.at(first + i / kLines) + i % kLines * kLine);
    }

    // Add batches as they arrive, from this one on. What the first half of them adds is kept for the other.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums) {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - 1 - Number>();
            sync_block();
            if (has_sums())
                sums.add(b_ + Number * Batch * kKeyStride + 16 * first_across(), kKeyStride,
                         v_ + Number * Batch * kValueStride + 16 * first_along(), kValueStride);
            if (Number == kBatches / 2 - 1) keep_middle(sums);
            add_batches<Number + 1>(sums);
        }
    }

    // The warp's first fragments of a sum, and whether they exist.
    KGEN_DEVICE int first_across() const { return warp_ / kValueWarps * kKeyTiles; }
    KGEN_DEVICE int first_along() const { return warp_ % kValueWarps * kValuePairs; }
    KGEN_DEVICE bool has_sums() const {
        return (kAcross % kKeyWarps == 0 || first_across() < kAcross) &&
               (kAlong % kValueWarps == 0 || first_along() < kAlong);
    }

    KGEN_DEVICE void keep_middle(const Sums& sums) {
        if (!has_sums()) return;
        const int key = 16 * first_across(), value = 16 * first_along();
        sums.store(
            middle_ + key * kValueStride + value, kValueStride,
            [&](int m, int n, int i) { return sums.at(m, n, i); },
            [&](int of_key, int of_value) {
                return (kAcross % kKeyWarps == 0 || key + of_key < kKeys) &&
                       (kAlong % kValueWarps == 0 || value + of_value < Slice);
            });
    }

    // The segment's sum to global memory: [kUnits][two tiles][lanes][four accumulators].
    KGEN_DEVICE void hand_out(const Sums& sums) {
        if (!has_sums()) return;
        float* target = sums_ + rank_ * kSum + 4 * lane_id();
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2 * kValuePairs; ++n) {
                const int across = first_across() + m, along = first_along() + n / 2;
                if (kAcross % kKeyWarps != 0 && across >= kAcross) continue;
                if (kAlong % kValueWarps != 0 && along >= kAlong) continue;
                Vec<float, 4> tile;
#pragma unroll
                for (int i = 0; i < 4; ++i) tile[i] = sums.at(m, n, i);
                store_vec(target + (across * kAlong + along) * 256 + n % 2 * 128, tile);
            }
    }

    // body(i, unit) for the units that the warp scans.
    template <class Body>
    KGEN_DEVICE void for_my_units(Body body) const {
#pragma unroll
        for (int i = 0; i < kUnitsPerWarp; ++i) {
            const int unit = rank_ + kBlocks * (warp_ + i * kWarps);
            if (kUnits % (kBlocks * kWarps) == 0 || unit < kUnits) body(i, unit);
        }
    }

    // Features of value j of a lane: of four accumulators of one tile, then of its neighbour.
    static KGEN_DEVICE int key_of(int unit, int j) {
        return unit / kAlong * 16 + Sums::key_of(0, j % 4);
    }
    static KGEN_DEVICE int value_of(int unit, int j) {
        return unit % kAlong * 16 + Sums::value_of(j / 4, j % 4);
    }

    // Add the segments' sums in order, `count` of them, and give each segment the state before it.
    KGEN_DEVICE void scan(int count) {
        for_my_units([&](int i, int unit) {
            Vec<float, 4> parts[kBlocks][2];  // all on their way at once
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    parts[block][tile] = load_vec<4>(sums_ + min(block, count - 1) * kSum +
                                                     unit * 256 + tile * 128 + 4 * lane_id());
            const int key = unit / kAlong * 16 + mma_lane().g;
            T* target = before_ + key * kValueStride + unit % kAlong * 16 + column_of_quad();
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                if (block >= count) break;
                T* there = cluster_address(target, block);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<Vec<u32, 2>*>(there + 8 * half * kValueStride) =
                        quad_of_row<T>(carried_[i][0], carried_[i][1], half);
#pragma unroll
                for (int j = 0; j < 8; ++j) carried_[i][j / 4][j % 4] += parts[block][j / 4][j % 4];
            }
        });
    }

    const WalkRows<T>& rows_;
    const WalkStates& states_;
    float* sums_;
    int rank_, warp_;
    T *b_, *v_, *middle_, *before_;
    float carried_[kUnitsPerWarp][2][4] = {};  // the state before the next segment to be added
};

}  // namespace kgen
