// Columns of wkv7's state, or of its gradient, in chunks of 16 steps on fp64 tensor cores; any decay. Producer warps
// compute the rows scaled by decays, the scores and the inverse of the next chunk (f64_producer.cuh). Each consumer
// warp has 16 value features of the state.
//
// With S the state before a chunk, G the gradient of the state after it, g = scale * gy and D the product of the
// chunk's decays:
//
//     forward                             backward
//     X = A S + ak v                      X = B G + rb^T g
//     sa = (I - ab)^-1 X                  gsa = (I - ab)^-T X
//                                         gv = K G + rk^T g + ak^T gsa
//     S = D S + K^T v + B^T sa            G = D G + R^T g + A^T gsa
//
// so that both are one loop: some rows read the state; others update it, multiplied by c (v or g) and by the output
// `first` (sa or gsa). The output `second` is gv.
//
// Precision: fp64, also for the state; outputs and checkpoints are rounded to fp32. NaN and Inf: as in
// kgen/chunked/chunk_mma.cuh; if a result is not finite, the block computes its sequence again, step by step.
//
// Layout: a consumer holds the state, `first` and `second` as transposed accumulators: their rows are its value
// features. Keys or steps 2q and 2q + 1 of accumulators are numbers q and q + 4 of an operand A.
//
// Shared memory: F64Tiles, then a copy of the tensors (Kept).
//
// Synchronisation: one block barrier per chunk.
//
// Config: that of F64Producer, plus kWarps, the number of consumer warps.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/f64_producer.cuh"

namespace kgen::wkv7 {

template <class Config, Direction D>
struct F64Loop : ColumnTensors<typename Config::Value, typename Config::W> {
    using Value = typename Config::Value;
    using Tensors = ColumnTensors<Value, typename Config::W>;
    using Tensors::width, Tensors::steps, Tensors::pitch, Tensors::c, Tensors::c_factor, Tensors::second_factor,
        Tensors::checkpoints, Tensors::first, Tensors::second;
    static constexpr bool kBack = D == Direction::backward;
    using Tiles = F64Tiles<Config::kK, kBack>;
    using Tile = double[4];
    using Steps = Tile[2];  // of a warp's value features and 16 steps
    static constexpr int kWarps = Config::kWarps, kRowWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarpSize * (kWarps + kRowWarps), kColumns = 16 * kWarps;
    static constexpr int kTiles = 2 * Tiles::kKeyTiles;  // of 8 keys
    using State = Tile[kTiles];
    // Data that only the step-by-step repetition reads. In registers it would be spilled.
    struct Kept {
        Tensors tensors;
        const float* start;
        float* end;
    };
    static constexpr int kKept = max(Tiles::kBytes, 4 * Config::kK * kColumns), kBytes = kKept + 256;
    static_assert(sizeof(Kept) <= 256, "its place in shared memory");

