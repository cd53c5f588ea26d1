// gr, gw, gk, ga and gb of one chunk of 32 steps of wkv7 on tensor cores; clamped decays, bf16.
//
// Keys are independent. S is the state before the chunk, G the gradient of the state after it, and g = scale * gy. For
// a step t after the middle of the chunk, c_t is the product of the decays after the middle up to t; for an earlier
// step, c_t is 1 over the product of the decays after t up to the middle. The operands of a key are
//
//     R_t = r_t c_t     A_t = a_t c_{t-1}     K_t = k_t / c_t     B_t = b_t / c_t
//
// A clamped decay is at least exp(-0.607), so that c_t lies between exp(-9.8) and exp(9.8). With sums over steps
// s <= t (r) or s < t (a) of the chunk, P = 1 / c_{-1} and Q = c_31:
//
//     gr_t = c_t     (P S g_t   + sum_s K_s (v_s . g_t)   + B_s (sa_s . g_t))   = c_t X_t
//     ga_t = c_{t-1} (P S gsa_t + sum_s K_s (v_s . gsa_t) + B_s (sa_s . gsa_t)) = c_{t-1} Y_t
//     gk_s = (Q G v_s  + sum_t R_t (g_t . v_s)  + A_t (gsa_t . v_s)) / c_s      = Z_s / c_s
//     gb_s = (Q G sa_s + sum_t R_t (g_t . sa_s) + A_t (gsa_t . sa_s)) / c_s     = U_s / c_s
//
// The sums over steps are products with masked matrices of scores [32 x 32], added to the products with the states. gw
// with respect to the logarithm of the decay is a running sum, per key:
//
//     E_0  = P Q sum_v S * G + sum_t R_t P S g_t + A_t P S gsa_t
//     gw_t = E_t - A_t Y_t     E_{t+1} = gw_t + K_t Z_t + B_t U_t - R_t X_t
//
// and the same backward from the other end:
//
//     E_32 = P Q sum_v S * G + sum_s K_s Q G v_s + B_s Q G sa_s
//     gw_t = E_{t+1} - (K_t Z_t + B_t U_t - R_t X_t)
//
// A pair of steps enters E at the early step and leaves it at the late one. Both times its terms are products of the
// same rounded operands, so that only an fp32 error remains, relative to the magnitudes added. gw_t is taken from the
// end for which the sum of these magnitudes, with |E| at that end, is smaller: it is exactly 0 where nothing precedes
// or follows t. With
//
//     M_t = |K_t Z_t + B_t U_t| + |R_t X_t| + |A_t Y_t|
//
// these sums are |E_0| + sum_{s<t} M_s + |A_t Y_t| and |E_32| + sum_{s>t} M_s + M_t - |A_t Y_t|. The terms of a step
// count one by one: where they cancel, as after an initial state of small values, their sum would say nothing about the
// error.
//
// Precision: TF32. R and K are rounded to nearest. A and B have a low term, because k gk and b gb may be many times gw.
// Other operands are truncated, as mma does; constant factors compensate the mean loss (kNearTf32).
//
// Layout: each warp has 16 keys. Each lane has keys g and g + 8 and steps 2q and 2q + 1 of each tile of 8 steps:
// [tile][2 * key + step], the order of accumulators and of operands A of the sums over steps.
//
// Shared memory:
//
//     float rows[4][32][kPitch]         gy, gsa, v, sa; blocks of 16 columns swizzled
//     float scores[2][4][32][32]        replace the rows: with rows late steps and columns early ones, and
//                                       transposed; each rk, rb, ak, ab. A row has two halves of 16 steps, in the order
//                                       2q, 2q + 1, 8 + 2q, 9 + 2q, swizzled.
//     float own[warps][kOwn]            G [16][kPitch] of fp32, or the scales of S and G [2][kPitch]; later, by tile
//                                       and lane, c_t and d log(d_t) / dw_t [2][4][32][4]
//     Value inputs[warps][5][2][16][16] r, k, a, b, w of a warp, then its results
//
// Synchronisation: three block barriers, and one more where results are checked for NaN and Inf. If any is not finite,
// the block computes its gradients again, step by step.
//
// Config and State: see RowGradients.
#pragma once

#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/row_gradients.cuh"
#include "kgen/wkv7/row_scores.cuh"

