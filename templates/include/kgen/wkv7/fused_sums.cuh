// gw of a chunk of 32 steps of wkv7 by running sums from both of its ends, for fused_loop.cuh; by one warpgroup.
//
// With E_t = sum_v S_{t-1} * G_t, per key, where G_t is the gradient of the state before step t but for its decay:
//
//     E_0  = sum_v S * G before the chunk, E_32 the same behind it
//     gw_t = E_t - A_t gA_t                                 E_{t+1} = gw_t + x_t - R_t gR_t
//     gw_t = E_{t+1} - (x_t - R_t gR_t)                     x_t = K_t gK_t + B_t gB_t
//
// gw_t is taken from the side where the sum of the magnitudes added is smaller, as in quotient_rows.cuh. E at an end is
// that of the neighbouring chunk: there the sum over value features is exactly 0 where nothing precedes or follows.
//
// Layout: a warp has eight steps, a lane keys 2 l and 2 l + 1.
//
// Shared memory, barriers: fused_tiles.cuh.
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/fused_tensors.cuh"
#include "kgen/wkv7/fused_tiles.cuh"

namespace kgen::wkv7 {

template <class Tensors>
class FusedSums {
    using Tiles = FusedTiles;
    using W = typename Tensors::W;
    using Two = Vec<float, 2>;
    static constexpr int kSteps = 8;

public:
    KGEN_DEVICE FusedSums(const Tiles& tiles, int warp, const Tensors& x)
        : tiles_(tiles), warp_(warp), x_(x), end_{{0.0f, 0.0f}} {}

    // E behind the last chunk, of `left` steps from step `begin` on, whose state is chunk number `number`'s: from the
    // gradient of the final state.
    KGEN_DEVICE void begin(i64 number, i64 begin, int left) {
        const int thread = kWarpSize * warp_ + lane_id(), key = thread % 64, half = thread / 64;
        float sum = 0.0f;
        if (key < Tensors::kK) {
#pragma unroll 1
            for (int first = 32 * half; first < 32 * half + 32 && first < Tensors::kV; first += 8) {
                float s[8];
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    s[i] = first + i < Tensors::kV ? x_.state_at(number, key, first + i) : 0.0f;
#pragma unroll 1
                for (i64 t = begin; t < begin + left; ++t) {
                    const float d = x_.decay(t, key), b = Tensors::at(x_.b, t, key), k = Tensors::at(x_.k, t, key);
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (first + i < Tensors::kV)
                            s[i] = fma(d, s[i], fma(b, Tensors::at(x_.sa, t, first + i),
                                                    k * Tensors::at(x_.v, t, first + i)));
                }
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (first + i < Tensors::kV) sum = fma(s[i], x_.gfinal[key * Tensors::kV + first + i], sum);
            }
        }
        tiles_.sums()[thread] = sum;
        named_barrier_sync(kFusedEarly, 128);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            end_[i] = tiles_.sums()[2 * lane_id() + i] + tiles_.sums()[64 + 2 * lane_id() + i];
        named_barrier_sync(kFusedEarly, 128);
    }

    // The lane's w of a chunk of `left` steps from step `begin` on.
    KGEN_DEVICE void load(float (&w)[kSteps][2], i64 begin, int left) const {
        const int key = 2 * opaque(lane_id()), first = kSteps * opaque(warp_);
        const W* from = x_.w.first + (begin + first) * x_.w.stride + key;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            w[s][0] = w[s][1] = 0.0f;
            if (first + s < left) load(w[s], from, key);
            from += x_.w.stride;
        }
    }

