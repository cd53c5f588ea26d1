// Compile-time configuration of wkv5's and wkv6's backward pass on tensor cores, and its copies to shared memory.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/types.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// Number of neighbouring threads that copy one row of `copies` copies: a power of 2, so that a thread keeps its column
// from row to row.
KGEN_DEVICE constexpr int copying_lanes(int copies) {
    int lanes = 1;
    while (lanes < copies && lanes < kWarpSize) lanes *= 2;
    return lanes;
}

// Called by the whole block: starts copies of `Steps` rows of a tensor from step `first` on, `width` of Width values
// each (a multiple of one copy), to rows in shared memory that are `tile_stride` apart. Rows of steps from `left` on
// are zeros. The caller commits the group.
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
            } else {  // cp.async moves at least 4 bytes
                *to = inside ? *from : from_float<T>(0.0f);
            }
            to += kRows * tile_stride;
            from += kRows * rows.stride;
        }
    }
}

// Whether products are as accurate as fp32: for gradients that are returned in fp32 (of W or of an initial state), and
// for those in fp16, which have three bits more than bf16.
template <class T, class W, bool InitialState>
inline constexpr bool kPreciseGradients = sizeof(W) == 4 || InitialState;
template <class W, bool InitialState>
inline constexpr bool kPreciseGradients<fp16, W, InitialState> = true;

// What a row of a tensor holds: features of a head, or terms of all slices of them (SliceOf).
enum class Features { keys, values, key_terms, value_terms };

// Types and extents of the kernels.
//
//     T, W         tensors; decays, in the form Form. PerStep: w has steps
//     Precise      products as accurate as fp32 (kPreciseGradients)
//     Chunk        steps between two checkpoints
//     BlockV       value features of a block of the state loop; Stages: its buffers of 32 steps
//     CopyBytes    bytes of one asynchronous copy
//     Sequential   a block loops backward over its head's chunks and carries the gradient of the state along
//     Pdl          kernels use programmatic dependent launch (pdl.cuh)
//     Packed       sequences are packed: offsets say where each begins
//     LevelScores  scores of halves of 4 and 2 steps, and gv from all scores, on tensor cores (level_scores.cuh)
template <class T_, class W_, DecayForm Form, bool PerStep, bool Precise, int K, int V, int Chunk,
          int BlockV, int Stages, int CopyBytes, bool Sequential, bool Pdl,
          bool Packed, bool LevelScores = false>
struct BackwardConfig {
    using T = T_;
    using W = W_;
    static constexpr DecayForm kForm = Form;
    static constexpr bool kPerStep = PerStep, kPrecise = Precise;
    static constexpr bool kSequential = Sequential, kPdl = Pdl, kPacked = Packed;
    static constexpr bool kLevelScores = LevelScores;
    static constexpr int kK = K, kV = V, kChunk = Chunk, kBlockV = BlockV, kStages = Stages;
    static constexpr int kCopyBytes = CopyBytes;
    static constexpr int kCopyBytesW = max(CopyBytes, static_cast<int>(sizeof(W)));
    static constexpr int kKeys = ceil_div(K, 16) * 16, kValues = ceil_div(V, 16) * 16;
    static constexpr int kWarps = kKeys / 16, kThreads = kWarps * kWarpSize;  // 16 keys of a warp
    static constexpr int kTiles = kValues / 8;  // fragments of a state, per warp

    // A block has all keys and values of a head, or with SliceOf (below) some of them.
    static constexpr int kKeySlices = 1, kValueSlices = 1;
    static constexpr int kHeadKeys = K, kHeadValues = V;  // of a head
    using Gradient = T;                                   // of r, k and v, as a block writes them
    using GradientW = W;
    template <class X, Features>
    using RowsOf = Rows<X>;
    template <Features>
    static KGEN_DEVICE int first() {  // first of the block's features
        return 0;
    }
    static KGEN_DEVICE int slice() { return 0; }
    static KGEN_DEVICE u32 block_of_slice() { return blockIdx.x; }  // number among the blocks of one slice

    static_assert(Chunk % 32 == 0 && BlockV % 16 == 0, "whole batches of steps, whole fragments");
    static_assert(K * sizeof(T) % CopyBytes == 0 && V * sizeof(T) % CopyBytes == 0,
                  "a copy would reach into the next row");

    // The decay of a step's w. Copies put zeros after the last step. In the form `log` zero gives a decay of 1; the
    // other forms use `exists`.
    static KGEN_DEVICE float decay_of_step(W w, bool exists) {
        const float decay = decay_of<Form>(to_float(w));
        return Form == DecayForm::log || exists ? decay : 1.0f;
    }

    // Floats from the start of the workspace of states, [B * H, chunks, kWarps, kTiles, lanes, 4], to this warp's tile.
    static KGEN_DEVICE i64 state_offset(i64 head, i64 chunks, i64 chunk) {
        const int warp = thread_rank() / kWarpSize;
        return ((head * chunks + chunk) * kWarps + warp) * (kTiles * kWarpSize * 4);
    }
};

// Rows of which a block has a slice; C: a SliceOf. Rows::first is that of the whole head.
template <class C, class X, Features F>
struct SliceRows : Rows<X> {
    KGEN_DEVICE Rows<X> head(i64 b, i64 h) const {
        Rows<X> its = Rows<X>::head(b, h);
        its.first += C::template first<F>();
        return its;
    }
    KGEN_DEVICE Rows<X> head(const Span& span, i64 h) const {
        Rows<X> its = Rows<X>::head(span, h);
        its.first += C::template first<F>();
        return its;
    }
};

// A block has kK of the keys and kV of the values of a head, for heads whose whole state would exceed its shared
// memory. Whole: the block's BackwardConfig. All gradients are linear in keys and values: gradients of r, k and w are
// sums over slices of values, gradients of v are sums over slices of keys. A block writes its terms in fp32.
template <class Whole, int KeySlices, int ValueSlices>
struct SliceOf : Whole {
    static constexpr int kKeySlices = KeySlices, kValueSlices = ValueSlices;
    static constexpr int kSlices = KeySlices * ValueSlices;
    static constexpr int kHeadKeys = Whole::kK * KeySlices, kHeadValues = Whole::kV * ValueSlices;
    using Gradient = float;
    using GradientW = float;
    template <class X, Features F>
    using RowsOf = SliceRows<SliceOf, X, F>;

    template <Features F>
    static KGEN_DEVICE int first() {
        const int key = slice() / ValueSlices, value = slice() % ValueSlices;
        if constexpr (F == Features::keys) return key * Whole::kK;
        if constexpr (F == Features::values) return value * Whole::kV;
        if constexpr (F == Features::key_terms) return value * kHeadKeys + key * Whole::kK;
        return key * kHeadValues + value * Whole::kV;
    }

    // Slices of a head and chunk are neighbours in the grid: they read the same rows.
    static KGEN_DEVICE int slice() { return static_cast<int>(blockIdx.x % kSlices); }
    static KGEN_DEVICE u32 block_of_slice() { return blockIdx.x / kSlices; }
};

}  // namespace kgen::wkv
