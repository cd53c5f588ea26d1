// What the kernels of wkv7's gradients of rows (gr, gw, gk, ga, gb) share: a chunk's inputs and results. Kernels on
// tensor cores also share how results are written, and the gradients by definition, step by step, for chunks with a
// result that is not finite.
//
// Config of RowGradients: Value and W, kK, kV, kForm, kRowWarps, and kVec: elements per copy. State: dtype of S and G
// in memory, float, bf16, or fp16 with scales (scaled_states.cuh).
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/checkpoints.cuh"
#include "kgen/wkv7/scaled_states.cuh"
#include "kgen/wkv7/tile_copier.cuh"

namespace kgen::wkv7 {

// The tensors of one chunk, from its first step on.
template <class Config, class State>
struct RowTensors {
    using Value = typename Config::Value;
    using W = typename Config::W;
    using StateType = State;
    static constexpr int kK = Config::kK, kV = Config::kV;

    // The block's first key; steps of the chunk; its first step in all tensors; the states.
    int first_key, steps;
    StepPointer<Value> gy, r, k, v, a, b;
    StepPointer<W> w;
    StepPointer<float> sa, gsa;
    const State *state, *gradient;  // [K, V]
    Rows<Value> gr, gk, ga, gb;
    Rows<W> gw;
    float scale;
    const float *state_scales = nullptr, *gradient_scales = nullptr;  // if State has scales: [V]
};

template <class Config, class State>
struct RowGradients : RowTensors<Config, State> {
    using Tensors = RowTensors<Config, State>;
    using Value = typename Config::Value;
    using W = typename Config::W;
    using Tensors::first_key, Tensors::steps, Tensors::gy, Tensors::r, Tensors::k, Tensors::v, Tensors::a, Tensors::b,
        Tensors::w, Tensors::sa, Tensors::gsa, Tensors::state, Tensors::gradient, Tensors::gr, Tensors::gk, Tensors::ga,
        Tensors::gb, Tensors::gw, Tensors::scale, Tensors::state_scales, Tensors::gradient_scales;
    using Tensors::kK, Tensors::kV;
    static constexpr auto kForm = Config::kForm;
    static constexpr bool kRepeats = true;  // see backward_rows
    static constexpr int kWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarps * kWarpSize, kKeys = 16 * kWarps;

    // Computes all gradients by definition; a thread has a key and every other step. NaN or Inf of one step never meets
    // the zeros of another step in a product. It takes hundreds of times as long as the kernel.
    KGEN_DEVICE void step_by_step() const {
        const int key = first_key + thread_rank() % kKeys;
        if (key >= kK) return;
#pragma unroll 1
        for (int t = thread_rank() / kKeys; t < steps; t += kThreads / kKeys) {
            float by_r = 0.0f, by_w = 0.0f, by_k = 0.0f, by_a = 0.0f, by_b = 0.0f;
#pragma unroll 1
            for (int x = 0; x < kV; ++x) {
                float s = to_float(state[i64{key} * kV + x]);
                float g = to_float(gradient[i64{key} * kV + x]);
                if constexpr (kScaled<State>) {
                    s *= state_scales[x];
                    g *= gradient_scales[x];
                }
#pragma unroll 1
                for (int i = 0; i < t; ++i) s = after(s, i, key, x);
#pragma unroll 1
                for (int i = steps - 1; i > t; --i)
                    g = fma(decay(i, key), with_y(g, i, key, x), at(a, i, key) * at(gsa, i, x));
                g = with_y(g, t, key, x);
                by_r = fma(after(s, t, key, x), scale * at(gy, t, x), by_r);
                by_w = fma(s, g, by_w);
                by_k = fma(g, at(v, t, x), by_k);
                by_a = fma(s, at(gsa, t, x), by_a);
                by_b = fma(g, at(sa, t, x), by_b);
            }
            gr.at(t)[key] = from_float<Value>(by_r);
            gw.at(t)[key] = from_float<W>(by_w * decay_slope<kForm>(at(w, t, key), decay(t, key)));
            gk.at(t)[key] = from_float<Value>(by_k);
            ga.at(t)[key] = from_float<Value>(by_a);
            gb.at(t)[key] = from_float<Value>(by_b);
        }
    }

