// All gradients of wkv7 by one loop over chunks of 32 steps, from the last chunk to the first; bf16 operands (wgmma,
// sm_90a), decays of the form clamp alone, up to 64 keys and value features. A block computes one head of one sequence.
// An earlier kernel has stored sa and the state before each chunk.
//
// Four warpgroups work at the same time, on two chunks:
//
//     producer    fused_producer.cuh    rows scaled by decays, scores
//     gradient    fused_gradient.cuh    the inverse, gsa, gv and G, which stays in its registers
//     late        fused_rows.cuh        gr, ga; half of gw (fused_sums.cuh)
//     early       fused_rows.cuh        gb, gk; the other half
//
// NaN and Inf: if a result is not finite, the block computes its sequence again, step by step.
//
// Shared memory: FusedTiles, from the next multiple of 1024 bytes on.
//
// Synchronisation: named barriers (fused_tiles.cuh). The producer starts the copies of r, k, a, b and w one chunk
// ahead, and the copies of v and gy when it begins the chunk's rows.
//
// Config: that of FusedTensors, plus kFinalState: whether the gradient of a final state may be given.
#pragma once

#include "kgen/wkv7/fused_gradient.cuh"
#include "kgen/wkv7/fused_producer.cuh"
#include "kgen/wkv7/fused_rows.cuh"
#include "kgen/wkv7/fused_sums.cuh"

namespace kgen::wkv7 {

template <class Config>
class FusedLoop {
public:
    using Tensors = FusedTensors<Config>;
    using Tiles = FusedTiles;
    static constexpr int kChunk = Tiles::kChunk, kThreads = 512;
    static constexpr int kSmemBytes = Tiles::kBytes + SwizzledPanels<8>::kBytes;
    static_assert(Config::kForm == DecayForm::clamp, "1 / P has a bound in this form alone");
    static_assert(Config::kK <= Tiles::kColumns && Config::kV <= Tiles::kColumns, "a panel has 64 columns");

    // tensors_of(block, N, T, H) returns the Tensors of a block. Each warpgroup calls it for itself, with an opaque
    // block number: otherwise the addresses of all tensors would take registers in all warpgroups. The step-by-step
    // repetition passes opaque N, T and H as well: with empty inline assembly alone, ptxas would find the same
    // products again and keep them in registers.
    template <class TensorsOf>
    static KGEN_DEVICE void run(i64 N, i64 T, i64 H, TensorsOf tensors_of) {
        const int group = warpgroup_rank();
        float nonfinite = 0.0f;  // becomes NaN if a result is not finite
        if (group == 0) {
            produce(tensors_of(own_block(), N, T, H));
        } else if (group == 1) {
            differentiate(tensors_of(own_block(), N, T, H), nonfinite);
        } else {
            compute(tensors_of(own_block(), N, T, H), group == 2, nonfinite);
        }
        if (block_any_nonfinite<kThreads / kWarpSize>(nonfinite)) {
            const u32 zero = static_cast<u32>(H >> 63);
            opaque(N, zero);
            opaque(T, zero);
            opaque(H, zero);
            tensors_of(own_block(), N, T, H).template step_by_step<kThreads>();
        }
    }

private:
    static KGEN_DEVICE Tiles tiles() { return {reinterpret_cast<bf16*>(align_panels(dynamic_smem<char>()))}; }
    static KGEN_DEVICE int own_block() { return opaque(static_cast<int>(blockIdx.x)); }
    // Chunks from the last to the first.
    struct Order {
        int chunks, last;  // steps of the last chunk in time

        KGEN_DEVICE explicit Order(i64 steps)
            : chunks(static_cast<int>(ceil_div(steps, i64{kChunk}))),
              last(static_cast<int>(steps - i64{chunks - 1} * kChunk)) {}
        // A chunk's number in time, its first step and its steps.
        KGEN_DEVICE int number(int chunk) const { return chunks - 1 - chunk; }
        KGEN_DEVICE i64 first(int chunk) const { return i64{number(chunk)} * kChunk; }
        KGEN_DEVICE int left(int chunk) const { return chunk == 0 ? last : kChunk; }
    };
    static KGEN_DEVICE void produce(const Tensors& x) {
        const Order order(x.steps);
        if (order.chunks == 0) return;
        FusedProducer<Tensors, Config::kVec> producer(tiles(), warp_in_warpgroup(), x, order.first(0));
        producer.copy_rows(0, order.left(0));
        cp_async_commit();
#pragma unroll 1
        for (int chunk = 0; chunk < order.chunks; ++chunk) {
            const int slot = Tiles::slot_of(chunk), next = Tiles::slot_of(chunk + 1), steps = order.left(chunk);
            if (chunk >= 2) named_barrier_sync(kFusedDone + (chunk & 1), 384);  // of the chunk before the previous one
            producer.copy_values(chunk, steps);
            cp_async_commit();
            if (chunk + 1 < order.chunks) {
                producer.copy_rows(next, kChunk);
                producer.prefetch(x, order.number(chunk + 1), order.first(chunk + 1));
            }
            cp_async_commit();
            cp_async_wait<2>();
            producer.put_rows(chunk, slot, steps);
            float sums[8][4];
            producer.multiply(slot, sums);
            typename FusedProducer<Tensors, Config::kVec>::Scores scores;
            producer.round_scores(scores, sums);
            if (chunk > 0) named_barrier_sync(kFusedConsumed, 256);  // of the previous chunk
            producer.put_scores(scores);
            cp_async_wait<1>();
            fence_proxy_async();
            named_barrier_arrive<256>(kFusedFull);
        }
        named_barrier_sync(kFusedConsumed, 256);  // each arrival needs a matching wait
        if (order.chunks > 1) named_barrier_sync(kFusedDone + (order.chunks & 1), 384);
        named_barrier_sync(kFusedDone + (order.chunks - 1 & 1), 384);
        cp_async_wait<0>();
    }

