// One loop over the steps of a sequence with columns of wkv7's state in registers, CUDA cores.
//
//     step        loop        rows of K     row of V    state before     first     second
//     Forward     forward     a b k (r)     v           S_{t-1}          sa_t      r_t S_t, where there are outputs
//     Backward    backward    r b k a       g           G_t              gsa_t     gv_t
//
// Layout: a block has kColumns columns of a head's state. kSplit threads share a column, whose rows they share out in
// runs of four (ThreadStateTile). A thread has kTile columns, kColumns / kTile apart.
//
// Shared memory, K and C short for the padded rows and the columns:
//
//     kStages x { Value rows[tensors][kTokens][K], c[kTokens][C]; W w[kTokens][K] }
//     float decays[kTokens][K]  of the steps in use
//
// Synchronisation: copies by cp.async, kStages - 1 buffers ahead (for_each_batch); two block barriers per kTokens
// steps: one when a buffer has arrived, one when its decays are computed.
//
// Config: Value and W; kK: number of keys; kForm (what w is); kSplit, kTile, kColumns; kTokens: steps per barrier;
// kStages: number of buffers; kVec: elements per copy.
#pragma once

#include "kgen/wkv/state_columns.cuh"
#include "kgen/wkv7/decay.cuh"

namespace kgen::wkv7 {

// A thread's columns of the state. `Split` lanes share out the rows of a column.
template <int Keys, int Split, int Tile>
struct StateColumnsTile {
    using Geometry = ThreadStateTile<Keys, Split, 1>;
    static constexpr int kRuns = Geometry::kRuns, kTile = Tile, kSplit = Split;

    float at[kRuns][4][Tile];

    // S = `state` [Keys, pitch], or 0 if that is null.
    template <class Columns>
    KGEN_DEVICE void load(const float* state, i64 pitch, const Columns& columns) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < Tile; ++x)
                    at[run][j][x] = state != nullptr && Geometry::exists(run, j) && columns.uses(x)
                                        ? state[(Geometry::first_row(run) + j) * pitch + columns.column(x)]
                                        : 0.0f;
    }

    template <class Columns>
    KGEN_DEVICE void store(float* state, i64 pitch, const Columns& columns) const {
#pragma unroll
        for (int run = 0; run < kRuns; ++run)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < Tile; ++x)
                    if (Geometry::exists(run, j) && columns.uses(x))
                        state[(Geometry::first_row(run) + j) * pitch + columns.column(x)] =
                            at[run][j][x];
    }

    // Reads the four values of a run from a row in shared memory.
    template <class T>
    static KGEN_DEVICE void four(const T* row, int run, float (&values)[4]) {
        to_floats(*reinterpret_cast<const Vec<T, 4>*>(row + Geometry::first_row(run)), values);
    }
};

// sa = a S, S = D S + b sa^T + k c^T; with Outputs also y = r S.
template <bool Outputs>
struct ForwardStep {
    static constexpr Direction kDirection = Direction::forward;
    static constexpr int kTensors = Outputs ? 4 : 3;

    // rows: the step's a, b, k, r, `pitch` elements apart.
    template <class State, class T>
    static KGEN_DEVICE void run(State& state, const T* rows, i64 pitch, const float* decays,
                                const float (&c)[State::kTile], float (&sa)[State::kTile],
                                float (&y)[State::kTile]) {
        float sums[2][State::kTile] = {};  // two chains per column
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run) {
            float a[4];
            State::four(rows, run, a);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < State::kTile; ++x)
                    sums[j % 2][x] = fma(a[j], state.at[run][j][x], sums[j % 2][x]);
        }
#pragma unroll
        for (int x = 0; x < State::kTile; ++x) {
            sa[x] = lanes_sum<State::kSplit>(sums[0][x] + sums[1][x]);
            sums[0][x] = sums[1][x] = 0.0f;
        }
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run) {
            float b[4], k[4], d[4], r[4];
            State::four(rows + pitch, run, b);
            State::four(rows + 2 * pitch, run, k);
            State::four(decays, run, d);
            if constexpr (Outputs) State::four(rows + 3 * pitch, run, r);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < State::kTile; ++x) {
                    float& s = state.at[run][j][x];
                    s = fma(d[j], s, fma(b[j], sa[x], k[j] * c[x]));
                    if (!State::Geometry::exists(run, j)) s = 0.0f;  // not 0 times an Inf of c
                    if constexpr (Outputs) sums[j % 2][x] = fma(r[j], s, sums[j % 2][x]);
                }
        }
#pragma unroll
        for (int x = 0; x < State::kTile; ++x)
            y[x] = Outputs ? lanes_sum<State::kSplit>(sums[0][x] + sums[1][x]) : 0.0f;
    }
};

// G += r g^T, gsa = b G, gv = k G, G = D G + a gsa^T.
struct BackwardStep {
    static constexpr Direction kDirection = Direction::backward;
    static constexpr int kTensors = 4;

