// The loop of value_columns.cuh with fewer instructions around the steps: a thread copies the same piece of every
// buffer, from addresses that it keeps, and rows of 16 bits are converted to fp32 once per block.
//
// Layout: that of value_columns.cuh.
//
// Shared memory, K and C short for the padded rows and the columns:
//
//     kStages x { Value rows[tensors][kTokens][K], c[kTokens][C]; W w[kTokens][K] }
//     float decays[kTokens][K], rows[tensors][kTokens][K]  of the steps in use; rows: if Value has 16 bits
//
// Synchronisation: as in value_columns.cuh.
//
// Config: that of ValueColumns.
#pragma once

#include "kgen/wkv7/prepared_rows.cuh"
#include "kgen/wkv7/value_columns.cuh"

namespace kgen::wkv7 {

// Copies rows of Tokens steps at a time, in the order of a loop, as copy_steps does. A thread keeps the address of its
// piece of the next steps.
template <Direction D, int Threads, int Tokens, int Pitch, int Vec, class T>
class RowCopier {
    static constexpr int kPieces = Pitch / Vec, kApart = max(Threads / kPieces, 1);  // steps
    static constexpr int kCopies = max(Tokens / kApart, 1);

public:
    // Whether a thread has the same piece of a row in all its copies.
    static constexpr bool kFits =
        Threads % kPieces == 0 && (Tokens % kApart == 0 || kApart > Tokens) && sizeof(T) * Vec >= 4;

    KGEN_DEVICE RowCopier(const StepPointer<T>& source, int width, i64 steps)
        : next_(source.first + time_of<D>(thread_rank() / kPieces, steps) * source.stride + column()),
          stride_((D == Direction::backward ? -1 : 1) * source.stride),
          inside_(column() < width) {}

    // `left`: steps that exist from the buffer's first one on.
    KGEN_DEVICE void start(T* target, i64 left) {
        // Opaque, so that offsets are computed here and not kept in registers, where they spilled.
        const int rank = opaque(thread_rank()), token = rank / kPieces;
        T* to = target + token * Pitch + rank % kPieces * Vec;
#pragma unroll
        for (int n = 0; n < kCopies; ++n) {
            // untested: batches of one step are all whole
            if (kApart <= Tokens || token < Tokens)
                cp_async_or_zero<sizeof(T) * Vec>(to + n * kApart * Pitch, next_ + n * kApart * stride_,
                                                  inside_ && token + n * kApart < left);
        }
        next_ += Tokens * stride_;
    }

private:
    static KGEN_DEVICE int column() { return thread_rank() % kPieces * Vec; }

    const T* next_;
    i64 stride_;
    bool inside_;
};

template <class Config, class Step>
struct PreparedLoop : ValueColumns<Config, Step> {
    using Base = ValueColumns<Config, Step>;
    using Base::columns, Base::steps, Base::rows, Base::c, Base::w, Base::column_factor;
    using Value = typename Config::Value;
    using W = typename Config::W;
    using State = typename Base::State;
    static constexpr Direction kDirection = Step::kDirection;
    static constexpr int kTensors = Step::kTensors, kTile = Config::kTile, kThreads = Base::kThreads;
    static constexpr int kColumns = Config::kColumns, kTokens = Config::kTokens, kPitch = Base::kPitch;
    static constexpr bool kWidens = sizeof(Value) == 2;
    template <class T, int Pitch, int Vec>
    using Copier = RowCopier<kDirection, kThreads, kTokens, Pitch, Vec, T>;
    using CopierX = Copier<Value, kPitch, Config::kVec>;
    using CopierC = Copier<Value, kColumns, Config::kVec>;
    using CopierW = Copier<W, kPitch, kgen::wkv::kVecOfW<Config>>;
    static constexpr bool kFits = CopierX::kFits && CopierC::kFits && CopierW::kFits;