    // gw of the chunk.
    KGEN_DEVICE void put(int chunk, const float (&w)[kSteps][2], i64 begin, int left, float& nonfinite) {
        const int warp = opaque(warp_);
        const int lane = opaque(lane_id()), key = 2 * lane, first = kSteps * warp;
        Two late[kSteps], read[kSteps], magnitudes[kSteps];  // x - R gR, A gA, magnitudes added
        Two sum = {}, size = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int place = Tiles::float_place(first + s, key);
            const Two x = at(tiles_.of_early() + place), of_r = at(tiles_.of_r() + place);
            read[s] = at(tiles_.of_a() + place);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                late[s][i] = x[i] - of_r[i];
                magnitudes[s][i] = abs(x[i]) + abs(of_r[i]) + abs(read[s][i]);
                sum[i] += late[s][i] - read[s][i];
                size[i] += magnitudes[s][i];
            }
        }
        *reinterpret_cast<Vec<float, 4>*>(tiles_.sums() + 128 * warp + 4 * lane) = {
            {sum[0], sum[1], size[0], size[1]}};
        Two before = {};
#pragma unroll
        for (int other = 0; other < 4; ++other) {
            const Two part = at(tiles_.ends(chunk) + 64 * other + key);
#pragma unroll
            for (int i = 0; i < 2; ++i) before[i] += part[i];
        }
        named_barrier_arrive<256>(kFusedSummed);
        named_barrier_sync(kFusedEarly, 128);

        // E before and behind the warp's steps; the magnitudes before them, and half of all of both sides.
        Two until = end_, sizes, limit;
        end_ = before;  // of the chunk before
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sizes[i] = abs(before[i]);
            limit[i] = sizes[i] + abs(until[i]);
        }
        Vec<float, 4> others[4];
#pragma unroll
        for (int other = 0; other < 4; ++other)
            others[other] = *reinterpret_cast<const Vec<float, 4>*>(tiles_.sums() + 128 * other + 4 * lane);
#pragma unroll
        for (int other = 3; other >= 0; --other)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                limit[i] += others[other][2 + i];
                if (other > warp) until[i] -= others[other][i];
            }
#pragma unroll
        for (int other = 0; other < 4; ++other)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (other < warp) {
                    before[i] += others[other][i];
                    sizes[i] += others[other][2 + i];
                }
        limit = {{0.5f * limit[0], 0.5f * limit[1]}};
        W* gw = x_.gw.at(begin + first) + key;
        Two from_end[kSteps];
#pragma unroll
        for (int s = kSteps - 1; s >= 0; --s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                from_end[s][i] = until[i] - late[s][i];
                until[i] = until[i] - (late[s][i] - read[s][i]);
            }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            float found[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float forth = before[i] - read[s][i];
                const bool is_late = sizes[i] + abs(read[s][i]) > limit[i];
                found[i] = is_late ? from_end[s][i] : forth;
                nonfinite = fma(found[i], 0.0f, nonfinite);
                before[i] += late[s][i] - read[s][i];
                sizes[i] += magnitudes[s][i];
                found[i] *= slope(w[s][i]);
            }
            if (first + s < left) store(gw, key, found);
            gw += x_.gw.stride_t;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) nonfinite = fma(sizes[i], 0.0f, nonfinite);
    }

private:
    static KGEN_DEVICE Two at(const float* from) { return *reinterpret_cast<const Two*>(from); }

    static KGEN_DEVICE void load(float (&to)[2], const W* from, int key) {
        if constexpr (Tensors::kVec % 2 == 0) {
            if (Tensors::is_key(key)) to_floats(load_vec<2>(from), to);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (Tensors::is_key(key + i)) to[i] = to_float(from[i]);
        }
    }
    // 1 - sigmoid is a product, which does not cancel, and finite where e^-w would overflow.
    static KGEN_DEVICE float slope(float w) {
        const float e = fast_exp2(min(-kLog2e * w, 126.0f)), sigmoid_of = fast_reciprocal(1.0f + e);
        return (-kClamp * sigmoid_of) * (e * sigmoid_of);
    }
    static KGEN_DEVICE void store(W* to, int key, const float (&two)[2]) {
        if constexpr (Tensors::kVec % 2 == 0) {
            if (Tensors::is_key(key)) *reinterpret_cast<u32*>(to) = pack2<W>(two[0], two[1]);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (Tensors::is_key(key + i)) to[i] = from_float<W>(two[i]);
        }
    }

    Tiles tiles_;
    int warp_;
    const Tensors& x_;
    Two end_;
};

}  // namespace kgen::wkv7
