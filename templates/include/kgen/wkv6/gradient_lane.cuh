// A lane's part of the gradients of 16 keys and one chunk of 16 steps of wkv5 and wkv6, any decay from 0 to 1; bf16.
//
// Within a chunk, with P_t the product of its decays before step t, P_16 that of all, S the state before the chunk, G
// the gradient of the state after it, n_ts = scale * gy_t . v_s, and sums over steps of the chunk:
//
//     gr_t = scale * P_t S gy_t          + sum_{s < t} P_t / P_{s+1} n_ts k_s      + n_tt u k_t
//     gk_t = (P_16 / P_{t+1}) G v_t      + sum_{u > t} P_u / P_{t+1} n_ut r_u      + n_tt u r_t
//     gw_t = P_16 sum_v S * G            + sum over pairs s < t < u, s = S or u = G included
//
// Sums over pairs are computed by halving (kgen/wkv7/halved_steps.cuh). gw of a step is the sum over the pairs that the
// step lies between: at each level k_s gk_s counts for the steps after s in the early half, and r_u gr_u for the steps
// before u in the late half. No quotient and no difference of sums is formed.
//
// The attention scores A_ts = sum_k r_t P_t / P_{s+1} k_s that gv needs are products of the same rows, summed over the
// warp's keys. For s = t the score is the bonus sum_k r u k.
//
// Layout: see halved_steps.cuh. Scores: a lane has `far`, the scores of slot g with the slots 8 + 2q and 9 + 2q, and
// `near`, the scores of slot g with the slots 2q and 2q + 1, or of slot 8 + g with the slots 8 + 2q and 9 + 2q,
// whichever steps are later. Where q == g / 2, `near` is instead both bonuses and the score of adjacent steps.
//
// Precision: TF32 for gradients, RowTerms bf16 terms of rows for scores. NaN and Inf of one step reach other steps
// through masks: see gradient_loop.cuh.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv7/halved_steps.cuh"

namespace kgen::wkv6 {

// Two neighbouring slots of a key: [2 * half + key], as operand A of products over slots.
using SlotWords = u32[4];

// Loads them from a tile of rows of 16 steps and 16 keys.
KGEN_DEVICE void load_slots(SlotWords& words, const u16* tile) {
    const int lane = lane_id(), row = wkv7::slot_step(lane % 8 + lane / 16 * 8);
    ldmatrix<4, true>(words, tile + SwizzledTile<bf16, 16>::offset(row, lane / 8 % 2));
}

// W: dtype of w; Form: of the decays; RowTerms: bf16 terms of rows for scores.
template <class W, DecayForm Form, int RowTerms>
struct GradientLane : wkv7::HalvedSteps {
    SlotWords r, k;
    Steps d, gr, gk;  // d: decays; 1 after the last step
    // Products of decays for each key. before_n and behind_n of a half of n steps (4 or 8): the steps before the late
    // pair of the lane, and those after its early pair; of 16 steps: [half], before and after the pair; kept: all
    // steps.
    float before_4[2], behind_4[2], before_8[2], behind_8[2], before_16[2][2], behind_16[2][2], kept[2];
    float far[2], near_scores[2], neighbours, bonus[2];  // scores

    template <class T>
    static KGEN_DEVICE float value(const SlotWords& words, int half, int i) {
        const f32x2 two = unpack2<T>(words[2 * half + i / 2]);
        return i % 2 == 0 ? two.x : two.y;
    }
    KGEN_DEVICE float r_at(int half, int i) const { return value<bf16>(r, half, i); }
    KGEN_DEVICE float k_at(int half, int i) const { return value<bf16>(k, half, i); }

