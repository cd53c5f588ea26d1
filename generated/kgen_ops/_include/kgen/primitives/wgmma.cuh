// Matrix products of a warpgroup (four adjacent warps) on tensor cores: wgmma.mma_async (sm_90a).
//
//     D[64 x N] += A[64 x 16] B[16 x N]
//
// Data layout:
//
//     D (fp32)    warp w has rows 16 w to 16 w + 15, as tiles of 16 x 8 in the fragment layout of mma.cuh's C
//     A           in registers, 16 rows per warp in the fragment layout of mma.cuh's 16-bit A; or in shared memory
//     B           in shared memory
//
// Operands in shared memory are swizzled panels (below), with K along their columns or along their rows.
//
//     wgmma_fence(d, a);                              // after writes to the registers of d and a
//     wgmma_m64k16<128, Major::K, Major::MN>(d, a_panels, b_panels);      // any number
//     wgmma_commit();                                 // the products since the last commit form a group
//     wgmma_wait<0>(d);                               // all groups are complete
//
// Synchronisation: wgmma is asynchronous. Do not read or write `d`, or overwrite operands, between wgmma_fence() and
// wgmma_wait(). Shared memory that other instructions wrote is visible to wgmma after a fence_proxy_async
// (bulk_copy.cuh) by each thread that wrote and a barrier.
//
// On the host a product is computed when it is waited for. It reads the contents of shared memory at that time; in two
// of the four thread orders of a verification it reads the contents at the last fence_proxy_async. The host reports a
// product without a wgmma_fence. Results are rounded as in mma.cuh.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/mma.cuh"
#include "kgen/primitives/warp.cuh"

#if KGEN_HOST
#include "kgen/host/deferred.hpp"
#endif

namespace kgen {

// The dimension of an operand that is contiguous in shared memory. K: A is stored as [64 x K], B as [N x K]. MN: A is
// stored as [K x 64], B as [K x N].
enum class Major { K, MN };

// The layout of a matrix of 16-bit values with `Rows` rows in shared memory, with the 128-byte swizzle: consecutive
// panels of 64 columns. A row of a panel is 128 bytes, in eight chunks of 16 bytes. Chunk p is stored at position
// p ^ (row % 8), so that a column of eight rows covers all banks. The first panel starts at a multiple of 1024 bytes.
template <int Rows>
struct SwizzledPanels {
    static_assert(Rows % 8 == 0, "the swizzle repeats every eight rows");
    static constexpr int kBytes = 1024;  // alignment
    static constexpr int kPanel = 64 * Rows;

    // Returns the offset, in elements, of a chunk of eight columns.
    static KGEN_DEVICE int offset(int row, int piece) {
        return piece / 8 * kPanel + 64 * row + (piece % 8 ^ row % 8) * 8;
    }
    // Returns the size of `columns` columns, in elements.
    static KGEN_DEVICE constexpr int elements(int columns) { return (columns + 63) / 64 * kPanel; }
};

// Returns the next multiple of 1024 bytes, for panels in dynamic shared memory.
KGEN_DEVICE char* align_panels(char* shared) {
    using Address = decltype(sizeof(0));
    const Address address = reinterpret_cast<Address>(shared);
    return shared + (-address & (SwizzledPanels<8>::kBytes - 1));
}

namespace detail {

#if KGEN_HOST

// A deferred product: the operands of a lane and its part of D.
template <class T, int Tiles>
struct GroupProduct {
    float (*d)[4];
    float a[2][16];  // rows g and g + 8, if A is in registers
    const T *a_panels, *b_panels;
    int a_rows, b_rows;    // of panels
    int a_row, a_column, b_row, b_column;
    bool a_in_registers, a_along_rows, b_along_rows;
    int g, q, warp;

    // Publishes the lane's fragment of A and collects the two rows that the four lanes of its quad hold.
    void gather(const u32 (&fragment)[4]) {
        MmaExchange exchange;
        publish_a<T>(exchange, fragment);
        exchange.meet();
        for (int half = 0; half < 2; ++half)
            for (int k = 0; k < 16; ++k) a[half][k] = exchange.a(half)[k];
    }

