// gr, gw, gk, ga and gb of one chunk of steps on CUDA cores, with rows of wkv7's state and its gradient in registers
// and all inputs prepared in shared memory: fp32, decays and their slopes computed once per step and key.
//
// 1. Forward from the state before the chunk: the states before all of its steps, and gr.
// 2. Backward from the gradient of the state after it: gw, gk, ga and gb.
//
// gw of a step is a sum over value features of S * G of that step, as in key_rows.cuh. Sums over pairs of steps, which
// tensor cores would compute, nearly cancel.
//
// Layout: a block has kKeys keys of a head and one chunk of kSteps steps. kKeySplit threads share a key: they share out
// the value features of its rows of S and G, in runs of four. Two neighbouring lanes have the same runs of two keys: a
// load of 16 bytes per lane takes two cycles of shared memory where pairs of lanes read the same address, and four
// elsewhere.
//
// Shared memory, V short for the padded value features:
//
//     float sa[kSteps][V], gsa[kSteps][V], v[kSteps][V], gy[kSteps][V]
//     float keys[kSteps][kKeys][8]    d, k, b, dd/dw; d, scale * r, a, none; results replace d, k, b, a, none
//
// Each load has 16 bytes: a run of value features, or the inputs of a key for one direction. Beyond the last step
// decays are 1, and all else is zero.
//
// Bank conflicts: none; for the results' sake the eight words of a key are adjacent.
//
// Synchronisation: two block barriers. The threads that write a key's results of a step are in one warp with all
// threads that read its inputs, and shuffles lie between these reads and writes.
//
// Config: Value and W; kK and kV: numbers of keys and value features; kForm; kSteps, kKeySplit, kKeys; kVec: elements
// per load.
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv/state_columns.cuh"
#include "kgen/wkv7/row_gradients.cuh"
#include "kgen/wkv7/row_scores.cuh"

namespace kgen::wkv7 {

// d and dd/dw of w: like decay_of and decay_slope, but with as few exponentials as possible and without divisions.
struct DecayAndSlope {
    float decay, slope;
};
template <DecayForm Form>
KGEN_DEVICE DecayAndSlope decay_and_slope(float w) {
    if constexpr (Form == DecayForm::clamp) {
        const float e = exp(-abs(w)), large = fast_reciprocal(1.0f + e), small = e * large;
        const float d = exp(-kClamp * (w < 0.0f ? small : large));
        return {d, -kClamp * small * large * d};
    } else {
        const float d = decay_of<Form>(w);
        return {d, decay_slope<Form>(w, d)};
    }
}

// The sums of four values over groups of Lanes lanes that are First lanes apart. Lane `rank` of a group gets the sum of
// value number_of_sum(rank).
template <int Lanes, int First>
KGEN_DEVICE float lanes_sums(const float (&x)[4]) {
    static_assert(Lanes >= 4, "a lane has one sum");
    const bool upper = lane_id() & First, odd = lane_id() & 2 * First;
    // Values, not elements: a choice between elements would be a choice between addresses, and x would lie in memory.
    const float a = x[0], b = x[1], c = x[2], d = x[3];
    const float first = (upper ? c : a) + shfl_xor(upper ? a : c, First);
    const float second = (upper ? d : b) + shfl_xor(upper ? b : d, First);
    float sum = (odd ? second : first) + shfl_xor(odd ? first : second, 2 * First);
#pragma unroll
    for (int distance = 4; distance < Lanes; distance *= 2) sum += shfl_xor(sum, distance * First);
    return sum;
}
KGEN_DEVICE int number_of_sum(int rank) { return rank % 2 * 2 + rank / 2 % 2; }

template <class Config>
struct PreparedRows : RowTensors<Config, float> {
    using Base = RowTensors<Config, float>;
    using Value = typename Config::Value;
    using W = typename Config::W;
    using Index = u32;
    using Base::first_key, Base::steps, Base::gy, Base::r, Base::k, Base::v, Base::a, Base::b, Base::w, Base::sa,
        Base::gsa, Base::state, Base::gradient, Base::gr, Base::gk, Base::ga, Base::gb, Base::gw, Base::scale;
    using Base::kK, Base::kV;
    static constexpr bool kRepeats = false;
    static constexpr int kSteps = Config::kSteps, kKeys = Config::kKeys, kSplit = Config::kKeySplit;
    static constexpr int kThreads = kKeys * kSplit;
    using Geometry = ThreadStateTile<kV, kSplit, 1>;
    static constexpr int kPitch = Geometry::kPitch, kRuns = Geometry::kRuns;
    using Four = Vec<float, 4>;
    using Run = float[4 * kRuns];  // rows of a thread
    static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps, at most 1024 threads");
    static_assert(kSteps % 4 == 0, "gr is summed for four steps at a time");

