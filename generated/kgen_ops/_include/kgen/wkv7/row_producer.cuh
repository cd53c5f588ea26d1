// Rows with decays and scores of a chunk of 16 steps of wkv7, for all value features of a head; bf16 operands (mma,
// sm_80), clamped decays.
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j / P_j     B_j = b_j / P_j
//
// chunk_producer.cuh has the scores, the inverse and shared memory. P is the exponential of a sum of logarithms, which
// are at least -0.607 each: 1 / P is below exp(9.71), and nothing is divided.
//
// A lane has two keys and four steps, and gets the sum of the steps before them by shuffles.
#pragma once

#include "kgen/wkv7/chunk_producer.cuh"

namespace kgen::wkv7 {

template <class W, int Keys, int Warps, int CopyVec, int Stages>
class RowProducer : public ChunkProducer<W, Keys, Warps, CopyVec, Stages> {
    using Base = ChunkProducer<W, Keys, Warps, CopyVec, Stages>;
    using typename Base::Buffers, typename Base::RowTile, typename Base::ScoreTile;
    using Half = HalfOperands<bf16>;
    using Base::buffers_, Base::warp_, Base::kOfK, Base::kOfA, Base::kOfB, Base::kOfW;

public:
    using Base::Base, Base::kTiles, Base::kPerWarp;
    static constexpr bool kToTheEnd = false;  // K and B are relative to the outset of the chunk

    // Rows and decays of a chunk. Chunks from 0 on, each once.
    KGEN_DEVICE void put_rows(int chunk) {
        this->begin_rows(chunk);
#pragma unroll
        for (int n = 0; n < kPerWarp; ++n) {
            const int tile = warp_ + n * Warps;
            if (kTiles % Warps != 0 && tile >= kTiles) break;
            put_tile(chunk, tile, this->inputs_of(chunk, n));
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

private:
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
};

}  // namespace kgen::wkv7
