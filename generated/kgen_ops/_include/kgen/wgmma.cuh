// Products of matrices by a warpgroup, four neighbouring warps, on tensor cores: wgmma (sm_90a).
//
//     D[64 x N] += A[64 x 16] B[16 x N]
//
//     D (fp32)    warp w has rows 16 w to 16 w + 15, as tiles of 16 x 8 with the lanes of mma.cuh's C
//     A           in registers, a warp's 16 rows as mma.cuh's A of 16 bits; or in shared memory
//     B           in shared memory
//
// What lies in shared memory are panels (below), and K runs along their columns or along their rows.
//
//     wgmma_fence(d, a);                              // what was written to registers is there
//     wgmma_64x16<128, Along::columns, Along::rows>(d, a_panels, b_panels);      // any number
//     wgmma_commit();                                 // they form a group
//     wgmma_wait<0>(d);                               // all groups but the newest 0 are done
//
// Products take turns with nothing: between fence and wait nobody may touch d, or overwrite what the
// products read. Shared memory that other instructions wrote they see behind a fence_proxy_async
// (bulk.cuh) of each thread that wrote and a barrier.
//
// On the host a product is made when it is waited for, from what shared memory has then. Fences do
// nothing there. How the sum is rounded: mma.cuh.
#pragma once

#include "block.cuh"
#include "mma.cuh"
#include "warp.cuh"

#if KGEN_HOST
#include "host/deferred.hpp"
#endif

namespace kgen {

// How K runs through an operand in shared memory: A is [64 x K] or its transpose, B [N x K] or [K x N].
enum class Along { columns, rows };

// A matrix of 16-bit values in shared memory, `Rows` rows: panels of 64 columns, one behind the other.
// A row of a panel is 128 bytes, eight pieces of 16 bytes, of which piece p lies where p ^ (row % 8)
// would: eight rows of a column are in all banks. The first panel begins at a multiple of 1024 bytes.
template <int Rows>
struct Panels {
    static_assert(Rows % 8 == 0, "the order of pieces repeats every eight rows");
    static constexpr int kBytes = 1024;  // that addresses are multiples of
    static constexpr int kPanel = 64 * Rows;

    // Where the piece of eight columns is, in elements.
    static KGEN_DEVICE int offset(int row, int piece) {
        return piece / 8 * kPanel + 64 * row + (piece % 8 ^ row % 8) * 8;
    }
    static KGEN_DEVICE constexpr int elements(int columns) { return (columns + 63) / 64 * kPanel; }
};

// A piece of shared memory that is a multiple of 1024 bytes into it, `room` for which is asked for.
KGEN_DEVICE char* panel_memory(char* shared) {
    using Address = decltype(sizeof(0));
    const Address address = reinterpret_cast<Address>(shared);
    return shared + (-address & (Panels<8>::kBytes - 1));
}

namespace detail {

#if KGEN_HOST

// What a lane brings to a product, and its part of D.
template <class T, int Tiles>
struct GroupProduct {
    float (*d)[4];
    T a[2][16];  // rows g and g + 8, if A is in registers
    const T *a_panels, *b_panels;
    int a_rows, b_rows;    // of panels
    int a_row, a_column, b_row, b_column;
    bool a_in_registers, a_along_rows, b_along_rows;
    int g, q, warp;

    // Bring the lane's fragment of A, and take the rows that it has with the other lanes of its quad.
    void gather(const u32 (&fragment)[4]) {
        MmaEntry* board = mma_board();
        const int lane = lane_id();
        const u32 half = board[lane].uses++ & 1;
        for (int i = 0; i < 4; ++i) board[lane].words[half][i] = fragment[i];
        sync_warp();
        for (int row = 0; row < 2; ++row)
            for (int k = 0; k < 16; ++k) {
                const MmaEntry& from = board[lane / 4 * 4 + k % 8 / 2];
                a[row][k] = T{static_cast<u16>(from.words[half][row + k / 8 * 2] >> (k % 2 * 16))};
            }
    }

