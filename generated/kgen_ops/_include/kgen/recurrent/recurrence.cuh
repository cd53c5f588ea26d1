// Recurrences over time whose state is a matrix: linear attention, wkv5 and wkv6; CUDA cores.
//
//     S_i = S_{i-1} + a_i c_i^T,   y_i = S_i^T p_i          i-th step of a loop
//
// S has rows (the features of a and p) and columns (the features of c and y). A loop goes forward or backward in time;
// gradients of the terms that S sums go backward. With q, k, v and the gradient g of the output:
//
//              loop       p    a    c    y     S
//     out      forward    q    k    v    out   [E, M]
//     gq       forward    g    v    k    gq    [M, E], the transpose of the one above
//     gk       backward   v    g    q    gk    [M, E]
//     gv       backward   k    q    g    gv    [E, M]
//
// The columns of S are independent, so they may be spread over threads and blocks; y is a sum over the rows of a
// column. Three loops:
//
//     run_in_memory     a column per thread, S in global memory; any shape
//     for_each_batch    a block's steps through shared memory, S as ThreadStateTile in registers
//     StepScan          many steps at once: a scan over time, for few heads
//
// With a decay the output of a step reads S before the step. The step's own term is a bonus, which callers add
// (kgen/wkv/tensors.cuh):
//
//     y_i = S_{i-1}^T p_i,   S_i = D_i S_{i-1} + a_i c_i^T
//
// D is diagonal. It scales the rows of S, or its columns where S is transposed.
//
// Synchronisation: for_each_batch has one block barrier per buffer (two with a single buffer), StepScan one per call.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace kgen {

enum class Direction { forward, backward };

// The time of the i-th step of a loop.
template <Direction W>
KGEN_DEVICE i64 time_of(i64 i, i64 steps) {
    return W == Direction::forward ? i : steps - 1 - i;
}

// The decay of a recurrence that has none.
struct NoDecay {
    static constexpr bool kDecays = false;
};

// `Count` rows of a step of `run_in_memory`, from row `first` on; p and a point to the step's rows.
//
// The compiler must assume that a store changes what a later load reads. So all rows are loaded before the first of
// them is stored.
template <int Count, class P, class A, class Decay>
KGEN_DEVICE void run_rows(float* state, i64 pitch, i64 first, i64 t, const P* p, const A* a, float c, float& y,
                          const Decay& decay) {
    float s[Count], d[Count], factor[Count], term[Count];
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        s[j] = state[(first + j) * pitch];
        factor[j] = to_float(p[first + j]);
        term[j] = to_float(a[first + j]);
        if constexpr (Decay::kDecays) d[j] = decay(t, first + j);
    }
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        if constexpr (Decay::kDecays) {
            y = fma(factor[j], s[j], y);
            s[j] = fma(d[j], s[j], term[j] * c);
        } else {
            s[j] = fma(term[j], c, s[j]);
            y = fma(factor[j], s[j], y);
        }
        state[(first + j) * pitch] = s[j];
    }
}

// One column of S that lies in global memory, `pitch` floats from row to row.
//
// p and a point to the rows of step 0, p_stride and a_stride are the elements between steps. column(t) returns c_t and
// is called before S changes; result(t, y) receives y_t; decay(t, r) returns element r of D_t.
template <Direction W, class P, class A, class Column, class Result, class Decay = NoDecay>
KGEN_DEVICE void run_in_memory(float* state, i64 pitch, i64 rows, i64 steps, const P* p,
                                i64 p_stride, const A* a, i64 a_stride, Column column,
                                Result result, Decay decay = {}) {
    constexpr int kRows = 8;
    for (i64 i = 0; i < steps; ++i) {
        const i64 t = time_of<W>(i, steps);
        const float c = column(t);
        float y = 0.0f;
        i64 r = 0;
        for (; r + kRows <= rows; r += kRows)
            run_rows<kRows>(state, pitch, r, t, p + t * p_stride, a + t * a_stride, c, y, decay);
        for (; r < rows; ++r) run_rows<1>(state, pitch, r, t, p + t * p_stride, a + t * a_stride, c, y, decay);
        result(t, y);
    }
}

