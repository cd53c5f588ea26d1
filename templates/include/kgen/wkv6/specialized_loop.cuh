// wkv5 and wkv6 forward by producer and consumer warps, in chunks of 16 steps; bf16 operands (mma, sm_80).
//
// Producer warps (row_producer.cuh) compute what does not depend on the state, once per head and up to kRowWarps chunks
// ahead. Each consumer warp holds 16 value features of the state in registers. From the rows and scores of a chunk it
// computes:
//
//     y  = R S + scores V        scores: R K^T below the diagonal, sum_k r u k on it
//     S  = diag(P) S + K^T V     K is decayed to the end of the chunk
//
// Only these products are serial in time. The scores and the state that R reads have a high and a low term, and so do
// rows R if kRTerms is 2. Other rows and V are bf16 operands. Sums are fp32.
//
// NaN and Inf: as in chunk_mma.cuh. If an output is not finite, the block computes its sequence again, step by step.
//
// Layout: S and y are transposed accumulators: their rows are value features, so that S is an operand A as it is.
//
// Shared memory: that of the producers; bf16 v[kWarps][kStages][16][16], a ring of chunks for each consumer warp, or
// with kRowCopies one ring for all, v[kStages][16][16 kWarps], with rows padded to 16, 64 or 128.
//
// Synchronisation: one block barrier per chunk. Between two barriers consumers read chunk n, and each producer writes a
// part of one of the chunks n + 1 to n + kRowWarps. The inputs come by cp.async, kStages - 1 chunks or parts ahead, to
// the warps that read them. With kRowCopies consumers copy rows of v for each other, which arrive before the barrier
// that begins the chunk, and producers copy whole rows of their next chunk (row_copier.cuh).
//
// Config: W and U; kForm: of the decays; kPerStep: whether w has a row per step; kK, kV; kWarps, kRowWarps: numbers of
// consumer and producer warps; kStages: chunks of inputs in shared memory; kVec: elements per copy; kPowers: powers of
// decays come from a table; kFixedParts: the producers' parts of a chunk are unrolled; kRTerms: bf16 terms of rows R;
// kRowCopies: whole rows are copied; kFinalState: whether a block may have to write the state after its last step. It
// computes that state from the state before its segment and from what the segment adds (segment_states.cuh).
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/wkv6/row_producer.cuh"

namespace kgen::wkv6 {

template <class Config>
struct SpecializedLoop {
    using W = typename Config::W;
    using U = typename Config::U;
    using Decay = DecayRows<W, U, Config::kForm>;
    using Buffers = ChunkBuffers<Config::kK, Config::kRowWarps, Config::kPerStep, Config::kPowers,
                                 Config::kRTerms>;
    using Producer = RowProducer<W, U, Config::kForm, Config::kPerStep, Config::kK, Config::kRowWarps,
                                 Config::kVec, Config::kStages, Config::kPowers, Config::kFixedParts,
                                 Config::kRTerms, Config::kRowCopies>;
    using Copier = wkv7::TileCopier<bf16, Config::kVec>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    static constexpr int kWarps = Config::kWarps, kRowWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarpSize * (kWarps + kRowWarps), kColumns = 16 * kWarps;
    static constexpr int kTiles = Producer::kTiles, kStages = Config::kStages;
    using ValueTile = InputTile<bf16, kColumns>;
    static constexpr int kRing = Config::kRowCopies ? ValueTile::kElements : kWarps * Copier::kElements;
    static constexpr int kSmemBytes =
        max(Producer::kBytes + 2 * kStages * kRing,
            step_by_step_bytes(Config::kK, kColumns));
    using State = float[2 * kTiles][4];
    using Sums = float[2][4];

    RecurrenceRows<bf16> rows;  // a and b are r and k
    RecurrenceStates states;
    Decay decay;

    KGEN_DEVICE void operator()() const {
        (*this)([](RecurrenceStates&) {}, [&] { run_steps(states); });
    }

    // The same, but all threads call again() if an output of the block is not finite. Every thread calls wait() once,
    // with the states, before it reads from them and before it writes an output.
    template <class Wait, class Again>
    KGEN_DEVICE void operator()(Wait wait, Again again) const {
        RecurrenceStates first = states;
        const int chunks = static_cast<int>(ceil_div(rows.end, i64{16}));
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        if (warp() < kWarps) {
            wait(first);
            consume_all(first, chunks, nonfinite);
        } else {
            produce_all(warp() - kWarps, chunks);
            wait(first);
        }
        cp_async_wait_all();  // zeros beyond the last step, to where run_steps may keep its state
        if (block_any_nonfinite<kWarps + kRowWarps>(nonfinite)) again();
    }

