// gr, gw, gk, ga and gb of one chunk of 16 steps of wkv7 on tensor cores, any decay from 0 to 1; tensors of 16 bits.
//
// Keys are independent. With P_t the product of the chunk's decays up to step t, S the state before the chunk, G the
// gradient of the state after it, g = scale * gy, and sums over steps s < t < u of the chunk:
//
//     gr_t = P_t S g_t         + sum_{s <= t} P_t / P_s (k_s (v_s . g_t) + b_s (sa_s . g_t))
//     ga_t = P_{t-1} S gsa_t   + sum_{s < t} P_{t-1} / P_s (k_s (v_s . gsa_t) + b_s (sa_s . gsa_t))
//     gk_t = (P_15 / P_t) G v_t  + sum_{u >= t} P_u / P_t r_u (g_u . v_t)
//                                + sum_{u > t} P_{u-1} / P_t a_u (gsa_u . v_t)          gb_t: with sa_t for v_t
//
// Sums are computed by halving (row_scores.cuh): blocks of 16, 8, 4 and 2 steps have a late and an early half; a pair
// of steps belongs to the level where they are in different halves. Its factor is the product of the decays from the
// middle to the late step, times the product of those from after the early step to the middle: no quotient is formed,
// and all factors are at most 1.
//
// gw of a step is the sum over the pairs that the step lies between. At each level k_s gk_s + b_s gb_s counts for the
// steps after s in the early half, a_u ga_u for the steps before u in the late half, and r_u gr_u for the latter and
// for u itself. The parts of S and G count likewise within the chunk, and P_15 sum_v S * G counts for all steps.
// `ahead` and `back` carry these sums down the levels, from half to half. No difference of sums is formed, so strong
// decays lose nothing.
//
// Precision: bf16 inputs have operands rounded to TF32; fp16 inputs (kPrecise) use 3xTF32, with short chains of
// products that are added in fp32. Both lose more than gradients in fp32 may: b removes from a state what k wrote into
// it, and the sums of both are larger than their difference.
//
// Layout: each warp has 16 keys. Each lane has keys g and g + 8 and the steps of slots 2q, 2q + 1 (half 0) and 8 + 2q,
// 9 + 2q (half 1): [half][2 * key + step], the order of accumulators and of operands A of the levels.
//
// Shared memory: RowScoreBuffers; Value inputs[warps][5][16][16]: r, k, a, b, w of a warp, later its results.
//
// Synchronisation: three block barriers, and one more where results are checked for NaN and Inf. If any is not finite,
// the block computes its gradients again, step by step.
//
// Config and State: see RowGradients.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/halved_steps.cuh"
#include "kgen/wkv7/row_gradients.cuh"
#include "kgen/wkv7/row_scores.cuh"

namespace kgen::wkv7 {

template <class Config, class State = float>
class ChunkRows : public RowGradients<Config, State> {
    using Value = typename Config::Value;
    using W = typename Config::W;

public:
    using Base = RowGradients<Config, State>;
    using Base::kKeys, Base::kThreads, Base::step_by_step;
    using Index = i64;
    static constexpr int kSteps = 16;
    static constexpr bool kOpaqueRepeat = false;
    static constexpr bool kPrecise = !kCoarse<Value>;

protected:  // ChunkRowsLoop uses these too
    using Base::first_key, Base::steps, Base::gy, Base::r, Base::k, Base::v, Base::a, Base::b, Base::w, Base::sa,
        Base::gsa, Base::state, Base::gradient, Base::gr, Base::gk, Base::ga, Base::gb, Base::gw, Base::scale;
    using Base::kForm, Base::kK, Base::kV, Base::kWarps, Base::write;
    using Scores = RowScores<Value, kV, kWarps, Config::kVec, kPrecise>;
    using Buffers = typename Scores::Buffers;
    using Copier = TileCopier<Value, Config::kVec>;
    using CopierW = TileCopier<W, Config::kVec>;
    static constexpr int kTile = Copier::kElements;
    // Blocks of 16 value features that are loaded at a time. Four at a time would spill with low terms; without them
    // they would spill on sm_120 if there are more than four blocks.
    static constexpr int kGroup = Buffers::kBlocks <= (kPrecise ? 2 : 4) ? Buffers::kBlocks : 2;
    using Half = float[4];         // of a lane: [2 * key + step]
    using Steps = float[2][4];     // both halves
    using Words = u32[4];          // of two steps: [2 * half + key]
    using Four = Vec<float, 4>;

public:
    static constexpr int kBytes = Buffers::kBytes + kWarps * 5 * 2 * kTile;

