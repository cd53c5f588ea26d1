// The producer warpgroup of group_loop.cuh: rows with decays and scores of a chunk of 32 steps of wkv7, for all value
// features of a head; bf16 operands (wgmma, sm_90a), decays of the form clamp alone.
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j / P_j     B_j = b_j / P_j
//
// as quotient_producer.cuh has them. 1 / P is below exp(19.5).
//
// Scores are those of chunk_producer.cuh, and the triangle A B^T, j < i: one product [A; R] [K; B]^T.
//
// Rows: a warp has eight steps, of which it copies the inputs itself. A lane has four keys of four steps, reads them
// from where it writes the rows, and gets the sums of earlier steps by a shuffle and from the other warps.
//
// Precision: R and K have two terms, A and B one; scores have two, and are sums of all products of terms but those of
// two low ones. Decays of 1 are exact. Inputs above 2^99 may give Inf: the loop then computes step by step.
//
// Synchronisation: group_tiles.cuh names the barriers. All warps call all functions.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/group_copier.cuh"

namespace kgen::wkv7 {

// CopyVec: elements per copy.
template <class W, int Keys, int CopyVec>
class GroupProducer {
    static constexpr int kChunk = GroupTiles::kChunk, kSteps = 8, kLaneSteps = 4, kLaneKeys = 4;
    using Half = HalfOperands<bf16>;
    using Words = Vec<u32, 2>;

public:
    // `warp`: of the four. Starts the copies of the first two chunks.
    KGEN_DEVICE GroupProducer(const GroupTiles& tiles, int warp, i64 steps, const StepPointer<bf16>& r,
                              const StepPointer<bf16>& k, const StepPointer<bf16>& a, const StepPointer<bf16>& b,
                              const StepPointer<W>& w)
        : tiles_(tiles),
          warp_(warp),
          left_(steps - kSteps * warp),
          r_(r, kSteps * warp, lane_id()),
          k_(k, kSteps * warp, lane_id()),
          a_(a, kSteps * warp, lane_id()),
          b_(b, kSteps * warp, lane_id()),
          w_(w, kSteps * warp, lane_id()) {
        u32* scores = reinterpret_cast<u32*>(tiles.scores(0));  // those of steps with later ones stay zero
        for (int i = kWarpSize * warp + lane_id(); i < 2 * GroupTiles::ScorePanels::kPanel; i += 4 * kWarpSize)
            scores[i] = 0;
        copy(0);
        copy(1);
    }

    // Rows and decays of a chunk, chunk after chunk.
    KGEN_DEVICE void put_rows(int slot) const {
        cp_async_wait<1>();
        sync_warp();  // all lanes' copies are there
        bf16* rows = tiles_.rows(slot) + 64 * kSteps * warp_;
        const OwnKeys own(opaque(lane_id()));
        // 1. Sums of logarithms: of the lane's steps, then of all before them.
        float sums[kLaneSteps][kLaneKeys], before[kLaneKeys];
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            read_logs(sums[s], rows, own, s);
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x)
                if (s > 0) sums[s][x] += sums[s > 0 ? s - 1 : 0][x];
        }
        Vec<float, kLaneKeys> total;
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) {
            const float all = sums[kLaneSteps - 1][x], other = shfl_xor(all, 16);
            before[x] = own.late ? other : 0.0f;
            total[x] = all + other;
        }
        *reinterpret_cast<Vec<float, kLaneKeys>*>(tiles_.totals(warp_) + own.key) = total;
        named_barrier_sync(kProducersBarrier, 128);
