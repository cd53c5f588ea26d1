// digest: f827407c5a3b
// Rendered by kgen from templates/wkv4/forward_running_max.cu.jinja
// config: running_max(lanes=32, vec=2, segments=8, steps=16, prefetch=false, min_blocks=2, splits=22)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=fp32, final_state_dtype=fp32, decay_form=log
// wkv4 forward by segments of time whose exponents follow their running maximum, with the same instructions for all
// values. k and v are read once (kSplits > 1: twice).
//
// A block has kColumns channels of a batch row and loops over rounds of kSegments * kSteps steps. In a round:
//
//   1. a thread loads the kSteps steps of its segment into registers and sums their terms: barrier A;
//   2. one thread for each channel goes through the segments' sums and replaces each by the state before that segment;
//      it keeps the state between rounds in registers: barrier B;
//   3. a thread computes its outputs, step by step from the state before its segment.
//
// With one segment a thread has all steps of its channels: there are no sums, no shared memory and no barriers.
//
// Where there are few channels, T is cut into kSplits parts, each of which has its own blocks:
//
//   wkv4_split_sums  sums the terms of each part, a block per part and kColumns channels
//   wkv4_forward     begins with the sums of the parts before its own
//
// Shared memory (dynamic): float [kSegments][kFloats][kColumns], slots of sums. Between B and A a thread reads and writes
// only its own slot, so that one set of slots is sufficient for all rounds.
#include "kgen/primitives/block.cuh"
#include "kgen/wkv4/running_max.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;
using kgen::wkv4::WholeDecay;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<float>;
constexpr bool kFinalState = kgen::kPresent<float>;
constexpr int kLanes = 32;        // threads side by side along the channels
constexpr int kVec = 2;            // adjacent channels of a thread
constexpr int kSegments = 8;  // segments of a round, a row of threads each
constexpr int kSteps = 16;        // of a segment
constexpr bool kPrefetch = false;  // load the next round's steps before computing this round's
constexpr int kSplits = 22;      // parts of T, at most
constexpr int kMinBlocks = 2;
constexpr int kThreads = kLanes * kSegments;
constexpr int kColumns = kLanes * kVec;
constexpr int kRound = kSegments * kSteps;

using Rows = kgen::wkv4::StepRows<const Value, kVec>;
using Loaded = kgen::wkv4::Loaded<Value, kVec, kSteps>;
using Sum = kgen::wkv4::WholeSum<kFinalState>;
using Slots = kgen::wkv4::WholeSlots<kColumns, kFinalState>;
using SumRows = kgen::wkv4::WholeRows<kFinalState>;

static_assert(kThreads <= 1024 && kThreads % kgen::kWarpSize == 0, "whole warps, one block");
static_assert(kSegments > 1 || !kFinalState, "one segment does not keep its largest term");
static_assert(kSegments == 1 || kVec <= kSegments, "a thread for each channel");

// The place of a thread's channels, or of a column of shared memory: channel column / kLanes of lane column % kLanes.
struct Place {
    i64 c, b, part;

