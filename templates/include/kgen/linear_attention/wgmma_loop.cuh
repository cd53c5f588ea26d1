// wgmma_split_bf16: a linear recurrence over the steps of one head in fp32, with wgmma on bf16 terms (sm_90a).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// An fp32 number is the sum of two or three bf16 terms (split_bf16.cuh). A CTA loops over chunks of 64 steps with
// three warpgroups:
//
//     output warpgroup  computes scores a b^T, a S and scores v. It reads rows of a from shared memory and
//                       splits them into operands in registers.
//     state warpgroup   keeps S in registers, adds b^T v of each chunk, and stores the terms of S before each
//                       chunk as panels.
//     split warpgroup   loads rows of b and v, splits them and stores the terms as panels. Two chunks later it
//                       writes the outputs of a chunk from shared memory to global memory, whole lines.
//
// Only the sum of states is serial. The output warpgroup has three of the four products, so any other work in it
// would cost tensor-core time; therefore another warpgroup splits rows and writes outputs.
//
// Accuracy: the sum of a chunk's products starts at zero, smallest terms first, and is added to the other sums in
// fp32, because tensor cores truncate (mma.cuh). If any output is NaN or infinite, the CTA computes all steps
// again, step by step (step_by_step.cuh).
//
// Layout: panels are SwizzledPanels of bf16 (wgmma.cuh), 64 x 64 per term; rows of fp32 are kStride apart.
//
// Shared memory: panels b[2][Terms], v[2][Terms], state before a chunk[2][Terms]; fp32 rows a[64][kStride],
// outputs[2][64][kStride].
//
// Synchronisation: three double buffers (mbarrier_double_buffer.cuh), indexed by the chunk: `rows` (split ->
// output and state), `states` (state -> output), `outputs` (output -> split). The output warpgroup has a named
// barrier (1) of its own for the rows of a.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/primitives/mbarrier_double_buffer.cuh"
#include "kgen/primitives/wgmma.cuh"

namespace kgen {

// Keys <= 64, Values: features of a and b, and of v and out. Terms: bf16 terms of an fp32 number. Vec: elements of
// one load. Scaled: v is multiplied by rows.value_factor.
template <int Keys, int Values, int Terms, int Vec, bool Scaled>
class WgmmaLoop {
    static constexpr int kChunk = 64;  // steps
    static constexpr int kKeys = 64;
    static constexpr int kPanel = 64 * 64;  // elements of one term of a chunk's rows or of a state
    static constexpr int kSlot = Terms * kPanel;
    static constexpr int kStride = 72;  // of fp32 rows: the pairs that a fragment loads lie in all 32 banks
    static constexpr int kRows = kChunk * kStride;
    // Registers per thread of each warpgroup, by setmaxnreg.
    static constexpr int kOutputRegisters = 208, kStateRegisters = 144, kSplitRegisters = 152;

    static_assert(Keys <= kKeys, "one panel of keys");
    static_assert(kOutputRegisters + kStateRegisters + kSplitRegisters <= 3 * 168,
                  "a CTA of 384 threads starts with 168 registers per thread");
    static_assert(Keys % Vec == 0 && Values % Vec == 0 && Vec <= 4, "a load stays inside one row");

    using Operand = PanelOperand<bf16, 64>;
    using Tile = float[8][4];             // 16 x 64 accumulators of a warp
    using Fragments = u32[Terms * 4][4];  // the same as operand A: per term four fragments of 16 columns

public:
    static constexpr int kThreads = 384;
    static constexpr int kBlockV = 64;  // value features of a CTA
    static constexpr int kValueBlocks = (Values + kBlockV - 1) / kBlockV;
    static constexpr int kSmemBytes =
        max(6 * kSlot * static_cast<int>(sizeof(bf16)) + 3 * kRows * static_cast<int>(sizeof(float)) +
                SwizzledPanels<8>::kBytes,
            step_by_step_bytes(Keys, kBlockV));

    // rows, states: v, out and the states begin with the CTA's first value feature.
    KGEN_DEVICE WgmmaLoop(const RecurrenceRows<float>& rows, const RecurrenceStates& states)
        : rows_(rows),
          states_(states),
          chunks_(static_cast<int>(ceil_div(rows.end - rows.first, i64{kChunk}))) {}

