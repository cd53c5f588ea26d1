// Columns of a state [K, V] in the registers of one warp, which reads and writes them once, for a few steps of
// decoding.
//
// Layout: kSplit lanes share a column; a lane has kTile columns. The rows of a lane are runs of kRun consecutive keys;
// the runs of lanes that share a column alternate. What an access moves depends on the order in memory:
//
//     order     contiguous    an access              lanes side by side have
//     values    V             kTile columns          the next columns
//     keys      K             kRun keys              the next runs of keys
//
// Columns of the state are independent, so that warps share nothing. There is no shared memory and no barrier: sums
// over keys are sums over the lanes that share a column, by shuffles.
#pragma once

#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"
#include "kgen/wkv/state_pool.cuh"

namespace kgen::wkv {

enum class StateOrder { values, keys };

template <int K, int V, int Split, int Tile, int Run, StateOrder Order>
struct WarpState {
    static_assert(is_power_of_two(Split) && Split <= kWarpSize, "lanes of a warp share a column");
    static_assert(K % Run == 0 && V % Tile == 0, "an access must not reach beyond a row or column");

    static constexpr bool kValues = Order == StateOrder::values;
    static constexpr int kGroups = kWarpSize / Split;   // groups of columns
    static constexpr int kColumns = kGroups * Tile;     // columns of a warp
    static constexpr int kRuns = ceil_div(K, Split * Run);
    static constexpr int kTile = Tile, kRun = Run;

    int first_column;  // of the warp
    float at[kRuns][Run][Tile];

    // For this lane: which group of columns it has, which part of their rows, and a run's first row.
    static KGEN_DEVICE int group() { return kValues ? lane_id() % kGroups : lane_id() / Split; }
    static KGEN_DEVICE int part() { return kValues ? lane_id() / kGroups : lane_id() % Split; }
    static KGEN_DEVICE int row(int run) { return (run * Split + part()) * Run; }
    static KGEN_DEVICE bool has_run(int run) {
        return K % (Split * Run) == 0 || row(run) < K;
    }

    KGEN_DEVICE int column(int x) const {
        return first_column + (kValues ? group() * Tile + x : x * kGroups + group());
    }
    KGEN_DEVICE bool has_column(int x) const { return V % kColumns == 0 || column(x) < V; }

    // Rows and columns that do not exist are 0.
    KGEN_DEVICE void load(const StatePool& head) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            if constexpr (kValues) {
#pragma unroll
                for (int j = 0; j < Run; ++j) {
                    Vec<float, Tile> values = {};
                    if (has_run(i) && has_column(0))
                        values = load_vec<Tile>(head.first + (row(i) + j) * head.stride_k + column(0));
#pragma unroll
                    for (int x = 0; x < Tile; ++x) at[i][j][x] = values[x];
                }
            } else {
#pragma unroll
                for (int x = 0; x < Tile; ++x) {
                    Vec<float, Run> values = {};
                    if (has_run(i) && has_column(x))
                        values = load_vec<Run>(head.first + row(i) + column(x) * head.stride_v);
#pragma unroll
                    for (int j = 0; j < Run; ++j) at[i][j][x] = values[j];
                }
            }
        }
    }

    KGEN_DEVICE void store(const StatePool& head) const {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            if (!has_run(i)) continue;
            if constexpr (kValues) {
                if (!has_column(0)) continue;
#pragma unroll
                for (int j = 0; j < Run; ++j) {
                    Vec<float, Tile> values;
#pragma unroll
                    for (int x = 0; x < Tile; ++x) values[x] = at[i][j][x];
                    store_vec(head.first + (row(i) + j) * head.stride_k + column(0), values);
                }
            } else {
#pragma unroll
                for (int x = 0; x < Tile; ++x) {
                    if (!has_column(x)) continue;
                    Vec<float, Run> values;
#pragma unroll
                    for (int j = 0; j < Run; ++j) values[j] = at[i][j][x];
                    store_vec(head.first + row(i) + column(x) * head.stride_v, values);
                }
            }
        }
    }

    // This lane's rows of a step's row [K]; 0 where it has none.
    struct Keys {
        float at[kRuns][Run];
    };
    template <class T>
    static KGEN_DEVICE Keys keys_of(const T* row_of_step) {
        Keys keys;
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            if (has_run(i)) {
                to_floats(load_vec<Run>(row_of_step + row(i)), keys.at[i]);
            } else {
#pragma unroll
                for (int j = 0; j < Run; ++j) keys.at[i][j] = 0.0f;
            }
        }
        return keys;
    }

    // This lane's columns of a step's row [V]; 0 where it has none.
    template <class T>
    KGEN_DEVICE void values_of(const T* row_of_step, float (&values)[Tile]) const {
#pragma unroll
        for (int x = 0; x < Tile; ++x)
            values[x] = has_column(x) ? to_float(row_of_step[column(x)]) : 0.0f;
    }

    // Writes one value per column, which all lanes that share it have.
    template <class T>
    KGEN_DEVICE void write(T* row_of_step, const float (&values)[Tile]) const {
        if (part() != 0) return;
#pragma unroll
        for (int x = 0; x < Tile; ++x)
            if (has_column(x)) row_of_step[column(x)] = from_float<T>(values[x]);
    }

    // The sum over the lanes that share a column.
    static KGEN_DEVICE float sum_of_parts(float value) {
        constexpr int kFirst = kValues ? kGroups : 1;
#pragma unroll
        for (int bits = kFirst; bits < kFirst * Split; bits *= 2) value += shfl_xor(value, bits);
        return value;
    }

    // sum_k x S, of each column.
    KGEN_DEVICE void read(const Keys& x, float (&sums)[Tile]) const {
#pragma unroll
        for (int c = 0; c < Tile; ++c) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kRuns; ++i)
#pragma unroll
                for (int j = 0; j < Run; ++j) sum = fma(x.at[i][j], at[i][j][c], sum);
            sums[c] = sum_of_parts(sum);
        }
    }
};

}  // namespace kgen::wkv