    KGEN_DEVICE Place(i64 C, i64 parts) {
        const kgen::u32 tiles =
            static_cast<kgen::u32>(kgen::ceil_div(C, static_cast<i64>(kColumns)));
        const kgen::u32 row = blockIdx.x / tiles;
        part = row % static_cast<kgen::u32>(parts);
        b = row / static_cast<kgen::u32>(parts);
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

// Returns the state of a channel before the block's part of T.
KGEN_DEVICE Sum state_before(const float* initial_state, float* split_sums, const Place& place,
                             i64 c, i64 C, float log_decay, i64 split_steps, i64 split_count) {
    Sum state = Sum::of_state(kInitialState ? initial_state : nullptr, place.b * C + c);
    if constexpr (kSplits > 1) {
        const WholeDecay decay = WholeDecay::of(log_decay, split_steps);
        const SumRows sums{split_sums, C};
#pragma unroll 8
        for (i64 i = 0; i < place.part; ++i) {
            state.append(decay, sums.get(place.b * split_count + i, c));
            state.normalise(state.b);
        }
    }
    return state;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_split_sums(const Value* __restrict__ k,      // [B, T, C]
                const Value* __restrict__ v,      // [B, T, C]
                const W* __restrict__ w,          // [C]
                const U* __restrict__ u,          // [C]
                float* __restrict__ split_sums,   // [B, split_count, kFloats, C]
                i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                i64 split_steps, i64 split_count) {
    // The sum of the last part is not needed, and all steps of the other parts exist. A segment is a kSegments-th of
    // the part.
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const Place place(C, split_count - 1);
    const i64 c = place.of_lane(lane), column = c < C ? c : 0;
    const i64 steps = split_steps / kSegments;
    const i64 begin = place.part * split_steps + segment * steps;
    const Slots slots{kgen::dynamic_smem<float>()};
    kgen::wkv4::ChannelExponents channel[kVec];
    load_channels(channel, w, u, column);
    const Rows k_rows(k + place.b * k_stride_B + column, k_stride_T);
    const Rows v_rows(v + place.b * v_stride_B + column, v_stride_T);

    // 1. The sum of the thread's segment.
    Sum total[kVec];
    WholeDecay decay[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) decay[j] = WholeDecay::of(channel[j].decay, kSteps);
#pragma unroll 1
    for (i64 t = begin; t < begin + steps; t += kSteps) {
        Loaded k_steps, v_steps;
        kgen::wkv4::load_steps<true>(k_steps, k_rows, k_rows.at(t), kSteps);
        kgen::wkv4::load_steps<true>(v_steps, v_rows, v_rows.at(t), kSteps);
        float keys[kSteps][kVec];
        kgen::wkv4::to_keys(keys, k_steps);
        Sum sums[kVec];
        kgen::wkv4::sum_segment<true>(sums, channel, keys, v_steps, kSteps);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            total[j].append(decay[j], sums[j]);
            total[j].normalise(total[j].b);
        }
    }
    if constexpr (kSegments == 1) {
        if (c < C) {
#pragma unroll
            for (int j = 0; j < kVec; ++j)
                SumRows{split_sums, C}.put(place.b * split_count + place.part, c + j, total[j]);
        }
        return;
    }

    // 2. The sum of all segments.
#pragma unroll
    for (int j = 0; j < kVec; ++j) slots.put(segment, j * kLanes + lane, total[j]);
    kgen::sync_block();
    const int own = static_cast<int>(threadIdx.x);
    const i64 own_c = place.of_column(own);
    if (own < kColumns && own_c < C) {
        const float log_decay = kgen::wkv4::log_decay<kForm>(kgen::to_float(w[own_c]));
        const WholeDecay of_segment = WholeDecay::of(log_decay, steps);
        Sum sum = slots.get(0, own);
        for (int i = 1; i < kSegments; ++i) {
            sum.append(of_segment, slots.get(i, own));
            sum.normalise(sum.b);
        }
        SumRows{split_sums, C}.put(place.b * split_count + place.part, own_c, sum);
    }
}

KGEN_EXPORT(wkv4_split_sums);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_forward(const Value* __restrict__ k,              // [B, T, C]
             const Value* __restrict__ v,              // [B, T, C]
             const W* __restrict__ w,                  // [C]
             const U* __restrict__ u,                  // [C]
             const float* __restrict__ initial_state,  // [B, C, 3] or null
             Value* __restrict__ y,                    // [B, T, C]
             float* __restrict__ final_state,          // [B, C, 3] or null
             float* __restrict__ split_sums,           // [B, split_count, kFloats, C]
             i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
             i64 y_stride_B, i64 y_stride_T, i64 split_steps, i64 split_count) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const Place place(C, split_count);
    const i64 c = place.of_lane(lane);
    const bool inside = c < C;          // C is a multiple of kVec
    const i64 column = inside ? c : 0;  // a thread outside reads channels that exist
    const i64 begin = place.part * split_steps, end = kgen::min(T, begin + split_steps);
    const Slots slots{kgen::dynamic_smem<float>()};

    kgen::wkv4::ChannelExponents channel[kVec];
    load_channels(channel, w, u, column);
    const Rows k_rows(k + place.b * k_stride_B + column, k_stride_T);
    const Rows v_rows(v + place.b * v_stride_B + column, v_stride_T);
    const kgen::wkv4::StepRows<Value, kVec> y_rows(y + place.b * y_stride_B + column, y_stride_T);

    // The state before the next round: with one segment, of the thread's channels (`state`); otherwise of the thread's
    // column (`before`).
    const int own = static_cast<int>(threadIdx.x);
    const i64 own_c = place.of_column(own);
    const bool scans = kSegments > 1 && own < kColumns && own_c < C;
    kgen::wkv4::RunningState state[kVec];
    Sum before;
    WholeDecay decay;
    float own_decay = 0.0f;
    if (scans) {
        own_decay = kgen::wkv4::log_decay<kForm>(kgen::to_float(w[own_c]));
        decay = WholeDecay::of(own_decay, kSteps);
        before = state_before(initial_state, split_sums, place, own_c, C, own_decay, split_steps,
                              split_count);
    }
    if constexpr (kSegments == 1) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            const Sum first = state_before(initial_state, split_sums, place, column + j, C,
                                           channel[j].decay, split_steps, split_count);
            state[j] = kgen::wkv4::RunningState::of(first);
        }
    }

    Loaded k_held, v_held, k_next, v_next;
    i64 t = begin + segment * kSteps;  // of the thread's first step
    int count = kgen::wkv4::steps_before<kSteps>(t, end);
    kgen::wkv4::load_steps(k_held, k_rows, k_rows.at(t), count);
    kgen::wkv4::load_steps(v_held, v_rows, v_rows.at(t), count);
