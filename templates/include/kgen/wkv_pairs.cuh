// What 16 steps of wkv5 and wkv6 owe to each other, on CUDA cores: a lane has a key.
//
// With decays d, g = scale * gy, n_sj = v_s . g_j and D(s, j) = d_{s+1} ... d_{j-1}, all for one key:
//
//     x_j(t) = S_{t-1} g_j              x_j(t + 1) = d_t x_j(t) + k_t n_tj
//     gr_j   = x_j(j) + n_jj u k_j
//     gk_s   = G_s v_s + n_ss u r_s     G_s v_s = sum_{j>s} D(s, j) r_j n_sj + D(s, end) (G v_s)
//     z_t    = S_{t-1} . G behind all   z_{t+1} = d_t z_t + k_t (G v_t)
//     gw_t   = d_t S_{t-1} . G_t        S_{t-1} . G_t = sum_{j>t} D(t, j) r_j x_j(t) + D(t, end) z_t
//     a_js   = r_j k_s D(s, j), a_ss = r u k: their sums over keys are what gv_s takes of g_j
//
// where S and G are the key's rows of the state and its gradient, and "behind all" and "end" mean the
// state behind these steps. Sums with D run from the far end, one decay and one term at a time. So
// decays meet sums of what they decay, as in the recurrence, and not every term for itself: where terms
// of neighbouring steps cancel, errors of decays do so as well. Nothing is divided by a decay, no sum
// is taken off another one, and nothing is added but what a gradient depends on: gw is as good as
// fp32's however small it is, and NaN stays where it belongs.
//
// All that is done for two halves of 8 steps. What one half owes to the other goes through the state
// between them: two multiply-adds per pair and not eight instructions, and a product of matrices
// for the sums over keys.
#pragma once

#include "chunk_decay.cuh"
#include "wkv_state_tile.cuh"

namespace kgen::wkv {

constexpr int kHalfSteps = kSubSteps / 2;
// Pairs s <= j of the same half, by s and then by j, early half first; and of different halves [s][j].
constexpr int kPairs = kHalfSteps * (kHalfSteps + 1);
constexpr int kPairsPadded = ceil_div(kPairs, 16) * 16;
constexpr int kCrossPairs = kHalfSteps * kHalfSteps;

// Sums over a warp's lanes, in the order in which their terms come.
class PairSums {
public:
    KGEN_DEVICE explicit PairSums(float* sums) : sums_(sums), terms_{} {}

    // Term number `index`, a constant once loops are unrolled.
    KGEN_DEVICE void add(int index, float term) {
        terms_[index % 16] = term;
        if (index % 16 == 15) fold(index / 16);
    }

    KGEN_DEVICE void finish() {
        if constexpr (kPairs % 16 != 0) fold(kPairs / 16);  // with terms that nobody reads
    }

private:
    KGEN_DEVICE void fold(int set) {
        float terms[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) terms[i] = terms_[i];
        const float sum = fold_lanes<16>(terms);
        if (lane_id() % 2 == 0) sums_[16 * set + lane_id() / 2] = sum;
    }