    // Writes 16 steps, from step `first` on, of the keys from `key` on; tile: in the layout of TileCopier.
    template <class T>
    KGEN_DEVICE void write(const Rows<T>& to, const u16* tile, int key, int first = 0) const {
        static_assert(sizeof(T) == 2, "tiles of copies have 16 bits");
        constexpr int kPerRow = 16 / Config::kVec;
#pragma unroll
        for (int n = 0; n < ceil_div(16 * kPerRow, kWarpSize); ++n) {
            const int i = lane_id() + n * kWarpSize, step = first + i / kPerRow, column = i % kPerRow * Config::kVec;
            if (step >= steps || key + column >= kK) continue;
            const auto* from = tile + TileCopier<Value, Config::kVec>::place(step - first, column);
            store_vec(to.at(step) + key + column, *reinterpret_cast<const Vec<T, Config::kVec>*>(from));
        }
    }

private:
    KGEN_DEVICE float after(float s, int t, int key, int x) const {
        return fma(decay(t, key), s, fma(at(b, t, key), at(sa, t, x), at(k, t, key) * at(v, t, x)));
    }
    KGEN_DEVICE float with_y(float g, int t, int key, int x) const {
        return fma(scale * at(r, t, key), at(gy, t, x), g);
    }
    KGEN_DEVICE float decay(int t, int key) const { return decay_of<kForm>(at(w, t, key)); }
    template <class T>
    static KGEN_DEVICE float at(const StepPointer<T>& rows, int t, int feature) {
        return to_float(rows.first[t * rows.stride + feature]);
    }
};

// The inputs and results of chunk number `index` of head h, for a block.
template <class Block, int Steps, bool Packed>
KGEN_DEVICE Block block_rows(
    const KeyRowsTensors<typename Block::Base::Value, typename Block::Base::W, typename Block::Base::StateType>& x,
    const Chunk& chunk, i64 N, i64 T, i64 H, i64 h, i64 index, int first_key, float scale) {
    constexpr int kV = Block::Base::kV, kSize = Block::Base::kK * kV;
    const i64 chunks = head_chunks<Steps, Packed>(N, T), number = h * chunks + index;
    const Span span{chunk.span.b, chunk.span.first + chunk.first, chunk.steps};
    Block rows{first_key,
               chunk.steps,
               step_pointer(x.gy, span, h),
               step_pointer(x.r, span, h),
               step_pointer(x.k, span, h),
               step_pointer(x.v, span, h),
               step_pointer(x.a, span, h),
               step_pointer(x.b, span, h),
               step_pointer(x.w, span, h),
               step_pointer(dense_rows(x.sa, T, H, kV), span, h),
               step_pointer(dense_rows(x.gsa, T, H, kV), span, h),
               x.states + number * kSize,
               x.gradients + number * kSize,
               x.gr.head(span, h),
               x.gk.head(span, h),
               x.ga.head(span, h),
               x.gb.head(span, h),
               x.gw.head(span, h),
               scale};
    if constexpr (kScaled<typename Block::Base::StateType>) {
        typename Block::Base& its = rows;
        its.state_scales = scales_of(x.states, H * chunks, kSize) + number * kV;
        its.gradient_scales = scales_of(x.gradients, H * chunks, kSize) + number * kV;
    }
    return rows;
}

// One block computes kKeys keys of a head and chunk; it returns at once if packed sequences leave the chunk's number
// unused. Block: such as ChunkRows, QuotientRows or PreparedRows; kRepeats: whether its call operator returns false if
// step_by_step is needed. StepByStep is for the function's call of itself alone.
template <class Block, bool StepByStep = false, class Offset>
KGEN_DEVICE void backward_rows(
    const Offset* cu_seqlens, i64 N, i64 T, i64 H,
    const KeyRowsTensors<typename Block::Base::Value, typename Block::Base::W, typename Block::Base::StateType>& x,
    float scale) {
    using Index = typename Block::Index;
    constexpr int kSteps = Block::kSteps, kKeyBlocks = ceil_div(Block::Base::kK, Block::kKeys);

    // Opaque, so that the second call computes its addresses anew instead of keeping those of the first in registers.
    u32 number_of_block = StepByStep ? static_cast<u32>(opaque(static_cast<int>(blockIdx.x))) : blockIdx.x;
    if constexpr (StepByStep) {
        if constexpr (Block::kOpaqueRepeat) opaque(number_of_block, static_cast<u32>(H >> 63));
    }
    const int block = static_cast<int>(number_of_block % kKeyBlocks);
    const Index heads = static_cast<Index>(H), index = number_of_block / kKeyBlocks / heads;
    const i64 h = number_of_block / kKeyBlocks % heads;
    const Chunk chunk = chunk_at<kSteps>(cu_seqlens, index, N, T);
    if (chunk.steps == 0) return;  // untested: only packed sequences leave numbers of chunks unused
    Block rows = block_rows<Block, kSteps, kPresent<Offset>>(x, chunk, N, T, H, h, index, block * Block::kKeys, scale);
    if constexpr (StepByStep) {
        rows.step_by_step();
    } else if constexpr (!Block::kRepeats) {
        rows();
    } else if (!rows()) {
        if constexpr (Block::kOpaqueRepeat) {
            // Opaque by an instruction: past empty inline assembly the assembler would find the same products again.
            const u32 zero = static_cast<u32>(H >> 63);
            opaque(N, zero);
            opaque(T, zero);
            opaque(H, zero);
            backward_rows<Block, true>(cu_seqlens, N, T, H, x, scale);
        } else {
            backward_rows<Block, true>(cu_seqlens, N, T, H, x, scale);
        }
    }
}

}  // namespace kgen::wkv7
