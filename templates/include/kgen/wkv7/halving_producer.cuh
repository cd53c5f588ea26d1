// Rows scaled by decays, and scores, of a chunk of 16 steps of wkv7, for all value features of a head; bf16 operands
// (mma, sm_80), any decay from 0 to 1: no exponent is above 0, and nothing branches on values.
//
//     A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j P_15 / P_j     B_j = b_j P_15 / P_j
//
// All factors are running products of decays; those of K and B run over the steps after j. Scores are computed by
// halving (kgen/chunked/halving_decay.cuh): blocks of 16, 8, 4 and 2 steps have a late half and an early half, and a
// late step t reads an early step s by
//
//     r_t k_s:  (r_t * d from the middle to t) (k_s * d after s to the middle)          likewise r_t b_s
//     a_t k_s:  (a_t * d from the middle to before t) (k_s * d after s to the middle)   likewise a_t b_s
//
// where every factor is at most 1. A pair s < t belongs to the level of the highest bit in which s and t differ. The
// diagonals of R K^T and R B^T contain no decays.
//
// Each lane has four keys of two steps, `early` (0 to 7) and 15 - early: at each level one of the two steps is in a
// late half, the other one in an early half. The eight lanes that hold the rows of a fragment thus have all late steps,
// with r in rows 0 to 7 and a in rows 8 to 15 of operand A, and all early steps of k, and of b, as operand B: two
// products per 16 keys and level, from registers. Products of decays over blocks of 1, 2, 4 and 8 steps come by
// shuffles, and are the factors of the next level. Each level computes 8 x 8 products for each of k and b with each of
// r and a, of which only those within a block count: 64 for blocks of 16 steps, then 32, 16 and 8. The last three and
// the 8 of the diagonal fill one fragment, `near`; the products of blocks of 16 fill the other fragment, `far`. The
// diagonal of r has 16 steps: the first eight lie in r's rows of `near`, the other eight in a's rows, as a has no
// diagonal.
//
// Shared memory: that of ChunkProducer; float sums[2][warps with keys][4][32][4]: slot, fragment, lane.
//
// Backward loops read r times a factor (in the rows R and the scores with r), so that gy needs no factor.
//
// Precision: rows and the operands of levels have one or two bf16 terms, as the class `Pass` says. Sums over a warp's
// keys and sums over warps are fp32.
#pragma once

#include "kgen/wkv7/chunk_producer.cuh"

namespace kgen::wkv7 {

// LevelLoop: whether the levels of 2 and 4 steps are a loop, which takes less of the instruction cache than unrolled
// code.
template <class Pass, class W, DecayForm Form, int Keys, int Warps, int CopyVec, int Stages, bool RowCopies,
          bool LevelLoop = false>
class HalvingProducer : public ChunkProducer<Pass, W, Keys, Warps, CopyVec, Stages, RowCopies> {
    using Base = ChunkProducer<Pass, W, Keys, Warps, CopyVec, Stages, RowCopies>;
    using typename Base::Buffers, typename Base::RowTile, typename Base::ScoreTile;
    using Half = HalfOperands<bf16>;
    using Base::buffers_, Base::warp_, Base::kOfK, Base::kOfA, Base::kOfB, Base::kOfW;

public:
    using Base::kTiles, Base::kPerWarp;

private:
    static constexpr int kWithKeys = min(Warps, kTiles);  // warps
    static constexpr int kFragment = 4 * kWarpSize, kSums = 4 * kFragment;
    static constexpr int kFragments = ceil_div(4, Warps);  // of a warp

public:
    static constexpr int kBytes = Base::kBytes + 4 * 2 * kWithKeys * kSums;

    // r_factor: multiplies r in backward loops.
    template <class... Rows>
    KGEN_DEVICE HalvingProducer(const Buffers& buffers, int warp, float r_factor, i64 steps,
                                const Rows&... rows)
        : Base(buffers, warp, steps, rows...), r_factor_(r_factor) {
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x)
                places_[n][x] = place_of(warp + n * Warps, x) | place_of(warp + n * Warps, 2 + x) << 16;
    }

    // Computes the rows and decays of a chunk, and the warp's keys' part of its scores. Call it once per chunk, from
    // chunk 0 on.
    KGEN_DEVICE void put_rows(int chunk) {
        this->begin_rows(chunk);
        if (kTiles < Warps && warp_ >= kTiles) return;
        if constexpr (Pass::kKeepsState && Form != DecayForm::log) this->keep_state_behind(chunk);
        Scores sums = {};
#pragma unroll 1  // two tiles at a time would spill
        for (int n = 0; n < kPerWarp; ++n) {
            const int tile = warp_ + n * Warps;
            if (kTiles % Warps != 0 && tile >= kTiles) break;
            put_tile(chunk, tile, this->inputs_of(chunk, n), sums);
        }
#pragma unroll
        for (int fragment = 0; fragment < 4; ++fragment) {
            const auto& found = fragment < 2 ? sums.far[fragment] : sums.near[fragment - 2];
            *sums_of(chunk, warp_, fragment) = {{found[0], found[1], found[2], found[3]}};
        }
    }

