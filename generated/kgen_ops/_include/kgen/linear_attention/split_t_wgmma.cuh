// The work of one CTA of split_t (split_t_loop.cuh) in a round, with wgmma (sm_90a).
//
//     sum      sum over the segment's steps of b_t v_t^T
//     intra    out_t += sum over s <= t of the segment of (a_t b_s) v_s
//     carried  out_t += a_t (state before the segment)
//
// Segment / 128 consumer warpgroups compute; one more warpgroup is the reducer, which only runs the exchange
// (split_t_exchange_gather.cuh). A consumer warpgroup has two tiles of 64 steps, one late in the segment with
// many tiles before it and one early, so that all consumers have equally many pairs of tiles.
//
// Layout: b, a, v and the state are SwizzledPanels (wgmma.cuh), columns in panels of 64. Scores stay in
// registers: accumulators of A B^T are operand A of the product with V.
//
// Shared memory: T b[Segment][kKeys], a[Segment][kKeys], v[Segment][BlockV], state before[kKeys][BlockV].
//
// Synchronisation: cp.async groups bring the rows, a group per batch of b and v, then one for a. A named barrier
// of the consumers (2) follows each wait; fence_proxy_async makes the rows visible to wgmma. The exchange
// signals the state by its mbarrier.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/linear_attention/split_t_exchange_gather.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/wgmma.cuh"

namespace kgen {

// Asynchronous copies of one tensor's rows to panels, 16 bytes each, by the first `Threads` threads of a CTA.
template <class T, int Width, int Rows, int Threads>
class PanelCopier {
    static constexpr int kVectors = (Width + 63) / 64 * 8;  // of a row
    static constexpr int kStripe = Threads / kVectors;       // rows
    static_assert(Threads % kVectors == 0 && kStripe % 8 == 0, "a thread's rows have one swizzle");

public:
    // Rows from step `first` on; the first `width` <= Width elements of each exist, a multiple of eight.
    KGEN_DEVICE PanelCopier(const StepRows<const T>& source, i64 first, int width)
        : stride_(source.stride), row_(thread_rank() / kVectors) {
        const int piece = thread_rank() % kVectors;
        from_ = source.at(first + row_) + 8 * piece;
        to_ = SwizzledPanels<Rows>::offset(row_, piece);
        idle_ = 8 * piece >= width;
    }

    // Starts the copies of rows [Begin, End); rows from `left` on become zeros. The caller commits the group.
    template <int Begin, int End>
    KGEN_DEVICE void start(T* panels, int left) const {
        static_assert((End - Begin) % kStripe == 0 && Begin % kStripe == 0, "whole stripes");
        if (idle_) return;
#pragma unroll
        for (int row = Begin; row < End; row += kStripe)
            cp_async_or_zero<16>(panels + to_ + 64 * row, from_ + row * stride_, row_ + row < left);
    }

private:
    i64 stride_;
    const T* from_;
    int row_, to_;
    bool idle_;
};

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA; Segment: steps of a CTA,
// with a consumer warpgroup for every 128; Batch: steps per group of copies, and per barrier of the sums;
// ScoreTerms: bf16 terms of a score. T is bf16.
template <class T, int Keys, int Values, int BlockV, int Segment, int Batch, int ScoreTerms>
class WgmmaSegment {
    static constexpr int kGroups = Segment / 128;  // warpgroups
    static constexpr int kTiles = Segment / 64;    // of steps
    static constexpr int kBatches = Segment / Batch;
    static constexpr int kKeyPanels = (Keys + 63) / 64;

public:
    using Element = T;
    // Three warpgroups start with 65536 / 384 registers per thread, rounded down to a multiple of eight. After
    // setmaxnreg they may not have more in total, or the kernel hangs. Two warpgroups need no setmaxnreg.
    static constexpr bool kSharesRegisters = kGroups == 2;
    static constexpr int kConsumerRegisters = 192, kReducerRegisters = 120;
    static_assert(2 * kConsumerRegisters + kReducerRegisters <= 3 * (65536 / 384 / 8 * 8),
                  "two consumer warpgroups and the reducer have what the CTA started with");
    static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
    static constexpr int kSegment = Segment;
    static constexpr int kFeatures = Keys, kValues = Values, kBlockV = BlockV;
    static constexpr int kKeys = 64 * kKeyPanels;  // of a sum

private:
    // Consumer warpgroups along the keys of a sum, and each one's tile of it.
    static constexpr int kKeyGroups = min(kGroups, kKeyPanels);
    static constexpr int kKeyTiles = kKeyPanels / kKeyGroups;      // of 64
    static constexpr int kWidth = BlockV / (kGroups / kKeyGroups);  // value features
    static constexpr int kRows = Segment * (2 * kKeys + BlockV);    // elements of shared memory
    using Half = HalfOperands<T>;
    using Tile = float[BlockV / 8][4];
    using Sums = float[kKeyTiles][kWidth / 8][4];
    using Operand = PanelOperand<T, Segment>;