    void defer() {
        g = mma_lane().g;
        q = mma_lane().q;
        warp = thread_rank() / kWarpSize % 4;
        host::defer(&run, this, sizeof(*this), d[0], 4 * Tiles);
    }

    // Reads sixteen values along K of row or column `i` of an operand that starts at (row, column).
    static void take(float* to, int stride, const T* panels, int rows, bool along_rows, int row,
                     int column, int i) {
        row += along_rows ? 0 : i;
        column += along_rows ? i : 0;
        const T* panel = panels + column / 64 * 64 * rows;
        const int piece = column / 8 % 8;
        if (along_rows) {
            for (int k = 0; k < 16; ++k) {
                const int r = row + k;
                to[stride * k] = to_float(panel[64 * r + (piece ^ r % 8) * 8 + column % 8]);
            }
        } else {
            for (int part = 0; part < 2; ++part) {
                const T* from = panel + 64 * row + ((piece + part) ^ row % 8) * 8;
                for (int k = 0; k < 8; ++k) to[stride * (8 * part + k)] = to_float(from[k]);
            }
        }
    }

    using Words = u32 __attribute__((vector_size(16)));
    using Floats = float __attribute__((vector_size(16)));
    using Halves = double __attribute__((vector_size(16)));  // of four floats: they are moved, not computed with

    template <class Value>
    static Value load(const T* from) {
        Value value;
        copy_bytes<sizeof(Value)>(&value, from);
        return value;
    }

    // Converts the low and the high halves of four words.
    static Floats low(Words pairs) {
        if constexpr (kIsBf16<T>) return bit_cast<Floats>(pairs << 16);
        return Floats{unpack2<T>(pairs[0]).x, unpack2<T>(pairs[1]).x, unpack2<T>(pairs[2]).x,
                      unpack2<T>(pairs[3]).x};
    }
    static Floats high(Words pairs) {
        if constexpr (kIsBf16<T>) return bit_cast<Floats>(pairs & 0xffff0000u);
        return Floats{unpack2<T>(pairs[0]).y, unpack2<T>(pairs[1]).y, unpack2<T>(pairs[2]).y,
                      unpack2<T>(pairs[3]).y};
    }

    // Writes the pairs of elements 0 to 3 of two vectors to four rows that are `Step` apart.
    template <int Step>
    static void put(float (*to)[2], Floats left, Floats right) {
#if defined(__clang__)
        const Floats first = __builtin_shufflevector(left, right, 0, 4, 1, 5);
        const Floats second = __builtin_shufflevector(left, right, 2, 6, 3, 7);
#else
        const Floats first = __builtin_shuffle(left, right, Words{0, 4, 1, 5});
        const Floats second = __builtin_shuffle(left, right, Words{2, 6, 3, 7});
#endif
        const Halves values[2] = {bit_cast<Halves>(first), bit_cast<Halves>(second)};
        copy_bytes<8>(to[0], &values[0]);
        copy_bytes<8>(to[Step], reinterpret_cast<const char*>(&values[0]) + 8);
        copy_bytes<8>(to[2 * Step], &values[1]);
        copy_bytes<8>(to[3 * Step], reinterpret_cast<const char*>(&values[1]) + 8);
    }

    // Reads the same values of the adjacent rows or columns i and i + 1; `i` is even.
    static void take_two(float (&to)[16][2], const T* panels, int rows, bool along_rows, int row,
                         int column, int i) {
        if (along_rows) {
            const u32 first = static_cast<u32>(column + i), piece = first / 8 % 8;
            const T* from = panels + first / 64 * 64 * static_cast<u32>(rows) + 64 * row + first % 8;
            for (u32 k = 0; k < 16; k += 4) {
                const u32 r = static_cast<u32>(row) + k;
                const Words pairs = {
                    load<u32>(from + 64 * k + (piece ^ r % 8) * 8),
                    load<u32>(from + 64 * k + 64 + (piece ^ (r + 1) % 8) * 8),
                    load<u32>(from + 64 * k + 128 + (piece ^ (r + 2) % 8) * 8),
                    load<u32>(from + 64 * k + 192 + (piece ^ (r + 3) % 8) * 8),
                };
                put<1>(to + k, low(pairs), high(pairs));
            }
            return;
        }
        const u32 r = static_cast<u32>(row + i), piece = static_cast<u32>(column) / 8 % 8;
        const T* from = panels + column / 64 * 64 * rows + 64 * r;
        for (u32 part = 0; part < 2; ++part) {
            const Words one = load<Words>(from + ((piece + part) ^ r % 8) * 8);
            const Words other = load<Words>(from + 64 + ((piece + part) ^ (r + 1) % 8) * 8);
            put<2>(to + 8 * part, low(one), low(other));
            put<2>(to + 8 * part + 1, high(one), high(other));
        }
    }

