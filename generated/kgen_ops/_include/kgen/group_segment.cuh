// A segment of the steps of a linear recurrence in a block, its products by warpgroups (wgmma.cuh): see
// segment_walk.cuh, which says when what of this is called.
//
// Besides them there is one that waits for other blocks and gathers states (gathered_exchange.cuh); what is
// here those call that work, all but serve(). A warpgroup has two tiles of 64 steps, the long one, which
// looks back far, and the short one, so that all look back as often. All operands lie in shared memory, but
// the scores: they are sums of one product and an operand of the next as they lie in registers.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "bulk.cuh"
#include "chunk_mma.cuh"
#include "chunk_place.cuh"
#include "chunk_stage.cuh"
#include "fragment_write.cuh"
#include "gathered_exchange.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "wgmma.cuh"

namespace kgen {

// By the first `Threads` threads of a block: asynchronous copies of one tensor's rows to panels, 16 bytes
// each.
template <class T, int Width, int Rows, int Threads>
class PanelCopier {
    static constexpr int kPieces = (Width + 63) / 64 * 8;  // of a row
    static constexpr int kSweep = Threads / kPieces;       // rows
    static_assert(Threads % kPieces == 0 && kSweep % 8 == 0, "a thread's pieces swap places alike");

public:
    // Rows from step `first` on; of each `width` <= Width values exist, a multiple of eight.
    KGEN_DEVICE PanelCopier(const StepRows<const T>& source, i64 first, int width)
        : stride_(source.stride), row_(thread_rank() / kPieces) {
        const int piece = thread_rank() % kPieces;
        from_ = source.at(first + row_) + 8 * piece;
        to_ = Panels<Rows>::offset(row_, piece);
        idle_ = 8 * piece >= width;
    }

    // Rows [Begin, End) of the panels; those from `left` on are zeros. The caller closes the group.
    template <int Begin, int End>
    KGEN_DEVICE void start(T* panels, int left) const {
        static_assert((End - Begin) % kSweep == 0 && Begin % kSweep == 0, "whole sweeps");
        if (idle_) return;
#pragma unroll
        for (int row = Begin; row < End; row += kSweep)
            cp_async_or_zero<16>(panels + to_ + 64 * row, from_ + row * stride_, row_ + row < left);
    }

private:
    i64 stride_;
    const T* from_;
    int row_, to_;
    bool idle_;
};

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block; Segment: steps,
// for 128 of which there is a warpgroup; Batch: steps per group of copies, and per barrier of the sums;
// ScoreParts: numbers of 16 bits that a score is. T has 16 bits and the range of fp32 (bf16).
template <class T, int Keys, int Values, int Slice, int Segment, int Batch, int ScoreParts>
class GroupSegment {
    static constexpr int kGroups = Segment / 128;  // warpgroups
    static constexpr int kTiles = Segment / 64;    // of steps
    static constexpr int kBatches = Segment / Batch;
    static constexpr int kKeyPanels = (Keys + 63) / 64;

public:
    using Element = T;
    // Of three warpgroups each thread begins with a 384th of an SM's registers, in whole eights, and they
    // may have as many together afterwards: with more the kernel hangs. Two have room for more from the
    // start.
    static constexpr bool kSharesRegisters = kGroups == 2;
    static constexpr int kWorkerRegisters = 192, kServerRegisters = 120;
    static_assert(2 * kWorkerRegisters + kServerRegisters <= 3 * (65536 / 384 / 8 * 8),
                  "two warpgroups that work and one that serves have what the block began with");
    static constexpr int kWorkers = 128 * kGroups, kThreads = kWorkers + 128;
    static constexpr int kSegment = Segment;
    static constexpr int kFeatures = Keys, kValues = Values, kSlice = Slice;
    static constexpr int kKeys = 64 * kKeyPanels;  // of a sum

private:
    // Warpgroups along the features of a sum, and what each has of it.
    static constexpr int kKeyGroups = min(kGroups, kKeyPanels);
    static constexpr int kKeyTiles = kKeyPanels / kKeyGroups;      // of 64
    static constexpr int kWidth = Slice / (kGroups / kKeyGroups);  // value features
    static constexpr int kRows = Segment * (2 * kKeys + Slice);    // elements of shared memory
    using Half = HalfOperands<T>;
    using Tile = float[Slice / 8][4];
    using Sums = float[kKeyTiles][kWidth / 8][4];
    using Operand = PanelOperand<T, Segment>;