    static_assert(kGroups <= 2, "more than two consumer warpgroups have too few registers");
    static_assert(kKeyPanels % kKeyGroups == 0, "a sum is whole tiles");
    static_assert(BlockV % 64 == 0 && BlockV <= 128 && kWidth >= 32, "a product's shape");
    static_assert(Keys % 8 == 0 && Values % 8 == 0, "rows are whole pieces");
    static_assert(Segment % Batch == 0 && Batch % 16 == 0, "a segment is whole batches");
    static_assert(ScoreTerms == 1 || ScoreTerms == 2, "a score rounded to bf16, and the remainder");

public:
    static constexpr int kBytes =
        (kRows + kKeys * BlockV) * static_cast<int>(sizeof(T)) + SwizzledPanels<8>::kBytes;
    // Bytes that the step-by-step fallback may overwrite: not the state before the segment.
    static constexpr int kFreeBytes = kRows * static_cast<int>(sizeof(T));

    template <int Ctas, bool HasInitialState, bool HasFinalState>
    using Exchange = GatherExchange<T, Keys, Values, BlockV, kConsumers, kThreads - kConsumers, Ctas,
                                      HasInitialState, HasFinalState>;

    KGEN_DEVICE WgmmaSegment() : group_(warpgroup_rank()) {}

    // Called by the consumers: computes a round. Returns NaN if any output is not finite.
    template <class Round>
    KGEN_DEVICE float run_round(Round& round) {
        sum_segment(round);
        Tile outputs[2] = {};  // of the late tile of steps, and of the early tile
        intra_segment(outputs);
        round.exchange.wait_for_state(round.number());
        return add_carried_and_write(outputs, round.has_state(), round.rows, round.first(), round.left());
    }

    // Called by the consumers: computes a round without outputs; afterwards state_before() is complete.
    template <class Round>
    KGEN_DEVICE void run_round_without_outputs(Round& round) {
        sum_segment(round);
        round.exchange.wait_for_state(round.number());
    }

    // Called by the reducer warpgroup in every round.
    template <class Round>
    KGEN_DEVICE void reduce(Round& round) const {
        round.exchange.reduce(before(), round.number(), round.is_last(), round.ends);
    }

    template <class Exchange>
    static KGEN_DEVICE const T* state_before(const Exchange&) {
        return before();
    }

private:
    // The shared-memory map, see above.
    static KGEN_DEVICE T* b() {
        return reinterpret_cast<T*>(align_panels(dynamic_smem<char>()));
    }
    static KGEN_DEVICE T* a() { return b() + Segment * kKeys; }
    static KGEN_DEVICE T* v() { return b() + 2 * Segment * kKeys; }
    static KGEN_DEVICE T* before() { return b() + kRows; }

    static KGEN_DEVICE void sync_consumers() { named_barrier_sync(2, kConsumers); }

    // The warpgroup's late (0) and early (1) tile of the segment, and its first features of a sum.
    template <int Which>
    KGEN_DEVICE int tile() const {
        return Which == 0 ? kTiles - 1 - group_ : group_;
    }
    KGEN_DEVICE int first_key() const { return group_ % kKeyGroups * 64 * kKeyTiles; }
    KGEN_DEVICE int first_value() const { return group_ / kKeyGroups * kWidth; }

