// wkv5 and wkv6 with states in registers: a block has a slice of the columns of a head's state and
// walks over time, its steps coming through shared memory.
//
// A Config has Value, W and U; kPerStep (whether w has steps) and kForm (what it is); kSplit threads
// that share a column, kTile columns of a thread, kColumns of a block; kTokens steps per barrier,
// kStages batches of them in shared memory, kVec elements per copy.
#pragma once

#include "wkv.cuh"

namespace kgen::wkv {

// The columns of a thread: neighbouring groups of threads have neighbouring ones, those of one
// thread lie a block's groups apart.
template <int Split, int Tile, int Columns>
struct Slice {
    static constexpr int kThreads = Columns / Tile * Split;
    static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 1024 threads");

    int first;   // column of the block
    int extent;  // columns of the state

    KGEN_DEVICE int width() const { return min(extent - first, Columns); }
    KGEN_DEVICE int lane() const { return thread_rank() % Split; }
    KGEN_DEVICE int place(int x) const { return x * (Columns / Tile) + thread_rank() / Split; }
    KGEN_DEVICE int column(int x) const { return first + place(x); }
    KGEN_DEVICE bool uses(int x) const { return column(x) < extent; }
};

// D of a StateTile whose rows are keys: of a step, in shared memory.
template <class State, int Tile>
struct SharedRows {
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

// The same of every step, in registers.
template <class State, int Tile, DecayForm Form>
struct FixedRows {
    static constexpr bool kDecays = true;
    float rows[State::kRuns][4];

