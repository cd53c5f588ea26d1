// Operand policies of Toeplitz products on tensor cores (sm_80): which mma a dtype uses, how the band is stored in
// shared memory, and how fragments are loaded.
//
// Data layout. FragmentA has 16 rows of the Toeplitz matrix: eight, and the eight that are `row_distance` rows
// further down. FragmentB has eight rows of x. The kMmaK columns of a fragment are numbered such that the columns of
// a lane are contiguous: kMmaK / 4 of them, starting at q * kMmaK / 4 (mma.cuh defines q).
//
// A band is stored as kCopies arrays of `copy` elements each. store() writes two elements of the band, given the next
// element as well; lane_base() returns the address of a lane's elements, given the index of the first one.
#pragma once

#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/mma.cuh"
#include "kgen/primitives/split_fp16.cuh"

namespace kgen {
namespace detail {

// fp32 taps as two TF32 terms (3xTF32). x in fp32 has two terms as well; x in 16 bits is one exact term.
template <class T>
struct Tf32MmaPolicy {
    static constexpr int kMmaK = 8;
    static constexpr bool kSplitX = sizeof(T) == 4;
    static constexpr int kPasses = kSplitX ? 3 : 2;
    static constexpr bool kCorrection = false;
    static constexpr int kCopies = 2;  // high parts, low parts

    using Band = u32;
    struct FragmentA {
        u32 hi[4], lo[4];
    };
    struct FragmentB {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void store(Band* band, int copy, int index, float first, float second,
                                  float) {
        split_tf32(first, band[index], band[copy + index]);
        split_tf32(second, band[index + 1], band[copy + index + 1]);
    }

    static KGEN_DEVICE const Band* lane_base(const Band* band, int, int start) {
        return band + start + 2 * mma_lane().q;
    }

    static KGEN_DEVICE FragmentA load_a(const Band* band, int copy, int row_distance) {
        FragmentA a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a.hi[i] = band[i / 2 - i % 2 * row_distance];
            a.lo[i] = band[copy + i / 2 - i % 2 * row_distance];
        }
        return a;
    }

    static KGEN_DEVICE FragmentB load_b(const T* x) {
        const Vec<T, 2> two = *reinterpret_cast<const Vec<T, 2>*>(x + 2 * mma_lane().q);
        FragmentB b = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kSplitX) {
                split_tf32(two[i], b.hi[i], b.lo[i]);
            } else {
                b.hi[i] = bit_cast<u32>(to_float(two[i]));
            }
        }
        return b;
    }

    // Adds one of the kPasses term products, the smallest first.
    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const FragmentA& a,
                                     const FragmentB& x) {
        mma_tf32_m16n8k8(acc, Pass == 0 ? a.lo : a.hi, Pass == 1 && kSplitX ? x.lo : x.hi);
    }
};

// 16-bit values. The second copy of the band is shifted by one element, so that pairs that start at odd elements are
// aligned, too.
template <class T>
struct HalfMmaPolicy {
    static constexpr int kMmaK = 16;
    static constexpr int kPasses = 1;
    static constexpr bool kCorrection = false;
    static constexpr int kCopies = 2;

    using Band = T;
    struct FragmentA {
        u32 pair[4];
    };
    struct FragmentB {
        u32 pair[2];
    };

    static KGEN_DEVICE void store(Band* band, int copy, int index, float first, float second,
                                float third) {
        *reinterpret_cast<u32*>(band + index) = pack2<T>(first, second);
        *reinterpret_cast<u32*>(band + copy + index) = pack2<T>(second, third);
    }

    static KGEN_DEVICE const Band* lane_base(const Band* band, int copy, int start) {
        return band + start + (start % 2 != 0 ? copy - 1 : 0) + 4 * mma_lane().q;
    }

    static KGEN_DEVICE FragmentA load_a(const Band* band, int, int row_distance) {
        FragmentA a;
#pragma unroll
        for (int i = 0; i < 4; ++i) a.pair[i] = load_pair(band + i / 2 * 2 - i % 2 * row_distance);
        return a;
    }

