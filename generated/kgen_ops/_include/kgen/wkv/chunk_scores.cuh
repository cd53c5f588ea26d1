// Work within each 16 steps of a chunk, in wkv5's and wkv6's backward pass: products of values, gradients per key,
// scores.
//
//     value_products    n_sj = v_s . g_j, tensor cores
//     key_gradients     gr, gk, gw, parts of gu, and scores of each half: a lane per key (scores.cuh); with
//                       C::kLevelScores factors of the scores of halves of 8, 4 and 2 steps (level_scores.cuh)
//     reduce            sums of scores over groups of keys, and of gu and gw over sets of 16 steps
//     cross_scores      scores across the halves of 16 steps, tensor cores
//
// Shared memory: chunk_memory.cuh. Synchronisation: a block barrier between any two of these functions; none inside.
#pragma once

#include "kgen/wkv/chunk_memory.cuh"

namespace kgen::wkv {

// The gradient with respect to a step's w, from the gradient with respect to its decay d.
template <DecayForm Form, class W, class Real>
KGEN_DEVICE float gradient_by_w(const StepRows<const W>& w, i64 step, int key, Real d,
                                Real by_decay) {
    if constexpr (Form == DecayForm::log) return static_cast<float>(d * by_decay);
    const Real slope = decay_slope<Form>(to_float(w.at(step)[key]), static_cast<float>(d));
    return static_cast<float>(slope * by_decay);
}

template <class C, class U>
class ChunkScores {
    using Memory = ChunkMemory<C>;
    using Index = typename Memory::Index;
    using T = typename C::T;
    using W = typename C::W;
    using Gradient = typename C::Gradient;
    using GradientW = typename C::GradientW;
    using ValueOperands = typename ChunkOperands<T, T>::Steps;  // for n: exact products in fp32
    // For scores, where one TF32 is enough for bf16.
    using KeyOperands = Tf32Operands<!detail::kIsBf16<T>>;
    using Real = typename Memory::Real;
    using Products = typename Memory::Products;
    static constexpr int kSubs = Memory::kSubs, kKeys = C::kKeys, kValues = C::kValues;
    static constexpr int kWarps = C::kWarps, kThreads = C::kThreads, kGroups = Memory::kGroups;
    static constexpr int kRowStride = Memory::kRowStride;
    static constexpr int kStride = Memory::kStride, kSub = Memory::kSub;
    static constexpr int kSubScores = Memory::kSubScores;
    static constexpr int kUnits = kSubs * kGroups;
    static constexpr int kSums = C::kValueSlices * C::kHeadKeys;  // of gu, per chunk and head

public:
    const Memory& at;
    const ChunkTensors<C, U>& tensors;
    const Index* shared_index;
    float scale;