    template <class W>
    KGEN_DEVICE explicit FixedRows(const W* w) {
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

// D of a StateTile whose columns are keys.
template <int Tile>
struct TileColumns {
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

// One walk over time with a tile of the state per thread.
//
// With c' = of_column * c: y = S^T p, S = D S + a c'^T, and the result of a step is
// of_result * (y + (sum p a u) * c') where the rows are keys (KeyRows), else with u of the column.
// start and end may be null. keep(t, state) is called before step t.
template <class Config, Walk D, int Rows, bool KeyRows>
struct TileWalk {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static constexpr int kTile = Config::kTile, kColumns = Config::kColumns;
    static constexpr int kTokens = Config::kTokens, kStages = Config::kStages;
    static constexpr DecayForm kForm = Config::kForm;
    static constexpr bool kRowsPerStep = KeyRows && Config::kPerStep;
    using State = StateTile<Rows, Config::kSplit, kTile>;
    using Part = Slice<Config::kSplit, kTile, kColumns>;
    static constexpr int kThreads = Part::kThreads, kPitch = State::kPitch;

    // Of dynamic shared memory: p, a, c and w of the batches, then the decays of a batch and u,
    // then the bonus of each of its steps.
    static constexpr int kPitchW = !Config::kPerStep ? 0 : KeyRows ? kPitch : kColumns;
    static constexpr int kOfW = kTokens * (2 * kPitch + kColumns) * static_cast<int>(sizeof(Value));
    static constexpr int kBatchBytes = kOfW + kTokens * kPitchW * static_cast<int>(sizeof(W));
    static constexpr int kDecays = kRowsPerStep ? kTokens * kPitch : 0;

    Part slice;
    i64 steps;
    Steps<Value> p, a, c;
    Steps<W> w;
    const typename Config::U* u;
    float of_column, of_result;

    template <class Keep>
    KGEN_DEVICE void operator()(const float* start, i64 row_stride, i64 column_stride, float* end,
                                Value* results, i64 result_stride, Keep keep) const {
        char* shared = dynamic_smem<char>();
        float* decays = reinterpret_cast<float*>(shared + kStages * kBatchBytes);
        float* shared_u = decays + kDecays;
        float* bonuses = shared_u + (KeyRows ? kPitch : 0);
        const auto uses = [&](int x) { return slice.uses(x); };
        const auto place = [&](int x) { return slice.column(x) * column_stride; };

        // 1. The state before the first step, and what is the same at every step.
        State state;
        state.load(start, row_stride, uses, place);
        float bonus_of_column[kTile];
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            bonus_of_column[x] = KeyRows || !uses(x) ? 1.0f : to_float(u[slice.column(x)]);
        if constexpr (KeyRows)
            for (int i = thread_rank(); i < Rows; i += kThreads) shared_u[i] = to_float(u[i]);
        const auto fixed = fixed_decay();

        // 2. Walk.
        in_batches<kTokens, kStages>(
            steps, [&](i64 begin, int slot) { stage(shared + slot * kBatchBytes, begin); },
            [&](i64 begin, int there, int slot) {
                const Value* rows_p = reinterpret_cast<const Value*>(shared + slot * kBatchBytes);
                const Value* rows_a = rows_p + kTokens * kPitch;
                const Value* rows_c = rows_a + kTokens * kPitch;
                const W* rows_w = reinterpret_cast<const W*>(shared + slot * kBatchBytes + kOfW);
                // What all columns of a step share, once: a warp per step.
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
                    keep(t, state);
                    float columns[kTile], y[kTile];
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        columns[x] = of_column * to_float(rows_c[i * kColumns + slice.place(x)]);
                    const Value* p_t = rows_p + i * kPitch;
                    const Value* a_t = rows_a + i * kPitch;
                    if constexpr (kRowsPerStep) {
                        state.step(a_t, p_t, columns, y,
                                   SharedRows<State, kTile>{decays + i * kPitch});
                    } else if constexpr (Config::kPerStep) {
                        TileColumns<kTile> of_step;
#pragma unroll
                        for (int x = 0; x < kTile; ++x)
                            of_step.columns[x] = decay_of<kForm>(
                                to_float(rows_w[i * kColumns + slice.place(x)]));
                        state.step(a_t, p_t, columns, y, of_step);
                    } else {
                        state.step(a_t, p_t, columns, y, fixed);
                    }
#pragma unroll
                    for (int x = 0; x < kTile; ++x) {
                        if (slice.lane() != x % Config::kSplit || !uses(x)) continue;
                        const float own = bonuses[i] * bonus_of_column[x];
                        results[t * result_stride + slice.column(x)] =
                            from_float<Value>(of_result * fma(own, columns[x], y[x]));
                    }
                }
            });

        // 3. The state after the last step.
        if (end != nullptr) state.store(end, row_stride, uses, place);
    }

private:
    // The decay where w has no steps.
    KGEN_DEVICE auto fixed_decay() const {
        if constexpr (Config::kPerStep) {
            return NoDecay{};
        } else if constexpr (KeyRows) {
            return FixedRows<State, kTile, kForm>(w.first);
        } else {
            TileColumns<kTile> decay;
#pragma unroll
            for (int x = 0; x < kTile; ++x)
                decay.columns[x] =
                    slice.uses(x) ? decay_of<kForm>(to_float(w.first[slice.column(x)])) : 0.0f;
            return decay;
        }
    }

    KGEN_DEVICE void stage(char* batch, i64 begin) const {
        constexpr int kVec = Config::kVec;
        Value* target = reinterpret_cast<Value*>(batch);
        copy_steps<D, kThreads, kTokens, kPitch, kVec>(target, p, Rows, begin, steps);
        target += kTokens * kPitch;
        copy_steps<D, kThreads, kTokens, kPitch, kVec>(target, a, Rows, begin, steps);
        target += kTokens * kPitch;
        const Steps<Value> of_c{c.first + slice.first, c.stride};
        copy_steps<D, kThreads, kTokens, kColumns, kVec>(target, of_c, slice.width(), begin, steps);
        if constexpr (Config::kPerStep) {
            const Steps<W> of_w{w.first + (KeyRows ? 0 : slice.first), w.stride};
            copy_steps<D, kThreads, kTokens, kPitchW, kVecOfW<Config>>(
                reinterpret_cast<W*>(batch + kOfW), of_w, KeyRows ? Rows : slice.width(), begin,
                steps);
        }
    }
};

template <class T>
KGEN_DEVICE Steps<T> steps_of(Rows<const T> rows, const Span& span, i64 h) {
    return Steps<T>{rows.head(span, h).first, rows.of_t};
}

// States before every Keep-th step, counted from the last, are kept: how many of a head, and which one
// that before step t is, in the order in which a walk backward in time comes to them (-1: none).
template <int Keep>
KGEN_DEVICE i64 kept_states(i64 steps) {
    return steps > Keep ? (steps - 1) / Keep : 0;
}
template <int Keep>
KGEN_DEVICE i64 kept_index(i64 t, i64 steps) {
    return t > 0 && (steps - t) % Keep == 0 ? (steps - t) / Keep - 1 : -1;
}

// The first kept state of a sequence's head, of [B, H, kept_states]; of packed sequences, which begin
// anywhere, of [H, T / Keep]: none has more than there are whole Keeps up to its end.
template <int Keep, class Offset>
KGEN_DEVICE i64 first_kept(const Span& span, i64 head, i64 h, i64 T) {
    return kPresent<Offset> ? h * (T / Keep) + span.first / Keep : head * kept_states<Keep>(T);
}

// The forward pass; a block per head and slice of values.
template <class Config, int K, int V, class T, class W, class U, class Offset>
KGEN_DEVICE void forward_by_head(i64 all_steps, i64 H, const Offset* offsets, Rows<const T> r,
                                 Rows<const T> k, Rows<const T> v, Rows<const W> w, const U* u,
                                 const float* initial_state, Rows<T> y, float* final_state,
                                 float scale) {
    constexpr int kSlices = ceil_div(V, Config::kColumns);
    const i64 head = blockIdx.x / kSlices, h = head % H;
    const Span span = span_of(offsets, head / H, all_steps);
    const int first = static_cast<int>(blockIdx.x % kSlices) * Config::kColumns;
    using Values = TileWalk<Config, Walk::forward, K, true>;
    using Tile = typename Values::State;
    const Values walk{
        {first, V}, span.steps, steps_of(r, span, h), steps_of(k, span, h), steps_of(v, span, h),
        steps_of(w, span, h), u + h * K, 1.0f, scale};
    walk(initial_state ? initial_state + head * K * V : nullptr, V, 1,
         final_state ? final_state + head * K * V : nullptr, y.head(span, h).first, y.of_t,
         [](i64, Tile&) {});
}

// gr, forward in time, which keeps states for KeyGradients, and gv with the gradient of the initial
// state, backward; blocks of both run side by side.
template <class Config, int K, int V, class T, class W, class U, class Offset>
KGEN_DEVICE void backward_by_head(i64 all_steps, i64 H, const Offset* offsets,
                                  Rows<const T> gy, Rows<const T> r, Rows<const T> k,
                                  Rows<const T> v, Rows<const W> w, const U* u,
                                  const float* initial_state, const float* gfinal_state,
                                  Rows<T> gr, Rows<T> gv, float* ginitial_state, float* kept,
                                  float scale) {
    constexpr int kSlicesK = ceil_div(K, Config::kColumns);
    constexpr int kSlices = kSlicesK + ceil_div(V, Config::kColumns);
    constexpr int kKeep = Config::kKeep;
    const i64 head = blockIdx.x / kSlices, h = head % H;
    const Span span = span_of(offsets, head / H, all_steps);
    const int item = static_cast<int>(blockIdx.x % kSlices);
    const auto steps_g = steps_of(gy, span, h), steps_r = steps_of(r, span, h);
    const auto steps_k = steps_of(k, span, h), steps_v = steps_of(v, span, h);
    const i64 state = head * K * V;

    if (item < kSlicesK) {
        using OfR = TileWalk<Config, Walk::forward, V, false>;
        const OfR walk{
            {item * Config::kColumns, K}, span.steps, steps_g, steps_v, steps_k,
            steps_of(w, span, h), u + h * K, 1.0f, scale};
        float* kept_here = kept + first_kept<kKeep, Offset>(span, head, h, all_steps) * K * V;
        walk(initial_state ? initial_state + state : nullptr, 1, V, nullptr,
             gr.head(span, h).first, gr.of_t, [&](i64 t, typename OfR::State& tile) {
                 const i64 index = kept_index<kKeep>(t, span.steps);
                 if (index < 0) return;
                 tile.store(
                     kept_here + index * K * V, K, [&](int x) { return walk.slice.uses(x); },
                     [&](int x) { return walk.slice.column(x); });
             });
    } else {
        using OfV = TileWalk<Config, Walk::backward, K, true>;
        const OfV walk{
            {(item - kSlicesK) * Config::kColumns, V}, span.steps, steps_k, steps_r, steps_g,
            steps_of(w, span, h), u + h * K, scale, 1.0f};
        walk(gfinal_state ? gfinal_state + state : nullptr, V, 1,
             ginitial_state ? ginitial_state + state : nullptr, gv.head(span, h).first, gv.of_t,
             [](i64, typename OfV::State&) {});
    }
}

}  // namespace kgen::wkv
