// Part of a state [keys x values] in a warp's registers: 16 keys with all values of a block, as
// accumulators of products on tensor cores (mma.cuh).
//
//     read      X S^T     S is the operand A as it stands, its values the sum's k; X are rows of values
//     advance   S = diag(d) S + F^T X     F are rows of keys in fp32, 16 steps at a time
//
// Rows of 16 bits are TF32 numbers as they are. What is fp32, the state and F, is rounded to TF32 or,
// if Precise, two TF32 numbers: then the products are as good as fp32's. So they are for rows in
// fp32, of which two numbers are taken as well.
//
// A sum over steps or values is a chain that begins with zero (see mma.cuh). NaN reaches what depends on
// it and nothing else: no zeros stand for what is not there but those of steps and features that do
// not exist.
#pragma once

#include "chunk_mma.cuh"

namespace kgen::wkv {

constexpr int kSubSteps = 16;  // steps that a state advances by at a time

// Values of float between rows of keys: 4 banks more than a multiple of 16, so that eight keys of
// steps 2q, and eight steps of four keys, are 32 different banks.
KGEN_DEVICE constexpr int key_row_stride(int keys) { return keys + 4; }

// Values of float from one set of 16 rows to the next one: half of the banks away.
KGEN_DEVICE constexpr int key_rows(int stride) { return kSubSteps * stride + 16; }

// Operands for a state in fp32 with rows of T.
template <class T, bool Precise>
struct StateProducts {
    static constexpr bool kWide = sizeof(T) == 4;
    static_assert(Precise || !kWide, "rows in fp32 are for products that are as good");
    using OfState = Tf32Operands<Precise>;
    using OfRows = Tf32Operands<kWide>;
    using A = typename OfState::A;
    using B = typename OfRows::B;

    // b[i][n]: values 8 i + {2q, 2q + 1} of steps 8 n + g, from rows [16 steps][16 values].
    static KGEN_DEVICE void load_across(const T* rows, int stride, B (&b)[2][2]) {
        const MmaLane lane = mma_lane();
        if constexpr (kWide) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(
                        rows + (8 * n + lane.g) * stride + 8 * i + 2 * lane.q);
                    OfRows::put(b[i][n], 0, two[0]);
                    OfRows::put(b[i][n], 1, two[1]);
                }
        } else {
            u32 pairs[4];
            const int rank = lane_id();
            ldmatrix<4>(pairs, rows + rank % 16 * stride + rank / 16 * 8);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const f32x2 two = unpack2<T>(pairs[m]);
                b[m / 2][m % 2].hi[0] = bit_cast<u32>(two.x);
                b[m / 2][m % 2].hi[1] = bit_cast<u32>(two.y);
            }
        }
    }

    // b[i][part]: values 8 i + g of steps step_of(part, 0) and step_of(part, 1).
    static KGEN_DEVICE void load_along(const T* rows, int stride, B (&b)[2][2]) {
        const MmaLane lane = mma_lane();
        if constexpr (kWide) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        OfRows::put(b[i][part], k,
                                    rows[step_of(part, k) * stride + 8 * i + lane.g]);
        } else {
            u32 pairs[4];
            const int rank = lane_id();
            ldmatrix<4, true>(pairs, rows + rank % 16 * stride + rank / 16 * 8);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const f32x2 two = unpack2<T>(pairs[m]);
                b[m / 2][0].hi[m % 2] = bit_cast<u32>(two.x);
                b[m / 2][1].hi[m % 2] = bit_cast<u32>(two.y);
            }
        }
    }

    // a[part]: keys g and g + 8 of the same steps, from rows [16 steps][16 keys].
    static KGEN_DEVICE void load_factors(const float* rows, int stride, A (&a)[2]) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                OfState::put(a[part], i,
                             rows[step_of(part, i / 2) * stride + lane.g + i % 2 * 8]);
    }

    // Which of 16 steps is k = q (half 0) or q + 4 (half 1) of a product: that which ldmatrix brings.
    static KGEN_DEVICE int step_of(int part, int half) {
        const int q = mma_lane().q;
        return kWide ? 8 * part + 4 * half + q : 2 * q + 8 * half + part;
    }

    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        if constexpr (Precise) mma_tf32_16x8x8(sums, a.lo, b.hi);
        if constexpr (kWide) mma_tf32_16x8x8(sums, a.hi, b.lo);
        mma_tf32_16x8x8(sums, a.hi, b.hi);
    }
};

