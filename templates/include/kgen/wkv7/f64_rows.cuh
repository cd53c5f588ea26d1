// gr, gw, gk, ga and gb of one chunk of 16 steps of wkv7 on fp64 tensor cores; any decay, gw in fp32.
//
// Keys are independent. With S the state before the chunk, G the gradient of the state after it, g = scale * gy and
// D(i, j) the product of the decays of steps i to j, per key:
//
//     gr_t = D(0, t) S g_t       + sum over s <= t of D(s+1, t) (k_s (v_s . g_t) + b_s (sa_s . g_t))
//     ga_t = D(0, t-1) S gsa_t   + sum over s < t of D(s+1, t-1) (k_s (v_s . gsa_t) + b_s (sa_s . gsa_t))
//     gk_s = D(s+1, 15) G v_s    + sum over t >= s of D(s+1, t) r_t (g_t . v_s) + over t > s of D(s+1, t-1) a_t (gsa_t . v_s)
//     gb_s: the same with sa_s
//
// The chunk is halved down to neighbours. In a block of 2, 4, 8 or 16 steps with the middle m, D(s+1, t) of an early step
// s and a late step t is D(s+1, m-1) D(m, t): no quotient is formed, so that any decay is exact, 0 and 1 as well. What
// earlier steps of a larger block give a late half is multiplied by the decays of the early half before the block's own
// pairs are added, so that one accumulator is enough. Neighbours and single steps take fma, all others mma.
//
// gw by the logarithm of the decay of step u is a sum over all pairs of an earlier writer s < u and a reader t >= u (for
// ga t > u), of S and readers, of writers and G, and of S and G. In each block whose late half has u it gets what the
// early half gives to readers behind the block, in each one whose early half has u what the late half reads from before
// the block, and at last what step u itself reads from before it. Only pairs that pass step u are added, each with the
// decay of u as a factor: nothing is subtracted, and gw is relative to that decay.
//
// Precision: fp64; inputs, S, G, sa, gsa and decays of steps are exact. k gk and b gb may be many times gw, and pairs of
// steps nearly cancel; in fp32 the errors exceed the bound of gw (decision 0071).
//
// Layout: a warp has 16 keys. A lane has keys g and g + 8 and the steps q and 4 + (q ^ 2) of each tile of 8 steps, as
// columns 2q and 2q + 1 of accumulators: [tile][2 * key + step]. So the four lanes of a key have one step each of steps
// 0 to 3, of 4 to 7, of 0, 1, 4, 5 and of 2, 3, 6, 7: operands of k = 4 at every level are a lane's own steps.
//
// Shared memory:
//
//     double rows[4][16][kPitch]     gy, gsa, v, sa; value features padded to 16; pairs of columns swizzled
//     double scores[4][16][20]       rows late steps, columns early ones; rk, rb, ak, ab
//     float  keys[6][16][kKeys + 8]  r, k, a, b, decay, d log(decay) / dw; results replace r, k, a, b, decay
//
// Bank conflicts: none among loads of operands.
//
// Synchronisation: three block barriers, and one more where results are looked at for NaN and Inf: if any is not
// finite, the block computes its gradients again, step by step.
//
// Config: RowGradients.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/mma_f64.cuh"
#include "kgen/wkv7/prepared_rows.cuh"

namespace kgen::wkv7 {

template <class Config>
class F64Rows : public RowGradients<Config, float> {
    using Value = typename Config::Value;
    using W = typename Config::W;

public:
    using Base = RowGradients<Config, float>;
    using Base::kKeys, Base::kThreads, Base::step_by_step;
    using Index = u32;
    static constexpr int kSteps = 16;
    static constexpr bool kOpaqueRepeat = true;

private:
    using Base::first_key, Base::steps, Base::gy, Base::r, Base::k, Base::v, Base::a, Base::b, Base::w, Base::sa,
        Base::gsa, Base::state, Base::gradient, Base::gr, Base::gk, Base::ga, Base::gb, Base::gw, Base::scale;
    using Base::kK, Base::kV, Base::kWarps;
    using Four = Vec<float, 4>;
    using Tile = double[4];   // of a tile of 8 steps, [2 * key + step]
    using Steps = Tile[2];    // of the chunk
    using OneK = double[2];   // operand A of four steps, [key]
    using TwoK = double[4];   // of eight steps, [2 * step + key]
    struct alignas(16) Pair {
        double x, y;
    };
    static_assert(kWarps == 1 || kWarps == 2 || kWarps == 4 || kWarps == 8, "scores are shared out to warps");

