// The tensors of a head and sequence for the fused backward loop of wkv7 (fused_loop.cuh), and all gradients by
// definition, step by step, for sequences with a result that is not finite.
//
// Config: W, of 16 bits; kK, kV, up to 64; kForm: of the decays; kVec: elements per copy.
//
// Shared memory of step_by_step: float s[K][V], g[K][V], gsa[V].
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/wkv7/checkpoints.cuh"

namespace kgen::wkv7 {

template <class Config>
struct FusedTensors {
    using W = typename Config::W;
    static constexpr int kK = Config::kK, kV = Config::kV, kVec = Config::kVec, kSteps = 32;
    static constexpr auto kForm = Config::kForm;
    static_assert(sizeof(W) == 2, "gradients of steps have 16 bits");

    i64 steps;
    StepPointer<bf16> gy, r, k, v, a, b;
    StepPointer<W> w;
    StepPointer<float> sa;
    const float* states;  // before all chunks, [chunks, K, V]
    const float* gfinal;  // [K, V], or null
    Rows<bf16> gr, gk, gv, ga, gb;
    Rows<W> gw;
    float scale;

    // Whether a key, or a value feature, exists; a block computes 64 of each.
    static KGEN_DEVICE bool is_key(int key) { return kK == 64 || key < kK; }
    static KGEN_DEVICE bool is_value(int column) { return kV == 64 || column < kV; }

    // An element of the state before a chunk.
    KGEN_DEVICE float state_at(i64 chunk, int key, int column) const {
        return states[(chunk * kK + key) * kV + column];
    }

    // Computes all gradients by definition, with Threads threads. Unlike in the loop, NaN or Inf of one step never
    // meets the zeros of another step in a product. It takes hundreds of times as long as the loop.
    template <int Threads>
    KGEN_DEVICE void step_by_step() const {
        float* const s = dynamic_smem<float>();
        float* const g = s + kK * kV;
        float* const gsa = g + kK * kV;
        const int rank = thread_rank();
        for (int i = rank; i < kK * kV; i += Threads) g[i] = gfinal != nullptr ? gfinal[i] : 0.0f;
        sync_block();
#pragma unroll 1
        for (i64 t = steps - 1; t >= 0; --t) {
            const i64 chunk = t / kSteps;
#pragma unroll 1
            for (int i = rank; i < kK * kV; i += Threads) {
                const int key = i / kV, x = i % kV;
                float found = state_at(chunk, key, x);
#pragma unroll 1
                for (i64 step = chunk * kSteps; step < t; ++step) found = after(found, step, key, x);
                s[i] = found;
                g[i] = fma(at(r, t, key), scale * at(gy, t, x), g[i]);
            }
            sync_block();
            if (rank < kV) {
                float by_b = 0.0f, by_k = 0.0f;
#pragma unroll 1
                for (int key = 0; key < kK; ++key) {
                    by_b = fma(at(b, t, key), g[key * kV + rank], by_b);
                    by_k = fma(at(k, t, key), g[key * kV + rank], by_k);
                }
                gsa[rank] = by_b;
                gv.at(t)[rank] = from_float<bf16>(by_k);
            }
            sync_block();
            if (rank < kK) {
                float by_r = 0.0f, by_w = 0.0f, by_k = 0.0f, by_a = 0.0f, by_b = 0.0f;
#pragma unroll 1
                for (int x = 0; x < kV; ++x) {
                    const float before = s[rank * kV + x], its = g[rank * kV + x];
                    by_r = fma(after(before, t, rank, x), scale * at(gy, t, x), by_r);
                    by_w = fma(before, its, by_w);
                    by_k = fma(its, at(v, t, x), by_k);
                    by_a = fma(before, gsa[x], by_a);
                    by_b = fma(its, at(sa, t, x), by_b);
                }
                gr.at(t)[rank] = from_float<bf16>(by_r);
                gw.at(t)[rank] = from_float<W>(by_w * decay_slope<kForm>(at(w, t, rank), decay(t, rank)));
                gk.at(t)[rank] = from_float<bf16>(by_k);
                ga.at(t)[rank] = from_float<bf16>(by_a);
                gb.at(t)[rank] = from_float<bf16>(by_b);
            }
            sync_block();
#pragma unroll 1
            for (int i = rank; i < kK * kV; i += Threads)
                g[i] = fma(decay(t, i / kV), g[i], at(a, t, i / kV) * gsa[i % kV]);
        }
    }

    // S after a step.
    KGEN_DEVICE float after(float s, i64 t, int key, int x) const {
        return fma(decay(t, key), s, fma(at(b, t, key), at(sa, t, x), at(k, t, key) * at(v, t, x)));
    }
    KGEN_DEVICE float decay(i64 t, int key) const { return decay_of<kForm>(at(w, t, key)); }
    template <class T>
    static KGEN_DEVICE float at(const StepPointer<T>& rows, i64 t, int feature) {
        return to_float(rows.first[t * rows.stride + feature]);
    }
};

}  // namespace kgen::wkv7
