// The work of one CTA of split_t (split_t_loop.cuh) in a round, with mma (sm_80).
//
//     sum      sum over the segment's steps of b_t v_t^T
//     intra    out_t += sum over s <= t of t's half of the segment of (a_t b_s) v_s
//     carried  out_t += a_t (state before the segment + sum of the first half, for steps of the second half)
//
// The segment has two halves, so that scores reach back at most half a segment; the sum of the first half is
// kept in shared memory as the state between the halves. A warp has two fragments of 16 steps of one half
// (paired_attention.cuh), one late with many fragments before it and one early, so that all warps have
// equally many pairs of fragments.
//
// Layout: rows in shared memory are kKeyStride and kValueStride elements apart; rows of a go from global memory
// to registers.
//
// Shared memory: T b[Segment][kKeyStride], v[Segment][kValueStride], the sum of the first half
// middle[kKeys][kValueStride], the state before the segment before[kKeys][kValueStride]; then the scratch of the
// exchange.
//
// Synchronisation: cp.async groups bring b and v, one per batch, each followed by a block barrier. The exchange
// (split_t_exchange_scan.cuh) has two grid barriers; between arrive and wait of each one the warps compute
// intra-segment outputs.
#pragma once

#include "kgen/chunked/chunk_states.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/linear_attention/paired_attention.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/linear_attention/split_t_exchange_scan.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA; Segment: steps of a CTA,
// with a warp for every 32; Batch: steps per group of copies, and per barrier of the sums; CopyBytes: bytes of one
// cp.async; ScoreTerms: bf16 terms of a score. T is bf16.
template <class T, int Keys, int Values, int BlockV, int Segment, int Batch, int CopyBytes,
          int ScoreTerms>
class MmaSegment {
    static constexpr int kWarps = Segment / 32;
    static constexpr int kHalf = Segment / 2;
    static constexpr int kBatches = Segment / Batch;

public:
    using Element = T;
    static constexpr int kThreads = kWarps * kWarpSize, kConsumers = kThreads;
    static constexpr int kSegment = Segment;
    static constexpr int kFeatures = Keys, kValues = Values, kBlockV = BlockV;
    static constexpr int kKeys = whole_fragments(Keys);  // keys of a sum, padded

private:
    using Rows = PairedAttention<T, Keys, Values, BlockV, CopyBytes, ScoreTerms>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    // Warps along the features of a sum, and each one's units of 16 x 16 elements.
    static constexpr int kValueWarps = kWarps >= 16 ? 4 : kWarps >= 4 ? 2 : 1;
    static constexpr int kKeyWarps = kWarps / kValueWarps;
    static constexpr int kKeyUnits = kKeys / 16, kValueUnits = BlockV / 16;  // of a whole sum
    static constexpr int kKeyTiles = (kKeyUnits + kKeyWarps - 1) / kKeyWarps;
    static constexpr int kValuePairs = (kValueUnits + kValueWarps - 1) / kValueWarps;
    // Fragments of b and v that the late fragment attends to before the first wait at the grid barrier.
    static constexpr int kFirstTiles = kWarps / 2 + 1;
    // Elements of shared memory.
    static constexpr int kRows = Segment * (kKeyStride + kValueStride);
    static constexpr int kState = kKeys * kValueStride;

    static_assert(is_power_of_two(kWarps) && kWarps >= 2, "warps form rows and columns of a sum");
    static_assert(kHalf % Batch == 0 && Batch % 16 == 0, "half a segment is whole batches");

public:
    static constexpr int kBytes = (kRows + 2 * kState) * static_cast<int>(sizeof(T));
    static constexpr int kFreeBytes = kBytes;  // bytes that the step-by-step fallback may overwrite

    template <int Ctas, bool HasInitialState, bool>
    using Exchange = ScanExchange<T, Keys, Values, BlockV, kThreads, Ctas, HasInitialState, kBytes>;

private:
    using Sums = StateFragments<T, kKeyTiles, kValuePairs, Batch>;
    using Outputs = Rows;

public:
    KGEN_DEVICE MmaSegment() : warp_(thread_rank() / kWarpSize) {}

