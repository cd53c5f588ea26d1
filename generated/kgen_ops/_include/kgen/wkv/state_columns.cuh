// One loop over the steps of a sequence with columns of the state in registers: wkv5 and wkv6, CUDA cores.
//
//     y_t = result_factor * (S^T p_t + bonus_t c'_t)     S = D_t S + a_t c'_t^T     c'_t = column_factor * c_t
//
// bonus_t is sum_i p a u where the rows of S are keys, else (sum_i p a) * u of the column. tensors.cuh lists
// p, a, c and D for y, gr and gv.
//
// Layout: a block has kColumns columns of a head's state. kSplit threads share a column, whose rows they share out in
// runs of four (ThreadStateTile). A thread has kTile columns, kColumns / kTile apart.
//
// Shared memory, K and C short for the padded rows and the columns:
//
//     kStages x { Value p[kTokens][K], a[kTokens][K], c[kTokens][C]; W w[kTokens][K or C], if w has steps }
//     float decays[kTokens][K]  of the steps in use, if rows are keys and w has steps
//     float u[K]                if rows are keys
//     float bonuses[kTokens]    of the steps in use
//
// Synchronisation: copies by cp.async, kStages - 1 buffers ahead (for_each_batch); two block barriers per kTokens
// steps: one when a buffer has arrived, one when its decays and bonuses are computed.
//
// Config: Value, W and U; kPerStep (whether w has steps) and kForm (what w is); kSplit, kTile, kColumns; kTokens: steps
// per barrier; kStages: number of buffers; kVec: elements per copy.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// A block's columns, and the columns of its threads: neighbouring groups of Split threads have neighbouring columns;
// the columns of one thread are Columns / Tile apart.
template <int Split, int Tile, int Columns>
struct BlockColumns {
    static constexpr int kThreads = Columns / Tile * Split;
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 1024 threads");

    int first;   // column of the block
    int extent;  // columns of the state

    KGEN_DEVICE int width() const { return min(extent - first, Columns); }
    KGEN_DEVICE int lane() const { return thread_rank() % Split; }
    KGEN_DEVICE int in_block(int x) const { return x * (Columns / Tile) + thread_rank() / Split; }
    KGEN_DEVICE int column(int x) const { return first + in_block(x); }
    KGEN_DEVICE bool uses(int x) const { return column(x) < extent; }
};

// D of a ThreadStateTile whose rows are keys: the decays of one step, in shared memory.
template <class State, int Tile>
struct RowDecays {
    static constexpr bool kDecays = true;
    const float* rows;
    KGEN_DEVICE void operator()(int run, float (&factors)[4][Tile]) const {
        const auto four = *reinterpret_cast<const Vec<float, 4>*>(rows + State::first_row(run));
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int x = 0; x < Tile; ++x) factors[j][x] = four[j];
    }
};

// The same if D is equal for all steps, in registers.
template <class State, int Tile, DecayForm Form>
struct ConstantRows {
    static constexpr bool kDecays = true;
    float rows[State::kRuns][4];

    template <class W>
    KGEN_DEVICE explicit ConstantRows(const W* w) {
#pragma unroll
        for (int run = 0; run < State::kRuns; ++run)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                rows[run][j] = State::exists(run, j)
                                   ? decay_of<Form>(to_float(w[State::first_row(run) + j]))
                                   : 0.0f;
    }
    KGEN_DEVICE void operator()(int run, float (&factors)[4][Tile]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int x = 0; x < Tile; ++x) factors[j][x] = rows[run][j];
    }
};

// D of a ThreadStateTile whose columns are keys.
template <int Tile>
struct ColumnDecays {
    static constexpr bool kDecays = true;
    float columns[Tile];
    KGEN_DEVICE void operator()(int, float (&factors)[4][Tile]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int x = 0; x < Tile; ++x) factors[j][x] = columns[x];
    }
};

// Elements of W that one copy moves.
template <class Config>
constexpr int kVecOfW = min(Config::kVec, 16 / static_cast<int>(sizeof(typename Config::W)));