namespace kgen::wkv7 {

template <class Config, class State = float>
class QuotientRows : public RowGradients<Config, State> {
    using Value = typename Config::Value;
    using W = typename Config::W;
    static_assert(kCoarse<Value> && kCoarse<W>, "one TF32 term");
    static_assert(Config::kForm == DecayForm::clamp, "quotients of other decays have no bound");

public:
    using Base = RowGradients<Config, State>;
    using Base::kKeys, Base::kThreads, Base::step_by_step;
    using Index = u32;
    static constexpr int kSteps = 32;
    static constexpr bool kOpaqueRepeat = true;  // else the prologue's divisors stay in registers, and spill

private:
    using Base::first_key, Base::steps, Base::gy, Base::r, Base::k, Base::v, Base::a, Base::b, Base::w, Base::sa,
        Base::gsa, Base::state, Base::gradient, Base::gr, Base::gk, Base::ga, Base::gb, Base::gw, Base::scale,
        Base::state_scales, Base::gradient_scales;
    using Base::kK, Base::kV, Base::kWarps, Base::write;
    using Products = RowScores<Value, kV, kWarps, Config::kVec, false>;
    using Four = Vec<float, 4>;
    using Sums = float[4];      // of a tile of steps, [2 * key + step]
    using Steps = Sums[4];      // of all tiles
    using Operand = u32[4];     // of a tile of steps, [key + 2 * step]
    using Words = u32[4];       // of two steps of two tiles, [2 * tile + key]
    static constexpr int kBlocks = Products::Buffers::kBlocks, kPitch = 16 * kBlocks;
    static constexpr int kRows = kSteps * kPitch, kMatrix = kSteps * kSteps;  // floats of a tensor, of a matrix
    static constexpr int kFloats = max(4 * kRows, 8 * kMatrix);
    static_assert(kWarps <= 4 || kWarps == 8, "scores are shared out to 1, 2, 4 or 8 warps");
    // Floats of a warp: decays and slopes, and before that the gradient of the state.
    static constexpr int kOwn = max(32 * kWarpSize, 16 * kPitch);
    static constexpr int kTile = 256;  // elements of 16 steps and 16 keys
    // Blocks of 16 value features of both states that are loaded at a time. With more, sums would spill.
    static constexpr int kGroup = min(kBlocks, 2);
    static constexpr bool kStaged = sizeof(State) == 4;  // whether G passes through shared memory
    using StateRows = Vec<State, 4>[kGroup][2];  // of keys g and g + 8
    enum Score { kRK, kRB, kAK, kAB };
    enum Input { kInputR, kInputK, kInputA, kInputB, kInputW };
    static constexpr float kNear = kNearTf32;

public:
    static constexpr int kBytes = 4 * (kFloats + kWarps * kOwn) + kWarps * 5 * 2 * 2 * kTile;

    // Returns whether all gradients are finite. If not, the caller has to compute the steps one by one. That code is
    // not here, because the addresses of all inputs would stay in registers until then, and other values would spill.
    KGEN_DEVICE bool operator()() const {
        const int warp = thread_rank() / kWarpSize, key = first_key + 16 * warp;
        float* const rows = dynamic_smem<float>();
        float* const scores = rows;
        float* const own = rows + kFloats + warp * kOwn;
        u16* const inputs = reinterpret_cast<u16*>(rows + kFloats + kWarps * kOwn) + warp * 5 * 2 * kTile;

        // 1. Copies; the first rows of the states.
        copy(r, inputs + 2 * kInputR * kTile, key);
        copy(k, inputs + 2 * kInputK * kTile, key);
        copy(a, inputs + 2 * kInputA * kTile, key);
        copy(b, inputs + 2 * kInputB * kTile, key);
        copy(w, inputs + 2 * kInputW * kTile, key);
        copy_rows(gsa, rows + kRowGsa * kRows);
        copy_rows(sa, rows + kRowSa * kRows);
        if constexpr (kStaged) copy_gradient(own, key);
        if constexpr (kScaled<State>) copy_scales(own);
        cp_async_commit();
        StateRows rows_s, rows_g;
        load_group(rows_s, state, key, 0);
        if constexpr (!kStaged) load_group(rows_g, gradient, key, 0);
        widen_rows(rows);
        cp_async_wait<0>();
        sync_block();

        // 2. Products with the states.
        Steps by_r = {}, by_a = {}, by_k = {}, by_b = {};
        float both[2] = {};  // sum_v S * G
#pragma unroll 1
        for (int group = 0; group < kBlocks; group += kGroup) {
            multiply_states(rows, own, rows_s, rows_g, group, by_r, by_a, by_k, by_b, both);
            if (group + kGroup >= kBlocks) break;
            load_group(rows_s, state, key, group + kGroup);
            if constexpr (!kStaged) load_group(rows_g, gradient, key, group + kGroup);
        }

        // 3. Scores. The barrier keeps the compiler from loading their operands earlier.
        sync_warp();
        put_scores(rows, scores, warp);

        // 4. Decays; factors of the products with the states; R and A.
        Decays c;
        Four* const own_decays = reinterpret_cast<Four*>(own) + lane_id();
        const Four* const own_slopes = own_decays + 4 * kWarpSize;
        Steps upto;  // read again from memory later
        c.read(inputs + 2 * kInputW * kTile, steps, upto, own_decays);
        float sum[2], end[2];  // E_0, E_32
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            sum[which] = both[which] * (c.to_middle[which] * c.to_end[which]);
            end[which] = sum[which];
        }
        Operand of_r[4], of_a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words words_r, words_a;
            load(words_r, inputs + (2 * kInputR + half) * kTile);
            load(words_a, inputs + (2 * kInputA + half) * kTile);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int tile = 2 * half + i / 4, x = i % 4;
                of_r[tile][place(x)] = rounded(value(words_r, i) * upto[tile][x]);
                of_a[tile][place(x)] = bit_cast<u32>(
                    value(words_a, i) * (x % 2 == 0 ? c.before_two[tile][x / 2] : upto[tile][x - 1]));
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int tile = i / 4, x = i % 4, which = x / 2;
            by_r[tile][x] *= c.to_middle[which] * scale;
            by_a[tile][x] *= c.to_middle[which] * kNear;
            by_k[tile][x] *= c.to_end[which];
            by_b[tile][x] *= c.to_end[which] * kNear;
            sum[which] = fma(bit_cast<float>(of_r[tile][place(x)]), by_r[tile][x], sum[which]);
            sum[which] = fma(bit_cast<float>(of_a[tile][place(x)]), by_a[tile][x], sum[which]);
        }

