// A linear recurrence over the steps of one sequence in fp32, its products by warpgroups (wgmma.cuh) of
// numbers that are sums of bf16 numbers (split_bf16.cuh).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// Chunk after chunk of 64 steps, by three or four warpgroups of a block:
//
//     one moves       rows: those of b and v from memory through registers, split, to panels; and outputs,
//                     a chunk behind the others, from shared memory to where they belong, whole lines
//     one sums        b^T v of each chunk to the state, which stays in its registers, and leaves the
//                     state before each chunk in panels
//     others make     outputs: scores a b^T, a times the state, scores times v. Rows of a they take from
//                     shared memory and split themselves, as fragments of operands in their registers
//
// They meet at mbarriers, two chunks apart at most. What is serial is the sum of states alone. Who makes
// outputs has three of the four products, and a product is nearly done when its instructions are issued:
// whatever else it does leaves the tensor cores to others. Two such warpgroups take turns with the chunks.
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
#include "math.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "split_bf16.cuh"
#include "two_places.cuh"
#include "wgmma.cuh"

namespace kgen {

// Keys <= 64, Values: features of a and b, and of v and out. Parts: numbers that one of fp32 becomes.
// Makers: warpgroups that make outputs. Vec: values that one load brings. Scaled: v is multiplied by
// rows.value_factor.
template <int Keys, int Values, int Parts, int Makers, int Vec, bool Scaled>
class GroupWalk {
    static constexpr int kChunk = 64;  // steps
    static constexpr int kKeys = 64;
    static constexpr int kPanel = 64 * 64;  // elements: a part of a chunk's rows, or of a state
    static constexpr int kPlace = Parts * kPanel;
    static constexpr int kStride = 72;  // of rows of fp32: pairs of a fragment's rows are in all banks
    static constexpr int kRows = kChunk * kStride;
    // Registers of a thread: what it begins with, and then that of each warpgroup.
    static constexpr int kAtFirst = Makers == 1 ? 168 : 128;
    static constexpr int kOfMaker = Makers == 1 ? 208 : 144;
    static constexpr int kOfAdder = Makers == 1 ? 144 : 104, kOfMover = Makers == 1 ? 152 : 120;

    static_assert(Keys <= kKeys, "one panel of keys");
    static_assert(Makers == 1 || Makers == 2, "two places of rows");
    static_assert(Makers * kOfMaker + kOfAdder + kOfMover <= (Makers + 2) * kAtFirst,
                  "a block that asks for more than it begins with waits for ever");
    static_assert(Keys % Vec == 0 && Values % Vec == 0 && Vec <= 4, "a load is of one row");

    using Operand = PanelOperand<bf16, 64>;
    using Tile = float[8][4];             // 16 x 64 of a warp
    using Fragments = u32[Parts * 4][4];  // the same as operands: of each part, four times 16 columns

public:
    static constexpr int kThreads = 128 * (Makers + 2);
    static constexpr int kSlice = 64;  // value features of a block
    static constexpr int kSlices = (Values + kSlice - 1) / kSlice;
    static constexpr int kSmemBytes =
        max(6 * kPlace * static_cast<int>(sizeof(bf16)) + (Makers + 2) * kRows * static_cast<int>(sizeof(float)) +
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
            // A place is filled by one warpgroup and used by one: rows by the adder, too.
            meet.rows.begin(128, 8);
            meet.states.begin(128, 4);
            meet.outputs.begin(128, 4);
            mbarrier_init_fence();
        }
        sync_block();
        const int group = warpgroup_rank();
        if (group < Makers) {
            take_registers<kOfMaker>();
            make_outputs(meet, group);
            end_with(0.0f);
        } else if (group == Makers) {
            leave_registers<kOfAdder>();
            end_with(add_up(meet));
        } else {
            leave_registers<kOfMover>();
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
    // Rows of fp32, kStride apart: two places of outputs, and of a one for each warpgroup that makes outputs.
    static KGEN_DEVICE bf16* panels() {
        return reinterpret_cast<bf16*>(panel_memory(dynamic_smem<char>()));
    }
    static KGEN_DEVICE bf16* b_of(int chunk) { return panels() + chunk % 2 * kPlace; }
    static KGEN_DEVICE bf16* v_of(int chunk) { return panels() + (2 + chunk % 2) * kPlace; }
    static KGEN_DEVICE bf16* state_before(int chunk) { return panels() + (4 + chunk % 2) * kPlace; }
    static KGEN_DEVICE float* outputs_of(int chunk) {
        return reinterpret_cast<float*>(panels() + 6 * kPlace) + chunk % 2 * kRows;
    }
    static KGEN_DEVICE float* rows_of_a(int maker) { return outputs_of(0) + (2 + maker) * kRows; }

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

    // ---- a warpgroup that makes outputs: rows are steps ----

    // Of every chunk, or of every second one.
    KGEN_DEVICE void make_outputs(Meetings& meet, int maker) const {
        if (Keys < kKeys) {  // features that do not exist are zeros
            for (int i = thread_rank() % 128; i < kRows; i += 128) rows_of_a(maker)[i] = 0.0f;
            sync_makers(maker);
        }
        copy_a(maker, maker);
#pragma unroll 1
        for (int chunk = maker; chunk < chunks_; chunk += Makers) {
            Fragments a;
            take_a(a, maker);
            copy_a(maker, chunk + Makers);

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

            wgmma_wait<0>(scores, sums, a);
            meet.states.release(chunk);
            Fragments seen;
            drop_later(scores);
            split_fragments(seen, scores);
            Tile inside;
            clear(inside);
            wgmma_fence(inside, seen);
            multiply<Along::rows>(inside, seen, v_of(chunk));
            wgmma_commit();

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

    static KGEN_DEVICE void sync_makers(int maker) { sync_named(1 + maker, 128); }

    // Start copies of a chunk's rows of a, if there is such a chunk. Those behind the last step are zeros.
    KGEN_DEVICE void copy_a(int maker, int chunk) const {
        constexpr int kCopies = kChunk / Vec, kSweep = 128 / kCopies;  // of a row; rows
        const int row = thread_rank() % 128 / kCopies, column = thread_rank() % kCopies * Vec;
        const int steps = chunk < chunks_ ? steps_of(chunk) : 0;
        const float* from = rows_.a.at(first_step(chunk) + row) + column;
        float* to = rows_of_a(maker) + row * kStride + column;
        if (chunk < chunks_ && column < Keys)
#pragma unroll
            for (int i = 0; i < kChunk; i += kSweep)
                cp_async_or_zero<4 * Vec>(to + i * kStride, from + i * rows_.a.stride, row + i < steps);
        cp_async_commit();
    }

    // The rows that are on their way, as operands. Then their place is free.
    static KGEN_DEVICE void take_a(Fragments& a, int maker) {
        cp_async_wait_all();
        sync_makers(maker);
        const MmaLane lane = mma_lane();
        const float* rows = rows_of_a(maker) + (16 * warp_of_group() + lane.g) * kStride + 2 * lane.q;
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
        sync_makers(maker);
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