    KGEN_DEVICE void run() {
        Pipelines& pipes = pipelines();
        if (thread_rank() == 0) {
            pipes.rows.init(128, 8);    // 128 producer threads, 8 consumer warps
            pipes.states.init(128, 4);
            pipes.outputs.init(128, 4);
            mbarrier_init_fence();
        }
        sync_block();
        const int group = warpgroup_rank();
        if (group == 0) {
            setmaxnreg_inc<kOutputRegisters>();
            compute_outputs(pipes);
            finish(0.0f);
        } else if (group == 1) {
            setmaxnreg_dec<kStateRegisters>();
            finish(update_state(pipes));
        } else {
            setmaxnreg_dec<kSplitRegisters>();
            finish(split_rows(pipes));
        }
    }

private:
    struct Pipelines {
        MbarrierDoubleBuffer rows, states, outputs;
    };
    static KGEN_DEVICE Pipelines& pipelines() {
        __shared__ Pipelines shared;
        return shared;
    }

    // The shared-memory map, see above.
    static KGEN_DEVICE bf16* panels() {
        return reinterpret_cast<bf16*>(align_panels(dynamic_smem<char>()));
    }
    static KGEN_DEVICE bf16* b_of(int chunk) { return panels() + chunk % 2 * kSlot; }
    static KGEN_DEVICE bf16* v_of(int chunk) { return panels() + (2 + chunk % 2) * kSlot; }
    static KGEN_DEVICE bf16* state_before(int chunk) { return panels() + (4 + chunk % 2) * kSlot; }
    static KGEN_DEVICE float* rows_of_a() { return reinterpret_cast<float*>(panels() + 6 * kSlot); }
    static KGEN_DEVICE float* outputs_of(int chunk) { return rows_of_a() + (1 + chunk % 2) * kRows; }

    KGEN_DEVICE i64 first_step(int chunk) const {
        return rows_.first + static_cast<i64>(chunk) * kChunk;
    }
    KGEN_DEVICE int steps_of(int chunk) const {
        return static_cast<int>(min(rows_.end - first_step(chunk), i64{kChunk}));
    }

    KGEN_DEVICE void finish(float nonfinite) const {
        if (block_any_nonfinite<kThreads / kWarpSize>(nonfinite))
            run_step_by_step<float, Keys, Values, kBlockV, kThreads, false, false, Scaled, true>(
                rows_, states_, NoDecayRows{});
    }

    // ---- the split warpgroup ----

    // A thread's share of a chunk: four elements of every eighth row.
    struct Rows {
        float of_b[8][4], of_v[8][4];
    };

    // Returns NaN if any output is not finite.
    KGEN_DEVICE float split_rows(Pipelines& pipes) const {
        float nonfinite = 0.0f;
        Rows rows;
        load_rows(rows, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_ + 2; ++chunk) {
            if (chunk < chunks_) {
                pipes.rows.producer_acquire(chunk);
                store_terms<false>(b_of(chunk), rows.of_b);
                store_terms<Scaled>(v_of(chunk), rows.of_v);
                fence_proxy_async();
                pipes.rows.producer_commit(chunk);
                load_rows(rows, chunk + 1);
            }
            if (chunk >= 2 && chunk - 2 < chunks_) {
                pipes.outputs.consumer_wait(chunk - 2);
                nonfinite += write(chunk - 2);
                pipes.outputs.consumer_release(chunk - 2);
            }
        }
        return nonfinite;
    }

    static KGEN_DEVICE int row_of_thread() { return thread_rank() % 128 / 16; }
    static KGEN_DEVICE int column_of_thread() { return thread_rank() % 16 * 4; }

    // Padding features and steps become zeros.
    KGEN_DEVICE void load_rows(Rows& rows, int chunk) const {
        const i64 first = first_step(chunk) + row_of_thread();
        load_rows_of(rows.of_b, rows_.b, first, Keys);
        load_rows_of(rows.of_v, rows_.v, first, rows_.values);
    }

    KGEN_DEVICE void load_rows_of(float (&to)[8][4], const StepRows<const float>& from, i64 first,
                                 int width) const {
        const float* row = from.at(first) + column_of_thread();
#pragma unroll
        for (int sweep = 0; sweep < 8; ++sweep)
#pragma unroll
            for (int i = 0; i < 4; i += Vec) {
                kgen::Vec<float, Vec> values{};
                if (first + 8 * sweep < rows_.end && column_of_thread() + i < width)
                    values = load<Cache::streaming>(reinterpret_cast<const kgen::Vec<float, Vec>*>(
                        row + 8 * sweep * from.stride + i));
#pragma unroll
                for (int j = 0; j < Vec; ++j) to[sweep][i + j] = values[j];
            }
    }

    template <bool Multiplied>
    KGEN_DEVICE void store_terms(bf16* slot, const float (&values)[8][4]) const {
        const float factor = Multiplied ? rows_.value_factor : 1.0f;
        const int column = column_of_thread();
#pragma unroll
        for (int sweep = 0; sweep < 8; ++sweep) {
            const float(&four)[4] = values[sweep];
            u32 left[Terms], right[Terms];
            split_bf16(four[0] * factor, four[1] * factor, left);
            split_bf16(four[2] * factor, four[3] * factor, right);
            bf16* to = slot + SwizzledPanels<64>::offset(row_of_thread() + 8 * sweep, column / 8) + column % 8;
#pragma unroll
            for (int term = 0; term < Terms; ++term)
                *reinterpret_cast<kgen::Vec<u32, 2>*>(to + term * kPanel) = {{left[term], right[term]}};
        }
    }

