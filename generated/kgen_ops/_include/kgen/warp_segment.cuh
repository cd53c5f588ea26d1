// A segment of the steps of a linear recurrence in a block, its products by warps: see segment_walk.cuh,
// which says when what of this is called.
//
// A warp has two fragments of 16 steps of one half of the segment (paired_rows.cuh): the long one, which
// looks back far, and the short one. So all warps look back as often, at each barrier, too. What half a
// segment adds is a state for the other half, so that no step looks back farther than half a segment.
#pragma once

#include "ask_for.cuh"
#include "async.cuh"
#include "block.cuh"
#include "chunk_place.cuh"
#include "chunk_stage.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "paired_rows.cuh"
#include "registers.cuh"
#include "scanned_exchange.cuh"
#include "state_tile.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block; Segment: steps,
// for 32 of which there is a warp; Batch: steps per group of copies, and per barrier of the sums;
// CopyBytes: of one copy; ScoreParts: of PairedRows. T has 16 bits and the range of fp32 (bf16).
template <class T, int Keys, int Values, int Slice, int Segment, int Batch, int CopyBytes,
          int ScoreParts>
class WarpSegment {
    static constexpr int kWarps = Segment / 32;
    static constexpr int kHalf = Segment / 2;
    static constexpr int kBatches = Segment / Batch;

public:
    using Element = T;
    static constexpr int kThreads = kWarps * kWarpSize, kWorkers = kThreads;
    static constexpr int kSegment = Segment;
    static constexpr int kFeatures = Keys, kValues = Values, kSlice = Slice;
    static constexpr int kKeys = whole_fragments(Keys);  // of a sum

private:
    using Rows = PairedRows<T, Keys, Values, Slice, CopyBytes, ScoreParts>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    // Warps along the features of a sum, and their fragments of 16.
    static constexpr int kValueWarps = kWarps >= 16 ? 4 : kWarps >= 4 ? 2 : 1;
    static constexpr int kKeyWarps = kWarps / kValueWarps;
    static constexpr int kAcross = kKeys / 16, kAlong = Slice / 16;  // of a whole sum
    static constexpr int kKeyTiles = (kAcross + kKeyWarps - 1) / kKeyWarps;
    static constexpr int kValuePairs = (kAlong + kValueWarps - 1) / kValueWarps;
    // Half of the looks, as a long fragment has at least.
    static constexpr int kFirstLooks = kWarps / 2 + 1;
    // Elements of shared memory.
    static constexpr int kRows = Segment * (kKeyStride + kValueStride);
    static constexpr int kState = kKeys * kValueStride;

    static_assert(is_power_of_two(kWarps) && kWarps >= 2, "warps are rows and columns of a sum");
    static_assert(kHalf % Batch == 0 && Batch % 16 == 0, "half a segment is whole batches");

public:
    static constexpr int kBytes = (kRows + 2 * kState) * static_cast<int>(sizeof(T));
    static constexpr int kFreeBytes = kBytes;  // from the first on, that a walk step by step may take

    template <int Blocks, bool Begins, bool>
    using Exchange = ScannedExchange<T, Keys, Values, Slice, kThreads, Blocks, Begins, kBytes>;

private:
    using Sums = StateTile<T, kKeyTiles, kValuePairs, Batch>;
    using Outputs = Rows;

public:
    KGEN_DEVICE WarpSegment() : warp_(thread_rank() / kWarpSize) {}

    // Another round: registers carry no address to it.
    KGEN_DEVICE void begin_again() { warp_ = computed_here(warp_); }

    // A round. NaN if any output is not finite.
    template <class Round>
    KGEN_DEVICE float take_round(Round& round) {
        warp_ = computed_here(warp_);  // registers carry no address from one round to the next
        Outputs outputs;
        {
            Sums sums;
            stage(round.rows, round.first(), round.left());
            add_batches<0>(sums, round.rows, round.first(), round.left());
            read<0>(outputs, round.rows, round.first(), round.left());
            hand_out(sums, round.exchange);
        }
        round.exchange.sums_written();
        outputs.template arrange<0>();
        look_back<0>(outputs, 0, kFirstLooks);
        round.exchange.wait_for_sums();
        round.exchange.scan();
        round.exchange.states_written();
        look_on(outputs, round.rows, round.first(), round.left());
        // All has been looked at, and the state is wanted.
        round.exchange.template begin_to_take<kValueStride>(before());
        if (half() == 1) outputs.carry(middle());
        round.exchange.take();
        if (round.has_state()) outputs.carry(before());
        const float poison = write<0>(outputs, round.rows, round.first(), round.left());
        return poison + write<1>(outputs, round.rows, round.first(), round.left());
    }