    // start, end: states [K, V]. Pointers to states and rows begin with the block's first column. A null start means
    // zeros; a null end is not written.
    KGEN_DEVICE void operator()(const float* start, float* end) const {
        const int warp = thread_rank() / kWarpSize;
        const i64 chunks = ceil_div(steps, i64{16});
        float nonfinite = 0.0f;  // becomes NaN if a result is not finite
        Kept* const kept = reinterpret_cast<Kept*>(dynamic_smem<char>() + kKept);
        if (thread_rank() == 0) *kept = {*this, start, end};
        if (warp >= kWarps) {
            F64Producer<Config, kBack> producer(warp - kWarps);
            if (chunks > 0) producer.load(*this, begin_of(0, chunks));
#pragma unroll 1
            for (i64 i = 0; i < chunks; ++i) {
                producer.put(*this, static_cast<int>(i & 1), i + 1 < chunks ? begin_of(i + 1, chunks) : steps);
                sync_block();
            }
            sync_block();
        } else {
            State state;
            each_of_state(warp, [&](int tile, int i, i64 place, bool used) {
                state[tile][i] = widened(start != nullptr && used ? start[place] : 0.0f);
            });
            Columns of_c;
            load(of_c, begin_of(0, chunks), warp);
            sync_block();
#pragma unroll 1
            for (i64 i = 0; i < chunks; ++i) {
                run(static_cast<int>(i & 1), begin_of(i, chunks),
                    i + 1 < chunks ? begin_of(i + 1, chunks) : steps, warp, state, of_c, nonfinite);
                sync_block();
            }
            each_of_state(warp, [&](int tile, int i, i64 place, bool used) {
                const float s = static_cast<float>(state[tile][i]);
                nonfinite = fma(s, 0.0f, nonfinite);
                if (end != nullptr && used) end[place] = s;
            });
        }
        if (block_any_nonfinite<kWarps + kRowWarps>(nonfinite)) {
            const Kept again = *kept;
            again.tensors.template step_by_step<D, kBack, Config::kK, kColumns, Config::kForm>(again.start, again.end);
        }
    }

private:
    // Elements [2 * tile + step][half] of c: steps 8 * tile + 2q + step, value features g + 8 * half.
    struct Columns {
        Value of[4][2];
    };

    // Opaque: otherwise the compiler would keep the next iteration's state in fp32 as well, and round it twice.
    static KGEN_DEVICE double widened(float x) {
        double wide = x;
#if !KGEN_HOST
        asm volatile("" : "+d"(wide));
#endif
        return wide;
    }

    // The first step of the i-th chunk of the loop; backward, 0 if there is no such chunk.
    static KGEN_DEVICE i64 begin_of(i64 i, i64 chunks) { return 16 * (kBack ? max(chunks - 1 - i, i64{0}) : i); }

    // Calls visit(tile, i, place, used) for each element of the warp's state; place: in a state [K, V].
    template <class Visit>
    KGEN_DEVICE void each_of_state(int warp, Visit visit) const {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
            each_of_tile(tile, warp, [&](int i, i64 place, bool used) { visit(tile, i, place, used); });
    }
    template <class Visit>
    KGEN_DEVICE void each_of_tile(int tile, int warp, Visit visit) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = 8 * tile + 2 * lane.q + i % 2, column = 16 * warp + lane.g + i / 2 * 8;
            const bool there = Config::kK % 16 == 0 || key < Config::kK;
            visit(i, key * pitch + column, there && column < width);
        }
    }

    // How many steps of a chunk exist from the lane's first step on.
    KGEN_DEVICE int left_at(i64 begin) const {
        return static_cast<int>(min(steps - begin, i64{16})) - 2 * mma_lane().q;
    }

    KGEN_DEVICE void load(Columns& to, i64 begin, int warp) const {
        const MmaLane lane = mma_lane();
        const int column = 16 * warp + lane.g, left = left_at(begin);
        const Value* const from = c.first + (begin + 2 * lane.q) * c.stride + column;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int step = 8 * (i / 2) + i % 2;
                const bool there = step < left && column + 8 * half < width;
                to.of[i][half] = there ? from[step * c.stride + 8 * half] : from_float<Value>(0.0f);
            }
    }

    // An accumulator as operand A of eight keys or steps.
    static KGEN_DEVICE void operand_of(const Tile& x, double (&to)[4]) {
        to[0] = x[0], to[1] = x[2], to[2] = x[1], to[3] = x[3];
    }

    // sums += x M^T for a matrix M of scores, of which only one triangle is not zero.
    static KGEN_DEVICE void multiply_matrix(Steps& sums, const Steps& x, int slot, int which) {
        const MmaLane lane = mma_lane();
        const double* from = Tiles::matrix(slot, which);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                if (kBack ? m < n : m > n) continue;
                const DoublePair pair =
                    *reinterpret_cast<const DoublePair*>(from + Tiles::place(8 * n + lane.g, 8 * m + 2 * lane.q));
                mma_f64(sums[n], x[m], {pair.x, pair.y});
            }
    }

    // Computes the chunk whose first step is `begin`.
    KGEN_DEVICE void run(int slot, i64 begin, i64 next, int warp, State& state, Columns& raw, float& nonfinite) const {
        const MmaLane lane = mma_lane();
        Steps of_c;  // operands A
#pragma unroll
        for (int i = 0; i < 8; ++i)
            of_c[i / 4][i % 4] = static_cast<double>(c_factor) * to_float(raw.of[i / 2][i % 2]);
        load(raw, next, warp);

        // 1. The products that read the state and c; the state's checkpoint. They alternate, so that conversions and
        // products overlap.
        float* const checkpoint = checkpoints + begin / 16 * (Config::kK * pitch);
        Steps read = {}, out = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            each_of_tile(tile, warp, [&](int i, i64 place, bool used) {
                if (used) checkpoint[place] = static_cast<float>(state[tile][i]);
            });
            double of_state[4];
            operand_of(state[tile], of_state);
#pragma unroll
            for (int which = 0; which < Tiles::kReads; ++which)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const DoublePair pair = *reinterpret_cast<const DoublePair*>(
                        Tiles::read(slot, which) + (8 * n + lane.g) * Tiles::kReadPitch + 8 * tile + 2 * lane.q);
                    mma_f64(which == 0 ? read[n] : out[n], of_state, {pair.x, pair.y});
                }
        }
        multiply_matrix(read, of_c, slot, Tiles::kFirstOfC);

        // 2. The output `first`.
        Steps x, solved = {};
        operand_of(read[0], x[0]);
        operand_of(read[1], x[1]);
        multiply_matrix(solved, x, slot, Tiles::kInverse);
        write(first, begin, warp, solved, 1.0f, nonfinite);
        operand_of(solved[0], x[0]);
        operand_of(solved[1], x[1]);
        // Opaque: otherwise the accumulators would be copied into an operand before each product.
