// The producer warpgroup of group_loop.cuh: it computes the rows scaled by decays and the scores of a chunk of 32 steps
// of wkv7, for all value features of a head; bf16 operands (wgmma, sm_90a), decays of the form clamp alone.
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j / P_j     B_j = b_j / P_j
//
// The rows are those of quotient_producer.cuh. 1 / P is below exp(19.5).
//
// Scores are those of chunk_producer.cuh, and the triangle A B^T, j < i. All come from one product [A; R] [K; B]^T. For
// a Pass that does not read R the product is [A; A] [K; B]^T, of which half of the warps store A K^T, the others the
// triangle.
//
// Rows: each warp has eight steps, whose inputs it copies itself. Each lane has four keys of four steps, reads their
// inputs from where it writes the rows, and gets the sums of earlier steps by a shuffle and, for the other warps'
// steps, from shared memory.
//
//     put_totals      sums of logarithms; at any time after put_rows of the previous chunk
//     put_rows        rows
//     start_scores    starts the products of rows
//     put_scores      stores the scores
//
// Precision: the Pass says how many terms rows have (loop_passes.cuh). Scores have two terms, and sum all products of
// terms except products of two low terms. Decays of 1 are exact. Inputs above 2^99 may give Inf; the loop then computes
// step by step.
//
// Synchronisation: group_tiles.cuh names the barriers. All warps of the warpgroup call all functions.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/group_copier.cuh"

namespace kgen::wkv7 {

// Pass: a forward loop by quotients. CopyVec: elements per copy. Only the diagonal blocks are inverted
// (GroupInverse::put_blocks); the block T21 of the inverse's panel holds A B^T of later steps with earlier ones, in two
// terms.
template <class Pass, class W, int Keys, int CopyVec>
class GroupProducer {
    static constexpr int kChunk = GroupTiles::kChunk, kSteps = 8, kLaneSteps = 4, kLaneKeys = 4;
    using Half = HalfOperands<bf16>;
    using Words = Vec<u32, 2>;
    static_assert(Pass::kTermsK == 2 && (Pass::kReadsR ? Pass::kTermsA + Pass::kTermsB == 2 && Pass::kTermsR == 2
                                                       : Pass::kTermsA + Pass::kTermsB == 4),
                  "rows that a slot has room for");

public:
    // `warp`: number in the warpgroup. The constructor starts the copies of the first two chunks.
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
        u32* scores = reinterpret_cast<u32*>(tiles.scores(0));  // scores of a step with later steps stay zero
        for (int i = kWarpSize * warp + lane_id(); i < 2 * GroupTiles::ScorePanels::kPanel; i += 4 * kWarpSize)
            scores[i] = 0;
        copy(0);
        copy(1);
    }

    // The result of put_totals for put_rows: sums of the logarithms of the decays, from the lane's first step through
    // each of its steps, and over the warp's steps before them.
    struct Logs {
        float sums[kLaneSteps][kLaneKeys], before[kLaneKeys];
    };

