// wkv7 forward by two warpgroups, in chunks of 32 steps; bf16 operands (wgmma, sm_90a), decays of the form clamp
// alone, up to 64 keys. A block has up to 64 value features of a head.
//
// The producer warpgroup (group_producer.cuh) computes rows with decays and scores of a chunk, while the consumer
// warpgroup computes the chunk before. That has the state in registers:
//
//     X  = A S + (A K^T) V
//     y  = R S + (R K^T) V + (R B^T) sa
//     S  = diag(P_32) (S + K^T V + B^T sa)
//
// sa = (I - A B^T)^-1 X by blocks of 16 steps, of which L = A B^T has L11, L21 and L22. Consumer warps take turns with
// both inverses (group_inverse.cuh):
//
//     sa_1 = (I - L11)^-1 X_1          sa_2 = (I - L22)^-1 (X_2 + L21 sa_1)
//
// Rows, the state, X and sa are rounded to bf16 as operands; R, scores, the inverses and L21 have a low term. Sums are
// fp32.
//
// NaN and Inf: as in specialized_loop.cuh. Where an output is not finite the block computes its sequence again, step
// by step.
//
// Layout: S, X, sa and y are transposed accumulators, whose rows are value features. Those of one product become
// operand A of the next one in registers. Operands B are panels in shared memory, which the four warps of a product
// read once.
//
// Shared memory: GroupTiles, from the next multiple of 1024 bytes on.
//
// Synchronisation: at two named barriers per chunk one warpgroup waits, and the other one arrives: at kFullBarrier,
// from which on consumers read a chunk, and at kConsumedBarrier, from which on producers overwrite its scores and the
// slot of its rows. Inputs come by cp.async to the slots of rows, two chunks ahead; v comes one chunk ahead. Producers
// compute the logarithms of the next chunk's decays while wgmma computes scores.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_outputs.cuh"
#include "kgen/wkv7/group_inverse.cuh"
#include "kgen/wkv7/group_producer.cuh"

namespace kgen::wkv7 {

// A Config has W; kForm: of the decays; kK; kVec: elements per copy.
template <class Config>
struct GroupLoop : ColumnTensors<bf16, typename Config::W> {
    using W = typename Config::W;
    using Half = HalfOperands<bf16>;
    using Tiles = GroupTiles;
    using Producer = GroupProducer<W, Config::kK, Config::kVec>;
    static constexpr int kChunk = Tiles::kChunk, kColumns = Tiles::kColumns, kThreads = 256, kKeys = Config::kK;
    static constexpr int kSmemBytes = Tiles::kBytes + SwizzledPanels<8>::kBytes;
    static_assert(Config::kForm == DecayForm::clamp, "1 / P has a bound in this form alone");
    static_assert(kKeys <= Tiles::kColumns, "a panel has 64 columns");

    // start: a state [K, V] whose first column is the block's, or null: zeros.
    KGEN_DEVICE void operator()(const float* start) const {
        (*this)(start, [&] { run_steps<true>(start, nullptr); });
    }

    // The same, with again() by all threads where an output of the block is not finite.
    template <class Again>
    KGEN_DEVICE void operator()(const float* start, Again again) const {
        const int chunks = static_cast<int>(ceil_div(this->steps, i64{kChunk}));
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        if (warpgroup_rank() == 0) {
            consume_all(start, chunks, nonfinite);
        } else {
            produce_all(chunks);
        }
        if (block_any_nonfinite<kThreads / kWarpSize>(nonfinite)) again();
    }

    // The steps one by one. end: the state after them, or null. Second: whether they write y.
    template <bool Second>
    KGEN_DEVICE void run_steps(const float* start, float* end) const {
        this->template step_by_step<Direction::forward, Second, kKeys, kColumns>(start, end);
    }

private:
    using Accumulators = float[4][4];  // of 16 value features and 32 steps

    static KGEN_DEVICE Tiles tiles() { return {reinterpret_cast<bf16*>(align_panels(dynamic_smem<char>()))}; }