    static constexpr int kBlocks = ceil_div(kV, 16), kPitch = 16 * kBlocks;
    static constexpr int kRows = kSteps * kPitch, kScorePitch = 20, kMatrix = kSteps * kScorePitch;
    static constexpr int kKeyPitch = kKeys + 8, kKeyRows = kSteps * kKeyPitch;
    enum Row { kOfGy, kOfGsa, kOfV, kOfSa };
    enum Score { kRK, kRB, kAK, kAB };
    enum Input { kInputR, kInputK, kInputA, kInputB, kInputD, kInputSlope, kInputs };
    // L2 fetches 256 bytes of the states at a time.
    static constexpr int kStateVec = min(Config::kVec, 4);

public:
    static constexpr int kBytes = 8 * (4 * kRows + 4 * kMatrix) + 4 * kInputs * kKeyRows;

    // Returns whether all is computed; else the caller has to take the steps one by one.
    KGEN_DEVICE bool operator()() const {
        const int warp = thread_rank() / kWarpSize, key = 16 * warp;  // of the block
        // 1. The chunk's inputs.
        put_rows();
        put_keys();
        sync_block();

        // 2. Products with the states; scores.
        Steps by_r = {}, by_a = {}, by_k = {}, by_b = {};
        double both[2] = {};  // sum_v S * G
        multiply_states(first_key + key, by_r, by_a, by_k, by_b, both);
        put_scores(warp);
        sync_block();

        // 3. Gradients.
        Steps of_w;
        const Decays decays(key);
        sync_warp();
        sum_states(decays, key, by_r, by_a, by_k, by_b, both, of_w);
        sync_warp();
        sum_halves(decays, key, by_r, by_a, by_k, by_b, of_w);
        sync_warp();
        sum_pairs(key, by_r, by_a, by_k, by_b, of_w);
        sync_warp();
        const float nonfinite = sum_neighbours(key, by_r, by_a, by_k, by_b, of_w);

        // 4. Results.
        sync_warp();  // all lanes have read what the results replace
        put_results(key, by_r, by_a, by_k, by_b, of_w);
        sync_block();
        write_results();
        return !block_any_nonfinite<kWarps>(nonfinite);
    }

private:
    static KGEN_DEVICE double* rows_of(int tensor) { return dynamic_smem<double>() + tensor * kRows; }
    static KGEN_DEVICE double* scores_of(int which) { return rows_of(4) + which * kMatrix; }
    static KGEN_DEVICE float* keys_of(int input) {
        return reinterpret_cast<float*>(scores_of(4)) + input * kKeyRows;
    }

    // A lane's steps of a tile, and the step in column `column`.
    static KGEN_DEVICE int own_step(int i) { return i == 0 ? mma_lane().q : 4 + (mma_lane().q ^ 2); }
    static KGEN_DEVICE int step_of(int column) { return column % 2 == 0 ? column / 2 : 4 + (column / 2 ^ 2); }
    static KGEN_DEVICE bool is_odd() { return (mma_lane().q & 1) != 0; }
    // Whether element i of a lane is in the late pair of its four steps.
    static KGEN_DEVICE bool is_late(int i) { return ((mma_lane().q & 2) != 0) == (i == 0); }

    // Element [tile][2 * half + i] of an input, of keys from `key` on.
    static KGEN_DEVICE int place(int key, int tile, int x) {
        return (8 * tile + own_step(x % 2)) * kKeyPitch + key + mma_lane().g + x / 2 * 8;
    }
    static KGEN_DEVICE int neighbours_place(int key, int tile, int x) {
        return (8 * tile + (own_step(x % 2) ^ 1)) * kKeyPitch + key + mma_lane().g + x / 2 * 8;
    }

    // Columns of rows: pairs of a run of four change places in steps 4 to 7 of a tile, so that a quarter of a warp reads
    // all banks.
    static KGEN_DEVICE int row_place(int step, int column) { return step * kPitch + (column ^ (step & 4) / 2); }

