// gr, gw, gk, ga and gb of one chunk of 16 steps of wkv7 on fp64 tensor cores; any decay, gw in fp32.
//
// Keys are independent. With S the state before the chunk, G the gradient of the state after it, g = scale * gy and
// D(i, j) the product of the decays of steps i to j, per key:
//
//     gr_t = D(0, t) S g_t       + sum over s <= t of D(s+1, t) (k_s (v_s . g_t) + b_s (sa_s . g_t))
//     ga_t = D(0, t-1) S gsa_t   + sum over s < t of D(s+1, t-1) (k_s (v_s . gsa_t) + b_s (sa_s . gsa_t))
//     gk_s = D(s+1, 15) G v_s    + sum over t >= s of D(s+1, t) r_t (g_t . v_s)
//                                + sum over t > s of D(s+1, t-1) a_t (gsa_t . v_s)
//     gb_s: the same with sa_s
//
// The chunk is halved down to adjacent steps. In a block of 2, 4, 8 or 16 steps with the middle m, D(s+1, t) of an
// early step s and a late step t is D(s+1, m-1) D(m, t): no quotient is formed, so that any decay is exact, 0 and 1 as
// well. The sums that a late half has from earlier steps of a larger block are multiplied by the decays of the early
// half before the block's own pairs are added, so that one accumulator is enough. Adjacent and single steps use fma,
// all others mma.
//
// gw with respect to the logarithm of the decay of step u is a sum over all pairs of an earlier writer s < u and a
// reader t >= u (for ga t > u), and of S with readers, of writers with G, and of S with G. It is collected block by
// block: from each block whose late half contains u, what the early half gives to readers after the block; from each
// block whose early half contains u, what the late half reads from before the block; and at last what step u itself
// reads from before it. Only pairs that pass step u are added, each with the decay of u as a factor: nothing is
// subtracted, and gw scales with that decay.
//
// Precision: fp64; inputs, S, G, sa, gsa and decays of steps are exact. k gk and b gb may be many times gw, and pairs
// of steps nearly cancel; in fp32 the errors exceed the bound of gw (decision 0071).
//
// Layout: each warp has 16 keys. Each lane has keys g and g + 8 and the steps q and 4 + (q ^ 2) of each tile of 8
// steps, as columns 2q and 2q + 1 of accumulators: [tile][2 * key + step]. The four lanes of a key thus have one step
// each of steps 0 to 3, of 4 to 7, of 0, 1, 4, 5 and of 2, 3, 6, 7: operands of k = 4 at every level are a lane's own
// steps.
//
// Shared memory:
//
//     double rows[4][16][kPitch]     gy, gsa, v, sa; value features padded to 16; pairs of columns swizzled. Later
//                                    results in fp32 [5][16][kKeys + 8]
//     double scores[4][16][20]       rows late steps, columns early ones, and a zero; rk, rb, ak, ab
//     double keys[5][16][kKeys + 4]  r * decay, k, a, b, decay
//     void*  targets[6]              addresses of the results; steps and the first key
//     float  floats[2][16][kKeys + 4]  r, d log(decay) / dw
//
// Bank conflicts: none among loads of operands.
//
// Synchronisation: three block barriers, and one more where results are checked for NaN and Inf. If any is not finite,
// the block computes its gradients again, step by step.
//
// Config: see RowGradients.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/mma_f64.cuh"
#include "kgen/wkv7/existing_rows.cuh"
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

    enum Row { kOfGy, kOfGsa, kOfV, kOfSa };
    enum Score { kRK, kRB, kAK, kAB };
    enum Input { kInputRD, kInputK, kInputA, kInputB, kInputD, kInputs };
    enum Float { kFloatR, kFloatSlope, kFloats };
    static constexpr int kBlocks = ceil_div(kV, 16), kPitch = 16 * kBlocks;
    static constexpr int kRows = kSteps * kPitch, kScorePitch = 20, kMatrix = kSteps * kScorePitch;
    static constexpr int kZero = 16;  // of each matrix of scores, after its first row
    static constexpr int kKeyPitch = kKeys + 4, kKeyRows = kSteps * kKeyPitch;
    static constexpr int kResultPitch = kKeys + 8, kResult = kSteps * kResultPitch;
    static constexpr int kRowDoubles = max(4 * kRows, kInputs * kResult / 2);
    static constexpr int kStateVec = min(Config::kVec, 4);