    // Returns whether all gradients are finite or have been computed again. With kPrecise the caller has to compute the
    // steps one by one if it returns false: here, the addresses of all inputs would stay in registers, and others would
    // spill.
    KGEN_DEVICE bool operator()() const {
        const int warp = thread_rank() / kWarpSize, key = first_key + 16 * warp;
        const Buffers buffers{dynamic_smem<float>()};
        u16* inputs = reinterpret_cast<u16*>(buffers.first) + Buffers::kBytes / 2 + warp * 5 * kTile;
        const Scores scores{buffers, warp};

        // 1. Copies of the keys' inputs, the first rows of the states, and the rows of value features.
        Copier(r, key).start(inputs, steps, kK - key);
        Copier(k, key).start(inputs + kTile, steps, kK - key);
        Copier(a, key).start(inputs + 2 * kTile, steps, kK - key);
        Copier(b, key).start(inputs + 3 * kTile, steps, kK - key);
        CopierW(w, key).start(inputs + 4 * kTile, steps, kK - key);
        cp_async_commit();
        Vec<float, 4> rows_s[kGroup][2], rows_g[kGroup][2];
        load_group(rows_s, state, key, 0);
        load_group(rows_g, gradient, key, 0);
        scores.put_values(gy, gsa, v, sa, steps);
        cp_async_wait<0>();
        sync_block();

        const float nonfinite = compute(scores, inputs, rows_s, rows_g, key);
        if constexpr (kPrecise) return !block_any_nonfinite<kWarps>(nonfinite);
        if (block_any_nonfinite<kWarps>(nonfinite)) step_by_step();
        return true;
    }

protected:
    // Computes the results of a chunk from the rows of value features in shared memory, the keys' inputs, and the
    // states' first rows, which it overwrites. Returns NaN if a result is not finite. It has two block barriers.
    KGEN_DEVICE float compute(const Scores& scores, u16* inputs, Vec<float, 4> (&rows_s)[kGroup][2],
                              Vec<float, 4> (&rows_g)[kGroup][2], int key) const {
        const Buffers buffers{dynamic_smem<float>()};
        // 1. Scores; products with the states.
        scores.put_scores(scale);
        Steps by_r = {}, by_a = {}, by_k = {}, by_b = {};
        float both[2] = {};  // sum_v S * G
#pragma unroll 1
        for (int group = 0; group < Buffers::kBlocks; group += kGroup) {
            multiply_states(scores, rows_s, rows_g, group, by_r, by_a, by_k, by_b, both);
            if (group + kGroup >= Buffers::kBlocks) break;
            load_group(rows_s, state, key, group + kGroup);
            load_group(rows_g, gradient, key, group + kGroup);
        }
        sync_block();
        scores.put_parts();
        sync_block();

        // 2. Decays over blocks, levels, results.
        Lane lane;
        lane.read(inputs, steps);
        lane.add_states(by_r, by_a, by_k, by_b, both, scale);
        lane.add_diagonal(buffers.scores());
        lane.template add_level<8>(buffers);
        lane.template descend<4>();
        lane.template add_level<4>(buffers);
        lane.template descend<2>();
        lane.template add_level<2>(buffers);
        lane.template descend<1>();
        lane.template add_level<1>(buffers);
        lane.finish(inputs + 4 * kTile);
        sync_warp();  // all lanes have read the inputs
        float nonfinite = 0.0f;
        put(inputs, lane.gr, nonfinite);
        put(inputs + kTile, lane.gk, nonfinite);
        put(inputs + 2 * kTile, lane.ga, nonfinite);
        put(inputs + 3 * kTile, lane.gb, nonfinite);
        put(inputs + 4 * kTile, lane.gw, nonfinite);
        sync_warp();
        write(gr, inputs, key);
        write(gk, inputs + kTile, key);
        write(ga, inputs + 2 * kTile, key);
        write(gb, inputs + 3 * kTile, key);
        write(gw, inputs + 4 * kTile, key);
        return nonfinite;
    }

