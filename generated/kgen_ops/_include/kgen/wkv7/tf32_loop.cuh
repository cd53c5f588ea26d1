// wkv7 forward by producer and consumer warps, in chunks of 16 steps; fp32 rows and states are TF32 operands (mma,
// sm_80) of one or two terms. With or without a final state.
//
// Producer warps (tf32_producer.cuh) compute what does not depend on the state, once per head and two chunks ahead.
// Each consumer warp holds 16 value features of the state in registers. From the rows, the scores and the inverse of a
// chunk it computes:
//
//     X  = A S + (A K^T) V          sa = (I - A B^T)^-1 X
//     y  = R S + (R K^T) V + (R B^T) sa
//     S  = diag(P_15) S + K^T V + B^T sa          K and B are decayed to the end of the chunk
//
// Only these products are serial in time. With kSplit the products that lead to the state are 3xTF32; with kSplitOutput
// the products that lead to y alone are 3xTF32 as well. All other operands are rounded to TF32. V of 16 bits is exact
// as TF32. With two terms, products form chains of their own that start from zero, and these are added to the state in
// fp32, because tensor cores truncate sums (primitives/mma.cuh).
//
// NaN and Inf: as in chunk_mma.cuh. If a result is not finite, the block computes its sequence again, step by step.
//
// Layout: S, X, sa and y are transposed accumulators: their rows are value features. The accumulators of one product
// become operand A of the next product without moves between registers: columns 2q and 2q + 1 of eight keys, or steps,
// are keys or steps q and q + 4 (of_column).
//
// Shared memory: that of the producers; v[kWarps][kStages][16][16], a ring of chunks for each consumer warp.
//
// Synchronisation: one block barrier per chunk. Between two barriers consumers read chunk n, and producers write the
// inverse of n + 1, and the rows and then the scores of n + 2, with a barrier of their own between them. The inputs
// come by cp.async, kStages - 1 chunks ahead, to the warps that read them.
//
// Config: Value and W; kForm: of the decays; kK; kWarps, kRowWarps: numbers of consumer and producer warps; kStages:
// chunks of inputs in shared memory; kVec: elements per copy; kRowCopies: whether warps copy whole rows for each other;
// kSplit; kSplitOutput, which needs kSplit. Inputs in fp32 use both.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/wkv7/column_tensors.cuh"
#include "kgen/wkv7/tf32_producer.cuh"

namespace kgen::wkv7 {

template <class Config>
struct Tf32Loop : ColumnTensors<typename Config::Value, typename Config::W> {
    using T = typename Config::Value;
    using Producer = Tf32Producer<Config>;
    using Buffers = typename Producer::Buffers;
    static constexpr bool kRowCopies = Config::kRowCopies;
    static constexpr bool kWide = sizeof(T) == 4;
    // 16-bit values of a tile of c, and of a warp.
    static constexpr int kValues = TileCopier<T, Config::kVec>::kElements;
    static constexpr int kWarpValues = Config::kStages * kValues + (kRowCopies ? 16 : 0);
    using Copier = Select<kRowCopies, WholeRowCopier<T, Config::kVec, Config::kWarps, 1, kWarpValues, 0>,
                          TileCopier<T, Config::kVec>>;
    using Ops = Tf32Operands<Config::kSplit>;
    static constexpr bool kSplit = Config::kSplit, kSplitOutput = Config::kSplitOutput;
    static constexpr int kWarps = Config::kWarps, kRowWarps = Config::kRowWarps;
    static constexpr int kThreads = kWarpSize * (kWarps + kRowWarps), kColumns = 16 * kWarps;
    static constexpr int kTiles = Producer::kTiles, kStages = Config::kStages, kAhead = 2;
    static constexpr int kSmemBytes =
        max(Producer::kBytes + 2 * kWarps * kWarpValues, 4 * Config::kK * kColumns);
    static_assert(Buffers::kSlots == kAhead + 1, "a slot for the chunk in use and those ahead");
    static_assert(4 * Config::kK * kColumns <= Buffers::kBytes,
                  "at the end copies are in flight, which the state of step_by_step must not reach");
    static_assert(kSplit || !kSplitOutput, "the state has no low terms");
    using State = float[2 * kTiles][4];
    using Sums = float[2][4];
    using A = typename Ops::A;
    using B = typename Ops::B;

