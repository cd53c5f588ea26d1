// Gradients of 16 steps of wkv5 and wkv6 from the states at their ends, on CUDA cores; each lane has one key.
//
// Per key, with decays d_t, g_j = scale * gy_j, n_sj = v_s . g_j, D(s, j) = d_{s+1} ... d_{j-1}, S the state before the
// 16 steps and G the gradient of the state after them (the key's rows):
//
//     x_j(t) = S_{t-1} g_j              x_j(t + 1) = d_t x_j(t) + k_t n_tj
//     gr_j   = x_j(j) + n_jj u k_j
//     gk_s   = G_s v_s + n_ss u r_s     G_s v_s = sum_{j>s} D(s, j) r_j n_sj + D(s, end) (G v_s)
//     z_t    = S_{t-1} . G              z_{t+1} = d_t z_t + k_t (G v_t)
//     gd_t   = S_{t-1} . G_t            ... = sum_{j>t} D(t, j) r_j x_j(t) + D(t, end) z_t
//     a_js   = r_j k_s D(s, j), a_ss = r u k: attention scores; gv_s takes sum_j (sum over keys of a_js) g_j
//
// Accuracy: sums with D run from the far end, one decay and one term at a time, so that a decay multiplies a sum, as in
// the recurrence, and not each term by itself: where terms of adjacent steps cancel, errors of decays cancel as well.
// Nothing is divided by a decay, no sum is subtracted from another, and only what a gradient depends on is added: gd is
// as accurate as fp32 however small it is, and NaN reaches only what depends on it.
//
// The 16 steps are two halves of 8. What one half contributes to the other goes through the state between them. This
// takes two multiply-adds per score of steps instead of eight instructions, and one matrix product for the sums over
// keys.
//
// Synchronisation: called by a whole warp; warp barriers only.
#pragma once

#include "kgen/chunked/chunk_decay.cuh"
#include "kgen/wkv/state_tile.cuh"

namespace kgen::wkv {

constexpr int kHalfSteps = kSubSteps / 2;
// Scores of steps s <= j of the same half, ordered by s and then by j, early half first; scores of different halves,
// [s][j].
constexpr int kScores = kHalfSteps * (kHalfSteps + 1);
constexpr int kScoresPadded = ceil_div(kScores, 16) * 16;
constexpr int kCrossScores = kHalfSteps * kHalfSteps;
// If tensor cores compute the scores of halves of 4 and 2 steps too (level_scores.cuh), by pairs of steps 2p, 2p + 1: a
// of step 2p with itself, a of both steps, a of step 2p + 1 with itself.
constexpr int kNearScores = kSubSteps + kSubSteps / 2;

// Sums of Count scores over a warp's keys, folded 16 at a time in the order in which they are computed.
template <int Count>
class ScoreSums {
public:
    KGEN_DEVICE explicit ScoreSums(float* sums) : sums_(sums), terms_{} {}

    // Term number `index`, a constant once loops are unrolled.
    KGEN_DEVICE void add(int index, float term) {
        terms_[index % 16] = term;
        if (index % 16 == 15) fold(index / 16);
    }

    KGEN_DEVICE void finish() {
        if constexpr (Count == kNearScores) {
            fold_half(Count / 16);
        } else if constexpr (Count % 16 != 0) {
            fold(Count / 16);  // the padding is never read
        }
    }

private:
    KGEN_DEVICE void fold(int set) {
        float terms[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) terms[i] = terms_[i];
        const float sum = fold_lanes<16>(terms);
        if (lane_id() % 2 == 0) sums_[16 * set + lane_id() / 2] = sum;
    }

    // Folds the last 8 terms.
    KGEN_DEVICE void fold_half(int set) {
        float terms[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) terms[i] = terms_[i];
        const float sum = fold_lanes<8>(terms);
        if (lane_id() % 4 == 0) sums_[16 * set + lane_id() / 4] = sum;
    }

    float* sums_;
    float terms_[16];
};

// The type in which products of these steps are summed: fp64 if gw is fp32. These products sum over values first; where
// values have one sign while steps cancel, fp32's rounding is several times that of the recurrence, which sums over
// steps first.
template <bool Precise>
struct ScoreReal {
    using Type = double;
};
template <>
struct ScoreReal<false> {
    using Type = float;
};

// A lane's key: its rows of the 16 steps, and its products with the states at their ends.
struct KeySteps {
    float r[kSubSteps], k[kSubSteps], d[kSubSteps];
    float state_g[kSubSteps];     // S g of each
    float gradient_v[kSubSteps];  // G v of each
    float u, gradient_u;  // u for scores; u for gr and gk
    float inner;  // S . G
};

// n of 16 steps in shared memory: [16][kStride] of Real, and if Real is fp64 also [16][kShortStride] of float.
template <class Real>
struct ValueProducts {
    static constexpr bool kBoth = sizeof(Real) > sizeof(float);
    static constexpr int kStride = kSubSteps + 16 / static_cast<int>(sizeof(Real));
    static constexpr int kShortStride = kSubSteps + 4;
    static constexpr int kBytes =
        kSubSteps * (kStride * static_cast<int>(sizeof(Real)) + (kBoth ? kShortStride * 4 : 0));

