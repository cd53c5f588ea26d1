// digest: 41be6dfb8b7f
// Rendered by kgen from templates/wkv4/backward_naive.cu.jinja
// config: naive(threads=64, chunk=16)
// problem: dtype=fp16, w_dtype=fp32, u_dtype=fp16, decay_form=raw
// wkv4 backward, one thread per batch row and channel, with a state every kChunk steps in global memory. Any shape.
// All sums are in a fixed order.
//
//     wkv4_backward         gk, gv, the gradient of the initial state, and parts of gw and gu for each batch row
//     wkv4_backward_reduce  gw and gu
#include "kgen/wkv4/gradients.cuh"

namespace {

using Value = kgen::fp16;
using W = float;
using U = kgen::fp16;
using kgen::i64;
using kgen::wkv4::Pair;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr int kThreads = 64;
constexpr int kChunk = 16;  // steps between two states in memory

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv4_backward(const Value* __restrict__ gy,             // [B, T, C]
              const Value* __restrict__ k,              // [B, T, C]
              const Value* __restrict__ v,              // [B, T, C]
              const W* __restrict__ w,                  // [C]
              const U* __restrict__ u,                  // [C]
              const float* __restrict__ initial_state,  // [B, C, 3] or null
              const float* __restrict__ gfinal_state,   // [B, C, 3] or null
              Value* __restrict__ gk,                   // [B, T, C]
              Value* __restrict__ gv,                   // [B, T, C]
              float* __restrict__ ginitial_state,       // [B, C, 3] or null
              float* __restrict__ chunk_states,         // [chunks, 4, B * C]
              float* __restrict__ gw_parts,             // [B, C]
              float* __restrict__ gu_parts,             // [B, C]
              i64 B, i64 T, i64 C, i64 gy_stride_B, i64 gy_stride_T, i64 k_stride_B, i64 k_stride_T,
              i64 v_stride_B, i64 v_stride_T, i64 gk_stride_B, i64 gk_stride_T, i64 gv_stride_B,
              i64 gv_stride_T) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [B, C]
    if (column >= B * C) return;
    const i64 b = column / C, c = column % C;
    const float decay = kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c]));
    const float bonus = kgen::to_float(u[c]);
    const kgen::wkv4::PairRows<true> checkpoints{chunk_states, B * C};
    const auto k_of = [&](i64 t) { return kgen::to_float(k[b * k_stride_B + t * k_stride_T + c]); };
    const auto v_of = [&](i64 t) { return kgen::to_float(v[b * v_stride_B + t * v_stride_T + c]); };

    // 1. Forward in time: the state before each chunk.
    const Pair first = kgen::wkv4::initial_pair<true>(initial_state, column);
    Pair state = first;
    for (i64 t = 0; t < T; ++t) {
        if (t % kChunk == 0) checkpoints.put(t / kChunk, column, state);
        kgen::wkv4::step(state, decay, k_of(t), v_of(t));
    }

    // 2. Backward in time, chunk by chunk.
    Pair gradient = kgen::wkv4::final_gradient(gfinal_state, column, state);
    kgen::CompensatedSum gw, gu;
    for (i64 chunk = kgen::ceil_div(T, static_cast<i64>(kChunk)) - 1; chunk >= 0; --chunk) {
        const i64 begin = chunk * kChunk;
        const int steps = static_cast<int>(kgen::min(T - begin, static_cast<i64>(kChunk)));
        // 2a. The outputs of the chunk's steps, and their contributions to gw.
        kgen::wkv4::OutputGradient outputs[kChunk];
        kgen::wkv4::DecayDerivative derivative;
        state = checkpoints.get(chunk, column);
        for (int i = 0; i < steps; ++i) {
            const i64 t = begin + i;
            const float k_t = k_of(t), v_t = v_of(t);
            const auto output = kgen::wkv4::output_of(state, bonus + k_t, v_t);
            const float r = kgen::to_float(gy[b * gy_stride_B + t * gy_stride_T + c]) * output.inverse;
            outputs[i] = {output.exponent, output.low, output.y, r};
            if (i > 0) gw.add(derivative.by_output(output, r));
            const Pair before = state;
            derivative.step(kgen::wkv4::step(state, decay, k_t, v_t), before);
        }
        gw.add(derivative.by_state(state, gradient));
        // 2b. Their gradients, last step first.
        for (int i = steps - 1; i >= 0; --i) {
            const i64 t = begin + i;
            const auto found =
                kgen::wkv4::step_gradients(outputs[i], gradient, k_of(t), bonus, v_of(t));
            gk[b * gk_stride_B + t * gk_stride_T + c] = kgen::from_float<Value>(found.gk);
            gv[b * gv_stride_B + t * gv_stride_T + c] = kgen::from_float<Value>(found.gv);
            gu.add(found.gu);
            outputs[i].step_back(gradient, decay);
        }
    }

    // 3. The parts of this batch row.
    gw_parts[column] = gw.value();
    gu_parts[column] = gu.value();
    if (ginitial_state)
        kgen::wkv4::store_initial_gradient(ginitial_state, column, first, gradient);
}

KGEN_EXPORT(wkv4_backward);

extern "C" __global__ void __launch_bounds__(kThreads)
wkv4_backward_reduce(const W* __restrict__ w,             // [C]
                     const float* __restrict__ gw_parts,  // [B, C]
                     const float* __restrict__ gu_parts,  // [B, C]
                     W* __restrict__ gw,                  // [C]
                     U* __restrict__ gu,                  // [C]
                     i64 B, i64 C) {
    kgen::wkv4::reduce_batch<kForm, kThreads>(w, gw_parts, gu_parts, gw, gu, B, C);
}

KGEN_EXPORT(wkv4_backward_reduce);