        // 5. gk, gb; K and B, and their part of E.
        const float* const late[2] = {of_lane(scores, 0), of_lane(scores, 1)};
        const float* const early[2] = {late[0] + 4 * kMatrix, late[1] + 4 * kMatrix};
        Operand of_k[4], of_b[4];
        Steps x;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u16* const tile_k = inputs + (2 * kInputK + half) * kTile;
            u16* const tile_b = inputs + (2 * kInputB + half) * kTile;
            Words words_k, words_b;
            load(words_k, tile_k);
            load(words_b, tile_b);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int tile = 2 * half + n;
                const Four its_decays = own_decays[tile * kWarpSize];
                float factor[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    factor[i] = fast_reciprocal(its_decays[i]);
                    const u32 its_k = rounded(value(words_k, 4 * n + i) * factor[i]);
                    const u32 its_b = bit_cast<u32>(value(words_b, 4 * n + i) * factor[i]);
                    of_k[tile][place(i)] = its_k;
                    of_b[tile][place(i)] = its_b;
                    end[i / 2] = fma(bit_cast<float>(its_k), by_k[tile][i], end[i / 2]);
                    end[i / 2] = fma(bit_cast<float>(its_b), by_b[tile][i], end[i / 2]);
                }
                sync_warp();
#pragma unroll
                for (int part = half; part < 2; ++part) {
                    const Four rk = four(early, kRK, tile, part), ak = four(early, kAK, tile, part);
                    const Four rb = four(early, kRB, tile, part), ab = four(early, kAB, tile, part);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const int from = 2 * part + m;
                        if (from < tile) continue;
                        multiply(by_k[tile], of_r[from], rk, m);
                        multiply(by_b[tile], of_r[from], rb, m);
                        Operand rest;
                        rest_of(of_a[from], rest);
                        multiply(by_k[tile], rest, ak, m);
                        multiply(by_b[tile], rest, ab, m);
                        multiply(by_k[tile], of_a[from], ak, m);
                        multiply(by_b[tile], of_a[from], ab, m);
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[tile][i] = fma(bit_cast<float>(of_k[tile][place(i)]), by_k[tile][i],
                                     bit_cast<float>(of_b[tile][place(i)]) * by_b[tile][i]);
                    by_k[tile][i] *= factor[i];
                    by_b[tile][i] *= factor[i];
                }
            }
            put<Value>(tile_k, by_k, half);
            put<Value>(tile_b, by_b, half);
        }
        sync_warp();
        write_both(gk, inputs + 2 * kInputK * kTile, key);
        write_both(gb, inputs + 2 * kInputB * kTile, key);

        // 6. gr, ga. gw forward from E_0, and backward from E_32 without the terms of later tiles, which are not known
        // yet; the sum of the magnitudes added from E_0 on.
        Steps forth, back, sizes;
        float size[2], until[4][2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            sum[which] = lanes_sum<4>(sum[which]);
            end[which] = lanes_sum<4>(end[which]);
            size[which] = abs(sum[which]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const int tile = 2 * half + n;
                sync_warp();
#pragma unroll
                for (int part = 0; part <= half; ++part) {
                    const Four rk = four(late, kRK, tile, part), ak = four(late, kAK, tile, part);
                    const Four rb = four(late, kRB, tile, part), ab = four(late, kAB, tile, part);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const int from = 2 * part + m;
                        if (from > tile) continue;
                        multiply(by_r[tile], of_k[from], rk, m);
                        multiply(by_a[tile], of_k[from], ak, m);
                        Operand rest;
                        rest_of(of_b[from], rest);
                        multiply(by_r[tile], rest, rb, m);
                        multiply(by_a[tile], rest, ab, m);
                        multiply(by_r[tile], of_b[from], rb, m);
                        multiply(by_a[tile], of_b[from], ab, m);
                    }
                }
                const Four its_decays = own_decays[tile * kWarpSize];
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    float less_a[2], y[2], late_terms[2], added[2], magnitudes[2], of_y[2];
#pragma unroll
                    for (int step = 0; step < 2; ++step) {
                        const int i = 2 * which + step;
                        less_a[step] = -bit_cast<float>(of_a[tile][place(i)]);
                        y[step] = by_a[tile][i];
                        late_terms[step] = fma(-bit_cast<float>(of_r[tile][place(i)]), by_r[tile][i], x[tile][i]);
                        added[step] = fma(less_a[step], y[step], late_terms[step]);
                        of_y[step] = abs(less_a[step] * y[step]);
                        magnitudes[step] =
                            abs(x[tile][i]) + abs(bit_cast<float>(of_r[tile][place(i)]) * by_r[tile][i]) + of_y[step];
                        by_r[tile][i] *= its_decays[i];
                        by_a[tile][i] *= step == 0 ? c.before_two[tile][which] : its_decays[i - 1];
                    }
                    const LaneSums sums(c, added[0] + added[1]);
                    const float first = sum[which] + sums.before;
                    forth[tile][2 * which] = fma(less_a[0], y[0], first);
                    forth[tile][2 * which + 1] = fma(less_a[1], y[1], first + added[0]);
                    back[tile][2 * which + 1] = sums.behind + late_terms[1];
                    back[tile][2 * which] = (sums.behind + added[1]) + late_terms[0];
                    sum[which] += sums.all;
                    until[tile][which] = sums.all;
                    const LaneSums its_size(c, magnitudes[0] + magnitudes[1]);
                    const float before = size[which] + its_size.before;
                    sizes[tile][2 * which] = before + of_y[0];
                    sizes[tile][2 * which + 1] = before + magnitudes[0] + of_y[1];
                    size[which] += its_size.all;
                }
            }
            put<Value>(inputs + (2 * kInputR + half) * kTile, by_r, half);
            put<Value>(inputs + (2 * kInputA + half) * kTile, by_a, half);
        }

        // 7. gw from the end whose sum of magnitudes is smaller.
