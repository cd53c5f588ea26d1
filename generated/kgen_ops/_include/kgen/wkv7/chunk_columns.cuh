// Columns of wkv7's state, or of its gradient, in chunks of 16 steps on tensor cores (mma, sm_80); clamped decays.
//
// With P_i the product of a chunk's decays up to step i, per key, and the rows
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j / P_j     B_j = b_j / P_j
//
// a chunk is as follows. S is the state before it, G the gradient of the state after it; all [steps x steps] matrices
// have a causal mask:
//
//     forward                                             backward
//     X = A S + (A K^T) V               j < i             X = B diag(P_16) G + (B R^T) g       i >= j
//     sa = (I - A B^T)^-1 X             j < i             gsa = (I - B A^T)^-1 X               i > j
//     y = R S + (R K^T) V + (R B^T) sa  j <= i            gv = K diag(P_16) G + (K R^T) g + (K A^T) gsa
//     S = diag(P_16) (S + K^T V + B^T sa)                 G = diag(P_16) G + R^T g + A^T gsa
//
// Both directions are one loop: rows `x` and `z` read the state, rows `p` and `q` update it with `first` and c.
//
//                 x    z    p    q    c    first    second
//     forward     A    R    B    K    v    sa       y
//     backward    B    K    A    R    g    gsa      gv
//
// A clamped decay is at least exp(-0.607), so that 1 / P_j is below exp(9.71); this bound permits these rows. P is the
// exponential of a sum, and 1 / P that of the negative sum: nothing is divided.
//
// Products are TF32; with kSplit they are 3xTF32, and sums of logarithms carry their rounding errors along. NaN and
// Inf: as in kgen/chunked/chunk_mma.cuh; if a result is not finite, the block computes its sequence again, step by
// step.
//
// Layout: a block has kColumns value features of a head's state, 16 per warp. A warp holds the state, `first` and
// `second`, all transposed, as accumulators: their rows are its value features. The dimension k of a product runs in
// the order of accumulators' columns.
//
// Shared memory, K short for the padded keys:
//
//     kStages x { Value r[16][K], k, a, b; c[16][kColumns], later `second`; W w[16][K] }
//     float R[16][stride], K, A, B; decay[K]
//     float scores[4][16][24]: x p^T, x q^T, z p^T, z q^T; inverse[warps][16][24]
//
// Synchronisation: three block barriers per chunk: when a buffer has arrived, when its rows are scaled by decays, and
// when the scores are stored.
//
// Config: Value and W; kK; kWarps; kStages: number of buffers; kVec: elements per copy; kSplit.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/recurrent/recurrence.cuh"
#include "kgen/wkv/state_columns.cuh"
#include "kgen/wkv7/column_tensors.cuh"
#include "kgen/wkv7/triangular_inverse.cuh"

namespace kgen::wkv7 {

// The logarithm of a product of decays.
template <bool Precise>
class LogDecay {
public:
    // Adds one more step, with w in the form `clamp`.
    KGEN_DEVICE void add(float w) {
        if constexpr (Precise) {
            const float term = -kClamp * sigmoid(w);
            const float next = sum_ + term;
            lost_ += term - (next - sum_);  // |sum_| >= |term| from the second step on
            sum_ = next;
        } else {
            sum_ -= kClamp * fast_div(1.0f, 1.0f + fast_exp(-w));
        }
    }
    // The product of the decays to the power of Sign.
    template <int Sign>
    KGEN_DEVICE float power() const {
        if constexpr (Precise) {
            const float product = exp(Sign * sum_);
            return fma(product, Sign * lost_, product);
        } else {
            return fast_exp(Sign * sum_);
        }
    }

private:
    float sum_ = 0.0f;
    float lost_ = 0.0f;
};

// Second: whether `second` is an output. StateSteps: steps from one checkpoint to the next.
template <class Config, Direction D, bool Second, int StateSteps = 16>
struct ChunkColumns : ColumnTensors<typename Config::Value, typename Config::W, float, StateSteps> {
    using Tensors = ColumnTensors<typename Config::Value, typename Config::W, float, StateSteps>;
    using Tensors::width, Tensors::steps, Tensors::pitch, Tensors::r, Tensors::w, Tensors::k,
        Tensors::a, Tensors::b, Tensors::c, Tensors::c_factor, Tensors::second_factor,
        Tensors::checkpoints, Tensors::first, Tensors::second;
    using Value = typename Config::Value;
    using W = typename Config::W;
    using Ops = Tf32Operands<Config::kSplit>;
    static constexpr bool kBack = D == Direction::backward;
    static constexpr int kC = 16, kWarps = Config::kWarps, kThreads = 32 * kWarps;
    static constexpr int kColumns = 16 * kWarps;
    static constexpr int kTiles = ceil_div(Config::kK, 8), kKeys = 8 * kTiles;
    static constexpr int kStride = chunk_row_stride<float>(kKeys), kScore = 24;
    // Fragments of keys at a time. Two terms of four would spill.
    static constexpr int kCount =
        kTiles % 4 == 0 && !Config::kSplit ? 4 : kTiles % 2 == 0 ? 2 : 1;
    static constexpr int kBytesOfValues =
        kC * (4 * kKeys + kColumns) * static_cast<int>(sizeof(Value));
    static constexpr int kBufferBytes =
        kBytesOfValues + kC * kKeys * static_cast<int>(sizeof(W));
    using State = float[1][kTiles][4];
    using Steps = float[1][2][4];  // of a warp's value features and 16 steps