    static void run(const void* what) {
        const GroupProduct& me = *static_cast<const GroupProduct*>(what);
        const T* b_panels = static_cast<const T*>(host::operand_of_deferred(me.b_panels));
        MmaExchange::Pair rows[2][16];  // converted once for all tiles, each value twice
        for (int half = 0; half < 2; ++half) {
            float row[16];
            if (!me.a_in_registers)
                take(row, 1, static_cast<const T*>(host::operand_of_deferred(me.a_panels)), me.a_rows,
                     me.a_along_rows, me.a_row, me.a_column, 16 * me.warp + 8 * half + me.g);
            for (int k = 0; k < 16; ++k) {
                const double value = me.a_in_registers ? me.a[half][k] : row[k];
                rows[half][k] = MmaExchange::Pair{value, value};
            }
        }
        for (int n = 0; n < Tiles; ++n) {
            float columns[16][2];
            take_two(columns, b_panels, me.b_rows, me.b_along_rows, me.b_row, me.b_column,
                     8 * n + 2 * me.q);
            MmaExchange::add_products<16, 2>(me.d[n], rows[0], rows[1], columns[0]);
        }
    }
};

#endif

}  // namespace detail

// An operand in panels: its start. On a GPU this is a wgmma descriptor.
template <class T, int Rows>
class PanelOperand {
public:
    // `row` is a multiple of 8, and of 16 if K is along rows. `column` is a multiple of 16 if K is along columns,
    // else of min(N, 64). It is a multiple of 64 unless all columns that the product reads are in one panel.
    KGEN_DEVICE PanelOperand(const T* panels, int row, int column) {
        static_assert(sizeof(T) == 2, "panels are of 16 bits");
#if KGEN_HOST
        panels_ = panels;
        row_ = row;
        column_ = column;
#else
        // Address, offset between panels, offset between groups of eight rows (1024 bytes), 128-byte swizzle. All
        // in units of 16 bytes.
        const u32 address = static_cast<u32>(__cvta_generic_to_shared(panels)) >> 4;
        descriptor_ = static_cast<u64>(address + moved(row, column)) |
                      static_cast<u64>(Rows * 8) << 16 | u64{64} << 32 | u64{1} << 62;
#endif
    }