#pragma unroll
        for (int which = 0; which < 2; ++which) size[which] = 0.5f * (size[which] + abs(end[which]));
#pragma unroll
        for (int tile = 3; tile >= 0; --tile)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float its = until[tile][which];
                until[tile][which] = end[which];
                end[which] -= its;
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u16* const tile_w = inputs + (2 * kInputW + half) * kTile;
            const Four slopes[2] = {own_slopes[2 * half * kWarpSize], own_slopes[(2 * half + 1) * kWarpSize]};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int tile = 2 * half + i / 4, which = i % 4 / 2;
                const bool is_late = sizes[tile][i % 4] > size[which];
                const float from_end = until[tile][which] - back[tile][i % 4];
                forth[tile][i % 4] = (is_late ? from_end : forth[tile][i % 4]) * slopes[i / 4][i % 4];
            }
            put<W>(tile_w, forth, half);
        }
        sync_warp();
        write_both(gr, inputs + 2 * kInputR * kTile, key);
        write_both(ga, inputs + 2 * kInputA * kTile, key);
        write_both(gw, inputs + 2 * kInputW * kTile, key);
        // All sums of the chunk are terms of E.
        return !block_any_nonfinite<kWarps>(fma(sum[0], 0.0f, sum[1] * 0.0f));
    }

