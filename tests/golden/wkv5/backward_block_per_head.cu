// Rendered by kgen from templates/wkv/backward_block_per_head.cu.jinja
// config: block_per_head(split=1, tile=1, columns=32, tokens=4, stages=1, vec=2, checkpoint_steps=16, key_split=8, keys=8)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 backward, states in registers. All sums are in a fixed order.
//
//     wkv_backward_rv      some blocks compute gr, forward in time, and write checkpoints of the state; other blocks of
//                          the same launch compute gv and the gradient of the initial state, backward in time
//     wkv_backward_kw      gk, gw and parts of gu, backward in time from checkpoint to checkpoint
//     wkv_backward_reduce  gu, and wkv5's gw
//
// Shared memory and barriers: kgen/wkv/state_columns.cuh, kgen/wkv/key_gradients.cuh.
#include "kgen/wkv/key_gradients.cuh"
#include "kgen/wkv/reduce.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::Direction;
using kgen::i64;
using kgen::wkv::Rows;
using kgen::wkv::step_pointer;

constexpr int kK = 64;
constexpr int kV = 64;

struct Config {
    using Value = ::Value;
    using W = ::W;
    using U = ::U;
    static constexpr bool kPerStep = false;  // w is [B, T, H, K], not [H, K]
    static constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
    static constexpr int kSplit = 1;      // threads that share a column of the state
    static constexpr int kTile = 1;        // columns of a thread
    static constexpr int kColumns = 32;  // columns of a block
    static constexpr int kTokens = 4;    // steps per barrier
    static constexpr int kStages = 1;    // buffers of kTokens steps in shared memory
    static constexpr int kVec = 2;          // elements per copy
    static constexpr int kCheckpointSteps = 16;  // steps between two checkpoints
    static constexpr int kKeySplit = 8;  // threads that share a key of wkv_backward_kw
    static constexpr int kKeys = 8;           // keys of a block of wkv_backward_kw
};

using LoopR = kgen::wkv::StateColumns<Config, Direction::forward, kV, false>;  // columns: keys
using LoopV = kgen::wkv::StateColumns<Config, Direction::backward, kK, true>;  // columns: values
using KeyLoop = kgen::wkv::KeyGradients<Config, kV>;
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kColumnBlocksR = kgen::ceil_div(kK, Config::kColumns);
constexpr int kColumnBlocks = kColumnBlocksR + kgen::ceil_div(kV, Config::kColumns);
constexpr int kKeyBlocks = kgen::ceil_div(kK, Config::kKeys);
constexpr int kReduceThreads = 128;

static_assert(kK % Config::kVec == 0 && kV % Config::kVec == 0, "copies must end with a row");

// One block computes gr of kColumns keys of a head, or gv of kColumns value features.
KGEN_DEVICE void backward_rv(i64 T, i64 H, const Offset* cu_seqlens, Rows<const Value> gy,
                             Rows<const Value> r, Rows<const Value> k, Rows<const Value> v,
                             Rows<const W> w, const U* u, const float* initial_state,
                             const float* gfinal_state, Rows<Value> gr, Rows<Value> gv,
                             float* ginitial_state, float* checkpoint_states, float scale) {
    // 1. The block's sequence, head and columns.
    const i64 head = blockIdx.x / kColumnBlocks, h = head % H, state = head * kK * kV;
    const kgen::wkv::Span span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const int block = static_cast<int>(blockIdx.x % kColumnBlocks);
    const auto gy_steps = step_pointer(gy, span, h);
    const auto r_steps = step_pointer(r, span, h);
    const auto k_steps = step_pointer(k, span, h);
    const auto v_steps = step_pointer(v, span, h);

    if (block < kColumnBlocksR) {
        // 2a. Forward in time: gr_t = scale * (S gy_t + n_t u k_t), and the checkpoints of S.
        const LoopR::Columns keys{block * Config::kColumns, kK};
        const LoopR loop{keys, span.steps, gy_steps, v_steps, k_steps,
                         step_pointer(w, span, h), u + h * kK, 1.0f, scale};
        constexpr int kSteps = Config::kCheckpointSteps;
        float* checkpoints =
            checkpoint_states +
            kgen::wkv::first_checkpoint<kSteps, Offset>(span, head, h, T) * kK * kV;
        loop(initial_state ? initial_state + state : nullptr, 1, kV, nullptr,
             gr.head(span, h).first, gr.stride_t, [&](i64 t, LoopR::State& columns) {
                 const i64 index = kgen::wkv::checkpoint_index<kSteps>(t, span.steps);
                 if (index < 0) return;
                 columns.store(
                     checkpoints + index * kK * kV, kK,
                     [&](int x) { return loop.columns.uses(x); },
                     [&](int x) { return loop.columns.column(x); });
             });
    } else {
        // 2b. Backward in time: gv_t = G^T k_t + (sum_k r u k) scale gy_t.
        const LoopV::Columns values{(block - kColumnBlocksR) * Config::kColumns, kV};
        const LoopV loop{values, span.steps, k_steps,
                         r_steps, gy_steps, step_pointer(w, span, h), u + h * kK, scale, 1.0f};
        loop(gfinal_state ? gfinal_state + state : nullptr, kV, 1,
             ginitial_state ? ginitial_state + state : nullptr,
             gv.head(span, h).first, gv.stride_t, [](i64, LoopV::State&) {});
    }
}

