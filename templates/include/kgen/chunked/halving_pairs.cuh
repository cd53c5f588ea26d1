// Rows with decays of 16 steps for halving_decay.cuh; each lane has two keys and four steps.
//
// A warp has 16 keys of all 16 steps: lane 8 * quarter + pair has the keys 2 * pair, 2 * pair + 1 and the steps
// 4 * quarter to 4 * quarter + 3. Loads and stores move two keys. Each exponential is computed once, for a and b, and
// the decays of the other quarters come by two shuffles.
//
// Within a quarter, `before[i]` is the product of the decays of its steps before step i, and `after[i]` of those after
// it. All rows are a * before or b * after, times the decays of the whole quarters between step and middle, or step and
// state.
//
// Layout: keys are in their order. The rows of a level are ordered so that the two quarters of half a warp write
// different banks and that eight early rows, or eight late ones, lie in different banks:
//
//     level of 8 steps   row t
//     level of 4 steps   quarters 0, 1, 3, 2
//     level of 2 steps   the early pairs of quarters 0, 2, 1, 3, then their late pairs
//
// b' of the state is stored by keys: row key % 8 has the steps of quarters 0 and 2 of every eighth key (fp32: 0 and 1),
// row 8 + key % 8 those of quarters 1 and 3 (fp32: 2 and 3).
//
// Synchronisation: none.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/decay_form.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// Where rows of the levels are, for products of eight early rows with eight late ones. level 0, 1, 2: 8, 4, 2 steps.
struct PairedRows {
    // The row of early step number `index`, and of late step number `index`.
    static KGEN_DEVICE int early(int level, int index) {
        return level == 1 ? index + (index & 4) * 2 : index;
    }
    static KGEN_DEVICE int late(int level, int index) { return index + (level == 1 ? 4 : 8); }

    // The step of 16 that is early step number `index`.
    static KGEN_DEVICE int early_step(int level, int index) {
        if (level == 0) return index;
        if (level == 1) return (index & 3) | (index & 4) << 1;
        return (index & 5) | (index & 2) << 2;
    }
};

// The decays of a chunk of 16 steps: its rows as copied are loaded into registers, then decayed and stored.
//
// Rounded: rows are rounded to TF32 when they are stored. Precise: b' of the state is not, and exponentials are as
// accurate as fp32. RowStride, WStride, Stride: elements between rows of a and b, of w, and of rows with decays.
template <class T, DecayForm Form, bool PerStep, bool Rounded, bool Precise, int RowStride,
          int WStride, int Stride>
class KeyPairs {
    static constexpr int kSteps = 4;  // of a lane
    static constexpr float kRound = Rounded ? kNearTf32 : 1.0f;
    static constexpr float kRoundUpdate = Precise ? 1.0f : kNearTf32;
    // Whether b' of the state is a product of the rounded rows of the levels.
    static constexpr bool kShared = !Rounded || !Precise;

    using Pair = Vec<float, 2>;
    using Product = DecayProduct<Form, Precise, sizeof(T) == 4>;

public:
    static constexpr int kKeys = 16;  // of a warp

    // First key of this lane among those of a warp, and its first step.
    static KGEN_DEVICE int lane_key() { return lane_id() % 8 * 2; }
    static KGEN_DEVICE int lane_step() { return lane_id() / 8 * kSteps; }

    // Loads the rows that begin at step 0 and the warp's first key. w: the row of all steps unless PerStep.
    template <class W>
    KGEN_DEVICE void load(const W* w, const T* a, const T* b) {
        const int key = lane_key(), step = lane_step();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (PerStep || i == 0) {
                const auto two =
                    *reinterpret_cast<const Vec<W, 2>*>(w + (PerStep ? (step + i) * WStride : 0) + key);
                w_[i] = {{to_float(two[0]), to_float(two[1])}};
            }
            a_[i] = *reinterpret_cast<const Vec<T, 2>*>(a + (step + i) * RowStride + key);
            b_[i] = *reinterpret_cast<const Vec<T, 2>*>(b + (step + i) * RowStride + key);
        }
    }

    // Stores the rows with decays. `left` steps exist. All pointers except `bonus` belong to the warp's first key.
    //
    //     u                               the bonus
    //     carried, levels[3], update      rows, `tile` floats apart
    //     all                             the product of all decays, at the place of a key in its eight: all_place()
    //     bonus                           of the warp's keys: sum a u b of each of 16 steps
    KGEN_DEVICE void store(const float* u, int left, float* carried, float* levels, int tile,
                           float* update, float* all, float* bonus) const {
        const int key = lane_key(), step = lane_step(), quarter = step / kSteps;
        const bool odd = quarter % 2 != 0, late = quarter >= 2;
        float a_rows[2][kSteps], b_rows[2][kSteps];             // a * before, b * after
        float own[2][kSteps];                                   // b' of the state, within the quarter
        float near_late[2], near_early[2];                      // of the level of 2 steps
        float before[2], after[2], middle[2], sums[kSteps] = {};
        typename Product::Exponent whole[2];
        const Pair bonus_of = *reinterpret_cast<const Pair*>(u + key);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            // 1. Decays of the steps, and their product over the quarter and over the other quarters.
            float d[kSteps];
            Product mine;
            decays(n, step, left, d, mine);
            const Product beside = mine.of_lane_xor(8);
            Product half = mine;
            half.times(beside);
            const Product other = half.of_lane_xor(16);
            half.times(other);
            whole[n] = half.exponent();
            const float next = beside.near_value(), far = other.near_value();
            before[n] = odd ? next : 1.0f;
            after[n] = odd ? 1.0f : next;
            middle[n] = late ? before[n] : after[n];
            if (late) {
                before[n] *= far;
            } else {
                after[n] *= far;
            }

            // 2. Rows within the quarter. The first a and the last b have no decay and need no rounding.
            float a[kSteps], b[kSteps];
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                a[i] = to_float(a_[i][n]);
                b[i] = to_float(b_[i][n]);
                sums[i] = fma(a[i] * b[i], bonus_of[n], sums[i]);
            }
            near_early[n] = b[0] * (d[1] * kRound);
            near_late[n] = a[3] * (d[2] * kRound);
            float product = kRound;
            a_rows[n][0] = a[0];
