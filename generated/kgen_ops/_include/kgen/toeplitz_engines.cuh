// What a warp multiplies in products with Toeplitz matrices on tensor cores (sm_80): fragments of the
// matrix out of a band in shared memory, and fragments of the other factor.
//
// `Tile` is a fragment of A: eight rows of the matrix, and the eight that lie `apart` rows below;
// `Column` is one of B, of eight rows of x. The kStep columns of a fragment are numbered so that a
// lane's are neighbours: kStep / 4 consecutive ones from q * kStep / 4 on.
//
// put() writes two elements of the band, given the next one, too; origin() is where a lane finds its own
// elements, given where they begin. Bands have kCopies copies of `copy` elements each.
#pragma once

#include "memory.cuh"
#include "mma.cuh"
#include "split_half.cuh"

namespace kgen {
namespace detail {

// fp32 taps as two TF32 numbers; x in fp32 as two as well, in 16 bits as it is.
template <class T>
struct Tf32Engine {
    static constexpr int kStep = 8;
    static constexpr bool kSplitX = sizeof(T) == 4;
    static constexpr int kPasses = kSplitX ? 3 : 2;
    static constexpr bool kSmall = false;
    static constexpr int kCopies = 2;  // high parts, low parts

    using Band = u32;
    struct Tile {
        u32 hi[4], lo[4];
    };
    struct Column {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void put(Band* band, int copy, int index, float first, float second, float) {
        split_tf32(first, band[index], band[copy + index]);
        split_tf32(second, band[index + 1], band[copy + index + 1]);
    }

    static KGEN_DEVICE const Band* origin(const Band* band, int, int start) {
        return band + start + 2 * mma_lane().q;
    }

    static KGEN_DEVICE Tile load_tile(const Band* band, int copy, int apart) {
        Tile tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tile.hi[i] = band[i / 2 - i % 2 * apart];
            tile.lo[i] = band[copy + i / 2 - i % 2 * apart];
        }
        return tile;
    }

    static KGEN_DEVICE Column load_column(const T* x) {
        const Vec<T, 2> two = *reinterpret_cast<const Vec<T, 2>*>(x + 2 * mma_lane().q);
        Column column = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kSplitX) {
                split_tf32(two[i], column.hi[i], column.lo[i]);
            } else {
                column.hi[i] = bit_cast<u32>(to_float(two[i]));
            }
        }
        return column;
    }

    // The passes in the order of their size, small first.
    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const Tile& tile,
                                     const Column& x) {
        mma_tf32_16x8x8(acc, Pass == 0 ? tile.lo : tile.hi, Pass == 1 && kSplitX ? x.lo : x.hi);
    }
};

// 16-bit values as they are. Bands have a second copy, one element ahead: pairs start at odd elements
// too.
template <class T>
struct HalfEngine {
    static constexpr int kStep = 16;
    static constexpr int kPasses = 1;
    static constexpr bool kSmall = false;
    static constexpr int kCopies = 2;

    using Band = T;
    struct Tile {
        u32 pair[4];
    };
    struct Column {
        u32 pair[2];
    };

    static KGEN_DEVICE void put(Band* band, int copy, int index, float first, float second,
                                float third) {
        *reinterpret_cast<u32*>(band + index) = pack2<T>(first, second);
        *reinterpret_cast<u32*>(band + copy + index) = pack2<T>(second, third);
    }

    static KGEN_DEVICE const Band* origin(const Band* band, int copy, int start) {
        return band + start + (start % 2 != 0 ? copy - 1 : 0) + 4 * mma_lane().q;
    }

    static KGEN_DEVICE Tile load_tile(const Band* band, int, int apart) {
        Tile tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) tile.pair[i] = load_pair(band + i / 2 * 2 - i % 2 * apart);
        return tile;
    }

    static KGEN_DEVICE u32 load_pair(const Band* band) {
        return *reinterpret_cast<const u32*>(band);
    }

    static KGEN_DEVICE Column load_column(const T* x) {
        const Vec<u32, 2> two = reinterpret_cast<const Vec<u32, 2>*>(x)[mma_lane().q];
        return Column{{two[0], two[1]}};
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const Tile& tile,
                                     const Column& x) {
        mma_16x8x16<T>(acc, tile.pair, x.pair);
    }
};

// fp32 values as pairs of fp16 (split_half.cuh). x has been split in place, four columns at a time:
// four hi, then four lo.
struct SplitEngine {
    static constexpr int kStep = 16;
    static constexpr int kPasses = 3;
    static constexpr bool kSmall = true;  // the sum of what is 2^11 times smaller
    static constexpr int kCopies = 4;     // hi and hi one element ahead, lo and lo one ahead

    using Band = fp16;
    struct Tile {
        u32 hi[4], lo[4];
    };
    struct Column {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void put(Band* band, int copy, int index, float first, float second,
                                float third) {
        const auto word = [=](int which) { return reinterpret_cast<u32*>(band + which * copy + index); };
        split_half(first, second, *word(0), *word(2));
        split_half(second, third, *word(1), *word(3));
    }

    static KGEN_DEVICE const Band* origin(const Band* band, int copy, int start) {
        return HalfEngine<fp16>::origin(band, copy, start);
    }

    static KGEN_DEVICE Tile load_tile(const Band* band, int copy, int apart) {
        Tile tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Band* pair = band + i / 2 * 2 - i % 2 * apart;
            tile.hi[i] = HalfEngine<fp16>::load_pair(pair);
            tile.lo[i] = HalfEngine<fp16>::load_pair(pair + 2 * copy);
        }
        return tile;
    }

    static KGEN_DEVICE Column load_column(const float* x) {
        const Vec<u32, 4> four = reinterpret_cast<const Vec<u32, 4>*>(x)[mma_lane().q];
        return Column{{four[0], four[1]}, {four[2], four[3]}};
    }

    // Split a row of `columns` (a multiple of 4) numbers where they lie; by a whole warp.
    static KGEN_DEVICE void split_row(float* row, int columns, float scale) {
#pragma unroll 4
        for (int i = 4 * lane_id(); i < columns; i += 4 * kWarpSize) {
            const Vec<float, 4> x = *reinterpret_cast<const Vec<float, 4>*>(row + i);
            Vec<u32, 4> split;
            split_half(x[0] * scale, x[1] * scale, split[0], split[2]);
            split_half(x[2] * scale, x[3] * scale, split[1], split[3]);
            *reinterpret_cast<Vec<u32, 4>*>(row + i) = split;
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&small)[4], const Tile& tile,
                                     const Column& x) {
        mma_16x8x16<fp16>(Pass == 2 ? acc : small, Pass == 0 ? tile.lo : tile.hi,
                          Pass == 1 ? x.lo : x.hi);
    }
};

// For x in T and taps in W, where nothing is too far apart for SplitEngine.
template <class T, class W>
struct EngineOf {
    using type = Tf32Engine<T>;
};
template <>
struct EngineOf<float, float> {
    using type = SplitEngine;
};
template <>
struct EngineOf<fp16, fp16> {
    using type = HalfEngine<fp16>;
};
template <>
struct EngineOf<bf16, bf16> {
    using type = HalfEngine<bf16>;
};

}  // namespace detail
}  // namespace kgen
