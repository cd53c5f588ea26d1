// Rendered by kgen from templates/wkv4/backward_scan.cu.jinja
// config: scan(lanes=32, vec=2, segments=8, steps=8, prefetch=false, min_blocks=1)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, decay_form=log
// wkv4 backward by scans over segments of time, in rounds of kSegments * kSteps steps.
//
//   wkv4_round_sums       the sums of each round's terms, a thread per round and kVec channels
//   wkv4_round_states     the state before each round, and the last one, from these sums; a thread per channel
//   wkv4_backward         gk, gv, the gradient of the initial state, and parts of gw and gu for each batch row
//   wkv4_backward_reduce  gw and gu
//
// A block of wkv4_backward has kColumns channels of a batch row and loops over the rounds, the last one first.
// In a round:
//
//   1. a thread loads the kSteps steps of its segment into registers and sums their terms: barrier A;
//   2. from the state before the segment it computes its outputs y_t and r_t, and sums the terms of the gradient by
//      the state: barrier B;
//   3. it adds the later segments to the gradient after the round, and computes gk and gv, last step first. The
//      gradient before the first segment is the gradient after the round that precedes in time.
//
// Shared memory (dynamic), in slots of float [4][kVec][kLanes]: kSegments sums, kSegments gradients, 2 gradients
// between rounds. Sums are written before A and read before B; gradients are written between A and B and read after B,
// so that two barriers per round are enough. The gradient between rounds is written after B and read after the
// next B, so that rounds alternate between two slots.
#include "kgen/primitives/block.cuh"
#include "kgen/wkv4/exchange.cuh"
#include "kgen/wkv4/gradients.cuh"
#include "kgen/wkv4/steps.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;
using kgen::wkv4::Pair;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kLanes = 32;        // threads side by side along the channels
constexpr int kVec = 2;            // adjacent channels of a thread
constexpr int kSegments = 8;  // segments of a round, a row of threads each
constexpr int kSteps = 8;        // of a segment
constexpr bool kPrefetch = false;  // load the next round's steps before computing this round's
constexpr int kMinBlocks = 1;
constexpr int kThreads = kLanes * kSegments;
constexpr int kColumns = kLanes * kVec;
constexpr int kRound = kSegments * kSteps;
constexpr int kSmallThreads = 128;  // of a block of the other kernels

using Rows = kgen::wkv4::Channels<const Value, kVec>;
using OutRows = kgen::wkv4::Channels<Value, kVec>;
using Held = kgen::wkv4::Held<Value, kVec, kSteps>;
using Slots = kgen::wkv4::PairSlots<kLanes, kVec, true>;

static_assert(kThreads <= 1024 && kThreads % kgen::kWarpSize == 0, "whole warps, one block");

}  // namespace

extern "C" __global__ void __launch_bounds__(kSmallThreads)
wkv4_round_sums(const Value* __restrict__ k,       // [B, T, C]
                const Value* __restrict__ v,       // [B, T, C]
                const W* __restrict__ w,           // [C]
                float* __restrict__ round_states,  // [B, rounds + 1, 4, C]
                i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                i64 rounds) {
    kgen::wkv4::sum_runs<kForm, true, kVec, kSteps, kSmallThreads>(
        k, v, w, round_states, T, C, k_stride_B, k_stride_T, v_stride_B, v_stride_T,
        static_cast<i64>(kRound), rounds, rounds + 1);
}

KGEN_EXPORT(wkv4_round_sums);

extern "C" __global__ void __launch_bounds__(kSmallThreads)
wkv4_round_states(const W* __restrict__ w,                  // [C]
                  const float* __restrict__ initial_state,  // [B, C, 3] or null
                  float* __restrict__ round_states,         // [B, rounds + 1, 4, C]
                  i64 B, i64 T, i64 C, i64 rounds) {
    constexpr int kAhead = 8;  // loads in flight
    const i64 column = static_cast<i64>(blockIdx.x) * kSmallThreads + threadIdx.x;  // of [B, C]
    if (column >= B * C) return;
    const i64 c = column % C, first_row = column / C * (rounds + 1);
    const kgen::wkv4::PairRows<true> rows{round_states, C};
    const float decay = kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c]));
    Pair state = kgen::wkv4::initial_pair<true>(kInitialState ? initial_state : nullptr, column);
    for (i64 round = 0; round < rounds; round += kAhead) {
        Pair sums[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (round + i < rounds) sums[i] = rows.get(first_row + round + i, c);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (round + i >= rounds) break;
            rows.put(first_row + round + i, c, state);
            const int steps = kgen::wkv4::steps_before<kRound>((round + i) * kRound, T);
            state.append(kgen::wkv4::decay_of_steps(decay, steps), sums[i]);
        }
    }
    rows.put(first_row + rounds, c, state);
}

