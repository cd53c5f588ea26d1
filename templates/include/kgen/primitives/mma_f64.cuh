// Matrix products of one warp in fp64 on tensor cores (mma.sync, DMMA).
//
//     C[16 x 8] += A[16 x K] B[K x 8]          K = 4, 8 or 16
//
// Data layout: with g = lane / 4 and q = lane % 4 (MmaLane) a lane holds
//
//     C    c[0] (g, 2q)    c[1] (g, 2q + 1)    c[2] (g + 8, 2q)    c[3] (g + 8, 2q + 1)
//     A    a[2 j] (g, 4 j + q)    a[2 j + 1] (g + 8, 4 j + q)      j < K / 4
//     B    b[j] (4 j + q, g)
//
// as (row, column). A kernel may permute the K columns of A and the K rows of B, if it permutes both in the same way.
//
// Hardware: one instruction from sm_90 on; on sm_80 to sm_89, two instructions of 8 x 8 x 4 for every four of K. GPUs
// for data centres have fp64 tensor cores (sm_80, sm_90, sm_100); on others the same instructions take many times as
// long.
//
// Precision: fp64, as a chain of fma. The order of the terms of one instruction is not documented.
//
// Synchronisation: all lanes of a warp execute the same call. On the host they exchange fragments through an array in
// shared memory.
#pragma once

#include "kgen/primitives/mma.cuh"

namespace kgen {

namespace detail {

#if KGEN_HOST

// Operands of a warp's products. Consecutive products alternate between two halves; see MmaBoard.
struct MmaBoardF64 {
    double a[2][16][16];  // half, row, column
    double b[2][8][16];   // half, column, row
    u32 uses[kWarpSize];
};

template <int K>
KGEN_DEVICE void host_mma_f64(double (&c)[4], const double (&a)[K / 2], const double (&b)[K / 4]) {
    __shared__ MmaBoardF64 boards[1024 / kWarpSize];
    MmaBoardF64& board = boards[thread_rank() / kWarpSize];
    const MmaLane lane = mma_lane();
    const u32 half = board.uses[lane_id()]++ & 1;
    for (int j = 0; j < K / 4; ++j) {
        board.a[half][lane.g][4 * j + lane.q] = a[2 * j];
        board.a[half][lane.g + 8][4 * j + lane.q] = a[2 * j + 1];
        board.b[half][lane.g][4 * j + lane.q] = b[j];
    }
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const double* row = board.a[half][lane.g + i / 2 * 8];
        const double* column = board.b[half][2 * lane.q + i % 2];
        double sum = c[i];
        for (int k = 0; k < K; ++k) sum = __builtin_fma(row[k], column[k], sum);
        c[i] = sum;
    }
}

#endif

}  // namespace detail

// Computes C += A B in fp64. K: twice the elements of `a`, at least 4.
template <int Elements, int Arch = KGEN_ARCH>
KGEN_DEVICE void mma_f64(double (&c)[4], const double (&a)[Elements], const double (&b)[Elements / 2]) {
    static_assert(Elements == 2 || Elements == 4 || Elements == 8, "K is 4, 8 or 16");
    static_assert(Arch == 0 || Arch >= 800, "fp64 products need sm_80");
#if KGEN_HOST
    detail::host_mma_f64<2 * Elements>(c, a, b);
#elif KGEN_ARCH >= 900
    if constexpr (Elements == 8) {
        asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64"
            " {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
              "d"(b[1]), "d"(b[2]), "d"(b[3]));
    } else if constexpr (Elements == 4) {
        asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64"
            " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
            : "d"(a[0]), "d"(a[1]), "d"(b[0]));
    }
#elif KGEN_ARCH >= 800
#pragma unroll
    for (int j = 0; j < Elements / 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(c[2 * half]), "+d"(c[2 * half + 1])
                : "d"(a[2 * j + half]), "d"(b[j]));
#endif
}

}  // namespace kgen