    KGEN_DEVICE void operator()() const {
        // 1. The chunk's inputs.
        Run before[kSteps + 1], back;
        load(before[0], state);
        load(back, gradient);
        put_rows(kOfSa, sa);
        put_rows(kOfGsa, gsa);
        put_rows(kOfV, v);
        put_rows(kOfGy, gy);
        put_keys();
        sync_block();

        const int key = own_key(), number = number_of_sum(own_part());
        const bool writes = own_part() < 4;
        const float* inputs = keys_of(0, key);
        float* by_step = keys_of(number, key) + 7;
        float* by_tensor = keys_of(0, key) + (number == 3 ? 6 : number);
        // 2. Forward in time.
        float by_r[4];  // of the last four steps
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            limit_loads();
            const Four of = four(inputs, i);
            const float d = of[0], k_t = of[1], b_t = of[2];
            float sum = 0.0f;
#pragma unroll
            for (int run = 0; run < kRuns; ++run) {
                const Four sa4 = four(kOfSa, i, run), v4 = four(kOfV, i, run), g4 = four(kOfGy, i, run);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int x = 4 * run + j;
                    const float added = fma(b_t, sa4[j], k_t * v4[j]);
                    before[i + 1][x] = exists(run, j) ? fma(d, before[i][x], added) : 0.0f;
                    sum = fma(before[i + 1][x], g4[j], sum);
                }
            }
            by_r[i % 4] = sum;
            if (i % 4 == 3) {
                const float all = lanes_sums<kSplit, kPair>(by_r);
                if (writes) by_step[(i - 3) * kStep] = all;
            }
        }

        // 3. Backward in time.
#pragma unroll
        for (int i = kSteps - 1; i >= 0; --i) {
            limit_loads();
            const Four of = four(inputs + 4, i);
            const float d = of[0], r_t = of[1], a_t = of[2];
            float by[4] = {};  // w, k, b, a
#pragma unroll
            for (int run = 0; run < kRuns; ++run) {
                const Four sa4 = four(kOfSa, i, run), gsa4 = four(kOfGsa, i, run);
                const Four v4 = four(kOfV, i, run), g4 = four(kOfGy, i, run);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int x = 4 * run + j;
                    const float s = before[i][x], total = fma(r_t, g4[j], back[x]);
                    by[0] = fma(s, total, by[0]);
                    by[1] = fma(total, v4[j], by[1]);
                    by[2] = fma(total, sa4[j], by[2]);
                    by[3] = fma(s, gsa4[j], by[3]);
                    back[x] = exists(run, j) ? fma(d, total, a_t * gsa4[j]) : 0.0f;
                }
            }
            const float all = lanes_sums<kSplit, kPair>(by);
            if (writes) by_tensor[i * kStep] = all;
        }
        sync_block();
        write_results();
    }