    // rows: the step's r, b, k, a, `pitch` elements apart.
    template <class State, class T>
    static KGEN_DEVICE void run(State& state, const T* rows, i64 pitch, const float* decays,
                                const float (&g)[State::kTile], float (&gsa)[State::kTile],
                                float (&gv)[State::kTile]) {
        float by_b[State::kTile] = {}, by_k[State::kTile] = {};
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run) {
            float r[4], b[4], k[4];
            State::four(rows, run, r);
            State::four(rows + pitch, run, b);
            State::four(rows + 2 * pitch, run, k);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < State::kTile; ++x) {
                    float& s = state.at[run][j][x];
                    s = fma(r[j], g[x], s);
                    if (!State::Geometry::exists(run, j)) s = 0.0f;  // not 0 times an Inf of g or gsa
                    by_b[x] = fma(b[j], s, by_b[x]);
                    by_k[x] = fma(k[j], s, by_k[x]);
                }
        }
#pragma unroll
        for (int x = 0; x < State::kTile; ++x) {
            gsa[x] = lanes_sum<State::kSplit>(by_b[x]);
            gv[x] = lanes_sum<State::kSplit>(by_k[x]);
        }
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run) {
            float a[4], d[4];
            State::four(rows + 3 * pitch, run, a);
            State::four(decays, run, d);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < State::kTile; ++x)
                    state.at[run][j][x] = fma(d[j], state.at[run][j][x], a[j] * gsa[x]);
        }
    }
};

// The loop.
template <class Config, class Step>
struct ValueColumns {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr Direction kDirection = Step::kDirection;
    static constexpr int kTensors = Step::kTensors, kTile = Config::kTile;
    static constexpr int kColumns = Config::kColumns, kTokens = Config::kTokens;
    using State = StateColumnsTile<Config::kK, Config::kSplit, kTile>;
    using Columns = kgen::wkv::BlockColumns<Config::kSplit, kTile, kColumns>;
    static constexpr int kThreads = Columns::kThreads, kPitch = State::Geometry::kPitch;

    static constexpr int kBytesOfValues =
        kTokens * (kTensors * kPitch + kColumns) * static_cast<int>(sizeof(Value));
    static constexpr int kBufferBytes =
        kBytesOfValues + kTokens * kPitch * static_cast<int>(sizeof(W));

    Columns columns;
    i64 steps;
    StepPointer<Value> rows[kTensors];
    StepPointer<Value> c;
    StepPointer<W> w;
    float column_factor;  // of c

    // start, end: states [K, V]; a null start is zero, a null end is not written. before_step(t, state) is called
    // before step t, result(t, column, first, second) after it, once per column.
    template <class BeforeStep, class Result>
    KGEN_DEVICE void operator()(const float* start, float* end, BeforeStep before_step,
                                Result result) const {
        char* shared = dynamic_smem<char>();
        float* decays = reinterpret_cast<float*>(shared + Config::kStages * kBufferBytes);
        State state;
        state.load(start, columns.extent, columns);
        for_each_batch<kTokens, Config::kStages>(
            steps, [&](i64 begin, int slot) { stage(shared + slot * kBufferBytes, begin); },
            [&](i64 begin, int there, int slot) {
                const Value* values = reinterpret_cast<const Value*>(shared + slot * kBufferBytes);
                const Value* values_c = values + kTensors * kTokens * kPitch;
                const W* values_w =
                    reinterpret_cast<const W*>(shared + slot * kBufferBytes + kBytesOfValues);
                for (int i = thread_rank(); i < there * kPitch; i += kThreads)
                    decays[i] = decay_of<Config::kForm>(to_float(values_w[i]));
                sync_block();
#pragma unroll 1
                for (int i = 0; i < there; ++i) {
                    const i64 t = time_of<kDirection>(begin + i, steps);
                    before_step(t, state);
                    float c_t[kTile], first[kTile], second[kTile];
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        c_t[x] = column_factor *
                                 to_float(values_c[i * kColumns + columns.in_block(x)]);
                    Step::run(state, values + i * kPitch, kTokens * kPitch, decays + i * kPitch,
                              c_t, first, second);
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        if (columns.lane() == x % Config::kSplit && columns.uses(x))
                            result(t, columns.column(x), first[x], second[x]);
                }
            });
        if (end != nullptr) state.store(end, columns.extent, columns);
    }

private:
    KGEN_DEVICE void stage(char* buffer, i64 begin) const {
        Value* target = reinterpret_cast<Value*>(buffer);
#pragma unroll
        for (int i = 0; i < kTensors; ++i) {
            copy_steps<kDirection, kThreads, kTokens, kPitch, Config::kVec>(
                target, rows[i], Config::kK, begin, steps);
            target += kTokens * kPitch;
        }
        copy_steps<kDirection, kThreads, kTokens, kColumns, Config::kVec>(
            target, StepPointer<Value>{c.first + columns.first, c.stride}, columns.width(), begin,
            steps);
        copy_steps<kDirection, kThreads, kTokens, kPitch, kgen::wkv::kVecOfW<Config>>(
            reinterpret_cast<W*>(buffer + kBytesOfValues), w, Config::kK, begin, steps);
    }
};

}  // namespace kgen::wkv7