    char* memory;

    KGEN_DEVICE Real* row(int step) const {
        return reinterpret_cast<Real*>(memory) + step * kStride;
    }
    KGEN_DEVICE float* short_row(int step) const {
        constexpr int kWide = kBoth ? kSubSteps * kStride * static_cast<int>(sizeof(Real)) : 0;
        return reinterpret_cast<float*>(memory + kWide) + step * kShortStride;
    }
};

// Loads the products n of a row from column `from` up to `to`, multiples of 4.
template <class Real>
KGEN_DEVICE void load_products(const Real* row, int from, int to, Real (&n)[kSubSteps]) {
    constexpr int kVec = 16 / static_cast<int>(sizeof(Real));
#pragma unroll
    for (int j = from; j < to; j += kVec) {
        const Vec<Real, kVec> some = *reinterpret_cast<const Vec<Real, kVec>*>(row + j);
#pragma unroll
        for (int i = 0; i < kVec; ++i) n[j + i] = some[i];
    }
}

// Passes on the rows of factors of scores for halves of 4 and of 2 steps, in the half from First on: put_row(steps, t,
// x).
template <int First, class PutRow>
KGEN_DEVICE void put_level_rows(const KeySteps& x, PutRow put_row) {
#pragma unroll
    for (int steps = kHalfSteps / 2; steps > 1; steps /= 2)
#pragma unroll
        for (int first = First; first < First + kHalfSteps; first += 2 * steps) {
            const int middle = first + steps;
            float early = 1.0f, late = 1.0f;
#pragma unroll
            for (int i = 0; i < steps; ++i) {
                const int s = middle - 1 - i, j = middle + i;
                put_row(steps, s, i == 0 ? x.k[s] : early * x.k[s]);
                put_row(steps, j, i == 0 ? x.r[j] : late * x.r[j]);
                early = i == 0 ? x.d[s] : early * x.d[s];
                late = i == 0 ? x.d[j] : late * x.d[j];
            }
        }
}

// Gradients of one half, the steps from First on. `read`, `back` and `inner` are S g, G v and S . G for the states at
// its ends. Levels: only the kNearScores of its scores are computed here.
template <int First, bool Levels, class Real, class Scores, class PutStep>
KGEN_DEVICE float half_gradients(const KeySteps& x, Real (&read)[kHalfSteps],
                             const Real (&back)[kHalfSteps], Real inner,
                             const ValueProducts<Real>& products, Scores& scores,
                             PutStep put_step) {
    constexpr int kHalf = kHalfSteps;
    float gu = 0.0f;
    int index = First / kHalf * ((Levels ? kNearScores : kScores) / 2);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int t = First + i;
        sync_warp();  // keeps the loads of later steps' products from moving up
        Real n[kSubSteps];
        float n_fp32[kSubSteps];  // for sums that need no more than fp32
        load_products(products.row(t), t / 4 * 4, First + kHalf, n);
        load_products(products.short_row(t), t / 4 * 4, First + kHalf, n_fp32);

        // 1. From the far end: the gradients of the decay and of k at step t.
        const Real k = x.k[t], d = x.d[t];
        Real across = inner;
        float behind = static_cast<float>(back[i]);
#pragma unroll
        for (int j = kHalf - 1; j > i; --j) {
            across = Real(x.d[First + j]) * across + Real(x.r[First + j]) * read[j];
            behind = fma(x.d[First + j], behind, x.r[First + j] * n_fp32[First + j]);
        }
        const float own = n_fp32[t], bonus = own * x.gradient_u;
        gu = fma(own * x.r[t], x.k[t], gu);
        put_step(t, fma(bonus, x.k[t], static_cast<float>(read[i])), fma(bonus, x.r[t], behind),
                d, across);

        // 2. x and z on to step t + 1, and the scores of step t.
        inner = d * inner + k * Real(back[i]);
        scores.add(index++, x.r[t] * x.u * x.k[t]);
        if constexpr (Levels) {
            if (i % 2 == 0) scores.add(index++, x.k[t] * x.r[t + 1]);
        }
        float decayed = x.k[t];
#pragma unroll
        for (int j = i + 1; j < kHalf; ++j) {
            read[j] = d * read[j] + k * n[First + j];
            if constexpr (!Levels) {
                scores.add(index++, decayed * x.r[First + j]);
                decayed *= x.d[First + j];
            }
        }
    }
    return gu;
}