private:
    struct Decays;

    // Sums over a group of four lanes: over the lanes before the caller, over the lanes after it, and over all.
    struct LaneSums {
        float before, behind, all;

        KGEN_DEVICE LaneSums(const Decays& c, float x) {
            const float other = shfl_xor(x, 1), two = x + other, others = shfl_xor(two, 2);
            all = two + others;
            before = fma(c.upper, others, c.odd * other);
            behind = fma(1.0f - c.upper, others, (1.0f - c.odd) * other);
        }
    };

    // Decays of a lane's keys and steps.
    struct Decays {
        float before_two[4][2];  // c_{t-1} of the first of two steps
        float to_middle[2], to_end[2];  // P, Q
        float odd, upper;     // 1 for the second lane of a pair; 1 for the second pair of lanes


        // upto: c_t. Also writes c_t, and the slopes of log(d) by w, to shared memory.
        KGEN_DEVICE void read(const u16* tiles, int steps, Steps& upto, Four* own) {
            const int q = mma_lane().q;
            odd = static_cast<float>(q & 1);
            upper = static_cast<float>(q >> 1);
            float log2_of_tile[4][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Words words;
                load(words, tiles + half * kTile);
                Four slope[2];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    // 1 - sigmoid(w) is the product e * sigmoid(w), which does not cancel; the bound keeps e finite
                    // where e^-w would overflow.
                    const float e = fast_exp2(min(-kLog2e * value<W>(words, i), 126.0f));
                    const float sigmoid_of = fast_reciprocal(1.0f + e);
                    upto[2 * half + i / 4][i % 4] = -kClamp * kLog2e * sigmoid_of;
                    slope[i / 4][i % 4] = (-kClamp * sigmoid_of) * (e * sigmoid_of);
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) own[(4 + 2 * half + n) * kWarpSize] = slope[n];
            }
            if (steps < kSteps) {  // decays after the last step are 1
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    if (8 * (i / 4) + 2 * q + i % 2 >= steps) upto[i / 4][i % 4] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int tile = i / 2, key = i % 2;
                const float first = upto[tile][2 * key], two = first + upto[tile][2 * key + 1];
                const LaneSums sums(*this, two);
                log2_of_tile[tile][key] = sums.all;
                before_two[tile][key] = sums.before;
                upto[tile][2 * key] = sums.before + first;
                upto[tile][2 * key + 1] = sums.before + two;
            }
#pragma unroll
            for (int key = 0; key < 2; ++key) {
                const float second = log2_of_tile[1][key], third = log2_of_tile[2][key];
                const float begin = log2_of_tile[0][key] + second;
                const float offsets[4] = {-begin, -second, 0.0f, third};
#pragma unroll
                for (int tile = 0; tile < 4; ++tile) {
                    before_two[tile][key] = fast_exp2(before_two[tile][key] + offsets[tile]);
#pragma unroll
                    for (int step = 0; step < 2; ++step)
                        upto[tile][2 * key + step] = fast_exp2(upto[tile][2 * key + step] + offsets[tile]);
                }
                to_middle[key] = fast_exp2(begin);
                to_end[key] = fast_exp2(third + log2_of_tile[3][key]);
            }
#pragma unroll
            for (int tile = 0; tile < 4; ++tile)
                own[tile * kWarpSize] = {{upto[tile][0], upto[tile][1], upto[tile][2], upto[tile][3]}};
        }
    };

    // Element i = 4 * tile + 2 * key + step of two tiles.
    template <class T = Value>
    static KGEN_DEVICE float value(const Words& words, int i) {
        const f32x2 two = unpack2<T>(words[i / 2]);
        return i % 2 == 0 ? two.x : two.y;
    }
    static KGEN_DEVICE int place(int i) { return i / 2 + i % 2 * 2; }
    // The nearest TF32 number: 8193 x in fp32 has its 11 bits, and the difference is exact. Inf becomes NaN.
    static KGEN_DEVICE u32 rounded(float x) { return bit_cast<u32>(fma(x, -8192.0f, x * 8193.0f)); }
    // The low part of an operand, which mma does not read.
    static KGEN_DEVICE void rest_of(const Operand& x, Operand& rest) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float high = bit_cast<float>(x[i] & 0xffffe000u);
            rest[i] = bit_cast<u32>(bit_cast<float>(x[i]) - high);
        }
    }

    // 16 steps: offset of the row of 8 keys whose address the calling lane passes to ldmatrix and stmatrix.
    static KGEN_DEVICE int own_row() {
        const int lane = lane_id();
        return SwizzledTile<bf16, 16>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
    static KGEN_DEVICE void load(Words& words, const u16* tile) {
        ldmatrix<4, true>(words, tile + own_row());
    }
    // Stores tiles 2 * half and 2 * half + 1.
    template <class T>
    static KGEN_DEVICE void put(u16* to, const Steps& x, int half) {
        Words words;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Sums& from = x[2 * half + i / 2];
            words[i] = pack2<T>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
        sync_warp();  // all lanes have read what was there
        stmatrix_transposed(words, to + own_row());
    }
    // Writes 32 steps of a result. A lane writes some of these steps, for a run of kVec keys.
    template <class T>
    KGEN_DEVICE void write_both(const Rows<T>& to, const u16* tiles, int key) const {
        constexpr int kPerRow = 16 / Config::kVec, kApart = kWarpSize / kPerRow, kUnrolled = kPerRow <= 2 ? kPerRow : 1;
        const int first = lane_id() / kPerRow, column = lane_id() % kPerRow * Config::kVec;
        if (kK % kKeys != 0 && key + column >= kK) return;
        T* const target = to.first + u32(first) * to.stride_t + (key + column);
#pragma unroll kUnrolled
        for (int n = 0; n < kPerRow; ++n) {
            const int step = first + n * kApart;
            const u16* const from = tiles + step / 16 * kTile + TileCopier<T, Config::kVec>::place(step % 16, column);
            if (step < steps)
                store_vec(target + n * kApart * to.stride_t, *reinterpret_cast<const Vec<T, Config::kVec>*>(from));
        }
    }

    // Copies 32 steps of 16 keys.
    template <class T>
    KGEN_DEVICE void copy(const StepPointer<T>& from, u16* tiles, int key) const {
        TileCopier<T, Config::kVec> copier(from, key);
        copier.start(tiles, steps, kK - key);
        copier.advance();
        copier.start(tiles + kTile, steps - 16, kK - key);
    }

    // Copies rows of value features in fp32. Elements that do not exist are zero.
    KGEN_DEVICE void copy_rows(const StepPointer<float>& from, float* to) const {
        constexpr int kEach = min(Config::kVec, 4);
        each_of_rows<kEach>([&](int step, int column, int place, int first, int later) {
            cp_async_or_zero<4 * kEach>(to + place, run_of(from, first, later, column),
                                        step < steps && (kV % 16 == 0 || column < kV));
        });
    }
    // Calls visit(step, column, place, first, later) for runs of Each columns of all rows, which the threads share out;
    // step = first + later, where `later` is the same for all threads.
    template <int Each, class Visit>
    static KGEN_DEVICE void each_of_rows(Visit visit) {
        constexpr int kPerRow = 16 * kBlocks / Each, kRuns = kSteps * kPerRow;
        constexpr int kUnrolled = kRuns <= 8 * kThreads ? 8 : 1;
        constexpr bool kColumn = kThreads % kPerRow == 0;  // whether a thread keeps its column
#pragma unroll kUnrolled
        for (int n = 0; n < ceil_div(kRuns, kThreads); ++n) {
            const int i = thread_rank() + n * kThreads;
            if (kRuns % kThreads != 0 && i >= kRuns) break;
            const int first = (kColumn ? thread_rank() : i) / kPerRow, later = kColumn ? n * (kThreads / kPerRow) : 0;
            const int step = first + later, column = (kColumn ? thread_rank() : i) % kPerRow * Each;
            // Rows that are an even number apart have the same swizzle.
            const int place = later % 2 == 0 ? row_place(first, column) + later * kPitch : row_place(step, column);
            visit(step, column, place, first, later);
        }
    }
    // The offset of a column in rows of value features. Odd rows exchange neighbouring blocks: otherwise two rows that
    // a quarter of a warp reads would have the same banks.
    static KGEN_DEVICE int row_place(int row, int column) {
        const int block = column / 16;
        return row * kPitch + 16 * (kBlocks % 2 == 0 ? block ^ (row & 1) : block) + column % 16;
    }
    // Reads four columns of a block, in a row of the lane (g of 8). first: the lane's address in even blocks, and in
    // odd blocks.
    struct OwnRow {
        const float* first[2];

        KGEN_DEVICE explicit OwnRow(const float* rows) {
            const MmaLane lane = mma_lane();
            const int exchange = kBlocks % 2 == 0 ? 16 * (lane.g & 1) : 0;
            first[0] = rows + lane.g * kPitch + 4 * lane.q + exchange;
            first[1] = first[0] - 2 * exchange;
        }
        // `floats`: offset of the row from row g. group: the first block of a group, which is even.
        KGEN_DEVICE Four operator()(int floats, int block, int group = 0) const {
            return *reinterpret_cast<const Four*>(first[block % 2] + floats + 16 * block + 16 * group);
        }
    };

    // Copies the warp's rows of G.
    KGEN_DEVICE void copy_gradient(float* to, int key) const {
        constexpr int kEach = min(Config::kVec, 4), kPerRow = kPitch / kEach, kRuns = 16 * kPerRow;
        constexpr int kUnrolled = kRuns <= 8 * kWarpSize ? 8 : 1;
        const State* const from = gradient + key * kV;
#pragma unroll kUnrolled
        for (int n = 0; n < kRuns / kWarpSize; ++n) {
            constexpr bool kColumn = kWarpSize % (2 * kPerRow) == 0;  // whether column and swizzle do not depend on n
            const int i = kColumn ? lane_id() : lane_id() + n * kWarpSize;
            const int later = kColumn ? n * kWarpSize / kPerRow : 0;
            const int first = i / kPerRow, column = i % kPerRow * kEach, row = first + later;
            const bool there = (kK % kKeys == 0 || key + row < kK) && (kV % 16 == 0 || column < kV);
            cp_async_or_zero<4 * kEach>(to + row_place(first, column) + later * kPitch,
                                        from + first * kV + column + later * kV, there);
        }
    }

    // Copies the scales of S, then those of G; they are zero beyond the last value feature.
    KGEN_DEVICE void copy_scales(float* to) const {
        constexpr int kEach = min(Config::kVec, 4), kPerRow = kPitch / kEach, kRuns = 2 * kPerRow;
#pragma unroll
        for (int n = 0; n < ceil_div(kRuns, kWarpSize); ++n) {
            const int i = lane_id() + n * kWarpSize, column = i % kPerRow * kEach;
            if (i >= kRuns) break;
            cp_async_or_zero<4 * kEach>(to + kEach * i, (i < kPerRow ? state_scales : gradient_scales) + column,
                                        column < kV);
        }
    }

    template <class T>
    static KGEN_DEVICE const T* run_of(const StepPointer<T>& rows, int first, int later, int column) {
        return rows.first + u32(first) * rows.stride + column + later * rows.stride;
    }
    // Stores the rows of gy and v in fp32.
    KGEN_DEVICE void widen_rows(float* rows) const {
        each_of_rows<4>([&](int step, int column, int place, int first, int later) {
            const int width = step < steps ? kV - column : 0;
            const Four of_gy = load_four<Config::kVec>(run_of(gy, first, later, column), width);
            const Four of_v = load_four<Config::kVec>(run_of(v, first, later, column), width);
            *reinterpret_cast<Four*>(rows + kRowGy * kRows + place) = of_gy;
            *reinterpret_cast<Four*>(rows + kRowV * kRows + place) = of_v;
        });
    }

    // Loads four value features of keys g and g + 8, of kGroup blocks of 16 from block `group` on. L2 fetches 256 bytes
    // at a time, so that it has the values of a later group by then.
    static KGEN_DEVICE void load_group(StateRows& rows, const State* of, int key, int group) {
        constexpr int kEach = min(Config::kVec, 4);
        const MmaLane lane = mma_lane();
        const State* const first = of + (key + lane.g) * kV + 16 * group + 4 * lane.q;
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool is_key = kK % kKeys == 0 || key + lane.g + 8 * half < kK;
                Vec<State, 4> four = {};
#pragma unroll
                for (int x = 0; x < 4; x += kEach) {
                    if (!is_key || (kV % (16 * kGroup) != 0 && 16 * (group + n) + 4 * lane.q + x >= kV)) continue;
                    const auto some = load_vec<kEach, Cache::prefetch_256>(first + 8 * half * kV + 16 * n + x);
#pragma unroll
                    for (int i = 0; i < kEach; ++i) four[x + i] = some[i];
                }
                rows[n][half] = four;
            }
    }

    static KGEN_DEVICE void multiply_states(const float* rows, const float* staged, const StateRows& rows_s,
                                            const StateRows& rows_g, int group, Steps& by_r, Steps& by_a,
                                            Steps& by_k, Steps& by_b, float (&both)[2]) {
        const OwnRow own(rows), own_g(staged);
        const float* const scales = staged + 16 * group + 4 * mma_lane().q;
        const auto widened = [=](const Vec<State, 4> (&two)[2], Four (&to)[2], int place) {
            Four factors = {};
            if constexpr (kScaled<State>) factors = *reinterpret_cast<const Four*>(scales + place);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x[4];
                to_floats(two[half], x);
#pragma unroll
                for (int i = 0; i < 4; ++i) to[half][i] = kScaled<State> ? x[i] * factors[i] : x[i];
            }
        };
        const auto read_gradient = [&](int n, Four (&g)[2]) {
            if constexpr (kStaged) {
#pragma unroll
                for (int half = 0; half < 2; ++half) g[half] = own_g(8 * half * kPitch, n, group);
            } else {
                widened(rows_g[n], g, kPitch + 16 * n);
            }
        };
        // S first: its registers are free when the sums with G begin.
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
            if (group + n >= kBlocks) break;
            Four s[2], g[2];
            widened(rows_s[n], s, 16 * n);
            read_gradient(n, g);