    void defer() {
        g = mma_lane().g;
        q = mma_lane().q;
        warp = thread_rank() / kWarpSize % 4;
        host::defer(&run, this, sizeof(*this));
    }

    // Sixteen values along K of row or column `i` of an operand that begins at (row, column).
    static void take(float (&to)[16], const T* panels, int rows, bool along_rows, int row, int column,
                     int i) {
        row += along_rows ? 0 : i;
        column += along_rows ? i : 0;
        const T* panel = panels + column / 64 * 64 * rows;
        const int piece = column / 8 % 8;
        for (int k = 0; k < 16; ++k) {
            const int r = along_rows ? row + k : row;
            const int p = along_rows ? piece : piece + k / 8;
            to[k] = to_float(panel[64 * r + (p ^ r % 8) * 8 + (along_rows ? column % 8 : k % 8)]);
        }
    }

    static void run(const void* what) {
        const GroupProduct& me = *static_cast<const GroupProduct*>(what);
        float rows[2][16];
        for (int half = 0; half < 2; ++half) {
            if (me.a_in_registers) {
                for (int k = 0; k < 16; ++k) rows[half][k] = to_float(me.a[half][k]);
            } else {
                take(rows[half], me.a_panels, me.a_rows, me.a_along_rows, me.a_row, me.a_column,
                     16 * me.warp + 8 * half + me.g);
            }
        }
        for (int n = 0; n < Tiles; ++n)
            for (int j = 0; j < 2; ++j) {
                float column[16];
                take(column, me.b_panels, me.b_rows, me.b_along_rows, me.b_row, me.b_column,
                     8 * n + 2 * me.q + j);
                for (int half = 0; half < 2; ++half) {
                    float& sum = me.d[n][2 * half + j];
                    double exact = static_cast<double>(sum);
                    for (int k = 0; k < 16; ++k)
                        exact += static_cast<double>(rows[half][k]) * static_cast<double>(column[k]);
                    sum = cut_off(exact);
                }
            }
    }
};

#endif

}  // namespace detail

// Where a product's operand begins in panels.
template <class T, int Rows>
class PanelOperand {
public:
    // `row` is a multiple of 8, and of 16 if K runs along rows. `column` is a multiple of 16 along
    // columns, and otherwise of N, or of 64 if that is less. A multiple of 64 unless all columns that
    // the product reads are of one panel.
    KGEN_DEVICE PanelOperand(const T* panels, int row, int column) {
        static_assert(sizeof(T) == 2, "panels are of 16 bits");
#if KGEN_HOST
        panels_ = panels;
        row_ = row;
        column_ = column;
#else
        // Address; from one panel to the next; from eight rows to the next eight, 1024 bytes; the
        // pieces' order. All in units of 16 bytes.
        const u32 address = static_cast<u32>(__cvta_generic_to_shared(panels)) >> 4;
        descriptor_ = static_cast<u64>(address + moved(row, column)) |
                      static_cast<u64>(Rows * 8) << 16 | u64{64} << 32 | u64{1} << 62;
#endif
    }

    // The operand that many rows and columns further on. Out of the middle of a panel no column leads to the
    // next one.
    KGEN_DEVICE PanelOperand at(int row, int column) const {
        PanelOperand there = *this;
#if KGEN_HOST
        if (column_ % 64 + column % 64 >= 64)
            host::fault("an operand %d columns behind column %d: not in a panel of 64", column,
                        column_);
        there.row_ += row;
        there.column_ += column;
#else
        there.descriptor_ += static_cast<u64>(moved(row, column));
#endif
        return there;
    }

#if KGEN_HOST
    template <class Product>
    void bring_a(Product& product) const {
        product.a_panels = panels_;
        product.a_rows = Rows;
        product.a_row = row_;
        product.a_column = column_;
    }
    template <class Product>
    void bring_b(Product& product) const {
        product.b_panels = panels_;
        product.b_rows = Rows;
        product.b_row = row_;
        product.b_column = column_;
    }

private:
    const T* panels_;
    int row_, column_;
#else
    KGEN_DEVICE u64 descriptor() const { return descriptor_; }

private:
    static KGEN_DEVICE u32 moved(int row, int column) {
        return static_cast<u32>(column / 64 * (Rows * 8) + row * 8 + column % 64 / 8);
    }