#pragma unroll
        for (int i = 0; i < 8; ++i) opaque(x[i / 4][i % 4], static_cast<u32>(steps >> 63));

        // 3. The output `second`.
        if constexpr (kBack) {
            multiply_matrix(out, of_c, slot, Tiles::kSecondOfC);
            multiply_matrix(out, x, slot, Tiles::kSecondOfFirst);
            write(second, begin, warp, out, second_factor, nonfinite);
        }

        // 4. The state at the other end of the chunk.
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const DoublePair decay =
                *reinterpret_cast<const DoublePair*>(Tiles::decay(slot) + 8 * tile + 2 * lane.q);
#pragma unroll
            for (int i = 0; i < 4; ++i) state[tile][i] *= i % 2 == 0 ? decay.x : decay.y;
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const double* from =
                    Tiles::update(slot, which) + 2 * lane.q * Tiles::kUpdatePitch + 8 * tile + lane.g;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const double rows[2] = {from[8 * n * Tiles::kUpdatePitch], from[(8 * n + 1) * Tiles::kUpdatePitch]};
                    mma_f64(state[tile], which == 0 ? of_c[n] : x[n], rows);
                }
            }
        }
    }

    template <class T>
    KGEN_DEVICE void write(const Rows<T>& to, i64 begin, int warp, const Steps& sums, float factor,
                           float& nonfinite) const {
        const MmaLane lane = mma_lane();
        const int column = 16 * warp + lane.g, left = left_at(begin);
        T* const row = to.at(begin + 2 * lane.q) + column;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int step = 8 * n + i % 2;
                const float value = factor * static_cast<float>(sums[n][i]);
                nonfinite = fma(value, 0.0f, nonfinite);
                if (step < left && column + i / 2 * 8 < width)
                    row[step * to.stride_t + i / 2 * 8] = from_float<T>(value);
            }
    }
};

}  // namespace kgen::wkv7