    KGEN_DEVICE void put_rows() const {
        constexpr int kQuads = kPitch / 4;
        for (int i = thread_rank(); i < kSteps * kQuads; i += kThreads) {
            const int step = i / kQuads, column = i % kQuads * 4, width = step < steps ? kV - column : 0;
            put_row(kOfGy, gy, step, column, width, scale);
            put_row(kOfGsa, gsa, step, column, width, 1.0);
            put_row(kOfV, v, step, column, width, 1.0);
            put_row(kOfSa, sa, step, column, width, 1.0);
        }
    }
    template <class T>
    KGEN_DEVICE void put_row(int tensor, const StepPointer<T>& from, int step, int column, int width,
                             double factor) const {
        const Four x = load_four<Config::kVec>(from.first + step * from.stride + column, width);
        double* to = rows_of(tensor);
        *reinterpret_cast<Pair*>(to + row_place(step, column)) = {factor * x[0], factor * x[1]};
        *reinterpret_cast<Pair*>(to + row_place(step, column + 2)) = {factor * x[2], factor * x[3]};
    }

    KGEN_DEVICE void put_keys() const {
        for (int i = thread_rank(); i < kSteps * kKeys; i += kThreads) {
            const int step = i / kKeys, key = first_key + i % kKeys, to = step * kKeyPitch + i % kKeys;
            const bool there = step < steps && key < kK;
            keys_of(kInputR)[to] = at(r, step, key, there);
            keys_of(kInputK)[to] = at(k, step, key, there);
            keys_of(kInputA)[to] = at(a, step, key, there);
            keys_of(kInputB)[to] = at(b, step, key, there);
            const LogDecaySlope of_step = decay_and_log_slope(at(w, step, key, there));
            keys_of(kInputD)[to] = there ? of_step.decay : 1.0f;
            keys_of(kInputSlope)[to] = of_step.slope;
        }
    }
    template <class T>
    static KGEN_DEVICE float at(const StepPointer<T>& rows, int step, int key, bool there) {
        return there ? to_float(rows.first[step * rows.stride + key]) : 0.0f;
    }
    // d, and d log(d) / dw: a finite number where w is one.
    struct LogDecaySlope {
        float decay, slope;
    };
    static KGEN_DEVICE LogDecaySlope decay_and_log_slope(float w) {
        if constexpr (Config::kForm == DecayForm::clamp) {
            const float e = exp(-abs(w)), large = fast_reciprocal(1.0f + e), small = e * large;
            return {exp(-kClamp * (w < 0.0f ? small : large)), -kClamp * small * large};
        } else {
            const float slope = Config::kForm == DecayForm::raw ? -exp(min(w, 80.0f)) : 1.0f;
            return {decay_of<Config::kForm>(w), slope};
        }
    }

