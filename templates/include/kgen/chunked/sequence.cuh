// The tensors of a chunked recurrence, as one CTA reads and writes them.
//
// StepRows          one tensor of a head: a row per step
// ChunkCopier       cp.async of one tensor's chunks to shared memory
// RecurrenceRows    a, b, v, out of a recurrence, and the CTA's steps
// DecayRows         decays of the state, or NoDecayRows
// NormKeyRows       the norm's part of a gradient, or NoNormKey
// RecurrenceStates  the states before and after the CTA's steps
// BlockSegment      which head, segment and block of features a CTA has
//
// Layout: rows of a chunk in shared memory are chunk_row_stride elements apart.
//
// Synchronisation: none here. The caller commits cp.async groups and waits for them.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/memory.cuh"

namespace kgen {

// One tensor of a head: row t begins at rows + t * stride. A loop backward in time passes the last row and a negative
// stride.
template <class T>
struct StepRows {
    T* rows;
    i64 stride;

    KGEN_DEVICE T* at(i64 step) const { return rows + step * stride; }

    KGEN_DEVICE StepRows from(int feature) const { return StepRows{rows + feature, stride}; }

    KGEN_DEVICE StepRows reversed(i64 steps) const {
        return StepRows{rows + (steps - 1) * stride, -stride};
    }
};

// Elements between two rows in shared memory, for rows of `width` elements, without bank conflicts. fp32: 8 or 24
// banks more than a multiple of 32, so that four rows of eight words, or four rows of four pairs, lie in 32 different
// banks. 16 bits: an odd multiple of 16 bytes, so that the eight rows of an ldmatrix do. One formula gives both.
template <class T>
KGEN_DEVICE constexpr int chunk_row_stride(int width) {
    return (width + 7) / 16 * 16 + 8;
}

// Copies one tensor's chunks of `Rows` steps and `Width` elements to shared memory, chunk after chunk; called by all
// threads of the CTA. A thread always copies the same columns, so that its next address takes one addition.
template <class T, int Rows, int Width, int CopyBytes, int Threads>
class ChunkCopier {
    static constexpr int kVec = CopyBytes / static_cast<int>(sizeof(T));
    static constexpr int kPerRow = (Width + kVec - 1) / kVec;  // copies
    static constexpr int kSweepRows = max(Threads / kPerRow, 1);
    static constexpr int kColumnSweeps = (kPerRow + Threads - 1) / Threads;

    // Whether no thread has fewer rows than another.
    static constexpr bool kEven = kColumnSweeps == 1 && Threads % kPerRow == 0 &&
                                  Rows % kSweepRows == 0;

public:
    // The first chunk begins at step `first`; rows have `width` <= Width elements, whole copies.
    KGEN_DEVICE ChunkCopier(StepRows<const T> source, i64 first, int width)
        : stride_(source.stride), width_(width) {
        const int rank = thread_rank();
        row_ = kColumnSweeps > 1 ? 0 : rank / kPerRow;
        column_ = (kColumnSweeps > 1 ? rank : rank % kPerRow) * kVec;
        next_ = source.at(first + row_) + column_;
        idle_ = row_ >= kSweepRows || column_ >= width;
    }

    // Starts the copies of the next chunk into `tile`. `left` of its steps exist (Whole: all); the others become zeros,
    // or with !Zeros keep their contents. Padding columns keep their contents. The caller commits the group.
    template <bool Whole, bool Zeros = true>
    KGEN_DEVICE void start(T* tile, int tile_stride, int left) {
        // untested: rows of one width leave the same threads idle in every call
        if (!(kEven && width_ == Width) && idle_) return;
        T* to = tile + row_ * tile_stride + column_;
#pragma unroll
        for (int row = 0; row < Rows; row += kSweepRows) {
            if (!kEven && row_ + row >= Rows) break;
            const bool inside = Whole || row_ + row < left;
            if (!Zeros && !inside) break;
#pragma unroll
            for (int i = 0; i < kColumnSweeps; ++i) {
                const int column = i * Threads * kVec;
                if (kColumnSweeps > 1 && column_ + column >= width_) break;
                copy(to + row * tile_stride + column, next_ + row * stride_ + column, inside);
            }
        }
        next_ += Rows * stride_;
    }

private:
    static KGEN_DEVICE void copy(T* to, const T* from, bool inside) {
        if constexpr (CopyBytes >= 4) {
            cp_async_or_zero<CopyBytes>(to, from, inside);
        } else {  // cp.async copies at least 4 bytes; a barrier after the wait makes this store visible, too
            *to = inside ? *from : from_float<T>(0.0f);
        }
    }

    const T* next_;
    i64 stride_;
    int width_, row_, column_;
    bool idle_;
};

// What a recurrence out_t = out_factor * a_t S_t, S_t = S_{t-1} + b_t v_t^T, reads and writes. v and out begin with
// the CTA's first value feature.
template <class T>
struct RecurrenceRows {
    StepRows<const T> a, b, v;
    StepRows<T> out;
    i64 first, end;      // steps [first, end)
    int values;          // value features of the CTA, without padding
    float out_factor;    // of out
    float value_factor;  // of b v^T, in loops that are Scaled
};

// The decays of the state, a row of keys per step in the given form, and the bonus: see chunk_decay.cuh. A stride of 0
// is a decay that is the same at all steps.
template <class W, class U, DecayForm Form = DecayForm::log>
struct DecayRows {
    StepRows<const W> w;
    const U* u;  // the bonus [Keys], or null where it is not needed

