// gr, gw, gk, ga and gb of one chunk of steps, with rows of wkv7's state and its gradient in registers, CUDA cores.
//
// 1. Forward from the state before the chunk: the states before all of its steps, and gr.
// 2. Backward from the gradient of the state after it: gw, gk, ga and gb.
//
// Layout: a block has kKeys keys of a head and one chunk of kSteps steps. kKeySplit threads share a key: they share out
// the value features of its rows of S and G, in runs of four.
//
// Shared memory, V short for the padded value features:
//
//     float sa[kSteps][V], gsa[kSteps][V]
//     Value v[kSteps][V], gy[kSteps][V], r[kSteps][kKeys], k, a, b; W w[kSteps][kKeys]
//
// Synchronisation: one group of cp.async, one block barrier.
//
// Config: Value and W; kK and kV: numbers of keys and value features; kForm; kSteps, kKeySplit, kKeys; kVec: elements
// per copy.
#pragma once

#include "kgen/wkv/state_columns.cuh"
#include "kgen/wkv7/checkpoints.cuh"

namespace kgen::wkv7 {

template <class Config>
struct KeyRows {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr int kSteps = Config::kSteps, kKeys = Config::kKeys, kSplit = Config::kKeySplit;
    using Geometry = ThreadStateTile<Config::kV, kSplit, 1>;
    using Columns = kgen::wkv::BlockColumns<kSplit, 1, kKeys>;
    static constexpr int kThreads = Columns::kThreads, kPitch = Geometry::kPitch;
    static constexpr int kRows = 4 * Geometry::kRuns;  // of a thread
    static constexpr int kVecOfFloats = min(Config::kVec, 4);

    Columns keys;
    int steps;                           // of the chunk
    StepPointer<Value> gy, r, k, v, a, b;  // from its first step on
    StepPointer<W> w;
    StepPointer<float> sa, gsa;
    float scale;

    // The gradients of a step and key.
    struct Gradients {
        float w, k, a, b;
    };

    // state: before the chunk, gradient: after it, [K, V] each. put_r(t, gr) and put(t, gradients) are called once
    // per step and key.
    template <class PutR, class Put>
    KGEN_DEVICE void operator()(const float* state, const float* gradient, PutR put_r,
                                Put put) const {
        // 1. The chunk's rows.
        float* rows_sa = dynamic_smem<float>();
        float* rows_gsa = rows_sa + kSteps * kPitch;
        Value* rows_v = reinterpret_cast<Value*>(rows_gsa + kSteps * kPitch);
        Value* rows_g = rows_v + kSteps * kPitch;
        Value* keys_r = rows_g + kSteps * kPitch;
        Value* keys_k = keys_r + kSteps * kKeys;
        Value* keys_a = keys_k + kSteps * kKeys;
        Value* keys_b = keys_a + kSteps * kKeys;
        W* keys_w = reinterpret_cast<W*>(keys_b + kSteps * kKeys);
        copy_rows<kVecOfFloats>(rows_sa, sa);
        copy_rows<kVecOfFloats>(rows_gsa, gsa);
        copy_rows<Config::kVec>(rows_v, v);
        copy_rows<Config::kVec>(rows_g, gy);
        copy_keys<Config::kVec>(keys_r, r);
        copy_keys<Config::kVec>(keys_k, k);
        copy_keys<Config::kVec>(keys_a, a);
        copy_keys<Config::kVec>(keys_b, b);
        copy_keys<kgen::wkv::kVecOfW<Config>>(keys_w, w);
        cp_async_commit();

        float before[kSteps + 1][kRows], back[kRows];
        load(before[0], state);
        load(back, gradient);
        cp_async_wait<0>();
        sync_block();

        const int place = keys.in_block(0);
        // 2. Forward in time.
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (i >= steps) break;
            const int at = i * kKeys + place;
            const float d = decay_of<Config::kForm>(to_float(keys_w[at]));
            const float k_t = to_float(keys_k[at]), b_t = to_float(keys_b[at]);
            float by_r = 0.0f;
#pragma unroll
            for (int run = 0; run < Geometry::kRuns; ++run) {
                float v4[4], g4[4], sa4[4];
                four(rows_v + i * kPitch, run, v4);
                four(rows_g + i * kPitch, run, g4);
                four(rows_sa + i * kPitch, run, sa4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int x = 4 * run + j;
                    before[i + 1][x] = Geometry::exists(run, j)
                                           ? fma(d, before[i][x], fma(b_t, sa4[j], k_t * v4[j]))
                                           : 0.0f;
                    by_r = fma(before[i + 1][x], g4[j], by_r);
                }
            }
            by_r = lanes_sum<kSplit>(by_r);
            if (writes(i)) put_r(i, scale * by_r);
        }

