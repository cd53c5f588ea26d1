// The inter-chunk part of gv for 16 steps of wkv5 and wkv6: gv_s = sum over keys of f_s G, where G is the gradient of
// the state after the steps and f_s are rows of k times the decays after step s.
//
// Each warp puts its 16 keys of G and f into shared memory; after a block barrier each warp multiplies fragments of 8
// values over all keys.
//
// Shared memory: for 16-bit tensors bf16 gradient[2][Keys][Values + 8], keys[2][16][Keys + 8], two bf16 terms of each
// value; for fp32 float gradient[Keys][Values + 8], and f is read where it lies.
#pragma once

#include "kgen/wkv/state_tile.cuh"

namespace kgen::wkv {

// Whether fragment tile + n * Stride of Tiles exists, for tile < Stride; a constant if all warps have equally many.
template <int Tiles, int Stride>
KGEN_DEVICE bool tile_exists(int tile, int n) {
    return Tiles % Stride == 0 || tile + n * Stride < Tiles;
}

// 16-bit tensors: G and f as two bf16 terms each, in planes that ldmatrix reads; three products of terms.
template <class T, bool Precise, int Keys, int Values>
class InterChunkGv {
    using Products = StateProducts<bf16, Precise>;
    static constexpr int kStride = Values + 8, kPlane = Keys * kStride;
    static constexpr int kKeyStride = Keys + 8, kKeyPlane = kSubSteps * kKeyStride;

public:
    static constexpr int kBytes = 2 * (kPlane + kKeyPlane) * static_cast<int>(sizeof(bf16));

    KGEN_DEVICE InterChunkGv(float* memory, const float*, int)
        : gradient_(reinterpret_cast<bf16*>(memory)), keys_(gradient_ + 2 * kPlane) {}

    // Stores this warp's fragments i and i + 1 of G; `terms` are the terms that the warp's own products use.
    template <class Tiles, class State>
    KGEN_DEVICE void put(const Tiles& gradient, int i, const State& terms, int key0) const {
        bf16* to = gradient_ + key0 * kStride + 8 * i;
        if constexpr (detail::kIsBf16<T>) {
            store(to, kStride, kPlane, terms);
        } else {
            store(to, kStride, kPlane, Products::of_sums(gradient, i));
        }
    }

    // Stores this warp's keys of rows of f.
    KGEN_DEVICE void put_keys(const float* rows, int stride, int key0) const {
        const MmaLane lane = mma_lane();
        typename Products::State a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(
                rows + (lane.g + i % 2 * 8) * stride + key0 + 2 * lane.q + i / 2 * 8);
            Products::split(a, i, two[0], two[1]);
        }
        store(keys_ + key0, kKeyStride, kKeyPlane, a);
    }

    // sums[n]: (step g, values 8 f + {2q, 2q + 1}), then the same of step g + 8, for each existing fragment
    // f = tile + n * Stride. One chain of products suffices: what it truncates is far below a rounding to 16 bits.
    template <int Stride, int Count>
    KGEN_DEVICE void multiply(int tile, float (&sums)[Count][4]) const {
#pragma unroll
        for (int n = 0; n < Count; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
        const int lane = lane_id();
        const bf16* keys = keys_ + lane % 16 * kKeyStride + lane / 16 * 8;
        const bf16* gradient = gradient_ + lane / 16 * kPlane + lane % 16 * kStride + 8 * tile;
#pragma unroll
        for (int key = 0; key < Keys; key += 16) {
            u32 high[4], low[4];
            ldmatrix<4>(high, keys + key);
            ldmatrix<4>(low, keys + kKeyPlane + key);
#pragma unroll
            for (int n = 0; n < Count; ++n) {
                if (!tile_exists<Values / 8, Stride>(tile, n)) continue;
                u32 both[4];
                ldmatrix<4, true>(both, gradient + key * kStride + 8 * n * Stride);
                const u32 b_high[2] = {both[0], both[1]}, b_low[2] = {both[2], both[3]};
                mma_m16n8k16<bf16>(sums[n], low, b_high);
                mma_m16n8k16<bf16>(sums[n], high, b_low);
                mma_m16n8k16<bf16>(sums[n], high, b_high);
            }
        }
    }

private:
    static KGEN_DEVICE void store(bf16* to, int stride, int plane,
                                  const typename Products::State& a) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<u32*>(to + p * plane + (lane.g + i % 2 * 8) * stride +
                                        2 * lane.q + i / 2 * 8) = a.term[p][i];
    }

    bf16 *gradient_, *keys_;
};

// fp32: 3xTF32, reading f where it lies in shared memory.
template <bool Precise, int Keys, int Values>
class InterChunkGv<float, Precise, Keys, Values> {
    using Operands = Tf32Operands<true>;
    static constexpr int kStride = Values + 8;

public:
    static constexpr int kBytes = Keys * kStride * static_cast<int>(sizeof(float));

    KGEN_DEVICE InterChunkGv(float* memory, const float* rows, int stride)
        : gradient_(memory), rows_(rows), stride_(stride) {}

    template <class Tiles, class State>
    KGEN_DEVICE void put(const Tiles& gradient, int i, const State&, int key0) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = i; tile < i + 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<Vec<float, 2>*>(gradient_ +
                                                  (key0 + lane.g + 8 * half) * kStride + 8 * tile +
                                                  2 * lane.q) = {
                    {gradient[tile][2 * half], gradient[tile][2 * half + 1]}};
    }

    KGEN_DEVICE void put_keys(const float*, int, int) const {}  // read in place

    template <int Stride, int Count>
    KGEN_DEVICE void multiply(int tile, float (&sums)[Count][4]) const {
#pragma unroll
        for (int n = 0; n < Count; ++n)
            if (tile_exists<Values / 8, Stride>(tile, n)) multiply_tile(tile + n * Stride, sums[n]);
    }

private:
    KGEN_DEVICE void multiply_tile(int tile, float (&sums)[4]) const {
        constexpr int kDeep = 4;  // fragments of a chain
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] = 0.0f;
#pragma unroll
        for (int first = 0; first < Keys / 8; first += kDeep) {
            float chain[4] = {};
#pragma unroll
            for (int i = first; i < min(first + kDeep, Keys / 8); ++i) {
                Operands::A a;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    Operands::put(
                        a, j,
                        rows_[(lane.g + j % 2 * 8) * stride_ + 8 * i + lane.q + j / 2 * 4]);
                const Operands::B b =
                    Operands::b_columns(gradient_ + 8 * i * kStride + 8 * tile, kStride);
                Operands::multiply<0>(chain, a, b);
                Operands::multiply<1>(chain, a, b);
                Operands::multiply<2>(chain, a, b);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] += chain[j];
        }
    }

    float* gradient_;
    const float* rows_;
    int stride_;
};

}  // namespace kgen::wkv