    // Starts all copies of the segment's rows: a group for each batch of b and v, then one for a.
    KGEN_DEVICE void stage(const RecurrenceRows<T>& rows, i64 first, int left) const {
        if (kKeys > Keys || rows.values < BlockV) {  // padding features are zeros
            for (int i = thread_rank(); i < kRows; i += kConsumers) b()[i] = from_float<T>(0.0f);
            sync_consumers();
        }
        stage_batches<0>(PanelCopier<T, kKeys, Segment, kConsumers>(rows.b, first, Keys),
                         PanelCopier<T, BlockV, Segment, kConsumers>(rows.v, first, rows.values), left);
        PanelCopier<T, kKeys, Segment, kConsumers>(rows.a, first, Keys)
            .template start<0, Segment>(a(), left);
        cp_async_commit();
    }

    template <int Number, class CopyB, class CopyV>
    KGEN_DEVICE void stage_batches(const CopyB& copy_b, const CopyV& copy_v, int left) const {
        if constexpr (Number < kBatches) {
            copy_b.template start<Number * Batch, (Number + 1) * Batch>(b(), left);
            copy_v.template start<Number * Batch, (Number + 1) * Batch>(v(), left);
            cp_async_commit();
            stage_batches<Number + 1>(copy_b, copy_v, left);
        }
    }

    // Sums b v^T of all steps as they arrive, and writes the sum for the exchange.
    template <class Round>
    KGEN_DEVICE void sum_segment(Round& round) {
        group_ = opaque(group_);  // so that no address stays in a register from one round to the next
        stage(round.rows, round.first(), round.left());
        Sums sums = {};
        add_batches<0>(sums);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) wgmma_wait<0>(sums[m]);
        put_sums(sums, round.exchange, round.number(), round.is_last());
        round.exchange.sums_written();
    }

    template <class Exchange>
    KGEN_DEVICE void put_sums(Sums& sums, const Exchange& exchange, int round, bool is_last) const {
        const int key = opaque(first_key() + 16 * warp_in_warpgroup() + mma_lane().g);
        const int value = opaque(first_value());
        if (exchange.needs_remainders(is_last))
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
                for (int n = 0; n < kWidth / 8; ++n) {
                    float(&tile)[4] = sums[m][n];
                    exchange.put_remainders(round, key + 64 * m, value + 8 * n + 2 * mma_lane().q, tile);
#pragma unroll
                    for (int i = 0; i < 4; ++i) tile[i] = Exchange::round_half_up(tile[i]);
                }
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < kWidth / 8; n += 2)
                exchange.put(round, key + 64 * m, value + 8 * n + column_of_quad(), sums[m][n],
                             sums[m][n + 1]);
    }

    // The intra-segment part of the outputs.
    KGEN_DEVICE void intra_segment(Tile (&outputs)[2]) const {
        cp_async_wait_all();
        fence_proxy_async();
        sync_consumers();
        intra_chunk<0>(outputs[0]);
        intra_chunk<1>(outputs[1]);
    }

    // Adds batch `Number` and all later ones, each as soon as its rows have arrived.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums) const {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - Number>();
            fence_proxy_async();
            sync_consumers();
            const Operand keys(b(), Number * Batch, first_key());
            const Operand values(v(), Number * Batch, first_value());
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) wgmma_fence(sums[m]);
#pragma unroll
            for (int step = 0; step < Batch; step += 16)
