// wkv7 by producer and consumer warps, in chunks of 16 steps; bf16 operands (mma, sm_80). A Pass (loop_passes.cuh) is
// the loop of the forward pass, or one of the two loops of the backward pass.
//
// Producer warps (halving_producer.cuh; for clamped decays also quotient_producer.cuh) compute what does not depend on
// the state, once per head and three chunks ahead. Each consumer warp holds 16 value features of the state in
// registers. From the rows, the scores and the inverse of a chunk it computes:
//
//     X  = A S + (A K^T) V          sa = (I - A B^T)^-1 X
//     y  = R S + (R K^T) V + (R B^T) sa
//     S  = diag(P_16) S + K^T V + B^T sa          K and B are decayed to the end of the chunk
//
// and backward, with chunks from the last to the first and G the gradient of the state; R and the scores with r are
// multiplied by the scale, so that gy is not:
//
//     X  = B G + (R B^T)^T gy       gsa = ((I - A B^T)^-1)^T X
//     gv = K G + (R K^T)^T gy + (A K^T)^T gsa
//     G  = diag(P_16) G + R^T gy + A^T gsa
//
// With quotients, K and B are relative to the beginning of the chunk: diag(P_16) multiplies S after its update, and G
// before all products.
//
// Only these products are serial in time. Scores and the inverse have a high and a low term, as in chunk_mma.cuh; V and
// gy are bf16 already. Rows, the state, X, sa and gsa are operands in bf16, with a low term where the class `Pass` says
// so. Sums are fp32.
//
// NaN and Inf: as in chunk_mma.cuh. If an output is not finite, the block computes its sequence again, step by step.
//
// Layout: S, X, sa and y are transposed accumulators: their rows are value features. The accumulators of one product
// become operand A of the next product without moves between registers.
//
// Shared memory: that of the producers; bf16 c[kWarps][kStages][16][16], a ring of chunks of v or gy for each consumer
// warp.
//
// Synchronisation: one block barrier per chunk. Between two barriers consumers read chunk n, and producers write the
// inverse of n + 1, the scores of n + 2 and the rows of n + 3. With Pass::kConsumerScores consumers write the scores.
// The inputs come by cp.async, kStages - 1 chunks ahead, to the warps that read them.
//
// Config: W; kForm: of the decays; kK; kWarps, kRowWarps: numbers of consumer and producer warps; kStages: chunks of
// inputs in shared memory; kVec: elements per copy; kRowCopies: whether warps copy whole rows for each other.
// Checkpoint: dtype of the states that are stored, float or bf16. StateSteps: steps from one stored state to the next.
// LevelLoop: see HalvingProducer.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_outputs.cuh"
#include "kgen/wkv7/halving_producer.cuh"
#include "kgen/wkv7/quotient_producer.cuh"

namespace kgen::wkv7 {

// The producer of a Pass.
template <class Config, class Pass, bool LevelLoop, bool Quotients = Pass::kQuotients>
struct ProducerChoice {
    using Type = HalvingProducer<Pass, typename Config::W, Config::kForm, Config::kK, Config::kRowWarps,
                                 Config::kVec, Config::kStages, Config::kRowCopies, LevelLoop>;
};
template <class Config, class Pass, bool LevelLoop>
struct ProducerChoice<Config, Pass, LevelLoop, true> {
    using Type = QuotientProducer<Pass, typename Config::W, Config::kForm, Config::kK, Config::kRowWarps,
                                  Config::kVec, Config::kStages, Config::kRowCopies>;
};

// The scores that consumers compute. Consumers hold the state in registers, so that heads above 64 keys leave room for
// the operands of only two tiles.
struct NoScores {
    template <class Buffers>
    KGEN_DEVICE explicit NoScores(const Buffers&) {}
};
template <class Config, class Pass, bool Consumers = Pass::kConsumerScores>
struct ScoresChoice {
    using Type = NoScores;
};
template <class Config, class Pass>
struct ScoresChoice<Config, Pass, true> {
    using Type = QuotientScores<Pass, Config::kK, Config::kK <= 64 ? 4 : 2>;
};

template <class Config, class Pass, class Checkpoint = float, bool LevelLoop = false, int StateSteps = 16>
struct SpecializedLoop : ColumnTensors<bf16, typename Config::W, Checkpoint, StateSteps> {
    using W = typename Config::W;
    using Tensors = ColumnTensors<bf16, W, Checkpoint, StateSteps>;
    using Buffers = ChunkBuffers<Config::kK, Pass>;
    using Producer = typename ProducerChoice<Config, Pass, LevelLoop>::Type;
    using Scores = typename ScoresChoice<Config, Pass>::Type;
    // Whether consumers copy rows for each other. A warp that computes columns of a transition matrix reads no c.
    static constexpr bool kRowCopies = Config::kRowCopies && (Pass::kFirst || Pass::kSecond);
    static constexpr int kValues = 256, kWarpValues = Config::kStages * kValues + (kRowCopies ? 16 : 0);  // of c
    using Copier = Select<kRowCopies,
                          WholeRowCopier<bf16, Config::kVec, Config::kWarps, 1, kWarpValues, 0, Pass::kDirection>,
                          TileCopier<bf16, Config::kVec, Pass::kDirection>>;
    using Order = ChunkOrder<Pass::kDirection>;
    static constexpr bool kBack = Pass::kDirection == Direction::backward;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    static constexpr int kWarps = Config::kWarps, kRowWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarpSize * (kWarps + kRowWarps), kColumns = 16 * kWarps;
    static constexpr int kTiles = Producer::kTiles, kStages = Config::kStages, kAhead = 3;
    static constexpr int kSmemBytes =
        max(Producer::kBytes + 2 * kWarps * kWarpValues, 4 * Config::kK * kColumns);
    static_assert(Buffers::kSlots == kAhead + 1, "a slot for the chunk in use and those ahead");
    static_assert(4 * Config::kK * kColumns <= Buffers::kBytes,
                  "at the end copies are in flight, which the state of step_by_step must not reach");
    using State = float[2 * kTiles][4];
    using Sums = float[2][4];

