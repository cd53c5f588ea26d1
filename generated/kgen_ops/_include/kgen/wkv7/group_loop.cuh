// The forward loop of wkv7 by two warpgroups, in chunks of 32 steps: it computes y, or sa and the states before all
// chunks. bf16 operands (wgmma, sm_90a), decays of the form clamp alone, up to 64 keys. A block has up to 64 value
// features of a head.
//
// The producer warpgroup (group_producer.cuh) computes the rows scaled by decays and the scores of a chunk, while the
// consumer warpgroup computes the chunk before. The consumers hold the state in registers:
//
//     X  = A S + (A K^T) V
//     y  = R S + (R K^T) V + (R B^T) sa
//     S  = diag(P_32) (S + K^T V + B^T sa)
//
// sa = (I - A B^T)^-1 X is solved by blocks of 16 steps; L = A B^T has the blocks L11, L21 and L22. The consumer warps
// take turns in inverting both diagonal blocks (group_inverse.cuh):
//
//     sa_1 = (I - L11)^-1 X_1          sa_2 = (I - L22)^-1 (X_2 + L21 sa_1)
//
// The loop of sa and the states computes neither R nor y. All operands are bf16. Scores, the inverses and L21 have a
// low term; rows, the state, X and sa have as many terms as the Pass says (loop_passes.cuh). Sums are fp32.
//
// NaN and Inf: if an output is not finite, the block computes its sequence again, step by step, as specialized_loop.cuh
// does.
//
// Layout: S, X, sa and y are transposed accumulators: their rows are value features. The accumulators of one product
// become operand A of the next product in registers. Operands B are panels in shared memory; one wgmma reads a panel
// once for all four warps.
//
// Shared memory: GroupTiles, from the next multiple of 1024 bytes on.
//
// Synchronisation: each chunk passes two named barriers, where one warpgroup waits and the other one only arrives.
// After kFullBarrier consumers read a chunk. After kConsumedBarrier producers overwrite its scores and the slot of its
// rows. Inputs come by cp.async to the slots of rows, two chunks ahead; v comes one chunk ahead. Producers compute the
// logarithms of the next chunk's decays while wgmma computes scores.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_outputs.cuh"
#include "kgen/wkv7/group_inverse.cuh"
#include "kgen/wkv7/group_producer.cuh"

namespace kgen::wkv7 {

// Config: W; kForm: of the decays; kK; kVec: elements per copy. Pass: a forward loop by quotients, with exactly one
// output. State: dtype of the states in memory, one every StateSteps steps.
template <class Config, class Pass = ByQuotients<ForwardOutputs>, class State = float, int StateSteps = 16>
struct GroupLoop : ColumnTensors<bf16, typename Config::W, State, StateSteps> {
    using W = typename Config::W;
    using Half = HalfOperands<bf16>;
    using Tiles = GroupTiles;
    using Producer = GroupProducer<Pass, W, Config::kK, Config::kVec>;
    static constexpr int kChunk = Tiles::kChunk, kColumns = Tiles::kColumns, kThreads = 256, kKeys = Config::kK;
    static constexpr int kSmemBytes = Tiles::kBytes + SwizzledPanels<8>::kBytes;
    static_assert(Config::kForm == DecayForm::clamp, "1 / P has a bound in this form alone");
    static_assert(kKeys <= Tiles::kColumns, "a panel has 64 columns");
    static_assert(Pass::kQuotients && Pass::kFirst != Pass::kSecond && (!Pass::kFirst || StateSteps == kChunk),
                  "the state is in registers between two chunks alone");

    // start: a state [K, V] whose first column is the block's, or null: zeros.
    KGEN_DEVICE void operator()(const float* start) const {
        (*this)(start, [&] { run_steps<Pass::kSecond>(start, nullptr); });
    }

    // The same, but all threads call again() if an output of the block is not finite.
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

    // Computes the steps one by one. end: receives the state after them, or null. Second: whether they write y.
    template <bool Second>
    KGEN_DEVICE void run_steps(const float* start, float* end) const {
        this->template step_by_step<Direction::forward, Second, kKeys, kColumns>(start, end);
    }

private:
    using Accumulators = float[4][4];  // 16 value features, 32 steps
    template <Row Which>
    static constexpr int kLow = Tiles::kLow<Pass, Which>;

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
            if (chunk > 0) named_barrier_sync(kConsumedBarrier, kThreads);  // of the previous chunk
            producer.copy(slot_ahead);
            producer.put_scores(sums);
            fence_proxy_async();
            named_barrier_arrive<kThreads>(kFullBarrier);
            slot = next;
            slot_ahead = Tiles::next_slot(slot_ahead);
        }
        named_barrier_sync(kConsumedBarrier, kThreads);  // of the last chunk: each arrival needs a matching wait
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
            if constexpr (Pass::kFirst) sums_output(chunk).write_state(state);
            cp_async_wait<0>();
            named_barrier_sync(kFullBarrier, kThreads);  // all copies of v are there as well
            // These branches precede all products: if one warp branches while products are in flight, ptxas serialises
            // the products.
            if (warp == 0) {
                copy(chunk + 1);
            } else if (warp == slot + 1) {
                GroupInverse<GroupTiles>::put_blocks(tiles());
                fence_proxy_async();
            }
            Accumulators output;
            consume(chunk, slot, state, output);
            wgmma_wait<0>(state);
            named_barrier_arrive<kThreads>(kConsumedBarrier);
            decay_state(slot, state);
            write(chunk, output, nonfinite);
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