    // Stores the scores of a chunk; each warp sums up one fragment after the other.
    KGEN_DEVICE void put_scores(int chunk) const {
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            const int fragment = warp_ + n * Warps;
            if (Warps > 4 && fragment >= 4) break;
            put_fragment(chunk, fragment, places_[n]);
        }
    }

private:
    static constexpr bool kBack = Pass::kDirection == Direction::backward;
    static constexpr int kTerms = Pass::kLevelTerms;
    using Quad = Vec<u32, 2>;  // bf16 of four keys
    using Factors = float[2][4];  // of the lane's two steps, by key
    // Products with k and with b.
    struct Scores {
        float far[2][4], near[2][4];
    };
    struct Inputs {
        Quad r[2], k[2], a[2], b[2];
    };

    // The early step of the lanes that hold row g of a fragment. In this order, 16 lanes that read or write four keys
    // of one of their steps have no bank conflicts.
    static KGEN_DEVICE int early_of(int g) { return g % 4 * 2 + g / 4; }
    static KGEN_DEVICE int early() { return early_of(mma_lane().g); }
    static KGEN_DEVICE int step(int which) { return which == 0 ? early() : 15 - early(); }
    static KGEN_DEVICE int key() { return 4 * mma_lane().q; }

    KGEN_DEVICE Vec<float, 4>* sums_of(int chunk, int warp, int fragment) const {
        float* sums = reinterpret_cast<float*>(buffers_.first) + Base::kBytes / 4;
        const int first = ((chunk & 1) * kWithKeys + warp) * kSums + fragment * kFragment;
        return reinterpret_cast<Vec<float, 4>*>(sums + first) + lane_id();
    }

    // Reads four keys of the lane's two steps.
    static KGEN_DEVICE void read(Quad (&quads)[2], const u16* tile) {
#pragma unroll
        for (int which = 0; which < 2; ++which)
            quads[which] = *reinterpret_cast<const Quad*>(
                tile + TileCopier<bf16, CopyVec>::place(step(which), key()));
    }
    static KGEN_DEVICE void read_decays(Factors& decay, const u16* tiles) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const u16* from = tiles + TileCopier<W, CopyVec>::place(step(which), key());
            Vec<float, 4> w;
            if constexpr (sizeof(W) == 2) {
                const Quad words = *reinterpret_cast<const Quad*>(from);
                const f32x2 low = unpack2<W>(words[0]), high = unpack2<W>(words[1]);
                w = {{low.x, low.y, high.x, high.y}};
            } else {
                w = *reinterpret_cast<const Vec<float, 4>*>(from);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x)
                decay[which][x] = fast_decay_of<Form>(w[x]);
        }
    }

    static KGEN_DEVICE float value(const Quad& quad, int x) {
        const f32x2 two = unpack2<bf16>(quad[x / 2]);
        return x % 2 == 0 ? two.x : two.y;
    }

    // The products of a level's blocks. before: product of the decays from the middle to before the late step; behind:
    // from after the early step to the middle. flip: whether step(0), not step(1), is in a late half. First: halves are
    // single steps.
    template <bool First>
    static KGEN_DEVICE void multiply_level(float (&of_k)[4], float (&of_b)[4], const Inputs& in,
                                           const Factors& decay, const Factors& before,
                                           const Factors& behind, bool flip) {
        Half::A readers[kTerms];
        Half::B k[kTerms], b[kTerms];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float r[2], a[2], of[2], to[2];
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int i = 2 * pair + x;
                const float late = flip ? before[0][i] : before[1][i];
                const float early = flip ? behind[1][i] : behind[0][i];
                r[x] = (flip ? value(in.r[0], i) : value(in.r[1], i)) *
                       (late * (flip ? decay[0][i] : decay[1][i]));
                a[x] = (flip ? value(in.a[0], i) : value(in.a[1], i)) * late;
                of[x] = (flip ? value(in.k[1], i) : value(in.k[0], i)) * early;
                to[x] = (flip ? value(in.b[1], i) : value(in.b[0], i)) * early;
            }
            if constexpr (Pass::kReadsR) {
                put_terms(readers, 2 * pair, r);
            } else {
#pragma unroll
                for (int term = 0; term < kTerms; ++term) readers[term].pair[2 * pair] = 0;
            }
            if constexpr (First) {  // then only r has a decay, that of its own step
                put_exact(readers, 2 * pair + 1, flip ? in.a[0][pair] : in.a[1][pair]);
                put_exact(k, pair, flip ? in.k[1][pair] : in.k[0][pair]);
                put_exact(b, pair, flip ? in.b[1][pair] : in.b[0][pair]);
            } else {
                put_terms(readers, 2 * pair + 1, a);
                put_terms(k, pair, of);
                put_terms(b, pair, to);
            }
        }
        for_term_products<kTerms>([&](int i, int j) {
            if (First && (j > 0 || (i > 0 && !Pass::kReadsR))) return;  // this product has only zeros
            Half::multiply<0>(of_k, readers[i], k[j]);
            Half::multiply<0>(of_b, readers[i], b[j]);
        });
    }

    // Set pair i of operands: put_terms splits two fp32 values into terms, put_exact takes two values that are bf16
    // already.
    template <class Operand>
    static KGEN_DEVICE void put_terms(Operand (&operands)[kTerms], int i, const float (&two)[2]) {
        u32 terms[kTerms];
        split_bf16(two[0], two[1], terms);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) operands[term].pair[i] = terms[term];
    }
    template <class Operand>
    static KGEN_DEVICE void put_exact(Operand (&operands)[kTerms], int i, u32 pair) {
        operands[0].pair[i] = pair;
#pragma unroll
        for (int term = 1; term < kTerms; ++term) operands[term].pair[i] = 0;
    }

    // r_t k_t and r_t b_t of steps g and g + 8, stored where a lane has the diagonal.
    static KGEN_DEVICE void put_diagonal(float (&near)[2][4], const u16* inputs) {
        const auto tile_at = [&](int i) { return reinterpret_cast<const bf16*>(inputs + i); };
        const Half::A r = ScoreTile::a_rows(tile_at(0));
#pragma unroll
        for (int tensor = 0; tensor < 2; ++tensor) {
            Half::B y[2];
            ScoreTile::two_rows(y, tile_at(tensor == 0 ? kOfK : kOfB));
            float own[2][4] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) Half::multiply<0>(own[n], r, y[n]);
#pragma unroll
            for (int i = 0; i < 4; ++i) near[tensor][i] = own[i / 2][i];
        }
    }

    // Stores the products of a level with halves below 8 steps in `near`; then extends `before`, `behind` and `all`
    // from blocks of `half` steps to blocks of twice as many. all: the products of the decays over the blocks of both
    // steps. First: half is 1.
    template <bool First>
    static KGEN_DEVICE void add_level(int half, float (&near)[2][4], const Inputs& in,
                                      const Factors& decay, Factors& before, Factors& behind,
                                      Factors& all) {
        const int distance = First ? 16 : 2 * half;  // of lanes, see early_of
        const bool flip = early() & half;
        float found[2][4] = {};
        multiply_level<First>(found[0], found[1], in, decay, before, behind, flip);
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // later, wider levels replace products that do not count
            const int other = early() ^ early_of(2 * mma_lane().q + i % 2);
            if (other & half) near[i / 4][i % 4] = found[i / 4][i % 4];
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float others[2] = {shfl_xor(all[0][x], distance), shfl_xor(all[1][x], distance)};
            if (flip) {
                before[0][x] *= others[0];
                behind[1][x] *= others[1];
            } else {
                behind[0][x] *= others[0];
                before[1][x] *= others[1];
            }
            all[0][x] *= others[0];
            all[1][x] *= others[1];
        }
    }

    KGEN_DEVICE void put_tile(int chunk, int tile, const u16* inputs, Scores& sums) const {
        Inputs in;
        Factors decay, all, before, behind;
        read_decays(decay, inputs + kOfW);
        if constexpr (Pass::kReadsR) read(in.r, inputs);
        read(in.k, inputs + kOfK);
        read(in.a, inputs + kOfA);
        read(in.b, inputs + kOfB);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            all[i / 4][i % 4] = decay[i / 4][i % 4];
            before[i / 4][i % 4] = behind[i / 4][i % 4] = 1.0f;
        }
        // 1. Scores: the diagonal, from the inputs as copied; then the levels, from adjacent steps to the halves of the
        // chunk.
        float near[2][4] = {};
        if constexpr (Pass::kReadsR) put_diagonal(near, inputs);
        add_level<true>(1, near, in, decay, before, behind, all);
        if constexpr (LevelLoop) {
#pragma unroll 1
            for (int half = 2; half <= 4; half *= 2)
                add_level<false>(half, near, in, decay, before, behind, all);
        } else {
            add_level<false>(2, near, in, decay, before, behind, all);
            add_level<false>(4, near, in, decay, before, behind, all);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sums.near[i / 4][i % 4] += near[i / 4][i % 4];
        multiply_level<false>(sums.far[0], sums.far[1], in, decay, before, behind, false);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            before[1][x] *= all[0][x];
            behind[0][x] *= all[1][x];
            all[0][x] *= all[1][x];
        }
        // 2. Rows for products with the state.
        bf16* rows = buffers_.rows(chunk);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            bf16* place = rows + RowTile::offset(step(which), 2 * tile + key() / 8) + key() % 8;
            put_quad<kRowA>(place, in.a[which], before[which]);
            if constexpr (Pass::kReadsR) {
                float through[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    through[x] = before[which][x] * decay[which][x];
                    if constexpr (kBack) through[x] *= r_factor_;
                }
                put_quad<kRowR>(place, in.r[which], through);
            }
            put_quad<kRowK>(place, in.k[which], behind[which]);
            put_quad<kRowB>(place, in.b[which], behind[which]);
        }
        if (mma_lane().g == 0)
            *reinterpret_cast<Vec<float, 4>*>(buffers_.decay(chunk) + 16 * tile + key()) = {
                {all[0][0], all[0][1], all[0][2], all[0][3]}};
    }

    // Stores four keys of a step's row, term by term.
    template <Row Which>
    static KGEN_DEVICE void put_quad(bf16* place, const Quad& quad, const float (&factors)[4]) {
        constexpr int kRowTerms = kTermsOf<Pass, Which>;
        Quad words[kRowTerms];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            u32 terms[kRowTerms];
            split_bf16(value(quad, 2 * pair) * factors[2 * pair],
                       value(quad, 2 * pair + 1) * factors[2 * pair + 1], terms);
#pragma unroll
            for (int term = 0; term < kRowTerms; ++term) words[term][pair] = terms[term];
        }