    // start: a state [K, V] whose first column is the block's, or null: zeros.
    KGEN_DEVICE void operator()(const float* start) const {
        (*this)(start, [&] { run_steps<Pass::kSecond>(start, nullptr); });
    }

    // The same, but all threads call again() if an output of the block is not finite.
    template <class Again>
    KGEN_DEVICE void operator()(const float* start, Again again) const {
        const Order order(this->steps);
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        if (warp() < kWarps) {
            State state;
            load_state(start, state);
            consume_all(state, 16 * warp(), this->width - 16 * warp(), order, nonfinite);
        } else {
            produce_all(order.chunks);
        }
        if (block_any_nonfinite<kWarps + kRowWarps>(nonfinite)) again();
    }

    // Computes the steps one by one. end: receives the state after them, or null. Outputs: see step_by_step.
    template <bool Second, bool Outputs = true>
    KGEN_DEVICE void run_steps(const float* start, float* end) const {
        this->template step_by_step<Pass::kDirection, Second, Config::kK, kColumns, Config::kForm, Outputs>(
            start, end);
    }

    // Runs a loop whose only result is the state after it. columns_of(warp): the SegmentColumns of a consumer warp.
    template <class ColumnsOf>
    KGEN_DEVICE void run_segment(ColumnsOf columns_of) const {
        const Order order(this->steps);
        if (warp() < kWarps) {
            const auto columns = columns_of(warp());
            State state;
            columns.begin(state);
            float nonfinite = 0.0f;  // there are no outputs
            consume_all(state, columns.first_value(), columns.values(), order, nonfinite);
            columns.end(state);
        } else {
            produce_all(order.chunks);
        }
    }

private:
    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }
    static KGEN_DEVICE Buffers buffers() { return {dynamic_smem<bf16>()}; }
    // The warp's value features of v or gy, of a chunk.
    static KGEN_DEVICE u16* values(int chunk) {
        return dynamic_smem<u16>() + Producer::kBytes / 2 + warp() * kWarpValues +
               (chunk & (kStages - 1)) * kValues;
    }
    // Ends an interval. It is a named barrier, because the warps of the two roles arrive from different code.
    static KGEN_DEVICE void end_interval() { named_barrier_sync(1, kThreads); }

    KGEN_DEVICE void produce_all(int chunks) const {
        Producer producer(buffers(), warp() - kWarps, this->c_factor, this->steps, this->r, this->k,
                          this->a, this->b, this->w);
#pragma unroll 1
        for (int chunk = -kAhead; chunk < chunks; ++chunk) {
            if constexpr (!Pass::kConsumerScores)
                if (chunk + 2 >= 0 && chunk + 2 < chunks) producer.put_scores(chunk + 2);
            if (chunk + 1 >= 0 && chunk + 1 < chunks) producer.put_inverse(chunk + 1);
            if (chunk + kAhead < chunks) producer.put_rows(chunk + kAhead);
            producer.await_inputs();
            end_interval();
        }
    }

