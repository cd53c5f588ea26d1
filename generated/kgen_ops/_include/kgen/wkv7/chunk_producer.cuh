// Common parts of all producers of a chunk of 16 steps of wkv7: tiles in shared memory, copies of the inputs, and the
// triangular inverse; bf16.
//
//     rows         of tensors a, r, k and b, scaled by decays                             [16][K], bf16
//     decay        P through the last step, per key                                       [K], fp32
//     scores       A K^T  j < i        R B^T  j <= i      R K^T  j <= i                   [16][16], bf16 high and low
//     inverse      (I - A B^T)^-1      j < i                                              transposed, likewise
//
// chunk_columns.cuh has the formulas, halving_producer.cuh and quotient_producer.cuh have the rows and the scores.
//
// Layout in shared memory (struct ChunkBuffers), each tile swizzled (swizzled_tile.cuh):
//
//     bf16 rows[4][kRowTiles][16][kRow]  slot, terms of A, R, K and B; kRow: 16, or K padded to a multiple of 64
//     bf16 scores[kScoreSlots][3][2][16][16]    slot, matrix, high and low terms
//     bf16 inverse[2][2][16][16]         slot, high and low terms
//     float triangle[2][16][24]          A B^T
//     float decay[4][kRow]
//     W w and bf16 r, k, a, b [warps][tiles of a warp][Stages]: copies of the inputs, 16 keys each (tile_copier.cuh)
//
// Scores of a step with later steps are zero from the beginning where nothing writes them. Rows beyond the last step
// are zero. Decays beyond the last step are 1 where the Pass has kKeepsState; in other loops nothing reads the state
// after that step.
//
// Pass: one of loop_passes.cuh.
//
// Synchronisation: none here. The three stages of a chunk, put_rows, put_scores and put_inverse, run in consecutive
// intervals between block barriers; the chunk is read in the interval after them. Hence four slots of rows and two of
// inverses. Each warp copies its own inputs, Stages - 1 chunks ahead of put_rows. With RowCopies the warps copy rows
// for each other, and await_inputs precedes the barrier that ends an interval.
#pragma once

#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/loop_passes.cuh"
#include "kgen/wkv7/tile_copier.cuh"
#include "kgen/wkv7/triangular_inverse.cuh"

namespace kgen::wkv7 {

// The tiles in shared memory. Keys: number of keys of a head.
template <int Keys, class Pass>
struct ChunkBuffers {
    static constexpr int kSlots = 4, kTriangle = 24;
    static constexpr int kRow = Keys <= 16 ? 16 : ceil_div(Keys, 64) * 64;
    using RowTile = SwizzledTile<bf16, kRow>;
    using ScoreTile = SwizzledTile<bf16, 16>;
    static constexpr int kTerm = ScoreTile::kElements;  // from the high to the low term
    static constexpr int kRowTiles = Pass::kTermsA + Pass::kTermsR + Pass::kTermsK + Pass::kTermsB;
    // Scores are needed for three chunks at a time. Where low terms leave little room there is no fourth slot.
    static constexpr int kScoreSlots = !Pass::kQuotients && kRowTiles > 4 ? 3 : 4;
    static constexpr int kRowElements = kSlots * kRowTiles * RowTile::kElements;
    static constexpr int kScoreElements = kScoreSlots * 3 * 2 * kTerm;
    static constexpr int kInverseElements = 2 * 2 * kTerm;
    static constexpr int kBytes = 2 * (kRowElements + kScoreElements + kInverseElements) +
                                  4 * (2 * 16 * kTriangle + kSlots * kRow);

    bf16* first;

