// The outputs of a consumer warp of specialized_loop.cuh: its 16 value features, one chunk of 16 steps after another.
//
//     ColumnOutput    `second` (y or gv), bf16
//     SumsOutput      `first` (sa or gsa), fp32, and the state at the outset of each chunk
//
// Layout: sums and states are transposed accumulators, whose rows are value features. Eight lanes store 32 bytes of a
// row, fp32, or four lanes 32 bytes, bf16.
//
// Synchronisation: none.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_tensors.cuh"

namespace kgen::wkv7 {

// Elements: that a store may have. `begin`: the step at which the first chunk of the loop begins.
template <int Elements, Direction D>
class ColumnOutput {
    static constexpr bool kQuads = Elements % 4 == 0, kBack = D == Direction::backward;

public:
    template <class Tensors>
    KGEN_DEVICE ColumnOutput(const Tensors& to, int column, i64 begin)
        : column_(column + (kQuads ? column_of_quad() : 2 * mma_lane().q)),
          width_(to.width),
          next_(to.second.at(begin + mma_lane().g) + column_),
          eighth_(8 * to.second.stride_t),
          left_(to.steps - begin - mma_lane().g),
          factor_(to.second_factor) {}

    KGEN_DEVICE void write(float (&sums)[2][4], float& nonfinite) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sums[i / 4][i % 4] *= factor_;
            nonfinite = fma(sums[i / 4][i % 4], 0.0f, nonfinite);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 pair[2];  // of step g + 8 * half, value features 2q + 8 n
#pragma unroll
            for (int n = 0; n < 2; ++n)
                pair[n] = transpose_matrix(pack2<bf16>(sums[half][2 * n], sums[half][2 * n + 1]));
            bf16* row = next_ + half * eighth_;
            const bool there = left_ > 8 * half;
            if constexpr (kQuads) {
                const Vec<u32, 2> quad = quad_of_pairs(pair[0], pair[1]);
                if (there && column_ < width_) *reinterpret_cast<Vec<u32, 2>*>(row) = quad;
            } else {
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    if (there) store_pair(row + 8 * n, 8 * n, pair[n]);
            }
        }
        next_ += (kBack ? -2 : 2) * eighth_;
        left_ += kBack ? 16 : -16;
    }

private:
    KGEN_DEVICE void store_pair(bf16* target, int columns, u32 pair) const {
        if constexpr (Elements == 2) {
            if (column_ + columns < width_) *reinterpret_cast<u32*>(target) = pair;
        } else {
            const Vec<bf16, 2> two = bit_cast<Vec<bf16, 2>>(pair);
#pragma unroll
            for (int x = 0; x < 2; ++x)
                if (column_ + columns + x < width_) target[x] = two[x];
        }
    }

    int column_, width_;
    bf16* next_;
    i64 eighth_, left_;
    float factor_;
};

// Keys: of a state.
template <int Keys, Direction D>
class SumsOutput {
    static constexpr bool kBack = D == Direction::backward;

public:
    template <class Tensors>
    KGEN_DEVICE SumsOutput(const Tensors& to, int column, i64 begin)
        : next_(to.first.at(begin + 2 * mma_lane().q) + column + mma_lane().g),
          step_(to.first.stride_t),
          left_(to.steps - begin - 2 * mma_lane().q),
          pitch_(to.pitch),
          state_(to.checkpoints + begin / 16 * (Keys * to.pitch) + 2 * mma_lane().q * to.pitch +
                 column + mma_lane().g) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            there_[half] = column + mma_lane().g + 8 * half < to.width;
    }

    // The state at the outset of the next chunk.
    template <int Tiles>
    KGEN_DEVICE void write_state(const float (&state)[Tiles][4]) {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + i % 2;
                const bool is_key = 8 * tile + 8 <= Keys || key + 2 * mma_lane().q < Keys;
                if (is_key && there_[i / 2]) state_[key * pitch_ + i / 2 * 8] = state[tile][i];
            }
        state_ += (kBack ? -1 : 1) * Keys * pitch_;
    }

    // The sums over keys of the next chunk.
    KGEN_DEVICE void write(const float (&sums)[2][4], float& nonfinite) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = sums[i / 4][i % 4];
            const int t = i / 4 * 8 + i % 2, half = i % 4 / 2;
            nonfinite = fma(value, 0.0f, nonfinite);
            if (left_ > t && there_[half]) next_[t * step_ + 8 * half] = value;
        }
        next_ += (kBack ? -16 : 16) * step_;
        left_ += kBack ? 16 : -16;
    }

private:
    float* next_;
    i64 step_, left_, pitch_;
    float* state_;
    bool there_[2];
};

}  // namespace kgen::wkv7
