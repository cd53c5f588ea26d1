// gk, gw and gu of wkv5 and wkv6: a block has a slice of a head's keys and walks backward in time from
// kept state to kept state. Between two it has the states of all steps in registers.
#pragma once

#include "wkv_tiles.cuh"

namespace kgen::wkv {

// Config as for TileWalk; kKeySplit threads share a key, kKeys keys of a block; kKeep steps lie
// between two kept states.
template <class Config, int Values>
struct KeyGradients {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr int kKeep = Config::kKeep, kKeys = Config::kKeys, kStages = 2;
    static constexpr DecayForm kForm = Config::kForm;
    using State = StateTile<Values, Config::kKeySplit, 1>;
    using Part = Slice<Config::kKeySplit, 1, kKeys>;
    static constexpr int kThreads = Part::kThreads, kPitch = State::kPitch;
    static constexpr int kRows = 4 * State::kRuns;  // of a thread

    // Of dynamic shared memory: v, gy, r, k and w of the batches, then v . gy of each step.
    static constexpr int kOfW = kKeep * 2 * (kPitch + kKeys) * static_cast<int>(sizeof(Value));
    static constexpr int kBatchBytes =
        kOfW + (Config::kPerStep ? kKeep * kKeys * static_cast<int>(sizeof(W)) : 0);

    Part slice;
    i64 steps;
    Steps<Value> gy, r, k, v;
    Steps<W> w;
    float bonus;  // u of the key
    float scale;

    // kept: the head's, [V, keys] each; the other states are [keys, V] or null. of_k(t, gk) and
    // of_w(t, gw, writes) take a step's gradients, of_w in all threads of a key, of_u(gu) the last.
    template <class OfK, class OfW, class OfU>
    KGEN_DEVICE void operator()(const float* initial_state, const float* kept, i64 keys,
                                const float* gfinal_state, OfK of_k, OfW of_w, OfU of_u) const {
        char* shared = dynamic_smem<char>();
        float* products = reinterpret_cast<float*>(shared + kStages * kBatchBytes);
        const int place = slice.place(0), key = slice.column(0);
        const bool used = slice.uses(0);

        float gradient[kRows], before[kKeep][kRows];
        load(gradient, gfinal_state, key * Values, 1);
        const float fixed =
            Config::kPerStep || !used ? 1.0f : decay_of<kForm>(to_float(w.first[key]));
        CompensatedSum gu;
        in_batches<kKeep, kStages>(
            steps, [&](i64 begin, int slot) { stage(shared + slot * kBatchBytes, begin); },
            [&](i64 begin, int there, int slot) {
                const Value* rows_v = reinterpret_cast<const Value*>(shared + slot * kBatchBytes);
                const Value* rows_g = rows_v + kKeep * kPitch;
                const Value* keys_r = rows_g + kKeep * kPitch;
                const Value* keys_k = keys_r + kKeep * kKeys;
                const W* keys_w = reinterpret_cast<const W*>(shared + slot * kBatchBytes + kOfW);
                const auto decay = [&](int i) {
                    return Config::kPerStep ? decay_of<kForm>(to_float(keys_w[i * kKeys + place]))
                                            : fixed;
                };
                const auto slope = [&](int i, float d) {
                    if constexpr (kForm == DecayForm::log) return d;  // nothing else is read
                    const W* of_step =
                        Config::kPerStep ? keys_w + i * kKeys + place : w.first + key;
                    return decay_slope<kForm>(used ? to_float(*of_step) : 0.0f, d);
                };
                for (int i = thread_rank() / kWarpSize; i < there; i += kThreads / kWarpSize) {
                    const float product = warp_dot(rows_v + i * kPitch, rows_g + i * kPitch,
                                                   Values, [](int) { return 1.0f; });
                    if (lane_id() == 0) products[i] = product * scale;
                }
                sync_block();

                // 1. Forward in time from the kept state: the states before each step.
                float state[kRows];
                if (begin + there == steps) {
                    load(state, initial_state, key * Values, 1);
                } else {
                    load(state, kept + begin / kKeep * Values * keys, key, keys);
                }
#pragma unroll
                for (int i = kKeep - 1; i >= 0; --i) {
                    if (i >= there) continue;
#pragma unroll
                    for (int x = 0; x < kRows; ++x) before[i][x] = state[x];
                    if (i == 0) continue;
                    const float d = decay(i), of_key = to_float(keys_k[i * kKeys + place]);
                    each_row(rows_v + i * kPitch, [&](int x, float value, bool exists) {
                        state[x] = exists ? fma(d, state[x], of_key * value) : 0.0f;
                    });
                }

                // 2. Backward in time.
#pragma unroll
                for (int i = 0; i < kKeep; ++i) {
                    if (i >= there) continue;
                    const i64 t = time_of<Walk::backward>(begin + i, steps);
                    const float d = decay(i), query = to_float(keys_r[i * kKeys + place]);
                    float read = 0.0f, inner = 0.0f;
                    each_row(rows_v + i * kPitch, [&](int x, float value, bool) {
                        read = fma(gradient[x], value, read);
                        inner = fma(gradient[x], before[i][x], inner);
                    });
                    each_row(rows_g + i * kPitch, [&](int x, float g, bool exists) {
                        gradient[x] = exists ? fma(d, gradient[x], scale * query * g) : 0.0f;
                    });
                    read = lanes_sum<Config::kKeySplit>(read);
                    inner = lanes_sum<Config::kKeySplit>(inner);
                    if (used && slice.lane() == i % Config::kKeySplit)
                        of_k(t, fma(products[i], bonus * query, read));
                    of_w(t, slope(i, d) * inner, used && slice.lane() == i % Config::kKeySplit);
                    gu.add(products[i] * query * to_float(keys_k[i * kKeys + place]));
                }
            });
        if (used && slice.lane() == 0) of_u(gu.value());
    }

private:
    // Call visit(x, value, exists) for every row of the thread, with values in shared memory.
    template <class Visit>
    static KGEN_DEVICE void each_row(const Value* rows, Visit visit) {
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run) {
            float four[4];
            to_floats(*reinterpret_cast<const Vec<Value, 4>*>(rows + State::first_row(run)), four);
#pragma unroll
            for (int j = 0; j < 4; ++j) visit(run * 4 + j, four[j], State::exists(run, j));
        }
    }