    // start, end: states [K, V] from the block's first column on. A null start means zeros; a null end is not written.
    KGEN_DEVICE void operator()(const float* start, float* end) const {
        const int chunks = static_cast<int>(ceil_div(this->steps, i64{16}));
        float nonfinite = 0.0f;  // becomes NaN if a result is not finite
        if (warp() < kWarps) {
            consume_all(start, end, chunks, nonfinite);
        } else {
            produce_all(chunks);
        }
        if (block_any_nonfinite<kWarps + kRowWarps>(nonfinite))
            this->template step_by_step<Direction::forward, true, Config::kK, kColumns,
                                        Config::kForm>(start, end);
    }

private:
    static KGEN_DEVICE int warp() { return thread_rank() / kWarpSize; }
    static KGEN_DEVICE Buffers buffers() { return {dynamic_smem<float>()}; }
    static KGEN_DEVICE int next(int slot) { return slot == Buffers::kSlots - 1 ? 0 : slot + 1; }
    // The warp's value features of a chunk.
    static KGEN_DEVICE u16* values(int chunk) {
        return dynamic_smem<u16>() + Producer::kBytes / 2 + warp() * kWarpValues +
               (chunk & (kStages - 1)) * kValues;
    }
    // Ends an interval. It is a named barrier, because the warps of the two roles arrive from different code.
    static KGEN_DEVICE void end_interval() { named_barrier_sync(1, kThreads); }

    KGEN_DEVICE void produce_all(int chunks) const {
        Producer producer(buffers(), warp() - kWarps, this->steps, this->r, this->k, this->a,
                          this->b, this->w);
        int slot = 0;
#pragma unroll 1
        for (int chunk = -kAhead; chunk < chunks; ++chunk) {
            if (chunk + 1 >= 0 && chunk + 1 < chunks) producer.put_inverse(chunk + 1);
            if (chunk + kAhead < chunks) {
                producer.put_rows(chunk + kAhead, slot);
                named_barrier_sync(2, kWarpSize * kRowWarps);
                producer.put_scores(chunk + kAhead, slot);
                slot = next(slot);
            }
            producer.await_inputs();
            end_interval();
        }
    }

    KGEN_DEVICE Copier copier_of() const {
        if constexpr (kRowCopies) {
            return {this->c, 0, 0, static_cast<int>(thread_rank())};
        } else {
            return {this->c, 16 * warp()};
        }
    }