    static KGEN_DEVICE u32 load_pair(const Band* band) {
        return *reinterpret_cast<const u32*>(band);
    }

    static KGEN_DEVICE FragmentB load_b(const T* x) {
        const Vec<u32, 2> two = reinterpret_cast<const Vec<u32, 2>*>(x)[mma_lane().q];
        return FragmentB{{two[0], two[1]}};
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const FragmentA& a,
                                     const FragmentB& x) {
        mma_m16n8k16<T>(acc, a.pair, x.pair);
    }
};

// fp32 values as two scaled fp16 terms (split_fp16.cuh). x is split in place, four columns at a time: four hi, then
// four lo.
struct SplitFp16MmaPolicy {
    static constexpr int kMmaK = 16;
    static constexpr int kPasses = 3;
    // A second accumulator for the products that carry the factor 2^-11.
    static constexpr bool kCorrection = true;
    static constexpr int kCopies = 4;  // hi, hi shifted by one element, lo, lo shifted

    using Band = fp16;
    struct FragmentA {
        u32 hi[4], lo[4];
    };
    struct FragmentB {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void store(Band* band, int copy, int index, float first, float second,
                                float third) {
        const auto word = [=](int which) {
            return reinterpret_cast<u32*>(band + which * copy + index);
        };
        split_fp16(first, second, *word(0), *word(2));
        split_fp16(second, third, *word(1), *word(3));
    }

    static KGEN_DEVICE const Band* lane_base(const Band* band, int copy, int start) {
        return HalfMmaPolicy<fp16>::lane_base(band, copy, start);
    }

    static KGEN_DEVICE FragmentA load_a(const Band* band, int copy, int row_distance) {
        FragmentA a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Band* pair = band + i / 2 * 2 - i % 2 * row_distance;
            a.hi[i] = HalfMmaPolicy<fp16>::load_pair(pair);
            a.lo[i] = HalfMmaPolicy<fp16>::load_pair(pair + 2 * copy);
        }
        return a;
    }

    static KGEN_DEVICE FragmentB load_b(const float* x) {
        const Vec<u32, 4> four = reinterpret_cast<const Vec<u32, 4>*>(x)[mma_lane().q];
        return FragmentB{{four[0], four[1]}, {four[2], four[3]}};
    }

    // Splits a row of `columns` (a multiple of 4) values in place. Called by a whole warp.
    static KGEN_DEVICE void split_row(float* row, int columns, float scale) {
#pragma unroll 4
        for (int i = 4 * lane_id(); i < columns; i += 4 * kWarpSize) {
            const Vec<float, 4> x = *reinterpret_cast<const Vec<float, 4>*>(row + i);
            Vec<u32, 4> split;
            split_fp16(x[0] * scale, x[1] * scale, split[0], split[2]);
            split_fp16(x[2] * scale, x[3] * scale, split[1], split[3]);
            *reinterpret_cast<Vec<u32, 4>*>(row + i) = split;
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&correction)[4], const FragmentA& a,
                                     const FragmentB& x) {
        mma_m16n8k16<fp16>(Pass == 2 ? acc : correction, Pass == 0 ? a.lo : a.hi,
                          Pass == 1 ? x.lo : x.hi);
    }
};

// The policy for x in T and taps in W. fp32 uses it only where the exponents fit two fp16 terms.
template <class T, class W>
struct MmaPolicyFor {
    using type = Tf32MmaPolicy<T>;
};
template <>
struct MmaPolicyFor<float, float> {
    using type = SplitFp16MmaPolicy;
};
template <>
struct MmaPolicyFor<fp16, fp16> {
    using type = HalfMmaPolicy<fp16>;
};
template <>
struct MmaPolicyFor<bf16, bf16> {
    using type = HalfMmaPolicy<bf16>;
};

}  // namespace detail
}  // namespace kgen
