// The two warpgroups of fused_loop.cuh that compute gr and ga (late rows), and gb and gk (early rows), of a chunk of 32
// steps of wkv7.
//
// With E = [R; A], F = [B; K], Y = [gy; gsa], Z = [sa; v], S the state before the chunk, X = diag(P_32) G,
// and D = Y Z^T with a causal mask (rows of gy keep their own and earlier steps, rows of gsa keep earlier steps):
//
//     [gR; gA] = Y S^T + D F        gr_t = scale P_t gR_t     ga_t = P_{t-1} gA_t
//     [gB; gK] = Z X^T + D^T E      gb_t = gB_t / P_t         gk_t = gK_t / P_t
//
// Each warpgroup computes D, or its transpose, for itself, because the accumulators become operands A. Both warpgroups
// execute the same copy of the code, as the instruction cache has no room for two. Each warp has eight steps. All
// operands have two terms except gy and v, which are bf16 already.
//
// Shared memory, barriers: fused_tiles.cuh.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/fused_tensors.cuh"
#include "kgen/wkv7/fused_tiles.cuh"

namespace kgen::wkv7 {

template <class Tensors>
class FusedRows {
    using Tiles = FusedTiles;
    using Operand = Tiles::PairOperand;
    static constexpr int kPairs = Tiles::kPairs, kEach = min(Tensors::kVec, 4);

public:
    // `late`: whether the warpgroup computes late rows.
    KGEN_DEVICE FusedRows(const Tiles& tiles, int warp, const Tensors& x, bool late)
        : tiles_(tiles), warp_(warp), x_(x), is_late_(late) {}

    // S before a chunk. Each of the eight warps loads 8 keys; each lane loads four of every 16 value features of one
    // key.
    using Line = float[4][4];

    KGEN_DEVICE void load_state(Line& line, i64 number) const {
        const int lane = opaque(lane_id()), column = 4 * (lane % 4), key = 8 * first_keys() + lane / 4;
        const float* const from = x_.states + (number * Tensors::kK + key) * Tensors::kV + column;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int left = Tensors::kV == 64 ? 4 : Tensors::kV - column - 16 * t;
#pragma unroll
            for (int i = 0; i < 4; i += kEach) {
                Vec<float, kEach> some = {};
                if (Tensors::is_key(key) && i < left) some = load_vec<kEach>(from + 16 * t + i);
#pragma unroll
                for (int j = 0; j < kEach; ++j) line[t][i + j] = some[j];
            }
        }
    }

