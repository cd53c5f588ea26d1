// A warp's tile of the state of a linear recurrence, [key features x value features], in accumulators:
// rows of b and v are added as products of matrices, and it is written as T for products with it.
#pragma once

#include "chunk_mma.cuh"
#include "chunk_rows.cuh"
#include "memory.cuh"

namespace kgen {

// KeyTiles: fragments of 16 key features; ValuePairs: of two tiles of 8 value features; Steps: that are
// added at a time. T has 16 bits and the range of fp32 (bf16).
template <class T, int KeyTiles, int ValuePairs, int Steps>
class StateTile {
    // Sums for chains of products that do not wait for each other, where registers are many.
    static constexpr int kChains = KeyTiles * ValuePairs <= 4 && Steps >= 32 ? 2 : 1;
    static constexpr int kDeep = KeyTiles + ValuePairs <= 6 ? min(Steps / 16, 4) : 1;
    using Half = HalfOperands<T>;

    static_assert(sizeof(T) == 2 && Steps % 16 == 0, "whole fragments of 16 bits");

public:
    // S += B^T V of `Steps` rows. Operands of kDeep fragments of steps are read before the first is
    // multiplied: a warp is often its scheduler's only one, and nobody else's products hide the reads.
    KGEN_DEVICE void add(const T* b, int b_stride, const T* v, int v_stride) {
#pragma unroll
        for (int first = 0; first < Steps / 16; first += kDeep) {
            typename Half::A keys[kDeep][KeyTiles];
            typename Half::B values[kDeep][ValuePairs][2];
#pragma unroll
            for (int step = 0; step < kDeep; ++step) {
                const int row = 16 * (first + step);
#pragma unroll
                for (int n = 0; n < ValuePairs; ++n)
                    Half::two_columns(values[step][n], v + row * v_stride + 16 * n, v_stride);
#pragma unroll
                for (int m = 0; m < KeyTiles; ++m)
                    keys[step][m] = Half::template a_columns<false>(b + row * b_stride + 16 * m,
                                                                    b_stride, 1.0f);
            }
#pragma unroll
            for (int step = 0; step < kDeep; ++step)
#pragma unroll
                for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
                    for (int n = 0; n < 2 * ValuePairs; ++n)
                        Half::template multiply<0>(sums_[step % kChains][m][n], keys[step][m],
                                                   values[step][n / 2][n % 2]);
        }
    }

    // Element i of tile (m, n) of the accumulators: key feature key_of(m, i), value feature
    // value_of(n, i) of the tile.
    KGEN_DEVICE float at(int m, int n, int i) const {
        float sum = sums_[0][m][n][i];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) sum += sums_[chain][m][n][i];
        return sum;
    }
    static KGEN_DEVICE int key_of(int m, int i) { return 16 * m + mma_lane().g + i / 2 * 8; }
    static KGEN_DEVICE int value_of(int n, int i) { return 8 * n + 2 * mma_lane().q + i % 2; }

    // body(m, n, i, key, value) for all elements of the lane.
    template <class Body>
    static KGEN_DEVICE void for_all(Body body) {
#pragma unroll
        for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2 * ValuePairs; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) body(m, n, i, key_of(m, i), value_of(n, i));
    }

    KGEN_DEVICE void set(int m, int n, int i, float x) { sums_[0][m][n][i] = x; }

    // Write value_at(m, n, i) of all elements as T; `inside(key, value)` says whether four values from
    // there on have a place.
    template <class ValueAt, class Inside>
    KGEN_DEVICE void store(T* target, int stride, ValueAt value_at, Inside inside) const {
        Vec<u32, 2> quads[KeyTiles][2][ValuePairs];
#pragma unroll
        for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < ValuePairs; ++n) {
                float tiles[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) tiles[i / 4][i % 4] = value_at(m, 2 * n + i / 4, i % 4);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    quads[m][half][n] = quad_of_row<T>(tiles[0], tiles[1], half);
            }
        const int g = mma_lane().g, column = column_of_quad();
#pragma unroll
        for (int row = 0; row < 16 * KeyTiles; row += 8)
#pragma unroll
            for (int n = 0; n < ValuePairs; ++n)
                if (inside(g + row, column + 16 * n))
                    *reinterpret_cast<Vec<u32, 2>*>(target + (g + row) * stride + column + 16 * n) =
                        quads[row / 16][row / 8 % 2][n];
    }

private:
    float sums_[kChains][KeyTiles][2 * ValuePairs][4] = {};
};

}  // namespace kgen