#pragma unroll
        for (int term = 0; term < kRowTerms; ++term)
            *reinterpret_cast<Quad*>(place + Buffers::template kRowsOf<Which> +
                                     term * RowTile::kElements) = words[term];
    }

    // Where element i of the lane's four elements of a fragment belongs: its offset in the tile of a score, or in the
    // triangle. Elements 0 and 1 are r's, elements 2 and 3 are a's.
    static KGEN_DEVICE int place_of(int fragment, int i) {
        const int g = mma_lane().g, n = 2 * mma_lane().q + i % 2;
        if (is_diagonal(fragment, i)) return score_place(g + i / 2 * 8, g + i / 2 * 8);
        const int row = early_of(g), column = early_of(n), other = row ^ column;
        const int half = fragment < 2 ? 8 : other & 4 ? 4 : other & 2 ? 2 : 1;
        const int late = row & half ? row : 15 - row;
        const int early = column & half ? 15 - column : column;
        return i >= 2 && fragment % 2 == 1 ? late * Buffers::kTriangle + early
                                           : score_place(late, early);
    }
    static KGEN_DEVICE int score_place(int row, int column) {
        return ScoreTile::offset(row, column / 8) + column % 8;
    }
    // Whether element i is on r's diagonal: step g if the element is in r's rows, step g + 8 if it is in a's rows.
    static KGEN_DEVICE bool is_diagonal(int fragment, int i) {
        return fragment >= 2 && mma_lane().g == 2 * mma_lane().q + i % 2;
    }

    // Adds up a fragment over the warps' keys, and stores each sum at its place. Fragments: far of k, far of b, near of
    // k, near of b.
    KGEN_DEVICE void put_fragment(int chunk, int fragment, const u32 (&places)[2]) const {
        Vec<float, 4> sums = *sums_of(chunk, 0, fragment);
#pragma unroll
        for (int warp = 1; warp < kWithKeys; ++warp) {
            const Vec<float, 4> some = *sums_of(chunk, warp, fragment);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += some[i];
        }
        const bool of_k = fragment % 2 == 0;
        bf16* of_r = buffers_.scores(chunk, of_k ? kScoreRK : kScoreRB);
        bf16* of_a = buffers_.scores(chunk, kScoreAK);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const u32 of_row = places[x] & 0xffff, place = places[x] >> 16;
            const bool diagonal = is_diagonal(fragment, x);
            if constexpr (kBack) {
                sums[x] *= r_factor_;
                if (diagonal) sums[2 + x] *= r_factor_;
            }
            u32 terms[2];
            split_bf16(sums[x], sums[2 + x], terms);
            if constexpr (Pass::kReadsR) put_score(of_r + of_row, terms[0], terms[1]);
            if (of_k || diagonal) {
                put_score((diagonal ? of_r : of_a) + place, terms[0] >> 16, terms[1] >> 16);
            } else {
                buffers_.triangle(chunk)[place] = sums[2 + x];
            }
        }
    }

    static KGEN_DEVICE void put_score(bf16* place, u32 high, u32 low) {
        u16* target = reinterpret_cast<u16*>(place);
        target[0] = static_cast<u16>(high);
        target[Buffers::kTerm] = static_cast<u16>(low);
    }

    float r_factor_;
    u32 places_[kFragments][2];  // place_of an element of r, and << 16 of the same one of a
};

}  // namespace kgen::wkv7
