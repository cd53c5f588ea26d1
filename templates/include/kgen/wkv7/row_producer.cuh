// What a chunk of 16 steps of wkv7 needs that does not depend on the state, for all value features of a head: rows with
// their decays, scores, and the triangular inverse; bf16 operands (mma, sm_80), clamped decays.
//
//     rows         A_i = a_i P_{i-1}   R_i = r_i P_i   K_j = k_j / P_j   B_j = b_j / P_j  [16][K], bf16
//     decay        P of all steps, per key                                                [K], fp32
//     scores       A K^T  j < i        R B^T  j <= i   R K^T  j <= i                      [16][16], bf16 high and low
//     inverse      (I - A B^T)^-1      j < i                                              transposed, likewise
//
// chunk_columns.cuh has the formulas. P is the exponential of a sum of logarithms, which are at least -0.607 each:
// 1 / P is below exp(9.71), and nothing is divided.
//
// A lane has two keys and four steps, and gets the sum of the steps before them by shuffles.
//
// Layout in shared memory (struct ChunkBuffers), each tile swizzled (swizzled_tile.cuh):
//
//     bf16 rows[4][4][16][kRow]          slot, tensor A R K B; kRow: 16, or K padded to a multiple of 64
//     bf16 scores[4][3][2][16][16]       slot, matrix, high and low terms
//     bf16 inverse[2][2][16][16]         slot, high and low terms
//     float triangle[2][16][24]          A B^T
//     float decay[4][kRow]
//     W w and bf16 r, k, a, b [warps][tiles of a warp][Stages]: copies of the inputs, 16 keys each (tile_copier.cuh)
//
// Scores of steps below 8 with steps from 8 on are zero from the beginning. Rows beyond the last step are zero. Decays
// there are not 1, but nothing reads a state behind them.
//
// Synchronisation: none here. The three stages of a chunk run in consecutive intervals between block barriers:
// put_rows, put_scores, put_inverse; its reader follows in the next one. So four slots of rows and two of inverses. A
// warp copies its inputs itself, Stages - 1 chunks ahead of put_rows.
#pragma once

#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/tile_copier.cuh"
#include "kgen/wkv7/triangular_inverse.cuh"

namespace kgen::wkv7 {

enum Row { kRowA, kRowR, kRowK, kRowB };
enum Score { kScoreAK, kScoreRB, kScoreRK };

// The tiles in shared memory. Keys: of a head.
template <int Keys>
struct ChunkBuffers {
    static constexpr int kSlots = 4, kTriangle = 24;
    static constexpr int kRow = Keys <= 16 ? 16 : ceil_div(Keys, 64) * 64;
    using RowTile = SwizzledTile<bf16, kRow>;
    using ScoreTile = SwizzledTile<bf16, 16>;
    static constexpr int kTerm = ScoreTile::kElements;  // from the high to the low term
    static constexpr int kRowElements = kSlots * 4 * RowTile::kElements;
    static constexpr int kScoreElements = kSlots * 3 * 2 * kTerm;
    static constexpr int kInverseElements = 2 * 2 * kTerm;
    static constexpr int kBytes = 2 * (kRowElements + kScoreElements + kInverseElements) +
                                  4 * (2 * 16 * kTriangle + kSlots * kRow);

    bf16* first;