    // Computes these sums. The chunk's w must have arrived: at most `Pending` groups of copies are still in flight.
    template <int Pending>
    KGEN_DEVICE void put_totals(int slot, Logs& logs) const {
        cp_async_wait<Pending>();
        sync_warp();  // all lanes' copies are there
        const bf16* rows = tiles_.rows(slot) + 64 * kSteps * warp_;
        const OwnKeys own(lane());
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            read_logs(logs.sums[s], rows, own, s);
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x)
                if (s > 0) logs.sums[s][x] += logs.sums[s > 0 ? s - 1 : 0][x];
        }
        Vec<float, kLaneKeys> total;
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) {
            const float all = logs.sums[kLaneSteps - 1][x], other = shfl_xor(all, 16);
            logs.before[x] = own.late ? other : 0.0f;
            total[x] = all + other;
        }
        *reinterpret_cast<Vec<float, kLaneKeys>*>(tiles_.totals(warp_) + own.key) = total;
    }

    // Computes the rows and decays of a chunk, after put_totals of this chunk. Copies of the next chunk may be in
    // flight.
    KGEN_DEVICE void put_rows(int slot, const Logs& logs) const {
        cp_async_wait<2>();
        named_barrier_sync(kProducersBarrier, 128);  // all totals are there, and all lanes' copies
        bf16* rows = tiles_.rows(slot) + 64 * kSteps * warp_;
        const OwnKeys own(lane());
        // 1. Sums of logarithms before the lane's steps.
        Inputs inputs;
        read_inputs(inputs, rows, own, 0);
        float before[kLaneKeys];
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) before[x] = logs.before[x];
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
            const Inputs now = inputs;
            if (s + 1 < kLaneSteps) read_inputs(inputs, rows, own, s + 1);  // else it waits for all writes
            bf16* at = rows + own.place(s);
            put_row<Pass::kTermsA>(at + 64 * GroupTiles::kA, at + 64 * kLow<kRowA>, now.a, product);
            float inverse[kLaneKeys];
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) {
                const float sum = before[x] + logs.sums[s][x];
                product[x] = fast_exp2(sum);
                inverse[x] = fast_exp2(-sum);
            }
            if constexpr (Pass::kReadsR)
                put_row<2>(at + 64 * GroupTiles::kR, at + 64 * kLow<kRowR>, now.r, product);
            put_row<2>(at + 64 * GroupTiles::kK, at + 64 * kLow<kRowK>, now.k, inverse);
            put_row<Pass::kTermsB>(at + 64 * GroupTiles::kB, at + 64 * kLow<kRowB>, now.b, inverse);
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

    // Starts [A; R] [K; B]^T of a chunk. Each warp has 16 rows: of A in warps 0 and 1, of R in warps 2 and 3; without R
    // all warps have rows of A. On return the second of two groups of products is in flight: `x` and `sums` are in use
    // until it is complete.
    KGEN_DEVICE void start_scores(int slot, u32 (&x)[4][4], float (&sums)[8][4]) const {
        const bf16* rows = tiles_.rows(slot);
        u32 low[4][4] = {};
        if constexpr (Pass::kReadsR) {
            read_a(x, rows + 64 * 16 * warp_);
            if (of_r()) read_a(low, rows + 64 * (kLow<kRowR> - GroupTiles::kR + 16 * warp_));
        } else {
            read_a(x, rows + 64 * 16 * (warp_ % 2));
            read_a(low, rows + 64 * (kLow<kRowA> + 16 * (warp_ % 2)));
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0.0f;
        const auto updates = tiles_.row_operand(slot, GroupTiles::kK);
        const auto rest = tiles_.row_operand(slot, kLow<kRowK>);
        constexpr int kRest = Pass::kTermsB == 2 ? 64 : 32;  // rows
        wgmma_fence(sums, x, low);
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, low[t], updates.at(0, 16 * t));
        wgmma_commit();
        // Consecutive products into the same accumulators need no fence only if they have the same shape.
        if constexpr (kRest != 64) wgmma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t)
            wgmma_m64k16<kRest, Major::K>(first_tiles<kRest / 8>(sums), x[t], rest.at(0, 16 * t));
        if constexpr (kRest != 64) wgmma_fence();
