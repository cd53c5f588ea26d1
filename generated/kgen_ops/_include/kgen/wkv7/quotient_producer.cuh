// Rows scaled by decays, and scores, of a chunk of 16 steps of wkv7, for all value features of a head; bf16 operands
// (mma, sm_80), decays of the form clamp alone.
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j / P_j     B_j = b_j / P_j
//
// P is the exponential of a sum of logarithms, each from -0.607 to 0. 1 / P is the exponential of the negative sum,
// below exp(9.71); nothing is divided. The scores are therefore products of the same rows that read and update a state.
// The state is multiplied by P_15, the decay of the chunk, once: forward after its update, backward before all
// products.
//
// Each lane has kLaneKeys keys of kLaneSteps adjacent steps. It adds up their logarithms, and gets the sums of earlier
// steps by shuffles.
//
// Each warp computes one matrix of scores at a time, from rows in shared memory (quotient_scores.cuh). A warp that
// computes an inverse in the same interval computes no scores, unless it is the only warp. With Pass::kConsumerScores
// the consumers compute the scores.
//
// Shared memory: that of ChunkProducer. The part of the triangle that nothing writes is zero.
//
// Backward loops read r times a factor, as in halving_producer.cuh.
//
// Precision: rows have one or two bf16 terms, as the class `Pass` says. Scores sum all products of terms except
// products of two low terms. Decays of 1 are exact. Inputs above 2^113 may give Inf; the loop then computes step by
// step.
#pragma once

#include "kgen/wkv7/quotient_scores.cuh"

namespace kgen::wkv7 {

template <class Pass, class W, DecayForm Form, int Keys, int Warps, int CopyVec, int Stages, bool RowCopies>
class QuotientProducer : public ChunkProducer<Pass, W, Keys, Warps, CopyVec, Stages, RowCopies> {
    using Base = ChunkProducer<Pass, W, Keys, Warps, CopyVec, Stages, RowCopies>;
    using typename Base::Buffers, typename Base::RowTile, typename Base::ScoreTile;
    using Base::buffers_, Base::warp_, Base::kOfK, Base::kOfA, Base::kOfB, Base::kOfW;
    static_assert(Form == DecayForm::clamp, "1 / P has a bound in this form alone");

public:
    using Base::kTiles, Base::kPerWarp, Base::kBytes;

    // r_factor: multiplies r in backward loops.
    template <class... Rows>
    KGEN_DEVICE QuotientProducer(const Buffers& buffers, int warp, float r_factor, i64 steps,
                                 const Rows&... rows)
        : Base(buffers, warp, steps, rows...), r_factor_(r_factor), scores_(buffers) {
        for (int i = kWarpSize * warp + lane_id(); i < 2 * 16 * Buffers::kTriangle; i += kWarpSize * Warps)
            buffers.triangle(0)[i] = 0.0f;
    }

    // Computes the rows and decays of a chunk. Call it once per chunk, from chunk 0 on.
    KGEN_DEVICE void put_rows(int chunk) {
        this->begin_rows(chunk);
        if (kTiles < Warps && warp_ >= kTiles) return;
        if constexpr (Pass::kKeepsState) this->keep_state_behind(chunk);
#pragma unroll 1
        for (int n = 0; n < kPerWarp; n += kAtOnce) put_tiles(chunk, n + own_tile());
    }

    // Computes the scores of a chunk.
    KGEN_DEVICE void put_scores(int chunk) const {
        constexpr int kMatrices = QuotientScores<Pass, Keys>::kMatrices;
        // The warp that computes the inverse of the chunk before takes no matrix; the warps after it take one matrix
        // each in turn.
        const int turn = (warp_ - (chunk - 1)) & (Warps - 1);
#pragma unroll 1
        for (int i = Warps == 1 ? 0 : turn == 0 ? kMatrices : turn - 1; i < kMatrices; i += max(Warps - 1, 1))
            scores_.put_score(chunk, QuotientScores<Pass, Keys>::matrix(i));
    }

    // Computes the inverse. One warp does, and the warps take turns from chunk to chunk. Lane l stores eight steps of
    // column l % 16.
    KGEN_DEVICE void put_inverse(int chunk) const {
        if (warp_ != (chunk & (Warps - 1))) return;
        const int column = lane_id() % 16, half = lane_id() / 16;
        float found[16];
        strict_inverse_column(buffers_.triangle(chunk), Buffers::kTriangle, column, found);
        Vec<u32, 4> words[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 terms[2];
            split_bf16(half == 0 ? found[2 * i] : found[8 + 2 * i],
                       half == 0 ? found[2 * i + 1] : found[9 + 2 * i], terms);
            words[0][i] = terms[0];
            words[1][i] = terms[1];
        }
        bf16* place = buffers_.inverse(chunk) + ScoreTile::offset(column, half);
#pragma unroll
        for (int term = 0; term < 2; ++term)
            *reinterpret_cast<Vec<u32, 4>*>(place + term * Buffers::kTerm) = words[term];
        if (half == column / 8) place[column % 8] = from_float<bf16>(1.0f);
    }

private:
    static constexpr bool kBack = Pass::kDirection == Direction::backward;
    // A warp computes one tile of 16 keys at once, or two tiles if all warps have pairs of tiles.
    static constexpr int kLaneKeys = 4, kLaneSteps = kTiles % (2 * Warps) == 0 ? 4 : 2;
    static constexpr int kAtOnce = kLaneKeys * kLaneSteps / 8;
    static constexpr int kPairs = kLaneKeys / 2;
    static constexpr int kKeyLanes = 16 / kLaneKeys, kStepLanes = 16 / kLaneSteps;
    using Words = Vec<u32, kPairs>;