    // The values of a chunk that a lane holds.
    struct Lane : HalvedSteps {
        Words r, k, a, b;
        Steps d;                          // decays; 1 after the last step
        float near[2][2], wide[2][2];     // [half][key]: decays of the neighbouring block of 2, and of 4 steps
        Steps gr, gk, ga, gb;
        Steps ahead, back;                // sums of the block for later steps, and for earlier ones

        KGEN_DEVICE void read(const u16* inputs, int steps) {
            set_flips();
            const int q = mma_lane().q;
            load(r, inputs);
            load(k, inputs + kTile);
            load(a, inputs + 2 * kTile);
            load(b, inputs + 3 * kTile);
            Words words;
            load(words, inputs + 4 * kTile);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int step = slot_step(8 * half + 2 * q + i % 2);
                    const float decay = fast_decay_of<kForm>(value<W>(words, half, i));
                    d[half][i] = step < steps ? decay : 1.0f;
                }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int key = 0; key < 2; ++key) {
                    const float two = d[half][2 * key] * d[half][2 * key + 1];
                    near[half][key] = shfl_xor(two, 1);
                    wide[half][key] = shfl_xor(two * near[half][key], 2);
                }
        }

        // before: the product of the decays from the beginning of a half of kHalf steps to before a step. behind: the
        // product from after the step to the end of the half.
        template <int kHalf>
        KGEN_DEVICE float before(int half, int i) const {
            const int key = i / 2;
            float x = i % 2 != half ? d[half][2 * key + half] : 1.0f;  // of the pair's first step
            if constexpr (kHalf >= 4) x *= flip_near == (half == 0) ? near[half][key] : 1.0f;
            if constexpr (kHalf >= 8) x *= flip_wide == (half == 0) ? wide[half][key] : 1.0f;
            if constexpr (kHalf >= 16) x *= half == 1 ? all(0, key) : 1.0f;
            return x;
        }
        template <int kHalf>
        KGEN_DEVICE float behind(int half, int i) const {
            const int key = i / 2;
            float x = i % 2 == half ? d[half][2 * key + 1 - half] : 1.0f;  // of the pair's second step
            if constexpr (kHalf >= 4) x *= flip_near == (half == 0) ? 1.0f : near[half][key];
            if constexpr (kHalf >= 8) x *= flip_wide == (half == 0) ? 1.0f : wide[half][key];
            if constexpr (kHalf >= 16) x *= half == 0 ? all(1, key) : 1.0f;
            return x;
        }
        // The product of the decays of all eight steps of a half of the chunk.
        KGEN_DEVICE float all(int half, int key) const {
            return d[half][2 * key] * d[half][2 * key + 1] * near[half][key] * wide[half][key];
        }

        // Adds the parts that read the states, and the first sums of gw: within the chunk, then across its middle.
        KGEN_DEVICE void add_states(const Steps& by_r, const Steps& by_a, const Steps& by_k,
                                    const Steps& by_b, const float (&both)[2], float scale) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float early = before<16>(half, i), late = behind<16>(half, i);
                    gr[half][i] = by_r[half][i] * (early * d[half][i] * scale);
                    ga[half][i] = by_a[half][i] * early;
                    gk[half][i] = by_k[half][i] * late;
                    gb[half][i] = by_b[half][i] * late;
                    const float own = value(r, half, i) * gr[half][i];
                    ahead[half][i] = fma(value(k, half, i), gk[half][i],
                                         value(b, half, i) * gb[half][i]);
                    back[half][i] = fma(value(a, half, i), ga[half][i], own);
                    gw[half][i] = fma(both[i / 2], all(0, i / 2) * all(1, i / 2), own);
                }
            descend_from_chunk(of(ahead), of(back));
        }

        // Adds r_t with k_t and b_t of the same step: no decays.
        KGEN_DEVICE void add_diagonal(const float* scores) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const int slot = 8 * half + 2 * mma_lane().q + step;
                    const float of_k = scores[slot * Buffers::kScores + slot];
                    const float of_b = scores[slot * Buffers::kScores + 16 + slot];