    // by_r = S g, by_a = S gsa, by_k = G v, by_b = G sa.
    KGEN_DEVICE void multiply_states(int key, Steps& by_r, Steps& by_a, Steps& by_k, Steps& by_b,
                                     double (&both)[2]) const {
        Four of_s[2], of_g[2];
        load_states(of_s, of_g, key, 0);
#pragma unroll 1
        for (int block = 0; block < kBlocks; ++block) {
            double x[8], y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = of_s[i % 2][i / 2];
                y[i] = of_g[i % 2][i / 2];
            }
            if (block + 1 < kBlocks) load_states(of_s, of_g, key, block + 1);
#pragma unroll
            for (int i = 0; i < 8; ++i) both[i % 2] += x[i] * y[i];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                multiply_row(by_r[tile], x, kOfGy, tile, block);
                multiply_row(by_a[tile], x, kOfGsa, tile, block);
                multiply_row(by_k[tile], y, kOfV, tile, block);
                multiply_row(by_b[tile], y, kOfSa, tile, block);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) both[half] += shfl_xor(both[half], lanes);
    }
    // Four value features of keys g and g + 8 of both states.
    KGEN_DEVICE void load_states(Four (&of_s)[2], Four (&of_g)[2], int key, int block) const {
        const MmaLane lane = mma_lane();
        const int column = 16 * block + 4 * lane.q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = key + lane.g + 8 * half, width = row < kK ? kV - column : 0;
            of_s[half] = load_four<kStateVec>(state + row * kV + column, width);
            of_g[half] = load_four<kStateVec>(gradient + row * kV + column, width);
        }
    }
    // The lane's part of a tile of 8 steps of a row, 16 value features.
    static KGEN_DEVICE void load_row(double (&found)[4], int tensor, int tile, int block) {
        const MmaLane lane = mma_lane();
        const int step = 8 * tile + step_of(lane.g), column = 16 * block + 4 * lane.q;
        const double* from = rows_of(tensor);
        const Pair first = *reinterpret_cast<const Pair*>(from + row_place(step, column));
        const Pair second = *reinterpret_cast<const Pair*>(from + row_place(step, column + 2));
        found[0] = first.x, found[1] = first.y, found[2] = second.x, found[3] = second.y;
    }
    static KGEN_DEVICE void multiply_row(Tile& sums, const double (&x)[8], int tensor, int tile, int block) {
        double y[4];
        load_row(y, tensor, tile, block);
        mma_f64(sums, x, y);
    }

    // A matrix of scores by a warp; with eight warps two share one.
    static KGEN_DEVICE void put_scores(int warp) {
        constexpr int kTiles = kWarps == 8 ? 1 : 2;
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int which = warp % 4; which < 4; which += min(kWarps, 4)) {
            const int first = kWarps == 8 ? warp / 4 : 0;
            Tile sums[kTiles] = {};
#pragma unroll 1
            for (int block = 0; block < kBlocks; ++block) {
                double late[2][4], x[8];
                load_row(late[0], kOfGy + which / 2, 0, block);
                load_row(late[1], kOfGy + which / 2, 1, block);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] = late[i % 2][i / 2];
#pragma unroll
                for (int n = 0; n < kTiles; ++n) multiply_row(sums[n], x, kOfV + which % 2, first + n, block);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    score(which, i / 2 * 8 + step_of(lane.g), 8 * (first + n) + own_step(i % 2)) = sums[n][i];
        }
    }
    static KGEN_DEVICE double& score(int which, int late, int early) {
        return scores_of(which)[late * kScorePitch + early];
    }

    // Products of decays in blocks of four steps: those before a step, those after it, all; all of eight steps.
    struct Decays {
        Steps before, behind, four;
        double eight[2][2];  // [tile][key]

        KGEN_DEVICE explicit Decays(int key) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const double own = keys_of(kInputD)[place(key, tile, x)];
                    const double other = keys_of(kInputD)[neighbours_place(key, tile, x)];
                    const double pair = own * other, others = shfl_xor(pair, 2);
                    before[tile][x] = (is_odd() ? other : 1.0) * (is_late(x % 2) ? others : 1.0);
                    behind[tile][x] = (is_odd() ? 1.0 : other) * (is_late(x % 2) ? 1.0 : others);
                    four[tile][x] = pair * others;
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) eight[tile][half] = four[tile][2 * half] * four[tile][2 * half + 1];
            }
        }
    };

    // Inputs with the decays in a block of four steps: before the step for readers, after it for writers.
    static KGEN_DEVICE double read_by_r(const Decays& decays, int key, int tile, int x) {
        const int from = place(key, tile, x);
        return decays.before[tile][x] * (static_cast<double>(keys_of(kInputR)[from]) * keys_of(kInputD)[from]);
    }
    static KGEN_DEVICE double read_by_a(const Decays& decays, int key, int tile, int x) {
        return decays.before[tile][x] * keys_of(kInputA)[place(key, tile, x)];
    }
    static KGEN_DEVICE double written(const Decays& decays, int input, int key, int tile, int x) {
        return decays.behind[tile][x] * keys_of(input)[place(key, tile, x)];
    }

    // Sums of gw for the other half of a block, over the four lanes of a key.
    static KGEN_DEVICE double lanes_all(double x) {
        x += shfl_xor(x, 1);
        return x + shfl_xor(x, 2);
    }

    // S and G themselves; what S gives to the late tile and G to the early one; pairs of both tiles.
    static KGEN_DEVICE void sum_states(const Decays& decays, int key, Steps& by_r, Steps& by_a, Steps& by_k,
                                       Steps& by_b, const double (&both)[2], Steps& of_w) {
        TwoK r_late, a_late, k_early, b_early;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int i = x % 2, half = x / 2, operand = 2 * i + half;
            const double earlier = i == 1 ? decays.four[1][x - 1] : 1.0;
            const double later = i == 0 ? decays.four[0][x + 1] : 1.0;
            r_late[operand] = earlier * read_by_r(decays, key, 1, x);
            a_late[operand] = earlier * read_by_a(decays, key, 1, x);
            k_early[operand] = later * written(decays, kInputK, key, 0, x);
            b_early[operand] = later * written(decays, kInputB, key, 0, x);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const double of_early = decays.eight[0][half], of_late = decays.eight[1][half];
            double early = 0.0, late = 0.0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int x = 2 * half + i, operand = 2 * i + half;
                by_r[1][x] *= of_early;
                by_a[1][x] *= of_early;
                by_k[0][x] *= of_late;
                by_b[0][x] *= of_late;
                early += k_early[operand] * by_k[0][x] + b_early[operand] * by_b[0][x];
                late += r_late[operand] * by_r[1][x] + a_late[operand] * by_a[1][x];
            }
            early = lanes_all(early);
            late = lanes_all(late);
            const double all = both[half] * (of_early * of_late);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                of_w[0][2 * half + i] = all + late;
                of_w[1][2 * half + i] = all + early;
            }
        }
        const MmaLane lane = mma_lane();
        const int row = step_of(lane.g);
        double rk[2], rb[2], ak[2], ab[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rk[i] = score(kRK, 8 + row, own_step(i));
            rb[i] = score(kRB, 8 + row, own_step(i));
            ak[i] = score(kAK, 8 + row, own_step(i));
            ab[i] = score(kAB, 8 + row, own_step(i));
        }
        mma_f64(by_r[1], k_early, rk);
        mma_f64(by_r[1], b_early, rb);
        mma_f64(by_a[1], k_early, ak);
        mma_f64(by_a[1], b_early, ab);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rk[i] = score(kRK, 8 + own_step(i), row);
            rb[i] = score(kRB, 8 + own_step(i), row);
            ak[i] = score(kAK, 8 + own_step(i), row);
            ab[i] = score(kAB, 8 + own_step(i), row);
        }
        mma_f64(by_k[0], r_late, rk);
        mma_f64(by_k[0], a_late, ak);
        mma_f64(by_b[0], r_late, rb);
        mma_f64(by_b[0], a_late, ab);
    }

    // The same for both halves of each tile.
    static KGEN_DEVICE void sum_halves(const Decays& decays, int key, Steps& by_r, Steps& by_a, Steps& by_k,
                                       Steps& by_b, Steps& of_w) {
        const MmaLane lane = mma_lane();
        const int row = step_of(lane.g);
        const bool column_is_late = lane.g % 2 == 1;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            sync_warp();
            OneK r_late, a_late, k_early, b_early;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = 2 * half, second = first + 1;
                const double of_early = decays.four[tile][first], of_late = decays.four[tile][second];
                r_late[half] = read_by_r(decays, key, tile, second);
                a_late[half] = read_by_a(decays, key, tile, second);
                k_early[half] = written(decays, kInputK, key, tile, first);
                b_early[half] = written(decays, kInputB, key, tile, first);
                by_r[tile][second] *= of_early;
                by_a[tile][second] *= of_early;
                by_k[tile][first] *= of_late;
                by_b[tile][first] *= of_late;
                of_w[tile][first] += lanes_all(r_late[half] * by_r[tile][second] + a_late[half] * by_a[tile][second]);
                of_w[tile][second] += lanes_all(k_early[half] * by_k[tile][first] + b_early[half] * by_b[tile][first]);
            }
            const int late = 8 * tile + row, early = 8 * tile + own_step(0);
            multiply_masked(by_r[tile], k_early, score(kRK, late, early), column_is_late);
            multiply_masked(by_r[tile], b_early, score(kRB, late, early), column_is_late);
            multiply_masked(by_a[tile], k_early, score(kAK, late, early), column_is_late);
            multiply_masked(by_a[tile], b_early, score(kAB, late, early), column_is_late);
            const int reader = 8 * tile + own_step(1), writer = 8 * tile + row;
            multiply_masked(by_k[tile], r_late, score(kRK, reader, writer), !column_is_late);
            multiply_masked(by_k[tile], a_late, score(kAK, reader, writer), !column_is_late);
            multiply_masked(by_b[tile], r_late, score(kRB, reader, writer), !column_is_late);
            multiply_masked(by_b[tile], a_late, score(kAB, reader, writer), !column_is_late);
            // What is behind a four's end or before its begin, of both pairs; then pairs in it.
            sum_fours(decays, key, tile, by_r, by_a, by_k, by_b, of_w);
        }
    }
    static KGEN_DEVICE void multiply_masked(Tile& sums, const OneK& x, double y, bool there) {
        const double only[1] = {there ? y : 0.0};
        mma_f64(sums, x, only);
    }

    // The same for both pairs of each four steps of a tile.
    static KGEN_DEVICE void sum_fours(const Decays& decays, int key, int tile, Steps& by_r, Steps& by_a, Steps& by_k,
                                      Steps& by_b, Steps& of_w) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const bool late = is_late(x % 2);
            const double readers = read_by_r(decays, key, tile, x) * by_r[tile][x] +
                                   read_by_a(decays, key, tile, x) * by_a[tile][x];
            const double writers = written(decays, kInputK, key, tile, x) * by_k[tile][x] +
                                   written(decays, kInputB, key, tile, x) * by_b[tile][x];
            double sum = late ? readers : writers;
            sum += shfl_xor(sum, 1);
            of_w[tile][x] += shfl_xor(sum, 2);
        }
        sync_warp();
        // Each lane has one step of an early pair and one of a late pair.
        OneK r_late, a_late, k_early, b_early;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int x = 2 * half + i, at_step = place(key, tile, x);
                const double own = keys_of(kInputD)[at_step], other = keys_of(kInputD)[neighbours_place(key, tile, x)];
                const double others = shfl_xor(own * other, 2);  // of the other pair
                const bool late = is_late(i);
                by_r[tile][x] *= late ? others : 1.0;
                by_a[tile][x] *= late ? others : 1.0;
                by_k[tile][x] *= late ? 1.0 : others;
                by_b[tile][x] *= late ? 1.0 : others;
                const double before = is_odd() ? other : 1.0, behind = is_odd() ? 1.0 : other;
                if (late) {
                    r_late[half] = before * (static_cast<double>(keys_of(kInputR)[at_step]) * own);
                    a_late[half] = before * keys_of(kInputA)[at_step];
                } else {
                    k_early[half] = behind * keys_of(kInputK)[at_step];
                    b_early[half] = behind * keys_of(kInputB)[at_step];
                }
            }
        }
        const int row = step_of(lane.g), q = lane.q;
        // Steps 0, 1, 4, 5 and 6, 7, 2, 3 by lane.
        const int early = q < 2 ? q : q + 2, late = q < 2 ? q + 6 : q;
        const bool reads = (row & 2) != 0 && (row & 4) == (early & 4), writes = (row & 2) == 0 && (row & 4) == (late & 4);
        const int base = 8 * tile;
        multiply_masked(by_r[tile], k_early, score(kRK, base + row, base + early), reads);
        multiply_masked(by_r[tile], b_early, score(kRB, base + row, base + early), reads);
        multiply_masked(by_a[tile], k_early, score(kAK, base + row, base + early), reads);
        multiply_masked(by_a[tile], b_early, score(kAB, base + row, base + early), reads);
        multiply_masked(by_k[tile], r_late, score(kRK, base + late, base + row), writes);
        multiply_masked(by_k[tile], a_late, score(kAK, base + late, base + row), writes);
        multiply_masked(by_b[tile], r_late, score(kRB, base + late, base + row), writes);
        multiply_masked(by_b[tile], a_late, score(kAB, base + late, base + row), writes);
    }

    // What lies outside of a pair, for its other step.
    static KGEN_DEVICE void sum_pairs(int key, const Steps& by_r, const Steps& by_a, const Steps& by_k,
                                      const Steps& by_b, Steps& of_w) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int own = place(key, tile, x);
                const double d = keys_of(kInputD)[own], other = keys_of(kInputD)[neighbours_place(key, tile, x)];
                // Odd: the readers; even: the writers. Both pass the other step of the pair.
                const double first = keys_of(is_odd() ? kInputR : kInputK)[own];
                const double second = keys_of(is_odd() ? kInputA : kInputB)[own];
                const double by_first = is_odd() ? d * by_r[tile][x] : by_k[tile][x];
                const double by_second = is_odd() ? by_a[tile][x] : by_b[tile][x];
                const double sum = first * by_first + second * by_second;
                of_w[tile][x] += shfl_xor(other * sum, 1);
            }
    }

    // Neighbours of a pair, steps themselves, and gw by w. Returns NaN if a result is not finite, else 0.
    static KGEN_DEVICE float sum_neighbours(int key, Steps& by_r, Steps& by_a, Steps& by_k, Steps& by_b,
                                            Steps& of_w) {
        float nonfinite = 0.0f;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int own = place(key, tile, x), next = neighbours_place(key, tile, x);
                const int step = 8 * tile + own_step(x % 2), late = step | 1, early = step & ~1;
                const double d = keys_of(kInputD)[own], other = keys_of(kInputD)[next];
                const double rk = score(kRK, late, early), rb = score(kRB, late, early);
                const double ak = score(kAK, late, early), ab = score(kAB, late, early);
                if (is_odd()) {
                    const double k_early = keys_of(kInputK)[next], b_early = keys_of(kInputB)[next];
                    by_r[tile][x] = other * by_r[tile][x] + (k_early * rk + b_early * rb);
                    by_a[tile][x] = other * by_a[tile][x] + (k_early * ak + b_early * ab);
                } else {
                    const double r_late = static_cast<double>(keys_of(kInputR)[next]) * other;
                    const double a_late = keys_of(kInputA)[next];
                    by_k[tile][x] = other * by_k[tile][x] + (r_late * rk + a_late * ak);
                    by_b[tile][x] = other * by_b[tile][x] + (r_late * rb + a_late * ab);
                }
                const double its_r = keys_of(kInputR)[own], its_k = keys_of(kInputK)[own], its_b = keys_of(kInputB)[own];
                const double its_rk = score(kRK, step, step), its_rb = score(kRB, step, step);
                by_r[tile][x] *= d;
                of_w[tile][x] = keys_of(kInputSlope)[own] * (of_w[tile][x] + its_r * by_r[tile][x]);
                by_r[tile][x] += its_k * its_rk + its_b * its_rb;
                by_k[tile][x] += its_r * its_rk;
                by_b[tile][x] += its_r * its_rb;
                const float sum = static_cast<float>((by_r[tile][x] + by_a[tile][x]) + (by_k[tile][x] + by_b[tile][x]));
                nonfinite = fma(sum, 0.0f, fma(static_cast<float>(of_w[tile][x]), 0.0f, nonfinite));
            }
        return nonfinite;
    }

    KGEN_DEVICE void put_results(int key, const Steps& by_r, const Steps& by_a, const Steps& by_k, const Steps& by_b,
                                 const Steps& of_w) const {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int to = place(key, tile, x);
                keys_of(kInputR)[to] = static_cast<float>(by_r[tile][x]);
                keys_of(kInputK)[to] = static_cast<float>(by_k[tile][x]);
                keys_of(kInputA)[to] = static_cast<float>(by_a[tile][x]);
                keys_of(kInputB)[to] = static_cast<float>(by_b[tile][x]);
                keys_of(kInputD)[to] = static_cast<float>(of_w[tile][x]);
            }
    }
    KGEN_DEVICE void write_results() const {
        write(gr, kInputR);
        write(gk, kInputK);
        write(ga, kInputA);
        write(gb, kInputB);
        write(gw, kInputD);
    }
    template <class T>
    KGEN_DEVICE void write(const Rows<T>& to, int input) const {
        constexpr int kEach = min(Config::kVec, 4), kPerRow = kKeys / kEach;
        for (int i = thread_rank(); i < kSteps * kPerRow; i += kThreads) {
            const int step = i / kPerRow, key = i % kPerRow * kEach;
            if (step >= steps || first_key + key >= kK) continue;
            Vec<T, kEach> some;
#pragma unroll
            for (int x = 0; x < kEach; ++x) some[x] = from_float<T>(keys_of(input)[step * kKeyPitch + key + x]);
            store_vec(to.at(step) + first_key + key, some);
        }
    }
};

}  // namespace kgen::wkv7
