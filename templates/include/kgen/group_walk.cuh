// A linear recurrence over the steps of one sequence in fp32, its products by warpgroups (wgmma.cuh) of
// numbers that are sums of bf16 numbers (split_bf16.cuh).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// Chunk after chunk of 64 steps, by three warpgroups of a block:
//
//     one splits      rows of b and v, from memory through registers to panels
//     one sums        b^T v of each chunk to the state, which stays in its registers, and leaves the
//                     state before each chunk in panels
//     one makes       outputs: scores a b^T, a times the state, scores times v. Rows of a it loads and
//                     splits itself, as fragments of operands: they are never in shared memory
//
// They meet at mbarriers, two chunks apart at most. What is serial is the sum of states alone; the third
// warpgroup has three of the four products, and is always a product ahead of what it waits for.
//
// A sum of products begins at zero with each chunk, small terms first, and is added to others in fp32:
// tensor cores cut off (mma.cuh). What is not finite is noticed by its effect on outputs, and then the block
// does its walk again, step by step.
#pragma once

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

// Keys <= 64, Values: features of a and b, and of v and out. Parts: numbers that one of fp32 becomes. Vec:
// values that one load brings. Scaled: v is multiplied by rows.value_factor.
template <int Keys, int Values, int Parts, int Vec, bool Scaled>
class GroupWalk {
    static constexpr int kChunk = 64;  // steps
    static constexpr int kKeys = 64;
    static constexpr int kPanel = 64 * 64;                // elements: a part of a chunk's rows, or of a state
    static constexpr int kPlace = Parts * kPanel;
    static constexpr int kMakers = 232, kAdders = 152, kSplitters = 120;  // registers of a thread

    static_assert(Keys <= kKeys, "one panel of keys");
    static_assert(kMakers + kAdders + kSplitters <= 3 * 168, "as many as a block of this size begins with");
    static_assert(Keys % Vec == 0 && Values % Vec == 0 && Vec <= 4, "a load is of one row");

    using Operand = PanelOperand<bf16, 64>;
    using Tile = float[8][4];           // 16 x 64 of a warp
    using Fragments = u32[Parts * 4][4];  // the same as operands: of each part, four times 16 columns

public:
    static constexpr int kThreads = 384;
    static constexpr int kSlice = 64;  // value features of a block
    static constexpr int kSlices = (Values + kSlice - 1) / kSlice;
    static constexpr int kSmemBytes =
        max(6 * kPlace * static_cast<int>(sizeof(bf16)) + Panels<8>::kBytes, plain_walk_bytes(Keys, kSlice));

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
            mbarrier_init_fence();
        }
        sync_block();
        const int group = warpgroup_rank();
        if (group == 0) {
            take_registers<kMakers>();
            end_with(make_outputs(meet));
        } else if (group == 1) {
            leave_registers<kAdders>();
            end_with(add_up(meet));
        } else {
            leave_registers<kSplitters>();
            split_rows(meet);
            end_with(0.0f);
        }
    }