    // Sets the decays from w of 16 steps, or from `constants` of the lane's two keys if w has no steps. `steps` steps
    // exist. slopes: room for four floats per lane, and four more 4 * kWarpSize floats further on.
    KGEN_DEVICE void set_decays(const u16* tile, int steps, float* slopes) {
        SlotWords words;
        load_slots(words, tile);
        set_decays(words, steps, slopes);
    }
    KGEN_DEVICE void set_decays(const SlotWords& words, int steps, float* slopes) {
        if constexpr (Form == DecayForm::raw) {
            // exp(w), and what log_decay_slope makes of it.
            Steps rates;
#pragma unroll
            for (int i = 0; i < 8; ++i) rates[i / 4][i % 4] = fast_exp(value<W>(words, i / 4, i % 4));
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<Vec<float, 4>*>(slopes + 4 * kWarpSize * half) = {
                    {rates[half][0], rates[half][1], rates[half][2], rates[half][3]}};
            put_decays(steps, [&](int half, int i) { return fast_exp(-rates[half][i]); });
        } else {
            put_decays(steps, [&](int half, int i) { return decay_of<Form, false>(value<W>(words, half, i)); });
        }
    }
    // Turns gw with respect to the decay's logarithm into gw with respect to w. Where exp(w) is infinite, gw is 0.
    KGEN_DEVICE void multiply_slopes(const float* slopes) {
        if constexpr (Form == DecayForm::raw) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto four = *reinterpret_cast<const Vec<float, 4>*>(slopes + 4 * kWarpSize * half);
#pragma unroll
                for (int i = 0; i < 4; ++i) gw[half][i] *= -min(four[i], 1e30f);
            }
        }
    }
    KGEN_DEVICE void set_decays(const float (&constants)[2], int steps) {
        put_decays(steps, [&](int, int i) { return constants[i / 2]; });
    }

    // Rows times decays, as operand A over slots: r decayed from the beginning of the chunk, k decayed to its end.
    template <int Terms>
    KGEN_DEVICE void decayed_r(u32 (&words)[4][Terms], float scale) const {
        decayed(words, [&](int half, int i) {
            return r_at(half, i) * before(half, i, before_16[half][i / 2] * scale);
        });
    }
    template <int Terms>
    KGEN_DEVICE void decayed_k(u32 (&words)[4][Terms]) const {
        decayed(words, [&](int half, int i) { return k_at(half, i) * behind(half, i, behind_16[half][i / 2]); });
    }

    // Adds the parts that read the states: by_r = S gy, by_k = G v, both = sum_v S * G per key.
    KGEN_DEVICE void add_states(const Steps& by_r, const Steps& by_k, const float (&both)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                gr[half][i] = by_r[half][i] * before(half, i, before_16[half][i / 2] * scale);
                gk[half][i] = by_k[half][i] * behind(half, i, behind_16[half][i / 2]);
                gw[half][i] = both[i / 2] * kept[i / 2];
            }
        descend_from_chunk(ahead(), back());
    }

    // Adds the pairs of adjacent steps, and of each step with itself: the last terms of gr and gk. n: products of rows
    // t of gy and columns s of v, by slots, times scale; u, gu: of the lane's keys.
    KGEN_DEVICE void add_neighbours(const float (&n)[2][4], const float (&u)[2], float (&gu)[2]) {
        const MmaLane lane = mma_lane();
        float own[2][2], pair[2];  // n of slots 2q, 2q + 1 (8 + 2q, 9 + 2q): each with itself; the two
        const int even = 9 * lane.q, odd = even + 4;  // the lanes that have these n
        own[0][0] = shfl(n[0][0], even);
        own[0][1] = shfl(n[0][1], odd);
        own[1][0] = shfl(n[1][2], even);
        own[1][1] = shfl(n[1][3], odd);
        pair[0] = shfl(n[0][0], odd);
        pair[1] = shfl(n[1][3], even);
        float products[2][2] = {};  // r u k
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = i / 2, step = i % 2;
                const float r_i = r_at(half, i), k_i = k_at(half, i), of_u = own[half][step] * u[key];
                gr[half][i] = fma(of_u, k_i, gr[half][i]);
                gk[half][i] = fma(of_u, r_i, gk[half][i]);
                gu[key] = fma(own[half][step] * r_i, k_i, gu[key]);
                products[half][step] = fma(r_i * u[key], k_i, products[half][step]);
                const int other = i ^ 1;
                if (step != half) {  // late
                    gr[half][i] = fma(pair[half], k_at(half, other), gr[half][i]);
                } else {
                    gk[half][i] = fma(pair[half], r_at(half, other), gk[half][i]);
                }
            }
        // Sums over the keys of all lanes, for the slots 2q + g % 2 and 8 + 2q + g % 2.
        const bool second = lane.g % 2 != 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float other = second ? products[half][0] : products[half][1];
            float sum = (second ? products[half][1] : products[half][0]) + shfl_xor(other, 4);
            sum += shfl_xor(sum, 8);
            bonus[half] = sum + shfl_xor(sum, 16);
        }
        // The score of adjacent steps, without decays: early slots 2q and 9 + 2q, late slots 2q + 1 and 8 + 2q.
        u32 late[2], early[2];
