// The chunked backward pass of wkv5 and wkv6: a block per chunk of steps, all chunks side by side.
//
// wkv_state_walk.cuh has put the states at both ends of every chunk into the workspace. From those
// a block finds the states at every 16th step, again as products of matrices:
//
//     1. forward    z_j = S g_j of 16 steps, S before them; then S behind them
//     2. backward   y_s = G v_s of 16 steps, G behind them; S . G; gv_s = G^T k_s; G before them
//     3.            n_sj = v_s . g_j of 16 steps
//     4.            pairs of steps (wkv_pairs.cuh): gr, gk, gw, and parts of gu
//     5.            gv, with the pairs' sums over keys
//
// A warp has 16 keys and all values of the states. Only gv is a sum over warps: there G goes
// through shared memory.
#pragma once

#include "wkv_carried_values.cuh"
#include "wkv_pairs.cuh"
#include "wkv_state_walk.cuh"

namespace kgen::wkv {

template <class T, class W, class U>
struct ChunkTensors {
    StepRows<const T> gy, r, k, v;
    StepRows<const W> w;
    const U* u;
    StepRows<T> gr, gk, gv;
    StepRows<W> gw;  // if w has steps
};

// The gradient by a step's w, from that by its decay d.
template <DecayForm Form, class W, class Real>
KGEN_DEVICE float gradient_by_w(const W* w, Real d, Real by_decay) {
    if constexpr (Form == DecayForm::log) return static_cast<float>(d * by_decay);
    const Real slope = decay_slope<Form>(to_float(*w), static_cast<float>(d));
    return static_cast<float>(slope * by_decay);
}

// C: a ChunkedBackward.
template <class C, class U>
class ChunkGradients {
    using T = typename C::T;
    using W = typename C::W;
    using Tile = KeyTile<T, C::kPrecise, C::kTiles>;
    using OfValues = typename ChunkProducts<T, T>::Steps;  // for n: exact products in fp32
    // For gv's pairs, where one TF32 is enough for bf16.
    using OfKeys = Tf32Operands<!detail::kIsBf16<T>>;
    static constexpr int kSubs = C::kChunk / kSubSteps, kKeys = C::kKeys, kValues = C::kValues;
    static constexpr int kWarps = C::kWarps, kThreads = C::kThreads;
    static constexpr int kGroups = ceil_div(kKeys, kWarpSize);  // of keys, one per lane
    static constexpr int kRowStride = chunk_row_stride<T>(kValues);
    static constexpr int kStride = key_row_stride(kKeys), kSub = key_rows(kStride);
    // Rows of k with their decays give way to gv.
    static constexpr int kWideStride = key_row_stride(max(kKeys, kValues));
    static constexpr int kWideSub = key_rows(kWideStride);
    using Parts = typename Tile::Products::State;
    using Carried = CarriedValues<T, C::kPrecise, kKeys, kValues>;
    using Real = typename PairReal<C::kPrecise>::Type;  // of n
    using Products = PairProducts<Real>;
    static constexpr int kSums = kGroups * kPairsPadded + kCrossPairs;
    static constexpr int kOwnTiles = ceil_div(C::kTiles, kWarps);  // of gv
    static constexpr int kKeyStride = chunk_row_stride<T>(kKeys);
    static constexpr int kKeyRows = C::kChunk * kKeyStride;  // of r and of k, as they come

public:
    static constexpr int kSmemBytes =
        2 * C::kChunk * kRowStride * static_cast<int>(sizeof(T)) +
        4 * (kSubs * (3 * kSub + kWideSub + (C::kPerStep ? 2 : 3) * kKeys) +
             max(max(Carried::kBytes / 4, 2 * kKeyRows * static_cast<int>(sizeof(T)) / 4),
                 kSubs * (Products::kBytes / 4 + kSums)));

