// The warpgroup of fused_loop.cuh that holds the gradient G of the state. It computes gsa and gv of a chunk of 32 steps
// of wkv7, and writes X = diag(P_32) G and sa to shared memory for the other warpgroups.
//
//     u   = (R B^T)^T gy + B X       gsa = ((I - A B^T)^-1)^T u
//     gv  = (R K^T)^T gy + K X + (A K^T)^T gsa
//     G   = X + R^T gy + A^T gsa     before the chunk
//
// It also computes the inverse, and sum_v S * G before the chunk, from which the running sums of gw start
// (fused_sums.cuh).
//
// Layout: accumulators are transposed: their rows are value features. One product gives u and the part of gv that comes
// from X and gy: its columns are tiles of eight steps of B and of K in turn. X, u, gsa, the rows, the scores and the
// inverse have two bf16 terms.
//
// Shared memory, barriers: fused_tiles.cuh.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/column_outputs.cuh"
#include "kgen/wkv7/fused_tensors.cuh"
#include "kgen/wkv7/fused_tiles.cuh"
#include "kgen/wkv7/group_inverse.cuh"

namespace kgen::wkv7 {

template <class Tensors>
class FusedGradient {
    using Tiles = FusedTiles;
    static constexpr int kChunk = Tiles::kChunk, kEach = min(Tensors::kVec, 4);

public:
    KGEN_DEVICE FusedGradient(const Tiles& tiles, int warp, const Tensors& x) : tiles_(tiles), warp_(warp), x_(x) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int key = 8 * (i / 4) + 2 * lane.q + i % 2, column = own_column(warp, lane, i);
            const bool used = x.gfinal != nullptr && key < Tensors::kK && column < Tensors::kV;
            g_[i / 4][i % 4] = used ? x.gfinal[key * Tensors::kV + column] : 0.0f;
        }
    }

    // Loads the thread's part of sa of a chunk of `left` steps from step `first` on: four value features of four steps,
    // which are 8 apart.
    KGEN_DEVICE void load_sa(float (&sa)[4][4], i64 first, int left) const {
        const int thread = kWarpSize * opaque(warp_) + opaque(lane_id()), step = thread / 16, column = thread % 16 * 4;
        const float* from = x_.sa.first + (first + step) * x_.sa.stride + column;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int i = 0; i < 4; i += kEach) {
                Vec<float, kEach> some = {};
                if (step + 8 * n < left && Tensors::is_value(column + i)) some = load_vec<kEach>(from + i);
#pragma unroll
                for (int j = 0; j < kEach; ++j) sa[n][i + j] = some[j];
            }
            from += 8 * x_.sa.stride;
        }
    }

    // Writes X, sa and the inverse of a chunk to shared memory. Those of the previous chunk are not read any more.
    KGEN_DEVICE void begin(int chunk, const float (&sa)[4][4]) {
        const int warp = opaque(warp_);
        const int lane = opaque(lane_id());
        const float* decay = tiles_.products(chunk) + Tiles::float_place(kChunk, 0);
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const auto d = *reinterpret_cast<const Vec<float, 2>*>(decay + 8 * tile + 2 * (lane % 4));
#pragma unroll
            for (int i = 0; i < 4; ++i) g_[tile][i] *= d[i % 2];
        }
        bf16* const own = tiles_.x() + 64 * 16 * warp;
        const PanelRows rows(own, lane), low_rows(own + Tiles::kPairs, lane);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            u32 x[4], low[4];
            split(x, low, g_[2 * t], g_[2 * t + 1]);
            rows.write(x, t);
            low_rows.write(low, t);
        }
        const int thread = kWarpSize * warp + lane, step = thread / 16, column = thread % 16 * 4;
        const int place = Tiles::PairPanels::offset(Tiles::pair_row(step, 0), column / 8) + column % 8;
        bf16* const z = tiles_.z(chunk) + place;
        bf16* const low_z = tiles_.low_z() + place;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 first_two[2], second_two[2];
            split_bf16(sa[n][0], sa[n][1], first_two);
            split_bf16(sa[n][2], sa[n][3], second_two);
            *reinterpret_cast<Vec<u32, 2>*>(z + 16 * 64 * n) = {{first_two[0], second_two[0]}};
            *reinterpret_cast<Vec<u32, 2>*>(low_z + 16 * 64 * n) = {{first_two[1], second_two[1]}};
        }
        if (warp == (chunk & 3)) GroupInverse<Tiles>::put(tiles_);
        fence_proxy_async();
        named_barrier_sync(kFusedGradient, 128);
    }

    // Computes gsa and writes it to shared memory; computes gv without its term from gsa.
    KGEN_DEVICE void solve(int chunk, int slot, u32 (&gsa)[2][4], u32 (&low_gsa)[2][4], float (&gv)[4][4]) const {
        const int warp = opaque(warp_);
        const int lane = opaque(lane_id());
        const bf16* values = tiles_.y(chunk) + Tiles::PairPanels::offset(lane % 8 + lane / 16 * 16,
                                                                        2 * warp + lane / 8 % 2);
        u32 gy[2][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) ldmatrix<4, true>(gy[t], values + 32 * 64 * t);
        float sums[8][4];
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
        const Tiles::PairOperand x(tiles_.x(), 0, 0), low_x(tiles_.x() + Tiles::kPairs, 0, 0);
        const Tiles::PairOperand rows(tiles_.early_rows(slot), 0, 0);
        const Tiles::PairOperand rest(tiles_.early_rows(slot) + Tiles::kPairs, 0, 0);
        const Tiles::StepOperand scores(tiles_.scores(Tiles::kScoreR), 0, 0);
        const Tiles::StepOperand low_scores(tiles_.scores(Tiles::kScoreRLow), 0, 0);
        wgmma_fence(sums, gy);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            wgmma_m64k16<64, Major::K, Major::K>(sums, low_x.at(0, 16 * t), rows.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K, Major::K>(sums, x.at(0, 16 * t), rest.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<64, Major::MN>(sums, gy[t], low_scores.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K, Major::K>(sums, x.at(0, 16 * t), rows.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<64, Major::MN>(sums, gy[t], scores.at(16 * t, 0));
        wgmma_commit();
        wgmma_wait<0>(sums, gy);

        u32 u[2][4], low_u[2][4];
        float solved[4][4];
#pragma unroll
        for (int t = 0; t < 2; ++t) split(u[t], low_u[t], sums[4 * t], sums[4 * t + 2]);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            solved[i / 4][i % 4] = 0.0f;
            gv[i / 4][i % 4] = sums[2 * (i / 4) + 1][i % 4];
        }
        const Tiles::StepOperand inverse(tiles_.scores(Tiles::kInverse), 0, 0);
        wgmma_fence(solved, u, low_u);
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(solved, low_u[t], inverse.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(solved, u[t], inverse.at(16 * t, 32));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(solved, u[t], inverse.at(16 * t, 0));
        wgmma_commit();
        wgmma_wait<0>(solved, u, low_u);

        const int row = Tiles::pair_row(lane / 16 * 8 + lane % 8, 1), piece = 2 * warp + lane / 8 % 2;
        const int place = Tiles::PairPanels::offset(row, piece);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            split(gsa[t], low_gsa[t], solved[2 * t], solved[2 * t + 1]);
            stmatrix_transposed(gsa[t], tiles_.y(chunk) + place + 32 * 64 * t);
            stmatrix_transposed(low_gsa[t], tiles_.low_y() + place + 32 * 64 * t);
        }
        fence_proxy_async();
        named_barrier_sync(kFusedGradient, 128);
    }

    // Adds the term from gsa to gv, and turns X into G before the chunk.
    KGEN_DEVICE void finish(int chunk, int slot, u32 (&gsa)[2][4], u32 (&low_gsa)[2][4], float (&gv)[4][4]) {
        const Tiles::PairOperand y(tiles_.y(chunk), 0, 0), low_y(tiles_.low_y(), 0, 0);
        const Tiles::StepOperand scores(tiles_.scores(Tiles::kScoreAK), 0, 0);
        const Tiles::PairOperand rows(tiles_.late_rows(slot), 0, 0), rest(tiles_.late_rows(slot) + Tiles::kPairs, 0, 0);
        float of_gsa[4][4];  // in separate accumulators: moving those of gv makes ptxas serialise all products
#pragma unroll
        for (int i = 0; i < 16; ++i) of_gsa[i / 4][i % 4] = 0.0f;
        wgmma_fence(of_gsa, g_, gsa, low_gsa);
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(of_gsa, low_gsa[t], scores.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(of_gsa, gsa[t], scores.at(16 * t, 32));
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma_m64k16<32, Major::MN>(of_gsa, gsa[t], scores.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::MN, Major::MN>(g_, low_y.at(16 * t, 0), rows.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::MN, Major::MN>(g_, y.at(16 * t, 0), rest.at(16 * t, 0));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::MN, Major::MN>(g_, y.at(16 * t, 0), rows.at(16 * t, 0));
        wgmma_commit();
        wgmma_wait<0>(of_gsa, g_, gsa, low_gsa);
#pragma unroll
        for (int i = 0; i < 16; ++i) gv[i / 4][i % 4] += of_gsa[i / 4][i % 4];
    }

    KGEN_DEVICE void write(i64 first, int left, float (&gv)[4][4], float& nonfinite) const {
        struct Output {
            int width;
            i64 steps;
            Rows<bf16> second;
            float second_factor;
        };
        const Output to{Tensors::kV, first + left, x_.gv, 1.0f};
        ColumnOutput<Tensors::kVec, Direction::forward> outputs(to, 16 * warp_, first);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sixteen[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) sixteen[i / 4][i % 4] = gv[2 * half + i / 4][i % 4];
            outputs.write(sixteen, nonfinite);
        }
    }

    // The warp's part of sum_v S * G before a chunk, with S from shared memory.
    KGEN_DEVICE void put_end(int chunk) const {
        const int warp = opaque(warp_);
        const int rank = opaque(lane_id());
        const MmaLane lane{rank / 4, rank % 4};
        const PanelRows rows(tiles_.state() + 64 * 16 * warp, rank);
        const PanelRows low_rows(tiles_.state() + 64 * 16 * warp + Tiles::kPairs, rank);
        float sums[16];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            u32 high[4], low[4];
            rows.read(high, t);
            low_rows.read(low, t);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const auto& its = g_[2 * t + n];
                const f32x2 first = sum_pair(high[2 * n], low[2 * n]);
                const f32x2 second = sum_pair(high[2 * n + 1], low[2 * n + 1]);
                sums[4 * t + 2 * n] = fma(second.x, its[2], first.x * its[0]);
                sums[4 * t + 2 * n + 1] = fma(second.y, its[3], first.y * its[1]);
            }
        }
        add_half<16>(sums, lane.g & 4);
        add_half<8>(sums, lane.g & 2);
        add_half<4>(sums, lane.g & 1);
        *reinterpret_cast<Vec<float, 2>*>(tiles_.ends(chunk) + 64 * warp + 8 * lane.g + 2 * lane.q) = {
            {sums[0], sums[1]}};
    }

private:
    static KGEN_DEVICE int own_column(int warp, const MmaLane& lane, int i) {
        return 16 * warp + lane.g + i % 4 / 2 * 8;
    }

    // Splits two tiles of accumulators into two terms, as operands A.
    static KGEN_DEVICE void split(u32 (&high)[4], u32 (&low)[4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* from = (i < 2 ? left : right) + i % 2 * 2;
            u32 terms[2];
            split_bf16(from[0], from[1], terms);
            high[i] = terms[0];
            low[i] = terms[1];
        }
    }

    // Adds up sums of two lanes whose numbers are Count apart. Each lane keeps half of the Count sums: the upper half
    // if `upper`.
    template <int Count>
    static KGEN_DEVICE void add_half(float (&sums)[16], int upper) {
#pragma unroll
        for (int m = 0; m < Count / 2; ++m) {
            const float first = sums[m], second = sums[Count / 2 + m];
            sums[m] = (upper ? second : first) + shfl_xor(upper ? first : second, Count);
        }
    }

    Tiles tiles_;
    int warp_;
    const Tensors& x_;
    float g_[8][4];
};

}  // namespace kgen::wkv7