    static_assert(kGroups <= 2, "registers for more warpgroups than two would be too few");
    static_assert(kKeyPanels % kKeyGroups == 0, "a sum is whole tiles");
    static_assert(Slice % 64 == 0 && Slice <= 128 && kWidth >= 32, "a product's shape");
    static_assert(Keys % 8 == 0 && Values % 8 == 0, "rows are whole pieces");
    static_assert(Segment % Batch == 0 && Batch % 16 == 0, "a segment is whole batches");
    static_assert(ScoreParts == 1 || ScoreParts == 2, "a score, rounded, and what that leaves");

public:
    static constexpr int kBytes =
        (kRows + kKeys * Slice) * static_cast<int>(sizeof(T)) + Panels<8>::kBytes;
    // From the first on, that a walk step by step may take: the state before the segment stays.
    static constexpr int kFreeBytes = kRows * static_cast<int>(sizeof(T));

    template <int Blocks, bool Begins, bool Ends>
    using Exchange = GatheredExchange<T, Keys, Values, Slice, kWorkers, kThreads - kWorkers, Blocks,
                                      Begins, Ends>;

    KGEN_DEVICE GroupSegment() : group_(warpgroup_rank()) {}

    // A round. NaN if any output is not finite.
    template <class Round>
    KGEN_DEVICE float take_round(Round& round) {
        add_up(round);
        Tile outputs[2] = {};  // the long one, the short one
        look(outputs);
        round.exchange.take(round.number());
        return finish(outputs, round.has_state(), round.rows, round.first(), round.left());
    }

    // The same without outputs: the group goes on, and state_before() is whole.
    template <class Round>
    KGEN_DEVICE void take_sums(Round& round) {
        add_up(round);
        round.exchange.take(round.number());
    }

    // By the warps that do not work, in every round.
    template <class Round>
    KGEN_DEVICE void serve(Round& round) const {
        round.exchange.serve(before(), round.number(), round.is_last(), round.ends);
    }

    template <class Exchange>
    static KGEN_DEVICE const T* state_before(const Exchange&) {
        return before();
    }

private:
    // Shared memory, panels of T: b[Segment][kKeys], a[Segment][kKeys], v[Segment][Slice], and the state
    // before the segment [kKeys][Slice].
    static KGEN_DEVICE T* b() {
        return reinterpret_cast<T*>(panel_memory(dynamic_smem<char>()));
    }
    static KGEN_DEVICE T* a() { return b() + Segment * kKeys; }
    static KGEN_DEVICE T* v() { return b() + 2 * Segment * kKeys; }
    static KGEN_DEVICE T* before() { return b() + kRows; }

    static KGEN_DEVICE void sync_workers() { sync_named(2, kWorkers); }

    // The warpgroup's tiles of the segment, and its first features of a sum.
    template <int Which>
    KGEN_DEVICE int tile() const {
        return Which == 0 ? kTiles - 1 - group_ : group_;
    }
    KGEN_DEVICE int first_key() const { return group_ % kKeyGroups * 64 * kKeyTiles; }
    KGEN_DEVICE int first_value() const { return group_ / kKeyGroups * kWidth; }

    // Start all copies of the segment's rows: a group for each batch of b and v, then one for a.
    KGEN_DEVICE void stage(const WalkRows<T>& rows, i64 first, int left) const {
        if (kKeys > Keys || rows.values < Slice) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kRows; i += kWorkers) b()[i] = from_float<T>(0.0f);
            sync_workers();
        }
        stage_batches<0>(PanelCopier<T, kKeys, Segment, kWorkers>(rows.b, first, Keys),
                         PanelCopier<T, Slice, Segment, kWorkers>(rows.v, first, rows.values), left);
        PanelCopier<T, kKeys, Segment, kWorkers>(rows.a, first, Keys)
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

    // Add all steps as they arrive, and hand the sum out.
    template <class Round>
    KGEN_DEVICE void add_up(Round& round) {
        group_ = computed_here(group_);  // registers carry no address from one round to the next
        stage(round.rows, round.first(), round.left());
        Sums sums = {};
        add_batches<0>(sums);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) wgmma_wait<0>(sums[m]);
        hand_out(sums, round.exchange, round.number(), round.is_last());
        round.exchange.sums_written();
    }

    template <class Exchange>
    KGEN_DEVICE void hand_out(Sums& sums, const Exchange& exchange, int round, bool is_last) const {
        const int key = computed_here(first_key() + 16 * warp_of_group() + mma_lane().g);
        const int value = computed_here(first_value());
        if (exchange.goes_on(is_last))
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
                for (int n = 0; n < kWidth / 8; ++n) {
                    float(&tile)[4] = sums[m][n];
                    exchange.put_rests(round, key + 64 * m, value + 8 * n + 2 * mma_lane().q, tile);
#pragma unroll
                    for (int i = 0; i < 4; ++i) tile[i] = Exchange::past_half(tile[i]);
                }
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < kWidth / 8; n += 2)
                exchange.put(round, key + 64 * m, value + 8 * n + column_of_quad(), sums[m][n],
                             sums[m][n + 1]);
    }

    // All looks.
    KGEN_DEVICE void look(Tile (&outputs)[2]) const {
        cp_async_wait_all();
        fence_proxy_async();
        sync_workers();
        look_back<0>(outputs[0]);
        look_back<1>(outputs[1]);
    }

    // Add batches as they arrive, from this one on.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums) const {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - Number>();
            fence_proxy_async();
            sync_workers();
            const Operand keys(b(), Number * Batch, first_key());
            const Operand values(v(), Number * Batch, first_value());