    KGEN_DEVICE void consume_all(const float* start, float* end, int chunks, float& nonfinite) const {
        State state;
        each_of_state([&](int tile, int i, i64 place, bool used) {
            state[tile][i] = start != nullptr && used ? start[place] : 0.0f;
        });
        Copier copier = copier_of();
        const auto copy = [&](int chunk) {
            const i64 left = max(min(this->steps - i64{chunk} * 16, i64{16}), i64{0});
            if constexpr (kRowCopies) {
                copier.start(values(chunk) - warp() * kWarpValues, static_cast<int>(left), this->width);
            } else {
                copier.start(values(chunk), static_cast<int>(left), this->width - 16 * warp());
            }
            cp_async_commit();
            copier.advance();
        };
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) {
            if constexpr (kRowCopies)
                if (chunk == kAhead - 1) cp_async_wait<kStages - 2>();
            end_interval();
        }
        Output output(*this, warp());
        int slot = 0;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if constexpr (!kRowCopies) {
                cp_async_wait<kStages - 2>();
                sync_warp();  // all lanes' copies are there, and all lanes have read the slot that is filled next
            }
            copy(chunk + kStages - 1);
            Sums y = {};
            consume(chunk, slot, state, y);
            output.write(y, nonfinite);
            slot = next(slot);
            if constexpr (kRowCopies) cp_async_wait<kStages - 2>();  // copies for the next chunk
            end_interval();
        }
        each_of_state([&](int tile, int i, i64 place, bool used) {
            nonfinite = fma(state[tile][i], 0.0f, nonfinite);
            if (end != nullptr && used) end[place] = state[tile][i];
        });
    }

    // Calls visit(tile, i, place, used) for each element of the warp's state; place: in a state [K, V].
    template <class Visit>
    KGEN_DEVICE void each_of_state(Visit visit) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * tile + of_column(2 * lane.q + i % 2);
                const int column = 16 * warp() + lane.g + i / 2 * 8;
                visit(tile, i, key * this->pitch + column, key < Config::kK && column < this->width);
            }
    }

    // Sets operand B from words `word` and `word + 1` of a lane. Rounded: the words are TF32 already.
    static KGEN_DEVICE void put(B& b, const u32 (&words)[4], int word, bool rounded) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kSplit) {
                if (!rounded) {
                    Ops::put(b, i, bit_cast<float>(words[word + i]));
                    continue;
                }
            }
            b.hi[i] = words[word + i];
        }
    }

    // matrix_row: the row, one of eight steps or keys, whose address a lane passes to ldmatrix. matrix_words: the
    // offset of its words in shared memory, for a StepTile that begins at word `first`.
    static KGEN_DEVICE int matrix_row() { return of_column(lane_id() % 8); }
    static KGEN_DEVICE int matrix_words(int first) {
        return first + StepTile::place(matrix_row(), lane_id() / 8 * 4);
    }

    // sums[n] += x y^T. y: the first word of a square [16][16] in shared memory that is zero above its diagonal. Split:
    // operands have two terms; Exact: x has no low term.
    template <bool Split, bool Exact>
    static KGEN_DEVICE void multiply_square(Sums& sums, const A (&x)[2], int y) {
        const int first = matrix_words(y);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            u32 words[4];
            ldmatrix<4>(words, buffers().first + StepTile::below(first, n));
            B b[2];
#pragma unroll
            for (int k = 0; k <= n; ++k) put(b[k], words, 2 * k, !Split);
            multiply<Split, Exact>(sums[n], x, b, n + 1);
        }
    }

    // sum += x y over `count` operands. With two terms the products form a chain of their own.
    template <bool Split, bool Exact>
    static KGEN_DEVICE void multiply(float (&sum)[4], const A (&x)[2], const B (&y)[2], int count) {
        if constexpr (Split) {
            float chain[4] = {};
            multiply_chain<Exact>(chain, x, y, count);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += chain[i];
        } else {
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (k < count) mma_tf32_m16n8k8(sum, x[k].hi, y[k].hi);
        }
    }

    template <bool Exact>
    static KGEN_DEVICE void multiply_chain(float (&chain)[4], const A (&x)[2], const B (&y)[2],
                                           int count) {
#pragma unroll
        for (int pass = Exact ? 1 : 0; pass < 3; ++pass)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                if (k < count)
                    mma_tf32_m16n8k8(chain, pass == 0 ? x[k].lo : x[k].hi,
                                     pass == 1 ? y[k].lo : y[k].hi);
    }

    // The warp's values of a chunk as operand A.
    static KGEN_DEVICE void read_values(A (&v)[2], const u16* tile) {
        if constexpr (kWide) {
            const MmaLane lane = mma_lane();
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int step = lane.q + i / 4 * 8 + i % 4 / 2 * 4, column = lane.g + i % 2 * 8;
                const u16* const from = tile + TileCopier<T, Config::kVec>::place(step, column);
                Ops::put(v[i / 4], i % 4, *reinterpret_cast<const float*>(from));
            }
        } else {
            const int lane = lane_id();
            const int step = lane / 16 * 8 + matrix_row(), chunk = lane / 8 % 2;
            u32 words[4];
            ldmatrix<4, true>(words, tile + SwizzledTile<T, 16>::offset(step, chunk));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const f32x2 two = unpack2<T>(words[i]);
                v[i / 2].hi[i % 2] = bit_cast<u32>(two.x);
                v[i / 2].hi[i % 2 + 2] = bit_cast<u32>(two.y);
            }
        }
    }

    static KGEN_DEVICE void operands_of(A (&found)[2], const Sums& sums) {
        found[0] = Ops::of_sums(sums, 0);
        found[1] = Ops::of_sums(sums, 1);
    }

    // sums[n] += s times rows 8 n to 8 n + 7, over the 16 keys of a tile.
    template <bool Split>
    static KGEN_DEVICE void read_state(Sums& sums, const A (&s)[2], const float* rows, int tile) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            u32 words[4];
            ldmatrix<4>(words, rows + (8 * n + matrix_row()) * Buffers::kReadStride + 16 * tile +
                                   lane_id() / 8 * 4);
            B b[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) put(b[k], words, 2 * k, !Split);
            multiply<Split, false>(sums[n], s, b, 2);
        }
    }

    // Adds the products of all steps of a tensor with eight keys to their sum.
    template <bool Exact>
    static KGEN_DEVICE void add_steps(float (&sum)[4], const A (&x)[2], const float* rows) {
        u32 words[4];
        ldmatrix<4>(words, rows);
        B b[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) put(b[k], words, 2 * k, false);
        if constexpr (kSplit) {
            multiply_chain<Exact>(sum, x, b, 2);
        } else {
            multiply<false, Exact>(sum, x, b, 2);
        }
    }

    // The compiler moves no load of operands across this. With all loads at the beginning of a chunk, registers would
    // spill.
    static KGEN_DEVICE void limit_loads() { sync_warp(); }

    static KGEN_DEVICE void consume(int chunk, int slot, State& state, Sums& y) {
        const Buffers from = buffers();
        // 1. The products that read v and the state.
        A v[2];
        read_values(v, values(chunk));
        Sums x = {};
        multiply_square<kSplit, !kWide>(x, v, Buffers::of_scores(slot, Buffers::kScoreAK));
        const float *rows_a = from.reads(slot, Buffers::kReadA),
                    *rows_r = from.reads(slot, Buffers::kReadR);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            A s[2];
            s[0] = Ops::of_sums(state, 2 * tile);
            s[1] = Ops::of_sums(state, 2 * tile + 1);
            read_state<kSplit>(x, s, rows_a, tile);
            read_state<kSplitOutput>(y, s, rows_r, tile);
            limit_loads();
        }

        // 2. sa and y.
        A operands[2];
        operands_of(operands, x);
        Sums solved = {};
        multiply_square<kSplit, false>(solved, operands, Buffers::of_inverse(chunk));
        operands_of(operands, solved);
        multiply_square<kSplitOutput, !kWide>(y, v, Buffers::of_scores(slot, Buffers::kScoreRK));
        multiply_square<kSplitOutput, false>(y, operands, Buffers::of_scores(slot, Buffers::kScoreRB));

        // 3. The state after the chunk.
        const int first = matrix_words(Buffers::of_updates(slot, Buffers::kUpdateK));
        const float* decay = from.decay(slot) + 2 * mma_lane().q;