    // sums += x y^T. x: two operands A of 16 steps each; y: two terms.
    static KGEN_DEVICE void multiply_scores(Accumulators& sums, const u32 (&x)[2][4], const Tiles::ScoreOperand& y) {
#pragma unroll
        for (int term = 1; term >= 0; --term)
#pragma unroll
            for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::K>(sums, x[t], y.at(0, 32 * term + 16 * t));
    }
    // The same for one operand of 16 steps with one or two terms. The scores begin at `row` and `column`.
    template <int Steps, int Terms>
    static KGEN_DEVICE void multiply_block(float (&sums)[Steps / 8][4], const u32 (&x)[Terms][4],
                                           const Tiles::ScoreOperand& y, int row, int column) {
        wgmma_m64k16<Steps, Major::K>(sums, x[0], y.at(row, 32 + column));
#pragma unroll
        for (int term = Terms - 1; term >= 0; --term) wgmma_m64k16<Steps, Major::K>(sums, x[term], y.at(row, column));
    }
    // sums += x y^T over the keys, for one term of the state in x; y: 32 rows.
    static KGEN_DEVICE void multiply_rows(Accumulators& sums, const u32 (&x)[4 * Pass::kStateTerms][4], int term,
                                          const Tiles::RowOperand& y) {
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<32, Major::K>(sums, x[4 * term + t], y.at(0, 16 * t));
    }
    // state += x y for 32 steps; y: the rows of these steps.
    static KGEN_DEVICE void update(float (&state)[8][4], const u32 (&x)[2][4], const Tiles::RowOperand& y) {
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<64, Major::MN>(state, x[t], y.at(16 * t, 0));
    }
    // state += sa B for 16 steps, from `step` on. b, low: both terms of the rows of all steps.
    static KGEN_DEVICE void update_sums(float (&state)[8][4], const u32 (&sa)[Pass::kSumsTerms][4],
                                        const Tiles::RowOperand& b, const Tiles::RowOperand& low, int step) {
        if constexpr (Pass::kTermsB == 2) wgmma_m64k16<64, Major::MN>(state, sa[0], low.at(step, 0));
#pragma unroll
        for (int term = Pass::kSumsTerms - 1; term >= 0; --term)
            wgmma_m64k16<64, Major::MN>(state, sa[term], b.at(step, 0));
    }

