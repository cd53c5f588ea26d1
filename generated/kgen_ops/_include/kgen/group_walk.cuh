// A linear recurrence over the steps of one sequence in fp32, its products by warpgroups (wgmma.cuh) of
// numbers that are sums of bf16 numbers (split_bf16.cuh).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// Chunk after chunk of 64 steps, by three warpgroups of a block:
//
//     one moves       rows: those of b and v from memory through registers, split, to panels; and outputs,
//                     a chunk behind the others, from shared memory to where they belong, whole lines
//     one sums        b^T v of each chunk to the state, which stays in its registers, and leaves the
//                     state before each chunk in panels
//     one makes       outputs: scores a b^T, a times the state, scores times v. Rows of a it takes from
//                     shared memory and splits itself, as fragments of operands in its registers
//
// They meet at mbarriers, two chunks apart at most. What is serial is the sum of states alone. The third
// warpgroup has three of the four products, and a product is nearly done when its instructions are issued:
// whatever else it does is time in which only the second one keeps the tensor cores busy.
//
// A sum of products begins at zero with each chunk, small terms first, and is added to others in fp32:
// tensor cores cut off (mma.cuh). What is not finite is noticed by its effect on outputs, and then the block
// does its walk again, step by step.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "chunk_stage.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "split_bf16.cuh"
#include "two_places.cuh"
#include "wgmma.cuh"

namespace kgen {

// Keys <= 64, Values: features of a and b, and of v and out. Parts: numbers that one of fp32 becomes. Vec:
// values that one load brings. Scaled: v is multiplied by rows.value_factor.
template <int Keys, int Values, int Parts, int Vec, bool Scaled>
class GroupWalk {
    static constexpr int kChunk = 64;  // steps
    static constexpr int kKeys = 64;
    static constexpr int kPanel = 64 * 64;  // elements: a part of a chunk's rows, or of a state
    static constexpr int kPlace = Parts * kPanel;
    static constexpr int kStride = 72;  // of rows of fp32: pairs of a fragment's rows are in all banks
    static constexpr int kRows = kChunk * kStride;
    static constexpr int kMakers = 208, kAdders = 144, kMovers = 152;  // registers of a thread

    static_assert(Keys <= kKeys, "one panel of keys");
    static_assert(kMakers + kAdders + kMovers <= 3 * 168, "as many as a block of this size begins with");
    static_assert(Keys % Vec == 0 && Values % Vec == 0 && Vec <= 4, "a load is of one row");

    using Operand = PanelOperand<bf16, 64>;
    using Tile = float[8][4];             // 16 x 64 of a warp
    using Fragments = u32[Parts * 4][4];  // the same as operands: of each part, four times 16 columns

public:
    static constexpr int kThreads = 384;
    static constexpr int kSlice = 64;  // value features of a block
    static constexpr int kSlices = (Values + kSlice - 1) / kSlice;
    static constexpr int kSmemBytes =
        max(6 * kPlace * static_cast<int>(sizeof(bf16)) + 3 * kRows * static_cast<int>(sizeof(float)) +
                Panels<8>::kBytes,
            plain_walk_bytes(Keys, kSlice));

    // Of v, out and the states the slice's features alone.
    KGEN_DEVICE GroupWalk(const WalkRows<float>& rows, const WalkStates& states)
        : rows_(rows),
          states_(states),
          chunks_(static_cast<int>(ceil_div(rows.end - rows.first, i64{kChunk}))) {}

    KGEN_DEVICE void walk() {
        Meetings& meet = meetings();
        if (thread_rank() == 0) {
            meet.rows.begin(128, 8);    // filled by one warpgroup, used by two
            meet.states.begin(128, 4);  // and by one
            meet.outputs.begin(128, 4);
            mbarrier_init_fence();
        }
        sync_block();
        const int group = warpgroup_rank();
        if (group == 0) {
            take_registers<kMakers>();
            make_outputs(meet);
            end_with(0.0f);
        } else if (group == 1) {
            leave_registers<kAdders>();
            end_with(add_up(meet));
        } else {
            leave_registers<kMovers>();
            end_with(move_rows(meet));
        }
    }

private:
    struct Meetings {
        TwoPlaces rows, states, outputs;
    };
    static KGEN_DEVICE Meetings& meetings() {
        __shared__ Meetings of_block;
        return of_block;
    }

    // Shared memory. Panels of bf16 for each part: two places of b, of v, and of the state before a chunk.
    // Rows of fp32, kStride apart: one place of a, two of outputs.
    static KGEN_DEVICE bf16* panels() {
        return reinterpret_cast<bf16*>(panel_memory(dynamic_smem<char>()));
    }
    static KGEN_DEVICE bf16* b_of(int chunk) { return panels() + chunk % 2 * kPlace; }
    static KGEN_DEVICE bf16* v_of(int chunk) { return panels() + (2 + chunk % 2) * kPlace; }
    static KGEN_DEVICE bf16* state_before(int chunk) { return panels() + (4 + chunk % 2) * kPlace; }
    static KGEN_DEVICE float* rows_of_a() { return reinterpret_cast<float*>(panels() + 6 * kPlace); }
    static KGEN_DEVICE float* outputs_of(int chunk) { return rows_of_a() + (1 + chunk % 2) * kRows; }