    // n of each 16 steps, times the scale.
    KGEN_DEVICE void value_products() const {
        constexpr int kDeep = 16;  // values of a chain
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int sub = thread_rank() / kWarpSize; sub < kSubs; sub += kWarps) {
            Real sums[2][4] = {};
#pragma unroll
            for (int first = 0; first < kValues; first += kDeep) {
                float chain[2][4] = {};
#pragma unroll
                for (int value = first; value < min(first + kDeep, kValues);
                     value += ValueOperands::kStep) {
                    const auto a = ValueOperands::a_rows(at.rows_of(at.v, sub) + value, kRowStride);
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        multiply_all<ValueOperands>(
                            chain[n], a,
                            ValueOperands::b_rows(
                                at.rows_of(at.g, sub) + 8 * n * kRowStride + value, kRowStride));
                }
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[n][j] += Real(chain[n][j]);
            }
            const Products products = at.products_of(sub);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = lane.g + 8 * half, column = 8 * n + 2 * lane.q;
                    const Real first = sums[n][2 * half] * Real(scale);
                    const Real second = sums[n][2 * half + 1] * Real(scale);
                    *reinterpret_cast<Vec<Real, 2>*>(products.row(row) + column) = {
                        {first, second}};
                    if constexpr (Products::kBoth)
                        *reinterpret_cast<Vec<float, 2>*>(products.short_row(row) + column) = {
                            {static_cast<float>(first), static_cast<float>(second)}};
                }
        }
    }

    // Computes one set of 16 steps and 32 keys per warp, after the first `before` sets; returns false if the warp has
    // none. Both conditions are votes (`any`), so that the compiler knows them to be uniform in a warp and does not
    // emit a second form of all shuffles for a diverged warp.
    KGEN_DEVICE bool key_gradients(int before) const {
        const int rank = read_thread_rank(), unit = rank / kWarpSize + before;
        if (!any(unit < kUnits)) return false;
        const Index index = *shared_index;
        const int sub = unit / kGroups, key = unit % kGroups * kWarpSize + rank % kWarpSize;
        float* sums = at.scores + sub * kSubScores + unit % kGroups * Memory::kGroupScores;
        if constexpr (C::kK % kWarpSize == 0) {
            if (any(index.left - sub * kSubSteps >= kSubSteps)) {
                unit_gradients<true>(index, sub, key, sums);
                return true;
            }
        }
        unit_gradients<false>(index, sub, key, sums);
        return true;
    }

    // Scores of an early step with a late step, summed over keys, for each 16 steps.
    KGEN_DEVICE void cross_scores() const {
        constexpr int kDeep = 4;
        const int rank = read_thread_rank();
        const MmaLane lane{rank % kWarpSize / 4, rank % 4};
#pragma unroll 1
        for (int sub = rank / kWarpSize; sub < kSubs; sub += kWarps) {
            const float* early = at.state_g + sub * kSub + lane.g * kStride + lane.q;
            const float* late = early + kHalfSteps * kStride;
            float sums[4] = {};
#pragma unroll
            for (int first = 0; first < kKeys; first += 8 * kDeep) {
                float chain[4] = {};
#pragma unroll
                for (int key = first; key < min(first + 8 * kDeep, kKeys); key += 8) {
                    typename KeyOperands::A a = {};
                    typename KeyOperands::B b;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        KeyOperands::put(a, 2 * i, early[key + 4 * i]);
                        KeyOperands::put(b, i, late[key + 4 * i]);
                    }
                    multiply_all<KeyOperands>(chain, a, b);
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) sums[j] += chain[j];
            }
            *reinterpret_cast<Vec<float, 2>*>(at.scores + sub * kSubScores +
                                              kGroups * kScoresPadded + lane.g * kHalfSteps +
                                              2 * lane.q) = {
                {sums[0], sums[1]}};
        }
    }

    // Sums scores over groups of keys, and gu and gw over sets of 16 steps.
    KGEN_DEVICE void reduce(float* gu_parts, float* gw_parts) const {
        const int rank = read_thread_rank();
        if constexpr (kGroups > 1 && !C::kLevelScores)
            for (int i = rank; i < kSubs * kScores; i += kThreads) {
                float* sums = at.scores + i / kScores * kSubScores + i % kScores;
                float sum = sums[0];
#pragma unroll
                for (int group = 1; group < kGroups; ++group) sum += sums[group * kScoresPadded];
                sums[0] = sum;
            }
        const i64 part =
            i64{C::kSequential ? shared_index->part : static_cast<int>(C::block_of_slice())} * kSums +
            C::template first<Features::key_terms>();
        for (int key = rank; key < C::kK; key += kThreads) {
            float gu = 0.0f, gw = 0.0f;
#pragma unroll
            for (int sub = 0; sub < kSubs; ++sub) {
                gu += at.gu[sub * kKeys + key];
                if constexpr (!C::kPerStep) gw += at.gw[sub * kKeys + key];
            }
            gu_parts[part + key] = gu;
            if constexpr (!C::kPerStep) gw_parts[part + key] = gw;
        }
    }

