// Decays and a bonus within a chunk of the loop of chunk_loop.cuh.
//
//     out_t = factor * a_t (S_{t-1} + diag(u) b_t v_t^T)     S_t = diag(exp(w_t)) S_{t-1} + b_t v_t^T
//
// Decays d_t = exp(w_t) are from 0 to 1, both included; w may have another form, see decay_form.cuh.
// With products over steps of one chunk the four products of chunk_mma.cuh become
//
//     carried    A' S      a'_t = a_t * (d of the steps before t)
//     state      S = diag(all d) S + B'^T V,   b'_t = b_t * (d of the steps after t)
//     scores     P_ts = sum_k a_t b_s (d of the steps between s and t), P_tt = sum_k a_t u b_t
//     inside     P V, as without decays
//
// Scores are a product again if each factor stands for its distance from the middle of the chunk:
// a step t after the middle has a_t * m_t and b_t / m_{t+1}, where m is the product from the
// middle to t; before the middle it is the other way round. This needs m neither 0 nor so small that
// 1 / m overflows fp32: `factor` checks that the decays of each half multiply to e^-60 or more, for each key. A chunk
// that fails the check takes `exact_scores`, on CUDA cores with running products. Entries beyond the diagonal may
// overflow; the causal mask selects them away, it does not multiply.
//
// Products are formed outwards from where they begin, never as quotients or differences: decays of
// exactly 0 and 1 stay exact, and -inf makes no NaN.
//
// Rows with decays are fp32, also for 16-bit tensors, whose products then are TF32: rounded to bf16, A', B' and the
// factors of the scores would each err as much as the output's own rounding.
//
// Shared memory: W ring[Stages][Chunk][Padded]; float score_a, score_b, carried [Chunk][kStride], update[Chunk]
// [kUpdateStride], all[Padded], u[Padded], bonus[groups][Chunk]; int mild[units].
//
// Synchronisation: the block calls `factor` between two block barriers; a lane has one key and half of the steps.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// Operands from fp32 that was multiplied by kNearTf32 when it was stored; of_sums rounds.
struct RoundedOperands : Tf32Operands<false> {
    static KGEN_DEVICE A a_rows(const float* tile, int stride) {
        A a = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const B two = b_rows(tile + 8 * half * stride, stride);
            a.hi[half] = two.hi[0];
            a.hi[half + 2] = two.hi[1];
        }
        return a;
    }

    static KGEN_DEVICE B b_rows(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        const Vec<float, 2> two =
            *reinterpret_cast<const Vec<float, 2>*>(tile + lane.g * stride + 2 * lane.q);
        return B{{bit_cast<u32>(two[0]), bit_cast<u32>(two[1])}, {}};
    }
};

// S += B^T V with V of 16 bits and B in fp32, both as TF32. Of 16 steps the even ones are one
// product, the odd ones another: k = q, q + 4 are steps 2q, 2q + 8, or the ones after them.
// Split: B is two TF32 numbers, so that S is as good as fp32's; else it was rounded when it was stored.
template <class T, bool Split>
struct MixedOperands {
    static constexpr int kStep = 16, kPasses = Split ? 2 : 1;
    static constexpr bool kChained = Split;

    struct A {
        u32 even[4], odd[4];
    };
    struct B {
        typename Tf32Operands<Split>::B even, odd;
    };

    static KGEN_DEVICE A a_columns(const T* tile, int stride) {
        return unpacked(HalfOperands<T>::a_columns(tile, stride).pair);
    }

    // The operand of pairs of steps.
    static KGEN_DEVICE A unpacked(const u32 (&pairs)[4]) {
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 two = unpack2<T>(pairs[i]);
            a.even[i] = bit_cast<u32>(two.x);
            a.odd[i] = bit_cast<u32>(two.y);
        }
        return a;
    }

    static KGEN_DEVICE B b_columns(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* row = tile + (2 * lane.q + 8 * i) * stride + lane.g;
            if constexpr (Split) {
                Tf32Operands<true>::put(b.even, i, row[0]);
                Tf32Operands<true>::put(b.odd, i, row[stride]);
            } else {
                b.even.hi[i] = bit_cast<u32>(row[0]);
                b.odd.hi[i] = bit_cast<u32>(row[stride]);
            }
        }
        return b;
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        if constexpr (Split && Pass == 0) {
            mma_tf32_m16n8k8(sums, a.even, b.even.lo);
            mma_tf32_m16n8k8(sums, a.odd, b.odd.lo);
        } else {
            mma_tf32_m16n8k8(sums, a.even, b.even.hi);
            mma_tf32_m16n8k8(sums, a.odd, b.odd.hi);
        }
    }
};

