// Matrix products of one warp on tensor cores (mma.sync), ldmatrix, stmatrix, movmatrix and TF32 conversions.
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

// Operands of a warp's products as values: a lane unpacks its own fragments, and reads the rows and columns that its
// part of D needs. Consecutive products of a lane alternate between two halves, so that one warp barrier per product is
// sufficient: a lane writes the same half again two products later, and between the two every lane has read the half
// and then passed the barrier of the product in between.
struct MmaBoard {
    float a[2][16][16];  // half, row, column
    float b[2][16][8];   // half, row, column
    u32 uses[kWarpSize];
};

KGEN_DEVICE const void** address_board() {
    __shared__ const void* board[1024];
    return board + (thread_rank() & ~(kWarpSize - 1));
}

// Returns `value` truncated to fp32, towards zero. Without a branch, which would be mispredicted every other time.
KGEN_DEVICE float cut_off(double value) {
    const float nearest = static_cast<float>(value);
    const bool is_beyond = __builtin_fabs(static_cast<double>(nearest)) > __builtin_fabs(value);
    return bit_cast<float>(bit_cast<u32>(nearest) - static_cast<u32>(is_beyond));  // Inf becomes the largest number
}

// A lane's part in one product: the lane writes its elements of A and B, and then multiplies, or reads rows of A.
class MmaExchange {
public:
    KGEN_DEVICE MmaExchange() : lane_(mma_lane()) {
        __shared__ MmaBoard boards[1024 / kWarpSize];
        board_ = &boards[thread_rank() / kWarpSize];
        half_ = board_->uses[lane_id()]++ & 1;
    }

    // Row g or g + 8 (row_half 0 or 1) of A. The rows are complete after `meet`.
    KGEN_DEVICE float* a(int row_half) { return board_->a[half_][lane_.g + 8 * row_half]; }
    // The element of B in column g.
    KGEN_DEVICE float& b(int row) { return board_->b[half_][row][lane_.g]; }

    KGEN_DEVICE void meet() { sync_warp(); }

    // Computes the lane's part of C += A B.
    template <int K>
    KGEN_DEVICE void multiply(float (&c)[4]) {
        meet();
        add_products<K, 8>(c, a(0), a(1), &board_->b[half_][0][2 * lane_.q]);
    }

    using Pair = double __attribute__((vector_size(16)));  // of the two columns

    // Adds the products of two rows of A and two adjacent columns of B, whose rows are `Stride` apart, to four sums.
    // A row has numbers, or each number twice (Pair).
    template <int K, int Stride, class Row>
    static KGEN_DEVICE void add_products(float (&c)[4], const Row* upper, const Row* lower,
                                         const float* columns) {
        Pair sums[2] = {{c[0], c[1]}, {c[2], c[3]}};
        for (int k = 0; k < K; ++k) {
            const Pair row_of_b = {columns[Stride * k], columns[Stride * k + 1]};
            sums[0] += factor(upper[k]) * row_of_b;
            sums[1] += factor(lower[k]) * row_of_b;
        }
        c[0] = cut_off(sums[0][0]);
        c[1] = cut_off(sums[0][1]);
        c[2] = cut_off(sums[1][0]);
        c[3] = cut_off(sums[1][1]);
    }

private:
    static KGEN_DEVICE double factor(double value) { return value; }
    static KGEN_DEVICE Pair factor(Pair value) { return value; }

    MmaLane lane_;
    MmaBoard* board_;
    u32 half_;
};

KGEN_DEVICE float tf32_of(u32 word) { return bit_cast<float>(word & 0xffffe000u); }

// Writes the values of a lane's fragment of A, whose elements are 16 bits wide.
template <class T>
KGEN_DEVICE void publish_a(MmaExchange& exchange, const u32 (&a)[4]) {
    const int q = mma_lane().q;
    for (int i = 0; i < 4; ++i) {
        const f32x2 pair = unpack2<T>(a[i]);
        float* to = exchange.a(i % 2) + 8 * (i / 2) + 2 * q;
        to[0] = pair.x;
        to[1] = pair.y;
    }
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
    const int q = mma_lane().q;
    detail::MmaExchange exchange;
    for (int i = 0; i < 4; ++i) exchange.a(i % 2)[q + 4 * (i / 2)] = detail::tf32_of(a[i]);
    for (int i = 0; i < 2; ++i) exchange.b(q + 4 * i) = detail::tf32_of(b[i]);
    exchange.multiply<8>(c);
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
    const int q = mma_lane().q;
    detail::MmaExchange exchange;
    detail::publish_a<T>(exchange, a);
    for (int i = 0; i < 2; ++i) {
        const f32x2 pair = unpack2<T>(b[i]);
        exchange.b(8 * i + 2 * q) = pair.x;
        exchange.b(8 * i + 2 * q + 1) = pair.y;
    }
    exchange.multiply<16>(c);
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

namespace detail {

// stmatrix as stores of 4 bytes: r[m] is rows g, columns 2q and 2q + 1 of matrix m.
KGEN_DEVICE void store_matrices(const u32 (&r)[4], void* row) {
    const MmaLane lane = mma_lane();
#if KGEN_HOST
    host::check_aligned(row, 16, "row of stmatrix");
    const void** rows = detail::address_board();
    rows[lane_id()] = row;
    sync_warp();
#else
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
#endif
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#if KGEN_HOST
        static_cast<u32*>(const_cast<void*>(rows[8 * m + lane.g]))[lane.q] = r[m];
#else
        const u32 target = shfl(address, 8 * m + lane.g) + 4 * lane.q;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(r[m]) : "memory");
#endif
    }
#if KGEN_HOST
    sync_warp();  // `rows` may be overwritten after this
#endif
}

}  // namespace detail

// Stores four matrices of 8 x 8 16-bit values to shared memory: the opposite of ldmatrix<4>. A lane's r[m] is row g,
// columns 2q and 2q + 1 of matrix m; lane 8 m + i passes the address of row i of matrix m, a multiple of 16 bytes. One
// instruction on sm_90, else a store of 4 bytes per matrix.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void stmatrix(const u32 (&r)[4], void* row) {
#if !KGEN_HOST && KGEN_ARCH >= 900
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    detail::store_matrices(r, row);
#endif
}

// The same, transposed: the opposite of ldmatrix<4, true>. r[m] is rows 2q and 2q + 1, column g of matrix m. Below
// sm_90 each matrix takes one more instruction (movmatrix).
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void stmatrix_transposed(const u32 (&r)[4], void* row) {
    KGEN_NEEDS_MMA(Arch, 750, "movmatrix needs sm_75");
#if !KGEN_HOST && KGEN_ARCH >= 900
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    u32 transposed[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) transposed[m] = transpose_matrix(r[m]);
    detail::store_matrices(transposed, row);
#endif
}

#undef KGEN_NEEDS_MMA

}  // namespace kgen
