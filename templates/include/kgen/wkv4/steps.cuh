// Loads and sums of a thread's consecutive steps of `Width` adjacent channels. No function exchanges data with other
// threads.
#pragma once

#include "kgen/primitives/memory.cuh"
#include "kgen/wkv4/pair.cuh"

namespace kgen::wkv4 {

// Rows of `Width` channels of one batch row of a tensor [B, T, C].
template <class T, int Width>
struct Channels {
    T* first;      // of step 0
    i64 stride_t;  // elements between steps

    KGEN_DEVICE T* at(i64 t) const { return first + t * stride_t; }
};

// `Steps` steps of a tensor in registers, as stored.
template <class T, int Width, int Steps>
struct Held {
    Vec<T, Width> step[Steps];

    // Loads the first `count` steps from step t on.
    KGEN_DEVICE void load(const Channels<const T, Width>& rows, i64 t, int count) {
#pragma unroll
        for (int i = 0; i < Steps; ++i)
            step[i] = i < count ? load_vec<Width>(rows.at(t + i)) : Vec<T, Width>{};
    }
};

// How many of the `Steps` steps from t on come before `end`.
template <int Steps>
KGEN_DEVICE int steps_before(i64 t, i64 end) {
    return static_cast<int>(max(static_cast<i64>(0), min(end - t, static_cast<i64>(Steps))));
}

// The log decays of `Width` channels from c on; `inside`: whether they exist.
template <DecayForm Form, int Width, class W>
KGEN_DEVICE void load_decays(float (&decay)[Width], const W* w, i64 c, bool inside) {
#pragma unroll
    for (int j = 0; j < Width; ++j) decay[j] = inside ? log_decay<Form>(to_float(w[c + j])) : 0.0f;
}

// Advances sums[j] past the first `count` steps: decays the sums and adds each step's terms.
template <bool TwoParts, class T, int Width, int Steps>
KGEN_DEVICE void add_steps(PairOf<TwoParts> (&sums)[Width], const float (&decay)[Width],
                           const Held<T, Width, Steps>& k, const Held<T, Width, Steps>& v,
                           int count) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (i >= count) break;
        float keys[Width], values[Width];
        to_floats(k.step[i], keys);
        to_floats(v.step[i], values);
#pragma unroll
        for (int j = 0; j < Width; ++j) step(sums[j], decay[j], keys[j], values[j]);
    }
}

// Sums each of the first `runs` runs of `run_steps` steps of every batch row. The sum of run i of batch row b goes to
// row b * row_runs + i of `sums` (PairRows). A thread sums one run of `Width` channels; all threads of a block have the
// same run.
template <DecayForm Form, bool TwoParts, int Width, int Steps, int Threads, class T, class W>
KGEN_DEVICE void sum_runs(const T* k, const T* v, const W* w, float* sums, i64 T_, i64 C,
                          i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                          i64 run_steps, i64 runs, i64 row_runs) {
    const u32 tiles = static_cast<u32>(ceil_div(C, static_cast<i64>(Threads * Width)));
    const u32 row = blockIdx.x / tiles;  // of [B, runs]
    const i64 c = (static_cast<i64>(blockIdx.x % tiles) * Threads + threadIdx.x) * Width;
    if (c >= C) return;
    const i64 run = row % static_cast<u32>(runs), b = row / static_cast<u32>(runs);
    const i64 end = min(T_, (run + 1) * run_steps);
    const Channels<const T, Width> k_rows{k + b * k_stride_B + c, k_stride_T};
    const Channels<const T, Width> v_rows{v + b * v_stride_B + c, v_stride_T};
    float decay[Width];
    load_decays<Form>(decay, w, c, true);
    PairOf<TwoParts> total[Width];
    for (i64 t = run * run_steps; t < end; t += Steps) {
        const int count = steps_before<Steps>(t, end);
        Held<T, Width, Steps> k_held, v_held;
        k_held.load(k_rows, t, count);
        v_held.load(v_rows, t, count);
        add_steps(total, decay, k_held, v_held, count);
    }
#pragma unroll
    for (int j = 0; j < Width; ++j)
        PairRows<TwoParts>{sums, C}.put(b * row_runs + run, c + j, total[j]);
}

}  // namespace kgen::wkv4
