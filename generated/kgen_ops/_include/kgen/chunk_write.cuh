// Outputs of a chunk from accumulators to rows of features.
#pragma once

#include "chunk_stage.cuh"
#include "memory.cuh"
#include "mma.cuh"

namespace kgen {

// By each warp for itself: tiles of 8 steps x 16 value features, transposed as accumulators are (rows
// are features), `Tiles` of them along the steps and MTiles along the features, chunk after chunk.
//
// What a warp writes at once are runs of 8 features. Of 16 bits it writes pairs, if EvenRows says
// that all rows begin at even elements: neighbouring lanes swap a step, after which the even one has
// two features of the first step and the odd one two of the second.
template <class T, int Chunk, int MTiles, int Tiles, int Slice, bool EvenRows>
class ChunkWriter {
    static constexpr bool kPaired = sizeof(T) == 2 && EvenRows;

public:
    // This warp's first output of a chunk is (step0, value0); the walk begins with step `first`.
    KGEN_DEVICE void begin(StepRows<T> out, i64 first, int step0, int value0) {
        const MmaLane lane = mma_lane();
        const int swap = kPaired ? lane.g % 2 : 0;
        step_ = step0 + 2 * lane.q + swap;
        value_ = value0 + lane.g - swap;
        stride_ = out.stride;
        next_ = out.at(first + step_) + value_;
    }

    // Write the next chunk, of which `left` steps exist, and `values` features of the slice.
    KGEN_DEVICE void write(float (&tiles)[MTiles][Tiles][4], int left, int values) {
        if constexpr (kPaired) pair_up(tiles);
        if (left == Chunk && values == Slice) {
            store<true>(tiles, left, values);
        } else {
            store<false>(tiles, left, values);
        }
        next_ += Chunk * stride_;
    }

private:
    static KGEN_DEVICE void pair_up(float (&tiles)[MTiles][Tiles][4]) {
        const bool odd = mma_lane().g % 2 != 0;
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& early = tiles[m][tile][2 * half];
                    float& late = tiles[m][tile][2 * half + 1];
                    const float got = shfl_xor(odd ? early : late, 4);
                    const float first = odd ? got : early, second = odd ? late : got;
                    early = first;
                    late = second;
                }
    }

    template <bool Whole>
    KGEN_DEVICE void store(const float (&tiles)[MTiles][Tiles][4], int left, int values) const {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            T* target = next_ + 8 * tile * stride_;
            const int step = step_ + 8 * tile;
#pragma unroll
            for (int m = 0; m < MTiles; ++m) {
                const float(&four)[4] = tiles[m][tile];
                const int value = value_ + 16 * m;
                if constexpr (kPaired) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (Whole || (step < left && value + 8 * half < values))
                            *reinterpret_cast<u32*>(target + 16 * m + 8 * half) =
                                pack2<T>(four[2 * half], four[2 * half + 1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (Whole || (step + i % 2 < left && value + i / 2 * 8 < values))
                            target[i % 2 * stride_ + 16 * m + i / 2 * 8] = from_float<T>(four[i]);
                }
            }
        }
    }

    T* next_;
    i64 stride_;
    int step_, value_;
};

}  // namespace kgen
