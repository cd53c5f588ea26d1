// digest: 1330744a8762
// Rendered by kgen from templates/wkv4/backward_running_max.cu.jinja
// config: running_max(lanes=32, vec=2, segments=8, steps=8, prefetch=true, min_blocks=1, step_weights=true)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, decay_form=log
// wkv4 backward by segments of time whose exponents follow their running maximum, with the same instructions for all
// values. Rounds have kSegments * kSteps steps. Gradients by states are pairs that go backward in time.
//
//   wkv4_segment_states   the state before each segment, the first round first: a thread sums its segment, barrier A,
//                         and one thread for each channel goes through the segments' sums
//   wkv4_backward         gk, gv, and parts of gw and gu for each batch row
//   wkv4_backward_reduce  gw and gu
//
// A block has kColumns channels of a batch row. A block of wkv4_backward takes the last round first. In a round:
//
//   1. a thread loads the kSteps steps of its segment and the state before them, computes its outputs, and sums the
//      terms of the gradient by the state: barrier A;
//   2. one thread for each channel goes through these sums, the last segment first, and replaces each by the gradient
//      after that segment; it keeps the gradient between rounds in registers: barrier B;
//   3. a thread computes gk and gv, last step first, and adds up gw and gu.
//
// With kStepWeights gradients go backward by the weights of the states' steps, in units of these states' exponents;
// see weighted_gradients.cuh. Otherwise gradients have their own running maxima (running_gradients.cuh).
//
// Shared memory (dynamic): float [kSegments][kFloats][kColumns], slots of sums. wkv4_segment_states has two sets of
// slots, between which rounds alternate: a thread that writes a slot in round r + 2 has passed A of round r + 1, which
// the channel's thread reaches after its reads of round r. In wkv4_backward a thread uses only its own slot between B
// and A.
#include "kgen/primitives/block.cuh"
#include "kgen/wkv4/running_gradients.cuh"
#include "kgen/wkv4/weighted_gradients.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;
using kgen::wkv4::WholeDecay;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kLanes = 32;        // threads side by side along the channels
constexpr int kVec = 2;            // adjacent channels of a thread
constexpr int kSegments = 8;  // segments of a round, a row of threads each
constexpr int kSteps = 8;        // of a segment
constexpr bool kPrefetch = true;  // load the next round's steps before computing this round's
constexpr int kMinBlocks = 1;
constexpr bool kStepWeights = true;  // gradients by the weights of the states' steps
constexpr int kThreads = kLanes * kSegments;
constexpr int kColumns = kLanes * kVec;
constexpr int kRound = kSegments * kSteps;
constexpr int kReduceThreads = 128;

using Rows = kgen::wkv4::StepRows<const Value, kVec>;
using OutRows = kgen::wkv4::StepRows<Value, kVec>;
using Loaded = kgen::wkv4::Loaded<Value, kVec, kSteps>;
using State = kgen::wkv4::WholeSum<kFinalState>;
using Sum = kgen::wkv4::WholeSum<false>;
using StateSlots = kgen::wkv4::WholeSlots<kColumns, kFinalState>;
using Slots = kgen::wkv4::WholeSlots<kColumns, false>;
using SumRows = kgen::wkv4::WholeRows<>;
using Running = kgen::wkv4::RunningState;
using Gradient = kgen::wkv4::StateGradient;
using GradientSlots = kgen::wkv4::GradientSlots<kColumns>;
using SegmentStates = kgen::wkv4::SegmentStates<kVec>;

static_assert(kThreads <= 1024 && kThreads % kgen::kWarpSize == 0, "whole warps, one block");
static_assert(kVec <= kSegments, "a thread for each channel");
static_assert(!kgen::kPresent<kgen::none>, "exponents of steps are single floats");

// The place of a thread's channels, or of a column of shared memory: channel column / kLanes of lane column % kLanes.
struct Place {
    i64 c, b;

