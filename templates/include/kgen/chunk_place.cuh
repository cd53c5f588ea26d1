// Where a block of a chunked walk stands, and where its tensors lie.
#pragma once

#include "chunk_stage.cuh"

namespace kgen {

// A block's head (counted over batch and heads), segment of the steps, and the rest of its index,
// which the kernel cuts further. Blocks of one segment are neighbours, for they read the same rows.
struct WalkPlace {
    i64 head;
    int segment, rest;
    i64 first, end;  // steps, counted in the direction of the walk

    // Every segment but the last one has as many steps, whole chunks.
    KGEN_DEVICE WalkPlace(i64 steps, int chunk, int segments, int launched_segments, int rests) {
        const i64 block = blockIdx.x;
        rest = static_cast<int>(block % rests);
        segment = static_cast<int>(block / rests % launched_segments);
        head = block / rests / launched_segments;
        const i64 length = ceil_div(ceil_div(steps, i64{segments}), i64{chunk}) * chunk;
        first = segment * length;
        end = min(first + length, steps);
    }
};

// The rows of one head.
template <class T>
KGEN_DEVICE StepRows<T> head_rows(T* tensor, i64 head, i64 heads, i64 stride_B, i64 stride_H,
                                  i64 stride_T) {
    return {tensor + head / heads * stride_B + head % heads * stride_H, stride_T};
}

// `offset` values into a tensor of fp32, or null if it is not there.
template <class Value>
KGEN_DEVICE float* floats_at(const Value* tensor, i64 offset) {
    if constexpr (kPresent<Value>) return const_cast<float*>(tensor) + offset;
    return nullptr;
}

}  // namespace kgen