    KGEN_DEVICE ChunkGradients(const ChunkTensors<T, W, U>& tensors, i64 first, int left,
                               float scale)
        : tensors_(tensors), first_(first), left_(left), scale_(scale) {
        // Shared memory: T v, g[Chunk][kRowStride]; float decays, of_r, read[kSubs][kSub],
        // of_k[kSubs][kWideSub], all (later gu), inner[, gw][kSubs][kKeys]; then what is Carried,
        // or T k, r[Chunk][kKeyStride], or Products products[kSubs]; float sums[kSubs][kSums].
        v_ = dynamic_smem<T>();
        g_ = v_ + C::kChunk * kRowStride;
        decays_ = reinterpret_cast<float*>(g_ + C::kChunk * kRowStride);
        of_r_ = decays_ + kSubs * kSub;
        read_ = of_r_ + kSubs * kSub;
        of_k_ = read_ + kSubs * kSub;
        all_ = of_k_ + kSubs * kWideSub;
        inner_ = all_ + kSubs * kKeys;
        gu_ = all_;
        gw_ = inner_ + kSubs * kKeys;
        gradient_ = C::kPerStep ? gw_ : gw_ + kSubs * kKeys;
        products_ = reinterpret_cast<char*>(gradient_);
        sums_ = gradient_ + kSubs * (Products::kBytes / 4);
        key0_ = thread_rank() / kWarpSize * 16;
    }

    // state, gradient: this warp's tiles, before the chunk and behind it. gu_part and gw_part: of
    // the chunk, [K]; the latter only if w has no steps.
    KGEN_DEVICE void find(const float* state, const float* gradient, float* gu_part,
                          float* gw_part) const {
        if constexpr (kValues > C::kV) {
            for (int i = thread_rank(); i < 2 * C::kChunk * kRowStride; i += kThreads)
                v_[i] = from_float<T>(0.0f);
            sync_block();
        }
        // Of k, r and w until the walk begins, in places of what comes later.
        T* k = reinterpret_cast<T*>(gradient_);
        T* r = k + kKeyRows;
        W* w = reinterpret_cast<W*>(read_);
        copy_rows<T, C::kChunk, C::kK, C::kCopy, kThreads>(k, kKeyStride, tensors_.k, first_,
                                                           left_);
        copy_rows<T, C::kChunk, C::kK, C::kCopy, kThreads>(r, kKeyStride, tensors_.r, first_,
                                                           left_);
        if constexpr (C::kPerStep)
            copy_rows<W, C::kChunk, C::kK, C::kCopyW, kThreads>(w, kKeys, tensors_.w, first_,
                                                                left_);
        cp_async_commit();
        copy_rows<T, C::kChunk, C::kV, C::kCopy, kThreads>(v_, kRowStride, tensors_.v, first_,
                                                           left_);
        copy_rows<T, C::kChunk, C::kV, C::kCopy, kThreads>(g_, kRowStride, tensors_.gy, first_,
                                                           left_);
        cp_async_commit();
        cp_async_wait<1>();
        sync_block();
        take_decays(r, k, w);
        cp_async_wait_all();
        sync_block();

        walk(state, gradient);
        sync_block();
        multiply_rows();
        sync_block();
#pragma unroll 1
        for (int unit = thread_rank() / kWarpSize; unit < kSubs * kGroups; unit += kWarps)
            look_at_pairs(unit / kGroups, unit % kGroups);
        sync_block();
        add_up(gu_part, gw_part);
        multiply_cross();
        sync_block();
        write_values();
    }

private:
    // Rows of r from the first of 16 steps on and of k up to the last, with their decays; a lane
    // has one of its warp's keys and 16 steps.
    KGEN_DEVICE void take_decays(const T* of_r, const T* of_k, const W* of_w) const {
        const int key = key0_ + lane_id() % 16;
        const bool used = kKeys == C::kK || key < C::kK;
        float fixed = 1.0f;
        if constexpr (!C::kPerStep)
            if (used) fixed = decay_of<C::kForm>(to_float(tensors_.w.at(0)[key]));
#pragma unroll 1
        for (int sub = lane_id() / 16; sub < kSubs; sub += 2) {
            float r[kSubSteps], k[kSubSteps], d[kSubSteps];
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                const int step = sub * kSubSteps + i;
                r[i] = used ? to_float(of_r[step * kKeyStride + key]) : 0.0f;
                k[i] = used ? to_float(of_k[step * kKeyStride + key]) : 0.0f;
                if constexpr (C::kPerStep) {
                    d[i] = used ? C::decay_of_step(of_w[step * kKeys + key], step < left_) : 1.0f;
                } else {
                    d[i] = step < left_ ? fixed : 1.0f;
                }
            }
            LongProduct before(scale_), behind(1.0f);
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                decays_[sub * kSub + i * kStride + key] = d[i];
                of_r_[sub * kSub + i * kStride + key] = before.times(r[i]);
                before.multiply(d[i]);
            }
#pragma unroll
            for (int i = kSubSteps - 1; i >= 0; --i) {
                of_k_[sub * kWideSub + i * kWideStride + key] = behind.times(k[i]);
                behind.multiply(d[i]);
            }
            all_[sub * kKeys + key] = behind.value();
        }
    }

    KGEN_DEVICE void walk(const float* state, const float* gradient) const {
        const MmaLane lane = mma_lane();
        // 1. Forward: z_j where it is read, and the states before each 16 steps but the first.
        Tile states[kSubs];
        states[0].load_fragments(state);
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            float out[2][4];
            states[sub].read(rows_of(g_, sub), kRowStride, out, [](int, const Parts&) {});
            put_steps(read_ + sub * kSub, out, scale_);
            if (sub + 1 < kSubs)
                states[sub + 1].advance(states[sub], all_ + sub * kKeys + key0_,
                                        of_k_ + sub * kWideSub + key0_, kWideStride,
                                        rows_of(v_, sub), kRowStride);
        }

        // 2. Backward: y_s takes the place of what r's rows were needed for.
        Tile back;
        back.load_fragments(gradient);