#pragma unroll
        for (int t = 0; t < 4; ++t) wgmma_m64k16<64, Major::K>(sums, x[t], updates.at(0, 16 * t));
        wgmma_commit();
        wgmma_wait<1>(low);  // frees the registers of `low`
    }

    // Writes scores and the triangle from these products to shared memory. Those of the previous chunk are not read any
    // more.
    KGEN_DEVICE void put_scores(const float (&sums)[8][4]) const {
        if (warp_ % 2 == 1) {
            put_block<0, false>(sums);
            put_block<1, true>(sums);
        } else {
            put_block<0, true>(sums);
        }
    }

    // Starts the copies of the chunk after the next, in two groups: w, then all other inputs.
    KGEN_DEVICE void copy(int slot) {
        if (left_ > -kSteps * warp_) {  // else nothing waits for these copies
            bf16 *rows = tiles_.rows(slot) + 64 * kSteps * warp_, *of_w = rows + 64 * GroupTiles::kW;
            if (sizeof(W) == 4) of_w += 64 * kSteps * warp_;
            const int left = static_cast<int>(max(min(left_, i64{kSteps}), i64{0}));
            w_.start(of_w, left, Keys);
            cp_async_commit();
            a_.start(rows + 64 * GroupTiles::kA, left, Keys);
            if constexpr (Pass::kReadsR) r_.start(rows + 64 * GroupTiles::kR, left, Keys);
            k_.start(rows + 64 * GroupTiles::kK, left, Keys);
            b_.start(rows + 64 * GroupTiles::kB, left, Keys);
        } else {
            cp_async_commit();
        }
        cp_async_commit();
        left_ -= kChunk;
    }