public:
    static constexpr int kBytes = 8 * (kRowDoubles + 4 * kMatrix + kInputs * kKeyRows + 6) + 4 * kFloats * kKeyRows;

    // Returns whether all gradients are finite. If not, the caller has to compute the steps one by one.
    KGEN_DEVICE bool operator()() const {
        const int warp = thread_rank() / kWarpSize, key = 16 * warp;  // of the block
        // 1. The chunk's inputs.
        RawRows rows[kRowTurns];
        RawKeys keys[kKeyTurns];
        Four of_s[2], of_g[2];
#pragma unroll
        for (int n = 0; n < kRowTurns; ++n) load_rows(rows[n], thread_rank() + n * kThreads);
#pragma unroll
        for (int n = 0; n < kKeyTurns; ++n) load_keys(keys[n], thread_rank() + n * kThreads);
        load_states(of_s, of_g, first_key + key, 0);
        if (thread_rank() == 0) put_targets();
#pragma unroll
        for (int n = 0; n < kRowTurns; ++n) put_rows(rows[n], thread_rank() + n * kThreads);
#pragma unroll
        for (int n = 0; n < kKeyTurns; ++n) put_keys(keys[n], thread_rank() + n * kThreads);
        sync_block();

        // 2. Products with the states; scores.
        Steps by_r = {}, by_a = {}, by_k = {}, by_b = {};
        double both[2] = {};  // sum_v S * G
        multiply_states(of_s, of_g, first_key + key, by_r, by_a, by_k, by_b, both);
        put_scores(warp);
        sync_block();

        // 3. Gradients. Barriers keep the compiler from loading operands before they are needed.
        Steps of_w;
        const Places of(key);
        float nonfinite = 0.0f;
        sum_states(of, by_r, by_a, by_k, by_b, both, of_w);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            sync_warp();
            const Decays decays(of, tile);
            sum_halves(decays, of, tile, by_r[tile], by_a[tile], by_k[tile], by_b[tile], of_w[tile]);
            sync_warp();
            sum_fours(decays, of, tile, by_r[tile], by_a[tile], by_k[tile], by_b[tile], of_w[tile]);
            sync_warp();
            nonfinite += sum_neighbours(of, tile, by_r[tile], by_a[tile], by_k[tile], by_b[tile], of_w[tile]);
            put_results(key, tile, by_r[tile], by_a[tile], by_k[tile], by_b[tile], of_w[tile]);
        }

        // 4. Results.
        sync_block();
        write_results();
        if (block_any_nonfinite<kWarps>(nonfinite)) return false;
        return true;
    }

