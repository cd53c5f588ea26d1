// Checkpoints of wkv7's backward pass in workspaces: S before and G after every chunk of Steps steps, and the sums over
// keys (sa, gsa) of every step.
//
// Chunk c has the steps from c * Steps on of its sequence; the last one may be shorter. Each batch row has
// ceil(T / Steps) chunks. A packed sequence may begin at any step `first`: the first chunk of sequence n has number
// first / Steps + n, out of T / Steps + N, which leaves some numbers unused.
#pragma once

#include "kgen/wkv7/decay.cuh"

namespace kgen::wkv7 {

// Number of a sequence's first chunk among those of its head.
template <int Steps, bool Packed>
KGEN_DEVICE i64 first_chunk(const Span& span, i64 n, i64 T) {
    return Packed ? span.first / Steps + n : n * ceil_div(T, i64{Steps});
}

// Chunks of a head, over all sequences.
template <int Steps, bool Packed>
KGEN_DEVICE i64 head_chunks(i64 N, i64 T) {
    return Packed ? T / Steps + N : N * ceil_div(T, i64{Steps});
}

// The chunk of a number.
struct Chunk {
    i64 n;       // sequence
    Span span;   // of the sequence
    i64 first;   // its first step in the sequence
    int steps;   // 0 for a number that packed sequences leave unused
};

// Chunk number `index` of a head, by binary search among the offsets: first_chunk grows by at least 1 per sequence.
// Index: i64, or u32, which takes fewer instructions.
template <int Steps, class Offset, class Index>
KGEN_DEVICE Chunk chunk_at(const Offset* cu_seqlens, Index index, i64 N, i64 T) {
    constexpr bool kPacked = kPresent<Offset>;
    Chunk found{};
    if constexpr (kPacked) {
        i64 low = 0, high = N - 1;
        while (low < high) {
            const i64 middle = (low + high + 1) / 2;
            const Span span = kgen::wkv::span_of(cu_seqlens, middle, T);
            if (first_chunk<Steps, kPacked>(span, middle, T) <= index) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        found.n = low;
    } else {
        found.n = index / static_cast<Index>(ceil_div(T, i64{Steps}));
    }
    found.span = kgen::wkv::span_of(cu_seqlens, found.n, T);
    found.first = (index - first_chunk<Steps, kPacked>(found.span, found.n, T)) * Steps;
    const i64 left = found.span.steps - found.first;
    // untested: only packed sequences leave numbers of chunks unused
    found.steps = left <= 0 ? 0 : static_cast<int>(min(left, i64{Steps}));
    return found;
}

// The role of a block in a launch that runs loops of both directions; each head and direction has PerHead blocks.
//
// Blocks of one direction have consecutive numbers, so that most SMs run one loop at a time: an instruction cache does
// not hold the code of both loops. Backward loops take longer and come first. Results do not depend on this order.
template <int PerHead>
struct DirectionBlock {
    bool back;
    i64 head;    // of all sequences
    int number;  // among the head's blocks of the direction

    KGEN_DEVICE DirectionBlock() {
        const u32 half = gridDim.x / 2, block = blockIdx.x;
        back = block < half;
        const u32 rank = back ? block : block - half;
        head = rank / PerHead;
        number = static_cast<int>(rank % PerHead);
    }
};

// A workspace [B, T, H, features], as a tensor.
template <class T>
KGEN_DEVICE Rows<T> dense_rows(T* first, i64 steps, i64 heads, i64 features) {
    return {first, steps * heads * features, heads * features, features};
}

// What wkv7_backward_rows reads and writes; sa, gsa [B, T, H, V], states and gradients [H, chunks, K, V].
template <class Value, class W, class State = float>
struct KeyRowsTensors {
    Rows<const Value> gy, r, k, v, a, b;
    Rows<const W> w;
    const float *sa, *gsa;
    const State *states, *gradients;
    Rows<Value> gr, gk, ga, gb;
    Rows<W> gw;
};

}  // namespace kgen::wkv7
