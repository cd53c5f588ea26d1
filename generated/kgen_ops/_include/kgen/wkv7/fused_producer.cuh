// The producer warpgroup of fused_loop.cuh: it computes the rows scaled by decays and the scores of a chunk of 32 steps
// of wkv7, in two bf16 terms, chunk by chunk from the last to the first. Decays of the form clamp alone.
//
//     A_t = a_t P_{t-1}     R_t = scale r_t P_t     K_t = k_t / P_t     B_t = b_t / P_t
//
// Scores are one product [R; A] [B; K]^T by wgmma (sm_90a).
//
// Rows: each warp has eight steps, whose inputs it copies itself. Each lane has four keys of four steps, as in
// group_producer.cuh.
//
// Steps beyond the end of the sequence get zeros, and decays of 1, because G passes them before all others. 1 / P is
// below exp(19.5). Inputs above 2^99 may give Inf; the loop then computes the sequence step by step.
//
// Shared memory, barriers: fused_tiles.cuh. All warps of the warpgroup call all functions.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/fused_tiles.cuh"
#include "kgen/wkv7/group_copier.cuh"

namespace kgen::wkv7 {

// Tensors: FusedTensors. CopyVec: elements per copy.
template <class Tensors, int CopyVec>
class FusedProducer {
    using W = typename Tensors::W;
    using Tiles = FusedTiles;
    static constexpr int kChunk = Tiles::kChunk, kSteps = 8, kLaneSteps = 4, kLaneKeys = 4;
    using Words = Vec<u32, 2>;          // the lane's keys, 16 bits each
    using Keys = Vec<float, kLaneKeys>;  // the same in fp32
    template <class T>
    using Copier = GroupCopier<T, CopyVec, kSteps, kWarpSize, Direction::backward>;

public:
    // `begin`: the first step of the last chunk.
    KGEN_DEVICE FusedProducer(const Tiles& tiles, int warp, const Tensors& x, i64 begin)
        : tiles_(tiles),
          warp_(warp),
          scale_(x.scale),
          r_(x.r, begin + kSteps * warp, lane_id()),
          k_(x.k, begin + kSteps * warp, lane_id()),
          a_(x.a, begin + kSteps * warp, lane_id()),
          b_(x.b, begin + kSteps * warp, lane_id()),
          v_(x.v, begin + kSteps * warp, lane_id()),
          gy_(x.gy, begin + kSteps * warp, lane_id()),
          w_(x.w, begin + kSteps * warp, lane_id()) {
        const int rank = kWarpSize * warp + lane_id();
        u32* scores = reinterpret_cast<u32*>(tiles.scores(0));  // scores of a step with later steps stay zero
        for (int i = rank; i < 2 * Tiles::kSteps; i += 4 * kWarpSize) scores[i] = 0;
        for (int i = rank; i < 3 * Tiles::kBlock; i += 4 * kWarpSize) tiles.triangle(0)[i] = 0.0f;
        u32* low = reinterpret_cast<u32*>(tiles.low_y());
        for (int i = rank; i < Tiles::kPairs; i += 4 * kWarpSize) low[i] = 0;
        if (rank < Tiles::kColumns) tiles.products(0)[rank] = tiles.products(1)[rank] = 1.0f;
    }

    // Start the copies of a chunk: copy_rows copies r, k, a, b and w, copy_values copies v and gy. `left`: the chunk's
    // steps.
    KGEN_DEVICE void copy_rows(int slot, int left) {
        left = of_warp(left);
        bf16* late = tiles_.late_rows(slot) + first_row();
        bf16* early = tiles_.early_rows(slot) + first_row();
        w_.start(late + Tiles::kPairs, left, Tensors::kK);
        a_.start(late + kSecond, left, Tensors::kK);
        r_.start(late, left, Tensors::kK);
        k_.start(early + kSecond, left, Tensors::kK);
        b_.start(early, left, Tensors::kK);
    }
    KGEN_DEVICE void copy_values(int chunk, int left) {
        left = of_warp(left);
        gy_.start(tiles_.y(chunk) + first_row(), left, Tensors::kV);
        v_.start(tiles_.z(chunk) + first_row() + kSecond, left, Tensors::kV);
    }

    // Prefetches to L2 sa and the state of a whole chunk, which other warpgroups load.
    KGEN_DEVICE void prefetch(const Tensors& x, i64 number, i64 first) const {
        constexpr int kLine = 128 / static_cast<int>(sizeof(float)), kState = Tensors::kK * Tensors::kV;
        const int rank = kWarpSize * opaque(warp_) + opaque(lane_id());
        // untested: the config decides how many lanes a chunk needs
        if (rank * kLine < kState) prefetch_to_l2(x.states + number * kState + rank * kLine);
        // untested: as above
        if (rank < 2 * kChunk && rank % 2 * 32 < Tensors::kV)
            prefetch_to_l2(x.sa.first + (first + rank / 2) * x.sa.stride + rank % 2 * 32);
    }

