// Products and matrix loads, with fragments put together value by value as mma.cuh documents them.
// Each warp of a block has matrices of its own.
#include <kgen/primitives/mma.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

namespace {

// out[16][8] = c + a[16][8] b[8][8], then the same product again on top: out[0] and out[1].
KGEN_DEVICE void multiply_tf32(const float* a, const float* b, const float* c, float* out) {
    const kgen::MmaLane at = kgen::mma_lane();
    const int warp = kgen::thread_rank() / 32, g = at.g, q = at.q;
    a += warp * 128, b += warp * 64, c += warp * 128, out += warp * 256;
    const kgen::u32 fa[4] = {
        kgen::to_tf32(a[g * 8 + q]), kgen::to_tf32(a[(g + 8) * 8 + q]),
        kgen::to_tf32(a[g * 8 + q + 4]), kgen::to_tf32(a[(g + 8) * 8 + q + 4])};
    const kgen::u32 fb[2] = {kgen::to_tf32(b[q * 8 + g]), kgen::to_tf32(b[(q + 4) * 8 + g])};
    float fc[4] = {c[g * 8 + 2 * q], c[g * 8 + 2 * q + 1], c[(g + 8) * 8 + 2 * q],
                   c[(g + 8) * 8 + 2 * q + 1]};
    for (int i = 0; i < 2; ++i) {
        kgen::mma_tf32_m16n8k8(fc, fa, fb);
        for (int j = 0; j < 4; ++j)
            out[i * 128 + (g + j / 2 * 8) * 8 + 2 * q + j % 2] = fc[j];
    }
}

// a[16][16], b[16][8]; fragments of A and B from shared memory by ldmatrix, or value by value.
template <class T, bool ByMatrix>
KGEN_DEVICE void multiply_half(const T* a, const T* b, const float* c, float* out) {
    __shared__ T tiles[2][2][256];
    const kgen::MmaLane at = kgen::mma_lane();
    const int warp = kgen::thread_rank() / 32, lane = kgen::lane_id(), g = at.g, q = at.q;
    a += warp * 256, b += warp * 128, c += warp * 128, out += warp * 256;
    kgen::u32 fa[4], fb[2];
    if constexpr (ByMatrix) {
        T* ta = tiles[warp][0];
        T* tb = tiles[warp][1];
        for (int i = lane; i < 256; i += 32) ta[i] = a[i];
        for (int i = lane; i < 128; i += 32) tb[i] = b[i];
        kgen::sync_warp();
        const int matrix = lane / 8, row = lane % 8;
        kgen::ldmatrix<4>(fa, ta + (matrix % 2 * 8 + row) * 16 + matrix / 2 * 8);
        kgen::ldmatrix<2, true>(fb, tb + (matrix % 2 * 8 + row) * 8);
    } else {
        const auto pair = [](T first, T second) {
            return static_cast<kgen::u32>(first.bits) | static_cast<kgen::u32>(second.bits) << 16;
        };
        for (int i = 0; i < 4; ++i) {
            const T* from = a + (g + i % 2 * 8) * 16 + 2 * q + i / 2 * 8;
            fa[i] = pair(from[0], from[1]);
        }
        for (int i = 0; i < 2; ++i)
            fb[i] = pair(b[(2 * q + 8 * i) * 8 + g], b[(2 * q + 8 * i + 1) * 8 + g]);
    }
    float fc[4] = {c[g * 8 + 2 * q], c[g * 8 + 2 * q + 1], c[(g + 8) * 8 + 2 * q],
                   c[(g + 8) * 8 + 2 * q + 1]};
    for (int i = 0; i < 2; ++i) {
        kgen::mma_m16n8k16<T>(fc, fa, fb);
        for (int j = 0; j < 4; ++j)
            out[i * 128 + (g + j / 2 * 8) * 8 + 2 * q + j % 2] = fc[j];
    }
}

// What each lane gets of up to four matrices, row 8 m + i of `in` [32][8] being row i of matrix m.
template <int Matrices, bool Transposed>
KGEN_DEVICE void dump_matrices(const kgen::u16* in, kgen::u32* out) {
    __shared__ __attribute__((aligned(16))) kgen::u16 rows[256];
    const int lane = kgen::lane_id();
    for (int i = lane; i < 256; i += 32) rows[i] = in[i];
    kgen::sync_warp();
    kgen::u32 found[Matrices];
    kgen::ldmatrix<Matrices, Transposed>(found, rows + lane * 8);
    rows[lane * 8] = 0;  // too late to be seen by other lanes
    for (int m = 0; m < Matrices; ++m) out[m * 32 + lane] = found[m];
}

}  // namespace

