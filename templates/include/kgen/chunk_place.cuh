// What a block of a chunked walk reads and writes: its place, rows of tensors, states.
#pragma once

#include "chunk_stage.cuh"
#include "decay_form.cuh"

namespace kgen {

// What a walk reads and writes. Of v and out, the slice's features alone.
template <class T>
struct WalkRows {
    StepRows<const T> a, b, v;
    StepRows<T> out;
    i64 first, end;      // steps of the segment
    int values;          // features of the slice that exist
    float out_factor;    // of out
    float value_factor;  // of v, if the walk is Scaled
};

// The decays of a walk's state as Form has them, a row of keys per step, and the bonus: see
// chunk_decay.cuh. A stride of 0 is a decay that is the same at all steps.
template <class W, class U, DecayForm Form = DecayForm::log>
struct DecayRows {
    StepRows<const W> w;
    const U* u;  // [Keys], or null: not needed

    KGEN_DEVICE float of(i64 step, int key) const {
        return decay_of<Form>(to_float(w.at(step)[key]));
    }
};

// A walk whose state does not decay.
struct NoDecayRows {};

template <class Decay>
constexpr bool kDecays = true;
template <>
constexpr bool kDecays<NoDecayRows> = false;

// The state before a walk and behind it, in fp32; null pointers are states that are zero, or that
// nobody asks for. `state[key * key_stride + value * value_stride]`, from the slice's first value on.
struct WalkStates {
    const float* state;
    i64 key_stride, value_stride;
    const float* key_sum;
    const float* parts;  // sums of the segments before this one: `count` of [Keys][Values]
    const float* key_parts;  // `count` of [Keys]; of a walk that decays, products of the decays
    int count;
    i64 part_stride;     // values between two parts; a part is [Keys][Values]
    float* end;
    i64 end_key_stride, end_value_stride;
    float end_factor;
    float* end_key_sum;
    const float* bias;  // of out, one per value feature, from the slice's first one on; or null
    float* norm;        // [steps]
    float eps;

    // The state before the walk; `keys` and `values` are the tensor's extents, not the slice's.
    template <bool Decays>
    KGEN_DEVICE float first(int key, int value, int keys, int values) const {
        float sum = state != nullptr ? state[key * key_stride + value * value_stride] : 0.0f;
        for (int i = 0; i < count; ++i) {
            if constexpr (Decays) sum *= key_parts[i * keys + key];
            sum += parts[i * part_stride + static_cast<i64>(key) * values + value];
        }
        return sum;
    }

    KGEN_DEVICE float first_key_sum(int key, int keys) const {
        float sum = key_sum != nullptr ? key_sum[key] : 0.0f;
        for (int i = 0; i < count; ++i) sum += key_parts[i * keys + key];
        return sum;
    }

    KGEN_DEVICE void store_end(int key, int value, float x) const {
        end[key * end_key_stride + value * end_value_stride] = x;
    }
};

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