// Operands of a loop: Scorer for the scores, Updater for the state, the others as in ChunkOperands. With decays,
// Product fp32 of 16-bit tensors is for a state that is returned in fp32.
template <class T, class Product, bool Decays>
struct LoopOperands : ChunkOperands<T, Product> {
    using Scorer = typename ChunkOperands<T, Product>::Steps;
    using Updater = Scorer;
};
template <class T, bool Split>
struct MixedProducts : ChunkOperands<T, T> {
    using Carry = RoundedOperands;
    using Scorer = RoundedOperands;
    using Updater = MixedOperands<T, Split>;
};
template <>
struct LoopOperands<fp16, fp16, true> : MixedProducts<fp16, false> {};
template <>
struct LoopOperands<bf16, bf16, true> : MixedProducts<bf16, false> {};
template <>
struct LoopOperands<fp16, float, true> : MixedProducts<fp16, true> {};
template <>
struct LoopOperands<bf16, float, true> : MixedProducts<bf16, true> {};

// Sum each of `Count` values over the warp's lanes: a lane gets the sum of values[lane * Count / 32].
template <int Count, int Bit = kWarpSize / 2, int Size>
KGEN_DEVICE float fold_lanes(float (&values)[Size]) {
    if constexpr (Count > 1) {
        const bool high = (lane_id() & Bit) != 0;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            const float low_value = values[i], high_value = values[i + Count / 2];
            values[i] = (high ? high_value : low_value) +
                        shfl_xor(high ? low_value : high_value, Bit);
        }
    } else {
        values[0] += shfl_xor(values[0], Bit);
    }
    if constexpr (Bit > 1) return fold_lanes<max(Count / 2, 1), Bit / 2>(values);
    return values[0];
}

// Whether rows with decays have their keys in order: then columns 2q, 2q + 1 of a tile of the state are its keys q and
// q + 4.
template <class Decay>
constexpr bool kRowsInKeyOrder = false;

// The decays of a loop: none, or those of the chunk in use, in shared memory. Precise: exponentials as accurate as
// fp32; else by the special function unit.
template <class Decay, class T, int Keys, int Padded, int Chunk, int Warps, int Stages,
          int CopyBytes, bool Precise>
class ChunkDecay;

template <class T, int Keys, int Padded, int Chunk, int Warps, int Stages, int CopyBytes,
          bool Precise>
class ChunkDecay<NoDecayRows, T, Keys, Padded, Chunk, Warps, Stages, CopyBytes, Precise> {
public:
    using Row = T;  // element type of rows for the products
    static constexpr int kStride = chunk_row_stride<T>(Padded), kUpdateStride = kStride;
    static constexpr int kSmemBytes = 0;
    KGEN_DEVICE ChunkDecay(const NoDecayRows&, i64) {}
};

template <class W, class U, DecayForm Form, class T, int Keys, int Padded, int Chunk, int Warps,
          int Stages, int CopyBytes, bool Precise>