    // A round. Returns NaN if any output is not finite.
    template <class Round>
    KGEN_DEVICE float run_round(Round& round) {
        warp_ = opaque(warp_);  // so that no address stays in a register from one round to the next
        Outputs outputs;
        {
            Sums sums;
            stage(round.rows, round.first(), round.left());
            add_batches<0>(sums, round.rows, round.first(), round.left());
            read<0>(outputs, round.rows, round.first(), round.left());
            put_sums(sums, round.exchange);
        }
        round.exchange.sums_written();
        outputs.template arrange<0>();
        intra_chunk<0>(outputs, 0, kFirstTiles);
        round.exchange.wait_for_sums();
        round.exchange.scan();
        round.exchange.states_written();
        finish_intra_chunk(outputs, round.rows, round.first(), round.left());
        // The intra-segment part is done; what is left needs the state.
        round.exchange.template start_state_copy<kValueStride>(before());
        if (half() == 1) outputs.carry(middle());
        round.exchange.wait_for_state();
        if (round.has_state()) outputs.carry(before());
        const float nonfinite = write<0>(outputs, round.rows, round.first(), round.left());
        return nonfinite + write<1>(outputs, round.rows, round.first(), round.left());
    }

    // A round without outputs: afterwards state_before() is complete.
    template <class Round>
    KGEN_DEVICE void run_round_without_outputs(Round& round) {
        warp_ = opaque(warp_);
        Sums sums;
        stage(round.rows, round.first(), round.left());
        add_batches<0>(sums, round.rows, round.first(), round.left());
        put_sums(sums, round.exchange);
        round.exchange.sums_written();
        round.exchange.wait_for_sums();
        round.exchange.scan();
        round.exchange.states_written();
        round.exchange.wait_for_states();
    }