    KGEN_DEVICE i64 first_step(int chunk) const {
        return rows_.first + static_cast<i64>(chunk) * kChunk;
    }
    KGEN_DEVICE int steps_of(int chunk) const {
        return static_cast<int>(min(rows_.end - first_step(chunk), i64{kChunk}));
    }

    KGEN_DEVICE void end_with(float poison) const {
        if (block_has<kThreads / kWarpSize>(poison))
            walk_plainly<float, Keys, Values, kSlice, kThreads, false, false, Scaled, true>(
                rows_, states_, NoDecayRows{});
    }

    // ---- the warpgroup that moves rows ----

    // What a thread has of a chunk: four values of every eighth row.
    struct Rows {
        float of_b[8][4], of_v[8][4];
    };

    // Returns NaN if any output is not finite.
    KGEN_DEVICE float move_rows(Meetings& meet) const {
        float poison = 0.0f;
        Rows rows;
        load_rows(rows, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_ + 2; ++chunk) {
            if (chunk < chunks_) {
                meet.rows.wait_free(chunk);
                store_parts<false>(b_of(chunk), rows.of_b);
                store_parts<Scaled>(v_of(chunk), rows.of_v);
                fence_proxy_async();
                meet.rows.fill(chunk);
                load_rows(rows, chunk + 1);
            }
            if (chunk >= 2 && chunk - 2 < chunks_) {
                meet.outputs.wait_full(chunk - 2);
                poison += write(chunk - 2);
                meet.outputs.release(chunk - 2);
            }
        }
        return poison;
    }

    static KGEN_DEVICE int row_of_thread() { return thread_rank() % 128 / 16; }
    static KGEN_DEVICE int column_of_thread() { return thread_rank() % 16 * 4; }

    // Zeros where there is nothing.
    KGEN_DEVICE void load_rows(Rows& rows, int chunk) const {
        const i64 first = first_step(chunk) + row_of_thread();
        load_sweeps(rows.of_b, rows_.b, first, Keys);
        load_sweeps(rows.of_v, rows_.v, first, rows_.values);
    }

    KGEN_DEVICE void load_sweeps(float (&to)[8][4], const StepRows<const float>& from, i64 first,
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
    KGEN_DEVICE void store_parts(bf16* place, const float (&values)[8][4]) const {
        const float factor = Multiplied ? rows_.value_factor : 1.0f;
        const int column = column_of_thread();
#pragma unroll
        for (int sweep = 0; sweep < 8; ++sweep) {
            const float(&four)[4] = values[sweep];
            u32 left[Parts], right[Parts];
            split_bf16(four[0] * factor, four[1] * factor, left);
            split_bf16(four[2] * factor, four[3] * factor, right);
            bf16* to = place + Panels<64>::offset(row_of_thread() + 8 * sweep, column / 8) + column % 8;
#pragma unroll
            for (int part = 0; part < Parts; ++part)
                *reinterpret_cast<kgen::Vec<u32, 2>*>(to + part * kPanel) = {{left[part], right[part]}};
        }
    }

    KGEN_DEVICE float write(int chunk) const {
        float poison[4] = {};  // chains that do not wait for each other
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
                poison[i] = fma(four[i], 0.0f, poison[i]);
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
        return poison[0] + poison[1] + (poison[2] + poison[3]);
    }

    // ---- the warpgroup that adds up the state: rows are keys, columns values ----

    KGEN_DEVICE float add_up(Meetings& meet) const {
        Tile state;
        for_state([&](int n, int i, int key, int value) {
            const bool there = key < Keys && value < rows_.values && states_.state != nullptr;
            state[n][i] = there ? states_.template first<false>(key, value, Keys, Values) : 0.0f;
        });
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            meet.states.wait_free(chunk);
            store_state(state_before(chunk), state);
            fence_proxy_async();
            meet.states.fill(chunk);
            meet.rows.wait_full(chunk);
            Tile sum;
            clear(sum);
            wgmma_fence(sum);
            const bf16 *b = b_of(chunk), *v = v_of(chunk);
            for_part_products<Parts>([&](int i, int j) {
                const Operand keys(b + i * kPanel, 0, 0), values(v + j * kPanel, 0, 0);
#pragma unroll
                for (int step = 0; step < kChunk; step += 16)
                    wgmma_64x16<64, Along::rows, Along::rows>(sum, keys.at(step, 0),
                                                              values.at(step, 0));
            });
            wgmma_commit();
            wgmma_wait<0>(sum);
            meet.rows.release(chunk);
            add(state, sum);
        }
        if (states_.end == nullptr) return 0.0f;
        float poison = 0.0f;
        for_state([&](int n, int i, int key, int value) {
            poison = fma(state[n][i], 0.0f, poison);
            if (key < Keys && value < rows_.values)
                states_.store_end(key, value, state[n][i] * states_.end_factor);
        });
        return poison;
    }

