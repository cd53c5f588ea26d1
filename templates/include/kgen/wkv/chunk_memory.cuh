// Shared memory of the chunk kernel of wkv5's and wkv6's backward pass, and the tensors it reads and writes.
//
// Layout, C = kChunk steps in `subs` = C / 16 sets of 16; rows of keys are fp32 and kStride apart:
//
//     T v[C][kRowStride], g[C][kRowStride]        rows of v and of gy
//     float decays[subs][16][kStride]             d_t
//     float decayed_r[subs][16][kStride]          r times the decays before its step;  later G v
//     float state_g[subs][16][kStride]            w of the chunk; then S g;            later factors of cross scores
//     float decayed_k[subs][16][kWideStride]      k times the decays after its step;   later the inter-chunk part of gv
//     float decay_product[subs][kKeys]            of the 16 steps;                     later gu
//     float state_dot[subs][kKeys]                S . G
//     float gw[subs][kKeys]                       if w has no steps
//     one of these, one after the other:
//         T chunk_k[C][kKeyStride], chunk_r[C][kKeyStride]    as they are copied
//         G and f of InterChunkGv
//         ValueProducts products[subs], then float scores[subs][kSubScores] at kScoresAt
//     if C::kLevelScores, in place of v if it has room, else after the scores:
//         float level_scores[subs][16][kLevelStride]
//
// With C::kSequential the next chunk's k, r and w are copied while scores are still read: so the scores lie after both.
#pragma once

#include "kgen/wkv/backward_config.cuh"
#include "kgen/wkv/inter_chunk_gv.cuh"
#include "kgen/wkv/scores.cuh"
#include "kgen/wkv/state_tile.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// C: a BackwardConfig, or a SliceOf one.
template <class C, class U>
struct ChunkTensors {
    template <class X>
    using Keys = typename C::template RowsOf<X, Features::keys>;
    template <class X>
    using Values = typename C::template RowsOf<X, Features::values>;
    template <class X>
    using KeyTerms = typename C::template RowsOf<X, Features::key_terms>;
    template <class X>
    using ValueTerms = typename C::template RowsOf<X, Features::value_terms>;
    using Gradient = typename C::Gradient;

    Values<const typename C::T> gy;
    Keys<const typename C::T> r, k;
    Values<const typename C::T> v;
    Keys<const typename C::W> w;
    const U* u;
    KeyTerms<Gradient> gr, gk;
    ValueTerms<Gradient> gv;
    KeyTerms<typename C::GradientW> gw;  // if w has steps
};

// A block's chunk. Addresses of rows are computed where they are read or written: all of them together would not fit
// into the registers.
struct ChunkIndex {
    int b, h;
    int chunk;
    int left;  // its steps that exist
    int part;  // its index of [B * H, chunks]

    KGEN_DEVICE i64 first(int steps) const { return static_cast<i64>(chunk) * steps; }

    // The chunk before; its number is -1 if this chunk is the first.
    KGEN_DEVICE ChunkIndex previous(int steps) const { return {b, h, chunk - 1, steps, part - 1}; }

    template <class R>
    KGEN_DEVICE auto steps(const R& rows) const {
        return step_rows(rows.head(b, h));
    }
};

// The same for packed sequences: rows begin with the sequence.
struct PackedChunkIndex : ChunkIndex {
    i64 first_step;  // of the sequence

    KGEN_DEVICE PackedChunkIndex previous(int steps) const {
        return {ChunkIndex::previous(steps), first_step};
    }

    template <class R>
    KGEN_DEVICE auto steps(const R& rows) const {
        auto its = ChunkIndex::steps(rows);
        its.rows = its.at(first_step);
        return its;
    }
};

template <bool Packed>
struct ChunkIndexOf {
    using Type = ChunkIndex;
};
template <>
struct ChunkIndexOf<true> {
    using Type = PackedChunkIndex;
};

// Chunks of packed sequences lie in a workspace [H, chunk_slots]. Sequence n has the slots from first_chunk_slot(n) to
// first_chunk_slot(n + 1): at least one, and as many as it has chunks, or one more.
template <int Chunk>
KGEN_DEVICE i64 first_chunk_slot(i64 first_step, i64 n) {
    return first_step / Chunk + n;
}

// The sequence, of N packed ones, to which chunk slot `slot` belongs.
template <int Chunk, class Offset>
KGEN_DEVICE i64 sequence_of_slot(const Offset* offsets, i64 N, i64 slot) {
    i64 n = 0, end = N;
    while (end - n > 1) {
        const i64 middle = (n + end) / 2;
        const bool later = first_chunk_slot<Chunk>(i64{offsets[middle]}, middle) <= slot;
        n = later ? middle : n;
        end = later ? end : middle;
    }
    return n;
}