// One block computes gk, gw and parts of gu of kKeys keys of a head. put_w(span, t, h, key, gw, writes) receives gw_t
// in all threads of the key, one of which writes.
template <class PutW>
KGEN_DEVICE void backward_kw(i64 T, i64 H, const Offset* cu_seqlens, Rows<const Value> gy,
                             Rows<const Value> r, Rows<const Value> k, Rows<const Value> v,
                             Rows<const W> w, const U* u, const float* initial_state,
                             const float* gfinal_state, const float* checkpoint_states,
                             Rows<Value> gk, float* gu_parts, float scale, PutW put_w) {
    // 1. The block's sequence, head and keys.
    const i64 head = blockIdx.x / kKeyBlocks, h = head % H, state = head * kK * kV;
    const kgen::wkv::Span span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const KeyLoop::Columns columns{static_cast<int>(blockIdx.x % kKeyBlocks) * Config::kKeys, kK};
    const int key = columns.column(0);

    // 2. From checkpoint to checkpoint, backward in time: the states of all steps between the two, then
    // the gradients of these steps.
    const KeyLoop loop{columns,
                       span.steps,
                       step_pointer(gy, span, h),
                       step_pointer(r, span, h),
                       step_pointer(k, span, h),
                       step_pointer(v, span, h),
                       step_pointer(w, span, h),
                       columns.uses(0) ? kgen::to_float(u[h * kK + key]) : 0.0f,
                       scale};
    const auto gk_h = gk.head(span, h);
    loop(
        initial_state ? initial_state + state : nullptr,
        checkpoint_states + kgen::wkv::first_checkpoint<Config::kCheckpointSteps, Offset>(
                                span, head, h, T) * kK * kV,
        kK, gfinal_state ? gfinal_state + state : nullptr,
        [&](i64 t, float x) { gk_h.at(t)[key] = kgen::from_float<Value>(x); },
        [&](i64 t, float x, bool writes) { put_w(span, t, h, key, x, writes); },
        [&](float gu) { gu_parts[head * kK + key] = gu; });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(LoopR::kThreads)
wkv_backward_rv(const Value* __restrict__ gy,             // [B, T, H, V]
                const Value* __restrict__ r,              // [B, T, H, K]
                const Value* __restrict__ k,              // [B, T, H, K]
                const Value* __restrict__ v,              // [B, T, H, V]
                const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
                const U* __restrict__ u,                  // [H, K]
                const float* __restrict__ initial_state,  // [N, H, K, V] or null
                const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
                Value* __restrict__ gr,                   // [B, T, H, K]
                Value* __restrict__ gv,                   // [B, T, H, V]
                float* __restrict__ ginitial_state,       // [N, H, K, V] or null
                float* __restrict__ checkpoint_states,    // [B, H, checkpoints, V, K]
                i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
                i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
                i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gv_stride_B,
                i64 gv_stride_T, i64 gv_stride_H, float scale) {
    backward_rv(
        T, H, cu_seqlens, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H},
        kgen::wkv::same_at_every_step(w, kK),
        u, kInitialState ? initial_state : nullptr, kFinalState ? gfinal_state : nullptr,
        {gr, gr_stride_B, gr_stride_T, gr_stride_H}, {gv, gv_stride_B, gv_stride_T, gv_stride_H},
        kInitialState ? ginitial_state : nullptr, checkpoint_states, scale);
}

KGEN_EXPORT(wkv_backward_rv);

// Packed sequences: without a minimum number of blocks ptxas chooses 168 registers, to fit a third block, and spills 72
// bytes.
extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kgen::kPresent<Offset> ? 1 : 0)
wkv_backward_kw(const Value* __restrict__ gy,                 // [B, T, H, V]
                const Value* __restrict__ r,                  // [B, T, H, K]
                const Value* __restrict__ k,                  // [B, T, H, K]
                const Value* __restrict__ v,                  // [B, T, H, V]
                const W* __restrict__ w,                      // [B, T, H, K], or [H, K]
                const U* __restrict__ u,                      // [H, K]
                const float* __restrict__ initial_state,      // [N, H, K, V] or null
                const float* __restrict__ gfinal_state,       // [N, H, K, V] or null
                const Offset* __restrict__ cu_seqlens,        // [N + 1] or null
                const float* __restrict__ checkpoint_states,  // [B, H, checkpoints, V, K]
                Value* __restrict__ gk,                       // [B, T, H, K]
                float* __restrict__ gw_parts,                 // [N, H, K]
                float* __restrict__ gu_parts,                 // [N, H, K]
                i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
                i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
                i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                i64 gk_stride_B, i64 gk_stride_T, i64 gk_stride_H,
                float scale) {
    kgen::CompensatedSum gw;  // of the thread's key
    backward_kw(
        T, H, cu_seqlens, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H},
        kgen::wkv::same_at_every_step(w, kK),
        u, kInitialState ? initial_state : nullptr, kFinalState ? gfinal_state : nullptr,
        checkpoint_states, {gk, gk_stride_B, gk_stride_T, gk_stride_H}, gu_parts, scale,
        [&](const kgen::wkv::Span&, i64, i64, int, float x, bool) { gw.add(x); });
    const int key = static_cast<int>(blockIdx.x % kKeyBlocks) * Config::kKeys +
                    static_cast<int>(threadIdx.x) / Config::kKeySplit;
    if (key < kK && threadIdx.x % Config::kKeySplit == 0)
        gw_parts[blockIdx.x / kKeyBlocks * kK + key] = gw.value();
}

KGEN_EXPORT(wkv_backward_kw);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gw_parts,  // [N, H, K]
                    const float* __restrict__ gu_parts,  // [N, H, K]
                    W* __restrict__ gw,                  // [H, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 H) {
    kgen::wkv::sum_sequences<kReduceThreads>(gw_parts, N, H * kK, gw);
    kgen::wkv::sum_sequences<kReduceThreads>(gu_parts, N, H * kK, gu);
}

KGEN_EXPORT(wkv_backward_reduce);