private:
    template <Row Which>
    static constexpr int kLow = GroupTiles::kLow<Pass, Which>;

    // The lane's part of the warp's steps.
    struct OwnKeys {
        bool late;  // whether the lane has the last four of the warp's eight steps
        int key;    // its first key
        int first;  // offset of its keys of its first step from the warp's first row of a tile

        KGEN_DEVICE explicit OwnKeys(u32 lane)
            : late(lane >= 16),
              key(static_cast<int>(lane % 16 * kLaneKeys)),
              first(GroupTiles::RowPanels::offset(static_cast<int>(lane / 16 % 2 * kLaneSteps), key / 8) + key % 8) {}
        // The same offset for the lane's step s.
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
            const Words words = *reinterpret_cast<const Words*>(rows + 64 * GroupTiles::kW + own.place(s));
#pragma unroll
            for (int x = 0; x < kLaneKeys; x += 2) {
                const f32x2 two = unpack2<W>(words[x / 2]);
                w[x] = two.x;
                w[x + 1] = two.y;
            }
        } else {
            const float* from = reinterpret_cast<const float*>(rows + 64 * GroupTiles::kW + 64 * kSteps * warp_);
            w = *reinterpret_cast<const Vec<float, kLaneKeys>*>(from + 64 * ((own.late ? 4 : 0) + s) + own.key);
        }
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) logs[x] = fast_clamp_log2(w[x]);
    }

    // The inputs of the lane's keys of a step.
    struct Inputs {
        Words a, r, k, b;
    };
    static KGEN_DEVICE void read_inputs(Inputs& inputs, const bf16* rows, const OwnKeys& own, int s) {
        const bf16* at = rows + own.place(s);
        inputs.a = *reinterpret_cast<const Words*>(at + 64 * GroupTiles::kA);
        if constexpr (Pass::kReadsR) inputs.r = *reinterpret_cast<const Words*>(at + 64 * GroupTiles::kR);
        inputs.k = *reinterpret_cast<const Words*>(at + 64 * GroupTiles::kK);
        inputs.b = *reinterpret_cast<const Words*>(at + 64 * GroupTiles::kB);
    }

    // Replaces the lane's inputs of a step by rows: inputs times factors, in one or two terms.
    template <int Terms>
    static KGEN_DEVICE void put_row(bf16* at, [[maybe_unused]] bf16* low, const Words& values,
                                    const float (&factors)[kLaneKeys]) {
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

    // Reads operands A of 64 keys from 16 rows of a panel.
    static KGEN_DEVICE void read_a(u32 (&x)[4][4], const bf16* rows) {
        const u32 rank = lane();
        const int first = GroupTiles::RowPanels::offset(static_cast<int>(rank % 16), static_cast<int>(rank / 16 % 2));
#pragma unroll
        for (int t = 0; t < 4; ++t) ldmatrix<4>(x[t], rows + (first ^ 16 * t));
    }

    // Whether the warp has rows of R.
    KGEN_DEVICE bool of_r() const { return Pass::kReadsR && warp_ >= 2; }
    // Stores the warp's scores with one block of 16 steps: the block on the diagonal, or the one before it.
    template <int Block, bool Diagonal>
    KGEN_DEVICE void put_block(const float (&sums)[8][4]) const {
        const bool of_k = Pass::kReadsR || warp_ < 2, of_b = Pass::kReadsR || !of_k;
        if (of_k)
            put_terms<Block, Diagonal>(of_r() ? GroupTiles::kScoreRK : GroupTiles::kScoreAK, sums[2 * Block],
                                       sums[2 * Block + 1]);
        if (!of_b) return;
        const auto &first = sums[4 + 2 * Block], &second = sums[4 + 2 * Block + 1];
        if (of_r()) {
            put_terms<Block, Diagonal>(GroupTiles::kScoreRB, first, second);
        } else if (!Diagonal) {
            put_terms<Block, Diagonal>(GroupTiles::kInverse, first, second);
        } else {
            const MmaLane own = own_lane();
            const int half = warp_ % 2, limit = last_step(own);
            float* triangle = tiles_.triangle(half + Block) + own.g * GroupTiles::kBlockRow + 2 * own.q;
#pragma unroll
            for (int m = 0; m < 4; ++m)
                *reinterpret_cast<Vec<float, 2>*>(triangle + m % 2 * 8 * GroupTiles::kBlockRow + m / 2 * 8) =
                    masked<Diagonal>(m / 2 == 0 ? first : second, m, limit);
        }
    }

    template <int Block, bool Diagonal>
    KGEN_DEVICE void put_terms(int score, const float (&first)[4], const float (&second)[4]) const {
        const int limit = last_step(own_lane());
        u32 terms[2][4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const auto pair = masked<Diagonal>(m / 2 == 0 ? first : second, m, limit);
            u32 both[2];
            split_bf16(pair[0], pair[1], both);
            terms[0][m] = both[0];
            terms[1][m] = both[1];
        }
        const u32 rank = lane();  // the lane gives the address of a row of an 8 x 8 matrix
        const int row = static_cast<int>(rank % 16), side = static_cast<int>(rank / 16 % 2);
        const int at = 64 * 16 * (warp_ % 2) + GroupTiles::ScorePanels::offset(row, side);
#pragma unroll
        for (int term = 0; term < 2; ++term)
            stmatrix(terms[term], tiles_.scores(score) + (at ^ (16 * Block + 32 * term)));
    }

    // One more than the last of eight steps, counted from step 2q on, that row g reads. R reads its own step.
    KGEN_DEVICE int last_step(const MmaLane& own) const { return own.g - 2 * own.q + (of_r() ? 1 : 0); }

    // Two scores of the 8 x 8 matrix `m` of a block; zero where the causal mask excludes them. m % 2: the last eight
    // rows; m / 2: the last eight steps.
    template <bool Diagonal>
    static KGEN_DEVICE Vec<float, 2> masked(const float (&tile)[4], int m, int limit) {
        Vec<float, 2> pair;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool read = !Diagonal || m == 1 || (m != 2 && i < limit);
            pair[i] = read ? tile[m % 2 * 2 + i] : 0.0f;
        }
        return pair;
    }

    // The lane number. It is opaque: otherwise the compiler keeps all offsets in registers from chunk to chunk. It is
    // unsigned: signed divisions cost more.
    static KGEN_DEVICE u32 lane() { return static_cast<u32>(opaque(lane_id())); }
    static KGEN_DEVICE MmaLane own_lane() {
        const u32 rank = lane();
        return {static_cast<int>(rank / 4), static_cast<int>(rank % 4)};
    }

    GroupTiles tiles_;
    int warp_;
    i64 left_;  // steps left from the warp's first step of the next chunk to copy
    GroupCopier<bf16, CopyVec, kSteps, kWarpSize> r_, k_, a_, b_;
    GroupCopier<W, CopyVec, kSteps, kWarpSize> w_;
};

}  // namespace kgen::wkv7