// at[i]: (key g, values 8 i + {2q, 2q + 1}), then the same of key g + 8.
template <class T, bool Precise, int Tiles>
struct KeyTile {
    using Products = StateProducts<T, Precise>;
    static_assert(Tiles % 2 == 0, "rows are read 16 values at a time");

    float at[Tiles][4];

    KGEN_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) at[i][j] = 0.0f;
    }

    // To and from memory where each lane's values of a tile lie together; `there` tiles exist.
    KGEN_DEVICE void store_fragments(float* memory, int there) const {
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
            if (i < there)
                *reinterpret_cast<Vec<float, 4>*>(memory + (i * kWarpSize + lane_id()) * 4) =
                    {{at[i][0], at[i][1], at[i][2], at[i][3]}};
    }

    KGEN_DEVICE void load_fragments(const float* memory) {
#pragma unroll
        for (int i = 0; i < Tiles; ++i) {
            const Vec<float, 4> four = *reinterpret_cast<const Vec<float, 4>*>(
                memory + (i * kWarpSize + lane_id()) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) at[i][j] = four[j];
        }
    }

    // visit(element, key of the tile, value of the tile)
    template <class Visit>
    KGEN_DEVICE void for_each(Visit visit) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                visit(at[i][j], lane.g + j / 2 * 8, 8 * i + 2 * lane.q + j % 2);
    }

    // out[n]: keys g and g + 8 of steps 8 n + {2q, 2q + 1}, sums over values of S x.
    KGEN_DEVICE void read(const T* rows, int stride, float (&out)[2][4]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) out[n][j] = 0.0f;
#pragma unroll
        for (int first = 0; first < Tiles; first += 4) {
            float chain[2][4] = {};
#pragma unroll
            for (int i = first; i < min(first + 4, Tiles); i += 2) {
                typename Products::B b[2][2];
                Products::load_across(rows + 8 * i, stride, b);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const typename Products::A a = Products::OfState::of_sums(at, i + k);
#pragma unroll
                    for (int n = 0; n < 2; ++n) Products::multiply(chain[n], a, b[k][n]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) out[n][j] += chain[n][j];
        }
    }

    // S = diag(decays) S + F^T X; `before` is S and may be this one. Decays and F are of the tile's keys.
    KGEN_DEVICE void advance(const KeyTile& before, const float* decays, const float* factors,
                             int factor_stride, const T* rows, int stride) {
        const MmaLane lane = mma_lane();
        const float of_row[2] = {decays[lane.g], decays[lane.g + 8]};
        typename Products::A a[2];
        Products::load_factors(factors, factor_stride, a);
#pragma unroll
        for (int i = 0; i < Tiles; i += 2) {
            typename Products::B b[2][2];
            Products::load_along(rows + 8 * i, stride, b);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float chain[4] = {};
                Products::multiply(chain, a[0], b[k][0]);
                Products::multiply(chain, a[1], b[k][1]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    at[i + k][j] = fma(of_row[j / 2], before.at[i + k][j], chain[j]);
            }
        }
    }

    // Sums over values of this times `other`, of keys g and g + 8, in all four lanes of a key.
    KGEN_DEVICE void inner(const KeyTile& other, float (&sums)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < Tiles; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    sum = fma(at[i][2 * half + j], other.at[i][2 * half + j], sum);
            sums[half] = lanes_sum<4>(sum);
        }
    }
};

}  // namespace kgen::wkv