    static KGEN_DEVICE int slot(int chunk) { return chunk & (kSlots - 1); }
    KGEN_DEVICE bf16* rows(int chunk, int which) const {
        return first + (slot(chunk) * 4 + which) * RowTile::kElements;
    }
    KGEN_DEVICE bf16* scores(int chunk, int which) const {
        return first + kRowElements + (slot(chunk) * 3 + which) * 2 * kTerm;
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

// The stages, by Warps warps; `warp` is the caller's number among them. W: dtype of w; CopyVec: elements per copy;
// Stages: chunks of inputs in shared memory, one of them in use.
template <class W, int Keys, int Warps, int CopyVec, int Stages>
class RowProducer {
    using Buffers = ChunkBuffers<Keys>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    using Copier = TileCopier<bf16, CopyVec>;
    using CopierW = TileCopier<W, CopyVec>;
    // Where k, a, b and w lie behind r.
    static constexpr int kOfK = Copier::kElements, kOfA = 2 * kOfK, kOfB = 3 * kOfK, kOfW = 4 * kOfK;
    static_assert(Stages == 2 || Stages == 4, "slots are found by the low bits of a chunk's number");

public:
    static constexpr int kTiles = ceil_div(Keys, 16), kPerWarp = ceil_div(kTiles, Warps);
    static constexpr int kInputs = kOfW + CopierW::kElements;  // 16-bit values, a tile of keys
    static constexpr int kBytes = Buffers::kBytes + 2 * Warps * kPerWarp * Stages * kInputs;

    KGEN_DEVICE RowProducer(const Buffers& buffers, int warp, i64 steps, const StepPointer<bf16>& r,
                            const StepPointer<bf16>& k, const StepPointer<bf16>& a,
                            const StepPointer<bf16>& b, const StepPointer<W>& w)
        : buffers_(buffers),
          warp_(warp),
          steps_(steps),
          inputs_(reinterpret_cast<u16*>(buffers.first) + Buffers::kBytes / 2 +
                  warp * kPerWarp * Stages * kInputs),
          r_(r, 16 * warp),
          k_(k, 16 * warp),
          a_(a, 16 * warp),
          b_(b, 16 * warp),
          w_(w, 16 * warp) {
        zero_scores();
#pragma unroll
        for (int chunk = 0; chunk < Stages - 1; ++chunk) copy(chunk);
    }

    // Rows and decays of a chunk, and the start of the copies of a later one. Chunks from 0 on, each once.
    KGEN_DEVICE void put_rows(int chunk) {
        cp_async_wait<Stages - 2>();
        sync_warp();  // the inputs of the chunk are there, and all lanes have read those of the one before
        copy(chunk + Stages - 1);
#pragma unroll
        for (int n = 0; n < kPerWarp; ++n) {
            const int tile = warp_ + n * Warps;
            if (kTiles % Warps != 0 && tile >= kTiles) break;
            put_tile(chunk, tile, inputs_of(chunk, n));
        }
    }

    // Scores of a chunk, a matrix per warp: A B^T, A K^T, R B^T, R K^T.
    KGEN_DEVICE void put_scores(int chunk) const {
#pragma unroll
        for (int n = 0; n < ceil_div(4, Warps); ++n) {
            const int which = warp_ + n * Warps;
            if (Warps > 4 && which >= 4) break;
            put_score(chunk, which);
        }
    }

    // The inverse, by one of the warps; by another one for the next chunk.
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

private:
    // Scores of steps below 8 with steps from 8 on are never written.
    KGEN_DEVICE void zero_scores() const {
        u32* words = reinterpret_cast<u32*>(buffers_.scores(0, 0));
        for (int i = kWarpSize * warp_ + lane_id(); i < Buffers::kScoreElements / 2;
             i += kWarpSize * Warps)
            words[i] = 0;
    }

    // The inputs of a chunk, of tile n of the warp: r, k, a, b, w.
    KGEN_DEVICE u16* inputs_of(int chunk, int n) const {
        return inputs_ + ((chunk & (Stages - 1)) * kPerWarp + n) * kInputs;
    }

    // How many steps of a chunk exist.
    KGEN_DEVICE int left_of(int chunk) const {
        return static_cast<int>(max(min(steps_ - i64{chunk} * 16, i64{16}), i64{0}));
    }

    // Starts the copies of a chunk's inputs; one group.
    KGEN_DEVICE void copy(int chunk) {
        const int left = left_of(chunk);
#pragma unroll
        for (int n = 0; n < kPerWarp; ++n) {
            const int first = 16 * n * Warps, width = Keys - 16 * warp_ - first;
            u16* to = inputs_of(chunk, n);
            r_.start(to, left, width, first);
            k_.start(to + kOfK, left, width, first);
            a_.start(to + kOfA, left, width, first);
            b_.start(to + kOfB, left, width, first);
            w_.start(to + kOfW, left, width, first);
        }
        cp_async_commit();
        r_.advance();
        k_.advance();
        a_.advance();
        b_.advance();
        w_.advance();
    }

    // A lane's first step, and its first key in a tile of 16.
    static KGEN_DEVICE int step() { return lane_id() / 8 * 4; }
    static KGEN_DEVICE int key() { return lane_id() % 8 * 2; }

    // Two keys of the lane's four steps in the tiles of one input.
    template <class T>
    static KGEN_DEVICE void read_pairs(f32x2 (&pairs)[4], const u16* tiles) {
        const int first = TileCopier<T, CopyVec>::place(step(), key());
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const u16* from = tiles + SwizzledTile<bf16, 16>::below(first, s);
            if constexpr (sizeof(T) == 2) {
                pairs[s] = unpack2<T>(*reinterpret_cast<const u32*>(from));
            } else {
                const auto two = *reinterpret_cast<const Vec<float, 2>*>(from);
                pairs[s] = {two[0], two[1]};
            }
        }
    }

    KGEN_DEVICE void put_tile(int chunk, int tile, const u16* inputs) const {
        f32x2 r[4], k[4], a[4], b[4], w[4];
        read_pairs<W>(w, inputs + kOfW);
        read_pairs<bf16>(a, inputs + kOfA);
        read_pairs<bf16>(r, inputs);
        read_pairs<bf16>(k, inputs + kOfK);
        read_pairs<bf16>(b, inputs + kOfB);
        // 1. Sums of logarithms: of the lane's steps, then of those before them.
        float log2[4][2], before[2];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const float terms[2] = {fast_clamp_log2(w[s].x), fast_clamp_log2(w[s].y)};
#pragma unroll
            for (int x = 0; x < 2; ++x)
                log2[s][x] = s == 0 ? terms[x] : log2[s > 0 ? s - 1 : 0][x] + terms[x];
        }
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            float sum = log2[3][x];
#pragma unroll
            for (int distance = 8; distance < kWarpSize; distance *= 2) {
                const float other = shfl_up(sum, distance);
                if (lane_id() >= distance) sum += other;
            }
            const float earlier = shfl_up(sum, 8);
            before[x] = step() > 0 ? earlier : 0.0f;
        }
        // 2. Rows.
        const int first = RowTile::offset(step(), 2 * tile + key() / 8) + key() % 8;
        bf16* rows = buffers_.rows(chunk, 0);
        float product[2] = {fast_exp2(before[0]), fast_exp2(before[1])};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            bf16* place = rows + RowTile::below(first, s);
            float inverse[2];
            put_pair(place, kRowA, a[s], product);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const float sum = before[x] + log2[s][x];
                product[x] = fast_exp2(sum);
                inverse[x] = fast_exp2(-sum);
            }
            put_pair(place, kRowR, r[s], product);
            put_pair(place, kRowK, k[s], inverse);
            put_pair(place, kRowB, b[s], inverse);
        }
        if (step() == 12)
            *reinterpret_cast<Vec<float, 2>*>(buffers_.decay(chunk) + 16 * tile + key()) = {
                {product[0], product[1]}};
    }

    static KGEN_DEVICE void put_pair(bf16* place, Row which, f32x2 two, const float (&factors)[2]) {
        *reinterpret_cast<u32*>(place + which * RowTile::kElements) =
            pack2<bf16>(two.x * factors[0], two.y * factors[1]);
    }

    KGEN_DEVICE void put_score(int chunk, int which) const {
        const bf16* readers = buffers_.rows(chunk, which < 2 ? kRowA : kRowR);
        const bf16* updates = buffers_.rows(chunk, which % 2 == 0 ? kRowB : kRowK);
        float sums[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const Half::A x = RowTile::a_rows(readers, tile);
            Half::B y[2];
            RowTile::two_rows(y, updates, tile);
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x, y[n]);
        }
        const MmaLane lane = mma_lane();
        if (which == 0) {  // read below the diagonal alone
            float* target = buffers_.triangle(chunk) + lane.g * Buffers::kTriangle + 2 * lane.q;
            for_lower_half([&](int n, int half) {
                *reinterpret_cast<Vec<float, 2>*>(target + 8 * half * Buffers::kTriangle + 8 * n) =
                    {{sums[n][2 * half], sums[n][2 * half + 1]}};
            });
            return;
        }
        const int own = which < 2 ? 0 : 1;  // whether a step reads its own update
        bf16* tile = buffers_.scores(chunk, which - 1);
        for_lower_half([&](int n, int half) {
            float two[2];
#pragma unroll
            for (int x = 0; x < 2; ++x)
                two[x] = n < half || 2 * lane.q + x < lane.g + own ? sums[n][2 * half + x] : 0.0f;
            u32 terms[2];
            split_bf16(two[0], two[1], terms);
            bf16* target = tile + ScoreTile::offset(lane.g + 8 * half, n) + 2 * lane.q;
            *reinterpret_cast<u32*>(target) = terms[0];
            *reinterpret_cast<u32*>(target + Buffers::kTerm) = terms[1];
        });
    }

    // Calls body(n, half) for the quarters of scores that are not above the diagonal: 8 n columns, 8 half rows on.
    template <class Body>
    static KGEN_DEVICE void for_lower_half(Body body) {
        body(0, 0);
        body(0, 1);
        body(1, 1);
    }

    Buffers buffers_;
    int warp_;
    i64 steps_;
    u16* inputs_;
    Copier r_, k_, a_, b_;
    CopierW w_;
};

}  // namespace kgen::wkv7
