// Products by two warpgroups, of panels filled value by value as wgmma.cuh documents them.
#include <kgen/primitives/bulk_copy.cuh>
#include <kgen/primitives/wgmma.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH == 900

namespace {

using kgen::Major;

constexpr int kK = 128;  // columns or rows that K runs along: two panels, or sixteen groups of rows

// A tensor [Rows, Columns] in panels.
template <int Rows, int Columns, class T>
KGEN_DEVICE void fill(T* panels, const T* from) {
    for (int i = kgen::thread_rank(); i < Rows * Columns; i += 256) {
        const int row = i / Columns, column = i % Columns;
        panels[kgen::SwizzledPanels<Rows>::offset(row, column / 8) + column % 8] = from[i];
    }
}

// out[64, 2 N] = c[64, 2 N] + 2 A B, A of [64, K] and B of [K, 2 N] as they are or transposed. Group g has
// columns g N to g N + N. The first product has A in shared memory, the second one in registers.
template <class T, int N, Major MajorA, Major MajorB>
KGEN_DEVICE void multiply(const T* a, const T* b, const float* c, float* out) {
    constexpr int kRowsA = MajorA == Major::K ? 64 : kK;
    constexpr int kRowsB = MajorB == Major::K ? 2 * N : kK;
    T* panels_a = reinterpret_cast<T*>(kgen::align_panels(kgen::dynamic_smem<char>()));
    T* panels_b = panels_a + 64 * kK;
    fill<kRowsA, 64 * kK / kRowsA>(panels_a, a);
    fill<kRowsB, 2 * N * kK / kRowsB>(panels_b, b);
    kgen::fence_proxy_async();
    kgen::sync_block();

    const int group = kgen::warpgroup_rank(), warp = kgen::warp_in_warpgroup();
    const kgen::MmaLane lane = kgen::mma_lane();
    const auto place = [&](int n, int i) {
        return (16 * warp + lane.g + i / 2 * 8) * 2 * N + group * N + 8 * n + 2 * lane.q + i % 2;
    };
    float d[N / 8][4];
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) d[n][i] = c[place(n, i)];
    kgen::u32 held[kK / 16][4];
    for (int k = 0; k < kK / 16; ++k)
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * warp + lane.g + i % 2 * 8, column = 16 * k + 2 * lane.q + i / 2 * 8;
            const auto value = [&](int j) {
                return MajorA == Major::K ? a[row * kK + column + j] : a[(column + j) * 64 + row];
            };
            held[k][i] = static_cast<kgen::u32>(value(0).bits) |
                         static_cast<kgen::u32>(value(1).bits) << 16;
        }

    const kgen::PanelOperand<T, kRowsA> from_a(panels_a, 0, 0);
    const kgen::PanelOperand<T, kRowsB> from_b(panels_b, MajorB == Major::K ? group * N : 0,
                                               MajorB == Major::K ? 0 : group * N);
    const auto b_at = [&](int k) {
        return MajorB == Major::K ? from_b.at(0, 16 * k) : from_b.at(16 * k, 0);
    };
    kgen::wgmma_fence(d, held);
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
        kgen::wgmma_m64k16<N, MajorA, MajorB>(
            d, MajorA == Major::K ? from_a.at(0, 16 * k) : from_a.at(16 * k, 0), b_at(k));
    kgen::wgmma_commit();
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) kgen::wgmma_m64k16<N, MajorB>(d, held[k], b_at(k));
    kgen::wgmma_commit();
    kgen::wgmma_wait<0>(d, held);
    for (int n = 0; n < N / 8; ++n)
        for (int i = 0; i < 4; ++i) out[place(n, i)] = d[n][i];
}

}  // namespace

#define PRODUCT(name, T, N, A, B)                                                              \
    extern "C" __global__ void name(const kgen::T* a, const kgen::T* b, const float* c,        \
                                    float* out) {                                              \
        multiply<kgen::T, N, Major::A, Major::B>(a, b, c, out);                                \
    }                                                                                          \
    KGEN_EXPORT(name);

PRODUCT(bf16_16_K_K, bf16, 16, K, K)
PRODUCT(bf16_16_K_MN, bf16, 16, K, MN)
PRODUCT(bf16_32_K_K, bf16, 32, K, K)
PRODUCT(bf16_32_K_MN, bf16, 32, K, MN)
PRODUCT(bf16_32_MN_MN, bf16, 32, MN, MN)
PRODUCT(bf16_64_K_K, bf16, 64, K, K)
PRODUCT(bf16_64_K_MN, bf16, 64, K, MN)
PRODUCT(bf16_64_MN_K, bf16, 64, MN, K)
PRODUCT(bf16_64_MN_MN, bf16, 64, MN, MN)
PRODUCT(bf16_128_K_K, bf16, 128, K, K)
PRODUCT(bf16_128_K_MN, bf16, 128, K, MN)
PRODUCT(bf16_128_MN_MN, bf16, 128, MN, MN)
PRODUCT(fp16_64_K_MN, fp16, 64, K, MN)
PRODUCT(fp16_128_MN_MN, fp16, 128, MN, MN)