    // Computes the rows and decays of a chunk of `left` steps. The lane's own copies of the inputs have arrived.
    KGEN_DEVICE void put_rows(int chunk, int slot, int left) const {
        sync_warp();  // now the copies of all lanes have arrived
        bf16* late = tiles_.late_rows(slot) + first_row();
        bf16* early = tiles_.early_rows(slot) + first_row();
        const OwnKeys own(opaque(lane_id()));
        // 1. Logarithms of the decays of the lane's steps, stored where the products of these decays go later; the sum
        // of these logarithms, and the sum over all earlier steps of the chunk.
        float* const products = tiles_.products(chunk) + 64 * (kSteps * warp_ + (own.late ? kLaneSteps : 0));
        const int existing = of_warp(left) - (own.late ? kLaneSteps : 0);
        Keys sum = {}, before, total;
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            const Words words = own.words(late + Tiles::kPairs, s);
            Keys logs;
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) {
                logs[x] = s < existing ? fast_clamp_log2(value<W>(words, x)) : 0.0f;
                sum[x] += logs[x];
            }
            *own.product(products, s) = logs;
        }
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) {
            const float other = shfl_xor(sum[x], 16);
            before[x] = own.late ? other : 0.0f;
            total[x] = sum[x] + other;
        }
        if (warp_ < 3) *reinterpret_cast<Keys*>(tiles_.totals(warp_) + own.key) = total;
        named_barrier_sync(kFusedProducers, 128);
#pragma unroll
        for (int other = 0; other < 3; ++other) {
            if (other >= warp_) break;
            const auto earlier = *reinterpret_cast<const Keys*>(tiles_.totals(other) + own.key);
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) before[x] += earlier[x];
        }
        // 2. Rows. All inputs of a step are read before anything is written, because the compiler does not know that
        // the addresses differ. The loop is not unrolled, because the code of all warpgroups together has to fit the
        // instruction cache.
        Keys product;
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) product[x] = fast_exp2(before[x]);
#pragma unroll 1
        for (int s = 0; s < kLaneSteps; ++s) {
            const Words a = own.words(late + kSecond, s), r = own.words(late, s);
            const Words k = own.words(early + kSecond, s), b = own.words(early, s);
            const Keys logs = *own.product(products, s);
            Keys until, scaled, inverse;
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) {
                before[x] += logs[x];
                until[x] = fast_exp2(before[x]);
                inverse[x] = fast_exp2(-before[x]);
                scaled[x] = scale_ * until[x];
            }
            const int at = own.place(s);
            put_row(late + kSecond + at, a, product);
            put_row(late + at, r, scaled);
            put_row(early + kSecond + at, k, inverse);
            put_row(early + at, b, inverse);
            *own.product(products, s) = product = until;
        }
        fence_proxy_async();
        named_barrier_sync(kFusedProducers, 128);
    }

    // [R; A] [B; K]^T of a chunk: each warp computes the rows of its eight steps.
    KGEN_DEVICE void multiply(int slot, float (&sums)[8][4]) const {
        bf16* late = tiles_.late_rows(slot) + first_row();
        u32 x[4][4], low[4][4];
        const PanelRows rows(late, opaque(lane_id())), low_rows(late + Tiles::kPairs, opaque(lane_id()));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            rows.read(x[t], t);
            low_rows.read(low[t], t);
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
        const bf16* of_early = tiles_.early_rows(slot);
        const Tiles::PairOperand early(of_early, 0, 0), rest(of_early + Tiles::kPairs, 0, 0);
        wgmma_fence(sums, x, low);
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, low[t], early.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, x[t], rest.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, x[t], early.at(0, 16 * t));
        wgmma_commit();
        wgmma_wait<0>(sums, x, low);
    }

    // The warp's scores. Indices: tile of eight early steps; R B^T, R K^T, A K^T (two terms), or A B^T (fp32); word.
    using Scores = u32[4][4][2];

    // Computes scores from these products, in registers: in shared memory the scores of the previous chunk may still be
    // read.
    KGEN_DEVICE void round_scores(Scores& scores, const float (&sums)[8][4]) const {
        const int rank = opaque(lane_id()), limit = rank / 4 - 2 * (rank % 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n > warp_) break;
            const int distance = limit + 8 * (warp_ - n);
            float of[4][2];  // R B, A B, R K, A K
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool read = i % 2 <= distance - i / 2 % 2;  // R reads its own step
                of[i / 2][i % 2] = read ? sums[2 * n + i / 4][i % 4] : 0.0f;
            }
            split_bf16(of[0][0], of[0][1], scores[n][0]);
            split_bf16(of[2][0], of[2][1], scores[n][1]);
            split_bf16(of[3][0], of[3][1], scores[n][2]);
            scores[n][3][0] = bit_cast<u32>(of[1][0]);
            scores[n][3][1] = bit_cast<u32>(of[1][1]);
        }
    }

    // Writes the scores to shared memory. The scores of the previous chunk are not read any more.
    KGEN_DEVICE void put_scores(const Scores& scores) const {
        const int rank = opaque(lane_id());
        const MmaLane lane{rank / 4, rank % 4};
        const int row = 64 * (kSteps * warp_ + lane.g);
        float* triangle =
            tiles_.triangle(warp_ / 2) + (8 * (warp_ % 2) + lane.g) * Tiles::kBlockRow + 2 * lane.q;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n > warp_) break;