KGEN_EXPORT(wkv4_round_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_backward(const Value* __restrict__ gy,             // [B, T, C]
              const Value* __restrict__ k,              // [B, T, C]
              const Value* __restrict__ v,              // [B, T, C]
              const W* __restrict__ w,                  // [C]
              const U* __restrict__ u,                  // [C]
              const float* __restrict__ gfinal_state,   // [B, C, 3] or null
              float* __restrict__ round_states,         // [B, rounds + 1, 4, C]
              Value* __restrict__ gk,                   // [B, T, C]
              Value* __restrict__ gv,                   // [B, T, C]
              float* __restrict__ ginitial_state,       // [B, C, 3] or null
              float* __restrict__ gw_parts,             // [B, C]
              float* __restrict__ gu_parts,             // [B, C]
              i64 T, i64 C, i64 gy_stride_B, i64 gy_stride_T, i64 k_stride_B, i64 k_stride_T,
              i64 v_stride_B, i64 v_stride_T, i64 gk_stride_B, i64 gk_stride_T, i64 gv_stride_B,
              i64 gv_stride_T, i64 rounds) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const kgen::u32 tiles = static_cast<kgen::u32>(kgen::ceil_div(C, static_cast<i64>(kColumns)));
    const i64 c = static_cast<i64>(blockIdx.x % tiles) * kColumns + lane * kVec;
    const i64 b = blockIdx.x / tiles;
    const bool inside = c < C;  // C is a multiple of kVec
    const kgen::wkv4::PairRows<true> states{round_states, C};
    const i64 first_row = b * (rounds + 1);

    const Slots sums{kgen::dynamic_smem<float>()};
    const Slots gradients{sums.memory + kSegments * Slots::kFloats};
    const Slots between{gradients.memory + kSegments * Slots::kFloats};

    float decay[kVec], bonus[kVec];
    kgen::wkv4::load_decays<kForm>(decay, w, c, inside);
#pragma unroll
    for (int j = 0; j < kVec; ++j) bonus[j] = inside ? kgen::to_float(u[c + j]) : 0.0f;
    const Rows gy_rows{gy + b * gy_stride_B + c, gy_stride_T};
    const Rows k_rows{k + b * k_stride_B + c, k_stride_T};
    const Rows v_rows{v + b * v_stride_B + c, v_stride_T};
    const OutRows gk_rows{gk + b * gk_stride_B + c, gk_stride_T};
    const OutRows gv_rows{gv + b * gv_stride_B + c, gv_stride_T};

    // The gradient after the last step.
    Pair gradient[kVec];
    if (kFinalState && segment == 0 && inside) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            const Pair last = states.get(first_row + rounds, c + j);
            gradient[j] = kgen::wkv4::final_gradient(gfinal_state, b * C + c + j, last);
        }
    }
    if (segment == 0) between.put(1, lane, gradient);

    kgen::CompensatedSum gw[kVec], gu[kVec];
    Held k_held, v_held, gy_held, k_next, v_next, gy_next;
    i64 t = (rounds - 1) * kRound + segment * kSteps;  // of the thread's first step
    int count = inside ? kgen::wkv4::steps_before<kSteps>(t, T) : 0;
    if (rounds > 0) {
        k_held.load(k_rows, t, count);
        v_held.load(v_rows, t, count);
        gy_held.load(gy_rows, t, count);
    }
    int parity = 0;
    for (i64 round = rounds - 1; round >= 0; --round, parity ^= 1) {
        const int next = inside && round > 0 ? kSteps : 0;  // all rounds but the last are whole
        if constexpr (kPrefetch) {
            k_next.load(k_rows, t - kRound, next);
            v_next.load(v_rows, t - kRound, next);
            gy_next.load(gy_rows, t - kRound, next);
        }

        // 1. The segment's sums.
        Pair state[kVec];
        kgen::wkv4::add_steps(state, decay, k_held, v_held, count);
        sums.put(segment, lane, state);
        kgen::sync_block();  // A

        // 2. Outputs from the state before the segment. Segments before one that has steps are whole.
        kgen::wkv4::OutputGradient outputs[kSteps][kVec];
        kgen::wkv4::DecayDerivative derivative[kVec];
        float gw_round[kVec] = {};
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            state[j] = inside ? states.get(first_row + round, c + j) : Pair{};
            for (int i = 0; i < segment; ++i)
                state[j].append(kgen::wkv4::decay_of_steps(decay[j], kSteps), sums.get(i, lane, j));
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (i >= count) break;
            float keys[kVec], values[kVec], gys[kVec];
            kgen::to_floats(k_held.step[i], keys);
            kgen::to_floats(v_held.step[i], values);
            kgen::to_floats(gy_held.step[i], gys);
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                const auto output = kgen::wkv4::output_of(state[j], bonus[j] + keys[j], values[j]);
                const float r = gys[j] * output.inverse;
                outputs[i][j] = {output.exponent, output.low, output.y, r};
                if (i > 0) gw_round[j] += derivative[j].by_output(output, r);
                const Pair before = state[j];
                derivative[j].step(kgen::wkv4::step(state[j], decay[j], keys[j], values[j]), before);
            }
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) gradient[j] = Pair{};
#pragma unroll
        for (int i = kSteps - 1; i >= 0; --i) {
            if (i >= count) continue;
#pragma unroll
            for (int j = 0; j < kVec; ++j) outputs[i][j].step_back(gradient[j], decay[j]);
        }
        gradients.put(segment, lane, gradient);
        kgen::sync_block();  // B

        // 3. The gradient after the segment, then before each of its steps.
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            gradient[j] = between.get(parity ^ 1, lane, j);
            for (int i = kSegments - 1; i > segment; --i) {
                const i64 begin = round * kRound + static_cast<i64>(i) * kSteps;
                const int steps = kgen::wkv4::steps_before<kSteps>(begin, T);
                gradient[j].append(kgen::wkv4::decay_of_steps(decay[j], steps),
                                   gradients.get(i, lane, j));
            }
            if (count > 0) gw_round[j] += derivative[j].by_state(state[j], gradient[j]);
        }
        float gu_round[kVec] = {};