// out[64, 64] = A B^T of columns 32 to 63 of a[64, 64] and b[64, 64]: operands that begin inside a panel, and
// go on in it. Group g has columns 32 g to 32 g + 31.
extern "C" __global__ void begins_inside(const kgen::bf16* a, const kgen::bf16* b, float* out) {
    kgen::bf16* panels = reinterpret_cast<kgen::bf16*>(kgen::align_panels(kgen::dynamic_smem<char>()));
    fill<64, 64>(panels, a);
    fill<64, 64>(panels + 64 * 64, b);
    kgen::fence_proxy_async();
    kgen::sync_block();
    const int first = 32 * kgen::warpgroup_rank();
    const kgen::PanelOperand<kgen::bf16, 64> from_a(panels, 0, 32);
    const kgen::PanelOperand<kgen::bf16, 64> from_b(panels + 64 * 64, first, 32);
    float d[4][4] = {};
    kgen::wgmma_fence(d);
#pragma unroll
    for (int k = 0; k < 2; ++k)
        kgen::wgmma_m64k16<32, Major::K, Major::K>(d, from_a.at(0, 16 * k),
                                                              from_b.at(0, 16 * k));
    kgen::wgmma_commit();
    kgen::wgmma_wait<0>(d);
    const kgen::MmaLane lane = kgen::mma_lane();
    for (int n = 0; n < 4; ++n)
        for (int i = 0; i < 4; ++i)
            out[(16 * kgen::warp_in_warpgroup() + lane.g + i / 2 * 8) * 64 + first + 8 * n + 2 * lane.q +
                i % 2] = d[n][i];
}
KGEN_EXPORT(begins_inside);

#if KGEN_HOST
// What a wait is for: out[0] is D before it, out[1] with one group of two left, out[2] behind all.
extern "C" __global__ void waits(const kgen::bf16* a, const kgen::bf16* b, float* out) {
    kgen::bf16* panels = reinterpret_cast<kgen::bf16*>(kgen::align_panels(kgen::dynamic_smem<char>()));
    fill<64, 16>(panels, a);
    fill<32, 16>(panels + 64 * 64, b);
    kgen::sync_block();
    const kgen::PanelOperand<kgen::bf16, 64> from_a(panels, 0, 0);
    const kgen::PanelOperand<kgen::bf16, 32> from_b(panels + 64 * 64, 0, 0);
    float d[4][4] = {};
    kgen::wgmma_fence(d);
    for (int i = 0; i < 2; ++i) {
        kgen::wgmma_m64k16<32, Major::K, Major::K>(d, from_a, from_b);
        kgen::wgmma_commit();
    }
    const int rank = kgen::thread_rank();
    out[rank] = d[0][0];
    kgen::wgmma_wait<1>(d);
    out[256 + rank] = d[0][0];
    kgen::wgmma_wait<0>(d);
    out[512 + rank] = d[0][0];
}
KGEN_EXPORT(waits);

extern "C" __global__ void never_waits(const kgen::bf16* a) {
    const kgen::PanelOperand<kgen::bf16, 64> from(a, 0, 0);
    float d[4][4] = {};
    kgen::wgmma_fence(d);
    kgen::wgmma_m64k16<32, Major::K, Major::K>(d, from, from);
}
KGEN_EXPORT(never_waits);

// Two products; the registers of the second may have changed since the wait.
extern "C" __global__ void fences_once(const kgen::bf16* a) {
    const kgen::PanelOperand<kgen::bf16, 64> from(a, 0, 0);
    float d[4][4] = {};
    kgen::wgmma_fence(d);
    for (int i = 0; i < 2; ++i) {
        kgen::wgmma_m64k16<32, Major::K, Major::K>(d, from, from);
        kgen::wgmma_commit();
        kgen::wgmma_wait<0>(d);
    }
}
KGEN_EXPORT(fences_once);

// Products of two shapes with the same accumulators.
extern "C" __global__ void two_shapes(const kgen::bf16* a, int fences) {
    const kgen::PanelOperand<kgen::bf16, 64> from(a, 0, 0);
    float d[8][4] = {};
    auto& first = reinterpret_cast<float(&)[4][4]>(d);
    kgen::wgmma_fence(d);
    kgen::wgmma_m64k16<64, Major::K, Major::K>(d, from, from);
    if (fences) kgen::wgmma_fence();
    kgen::wgmma_m64k16<32, Major::K, Major::K>(first, from, from);
    kgen::wgmma_commit();
    kgen::wgmma_wait<0>(d);
}
KGEN_EXPORT(two_shapes);

// Rows of a that wgmma may not see: without a fence they are in shared memory, and not in the async proxy's view.
extern "C" __global__ void shows(const kgen::bf16* a, float* out, int fences) {
    kgen::bf16* panels = reinterpret_cast<kgen::bf16*>(kgen::align_panels(kgen::dynamic_smem<char>()));
    fill<64, 16>(panels, a);
    if (fences) kgen::fence_proxy_async();
    kgen::sync_block();
    const kgen::PanelOperand<kgen::bf16, 64> from(panels, 0, 0);
    float d[4][4] = {};
    kgen::wgmma_fence(d);
    kgen::wgmma_m64k16<32, Major::K, Major::K>(d, from, from);
    kgen::wgmma_commit();
    kgen::wgmma_wait<0>(d);
    out[kgen::thread_rank()] = d[0][0];
}
KGEN_EXPORT(shows);

// An operand that is moved twice by `column` columns, from column 32 on.
extern "C" __global__ void moves(const kgen::bf16* a, int column) {
    const kgen::PanelOperand<kgen::bf16, 64> from(a, 0, 32);
    from.at(0, column).at(0, column);
}
KGEN_EXPORT(moves);
#endif

#endif