// sum_i a[i] * b[i] * f(i) over a warp.
template <class T, class Factor>
KGEN_DEVICE float warp_dot(const T* a, const T* b, int extent, Factor factor) {
    float sum = 0.0f;
    for (int i = lane_id(); i < extent; i += kWarpSize)
        sum = fma(to_float(a[i]) * factor(i), to_float(b[i]), sum);
    return lanes_sum<kWarpSize>(sum);
}

// The loop. KeyRows: whether the rows of the state are keys. A null `start` means zeros; a null `end` means that the
// state after the last step is not stored. before_step(t, state) is called before step t.
template <class Config, Direction D, int Rows, bool KeyRows>
struct StateColumns {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr int kTile = Config::kTile, kColumns = Config::kColumns;
    static constexpr int kTokens = Config::kTokens, kStages = Config::kStages;
    static constexpr DecayForm kForm = Config::kForm;
    static constexpr bool kRowsPerStep = KeyRows && Config::kPerStep;
    using State = ThreadStateTile<Rows, Config::kSplit, kTile>;
    using Columns = BlockColumns<Config::kSplit, kTile, kColumns>;
    static constexpr int kThreads = Columns::kThreads, kPitch = State::kPitch;

    static constexpr int kPitchW = !Config::kPerStep ? 0 : KeyRows ? kPitch : kColumns;
    static constexpr int kBytesOfPac =
        kTokens * (2 * kPitch + kColumns) * static_cast<int>(sizeof(Value));
    static constexpr int kBufferBytes =
        kBytesOfPac + kTokens * kPitchW * static_cast<int>(sizeof(W));
    static constexpr int kDecays = kRowsPerStep ? kTokens * kPitch : 0;

    Columns columns;
    i64 steps;
    StepPointer<Value> p, a, c;
    StepPointer<W> w;
    const typename Config::U* u;
    float column_factor, result_factor;

    template <class BeforeStep>
    KGEN_DEVICE void operator()(const float* start, i64 row_stride, i64 column_stride, float* end,
                                Value* results, i64 result_stride, BeforeStep before_step) const {
        char* shared = dynamic_smem<char>();
        float* decays = reinterpret_cast<float*>(shared + kStages * kBufferBytes);
        float* shared_u = decays + kDecays;
        float* bonuses = shared_u + (KeyRows ? kPitch : 0);
        const auto uses = [&](int x) { return columns.uses(x); };
        const auto offset = [&](int x) { return columns.column(x) * column_stride; };

        // 1. The state before the first step, u, and decays that are the same at every step.
        State state;
        state.load(start, row_stride, uses, offset);
        float column_bonus[kTile];
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            column_bonus[x] = KeyRows || !uses(x) ? 1.0f : to_float(u[columns.column(x)]);
        if constexpr (KeyRows)
            for (int i = thread_rank(); i < Rows; i += kThreads) shared_u[i] = to_float(u[i]);
        const auto constant = constant_decay();

        // 2. The loop.
        for_each_batch<kTokens, kStages>(
            steps, [&](i64 begin, int slot) { stage(shared + slot * kBufferBytes, begin); },
            [&](i64 begin, int there, int slot) {
                const Value* rows_p = reinterpret_cast<const Value*>(shared + slot * kBufferBytes);
                const Value* rows_a = rows_p + kTokens * kPitch;
                const Value* rows_c = rows_a + kTokens * kPitch;
                const W* rows_w =
                    reinterpret_cast<const W*>(shared + slot * kBufferBytes + kBytesOfPac);
                // What all columns of a step share; a warp computes it for a step.
                for (int i = thread_rank() / kWarpSize; i < there; i += kThreads / kWarpSize) {
                    const float bonus =
                        warp_dot(rows_p + i * kPitch, rows_a + i * kPitch, Rows,
                                 [&](int row) { return KeyRows ? shared_u[row] : 1.0f; });
                    if (lane_id() == 0) bonuses[i] = bonus;
                    if constexpr (kRowsPerStep)
                        for (int row = lane_id(); row < kPitch; row += kWarpSize)
                            decays[i * kPitch + row] =
                                decay_of<kForm>(to_float(rows_w[i * kPitch + row]));
                }
                sync_block();
#pragma unroll 1
                for (int i = 0; i < there; ++i) {
                    const i64 t = time_of<D>(begin + i, steps);
                    before_step(t, state);
                    float c_t[kTile], y[kTile];
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        c_t[x] =
                            column_factor * to_float(rows_c[i * kColumns + columns.in_block(x)]);
                    const Value* p_t = rows_p + i * kPitch;
                    const Value* a_t = rows_a + i * kPitch;
                    if constexpr (kRowsPerStep) {
                        state.step(a_t, p_t, c_t, y,
                                   RowDecays<State, kTile>{decays + i * kPitch});
                    } else if constexpr (Config::kPerStep) {
                        ColumnDecays<kTile> of_step;
#pragma unroll
                        for (int x = 0; x < kTile; ++x)
                            of_step.columns[x] = decay_of<kForm>(
                                to_float(rows_w[i * kColumns + columns.in_block(x)]));
                        state.step(a_t, p_t, c_t, y, of_step);
                    } else {
                        state.step(a_t, p_t, c_t, y, constant);
                    }
#pragma unroll
                    for (int x = 0; x < kTile; ++x) {
                        if (columns.lane() != x % Config::kSplit || !uses(x)) continue;
                        const float own = bonuses[i] * column_bonus[x];
                        results[t * result_stride + columns.column(x)] =
                            from_float<Value>(result_factor * fma(own, c_t[x], y[x]));
                    }
                }
            });

        // 3. The state after the last step.
        if (end != nullptr) state.store(end, row_stride, uses, offset);
    }

private:
    // The decay if w has no steps; otherwise nothing.
    KGEN_DEVICE auto constant_decay() const {
        if constexpr (Config::kPerStep) {
            return NoDecay{};
        } else if constexpr (KeyRows) {
            return ConstantRows<State, kTile, kForm>(w.first);
        } else {
            ColumnDecays<kTile> decay;
#pragma unroll
            for (int x = 0; x < kTile; ++x)
                decay.columns[x] =
                    columns.uses(x) ? decay_of<kForm>(to_float(w.first[columns.column(x)])) : 0.0f;
            return decay;
        }
    }