#pragma unroll
        for (int i = kSteps - 1; i >= 0; --i) {
            if (i >= count) continue;
            float keys[kVec], values[kVec], gks[kVec], gvs[kVec];
            kgen::to_floats(k_held.step[i], keys);
            kgen::to_floats(v_held.step[i], values);
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                const auto found = kgen::wkv4::step_gradients(outputs[i][j], gradient[j], keys[j],
                                                              bonus[j], values[j]);
                gks[j] = found.gk;
                gvs[j] = found.gv;
                gu_round[j] += found.gu;
                outputs[i][j].step_back(gradient[j], decay[j]);
            }
            kgen::store_vec(gk_rows.at(t + i), kgen::from_floats<Value>(gks));
            kgen::store_vec(gv_rows.at(t + i), kgen::from_floats<Value>(gvs));
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            gw[j].add(gw_round[j]);
            gu[j].add(gu_round[j]);
        }
        if (segment == 0) between.put(parity, lane, gradient);

        t -= kRound;
        count = next;
        if constexpr (kPrefetch) {
            k_held = k_next;
            v_held = v_next;
            gy_held = gy_next;
        } else {
            k_held.load(k_rows, t, count);
            v_held.load(v_rows, t, count);
            gy_held.load(gy_rows, t, count);
        }
    }

    // The gradient of the initial state. In the threads of segment 0 `gradient` is the gradient before step 0.
    if (kInitialState && segment == 0 && inside) {
#pragma unroll
        for (int j = 0; j < kVec; ++j)
            kgen::wkv4::store_initial_gradient(ginitial_state, b * C + c + j,
                                               states.get(first_row, c + j), gradient[j]);
    }

    // The parts of gw and gu: the segments' sums, in order. All threads have passed B since they last read `sums`.
    Pair own[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) own[j] = Pair{0.0f, gw[j].value(), gu[j].value()};
    sums.put(segment, lane, own);
    kgen::sync_block();
    if (segment == 0 && inside) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            kgen::CompensatedSum gw_sum, gu_sum;
            for (int i = 0; i < kSegments; ++i) {
                const Pair part = sums.get(i, lane, j);
                gw_sum.add(part.a);
                gu_sum.add(part.b);
            }
            gw_parts[b * C + c + j] = gw_sum.value();
            gu_parts[b * C + c + j] = gu_sum.value();
        }
    }
}

KGEN_EXPORT(wkv4_backward);

extern "C" __global__ void __launch_bounds__(kSmallThreads)
wkv4_backward_reduce(const W* __restrict__ w,             // [C]
                     const float* __restrict__ gw_parts,  // [B, C]
                     const float* __restrict__ gu_parts,  // [B, C]
                     W* __restrict__ gw,                  // [C]
                     U* __restrict__ gu,                  // [C]
                     i64 B, i64 C) {
    kgen::wkv4::reduce_batch<kForm, kSmallThreads>(w, gw_parts, gu_parts, gw, gu, B, C);
}

KGEN_EXPORT(wkv4_backward_reduce);
