// Matrix products of one warp on tensor cores (mma.sync), ldmatrix, movmatrix and TF32 conversions.
//
//     D[16 x 8] = A[16 x K] B[K x 8] + C[16 x 8]
//
// Data layout: the 32 lanes hold a fragment of each matrix. With g = lane / 4 and q = lane % 4 (MmaLane):
//
//     C and D (fp32)        c[0] (g, 2q)    c[1] (g, 2q + 1)    c[2] (g + 8, 2q)    c[3] (g + 8, 2q + 1)
//
//     A, K = 8 (TF32)       a[0] (g, q)     a[1] (g + 8, q)     a[2] (g, q + 4)     a[3] (g + 8, q + 4)
//     B, K = 8 (TF32)       b[0] (q, g)     b[1] (q + 4, g)
//
//     A, K = 16 (16 bits)   a[0] (g, 2q..)  a[1] (g + 8, 2q..)  a[2] (g, 2q + 8..)  a[3] (g + 8, 2q + 8..)
//     B, K = 16 (16 bits)   b[0] (2q.., g)  b[1] (2q + 8.., g)
//
// as (row, column), where `2q..` is the pair 2q, 2q + 1, the first in the low half. A kernel may permute the K
// columns of A and the K rows of B, if it permutes both in the same way.
//
// Precision: tensor cores accumulate in fp32 but truncate instead of rounding. Every mma onto a large C loses up to
// one ulp of it, always towards zero. Sums of many terms that need fp32's accuracy are computed in short runs, each
// starting from C = 0, and the results are added by fp32 additions (promotion).
//
// Synchronisation: all lanes of a warp execute the same call. On the host the lanes exchange fragments through an
// array in shared memory, and each lane computes its own part of D: exact products, summed with C in double and
// truncated to fp32.
#pragma once

#include "kgen/primitives/types.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// A tag that selects products with fp32 operands rounded to TF32. No value has this type.
struct tf32 {};

// The functions are templates so that this assertion fails where one of them is used, not where the header is
// included.
#define KGEN_NEEDS_MMA(Arch, Least, What) static_assert(Arch == 0 || Arch >= Least, What)

// The position of a lane in a fragment.
struct MmaLane {
    int g;  // row of A, C and D; column of B
    int q;  // position among the four lanes of a row
};

// Returns the position of the calling lane.
KGEN_DEVICE MmaLane mma_lane() {
    const int lane = lane_id();
    return MmaLane{lane / 4, lane % 4};
}

namespace detail {

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

#if KGEN_HOST

// The fragments that the lanes of a warp exchange. Consecutive products of a lane alternate between the two halves of
// its entry, so that one warp barrier per product is sufficient: a lane writes a half again two products later, after
// a barrier that all lanes reach after they have read it.
struct MmaEntry {
    u32 words[2][6];
    u32 uses;
};

KGEN_DEVICE MmaEntry* mma_board() {
    __shared__ MmaEntry board[1024];
    return board + (thread_rank() & ~(kWarpSize - 1));
}

KGEN_DEVICE const void** address_board() {
    __shared__ const void* board[1024];
    return board + (thread_rank() & ~(kWarpSize - 1));
}

// Returns `value` truncated to fp32, towards zero.
KGEN_DEVICE float cut_off(double value) {
    const float nearest = static_cast<float>(value);
    const double back = static_cast<double>(nearest);
    if (!(value > 0.0 ? back > value : back < value)) return nearest;
    const u32 bits = bit_cast<u32>(nearest);  // not 0; Inf becomes the largest number
    return bit_cast<float>(bits - 1);
}

// D = A B + C from the fragments of all lanes. element_a returns the value in column k of row g or g + 8 (row_half 0
// or 1) from the four lanes of row g; element_b returns the value in row k from the four lanes of a column.
template <int K, class ElementA, class ElementB>
KGEN_DEVICE void multiply_on_host(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2],
                                  ElementA element_a, ElementB element_b) {
    MmaEntry* board = mma_board();
    const int lane = lane_id();
    const u32 half = board[lane].uses++ & 1;
    u32* mine = board[lane].words[half];
    for (int i = 0; i < 4; ++i) mine[i] = a[i];
    for (int i = 0; i < 2; ++i) mine[4 + i] = b[i];
    sync_warp();
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const int row_half = i / 2, column = 2 * q + i % 2;
        double sum = static_cast<double>(c[i]);
        for (int k = 0; k < K; ++k) {
            const float from_a = element_a(board + 4 * g, half, row_half, k);
            const float from_b = element_b(board + 4 * column, half, k);
            sum += static_cast<double>(from_a) * static_cast<double>(from_b);
        }
        c[i] = cut_off(sum);
    }
}

KGEN_DEVICE float tf32_of(u32 word) { return bit_cast<float>(word & 0xffffe000u); }

template <class T>
KGEN_DEVICE float half_of(u32 word, int which) {
    return to_float(T{static_cast<u16>(word >> (16 * which))});
}

#endif

}  // namespace detail

// Rounds x to TF32 (10 bits of mantissa, ties away from zero) and returns the bits of an fp32.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE u32 to_tf32(float x) {
    KGEN_NEEDS_MMA(Arch, 800, "TF32 needs sm_80");
#if KGEN_HOST
    const u32 bits = bit_cast<u32>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
    return (bits + 0x1000u) & 0xffffe000u;  // the carry may make it Inf
#elif KGEN_ARCH >= 800
    u32 result;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