#pragma unroll
        for (int key = 0; key < 2; ++key) {
            late[key] = transpose_matrix(r[key] >> 16 | r[2 + key] << 16);
            early[key] = transpose_matrix((k[key] & 0xffffu) | (k[2 + key] & 0xffff0000u));
        }
        float sums[4] = {};
        mma_m16n8k16<bf16>(sums, {early[0], 0, early[1], 0}, late);
        neighbours = second ? sums[1] : sums[0];
    }

    // Adds the pairs of steps in different halves of blocks of 2 * kHalf steps, 2 <= kHalf <= 8. n: as in
    // add_neighbours; m: its transpose, with rows s and columns t. The barrier keeps operands of later levels out of
    // registers.
    template <int kHalf>
    KGEN_DEVICE void add_level(const float (&n)[2][4], const float (&m)[2][4]) {
        sync_warp();
        const MmaLane lane = mma_lane();
        const bool flips = flip<kHalf>();
        // Whether the two steps of the lane's products are in the same block.
        const bool same = kHalf == 8 || (kHalf == 4 ? (lane.g / 4 ^ lane.q / 2) == 1 : (lane.g / 2 ^ lane.q) == 1);
        u32 of_early[2], of_late[2];  // operands B
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            if constexpr (kHalf == 8) {
                of_early[which] = bit_cast<u32>(n[0][2 + which]);
                of_late[which] = bit_cast<u32>(m[1][which]);
            } else {
                of_early[which] = same ? bit_cast<u32>(flips ? n[1][2 + which] : n[0][which]) : 0u;
                of_late[which] = same ? bit_cast<u32>(flips ? m[0][which] : m[1][2 + which]) : 0u;
            }
        }
        Half to_late, from_early, late_row, early_row;
        u32 of_r[4], of_k[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int key = i / 2;
            const f32x2 two_r = unpack2<bf16>(kHalf < 8 && flips ? r[key] : r[2 + key]);
            const f32x2 two_k = unpack2<bf16>(kHalf < 8 && flips ? k[2 + key] : k[key]);
            // Decays of the pair's other step; then of the rest of the half.
            const int which = i % 2;
            const float of_pair = which == 0 ? (flips ? 1.0f : d[1][2 * key + 1]) : flips ? d[0][2 * key] : 1.0f;
            const float for_pair = which == 0 ? (flips ? 1.0f : d[0][2 * key + 1]) : flips ? d[1][2 * key] : 1.0f;
            to_late[i] = of_pair * (kHalf == 8 ? before_8[key] : kHalf == 4 ? before_4[key] : 1.0f);
            from_early[i] = for_pair * (kHalf == 8 ? behind_8[key] : kHalf == 4 ? behind_4[key] : 1.0f);
            late_row[i] = (which == 0 ? two_r.x : two_r.y) * to_late[i];
            early_row[i] = (which == 0 ? two_k.x : two_k.y) * from_early[i];
            const int place = i / 2 + i % 2 * 2;  // of operand A: key, then step
            of_r[place] = bit_cast<u32>(late_row[i]);
            of_k[place] = bit_cast<u32>(early_row[i]);
        }
        // Operands are truncated instead of rounded; this factor compensates the mean loss.
        constexpr float kRounding = kNearTf32 * kNearTf32;
        const float share = flips ? 0.0f : kRounding, other = kRounding - share;
        Half by_r = {}, by_k = {};
        mma_tf32_m16n8k8(by_r, of_k, of_early);
        mma_tf32_m16n8k8(by_k, of_r, of_late);
        put_scores<kHalf>(late_row, early_row, same);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            by_r[i] *= to_late[i];
            by_k[i] *= from_early[i];
            add_late<kHalf>(share, other, i, gr, by_r[i]);
            add_early<kHalf>(share, other, i, gk, by_k[i]);
        }
    }

    // Adds all levels, and gw between them. The last terms of gr and gk are those of add_neighbours.
    KGEN_DEVICE void add_levels(const float (&n)[2][4], const float (&m)[2][4]) {
        add_level<8>(n, m);
        descend<4>(ahead(), back());
        add_level<4>(n, m);
        descend<2>(ahead(), back());
        add_level<2>(n, m);
        descend<1>(ahead(), back());
    }

    // The scores of a chunk as operand A of gv, rows s and columns t >= s, in Terms terms, from sums over all keys: x:
    // far, near; last: the third score where q == g / 2.
    template <int Terms>
    static KGEN_DEVICE void score_operands(u32 (&terms)[Terms][4], const float (&x)[4], float last) {
        const MmaLane lane = mma_lane();
        const int middle = lane.g / 2;
        const bool second = lane.g % 2 != 0, at = lane.q == middle;
        // Slots 0 to 7: near scores if the other slots are later; the bonus is the first score (g even) or the second.
        const bool of_low = lane.q > middle, of_high = lane.q < middle;
        const float low[2] = {of_low || (at && !second) ? x[2] : 0.0f, of_low || at ? x[3] : 0.0f};
        const float high[2] = {of_high || (at && second) ? x[2] : (at ? last : 0.0f),
                               of_high ? x[3] : (at && second ? last : 0.0f)};
        const auto put = [&](int i, float first, float second) {
            u32 pair[Terms];
            split_bf16(first, second, pair);
#pragma unroll
            for (int term = 0; term < Terms; ++term) terms[term][i] = pair[term];
        };
        put(0, low[0], low[1]);
#pragma unroll
        for (int term = 0; term < Terms; ++term) terms[term][1] = 0;  // early rows
        put(2, x[0], x[1]);
        put(3, high[0], high[1]);
    }

    // The warp's part of the sums that score_operands takes.
    KGEN_DEVICE void scores(float (&x)[4], float& last) const {
        const MmaLane lane = mma_lane();
        const bool second = lane.g % 2 != 0, at = lane.q == lane.g / 2;
        x[0] = far[0];
        x[1] = far[1];
        // g even: bonus of slot g, score of neighbours, bonus of slot 8 + g; g odd: score, then the bonuses.
        x[2] = at ? (second ? neighbours : bonus[0]) : near_scores[0];
        x[3] = at ? (second ? bonus[0] : neighbours) : near_scores[1];
        last = bonus[1];
    }