    static KGEN_DEVICE int slot(int chunk) { return chunk & (kSlots - 1); }
    // All rows of a chunk. kRowsOf: the offset of a tensor's rows from there; the terms follow one another.
    KGEN_DEVICE bf16* rows(int chunk) const {
        return first + slot(chunk) * kRowTiles * RowTile::kElements;
    }
    template <Row Which>
    static constexpr int kRowsOf = RowTile::kElements * ((Which > kRowA ? Pass::kTermsA : 0) +
                                                         (Which > kRowR ? Pass::kTermsR : 0) +
                                                         (Which > kRowK ? Pass::kTermsK : 0));
    KGEN_DEVICE bf16* scores(int chunk, int which) const {
        const int of_chunk = kScoreSlots == kSlots
                                 ? slot(chunk)
                                 : static_cast<int>(static_cast<u32>(chunk) % kScoreSlots);
        return first + kRowElements + (of_chunk * 3 + which) * 2 * kTerm;
    }
    KGEN_DEVICE bf16* inverse(int chunk) const {
        return first + kRowElements + kScoreElements + (chunk & 1) * 2 * kTerm;
    }
    KGEN_DEVICE float* triangle(int chunk) const {
        return reinterpret_cast<float*>(first + kRowElements + kScoreElements + kInverseElements) +
               (chunk & 1) * 16 * kTriangle;
    }
    KGEN_DEVICE float* decay(int chunk) const {
        return triangle(0) + 2 * 16 * kTriangle + slot(chunk) * kRow;
    }
};

// Runs on Warps warps; `warp` is the caller's number among them. W: dtype of w; CopyVec: elements per copy; Stages:
// chunks of inputs in shared memory, one of them in use; RowCopies: see above. A derived class adds put_rows and
// put_scores.
template <class Pass, class W, int Keys, int Warps, int CopyVec, int Stages, bool RowCopies>
class ChunkProducer {
protected:
    static constexpr auto kDirection = Pass::kDirection;
    using Buffers = ChunkBuffers<Keys, Pass>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    // Offsets of k, a, b and w from r.
    static constexpr int kOfK = 256, kOfA = 2 * kOfK, kOfB = 3 * kOfK, kOfW = 4 * kOfK;
    static_assert(Stages == 2 || Stages == 4, "slots are found by the low bits of a chunk's number");

public:
    static constexpr int kTiles = ceil_div(Keys, 16), kPerWarp = ceil_div(kTiles, Warps);
    static constexpr int kUnrolledTiles = Pass::kLevelTerms == 1 ? kPerWarp : 1;  // else addresses would spill
    // 16-bit values of a tile of keys, and of a warp. The 16 values more per tile and per warp are shifts for
    // WholeRowCopier.
    static constexpr int kInputs = kOfW + TileCopier<W, CopyVec>::kElements + (RowCopies ? 16 * Warps : 0);
    static constexpr int kWarpInputs = kPerWarp * Stages * kInputs + (RowCopies ? 16 : 0);
    static constexpr int kBytes = Buffers::kBytes + 2 * Warps * kWarpInputs;

protected:
    template <class T>
    using CopierOf = Select<RowCopies, WholeRowCopier<T, CopyVec, Warps, kPerWarp, kWarpInputs, kInputs, kDirection>,
                            TileCopier<T, CopyVec, kDirection>>;

public:

    KGEN_DEVICE ChunkProducer(const Buffers& buffers, int warp, i64 steps, const StepPointer<bf16>& r,
                              const StepPointer<bf16>& k, const StepPointer<bf16>& a,
                              const StepPointer<bf16>& b, const StepPointer<W>& w)
        : buffers_(buffers),
          warp_(warp),
          order_(steps),
          inputs_(reinterpret_cast<u16*>(buffers.first) + Buffers::kBytes / 2 + warp * kWarpInputs),
          r_(copier(r, warp, steps)),
          k_(copier(k, warp, steps)),
          a_(copier(a, warp, steps)),
          b_(copier(b, warp, steps)),
          w_(copier(w, warp, steps)) {
        zero_scores();
#pragma unroll
        for (int chunk = 0; chunk < Stages - 1; ++chunk) copy(chunk);
        if constexpr (RowCopies) {
            await_inputs();
            named_barrier_sync(2, kWarpSize * Warps);
        }
    }

    // With RowCopies, at the end of an interval: waits for the thread's copies that the next put_rows reads.
    KGEN_DEVICE void await_inputs() const {
        if constexpr (RowCopies) cp_async_wait<Stages - 2>();
    }