    KGEN_DEVICE Copier copier_of(int column, const Order& order) const {
        if constexpr (kRowCopies) {
            return {this->c, column - 16 * warp(), order.first(0), static_cast<int>(thread_rank())};
        } else {
            return {this->c, column, order.first(0)};
        }
    }

    // Called by a consumer: computes its matrices of a chunk.
    static KGEN_DEVICE void put_scores(const Scores& scores, int chunk) {
#pragma unroll 1
        for (int i = warp(); i < Scores::kMatrices; i += kWarps)
            scores.put_score(chunk, Scores::matrix(i));
    }

    // column: the warp's first column in c and in the outputs; `width` columns of c exist from there on.
    KGEN_DEVICE void consume_all(State& state, int column, int width, const Order& order,
                                 float& nonfinite) const {
        Copier copier = copier_of(column, order);
        const auto copy = [&](int chunk) {
            if constexpr (kRowCopies) {
                copier.start(values(chunk) - warp() * kWarpValues, order.left(chunk), this->width);
            } else {
                copier.start(values(chunk), order.left(chunk), width);
            }
            cp_async_commit();
            copier.advance();
        };
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
        const Scores scores(buffers());
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) {
            if constexpr (Pass::kConsumerScores)
                if (chunk >= 1 && chunk - 1 < order.chunks) put_scores(scores, chunk - 1);
            if constexpr (kRowCopies)
                if (chunk == kAhead - 1) cp_async_wait<kStages - 2>();
            end_interval();
        }
        ColumnOutput<Config::kVec, Pass::kDirection> second(*this, column, order.first(0));
        SumsOutput<Config::kK, Config::kVec, Pass::kDirection, Checkpoint, StateSteps> first(
            *this, column, order.first(0));
#pragma unroll 1
        for (int chunk = 0; chunk < order.chunks; ++chunk) {
            if constexpr (!kRowCopies) {
                cp_async_wait<kStages - 2>();
                sync_warp();  // all lanes' copies are there, and all lanes have read the slot that is filled next
            }
            copy(chunk + kStages - 1);
            if constexpr (Pass::kFirst && StateSteps == 16) {
                first.write_state(state);
            } else if constexpr (Pass::kFirst) {
                if (order.template is_checkpoint<StateSteps>(chunk)) first.write_state(state);
            }
            if constexpr (Pass::kConsumerScores)
                if (chunk + 2 < order.chunks) put_scores(scores, chunk + 2);
            Sums solved, read = {};
            consume(chunk, state, solved, read);
            if constexpr (Pass::kFirst) first.write(solved, nonfinite);
            if constexpr (Pass::kSecond) second.write(read, nonfinite);
            if constexpr (kRowCopies) cp_async_wait<kStages - 2>();  // copies for the next chunk
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

    // sums += x y^T: x is an operand A, y is [16][16] of a high and a low term, or of the high term alone (terms = 1).
    // If Columns: sums += x y.
    template <bool Columns>
    static KGEN_DEVICE void multiply(Sums& sums, const Half::A& x, const bf16* y, int terms = 2) {
#pragma unroll
        for (int term = terms - 1; term >= 0; --term) {
            Half::B b[2];
            if constexpr (Columns) {
                ScoreTile::two_columns(b, y + term * Buffers::kTerm);
            } else {
                ScoreTile::two_rows(b, y + term * Buffers::kTerm);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x, b[n]);
        }
    }

    // sums += scores times x. In backward loops early steps read late ones, by the transposed scores.
    static KGEN_DEVICE void multiply_scores(Sums& sums, const Half::A& x, int chunk, Score which) {
        multiply<kBack>(sums, x, buffers().scores(chunk, which));
    }

    // The rounding error of Half::of_sums(sums, tile), as an operand.
    template <int Tiles>
    static KGEN_DEVICE Half::A rest_of(const float (&sums)[Tiles][4], const Half::A& rounded,
                                       int tile) {
        Half::A rest;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 high = unpack2<bf16>(rounded.pair[i]);
            const float* exact = sums[tile + i / 2] + i % 2 * 2;
            rest.pair[i] = pack2<bf16>(exact[0] - high.x, exact[1] - high.y);
        }
        return rest;
    }