    // Writes this state to shared memory, transposed. Lanes 2 and 3 of every four store their two pairs in the other
    // order: otherwise rows that are 8 apart, which share banks, would meet in one matrix.
    KGEN_DEVICE void put_state(const Line& line) const {
        const int lane = opaque(lane_id()), row = lane % 8;
        const bool swapped = lane % 4 >= 2;
        // The matrix row whose address the lane gives is this one of 16 value features.
        const int feature = row / 2 * 4 + row % 2 + 2 * (lane / 8 % 2 ^ row / 4);
        bf16* to = tiles_.state() + Tiles::PairPanels::offset(lane / 16 * 16 + feature, first_keys());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 words[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&four)[4] = line[2 * half + i / 2];
                const int x = 2 * (i % 2), y = 2 - x;
                u32 terms[2];
                split_bf16(swapped ? four[y] : four[x], swapped ? four[y + 1] : four[x + 1], terms);
                words[i] = terms[0];
                low[i] = terms[1];
            }
            stmatrix_transposed(words, to + 32 * 64 * half);
            stmatrix_transposed(low, to + 32 * 64 * half + kPairs);
        }
        fence_proxy_async();
    }

    // Computes the products of the steps with the state, or with X, and D. The warpgroup then reads S or X, Y and Z no
    // more.
    KGEN_DEVICE void read(int chunk, float (&sums)[8][4], u32 (&scores)[4][4], u32 (&low_scores)[4][4]) const {
        const int warp = opaque(warp_);
        const int lane = opaque(lane_id());
        bf16* its = (late() ? tiles_.y(chunk) : tiles_.z(chunk)) + 64 * 16 * warp;
        const Operand low(late() ? tiles_.low_y() : tiles_.low_z(), 0, 0);
        u32 own[4][4];
        const PanelRows rows(its, lane);
#pragma unroll
        for (int t = 0; t < 4; ++t) rows.read(own[t], t);
        float products[8][4];
#pragma unroll
        for (int i = 0; i < 32; ++i) products[i / 4][i % 4] = sums[i / 4][i % 4] = 0.0f;
        const Operand other(late() ? tiles_.z(chunk) : tiles_.y(chunk), 0, 0);
        const Operand low_other(late() ? tiles_.low_z() : tiles_.low_y(), 0, 0);
        const bf16* state = late() ? tiles_.state() : tiles_.x();
        wgmma_fence(products, sums, own);
        multiply<Major::K>(products, own, low, other, low_other);
        wgmma_commit();
        multiply<Major::MN>(sums, own, low, Operand(state, 0, 0), Operand(state + kPairs, 0, 0));
        wgmma_commit();
        wgmma_wait<0>(products, sums, own);
        named_barrier_arrive<384>(kFusedRead);
        // How many steps the reader is later, for row g and column 0 of a lane: a row reads columns if late, else a
        // column reads rows.
        const int sign = late() ? 1 : -1, distance = sign * (8 * warp + lane / 4 - 2 * (lane % 4));
        const int of_rows = late() ? 1 : 0;  // A reads only earlier steps: rows, or columns, of the second kind
#pragma unroll
        for (int i = 0; i < 4; ++i)  // the outer loop: else ptxas spills
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                // Rows of the second kind are i % 2 == 1, columns of the second kind i / 2 == 1.
                float two[2];
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int least = i == 0 ? 0 : i == 1 ? of_rows : i == 2 ? 1 - of_rows : 1;
                    const bool is_read = distance - sign * (8 * t + x) >= least;
                    two[x] = is_read ? products[2 * t + i / 2][i % 2 * 2 + x] : 0.0f;
                }
                u32 terms[2];
                split_bf16(two[0], two[1], terms);
                scores[t][i] = terms[0];
                low_scores[t][i] = terms[1];
            }
    }

    // Adds the products with the rows of the chunk's steps.
    KGEN_DEVICE void add_steps(int slot, float (&sums)[8][4], u32 (&scores)[4][4], u32 (&low_scores)[4][4]) const {
        const bf16* rows = late() ? tiles_.early_rows(slot) : tiles_.late_rows(slot);
        wgmma_fence(sums, scores, low_scores);
        multiply<Major::MN>(sums, scores, low_scores, Operand(rows, 0, 0), Operand(rows + kPairs, 0, 0));
        wgmma_commit();
        wgmma_wait<0>(sums, scores, low_scores);
    }

    // Turns sums into gradients, as bf16 pairs of a lane's tiles, and writes the sums times their own rows to shared
    // memory.
    template <bool Late>
    KGEN_DEVICE void finish(int chunk, int slot, const float (&sums)[8][4], u32 (&first)[8], u32 (&second)[8]) const {
        const int warp = opaque(warp_);
        const int rank = opaque(lane_id());
        const MmaLane lane{rank / 4, rank % 4};
        const int step = 8 * warp + lane.g, column = 2 * lane.q;
        const int until = Tiles::float_place(step + 1, column), before = Tiles::float_place(step, column);
        bf16* own = (Late ? tiles_.late_rows(slot) : tiles_.early_rows(slot)) + 64 * 16 * warp;
        const PanelRows rows(own, rank), low_rows(own + kPairs, rank);
        const float* const products = tiles_.products(chunk);
        float* const of_first = Late ? tiles_.of_r() : tiles_.of_early();
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            u32 high[4], low[4];
            rows.read(high, t);
            low_rows.read(low, t);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int tile = 2 * t + n, place = Tiles::tile_place(before, tile);
                const f32x2 one = sum_pair(high[2 * n], low[2 * n]), two = sum_pair(high[2 * n + 1], low[2 * n + 1]);
                const float(&of)[4] = sums[tile];
                const auto p = *reinterpret_cast<const Vec<float, 2>*>(products + Tiles::tile_place(until, tile));
                if constexpr (Late) {
                    const auto q = *reinterpret_cast<const Vec<float, 2>*>(products + place);
                    *reinterpret_cast<Vec<float, 2>*>(of_first + place) = {{one.x * of[0], one.y * of[1]}};
                    *reinterpret_cast<Vec<float, 2>*>(tiles_.of_a() + place) = {{two.x * of[2], two.y * of[3]}};
                    first[tile] = pack2<bf16>(of[0] * (x_.scale * p[0]), of[1] * (x_.scale * p[1]));
                    second[tile] = pack2<bf16>(of[2] * q[0], of[3] * q[1]);
                } else {
                    *reinterpret_cast<Vec<float, 2>*>(of_first + place) = {
                        {fma(two.x, of[2], one.x * of[0]), fma(two.y, of[3], one.y * of[1])}};
                    const float x = fast_reciprocal(p[0]), y = fast_reciprocal(p[1]);
                    first[tile] = pack2<bf16>(of[0] * x, of[1] * y);
                    second[tile] = pack2<bf16>(of[2] * x, of[3] * y);
                }
            }
        }
    }

    // Writes the gradients of a chunk of `left` steps from step `begin` on.
    KGEN_DEVICE void write(const Rows<bf16>& to, const u32 (&pairs)[8], i64 begin, int left) const {
        const int warp = opaque(warp_);
        const int rank = opaque(lane_id());
        const MmaLane lane{rank / 4, rank % 4};
        const int step = 8 * warp + lane.g;
        if constexpr (Tensors::kVec % 8 == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Vec<u32, 4> tile;  // number 4 half + q
#pragma unroll
                for (int i = 0; i < 4; ++i) tile[i] = pairs[4 * half + i];
                transpose_lanes(tile, lane.q);
                const int column = 8 * (4 * half + lane.q);
                if (step < left && Tensors::is_key(column))
                    *reinterpret_cast<Vec<u32, 4>*>(to.at(begin + step) + column) = tile;
            }
            return;
        }
        Vec<u32, 2> quads[4];  // unless kVec % 4 == 0, the pairs of both tiles
