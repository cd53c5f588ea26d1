// digest: 22c5876c36a0
// Rendered by kgen from templates/linear_attention/backward_chunk_scan_norm.cu.jinja
// config: chunk_scan_norm(chunk=32, value_tiles=1, value_warps=4, key_warps=1, stages=3, copy_bytes=16, segments=4, min_blocks=2, scan_vec=4, overlap=1)
// problem: E=64, M=64, dtype=fp16, product_dtype=fp16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=fp32
// linear_attention backward, chunk_scan_norm: tensor cores, from sm_80 on, with a norm; also without a norm, for
// numbers of keys that the other variants have no registers for. The three gradients are recurrences, gq with the state
// S, gk and gv backward in time with its gradient G. The norm adds one more key to gq and gk, and factors per step
// (chunk_norm_key.cuh). Three kernels, or with one segment only the last:
//
//     sums      what each segment adds to S and the key sum z, and to their gradients G and y
//     scan      the sums become S, z, G and y before the segments (segment_scan.cuh)
//     backward  each CTA reads its states before its segment and loops over the chunks (chunk_loop.cuh)
//
// S and G lie as [E, M]; gq and gk read them transposed.
#include "kgen/chunked/chunk_loop.cuh"
#include "kgen/chunked/segment_scan.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/pdl.cuh"
namespace {

using T = kgen::fp16;
using Product = kgen::fp16;
using InitialState = kgen::none;
using InitialKeySum = kgen::none;
using FinalState = kgen::none;
using FinalKeySum = kgen::none;
using Norm = float;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kChunk = 32;             // steps
constexpr int kValueTiles = 1;  // fragments of 16 value features per warp
constexpr int kValueWarps = 4;  // warps of a CTA along the value features
constexpr int kKeyWarps = 1;      // warps of a CTA along the keys, for the same value features
constexpr int kStages = 3;           // chunks in the shared-memory ring
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kSegments = 4;       // of the steps of a head, a CTA each
constexpr int kMinBlocks = 2;    // CTAs per SM that __launch_bounds__ reserves registers for
constexpr int kScanVec = 4;        // elements of a state per thread of the scan

constexpr int kSums = kSegments - 1;  // the sum of the last segment is not needed
constexpr int kScanThreads = 128;

// The gradient of the initial state is the last G, in fp32.
using NormKey = kgen::NormKeyRows<kgen::kPresent<InitialState>>;

// gq, gk and the sums have the features of k as value features; gv has the features of v.
template <int Keys, int Values>
using LoopOf = kgen::ChunkLoop<T, Product, Keys, Values, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                               kStages, kCopy, false, false, false, kgen::NoDecayRows, NormKey,
                               kgen::kPresent<InitialState>>;
using KeyLoop = LoopOf<kM, kE>;
using ValueLoop = LoopOf<kE, kM>;

constexpr int kBlockV = KeyLoop::kBlockV;
constexpr int kKeyBlocks = (kE + kBlockV - 1) / kBlockV;
constexpr int kValueBlocks = (kM + kBlockV - 1) / kBlockV;

// Strides of B, H and T of a tensor.
struct Strides {
    kgen::i64 batch, head, step;
};

// The rows of a head, in the order of its loop.
struct Head {
    kgen::i64 index, heads, steps;
    bool backward;

    template <class Value>
    KGEN_DEVICE kgen::StepRows<Value> rows(Value* tensor, const Strides& of) const {
        const auto found = kgen::head_rows(tensor, index, heads, of.batch, of.head, of.step);
        return backward ? found.reversed(steps) : found;
    }

    KGEN_DEVICE NormKey norm_key(const Norm* norm, const Norm* gout_dot_out, float scale) const {
        const kgen::i64 first = index * steps + (backward ? steps - 1 : 0);
        return NormKey{kgen::floats_at(norm, first), kgen::floats_at(gout_dot_out, first),
                       backward ? -1 : 1, scale, !backward, kgen::kPresent<Norm>, nullptr, nullptr};
    }
};

}  // namespace