private:
    // Sums of gw over the levels so far: gr and gk do not yet have the terms of the step itself and of its neighbour.
    KGEN_DEVICE auto ahead() const {
        return [this](int half, int i) { return k_at(half, i) * gk[half][i]; };
    }
    KGEN_DEVICE auto back() const {
        return [this](int half, int i) { return r_at(half, i) * gr[half][i]; };
    }

    // The decays before (after) a step, from those before (after) its pair.
    KGEN_DEVICE float before(int half, int i, float pair) const {
        return i % 2 != half ? d[half][i - i % 2 + half] * pair : pair;
    }
    KGEN_DEVICE float behind(int half, int i, float pair) const {
        return i % 2 == half ? d[half][i - i % 2 + 1 - half] * pair : pair;
    }

    template <class Decay>
    KGEN_DEVICE void put_decays(int steps, Decay decay) {
        set_flips();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int step = wkv7::slot_step(8 * half + 2 * mma_lane().q + i % 2);
                d[half][i] = step < steps ? decay(half, i) : 1.0f;
            }
#pragma unroll
        for (int key = 0; key < 2; ++key) {
            float all[2], before_near[2], behind_near[2], before_wide[2], behind_wide[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Decays of the neighbouring block of 2 steps, and of 4; whether this block is before the pair.
                const float two = d[half][2 * key] * d[half][2 * key + 1], near = shfl_xor(two, 1);
                const float wide = shfl_xor(two * near, 2);
                const bool near_first = flip_near == (half == 0), wide_first = flip_wide == (half == 0);
                before_near[half] = near_first ? near : 1.0f;
                behind_near[half] = near_first ? 1.0f : near;
                before_wide[half] = before_near[half] * (wide_first ? wide : 1.0f);
                behind_wide[half] = behind_near[half] * (wide_first ? 1.0f : wide);
                all[half] = two * near * wide;
            }
            before_4[key] = flip_wide ? before_near[0] : before_near[1];
            behind_4[key] = flip_wide ? behind_near[1] : behind_near[0];
            before_8[key] = before_wide[1];
            behind_8[key] = behind_wide[0];
            before_16[0][key] = before_wide[0];
            before_16[1][key] = before_wide[1] * all[0];
            behind_16[0][key] = behind_wide[0] * all[1];
            behind_16[1][key] = behind_wide[1];
            kept[key] = all[0] * all[1];
        }
    }

    template <int Terms, class At>
    static KGEN_DEVICE void decayed(u32 (&words)[4][Terms], At at) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int key = 0; key < 2; ++key)
                split_bf16(at(half, 2 * key), at(half, 2 * key + 1), words[2 * half + key]);
    }

    // Computes the scores of a level: rows are early steps, columns late ones. Rows 8 to 15 are the early rows' low
    // terms.
    template <int kHalf>
    KGEN_DEVICE void put_scores(const Half& late_row, const Half& early_row, bool same) {
        u32 of_late[RowTerms][2], of_early[4] = {};  // [term][key]
#pragma unroll
        for (int key = 0; key < 2; ++key) {
            u32 early[RowTerms], late[RowTerms];
            split_bf16(early_row[2 * key], early_row[2 * key + 1], early);
            split_bf16(late_row[2 * key], late_row[2 * key + 1], late);
#pragma unroll
            for (int term = 0; term < RowTerms; ++term) {
                of_early[2 * key + term] = transpose_matrix(early[term]);
                of_late[term][key] = transpose_matrix(late[term]);
            }
        }
        float sums[4] = {};
#pragma unroll
        for (int term = RowTerms - 1; term >= 0; --term) mma_m16n8k16<bf16>(sums, of_early, of_late[term]);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float sum = RowTerms > 1 ? sums[which] + sums[2 + which] : sums[which];
            if constexpr (kHalf == 8) {
                far[which] = sum;
            } else {
                near_scores[which] = same ? sum : kHalf == 4 ? 0.0f : near_scores[which];
            }
        }
    }
};

}  // namespace kgen::wkv6
