// The walk inside a chunk of the chunked backward pass of wkv5 and wkv6: the state and its gradient
// move on by 16 steps at a time, in registers.
//
//     1. forward    z_j = S g_j of 16 steps, S before them; then S behind them
//     2. backward   y_s = G v_s of 16 steps, G behind them; S . G; gv_s = G^T k_s; G before them
//
// A warp has 16 keys and all values of the states. Only gv is a sum over warps: there G goes
// through shared memory.
#pragma once

#include "wkv_chunk_memory.cuh"

namespace kgen::wkv {

template <class C>
class ChunkWalk {
    using Memory = ChunkMemory<C>;
    using T = typename C::T;
    using W = typename C::W;
    using Carried = typename Memory::Carried;
    using Parts = typename StateProducts<T, C::kPrecise>::State;
    static constexpr int kSubs = Memory::kSubs, kKeys = C::kKeys, kWarps = C::kWarps;
    static constexpr int kRowStride = Memory::kRowStride, kKeyStride = Memory::kKeyStride;
    static constexpr int kStride = Memory::kStride, kSub = Memory::kSub;
    static constexpr int kWideStride = Memory::kWideStride, kWideSub = Memory::kWideSub;
    static constexpr int kOwnTiles = ceil_div(C::kTiles, kWarps);  // of gv

public:
    using Tile = KeyTile<T, C::kPrecise, C::kTiles>;

    const Memory& at;
    float scale;

    // Rows of r from the first of 16 steps on and of k up to the last, with their decays; a lane
    // has one of its warp's keys and 16 steps. w: of the head, if it has no steps.
    KGEN_DEVICE void take_decays(const ChunkPlace& place, const W* w) const {
        const T *of_r = at.raw_r(), *of_k = at.raw_k();
        const W* of_w = at.raw_w();
        const int key = at.key0 + lane_id() % 16;
        const bool used = kKeys == C::kK || key < C::kK;
        float fixed = 1.0f;
        if constexpr (!C::kPerStep)
            if (used) fixed = decay_of<C::kForm>(to_float(w[key]));
#pragma unroll 1
        for (int sub = lane_id() / 16; sub < kSubs; sub += 2) {
            float r[kSubSteps], k[kSubSteps], d[kSubSteps];
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                const int step = sub * kSubSteps + i;
                r[i] = used ? to_float(of_r[step * kKeyStride + key]) : 0.0f;
                k[i] = used ? to_float(of_k[step * kKeyStride + key]) : 0.0f;
                if constexpr (C::kPerStep) {
                    d[i] = used ? C::decay_of_step(of_w[step * kKeys + key], step < place.left)
                                : 1.0f;
                } else {
                    d[i] = step < place.left ? fixed : 1.0f;
                }
            }
            LongProduct before(scale), behind(1.0f);
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                at.decays[sub * kSub + i * kStride + key] = d[i];
                at.of_r[sub * kSub + i * kStride + key] = before.times(r[i]);
                before.multiply(d[i]);
            }
#pragma unroll
            for (int i = kSubSteps - 1; i >= 0; --i) {
                at.of_k[sub * kWideSub + i * kWideStride + key] = behind.times(k[i]);
                behind.multiply(d[i]);
            }
            at.all[sub * kKeys + key] = behind.value();
        }
    }

    // states: the first is there. state, gradient: see ChunkGradients.
    KGEN_DEVICE void walk(Tile (&states)[kSubs], const float* state, float* gradient) const {
        const MmaLane lane = mma_lane();
        // 1. Forward: z_j where it is read, and the states before each 16 steps but the first. G is
        // on its way where the first state has left its registers.
        Tile back;
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            float out[2][4];
            states[sub].read(at.rows_of(at.g, sub), kRowStride, out, [](int, const Parts&) {});
            put_steps(at.read + sub * kSub, out, scale);
            if (sub == 1) back.load_fragments(gradient);
            if (sub + 1 < kSubs)
                states[sub + 1].advance(states[sub], at.all + sub * kKeys + at.key0,
                                        at.of_k + sub * kWideSub + at.key0, kWideStride,
                                        at.rows_of(at.v, sub), kRowStride);
        }

        // 2. Backward: y_s takes the place of what r's rows were needed for.
#pragma unroll
        for (int sub = kSubs - 1; sub >= 0; --sub) {
            float* rows_of_k = at.of_k + sub * kWideSub;
            const Carried carried(at.gradient, rows_of_k, kWideStride);
            carried.put_keys(rows_of_k, kWideStride, at.key0);
            float inner[2], out[2][4];
            // Again, where other states have left their registers.
            if (sub == kSubs / 2 - 1) states[0].load_fragments(state);
            states[sub].inner(back, inner);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = sub * kKeys + at.key0 + lane.g + 8 * half;
                if (lane.q == 0) at.inner[key] = inner[half];
            }
            back.read(at.rows_of(at.v, sub), kRowStride, out,
                      [&](int i, const Parts& parts) { carried.put(back.at, i, parts, at.key0); });
            if (C::kCarry || sub > 0)
                back.advance(back, at.all + sub * kKeys + at.key0, at.of_r + sub * kSub + at.key0,
                             kStride, at.rows_of(at.g, sub), kRowStride);
            if (C::kCarry && sub == 0) back.store_fragments(gradient, C::kTiles);
            sync_warp();
            put_steps(at.of_r + sub * kSub, out, 1.0f);
            sync_block();

            // gv of the carried gradient, over all warps' keys.
            float values[kOwnTiles][4];
            carried.template multiply<kWarps>(thread_rank() / kWarpSize, values);
            sync_block();
#pragma unroll
            for (int i = 0; i < kOwnTiles; ++i) {
                if (!tile_exists<C::kTiles, kWarps>(thread_rank() / kWarpSize, i)) continue;
                const int tile = thread_rank() / kWarpSize + i * kWarps;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<Vec<float, 2>*>(
                        rows_of_k + (lane.g + 8 * half) * kWideStride + 8 * tile +
                        2 * lane.q) = {{values[i][2 * half], values[i][2 * half + 1]}};
            }
        }
    }

private:
    // Accumulators (keys g and g + 8, steps 8 n + {2q, 2q + 1}) to rows of keys.
    KGEN_DEVICE void put_steps(float* rows, const float (&sums)[2][4], float factor) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                rows[(8 * n + 2 * lane.q + j % 2) * kStride + at.key0 + lane.g + j / 2 * 8] =
                    sums[n][j] * factor;
    }
};

}  // namespace kgen::wkv