#pragma unroll
        for (int sub = kSubs - 1; sub >= 0; --sub) {
            float* rows_of_k = of_k_ + sub * kWideSub;
            const Carried carried(gradient_, rows_of_k, kWideStride);
            carried.put_keys(rows_of_k, kWideStride, key0_);
            float inner[2], out[2][4];
            if (sub == 0) states[0].load_fragments(state);  // again: no registers in between
            states[sub].inner(back, inner);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = sub * kKeys + key0_ + lane.g + 8 * half;
                if (lane.q == 0) inner_[key] = inner[half];
            }
            back.read(rows_of(v_, sub), kRowStride, out,
                      [&](int i, const Parts& parts) { carried.put(back.at, i, parts, key0_); });
            if (sub > 0)
                back.advance(back, all_ + sub * kKeys + key0_, of_r_ + sub * kSub + key0_, kStride,
                             rows_of(g_, sub), kRowStride);
            sync_warp();
            put_steps(of_r_ + sub * kSub, out, 1.0f);
            sync_block();

            // gv of the carried gradient, over all warps' keys.
            float values[kOwnTiles][4];
            carried.template multiply<kWarps>(thread_rank() / kWarpSize, values);
            sync_block();
#pragma unroll
            for (int i = 0; i < kOwnTiles; ++i) {
                const int tile = thread_rank() / kWarpSize + i * kWarps;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (tile < C::kTiles)
                        *reinterpret_cast<Vec<float, 2>*>(
                            rows_of_k + (lane.g + 8 * half) * kWideStride + 8 * tile +
                            2 * lane.q) = {{values[i][2 * half], values[i][2 * half + 1]}};
            }
        }
    }

    // n of each 16 steps, with the scale.
    KGEN_DEVICE void multiply_rows() const {
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
                     value += OfValues::kStep) {
                    const auto a = OfValues::a_rows(rows_of(v_, sub) + value, kRowStride);
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        multiply_all<OfValues>(
                            chain[n], a,
                            OfValues::b_rows(rows_of(g_, sub) + 8 * n * kRowStride + value,
                                             kRowStride));
                }
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[n][j] += Real(chain[n][j]);
            }
            const Products products = products_of(sub);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = lane.g + 8 * half, column = 8 * n + 2 * lane.q;
                    const Real first = sums[n][2 * half] * Real(scale_);
                    const Real second = sums[n][2 * half + 1] * Real(scale_);
                    *reinterpret_cast<Vec<Real, 2>*>(products.row(row) + column) = {
                        {first, second}};
                    if constexpr (Products::kBoth)
                        *reinterpret_cast<Vec<float, 2>*>(products.short_row(row) + column) = {
                            {static_cast<float>(first), static_cast<float>(second)}};
                }
        }
    }

    KGEN_DEVICE Products products_of(int sub) const {
        return Products{products_ + sub * Products::kBytes};
    }

    // One feature of 16 steps, of which `left` exist, from step First on.
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

    KGEN_DEVICE void look_at_pairs(int sub, int group) const {
        const int key = group * kWarpSize + lane_id();
        const bool used = key < C::kK;
        const int column = min(key, kKeys - 1);
        const i64 first = first_ + sub * kSubSteps;
        const int left = used ? left_ - sub * kSubSteps : 0;

        KeySteps x;
        load_steps(tensors_.r, first, left, key, x.r);
        load_steps(tensors_.k, first, left, key, x.k);
        float* rows = read_ + sub * kSub + column;
#pragma unroll
        for (int i = 0; i < kSubSteps; ++i) {
            x.d[i] = decays_[sub * kSub + i * kStride + column];
            x.read[i] = rows[i * kStride];
            x.back[i] = of_r_[sub * kSub + i * kStride + column];
        }
        sync_warp();  // lanes without a key have read what others now write
        x.u = used ? to_float(tensors_.u[key]) : 0.0f;
        x.inner = inner_[sub * kKeys + column];

        T* gr = tensors_.gr.at(first) + key;
        T* gk = tensors_.gk.at(first) + key;
        W* gw = C::kPerStep ? tensors_.gw.at(first) + key : nullptr;
        const StepRows<const W> w{tensors_.w.at(first) + key, tensors_.w.stride};
        float gw_sum = 0.0f;
        const float gu = step_pairs(
            x, products_of(sub), sums_ + sub * kSums + group * kPairsPadded,
            [&](int t, float of_r, float of_k, Real d, Real by_decay) {
                if (t < left) {
                    *gr = from_float<T>(of_r);
                    *gk = from_float<T>(of_k);
                    const float of_w = gradient_by_w<C::kForm>(w.at(t), d, by_decay);
                    if constexpr (C::kPerStep) {
                        *gw = from_float<W>(of_w);
                    } else {
                        gw_sum += of_w;
                    }
                }
                gr += tensors_.gr.stride;
                gk += tensors_.gk.stride;
                if constexpr (C::kPerStep) gw += tensors_.gw.stride;
            },
            [&](int t, float of_key) {
                if (key < kKeys) rows[t * kStride] = of_key;
            },
            [&](KeySteps& late) {
                load_steps<kHalfSteps>(tensors_.r, first, left, key, late.r);
                load_steps<kHalfSteps>(tensors_.k, first, left, key, late.k);
#pragma unroll
                for (int i = kHalfSteps; i < kSubSteps; ++i) {
                    late.d[i] = decays_[sub * kSub + i * kStride + column];
                    late.back[i] = of_r_[sub * kSub + i * kStride + column];
                }
            });
        if (!used) return;
        gu_[sub * kKeys + key] = gu;
        if constexpr (!C::kPerStep) gw_[sub * kKeys + key] = gw_sum;
    }

    // Sums over keys of pairs of an early and a late step, of each 16 steps.
    KGEN_DEVICE void multiply_cross() const {
        constexpr int kDeep = 4;
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int sub = thread_rank() / kWarpSize; sub < kSubs; sub += kWarps) {
            const float* early = read_ + sub * kSub + lane.g * kStride + lane.q;
            const float* late = early + kHalfSteps * kStride;
            float sums[4] = {};
#pragma unroll
            for (int first = 0; first < kKeys; first += 8 * kDeep) {
                float chain[4] = {};
#pragma unroll
                for (int key = first; key < min(first + 8 * kDeep, kKeys); key += 8) {
                    typename OfKeys::A a = {};
                    typename OfKeys::B b;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        OfKeys::put(a, 2 * i, early[key + 4 * i]);
                        OfKeys::put(b, i, late[key + 4 * i]);
                    }
                    multiply_all<OfKeys>(chain, a, b);
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) sums[j] += chain[j];
            }
            *reinterpret_cast<Vec<float, 2>*>(sums_ + sub * kSums + kGroups * kPairsPadded +
                                              lane.g * kHalfSteps + 2 * lane.q) = {
                {sums[0], sums[1]}};
        }
    }

    // Sums over groups of keys, and over sets of 16 steps.
    KGEN_DEVICE void add_up(float* gu_part, float* gw_part) const {
        if constexpr (kGroups > 1)
            for (int i = thread_rank(); i < kSubs * kPairs; i += kThreads) {
                float* sums = sums_ + i / kPairs * kSums + i % kPairs;
                float sum = sums[0];
#pragma unroll
                for (int group = 1; group < kGroups; ++group) sum += sums[group * kPairsPadded];
                sums[0] = sum;
            }
        for (int key = thread_rank(); key < C::kK; key += kThreads) {
            float gu = 0.0f, gw = 0.0f;
#pragma unroll
            for (int sub = 0; sub < kSubs; ++sub) {
                gu += gu_[sub * kKeys + key];
                if constexpr (!C::kPerStep) gw += gw_[sub * kKeys + key];
            }
            gu_part[key] = gu;
            if constexpr (!C::kPerStep) gw_part[key] = gw;
        }
    }

    KGEN_DEVICE void write_values() const {
        constexpr int kParts = ceil_div(kValues, kWarpSize);
#pragma unroll 1
        for (int unit = thread_rank() / kWarpSize; unit < kSubs * kParts; unit += kWarps) {
            const int sub = unit / kParts, value = unit % kParts * kWarpSize + lane_id();
            if (value >= C::kV) continue;
            float g[kSubSteps];
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i)
                g[i] = to_float(rows_of(g_, sub)[i * kRowStride + value]);
            const float* carried = of_k_ + sub * kWideSub + value;
            const int left = left_ - sub * kSubSteps;
            T* gv = tensors_.gv.at(first_ + sub * kSubSteps) + value;
            const float* sums = sums_ + sub * kSums;
            read_pairs(
                sums, sums + kGroups * kPairsPadded, g, scale_,
                [&](int s) { return carried[s * kWideStride]; },
                [&](int s, float sum) {
                    if (s < left) *gv = from_float<T>(sum);
                    gv += tensors_.gv.stride;
                });
        }
    }

    KGEN_DEVICE const T* rows_of(const T* rows, int sub) const {
        return rows + sub * kSubSteps * kRowStride;
    }

    // Accumulators (keys g and g + 8, steps 8 n + {2q, 2q + 1}) to rows of keys.
    KGEN_DEVICE void put_steps(float* rows, const float (&sums)[2][4], float factor) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                rows[(8 * n + 2 * lane.q + j % 2) * kStride + key0_ + lane.g + j / 2 * 8] =
                    sums[n][j] * factor;
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

    const ChunkTensors<T, W, U>& tensors_;
    i64 first_;
    int left_;  // steps of the chunk that exist
    float scale_;
    T *v_, *g_;
    float *decays_, *of_r_, *read_, *of_k_, *all_, *inner_, *gu_, *gw_, *gradient_, *sums_;
    char* products_;
    int key0_;
};

}  // namespace kgen::wkv