    // Returns the operand that starts `row` rows and `column` columns further on. An offset that is not a multiple of
    // 64 columns must stay in the panel.
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

// Returns the rank of the calling warpgroup in its block.
KGEN_DEVICE int warpgroup_rank() { return shfl(thread_rank() / 128, 0); }
// Returns the rank of the calling warp in its warpgroup.
KGEN_DEVICE int warp_in_warpgroup() { return thread_rank() / kWarpSize % 4; }

namespace detail {

// A compiler barrier: accesses of these registers are not moved across it.
template <int Tiles>
KGEN_DEVICE void hold([[maybe_unused]] float (&sums)[Tiles][4]) {
#if !KGEN_HOST
#pragma unroll
    for (int i = 0; i < 4 * Tiles; ++i) asm volatile("" : "+f"(sums[i / 4][i % 4])::"memory");
#endif
}

KGEN_DEVICE void hold([[maybe_unused]] u32 (&fragment)[4]) {
#if !KGEN_HOST
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(fragment[i])::"memory");
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

// wgmma.fence: orders earlier writes to `registers` (D, and A in registers) before the next products. Needed before
// the first product, after every write by other instructions, and between products of different N with the same D.
template <class... Registers>
KGEN_DEVICE void wgmma_fence(Registers&... registers) {
    (detail::hold(registers), ...);
#if KGEN_HOST
    host::defer_fence();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// wgmma.commit_group: the products since the last commit form a group.
KGEN_DEVICE void wgmma_commit() {
#if KGEN_HOST
    host::defer_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// wgmma.wait_group: waits until at most `Pending` groups are in flight. Pass all registers that the completed
// products wrote.
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
#define KGEN_SUMS_2(i) KGEN_SUMS_1(i), KGEN_SUMS_1(i + 1)
#define KGEN_SUMS_4(i) KGEN_SUMS_2(i), KGEN_SUMS_2(i + 2)
#define KGEN_SUMS_8(i) KGEN_SUMS_4(i), KGEN_SUMS_4(i + 4)
#define KGEN_SUMS_16(i) KGEN_SUMS_8(i), KGEN_SUMS_8(i + 8)
#define KGEN_PLACES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define KGEN_PLACES_16 KGEN_PLACES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define KGEN_PLACES_32 \
    KGEN_PLACES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KGEN_PLACES_64                                                                         \
    KGEN_PLACES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
                   "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// scale-d is always 1 (accumulate), scale-a and scale-b are 1; then the transposition of operands in shared memory.
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

// wgmma exists on sm_90a only, neither before nor after it.
#define KGEN_NEEDS_WGMMA(Arch)                                           \
    static_assert(sizeof(T) == 2 && (N == 16 || N == 32 || N == 64 || N == 128), \
                  "N is 16, 32, 64 or 128, and operands have 16 bits");  \
    static_assert(Arch == 0 || Arch == 900, "wgmma needs sm_90a")

// Starts D += A B with both operands in shared memory.
template <int N, Major MajorA, Major MajorB, class T, int RowsA, int RowsB, int Arch = KGEN_ARCH>
KGEN_DEVICE void wgmma_m64k16(float (&d)[N / 8][4], const PanelOperand<T, RowsA>& a,
                             const PanelOperand<T, RowsB>& b) {
    KGEN_NEEDS_WGMMA(Arch);
#if KGEN_HOST
    detail::GroupProduct<T, N / 8> product{};
    product.d = d;
    product.a_along_rows = MajorA == Major::MN;
    product.b_along_rows = MajorB == Major::MN;
    a.bring_a(product);
    b.bring_b(product);
    product.defer();
#else
    constexpr int kA = MajorA == Major::MN, kB = MajorB == Major::MN;
    if constexpr (N == 16) {
        KGEN_BY_TYPE("16", KGEN_PLACES_8, "%8, %9", "%10, %11", KGEN_SUMS_2(0),
                     "l"(a.descriptor()), "l"(b.descriptor()), "n"(kA), "n"(kB));
    } else if constexpr (N == 32) {
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

// Starts D += A B with A in registers.
template <int N, Major MajorB, class T, int RowsB, int Arch = KGEN_ARCH>
KGEN_DEVICE void wgmma_m64k16(float (&d)[N / 8][4], const u32 (&a)[4],
                             const PanelOperand<T, RowsB>& b) {
    KGEN_NEEDS_WGMMA(Arch);
#if KGEN_HOST
    detail::GroupProduct<T, N / 8> product{};
    product.d = d;
    product.a_in_registers = true;
    product.b_along_rows = MajorB == Major::MN;
    product.gather(a);
    b.bring_b(product);
    product.defer();
#else
    constexpr int kB = MajorB == Major::MN;
    if constexpr (N == 16) {
        KGEN_BY_TYPE("16", KGEN_PLACES_8, "{%8,%9,%10,%11}, %12", "%13",
                     KGEN_SUMS_2(0), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                     "l"(b.descriptor()), "n"(kB));
    } else if constexpr (N == 32) {
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
#undef KGEN_SUMS_2
#undef KGEN_SUMS_4
#undef KGEN_SUMS_8
#undef KGEN_SUMS_16
#undef KGEN_PLACES_8
#undef KGEN_PLACES_16
#undef KGEN_PLACES_32
#undef KGEN_PLACES_64
#undef KGEN_PRODUCT
#undef KGEN_BY_TYPE
#endif

}  // namespace kgen