    float* sums_;
    float terms_[16];
};

// What a lane has of its key before it looks at pairs.
struct KeySteps {
    float r[kSubSteps], k[kSubSteps], d[kSubSteps];
    float read[kSubSteps];  // S g of each, S before all of them
    float back[kSubSteps];  // G v of each, G behind all of them
    float u;
    float inner;  // S . G of these
};

// Four products n of a row, from column j on.
KGEN_DEVICE void load_products(const float* row, int j, float* n) {
    const Vec<float, 4> four = *reinterpret_cast<const Vec<float, 4>*>(row + j);
#pragma unroll
    for (int i = 0; i < 4; ++i) n[j + i] = four[i];
}

// The steps from First on, one half; x.read, x.back and `inner` are of the states at its ends.
template <int First, class OfStep>
KGEN_DEVICE float half_pairs(KeySteps& x, float inner, const float* products, int stride,
                             PairSums& pairs, OfStep of_step) {
    constexpr int kEnd = First + kHalfSteps;
    float gu = 0.0f;
    int index = First / kHalfSteps * (kPairs / 2);
#pragma unroll
    for (int t = First; t < kEnd; ++t) {
        float n[kSubSteps];
#pragma unroll
        for (int j = t / 4 * 4; j < kEnd; j += 4) load_products(products + t * stride, j, n);

        // 1. From the far end: gradients of the state and of the key, which stand at step t.
        float across = inner, behind = x.back[t];
#pragma unroll
        for (int j = kEnd - 1; j > t; --j) {
            across = fma(x.d[j], across, x.r[j] * x.read[j]);
            behind = fma(x.d[j], behind, x.r[j] * n[j]);
        }
        const float bonus = n[t] * x.u;
        gu = fma(n[t] * x.r[t], x.k[t], gu);
        of_step(t, fma(bonus, x.k[t], x.read[t]), fma(bonus, x.r[t], behind), x.d[t] * across);

        // 2. On to step t + 1.
        inner = fma(x.d[t], inner, x.k[t] * x.back[t]);
        pairs.add(index++, x.r[t] * x.u * x.k[t]);
        float decayed = x.k[t];
#pragma unroll
        for (int j = t + 1; j < kEnd; ++j) {
            x.read[j] = fma(x.d[t], x.read[j], x.k[t] * n[j]);
            pairs.add(index++, decayed * x.r[j]);
            decayed *= x.d[j];
        }
    }
    return gu;
}

// products: n [16][stride], read 4 at a time; sums: kPairsPadded. of_step(t, gr, gk, gw) takes a step's
// gradients, step after step, and of_cross(t, x) k of an early step with the decays up to the middle, r
// of a late one with those behind it. Returns the sum of n_tt r_t k_t. By a whole warp; a lane without
// a key has zeros.
template <class OfStep, class OfCross>
KGEN_DEVICE float step_pairs(KeySteps& x, const float* products, int stride, float* sums,
                             OfStep of_step, OfCross of_cross) {
    constexpr int kHalf = kHalfSteps;
    // 1. The state and its gradient in the middle.
    float keys[kHalf], queries[kHalf], early = 1.0f, late = 1.0f;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int s = kHalf - 1 - i, j = kHalf + i;
        keys[s] = x.k[s] * early;
        queries[i] = x.r[j] * late;
        early *= x.d[s];
        late *= x.d[j];
        of_cross(s, keys[s]);
        of_cross(j, queries[i]);
    }
    float inner_early = 0.0f, inner_late = 0.0f;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        inner_early = fma(queries[i], x.read[kHalf + i], inner_early);
        inner_late = fma(keys[i], x.back[i], inner_late);
    }
    inner_early = fma(late, x.inner, inner_early);
    inner_late = fma(early, x.inner, inner_late);
    float read[kHalf] = {};
#pragma unroll
    for (int s = 0; s < kHalf; ++s) {
        float n[kSubSteps], back = 0.0f;
#pragma unroll
        for (int j = kHalf; j < kSubSteps; j += 4) load_products(products + s * stride, j, n);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            read[i] = fma(keys[s], n[kHalf + i], read[i]);
            back = fma(queries[i], n[kHalf + i], back);
        }
        x.back[s] = fma(late, x.back[s], back);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) x.read[kHalf + i] = fma(early, x.read[kHalf + i], read[i]);

    // 2. Each half.
    PairSums pairs(sums);
    const float gu = half_pairs<0>(x, inner_early, products, stride, pairs, of_step) +
                     half_pairs<kHalf>(x, inner_late, products, stride, pairs, of_step);
    pairs.finish();
    return gu;
}

// gv of one value from its carried part and g: out(s, carried + factor * sum_{j>=s} a_js g_j). `sums` are
// kPairsPadded, `crosses` kCrossPairs; g is zero where there is no step.
template <class Carried, class Out>
KGEN_DEVICE void read_pairs(const float* sums, const float* crosses, const float (&g)[kSubSteps],
                            float factor, Carried carried, Out out) {
    Vec<float, 4> four = {};
    int index = 0;
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int j = s; j < (s / kHalfSteps + 1) * kHalfSteps; ++j, ++index) {
            if (index % 4 == 0) four = *reinterpret_cast<const Vec<float, 4>*>(sums + index);
            sum = fma(four[index % 4], g[j], sum);
        }
        if (s < kHalfSteps) {
#pragma unroll
            for (int j = 0; j < kHalfSteps; j += 4) {
                const Vec<float, 4> cross = *reinterpret_cast<const Vec<float, 4>*>(
                    crosses + s * kHalfSteps + j);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum = fma(cross[i], g[kHalfSteps + j + i], sum);
            }
        }
        out(s, fma(factor, sum, carried(s)));
    }
}

}  // namespace kgen::wkv
