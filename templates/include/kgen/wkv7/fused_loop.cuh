// All gradients of wkv7 by one loop over chunks of 32 steps from the last to the first; bf16 operands (wgmma, sm_90a),
// decays of the form clamp alone, up to 64 keys and value features. A block has a head; the states before all chunks
// and sa are those of an earlier kernel.
//
// Four warpgroups work at once, on two chunks:
//
//     producer    fused_producer.cuh    rows with decays, scores and the inverse of a chunk, while others read the next
//     gradient    fused_gradient.cuh    gsa, gv and G, which neither of the others needs in memory
//     late        fused_rows.cuh        gr, ga
//     early       fused_rows.cuh        gb, gk; gw (fused_sums.cuh)
//
// NaN and Inf: where a result is not finite the block computes its sequence again, step by step.
//
// Shared memory: FusedTiles, from the next multiple of 1024 bytes on.
//
// Synchronisation: named barriers (fused_tiles.cuh). Inputs come by cp.async to the slots of rows, one chunk ahead; v
// and gy when the chunk before the last one is done.
#pragma once

#include "kgen/wkv7/fused_gradient.cuh"
#include "kgen/wkv7/fused_producer.cuh"
#include "kgen/wkv7/fused_rows.cuh"
#include "kgen/wkv7/fused_sums.cuh"

namespace kgen::wkv7 {

template <class Config, class State>
struct FusedLoop : FusedTensors<Config, State> {
    using Tensors = FusedTensors<Config, State>;
    using Tiles = FusedTiles;
    static constexpr int kChunk = Tiles::kChunk, kThreads = 512;
    static constexpr int kSmemBytes = Tiles::kBytes + SwizzledPanels<8>::kBytes;
    static_assert(Config::kForm == DecayForm::clamp, "1 / P has a bound in this form alone");
    static_assert(Config::kK <= Tiles::kColumns && Config::kV <= Tiles::kColumns, "a panel has 64 columns");

    KGEN_DEVICE void operator()() const {
        const int chunks = static_cast<int>(ceil_div(this->steps, i64{kChunk})), group = warpgroup_rank();
        if (chunks == 0) return;
        float nonfinite = 0.0f;  // becomes NaN if a result is not finite
        if (group == 0) {
            produce(chunks);
        } else if (group == 1) {
            differentiate(chunks, nonfinite);
        } else if (group == 2) {
            compute_late(chunks);
        } else {
            compute_early(chunks, nonfinite);
        }
        if (block_any_nonfinite<kThreads / kWarpSize>(nonfinite)) this->template step_by_step<kThreads>();
    }

private:
    static KGEN_DEVICE Tiles tiles() { return {reinterpret_cast<bf16*>(align_panels(dynamic_smem<char>()))}; }
    // The first step of a chunk, in the order of the loop; its steps.
    static KGEN_DEVICE i64 first(int chunk, int chunks) { return i64{chunks - 1 - chunk} * kChunk; }
    KGEN_DEVICE int left(int chunk, int chunks) const {
        return chunk == 0 ? static_cast<int>(this->steps - first(0, chunks)) : kChunk;
    }

    KGEN_DEVICE void produce(int chunks) const {
        FusedProducer<Tensors, Config::kVec> producer(tiles(), warp_in_warpgroup(), *this, first(0, chunks));
        producer.copy_rows(0, left(0, chunks));
        cp_async_commit();
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int next = Tiles::next_slot(slot), steps = left(chunk, chunks);
            if (chunk >= 2) named_barrier_sync(kFusedDone + (chunk & 1), 384);  // of the last chunk but one
            producer.copy_values(chunk, steps);
            cp_async_commit();
            if (chunk + 1 < chunks) producer.copy_rows(next, kChunk);
            cp_async_commit();
            cp_async_wait<2>();
            producer.put_rows(chunk, slot, steps);
            float sums[8][4];
            producer.multiply(slot, sums);
            typename FusedProducer<Tensors, Config::kVec>::Scores scores;
            producer.round_scores(scores, sums);
            if (chunk > 0) named_barrier_sync(kFusedConsumed, 256);  // of the chunk before
            producer.put_scores(scores);
            if (warp_in_warpgroup() == (chunk & 3)) producer.put_inverse();
            cp_async_wait<1>();
            fence_proxy_async();
            named_barrier_arrive<256>(kFusedFull);
            slot = next;
        }
        named_barrier_sync(kFusedConsumed, 256);  // each arrival has its wait
        if (chunks > 1) named_barrier_sync(kFusedDone + (chunks & 1), 384);
        named_barrier_sync(kFusedDone + (chunks - 1 & 1), 384);
        cp_async_wait<0>();
    }

