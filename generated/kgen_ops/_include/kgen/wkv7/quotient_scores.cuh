// The products of rows with rows of a chunk of 16 steps of wkv7: the scores, and the triangle that is inverted. The
// rows are those of quotient_producer.cuh, so that the products need no further decays.
//
// Shared memory and layout: ChunkBuffers (chunk_producer.cuh). Synchronisation: none here.
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/chunk_producer.cuh"

namespace kgen::wkv7 {

// For one warp, the caller. Group: how many tiles of 16 keys have their operands in registers at once.
template <class Pass, int Keys, int Group = 4>
class QuotientScores {
    using Buffers = ChunkBuffers<Keys, Pass>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    static constexpr int kTiles = ceil_div(Keys, 16), kGroup = min(Group, kTiles);

public:
    static constexpr int kMatrices = Pass::kReadsR && Pass::kReadsK ? 4 : 2;
    // The number of the i-th matrix that the Pass needs.
    static KGEN_DEVICE int matrix(int i) { return kMatrices == 4 ? i : Pass::kReadsR ? 2 * i : 3 * i; }

    KGEN_DEVICE explicit QuotientScores(const Buffers& buffers) : buffers_(buffers) {}

    // Computes matrix `which`: 0: A B^T, 1: R K^T, 2: R B^T, 3: A K^T.
    KGEN_DEVICE void put_score(int chunk, int which) const {
        const bool of_r = (which + 1) & 2, of_k = which & 1;
        // Offsets from `rows`. They are opaque: otherwise the compiler would compute the offsets of low terms anew.
        const bf16* rows = buffers_.first;
        const int of_chunk = static_cast<int>(buffers_.rows(chunk) - rows);
        const int readers =
            of_chunk + (of_r ? Buffers::template kRowsOf<kRowR> : Buffers::template kRowsOf<kRowA>);
        const int updates =
            of_chunk + (of_k ? Buffers::template kRowsOf<kRowK> : Buffers::template kRowsOf<kRowB>);
        // 1. Sums over keys. Products with low terms have accumulators of their own, so that dependent chains are
        // short.
        float sums[2][4] = {}, low[2][4] = {};
#pragma unroll
        for (int first = 0; first < kTiles; first += kGroup) {
            int x_at[kGroup], y_at[kGroup];
            for_tiles(first, [&](int n) {
                x_at[n] = opaque(readers + RowTile::beside(rows_first_, first + n));
                y_at[n] = opaque(updates + RowTile::beside(columns_first_, first + n));
            });
            typename Half::A x[kGroup];
            typename Half::B y[kGroup][2];
            for_tiles(first, [&](int n) {
                x[n] = read_a(rows + x_at[n]);
                read_b(y[n], rows + y_at[n]);
                multiply(sums, x[n], y[n]);
            });
            // untested: the config decides
            if (of_r ? Pass::kTermsR == 2 : Pass::kTermsA == 2)
                for_tiles(first, [&](int n) {
                    multiply(low, read_a(rows + x_at[n] + RowTile::kElements), y[n]);
                });
            // untested: the config decides
            if (of_k ? Pass::kTermsK == 2 : Pass::kTermsB == 2)
                for_tiles(first, [&](int n) {
                    typename Half::B rest[2];
                    read_b(rest, rows + y_at[n] + RowTile::kElements);
                    multiply(low, x[n], rest);
                });
        }
        const MmaLane lane = mma_lane();
        const int own = of_r ? 1 : 0;  // whether a step reads its own update
        for_lower_half([&](int n, int half) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                float& sum = sums[n][2 * half + x];
                sum += low[n][2 * half + x];
                if (n == half && 2 * lane.q + x >= lane.g + own) sum = 0.0f;
            }
        });
        // 2. The triangle, or scores.
        if (which == 0) {
            float* target = buffers_.triangle(chunk) + lane.g * Buffers::kTriangle + 2 * lane.q;
            for_lower_half([&](int n, int half) {
                *reinterpret_cast<Vec<float, 2>*>(target + 8 * half * Buffers::kTriangle + 8 * n) =
                    {{sums[n][2 * half], sums[n][2 * half + 1]}};
            });
            return;
        }
        // untested: the config decides which of the matrices there are
        bf16* scores = buffers_.scores(chunk, of_r ? (of_k ? kScoreRK : kScoreRB) : kScoreAK);
        for_lower_half([&](int n, int half) {
            u32 terms[2];
            split_bf16(sums[n][2 * half], sums[n][2 * half + 1], terms);
            bf16* target = scores + (score_place_ ^ 16 * half ^ 8 * n);
            *reinterpret_cast<u32*>(target) = terms[0];
            *reinterpret_cast<u32*>(target + Buffers::kTerm) = terms[1];
        });
    }
private:
    // Calls body(n) for those of kGroup tiles from `first` on that exist. This is a member function, because NVRTC
    // takes a lambda with an `auto` parameter for a host function.
    template <class Body>
    static KGEN_DEVICE void for_tiles(int first, Body body) {
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
            if (first + n < kTiles) body(n);
    }

    static KGEN_DEVICE typename Half::A read_a(const bf16* tile) {
        typename Half::A a;
        ldmatrix<4>(a.pair, tile);
        return a;
    }
    static KGEN_DEVICE void read_b(typename Half::B (&b)[2], const bf16* tile) {
        u32 words[4];
        ldmatrix<4>(words, tile);
        Half::split(b, words);
    }
    static KGEN_DEVICE void multiply(float (&sums)[2][4], const typename Half::A& x, const typename Half::B (&y)[2]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) Half::template multiply<0>(sums[n], x, y[n]);
    }

    // Calls body(n, half) for the three quarters of a matrix that are not above the diagonal: columns from 8 n on, rows
    // from 8 half on.
    template <class Body>
    static KGEN_DEVICE void for_lower_half(Body body) {
        body(0, 0);
        body(0, 1);
        body(1, 1);
    }

    Buffers buffers_;
    // The lane's offsets in tiles: of the rows that it passes to ldmatrix, and of its first score. They are opaque
    // because the compiler would compute them again for every chunk.
    int rows_first_ = opaque(RowTile::rows_first()), columns_first_ = opaque(RowTile::columns_first());
    int score_place_ = opaque(ScoreTile::offset(mma_lane().g, 0) + 2 * mma_lane().q);
};

}  // namespace kgen::wkv7
