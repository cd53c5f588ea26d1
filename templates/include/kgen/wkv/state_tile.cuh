// A tile of a state [keys x values] in a warp's registers, and its products on tensor cores: wkv5 and wkv6 backward.
//
//     multiply    out = S X^T                     X: 16 rows of values, in shared memory
//     update      S = diag(d) S + F^T X           F: 16 rows of keys in fp32, in shared memory
//     dot         sum over values of S * G, per key
//
// Layout: each warp has 16 keys and all values of its block, as accumulators of mma.m16n8 (mma.cuh). In `multiply` the
// accumulators are operand A without a move; the dimension k of that product counts values.
//
// S and F, operands in fp32, are sums of terms of the type that is multiplied:
//
//     rows of    as accurate as fp32 (Precise)    else
//     bf16       three bf16, exactly: 24 bits     two, 16 bits
//     fp16       three TF32, exactly              one
//     fp32       two TF32 each, three products
//
// Each product over 16 steps or values is a chain of its own that begins with zero, small terms first (see mma.cuh):
// where terms have one sign, the truncation of longer chains would add up. NaN reaches only what depends on it: only
// steps and features that do not exist are zero-filled.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/math.cuh"

namespace kgen::wkv {

constexpr int kSubSteps = 16;  // steps that a state advances by at a time

// Floats between rows of keys in shared memory: 4 banks more than a multiple of 16, so that eight keys of steps 2q, and
// eight steps of four keys, lie in 32 different banks.
KGEN_DEVICE constexpr int key_row_stride(int keys) { return keys + 4; }

// Floats from one set of 16 rows to the next one: half of the banks away.
KGEN_DEVICE constexpr int key_rows(int stride) { return kSubSteps * stride + 16; }

// A running product of decays in two floats: times(x) has one rounding error, not one per decay. Where terms of
// adjacent steps cancel, rounding errors of their decays would not.
class CompensatedProduct {
public:
    KGEN_DEVICE explicit CompensatedProduct(float first) : high_(first), low_(0.0f) {}
    KGEN_DEVICE void multiply(float x) {
        const float product = high_ * x;
        low_ = fma(low_, x, fma(high_, x, -product));
        high_ = product;
    }
    KGEN_DEVICE float times(float x) const { return fma(high_, x, low_ * x); }
    KGEN_DEVICE float value() const { return high_ + low_; }

private:
    float high_, low_;
};

// The high 16 bits of x and of y, the latter in the high half.
KGEN_DEVICE u32 high_halves(float x, float y) {
#if KGEN_HOST
    return bit_cast<u32>(x) >> 16 | (bit_cast<u32>(y) & 0xffff0000u);
#else
    return __byte_perm(bit_cast<u32>(x), bit_cast<u32>(y), 0x7632);  // one instruction, no mask
#endif
}

// Operands of products of a state in fp32 with rows of T, 16 steps and 16 values at a time. `State` has 16 keys, and 16
// values or 16 steps as the summed dimension k; `Rows` are two fragments of 8 of the other index.
template <class T, bool Precise>
struct StateProducts {  // fp16 and fp32, as TF32
    static constexpr bool kWide = sizeof(T) == 4;
    static_assert(Precise || !kWide, "rows in fp32 always take Precise products");
    static constexpr int kTerms = kWide ? 2 : Precise ? 3 : 1;  // of an fp32 operand
    static constexpr int kRowTerms = kWide ? 2 : 1;

    struct State {
        u32 term[2][kTerms][4];  // of k = 0 .. 7 and 8 .. 15
    };
    struct Rows {
        u32 term[2][2][kRowTerms][2];  // of each fragment, the same
    };

    // Splits x into terms of falling size. The last term is rounded without a bias, and keeps NaN.
    template <int Terms, int Count>
    static KGEN_DEVICE void split(u32 (&terms)[Terms][Count], int i, float x) {
#pragma unroll
        for (int p = 0; p + 1 < Terms; ++p) {
            terms[p][i] = (bit_cast<u32>(x) + 0x1000u) & 0xffffe000u;
            x -= bit_cast<float>(terms[p][i]);
        }
        terms[Terms - 1][i] = near_tf32(x);
    }

    static KGEN_DEVICE void put(Rows& rows, int fragment, int k, int i, float x) {
        if constexpr (kWide) {
            split(rows.term[fragment][k], i, x);
        } else {
            rows.term[fragment][k][0][i] = bit_cast<u32>(x);
        }
    }