    u64 descriptor_;
#endif
};

// The calling thread's warpgroup in its block, and its warp there.
KGEN_DEVICE int warpgroup_rank() { return shfl(thread_rank() / 128, 0); }
KGEN_DEVICE int warp_of_group() { return thread_rank() / kWarpSize % 4; }

namespace detail {

// The compiler moves nothing that reads or writes these registers to the other side of this place.
template <int Tiles>
KGEN_DEVICE void hold([[maybe_unused]] float (&sums)[Tiles][4]) {
#if !KGEN_HOST
#pragma unroll
    for (int i = 0; i < 4 * Tiles; ++i) asm volatile("" : "+f"(sums[i / 4][i % 4])::"memory");
#endif
}

template <int Fragments>
KGEN_DEVICE void hold([[maybe_unused]] u32 (&fragments)[Fragments][4]) {
#if !KGEN_HOST
#pragma unroll
    for (int i = 0; i < 4 * Fragments; ++i)
        asm volatile("" : "+r"(fragments[i / 4][i % 4])::"memory");
#endif
}

}  // namespace detail

// Before the first product that has these registers, and whenever others have written to them.
template <class... Registers>
KGEN_DEVICE void wgmma_fence(Registers&... registers) {
    (detail::hold(registers), ...);
#if !KGEN_HOST
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Close the group of the products since the last commit.
KGEN_DEVICE void wgmma_commit() {
#if KGEN_HOST
    host::defer_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Wait until at most `Pending` groups are not done. `registers`: all that products of the others wrote.
template <int Pending, class... Registers>
KGEN_DEVICE void wgmma_wait(Registers&... registers) {
#if KGEN_HOST
    host::defer_wait(Pending);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
    (detail::hold(registers), ...);
}

#if !KGEN_HOST
#define KGEN_SUMS_1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define KGEN_SUMS_4(i) KGEN_SUMS_1(i), KGEN_SUMS_1(i + 1), KGEN_SUMS_1(i + 2), KGEN_SUMS_1(i + 3)
#define KGEN_SUMS_8(i) KGEN_SUMS_4(i), KGEN_SUMS_4(i + 4)
#define KGEN_SUMS_16(i) KGEN_SUMS_8(i), KGEN_SUMS_8(i + 8)
#define KGEN_PLACES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KGEN_PLACES_32 \
    KGEN_PLACES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KGEN_PLACES_64                                                                         \
    KGEN_PLACES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
                   "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// The sums are always added to: that is the predicate. Then two factors of 1, and whether operands in
// shared memory are transposed.
#define KGEN_PRODUCT(N, Type, Places, Operands, Transposed)                                  \
    "{.reg .pred p; setp.ne.b32 p, 1, 0; "                                                   \
    "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." Type "." Type " {" Places "}, " Operands \
    ", p, 1, 1, " Transposed ";}"
#define KGEN_BY_TYPE(N, Places, Operands, Transposed, Sums, ...)                        \
    if constexpr (detail::kIsBf16<T>)                                                   \
        asm volatile(KGEN_PRODUCT(N, "bf16", Places, Operands, Transposed)              \
                     : Sums                                                             \
                     : __VA_ARGS__                                                      \
                     : "memory");                                                       \
    else                                                                                \
        asm volatile(KGEN_PRODUCT(N, "f16", Places, Operands, Transposed)               \
                     : Sums                                                             \
                     : __VA_ARGS__                                                      \
                     : "memory")
#endif

// Products exist for sm_90a alone: not for what came before, nor behind it.
#define KGEN_NEEDS_WGMMA(Arch)                                                            \
    static_assert(sizeof(T) == 2 && (N == 32 || N == 64 || N == 128), "a shape of ours"); \
    static_assert(Arch == 0 || Arch == 900, "products by warpgroups need sm_90a")

// D += A B, both in shared memory.
template <int N, Along AlongA, Along AlongB, class T, int RowsA, int RowsB, int Arch = KGEN_ARCH>
KGEN_DEVICE void wgmma_64x16(float (&d)[N / 8][4], const PanelOperand<T, RowsA>& a,
                             const PanelOperand<T, RowsB>& b) {
    KGEN_NEEDS_WGMMA(Arch);
#if KGEN_HOST
    detail::GroupProduct<T, N / 8> product{};
    product.d = d;
    product.a_along_rows = AlongA == Along::rows;
    product.b_along_rows = AlongB == Along::rows;
    a.bring_a(product);
    b.bring_b(product);
    product.defer();
#else
    constexpr int kA = AlongA == Along::rows, kB = AlongB == Along::rows;
    if constexpr (N == 32) {
        KGEN_BY_TYPE("32", KGEN_PLACES_16, "%16, %17", "%18, %19", KGEN_SUMS_4(0),
                     "l"(a.descriptor()), "l"(b.descriptor()), "n"(kA), "n"(kB));
    } else if constexpr (N == 64) {
        KGEN_BY_TYPE("64", KGEN_PLACES_32, "%32, %33", "%34, %35",
                     KGEN_SUMS_8(0), "l"(a.descriptor()),
                     "l"(b.descriptor()), "n"(kA), "n"(kB));
    } else {
        KGEN_BY_TYPE("128", KGEN_PLACES_64, "%64, %65", "%66, %67", KGEN_SUMS_16(0),
                     "l"(a.descriptor()), "l"(b.descriptor()), "n"(kA), "n"(kB));
    }
#endif
}

// D += A B, A in registers.
template <int N, Along AlongB, class T, int RowsB, int Arch = KGEN_ARCH>
KGEN_DEVICE void wgmma_64x16(float (&d)[N / 8][4], const u32 (&a)[4],
                             const PanelOperand<T, RowsB>& b) {
    KGEN_NEEDS_WGMMA(Arch);
#if KGEN_HOST
    detail::GroupProduct<T, N / 8> product{};
    product.d = d;
    product.a_in_registers = true;
    product.b_along_rows = AlongB == Along::rows;
    product.gather(a);
    b.bring_b(product);
    product.defer();
#else
    constexpr int kB = AlongB == Along::rows;
    if constexpr (N == 32) {
        KGEN_BY_TYPE("32", KGEN_PLACES_16, "{%16,%17,%18,%19}, %20", "%21",
                     KGEN_SUMS_4(0), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                     "l"(b.descriptor()), "n"(kB));
    } else if constexpr (N == 64) {
        KGEN_BY_TYPE("64", KGEN_PLACES_32, "{%32,%33,%34,%35}, %36", "%37",
                     KGEN_SUMS_8(0), "r"(a[0]), "r"(a[1]), "r"(a[2]),
                     "r"(a[3]), "l"(b.descriptor()), "n"(kB));
    } else {
        KGEN_BY_TYPE("128", KGEN_PLACES_64, "{%64,%65,%66,%67}, %68", "%69",
                     KGEN_SUMS_16(0), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                     "l"(b.descriptor()), "n"(kB));
    }
#endif
}

#undef KGEN_NEEDS_WGMMA
#if !KGEN_HOST
#undef KGEN_SUMS_1
#undef KGEN_SUMS_4
#undef KGEN_SUMS_8
#undef KGEN_SUMS_16
#undef KGEN_PLACES_16
#undef KGEN_PLACES_32
#undef KGEN_PLACES_64
#undef KGEN_PRODUCT
#undef KGEN_BY_TYPE
#endif

}  // namespace kgen
