// The outputs of a consumer warp of specialized_loop.cuh: its 16 value features, chunk after chunk of 16 steps.
//
//     ColumnOutput    `second` (y or gv), bf16
//     SumsOutput      `first` (sa or gsa), fp32, and the state before each chunk in the loop's order: fp32, bf16, or
//                     fp16 with scales (scaled_states.cuh)
//
// Layout: sums and states are transposed accumulators: their rows are value features. 32 bytes of a row are stored by
// eight lanes in fp32, and by four lanes in 16 bits.
//
// Synchronisation: none.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_tensors.cuh"
#include "kgen/wkv7/scaled_states.cuh"

namespace kgen::wkv7 {

// Elements: how many elements one store may have. `begin`: the step at which the first chunk of the loop begins.
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

// Keys: number of keys of a state; State: its dtype in memory. 16-bit states are stored four value features at a time
// where Elements allows it. StateSteps: steps from one stored state to the next.
template <int Keys, int Elements, Direction D, class State, int StateSteps>
class SumsOutput {
    static constexpr bool kBack = D == Direction::backward;
    static constexpr bool kPairs = sizeof(State) == 2, kQuads = kPairs && Elements % 4 == 0;
    static constexpr int kStores = kPairs && !kQuads ? 4 : 1;  // of a lane, per eight keys of a 16-bit state

public:
    template <class Tensors>
    KGEN_DEVICE SumsOutput(const Tensors& to, int column, i64 begin)
        : next_(to.first.at(begin + 2 * mma_lane().q) + column + mma_lane().g),
          step_(to.first.stride_t),
          left_(to.steps - begin - 2 * mma_lane().q),
          pitch_(to.pitch),
          state_(to.checkpoints + begin / StateSteps * (Keys * to.pitch) + own_key() * to.pitch + column +
                 own_column()) {
        if constexpr (kScaled<State>) scales_ = to.scales + begin / StateSteps * to.pitch + column + mma_lane().g;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            there_[half] = column + mma_lane().g + 8 * half < to.width;
#pragma unroll
        for (int x = 0; x < kStores; ++x)
            stores_[x] = column + own_column() + x / 2 * 8 + x % 2 < to.width;
    }

    // Stores the state before the next chunk that has a checkpoint.
    template <int Tiles>
    KGEN_DEVICE void write_state(const float (&state)[Tiles][4]) {
        float factors[2];  // of value features g and g + 8
        if constexpr (kScaled<State>) put_scales(state, factors);
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            if constexpr (kScaled<State>) {
                const float scaled[4] = {state[tile][0] * factors[0], state[tile][1] * factors[0],
                                         state[tile][2] * factors[1], state[tile][3] * factors[1]};
                write_rounded(scaled, tile);
            } else if constexpr (kPairs) {
                write_rounded(state[tile], tile);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = 8 * tile + i % 2;
                    if (is_key(tile, i % 2) && there_[i / 2])
                        state_[key * pitch_ + i / 2 * 8] = state[tile][i];
                }
            }
        }
        state_ += (kBack ? -1 : 1) * Keys * pitch_;
        if constexpr (kScaled<State>) scales_ += (kBack ? -1 : 1) * pitch_;
    }

    // Stores the sums over keys of the next chunk.
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
    // Computes and stores the scales of the lane's two columns; the four lanes of a group have a part of each column.
    template <int Tiles>
    KGEN_DEVICE void put_scales(const float (&state)[Tiles][4], float (&factors)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * Tiles; ++i)
                largest = fmax(largest, abs(state[i / 2][2 * half + i % 2]));
            largest = lanes_reduce<4, LargerNumber>(largest);
            // untested: NaN is on the same side as Inf
            if (!(largest < infinity())) {  // by all four lanes
                largest = 0.0f;
#pragma unroll
                for (int i = 0; i < 2 * Tiles; ++i)
                    largest = fmax(largest, finite_magnitude(state[i / 2][2 * half + i % 2]));
                largest = lanes_reduce<4, LargerNumber>(largest, 0xfu << lane_id() / 4 * 4);
            }
            const StateScale scale(largest);
            factors[half] = scale.to_memory;
            if (mma_lane().q == 0 && there_[half]) scales_[8 * half] = scale.from_memory;
        }
    }

    // The lane's first key of a tile, and its first value feature; of a 16-bit state, after the exchanges of
    // write_rounded.
    static KGEN_DEVICE int own_key() { return kPairs ? mma_lane().g : 2 * mma_lane().q; }
    static KGEN_DEVICE int own_column() {
        return kQuads ? column_of_quad() : kPairs ? 2 * mma_lane().q : mma_lane().g;
    }
    static KGEN_DEVICE bool is_key(int tile, int key) {
        return 8 * tile + 8 <= Keys || 8 * tile + own_key() + key < Keys;
    }

    // Stores eight keys, rounded to nearest and transposed: rows become keys.
    KGEN_DEVICE void write_rounded(const float (&tile)[4], int number) const {
        u32 pair[2];  // of key g, value features 2q + 8 n
#pragma unroll
        for (int n = 0; n < 2; ++n)
            pair[n] = transpose_matrix(pack2<State>(tile[2 * n], tile[2 * n + 1]));
        State* to = state_ + 8 * number * pitch_;
        if constexpr (kQuads) {
            const Vec<u32, 2> quad = quad_of_pairs(pair[0], pair[1]);
            if (is_key(number, 0) && stores_[0]) *reinterpret_cast<Vec<u32, 2>*>(to) = quad;
        } else {
#pragma unroll
            for (int x = 0; x < 4; ++x)
                if (is_key(number, 0) && stores_[x])
                    to[x / 2 * 8 + x % 2] = bit_cast<Vec<State, 2>>(pair[x / 2])[x % 2];
        }
    }

    float* next_;
    i64 step_, left_, pitch_;
    State* state_;
    float* scales_;
    bool there_[2];
    bool stores_[kStores];
};

}  // namespace kgen::wkv7