    // The same without outputs: the group goes on, and state_before() is whole.
    template <class Round>
    KGEN_DEVICE void take_sums(Round& round) {
        warp_ = computed_here(warp_);
        Sums sums;
        stage(round.rows, round.first(), round.left());
        add_batches<0>(sums, round.rows, round.first(), round.left());
        hand_out(sums, round.exchange);
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
    // Start all copies of the segment's rows, a group for each batch.
    KGEN_DEVICE void stage(const WalkRows<T>& rows, i64 first, int left) const {
        const bool ragged = kKeys > Keys || rows.values < Slice;
        if (ragged) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kRows; i += kThreads) b()[i] = from_float<T>(0.0f);
            sync_block();
        }
        ChunkCopier<T, Batch, Keys, CopyBytes, kThreads> copy_b(rows.b, first, Keys);
        ChunkCopier<T, Batch, Slice, CopyBytes, kThreads> copy_v(rows.v, first, rows.values);
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
    KGEN_DEVICE void hand_out(const Sums& sums, const Exchange& exchange) const {
        if (!has_sums()) return;
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
                exchange.put(across, along, n % 2, tile);
            }
    }

    // Looks while the group's states are on their way.
    KGEN_DEVICE void look_on(Outputs& outputs, const WalkRows<T>& rows, i64 first, int left) const {
        read<1>(outputs, rows, first, left);
        look_back<0>(outputs, kFirstLooks, fragment<0>() + 1);
        outputs.template arrange<1>();
        look_back<1>(outputs, 0, fragment<1>() + 1);
    }

    // The warp's half of the segment, and its fragments among those of it: the long one, then the short one.
    // Over both all warps have kWarps + 1 looks. Halves are of neighbouring warps, so that each of an SM's
    // four schedulers has as many warps of either.
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
    KGEN_DEVICE void read(Outputs& outputs, const WalkRows<T>& rows, i64 first, int left) const {
        outputs.template read<Which>(rows.a, first + step_of<Which>(), left - step_of<Which>());
    }

    // Looks `from` to `to` of a fragment, of fragment() + 1.
    template <int Which>
    KGEN_DEVICE void look_back(Outputs& outputs, int from, int to) const {
        outputs.template look_back<Which>(b() + half() * kHalf * kKeyStride,
                                          v() + half() * kHalf * kValueStride, fragment<Which>(),
                                          from, to);
    }

    template <int Which>
    KGEN_DEVICE float write(Outputs& outputs, const WalkRows<T>& rows, i64 first,
                            int left) const {
        return outputs.template write<Which>(rows, first + step_of<Which>(),
                                             left - step_of<Which>());
    }

    // Add batches as they arrive, from this one on. What the first half of them adds is kept for the other.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums, const WalkRows<T>& rows, i64 first, int left) const {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - 1 - Number>();
            sync_block();
            if (has_sums())
                sums.add(b() + Number * Batch * kKeyStride + 16 * first_across(), kKeyStride,
                         v() + Number * Batch * kValueStride + 16 * first_along(), kValueStride);
            if (Number == kBatches / 2 - 1) {
                keep_middle(sums);
                // Not before, for b and v are wanted first; and loads would wait behind all their copies.
                ask_for<Keys, kWarpSize>(rows.a, first + step_of<0>(), left - step_of<0>(), lane_id(),
                                         16);
                ask_for<Keys, kWarpSize>(rows.a, first + step_of<1>(), left - step_of<1>(), lane_id(),
                                         16);
            }
            add_batches<Number + 1>(sums, rows, first, left);
        }
    }

    // The warp's first fragments of a sum, and whether they exist.
    KGEN_DEVICE int first_across() const { return warp_ / kValueWarps * kKeyTiles; }
    KGEN_DEVICE int first_along() const { return warp_ % kValueWarps * kValuePairs; }
    KGEN_DEVICE bool has_sums() const {
        return (kAcross % kKeyWarps == 0 || first_across() < kAcross) &&
               (kAlong % kValueWarps == 0 || first_along() < kAlong);
    }

    KGEN_DEVICE void keep_middle(const Sums& sums) const {
        if (!has_sums()) return;
        const int key = 16 * first_across(), value = 16 * first_along();
        sums.store(
            middle() + key * kValueStride + value, kValueStride,
            [&](int m, int n, int i) { return sums.at(m, n, i); },
            [&](int of_key, int of_value) {
                return (kAcross % kKeyWarps == 0 || key + of_key < kKeys) &&
                       (kAlong % kValueWarps == 0 || value + of_value < Slice);
            });
    }

    // Shared memory: T b[Segment][kKeyStride], v[Segment][kValueStride], and [kKeys][kValueStride] what the
    // segment's first half adds, and the state before the segment.
    static KGEN_DEVICE T* b() { return dynamic_smem<T>(); }
    static KGEN_DEVICE T* v() { return b() + Segment * kKeyStride; }
    static KGEN_DEVICE T* middle() { return b() + kRows; }
    static KGEN_DEVICE T* before() { return middle() + kState; }

    int warp_;
};

}  // namespace kgen