// A lane's part of Rows x Tile elements of S, in registers. The `Split` lanes of a group together hold all rows of
// `Tile` columns.
//
// A lane holds rows in runs of four, `Split` runs apart, so that one access to shared memory reads a run, and the lanes
// of a group read adjacent runs.
template <int Rows, int Split, int Tile>
class ThreadStateTile {
    static_assert(is_power_of_two(Split) && Split <= kWarpSize, "lanes of one warp share a column");
    static constexpr bool kRagged = Rows % (4 * Split) != 0;

public:
    static constexpr int kRuns = ceil_div(Rows, 4 * Split);  // of a lane
    // Elements between two steps' rows in shared memory: whole runs, and whole 16 bytes.
    static constexpr int kPitch = ceil_div(kRuns * 4 * Split, 8) * 8;

    // S = `state`, or 0 if that is null. Column x of the tile is used if uses(x), and lies
    // place(x) elements from the first of its row.
    template <class Uses, class Place>
    KGEN_DEVICE void load(const float* state, i64 row_stride, Uses uses, Place place) {
        each([&](int row, bool exists, int x, float& s) {
            s = state != nullptr && exists && uses(x) ? state[row * row_stride + place(x)] : 0.0f;
        });
    }

    template <class Uses, class Place>
    KGEN_DEVICE void store(float* state, i64 row_stride, Uses uses, Place place) {
        each([&](int row, bool exists, int x, float& s) {
            if (exists && uses(x)) state[row * row_stride + place(x)] = s;
        });
    }

    // S += a c^T, y = S^T p, for all columns of the tile; every lane of a group gets the group's y. a and p lie in
    // shared memory and have kPitch elements; elements beyond Rows are zero.
    //
    // With a decay: y = S^T p, S = D S + a c^T; decay(run, factors) returns D of a run.
    template <class T, class Decay = NoDecay>
    KGEN_DEVICE void step(const T* a, const T* p, const float (&c)[Tile], float (&y)[Tile],
                          const Decay& decay = {}) {
        float sums[2][Tile] = {};  // two chains per column
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            float from_a[4], from_p[4], factors[4][Tile];
            to_floats(*reinterpret_cast<const Vec<T, 4>*>(a + first_row(run)), from_a);
            to_floats(*reinterpret_cast<const Vec<T, 4>*>(p + first_row(run)), from_p);
            if constexpr (Decay::kDecays) decay(run, factors);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < Tile; ++x) {
                    float s = state_[run][j][x];
                    float& sum = sums[j % 2][x];
                    if constexpr (Decay::kDecays) {
                        sum = fma(from_p[j], s, sum);
                        s = fma(factors[j][x], s, from_a[j] * c[x]);
                    } else {
                        s = fma(from_a[j], c[x], s);
                    }
                    if (!exists(run, j)) s = 0.0f;  // 0 times an Inf of c is NaN
                    if constexpr (!Decay::kDecays) sum = fma(from_p[j], s, sum);
                    state_[run][j][x] = s;
                }
        }
#pragma unroll
        for (int x = 0; x < Tile; ++x) y[x] = lanes_sum<Split>(sums[0][x] + sums[1][x]);
    }

    // The first of the four rows of a lane's run.
    static KGEN_DEVICE int first_row(int run) {
        return (run * Split + thread_rank() % Split) * 4;
    }
    static KGEN_DEVICE bool exists(int run, int j) {
        return !kRagged || run < kRuns - 1 || first_row(run) + j < Rows;
    }

private:
    template <class Visit>
    KGEN_DEVICE void each(Visit visit) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int x = 0; x < Tile; ++x)
                    visit(first_row(run) + j, exists(run, j), x, state_[run][j][x]);
    }

    float state_[kRuns][4][Tile];
};

// One operand: the row of step 0, and the elements between steps.
template <class T>
struct StepPointer {
    const T* first;
    i64 stride;
};