    // Computes the steps one by one. begin: RecurrenceStates, or a type with its members.
    template <class States>
    KGEN_DEVICE void run_steps(const States& begin) const {
        run_step_by_step<bf16, Config::kK, Config::kV, kColumns, kThreads, false, false, false, true>(
            rows, begin, decay);
    }

private:
    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }
    static KGEN_DEVICE Buffers buffers() { return {dynamic_smem<bf16>()}; }
    // The warp's value features of a chunk.
    static KGEN_DEVICE u16* values(int chunk) {
        return dynamic_smem<u16>() + Producer::kBytes / 2 +
               (warp() * kStages + (chunk & (kStages - 1))) * Copier::kElements;
    }
    // The value features of all consumers, with kRowCopies.
    static KGEN_DEVICE u16* value_rows(int chunk) {
        return dynamic_smem<u16>() + Producer::kBytes / 2 + (chunk & (kStages - 1)) * ValueTile::kElements;
    }
    template <class T>
    static KGEN_DEVICE StepPointer<T> pointer(const StepRows<const T>& steps) {
        return {steps.rows, steps.stride};
    }
    // Ends an interval. It is a named barrier, because the warps of the two roles arrive from different code.
    static KGEN_DEVICE void end_interval() { named_barrier_sync(1, kThreads); }

    // Consumers read chunk n in interval n; the first interval is -kRowWarps. Part i of chunk n is written in interval
    // n - kRowWarps + i.
    KGEN_DEVICE void produce_all(int producer, int chunks) const {
        Producer rows_of(buffers(), producer, rows.end, pointer(rows.a), pointer(rows.b),
                         pointer(decay.w), decay.u);
        for (int i = 0; i < producer; ++i) end_interval();
        if constexpr (Config::kFixedParts) {
            int interval = producer - kRowWarps;
#pragma unroll 1
            while (interval < chunks) {
                const bool there = interval + kRowWarps < chunks;
                produce_parts<0>(rows_of, there, interval, chunks);
            }
            return;
        }
        int part = 0;
#pragma unroll 1
        for (int interval = producer - kRowWarps; interval < chunks; ++interval) {
            if (interval - part + kRowWarps < chunks) rows_of.put_part(part);
            part = part == kRowWarps - 1 ? 0 : part + 1;
            end_interval();
        }
    }

    // Computes the parts of a chunk from `Part` on, unrolled.
    template <int Part>
    static KGEN_DEVICE void produce_parts(Producer& rows_of, bool there, int& interval, int chunks) {
        if (interval >= chunks) return;
        if (there) rows_of.put_part(Part);
        end_interval();
        ++interval;
        if constexpr (Part + 1 < kRowWarps)
            produce_parts<Part + 1>(rows_of, there, interval, chunks);
    }

    KGEN_DEVICE void consume_all(const RecurrenceStates& first, int chunks, float& nonfinite) const {
        State state;
        load_state(first, state);
        if constexpr (Config::kFinalState)
            if (first.final_state != nullptr) store_final(first, state, nonfinite);
        auto copier = value_copier();
        const ChunkLengths lengths(rows.end);
        const auto copy = [&](int chunk) {
            if constexpr (Config::kRowCopies) {
                copier.start(value_rows(chunk), lengths.of(chunk));
                cp_async_commit();
                copier.advance(0, 16);
            } else {
                const i64 left = max(min(rows.end - i64{chunk} * 16, i64{16}), i64{0});
                copier.start(values(chunk), static_cast<int>(left), rows.values - 16 * warp());
                cp_async_commit();
                copier.advance();
            }
        };
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
        if constexpr (Config::kRowCopies) cp_async_wait<kStages - 2>();  // before the barrier that begins a chunk
#pragma unroll
        for (int i = 0; i < kRowWarps; ++i) end_interval();
        Output output(rows, warp());
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if constexpr (!Config::kRowCopies) {
                cp_async_wait<kStages - 2>();
                sync_warp();  // all lanes' copies are there, and all lanes have read the slot that is filled next
            }
            copy(chunk + kStages - 1);
            Sums y = {};
            consume(chunk, slot, state, y);
            slot = slot == kRowWarps ? 0 : slot + 1;
            output.write(y, nonfinite);
            if constexpr (Config::kRowCopies) cp_async_wait<kStages - 2>();  // the next chunk is there
            end_interval();
        }
    }

    KGEN_DEVICE auto value_copier() const {
        if constexpr (Config::kRowCopies) {
            return RowCopier<bf16, kColumns, kWarps>(pointer(rows.v), thread_rank(), rows.values);
        } else {
            return Copier(pointer(rows.v), 16 * warp());
        }
    }

    KGEN_DEVICE void load_state(const RecurrenceStates& from, State& state) const {
        RecurrenceStates first = from;
        first.segments = 0;
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + 2 * lane.q + i % 2;
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                const bool used = key < Config::kK && column < rows.values;
                state[tile][i] =
                    used ? first.template initial_at<true>(key, column, Config::kK, Config::kV) : 0.0f;
            }
