// wkv7 forward by warps of two roles, in chunks of 16 steps; bf16 operands (mma, sm_80).
//
// Producer warps (halving_producer.cuh) compute what does not depend on the state, once per head and three chunks ahead.
// A consumer warp has 16 value features of the state in registers. With the rows, scores and the inverse of a chunk:
//
//     X  = A S + (A K^T) V          sa = (I - A B^T)^-1 X
//     y  = R S + (R K^T) V + (R B^T) sa
//     S  = diag(P_16) S + K^T V + B^T sa          K and B are decayed to the end of the chunk
//
// Only these products are serial in time. Scores, the inverse and the state that R reads have a high and a low term, as
// in chunk_mma.cuh; rows, the state that A reads, V, X and sa are rounded to bf16 as operands, and the sums are fp32.
//
// NaN and Inf: as in chunk_mma.cuh. Where an output is not finite the block computes its sequence again, step by step.
//
// Layout: S, X, sa and y are transposed accumulators, whose rows are value features. Those of one product become
// operand A of the next without moves between registers.
//
// Shared memory: that of the producers; bf16 v[kWarps][kStages][16][16], a ring of chunks for each consumer warp.
//
// Synchronisation: one block barrier per chunk. Between two barriers consumers read chunk n, and producers write the
// inverse of n + 1, the scores of n + 2 and the rows of n + 3. The inputs come by cp.async, kStages - 1
// chunks ahead, to the warps that read them.
//
// A Config has W; kForm: of the decays; kK; kWarps, kRowWarps: of consumers and producers; kStages: chunks of inputs in
// shared memory; kVec: elements per copy.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_tensors.cuh"
#include "kgen/wkv7/halving_producer.cuh"

namespace kgen::wkv7 {

template <class Config>
struct SpecializedLoop : ColumnTensors<bf16, typename Config::W> {
    using W = typename Config::W;
    using Tensors = ColumnTensors<bf16, W>;
    using Buffers = ChunkBuffers<Config::kK>;
    using Producer = HalvingProducer<W, Config::kForm, Config::kK, Config::kRowWarps, Config::kVec,
                                     Config::kStages>;
    using Copier = TileCopier<bf16, Config::kVec>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    static constexpr int kWarps = Config::kWarps, kRowWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarpSize * (kWarps + kRowWarps), kColumns = 16 * kWarps;
    static constexpr int kTiles = Producer::kTiles, kStages = Config::kStages, kAhead = 3;
    static constexpr int kSmemBytes =
        max(Producer::kBytes + 2 * kWarps * kStages * Copier::kElements, 4 * Config::kK * kColumns);
    static_assert(Buffers::kSlots == kAhead + 1, "a slot for the chunk in use and those ahead");
    using State = float[2 * kTiles][4];
    using Sums = float[2][4];

    // start: a state [K, V] whose first column is the block's, or null: zeros.
    KGEN_DEVICE void operator()(const float* start) const {
        const int chunks = static_cast<int>(ceil_div(this->steps, i64{16}));
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        if (warp() < kWarps) {
            consume_all(start, chunks, nonfinite);
        } else {
            produce_all(chunks);
        }
        if (block_any_nonfinite<kWarps + kRowWarps>(nonfinite))
            this->template step_by_step<Direction::forward, true, Config::kK, kColumns,
                                        Config::kForm>(start, nullptr);
    }

private:
    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }
    static KGEN_DEVICE Buffers buffers() { return {dynamic_smem<bf16>()}; }
    // The warp's value features of a chunk.
    static KGEN_DEVICE u16* values(int chunk) {
        return dynamic_smem<u16>() + Producer::kBytes / 2 +
               (warp() * kStages + (chunk & (kStages - 1))) * Copier::kElements;
    }
    // The end of an interval. Warps of both roles arrive at barriers of their own code.
    static KGEN_DEVICE void end_interval() { named_barrier_sync(1, kThreads); }

    KGEN_DEVICE void produce_all(int chunks) const {
        Producer producer(buffers(), warp() - kWarps, this->steps, this->r, this->k, this->a,
                          this->b, this->w);
#pragma unroll 1
        for (int chunk = -kAhead; chunk < chunks; ++chunk) {
            if (chunk + 2 >= 0 && chunk + 2 < chunks) producer.put_scores(chunk + 2);
            if (chunk + 1 >= 0 && chunk + 1 < chunks) producer.put_inverse(chunk + 1);
            if (chunk + kAhead < chunks) producer.put_rows(chunk + kAhead);
            end_interval();
        }
    }