    KGEN_DEVICE float write(int chunk) const {
        float nonfinite[4] = {};  // independent chains of fma, to hide their latency
        const float* from = outputs_of(chunk) + row_of_thread() * kStride + column_of_thread();
        float* row = rows_.out.at(first_step(chunk) + row_of_thread()) + column_of_thread();
        const int rows = steps_of(chunk) - row_of_thread(), left = rows_.values - column_of_thread();
#pragma unroll
        for (int sweep = 0; sweep < 8; ++sweep) {
            kgen::Vec<float, 4> four =
                *reinterpret_cast<const kgen::Vec<float, 4>*>(from + 8 * sweep * kStride);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                four[i] *= rows_.out_factor;
                nonfinite[i] = fma(four[i], 0.0f, nonfinite[i]);
            }
#pragma unroll
            for (int i = 0; i < 4; i += Vec) {
                kgen::Vec<float, Vec> values;
#pragma unroll
                for (int j = 0; j < Vec; ++j) values[j] = four[i + j];
                if (8 * sweep < rows && i < left)
                    store<Cache::streaming>(
                        reinterpret_cast<kgen::Vec<float, Vec>*>(row + 8 * sweep * rows_.out.stride + i),
                        values);
            }
        }
        return nonfinite[0] + nonfinite[1] + (nonfinite[2] + nonfinite[3]);
    }

    // ---- the state warpgroup: rows of its accumulators are keys, columns value features ----

    // Returns NaN if the final state is wanted and not finite.