#else
    return bit_cast<u32>(x);
#endif
}

// Splits x into two TF32 terms: x = hi + lo + e with |e| <= 2^-22 |x|, for finite x below 2^127. The products hi * hi
// + hi * lo + lo * hi of two such pairs have an error of at most 3 * 2^-22 of the exact product. The low 13 bits of
// lo are not cleared: mma ignores them. This takes four instructions instead of nine for two conversions. The result
// for NaN and Inf is undefined.
KGEN_DEVICE void split_tf32(float x, u32& hi, u32& lo) {
    hi = (bit_cast<u32>(x) + 0x1000u) & 0xffffe000u;
    lo = bit_cast<u32>(x - bit_cast<float>(hi)) + 0x1000u;
}

// Computes C += A B in TF32, K = 8. The low 13 bits of a and b are ignored.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mma_tf32_m16n8k8(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    KGEN_NEEDS_MMA(Arch, 800, "TF32 products need sm_80");
#if KGEN_HOST
    detail::multiply_on_host<8>(
        c, a, b,
        [](const detail::MmaEntry* lanes, u32 half, int row_half, int k) {
            return detail::tf32_of(lanes[k % 4].words[half][row_half + 2 * (k / 4)]);
        },
        [](const detail::MmaEntry* lanes, u32 half, int k) {
            return detail::tf32_of(lanes[k % 4].words[half][4 + k / 4]);
        });
#elif KGEN_ARCH >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
          "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// Computes C += A B in T (fp16 or bf16), K = 16.
template <class T, int Arch = KGEN_ARCH>
KGEN_DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    static_assert(sizeof(T) == 2, "products of fp16 or bf16");
    KGEN_NEEDS_MMA(Arch, 800, "products of 16 x 8 x 16 need sm_80");
#if KGEN_HOST
    detail::multiply_on_host<16>(
        c, a, b,
        [](const detail::MmaEntry* lanes, u32 half, int row_half, int k) {
            return detail::half_of<T>(lanes[k % 8 / 2].words[half][row_half + 2 * (k / 8)], k % 2);
        },
        [](const detail::MmaEntry* lanes, u32 half, int k) {
            return detail::half_of<T>(lanes[k % 8 / 2].words[half][4 + k / 8], k % 2);
        });
#elif KGEN_ARCH >= 800
    if constexpr (detail::kIsBf16<T>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
              "f"(c[1]), "f"(c[2]), "f"(c[3]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
              "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
#endif
}

// Loads `Matrices` (1, 2 or 4) matrices of 8 x 8 16-bit values from shared memory. A lane's r[m] is (row g, columns
// 2q and 2q + 1) of matrix m, or (rows 2q and 2q + 1, column g) if `Transposed`. Lane 8 m + i passes the address of
// row i of matrix m, a multiple of 16 bytes; addresses of lanes beyond the last matrix are not used.
//
// A row-major 16 x 16 tile of A is four matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15. B (K x 8)
// is two matrices, Transposed if its K rows are contiguous in memory.
template <int Matrices, bool Transposed = false, int Arch = KGEN_ARCH>
KGEN_DEVICE void ldmatrix(u32 (&r)[Matrices], const void* row) {
    static_assert(Matrices == 1 || Matrices == 2 || Matrices == 4, "1, 2 or 4 matrices at a time");
    KGEN_NEEDS_MMA(Arch, 750, "ldmatrix needs sm_75");
#if KGEN_HOST
    const int lane = lane_id(), g = lane / 4, q = lane % 4;
    if (lane < 8 * Matrices) host::check_aligned(row, 16, "row of ldmatrix");
    const void** rows = detail::address_board();
    rows[lane] = row;
    sync_warp();
    for (int m = 0; m < Matrices; ++m) {
        u32 pair = 0;
        for (u32 i = 0; i < 2; ++i) {
            const int from = Transposed ? 2 * q + static_cast<int>(i) : g;
            const int column = Transposed ? g : 2 * q + static_cast<int>(i);
            pair |= static_cast<u32>(static_cast<const u16*>(rows[8 * m + from])[column])
                    << (16 * i);
        }
        r[m] = pair;
    }
    sync_warp();  // `rows` may be overwritten after this
#elif KGEN_ARCH >= 750
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    if constexpr (Matrices == 4 && Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else if constexpr (Matrices == 4) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else if constexpr (Matrices == 2 && Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(address)
                     : "memory");
    } else if constexpr (Matrices == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1])
                     : "r"(address)
                     : "memory");
    } else if constexpr (Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(r[0])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                     : "=r"(r[0])
                     : "r"(address)
                     : "memory");
    }
#endif
}

// Transposes a matrix of 8 x 8 16-bit values that the lanes of a warp hold: `pair` is row g, columns 2q and 2q + 1; the
// result is rows 2q and 2q + 1, column g.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE u32 transpose_matrix(u32 pair) {
    KGEN_NEEDS_MMA(Arch, 750, "movmatrix needs sm_75");
#if KGEN_HOST
    const MmaLane lane = mma_lane();
    const u32 early = shfl(pair, 8 * lane.q + lane.g / 2);
    const u32 late = shfl(pair, 8 * lane.q + 4 + lane.g / 2);
    const int shift = 16 * (lane.g % 2);
    return (early >> shift & 0xffffu) | (late >> shift & 0xffffu) << 16;
#elif KGEN_ARCH >= 750
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
#else
    return pair;
#endif
}

#undef KGEN_NEEDS_MMA

}  // namespace kgen