#pragma unroll
        for (int tile = 0; tile < 2 * kTiles; ++tile) {
            float sum[4] = {};
            const float* rows_k = from.first + StepTile::below(first, tile);
            const float* rows_b = rows_k + Buffers::kUpdates;
            add_steps<!kWide>(sum, v, rows_k);
            add_steps<false>(sum, operands, rows_b);
            const auto d = *reinterpret_cast<const Vec<float, 2>*>(decay + 8 * tile);
#pragma unroll
            for (int i = 0; i < 4; ++i) state[tile][i] = fma(state[tile][i], d[i % 2], sum[i]);
            if (tile % 2 == 1) limit_loads();
        }
    }

    // Writes a warp's outputs, chunk after chunk.
    class Output {
        static constexpr bool kQuads = Config::kVec % 4 == 0;

    public:
        KGEN_DEVICE Output(const Tf32Loop& loop, int warp)
            : column_(16 * warp + (kWide ? mma_lane().g : kQuads ? column_of_quad() : 2 * mma_lane().q)),
              width_(loop.width),
              next_(loop.second.at(step()) + column_),
              eighth_(8 * loop.second.stride_t),
              left_(loop.steps - step()),
              factor_(loop.second_factor) {}

        // sums: transposed accumulators.
        KGEN_DEVICE void write(Sums& sums, float& nonfinite) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[i / 4][i % 4] *= factor_;
                nonfinite = fma(sums[i / 4][i % 4], 0.0f, nonfinite);
            }
            if constexpr (kWide) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int half = i / 4, later = i % 2, columns = i % 4 / 2 * 8;
                    T* row = next_ + half * eighth_ + later * (eighth_ / 2);
                    if (left_ > 8 * half + 4 * later && column_ + columns < width_) row[columns] = sums[half][i % 4];
                }
            } else {
                write_pairs(sums);
            }
            next_ += 2 * eighth_;
            left_ -= 16;
        }

    private:
        KGEN_DEVICE void write_pairs(const Sums& sums) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 pair[2];  // of step() + 8 * half, value features 2q + 8 n
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    pair[n] = transpose_matrix(pack2<T>(sums[half][2 * n], sums[half][2 * n + 1]));
                T* row = next_ + half * eighth_;
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
        }

        // The first step that the lane writes, among the first eight steps of a chunk.
        static KGEN_DEVICE int step() { return kWide ? mma_lane().q : of_column(mma_lane().g); }

        KGEN_DEVICE void store_pair(T* target, int columns, u32 pair) const {
            if constexpr (Config::kVec == 2) {
                if (column_ + columns < width_) *reinterpret_cast<u32*>(target) = pair;
            } else {
                const Vec<T, 2> two = bit_cast<Vec<T, 2>>(pair);
#pragma unroll
                for (int x = 0; x < 2; ++x)
                    if (column_ + columns + x < width_) target[x] = two[x];
            }
        }

        int column_, width_;
        T* next_;
        i64 eighth_, left_;
        float factor_;
    };
};

}  // namespace kgen::wkv7