    // The lane's tile among those computed at once, its group of steps, its first step, and its first key in the tile.
    static KGEN_DEVICE int own_tile() { return lane_id() / (kKeyLanes * kStepLanes); }
    static KGEN_DEVICE int group() { return lane_id() / kKeyLanes % kStepLanes; }
    static KGEN_DEVICE int step() { return group() * kLaneSteps; }
    static KGEN_DEVICE int key() { return lane_id() % kKeyLanes * kLaneKeys; }

    KGEN_DEVICE Words read(const u16* tile, int s) const {
        return *reinterpret_cast<const Words*>(tile + SwizzledTile<bf16, 16>::below(input_place_, s));
    }
    static KGEN_DEVICE float value(const Words& words, int x) {
        const f32x2 two = unpack2<bf16>(words[x / 2]);
        return x % 2 == 0 ? two.x : two.y;
    }

    // The base-2 logarithms of the decays of the lane's step s.
    KGEN_DEVICE void read_logs(float (&logs)[kLaneKeys], const u16* tiles, int s) const {
        const int place = sizeof(W) == 2 ? input_place_ : TileCopier<W, CopyVec>::place(step(), key());
        const u16* from = tiles + SwizzledTile<bf16, 16>::below(place, s);
        Vec<float, kLaneKeys> w;
        if constexpr (sizeof(W) == 2) {
            const Words words = *reinterpret_cast<const Words*>(from);
#pragma unroll
            for (int x = 0; x < kLaneKeys; x += 2) {
                const f32x2 two = unpack2<W>(words[x / 2]);
                w[x] = two.x;
                w[x + 1] = two.y;
            }
        } else {
            w = *reinterpret_cast<const Vec<float, kLaneKeys>*>(from);
        }
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) logs[x] = fast_clamp_log2(w[x]);
    }

    // Computes the lane's part of tile n of the warp.
    KGEN_DEVICE void put_tiles(int chunk, int n) const {
        const u16* inputs = this->inputs_of(chunk, n);
        const int tile = warp_ + n * Warps;
        if (kTiles % Warps != 0 && tile >= kTiles) return;
        // 1. Sums of logarithms: over the lane's steps, then over the steps before them.
        float sums[kLaneSteps][kLaneKeys], before[kLaneKeys];
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            read_logs(sums[s], inputs + kOfW, s);
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x)
                if (s > 0) sums[s][x] += sums[s > 0 ? s - 1 : 0][x];
        }
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) {
            float all = sums[kLaneSteps - 1][x];
#pragma unroll
            for (int bit = 1; bit < kStepLanes; bit *= 2) {
                const float other = shfl_xor(all, bit * kKeyLanes);
                if (bit == 1) {
                    before[x] = group() & bit ? other : 0.0f;
                } else if (group() & bit) {
                    before[x] += other;
                }
                all += other;
            }
        }
        // 2. Rows.
        const int first = RowTile::beside(row_place_, tile);
        bf16* rows = buffers_.rows(chunk);
        float product[kLaneKeys];
#pragma unroll
        for (int x = 0; x < kLaneKeys; ++x) product[x] = fast_exp2(before[x]);
#pragma unroll
        for (int s = 0; s < kLaneSteps; ++s) {
            bf16* place = rows + RowTile::below(first, s);
            put_row<kRowA>(place, read(inputs + kOfA, s), product);
            float inverse[kLaneKeys], through[kLaneKeys];
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) {
                const float sum = before[x] + sums[s][x];
                product[x] = fast_exp2(sum);
                inverse[x] = fast_exp2(-sum);
                through[x] = kBack ? product[x] * r_factor_ : product[x];
            }
            if constexpr (Pass::kReadsR) put_row<kRowR>(place, read(inputs, s), through);
            if constexpr (Pass::kReadsK) put_row<kRowK>(place, read(inputs + kOfK, s), inverse);
            put_row<kRowB>(place, read(inputs + kOfB, s), inverse);
        }
        if (group() == kStepLanes - 1) {
            Vec<float, kLaneKeys> last;
#pragma unroll
            for (int x = 0; x < kLaneKeys; ++x) last[x] = product[x];
            *reinterpret_cast<Vec<float, kLaneKeys>*>(buffers_.decay(chunk) + 16 * tile + key()) = last;
        }
    }

    // Stores the lane's keys of a step's row, term by term.
    template <Row Which>
    static KGEN_DEVICE void put_row(bf16* place, const Words& values, const float (&factors)[kLaneKeys]) {
        constexpr int kRowTerms = kTermsOf<Pass, Which>;
        Words words[kRowTerms];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            u32 terms[kRowTerms];
            split_bf16(value(values, 2 * pair) * factors[2 * pair],
                       value(values, 2 * pair + 1) * factors[2 * pair + 1], terms);
#pragma unroll
            for (int term = 0; term < kRowTerms; ++term) words[term][pair] = terms[term];
        }
#pragma unroll
        for (int term = 0; term < kRowTerms; ++term)
            *reinterpret_cast<Words*>(place + Buffers::template kRowsOf<Which> +
                                      term * RowTile::kElements) = words[term];
    }

    float r_factor_;
    // The lane's offsets in tiles: of its first input, and of its first element of rows. They are opaque because the
    // compiler would compute them again for every chunk.
    int input_place_ = opaque(TileCopier<bf16, CopyVec>::place(step(), key()));
    int row_place_ = opaque(RowTile::offset(step(), key() / 8) + key() % 8);
    QuotientScores<Pass, Keys> scores_;
};

}  // namespace kgen::wkv7