    // Computes the inverse. One warp does, and the warps take turns from chunk to chunk.
    KGEN_DEVICE void put_inverse(int chunk) const {
        if (warp_ != (chunk & (Warps - 1))) return;
        const int column = lane_id() % 16;
        const bool low = lane_id() >= 16;
        float found[16];
        inverse_column<false>(buffers_.triangle(chunk), Buffers::kTriangle, column, found);
        bf16* tile = buffers_.inverse(chunk) + (low ? Buffers::kTerm : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vec<u32, 4> words;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 terms[2];
                split_bf16(found[8 * half + 2 * i], found[8 * half + 2 * i + 1], terms);
                words[i] = low ? terms[1] : terms[0];
            }
            *reinterpret_cast<Vec<u32, 4>*>(tile + ScoreTile::offset(column, half)) = words;
        }
    }

protected:
    // Waits for the inputs of a chunk, and starts the copies of a later one.
    KGEN_DEVICE void begin_rows(int chunk) {
        if constexpr (!RowCopies) {
            cp_async_wait<Stages - 2>();
            sync_warp();  // the inputs of the chunk are there, and all lanes have read those of the one before
        }
        copy(chunk + Stages - 1);
    }

    // The inputs of a chunk, of tile n of the warp: r, k, a, b, w.
    KGEN_DEVICE u16* inputs_of(int chunk, int n) const {
        return inputs_ + ((chunk & (Stages - 1)) * kPerWarp + n) * kInputs;
    }

    // Sets the decays of steps beyond the last one to 1. Their w was copied as zero, which gives 1 in the form `log`
    // alone.
    KGEN_DEVICE void keep_state_behind(int chunk) const {
        const int left = order_.left(chunk);
        if (left == 16) return;
#pragma unroll 1
        for (int i = lane_id(); i < 256 * kPerWarp; i += kWarpSize) {
            u16* tiles = inputs_of(chunk, i / 256) + kOfW;
            const int row = i / 16 % 16;
            if (row >= left)
                *reinterpret_cast<W*>(tiles + TileCopier<W, CopyVec>::place(row, i % 16)) =
                    from_float<W>(-infinity());
        }
        sync_warp();
    }

    Buffers buffers_;
    int warp_;
    ChunkOrder<kDirection> order_;

private:
    template <class T>
    static KGEN_DEVICE CopierOf<T> copier(const StepPointer<T>& rows, int warp, i64 steps) {
        const i64 begin = ChunkOrder<kDirection>(steps).first(0);
        if constexpr (RowCopies) {
            return {rows, 0, begin, kWarpSize * warp + lane_id()};
        } else {
            return {rows, 16 * warp, begin};
        }
    }

    KGEN_DEVICE void zero_scores() const {
        u32* words = reinterpret_cast<u32*>(buffers_.scores(0, 0));
        for (int i = kWarpSize * warp_ + lane_id(); i < Buffers::kScoreElements / 2;
             i += kWarpSize * Warps)
            words[i] = 0;
    }

    // Starts the copies of a chunk's inputs; one group.
    KGEN_DEVICE void copy(int chunk) {
        const int left = order_.left(chunk);
        if constexpr (RowCopies) {
            u16* to = inputs_of(chunk, 0) - warp_ * kWarpInputs;
            if constexpr (Pass::kReadsR) r_.start(to, left, Keys);
            if constexpr (Pass::kReadsK) k_.start(to + kOfK, left, Keys);
            a_.start(to + kOfA, left, Keys);
            b_.start(to + kOfB, left, Keys);
            w_.start(to + kOfW, left, Keys);
        } else {
#pragma unroll kUnrolledTiles
            for (int n = 0; n < kPerWarp; ++n) {
                const int first = 16 * n * Warps, width = Keys - 16 * warp_ - first;
                u16* to = inputs_of(chunk, n);
                if constexpr (Pass::kReadsR) r_.start(to, left, width, first);
                if constexpr (Pass::kReadsK) k_.start(to + kOfK, left, width, first);
                a_.start(to + kOfA, left, width, first);
                b_.start(to + kOfB, left, width, first);
                w_.start(to + kOfW, left, width, first);
            }
        }
        cp_async_commit();
        if constexpr (Pass::kReadsR) r_.advance();
        if constexpr (Pass::kReadsK) k_.advance();
        a_.advance();
        b_.advance();
        w_.advance();
    }

    u16* inputs_;
    CopierOf<bf16> r_, k_, a_, b_;
    CopierOf<W> w_;
};

}  // namespace kgen::wkv7
