// The states before the segments of a block's rounds, or before its rounds, to global memory.
//
// A block has Lanes * Vec channels of a batch row and takes the rounds in order: a thread sums its segment, barrier A,
// and one thread for each channel goes through the segments' sums.
//
// Shared memory: two sets of WholeSlots of `Segments`, which rounds alternate between: a thread that writes a slot in
// round r + 2 has passed A of round r + 1, which the channel's thread reaches after its reads of round r.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/wkv4/running_gradients.cuh"

namespace kgen::wkv4 {

// The place of a thread's channels, or of a column of shared memory: channel column / Lanes of lane column % Lanes.
template <int Lanes, int Vec>
struct Place {
    i64 c, b;

    KGEN_DEVICE explicit Place(i64 C) {
        const u32 tiles = static_cast<u32>(ceil_div(C, static_cast<i64>(Lanes * Vec)));
        b = blockIdx.x / tiles;
        c = static_cast<i64>(blockIdx.x % tiles) * (Lanes * Vec);
    }
    KGEN_DEVICE i64 of_lane(int lane) const { return c + lane * Vec; }
    KGEN_DEVICE i64 of_column(int column) const { return c + column % Lanes * Vec + column / Lanes; }
};

// A block's rounds of Segments * Steps steps. `Final`: the gradient after the last step is stored after the states.
template <class Value, int Lanes, int Vec, int Segments, int Steps, bool Final>
struct StateRounds {
    using Rows = StepRows<const Value, Vec>;
    using Steps_ = Loaded<Value, Vec, Steps>;
    using State = WholeSum<Final>;
    using Sum = WholeSum<false>;
    using Slots = WholeSlots<Lanes * Vec, Final>;
    static constexpr int kRound = Segments * Steps;

    // Stores to `states` [B, rounds * Segments + 1, 3, C] the state before each segment, or with `PerRound` to
    // [B, rounds, 3, C] that before each round.
    template <bool Prefetch, bool PerRound, DecayForm Form, class W>
    KGEN_DEVICE static void store(const Slots& slots, const Value* k, const Value* v, const W* w,
                                  const float* gfinal_state, float* segment_states, i64 T, i64 C,
                                  i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                                  i64 rounds) {
        static_assert(!(PerRound && Final), "the gradient after the last step has no row");
        const int lane = static_cast<int>(threadIdx.x) % Lanes;
        const int segment = static_cast<int>(threadIdx.x) / Lanes;
        const Place<Lanes, Vec> place(C);
        const i64 c = place.of_lane(lane), column = c < C ? c : 0;
        ChannelExponents channel[Vec];
#pragma unroll
        for (int j = 0; j < Vec; ++j)
            channel[j].set(log_decay<Form>(to_float(w[column + j])), 0.0f);
        const Rows k_rows(k + place.b * k_stride_B + column, k_stride_T);
        const Rows v_rows(v + place.b * v_stride_B + column, v_stride_T);

        const int own = static_cast<int>(threadIdx.x);
        const i64 own_c = place.of_column(own);
        const bool scans = own < Lanes * Vec && own_c < C;
        const WholeRows states{segment_states, C};
        const i64 first_row = place.b * (PerRound ? rounds : rounds * Segments + 1);
        State before;
        WholeDecay decay;
        float own_decay = 0.0f;
        if (scans) {
            own_decay = log_decay<Form>(to_float(w[own_c]));
            decay = WholeDecay::of(own_decay, Steps);
        }

        Steps_ k_held, v_held, k_next, v_next;
        i64 t = segment * Steps;  // of the thread's first step
        int count = steps_before<Steps>(t, T);
        load_steps(k_held, k_rows, k_rows.at(t), count);
        load_steps(v_held, v_rows, v_rows.at(t), count);
        int parity = 0;
#pragma unroll 1
        for (i64 round = 0; round < rounds; ++round, parity ^= 1) {
            const int next = steps_before<Steps>(t + kRound, T);
            if constexpr (Prefetch) {
                load_steps(k_next, k_rows, k_rows.at(t + kRound), next);
                load_steps(v_next, v_rows, v_rows.at(t + kRound), next);
            }
            float keys[Steps][Vec];
            to_keys(keys, k_held);
            State sums[Vec];
            if (count == Steps)
                sum_segment<true>(sums, channel, keys, v_held, Steps);
            else
                sum_segment<false>(sums, channel, keys, v_held, count);
            const int slot = parity * Segments;
#pragma unroll
            for (int j = 0; j < Vec; ++j) slots.put(slot + segment, j * Lanes + lane, sums[j]);
            sync_block();  // A
            if (scans) {
                if constexpr (PerRound)
                    states.put(first_row + round, own_c, Sum{before.exponent, before.a, before.b});
                // The steps of the last round that are not there matter to the last state alone.
                const bool whole = !Final || round + 1 < rounds;
#pragma unroll 8
                for (int i = 0; i < Segments; ++i) {
                    if constexpr (!PerRound) {
                        const Sum found{before.exponent, before.a, before.b};
                        states.put(first_row + round * Segments + i, own_c, found);
                    }
                    if (!whole) {
                        const i64 begin = round * kRound + i * Steps;
                        decay = WholeDecay::of(own_decay, steps_before<Steps>(begin, T));
                    }
                    before.append(decay, slots.get(slot + i, own));
                    before.normalise(before.b);
                }
            }
            t += kRound;
            count = next;
            if constexpr (Prefetch) {
                k_held = k_next;
                v_held = v_next;
            } else {
                load_steps(k_held, k_rows, k_rows.at(t), count);
                load_steps(v_held, v_rows, v_rows.at(t), count);
            }
        }
        // The gradient after the last step is after the states.
        if constexpr (Final) {
            if (scans)
                states.put(first_row + rounds * Segments, own_c,
                           last_gradient(gfinal_state, place.b * C + own_c, before));
        }
    }
};

}  // namespace kgen::wkv4
