// What 16 steps of wkv5 and wkv6 owe to each other, on CUDA cores: a lane has a key.
//
// With decays d, g = scale * gy, n_sj = v_s . g_j, and within these steps D(s, j) = d_{s+1} ... d_{j-1}:
//
//     gr_j = (what came before) + sum_{s<j} D(s, j) k_s n_sj + n_jj u k_j
//     gk_s = (what comes behind) + sum_{j>s} D(s, j) r_j n_sj + n_ss u r_s
//     gw_t = d_t sum_v S_{t-1} G_t, of four parts:
//            state before the steps * gradient behind them
//            sum_{s<t} k_s (G behind the steps . v_s)    sum_{j>t} r_j (S before the steps . g_j)
//            sum_{s<t<j} k_s r_j D(s, j) n_sj
//     a_js = sum_k r_j k_s D(s, j), a_ss = sum_k r u k: what gv_s takes of g_j, a sum over keys
//
// Every term is a product of decays that lie between its steps, formed by multiplication alone: there is
// no bound on decays, no difference of sums, and no term of steps that do not depend on each other. So
// gw is as good as fp32's however small, and NaN stays where it belongs.
#pragma once

#include "chunk_decay.cuh"
#include "wkv_state_tile.cuh"

namespace kgen::wkv {

// Pairs s <= j of 16 steps, by s and then by j.
constexpr int kPairs = kSubSteps * (kSubSteps + 1) / 2;
constexpr int kPairsPadded = 144;  // whole sets of 16

// Sums over a warp's lanes, in the order in which their terms come.
class PairSums {
public:
    KGEN_DEVICE explicit PairSums(float* sums) : sums_(sums) {}

    // Term number `index`, a constant once loops are unrolled.
    KGEN_DEVICE void add(int index, float term) {
        terms_[index % 16] = term;
        if (index % 16 == 15) fold(index / 16);
    }

    KGEN_DEVICE void finish() {
#pragma unroll
        for (int i = kPairs % 16; i < 16; ++i) terms_[i] = 0.0f;
        fold(kPairs / 16);
    }

private:
    KGEN_DEVICE void fold(int set) {
        const float sum = fold_lanes<16>(terms_);
        if (lane_id() % 2 == 0) sums_[16 * set + lane_id() / 2] = sum;
    }

    float* sums_;
    float terms_[16];
};

// What a lane has of its key before it looks at pairs.
struct KeySteps {
    float r[kSubSteps], k[kSubSteps], d[kSubSteps];
    float of_r[kSubSteps];  // gr of each step from the state before all of them
    float of_k[kSubSteps];  // gk from the gradient behind all of them
    float u;
    float across;  // the state before * the gradient behind * all decays
};

// products: n [16][stride], read 4 at a time; sums: kPairsPadded. of_step(t, gr, gk, gw) takes a step's
// gradients. Returns the sum of n_tt r_t k_t. By a whole warp; a lane without a key has zeros.
template <class OfStep>
KGEN_DEVICE float step_pairs(KeySteps& x, const float* products, int stride, float* sums,
                             OfStep of_step) {
    PairSums pairs(sums);
    float gu = 0.0f, base = x.across;
    int index = 0;
#pragma unroll
    for (int t = 0; t < kSubSteps; ++t) {
        float n[kSubSteps];
#pragma unroll
        for (int j = t / 4 * 4; j < kSubSteps; j += 4) {
            const Vec<float, 4> four =
                *reinterpret_cast<const Vec<float, 4>*>(products + t * stride + j);
#pragma unroll
            for (int i = 0; i < 4; ++i) n[j + i] = four[i];
        }

        // 1. Here of_r[j] has what came before and the steps s < t.
        float gw = base;
#pragma unroll
        for (int j = t + 1; j < kSubSteps; ++j) gw = fma(x.r[j], x.of_r[j], gw);
        const float bonus = n[t] * x.u;
        const float gr = fma(bonus, x.k[t], x.of_r[t]);
        gu = fma(n[t] * x.r[t], x.k[t], gu);
        base = fma(x.k[t], x.of_k[t], base);

        // 2. From the far end, so that each decay is one multiplication.
        float behind = 0.0f;
#pragma unroll
        for (int j = kSubSteps - 1; j > t; --j) {
            const float term = x.r[j] * n[j];
            behind = j == kSubSteps - 1 ? term : fma(x.d[j], behind, term);
        }
        const float gk = fma(bonus, x.r[t], x.of_k[t] + behind);
        of_step(t, gr, gk, gw);

        // 3. Step t to all that come behind it.
        pairs.add(index++, x.r[t] * x.u * x.k[t]);
        float decayed = x.k[t];
#pragma unroll
        for (int j = t + 1; j < kSubSteps; ++j) {
            x.of_r[j] = fma(decayed, n[j], x.of_r[j]);
            pairs.add(index++, decayed * x.r[j]);
            decayed *= x.d[j];
        }
    }
    pairs.finish();
    return gu;
}

// gv of one value from its carried part and g: out(s, carried + factor * sum_{j>=s} a_js g_j). `sums` are
// kPairsPadded; g is zero where there is no step.
template <class Carried, class Out>
KGEN_DEVICE void read_pairs(const float* sums, const float (&g)[kSubSteps], float factor,
                            Carried carried, Out out) {
    Vec<float, 4> four = {};
    int index = 0;
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
        float sum = 0.0f;
#pragma unroll
        for (int j = s; j < kSubSteps; ++j, ++index) {
            if (index % 4 == 0) four = *reinterpret_cast<const Vec<float, 4>*>(sums + index);
            sum = fma(four[index % 4], g[j], sum);
        }
        out(s, fma(factor, sum, carried(s)));
    }
}

}  // namespace kgen::wkv
