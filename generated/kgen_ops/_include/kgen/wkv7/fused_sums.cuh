// gw of a chunk of 32 steps of wkv7, by running sums from both ends of the chunk, for fused_loop.cuh. The warpgroup of
// late rows computes keys 0 to 31, the warpgroup of early rows keys 32 to 63.
//
// Per key, with E_t = sum_v S * G, where S is the state before step t and G its gradient, and gw_t still without its
// factor d log(d_t) / dw_t:
//
//     E_0 is E before the chunk, E_32 is E after the chunk
//     gw_t = E_t - A_t gA_t                                 E_{t+1} = gw_t + x_t - R_t gR_t
//     gw_t = E_{t+1} - (x_t - R_t gR_t)                     x_t = K_t gK_t + B_t gB_t
//
// gw_t is taken from the end for which the sum of the magnitudes added is smaller, as in quotient_rows.cuh. E at each
// end of a chunk is summed over value features anew, and shared with the neighbouring chunk: it is exactly 0 where no
// step precedes or follows.
//
// Layout: each warp has eight steps, each lane two keys of four steps.
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
    static constexpr int kSteps = 4;

public:
    using Logits = u32[kSteps];  // w of the lane's keys, in pairs: unpacking them would wait for the load

    KGEN_DEVICE FusedSums(const Tiles& tiles, int warp, const Tensors& x, bool late)
        : tiles_(tiles), warp_(warp), x_(x), is_late_(late) {}

    // Stores E after the last chunk: 0, or sum_v S * G from the gradient of the final state. The last chunk has `left`
    // steps from step `begin` on; the state before it is states[number]. Each thread computes one key and 16 value
    // features.
    template <bool HasFinal>
    KGEN_DEVICE void begin(i64 number, i64 begin, int left) const {
        const int key = first_key() + lane_id();
        float sum = 0.0f;
        if (HasFinal && x_.gfinal != nullptr && key < Tensors::kK) {
#pragma unroll 1
            for (int first = 16 * warp_; first < 16 * warp_ + 16 && first < Tensors::kV; first += 8) {
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
        tiles_.ends(1)[64 * warp_ + key] = sum;  // where a chunk processed before the first one would store E
    }

    // The lane's w of a chunk of `left` steps from step `begin` on.
    KGEN_DEVICE void load(Logits& w, i64 begin, int left) const {
        const Own own(opaque(warp_), opaque(lane_id()), first_key());
        const W* from = x_.w.first + (begin + own.first) * x_.w.stride + own.key;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            w[s] = own.first + s < left ? load(from, own.key) : 0;
            from += x_.w.stride;
        }
    }

    // Computes and writes gw of the chunk. Both warpgroups call it.
    KGEN_DEVICE void put(int chunk, const Logits& w, i64 begin, int left, float& nonfinite) const {
        const int warp = opaque(warp_), lane = opaque(lane_id());
        const Own own(warp, lane, first_key());
        Two late[kSteps], read[kSteps], magnitudes[kSteps];  // x - R gR, A gA, magnitudes added
        Two sum = {}, size = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int place = Tiles::float_place(own.first + s, own.key);
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
        // The sums of the warp's other four steps.
        const bool second = lane >= 16;
        Two other_sum, other_size;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            other_sum[i] = shfl_xor(sum[i], 16);
            other_size[i] = shfl_xor(size[i], 16);
        }
        float* const sums = own_sums() + 4 * (lane % 16);
        if (!second)
            *reinterpret_cast<Vec<float, 4>*>(sums + 64 * warp) = {
                {sum[0] + other_sum[0], sum[1] + other_sum[1], size[0] + other_size[0], size[1] + other_size[1]}};
        // E before and after the lane's steps, once the sums of the other warps and lanes are applied below; the sum of
        // the magnitudes before the lane's steps; half of the sum of all magnitudes, those of both ends included.
        Two before = end_of(chunk, own.key), until = end_of(chunk + 1, own.key), sizes, limit;
        named_barrier_sync(kFusedSummed, 256);

#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sizes[i] = abs(before[i]);
            limit[i] = sizes[i] + abs(until[i]);
        }
        Vec<float, 4> others[4];
#pragma unroll
        for (int other = 0; other < 4; ++other)
            others[other] = *reinterpret_cast<const Vec<float, 4>*>(sums + 64 * other);
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
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            before[i] += second ? other_sum[i] : 0.0f;
            sizes[i] += second ? other_size[i] : 0.0f;
            until[i] -= second ? 0.0f : other_sum[i];
            limit[i] *= 0.5f;
        }
        Two from_end[kSteps];
#pragma unroll
        for (int s = kSteps - 1; s >= 0; --s)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                from_end[s][i] = until[i] - late[s][i];
                until[i] = until[i] - (late[s][i] - read[s][i]);
            }
        W* gw = x_.gw.at(begin + own.first) + own.key;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const f32x2 logits = unpack2<W>(w[s]);
            float found[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float forth = before[i] - read[s][i];
                const bool is_late = sizes[i] + abs(read[s][i]) > limit[i];
                found[i] = is_late ? from_end[s][i] : forth;
                nonfinite = fma(found[i], 0.0f, nonfinite);
                before[i] += late[s][i] - read[s][i];
                sizes[i] += magnitudes[s][i];
                found[i] *= slope(i == 0 ? logits.x : logits.y);
            }
            if (own.first + s < left) store(gw, own.key, found);
            gw += x_.gw.stride_t;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) nonfinite = fma(sizes[i], 0.0f, nonfinite);
    }

private:
    // A lane's first step and key.
    struct Own {
        int first, key;

        KGEN_DEVICE Own(int warp, int lane, int first_key)
            : first(2 * kSteps * warp + lane / 16 * kSteps), key(first_key + 2 * (lane % 16)) {}
    };
    KGEN_DEVICE bool late() const { return opaque(is_late_) != 0; }
    KGEN_DEVICE int first_key() const { return late() ? 0 : 32; }
    // E before `chunk` in time. end_of(chunk + 1) is the E stored for the chunk processed before, as two places
    // alternate: that is E after `chunk`.
    KGEN_DEVICE Two end_of(int chunk, int key) const {
        Two sum = {};
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            const Two part = at(tiles_.ends(chunk) + 64 * warp + key);
#pragma unroll
            for (int i = 0; i < 2; ++i) sum[i] += part[i];
        }
        return sum;
    }
    KGEN_DEVICE float* own_sums() const { return tiles_.sums() + (late() ? 0 : 4 * 64); }

    static KGEN_DEVICE Two at(const float* from) { return *reinterpret_cast<const Two*>(from); }

    static KGEN_DEVICE u32 load(const W* from, int key) {
        if constexpr (Tensors::kVec % 2 == 0) {
            return Tensors::is_key(key) ? *reinterpret_cast<const u32*>(from) : 0;
        } else {
            Vec<W, 2> two = {};
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (Tensors::is_key(key + i)) two[i] = from[i];
            return bit_cast<u32>(two);
        }
    }
    // 1 - sigmoid(w) is computed as the product e * sigmoid(w), which does not cancel; the bound keeps e finite where
    // e^-w would overflow.
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
    int is_late_;
};

}  // namespace kgen::wkv7