        // 3. Backward in time.
#pragma unroll
        for (int i = kSteps - 1; i >= 0; --i) {
            if (i >= steps) continue;
            const int at = i * kKeys + place;
            const float w_t = to_float(keys_w[at]), d = decay_of<Config::kForm>(w_t);
            const float r_t = scale * to_float(keys_r[at]), a_t = to_float(keys_a[at]);
            Gradients by{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int run = 0; run < Geometry::kRuns; ++run) {
                float v4[4], g4[4], sa4[4], gsa4[4];
                four(rows_v + i * kPitch, run, v4);
                four(rows_g + i * kPitch, run, g4);
                four(rows_sa + i * kPitch, run, sa4);
                four(rows_gsa + i * kPitch, run, gsa4);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int x = 4 * run + j;
                    const float total = fma(r_t, g4[j], back[x]);
                    by.w = fma(before[i][x], total, by.w);
                    by.k = fma(total, v4[j], by.k);
                    by.a = fma(before[i][x], gsa4[j], by.a);
                    by.b = fma(total, sa4[j], by.b);
                    back[x] = Geometry::exists(run, j) ? fma(d, total, a_t * gsa4[j]) : 0.0f;
                }
            }
            by = {lanes_sum<kSplit>(by.w), lanes_sum<kSplit>(by.k), lanes_sum<kSplit>(by.a),
                  lanes_sum<kSplit>(by.b)};
            by.w *= decay_slope<Config::kForm>(w_t, d);
            if (writes(i)) put(i, by);
        }
    }

private:
    // Whether this thread writes the key's gradients of a step.
    KGEN_DEVICE bool writes(int step) const {
        return keys.uses(0) && keys.lane() == step % kSplit;
    }

    template <class T>
    static KGEN_DEVICE void four(const T* row, int run, float (&values)[4]) {
        to_floats(*reinterpret_cast<const Vec<T, 4>*>(row + Geometry::first_row(run)), values);
    }

    KGEN_DEVICE void load(float (&rows)[kRows], const float* state) const {
#pragma unroll
        for (int x = 0; x < kRows; ++x)
            rows[x] = keys.uses(0) && Geometry::exists(x / 4, x % 4)
                          ? state[static_cast<i64>(keys.column(0)) * Config::kV +
                                  Geometry::first_row(x / 4) + x % 4]
                          : 0.0f;
    }

    template <int Vec, class T>
    KGEN_DEVICE void copy_rows(T* target, StepPointer<T> source) const {
        copy_steps<Direction::forward, kThreads, kSteps, kPitch, Vec>(target, source, Config::kV, 0,
                                                                      steps);
    }
    template <int Vec, class T>
    KGEN_DEVICE void copy_keys(T* target, StepPointer<T> source) const {
        copy_steps<Direction::forward, kThreads, kSteps, kKeys, Vec>(
            target, StepPointer<T>{source.first + keys.first, source.stride}, keys.width(), 0,
            steps);
    }
};

// One block computes kKeys keys of a head and chunk. It returns at once if packed sequences leave the chunk's number
// unused.
template <class Config, class Offset>
KGEN_DEVICE void backward_rows(const Offset* cu_seqlens, i64 N, i64 T, i64 H,
                               const KeyRowsTensors<typename Config::Value, typename Config::W>& x,
                               float scale) {
    using Value = typename Config::Value;
    using W = typename Config::W;
    using Loop = KeyRows<Config>;
    constexpr int kKeyBlocks = ceil_div(Config::kK, Config::kKeys), kSize = Config::kK * Config::kV;

    // 1. The block's chunk, head and keys.
    const int block = static_cast<int>(blockIdx.x % kKeyBlocks);
    const i64 h = blockIdx.x / kKeyBlocks % H, index = blockIdx.x / kKeyBlocks / H;
    const Chunk chunk = chunk_at<Config::kSteps>(cu_seqlens, index, N, T);
    if (chunk.steps == 0) return;  // untested: only packed sequences leave numbers of chunks unused
    const i64 number = h * head_chunks<Config::kSteps, kPresent<Offset>>(N, T) + index;
    const Span span{chunk.span.b, chunk.span.first + chunk.first, chunk.steps};
    const typename Loop::Columns keys{block * Config::kKeys, Config::kK};
    const int key = keys.column(0);
    const auto gr = x.gr.head(span, h), gk = x.gk.head(span, h);
    const auto ga = x.ga.head(span, h), gb = x.gb.head(span, h);
    const auto gw = x.gw.head(span, h);

    // 2. Its gradients.
    const Loop loop{keys,
                    chunk.steps,
                    step_pointer(x.gy, span, h),
                    step_pointer(x.r, span, h),
                    step_pointer(x.k, span, h),
                    step_pointer(x.v, span, h),
                    step_pointer(x.a, span, h),
                    step_pointer(x.b, span, h),
                    step_pointer(x.w, span, h),
                    step_pointer(dense_rows(x.sa, T, H, Config::kV), span, h),
                    step_pointer(dense_rows(x.gsa, T, H, Config::kV), span, h),
                    scale};
    loop(x.states + number * kSize, x.gradients + number * kSize,
         [&](int t, float by_r) { gr.at(t)[key] = from_float<Value>(by_r); },
         [&](int t, const typename Loop::Gradients& by) {
             gw.at(t)[key] = from_float<W>(by.w);
             gk.at(t)[key] = from_float<Value>(by.k);
             ga.at(t)[key] = from_float<Value>(by.a);
             gb.at(t)[key] = from_float<Value>(by.b);
         });
}

}  // namespace kgen::wkv7