#pragma unroll
            for (int i = 1; i < kSteps; ++i) {
                product *= d[i - 1];
                a_rows[n][i] = a[i] * product;
            }
            product = kShared ? kRound : 1.0f;
            b_rows[n][kSteps - 1] = own[n][kSteps - 1] = b[kSteps - 1];
#pragma unroll
            for (int i = kSteps - 2; i >= 0; --i) {
                product *= d[i + 1];
                own[n][i] = b[i] * product;
                b_rows[n][i] = kShared ? own[n][i] : own[n][i] * kRound;
            }
        }

        // 3. The bonus of each step, and the product of all decays: even quarters store it for a key, odd ones for the
        // next key.
        const float sum = fold_pairs(sums);
        if (lane_id() % 2 == 0) bonus[lane_id() / 2] = sum;
        const auto first = whole[0], second = whole[1];
        const float product = Product::value_of(odd ? second : first);
        if (!late) all[all_place(key) + (odd ? 2 : 0)] = product;

        // 4. Rows for reading: of the state, and of the levels where these steps are late or early.
        float* place = carried + step * Stride + key;
        float* gray = levels + tile + (quarter ^ quarter >> 1) * kSteps * Stride + key;
        float* pairs = levels + 2 * tile + ((quarter & 1) * 4 + (quarter & 2)) * Stride + key;
        float* eight = levels + step * Stride + key;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            Pair state, four, both;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float a = a_rows[n][i], b = b_rows[n][i];
                state[n] = a * (i == 0 ? before[n] * kRound : before[n]);
                four[n] = odd ? a : b;
                const bool plain_a = i == 0, plain_b = i == kSteps - 1;  // rows not rounded yet
                float factor = middle[n];
                if (plain_a) factor = late ? middle[n] * kRound : middle[n];
                if (plain_b) factor = late ? middle[n] : middle[n] * kRound;
                both[n] = (late ? a : b) * factor;
            }
            *reinterpret_cast<Pair*>(place + i * Stride) = state;
            *reinterpret_cast<Pair*>(gray + i * Stride) = four;
            *reinterpret_cast<Pair*>(eight + i * Stride) = both;
        }
        *reinterpret_cast<Pair*>(pairs) = {{near_early[0], near_early[1]}};
        *reinterpret_cast<Pair*>(pairs + Stride) = {{to_float(b_[1][0]), to_float(b_[1][1])}};
        *reinterpret_cast<Pair*>(pairs + 8 * Stride) = {{to_float(a_[2][0]), to_float(a_[2][1])}};
        *reinterpret_cast<Pair*>(pairs + 9 * Stride) = {{near_late[0], near_late[1]}};

        // 5. b' of the state, by keys.
        constexpr bool kInOrder = sizeof(T) == 4;
        const bool lower = kInOrder ? late : odd, right = kInOrder ? odd : late;
        float* by_key = update + (key % 8 + (lower ? 8 : 0)) * Stride + key / 8 * 8 + (right ? kSteps : 0);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            // Rows that are shared with the levels are rounded already, except the last one.
            const float rest = kRound == 1.0f || !kShared ? after[n] * kRoundUpdate : after[n];
            const float last = after[n] * kRoundUpdate;
            *reinterpret_cast<Vec<float, 4>*>(by_key + n * Stride) = {
                {own[n][0] * rest, own[n][1] * rest, own[n][2] * rest, own[n][3] * last}};
        }
    }

    // Where the product of all decays of a key is: the keys q and q + 4 of eight are neighbours.
    static KGEN_DEVICE int all_place(int key) {
        return (key & ~7) | (key & 3) << 1 | (key >> 2 & 1);
    }

private:
    KGEN_DEVICE void decays(int n, int step, int left, float (&d)[kSteps], Product& product) const {
        const float same = w_[0][n];
        const float decay = PerStep ? 0.0f : decay_of<Form, Precise>(same);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if constexpr (PerStep) {
                d[i] = decay_of<Form, Precise>(w_[i][n]);
                product.times(w_[i][n]);
            } else {  // steps that do not exist keep the state
                d[i] = step + i < left ? decay : 1.0f;
                if (step + i < left) product.times(same);
            }
        }
    }

    // Sums of the four values over eight lanes: lanes 2 * i and 2 * i + 1 get that of values[i].
    static KGEN_DEVICE float fold_pairs(float (&values)[kSteps]) {
        float two[2];
        const bool upper = (lane_id() & 4) != 0, high = (lane_id() & 2) != 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // selects of numbers: a selected address would put the array into local memory
            const float first = values[i], second = values[i + 2];
            two[i] = (upper ? second : first) + shfl_xor(upper ? first : second, 4);
        }
        const float first = two[0], second = two[1];
        const float one = (high ? second : first) + shfl_xor(high ? first : second, 2);
        return one + shfl_xor(one, 1);
    }

    Pair w_[kSteps];
    Vec<T, 2> a_[kSteps], b_[kSteps];
};

}  // namespace kgen
