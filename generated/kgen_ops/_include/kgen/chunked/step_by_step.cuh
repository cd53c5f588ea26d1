// A linear recurrence one step at a time: the fallback of all chunked kernels for NaN and Inf.
//
//     S_t = decay_t S_{t-1} + b_t v_t^T          out_t = out_factor * a_t S_t / norm_t + bias
//
// Chunked kernels multiply by zeros (beyond the causal mask) and by split operands; NaN or Inf there would spread to
// outputs that do not depend on them. Here NaN and Inf reach exactly what depends on them.
//
// Shared memory: float state[Keys][BlockV], key_sum[Keys], norm (4 floats); with a norm key (chunk_norm_key.cuh)
// norm_sums[BlockV]. It reuses the kernel's shared memory.
//
// Synchronisation: begins with a block barrier, for the kernel's last reads of shared memory. A thread owns whole
// columns of the state; only key_sum and norm need barriers.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/math.cuh"

namespace kgen {

// Bytes of shared memory that run_step_by_step needs, without a norm key.
KGEN_DEVICE constexpr int step_by_step_bytes(int keys, int block_v) {
    return 4 * (keys * block_v + keys + 4);
}

// All steps of a CTA: with outputs, or the sum of a segment alone. `states` is a RecurrenceStates or has its members.
template <class T, int Keys, int Values, int BlockV, int Threads, bool KeySums, bool Normalised,
          bool Scaled, bool WithOutputs, class States, class Decay, class NormKey = NoNormKey>
KGEN_DEVICE void run_step_by_step(const RecurrenceRows<T>& rows, const States& states,
                              const Decay& decay, const NormKey& norm_key = {}) {

    float* state = dynamic_smem<float>();
    float* key_sum = state + Keys * BlockV;
    float* norm = key_sum + Keys;
    const int rank = thread_rank();
    sync_block();
    for (int i = rank; i < Keys * BlockV; i += Threads) {
        const int key = i / BlockV, value = i % BlockV;
        const bool there = WithOutputs && value < rows.values;
        state[i] = there ? states.template initial_at<kDecays<Decay>>(key, value, Keys, Values) : 0.0f;
    }
    if constexpr (KeySums && WithOutputs)
        for (int key = rank; key < Keys; key += Threads)
            key_sum[key] = states.initial_key_sum_at(key, Keys);
    [[maybe_unused]] float* norm_sums = norm + 4;
    if constexpr (kHasNormKey<NormKey>)
        for (int value = rank; value < rows.values; value += Threads)
            norm_sums[value] =
                WithOutputs && norm_key.initial != nullptr ? norm_key.initial[value] : 0.0f;
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
        [[maybe_unused]] NormKeyStep step;
        if constexpr (kHasNormKey<NormKey>) step = norm_key.at(t);
        for (int value = rank; value < rows.values; value += Threads) {
            float v = to_float(rows.v.at(t)[value]);
            if constexpr (Scaled) v *= rows.value_factor;
            if constexpr (kHasNormKey<NormKey>) v *= step.weight;
            float sum = 0.0f;
#pragma unroll 1
            for (int key = 0; key < Keys; ++key) {
                float& s = state[key * BlockV + value];
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
            if constexpr (kHasNormKey<NormKey>) {
                if (norm_key.has_key) {
                    norm_sums[value] = fma(step.y, v, norm_sums[value]);
                    sum = fma(step.x, norm_sums[value], sum);
                }
                sum *= step.factor;
            }
            if constexpr (WithOutputs) {
                const float bias = states.bias != nullptr ? states.bias[value] : 0.0f;
                rows.out.at(t)[value] = from_float<T>(sum * rows.out_factor / divisor + bias);
            }
        }
    }
    if constexpr (kHasNormKey<NormKey>)
        if (norm_key.end != nullptr)
            for (int value = rank; value < rows.values; value += Threads)
                norm_key.end[value] = norm_sums[value];
    sync_block();
    if (states.final_state == nullptr) return;
    for (int i = rank; i < Keys * BlockV; i += Threads)
        if (i % BlockV < rows.values)
            states.store_final(i / BlockV, i % BlockV,
                             state[i] * (WithOutputs ? states.final_factor : 1.0f));
}

}  // namespace kgen