    // Fragments of steps 8 n + g; k are values 8 k + {2q, 2q + 1}, in the order of a state's
    // columns.
    static KGEN_DEVICE Rows across(const T* rows, int stride) {
        Rows b;
        if constexpr (kWide) {
            const MmaLane lane = mma_lane();
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(
                        rows + (8 * n + lane.g) * stride + 8 * k + 2 * lane.q);
                    put(b, n, k, 0, two[0]);
                    put(b, n, k, 1, two[1]);
                }
        } else {
            u32 pairs[4];
            ldmatrix<4>(pairs, rows + lane_id() % 16 * stride + lane_id() / 16 * 8);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const f32x2 two = unpack2<T>(pairs[m]);
                put(b, m % 2, m / 2, 0, two.x);
                put(b, m % 2, m / 2, 1, two.y);
            }
        }
        return b;
    }

    // Fragments of values 8 n + g; k are steps, in the order of `step_of`.
    static KGEN_DEVICE Rows along(const T* rows, int stride) {
        Rows b;
        if constexpr (kWide) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int k = 0; k < 2; ++k)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        put(b, n, k, i, rows[step_of(k, i) * stride + 8 * n + mma_lane().g]);
        } else {
            u32 pairs[4];
            ldmatrix<4, true>(pairs, rows + lane_id() % 16 * stride + lane_id() / 16 * 8);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const f32x2 two = unpack2<T>(pairs[m]);
                put(b, m / 2, 0, m % 2, two.x);
                put(b, m / 2, 1, m % 2, two.y);
            }
        }
        return b;
    }

    // From rows of keys [16 steps][16 keys].
    static KGEN_DEVICE State of_factors(const float* rows, int stride) {
        State a;
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split(a.term[k], i, rows[step_of(k, i / 2) * stride + mma_lane().g + i % 2 * 8]);
        return a;
    }

    // From accumulator fragments `tile` and the next one.
    template <class Tiles>
    static KGEN_DEVICE State of_sums(const Tiles& sums, int tile) {
        State a;
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) split(a.term[k], i, sums[tile + k][i % 2 * 2 + i / 2]);
        return a;
    }

    // Which of 16 steps is q (half 0) or q + 4 (half 1) of k: the order in which ldmatrix returns them.
    static KGEN_DEVICE int step_of(int k, int half) {
        const int q = mma_lane().q;
        return kWide ? 8 * k + 4 * half + q : 2 * q + 8 * half + k;
    }

    // sums = a * fragment of b, summed over k.
    static KGEN_DEVICE void multiply(float (&sums)[4], const State& a, const Rows& b,
                                     int fragment) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
        for (int p = kTerms - 1; p >= 0; --p) {
            if constexpr (kWide)
                if (p == 0)
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        mma_tf32_m16n8k8(sums, a.term[k][0], b.term[fragment][k][kRowTerms - 1]);
#pragma unroll
            for (int k = 0; k < 2; ++k)
                mma_tf32_m16n8k8(sums, a.term[k][p], b.term[fragment][k][0]);
        }
    }
};

template <bool Precise>
struct StateProducts<bf16, Precise> {
    static constexpr int kTerms = Precise ? 3 : 2;

    struct State {
        u32 term[kTerms][4];
    };
    struct Rows {
        u32 pairs[2][2];  // of each fragment
    };

    // Splits two values into pairs of bf16 terms of falling size, whose bits are those of the values: truncated instead
    // of rounded, three terms have all 24 bits.
    static KGEN_DEVICE void split(State& a, int i, float x, float y) {
#pragma unroll
        for (int p = 0; p < kTerms; ++p) {
            if (p + 1 == kTerms && !Precise) {
                a.term[p][i] = pack2<bf16>(x, y);
                break;
            }
            a.term[p][i] = high_halves(x, y);
            x -= bit_cast<float>(bit_cast<u32>(x) & 0xffff0000u);
            y -= bit_cast<float>(bit_cast<u32>(y) & 0xffff0000u);
        }
    }

    static KGEN_DEVICE Rows across(const bf16* rows, int stride) {
        u32 pairs[4];
        const int lane = lane_id();  // a fragment's pairs are adjacent, as a product takes them
        ldmatrix<4>(pairs, rows + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
        return {{{pairs[0], pairs[1]}, {pairs[2], pairs[3]}}};
    }

    static KGEN_DEVICE Rows along(const bf16* rows, int stride) {
        u32 pairs[4];
        ldmatrix<4, true>(pairs, rows + lane_id() % 16 * stride + lane_id() / 16 * 8);
        return {{{pairs[0], pairs[1]}, {pairs[2], pairs[3]}}};
    }

    static KGEN_DEVICE State of_factors(const float* rows, int stride) {
        const MmaLane lane = mma_lane();
        State a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* two = rows + (2 * lane.q + i / 2 * 8) * stride + lane.g + i % 2 * 8;
            split(a, i, two[0], two[stride]);
        }
        return a;
    }

