// Shared memory of the chunked backward pass of wkv5 and wkv6, and what a block reads and writes.
#pragma once

#include "wkv_carried_values.cuh"
#include "wkv_pairs.cuh"
#include "wkv_state_walk.cuh"

namespace kgen::wkv {

template <class T, class W, class U>
struct ChunkTensors {
    Rows<const T> gy, r, k, v;
    Rows<const W> w;
    const U* u;
    Rows<T> gr, gk, gv;
    Rows<W> gw;  // if w has steps
};

// A block's chunk. Rows are asked for where they are read or written: all their addresses would
// not fit the registers.
struct ChunkPlace {
    int b, h;
    int chunk;
    int left;  // steps of the chunk that exist
    int part;  // of [B * H, chunks]

    KGEN_DEVICE i64 first(int steps) const { return static_cast<i64>(chunk) * steps; }

    template <class X>
    KGEN_DEVICE StepRows<X> steps(const Rows<X>& rows) const {
        const Rows<X> its = rows.head(b, h);
        return {its.first, its.of_t};
    }
};

// The thread's rank in a block of one dimension, read again: what comes before need not keep it.
KGEN_DEVICE int read_thread_rank() {
#if KGEN_HOST
    return thread_rank();
#else
    int rank;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(rank));
    return rank;
#endif
}

// Where a chunk's values lie in shared memory; C: a ChunkedBackward.
template <class C>
struct ChunkMemory {
    using T = typename C::T;
    using W = typename C::W;
    using Carried = CarriedValues<T, C::kPrecise, C::kKeys, C::kValues>;
    using Real = typename PairReal<C::kPrecise>::Type;  // of n
    using Products = PairProducts<Real>;
    static constexpr int kSubs = C::kChunk / kSubSteps, kKeys = C::kKeys, kValues = C::kValues;
    static constexpr int kGroups = ceil_div(kKeys, kWarpSize);  // of keys, one per lane
    static constexpr int kRowStride = chunk_row_stride<T>(kValues);
    static constexpr int kStride = key_row_stride(kKeys), kSub = key_rows(kStride);
    // Rows of k with their decays give way to gv.
    static constexpr int kWideStride = key_row_stride(max(kKeys, kValues));
    static constexpr int kWideSub = key_rows(kWideStride);
    static constexpr int kKeyStride = chunk_row_stride<T>(kKeys);
    static constexpr int kKeyRows = C::kChunk * kKeyStride;  // of r and of k, as they come
    static constexpr int kRawFloats = 2 * kKeyRows * static_cast<int>(sizeof(T)) / 4;
    static constexpr int kSums = kGroups * kPairsPadded + kCrossPairs;
    // Behind n, and behind the next chunk's r and k, which come while sums are still read.
    static constexpr int kSumsAt =
        max(kSubs * (Products::kBytes / 4), C::kCarry ? kRawFloats : 0);

    static constexpr int kSmemBytes =
        2 * C::kChunk * kRowStride * static_cast<int>(sizeof(T)) +
        4 * (kSubs * (3 * kSub + kWideSub + (C::kPerStep ? 2 : 3) * kKeys) +
             max(max(Carried::kBytes / 4, kRawFloats), kSumsAt + kSubs * kSums));

    // T v, g[Chunk][kRowStride]; float decays, of_r, read[kSubs][kSub], of_k[kSubs][kWideSub],
    // all (later gu), inner[, gw][kSubs][kKeys]; then what is Carried, or T k, r[Chunk][kKeyStride]
    // with W w in place of read, or Products products[kSubs]; float sums[kSubs][kSums] at kSumsAt.
    T *v, *g;
    float *decays, *of_r, *read, *of_k, *all, *inner, *gu, *gw, *gradient, *sums;
    char* products;
    int key0;  // the first of this warp's keys

    KGEN_DEVICE ChunkMemory() {
        v = dynamic_smem<T>();
        g = v + C::kChunk * kRowStride;
        decays = reinterpret_cast<float*>(g + C::kChunk * kRowStride);
        of_r = decays + kSubs * kSub;
        read = of_r + kSubs * kSub;
        of_k = read + kSubs * kSub;
        all = of_k + kSubs * kWideSub;
        inner = all + kSubs * kKeys;
        gu = all;
        gw = inner + kSubs * kKeys;
        gradient = C::kPerStep ? gw : gw + kSubs * kKeys;
        products = reinterpret_cast<char*>(gradient);
        sums = gradient + kSumsAt;
        key0 = (C::kCarry ? read_thread_rank() : thread_rank()) / kWarpSize * 16;
    }

    // k, r and w of a chunk, until its walk begins in places of what comes later.
    KGEN_DEVICE T* raw_k() const { return reinterpret_cast<T*>(gradient); }
    KGEN_DEVICE T* raw_r() const { return raw_k() + kKeyRows; }
    KGEN_DEVICE W* raw_w() const { return reinterpret_cast<W*>(read); }

    // Of v or g.
    KGEN_DEVICE const T* rows_of(const T* rows, int sub) const {
        return rows + sub * kSubSteps * kRowStride;
    }

    KGEN_DEVICE Products products_of(int sub) const {
        return Products{products + sub * Products::kBytes};
    }
};

}  // namespace kgen::wkv