    KGEN_DEVICE explicit Place(i64 C) {
        const kgen::u32 tiles =
            static_cast<kgen::u32>(kgen::ceil_div(C, static_cast<i64>(kColumns)));
        b = blockIdx.x / tiles;
        c = static_cast<i64>(blockIdx.x % tiles) * kColumns;
    }
    KGEN_DEVICE i64 of_lane(int lane) const { return c + lane * kVec; }
    KGEN_DEVICE i64 of_column(int column) const {
        return c + column % kLanes * kVec + column / kLanes;
    }
};

KGEN_DEVICE void load_channels(kgen::wkv4::ChannelExponents (&channel)[kVec], const W* w,
                               const U* u, i64 c) {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
        channel[j].set(kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c + j])),
                       kgen::to_float(u[c + j]));
}

KGEN_DEVICE float decay_of_channel(const W* w, i64 c) {
    return kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c]));
}

// Replaces the sum of a segment by `after`, the gradient after the segment, and turns `after` into the gradient before
// it.
KGEN_DEVICE void behind_segment(Sum& after, const WholeDecay& decay, const Slots& slots,
                                int segment, int column) {
    const Sum sum = slots.get(segment, column);
    slots.put(segment, column, after);
    after.append(decay, sum);
    after.normalise(kgen::wkv4::larger(kgen::abs(after.a), kgen::abs(after.b)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_segment_states(const Value* __restrict__ k,              // [B, T, C]
                    const Value* __restrict__ v,              // [B, T, C]
                    const W* __restrict__ w,                  // [C]
                    const U* __restrict__ u,                  // [C]
                    const float* __restrict__ gfinal_state,   // [B, C, 3] or null
                    float* __restrict__ segment_states,       // [B, rounds * kSegments + 1, 3, C]
                    i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                    i64 rounds) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const Place place(C);
    const i64 c = place.of_lane(lane), column = c < C ? c : 0;
    const StateSlots slots{kgen::dynamic_smem<float>()};
    kgen::wkv4::ChannelExponents channel[kVec];
    load_channels(channel, w, u, column);
    const Rows k_rows(k + place.b * k_stride_B + column, k_stride_T);
    const Rows v_rows(v + place.b * v_stride_B + column, v_stride_T);

    const int own = static_cast<int>(threadIdx.x);
    const i64 own_c = place.of_column(own);
    const bool scans = own < kColumns && own_c < C;
    const SumRows states{segment_states, C};
    const i64 first_row = place.b * (rounds * kSegments + 1);
    State before;
    WholeDecay decay;
    float own_decay = 0.0f;
    if (scans) {
        own_decay = decay_of_channel(w, own_c);
        decay = WholeDecay::of(own_decay, kSteps);
    }

    Loaded k_held, v_held, k_next, v_next;
    i64 t = segment * kSteps;  // of the thread's first step
    int count = kgen::wkv4::steps_before<kSteps>(t, T);
    kgen::wkv4::load_steps(k_held, k_rows, k_rows.at(t), count);
    kgen::wkv4::load_steps(v_held, v_rows, v_rows.at(t), count);
    int parity = 0;
#pragma unroll 1
    for (i64 round = 0; round < rounds; ++round, parity ^= 1) {
        const int next = kgen::wkv4::steps_before<kSteps>(t + kRound, T);
        if constexpr (kPrefetch) {
            kgen::wkv4::load_steps(k_next, k_rows, k_rows.at(t + kRound), next);
            kgen::wkv4::load_steps(v_next, v_rows, v_rows.at(t + kRound), next);
        }
        float keys[kSteps][kVec];
        kgen::wkv4::to_keys(keys, k_held);
        State sums[kVec];
        if (count == kSteps)
            kgen::wkv4::sum_segment<true>(sums, channel, keys, v_held, kSteps);
        else
            kgen::wkv4::sum_segment<false>(sums, channel, keys, v_held, count);
        const int slot = parity * kSegments;
#pragma unroll
        for (int j = 0; j < kVec; ++j) slots.put(slot + segment, j * kLanes + lane, sums[j]);
        kgen::sync_block();  // A
        if (scans) {
            // Steps of the last round that do not exist affect only the state after the last step.
            const bool whole = !kFinalState || round + 1 < rounds;
#pragma unroll 8
            for (int i = 0; i < kSegments; ++i) {
                const Sum found{before.exponent, before.a, before.b};
                states.put(first_row + round * kSegments + i, own_c, found);
                if (!whole) {
                    const i64 begin = round * kRound + i * kSteps;
                    decay = WholeDecay::of(own_decay, kgen::wkv4::steps_before<kSteps>(begin, T));
                }
                before.append(decay, slots.get(slot + i, own));
                before.normalise(before.b);
            }
        }
        t += kRound;
        count = next;
        if constexpr (kPrefetch) {
            k_held = k_next;
            v_held = v_next;
        } else {
            kgen::wkv4::load_steps(k_held, k_rows, k_rows.at(t), count);
            kgen::wkv4::load_steps(v_held, v_rows, v_rows.at(t), count);
        }
    }
    // The row after the states holds the gradient after the last step.
    if constexpr (kFinalState) {
        if (scans)
            states.put(first_row + rounds * kSegments, own_c,
                       kgen::wkv4::last_gradient(gfinal_state, place.b * C + own_c, before));
    }
}

KGEN_EXPORT(wkv4_segment_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_backward(const Value* __restrict__ gy,             // [B, T, C]
              const Value* __restrict__ k,              // [B, T, C]
              const Value* __restrict__ v,              // [B, T, C]
              const W* __restrict__ w,                  // [C]
              const U* __restrict__ u,                  // [C]
              float* __restrict__ segment_states,       // [B, rounds * kSegments + 1, 3, C]
              Value* __restrict__ gk,                   // [B, T, C]
              Value* __restrict__ gv,                   // [B, T, C]
              float* __restrict__ gw_parts,             // [B, C]
              float* __restrict__ gu_parts,             // [B, C]
              i64 T, i64 C, i64 gy_stride_B, i64 gy_stride_T, i64 k_stride_B, i64 k_stride_T,
              i64 v_stride_B, i64 v_stride_T, i64 gk_stride_B, i64 gk_stride_T, i64 gv_stride_B,
              i64 gv_stride_T, i64 rounds) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const Place place(C);
    const i64 c = place.of_lane(lane);
    const bool inside = c < C;          // C is a multiple of kVec
    const i64 column = inside ? c : 0;  // a thread outside reads channels that exist
    const Slots slots{kgen::dynamic_smem<float>()};
    kgen::wkv4::ChannelExponents channel[kVec];
    load_channels(channel, w, u, column);
    float bonus[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) bonus[j] = kgen::to_float(u[column + j]);
    const Rows gy_rows(gy + place.b * gy_stride_B + column, gy_stride_T);
    const Rows k_rows(k + place.b * k_stride_B + column, k_stride_T);
    const Rows v_rows(v + place.b * v_stride_B + column, v_stride_T);
    const OutRows gk_rows(gk + place.b * gk_stride_B + column, gk_stride_T);
    const OutRows gv_rows(gv + place.b * gv_stride_B + column, gv_stride_T);

    const int own = static_cast<int>(threadIdx.x);
    const i64 own_c = place.of_column(own);
    const bool scans = own < kColumns && own_c < C;
    const SumRows states{segment_states, C};
    const i64 first_row = place.b * (rounds * kSegments + 1);
    Sum after;  // the gradient after the round, of the thread's column
    Gradient units_after;  // with kStepWeights: the same
    WholeDecay decay;
    float own_decay = 0.0f;
    if (scans) {
        own_decay = decay_of_channel(w, own_c);
        decay = WholeDecay::of(own_decay, kSteps);
        if (kFinalState) after = states.get(first_row + rounds * kSegments, own_c);
        if constexpr (kStepWeights && kFinalState) units_after = {after.a, after.b};
    }
    const GradientSlots gradient_slots{slots.memory};

    kgen::CompensatedSum gw[kVec], gu[kVec];
    Loaded k_held, v_held, gy_held, k_next, v_next, gy_next;
    i64 t = (rounds - 1) * kRound + segment * kSteps;  // of the thread's first step
    int count = rounds > 0 ? kgen::wkv4::steps_before<kSteps>(t, T) : 0;
    kgen::wkv4::load_steps(k_held, k_rows, k_rows.at(t), count);
    kgen::wkv4::load_steps(v_held, v_rows, v_rows.at(t), count);
    kgen::wkv4::load_steps(gy_held, gy_rows, gy_rows.at(t), count);
    SegmentStates states_held, states_next;  // with kStepWeights
    if constexpr (kStepWeights) {
        if (rounds > 0)
            states_held.load(states, first_row + (rounds - 1) * kSegments + segment, column,
                             segment == kSegments - 1, kFinalState);
    }
#pragma unroll 1
    for (i64 round = rounds - 1; round >= 0; --round) {
        const int next = round > 0 ? kSteps : 0;  // all rounds but the last are whole
        if constexpr (kPrefetch && kStepWeights) {
            if (round > 0) {
                kgen::wkv4::load_whole(k_next, k_rows, k_rows.at(t - kRound));
                kgen::wkv4::load_whole(v_next, v_rows, v_rows.at(t - kRound));
                kgen::wkv4::load_whole(gy_next, gy_rows, gy_rows.at(t - kRound));
                states_next.load(states, first_row + (round - 1) * kSegments + segment, column,
                                 false, kFinalState);
            }
        } else if constexpr (kPrefetch) {
            kgen::wkv4::load_steps(k_next, k_rows, k_rows.at(t - kRound), next);
            kgen::wkv4::load_steps(v_next, v_rows, v_rows.at(t - kRound), next);
            kgen::wkv4::load_steps(gy_next, gy_rows, gy_rows.at(t - kRound), next);
        }

        // 1. Outputs from the state before the segment, and the sums of their gradients.
        float keys[kSteps][kVec];
        kgen::wkv4::to_keys(keys, k_held);
        Running state[kVec];
        kgen::wkv4::StepOutput outputs[kSteps][kVec];
        kgen::wkv4::WeightedStep weighted[kSteps][kVec];  // with kStepWeights, instead of outputs
        if constexpr (kStepWeights) {
            float factor[kVec];  // the unit of the sums, as a part of the slots' unit
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                state[j] = Running::of(states_held.before[j]);
                factor[j] = Running::lost_factor(states_held.before[j].exponent, state[j].m);
            }
            kgen::wkv4::segment_weighted_steps<kFinalState>(weighted, state, channel, k_held,
                                                            v_held, gy_held, count);
            Gradient sums[kVec];
            kgen::wkv4::sum_weighted_steps(sums, weighted);
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                gradient_slots.put(segment, j * kLanes + lane,
                                   Gradient{factor[j] * sums[j].a, factor[j] * sums[j].b},
                                   states_held.before[j].exponent - states_held.next[j]);
            }
        } else {
            Sum sums[kVec];
#pragma unroll
            for (int j = 0; j < kVec; ++j)
                state[j] = Running::of(states.get(first_row + round * kSegments + segment, column + j));
            if (count == kSteps) {
                kgen::wkv4::segment_step_outputs<true>(outputs, state, channel, bonus, keys, v_held,
                                                       gy_held, kSteps);
                kgen::wkv4::sum_gradients<true>(sums, channel, outputs, kSteps);
            } else {
                kgen::wkv4::segment_step_outputs<false>(outputs, state, channel, bonus, keys, v_held,
                                                        gy_held, count);
                kgen::wkv4::sum_gradients<false>(sums, channel, outputs, count);
            }
#pragma unroll
            for (int j = 0; j < kVec; ++j) slots.put(segment, j * kLanes + lane, sums[j]);
        }
        kgen::sync_block();  // A

        // 2. The gradients after the segments.
        if (scans) {
            if ((round + 1) * kRound <= T) {
#pragma unroll 8
                for (int i = kSegments - 1; i >= 0; --i) {
                    if constexpr (kStepWeights)
                        gradient_slots.go_back(units_after, decay, i, own);
                    else
                        behind_segment(after, decay, slots, i, own);
                }
            } else {
#pragma unroll 1
                for (int i = kSegments - 1; i >= 0; --i) {
                    const i64 begin = round * kRound + i * kSteps;
                    const int there = kgen::wkv4::steps_before<kSteps>(begin, T);
                    if constexpr (kStepWeights)
                        gradient_slots.go_back(units_after, WholeDecay::of(own_decay, there), i,
                                               own);
                    else
                        behind_segment(after, WholeDecay::of(own_decay, there), slots, i, own);
                }
            }
        }
        kgen::sync_block();  // B

        // 3. Gradients, last step first.
        float gw_round[kVec] = {}, gu_round[kVec] = {};
        if constexpr (kStepWeights) {
            Gradient gradient[kVec];
#pragma unroll
            for (int j = 0; j < kVec; ++j)
                gradient[j] = kgen::wkv4::in_units_of(
                    state[j].m, gradient_slots.gradient(segment, j * kLanes + lane),
                    states_held.next[j]);
            if (inside) {
                if (count == kSteps)
                    kgen::wkv4::segment_weighted_gradients<true>(
                        gradient, gw_round, gu_round, weighted, v_held, gk_rows, gv_rows, t,
                        kSteps);
                else
                    kgen::wkv4::segment_weighted_gradients<false>(
                        gradient, gw_round, gu_round, weighted, v_held, gk_rows, gv_rows, t,
                        count);
            }
        } else {
            Running gradient[kVec];
#pragma unroll
            for (int j = 0; j < kVec; ++j)
                gradient[j] = Running::of(slots.get(segment, j * kLanes + lane));
            if (inside) {
                if (count == kSteps)
                    kgen::wkv4::segment_gradients<true>(gradient, gw_round, gu_round, outputs, channel,
                                                        keys, v_held, gk_rows, gv_rows, t, kSteps);
                else
                    kgen::wkv4::segment_gradients<false>(gradient, gw_round, gu_round, outputs, channel,
                                                         keys, v_held, gk_rows, gv_rows, t, count);
            }
        }
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            gw[j].add(gw_round[j]);
            gu[j].add(gu_round[j]);
        }

        t -= kRound;
        count = next;
        if constexpr (kPrefetch) {
            k_held = k_next;
            v_held = v_next;
            gy_held = gy_next;
            if constexpr (kStepWeights) states_held = states_next;
        } else if (kStepWeights && round > 0) {
            kgen::wkv4::load_whole(k_held, k_rows, k_rows.at(t));
            kgen::wkv4::load_whole(v_held, v_rows, v_rows.at(t));
            kgen::wkv4::load_whole(gy_held, gy_rows, gy_rows.at(t));
            states_held.load(states, first_row + (round - 1) * kSegments + segment, column, false,
                             kFinalState);
        } else if (round > 0) {
            kgen::wkv4::load_steps<true>(k_held, k_rows, k_rows.at(t), kSteps);
            kgen::wkv4::load_steps<true>(v_held, v_rows, v_rows.at(t), kSteps);
            kgen::wkv4::load_steps<true>(gy_held, gy_rows, gy_rows.at(t), kSteps);
        }
    }

    // The parts of gw and gu: the segments' sums, in order.
#pragma unroll
    for (int j = 0; j < kVec; ++j)
        slots.put(segment, j * kLanes + lane, Sum{0.0f, gw[j].value(), gu[j].value()});
    kgen::sync_block();
    if (scans) {
        kgen::CompensatedSum gw_sum, gu_sum;
        for (int i = 0; i < kSegments; ++i) {
            const Sum part = slots.get(i, own);
            gw_sum.add(part.a);
            gu_sum.add(part.b);
        }
        gw_parts[place.b * C + own_c] = gw_sum.value();
        gu_parts[place.b * C + own_c] = gu_sum.value();
    }
}

KGEN_EXPORT(wkv4_backward);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv4_backward_reduce(const W* __restrict__ w,             // [C]
                     const float* __restrict__ gw_parts,  // [B, C]
                     const float* __restrict__ gu_parts,  // [B, C]
                     W* __restrict__ gw,                  // [C]
                     U* __restrict__ gu,                  // [C]
                     i64 B, i64 C) {
    kgen::wkv4::reduce_batch<kForm, kReduceThreads>(w, gw_parts, gu_parts, gw, gu, B, C);
}

KGEN_EXPORT(wkv4_backward_reduce);