    static KGEN_DEVICE void differentiate(const Tensors& x, float& nonfinite) {
        const Order order(x.steps);
        if (order.chunks == 0) return;
        FusedGradient<Tensors> gradient(tiles(), warp_in_warpgroup(), x);
        float sa[4][4];
        gradient.load_sa(sa, order.first(0), order.left(0));
#pragma unroll 1
        for (int chunk = 0; chunk < order.chunks; ++chunk) {
            const i64 begin = order.first(chunk);
            u32 gsa[2][4], low_gsa[2][4];
            const int slot = Tiles::slot_of(chunk);
            float gv[4][4];
            named_barrier_sync(kFusedFull, 256);
            if (chunk > 0) named_barrier_sync(kFusedRead, 384);  // of the previous chunk
            gradient.begin(chunk, sa);
            named_barrier_arrive<384>(kFusedBegun);
            gradient.solve(chunk, slot, gsa, low_gsa, gv);
            named_barrier_arrive<384>(kFusedSolved);
            gradient.finish(chunk, slot, gsa, low_gsa, gv);
            named_barrier_arrive<256>(kFusedConsumed);
            if (chunk + 1 < order.chunks) gradient.load_sa(sa, order.first(chunk + 1), kChunk);
            named_barrier_sync(kFusedState, 384);
            gradient.put_end(chunk);
            named_barrier_arrive<256>(kFusedStateRead);
            named_barrier_arrive<384>(kFusedExchanged + (chunk & 1));
            gradient.write(begin, order.left(chunk), gv, nonfinite);
        }
        named_barrier_sync(kFusedRead, 384);
    }

    // The late and the early warpgroup share this code. `late`: whether the caller is the late one.
    static KGEN_DEVICE void compute(const Tensors& x, bool late, float& nonfinite) {
        const Order order(x.steps);
        if (order.chunks == 0) return;
        const FusedRows<Tensors> rows(tiles(), warp_in_warpgroup(), x, late);
        const FusedSums<Tensors> running(tiles(), warp_in_warpgroup(), x, late);
        const Rows<bf16> first = late ? x.gr : x.gb, second = late ? x.ga : x.gk;
        running.template begin<Config::kFinalState>(order.number(0), order.first(0), order.left(0));
        typename FusedRows<Tensors>::Line state;
        rows.load_state(state, order.number(0));
#pragma unroll 1
        for (int chunk = 0; chunk < order.chunks; ++chunk) {
            const i64 begin = order.first(chunk);
            const int left = order.left(chunk);
            float sums[8][4];
            u32 scores[4][4], low_scores[4][4], first_pairs[8], second_pairs[8];
            typename FusedSums<Tensors>::Logits w;
            rows.put_state(state);
            named_barrier_arrive<384>(kFusedState);
            named_barrier_sync(kFusedBegun, 384);
            named_barrier_sync(kFusedSolved, 384);
            rows.read(chunk, sums, scores, low_scores);
            const int slot = Tiles::slot_of(opaque(chunk));
            rows.add_steps(slot, sums, scores, low_scores);
            if (late) {
                named_barrier_sync(kFusedStateRead, 256);
                rows.template finish<true>(chunk, slot, sums, first_pairs, second_pairs);
            } else {
                rows.template finish<false>(chunk, slot, sums, first_pairs, second_pairs);
            }
            named_barrier_arrive<384>(kFusedDone + (chunk & 1));
            running.load(w, begin, left);
            if (chunk + 1 < order.chunks) rows.load_state(state, order.number(chunk + 1));
            rows.write(first, first_pairs, begin, left);
            rows.write(second, second_pairs, begin, left);
            named_barrier_sync(kFusedExchanged + (chunk & 1), 384);
            running.put(chunk, w, begin, left, nonfinite);
        }
    }
};

}  // namespace kgen::wkv7