private:
    // How many neighbouring lanes have the same value features, of a key each: two, or one if a warp has one key.
    static constexpr int kPair = kSplit < kWarpSize ? 2 : 1;
    static KGEN_DEVICE int own_part() { return thread_rank() / kPair % kSplit; }
    static KGEN_DEVICE int own_key() { return thread_rank() / (kPair * kSplit) * kPair + thread_rank() % kPair; }
    static KGEN_DEVICE int first_row(int run) { return 4 * (own_part() + run * kSplit); }
    static KGEN_DEVICE bool exists(int run, int j) {
        return kV % (4 * kSplit) == 0 || first_row(run) + j < kV;
    }

    enum { kOfSa, kOfGsa, kOfV, kOfGy, kOfKeys };
    static constexpr int kStep = 8 * kKeys;  // words of the keys of a step

    static KGEN_DEVICE float* rows_of(int tensor) { return dynamic_smem<float>() + tensor * kSteps * kPitch; }
    static KGEN_DEVICE float* keys_of(int step, int key) { return rows_of(kOfKeys) + step * kStep + key * 8; }
    static KGEN_DEVICE Four four(const float* key, int step) {
        return *reinterpret_cast<const Four*>(key + step * kStep);
    }
    static KGEN_DEVICE Four four(int tensor, int step, int run) {
        return *reinterpret_cast<const Four*>(rows_of(tensor) + step * kPitch + first_row(run));
    }

    // The compiler moves no load across this. With the loads of several steps at a time, registers would spill.
    static KGEN_DEVICE void limit_loads() { sync_warp(); }

    KGEN_DEVICE void load(Run& rows, const float* from) const {
        const int key = first_key + own_key();
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const int column = first_row(run);
            const Four some = load_four<Config::kVec>(from + key * kV + column, key < kK ? kV - column : 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) rows[4 * run + j] = some[j];
        }
    }

    // Stores the value features of all steps.
    template <class T>
    KGEN_DEVICE void put_rows(int tensor, const StepPointer<T>& source) const {
        constexpr int kQuads = kPitch / 4, kAll = kSteps * kQuads;
        float* to = rows_of(tensor);
        if constexpr (kThreads % kQuads == 0 && kAll % kThreads == 0) {
            // A thread has the same columns of several steps.
            constexpr int kApart = kThreads / kQuads;
            const int first = thread_rank() / kQuads, column = thread_rank() % kQuads * 4;
            const T* from = source.first + first * source.stride + column;
#pragma unroll
            for (int n = 0; n < kSteps / kApart; ++n) {
                const int width = first + n * kApart < steps ? kV - column : 0;
                put_four(to + 4 * (thread_rank() + n * kThreads), load_four<Config::kVec>(from, width));
                from += kApart * source.stride;
            }
        } else {
            for (int i = thread_rank(); i < kAll; i += kThreads) {
                const int step = i / kQuads, column = i % kQuads * 4;
                const T* from = source.first + step * source.stride + column;
                put_four(to + 4 * i, load_four<Config::kVec>(from, step < steps ? kV - column : 0));
            }
        }
    }
    static KGEN_DEVICE void put_four(float* to, const Four& x) { *reinterpret_cast<Four*>(to) = x; }

    // Stores the inputs of keys; a thread has one key of a step at a time.
    KGEN_DEVICE void put_keys() const {
        for (int i = thread_rank(); i < kSteps * kKeys; i += kThreads) {
            const int step = i / kKeys, key = first_key + i % kKeys;
            const bool there = step < steps && key < kK;
            const DecayAndSlope of_step = decay_and_slope<Config::kForm>(at(w, step, key, there));
            const float d = step < steps ? of_step.decay : 1.0f;
            float* to = rows_of(kOfKeys) + 8 * i;
            put_four(to, {{d, at(k, step, key, there), at(b, step, key, there), of_step.slope}});
            put_four(to + 4, {{d, scale * at(r, step, key, there), at(a, step, key, there), 0.0f}});
        }
    }
    template <class T>
    static KGEN_DEVICE float at(const StepPointer<T>& rows, int step, int key, bool there) {
        return there ? to_float(rows.first[step * rows.stride + key]) : 0.0f;
    }

    KGEN_DEVICE void write_results() const {
        constexpr int kApart = kThreads / kKeys;  // steps
        static_assert(kSteps % kApart == 0 || kApart > kSteps, "a thread has the same key of several steps");
        // Opaque, so that nothing is computed earlier and kept in registers.
        const int rank = opaque(thread_rank()), first = rank / kKeys, key = first_key + rank % kKeys;
        if (key >= kK) return;
        Value *to_k = gk.at(first) + key, *to_b = gb.at(first) + key;
        Value *to_a = ga.at(first) + key, *to_r = gr.at(first) + key;
        W* to_w = gw.at(first) + key;
#pragma unroll
        for (int n = 0; n < max(kSteps / kApart, 1); ++n) {
            if (first + n * kApart >= steps) break;
            const Four* from = reinterpret_cast<const Four*>(rows_of(kOfKeys)) + 2 * (rank + n * kThreads);
            const Four forward = from[0], backward = from[1];
            to_w[n * kApart * gw.stride_t] = from_float<W>(forward[0] * forward[3]);
            to_k[n * kApart * gk.stride_t] = from_float<Value>(forward[1]);
            to_b[n * kApart * gb.stride_t] = from_float<Value>(forward[2]);
            to_a[n * kApart * ga.stride_t] = from_float<Value>(backward[2]);
            to_r[n * kApart * gr.stride_t] = from_float<Value>(scale * backward[3]);
        }
    }
};

}  // namespace kgen::wkv7
