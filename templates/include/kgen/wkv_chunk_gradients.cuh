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
    Rows<const T> gy, r, k, v;
    Rows<const W> w;
    const U* u;
    Rows<T> gr, gk, gv;
    Rows<W> gw;  // if w has steps
};

// A block's chunk. Rows are asked for where they are read or written: all their addresses would
// not fit the registers.
struct ChunkPlace {
    int b, h;
    int chunk;
    int left;  // steps of the chunk that exist
    int part;  // of [B * H, chunks]

    template <class X>
    KGEN_DEVICE StepRows<X> steps(const Rows<X>& rows) const {
        const Rows<X> its = rows.head(b, h);
        return {its.first, its.of_t};
    }
};

// The thread's rank in a block of one dimension, read again: what comes before need not keep it.
KGEN_DEVICE int read_thread_rank() {
#if KGEN_HOST
    return thread_rank();
#else
    int rank;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(rank));
    return rank;
#endif
}

// The gradient by a step's w, from that by its decay d.
template <DecayForm Form, class W, class Real>
KGEN_DEVICE float gradient_by_w(const StepRows<const W>& w, i64 step, int key, Real d,
                                Real by_decay) {
    if constexpr (Form == DecayForm::log) return static_cast<float>(d * by_decay);
    const Real slope = decay_slope<Form>(to_float(w.at(step)[key]), static_cast<float>(d));
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
    static constexpr int kUnits = kSubs * kGroups;
    static constexpr int kSums = kGroups * kPairsPadded + kCrossPairs;
    static constexpr int kOwnTiles = ceil_div(C::kTiles, kWarps);  // of gv
    static constexpr int kKeyStride = chunk_row_stride<T>(kKeys);
    static constexpr int kKeyRows = C::kChunk * kKeyStride;  // of r and of k, as they come
    static constexpr int kRawFloats = 2 * kKeyRows * static_cast<int>(sizeof(T)) / 4;
    // Behind n, and behind the next chunk's r and k, which come while sums are still read.
    static constexpr int kSumsAt =
        max(kSubs * (Products::kBytes / 4), C::kCarry ? kRawFloats : 0);

public:
    static constexpr int kSmemBytes =
        2 * C::kChunk * kRowStride * static_cast<int>(sizeof(T)) +
        4 * (kSubs * (3 * kSub + kWideSub + (C::kPerStep ? 2 : 3) * kKeys) +
             max(max(Carried::kBytes / 4, kRawFloats), kSumsAt + kSubs * kSums));

    // kept: in shared memory, for this object's own use.
    KGEN_DEVICE ChunkGradients(const ChunkTensors<T, W, U>& tensors, ChunkPlace* kept, float scale)
        : tensors_(tensors), kept_(kept), scale_(scale) {
        // Shared memory: T v, g[Chunk][kRowStride]; float decays, of_r, read[kSubs][kSub],
        // of_k[kSubs][kWideSub], all (later gu), inner[, gw][kSubs][kKeys]; then what is Carried,
        // or T k, r[Chunk][kKeyStride], or Products products[kSubs]; float sums[kSubs][kSums], at
        // kSumsAt.
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
        sums_ = gradient_ + kSumsAt;
        key0_ = (C::kCarry ? read_thread_rank() : thread_rank()) / kWarpSize * 16;
    }

    // Once, before all chunks of a block: what no copy brings.
    KGEN_DEVICE void clear_padding() const {
        if constexpr (kValues > C::kV) {
            for (int i = thread_rank(); i < 2 * C::kChunk * kRowStride; i += kThreads)
                v_[i] = from_float<T>(0.0f);
            sync_block();
        }
    }

    // The chunk's k, r and w are on their way if C::kCarry, and then those of the chunk before it
    // are. state, gradient: this warp's tiles, before the chunk and behind it; if C::kCarry the latter
    // becomes that before the chunk. gu_parts and gw_parts: of all chunks, [K]; the latter only if w
    // has no steps.
    KGEN_DEVICE void find(const ChunkPlace& place, const float* state, float* gradient,
                          float* gu_parts, float* gw_parts) const {
        if constexpr (!C::kCarry) copy_keys(place);
        copy<C::kV, C::kCopy>(v_, kRowStride, tensors_.v, place);
        copy<C::kV, C::kCopy>(g_, kRowStride, tensors_.gy, place);
        cp_async_commit();
        Tile states[kSubs];
        states[0].load_fragments(state);  // on their way while decays are taken
        if (thread_rank() == 0) *kept_ = place;
        cp_async_wait<1>();
        sync_block();
        take_decays(place);
        cp_async_wait_all();
        sync_block();

        walk(states, state, gradient);
        sync_block();
        multiply_rows();
        sync_block();
#pragma unroll 1
        for (int before = 0; look_at_unit(before); before += kWarps) {
        }
        sync_block();
        add_up(gu_parts, gw_parts);
        multiply_cross();
        sync_block();
        if constexpr (C::kCarry) {
            const ChunkPlace next = before(*kept_);
            if (next.chunk >= 0) copy_keys(next);  // while values are written
        }
        write_values();
    }

    // k, r and w of a chunk, until its walk begins in places of what comes later.
    KGEN_DEVICE void copy_keys(const ChunkPlace& place) const {
        copy<C::kK, C::kCopy>(raw_k(), kKeyStride, tensors_.k, place);
        copy<C::kK, C::kCopy>(raw_r(), kKeyStride, tensors_.r, place);
        if constexpr (C::kPerStep) copy<C::kK, C::kCopyW>(raw_w(), kKeys, tensors_.w, place);
        cp_async_commit();
    }

    // The chunk before one, -1 if that is the first.
    static KGEN_DEVICE ChunkPlace before(const ChunkPlace& place) {
        return {place.b, place.h, place.chunk - 1, C::kChunk, place.part - 1};
    }

private:
    KGEN_DEVICE T* raw_k() const { return reinterpret_cast<T*>(gradient_); }
    KGEN_DEVICE T* raw_r() const { return raw_k() + kKeyRows; }
    KGEN_DEVICE W* raw_w() const { return reinterpret_cast<W*>(read_); }

    // Rows of the chunk to shared memory; what has no step is zero.
    template <int Width, int CopyBytes, class X>
    static KGEN_DEVICE void copy(X* tile, int tile_stride, const Rows<const X>& rows,
                                 const ChunkPlace& place) {
        copy_rows<X, C::kChunk, Width, CopyBytes, kThreads>(
            tile, tile_stride, place.steps(rows), first_of(place), place.left);
    }

    static KGEN_DEVICE i64 first_of(const ChunkPlace& place) {
        return static_cast<i64>(place.chunk) * C::kChunk;
    }

    // Rows of r from the first of 16 steps on and of k up to the last, with their decays; a lane
    // has one of its warp's keys and 16 steps.
    KGEN_DEVICE void take_decays(const ChunkPlace& place) const {
        const T *of_r = raw_r(), *of_k = raw_k();
        const W* of_w = raw_w();
        const int key = key0_ + lane_id() % 16;
        const bool used = kKeys == C::kK || key < C::kK;
        float fixed = 1.0f;
        if constexpr (!C::kPerStep)
            if (used) fixed = decay_of<C::kForm>(to_float(place.steps(tensors_.w).at(0)[key]));
#pragma unroll 1
        for (int sub = lane_id() / 16; sub < kSubs; sub += 2) {
            float r[kSubSteps], k[kSubSteps], d[kSubSteps];
#pragma unroll
            for (int i = 0; i < kSubSteps; ++i) {
                const int step = sub * kSubSteps + i;
                r[i] = used ? to_float(of_r[step * kKeyStride + key]) : 0.0f;
                k[i] = used ? to_float(of_k[step * kKeyStride + key]) : 0.0f;
                if constexpr (C::kPerStep) {
                    d[i] = used ? C::decay_of_step(of_w[step * kKeys + key], step < place.left) : 1.0f;
                } else {
                    d[i] = step < place.left ? fixed : 1.0f;
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

    // states: the first is there.
    KGEN_DEVICE void walk(Tile (&states)[kSubs], const float* state, float* gradient) const {
        const MmaLane lane = mma_lane();
        // 1. Forward: z_j where it is read, and the states before each 16 steps but the first. G is
        // on its way where the first state has left its registers.
        Tile back;
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            float out[2][4];
            states[sub].read(rows_of(g_, sub), kRowStride, out, [](int, const Parts&) {});
            put_steps(read_ + sub * kSub, out, scale_);
            if (sub == 1) back.load_fragments(gradient);
            if (sub + 1 < kSubs)
                states[sub + 1].advance(states[sub], all_ + sub * kKeys + key0_,
                                        of_k_ + sub * kWideSub + key0_, kWideStride,
                                        rows_of(v_, sub), kRowStride);
        }

        // 2. Backward: y_s takes the place of what r's rows were needed for.
#pragma unroll
        for (int sub = kSubs - 1; sub >= 0; --sub) {
            float* rows_of_k = of_k_ + sub * kWideSub;
            const Carried carried(gradient_, rows_of_k, kWideStride);
            carried.put_keys(rows_of_k, kWideStride, key0_);
            float inner[2], out[2][4];
            // Again, where other states have left their registers.
            if (sub == kSubs / 2 - 1) states[0].load_fragments(state);
            states[sub].inner(back, inner);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = sub * kKeys + key0_ + lane.g + 8 * half;
                if (lane.q == 0) inner_[key] = inner[half];
            }
            back.read(rows_of(v_, sub), kRowStride, out,
                      [&](int i, const Parts& parts) { carried.put(back.at, i, parts, key0_); });
            if (C::kCarry || sub > 0)
                back.advance(back, all_ + sub * kKeys + key0_, of_r_ + sub * kSub + key0_, kStride,
                             rows_of(g_, sub), kRowStride);
            if (C::kCarry && sub == 0) back.store_fragments(gradient, C::kTiles);
            sync_warp();
            put_steps(of_r_ + sub * kSub, out, 1.0f);
            sync_block();

            // gv of the carried gradient, over all warps' keys.
            float values[kOwnTiles][4];
            carried.template multiply<kWarps>(thread_rank() / kWarpSize, values);
            sync_block();
#pragma unroll
            for (int i = 0; i < kOwnTiles; ++i) {
                if (!tile_exists<C::kTiles, kWarps>(thread_rank() / kWarpSize, i)) continue;
                const int tile = thread_rank() / kWarpSize + i * kWarps;
#pragma unroll
                for (int half = 0; half < 2; ++half)
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

    // A set of 16 steps and 32 keys for each warp, behind the first `before` ones; false if the
    // warp has none. That, and whether a set is whole, are votes: a compiler that knows a warp is
    // of one mind makes no second form of all shuffles for one that is not.
    KGEN_DEVICE bool look_at_unit(int before) const {
        const int rank = read_thread_rank(), unit = rank / kWarpSize + before;
        if (!any(unit < kUnits)) return false;
        const ChunkPlace place = *kept_;
        const int sub = unit / kGroups, key = unit % kGroups * kWarpSize + rank % kWarpSize;
        float* sums = sums_ + sub * kSums + unit % kGroups * kPairsPadded;
        if constexpr (C::kK % kWarpSize == 0) {
            if (any(place.left - sub * kSubSteps >= kSubSteps)) {
                look_at_pairs<true>(place, sub, key, sums);
                return true;
            }
        }
        look_at_pairs<false>(place, sub, key, sums);
        return true;
    }

    // Whole: all steps and keys exist, and nothing asks for them.
    template <bool Whole>
    KGEN_DEVICE void look_at_pairs(const ChunkPlace& place, int sub, int key, float* sums) const {
        const bool used = Whole || key < C::kK;
        const int column = Whole ? key : min(key, kKeys - 1);
        const i64 first = first_of(place) + sub * kSubSteps;
        const int left = Whole ? kSubSteps : used ? place.left - sub * kSubSteps : 0;

        KeySteps x;
        const StepRows<const T> of_r = place.steps(tensors_.r);
        const StepRows<const T> of_k = place.steps(tensors_.k);
        load_steps(of_r, first, left, key, x.r);
        load_steps(of_k, first, left, key, x.k);
        float* rows = read_ + sub * kSub + column;
#pragma unroll
        for (int i = 0; i < kSubSteps; ++i) {
            x.d[i] = decays_[sub * kSub + i * kStride + column];
            x.read[i] = rows[i * kStride];
            x.back[i] = of_r_[sub * kSub + i * kStride + column];
        }
        sync_warp();  // lanes without a key have read what others now write
        x.u = used ? to_float(tensors_.u[place.h * C::kK + key]) : 0.0f;
        x.inner = inner_[sub * kKeys + column];

        T* gr = place.steps(tensors_.gr).at(first) + key;
        T* gk = place.steps(tensors_.gk).at(first) + key;
        W* gw = C::kPerStep ? place.steps(tensors_.gw).at(first) + key : nullptr;
        const StepRows<const W> w = place.steps(tensors_.w);
        float gw_sum = 0.0f;
        const float gu = step_pairs(
            x, products_of(sub), sums,
            [&](int t, float by_r, float by_k, Real d, Real by_decay) {
                // Nothing but stores is conditional.
                const bool there = Whole || t < left;
                const float by_w = gradient_by_w<C::kForm>(
                    w, first + (there ? t : 0), key, d, by_decay);
                const T of_r = from_float<T>(by_r), of_k = from_float<T>(by_k);
                if (there) {
                    *gr = of_r;
                    *gk = of_k;
                    if constexpr (C::kPerStep) *gw = from_float<W>(by_w);
                }
                if constexpr (!C::kPerStep) gw_sum += there ? by_w : 0.0f;
                gr += tensors_.gr.of_t;
                gk += tensors_.gk.of_t;
                if constexpr (C::kPerStep) gw += tensors_.gw.of_t;
            },
            [&](int t, float of_key) {
                if (Whole || key < kKeys) rows[t * kStride] = of_key;
            },
            [&](KeySteps& late) {
                load_steps<kHalfSteps>(of_r, first, left, key, late.r);
                load_steps<kHalfSteps>(of_k, first, left, key, late.k);
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
        const int rank = read_thread_rank();
        const MmaLane lane{rank % kWarpSize / 4, rank % 4};
#pragma unroll 1
        for (int sub = rank / kWarpSize; sub < kSubs; sub += kWarps) {
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
    KGEN_DEVICE void add_up(float* gu_parts, float* gw_parts) const {
        const int rank = read_thread_rank();
        if constexpr (kGroups > 1)
            for (int i = rank; i < kSubs * kPairs; i += kThreads) {
                float* sums = sums_ + i / kPairs * kSums + i % kPairs;
                float sum = sums[0];
#pragma unroll
                for (int group = 1; group < kGroups; ++group) sum += sums[group * kPairsPadded];
                sums[0] = sum;
            }
        const i64 part = i64{C::kCarry ? kept_->part : static_cast<int>(blockIdx.x)} * C::kK;
        for (int key = rank; key < C::kK; key += kThreads) {
            float gu = 0.0f, gw = 0.0f;
#pragma unroll
            for (int sub = 0; sub < kSubs; ++sub) {
                gu += gu_[sub * kKeys + key];
                if constexpr (!C::kPerStep) gw += gw_[sub * kKeys + key];
            }
            gu_parts[part + key] = gu;
            if constexpr (!C::kPerStep) gw_parts[part + key] = gw;
        }
    }

    KGEN_DEVICE void write_values() const {
        // Two values of a lane share what is read of pairs, if all warps have work all the same.
        constexpr int kCount = kSubs * ceil_div(kValues, 2 * kWarpSize) >= kWarps ? 2 : 1;
        constexpr int kParts = ceil_div(kValues, kCount * kWarpSize);
        const int rank = read_thread_rank();
        const ChunkPlace place = *kept_;
#pragma unroll 1
        for (int unit = rank / kWarpSize; unit < kSubs * kParts; unit += kWarps) {
            const int sub = unit / kParts;
            const int value = unit % kParts * kCount * kWarpSize + rank % kWarpSize;
            const auto there = [&](int i) {
                return C::kV % (kCount * kWarpSize) == 0 || value + i * kWarpSize < C::kV;
            };
            float g[kCount][kSubSteps];
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int s = 0; s < kSubSteps; ++s)
                    g[i][s] = there(i) ? to_float(rows_of(g_, sub)[s * kRowStride + value +
                                                                   i * kWarpSize])
                                       : 0.0f;
            const float* carried = of_k_ + sub * kWideSub + value;
            const int left = place.left - sub * kSubSteps;
            T* gv = place.steps(tensors_.gv).at(first_of(place) + sub * kSubSteps) + value;
            const float* sums = sums_ + sub * kSums;
            read_pairs(
                sums, sums + kGroups * kPairsPadded, g, scale_,
                [&](int s, int i) {
                    return there(i) ? carried[s * kWideStride + i * kWarpSize] : 0.0f;
                },
                [&](int s, int i, float sum) {
                    const T of_value = from_float<T>(sum);
                    if (s < left && there(i)) gv[i * kWarpSize] = of_value;
                    if (i + 1 == kCount) gv += tensors_.gv.of_t;
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
    ChunkPlace* kept_;
    float scale_;
    T *v_, *g_;
    float *decays_, *of_r_, *read_, *of_k_, *all_, *inner_, *gu_, *gw_, *gradient_, *sums_;
    char* products_;
    int key0_;
};

// All chunks of a head from the last one to the first, by one block that carries the gradient of the
// state. Between two chunks it lies in `gradients`, one state per head: the registers are needed for
// pairs. A thread reads what it has written itself, so that no barrier is needed for that.
template <class C, class T, class W, class U>
KGEN_DEVICE void find_all_chunks(const ChunkTensors<T, W, U>& tensors, ChunkPlace place,
                                 ChunkPlace* kept, const float* states, float* gradients,
                                 const float* gfinal_state, float* ginitial_state,
                                 float* gu_parts, float* gw_parts, float scale) {
    using Tile = KeyTile<T, C::kPrecise, C::kTiles>;
    const auto own = [&] { return gradients + C::state_offset(blockIdx.x, 1, 0); };
    const int key0 = read_thread_rank() / kWarpSize * 16;
    Tile last;
    last.clear();
    if (gfinal_state != nullptr)
        last.load_rows(gfinal_state + i64{key0} * C::kV, C::kV, C::kK - key0, C::kV);
    last.store_fragments(own(), C::kTiles);
    using Gradients = ChunkGradients<C, U>;
    Gradients(tensors, kept, scale).clear_padding();
    if (place.chunk >= 0) Gradients(tensors, kept, scale).copy_keys(place);
#pragma unroll 1
    while (place.chunk >= 0) {
        Gradients(tensors, kept, scale)
            .find(place, states + C::state_offset(0, 0, place.part), own(), gu_parts, gw_parts);
        place = Gradients::before(*kept);
        sync_block();  // before copies of the next chunk, and its place, come where this one's are
    }
    if (ginitial_state != nullptr) {
        const int key0 = read_thread_rank() / kWarpSize * 16;
        Tile first;
        first.load_fragments(own());
        first.store_rows(ginitial_state + i64{key0} * C::kV, C::kV, C::kK - key0, C::kV);
    }
}

}  // namespace kgen::wkv