    KGEN_DEVICE float of(i64 step, int key) const {
        return decay_of<Form>(to_float(w.at(step)[key]));
    }
};

// A state without decay.
struct NoDecayRows {};

template <class Decay>
constexpr bool kDecays = true;
template <>
constexpr bool kDecays<NoDecayRows> = false;

// The numbers of a step with a norm: see chunk_norm_key.cuh.
struct NormKeyStep {
    float x, y, weight, factor;
};

// The norm's part of a gradient of linear attention. Step t of the loop has norm[t * direction]; a loop backward in
// time passes the last step and -1. Null pointers stand for norms of 1 that have no gradient. Exact: the final state is
// returned in fp32.
template <bool Exact>
struct NormKeyRows {
    const float* norm;
    const float* gout_dot_out;
    int direction;
    float scale;
    bool of_q;     // gq; else gk, or gv
    bool has_key;  // whether there is a z: not for gv
    const float* initial;  // z before the CTA's steps, from its first value feature on; null: zero
    float* end;            // z after them, or null

    KGEN_DEVICE NormKeyStep of(float norm_t, float dot) const {
        const float factor = scale / norm_t;
        if (of_q) return NormKeyStep{-dot, 1.0f, 1.0f, factor};
        return NormKeyStep{1.0f, has_key ? -dot : 0.0f, factor, 1.0f};
    }

    KGEN_DEVICE NormKeyStep at(i64 step) const {
        if (norm == nullptr) return of(1.0f, 0.0f);
        return of(norm[step * direction], gout_dot_out[step * direction]);
    }
};

// A recurrence without a norm.
struct NoNormKey {};

// The same, with a state of two terms where it is an operand in 16 bits. If all rows b have one sign, the keys of a
// state are large together. Its rounding errors are then large as well, while the products a S may cancel.
struct NoNormSplitState : NoNormKey {};

template <class NormKey>
constexpr bool kHasNormKey = true;
template <>
constexpr bool kHasNormKey<NoNormKey> = false;
template <>
constexpr bool kHasNormKey<NoNormSplitState> = false;

// The states before and after a CTA's steps, in fp32: state[key * key_stride + value * value_stride], from the CTA's
// first value feature on. A null initial state is zero; a null final state is not written.
struct RecurrenceStates {
    const float* initial_state;
    i64 initial_key_stride, initial_value_stride;
    const float* initial_key_sum;
    const float* segment_sums;      // of the segments before this one: `segments` of [Keys][Values]
    const float* segment_key_sums;  // `segments` of [Keys]; with decays, products of the decays
    int segments;
    i64 segment_stride;  // elements from one segment's sum to the next one's
    float* final_state;
    i64 final_key_stride, final_value_stride;
    float final_factor;
    float* final_key_sum;
    const float* bias;  // added to out, one per value feature from the CTA's first one on; or null
    float* norm;        // [steps]
    float eps;

    // The state before the segment; `keys` and `values` are extents of the tensor, not of the CTA.
    template <bool Decays>
    KGEN_DEVICE float initial_at(int key, int value, int keys, int values) const {
        float sum = initial_state != nullptr
                        ? initial_state[key * initial_key_stride + value * initial_value_stride]
                        : 0.0f;
        for (int i = 0; i < segments; ++i) {
            if constexpr (Decays) sum *= segment_key_sums[i * keys + key];
            sum += segment_sums[i * segment_stride + static_cast<i64>(key) * values + value];
        }
        return sum;
    }

    KGEN_DEVICE float initial_key_sum_at(int key, int keys) const {
        float sum = initial_key_sum != nullptr ? initial_key_sum[key] : 0.0f;
        for (int i = 0; i < segments; ++i) sum += segment_key_sums[i * keys + key];
        return sum;
    }

    KGEN_DEVICE void store_final(int key, int value, float x) const {
        final_state[key * final_key_stride + value * final_value_stride] = x;
    }
};

// A CTA's head (counted over batch and heads), segment of the steps, and the rest of its index (usually a block of
// value features). CTAs of one segment are neighbours, because they read the same rows.
struct BlockSegment {
    i64 head;
    int segment, rest;
    i64 first, end;  // steps, counted in the direction of the recurrence

    // All segments but the last one have equally many whole chunks.
    KGEN_DEVICE BlockSegment(i64 steps, int chunk, int segments, int launched_segments, int rests) {
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

// The address of element `offset` of an fp32 tensor, or null if the tensor is not given.
template <class Value>
KGEN_DEVICE float* floats_at(const Value* tensor, i64 offset) {
    if constexpr (kPresent<Value>) return const_cast<float*>(tensor) + offset;
    return nullptr;
}

}  // namespace kgen
