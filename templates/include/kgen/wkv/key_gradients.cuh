// gk, gw and parts of gu of wkv5 and wkv6 on CUDA cores, backward in time from checkpoint to checkpoint of the state.
//
//     n_t  = v_t . g_t               gk_t = G_t v_t + n_t u r_t     gu = sum_t n_t r_t k_t
//     gw_t = dd_t/dw_t S_{t-1} . G_t per key                        G_{t-1} = diag(d_t) G_t + r_t g_t^T
//
// Layout: a block has kKeys keys of a head. kKeySplit threads share a key: they share out the value features of its
// rows of S and G, in runs of four. Between two checkpoints a thread holds the states before all kCheckpointSteps steps
// in registers.
//
// Shared memory, V short for the padded value features:
//
//     2 x { Value v[steps][V], gy[steps][V], r[steps][kKeys], k[steps][kKeys]; W w[steps][kKeys], if w has steps }
//     float products[steps]     n of the steps in use
//
// Synchronisation: cp.async, one buffer ahead; two block barriers per buffer, as in state_columns.cuh.
#pragma once

#include "kgen/wkv/state_columns.cuh"

namespace kgen::wkv {

// Config: that of StateColumns, plus kKeySplit, kKeys and kCheckpointSteps.
template <class Config, int Values>
struct KeyGradients {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr int kSteps = Config::kCheckpointSteps, kKeys = Config::kKeys, kStages = 2;
    static constexpr DecayForm kForm = Config::kForm;
    using State = ThreadStateTile<Values, Config::kKeySplit, 1>;
    using Columns = BlockColumns<Config::kKeySplit, 1, kKeys>;
    static constexpr int kThreads = Columns::kThreads, kPitch = State::kPitch;
    static constexpr int kRows = 4 * State::kRuns;  // of a thread

    static constexpr int kBytesOfRows =
        kSteps * 2 * (kPitch + kKeys) * static_cast<int>(sizeof(Value));
    static constexpr int kBufferBytes =
        kBytesOfRows + (Config::kPerStep ? kSteps * kKeys * static_cast<int>(sizeof(W)) : 0);

    Columns columns;
    i64 steps;
    StepPointer<Value> gy, r, k, v;
    StepPointer<W> w;
    float bonus;  // u of the key
    float scale;

    // checkpoints: the head's, [V, keys] each; the other states are [keys, V] or null. put_k(t, gk) and put_w(t, gw,
    // writes) receive a step's gradients (put_w in all threads of a key), put_u(gu) receives the sum at the end.
    template <class PutK, class PutW, class PutU>
    KGEN_DEVICE void operator()(const float* initial_state, const float* checkpoints, i64 keys,
                                const float* gfinal_state, PutK put_k, PutW put_w,
                                PutU put_u) const {
        char* shared = dynamic_smem<char>();
        float* products = reinterpret_cast<float*>(shared + kStages * kBufferBytes);
        const int place = columns.in_block(0), key = columns.column(0);
        const bool used = columns.uses(0);

        float gradient[kRows], before[kSteps][kRows];
        load(gradient, gfinal_state, key * Values, 1);
        const float constant =
            Config::kPerStep || !used ? 1.0f : decay_of<kForm>(to_float(w.first[key]));
        CompensatedSum gu;
        for_each_batch<kSteps, kStages>(
            steps, [&](i64 begin, int slot) { stage(shared + slot * kBufferBytes, begin); },
            [&](i64 begin, int there, int slot) {
                const Value* rows_v = reinterpret_cast<const Value*>(shared + slot * kBufferBytes);
                const Value* rows_g = rows_v + kSteps * kPitch;
                const Value* keys_r = rows_g + kSteps * kPitch;
                const Value* keys_k = keys_r + kSteps * kKeys;
                const W* keys_w =
                    reinterpret_cast<const W*>(shared + slot * kBufferBytes + kBytesOfRows);
                const auto decay = [&](int i) {
                    return Config::kPerStep ? decay_of<kForm>(to_float(keys_w[i * kKeys + place]))
                                            : constant;
                };
                const auto slope = [&](int i, float d) {
                    if constexpr (kForm == DecayForm::log) return d;  // w is not read again
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

                // 1. Forward in time from the checkpoint: the states before each step.
                float state[kRows];
                if (begin + there == steps) {
                    load(state, initial_state, key * Values, 1);
                } else {
                    load(state, checkpoints + begin / kSteps * Values * keys, key, keys);
                }
#pragma unroll
                for (int i = kSteps - 1; i >= 0; --i) {
                    if (i >= there) continue;
#pragma unroll
                    for (int x = 0; x < kRows; ++x) before[i][x] = state[x];
                    if (i == 0) continue;
                    const float d = decay(i), of_key = to_float(keys_k[i * kKeys + place]);
                    each_row(rows_v + i * kPitch, [&](int x, float value, bool exists) {
                        state[x] = exists ? fma(d, state[x], of_key * value) : 0.0f;
                    });
                }

                // 2. Backward in time: gradients of these steps.
#pragma unroll
                for (int i = 0; i < kSteps; ++i) {
                    if (i >= there) continue;
                    const i64 t = time_of<Direction::backward>(begin + i, steps);
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
                    if (used && columns.lane() == i % Config::kKeySplit)
                        put_k(t, fma(products[i], bonus * query, read));
                    put_w(t, slope(i, d) * inner, used && columns.lane() == i % Config::kKeySplit);
                    gu.add(products[i] * query * to_float(keys_k[i * kKeys + place]));
                }
            });
        if (used && columns.lane() == 0) put_u(gu.value());
    }

private:
    // Calls visit(x, value, exists) for every row of the thread, with values in shared memory.
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
                from != nullptr && columns.uses(0) && State::exists(x / 4, x % 4);
            rows[x] = there ? from[column + (State::first_row(x / 4) + x % 4) * stride] : 0.0f;
        }
    }

    KGEN_DEVICE void stage(char* buffer, i64 begin) const {
        constexpr int kVec = Config::kVec;
        constexpr Direction kBack = Direction::backward;
        Value* target = reinterpret_cast<Value*>(buffer);
        copy_steps<kBack, kThreads, kSteps, kPitch, kVec>(target, v, Values, begin, steps);
        target += kSteps * kPitch;
        copy_steps<kBack, kThreads, kSteps, kPitch, kVec>(target, gy, Values, begin, steps);
        target += kSteps * kPitch;
        const StepPointer<Value> of_r{r.first + columns.first, r.stride};
        copy_steps<kBack, kThreads, kSteps, kKeys, kVec>(target, of_r,
                                                         columns.width(), begin, steps);
        target += kSteps * kKeys;
        const StepPointer<Value> of_k{k.first + columns.first, k.stride};
        copy_steps<kBack, kThreads, kSteps, kKeys, kVec>(target, of_k,
                                                         columns.width(), begin, steps);
        if constexpr (Config::kPerStep) {
            const StepPointer<W> of_w{w.first + columns.first, w.stride};
            copy_steps<kBack, kThreads, kSteps, kKeys, kVecOfW<Config>>(
                reinterpret_cast<W*>(buffer + kBytesOfRows), of_w, columns.width(), begin, steps);
        }
    }
};

}  // namespace kgen::wkv