extern "C" __global__ void mma_tf32(const float* a, const float* b, const float* c, float* out) {
    multiply_tf32(a, b, c, out);
}
KGEN_EXPORT(mma_tf32);

#define KGEN_TEST_HALF(name, T, by_matrix)                                                        \
    extern "C" __global__ void name(const T* a, const T* b, const float* c, float* out) {          \
        multiply_half<T, by_matrix>(a, b, c, out);                                                \
    }                                                                                             \
    KGEN_EXPORT(name)

KGEN_TEST_HALF(mma_fp16, kgen::fp16, false);
KGEN_TEST_HALF(mma_bf16, kgen::bf16, false);
KGEN_TEST_HALF(mma_fp16_ldmatrix, kgen::fp16, true);
KGEN_TEST_HALF(mma_bf16_ldmatrix, kgen::bf16, true);

#define KGEN_TEST_LDMATRIX(name, matrices, transposed)                             \
    extern "C" __global__ void name(const kgen::u16* in, kgen::u32* out) {         \
        dump_matrices<matrices, transposed>(in, out);                              \
    }                                                                              \
    KGEN_EXPORT(name)

KGEN_TEST_LDMATRIX(ldmatrix_1, 1, false);
KGEN_TEST_LDMATRIX(ldmatrix_2, 2, false);
KGEN_TEST_LDMATRIX(ldmatrix_4, 4, false);
KGEN_TEST_LDMATRIX(ldmatrix_1_trans, 1, true);
KGEN_TEST_LDMATRIX(ldmatrix_2_trans, 2, true);
KGEN_TEST_LDMATRIX(ldmatrix_4_trans, 4, true);

// What each lane gets of the transpose of in[8][8].
extern "C" __global__ void movmatrix(const kgen::u16* in, kgen::u32* out) {
    const kgen::MmaLane at = kgen::mma_lane();
    const kgen::u16* pair = in + 8 * at.g + 2 * at.q;
    out[kgen::lane_id()] = kgen::transpose_matrix(static_cast<kgen::u32>(pair[0]) |
                                                  static_cast<kgen::u32>(pair[1]) << 16);
}
KGEN_EXPORT(movmatrix);

// Four matrices, in[4][32], stored as rows of out [32][8]: row 8 m + i is row i of matrix m, or of its transpose.
#define KGEN_TEST_STMATRIX(name, store)                                         \
    extern "C" __global__ void name(const kgen::u32* in, kgen::u16* out) {      \
        __shared__ __attribute__((aligned(16))) kgen::u16 rows[256];            \
        const int lane = kgen::lane_id();                                       \
        kgen::u32 words[4];                                                     \
        for (int m = 0; m < 4; ++m) words[m] = in[m * 32 + lane];               \
        kgen::store(words, rows + lane * 8);                                    \
        kgen::sync_warp();                                                      \
        for (int i = lane; i < 256; i += 32) out[i] = rows[i];                  \
    }                                                                           \
    KGEN_EXPORT(name)

KGEN_TEST_STMATRIX(stmatrix_plain, stmatrix);
KGEN_TEST_STMATRIX(stmatrix_trans, stmatrix_transposed);

// rounded[i], high[i], low[i] of in[i].
extern "C" __global__ void split(const float* in, kgen::u32* rounded, kgen::u32* high,
                                 kgen::u32* low) {
    const int i = static_cast<int>(blockIdx.x) * 64 + kgen::thread_rank();
    rounded[i] = kgen::to_tf32(in[i]);
    kgen::split_tf32(in[i], high[i], low[i]);
}
KGEN_EXPORT(split);

// A warp of which lane 31 stays away from the product.
extern "C" __global__ void diverged(const float* in, float* out) {
    float c[4] = {};
    const kgen::u32 a[4] = {}, b[2] = {};
    if (kgen::lane_id() != 31) kgen::mma_tf32_m16n8k8(c, a, b);
    out[kgen::lane_id()] = c[0] + in[0];
}
KGEN_EXPORT(diverged);

// Rows that begin 2 bytes off.
extern "C" __global__ void misaligned_rows(kgen::u32* out) {
    __shared__ __attribute__((aligned(16))) kgen::u16 rows[264];
    kgen::u32 found[4];
    kgen::ldmatrix<4>(found, rows + kgen::lane_id() * 8 + 1);
    out[kgen::lane_id()] = found[0];
}
KGEN_EXPORT(misaligned_rows);

#endif