// Copies rows of `Tokens` steps of a loop to shared memory, Pitch elements apart, by asynchronous copies of Vec
// elements (ordinary loads and stores if Vec elements have fewer than 4 bytes). Elements beyond `width` and steps
// beyond the last become zeros.
template <Direction W, int Threads, int Tokens, int Pitch, int Vec, class T>
KGEN_DEVICE void copy_steps(T* target, StepPointer<T> source, int width, i64 begin, i64 steps) {
    static_assert(Pitch % 8 == 0, "rows start at whole 16 bytes");
    static_assert(sizeof(T) * Vec <= 16, "one copy moves at most 16 bytes");
    constexpr int kPieces = Pitch / Vec;
    for (int piece = thread_rank(); piece < Tokens * kPieces; piece += Threads) {
        const int token = piece / kPieces, column = piece % kPieces * Vec;
        const bool inside = begin + token < steps && column < width;
        const T* from = source.first;
        if (inside) from += time_of<W>(begin + token, steps) * source.stride + column;
        T* to = target + token * Pitch + column;
        if constexpr (sizeof(T) * Vec >= 4) {
            cp_async_or_zero<sizeof(T) * Vec>(to, from, inside);
        } else {
            for (int j = 0; j < Vec; ++j) to[j] = inside ? from[j] : from_float<T>(0.0f);
        }
    }
}

// A block's loop in batches of `Tokens` steps, copied `Stages` - 1 batches ahead.
//
// stage(begin, slot) issues the copies of the batch whose first step is the loop's begin-th; once they have arrived for
// all threads, use(begin, there, slot) is called, `there` being the number of its steps.
template <int Tokens, int Stages, class Stage, class Use>
KGEN_DEVICE void for_each_batch(i64 steps, Stage stage, Use use) {
    static_assert(Stages >= 1, "the batch in use needs a buffer");
    const i64 batches = ceil_div(steps, static_cast<i64>(Tokens));
    const auto issue = [&](i64 batch) {
        stage(batch * Tokens, static_cast<int>(batch % Stages));
    };
    for (i64 batch = 0; batch < Stages - 1; ++batch) {
        if (batch < batches) issue(batch);
        cp_async_commit();
    }
    for (i64 batch = 0; batch < batches; ++batch) {
        if constexpr (Stages == 1) {
            if (batch > 0) sync_block();  // all threads are done with the previous batch
            issue(batch);
            cp_async_commit();
            cp_async_wait<0>();
            sync_block();
        } else {
            cp_async_wait<Stages - 2>();
            sync_block();  // the batch has arrived, and all threads are done with the previous batch
            if (batch + Stages - 1 < batches) issue(batch + Stages - 1);
            cp_async_commit();
        }
        const i64 begin = batch * Tokens;
        // untested: batches of one step are all whole
        const int there = steps - begin < Tokens ? static_cast<int>(steps - begin) : Tokens;
        use(begin, there, static_cast<int>(batch % Stages));
    }
}

// Copies p, a (RowPitch) and c (Columns) of a block's steps to shared memory: Stages buffers of p, a, c, then of
// factors.
template <class T, int Threads, int RowPitch, int Columns, int Tokens, int Stages, int Vec>
class StepRing {
    static constexpr int kBatch = Tokens * (2 * RowPitch + Columns);

public:
    // Bytes of dynamic shared memory.
    static constexpr int kBytes =
        Stages * (kBatch * static_cast<int>(sizeof(T)) + Tokens * static_cast<int>(sizeof(f32x2)));