private:
    static KGEN_DEVICE double* rows_of(int tensor) { return dynamic_smem<double>() + tensor * kRows; }
    static KGEN_DEVICE double* scores_of(int which) {
        return dynamic_smem<double>() + kRowDoubles + which * kMatrix;
    }
    static KGEN_DEVICE double* keys_of(int input) { return scores_of(4) + input * kKeyRows; }
    static KGEN_DEVICE float* floats_of(int which) {
        return reinterpret_cast<float*>(keys_of(kInputs) + 6) + which * kKeyRows;
    }

    // A lane's step i of a tile, and the step in column `column`.
    static KGEN_DEVICE int own_step(int i) { return i == 0 ? mma_lane().q : 4 + (mma_lane().q ^ 2); }
    static KGEN_DEVICE int step_of(int column) { return column % 2 == 0 ? column / 2 : 4 + (column / 2 ^ 2); }
    static KGEN_DEVICE bool is_odd() { return (mma_lane().q & 1) != 0; }
    // Whether element i of a lane is in the late pair of its four steps.
    static KGEN_DEVICE bool is_late(int i) { return ((mma_lane().q & 2) != 0) == (i == 0); }

    // Offsets of a lane's steps in inputs: of its own steps, and of the adjacent step of each.
    struct Places {
        int own[2], next[2];

        KGEN_DEVICE explicit Places(int key) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                own[i] = own_step(i) * kKeyPitch + key + mma_lane().g;
                next[i] = (own_step(i) ^ 1) * kKeyPitch + key + mma_lane().g;
            }
        }
        // Element [tile][2 * half + i] of an input.
        KGEN_DEVICE double operator()(int input, int tile, int x) const {
            return keys_of(input)[own[x % 2] + 8 * tile * kKeyPitch + x / 2 * 8];
        }
        KGEN_DEVICE double neighbour(int input, int tile, int x) const {
            return keys_of(input)[next[x % 2] + 8 * tile * kKeyPitch + x / 2 * 8];
        }
        KGEN_DEVICE float single(int input, int tile, int x) const {
            return floats_of(input)[own[x % 2] + 8 * tile * kKeyPitch + x / 2 * 8];
        }
    };

    // Columns of rows: in steps 4 to 7 of a tile the two pairs of a run of four are exchanged, so that a quarter of a
    // warp reads all banks.
    static KGEN_DEVICE int row_place(int step, int column) { return step * kPitch + (column ^ (step & 4) / 2); }

    // A thread's inputs as they are in memory, so that all loads are in flight together.
    struct RawRows {
        Vec<Value, 4> gy, v;
        Four gsa, sa;
    };
    struct RawKeys {
        Vec<Value, 4> r, k, a, b;
        Vec<W, 4> w;
    };
    static constexpr int kRowQuads = kPitch / 4, kKeyQuads = kKeys / 4;
    static constexpr int kRowTurns = ceil_div(kSteps * kRowQuads, kThreads);
    static constexpr int kKeyTurns = ceil_div(kSteps * kKeyQuads, kThreads);

    // i: number of a quad of columns, counted step by step. Beyond the last step, the last step is loaded.
    KGEN_DEVICE void load_rows(RawRows& to, int i) const {
        const int step = min(i / kRowQuads, steps - 1), column = i % kRowQuads * 4;
        to.gy = load_existing<Config::kVec, kV>(gy.first + step * gy.stride, column);
        to.gsa = load_existing<Config::kVec, kV>(gsa.first + step * gsa.stride, column);
        to.v = load_existing<Config::kVec, kV>(v.first + step * v.stride, column);
        to.sa = load_existing<Config::kVec, kV>(sa.first + step * sa.stride, column);
    }
    KGEN_DEVICE void put_rows(const RawRows& x, int i) const {
        const int step = i / kRowQuads, column = i % kRowQuads * 4, width = step < steps ? kV - column : 0;
        if (kSteps * kRowQuads % kThreads != 0 && step >= kSteps) return;
        put_row(kOfGy, x.gy, step, column, width, scale);
        put_row(kOfGsa, x.gsa, step, column, width, 1.0);
        put_row(kOfV, x.v, step, column, width, 1.0);
        put_row(kOfSa, x.sa, step, column, width, 1.0);
    }
    template <class T>
    static KGEN_DEVICE void put_row(int tensor, const Vec<T, 4>& from, int step, int column, int width,
                                    double factor) {
        const Four x = existing(from, width);
        double* to = rows_of(tensor);
        *reinterpret_cast<Pair*>(to + row_place(step, column)) = {factor * x[0], factor * x[1]};
        *reinterpret_cast<Pair*>(to + row_place(step, column + 2)) = {factor * x[2], factor * x[3]};
    }
    // The first `width` elements, then zeros.
    template <class T>
    static KGEN_DEVICE Four existing(const Vec<T, 4>& from, int width) {
        Four x;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = i < width ? to_float(from[i]) : 0.0f;
        return x;
    }

    // Loads four keys of a step.
    KGEN_DEVICE void load_keys(RawKeys& to, int i) const {
        const int step = min(i / kKeyQuads, steps - 1), key = first_key + i % kKeyQuads * 4;
        to.r = load_existing<Config::kVec, kK>(r.first + step * r.stride, key);
        to.k = load_existing<Config::kVec, kK>(k.first + step * k.stride, key);
        to.a = load_existing<Config::kVec, kK>(a.first + step * a.stride, key);
        to.b = load_existing<Config::kVec, kK>(b.first + step * b.stride, key);
        to.w = load_existing<Config::kVec, kK>(w.first + step * w.stride, key);
    }
    KGEN_DEVICE void put_keys(const RawKeys& raw, int i) const {
        const int step = i / kKeyQuads, key = i % kKeyQuads * 4, to = step * kKeyPitch + key;
        const int width = step < steps ? kK - first_key - key : 0;
        if (kSteps * kKeyQuads % kThreads != 0 && step >= kSteps) return;
        const Four of_r = existing(raw.r, width), of_w = existing(raw.w, width);
        float d[4], slope[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const LogDecaySlope of_step = decay_and_log_slope(of_w[x]);
            d[x] = x < width ? of_step.decay : 1.0f;
            slope[x] = of_step.slope;
        }
        put_four(kInputD, to, {{d[0], d[1], d[2], d[3]}}, {{1.0f, 1.0f, 1.0f, 1.0f}});
        put_four(kInputRD, to, of_r, {{d[0], d[1], d[2], d[3]}});
        put_four(kInputK, to, existing(raw.k, width), {{1.0f, 1.0f, 1.0f, 1.0f}});
        put_four(kInputA, to, existing(raw.a, width), {{1.0f, 1.0f, 1.0f, 1.0f}});
        put_four(kInputB, to, existing(raw.b, width), {{1.0f, 1.0f, 1.0f, 1.0f}});
        *reinterpret_cast<Four*>(floats_of(kFloatR) + to) = of_r;
        *reinterpret_cast<Four*>(floats_of(kFloatSlope) + to) = {{slope[0], slope[1], slope[2], slope[3]}};
    }
    static KGEN_DEVICE void put_four(int input, int to, const Four& x, const Four& y) {
        double product[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) product[i] = static_cast<double>(x[i]) * y[i];
        Pair* const pairs = reinterpret_cast<Pair*>(keys_of(input) + to);
        pairs[0] = {product[0], product[1]};
        pairs[1] = {product[2], product[3]};
    }
    // d, and d log(d) / dw, which is finite if w is.
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
    // of_s, of_g: the first block of S and G.
    KGEN_DEVICE void multiply_states(Four (&of_s)[2], Four (&of_g)[2], int key, Steps& by_r, Steps& by_a, Steps& by_k,
                                     Steps& by_b, double (&both)[2]) const {
#pragma unroll 1
        for (int block = 0; block < kBlocks; ++block) {
            double x[8], y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool there = kV % 16 == 0 || 16 * block + 4 * mma_lane().q + i / 2 < kV;
                x[i] = there ? of_s[i % 2][i / 2] : 0.0f;
                y[i] = there ? of_g[i % 2][i / 2] : 0.0f;
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
    // Loads four value features of keys g and g + 8 of both states.
    KGEN_DEVICE void load_states(Four (&of_s)[2], Four (&of_g)[2], int key, int block) const {
        const MmaLane lane = mma_lane();
        const int column = 16 * block + 4 * lane.q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = min(key + lane.g + 8 * half, kK - 1);
            of_s[half] = load_existing<kStateVec, kV>(state + row * kV, column);
            of_g[half] = load_existing<kStateVec, kV>(gradient + row * kV, column);
        }
    }
    // Loads the lane's part of a tile of 8 steps of a tensor, 16 value features.
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

    // Computes the matrices of scores, one at a time per warp; of eight warps, two share a matrix.
    static KGEN_DEVICE void put_scores(int warp) {
        constexpr int kTiles = kWarps == 8 ? 1 : 2;
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int which = warp % 4; which < 4; which += min(kWarps, 4)) {
            const int first = kWarps == 8 ? warp / 4 : 0;
            Tile sums[kTiles] = {};
            if (lane_id() == 0) scores_of(which)[kZero] = 0.0;
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

    // The offset of a lane's element of operand B in a matrix of scores.
    static KGEN_DEVICE int score_place(int late, int early) { return late * kScorePitch + early; }

    // Products of the decays of a tile, within blocks of four steps: of the steps before a step, of those after it, of
    // all four, and of the other pair.
    struct Decays {
        Tile before, behind, four, others;

        KGEN_DEVICE Decays(const Places& of, int tile) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const double other = of.neighbour(kInputD, tile, x), pair = of(kInputD, tile, x) * other;
                others[x] = shfl_xor(pair, 2);
                const double both = other * others[x];
                const double earlier = is_late(x % 2) ? others[x] : 1.0, later = is_late(x % 2) ? 1.0 : others[x];
                const double earlier_too = is_late(x % 2) ? both : other, later_too = is_late(x % 2) ? other : both;
                before[x] = is_odd() ? earlier_too : earlier;
                behind[x] = is_odd() ? later : later_too;
                four[x] = pair * others[x];
            }
        }
        // The product over all eight steps.
        KGEN_DEVICE double eight(int half) const { return four[2 * half] * four[2 * half + 1]; }
    };

    // Sum over the four lanes of a key, which gw of the other half of a block gets.
    static KGEN_DEVICE double lanes_all(double x) {
        x += shfl_xor(x, 1);
        return x + shfl_xor(x, 2);
    }

    // Adds S * G itself, what S gives to the late tile and G to the early one, and the pairs of steps of both tiles.
    static KGEN_DEVICE void sum_states(const Places& of, Steps& by_r, Steps& by_a, Steps& by_k, Steps& by_b,
                                       const double (&both)[2], Steps& of_w) {
        TwoK r_late, a_late, k_early, b_early;
        double of_tile[2][2];  // decays of eight steps, [tile][key]
        {
            const Decays second(of, 1);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int operand = x % 2 * 2 + x / 2;
                const double before = x % 2 == 1 ? second.before[x] * second.four[x - 1] : second.before[x];
                r_late[operand] = before * of(kInputRD, 1, x);
                a_late[operand] = before * of(kInputA, 1, x);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) of_tile[1][half] = second.eight(half);
        }
        sync_warp();
        {
            const Decays first(of, 0);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int operand = x % 2 * 2 + x / 2;
                const double behind = x % 2 == 0 ? first.behind[x] * first.four[x + 1] : first.behind[x];
                k_early[operand] = behind * of(kInputK, 0, x);
                b_early[operand] = behind * of(kInputB, 0, x);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) of_tile[0][half] = first.eight(half);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const double of_early = of_tile[0][half], of_late = of_tile[1][half];
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
        const int row = step_of(mma_lane().g);
        const double* const reads = scores_of(0) + score_place(8 + row, own_step(0));
        const double* const writes = scores_of(0) + score_place(8 + own_step(0), row);
        const int further = own_step(1) - own_step(0);
        double of_score[4][2];
        sync_warp();