    // Splits accumulators into operands A: all fragments of the high term, then all of the low term.
    template <int Fragments, int Tiles>
    static KGEN_DEVICE void split(u32 (&x)[Fragments][4], const float (&sums)[Tiles][4]) {
        constexpr int kTerms = 2 * Fragments / Tiles, kOfTerm = Tiles / 2;
#pragma unroll
        for (int t = 0; t < kOfTerm; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 terms[kTerms];
                split_bf16(sums[2 * t + i / 2][i % 2 * 2], sums[2 * t + i / 2][i % 2 * 2 + 1], terms);
#pragma unroll
                for (int term = 0; term < kTerms; ++term) x[kOfTerm * term + t][i] = terms[term];
            }
    }
    // Stores half of the output.
    static KGEN_DEVICE void put_half(Accumulators& output, int half, const float (&sums)[2][4]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) output[2 * half + i / 4][i % 4] = sums[i / 4][i % 4];
    }
    template <int Count>
    static KGEN_DEVICE void clear(float (&sums)[Count][4]) {
#pragma unroll
        for (int i = 0; i < 4 * Count; ++i) sums[i / 4][i % 4] = 0.0f;
    }

    // Computes y or sa of a chunk. `output` is complete on return; the last products that update the state are still in
    // flight.
    static KGEN_DEVICE void consume(int chunk, int slot, float (&state)[8][4], Accumulators& output) {
        constexpr bool kY = Pass::kSecond;
        constexpr int kTerms = Pass::kStateTerms;
        const Tiles from = tiles();
        u32 v[2][4], s[4 * kTerms][4];
        const u32 rank = static_cast<u32>(opaque(lane_id()));
        const bf16* values =
            from.values(chunk) + Tiles::ScorePanels::offset(static_cast<int>(rank % 8 + rank / 16 % 2 * 8),
                                                            2 * warp_in_warpgroup() + static_cast<int>(rank / 8 % 2));
#pragma unroll
        for (int t = 0; t < 2; ++t) ldmatrix<4, true>(v[t], values + 16 * 64 * t);
        split(s, state);
        named_barrier_sync(kInverseBarrier, 128);

        // 1. X, and y without its term from sa.
        Accumulators x;
        clear(x);
        if constexpr (kY) clear(output);
        fence(output, x, s, v, state);
        multiply_scores(x, v, from.score_operand(Tiles::kScoreAK));
        if constexpr (Pass::kTermsA == 2) multiply_rows(x, s, 0, from.row_operand(slot, kLow<kRowA>));
#pragma unroll
        for (int term = kTerms - 1; term >= 0; --term) multiply_rows(x, s, term, from.row_operand(slot, Tiles::kA));
        wgmma_commit();
        if constexpr (kY) {
            multiply_scores(output, v, from.score_operand(Tiles::kScoreRK));
            multiply_rows(output, s, 0, from.row_operand(slot, kLow<kRowR>));
            multiply_rows(output, s, 0, from.row_operand(slot, Tiles::kR));
            wgmma_commit();
        }

        // 2. sa of the first 16 steps; meanwhile the state gets K^T v.
        const auto inverse = from.score_operand(Tiles::kInverse), of_sa = from.score_operand(Tiles::kScoreRB);
        const auto updates = from.row_operand(slot, Tiles::kB), low_updates = from.row_operand(slot, kLow<kRowB>);
        u32 sa[2][Pass::kSumsTerms][4], own[Pass::kReadTerms][4];
        float sums[2][4];
        wgmma_wait<kY ? 1 : 0>(x);
        split(own, first_tiles<2>(x));
        clear(sums);
        wgmma_fence(sums, own);
        multiply_block<16>(sums, own, inverse, 0, 0);
        wgmma_commit();
        update(state, v, from.row_operand(slot, kLow<kRowK>));
        update(state, v, from.row_operand(slot, Tiles::kK));
        wgmma_commit();

        // 3. The product of L21 and this sa, for X of the later 16 steps; meanwhile this sa is applied to y and the
        // state.
        wait<1>(output, sums, s, own);
        if constexpr (!kY) put_half(output, 0, sums);
        split(sa[0], sums);
        clear(sums);
        fence(output, sums, sa[0]);
        multiply_block<16>(sums, sa[0], inverse, 16, 0);
        wgmma_commit();
        if constexpr (kY) multiply_block<32>(output, sa[0], of_sa, 0, 0);
        update_sums(state, sa[0], updates, low_updates, 0);
        wgmma_commit();

        // 4. sa of the later 16 steps.
        wgmma_wait<1>(sums, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] += x[2 + i / 4][i % 4];
        split(own, sums);
        clear(sums);
        wgmma_fence(sums, own);
        multiply_block<16>(sums, own, inverse, 16, 16);
        wgmma_commit();

        // 5. This sa is applied to y and the state.
        wait<0>(output, sums, own, state, sa[0]);
        if constexpr (!kY) put_half(output, 1, sums);
        split(sa[1], sums);
        fence(output, sa[1]);
        if constexpr (kY) {
            multiply_block<32>(output, sa[1], of_sa, 0, 16);
            wgmma_commit();
        }
        update_sums(state, sa[1], updates, low_updates, 16);
        wgmma_commit();
        if constexpr (kY) wgmma_wait<1>(output);
    }

    // wgmma_fence and wgmma_wait. They include `output` where it is y, which products accumulate into; sa is a copy.
    template <class... Registers>
    static KGEN_DEVICE void fence(Accumulators& output, Registers&... registers) {
        if constexpr (Pass::kSecond) {
            wgmma_fence(registers..., output);
        } else {
            wgmma_fence(registers...);
        }
    }
    template <int Pending, class... Registers>
    static KGEN_DEVICE void wait(Accumulators& output, Registers&... registers) {
        if constexpr (Pass::kSecond) {
            wgmma_wait<Pending>(registers..., output);
        } else {
            wgmma_wait<Pending>(registers...);
        }
    }

    KGEN_DEVICE auto sums_output(int chunk) const {
        return SumsOutput<kKeys, Config::kVec, Direction::forward, State, StateSteps>(
            *this, 16 * warp_in_warpgroup(), i64{chunk} * kChunk);
    }

    KGEN_DEVICE void write(int chunk, Accumulators& output, float& nonfinite) const {
        // The output's addresses are computed only here: kept longer, they would take registers that the inverse needs.
        if constexpr (Pass::kSecond) {
            ColumnOutput<Config::kVec, Direction::forward> outputs(*this, 16 * warp_in_warpgroup(),
                                                                   i64{chunk} * kChunk);
            write_halves(outputs, output, nonfinite);
        } else {
            auto outputs = sums_output(chunk);
            write_halves(outputs, output, nonfinite);
        }
    }
    template <class Outputs>
    static KGEN_DEVICE void write_halves(Outputs& outputs, const Accumulators& output, float& nonfinite) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sixteen[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) sixteen[i / 4][i % 4] = output[2 * half + i / 4][i % 4];
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
