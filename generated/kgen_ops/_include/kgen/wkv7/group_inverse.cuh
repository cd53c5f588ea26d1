// The inverse of a unit triangular matrix of 32 steps, for group_loop.cuh: T = (I - L)^-1, L strictly lower.
//
// T has blocks of 16 steps: T11 and T22 are the inverses of the diagonal blocks, T21 = T22 L21 T11. One warp computes
// T11 and T22 side by side, by substitution in fp32 with a row per lane. `put` then computes T21 by mma with two bf16
// terms.
//
// Shared memory: GroupTiles or FusedTiles; L is in `triangle`. T has a high and a low term in the panel kInverse, whose
// upper right block is zero from the beginning. Synchronisation: only within the warp.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/group_tiles.cuh"

namespace kgen::wkv7 {

// A template, so that architectures without these products may include the header.
template <class Tiles>
class GroupInverse {
    using Half = HalfOperands<bf16>;

public:
    // T11 and T22 alone, by one warp.
    static KGEN_DEVICE void put_blocks(const Tiles& tiles) {
        bf16* panel = tiles.scores(Tiles::kInverse);
        // N = T - I of both blocks: N = L + N L. Lane l has row l % 16 of block l / 16. Once an element of the row is
        // complete, its product with a row of L is added to all earlier elements.
        const u32 rank = static_cast<u32>(opaque(lane_id())), row = rank % 16, block = rank / 16;
        const float* triangle = tiles.triangle(2 * block);
        float found[16];
        read_line<16>(found, triangle + row * Tiles::kBlockRow);
        add_complete<14>(found, triangle);
        bf16* to = panel + 64 * (16 * block + row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vec<u32, 4> words[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 terms[2];
                split_bf16(found[8 * half + 2 * i], found[8 * half + 2 * i + 1], terms);
                words[0][i] = terms[0];
                words[1][i] = terms[1];
            }
#pragma unroll
            for (int term = 0; term < 2; ++term)
                *reinterpret_cast<Vec<u32, 4>*>(to + ((2 * block + half + 4 * term) ^ row % 8) * 8) = words[term];
        }
        to[((2 * block + row / 8) ^ row % 8) * 8 + row % 8] = from_float<bf16>(1.0f);
    }

    // All of T, by one warp.
    static KGEN_DEVICE void put(const Tiles& tiles) {
        put_blocks(tiles);
        sync_warp();
        bf16* panel = tiles.scores(Tiles::kInverse);
        const int rank = opaque(lane_id());
        // T21^T = (T11^T L21^T) T22^T, by tiles of 8 steps of the later block.
        const MmaLane lane{rank / 4, rank % 4};
        const int later = rank % 8 + rank / 16 * 8, side = rank / 8 % 2;  // addresses for ldmatrix
        float sums[2][4] = {}, of_later[2][4] = {};
        Half::A x[2];
        Half::B y[2][2];  // term, tile
#pragma unroll
        for (int term = 0; term < 2; ++term)
            ldmatrix<4, true>(x[term].pair, panel + 64 * later + ((side + 4 * term) ^ later % 8) * 8);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto pair = *reinterpret_cast<const Vec<float, 2>*>(
                    tiles.triangle(1) + (lane.g + 8 * n) * Tiles::kBlockRow + 2 * lane.q + 8 * i);
                u32 terms[2];
                split_bf16(pair[0], pair[1], terms);
                y[0][n].pair[i] = terms[0];
                y[1][n].pair[i] = terms[1];
            }
        multiply_terms(sums, x, y);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 terms[2];
            split_bf16(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1], terms);
            x[0].pair[i] = terms[0];
            x[1].pair[i] = terms[1];
        }
        bf16* at = panel + 64 * (16 + later);
#pragma unroll
        for (int term = 0; term < 2; ++term) {
            u32 words[4];
            ldmatrix<4>(words, at + ((2 + side + 4 * term) ^ later % 8) * 8);
            Half::split(y[term], words);
        }
        multiply_terms(of_later, x, y);
        u32 words[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 terms[2];
            split_bf16(of_later[i / 2][i % 2 * 2], of_later[i / 2][i % 2 * 2 + 1], terms);
            words[0][i] = terms[0];
            words[1][i] = terms[1];
        }
#pragma unroll
        for (int term = 0; term < 2; ++term)
            stmatrix_transposed(words[term], at + ((side + 4 * term) ^ later % 8) * 8);
    }

private:
    // Reads at least the first Count elements of a row of the triangle.
    template <int Count>
    static KGEN_DEVICE void read_line(float (&line)[16], const float* row) {
#pragma unroll
        for (int j = 0; j < Count; j += 4) {
            const auto four = *reinterpret_cast<const Vec<float, 4>*>(row + j);
#pragma unroll
            for (int x = 0; x < 4; ++x) line[j + x] = four[x];
        }
    }
    // Adds the products of elements I to 1, which become complete in this order, to the elements before them.
    template <int I>
    static KGEN_DEVICE void add_complete(float (&found)[16], const float* triangle) {
        float line[16];
        read_line<I>(line, triangle + I * Tiles::kBlockRow);
#pragma unroll
        for (int j = 0; j < I; ++j) found[j] = fma(found[I], line[j], found[j]);
        if constexpr (I > 1) add_complete<I - 1>(found, triangle);
    }

    // sums += x y of 16 x 16, of two terms each.
    static KGEN_DEVICE void multiply_terms(float (&sums)[2][4], const Half::A (&x)[2], const Half::B (&y)[2][2]) {
        for_term_products<2>([&](int i, int j) {
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(sums[n], x[i], y[j][n]);
        });
    }
};

}  // namespace kgen::wkv7