    // start, end: states [K, V]. Pointers to states and rows begin with the block's first column. A null start means
    // zeros; a null end is not written.
    KGEN_DEVICE void operator()(const float* start, float* end) const {
        char* shared = dynamic_smem<char>();
        const i64 chunks = ceil_div(steps, i64{kC});
        const auto begin_of = [&](i64 begin) { return kBack ? (chunks - 1) * kC - begin : begin; };
        State state;
        each_of_state([&](int tile, int i, i64 place, bool used) {
            state[0][tile][i] = start != nullptr && used ? start[place] : 0.0f;
        });
        float nonfinite = 0.0f;  // becomes NaN if a result is not finite
        for_each_batch<kC, Config::kStages>(
            chunks * kC,
            [&](i64 begin, int slot) { stage(shared + slot * kBufferBytes, begin_of(begin)); },
            [&](i64 begin, int, int slot) {
                run(shared + slot * kBufferBytes, begin_of(begin), state, nonfinite);
            });
        each_of_state([&](int tile, int i, i64 place, bool used) {
            const float s = state[0][tile][i];
            nonfinite = fma(s, 0.0f, nonfinite);
            if (end != nullptr && used) end[place] = s;
        });
        if (block_any_nonfinite<kWarps>(nonfinite))
            this->template step_by_step<D, Second, Config::kK, kColumns>(start, end);
    }

private:
    static KGEN_DEVICE float* rows_r() {
        return reinterpret_cast<float*>(dynamic_smem<char>() + Config::kStages * kBufferBytes);
    }
    static KGEN_DEVICE float* rows_k() { return rows_r() + kC * kStride; }
    static KGEN_DEVICE float* rows_a() { return rows_k() + kC * kStride; }
    static KGEN_DEVICE float* rows_b() { return rows_a() + kC * kStride; }
    static KGEN_DEVICE float* rows_x() { return kBack ? rows_b() : rows_a(); }
    static KGEN_DEVICE float* rows_z() { return kBack ? rows_k() : rows_r(); }
    static KGEN_DEVICE float* rows_p() { return kBack ? rows_a() : rows_b(); }
    static KGEN_DEVICE float* rows_q() { return kBack ? rows_r() : rows_k(); }
    static KGEN_DEVICE float* kept() { return rows_b() + kC * kStride; }
    static KGEN_DEVICE float* scores(int which) { return kept() + kKeys + which * kC * kScore; }
    static KGEN_DEVICE float* inverse() { return scores(4 + warp()); }
    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }

    // Calls visit(tile, i, place, used) for each element of the warp's state; place: in a state [K, V].
    template <class Visit>
    KGEN_DEVICE void each_of_state(Visit visit) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + 2 * lane.q + i % 2;
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                visit(tile, i, key * pitch + column, key < Config::kK && column < width);
            }
    }

    // Operand A from a tile whose columns are the operand's rows, times a factor; k runs along the tile's rows in
    // pairs.
    template <class T>
    static KGEN_DEVICE typename Ops::A a_columns(const T* tile, int stride, float factor) {
        const MmaLane lane = mma_lane();
        typename Ops::A found;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            Ops::put(found, i,
                     factor * to_float(tile[(2 * lane.q + i / 2) * stride + lane.g + i % 2 * 8]));
        return found;
    }

    static KGEN_DEVICE typename Ops::B b_columns(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        typename Ops::B found;
#pragma unroll
        for (int i = 0; i < 2; ++i) Ops::put(found, i, tile[(2 * lane.q + i) * stride + lane.g]);
        return found;
    }

    // sums += x rows^T for [16 x 16] scores, of which only one triangle is read.
    static KGEN_DEVICE void multiply_scores(Steps& sums, const typename Ops::A (&x)[1][2],
                                            const float* rows) {
        multiply_group<Ops, 1, 2, 2>(sums, 0, x, [&](int n, int i, typename Ops::B& found) {
            if (kBack ? i < n : i > n) return false;
            found = Ops::b_rows(rows + 8 * n * kScore + 8 * i, kScore);
            return true;
        });
    }

    static KGEN_DEVICE void fragments_of(typename Ops::A (&found)[1][2], const Steps& sums) {
        found[0][0] = Ops::of_sums(sums[0], 0);
        found[0][1] = Ops::of_sums(sums[0], 1);
    }

    // Whether the state before a chunk, in the loop's order, is stored.
    KGEN_DEVICE bool is_checkpoint(i64 begin) const {
        if constexpr (StateSteps == kC) return true;
        const i64 end = begin + kC;
        return kBack ? end >= steps || end % StateSteps == 0 : begin % StateSteps == 0;
    }

    // Computes the chunk whose first step is `begin`.
    KGEN_DEVICE void run(char* buffer, i64 begin, State& state, float& nonfinite) const {
        const int there = static_cast<int>(min(steps - begin, i64{kC}));
        Value* values_c = reinterpret_cast<Value*>(buffer) + 4 * kC * kKeys + 16 * warp();
        if (checkpoints != nullptr && is_checkpoint(begin))
            each_of_state([&](int tile, int i, i64 place, bool used) {
                if (used) checkpoints[begin / StateSteps * (Config::kK * pitch) + place] = state[0][tile][i];
            });
        // 1. Rows scaled by decays.
        apply_decays(buffer, there);
        sync_block();

        // 2. Scores, and the products that read the state.
        for (int which = warp(); which < (Second ? 4 : 2); which += kWarps) put_scores(which);
        if constexpr (kBack) decay_state(state);
        Steps read = {}, out = {};
#pragma unroll
        for (int first = 0; first < kTiles; first += kCount) {
            typename Ops::A of_state[1][kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) of_state[0][i] = Ops::of_sums(state[0], first + i);
            multiply_rows(read, of_state, rows_x() + 8 * first);
            if constexpr (Second) multiply_rows(out, of_state, rows_z() + 8 * first);
        }
        sync_block();

        // 3. `first`, `second`, and the state at the other end of the chunk.
        put_inverse();
        typename Ops::A x[1][2], of_c[1][2];
        of_c[0][0] = a_columns(values_c, kColumns, c_factor);
        of_c[0][1] = a_columns(values_c + 8 * kColumns, kColumns, c_factor);
        multiply_scores(read, of_c, scores(1));
        fragments_of(x, read);
        Steps solved = {};
        multiply_scores(solved, x, inverse());
        fragments_of(x, solved);
        if constexpr (Second) {
            multiply_scores(out, of_c, scores(3));
            multiply_scores(out, x, scores(2));
        }
        constexpr int kGroup = min(kTiles, Config::kSplit ? 2 : 4);
#pragma unroll
        for (int first = 0; first < kTiles; first += kGroup) {
            multiply_steps<kGroup>(state, first, of_c, rows_q());
            multiply_steps<kGroup>(state, first, x, rows_p());
        }
        if constexpr (!kBack) decay_state(state);
        if (first.first != nullptr) write_first(begin, there, solved, nonfinite);
        if constexpr (Second) write_second(values_c, begin, there, out, nonfinite);
    }

    static KGEN_DEVICE void decay_state(State& state) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) state[0][tile][i] *= kept()[8 * tile + 2 * lane.q + i % 2];
    }

    static KGEN_DEVICE void multiply_rows(Steps& sums, const typename Ops::A (&x)[1][kCount],
                                          const float* rows) {
        multiply_group<Ops, 1, 2, kCount>(sums, 0, x, [&](int n, int i, typename Ops::B& found) {
            found = Ops::b_rows(rows + 8 * n * kStride + 8 * i, kStride);
            return true;
        });
    }

    template <int Group>
    static KGEN_DEVICE void multiply_steps(State& state, int first, const typename Ops::A (&x)[1][2],
                                           const float* rows) {
        multiply_group<Ops, 1, Group, 2>(
            state, first, x, [&](int n, int i, typename Ops::B& found) {
                found = b_columns(rows + 8 * i * kStride + 8 * (first + n), kStride);
                return true;
            });
    }

    // Half of the threads scale r and a, the others k and b; each thread has all steps of its keys.
    KGEN_DEVICE void apply_decays(const char* buffer, int there) const {
        const Value* values = reinterpret_cast<const Value*>(buffer);
        const W* values_w = reinterpret_cast<const W*>(buffer + kBytesOfValues);
        for (int i = thread_rank(); i < 2 * kKeys; i += kThreads) {
            const int key = i % kKeys;
            const bool reads = i < kKeys;
            const Value* x = values + (reads ? 0 : kC * kKeys) + key;  // r or k
            const Value* z = x + 2 * kC * kKeys;                       // a or b
            float* put_x = (reads ? rows_r() : rows_k()) + key;
            float* put_z = (reads ? rows_a() : rows_b()) + key;
            LogDecay<Config::kSplit> decay;
            float before = 1.0f;
#pragma unroll
            for (int t = 0; t < kC; ++t) {
                if (t < there) decay.add(to_float(values_w[t * kKeys + key]));
                const float now =
                    reads ? decay.template power<1>() : decay.template power<-1>();
                put_x[t * kStride] = now * to_float(x[t * kKeys]);
                put_z[t * kStride] = (reads ? before : now) * to_float(z[t * kKeys]);
                before = now;
            }
            if (!reads) kept()[key] = decay.template power<1>();
        }
    }

    // One warp computes matrix `which` of the scores.
    static KGEN_DEVICE void put_scores(int which) {
        const float* readers = which < 2 ? rows_x() : rows_z();
        const float* updates = which % 2 == 0 ? rows_p() : rows_q();
        Steps sums = {};
#pragma unroll
        for (int first = 0; first < kTiles; first += kCount) {
            typename Ops::A x[1][kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                x[0][i] = Ops::a_rows(readers + 8 * (first + i), kStride);
            multiply_rows(sums, x, updates + 8 * first);
        }
        const MmaLane lane = mma_lane();
        // Whether a step reads its own update: y_t reads k_t and b_t, gsa_t and gv_t read r_t alone.
        const int own = (kBack ? which % 2 : which / 2) ? 1 : 0;
        const auto reads = [&](int i, int j) { return kBack ? i < j + own : j < i + own; };
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = lane.g + 8 * half, j = 8 * n + 2 * lane.q;
                *reinterpret_cast<Vec<float, 2>*>(scores(which) + i * kScore + j) = {
                    {reads(i, j) ? sums[0][n][2 * half] : 0.0f,
                     reads(i, j + 1) ? sums[0][n][2 * half + 1] : 0.0f}};
            }
    }

    // (I - x p^T)^-1 by substitution, with a lane per column; each warp computes it for itself.
    static KGEN_DEVICE void put_inverse() {
        const int column = lane_id() % kC;
        float found[kC];
        inverse_column<kBack>(scores(0), kScore, column, found);
        if (lane_id() < kC)
#pragma unroll
            for (int i = 0; i < kC; ++i) inverse()[i * kScore + column] = found[i];
        sync_warp();
    }

    KGEN_DEVICE void write_first(i64 begin, int there, const Steps& sums, float& nonfinite) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = 8 * n + 2 * lane.q + i % 2;
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                nonfinite = fma(sums[0][n][i], 0.0f, nonfinite);
                if (t < there && column < width) first.at(begin + t)[column] = sums[0][n][i];
            }
    }

    // Writes `second` through the warp's columns of c in shared memory.
    KGEN_DEVICE void write_second(Value* tile, i64 begin, int there, const Steps& out,
                                  float& nonfinite) const {
        const MmaLane lane = mma_lane();
        sync_warp();  // all lanes have read c
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float value = second_factor * out[0][n][i];
                nonfinite = fma(value, 0.0f, nonfinite);
                tile[(8 * n + 2 * lane.q + i % 2) * kColumns + lane.g + i / 2 * 8] =
                    from_float<Value>(value);
            }
        sync_warp();
        constexpr int kVec = Config::kVec, kPerRow = 16 / kVec;
        for (int i = lane_id(); i < kC * kPerRow; i += kWarpSize) {
            const int t = i / kPerRow, column = i % kPerRow * kVec;
            if (t < there && 16 * warp() + column < width)
                store_vec(second.at(begin + t) + 16 * warp() + column,
                          *reinterpret_cast<const Vec<Value, kVec>*>(tile + t * kColumns + column));
        }
    }

    KGEN_DEVICE void stage(char* buffer, i64 begin) const {
        constexpr Direction kForward = Direction::forward;
        constexpr int kVec = Config::kVec;
        Value* target = reinterpret_cast<Value*>(buffer);
        const StepPointer<Value> rows[4] = {r, k, a, b};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            copy_steps<kForward, kThreads, kC, kKeys, kVec>(target, rows[i], Config::kK, begin,
                                                            steps);
            target += kC * kKeys;
        }
        copy_steps<kForward, kThreads, kC, kColumns, kVec>(target, c, width, begin, steps);
        copy_steps<kForward, kThreads, kC, kKeys, kgen::wkv::kVecOfW<Config>>(
            reinterpret_cast<W*>(buffer + kBytesOfValues), w, Config::kK, begin, steps);
    }
};

}  // namespace kgen::wkv7