    KGEN_DEVICE void differentiate(int chunks, float& nonfinite) const {
        FusedGradient<Tensors> gradient(tiles(), warp_in_warpgroup(), *this);
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const i64 begin = first(chunk, chunks);
            u32 x[4][4], low[4][4], gy[2][4], gsa[4][2], low_gsa[4][2];
            float gv[4][4];
            named_barrier_sync(kFusedFull, 256);
            if (chunk > 0) named_barrier_sync(kFusedRead, 384);  // of the chunk before
            gradient.begin(chunk, begin, x, low);
            named_barrier_arrive<384>(kFusedBegun);
            gradient.solve(chunk, slot, x, low, gy, gsa, low_gsa, gv);
            named_barrier_arrive<384>(kFusedSolved);
            gradient.finish(slot, gy, gsa, low_gsa, gv);
            named_barrier_arrive<256>(kFusedConsumed);
            gradient.write(begin, gv, nonfinite);
            gradient.put_end(chunk, chunks - 1 - chunk);
            named_barrier_arrive<384>(kFusedExchanged + (chunk & 1));
            slot = Tiles::next_slot(slot);
        }
        named_barrier_sync(kFusedRead, 384);
    }

    KGEN_DEVICE void compute_late(int chunks) const {
        const FusedRows<Tensors, true> rows(tiles(), warp_in_warpgroup(), *this);
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            float sums[8][4];
            u32 first_pairs[8], second_pairs[8];
            if (chunk > 0) named_barrier_sync(kFusedSummed, 256);  // of the chunk before
            rows.put_state(chunks - 1 - chunk);
            named_barrier_sync(kFusedLate, 128);
            compute(rows, chunk, slot, sums);
            named_barrier_sync(kFusedLate, 128);  // all warps have read S
            rows.finish(chunk, slot, sums, first_pairs, second_pairs);
            named_barrier_arrive<384>(kFusedExchanged + (chunk & 1));
            named_barrier_arrive<384>(kFusedDone + (chunk & 1));
            rows.write(this->gr, first_pairs, first(chunk, chunks), left(chunk, chunks));
            rows.write(this->ga, second_pairs, first(chunk, chunks), left(chunk, chunks));
            slot = Tiles::next_slot(slot);
        }
        named_barrier_sync(kFusedSummed, 256);
    }

    KGEN_DEVICE void compute_early(int chunks, float& nonfinite) const {
        const FusedRows<Tensors, false> rows(tiles(), warp_in_warpgroup(), *this);
        FusedSums<Tensors> running(tiles(), warp_in_warpgroup(), *this);
        if (Config::kFinalState && this->gfinal != nullptr)
            running.begin(chunks - 1, first(0, chunks), left(0, chunks));
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            float sums[8][4];
            u32 first_pairs[8], second_pairs[8];
            compute(rows, chunk, slot, sums);
            rows.finish(chunk, slot, sums, first_pairs, second_pairs);
            named_barrier_arrive<384>(kFusedDone + (chunk & 1));
            rows.write(this->gb, first_pairs, first(chunk, chunks), left(chunk, chunks));
            rows.write(this->gk, second_pairs, first(chunk, chunks), left(chunk, chunks));
            named_barrier_sync(kFusedExchanged + (chunk & 1), 384);
            running.put(chunk, first(chunk, chunks), left(chunk, chunks), nonfinite);
            slot = Tiles::next_slot(slot);
        }
    }

    template <class Rows>
    static KGEN_DEVICE void compute(const Rows& rows, int chunk, int slot, float (&sums)[8][4]) {
        u32 scores[4][4], low_scores[4][4];
        named_barrier_sync(kFusedBegun, 384);
        named_barrier_sync(kFusedSolved, 384);
        rows.read(chunk, sums, scores, low_scores);
        named_barrier_arrive<384>(kFusedRead);
        rows.add_steps(slot, sums, scores, low_scores);
    }
};

}  // namespace kgen::wkv7