#pragma unroll
        for (int other = 0; other < 3; ++other) {
            if (other >= warp_) break;
            const auto earlier = *reinterpret_cast<const Vec<float, kLaneKeys>*>(tiles_.totals(other) + own.key);
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) before[x] += earlier[x];
        }
        // 2. Rows.
        float product[kLaneKeys];
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) product[x] = fast_exp2(before[x]);
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            bf16* at = rows + own.place(s);
            put_row<1>(at + 64 * GroupTiles::kA, nullptr, product);
            float inverse[kLaneKeys];
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) {
                const float sum = before[x] + sums[s][x];
                product[x] = fast_exp2(sum);
                inverse[x] = fast_exp2(-sum);
            }
            put_row<2>(at + 64 * GroupTiles::kR, at + 64 * GroupTiles::kRLow, product);
            put_row<2>(at + 64 * GroupTiles::kK, at + 64 * GroupTiles::kKLow, inverse);
            put_row<1>(at + 64 * GroupTiles::kB, nullptr, inverse);
        }
        if (warp_ == 3 && own.late) {
            Vec<float, kLaneKeys> last;
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) last[x] = product[x];
            *reinterpret_cast<Vec<float, kLaneKeys>*>(tiles_.decay(slot) + own.key) = last;
        }
        fence_proxy_async();
        named_barrier_sync(kProducersBarrier, 128);
    }

    // [A; R] [K; B]^T of a chunk: the warp's 16 rows, of A for warps 0 and 1.
    KGEN_DEVICE void multiply(int slot, float (&sums)[8][4]) const {
        const bf16* rows = tiles_.rows(slot);
        u32 x[4][4], low[4][4] = {};
        read_a(x, rows + 64 * 16 * warp_);
        if (of_r()) read_a(low, rows + 64 * (GroupTiles::kRLow - GroupTiles::kR + 16 * warp_));
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
        const auto updates = tiles_.row_operand(slot, GroupTiles::kK);
        const auto rest = tiles_.row_operand(slot, GroupTiles::kKLow);
        wgmma_fence(sums, x, low);
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, low[t], updates.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<32, Major::K>(first_tiles<4>(sums), x[t], rest.at(0, 16 * t));
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, x[t], updates.at(0, 16 * t));
        wgmma_commit();
        wgmma_wait<0>(sums, x, low);
    }

    // A warp's scores: tile of eight steps, half of the rows, those with K and with B, words: two terms of a pair, or
    // a pair of the triangle in fp32.
    using Scores = u32[4][2][2][2];

    // Scores and the triangle from these products, in registers: consumers may still read those of the chunk before.
    KGEN_DEVICE void round_scores(Scores& scores, const float (&sums)[8][4]) const {
        const int rank = opaque(lane_id());
        const int limit = 16 * (warp_ % 2) + rank / 4 - 2 * (rank % 4) + (of_r() ? 1 : 0);  // R reads its own update
        for_tiles([&](int n, int half) {
            float pairs[2][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool read = 8 * n + i < limit + 8 * half;
                pairs[0][i] = read ? sums[n][2 * half + i] : 0.0f;
                pairs[1][i] = read ? sums[4 + n][2 * half + i] : 0.0f;
            }
            split_bf16(pairs[0][0], pairs[0][1], scores[n][half][0]);
            if (of_r()) {
                split_bf16(pairs[1][0], pairs[1][1], scores[n][half][1]);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i) scores[n][half][1][i] = bit_cast<u32>(pairs[1][i]);
            }
        });
    }

    // To shared memory. Nothing reads those of the chunk before any more.
    KGEN_DEVICE void put_scores(const Scores& scores) const {
        const int rank = opaque(lane_id());
        const MmaLane lane{rank / 4, rank % 4};
        const int row = 64 * (16 * (warp_ % 2) + lane.g);
        bf16* of_k = tiles_.scores(of_r() ? GroupTiles::kScoreRK : GroupTiles::kScoreAK) + row;
        bf16* of_b = tiles_.scores(GroupTiles::kScoreRB) + row;
        float* triangle = tiles_.triangle(warp_ % 2) + lane.g * GroupTiles::kBlockRow + 2 * lane.q;
        for_tiles([&](int n, int half) {
            put_pair(of_k + 512 * half, lane, n, scores[n][half][0]);
            if (of_r()) {
                put_pair(of_b + 512 * half, lane, n, scores[n][half][1]);
            } else {
                *reinterpret_cast<Vec<u32, 2>*>(triangle + n / 2 * GroupTiles::kBlock +
                                                8 * half * GroupTiles::kBlockRow + n % 2 * 8) = {
                    {scores[n][half][1][0], scores[n][half][1][1]}};
            }
        });
    }

    // Starts the copies of the next chunk but one; one group.
    KGEN_DEVICE void copy(int slot) {
        if (left_ > -kSteps * warp_) {  // else none is waited for
            bf16 *rows = tiles_.rows(slot) + 64 * kSteps * warp_, *of_w = rows + 64 * GroupTiles::kRLow;
            if (sizeof(W) == 4) of_w += 64 * kSteps * warp_;
            const int left = static_cast<int>(max(min(left_, i64{kSteps}), i64{0}));
            w_.start(of_w, left, Keys);
            a_.start(rows + 64 * GroupTiles::kA, left, Keys);
            r_.start(rows + 64 * GroupTiles::kR, left, Keys);
            k_.start(rows + 64 * GroupTiles::kK, left, Keys);
            b_.start(rows + 64 * GroupTiles::kB, left, Keys);
        }
        cp_async_commit();
        left_ -= kChunk;
    }