    // body(tile, accumulator, key, value)
    template <class Body>
    static KGEN_DEVICE void for_state(Body body) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                body(n, i, 16 * warp_of_group() + lane.g + i / 2 * 8, 8 * n + 2 * lane.q + i % 2);
    }

    static KGEN_DEVICE void store_state(bf16* place, const Tile& state) {
        const MmaLane lane = mma_lane();
        const int row = 16 * warp_of_group() + lane.g;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 parts[Parts];
                split_bf16(state[n][2 * half], state[n][2 * half + 1], parts);
#pragma unroll
                for (int part = 0; part < Parts; ++part)
                    *reinterpret_cast<u32*>(place + part * kPanel +
                                            Panels<64>::offset(row + 8 * half, n) + 2 * lane.q) =
                        parts[part];
            }
    }

    // ---- the warpgroup that makes outputs: rows are steps ----

    KGEN_DEVICE void make_outputs(Meetings& meet) const {
        if (chunks_ == 0) return;
        CopierOfA copier(rows_.a, rows_.first, Keys);
        if (Keys < kKeys) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kRows; i += 128) rows_of_a()[i] = 0.0f;
            sync_makers();
        }
        Fragments a;
        copy_a(copier, 0);
        take_a(a);
        copy_a(copier, 1);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            Tile scores;
            meet.rows.wait_full(chunk);
            clear(scores);
            wgmma_fence(scores, a);
            multiply<Along::columns>(scores, a, b_of(chunk));
            wgmma_commit();

            Tile sums;
            meet.states.wait_full(chunk);
            clear(sums);
            wgmma_fence(sums, a);
            multiply<Along::rows>(sums, a, state_before(chunk));
            wgmma_commit();

            wgmma_wait<1>(scores);
            Fragments seen;
            drop_later(scores);
            split_fragments(seen, scores);
            Tile inside;
            clear(inside);
            wgmma_fence(inside, seen);
            multiply<Along::rows>(inside, seen, v_of(chunk));
            wgmma_commit();

            wgmma_wait<1>(sums, a);
            meet.states.release(chunk);
            take_a(a);
            copy_a(copier, chunk + 2);

            wgmma_wait<0>(inside, seen);
            meet.rows.release(chunk);
            add(sums, inside);
            meet.outputs.wait_free(chunk);
            leave(sums, outputs_of(chunk));
            meet.outputs.fill(chunk);
        }
    }

    template <Along K>
    static KGEN_DEVICE void multiply(Tile& sums, const Fragments& a, const bf16* place) {
        for_part_products<Parts>([&](int i, int j) {
            const Operand other(place + j * kPanel, 0, 0);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma_64x16<64, K>(sums, a[4 * i + k],
                                   K == Along::rows ? other.at(16 * k, 0) : other.at(0, 16 * k));
        });
    }

    using CopierOfA = ChunkCopier<float, kChunk, Keys, 4 * Vec, 128>;
    static KGEN_DEVICE void sync_makers() { sync_named(1, 128); }

    // Start copies of a chunk's rows of a, if there is such a chunk. Those behind the last step are zeros.
    KGEN_DEVICE void copy_a(CopierOfA& copier, int chunk) const {
        if (chunk < chunks_) copier.template start<false>(rows_of_a(), kStride, steps_of(chunk));
        cp_async_commit();
    }

    // The rows that are on their way, as operands. Then their place is free.
    static KGEN_DEVICE void take_a(Fragments& a) {
        cp_async_wait_all();
        sync_makers();
        const MmaLane lane = mma_lane();
        const float* rows = rows_of_a() + (16 * warp_of_group() + lane.g) * kStride + 2 * lane.q;
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
        sync_makers();
    }

    static KGEN_DEVICE void split_fragments(Fragments& to, const Tile& from) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float* two = from[i / 2] + i % 2 * 2;
            u32 parts[Parts];
            split_bf16(two[0], two[1], parts);
#pragma unroll
            for (int part = 0; part < Parts; ++part) to[4 * part + i / 4][i % 4] = parts[part];
        }
    }

    // A step sees none that is later.
    static KGEN_DEVICE void drop_later(Tile& scores) {
        for_state([&](int n, int i, int step, int other) {
            if (other > step) scores[n][i] = 0.0f;
        });
    }

    static KGEN_DEVICE void leave(const Tile& sums, float* rows) {
        const MmaLane lane = mma_lane();
        rows += (16 * warp_of_group() + lane.g) * kStride + 2 * lane.q;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<kgen::Vec<float, 2>*>(rows + 8 * half * kStride + 8 * n) = {
                    {sums[n][2 * half], sums[n][2 * half + 1]}};
    }

    // ---- what they share ----

    static KGEN_DEVICE void clear(Tile& sums) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
    }
    static KGEN_DEVICE void add(Tile& sums, const Tile& more) {
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += more[i / 4][i % 4];
    }

    const WalkRows<float>& rows_;
    const WalkStates& states_;
    int chunks_;
};

}  // namespace kgen