    template <class Exchange>
    static KGEN_DEVICE const T* state_before(const Exchange& exchange) {
        return exchange.state();
    }

private:
    // Starts all copies of the segment's rows, a group for each batch.
    KGEN_DEVICE void stage(const RecurrenceRows<T>& rows, i64 first, int left) const {
        const bool ragged = kKeys > Keys || rows.values < BlockV;
        if (ragged) {  // padding features are zeros
            for (int i = thread_rank(); i < kRows; i += kThreads) b()[i] = from_float<T>(0.0f);
            sync_block();
        }
        ChunkCopier<T, Batch, Keys, CopyBytes, kThreads> copy_b(rows.b, first, Keys);
        ChunkCopier<T, Batch, BlockV, CopyBytes, kThreads> copy_v(rows.v, first, rows.values);
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            const int there = left - batch * Batch;
            T* to_b = b() + batch * Batch * kKeyStride;
            T* to_v = v() + batch * Batch * kValueStride;
            if (there >= Batch) {
                copy_b.template start<true>(to_b, kKeyStride, Batch);
                copy_v.template start<true>(to_v, kValueStride, Batch);
            } else {
                copy_b.template start<false>(to_b, kKeyStride, there);
                copy_v.template start<false>(to_v, kValueStride, there);
            }
            cp_async_commit();
        }
    }

    template <class Exchange>
    KGEN_DEVICE void put_sums(const Sums& sums, const Exchange& exchange) const {
        if (!has_sums()) return;
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2 * kValuePairs; ++n) {
                const int key_unit = first_key_unit() + m, value_unit = first_value_unit() + n / 2;
                if (kKeyUnits % kKeyWarps != 0 && key_unit >= kKeyUnits) continue;
                if (kValueUnits % kValueWarps != 0 && value_unit >= kValueUnits) continue;
                Vec<float, 4> tile;
#pragma unroll
                for (int i = 0; i < 4; ++i) tile[i] = sums.at(m, n, i);
                exchange.put(key_unit, value_unit, n % 2, tile);
            }
    }

    // The rest of the intra-segment part, while other CTAs write states.
    KGEN_DEVICE void finish_intra_chunk(Outputs& outputs, const RecurrenceRows<T>& rows, i64 first,
                                        int left) const {
        read<1>(outputs, rows, first, left);
        intra_chunk<0>(outputs, kFirstTiles, fragment<0>() + 1);
        outputs.template arrange<1>();
        intra_chunk<1>(outputs, 0, fragment<1>() + 1);
    }

    // The warp's half of the segment, and its late (0) and early (1) fragment among the fragments of that half. In
    // every warp these two fragments together attend to kWarps + 1 fragments. Warps of a half have consecutive ranks,
    // so that each of an SM's four schedulers has equally many warps of either half.
    KGEN_DEVICE int half() const { return warp_ / (kWarps / 2); }
    template <int Which>
    KGEN_DEVICE int fragment() const {
        const int of_half = warp_ % (kWarps / 2);
        return Which == 0 ? kWarps - 1 - of_half : of_half;
    }
    template <int Which>
    KGEN_DEVICE int step_of() const {  // in the segment
        return half() * kHalf + 16 * fragment<Which>();
    }

    template <int Which>
    KGEN_DEVICE void read(Outputs& outputs, const RecurrenceRows<T>& rows, i64 first, int left) const {
        outputs.template read<Which>(rows.a, first + step_of<Which>(), left - step_of<Which>());
    }

    // Attends from a fragment to fragments [from, to) of b and v; the last one it can read is fragment() itself.
    template <int Which>
    KGEN_DEVICE void intra_chunk(Outputs& outputs, int from, int to) const {
        outputs.template intra_chunk<Which>(b() + half() * kHalf * kKeyStride,
                                          v() + half() * kHalf * kValueStride, fragment<Which>(),
                                          from, to);
    }

    template <int Which>
    KGEN_DEVICE float write(Outputs& outputs, const RecurrenceRows<T>& rows, i64 first,
                            int left) const {
        return outputs.template write<Which>(rows, first + step_of<Which>(),
                                             left - step_of<Which>());
    }

    // Adds batch `Number` and all later ones, each as soon as its rows have arrived. Stores the sum of the first half.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums, const RecurrenceRows<T>& rows, i64 first, int left) const {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - 1 - Number>();
            sync_block();
            if (has_sums())
                sums.add(b() + Number * Batch * kKeyStride + 16 * first_key_unit(), kKeyStride,
                         v() + Number * Batch * kValueStride + 16 * first_value_unit(), kValueStride);
            if (Number == kBatches / 2 - 1) {
                store_middle(sums);
                // The prefetch is not issued earlier because b and v are needed first. It replaces early loads because
                // a load issued after cp.async waits for the copies in flight.
                prefetch_l2<Keys, kWarpSize>(rows.a, first + step_of<0>(), left - step_of<0>(), lane_id(),
                                         16);
                prefetch_l2<Keys, kWarpSize>(rows.a, first + step_of<1>(), left - step_of<1>(), lane_id(),
                                         16);
            }
            add_batches<Number + 1>(sums, rows, first, left);
        }
    }

    // The warp's first units of a sum, and whether they exist.
    KGEN_DEVICE int first_key_unit() const { return warp_ / kValueWarps * kKeyTiles; }
    KGEN_DEVICE int first_value_unit() const { return warp_ % kValueWarps * kValuePairs; }
    KGEN_DEVICE bool has_sums() const {
        return (kKeyUnits % kKeyWarps == 0 || first_key_unit() < kKeyUnits) &&
               (kValueUnits % kValueWarps == 0 || first_value_unit() < kValueUnits);
    }

    KGEN_DEVICE void store_middle(const Sums& sums) const {
        if (!has_sums()) return;
        const int key = 16 * first_key_unit(), value = 16 * first_value_unit();
        sums.store(
            middle() + key * kValueStride + value, kValueStride,
            [&](int m, int n, int i) { return sums.at(m, n, i); },
            [&](int of_key, int of_value) {
                return (kKeyUnits % kKeyWarps == 0 || key + of_key < kKeys) &&
                       (kValueUnits % kValueWarps == 0 || value + of_value < BlockV);
            });
    }

    // The shared-memory map, see above.
    static KGEN_DEVICE T* b() { return dynamic_smem<T>(); }
    static KGEN_DEVICE T* v() { return b() + Segment * kKeyStride; }
    static KGEN_DEVICE T* middle() { return b() + kRows; }
    static KGEN_DEVICE T* before() { return middle() + kState; }

    int warp_;
};

}  // namespace kgen
