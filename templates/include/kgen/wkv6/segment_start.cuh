// The state of wkv5 and wkv6 before a segment of T, or its gradient after one, computed from what other segments add
// (segment_states.cuh):
//
//     forward     S = diag(P) S + L    over the earlier segments, from the first one on
//     backward    G = diag(P) G + L    over the later segments, from the last one on
//
// Each warp has 16 keys and all value features in its accumulators (StateTile), and issues all loads of a segment at
// once.
//
// NaN and Inf: P underflows to 0 after many steps, and 0 * Inf is NaN, while Inf times the decays step by step stays
// Inf. A lane that finds NaN or Inf computes its part from the steps of the other segments, one by one.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/primitives/mma.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv6 {

// Config: W; kForm: of the decays; kPerStep: whether w has a row per step; kK, kV: features of a head.
template <class Config, bool Backward>
struct SegmentStart {
    using W = typename Config::W;

    const float *sums, *decays;     // of the other segments, in the order of time: [K, V] and [K] each
    int segments;                   // number of other segments
    const float* final;             // [K, V], the gradient after the last segment; or null: zeros
    StepPointer<bf16> keys, values;  // from the other segments' first step on: k and v, or r and gy
    StepPointer<W> w;               // one row if w has no steps
    i64 steps;                      // of the other segments
    float scale;                    // for the gradient

    // Computes the tile of 16 keys from `key0` on. Returns whether the lane's part is finite.
    template <class Tile>
    KGEN_DEVICE bool operator()(Tile& tile, int key0) const {
        begin(tile, key0);
        const int key = key0 + mma_lane().g;
#pragma unroll 1
        for (int i = 0; i < segments; ++i) {
            const int segment = Backward ? segments - 1 - i : i;
            const float* sum = sums + (segment * Config::kK + key) * Config::kV;
            float decay[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool there = key + 8 * half < Config::kK;
                decay[half] = there ? decays[segment * Config::kK + key + 8 * half] : 0.0f;
            }
            each(tile, key, [&](float& element, int half, int value, bool there) {
                element = fma(element, decay[half], there ? sum[8 * half * Config::kV + value] : 0.0f);
            });
        }
        float nonfinite = 0.0f;
        each(tile, key, [&](float& element, int, int, bool) { nonfinite = fma(element, 0.0f, nonfinite); });
        if (wkv::is_finite(nonfinite)) return true;
        begin(tile, key0);
        step_by_step(tile, key);
        return false;
    }

private:
    template <class Tile>
    KGEN_DEVICE void begin(Tile& tile, int key0) const {
        tile.clear();
        if (final != nullptr)
            tile.load_rows(final + key0 * Config::kV, Config::kV, Config::kK - key0, Config::kV);
    }

    template <class Tile>
    KGEN_DEVICE void step_by_step(Tile& tile, int key) const {
#pragma unroll 1
        for (i64 i = 0; i < steps; ++i) {
            const i64 t = Backward ? steps - 1 - i : i;
            const W* of_w = w.first + (Config::kPerStep ? t * w.stride : 0);
            float decay[2], factor[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool there = key + 8 * half < Config::kK;
                decay[half] = there ? decay_of<Config::kForm>(to_float(of_w[key + 8 * half])) : 0.0f;
                factor[half] = there ? to_float(keys.first[t * keys.stride + key + 8 * half]) : 0.0f;
            }
            const bf16* row = values.first + t * values.stride;
            each(tile, key, [&](float& element, int half, int value, bool there) {
                const float x = there ? to_float(row[value]) : 0.0f;
                element = fma(element, decay[half], factor[half] * (Backward ? scale * x : x));
            });
        }
    }

    // Calls visit(element, half, value feature, whether the element exists) for each element. key: the key of half 0.
    template <class Tile, class Visit>
    static KGEN_DEVICE void each(Tile& tile, int key, const Visit& visit) {
        constexpr int kTiles = sizeof(tile.at) / sizeof(tile.at[0]);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int value = 8 * i + 2 * mma_lane().q + j % 2;
                const bool there = (Config::kK % 16 == 0 || key + j / 2 * 8 < Config::kK) &&
                                   (Config::kV % 16 == 0 || value < Config::kV);
                visit(tile.at[i][j], j / 2, value, there);
            }
    }
};

}  // namespace kgen::wkv6
