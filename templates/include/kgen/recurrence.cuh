// Recurrences over time whose state is a matrix: linear attention and its kin.
//
//     S_i = S_{i-1} + a_i c_i^T,   y_i = S_i^T p_i          i-th step of a walk
//
// S has rows (the features of a and p) and columns (those of c and y). A walk goes forward or
// backward in time; gradients with respect to what was summed walk backward. With q, k, v and the
// gradient g of the output:
//
//              walk       p    a    c    y     S
//     out      forward    q    k    v    out   [E, M]
//     gq       forward    g    v    k    gq    [M, E], the transpose of the one above
//     gk       backward   v    g    q    gk    [M, E]
//     gv       backward   k    q    g    gv    [E, M]
//
// The columns of S are independent, so they may be spread over threads and blocks; the rows of a
// column are summed. This header has a column in memory (any shape), for naive variants, and below a
// tile in registers. A decay per step would multiply S in `advance`; a bonus is one more term of y.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "math.cuh"
#include "memory.cuh"

namespace kgen {

enum class Walk { forward, backward };

// The step in time that the i-th step of a walk is.
template <Walk W>
KGEN_DEVICE i64 time_of(i64 i, i64 steps) {
    return W == Walk::forward ? i : steps - 1 - i;
}

// Walk one column of S that lies in memory, `pitch` floats from row to row.
//
// p and a are the first step's rows, p_stride and a_stride elements from step to step; column(t)
// gives c_t, and result(t, y) takes y_t.
template <Walk W, class P, class A, class Column, class Result>
KGEN_DEVICE void walk_in_memory(float* state, i64 pitch, i64 rows, i64 steps, const P* p,
                                i64 p_stride, const A* a, i64 a_stride, Column column,
                                Result result) {
    for (i64 i = 0; i < steps; ++i) {
        const i64 t = time_of<W>(i, steps);
        const float c = column(t);
        float sums[2] = {};
#pragma unroll 4
        for (i64 r = 0; r < rows; ++r) {
            const float s = fma(to_float(a[t * a_stride + r]), c, state[r * pitch]);
            state[r * pitch] = s;
            sums[r & 1] = fma(to_float(p[t * p_stride + r]), s, sums[r & 1]);
        }
        result(t, sums[0] + sums[1]);
    }
}

}  // namespace kgen