#pragma unroll
            for (int term = 0; term < 2; ++term) {
                bf16* of_r = tiles_.scores(Tiles::kScoreR + term) + row;
                put_pair(of_r, lane, 2 * n, scores[n][0][term]);
                put_pair(of_r, lane, 2 * n + 1, scores[n][1][term]);
                put_pair(tiles_.scores(Tiles::kScoreAK) + row, lane, n + 4 * term, scores[n][2][term]);
            }
            *reinterpret_cast<Vec<u32, 2>*>(triangle + n / 2 * Tiles::kBlock + n % 2 * 8) = {
                {scores[n][3][0], scores[n][3][1]}};
        }
    }

private:
    static constexpr int kSecond = 8 * 64;  // elements from one row of a step in a pair panel to its other row

    // The lane's part of the warp's steps. It is constructed from an opaque lane number: otherwise the compiler keeps
    // all offsets in registers from chunk to chunk.
    struct OwnKeys {
        bool late;  // whether the lane has the last four of the warp's eight steps
        int key;    // its first key
        int first;  // offset of its keys of its first step from the warp's first row of a tile

        KGEN_DEVICE explicit OwnKeys(int lane)
            : late(lane >= 16),
              key(lane % 16 * kLaneKeys),
              first(Tiles::PairPanels::offset(lane / 16 * kLaneSteps, key / 8) + key % 8) {}
        // The same offset for the lane's step s.
        KGEN_DEVICE int place(int s) const { return (first ^ 8 * s) + 64 * s; }
        // The lane's inputs of its step s. `tile`: the warp's first row of a tile.
        KGEN_DEVICE Words words(const bf16* tile, int s) const {
            return *reinterpret_cast<const Words*>(tile + place(s));
        }
        // Where P through the lane's step s lies: Tiles::float_place(4 n + s + 1, key). `products`: P before the lane's
        // first step.
        KGEN_DEVICE Keys* product(float* products, int s) const {
            return reinterpret_cast<Keys*>(products + (key ^ (s + 1) % 4 * 8) + 64 * (s + 1));
        }
    };

    KGEN_DEVICE int first_row() const { return 64 * 2 * kSteps * opaque(warp_); }
    // How many of a chunk's `left` steps are the warp's.
    KGEN_DEVICE int of_warp(int left) const { return max(min(left - kSteps * warp_, kSteps), 0); }

    template <class T>
    static KGEN_DEVICE float value(const Words& words, int x) {
        const f32x2 two = unpack2<T>(words[x / 2]);
        return x % 2 == 0 ? two.x : two.y;
    }

    // Replaces the lane's inputs of a step by rows: inputs times factors, in two terms.
    static KGEN_DEVICE void put_row(bf16* at, const Words& inputs, const Keys& factors) {
        Words words[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            u32 terms[2];
            split_bf16(value<bf16>(inputs, 2 * pair) * factors[2 * pair],
                       value<bf16>(inputs, 2 * pair + 1) * factors[2 * pair + 1], terms);
            words[0][pair] = terms[0];
            words[1][pair] = terms[1];
        }
        *reinterpret_cast<Words*>(at) = words[0];
        *reinterpret_cast<Words*>(at + Tiles::kPairs) = words[1];
    }

    // Writes two scores of a row, at columns 8 tile + 2 q and the next one.
    static KGEN_DEVICE void put_pair(bf16* row, const MmaLane& lane, int tile, u32 pair) {
        *reinterpret_cast<u32*>(row + (tile ^ lane.g) * 8 + 2 * lane.q) = pair;
    }

    Tiles tiles_;
    int warp_;
    float scale_;
    Copier<bf16> r_, k_, a_, b_, v_, gy_;
    Copier<W> w_;
};

}  // namespace kgen::wkv7
