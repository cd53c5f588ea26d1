// What 16 steps of wkv5 and wkv6 owe to each other, on CUDA cores: a lane has a key.
//
// With decays d, g = scale * gy, n_sj = v_s . g_j and D(s, j) = d_{s+1} ... d_{j-1}, all for one
// key:
//
//     x_j(t) = S_{t-1} g_j              x_j(t + 1) = d_t x_j(t) + k_t n_tj
//     gr_j   = x_j(j) + n_jj u k_j
//     gk_s   = G_s v_s + n_ss u r_s     G_s v_s = sum_{j>s} D(s, j) r_j n_sj + D(s, end) (G v_s)
//     z_t    = S_{t-1} . G behind all   z_{t+1} = d_t z_t + k_t (G v_t)
//     gd_t   = S_{t-1} . G_t            ... = sum_{j>t} D(t, j) r_j x_j(t) + D(t, end) z_t
//     a_js   = r_j k_s D(s, j), a_ss = r u k: their sums over keys are what gv_s takes of g_j
//
// where S and G are the key's rows of the state and its gradient, and "behind all" and "end" mean
// the state behind these steps. Sums with D run from the far end, one decay and one term at a time.
// So decays meet sums of what they decay, as in the recurrence, and not every term for itself:
// where terms of neighbouring steps cancel, errors of decays do so as well. Nothing is divided by a
// decay, no sum is taken off another one, and nothing is added but what a gradient depends on: gd
// is as good as fp32's however small it is, and NaN stays where it belongs.
//
// All that is done for two halves of 8 steps. What one half owes to the other goes through the
// state between them: two multiply-adds per pair and not eight instructions, and a product of
// matrices for the sums over keys.
#pragma once

#include "chunk_decay.cuh"
#include "wkv_state_tile.cuh"

