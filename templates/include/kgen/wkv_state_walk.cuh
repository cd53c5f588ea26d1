// States at the boundaries of chunks, for the chunked backward pass of wkv5 and wkv6: forward in
// time the state before each chunk, backward the gradient of the state behind each.
//
//     forward    S_t     = diag(d_t) S_{t-1} + k_t v_t^T
//     backward   G_{t-1} = diag(d_t) G_t + scale * r_t gy_t^T
//
// 16 steps are one product: rows of keys get their decays up to the last of them (forward) or from
// the first one (backward) by running products, so that no exponent is ever positive.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_place.cuh"
#include "decay_form.cuh"
#include "math.cuh"
#include "wkv.cuh"
#include "wkv_state_tile.cuh"

namespace kgen::wkv {

// Threads side by side that copy a row of so many copies: a power of 2, so that a thread keeps its
// column from row to row.
KGEN_DEVICE constexpr int copying_lanes(int copies) {
    int lanes = 1;
    while (lanes < copies && lanes < kWarpSize) lanes *= 2;
    return lanes;
}

// By the whole block: `Steps` rows of a tensor from step `first` on, of each `width` of Width
// values, a multiple of what one copy moves, to rows `tile_stride` apart. Steps behind the first
// `left` ones are zeros.
template <class T, int Steps, int Width, int CopyBytes, int Threads>
KGEN_DEVICE void copy_rows(T* tile, int tile_stride, const StepRows<const T>& rows, i64 first,
                           int left, int width = Width) {
    constexpr int kVec = CopyBytes / static_cast<int>(sizeof(T));
    constexpr int kPerRow = ceil_div(Width, kVec);
    constexpr int kLanes = copying_lanes(kPerRow), kRows = Threads / kLanes;
    const int row = thread_rank() / kLanes;
#pragma unroll
    for (int part = 0; part < kPerRow; part += kLanes) {
        const int column = (part + thread_rank() % kLanes) * kVec;
        if (column >= width) continue;
        T* to = tile + row * tile_stride + column;
        const T* from = rows.at(first + row) + column;
#pragma unroll
        for (int step = 0; step < Steps; step += kRows) {
            if (Steps % kRows != 0 && step + row >= Steps) break;
            const bool inside = step + row < left;
            if constexpr (CopyBytes >= 4) {
                cp_async_or_zero<CopyBytes>(to, from, inside);
            } else {  // no copy moves less than 4 bytes; whoever waits for the others sees this one
                *to = inside ? *from : from_float<T>(0.0f);
            }
            to += kRows * tile_stride;
            from += kRows * rows.stride;
        }
    }
}

// Extents and choices of the kernels: tensors of T, decays of W in Form, one per step if PerStep;
// Chunk steps between two states; Slice values and Stages batches of a block of the walk; CopyBytes
// of a copy; Precise: products as good as fp32's; Carry: blocks that walk back over their head's
// chunks and carry the gradient of the state themselves; Overlap: a kernel may begin before the one
// before it has ended (dependent_launch.cuh); Stagger: thousands of cycles by which the blocks behind
// the first on an SM begin later, if Carry.
template <class T_, class W_, DecayForm Form, bool PerStep, bool Precise, int K, int V, int Chunk,
          int Slice, int Stages, int CopyBytes, bool Carry, bool Overlap,
          int Stagger>
struct ChunkedBackward {
    using T = T_;
    using W = W_;
    static constexpr DecayForm kForm = Form;
    static constexpr bool kPerStep = PerStep, kPrecise = Precise;
    static constexpr bool kCarry = Carry, kOverlap = Overlap;
    static constexpr int kStagger = Stagger;
    static constexpr int kK = K, kV = V, kChunk = Chunk, kSlice = Slice, kStages = Stages;
    static constexpr int kCopy = CopyBytes;
    static constexpr int kCopyW = max(CopyBytes, static_cast<int>(sizeof(W)));
    static constexpr int kKeys = ceil_div(K, 16) * 16, kValues = ceil_div(V, 16) * 16;
    static constexpr int kWarps = kKeys / 16, kThreads = kWarps * kWarpSize;  // 16 keys of a warp
    static constexpr int kTiles = kValues / 8;  // of a state, per warp