class ChunkDecay<DecayRows<W, U, Form>, T, Keys, Padded, Chunk, Warps, Stages, CopyBytes,
                 Precise> {
    static constexpr int kHalf = Chunk / 2;
    static constexpr int kGroups = (Padded + kWarpSize - 1) / kWarpSize;  // of keys, one per lane
    static constexpr int kUnits = 2 * kGroups;                            // a half of the steps each
    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kRowStride = chunk_row_stride<T>(Padded);  // of the ring's rows a and b
    static constexpr int kStage = Chunk * Padded;                   // w of a chunk
    static constexpr int kCopy = max(CopyBytes, static_cast<int>(sizeof(W)));
    // Factors that pre-round rows for the products to TF32; rows for the state only unless Precise.
    static constexpr float kRound = sizeof(T) == 2 ? kNearTf32 : 1.0f;
    static constexpr float kRoundUpdate = Precise ? 1.0f : kRound;
    static constexpr float kMildest = 60.0f;  // e^60 is well within fp32

    static_assert(Chunk == 16 || Chunk == 32, "a thread keeps the decays of half a chunk");
    static_assert(Keys * sizeof(W) % kCopy == 0, "a copy would reach into the next row");

public:
    using Row = float;

    // Elements between two rows with decays; b' is read by columns, of even rows if T has 16 bits.
    static constexpr int kStride = chunk_row_stride<float>(Padded);
    static constexpr int kUpdateStride = sizeof(T) == 2 ? Padded + 4 : kStride;

private:
    static constexpr int kTile = Chunk * kStride;

public:
    static constexpr int kSmemBytes =
        Stages * kStage * static_cast<int>(sizeof(W)) +
        4 * (3 * kTile + Chunk * kUpdateStride + 2 * Padded + kGroups * Chunk + kUnits);

    KGEN_DEVICE ChunkDecay(const DecayRows<W, U, Form>& rows, i64 first)
        : row_u_(rows.u), copy_(rows.w, first, Keys) {}

    // `smem`: kSmemBytes, whose first byte is a multiple of 16; padding becomes zero for good. The
    // caller's next barrier comes before copies into it and before `factor`.
    KGEN_DEVICE void begin(void* smem) {
        // Shared memory: W ring[Stages][Chunk][Padded]; float score_a, score_b, carried
        // [Chunk][kStride], update[Chunk][kUpdateStride], all[Padded], u[Padded],
        // bonus[kGroups][Chunk]; int mild[kUnits].
        ring_ = static_cast<W*>(smem);
        score_a_ = reinterpret_cast<float*>(ring_ + Stages * kStage);
        score_b_ = score_a_ + kTile;
        carried_ = score_b_ + kTile;
        update_ = carried_ + kTile;
        all_ = update_ + Chunk * kUpdateStride;
        u_ = all_ + Padded;
        bonus_ = u_ + Padded;
        mild_ = reinterpret_cast<int*>(bonus_ + kGroups * Chunk);
        for (int key = thread_rank(); key < Padded; key += kThreads)
            u_[key] = key < Keys && row_u_ != nullptr ? to_float(row_u_[key]) : 0.0f;
        if constexpr (Padded > Keys)
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<W>(w_of_no_decay<Form>());
    }

    // Start the copies of the next chunk's w, as ChunkCopier::start; steps after the last one have decay 1.
    template <bool Whole>
    KGEN_DEVICE void start(int slot, int left) {
        constexpr bool kZerosKeep = Form == DecayForm::log;
        W* stage = ring_ + slot * kStage;
        copy_.template start<Whole, kZerosKeep>(stage, Padded, left);
        if constexpr (!Whole && !kZerosKeep)
            for (int i = left * Padded + thread_rank(); i < kStage; i += kThreads)
                stage[i] = from_float<W>(w_of_no_decay<Form>());
    }

    // Compute rows with decays and the bonus of the chunk in `slot`, from its rows a and b. By the whole block: a
    // barrier before it and one after.
    KGEN_DEVICE void factor(int slot, const T* a, const T* b) {
        const W* w = ring_ + slot * kStage;
#pragma unroll 1
        for (int unit = thread_rank() / kWarpSize; unit < kUnits; unit += Warps) {
            if (unit % 2 == 0) {
                factor_half<false>(unit, w, a, b);
            } else {
                factor_half<true>(unit, w, a, b);
            }
        }
    }

    KGEN_DEVICE const float* score_a() const { return score_a_; }
    KGEN_DEVICE const float* score_b() const { return score_b_; }
    KGEN_DEVICE const float* carried() const { return carried_; }
    KGEN_DEVICE const float* update() const { return update_; }

    // The chunk's product of all decays of a key, and of the next one.
    KGEN_DEVICE const float* all(int key) const { return all_ + key; }

    // sum_k a u b of a step: the score of the step itself.
    KGEN_DEVICE float bonus(int step) const {
        float sum = bonus_[step];
#pragma unroll
        for (int group = 1; group < kGroups; ++group) sum += bonus_[group * Chunk + step];
        return sum;
    }

    // Whether the factors of the scores are within range. The same for all threads.
    KGEN_DEVICE bool can_factor() const {
        bool mild = true;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) mild = mild && mild_[unit] != 0;
        return mild;
    }

    // The scores of the chunk in `slot` with running products: eight columns per warp at a time, four
    // lanes per column, each with keys of its own.
    template <class Inside>
    KGEN_DEVICE void exact_scores(int slot, const T* a, const T* b, typename Inside::Score* out,
                                  int out_stride, int plane) const {
        const W* w = ring_ + slot * kStage;
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int tile = thread_rank() / kWarpSize; tile < Chunk / 8; tile += Warps) {
            const int s = 8 * tile + lane.g;
            float decayed[Padded / 4];
#pragma unroll
            for (int i = 0; i < Padded / 4; ++i)
                decayed[i] = to_float(b[s * kRowStride + key_of(i, lane.q)]);
#pragma unroll 1
            for (int t = tile / 2 * 16; t < Chunk; ++t) {
                float sum = 0.0f;
                if (t > s) {
#pragma unroll
                    for (int i = 0; i < Padded / 4; ++i) {
                        const int key = key_of(i, lane.q);
                        sum = fma(to_float(a[t * kRowStride + key]), decayed[i], sum);
                        decayed[i] *= decay_of<Form>(to_float(w[t * Padded + key]));
                    }
                }
                sum = lanes_sum<4>(sum);
                if (t == s) sum = bonus(t);
                const float next = shfl_xor(sum, 4);  // of column s + 1, if s is even
                if (lane.q == 0 && lane.g % 2 == 0) {
                    const float two[2] = {sum, next};
                    Inside::store(out + t * out_stride + s, plane, two);
                }
            }
        }
    }