    template <class Tiles>
    static KGEN_DEVICE State of_sums(const Tiles& sums, int tile) {
        State a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split(a, i, sums[tile + i / 2][i % 2 * 2], sums[tile + i / 2][i % 2 * 2 + 1]);
        return a;
    }

    static KGEN_DEVICE void multiply(float (&sums)[4], const State& a, const Rows& b,
                                     int fragment) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
        for (int p = kTerms - 1; p >= 0; --p)
            mma_m16n8k16<bf16>(sums, a.term[p], b.pairs[fragment]);
    }
};

// The tile. at[i]: (key g, values 8 i + {2q, 2q + 1}), then the same of key g + 8.
template <class T, bool Precise, int Tiles>
struct StateTile {
    using Products = StateProducts<T, Precise>;
    static_assert(Tiles % 2 == 0, "rows are read 16 values at a time");

    float at[Tiles][4];

    KGEN_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) at[i][j] = 0.0f;
    }

    // store_fragments and load_fragments: memory in accumulator order, [fragment][lane][4]; `there` fragments exist.
    KGEN_DEVICE void store_fragments(float* memory, int there) const {
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
            if (i < there)
                *reinterpret_cast<Vec<float, 4>*>(memory + (i * kWarpSize + lane_id()) * 4) =
                    {{at[i][0], at[i][1], at[i][2], at[i][3]}};
    }

    // The same rounded to bf16, as operands A of two fragments each, [fragment / 2][lane][4].
    KGEN_DEVICE void store_rounded(u32* memory, int there) const {
#pragma unroll
        for (int i = 0; i < Tiles; i += 2)
            if (i < there)
                *reinterpret_cast<Vec<u32, 4>*>(memory + (i / 2 * kWarpSize + lane_id()) * 4) = {
                    {pack2<bf16>(at[i][0], at[i][1]), pack2<bf16>(at[i][2], at[i][3]),
                     pack2<bf16>(at[i + 1][0], at[i + 1][1]), pack2<bf16>(at[i + 1][2], at[i + 1][3])}};
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

    // Calls visit(element, key of the tile, value of the tile) for each element.
    template <class Visit>
    KGEN_DEVICE void for_each(Visit visit) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < Tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                visit(at[i][j], lane.g + j / 2 * 8, 8 * i + 2 * lane.q + j % 2);
    }

    // Loads from and stores to rows of values that are `stride` apart, from the tile's first key and value on. The
    // first `keys` and `values` of the tile exist; the other elements stay as they are.
    KGEN_DEVICE void load_rows(const float* rows, int stride, int keys, int values) {
        for_each([&](float& element, int key, int value) {
            if (key < keys && value < values) element = rows[i64{key} * stride + value];
        });
    }

    KGEN_DEVICE void store_rows(float* rows, int stride, int keys, int values) {
        for_each([&](float& element, int key, int value) {
            if (key < keys && value < values) rows[i64{key} * stride + value] = element;
        });
    }

    // out[n]: S x for keys g and g + 8 and the rows x of steps 8 n + {2q, 2q + 1}. visit(i, a) receives the terms of
    // fragments i and i + 1, in the form that the products take.
    template <class Visit>
    KGEN_DEVICE void multiply(const T* rows, int stride, float (&out)[2][4], Visit visit) const {
#pragma unroll
        for (int i = 0; i < Tiles; i += 2) {
            const typename Products::Rows b = Products::across(rows + 8 * i, stride);
            const typename Products::State a = Products::of_sums(at, i);
            visit(i, a);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float chain[4];
                Products::multiply(chain, a, b, n);
#pragma unroll
                for (int j = 0; j < 4; ++j) out[n][j] = i == 0 ? chain[j] : out[n][j] + chain[j];
            }
        }
    }

    // S = diag(decays) S + F^T X; `before` is the old S and may be this tile. Decays and F are of the tile's keys.
    KGEN_DEVICE void update(const StateTile& before, const float* decays, const float* factors,
                             int factor_stride, const T* rows, int stride) {
        const MmaLane lane = mma_lane();
        const float of_row[2] = {decays[lane.g], decays[lane.g + 8]};
        const typename Products::State a = Products::of_factors(factors, factor_stride);
#pragma unroll
        for (int i = 0; i < Tiles; i += 2) {
            const typename Products::Rows b = Products::along(rows + 8 * i, stride);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float chain[4];
                Products::multiply(chain, a, b, n);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    at[i + n][j] = fma(of_row[j / 2], before.at[i + n][j], chain[j]);
            }
        }
    }

    // Sums over values of this tile times `other`, for keys g and g + 8, in all four lanes of a key.
    KGEN_DEVICE void dot(const StateTile& other, float (&sums)[2]) const {
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
