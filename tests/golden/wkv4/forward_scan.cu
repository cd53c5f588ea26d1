// Rendered by kgen from templates/wkv4/forward_scan.cu.jinja
// config: scan(lanes=128, vec=2, segments=1, steps=4, prefetch=false, min_blocks=4, splits=1)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=fp32, final_state_dtype=fp32, decay_form=raw
// wkv4 forward by a scan over segments of time: k and v are read once (kSplits > 1: twice).
//
// A block has kColumns channels of a batch row and loops over rounds of kSegments * kSteps steps. In a round:
//
//   1. a thread loads the kSteps steps of its segment into registers and sums their terms;
//   2. the sums of all segments go to shared memory;
//   3. the thread adds the segments before its own to the state before the round;
//   4. it computes its outputs from registers. The state after the last segment is the state before the next round.
//
// A segment's sums and outputs take one exponential for each step and channel. Where its keys are too far apart for
// that (segment.cuh), the thread reads the steps again and takes them one by one.
//
// Where there are few channels, T is cut into kSplits parts, each of which has its own blocks:
//
//   wkv4_split_sums  sums the terms of each part, a thread per part and kVec channels
//   wkv4_forward     begins with the sums of the parts before its own
//
// Shared memory (dynamic), in slots of float [3][kVec][kLanes]: 2 x kSegments sums, 2 states between rounds.
// Synchronisation: a barrier per round. Rounds alternate between two sets of slots: a thread that writes a slot in
// round r + 2 has passed the barrier of round r + 1, which every thread reaches after its reads of round r.
#include "kgen/primitives/block.cuh"
#include "kgen/wkv4/exchange.cuh"
#include "kgen/wkv4/segment.cuh"
#include "kgen/wkv4/steps.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;
using Pair = kgen::wkv4::PairOf<false>;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr bool kInitialState = kgen::kPresent<float>;
constexpr bool kFinalState = kgen::kPresent<float>;
constexpr int kLanes = 128;        // threads side by side along the channels
constexpr int kVec = 2;            // adjacent channels of a thread
constexpr int kSegments = 1;  // segments of a round, a row of threads each
constexpr int kSteps = 4;        // of a segment
constexpr bool kPrefetch = false;  // load the next round's steps before computing this round's
constexpr int kSplits = 1;      // parts of T, at most
constexpr int kMinBlocks = 4;
constexpr int kThreads = kLanes * kSegments;
constexpr int kColumns = kLanes * kVec;
constexpr int kRound = kSegments * kSteps;
constexpr int kSumThreads = 128;

using Rows = kgen::wkv4::Channels<const Value, kVec>;
using Loaded = kgen::wkv4::Loaded<Value, kVec, kSteps>;
using Segment = kgen::wkv4::Segment<kVec, kSteps, kFinalState>;
using Slots = kgen::wkv4::PairSlots<kLanes, kVec, false>;

static_assert(kThreads <= 1024 && kThreads % kgen::kWarpSize == 0, "whole warps, one block");

// Loads the first `count` steps from step t on.
KGEN_DEVICE void load(Loaded& steps, const Rows& rows, i64 t, int count) {
    if (count == kSteps)
        steps.load(rows.at(t), rows.stride_t, kSteps);
    else
        steps.load(rows.at(t), rows.stride_t, count);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kSumThreads)
wkv4_split_sums(const Value* __restrict__ k,      // [B, T, C]
                const Value* __restrict__ v,      // [B, T, C]
                const W* __restrict__ w,          // [C]
                float* __restrict__ split_sums,   // [B, split_count, 3, C]
                i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                i64 split_steps, i64 split_count) {
    // The sum of the last part is not needed.
    kgen::wkv4::sum_runs<kForm, false, kVec, kSteps, kSumThreads>(
        k, v, w, split_sums, T, C, k_stride_B, k_stride_T, v_stride_B, v_stride_T, split_steps,
        split_count - 1, split_count);
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
             float* __restrict__ split_sums,           // [B, split_count, 3, C]
             i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
             i64 y_stride_B, i64 y_stride_T, i64 split_steps, i64 split_count) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int segment = static_cast<int>(threadIdx.x) / kLanes;
    const kgen::u32 tiles = static_cast<kgen::u32>(kgen::ceil_div(C, static_cast<i64>(kColumns)));
    const kgen::u32 part = blockIdx.x / tiles, parts = static_cast<kgen::u32>(split_count);
    const i64 c = static_cast<i64>(blockIdx.x % tiles) * kColumns + lane * kVec;
    const i64 split = part % parts, b = part / parts;
    const bool inside = c < C;  // C is a multiple of kVec
    const i64 column = inside ? c : 0;  // a thread outside reads channels that exist
    const i64 begin = split * split_steps, end = kgen::min(T, begin + split_steps);

    const Slots slots{kgen::dynamic_smem<float>()};
    constexpr int kStates = 2 * kSegments;  // the first of the slots of states

    kgen::wkv4::ChannelFactors channel[kVec];
    float decay[kVec];
    kgen::wkv4::load_decays<kForm>(decay, w, column, true);
