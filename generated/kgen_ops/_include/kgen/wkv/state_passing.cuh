// State passing within a chunk, in wkv5's and wkv6's backward pass: the state and its gradient advance by 16 steps at a
// time, in registers.
//
//     1. forward     state_g = S g_j of 16 steps, S the state before them; then S after them
//     2. backward    G v_s of 16 steps, G after them; S . G; gv_s = G^T f_s; then G before them
//
// Layout: each warp has 16 keys and all values of both. Only gv is a sum over warps: for gv, G goes through shared
// memory (inter_chunk_gv.cuh). Shared memory: chunk_memory.cuh.
//
// Synchronisation: a warp reads and writes its own keys; for gv two block barriers per 16 steps.
#pragma once

#include "kgen/wkv/chunk_memory.cuh"

namespace kgen::wkv {

template <class C>
class StatePassing {
    using Memory = ChunkMemory<C>;
    using Index = typename Memory::Index;
    using T = typename C::T;
    using W = typename C::W;
    using Inter = typename Memory::Inter;
    using Terms = typename StateProducts<T, C::kPrecise>::State;
    static constexpr int kSubs = Memory::kSubs, kKeys = C::kKeys, kWarps = C::kWarps;
    static constexpr int kRowStride = Memory::kRowStride, kKeyStride = Memory::kKeyStride;
    static constexpr int kStride = Memory::kStride, kSub = Memory::kSub;
    static constexpr int kWideStride = Memory::kWideStride, kWideSub = Memory::kWideSub;
    static constexpr int kOwnTiles = ceil_div(C::kTiles, kWarps);  // of gv

public:
    using Tile = StateTile<T, C::kPrecise, C::kTiles>;

    const Memory& at;
    float scale;

    // Stores rows of r times the decays since the first of 16 steps, and rows of k times the decays up to the last. A
    // lane has one of its warp's keys and 16 steps. w: the head's row, if w has no steps.
    KGEN_DEVICE void apply_decays(const Index& index, const W* w) const {
        const T *rows_r = at.chunk_r(), *rows_k = at.chunk_k();
        const W* rows_w = at.chunk_w();
        const int key = at.key0 + lane_id() % 16;
        const bool used = kKeys == C::kK || key < C::kK;
        float constant = 1.0f;
        if constexpr (!C::kPerStep)
            if (used) constant = decay_of<C::kForm>(to_float(w[key]));
#pragma unroll 1
        for (int sub = lane_id() / 16; sub < kSubs; sub += 2) {
            float r[kSubSteps], k[kSubSteps], d[kSubSteps];
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                const int step = sub * kSubSteps + i;
                r[i] = used ? to_float(rows_r[step * kKeyStride + key]) : 0.0f;
                k[i] = used ? to_float(rows_k[step * kKeyStride + key]) : 0.0f;
                if constexpr (C::kPerStep) {
                    d[i] = used ? C::decay_of_step(rows_w[step * kKeys + key], step < index.left)
                                : 1.0f;
                } else {
                    d[i] = step < index.left ? constant : 1.0f;
                }
            }
            CompensatedProduct before(scale), behind(1.0f);
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                at.decays[sub * kSub + i * kStride + key] = d[i];
                at.decayed_r[sub * kSub + i * kStride + key] = before.times(r[i]);
                before.multiply(d[i]);
            }
#pragma unroll
            for (int i = kSubSteps - 1; i >= 0; --i) {
                at.decayed_k[sub * kWideSub + i * kWideStride + key] = behind.times(k[i]);
                behind.multiply(d[i]);
            }
            at.decay_product[sub * kKeys + key] = behind.value();
        }
    }

    // states[0] is already loaded. state: this warp's tile of the state before the chunk, in the workspace. gradient:
    // the tile of the gradient of the state after the chunk; if C::kSequential, it is overwritten by the gradient
    // before the chunk.
    KGEN_DEVICE void run(Tile (&states)[kSubs], const float* state, float* gradient) const {
        const MmaLane lane = mma_lane();
        // 1. Forward: S g, and the states before each 16 steps but the first. G is loaded once the first state is no
        // longer needed in registers.
        Tile back;
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            float out[2][4];
            states[sub].multiply(at.rows_of(at.g, sub), kRowStride, out, [](int, const Terms&) {});
            store_rows_of_keys(at.state_g + sub * kSub, out, scale);
            if (sub == 1) back.load_fragments(gradient);
            if (sub + 1 < kSubs)
                states[sub + 1].update(states[sub], at.decay_product + sub * kKeys + at.key0,
                                        at.decayed_k + sub * kWideSub + at.key0, kWideStride,
                                        at.rows_of(at.v, sub), kRowStride);
        }

        // 2. Backward: G v replaces decayed r.
#pragma unroll
        for (int sub = kSubs - 1; sub >= 0; --sub) {
            float* decayed_k = at.decayed_k + sub * kWideSub;
            const Inter inter_gv(at.gradient, decayed_k, kWideStride);
            inter_gv.put_keys(decayed_k, kWideStride, at.key0);
            float products[2], out[2][4];
            // Load the first state again: by now the later states have left their registers.
            if (sub == kSubs / 2 - 1) states[0].load_fragments(state);
            states[sub].dot(back, products);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = sub * kKeys + at.key0 + lane.g + 8 * half;
                if (lane.q == 0) at.state_dot[key] = products[half];
            }
            back.multiply(at.rows_of(at.v, sub), kRowStride, out,
                      [&](int i, const Terms& terms) { inter_gv.put(back.at, i, terms, at.key0); });
            if (C::kSequential || sub > 0)
                back.update(back, at.decay_product + sub * kKeys + at.key0,
                            at.decayed_r + sub * kSub + at.key0, kStride,
                            at.rows_of(at.g, sub), kRowStride);
            if (C::kSequential && sub == 0) back.store_fragments(gradient, C::kTiles);
            sync_warp();
            store_rows_of_keys(at.decayed_r + sub * kSub, out, 1.0f);
            sync_block();

            // The inter-chunk part of gv, over all warps' keys.
            float values[kOwnTiles][4];
            inter_gv.template multiply<kWarps>(thread_rank() / kWarpSize, values);
            sync_block();
#pragma unroll
            for (int i = 0; i < kOwnTiles; ++i) {
                if (!tile_exists<C::kTiles, kWarps>(thread_rank() / kWarpSize, i)) continue;
                const int tile = thread_rank() / kWarpSize + i * kWarps;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<Vec<float, 2>*>(
                        decayed_k + (lane.g + 8 * half) * kWideStride + 8 * tile +
                        2 * lane.q) = {{values[i][2 * half], values[i][2 * half + 1]}};
            }
        }
    }

private:
    // Stores accumulators (keys g and g + 8, steps 8 n + {2q, 2q + 1}) as rows of keys.
    KGEN_DEVICE void store_rows_of_keys(float* rows, const float (&sums)[2][4],
                                        float factor) const {
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