private:
    // What a lane has of the warp's steps. Functions get it from an opaque lane, lest the compiler keeps all places
    // in registers from chunk to chunk.
    struct OwnKeys {
        bool late;  // whether it has the last four steps
        int key;    // its first one
        int first;  // where its keys of its first step lie, from the warp's first row of a tile on

        KGEN_DEVICE explicit OwnKeys(int lane)
            : late(lane >= 16),
              key(lane % 16 * kLaneKeys),
              first(GroupTiles::RowPanels::offset(lane / 16 * kLaneSteps, key / 8) + key % 8) {}
        // The same of a later step.
        KGEN_DEVICE int place(int s) const { return (first ^ 8 * s) + 64 * s; }
    };

    static KGEN_DEVICE float value(const Words& words, int x) {
        const f32x2 two = unpack2<bf16>(words[x / 2]);
        return x % 2 == 0 ? two.x : two.y;
    }

    // The base-2 logarithms of the decays of a lane's step.
    KGEN_DEVICE void read_logs(float (&logs)[kLaneKeys], const bf16* rows, const OwnKeys& own, int s) const {
        Vec<float, kLaneKeys> w;
        if constexpr (sizeof(W) == 2) {
            const Words words = *reinterpret_cast<const Words*>(rows + 64 * GroupTiles::kRLow + own.place(s));
#pragma unroll
            for (int x = 0; x < kLaneKeys; x += 2) {
                const f32x2 two = unpack2<W>(words[x / 2]);
                w[x] = two.x;
                w[x + 1] = two.y;
            }
        } else {
            const float* from = reinterpret_cast<const float*>(rows + 64 * GroupTiles::kRLow + 64 * kSteps * warp_);
            w = *reinterpret_cast<const Vec<float, kLaneKeys>*>(from + 64 * ((own.late ? 4 : 0) + s) + own.key);
        }
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) logs[x] = fast_clamp_log2(w[x]);
    }

    // The lane's keys of a step: inputs become rows.
    template <int Terms>
    static KGEN_DEVICE void put_row(bf16* at, [[maybe_unused]] bf16* low, const float (&factors)[kLaneKeys]) {
        const Words values = *reinterpret_cast<const Words*>(at);
        Words words[Terms];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            u32 terms[Terms];
            split_bf16(value(values, 2 * pair) * factors[2 * pair],
                       value(values, 2 * pair + 1) * factors[2 * pair + 1], terms);
#pragma unroll
            for (int term = 0; term < Terms; ++term) words[term][pair] = terms[term];
        }
        *reinterpret_cast<Words*>(at) = words[0];
        if constexpr (Terms == 2) *reinterpret_cast<Words*>(low) = words[Terms - 1];
    }

    // Operands A of 64 keys, from 16 rows of a panel.
    static KGEN_DEVICE void read_a(u32 (&x)[4][4], const bf16* rows) {
        const int lane = opaque(lane_id()), first = GroupTiles::RowPanels::offset(lane % 16, lane / 16);
#pragma unroll
        for (int t = 0; t < 4; ++t) ldmatrix<4>(x[t], rows + (first ^ 16 * t));
    }

    // Whether the warp's rows are of R.
    KGEN_DEVICE bool of_r() const { return warp_ >= 2; }
    // Calls body(n, half) for the warp's scores that are not all above the diagonal: of 8 steps each.
    template <class Body>
    KGEN_DEVICE void for_tiles(Body body) const {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n >= 2 && warp_ % 2 == 0) break;
            body(n, 0);
            body(n, 1);
        }
    }

    // Two scores of a row, steps 8 n + 2 q on.
    static KGEN_DEVICE void put_pair(bf16* row, const MmaLane& lane, int n, const u32 (&terms)[2]) {
#pragma unroll
        for (int term = 0; term < 2; ++term)
            *reinterpret_cast<u32*>(row + ((n + 4 * term) ^ lane.g) * 8 + 2 * lane.q) = terms[term];
    }

    GroupTiles tiles_;
    int warp_;
    i64 left_;  // steps from the warp's first one of the next chunk that is copied
    GroupCopier<bf16, CopyVec, kSteps, kWarpSize> r_, k_, a_, b_;
    GroupCopier<W, CopyVec, kSteps, kWarpSize> w_;
};

}  // namespace kgen::wkv7