    KGEN_DEVICE void stage(char* buffer, i64 begin) const {
        constexpr int kVec = Config::kVec;
        Value* target = reinterpret_cast<Value*>(buffer);
        copy_steps<D, kThreads, kTokens, kPitch, kVec>(target, p, Rows, begin, steps);
        target += kTokens * kPitch;
        copy_steps<D, kThreads, kTokens, kPitch, kVec>(target, a, Rows, begin, steps);
        target += kTokens * kPitch;
        const StepPointer<Value> of_c{c.first + columns.first, c.stride};
        copy_steps<D, kThreads, kTokens, kColumns, kVec>(target, of_c,
                                                         columns.width(), begin, steps);
        if constexpr (Config::kPerStep) {
            const StepPointer<W> of_w{w.first + (KeyRows ? 0 : columns.first), w.stride};
            copy_steps<D, kThreads, kTokens, kPitchW, kVecOfW<Config>>(
                reinterpret_cast<W*>(buffer + kBytesOfPac), of_w,
                KeyRows ? Rows : columns.width(), begin,
                steps);
        }
    }
};

// Checkpoints: the states before every Steps-th step, counted from the last step. checkpoint_count: how many a head
// has; checkpoint_index: the index of the checkpoint before step t, in the order in which a loop backward in time reads
// them (-1: none).
template <int Steps>
KGEN_DEVICE i64 checkpoint_count(i64 steps) {
    return steps > Steps ? (steps - 1) / Steps : 0;
}
template <int Steps>
KGEN_DEVICE i64 checkpoint_index(i64 t, i64 steps) {
    return t > 0 && (steps - t) % Steps == 0 ? (steps - t) / Steps - 1 : -1;
}

// Index of a sequence's first checkpoint in [B, H, checkpoints], or for packed sequences, which may begin at any step,
// in [H, T / Steps]: a sequence has no more checkpoints than whole sets of Steps steps end in it.
template <int Steps, class Offset>
KGEN_DEVICE i64 first_checkpoint(const Span& span, i64 head, i64 h, i64 T) {
    return kPresent<Offset> ? h * (T / Steps) + span.first / Steps
                            : head * checkpoint_count<Steps>(T);
}

}  // namespace kgen::wkv