namespace kgen::wkv {

constexpr int kHalfSteps = kSubSteps / 2;
// Pairs s <= j of the same half, by s and then by j, early half first; and of different halves
// [s][j].
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

// What pairs are summed in where gw is fp32. Sums over values come first here, and where these have
// one sign while steps cancel, fp32's roundings are several times those of a recurrence, which sums
// over steps first.
template <bool Precise>
struct PairReal {
    using Type = double;
};
template <>
struct PairReal<false> {
    using Type = float;
};

// What a lane has of its key before it looks at pairs.
struct KeySteps {
    float r[kSubSteps], k[kSubSteps], d[kSubSteps];
    float read[kSubSteps];  // S g of each, S before all of them
    float back[kSubSteps];  // G v of each, G behind all of them
    float u;
    float inner;  // S . G of these
};

// n of 16 steps in shared memory, and in fp32, too.
template <class Real>
struct PairProducts {
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

// Products n of a row from column `from` up to `to`, multiples of 4.
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

// The steps from First on, one half; x.back and, of the half, `read` and `inner` are of the states
// at its ends.
template <int First, class Real, class OfStep>
KGEN_DEVICE float half_pairs(const KeySteps& x, Real (&read)[kHalfSteps],
                             const Real (&back)[kHalfSteps], Real inner,
                             const PairProducts<Real>& products, PairSums& pairs,
                             OfStep of_step) {
    constexpr int kHalf = kHalfSteps;
    float gu = 0.0f;
    int index = First / kHalf * (kPairs / 2);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int t = First + i;
        sync_warp();  // keeps later steps' products out of registers
        Real n[kSubSteps];
        float of_key[kSubSteps];  // the same, for what is as good in fp32
        load_products(products.row(t), t / 4 * 4, First + kHalf, n);
        load_products(products.short_row(t), t / 4 * 4, First + kHalf, of_key);

        // 1. From the far end: gradients of the state and of the key, which stand at step t.
        const Real k = x.k[t], d = x.d[t];
        Real across = inner;
        float behind = static_cast<float>(back[i]);
#pragma unroll
        for (int j = kHalf - 1; j > i; --j) {
            across = Real(x.d[First + j]) * across + Real(x.r[First + j]) * read[j];
            behind = fma(x.d[First + j], behind, x.r[First + j] * of_key[First + j]);
        }
        const float own = of_key[t], bonus = own * x.u;
        gu = fma(own * x.r[t], x.k[t], gu);
        of_step(t, fma(bonus, x.k[t], static_cast<float>(read[i])), fma(bonus, x.r[t], behind),
                d, across);

        // 2. On to step t + 1.
        inner = d * inner + k * Real(back[i]);
        pairs.add(index++, x.r[t] * x.u * x.k[t]);
        float decayed = x.k[t];
#pragma unroll
        for (int j = i + 1; j < kHalf; ++j) {
            read[j] = d * read[j] + k * n[First + j];
            pairs.add(index++, decayed * x.r[First + j]);
            decayed *= x.d[First + j];
        }
    }
    return gu;
}

// sums: kPairsPadded. of_step(t, gr, gk, d, gd) takes a step's gradients, that by its decay d among
// them, step after step, and of_cross(t, x) k of an early step with the decays up to the middle, r
// of a late one with those behind it. load_late brings r, k, d and back of the late steps again:
// they need no registers in between. Returns the sum of n_tt r_t k_t. By a whole warp; a lane
// without a key has zeros.
template <class Real, class OfStep, class OfCross, class LoadLate>
KGEN_DEVICE float step_pairs(KeySteps& x, const PairProducts<Real>& products, float* sums,
                             OfStep of_step, OfCross of_cross, LoadLate load_late) {
    constexpr int kHalf = kHalfSteps;
    // 1. The state and its gradient in the middle. A key with its decays meets sums over all
    // values: its rounding, the same for all of them, would count for more than that of any sum.
    Real keys[kHalf], queries[kHalf], all_early(1.0f), all_late(1.0f);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const int s = kHalf - 1 - i, j = kHalf + i;
        keys[s] = all_early * Real(x.k[s]);
        queries[i] = all_late * Real(x.r[j]);
        all_early = all_early * Real(x.d[s]);
        all_late = all_late * Real(x.d[j]);
        of_cross(s, static_cast<float>(keys[s]));
        of_cross(j, static_cast<float>(queries[i]));
    }
    Real read[kHalf];
    Real back_early[kHalf];
    Real inner_early = all_late * Real(x.inner), inner_late = all_early * Real(x.inner);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        inner_early = inner_early + queries[i] * Real(x.read[kHalf + i]);
        inner_late = inner_late + keys[i] * Real(x.back[i]);
        read[i] = all_early * Real(x.read[kHalf + i]);
    }
#pragma unroll
    for (int s = 0; s < kHalf; ++s) {
        sync_warp();
        Real n[kSubSteps];
        load_products(products.row(s), kHalf, kSubSteps, n);
        Real back = all_late * Real(x.back[s]);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            read[i] = read[i] + keys[s] * n[kHalf + i];
            back = back + queries[i] * n[kHalf + i];
        }
        back_early[s] = back;
    }

    // 2. Each half.
    PairSums pairs(sums);
    Real read_early[kHalf], back_late[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) read_early[i] = x.read[i];
    float gu = half_pairs<0>(x, read_early, back_early, inner_early, products, pairs, of_step);
    load_late(x);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) back_late[i] = x.back[kHalf + i];
    gu += half_pairs<kHalf>(x, read, back_late, inner_late, products, pairs, of_step);
    pairs.finish();
    return gu;
}

// gv of Count values from their carried parts and g: out(s, i, carried + factor * sum_{j>=s} a_js
// g_j). `sums` are kPairsPadded, `crosses` kCrossPairs; g is zero where there is no step.
template <int Count, class Carried, class Out>
KGEN_DEVICE void read_pairs(const float* sums, const float* crosses,
                            const float (&g)[Count][kSubSteps], float factor, Carried carried,
                            Out out) {
    Vec<float, 4> four = {};
    int index = 0;
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
        float of_step[Count] = {};
        const auto add = [&](float pair, int j) {
#pragma unroll
            for (int i = 0; i < Count; ++i) of_step[i] = fma(pair, g[i][j], of_step[i]);
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
        for (int i = 0; i < Count; ++i) out(s, i, fma(factor, of_step[i], carried(s, i)));
    }
}

}  // namespace kgen::wkv