#pragma unroll
            for (int m = 0; m < kKeyTiles; ++m) wgmma_fence(sums[m]);
#pragma unroll
            for (int step = 0; step < Batch; step += 16)
#pragma unroll
                for (int m = 0; m < kKeyTiles; ++m)
                    wgmma_64x16<kWidth, Along::rows, Along::rows>(
                        sums[m], keys.at(step, 64 * m), values.at(step, 0));
            wgmma_commit();
            add_batches<Number + 1>(sums);
        }
    }

    // O += A S if there is a state, and write: the long tile's rows while the short one's are multiplied. NaN
    // if any output is not finite.
    KGEN_DEVICE float finish(Tile (&outputs)[2], bool has_state, const WalkRows<T>& rows, i64 first,
                             int left) const {
        float poison = 0.0f;
        if (has_state) {
            const PanelOperand<T, kKeys> state(before(), 0, 0);
            wgmma_fence(outputs[0], outputs[1]);
            carry(outputs[0], Operand(a(), 64 * tile<0>(), 0), state);
            wgmma_commit();
            carry(outputs[1], Operand(a(), 64 * tile<1>(), 0), state);
            wgmma_commit();
            wgmma_wait<1>(outputs[0]);
            poison = write<0>(outputs[0], rows, first, left);
            wgmma_wait<0>(outputs[1]);
        } else {
            poison = write<0>(outputs[0], rows, first, left);
        }
        return poison + write<1>(outputs[1], rows, first, left);
    }

    static KGEN_DEVICE void carry(Tile& sums, const Operand& rows,
                                  const PanelOperand<T, kKeys>& state) {
#pragma unroll
        for (int key = 0; key < kKeys; key += 16)
            wgmma_64x16<Slice, Along::columns, Along::rows>(sums, rows.at(0, key),
                                                            state.at(key, 0));
    }

    template <int Which>
    KGEN_DEVICE float write(Tile& sums, const WalkRows<T>& rows, i64 first, int left) const {
        const int step = 64 * tile<Which>() + 16 * warp_of_group();
        return write_fragment<T, Values, Slice>(sums, rows, first + step, left - step);
    }

    // O += (A B^T) V over the tiles of b and v up to the own one, of which a step sees none that is later.
    // One product after the other: with the next tile's scores on their way beside O, registers are too
    // few, and the compiler takes all products of the kernel one by one.
    template <int Which>
    KGEN_DEVICE void look_back(Tile& sums) const {
        const Operand rows(a(), 64 * tile<Which>(), 0);
#pragma unroll 1
        for (int i = 0; i <= tile<Which>(); ++i) {
            float scores[8][4] = {};
            score(scores, rows, i);
            u32 parts[ScoreParts * 4][4];
            split_scores(parts, scores, i == tile<Which>());
            const Operand values(v(), 64 * i, 0);
            wgmma_fence(sums, parts);
#pragma unroll
            for (int k = 0; k < 4 * ScoreParts; ++k)
                wgmma_64x16<Slice, Along::rows>(sums, parts[k], values.at(16 * (k % 4), 0));
            wgmma_commit();
            wgmma_wait<0>(sums, parts);
        }
    }

    // A B^T with a tile of b.
    KGEN_DEVICE void score(float (&scores)[8][4], const Operand& rows, int other) const {
        const Operand keys(b(), 64 * other, 0);
        wgmma_fence(scores);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16)
            wgmma_64x16<64, Along::columns, Along::columns>(scores, rows.at(0, key),
                                                            keys.at(0, key));
        wgmma_commit();
        wgmma_wait<0>(scores);
    }

    // Scores as operands, low parts first; of a tile's own steps those beyond the diagonal are zeros.
    static KGEN_DEVICE void split_scores(u32 (&parts)[ScoreParts * 4][4], float (&scores)[8][4],
                                         bool own) {
        const MmaLane lane = mma_lane();
        const int row = 16 * warp_of_group() + lane.g;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float* two = scores[i / 2] + i % 2 * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (own && 8 * (i / 2) + 2 * lane.q + j > row + i % 2 * 8) two[j] = 0.0f;
            const u32 high = pack2<T>(two[0], two[1]);
            parts[i / 4 + 4 * (ScoreParts - 1)][i % 4] = high;
            if constexpr (ScoreParts == 2) {
                const f32x2 back = unpack2<T>(high);
                parts[i / 4][i % 4] = pack2<T>(two[0] - back.x, two[1] - back.y);
            }
        }
    }

    int group_;
};

}  // namespace kgen