    KGEN_DEVICE float update_state(Pipelines& pipes) const {
        Tile state;
        for_state([&](int n, int i, int key, int value) {
            const bool there = key < Keys && value < rows_.values && states_.initial_state != nullptr;
            state[n][i] = there ? states_.template initial_at<false>(key, value, Keys, Values) : 0.0f;
        });
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            pipes.states.producer_acquire(chunk);
            store_state(state_before(chunk), state);
            fence_proxy_async();
            pipes.states.producer_commit(chunk);
            pipes.rows.consumer_wait(chunk);
            Tile sum;
            clear(sum);
            wgmma_fence(sum);
            const bf16 *b = b_of(chunk), *v = v_of(chunk);
            for_term_products<Terms>([&](int i, int j) {
                const Operand keys(b + i * kPanel, 0, 0), values(v + j * kPanel, 0, 0);
#pragma unroll
                for (int step = 0; step < kChunk; step += 16)
                    wgmma_m64k16<64, Major::MN, Major::MN>(sum, keys.at(step, 0),
                                                              values.at(step, 0));
            });
            wgmma_commit();
            wgmma_wait<0>(sum);
            pipes.rows.consumer_release(chunk);
            add(state, sum);
        }
        if (states_.final_state == nullptr) return 0.0f;
        float nonfinite = 0.0f;
        for_state([&](int n, int i, int key, int value) {
            nonfinite = fma(state[n][i], 0.0f, nonfinite);
            if (key < Keys && value < rows_.values)
                states_.store_final(key, value, state[n][i] * states_.final_factor);
        });
        return nonfinite;
    }

    // Calls body(tile, accumulator, row, column) for all accumulators of the lane.
    template <class Body>
    static KGEN_DEVICE void for_state(Body body) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                body(n, i, 16 * warp_in_warpgroup() + lane.g + i / 2 * 8, 8 * n + 2 * lane.q + i % 2);
    }

    static KGEN_DEVICE void store_state(bf16* slot, const Tile& state) {
        const MmaLane lane = mma_lane();
        const int row = 16 * warp_in_warpgroup() + lane.g;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 terms[Terms];
                split_bf16(state[n][2 * half], state[n][2 * half + 1], terms);
#pragma unroll
                for (int term = 0; term < Terms; ++term)
                    *reinterpret_cast<u32*>(slot + term * kPanel +
                                            SwizzledPanels<64>::offset(row + 8 * half, n) + 2 * lane.q) =
                        terms[term];
            }
    }

    // ---- the output warpgroup: rows of its accumulators are steps ----

    KGEN_DEVICE void compute_outputs(Pipelines& pipes) const {
        if (chunks_ == 0) return;
        CopierOfA copier(rows_.a, rows_.first, Keys);
        if (Keys < kKeys) {  // padding features are zeros
            for (int i = thread_rank(); i < kRows; i += 128) rows_of_a()[i] = 0.0f;
            sync_output_warps();
        }
        Fragments a;
        copy_a(copier, 0);
        load_a(a);
        copy_a(copier, 1);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            // 1. Scores a b^T.
            Tile scores;
            pipes.rows.consumer_wait(chunk);
            clear(scores);
            wgmma_fence(scores, a);
            multiply<Major::K>(scores, a, b_of(chunk));
            wgmma_commit();

            // 2. The contribution of earlier chunks: a S.
            Tile sums;
            pipes.states.consumer_wait(chunk);
            clear(sums);
            wgmma_fence(sums, a);
            multiply<Major::MN>(sums, a, state_before(chunk));
            wgmma_commit();

            // 3. The contribution of the chunk's own steps: masked scores times v.
            wgmma_wait<1>(scores);
            Fragments score_terms;
            apply_causal_mask(scores);
            split_fragments(score_terms, scores);
            Tile intra;
            clear(intra);
            wgmma_fence(intra, score_terms);
            multiply<Major::MN>(intra, score_terms, v_of(chunk));
            wgmma_commit();

            // 4. Meanwhile: rows of a of the next chunk.
            wgmma_wait<1>(sums, a);
            pipes.states.consumer_release(chunk);
            load_a(a);
            copy_a(copier, chunk + 2);

            // 5. The sum of both goes to the split warpgroup, which writes it.
            wgmma_wait<0>(intra, score_terms);
            pipes.rows.consumer_release(chunk);
            add(sums, intra);
            pipes.outputs.producer_acquire(chunk);
            stage_outputs(sums, outputs_of(chunk));
            pipes.outputs.producer_commit(chunk);
        }
    }

    template <Major K>
    static KGEN_DEVICE void multiply(Tile& sums, const Fragments& a, const bf16* slot) {
        for_term_products<Terms>([&](int i, int j) {
            const Operand other(slot + j * kPanel, 0, 0);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma_m64k16<64, K>(sums, a[4 * i + k],
                                   K == Major::MN ? other.at(16 * k, 0) : other.at(0, 16 * k));
        });
    }

    using CopierOfA = ChunkCopier<float, kChunk, Keys, 4 * Vec, 128>;
    static KGEN_DEVICE void sync_output_warps() { named_barrier_sync(1, 128); }

    // Starts the copies of a chunk's rows of a, if there is such a chunk. Steps after the last one become zeros.
    KGEN_DEVICE void copy_a(CopierOfA& copier, int chunk) const {
        if (chunk < chunks_) copier.template start<false>(rows_of_a(), kStride, steps_of(chunk));
        cp_async_commit();
    }

    // Waits for the rows of a and splits them into operands. Afterwards their buffer is free.
    static KGEN_DEVICE void load_a(Fragments& a) {
        cp_async_wait_all();
        sync_output_warps();
        const MmaLane lane = mma_lane();
        const float* rows = rows_of_a() + (16 * warp_in_warpgroup() + lane.g) * kStride + 2 * lane.q;
        Tile tile;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const kgen::Vec<float, 2> two =
                    *reinterpret_cast<const kgen::Vec<float, 2>*>(rows + 8 * half * kStride + 8 * n);
                tile[n][2 * half] = two[0];
                tile[n][2 * half + 1] = two[1];
            }
        split_fragments(a, tile);
        sync_output_warps();
    }

    static KGEN_DEVICE void split_fragments(Fragments& to, const Tile& from) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float* two = from[i / 2] + i % 2 * 2;
            u32 terms[Terms];
            split_bf16(two[0], two[1], terms);
#pragma unroll
            for (int term = 0; term < Terms; ++term) to[4 * term + i / 4][i % 4] = terms[term];
        }
    }

    // Scores of later steps become zeros.
    static KGEN_DEVICE void apply_causal_mask(Tile& scores) {
        for_state([&](int n, int i, int step, int other) {
            if (other > step) scores[n][i] = 0.0f;
        });
    }

    static KGEN_DEVICE void stage_outputs(const Tile& sums, float* rows) {
        const MmaLane lane = mma_lane();
        rows += (16 * warp_in_warpgroup() + lane.g) * kStride + 2 * lane.q;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<kgen::Vec<float, 2>*>(rows + 8 * half * kStride + 8 * n) = {
                    {sums[n][2 * half], sums[n][2 * half + 1]}};
    }

    // ---- shared by the warpgroups ----

    static KGEN_DEVICE void clear(Tile& sums) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
    }
    static KGEN_DEVICE void add(Tile& sums, const Tile& more) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += more[i / 4][i % 4];
    }

    const RecurrenceRows<float>& rows_;
    const RecurrenceStates& states_;
    int chunks_;
};

}  // namespace kgen