    template <class BeforeStep, class Result>
    KGEN_DEVICE void operator()(const float* start, float* end, BeforeStep before_step, Result result) const {
        char* shared = dynamic_smem<char>();
        float* decays = reinterpret_cast<float*>(shared + Config::kStages * Base::kBufferBytes);
        float* wide = decays + kTokens * kPitch;
        State state;
        state.load(start, columns.extent, columns);
        const int keys = Config::kK;
        CopierX of_a{rows[0], keys, steps}, of_b{rows[1], keys, steps}, of_k{rows[2], keys, steps};
        CopierX of_r{rows[kTensors - 1], keys, steps};
        CopierC of_c{{c.first + columns.first, c.stride}, columns.width(), steps};
        CopierW of_w{w, keys, steps};
        for_each_batch<kTokens, Config::kStages>(
            steps,
            [&](i64 begin, int slot) {
                Value* to = reinterpret_cast<Value*>(shared + slot * Base::kBufferBytes);
                const i64 left = steps - begin;
                of_a.start(to, left);
                of_b.start(to + kTokens * kPitch, left);
                of_k.start(to + 2 * kTokens * kPitch, left);
                if (kTensors == 4) of_r.start(to + 3 * kTokens * kPitch, left);
                to += kTensors * kTokens * kPitch;
                of_c.start(to, left);
                of_w.start(reinterpret_cast<W*>(to + kTokens * kColumns), left);
            },
            [&](i64 begin, int there, int slot) {
                const Value* values = reinterpret_cast<const Value*>(shared + slot * Base::kBufferBytes);
                const Value* values_c = values + kTensors * kTokens * kPitch;
                put_decays(decays, reinterpret_cast<const W*>(values_c + kTokens * kColumns));
                if constexpr (kWidens) widen(wide, values);
                sync_block();
                i64 t = time_of<kDirection>(begin, steps);
#pragma unroll 1
                for (int i = 0; i < there; ++i, t += kDirection == Direction::backward ? -1 : 1) {
                    before_step(t, state);
                    float c_t[kTile], first[kTile], second[kTile];
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        c_t[x] = column_factor * to_float(values_c[i * kColumns + columns.in_block(x)]);
                    if constexpr (kWidens) {
                        Step::run(state, wide + i * kPitch, kTokens * kPitch, decays + i * kPitch, c_t, first, second);
                    } else {
                        Step::run(state, values + i * kPitch, kTokens * kPitch, decays + i * kPitch, c_t, first,
                                  second);
                    }
#pragma unroll
                    for (int x = 0; x < kTile; ++x)
                        if (columns.lane() == x % Config::kSplit && columns.uses(x))
                            result(t, columns.column(x), first[x], second[x]);
                }
            });
        if (end != nullptr) state.store(end, columns.extent, columns);
    }

private:
    using Four = Vec<float, 4>;

    // Calls visit(i) for the thread's quads of `Rows` rows.
    template <int Rows, class Visit>
    static KGEN_DEVICE void each_quad(Visit visit) {
        constexpr int kAll = Rows * kPitch / 4;
#pragma unroll 4
        for (int n = 0; n < ceil_div(kAll, kThreads); ++n) {
            const int i = thread_rank() + n * kThreads;
            if (kAll % kThreads == 0 || i < kAll) visit(i);
        }
    }
    static KGEN_DEVICE void put_decays(float* to, const W* from) {
        each_quad<kTokens>([&](int i) {
            float d[4];
            to_floats(reinterpret_cast<const Vec<W, 4>*>(from)[i], d);
#pragma unroll
            for (int x = 0; x < 4; ++x) d[x] = decay_and_slope<Config::kForm>(d[x]).decay;
            reinterpret_cast<Four*>(to)[i] = {{d[0], d[1], d[2], d[3]}};
        });
    }
    static KGEN_DEVICE void widen(float* to, const Value* from) {
        each_quad<kTensors * kTokens>([&](int i) {
            float x[4];
            to_floats(reinterpret_cast<const Vec<Value, 4>*>(from)[i], x);
            reinterpret_cast<Four*>(to)[i] = {{x[0], x[1], x[2], x[3]}};
        });
    }
};

// The loop to use: that of value_columns.cuh if a thread's copies are not the same in every buffer.
template <class Config, class Step, bool Fits = PreparedLoop<Config, Step>::kFits>
struct ColumnsLoop {
    using Type = ValueColumns<Config, Step>;
};
template <class Config, class Step>
struct ColumnsLoop<Config, Step, true> {
    using Type = PreparedLoop<Config, Step>;
};

}  // namespace kgen::wkv7