private:
    // Loads one key of 16 steps, of which `left` exist, from step First on.
    template <int First = 0>
    static KGEN_DEVICE void load_steps(const StepRows<const T>& rows, i64 first, int left, int key,
                                       float (&to)[kSubSteps]) {
        const T* from = rows.at(first + First) + key;
#pragma unroll
        for (int i = First; i < kSubSteps; ++i) {
            to[i] = i < left ? to_float(*from) : 0.0f;
            from += rows.stride;
        }
    }

    // Whole: all steps and keys exist; no bounds are checked.
    template <bool Whole>
    KGEN_DEVICE void unit_gradients(const Index& index, int sub, int key, float* sums) const {
        const bool used = Whole || key < C::kK;
        const int column = Whole ? key : min(key, kKeys - 1);
        const i64 first = index.first(C::kChunk) + sub * kSubSteps;
        const int left = Whole ? kSubSteps : used ? index.left - sub * kSubSteps : 0;

        KeySteps x;
        const StepRows<const T> of_r = index.steps(tensors.r);
        const StepRows<const T> of_k = index.steps(tensors.k);
        load_steps(of_r, first, left, key, x.r);
        load_steps(of_k, first, left, key, x.k);
        float* rows = at.state_g + sub * kSub + column;
#pragma unroll
        for (int i = 0; i < kSubSteps; ++i) {
            x.d[i] = at.decays[sub * kSub + i * kStride + column];
            x.state_g[i] = rows[i * kStride];
            x.gradient_v[i] = at.decayed_r[sub * kSub + i * kStride + column];
        }
        sync_warp();  // lanes without a key have read what other lanes now write
        const int head_key = C::template first<Features::keys>() + key;
        x.u = used ? to_float(tensors.u[index.h * C::kHeadKeys + head_key]) : 0.0f;
        // Terms of slices of values could be Inf of both signs: slices.cuh adds the terms of these u once n is
        // complete.
        x.gradient_u = C::kValueSlices > 1 && !is_finite(x.u) ? 0.0f : x.u;
        x.inner = at.state_dot[sub * kKeys + column];

        Gradient* gr = index.steps(tensors.gr).at(first) + key;
        Gradient* gk = index.steps(tensors.gk).at(first) + key;
        GradientW* gw = C::kPerStep ? index.steps(tensors.gw).at(first) + key : nullptr;
        const StepRows<const W> w = index.steps(tensors.w);
        float gw_sum = 0.0f;
        const float gu = step_gradients<C::kLevelScores>(
            x, at.products_of(sub), sums,
            [&](int t, float by_r, float by_k, Real d, Real by_decay) {
                // Only the stores are conditional.
                const bool there = Whole || t < left;
                // The chunk's first step exists; the first of these 16 steps may not.
                const float by_w = gradient_by_w<C::kForm>(
                    w, there ? first + t : index.first(C::kChunk), used ? key : 0, d, by_decay);
                const Gradient of_r = from_float<Gradient>(by_r);
                const Gradient of_k = from_float<Gradient>(by_k);
                if (there) {
                    *gr = of_r;
                    *gk = of_k;
                    if constexpr (C::kPerStep) *gw = from_float<GradientW>(by_w);
                }
                if constexpr (!C::kPerStep) gw_sum += there ? by_w : 0.0f;
                gr += tensors.gr.stride_t;
                gk += tensors.gk.stride_t;
                if constexpr (C::kPerStep) gw += tensors.gw.stride_t;
            },
            [&](int steps, int t, float factor) {
                float* to = steps == kHalfSteps       ? rows
                            : steps == kHalfSteps / 2 ? at.decays + sub * kSub + column
                                                      : at.decayed_r + sub * kSub + column;
                if (Whole || key < kKeys) to[t * kStride] = factor;
            },
            [&](KeySteps& late) {
                load_steps<kHalfSteps>(of_r, first, left, key, late.r);
                load_steps<kHalfSteps>(of_k, first, left, key, late.k);
#pragma unroll
                for (int i = kHalfSteps; i < kSubSteps; ++i) {
                    late.d[i] = at.decays[sub * kSub + i * kStride + column];
                    late.gradient_v[i] = at.decayed_r[sub * kSub + i * kStride + column];
                }
                // Lanes without a key have read what other lanes now write.
                if constexpr (C::kLevelScores && !Whole) sync_warp();
            });
        if (!used) return;
        at.gu[sub * kKeys + key] = gu;
        if constexpr (!C::kPerStep) at.gw[sub * kKeys + key] = gw_sum;
    }

    template <class Operands>
    static KGEN_DEVICE void multiply_all(float (&sums)[4], const typename Operands::A& a,
                                         const typename Operands::B& b) {
        Operands::template multiply<0>(sums, a, b);
        if constexpr (Operands::kPasses > 1) {
            Operands::template multiply<1>(sums, a, b);
            Operands::template multiply<2>(sums, a, b);
        }
    }
};

}  // namespace kgen::wkv