#pragma unroll
                for (int m = 0; m < kKeyTiles; ++m)
                    wgmma_m64k16<kWidth, Major::MN, Major::MN>(
                        sums[m], keys.at(step, 64 * m), values.at(step, 0));
            wgmma_commit();
            add_batches<Number + 1>(sums);
        }
    }

    // O += A S if there is a state, then writes O: the late tile while wgmma computes the early one. Returns NaN if
    // any output is not finite.
    KGEN_DEVICE float add_carried_and_write(Tile (&outputs)[2], bool has_state,
                                            const RecurrenceRows<T>& rows, i64 first, int left) const {
        float nonfinite = 0.0f;
        if (has_state) {
            const PanelOperand<T, kKeys> state(before(), 0, 0);
            wgmma_fence(outputs[0], outputs[1]);
            carry(outputs[0], Operand(a(), 64 * tile<0>(), 0), state);
            wgmma_commit();
            carry(outputs[1], Operand(a(), 64 * tile<1>(), 0), state);
            wgmma_commit();
            wgmma_wait<1>(outputs[0]);
            nonfinite = write<0>(outputs[0], rows, first, left);
            wgmma_wait<0>(outputs[1]);
        } else {
            nonfinite = write<0>(outputs[0], rows, first, left);
        }
        return nonfinite + write<1>(outputs[1], rows, first, left);
    }

    static KGEN_DEVICE void carry(Tile& sums, const Operand& rows,
                                  const PanelOperand<T, kKeys>& state) {
#pragma unroll
        for (int key = 0; key < kKeys; key += 16)
            wgmma_m64k16<BlockV, Major::K, Major::MN>(sums, rows.at(0, key),
                                                            state.at(key, 0));
    }

    template <int Which>
    KGEN_DEVICE float write(Tile& sums, const RecurrenceRows<T>& rows, i64 first, int left) const {
        const int step = 64 * tile<Which>() + 16 * warp_in_warpgroup();
        return write_fragment<T, Values, BlockV>(sums, rows, first + step, left - step);
    }

    // O += (A B^T) V over the tiles of b and v up to the warpgroup's own one, which gets the causal mask. The
    // products run one after the other: with the next tile's scores in flight beside O, registers are too few
    // and ptxas serialises all wgmma of the kernel.
    template <int Which>
    KGEN_DEVICE void intra_chunk(Tile& sums) const {
        const Operand rows(a(), 64 * tile<Which>(), 0);
#pragma unroll 1
        for (int i = 0; i <= tile<Which>(); ++i) {
            float scores[8][4] = {};
            score(scores, rows, i);
            u32 terms[ScoreTerms * 4][4];
            split_scores(terms, scores, i == tile<Which>());
            const Operand values(v(), 64 * i, 0);
            wgmma_fence(sums, terms);
#pragma unroll
            for (int k = 0; k < 4 * ScoreTerms; ++k)
                wgmma_m64k16<BlockV, Major::MN>(sums, terms[k], values.at(16 * (k % 4), 0));
            wgmma_commit();
            wgmma_wait<0>(sums, terms);
        }
    }

    // A B^T with a tile of b.
    KGEN_DEVICE void score(float (&scores)[8][4], const Operand& rows, int other) const {
        const Operand keys(b(), 64 * other, 0);
        wgmma_fence(scores);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16)
            wgmma_m64k16<64, Major::K, Major::K>(scores, rows.at(0, key),
                                                            keys.at(0, key));
        wgmma_commit();
        wgmma_wait<0>(scores);
    }

    // Scores as bf16 operands, low terms first. own: the tile is the warpgroup's own and gets the causal mask.
    static KGEN_DEVICE void split_scores(u32 (&terms)[ScoreTerms * 4][4], float (&scores)[8][4],
                                         bool own) {
        const MmaLane lane = mma_lane();
        const int row = 16 * warp_in_warpgroup() + lane.g;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float* two = scores[i / 2] + i % 2 * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (own && 8 * (i / 2) + 2 * lane.q + j > row + i % 2 * 8) two[j] = 0.0f;
            const u32 high = pack2<T>(two[0], two[1]);
            terms[i / 4 + 4 * (ScoreTerms - 1)][i % 4] = high;
            if constexpr (ScoreTerms == 2) {
                const f32x2 back = unpack2<T>(high);
                terms[i / 4][i % 4] = pack2<T>(two[0] - back.x, two[1] - back.y);
            }
        }
    }

    int group_;  // the consumer warpgroup
};

}  // namespace kgen