#pragma unroll
    for (int j = 0; j < kVec; ++j) channel[j].set(decay[j], kgen::to_float(u[column + j]), kSteps);
    const Rows k_rows{k + b * k_stride_B + column, k_stride_T};
    const Rows v_rows{v + b * v_stride_B + column, v_stride_T};
    const kgen::wkv4::Channels<Value, kVec> y_rows{y + b * y_stride_B + column, y_stride_T};

    // The state before the block's first step.
    if (segment == 0) {
        Pair state[kVec];
        if (inside) {
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                if (kInitialState)
                    state[j] = kgen::wkv4::initial_pair<false>(initial_state, b * C + c + j);
                if constexpr (kSplits > 1) {
                    const kgen::wkv4::PairRows<false> sums{split_sums, C};
                    const auto decay_of_split = kgen::wkv4::decay_of_steps(decay[j], split_steps);
#pragma unroll 4
                    for (i64 i = 0; i < split; ++i)
                        state[j].append(decay_of_split, sums.get(b * split_count + i, c + j));
                }
                if (kFinalState && T == 0)
                    kgen::wkv4::store_state(final_state, b * C + c + j, state[j]);
            }
        }
        slots.put(kStates + 1, lane, state);
    }

    Loaded k_held, v_held, k_next, v_next;
    i64 t = begin + segment * kSteps;  // of the thread's first step
    int count = kgen::wkv4::steps_before<kSteps>(t, end);
    load(k_held, k_rows, t, count);
    load(v_held, v_rows, t, count);
    int parity = 0;
    for (i64 first = begin; first < end; first += kRound, parity ^= 1) {
        const int next = kgen::wkv4::steps_before<kSteps>(t + kRound, end);
        if constexpr (kPrefetch) {
            load(k_next, k_rows, t + kRound, next);
            load(v_next, v_rows, t + kRound, next);
        }

        // 1, 2. The segment's sums.
        Segment own;
        Pair state[kVec];
        const bool anchored = count == kSteps
                                  ? own.sum<true>(state, channel, k_held, v_held, kSteps)
                                  : own.sum<false>(state, channel, k_held, v_held, count);
        if (!anchored) kgen::wkv4::sum_by_steps(state, channel, k_rows, v_rows, t, count);
        slots.put(parity * kSegments + segment, lane, state);
        kgen::sync_block();

        // 3. The state before the segment. Segments before one that has steps are whole.
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            state[j] = slots.get(kStates + (parity ^ 1), lane, j);
            for (int i = 0; i < segment; ++i)
                state[j].append(kgen::wkv4::decay_of_steps(decay[j], kSteps),
                                slots.get(parity * kSegments + i, lane, j));
        }

        // 4. The state after the last segment that has steps, then outputs.
        const bool last = count > 0 && t + count == end;  // untested: a single segment has steps
        if (last || segment == kSegments - 1) {
            Pair behind[kVec];
#pragma unroll
            for (int j = 0; j < kVec; ++j) {
                behind[j] = state[j];
                behind[j].append(kgen::wkv4::decay_of_steps(decay[j], count),
                                 slots.get(parity * kSegments + segment, lane, j));
            }
            if (segment == kSegments - 1) slots.put(kStates + parity, lane, behind);
            if (kFinalState && inside && last && end == T) {
#pragma unroll
                for (int j = 0; j < kVec; ++j)
                    kgen::wkv4::store_state(final_state, b * C + c + j, behind[j]);
            }
        }
        if (inside) {
            if (!anchored || !own.outputs_fit(state, channel))
                kgen::wkv4::outputs_by_steps(state, channel, k_rows, v_rows, y_rows, t, count);
            else if (count == kSteps)
                own.outputs<true>(state, channel, v_held, y_rows.at(t), y_stride_T, kSteps);
            else
                own.outputs<false>(state, channel, v_held, y_rows.at(t), y_stride_T, count);
        }

        t += kRound;
        count = next;
        if constexpr (kPrefetch) {
            k_held = k_next;
            v_held = v_next;
        } else {
            load(k_held, k_rows, t, count);
            load(v_held, v_rows, t, count);
        }
    }
}

KGEN_EXPORT(wkv4_forward);