#pragma unroll
                    for (int key = 0; key < 2; ++key) {
                        const int i = 2 * key + step;
                        gr[half][i] += fma(value(k, half, i), of_k, value(b, half, i) * of_b);
                        gk[half][i] = fma(value(r, half, i), of_k, gk[half][i]);
                        gb[half][i] = fma(value(r, half, i), of_b, gb[half][i]);
                    }
                }
        }

        // Adds the pairs of steps in different halves of blocks of 2 * kHalf steps. The barrier keeps operands of later
        // levels out of registers.
        template <int kHalf>
        KGEN_DEVICE void add_level(const Buffers& buffers) {
            sync_warp();
            const bool flips = flip<kHalf>();
            constexpr int kPart = kHalf == 8 ? 0 : kHalf == 4 ? 2 : kHalf == 2 ? 4 : 6;
            Half r_late, a_late, k_early, b_early, to_late, from_early, own;
            u32 of_r[4], of_a[4], of_k[4], of_b[4];
            u32 low_r[4], low_a[4], low_k[4], low_b[4];  // kPrecise
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                r_late[i] = late<kHalf>(flips, i, [&](int h, int j) { return value(r, h, j); });
                a_late[i] = late<kHalf>(flips, i, [&](int h, int j) { return value(a, h, j); });
                own[i] = late<kHalf>(flips, i, [&](int h, int j) { return d[h][j]; });
                k_early[i] = early<kHalf>(flips, i, [&](int h, int j) { return value(k, h, j); });
                b_early[i] = early<kHalf>(flips, i, [&](int h, int j) { return value(b, h, j); });
                to_late[i] = late<kHalf>(flips, i, [&](int h, int j) {
                    return kHalf == 1 ? 1.0f : before<kHalf>(h, j);
                });
                from_early[i] = early<kHalf>(flips, i, [&](int h, int j) {
                    return kHalf == 1 ? 1.0f : behind<kHalf>(h, j);
                });
                own[i] *= to_late[i];
                const int place = i / 2 + i % 2 * 2;  // of operand A: key, then step
                of_r[place] = high_term(r_late[i] * own[i], low_r[place]);
                of_a[place] = high_term(a_late[i] * to_late[i], low_a[place]);
                of_k[place] = high_term(k_early[i] * from_early[i], low_k[place]);
                of_b[place] = high_term(b_early[i] * from_early[i], low_b[place]);
            }
            // A factor of 1 or 0: the lane's steps of half 1 add their sums to those of the late steps, its steps of
            // half 0 to those of the early steps, or the other way round.
            const float share = flips ? 0.0f : 1.0f, other = 1.0f - share;
            Half by_r = {}, by_a = {}, by_k = {}, by_b = {};
            const Vec<float, 4>* parts = buffers.parts(kPart);
            if constexpr (kPrecise) {
                multiply_low(by_r, of_k, of_b, low_k, low_b, parts);
                multiply_low(by_a, of_k, of_b, low_k, low_b, parts + 32);
                multiply_low(by_k, of_r, of_a, low_r, low_a, parts + 64);
                multiply_low(by_b, of_r, of_a, low_r, low_a, parts + 96);
            }
            multiply(by_r, of_k, of_b, parts[0]);
            multiply(by_a, of_k, of_b, parts[32]);
            multiply(by_k, of_r, of_a, parts[64]);
            multiply(by_b, of_r, of_a, parts[96]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                by_r[i] *= own[i];
                by_a[i] *= to_late[i];
                by_k[i] *= from_early[i];
                by_b[i] *= from_early[i];
                const float at = r_late[i] * by_r[i], before_it = fma(a_late[i], by_a[i], at);
                const float behind_it = fma(k_early[i], by_k[i], b_early[i] * by_b[i]);
                add_late<kHalf>(share, other, i, gr, by_r[i]);
                add_late<kHalf>(share, other, i, ga, by_a[i]);
                add_late<kHalf>(share, other, i, gw, at);
                add_early<kHalf>(share, other, i, gk, by_k[i]);
                add_early<kHalf>(share, other, i, gb, by_b[i]);
                if constexpr (kHalf > 1) {
                    add_late<kHalf>(share, other, i, back, before_it);
                    add_early<kHalf>(share, other, i, ahead, behind_it);
                }
            }
        }

        template <int kHalf>
        KGEN_DEVICE void descend() {
            HalvedSteps::descend<kHalf>(of(ahead), of(back));
        }
        static KGEN_DEVICE auto of(const Steps& sums) {
            return [&sums](int half, int i) { return sums[half][i]; };
        }

        // Turns gw with respect to the logarithm of the decay into gw with respect to w.
        KGEN_DEVICE void finish(const u16* inputs) {
            if constexpr (kForm != DecayForm::log) {
                Words words;
                load(words, inputs);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        gw[half][i] *= log_decay_slope<kForm>(value<W>(words, half, i));
            }
        }

        template <class T = Value>
        static KGEN_DEVICE float value(const Words& words, int half, int i) {
            const f32x2 two = unpack2<T>(words[2 * half + i / 2]);
            return i % 2 == 0 ? two.x : two.y;
        }

        // Loads two neighbouring slots of a key, for both keys and halves.
        static KGEN_DEVICE void load(Words& words, const u16* tile) {
            const int lane = lane_id(), row = slot_step(lane % 8 + lane / 16 * 8);
            ldmatrix<4, true>(words, tile + SwizzledTile<bf16, 16>::offset(row, lane / 8 % 2));
        }

        // Element i of the late or early steps of a level: [2 * key + which].
        template <int kHalf, class At>
        static KGEN_DEVICE float late(bool flip, int i, At at) {
            if constexpr (kHalf == 1) return at(i % 2, i / 2 * 2 + 1 - i % 2);
            if constexpr (kHalf == 8) return at(1, i);
            return flip ? at(0, i) : at(1, i);
        }
        template <int kHalf, class At>
        static KGEN_DEVICE float early(bool flip, int i, At at) {
            if constexpr (kHalf == 1) return at(i % 2, i / 2 * 2 + i % 2);
            if constexpr (kHalf == 8) return at(0, i);
            return flip ? at(1, i) : at(0, i);
        }
        // Adds the products with low terms.
        static KGEN_DEVICE void multiply_low(Half& sums, const u32 (&first)[4], const u32 (&second)[4],
                                             const u32 (&low_first)[4], const u32 (&low_second)[4],
                                             const Four* part) {
            multiply(sums, first, second, part[Buffers::kLowParts]);
            multiply(sums, low_first, low_second, part[0]);
        }
        static KGEN_DEVICE void multiply(Half& sums, const u32 (&first)[4], const u32 (&second)[4],
                                         const Vec<float, 4>& part) {
            mma_tf32_m16n8k8(sums, first, {bit_cast<u32>(part[0]), bit_cast<u32>(part[1])});
            mma_tf32_m16n8k8(sums, second, {bit_cast<u32>(part[2]), bit_cast<u32>(part[3])});
        }
    };

    // The high term of an operand; with kPrecise, `low` becomes the low term.
    static KGEN_DEVICE u32 high_term(float x, u32& low) {
        if constexpr (kPrecise) {
            u32 high;
            split_tf32_finite(x, high, low);
            return high;
        } else {
            return near_tf32(x);
        }
    }

    // Loads four value features of keys g and g + 8, of kGroup blocks of 16 from block `group` on.
    static KGEN_DEVICE void load_group(Vec<float, 4> (&rows)[kGroup][2], const State* of, int key,
                                       int group) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = key + lane.g + 8 * half, column = 16 * (group + n) + 4 * lane.q;
                rows[n][half] = load_four<Config::kVec>(of + i64{row} * kV + column,
                                                        row < kK ? kV - column : 0);
            }
    }

    static KGEN_DEVICE void multiply_states(const Scores& scores,
                                            const Vec<float, 4> (&rows_s)[kGroup][2],
                                            const Vec<float, 4> (&rows_g)[kGroup][2], int group,
                                            Steps& by_r, Steps& by_a, Steps& by_k, Steps& by_b,
                                            float (&both)[2]) {
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
            if (group + n >= Buffers::kBlocks) break;
            if constexpr (kPrecise) {
                multiply_precisely(scores, rows_s[n], rows_g[n], group + n, by_r, by_a, by_k, by_b, both);
            } else {
                Vec<float, 4> s[2], g[2];
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        both[half] = fma(rows_s[n][half][x], rows_g[n][half][x], both[half]);
                        s[half][x] = as_operand(rows_s[n][half][x]);
                        g[half][x] = as_operand(rows_g[n][half][x]);
                    }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    multiply_rows(by_r[half], s, Scores::four(scores.rows(kRowGy, half), group + n));
                    multiply_rows(by_a[half], s, Scores::four(scores.rows(kRowGsa, half), group + n));
                    multiply_rows(by_k[half], g, Scores::four(scores.rows(kRowV, half), group + n));
                    multiply_rows(by_b[half], g, Scores::four(scores.rows(kRowSa, half), group + n));
                }
            }
        }
        if (group + kGroup >= Buffers::kBlocks) {
            both[0] = lanes_sum<4>(both[0]);
            both[1] = lanes_sum<4>(both[1]);
        }
    }

    // Adds the products of one block of 16 value features, in two terms.
    static KGEN_DEVICE void multiply_precisely(const Scores& scores, const Four (&rows_s)[2],
                                               const Four (&rows_g)[2], int block, Steps& by_r,
                                               Steps& by_a, Steps& by_k, Steps& by_b,
                                               float (&both)[2]) {
        Four s[2], g[2], low_s[2], low_g[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                both[half] = fma(rows_s[half][x], rows_g[half][x], both[half]);
                Scores::split(rows_s[half][x], s[half][x], low_s[half][x]);
                Scores::split(rows_g[half][x], g[half][x], low_g[half][x]);
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scores.template add_rows<kRowGy>(by_r[half], s, low_s, half, block);
            scores.template add_rows<kRowGsa>(by_a[half], s, low_s, half, block);
            scores.template add_rows<kRowV>(by_k[half], g, low_g, half, block);
            scores.template add_rows<kRowSa>(by_b[half], g, low_g, half, block);
        }
    }

    // An element of a state, rounded to TF32. States of 16 bits are exact.
    static KGEN_DEVICE float as_operand(float x) {
        if constexpr (sizeof(State) == 2) return x;
        return bit_cast<float>(near_tf32(x));
    }
    static KGEN_DEVICE void multiply_rows(Half& sums, const Vec<float, 4> (&a)[2],
                                          const Vec<float, 4>& b) {
        Scores::template multiply<0>(sums, a[0], a[1], b);
        Scores::template multiply<1>(sums, a[0], a[1], b);
    }

    // Stores a result of 16 keys and steps in a tile of the warp.
    template <class T>
    static KGEN_DEVICE void put_words(u16* tile, const T (&x)[2][4]) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                const u32 pair = transpose_matrix(pack2<Value>(x[half][2 * key], x[half][2 * key + 1]));
                const int row = slot_step(8 * half + lane.g);
                *reinterpret_cast<u32*>(tile + SwizzledTile<bf16, 16>::offset(row, key) +
                                        2 * lane.q) = pair;
            }
    }
    static KGEN_DEVICE void put(u16* tile, const Steps& x, float& nonfinite) {
        put_words(tile, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) nonfinite = fma(x[i / 4][i % 4], 0.0f, nonfinite);
    }
};

}  // namespace kgen::wkv7