    // Calls body(t, p, a, c, factors) at every step, with the step's rows in shared memory. Rows of p and a have `rows`
    // elements, rows of c have `columns`; elements beyond are zeros. factors(t) is evaluated once per step and block.
    template <Direction W, class Factors, class Body>
    static KGEN_DEVICE void run(i64 steps, int rows, int columns, StepPointer<T> p, StepPointer<T> a,
                                 StepPointer<T> c, Factors factors, Body body) {
        T* shared = dynamic_smem<T>();
        f32x2* shared_factors = reinterpret_cast<f32x2*>(shared + Stages * kBatch);
        for_each_batch<Tokens, Stages>(
            steps,
            [&](i64 begin, int slot) {
                T* target = shared + slot * kBatch;
                copy_steps<W, Threads, Tokens, RowPitch, Vec>(target, p, rows, begin, steps);
                target += Tokens * RowPitch;
                copy_steps<W, Threads, Tokens, RowPitch, Vec>(target, a, rows, begin, steps);
                target += Tokens * RowPitch;
                copy_steps<W, Threads, Tokens, Columns, Vec>(target, c, columns, begin, steps);
                for (int i = thread_rank(); i < Tokens && begin + i < steps; i += Threads)
                    shared_factors[slot * Tokens + i] = factors(time_of<W>(begin + i, steps));
            },
            [&](i64 begin, int there, int slot) {
                const T* rows_p = shared + slot * kBatch;
                const T* rows_a = rows_p + Tokens * RowPitch;
                const T* rows_c = rows_a + Tokens * RowPitch;
#pragma unroll 1
                for (int i = 0; i < there; ++i)
                    body(time_of<W>(begin + i, steps), rows_p + i * RowPitch,
                         rows_a + i * RowPitch, rows_c + i * Columns,
                         shared_factors[slot * Tokens + i]);
            });
    }
};

// Exclusive sums over time, by a block of `Warps` warps: each group of `Lanes` threads has consecutive steps. A call
// has one block barrier, which is sufficient for the reason given at GroupReduce.
template <int Values, int Lanes, int Warps>
class StepScan {
    static_assert(is_power_of_two(Lanes) && Lanes <= kWarpSize, "a group is part of a warp");

public:
    static constexpr int kBytes = 2 * Warps * Values * Lanes * static_cast<int>(sizeof(float));

    KGEN_DEVICE explicit StepScan(float* scratch) : scratch_(scratch), half_(0) {}

    // values: in, the sums of the group's own steps; out, of all steps before the group's.
    // before: in, the sums of all steps before this call's; out, with this call's.
    KGEN_DEVICE void operator()(float (&values)[Values], float (&before)[Values]) {
        const int lane = lane_id(), warp = thread_rank() / kWarpSize;
        float* totals = scratch_ + half_ * (Warps * Values * Lanes);
        half_ ^= 1;
        float earlier[Values];  // sums of the earlier groups of this warp
#pragma unroll
        for (int i = 0; i < Values; ++i) {
            float sum = values[i];
#pragma unroll
            for (int distance = Lanes; distance < kWarpSize; distance *= 2) {
                const float other = shfl_up(sum, distance);
                if (lane >= distance) sum = other + sum;
            }
            if (lane >= kWarpSize - Lanes)
                totals[(warp * Values + i) * Lanes + lane % Lanes] = sum;
            earlier[i] = 0.0f;
            if constexpr (Lanes < kWarpSize) {
                const float other = shfl_up(sum, Lanes);
                if (lane >= Lanes) earlier[i] = other;
            }
        }
        sync_block();
#pragma unroll
        for (int i = 0; i < Values; ++i) {
            float sum = before[i];
            values[i] = sum;
            for (int w = 0; w < Warps; ++w) {
                sum += totals[(w * Values + i) * Lanes + lane % Lanes];
                if (w + 1 == warp) values[i] = sum;
            }
            before[i] = sum;
            if constexpr (Lanes < kWarpSize) values[i] += earlier[i];
        }
    }

private:
    float* scratch_;
    int half_;
};

KGEN_DEVICE constexpr int next_power_of_two(int n) {
    return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2);
}

// A column of S, taken many steps at a time by a whole block.
//
// A group of `kLanes` threads has the rows of a column, RowsPerThread each, of StepsPerGroup consecutive steps; the
// groups of a block have consecutive runs of steps. Columns > 1: several columns that share a and p. Extra: one more
// row of S, a number that every thread keeps; the caller's functions supply its terms and use its value.
template <int Rows, int RowsPerThread, int StepsPerGroup, int Warps, int Columns, bool Extra = false>
class ColumnScan {
public:
    static constexpr int kColumns = Columns;
    float extra = 0.0f;  // before the next step

private:
    static constexpr int kLanes = next_power_of_two(ceil_div(Rows, RowsPerThread));
    static constexpr bool kRagged = Rows != kLanes * RowsPerThread;
    static constexpr int kGroups = Warps * kWarpSize / kLanes;
    static constexpr int kValues = Columns * RowsPerThread + (Extra ? 1 : 0);
    using Scan = StepScan<kValues, kLanes, Warps>;

public:
    KGEN_DEVICE explicit ColumnScan(float* scratch) : scan_(scratch) {}