// The thread's rank in a one-dimensional block, read again from its special register: a copy would occupy another
// register.
KGEN_DEVICE int read_thread_rank() {
#if KGEN_HOST
    return thread_rank();
#else
    int rank;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(rank));
    return rank;
#endif
}

// C: a BackwardConfig.
template <class C>
struct ChunkMemory {
    using T = typename C::T;
    using W = typename C::W;
    using Index = typename ChunkIndexOf<C::kPacked>::Type;
    using Inter = InterChunkGv<T, C::kPrecise, C::kKeys, C::kValues>;
    using Real = typename ScoreReal<C::kPrecise>::Type;  // of n
    using Products = ValueProducts<Real>;
    static constexpr int kSubs = C::kChunk / kSubSteps, kKeys = C::kKeys, kValues = C::kValues;
    static constexpr int kGroups = ceil_div(kKeys, kWarpSize);  // of keys, one per lane
    static constexpr int kRowStride = chunk_row_stride<T>(kValues);
    static constexpr int kStride = key_row_stride(kKeys), kSub = key_rows(kStride);
    // Rows of gv replace those of decayed k: rows of keys or of values, whichever are wider.
    static constexpr int kWideStride = key_row_stride(max(kKeys, kValues));
    static constexpr int kWideSub = key_rows(kWideStride);
    static constexpr int kKeyStride = chunk_row_stride<T>(kKeys);
    static constexpr int kKeyRows = C::kChunk * kKeyStride;  // elements of chunk_r, and of chunk_k
    static constexpr int kChunkRowFloats = 2 * kKeyRows * static_cast<int>(sizeof(T)) / 4;
    // Scores of a group of keys, and of all groups.
    static constexpr int kGroupScores = C::kLevelScores ? kNearScores : kScoresPadded;
    static constexpr int kSubScores =
        kGroups * kGroupScores + (C::kLevelScores ? 0 : kCrossScores);
    static constexpr int kLevelStride = key_row_stride(kSubSteps);
    static constexpr int kLevelFloats = kSubSteps * kLevelStride;
    // v is replaced only if it has no padding, which must stay zero.
    static constexpr bool kLevelsInV =
        kValues == C::kV && kRowStride * static_cast<int>(sizeof(T)) >= kLevelStride * 4;
    static constexpr int kLevelsBehind =
        C::kLevelScores && !kLevelsInV ? kSubs * kLevelFloats : 0;
    // Floats from the overlaid part to the scores.
    static constexpr int kScoresAt =
        max(kSubs * (Products::kBytes / 4), C::kSequential ? kChunkRowFloats : 0);

    static constexpr int kSmemBytes =
        2 * C::kChunk * kRowStride * static_cast<int>(sizeof(T)) +
        4 * (kSubs * (3 * kSub + kWideSub + (C::kPerStep ? 2 : 3) * kKeys) +
             max(max(Inter::kBytes / 4, kChunkRowFloats), kScoresAt + kSubs * kSubScores + kLevelsBehind));

    T *v, *g;
    float *decays, *decayed_r, *state_g, *decayed_k, *decay_product, *state_dot, *gu, *gw;
    float *gradient, *scores;
    float* level_scores;
    char* products;
    int key0;  // the first of this warp's keys

    KGEN_DEVICE ChunkMemory() {
        v = dynamic_smem<T>();
        g = v + C::kChunk * kRowStride;
        decays = reinterpret_cast<float*>(g + C::kChunk * kRowStride);
        decayed_r = decays + kSubs * kSub;
        state_g = decayed_r + kSubs * kSub;
        decayed_k = state_g + kSubs * kSub;
        decay_product = decayed_k + kSubs * kWideSub;
        state_dot = decay_product + kSubs * kKeys;
        gu = decay_product;
        gw = state_dot + kSubs * kKeys;
        gradient = C::kPerStep ? gw : gw + kSubs * kKeys;
        products = reinterpret_cast<char*>(gradient);
        scores = gradient + kScoresAt;
        level_scores = kLevelsInV ? reinterpret_cast<float*>(v) : scores + kSubs * kSubScores;
        key0 = (C::kSequential ? read_thread_rank() : thread_rank()) / kWarpSize * 16;
    }

    // k, r and w of a chunk as they are copied; w in place of state_g.
    KGEN_DEVICE T* chunk_k() const { return reinterpret_cast<T*>(gradient); }
    KGEN_DEVICE T* chunk_r() const { return chunk_k() + kKeyRows; }
    KGEN_DEVICE W* chunk_w() const { return reinterpret_cast<W*>(state_g); }

    // Rows of 16 steps of v or g.
    KGEN_DEVICE const T* rows_of(const T* rows, int sub) const {
        return rows + sub * kSubSteps * kRowStride;
    }

    KGEN_DEVICE Products products_of(int sub) const {
        return Products{products + sub * Products::kBytes};
    }
};

}  // namespace kgen::wkv