#pragma unroll 1
    for (i64 first = begin; first < end; first += kRound) {
        const int next = kgen::wkv4::steps_before<kSteps>(t + kRound, end);
        if constexpr (kPrefetch) {
            kgen::wkv4::load_steps(k_next, k_rows, k_rows.at(t + kRound), next);
            kgen::wkv4::load_steps(v_next, v_rows, v_rows.at(t + kRound), next);
        }
        float keys[kSteps][kVec];
        kgen::wkv4::to_keys(keys, k_held);

        if constexpr (kSegments > 1) {
            // 1. The segment's sums.
            Sum sums[kVec];
            if (count == kSteps)
                kgen::wkv4::sum_segment<true>(sums, channel, keys, v_held, kSteps);
            else
                kgen::wkv4::sum_segment<false>(sums, channel, keys, v_held, count);
#pragma unroll
            for (int j = 0; j < kVec; ++j) slots.put(segment, j * kLanes + lane, sums[j]);
            kgen::sync_block();  // A

            // 2. The states before the segments. The last round may have fewer steps; they matter to the final state
            // alone.
            if (scans) {
                const bool whole = !kFinalState || first + kRound <= end;
#pragma unroll 8
                for (int i = 0; i < kSegments; ++i) {
                    if (!whole) {
                        const int there = kgen::wkv4::steps_before<kSteps>(first + i * kSteps, end);
                        decay = WholeDecay::of(own_decay, there);
                    }
                    const Sum sum = slots.get(i, own);
                    slots.put(i, own, before);
                    before.append(decay, sum);
                    before.normalise(before.b);
                }
            }
            kgen::sync_block();  // B
#pragma unroll
            for (int j = 0; j < kVec; ++j)
                state[j] = kgen::wkv4::RunningState::of(slots.get(segment, j * kLanes + lane));
        }

        // 3. Outputs.
        if (inside) {
            if (count == kSteps)
                kgen::wkv4::segment_outputs<true>(state, channel, keys, v_held, y_rows, t, count);
            else
                kgen::wkv4::segment_outputs<false>(state, channel, keys, v_held, y_rows, t, count);
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

    if (kFinalState && scans && (kSplits == 1 || end == T)) before.store_state(final_state, place.b * C + own_c);
}

KGEN_EXPORT(wkv4_forward);