#pragma unroll
        for (int i = 0; i < 8; ++i) of_score[i / 2][i % 2] = reads[i / 2 * kMatrix + i % 2 * further];
        mma_f64(by_r[1], k_early, of_score[kRK]);
        mma_f64(by_r[1], b_early, of_score[kRB]);
        mma_f64(by_a[1], k_early, of_score[kAK]);
        mma_f64(by_a[1], b_early, of_score[kAB]);
        sync_warp();
#pragma unroll
        for (int i = 0; i < 8; ++i) of_score[i / 2][i % 2] = writes[i / 2 * kMatrix + i % 2 * further * kScorePitch];
        mma_f64(by_k[0], r_late, of_score[kRK]);
        mma_f64(by_k[0], a_late, of_score[kAK]);
        mma_f64(by_b[0], r_late, of_score[kRB]);
        mma_f64(by_b[0], a_late, of_score[kAB]);
    }

    // Adds the pairs of a level: late steps get what early steps write, by the scores at `reads`, and early steps what
    // late steps read, by the scores at `writes`. A lane whose pair of steps belongs to another level reads zeros.
    static KGEN_DEVICE void multiply_pairs(Tile& by_r, Tile& by_a, Tile& by_k, Tile& by_b, const OneK& r_late,
                                           const OneK& a_late, const OneK& k_early, const OneK& b_early,
                                           int reads, bool is_reader, int writes, bool is_writer) {
        const double* const from = scores_of(0) + (is_reader ? reads : kZero);
        const double* const to = scores_of(0) + (is_writer ? writes : kZero);
        multiply_score(by_r, k_early, from[kRK * kMatrix]);
        multiply_score(by_k, r_late, to[kRK * kMatrix]);
        multiply_score(by_a, k_early, from[kAK * kMatrix]);
        multiply_score(by_b, r_late, to[kRB * kMatrix]);
        multiply_score(by_r, b_early, from[kRB * kMatrix]);
        multiply_score(by_k, a_late, to[kAK * kMatrix]);
        multiply_score(by_a, b_early, from[kAB * kMatrix]);
        multiply_score(by_b, a_late, to[kAB * kMatrix]);
    }
    static KGEN_DEVICE void multiply_score(Tile& sums, const OneK& x, double y) {
        const double only[1] = {y};
        mma_f64(sums, x, only);
    }

    // Adds the same sums and pairs for the two halves of a tile.
    static KGEN_DEVICE void sum_halves(const Decays& decays, const Places& of, int tile, Tile& by_r, Tile& by_a,
                                       Tile& by_k, Tile& by_b, Tile& of_w) {
        OneK r_late, a_late, k_early, b_early;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = 2 * half, second = first + 1;
            const double of_early = decays.four[first], of_late = decays.four[second];
            r_late[half] = decays.before[second] * of(kInputRD, tile, second);
            a_late[half] = decays.before[second] * of(kInputA, tile, second);
            k_early[half] = decays.behind[first] * of(kInputK, tile, first);
            b_early[half] = decays.behind[first] * of(kInputB, tile, first);
            by_r[second] *= of_early;
            by_a[second] *= of_early;
            by_k[first] *= of_late;
            by_b[first] *= of_late;
            of_w[first] += lanes_all(r_late[half] * by_r[second] + a_late[half] * by_a[second]);
            of_w[second] += lanes_all(k_early[half] * by_k[first] + b_early[half] * by_b[first]);
        }
        const int row = step_of(mma_lane().g);
        const bool column_is_late = mma_lane().g % 2 == 1;
        multiply_pairs(by_r, by_a, by_k, by_b, r_late, a_late, k_early, b_early,
                       score_place(8 * tile + row, 8 * tile + own_step(0)), column_is_late,
                       score_place(8 * tile + own_step(1), 8 * tile + row), !column_is_late);
    }

    // The same for the two pairs of each four steps of a tile. A lane has a step of an early pair and one of a late
    // pair.
    static KGEN_DEVICE void sum_fours(const Decays& decays, const Places& of, int tile, Tile& by_r, Tile& by_a,
                                      Tile& by_k, Tile& by_b, Tile& of_w) {
        OneK r_late, a_late, k_early, b_early;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int half = x / 2;
            const bool late = is_late(x % 2);
            const double other = of.neighbour(kInputD, tile, x);
            const double first = of(late ? kInputRD : kInputK, tile, x), second = of(late ? kInputA : kInputB, tile, x);
            const double factor = late ? decays.before[x] : decays.behind[x];
            // The step of a late pair is a reader (r, a), the step of an early pair a writer (k, b).
            double by_first = late ? by_r[x] : by_k[x], by_second = late ? by_a[x] : by_b[x];
            double sum = factor * (first * by_first + second * by_second);
            sum += shfl_xor(sum, 1);
            of_w[x] += shfl_xor(sum, 2);
            by_first *= decays.others[x];
            by_second *= decays.others[x];
            by_r[x] = late ? by_first : by_r[x];
            by_a[x] = late ? by_second : by_a[x];
            by_k[x] = late ? by_k[x] : by_first;
            by_b[x] = late ? by_b[x] : by_second;
            const double in_pair = is_odd() == late ? other : 1.0;
            const double first_in_pair = in_pair * first, second_in_pair = in_pair * second;
            if (x % 2 == 0) {
                r_late[half] = k_early[half] = first_in_pair;
                a_late[half] = b_early[half] = second_in_pair;
            } else {
                r_late[half] = late ? first_in_pair : r_late[half];
                a_late[half] = late ? second_in_pair : a_late[half];
                k_early[half] = late ? k_early[half] : first_in_pair;
                b_early[half] = late ? b_early[half] : second_in_pair;
            }
        }
        const MmaLane lane = mma_lane();
        // Steps 0, 1, 4, 5 and 6, 7, 2, 3 by lane.
        const int row = step_of(lane.g), early = lane.q + (lane.q & 2), late = lane.q + 6 - 3 * (lane.q & 2);
        const bool is_reader = (row & 2) != 0 && (row & 4) == (early & 4);
        const bool is_writer = (row & 2) == 0 && (row & 4) == (late & 4);
        multiply_pairs(by_r, by_a, by_k, by_b, r_late, a_late, k_early, b_early,
                       score_place(8 * tile + row, 8 * tile + early), is_reader,
                       score_place(8 * tile + late, 8 * tile + row), is_writer);
    }

    // Adds the pairs of adjacent steps and of single steps, and completes gw with respect to w. Odd steps read what
    // even steps write. Returns NaN if a result is not finite, else 0.
    static KGEN_DEVICE float sum_neighbours(const Places& of, int tile, Tile& by_r, Tile& by_a, Tile& by_k, Tile& by_b,
                                            Tile& of_w) {
        float nonfinite = 0.0f;
        const bool odd = is_odd();
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const double d = of(kInputD, tile, x), other = of.neighbour(kInputD, tile, x);
            double by_first = odd ? by_r[x] : by_k[x], by_second = odd ? by_a[x] : by_b[x];
            // gw of the adjacent step: an odd reader of what lies before the pair, or an even writer for what lies
            // after it.
            const double sum = of(odd ? kInputRD : kInputK, tile, x) * by_first +
                               of(odd ? kInputA : kInputB, tile, x) * by_second;
            double its_w = of_w[x] + shfl_xor(other * sum, 1);
            const int step = 8 * tile + own_step(x % 2);
            const double* const pair = scores_of(0) + score_place(step | 1, step & ~1);
            const double first = of.neighbour(odd ? kInputK : kInputRD, tile, x);
            const double second = of.neighbour(odd ? kInputB : kInputA, tile, x);
            by_first = other * by_first + (first * pair[kRK * kMatrix] + second * pair[(odd ? kRB : kAK) * kMatrix]);
            by_second = other * by_second + (first * pair[(odd ? kAK : kRB) * kMatrix] + second * pair[kAB * kMatrix]);
            double its_r = odd ? by_first : by_r[x];
            const double its_k = odd ? by_k[x] : by_first, its_b = odd ? by_b[x] : by_second;
            by_a[x] = odd ? by_second : by_a[x];
            // The step itself.
            const double* const own = scores_of(0) + score_place(step, step);
            const double from_r = of.single(kFloatR, tile, x), rk = own[kRK * kMatrix], rb = own[kRB * kMatrix];
            its_w += of(kInputRD, tile, x) * its_r;
            of_w[x] = its_w * of.single(kFloatSlope, tile, x);
            by_r[x] = d * its_r + (of(kInputK, tile, x) * rk + of(kInputB, tile, x) * rb);
            by_k[x] = its_k + from_r * rk;
            by_b[x] = its_b + from_r * rb;
            const float all = static_cast<float>((by_r[x] + by_a[x]) + (by_k[x] + by_b[x]));
            nonfinite = fma(all, 0.0f, fma(static_cast<float>(of_w[x]), 0.0f, nonfinite));
        }
        return nonfinite;
    }

    // Stores the results in place of the rows.
    static KGEN_DEVICE void put_results(int key, int tile, const Tile& by_r, const Tile& by_a, const Tile& by_k,
                                        const Tile& by_b, const Tile& of_w) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            float* const to =
                results_of(0) + (8 * tile + own_step(x % 2)) * kResultPitch + key + mma_lane().g + x / 2 * 8;
            to[kInputRD * kResult] = static_cast<float>(by_r[x]);
            to[kInputK * kResult] = static_cast<float>(by_k[x]);
            to[kInputA * kResult] = static_cast<float>(by_a[x]);
            to[kInputB * kResult] = static_cast<float>(by_b[x]);
            to[kInputD * kResult] = static_cast<float>(of_w[x]);
        }
    }
    static KGEN_DEVICE float* results_of(int input) { return dynamic_smem<float>() + input * kResult; }
    // Stores the addresses of the results in shared memory: in registers they would be spilled.
    KGEN_DEVICE void put_targets() const {
        target<Value>(kInputRD) = gr.first;
        target<Value>(kInputK) = gk.first;
        target<Value>(kInputA) = ga.first;
        target<Value>(kInputB) = gb.first;
        target<W>(kInputD) = gw.first;
        extent(0) = steps;
        extent(1) = first_key;
    }
    static KGEN_DEVICE int& extent(int which) { return reinterpret_cast<int*>(keys_of(kInputs) + 5)[which]; }
    template <class T>
    static KGEN_DEVICE T*& target(int input) {
        return reinterpret_cast<T**>(keys_of(kInputs))[input];
    }
    KGEN_DEVICE void write_results() const {
        write<Value>(kInputRD, gr.stride_t);
        write<Value>(kInputK, gk.stride_t);
        write<Value>(kInputA, ga.stride_t);
        write<Value>(kInputB, gb.stride_t);
        write<W>(kInputD, gw.stride_t);
    }
    template <class T>
    KGEN_DEVICE void write(int input, i64 stride) const {
        // A thread has the same keys of several steps.
        constexpr int kEach = min(Config::kVec, 4), kPerRow = kKeys / kEach, kApart = kThreads / kPerRow;
        static_assert(kSteps % kApart == 0, "all threads have as many steps");
        const int first = thread_rank() / kPerRow, key = thread_rank() % kPerRow * kEach, left = extent(0) - first;
        T* to = target<T>(input) + first * stride + (extent(1) + key);
        const float* from = results_of(input) + first * kResultPitch + key;
        const bool there = extent(1) + key < kK;
#pragma unroll
        for (int n = 0; n < kSteps / kApart; ++n, to += kApart * stride) {
            const auto some = *reinterpret_cast<const Vec<float, kEach>*>(from + n * kApart * kResultPitch);
            if (!there || n * kApart >= left) continue;
            float x[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) x[i] = some[i];
            store_vec(to, from_floats<T>(x));
        }
    }
};

}  // namespace kgen::wkv7