    KGEN_DEVICE void consume_all(const float* start, int chunks, float& nonfinite) const {
        State state;
        load_state(start, state);
        Copier copier(this->c, 16 * warp());
        const auto copy = [&](int chunk) {
            const i64 left = max(min(this->steps - i64{chunk} * 16, i64{16}), i64{0});
            copier.start(values(chunk), static_cast<int>(left), this->width - 16 * warp());
            cp_async_commit();
            copier.advance();
        };
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) end_interval();
        Output output(*this, warp());
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            cp_async_wait<kStages - 2>();
            sync_warp();  // all lanes' copies are there, and all lanes have read the slot that is filled next
            copy(chunk + kStages - 1);
            Sums y = {};
            consume(chunk, state, y);
            output.write(y, nonfinite);
            end_interval();
        }
    }

    KGEN_DEVICE void load_state(const float* start, State& state) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + 2 * lane.q + i % 2;
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                const bool used = start != nullptr && key < Config::kK && column < this->width;
                state[tile][i] = used ? start[key * this->pitch + column] : 0.0f;
            }
    }

    // sums += x y^T, x operand A, y [16][16] of a high and a low term.
    static KGEN_DEVICE void multiply_rows(Sums& sums, const Half::A& x, const bf16* y) {
#pragma unroll
        for (int term = 1; term >= 0; --term) {
            Half::B b[2];
            ScoreTile::two_rows(b, y + term * Buffers::kTerm);
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x, b[n]);
        }
    }

    // sums += x y.
    static KGEN_DEVICE void multiply_columns(Sums& sums, const Half::A& x, const bf16* y) {
#pragma unroll
        for (int term = 1; term >= 0; --term) {
            Half::B b[2];
            ScoreTile::two_columns(b, y + term * Buffers::kTerm);
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x, b[n]);
        }
    }

    // What Half::of_sums(state, tile) lost by rounding.
    static KGEN_DEVICE Half::A rest_of(const State& state, const Half::A& rounded, int tile) {
        Half::A rest;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 high = unpack2<bf16>(rounded.pair[i]);
            const float* exact = state[tile + i / 2] + i % 2 * 2;
            rest.pair[i] = pack2<bf16>(exact[0] - high.x, exact[1] - high.y);
        }
        return rest;
    }

    static KGEN_DEVICE void consume(int chunk, State& state, Sums& y) {
        const Buffers from = buffers();
        // 1. What the chunk reads of v and of the state.
        const Half::A v = ScoreTile::a_columns(reinterpret_cast<const bf16*>(values(chunk)));
        Sums x = {}, of_v = {};
        multiply_rows(of_v, v, from.scores(chunk, kScoreAK));
        const bf16 *rows_a = from.rows(chunk, kRowA), *rows_r = from.rows(chunk, kRowR);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const Half::A s = Half::of_sums(state, 2 * tile);
            Half::B a[2], r[2];
            RowTile::two_rows(a, rows_a, tile);
            RowTile::two_rows(r, rows_r, tile);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                Half::multiply<0>(x[n], s, a[n]);
                Half::multiply<0>(y[n], s, r[n]);
            }
            const Half::A rest = rest_of(state, s, 2 * tile);
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(y[n], rest, r[n]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n][i] += of_v[n][i];

        // 2. sa, y.
        Sums solved = {};
        multiply_columns(solved, Half::of_sums(x, 0), from.inverse(chunk));
        const Half::A sa = Half::of_sums(solved, 0);
        multiply_rows(y, v, from.scores(chunk, kScoreRK));
        multiply_rows(y, sa, from.scores(chunk, kScoreRB));

        // 3. The state behind the chunk.
        const bf16 *rows_k = from.rows(chunk, kRowK), *rows_b = from.rows(chunk, kRowB);
        const float* decay = from.decay(chunk) + 2 * mma_lane().q;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            Half::B k[2], b[2];
            RowTile::two_columns(k, rows_k, tile);
            RowTile::two_columns(b, rows_b, tile);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float(&s)[4] = state[2 * tile + n];
                const auto d =
                    *reinterpret_cast<const Vec<float, 2>*>(decay + 16 * tile + 8 * n);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[i] *= d[i % 2];
                Half::multiply<0>(s, v, k[n]);
                Half::multiply<0>(s, sa, b[n]);
            }
        }
    }

    // Writes a warp's outputs, chunk after chunk.
    class Output {
        static constexpr bool kQuads = Config::kVec % 4 == 0;

    public:
        KGEN_DEVICE Output(const SpecializedLoop& loop, int warp)
            : column_(16 * warp + (kQuads ? column_of_quad() : 2 * mma_lane().q)),
              width_(loop.width),
              next_(loop.second.at(mma_lane().g) + column_),
              eighth_(8 * loop.second.stride_t),
              left_(loop.steps - mma_lane().g),
              factor_(loop.second_factor) {}

        // sums: transposed accumulators.
        KGEN_DEVICE void write(Sums& sums, float& nonfinite) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[i / 4][i % 4] *= factor_;
                nonfinite = fma(sums[i / 4][i % 4], 0.0f, nonfinite);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pair[2];  // of step g + 8 * half, value features 2q + 8 n
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    pair[n] = transpose_matrix(pack2<bf16>(sums[half][2 * n], sums[half][2 * n + 1]));
                bf16* row = next_ + half * eighth_;
                const bool there = left_ > 8 * half;
                if constexpr (kQuads) {
                    const Vec<u32, 2> quad = quad_of_pairs(pair[0], pair[1]);
                    if (there && column_ < width_) *reinterpret_cast<Vec<u32, 2>*>(row) = quad;
                } else {
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        if (there) store_pair(row + 8 * n, 8 * n, pair[n]);
                }
            }
            next_ += 2 * eighth_;
            left_ -= 16;
        }

    private:
        KGEN_DEVICE void store_pair(bf16* target, int columns, u32 pair) const {
            if constexpr (Config::kVec == 2) {
                if (column_ + columns < width_) *reinterpret_cast<u32*>(target) = pair;
            } else {
                const Vec<bf16, 2> two = bit_cast<Vec<bf16, 2>>(pair);
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    if (column_ + columns + x < width_) target[x] = two[x];
            }
        }

        int column_, width_;
        bf16* next_;
        i64 eighth_, left_;
        float factor_;
    };
};

}  // namespace kgen::wkv7