    KGEN_DEVICE void load(float (&rows)[kRows], const float* from, i64 column, i64 stride) const {
#pragma unroll
        for (int x = 0; x < kRows; ++x) {
            const bool there =
                from != nullptr && slice.uses(0) && State::exists(x / 4, x % 4);
            rows[x] = there ? from[column + (State::first_row(x / 4) + x % 4) * stride] : 0.0f;
        }
    }

    KGEN_DEVICE void stage(char* batch, i64 begin) const {
        constexpr int kVec = Config::kVec;
        constexpr Walk kBack = Walk::backward;
        Value* target = reinterpret_cast<Value*>(batch);
        copy_steps<kBack, kThreads, kKeep, kPitch, kVec>(target, v, Values, begin, steps);
        target += kKeep * kPitch;
        copy_steps<kBack, kThreads, kKeep, kPitch, kVec>(target, gy, Values, begin, steps);
        target += kKeep * kPitch;
        const Steps<Value> of_r{r.first + slice.first, r.stride};
        copy_steps<kBack, kThreads, kKeep, kKeys, kVec>(target, of_r, slice.width(), begin, steps);
        target += kKeep * kKeys;
        const Steps<Value> of_k{k.first + slice.first, k.stride};
        copy_steps<kBack, kThreads, kKeep, kKeys, kVec>(target, of_k, slice.width(), begin, steps);
        if constexpr (Config::kPerStep) {
            const Steps<W> of_w{w.first + slice.first, w.stride};
            copy_steps<kBack, kThreads, kKeep, kKeys, kVecOfW<Config>>(
                reinterpret_cast<W*>(batch + kOfW), of_w, slice.width(), begin, steps);
        }
    }
};

// gk, gw and parts of gu; a block per head and slice of keys. of_w(span, t, h, key, gw, writes)
// takes gw_t in all threads of the key, one of which writes.
template <class Config, int K, int V, class T, class W, class U, class Offset, class OfW>
KGEN_DEVICE void key_gradients(i64 all_steps, i64 H, const Offset* offsets, Rows<const T> gy,
                               Rows<const T> r, Rows<const T> k, Rows<const T> v,
                               Rows<const W> w, const U* u,
                               const float* initial_state, const float* gfinal_state,
                               const float* kept, Rows<T> gk, float* gu_parts, float scale,
                               OfW of_w) {
    using Gradients = KeyGradients<Config, V>;
    constexpr int kSlices = ceil_div(K, Config::kKeys);
    const i64 head = blockIdx.x / kSlices, h = head % H;
    const Span span = span_of(offsets, head / H, all_steps);
    const typename Gradients::Part slice{
        static_cast<int>(blockIdx.x % kSlices) * Config::kKeys, K};
    const int key = slice.column(0);
    const Gradients gradients{slice, span.steps, steps_of(gy, span, h), steps_of(r, span, h),
                              steps_of(k, span, h), steps_of(v, span, h), steps_of(w, span, h),
                              slice.uses(0) ? to_float(u[h * K + key]) : 0.0f, scale};
    const auto gk_h = gk.head(span, h);
    gradients(
        initial_state ? initial_state + head * K * V : nullptr,
        kept + first_kept<Config::kKeep, Offset>(span, head, h, all_steps) * K * V, K,
        gfinal_state ? gfinal_state + head * K * V : nullptr,
        [&](i64 t, float x) { gk_h.at(t)[key] = from_float<T>(x); },
        [&](i64 t, float x, bool writes) { of_w(span, t, h, key, x, writes); },
        [&](float gu) { gu_parts[head * K + key] = gu; });
}

}  // namespace kgen::wkv