#pragma unroll
        for (int t = 0; t < 4; ++t)
            quads[t] = Tensors::kVec % 4 == 0 ? quad_of_pairs(pairs[2 * t], pairs[2 * t + 1])
                                              : Vec<u32, 2>{{pairs[2 * t], pairs[2 * t + 1]}};
        if (step >= left) return;
        const int first = Tensors::kVec % 4 == 0 ? column_of_quad() : 2 * lane.q;
        bf16* const row = to.at(begin + step) + first;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if constexpr (Tensors::kVec % 4 == 0) {
                if (Tensors::is_key(16 * t + first)) *reinterpret_cast<Vec<u32, 2>*>(row + 16 * t) = quads[t];
            } else {
#pragma unroll
                for (int n = 0; n < 2; ++n) store_pair(row + 16 * t + 8 * n, first + 16 * t + 8 * n, quads[t][n]);
            }
        }
    }

    // Transposes the words of four lanes with four words each: word i of lane q becomes word q of lane i.
    static KGEN_DEVICE void transpose_lanes(Vec<u32, 4>& words, int q) {
#pragma unroll
        for (int distance = 1; distance <= 2; distance *= 2) {
            const bool upper = (q & distance) != 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & distance) continue;
                const u32 other = shfl_xor(upper ? words[i] : words[i + distance], distance);
                if (upper)
                    words[i] = other;
                else
                    words[i + distance] = other;
            }
        }
    }

    static KGEN_DEVICE void store_pair(bf16* to, int column, u32 pair) {
        if constexpr (Tensors::kVec % 2 == 0) {
            if (Tensors::is_key(column)) *reinterpret_cast<u32*>(to) = pair;
        } else {
            const auto two = bit_cast<Vec<bf16, 2>>(pair);
#pragma unroll
            for (int x = 0; x < 2; ++x)
                if (Tensors::is_key(column + x)) to[x] = two[x];
        }
    }

private:
    // Opaque: otherwise the compiler keeps what depends on it in registers from chunk to chunk.
    KGEN_DEVICE bool late() const { return opaque(is_late_) != 0; }
    KGEN_DEVICE int first_keys() const { return opaque(warp_) + (late() ? 0 : 4); }  // in blocks of 8

    template <Major M>
    static KGEN_DEVICE Operand at(const Operand& x, int fragment) {
        return M == Major::K ? x.at(0, 16 * fragment) : x.at(16 * fragment, 0);
    }
    // sums += x y for one term of a fragment of x, which is in registers, or a row operand in shared memory.
    template <Major M>
    static KGEN_DEVICE void multiply(float (&sums)[8][4], const u32 (&x)[4][4], const Operand& y, int fragment) {
        wgmma_m64k16<64, M>(sums, x[fragment], at<M>(y, fragment));
    }
    template <Major M>
    static KGEN_DEVICE void multiply(float (&sums)[8][4], const Operand& x, const Operand& y, int fragment) {
        wgmma_m64k16<64, Major::K, M>(sums, x.at(0, 16 * fragment), at<M>(y, fragment));
    }
    // sums += x y, where x and y have two terms each.
    template <Major M, class Low>
    static KGEN_DEVICE void multiply(float (&sums)[8][4], const u32 (&x)[4][4], const Low& low_x, const Operand& y,
                                     const Operand& low_y) {
#pragma unroll
        for (int t = 0; t < 4; ++t) multiply<M>(sums, low_x, y, t);
#pragma unroll
        for (int t = 0; t < 4; ++t) multiply<M>(sums, x, low_y, t);
#pragma unroll
        for (int t = 0; t < 4; ++t) multiply<M>(sums, x, y, t);
    }

    Tiles tiles_;
    int warp_;
    const Tensors& x_;
    int is_late_;
};

}  // namespace kgen::wkv7