// Sums over each segment but the last: of k v^T and k forward in time, of q gout^T and q backward, with the weights of
// the norm.
extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kMinBlocks)
linear_attention_backward_sums(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const Norm* __restrict__ norm,          // [B, H, T]
    const Norm* __restrict__ gout_dot_out,  // [B, H, T]
    float* __restrict__ state_sums,         // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_sums,      // [B * H, segments - 1, E, M]
    float* __restrict__ key_sums,           // [B * H, segments - 1, E]
    float* __restrict__ key_sum_gradients,  // [B * H, segments - 1, E]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    kgen::griddepcontrol_launch_dependents();
    const kgen::BlockSegment place(steps, kChunk, kSegments, kgen::max(kSums, 1), 2 * kKeyBlocks);
    const bool of_state = place.rest < kKeyBlocks;
    const int value = place.rest % kKeyBlocks * kBlockV;
    const Head head{place.head, H, steps, !of_state};

    kgen::RecurrenceRows<T> rows{};
    if (of_state) {
        rows.b = head.rows(v, {v_stride_B, v_stride_H, v_stride_T});
        rows.v = head.rows(k, {k_stride_B, k_stride_H, k_stride_T}).from(value);
    } else {
        rows.b = head.rows(gout, {gout_stride_B, gout_stride_H, gout_stride_T});
        rows.v = head.rows(q, {q_stride_B, q_stride_H, q_stride_T}).from(value);
    }
    rows.a = rows.b;
    rows.first = place.first;
    rows.end = place.end;
    rows.values = kgen::min(kE - value, kBlockV);

    const kgen::i64 sum = place.head * kSums + place.segment;
    kgen::RecurrenceStates states{};
    states.final_state = (of_state ? state_sums : gradient_sums) + (sum * kE + value) * kM;
    states.final_key_stride = 1;
    states.final_value_stride = kM;
    NormKey norm_key = head.norm_key(norm, gout_dot_out, scale);
    norm_key.end = (of_state ? key_sums : key_sum_gradients) + sum * kE + value;
    KeyLoop(rows, states, {}, norm_key).sum_segment();
}

KGEN_EXPORT(linear_attention_backward_sums);

// In place: sum i becomes the state, gradient or key sum before segment i + 1.
extern "C" __global__ void __launch_bounds__(kScanThreads)
linear_attention_backward_scan(
    const InitialState* __restrict__ initial_state,     // [B, H, E, M]
    const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
    const FinalState* __restrict__ gfinal_state,        // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,     // [B, H, E]
    float* __restrict__ state_sums,         // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_sums,      // [B * H, segments - 1, E, M]
    float* __restrict__ key_sums,           // [B * H, segments - 1, E]
    float* __restrict__ key_sum_gradients,  // [B * H, segments - 1, E]
    kgen::i64 B, kgen::i64 H) {
    kgen::griddepcontrol_launch_dependents();
    constexpr int kScanned = kgen::max(kSums, 1);
    const kgen::i64 heads = B * H;
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kScanThreads + kgen::thread_rank();
    const kgen::i64 of_states = heads * (kE * kM / kScanVec), of_keys = heads * kE;  // threads
    kgen::griddepcontrol_wait(state_sums, gradient_sums, key_sums, key_sum_gradients);
    if (index < 2 * of_states) {
        const bool of_state = index < of_states;
        kgen::states_before_segments<kScanned, kScanVec, kE * kM>(
            of_state ? state_sums : gradient_sums,
            of_state ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), heads,
            of_state ? index : index - of_states);
    } else {
        const kgen::i64 rest = index - 2 * of_states;
        const bool of_key_sum = rest < of_keys;
        kgen::states_before_segments<kScanned, 1, kE>(
            of_key_sum ? key_sums : key_sum_gradients,
            of_key_sum ? kgen::floats_at(initial_key_sum, 0) : kgen::floats_at(gfinal_key_sum, 0),
            heads, of_key_sum ? rest : rest - of_keys);
    }
}

KGEN_EXPORT(linear_attention_backward_scan);

extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,     // [B, H, E, M]
    const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
    const Norm* __restrict__ norm,                     // [B, H, T]
    const Norm* __restrict__ gout_dot_out,             // [B, H, T]
    const FinalState* __restrict__ gfinal_state,        // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,     // [B, H, E]
    const float* __restrict__ state_sums,         // [B * H, segments - 1, E, M]
    const float* __restrict__ gradient_sums,      // [B * H, segments - 1, E, M]
    const float* __restrict__ key_sums,           // [B * H, segments - 1, E]
    const float* __restrict__ key_sum_gradients,  // [B * H, segments - 1, E]
    T* __restrict__ gq,               // [B, H, T, E]
    T* __restrict__ gk,               // [B, H, T, E]
    T* __restrict__ gv,               // [B, H, T, M]
    InitialState* __restrict__ ginitial_state,     // [B, H, E, M]
    InitialKeySum* __restrict__ ginitial_key_sum,  // [B, H, E]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
    kgen::i64 gq_stride_B, kgen::i64 gq_stride_H, kgen::i64 gq_stride_T,
    kgen::i64 gk_stride_B, kgen::i64 gk_stride_H, kgen::i64 gk_stride_T,
    kgen::i64 gv_stride_B, kgen::i64 gv_stride_H, kgen::i64 gv_stride_T, float scale) {
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSegments, 2 * kKeyBlocks + kValueBlocks);
    const bool of_q = place.rest < kKeyBlocks;
    const bool of_v = place.rest >= 2 * kKeyBlocks;
    const int value = (of_v ? place.rest - 2 * kKeyBlocks : place.rest % kKeyBlocks) * kBlockV;
    const bool last = place.segment == kSegments - 1;
    const Head head{place.head, H, steps, !of_q};

    // 1. The rows a, b, v of the gradient's recurrence.
    const auto of_gout = head.rows(gout, {gout_stride_B, gout_stride_H, gout_stride_T});
    const auto of_queries = head.rows(q, {q_stride_B, q_stride_H, q_stride_T});
    const auto of_keys = head.rows(k, {k_stride_B, k_stride_H, k_stride_T});
    const auto of_values = head.rows(v, {v_stride_B, v_stride_H, v_stride_T});
    kgen::RecurrenceRows<T> rows{};
    rows.a = of_q ? of_gout : of_v ? of_keys : of_values;
    rows.b = of_q ? of_values : of_v ? of_queries : of_gout;
    rows.v = (of_q ? of_keys : of_v ? of_gout : of_queries).from(value);
    if (of_q) {
        rows.out = head.rows(gq, {gq_stride_B, gq_stride_H, gq_stride_T});
    } else if (of_v) {
        rows.out = head.rows(gv, {gv_stride_B, gv_stride_H, gv_stride_T});
    } else {
        rows.out = head.rows(gk, {gk_stride_B, gk_stride_H, gk_stride_T});
    }
    rows.out = rows.out.from(value);
    rows.first = place.first;
    rows.end = place.end;
    rows.values = kgen::min((of_v ? kM : kE) - value, kBlockV);
    rows.out_factor = 1.0f;

    // 2. The state before the segment: as [E, M] for gv, transposed for gq and gk.
    kgen::griddepcontrol_wait(state_sums, gradient_sums, key_sums, key_sum_gradients);
    kgen::RecurrenceStates states{};
    states.initial_state = kgen::state_before_segment<kSums, kE * kM>(
        of_q ? state_sums : gradient_sums,
        of_q ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), place.head,
        place.segment);
    if (states.initial_state != nullptr) states.initial_state += of_v ? value : value * kM;
    states.initial_key_stride = states.final_key_stride = of_v ? kM : 1;
    states.initial_value_stride = states.final_value_stride = of_v ? 1 : kM;
    states.final_factor = 1.0f;
    if (last && of_v)
        states.final_state = kgen::floats_at(ginitial_state, place.head * kE * kM + value);

    // 3. The norm: z before the segment for gq, its gradient for gk. Without a norm the key sum is only returned: its
    // gradient is added to gk and passes through unchanged.
    NormKey norm_key = head.norm_key(norm, gout_dot_out, scale);
    norm_key.has_key = kgen::kPresent<Norm> && !of_v;
    if (!kgen::kPresent<Norm> && !of_q && !of_v)
        states.bias = kgen::floats_at(gfinal_key_sum, place.head * kE + value);
    if (!of_v) {
        norm_key.initial = kgen::state_before_segment<kSums, kE>(
            of_q ? key_sums : key_sum_gradients,
            of_q ? kgen::floats_at(initial_key_sum, 0) : kgen::floats_at(gfinal_key_sum, 0),
            place.head, place.segment);
        if (norm_key.initial != nullptr) norm_key.initial += value;
        if (last && !of_q)
            norm_key.end = kgen::floats_at(ginitial_key_sum, place.head * kE + value);
    }

    // 4. The chunk loop. One instantiation for all loops of one shape, so that the CTAs of an SM run the same code.
    if (kE == kM || !of_v) {
        KeyLoop(rows, states, {}, norm_key).run();
    } else {
        ValueLoop(rows, states, {}, norm_key).run();
    }
}

KGEN_EXPORT(linear_attention_backward);