    KGEN_DEVICE void load(int column, const float* state, i64 row_stride) {
#pragma unroll
        for (int j = 0; j < RowsPerThread; ++j)
            before_[column * RowsPerThread + j] =
                state != nullptr && exists(j) ? state[row(j) * row_stride] : 0.0f;
    }

    KGEN_DEVICE void store(int column, float* state, i64 row_stride) {
        if (thread_rank() / kLanes != 0) return;
#pragma unroll
        for (int j = 0; j < RowsPerThread; ++j)
            if (exists(j)) state[row(j) * row_stride] = before_[column * RowsPerThread + j];
    }

    // coefficients(t, c, x) returns c_t in c, and the term of the extra row in x. result(t, y, x) receives y_t and the
    // extra row; one thread of each group calls it.
    template <Direction W, class T, class Coefficients, class Result>
    KGEN_DEVICE void run(i64 steps, StepPointer<T> p, StepPointer<T> a, Coefficients coefficients,
                          Result result) {
        const int group = thread_rank() / kLanes;
        for (i64 begin = 0; begin < steps; begin += kGroups * StepsPerGroup) {
            const i64 first = begin + group * StepsPerGroup;
            // 1. The terms of the group's steps, and their sum.
            float terms[StepsPerGroup][kValues];
            float sums[kValues] = {};
#pragma unroll
            for (int s = 0; s < StepsPerGroup; ++s) {
                float c[Columns] = {};
                float more = 0.0f;
                const bool there = first + s < steps;
                const i64 t = time_of<W>(there ? first + s : 0, steps);
                if (there) coefficients(t, c, more);
#pragma unroll
                for (int j = 0; j < RowsPerThread; ++j) {
                    const bool used = there && exists(j);
                    const float factor = used ? to_float(a.first[t * a.stride + row(j)]) : 0.0f;
#pragma unroll
                    for (int x = 0; x < Columns; ++x)
                        terms[s][x * RowsPerThread + j] = used ? factor * c[x] : 0.0f;
                }
                if constexpr (Extra) terms[s][kValues - 1] = more;
#pragma unroll
                for (int i = 0; i < kValues; ++i) sums[i] += terms[s][i];
            }
            // 2. The state before the group's first step.
            if constexpr (Extra) before_[kValues - 1] = extra;
            scan_(sums, before_);
            if constexpr (Extra) extra = before_[kValues - 1];
            // 3. Step by step.
#pragma unroll
            for (int s = 0; s < StepsPerGroup; ++s) {
                const bool there = first + s < steps;
                const i64 t = time_of<W>(there ? first + s : 0, steps);
                float y[Columns] = {};
#pragma unroll
                for (int i = 0; i < kValues; ++i) sums[i] += terms[s][i];
#pragma unroll
                for (int j = 0; j < RowsPerThread; ++j) {
                    if (!there || !exists(j)) continue;
                    const float factor = to_float(p.first[t * p.stride + row(j)]);
#pragma unroll
                    for (int x = 0; x < Columns; ++x)
                        y[x] = fma(factor, sums[x * RowsPerThread + j], y[x]);
                }
#pragma unroll
                for (int x = 0; x < Columns; ++x) y[x] = lanes_sum<kLanes>(y[x]);
                if (there && thread_rank() % kLanes == 0) result(t, y, sums[kValues - 1]);
            }
        }
    }

private:
    static KGEN_DEVICE int row(int j) {
        return thread_rank() % kLanes * RowsPerThread + j;
    }
    static KGEN_DEVICE bool exists(int j) { return !kRagged || row(j) < Rows; }

    Scan scan_;
    float before_[kValues] = {};
};

}  // namespace kgen