    static_assert(Chunk % 32 == 0 && Slice % 16 == 0, "whole batches of steps, whole fragments");
    static_assert(K * sizeof(T) % CopyBytes == 0 && V * sizeof(T) % CopyBytes == 0,
                  "a copy would reach into the next row");

    // The decay of a step's w. Copies put zeros behind the last step, which keep all as logarithms
    // alone: other forms ask whether the step `exists`.
    static KGEN_DEVICE float decay_of_step(W w, bool exists) {
        const float decay = decay_of<Form>(to_float(w));
        return Form == DecayForm::log || exists ? decay : 1.0f;
    }

    // Of the workspace, [B * H, chunks, kWarps, kTiles, lanes, 4]: values to this warp's tiles.
    static KGEN_DEVICE i64 state_offset(i64 head, i64 chunks, i64 chunk) {
        const int warp = thread_rank() / kWarpSize;
        return ((head * chunks + chunk) * kWarps + warp) * (kTiles * kWarpSize * 4);
    }
};

// One block's walk over all steps of a head, for a slice of the values.
template <class C>
class StateWalk {
    using T = typename C::T;
    using W = typename C::W;
    using Tile = KeyTile<T, C::kPrecise, C::kSlice / 8>;
    static constexpr int kSteps = 32;  // of a batch: lanes have 16 keys of two sets of 16 steps
    static constexpr int kStages = C::kStages, kKeys = C::kKeys, kThreads = C::kThreads;
    static constexpr int kRowStride = chunk_row_stride<T>(C::kSlice);
    static constexpr int kRows = kSteps * kRowStride, kBatch = kSteps * kKeys;
    static constexpr int kStride = key_row_stride(kKeys), kFactors = key_rows(kStride);
    static constexpr int kPerChunk = C::kChunk / kSteps;

public:
    static constexpr int kSmemBytes =
        kStages * ((kRows + kBatch) * static_cast<int>(sizeof(T)) +
                   (C::kPerStep ? kBatch * static_cast<int>(sizeof(W)) : 0)) +
        4 * (2 * kFactors + 2 * kKeys);

    StepRows<const T> x;     // rows of keys: k, or r
    StepRows<const T> rows;  // of values, from the slice's first one on: v, or gy
    StepRows<const W> w;
    i64 steps;
    int width;    // values of the slice that exist
    float scale;  // of x