#pragma unroll 1
        for (int segment = 0; segment < from.segments; ++segment) add_segment(from, segment, state);
    }

    // Does what RecurrenceStates::initial_at does for a segment, with all loads of the segment at once.
    KGEN_DEVICE void add_segment(const RecurrenceStates& from, int segment, State& state) const {
        const MmaLane lane = mma_lane();
        const float* sums = from.segment_sums + segment * from.segment_stride;
        const float* decays = from.segment_key_sums + segment * Config::kK;
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int key = 8 * tile + 2 * lane.q + x;
                const bool there = Config::kK % 16 == 0 || key < Config::kK;
                const float decay = there ? decays[key] : 0.0f;
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    const int column = 16 * warp() + lane.g + 8 * y;
                    const bool used = there && (Config::kV % kColumns == 0 || column < rows.values);
                    const float sum = used ? sums[key * Config::kV + column] : 0.0f;
                    state[tile][2 * y + x] = fma(state[tile][2 * y + x], decay, sum);
                }
            }
    }

    // The state after the last segment, from the state before it and what it adds.
    KGEN_DEVICE void store_final(const RecurrenceStates& to, const State& before, float& nonfinite) const {
        State state;
#pragma unroll
        for (int i = 0; i < 8 * kTiles; ++i) state[i / 4][i % 4] = before[i / 4][i % 4];
        add_segment(to, to.segments, state);
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + 2 * lane.q + i % 2;
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                if (key >= Config::kK || column >= rows.values) continue;
                to.store_final(key, column, state[tile][i]);
                nonfinite = fma(state[tile][i], 0.0f, nonfinite);
            }
    }

    static KGEN_DEVICE Half::A values_of(int chunk) {
        if constexpr (Config::kRowCopies) {
            return ValueTile::Tile::a_columns(reinterpret_cast<const bf16*>(value_rows(chunk)), warp());
        } else {
            return ScoreTile::a_columns(reinterpret_cast<const bf16*>(values(chunk)));
        }
    }

    static KGEN_DEVICE void consume(int chunk, int slot, State& state, Sums& y) {
        const Buffers from = buffers();
        // 1. y: the products of the chunk's steps with each other, then with the state, small terms first.
        const Half::A v = values_of(chunk);
#pragma unroll
        for (int term = 1; term >= 0; --term) {
            Half::B scores[2];
            ScoreTile::two_rows(scores, from.scores(chunk) + term * Buffers::kTerm);
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(y[n], v, scores[n]);
        }
        const bf16* rows_r = from.rows(slot, kRowR);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            Half::A terms[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* exact = state[2 * tile + i / 2] + i % 2 * 2;
                u32 pair[2];
                split_bf16(exact[0], exact[1], pair);
                terms[0].pair[i] = pair[0];
                terms[1].pair[i] = pair[1];
            }
            Half::B r[2];
            if constexpr (Config::kRTerms == 2) {
                RowTile::two_rows(r, from.rows(slot, kRowRLow), tile);
#pragma unroll
                for (int n = 0; n < 2; ++n) Half::multiply<0>(y[n], terms[0], r[n]);
            }
            RowTile::two_rows(r, rows_r, tile);
#pragma unroll
            for (int term = 1; term >= 0; --term)
#pragma unroll
                for (int n = 0; n < 2; ++n) Half::multiply<0>(y[n], terms[term], r[n]);
        }

        // 2. The state after the chunk.
        const bf16* rows_k = from.rows(slot, kRowK);
        const float* decays = from.decay(slot) + 2 * mma_lane().q;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            Half::B k[2];
            RowTile::two_columns(k, rows_k, tile);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float(&s)[4] = state[2 * tile + n];
                const auto d =
                    *reinterpret_cast<const Vec<float, 2>*>(decays + 16 * tile + 8 * n);
#pragma unroll
                for (int i = 0; i < 4; ++i) s[i] *= d[i % 2];
                Half::multiply<0>(s, v, k[n]);
            }
        }
    }

    // Writes a warp's outputs, chunk after chunk.
    class Output {
        static constexpr bool kQuads = Config::kVec % 4 == 0;

    public:
        KGEN_DEVICE Output(const RecurrenceRows<bf16>& rows, int warp)
            : column_(16 * warp + (kQuads ? column_of_quad() : 2 * mma_lane().q)),
              width_(rows.values),
              next_(rows.out.at(mma_lane().g) + column_),
              eighth_(8 * rows.out.stride),
              left_(rows.end - mma_lane().g),
              factor_(rows.out_factor) {}

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

}  // namespace kgen::wkv6