// Gradients of all 16 steps. sums: kScoresPadded, or kNearScores if Levels. put_step(t, gr, gk, d, gd) receives the
// gradients of one step; gd is with respect to its decay d. put_row(steps, t, x) receives the factors of the scores
// across halves of `steps` steps: k of an early step times the decays up to the middle, r of a late step times the
// decays from there. The halves have 8 steps, and if Levels also 4 and 2. load_late reads r, k, d and gradient_v of the
// late steps again, so that they need no registers in between. Returns sum_t n_tt r_t k_t. A lane without a key has
// zeros.
template <bool Levels, class Real, class PutStep, class PutRow, class LoadLate>
KGEN_DEVICE float step_gradients(KeySteps& x, const ValueProducts<Real>& products, float* sums,
                             PutStep put_step, PutRow put_row, LoadLate load_late) {
    constexpr int kHalf = kHalfSteps;
    // 1. The state and its gradient between the halves, in Real: a decayed key multiplies sums over all values, so its
    // rounding would weigh more than that of any one sum.
    Real keys[kHalf], queries[kHalf], all_early(1.0f), all_late(1.0f);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int s = kHalf - 1 - i, j = kHalf + i;
        keys[s] = all_early * Real(x.k[s]);
        queries[i] = all_late * Real(x.r[j]);
        all_early = all_early * Real(x.d[s]);
        all_late = all_late * Real(x.d[j]);
        put_row(kHalf, s, static_cast<float>(keys[s]));
        put_row(kHalf, j, static_cast<float>(queries[i]));
    }
    Real read[kHalf];
    Real back_early[kHalf];
    Real inner_early = all_late * Real(x.inner), inner_late = all_early * Real(x.inner);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        inner_early = inner_early + queries[i] * Real(x.state_g[kHalf + i]);
        inner_late = inner_late + keys[i] * Real(x.gradient_v[i]);
        read[i] = all_early * Real(x.state_g[kHalf + i]);
    }
#pragma unroll
    for (int s = 0; s < kHalf; ++s) {
        sync_warp();
        Real n[kSubSteps];
        load_products(products.row(s), kHalf, kSubSteps, n);
        Real back = all_late * Real(x.gradient_v[s]);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            read[i] = read[i] + keys[s] * n[kHalf + i];
            back = back + queries[i] * n[kHalf + i];
        }
        back_early[s] = back;
    }

    // 2. Each half.
    ScoreSums<Levels ? kNearScores : kScores> scores(sums);
    Real read_early[kHalf], back_late[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) read_early[i] = x.state_g[i];
    if constexpr (Levels) put_level_rows<0>(x, put_row);
    float gu = half_gradients<0, Levels>(x, read_early, back_early, inner_early, products,
                                         scores, put_step);
    load_late(x);
    if constexpr (Levels) put_level_rows<kHalf>(x, put_row);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) back_late[i] = x.gradient_v[kHalf + i];
    gu += half_gradients<kHalf, Levels>(x, read, back_late, inner_late, products, scores,
                                        put_step);
    scores.finish();
    return gu;
}

// gv of Count values: out(s, i, inter(s, i) + factor * sum_{j>=s} a_js g_j). `sums` has kScoresPadded scores, `crosses`
// kCrossScores; g is zero for steps that do not exist.
template <int Count, class Inter, class Out>
KGEN_DEVICE void multiply_scores(const float* sums, const float* crosses,
                            const float (&g)[Count][kSubSteps], float factor, Inter inter,
                            Out out) {
    Vec<float, 4> four = {};
    int index = 0;
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
        float of_step[Count] = {};
        const auto add = [&](float score, int j) {
#pragma unroll
            for (int i = 0; i < Count; ++i) of_step[i] = fma(score, g[i][j], of_step[i]);
        };
#pragma unroll
        for (int j = s; j < (s / kHalfSteps + 1) * kHalfSteps; ++j, ++index) {
            if (index % 4 == 0) four = *reinterpret_cast<const Vec<float, 4>*>(sums + index);
            add(four[index % 4], j);
        }
        if (s < kHalfSteps) {
#pragma unroll
            for (int j = 0; j < kHalfSteps; j += 4) {
                const Vec<float, 4> cross = *reinterpret_cast<const Vec<float, 4>*>(
                    crosses + s * kHalfSteps + j);
#pragma unroll
                for (int i = 0; i < 4; ++i) add(cross[i], kHalfSteps + j + i);
            }
        }
#pragma unroll
        for (int i = 0; i < Count; ++i) out(s, i, fma(factor, of_step[i], inter(s, i)));
    }
}

}  // namespace kgen::wkv