#pragma unroll
            for (int i = 0; i < 8; ++i) both[i / 4] = fma(s[i / 4][i % 4], g[i / 4][i % 4], both[i / 4]);
            if constexpr (sizeof(State) == 4) round(s);  // 16 bits are exact
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
                const int place = 8 * tile * kPitch;
                add(by_r[tile], s, own(place + kRowGy * kRows, n, group));
                add(by_a[tile], s, own(place + kRowGsa * kRows, n, group));
            }
        }
        sync_warp();
#pragma unroll
        for (int n = 0; n < kGroup; ++n) {
            if (group + n >= kBlocks) break;
            Four g[2];
            read_gradient(n, g);
            if constexpr (sizeof(State) == 4) round(g);
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
                const int place = 8 * tile * kPitch;
                add(by_k[tile], g, own(place + kRowV * kRows, n, group));
                add(by_b[tile], g, own(place + kRowSa * kRows, n, group));
            }
        }
    }
    // Rounds operands A. Without a result of its own an operand would be copied for every product, as its registers are
    // in another order.
    static KGEN_DEVICE void round(Four (&x)[2]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = bit_cast<float>(near_tf32(x[i / 4][i % 4]));
    }
    static KGEN_DEVICE void add(Sums& sums, const Four (&x)[2], const Four& y) { Products::add(sums, x, y); }

    // The address of the lane's part of 16 steps, in row g of the first tile of the first matrix of scores.
    static KGEN_DEVICE const float* of_lane(const float* scores, int part) {
        const MmaLane lane = mma_lane();
        return scores + score_place(lane.g, part) + 4 * lane.q;
    }
    // The offset of 16 steps (half `part`) of a row.
    static KGEN_DEVICE int score_place(int row, int part) {
        return row * kSteps + 16 * (part ^ ((row ^ row >> 1) & 1));
    }
    // The lane's steps of tiles 2 * part and 2 * part + 1, in row 8 * tile + g.
    static KGEN_DEVICE Four four(const float* const (&own)[2], int which, int tile, int part) {
        return *reinterpret_cast<const Four*>(own[part] + which * kMatrix + 8 * tile * kSteps);
    }
    static KGEN_DEVICE void multiply(Sums& sums, const Operand& x, const Four& y, int m) {
        mma_tf32_m16n8k8(sums, x, {bit_cast<u32>(y[2 * m]), bit_cast<u32>(y[2 * m + 1])});
    }

    // Computes the scores of all pairs of steps, and stores them in place of the rows.
    static constexpr int kMatrices = kWarps < 4 ? 4 / kWarps : 1;  // of a warp; two of eight warps share one
    KGEN_DEVICE void put_scores(const float* rows, float* scores, int warp) const {
        if constexpr (kWarps <= 4) {
            float first[kMatrices][2][4] = {}, second[kMatrices][4][4] = {};
#pragma unroll
            for (int n = 0; n < kMatrices; ++n) {
                multiply_scores<0>(first[n], rows, warp + n * kWarps);
                sync_warp();
                multiply_scores<1>(second[n], rows, warp + n * kWarps);
            }
            sync_block();
#pragma unroll
            for (int n = 0; n < kMatrices; ++n) {
                store_scores<0>(first[n], scores, warp + n * kWarps);
                store_scores<1>(second[n], scores, warp + n * kWarps);
            }
        } else {
            float sums[4][4] = {};
            const bool is_second = warp >= 4;
            if (is_second) {
                multiply_scores<1>(sums, rows, warp - 4);
            } else {
                multiply_scores<0>(sums, rows, warp);
            }
            sync_block();
            if (is_second) {
                store_scores<1>(sums, scores, warp - 4);
            } else {
                store_scores<0>(sums, scores, warp);
            }
        }
        sync_block();
    }

    // Products of 16 late steps with as many early steps, or with all 32 for the last 16 late steps.
    template <int kLast, int kTiles>
    static KGEN_DEVICE void multiply_scores(float (&sums)[kTiles][4], const float* rows, int which) {
        const OwnRow late(rows + which / 2 * kRows), early(rows + (kRowV + which % 2) * kRows);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            Four x[2] = {late(16 * kLast * kPitch, block), late((16 * kLast + 8) * kPitch, block)};
            round(x);
#pragma unroll
            for (int tile = 0; tile < 2 + 2 * kLast; ++tile)
                add(sums[tile], x, early(8 * tile * kPitch, block));
        }
    }
    // Stores masked scores twice, with late steps as rows and with early steps as rows. The factors compensate the
    // truncation of sa and of the scores.
    template <int kLast, int kTiles>
    KGEN_DEVICE void store_scores(const float (&sums)[kTiles][4], float* scores, int which) const {
        const MmaLane lane = mma_lane();
        const bool of_a = which / 2 == 1, of_b = which % 2 == 1;
        const float factor = kNear * (of_a ? 1.0f : scale) * (of_b ? kNear : 1.0f);
        float* const of_late = scores + which * kMatrix;
        float* const of_early = of_late + 4 * kMatrix;
        const int distance = lane.g - 2 * lane.q - (of_a ? 1 : 0);  // in a tile on the diagonal: row - first column
#pragma unroll
        for (int tile = 0; tile < 2 + 2 * kLast; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int beyond = 16 * kLast + 8 * half - 8 * tile;  // steps from the column's tile to the row's
                float x[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool there = beyond > 0 || (beyond == 0 && distance >= i);
                    x[i] = there ? factor * sums[tile][2 * half + i] : 0.0f;
                }
                const int row = 16 * kLast + 8 * half + lane.g, column = 8 * tile + 2 * lane.q;
                *reinterpret_cast<Vec<float, 2>*>(of_late + score_place(row, tile / 2) + 4 * lane.q +
                                                  2 * (tile % 2)) = {{x[0], x[1]}};
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    of_early[score_place(column + i, kLast) + 4 * (lane.g / 2) + lane.g % 2 + 2 * half] = x[i];
            }
    }
};

// See backward_chunk_rows.
template <class Config, class State = float, class Offset>
KGEN_DEVICE void backward_quotient_rows(
    const Offset* cu_seqlens, i64 N, i64 T, i64 H,
    const KeyRowsTensors<typename Config::Value, typename Config::W, State>& x, float scale) {
    backward_rows<QuotientRows<Config, State>>(cu_seqlens, N, T, H, x, scale);
}

}  // namespace kgen::wkv7
