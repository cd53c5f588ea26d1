// A linear recurrence step by step, as it is written: for what chunk_walk.cuh finds not to be finite.
#pragma once

#include "block.cuh"
#include "chunk_place.cuh"
#include "math.cuh"

namespace kgen {

// Bytes of shared memory that walk_plainly needs.
KGEN_DEVICE constexpr int plain_walk_bytes(int keys, int slice) {
    return 4 * (keys * slice + keys + 4);
}

// All of a block's walk, or of its sum without outputs: NaN and Inf reach what depends on them and
// nothing else. A thread has value features of its own. `states` is a WalkStates, or has its members.
// Begins with a block barrier.
template <class T, int Keys, int Values, int Slice, int Threads, bool KeySums, bool Normalised,
          bool Scaled, bool WithOutputs, class States, class Decay>
KGEN_DEVICE void walk_plainly(const WalkRows<T>& rows, const States& states,
                              const Decay& decay) {
    // Shared memory: float state[Keys][Slice], key_sum[Keys], norm.
    float* state = dynamic_smem<float>();
    float* key_sum = state + Keys * Slice;
    float* norm = key_sum + Keys;
    const int rank = thread_rank();
    sync_block();
    for (int i = rank; i < Keys * Slice; i += Threads) {
        const int key = i / Slice, value = i % Slice;
        const bool there = WithOutputs && value < rows.values;
        state[i] = there ? states.template first<kDecays<Decay>>(key, value, Keys, Values) : 0.0f;
    }
    if constexpr (KeySums && WithOutputs)
        for (int key = rank; key < Keys; key += Threads)
            key_sum[key] = states.first_key_sum(key, Keys);
    sync_block();

#pragma unroll 1
    for (i64 t = rows.first; t < rows.end; ++t) {
        const T* a = rows.a.at(t);
        const T* b = rows.b.at(t);
        float divisor = 1.0f;
        if constexpr (KeySums && WithOutputs) {
            for (int key = rank; key < Keys; key += Threads) key_sum[key] += to_float(b[key]);
            sync_block();
            if (Normalised && rank == 0) {
                float sum = 0.0f;
                for (int key = 0; key < Keys; ++key) sum = fma(to_float(a[key]), key_sum[key], sum);
                *norm = fma(rows.out_factor, sum, states.eps);
                if (states.norm != nullptr) states.norm[t] = *norm;
            }
            sync_block();
            if constexpr (Normalised) divisor = *norm;
        }
        for (int value = rank; value < rows.values; value += Threads) {
            float v = to_float(rows.v.at(t)[value]);
            if constexpr (Scaled) v *= rows.value_factor;
            float sum = 0.0f;
#pragma unroll 1
            for (int key = 0; key < Keys; ++key) {
                float& s = state[key * Slice + value];
                if constexpr (kDecays<Decay>) {
                    const float product = to_float(b[key]) * v;
                    if constexpr (WithOutputs)
                        sum = fma(to_float(a[key]), fma(to_float(decay.u[key]), product, s), sum);
                    s = fma(decay.of(t, key), s, product);
                } else {
                    s = fma(to_float(b[key]), v, s);
                    if constexpr (WithOutputs) sum = fma(to_float(a[key]), s, sum);
                }
            }
            if constexpr (WithOutputs) {
                const float bias = states.bias != nullptr ? states.bias[value] : 0.0f;
                rows.out.at(t)[value] = from_float<T>(sum * rows.out_factor / divisor + bias);
            }
        }
    }
    sync_block();
    if (states.end == nullptr) return;
    for (int i = rank; i < Keys * Slice; i += Threads)
        if (i % Slice < rows.values)
            states.store_end(i / Slice, i % Slice,
                             state[i] * (WithOutputs ? states.end_factor : 1.0f));
}

}  // namespace kgen