    KGEN_DEVICE void produce_all(int chunks) const {
        if (chunks == 0) return;
        Producer producer(tiles(), warp_in_warpgroup(), this->steps, this->r, this->k, this->a, this->b, this->w);
        typename Producer::Logs logs;
        producer.template put_totals<3>(0, logs);
        int slot = 0, slot_ahead = 2;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int next = Tiles::next_slot(slot);
            producer.put_rows(slot, logs);
            float sums[8][4];
            u32 x[4][4];
            producer.start_scores(slot, x, sums);
            producer.template put_totals<1>(next, logs);  // without a branch; after the last chunk nothing reads them
            wgmma_wait<0>(sums, x);
            if (chunk > 0) named_barrier_sync(kConsumedBarrier, kThreads);  // of the chunk before
            producer.copy(slot_ahead);
            producer.put_scores(sums);
            fence_proxy_async();
            named_barrier_arrive<kThreads>(kFullBarrier);
            slot = next;
            slot_ahead = Tiles::next_slot(slot_ahead);
        }
        named_barrier_sync(kConsumedBarrier, kThreads);  // of the last one: each arrival has its wait
    }

    KGEN_DEVICE void consume_all(const float* start, int chunks, float& nonfinite) const {
        float state[8][4];
        load_state(start, state);
        const int warp = warp_in_warpgroup();
        GroupCopier<bf16, Config::kVec, kChunk, kWarpSize> copier(this->c, 0, lane_id());
        const auto copy = [&](int chunk) {
            const i64 left = this->steps - i64{chunk} * kChunk;
            if (left > 0) copier.start(tiles().values(chunk), static_cast<int>(min(left, i64{kChunk})), this->width);
            cp_async_commit();
        };
        if (warp == 0) copy(0);
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            cp_async_wait<0>();
            named_barrier_sync(kFullBarrier, kThreads);  // all copies of v are there as well
            // Before all products: where one warp branches meanwhile, ptxas lets each product wait for the one before.
            if (warp == 0) {
                copy(chunk + 1);
            } else if (warp == slot + 1) {
                GroupInverse<GroupTiles>::put_blocks(tiles());
                fence_proxy_async();
            }
            Accumulators y;
            consume(chunk, slot, state, y);
            wgmma_wait<0>(state);
            named_barrier_arrive<kThreads>(kConsumedBarrier);
            decay_state(slot, state);
            write(chunk, y, nonfinite);
            slot = Tiles::next_slot(slot);
        }
    }

    KGEN_DEVICE void load_state(const float* start, float (&state)[8][4]) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < 8; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + 2 * lane.q + i % 2;
                const int column = 16 * warp_in_warpgroup() + lane.g + i / 2 * 8;
                const bool used = start != nullptr && key < kKeys && column < this->width;
                state[tile][i] = used ? start[key * this->pitch + column] : 0.0f;
            }
    }

    // sums += x y^T for two operands A of 16 steps each; y of two terms.
    static KGEN_DEVICE void multiply_scores(Accumulators& sums, const u32 (&x)[2][4], const Tiles::ScoreOperand& y) {
#pragma unroll
        for (int term = 1; term >= 0; --term)
#pragma unroll
            for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::K>(sums, x[t], y.at(0, 32 * term + 16 * t));
    }
    // The same for one operand, from row and column `row` and `column` of the scores on.
    template <int Steps>
    static KGEN_DEVICE void multiply_block(float (&sums)[Steps / 8][4], const u32 (&x)[4],
                                           const Tiles::ScoreOperand& y, int row, int column) {
#pragma unroll
        for (int term = 1; term >= 0; --term) wgmma_m64k16<Steps, Major::K>(sums, x, y.at(row, 32 * term + column));
    }
    // sums += x y^T over the keys; y: 32 rows.
    static KGEN_DEVICE void multiply_rows(Accumulators& sums, const u32 (&x)[4][4], const Tiles::RowOperand& y) {
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<32, Major::K>(sums, x[t], y.at(0, 16 * t));
    }
    // state += x y for 32 steps; y: their rows.
    static KGEN_DEVICE void update(float (&state)[8][4], const u32 (&x)[2][4], const Tiles::RowOperand& y) {
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<64, Major::MN>(state, x[t], y.at(16 * t, 0));
    }

    // Operands A of all columns of accumulators.
    template <int Fragments>
    static KGEN_DEVICE void round(u32 (&x)[Fragments][4], const float (&sums)[2 * Fragments][4]) {
#pragma unroll
        for (int t = 0; t < Fragments; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[t][i] = pack2<bf16>(sums[2 * t + i / 2][i % 2 * 2], sums[2 * t + i / 2][i % 2 * 2 + 1]);
    }
    static KGEN_DEVICE void round_block(u32 (&x)[4], const float (&sums)[2][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack2<bf16>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    }
    template <int Count>
    static KGEN_DEVICE void clear(float (&sums)[Count][4]) {
#pragma unroll
        for (int i = 0; i < 4 * Count; ++i) sums[i / 4][i % 4] = 0.0f;
    }

    // y is complete at the end; the last products with the state are not.
    static KGEN_DEVICE void consume(int chunk, int slot, float (&state)[8][4], Accumulators& y) {
        const Tiles from = tiles();
        u32 v[2][4], s[4][4];
        const u32 rank = static_cast<u32>(opaque(lane_id()));
        const bf16* values =
            from.values(chunk) + Tiles::ScorePanels::offset(static_cast<int>(rank % 8 + rank / 16 % 2 * 8),
                                                            2 * warp_in_warpgroup() + static_cast<int>(rank / 8 % 2));
#pragma unroll
        for (int t = 0; t < 2; ++t) ldmatrix<4, true>(v[t], values + 16 * 64 * t);
        round(s, state);
        named_barrier_sync(kInverseBarrier, 128);

        // 1. What the chunk reads of v and of the state.
        Accumulators x;
        clear(x);
        clear(y);
        wgmma_fence(x, y, s, v, state);
        multiply_scores(x, v, from.score_operand(Tiles::kScoreAK));
        multiply_rows(x, s, from.row_operand(slot, Tiles::kA));
        wgmma_commit();
        multiply_scores(y, v, from.score_operand(Tiles::kScoreRK));
        multiply_rows(y, s, from.row_operand(slot, Tiles::kRLow));
        multiply_rows(y, s, from.row_operand(slot, Tiles::kR));
        wgmma_commit();

        // 2. sa of the first 16 steps, and what the state gets of v meanwhile.
        const auto inverse = from.score_operand(Tiles::kInverse), of_sa = from.score_operand(Tiles::kScoreRB);
        const auto updates = from.row_operand(slot, Tiles::kB);
        u32 sa[2][4], own[4];
        float sums[2][4];
        wgmma_wait<1>(x);
        round_block(own, first_tiles<2>(x));
        clear(sums);
        wgmma_fence(sums, own);
        multiply_block<16>(sums, own, inverse, 0, 0);
        wgmma_commit();
        update(state, v, from.row_operand(slot, Tiles::kKLow));
        update(state, v, from.row_operand(slot, Tiles::kK));
        wgmma_commit();

        // 3. X of the later 16 steps gets what they read of that sa; what y and the state get of it meanwhile.
        wgmma_wait<1>(sums, y, s, own);
        round_block(sa[0], sums);
        clear(sums);
        wgmma_fence(sums, sa[0], y);
        multiply_block<16>(sums, sa[0], inverse, 16, 0);
        wgmma_commit();
        multiply_block<32>(y, sa[0], of_sa, 0, 0);
        wgmma_m64k16<64, Major::MN>(state, sa[0], updates);
        wgmma_commit();

        // 4. sa of the later steps.
        wgmma_wait<1>(sums, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] += x[2 + i / 4][i % 4];
        round_block(own, sums);
        clear(sums);
        wgmma_fence(sums, own);
        multiply_block<16>(sums, own, inverse, 16, 16);
        wgmma_commit();

        // 5. y and the state.
        wgmma_wait<0>(sums, own, y, state, sa[0]);
        round_block(sa[1], sums);
        wgmma_fence(sa[1], y);
        multiply_block<32>(y, sa[1], of_sa, 0, 16);
        wgmma_commit();
        wgmma_m64k16<64, Major::MN>(state, sa[1], updates.at(16, 0));
        wgmma_commit();
        wgmma_wait<1>(y);
    }

    KGEN_DEVICE void write(int chunk, Accumulators& y, float& nonfinite) const {
        // Its places take registers that the inverse needs.
        ColumnOutput<Config::kVec, Direction::forward> outputs(*this, 16 * warp_in_warpgroup(), i64{chunk} * kChunk);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sixteen[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) sixteen[i / 4][i % 4] = y[2 * half + i / 4][i % 4];
            outputs.write(sixteen, nonfinite);
        }
    }

    static KGEN_DEVICE void decay_state(int slot, float (&state)[8][4]) {
        const float* decay = tiles().decay(slot) + 2 * (opaque(lane_id()) % 4);
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const auto d = *reinterpret_cast<const Vec<float, 2>*>(decay + 8 * tile);
#pragma unroll
            for (int i = 0; i < 4; ++i) state[tile][i] *= d[i % 2];
        }
    }
};

}  // namespace kgen::wkv7