    // start and end: the head's [K, V], from the slice's first value on, or null; kept: of the
    // workspace, this warp's tiles of the first chunk and slice.
    template <bool Backward>
    KGEN_DEVICE void walk(const float* start, float* kept, i64 kept_stride, int kept_tiles,
                          float* end) const {
        // Shared memory: W w[Stages][32][kKeys]; T x[Stages][32][kKeys],
        // rows[Stages][32][kRowStride]; float factors[2][kFactors], decays[2][kKeys].
        W* ring_w = dynamic_smem<W>();
        T* ring_x = reinterpret_cast<T*>(ring_w + (C::kPerStep ? kStages * kBatch : 0));
        T* ring_rows = ring_x + kStages * kBatch;
        float* factors = reinterpret_cast<float*>(ring_rows + kStages * kRows);
        float* decays = factors + 2 * kFactors;

        const int key0 = thread_rank() / kWarpSize * 16;
        Tile state;
        state.clear();
        if (start != nullptr)
            state.load_rows(start + static_cast<i64>(key0) * C::kV, C::kV, C::kK - key0, width);
        if (kKeys > C::kK || width < C::kSlice) {  // what no copy brings is zero for good
            if constexpr (C::kPerStep)
                for (int i = thread_rank(); i < kStages * kBatch; i += kThreads)
                    ring_w[i] = from_float<W>(0.0f);
            for (int i = thread_rank(); i < kStages * (kBatch + kRows); i += kThreads)
                ring_x[i] = from_float<T>(0.0f);
            sync_block();
        }
        // The decay of this lane's key, if all steps have the same.
        const int key = key0 + lane_id() % 16;
        float fixed = 1.0f;
        if constexpr (!C::kPerStep)
            if (key < C::kK) fixed = decay_of<C::kForm>(to_float(w.at(0)[key]));

        const i64 batches = ceil_div(steps, i64{kSteps});
        const auto stage = [&](i64 batch) {
            if (batch < batches) {
                const i64 first = (Backward ? batches - 1 - batch : batch) * kSteps;
                const int slot = static_cast<int>(batch % kStages);
                const int left = static_cast<int>(min(steps - first, i64{kSteps}));
                copy_rows<T, kSteps, C::kK, C::kCopy, kThreads>(ring_x + slot * kBatch, kKeys, x,
                                                                first, left);
                copy_rows<T, kSteps, C::kSlice, C::kCopy, kThreads>(
                    ring_rows + slot * kRows, kRowStride, rows, first, left, width);
                if constexpr (C::kPerStep)
                    copy_rows<W, kSteps, C::kK, C::kCopyW, kThreads>(ring_w + slot * kBatch,
                                                                     kKeys, w, first, left);
            }
            cp_async_commit();
        };
        for (int batch = 0; batch < kStages - 1; ++batch) stage(batch);

#pragma unroll 1
        for (i64 batch = 0; batch < batches; ++batch) {
            cp_async_wait<kStages - 2>();
            sync_block();
            stage(batch + kStages - 1);
            const int slot = static_cast<int>(batch % kStages);
            const i64 place = Backward ? batches - 1 - batch : batch;
            const bool boundary =
                Backward ? (place + 1) % kPerChunk == 0 || batch == 0 : place % kPerChunk == 0;
            if (boundary) state.store_fragments(kept + place / kPerChunk * kept_stride, kept_tiles);
            if (!Backward && place / kPerChunk == (batches - 1) / kPerChunk) break;

            // 1. A lane has a key of its warp and 16 of the steps.
            {
                const int half = lane_id() / 16;
                const T* from = ring_x + slot * kBatch + half * kSubSteps * kKeys + key;
                const W* decays_of = ring_w + slot * kBatch + half * kSubSteps * kKeys + key;
                const i64 first = place * kSteps + half * kSubSteps;
                float* to = factors + half * kFactors + key;
                LongProduct product(scale);
                float all = 1.0f;
#pragma unroll
                for (int i = 0; i < kSubSteps; ++i) {
                    const int step = Backward ? i : kSubSteps - 1 - i;
                    float decay = fixed;
                    if constexpr (C::kPerStep) {
                        decay = C::decay_of_step(decays_of[step * kKeys], first + step < steps);
                    } else if (first + step >= steps) {
                        decay = 1.0f;
                    }
                    to[step * kStride] = product.times(to_float(from[step * kKeys]));
                    product.multiply(decay);
                    all *= decay;
                }
                decays[half * kKeys + key] = all;
            }
            sync_warp();

            // 2. The state moves on by two sets of steps.
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int half = Backward ? 1 - i : i;
                state.advance(state, decays + half * kKeys + key0,
                              factors + half * kFactors + key0, kStride,
                              ring_rows + slot * kRows + half * kSubSteps * kRowStride, kRowStride);
            }
            sync_warp();
        }
        cp_async_wait_all();
        if (end != nullptr)
            state.store_rows(end + static_cast<i64>(key0) * C::kV, C::kV, C::kK - key0, width);
    }
};

}  // namespace kgen::wkv