private:
    static KGEN_DEVICE int key_of(int i, int q) { return 8 * (i / 2) + 2 * q + i % 2; }

    // One key per lane, half of the steps: those after the middle of the chunk, or before it. Outwards,
    // from the middle to the chunk's end or its beginning, x is the tensor that a step's decay multiplies later: a
    // after the middle, b before it.
    template <bool Behind>
    KGEN_DEVICE void factor_half(int unit, const W* w, const T* a, const T* b) {
        constexpr int kFirst = Behind ? kHalf : kHalf - 1, kNext = Behind ? 1 : -1;
        constexpr int kStrideX = Behind ? kStride : kUpdateStride;
        constexpr int kStrideY = Behind ? kUpdateStride : kStride;
        const int key = unit / 2 * kWarpSize + lane_id();
        const bool there = Padded % kWarpSize == 0 || key < Padded;
        const int column = there ? key : Padded - 1;
        const T* x_rows = (Behind ? a : b) + column;
        const T* y_rows = (Behind ? b : a) + column;
        float* x_score = (Behind ? score_a_ : score_b_) + column;
        float* y_score = (Behind ? score_b_ : score_a_) + column;
        float* x_far = (Behind ? carried_ : update_) + column;
        float* y_far = (Behind ? update_ : carried_) + column;
        w += column;

        // 1. All decays of each half.
        DecayProduct<Form, Precise> own, other;
        float decays[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float of_step = to_float(w[(kFirst + i * kNext) * Padded]);
            own.times(of_step);
            decays[i] = decay_of<Form, Precise>(of_step);
            other.times(to_float(w[(kFirst - kNext - i * kNext) * Padded]));
        }
        const bool mild = kgen::all(own.can_factor(kMildest) && other.can_factor(kMildest));
        if (lane_id() == 0) mild_[unit] = mild ? 1 : 0;
        const float beyond = other.value() * (Behind ? kRound : kRoundUpdate);
        own.times(other);
        if (!Behind && there) all_[key] = own.value();

        // 2. Outwards: x and y of the scores, x of the state.
        const float u = there ? u_[column] : 0.0f;
        float bonus[kHalf];
        float product = 1.0f;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const int t = kFirst + i * kNext;
            const float x = to_float(x_rows[t * kRowStride]), y = to_float(y_rows[t * kRowStride]);
            bonus[i] = x * u * y;
            const float near = x * product;
            product *= decays[i];
            if (there) {
                x_score[t * kStride] = near * kRound;
                x_far[t * kStrideX] = near * beyond;
                y_score[t * kStride] = y * fast_reciprocal(product) * kRound;
            }
        }

        // 3. Inwards: y of the state.
        product = Behind ? kRoundUpdate : kRound;
#pragma unroll
        for (int i = kHalf - 1; i >= 0; --i) {
            const int t = kFirst + i * kNext;
            if (there) y_far[t * kStrideY] = to_float(y_rows[t * kRowStride]) * product;
            product *= decays[i];
        }

        const float sum = fold_lanes<kHalf>(bonus);
        constexpr int kLanes = kWarpSize / kHalf;  // that have the same sum
        if (lane_id() % kLanes == 0)
            bonus_[unit / 2 * Chunk + kFirst + lane_id() / kLanes * kNext] = sum;
    }

    const U* row_u_;
    ChunkCopier<W, Chunk, Keys, kCopy, kThreads> copy_;
    W* ring_;
    float *score_a_, *score_b_, *carried_, *update_, *all_, *u_, *bonus_;
    int* mild_;
};

}  // namespace kgen