private:
    struct Meetings {
        TwoPlaces rows, states;
    };
    static KGEN_DEVICE Meetings& meetings() {
        __shared__ Meetings of_block;
        return of_block;
    }

    // Shared memory, panels of bf16 for each part: two places of b, of v, and of the state before a chunk.
    static KGEN_DEVICE bf16* panels() {
        return reinterpret_cast<bf16*>(panel_memory(dynamic_smem<char>()));
    }
    static KGEN_DEVICE bf16* b_of(int chunk) { return panels() + chunk % 2 * kPlace; }
    static KGEN_DEVICE bf16* v_of(int chunk) { return panels() + (2 + chunk % 2) * kPlace; }
    static KGEN_DEVICE bf16* state_before(int chunk) { return panels() + (4 + chunk % 2) * kPlace; }

    KGEN_DEVICE i64 first_step(int chunk) const {
        return rows_.first + static_cast<i64>(chunk) * kChunk;
    }

    KGEN_DEVICE void end_with(float poison) const {
        if (block_has<kThreads / kWarpSize>(poison))
            walk_plainly<float, Keys, Values, kSlice, kThreads, false, false, Scaled, true>(
                rows_, states_, NoDecayRows{});
    }

    // ---- the warpgroup that splits rows of b and v ----

    // What a thread has of a chunk: eight values of every 16th row.
    struct Rows {
        float of_b[4][8], of_v[4][8];
    };

    KGEN_DEVICE void split_rows(Meetings& meet) const {
        Rows rows;
        load_rows(rows, 0);
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            meet.rows.wait_free(chunk);
            store_parts<false>(b_of(chunk), rows.of_b);
            store_parts<Scaled>(v_of(chunk), rows.of_v);
            meet.rows.fill(chunk);
            load_rows(rows, chunk + 1);
        }
    }

    static KGEN_DEVICE int row_of_thread() { return thread_rank() % 128 / 8; }
    static KGEN_DEVICE int piece_of_thread() { return thread_rank() % 8; }

    // Zeros where there is nothing.
    KGEN_DEVICE void load_rows(Rows& rows, int chunk) const {
        const i64 first = first_step(chunk) + row_of_thread();
        load_sweeps(rows.of_b, rows_.b, first, Keys);
        load_sweeps(rows.of_v, rows_.v, first, rows_.values);
    }

    KGEN_DEVICE void load_sweeps(float (&to)[4][8], const StepRows<const float>& from, i64 first,
                                 int width) const {
        const float* row = from.at(first) + 8 * piece_of_thread();
#pragma unroll
        for (int sweep = 0; sweep < 4; ++sweep)
#pragma unroll
            for (int i = 0; i < 8; i += Vec)
                load_values<Vec>(&to[sweep][i], row + 16 * sweep * from.stride + i,
                                 first + 16 * sweep < rows_.end && 8 * piece_of_thread() + i < width);
    }

    template <bool Multiplied>
    KGEN_DEVICE void store_parts(bf16* place, const float (&values)[4][8]) const {
#pragma unroll
        for (int sweep = 0; sweep < 4; ++sweep) {
            kgen::Vec<u32, 4> pieces[Parts];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float factor = Multiplied ? rows_.value_factor : 1.0f;
                u32 parts[Parts];
                split_bf16(values[sweep][2 * i] * factor, values[sweep][2 * i + 1] * factor, parts);
#pragma unroll
                for (int part = 0; part < Parts; ++part) pieces[part][i] = parts[part];
            }
#pragma unroll
            for (int part = 0; part < Parts; ++part)
                *reinterpret_cast<kgen::Vec<u32, 4>*>(
                    place + part * kPanel +
                    Panels<64>::offset(row_of_thread() + 16 * sweep, piece_of_thread())) = pieces[part];
        }
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

    KGEN_DEVICE float make_outputs(Meetings& meet) const {
        if (chunks_ == 0) return 0.0f;
        float poison = 0.0f;
        Tile ahead;  // rows of a of the next chunk, as fragments lie
        load_fragments(ahead, 0);
        Fragments a;
        split_fragments(a, ahead);
        load_fragments(ahead, 1);
        Tile sums;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            Tile scores;
            meet.rows.wait_full(chunk);
            clear(scores);
            wgmma_fence(scores, a);
            multiply<Along::columns>(scores, a, b_of(chunk));
            wgmma_commit();
            if (chunk > 0) poison += write(sums, chunk - 1);  // behind the scores

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
            split_fragments(a, ahead);
            load_fragments(ahead, chunk + 2);

            wgmma_wait<0>(inside, seen);
            meet.rows.release(chunk);
            add(sums, inside);
        }
        return poison + write(sums, chunks_ - 1);
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

    // Rows of a as accumulators have them; zeros where there is nothing.
    KGEN_DEVICE void load_fragments(Tile& to, int chunk) const {
        constexpr int kVec = min(Vec, 2);
        const MmaLane lane = mma_lane();
        const i64 first = first_step(chunk) + 16 * warp_of_group() + lane.g;
        const float* row = rows_.a.at(first) + 2 * lane.q;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; i += kVec)
                    load_values<kVec>(&to[n][2 * half + i], row + 8 * half * rows_.a.stride + 8 * n + i,
                                      first + 8 * half < rows_.end && 8 * n + 2 * lane.q + i < Keys);
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

    KGEN_DEVICE float write(Tile& sums, int chunk) const {
        float poison[4] = {};  // chains that do not wait for each other
        const MmaLane lane = mma_lane();
        const i64 first = first_step(chunk) + 16 * warp_of_group() + lane.g;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool there = first + 8 * half < rows_.end;
            float* row = rows_.out.at(first + 8 * half) + 2 * lane.q;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                float* two = sums[n] + 2 * half;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    two[i] *= rows_.out_factor;
                    poison[2 * half + i] = fma(two[i], 0.0f, poison[2 * half + i]);
                }
                const int left = there ? rows_.values - 8 * n - 2 * lane.q : 0;
                if constexpr (Vec >= 2) {
                    if (left > 0)
                        store<Cache::streaming>(reinterpret_cast<kgen::Vec<float, 2>*>(row + 8 * n),
                                                kgen::Vec<float, 2>{{two[0], two[1]}});
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (i < left) row[8 * n + i] = two[i];
                }
            }
        }
        return poison[0] + poison[1] + (poison[2] + poison[3]);
    }

    // ---- what they share ----

    template <int Count>
    static KGEN_DEVICE void load_values(float* to, const float* from, bool there) {
        kgen::Vec<float, Count> values{};
        if (there)
            values = load<Cache::streaming>(reinterpret_cast<const kgen::Vec<float, Count>*>(from));
#pragma unroll
        for (int i = 0; i < Count; ++i) to[i] = values[i];
    }

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