    // sums += x y^T for a tile of one term of rows.
    static KGEN_DEVICE void multiply_rows(Sums& sums, const Half::A& x, const Half::B (&y)[2]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x, y[n]);
    }

    // state += x^T c for 16 keys, with all terms of the rows x and Terms terms of c.
    template <Row Which, int Terms>
    static KGEN_DEVICE void update(State& state, const bf16* rows, int tile,
                                   const Half::A (&c)[Terms]) {
#pragma unroll
        for (int term = kTermsOf<Pass, Which> - 1; term >= 0; --term) {
            Half::B b[2];
            RowTile::two_columns(
                b, rows + Buffers::template kRowsOf<Which> + term * RowTile::kElements, tile);
#pragma unroll
            for (int of_c = term == 0 ? Terms - 1 : 0; of_c >= 0; --of_c)
#pragma unroll
                for (int n = 0; n < 2; ++n) Half::multiply<0>(state[2 * tile + n], c[of_c], b[n]);
        }
    }

    static KGEN_DEVICE void consume(int chunk, State& state, Sums& solved, Sums& read) {
        const Buffers from = buffers();
        const bf16* rows = from.rows(chunk);
        if constexpr (Pass::kQuotients && kBack) {  // rows B and K are relative to the chunk's beginning
            const float* of_chunk = from.decay(chunk) + 2 * mma_lane().q;
#pragma unroll
            for (int tile = 0; tile < 2 * kTiles; ++tile) {
                const auto d = *reinterpret_cast<const Vec<float, 2>*>(of_chunk + 8 * tile);
#pragma unroll
                for (int i = 0; i < 4; ++i) state[tile][i] *= d[i % 2];
            }
        }
        // 1. The products that read c and the state.
        const Half::A c[1] = {
            ScoreTile::a_columns(reinterpret_cast<const bf16*>(values(chunk)))};
        Sums x = {}, of_c = {};
        multiply_scores(of_c, c[0], chunk, Pass::kScoreXQ);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const Half::A s = Half::of_sums(state, 2 * tile);
            Half::B of_x[2], of_z[2], low[2];
            RowTile::two_rows(of_x, rows + Buffers::template kRowsOf<Pass::kX>, tile);
            if constexpr (Pass::kSecond)
                RowTile::two_rows(of_z, rows + Buffers::template kRowsOf<Pass::kZ>, tile);
            if constexpr (kTermsOf<Pass, Pass::kX> == 2) {
                RowTile::two_rows(
                    low, rows + Buffers::template kRowsOf<Pass::kX> + RowTile::kElements, tile);
                multiply_rows(x, s, low);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                Half::multiply<0>(x[n], s, of_x[n]);
                if constexpr (Pass::kSecond) Half::multiply<0>(read[n], s, of_z[n]);
            }
            if constexpr (Pass::kSecond && kTermsOf<Pass, Pass::kZ> == 2) {
                RowTile::two_rows(
                    low, rows + Buffers::template kRowsOf<Pass::kZ> + RowTile::kElements, tile);
                multiply_rows(read, s, low);
            }
            const Half::A rest = rest_of(state, s, 2 * tile);
            if constexpr (Pass::kStateTerms == 2) multiply_rows(x, rest, of_x);
            if constexpr (Pass::kSecond && Pass::kZStateTerms == 2) multiply_rows(read, rest, of_z);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[n][i] += of_c[n][i];
                solved[n][i] = 0.0f;
            }

        // 2. The outputs `first` and `second`.
        const Half::A high = Half::of_sums(x, 0);
        if constexpr (Pass::kReadTerms == 2)
            multiply<!kBack>(solved, rest_of(x, high, 0), from.inverse(chunk), 1);
        multiply<!kBack>(solved, high, from.inverse(chunk));
        Half::A sums[Pass::kSumsTerms];
        sums[0] = Half::of_sums(solved, 0);
        if constexpr (Pass::kSumsTerms == 2) sums[1] = rest_of(solved, sums[0], 0);
        if constexpr (Pass::kSecond) {
            multiply_scores(read, c[0], chunk, Pass::kScoreZQ);
            if constexpr (Pass::kSumsTerms == 2)
                multiply<kBack>(read, sums[1], from.scores(chunk, Pass::kScoreZP), 1);
            multiply_scores(read, sums[0], chunk, Pass::kScoreZP);
        }

        // 3. The state after the chunk.
        const float* decay = from.decay(chunk) + 2 * mma_lane().q;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if constexpr (Pass::kQuotients) {
                update<Pass::kQ>(state, rows, tile, c);
                update<Pass::kP>(state, rows, tile, sums);
                if constexpr (kBack) continue;  // decayed before all products
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const auto d =
                    *reinterpret_cast<const Vec<float, 2>*>(decay + 16 * tile + 8 * n);
#pragma unroll
                for (int i = 0; i < 4; ++i) state[2 * tile + n][i] *= d[i % 2];
            }
            if constexpr (!Pass::kQuotients) {
                update<Pass::kQ>(state, rows, tile, c);
                update<Pass::kP>(state, rows, tile, sums);
            }
        }
    }
};

}  // namespace kgen::wkv7
