// The gradient of the taps of a Toeplitz product on tensor cores (sm_80).
//
//     gw[columns - 1 - d] = sum over b and t of g[b][t] * x[b][t - d]
//
// P[t][u] = sum over b of g[b][t] * x[b][u] is a matrix product with K = b; gw[columns - 1 - d] is the sum of P along
// the diagonal t - u = d.
//
// Data layout: 16 x 8 tiles of P at one distance t - u share an accumulator, over all t. A warp holds the
// accumulators of `Diagonals` distances in steps of 8 and loops over t. A fragment of x is used for the first
// distance with one tile of g, for the third distance with the next tile of g, and so on; it stays in registers until
// its last use.
//
// Precision: fp32 values are split into two fp16 terms once, in shared memory (3xfp16). Values that exceed the
// exponent range of two fp16 terms are split into two TF32 terms in registers, at half the speed. 16-bit values are
// multiplied directly. Partial sums are promoted to fp32 registers if gw is fp32 (mma.cuh).
//
// Shared memory: T gs[kStaged][stride]; T xs[kStaged][stride]; float lines[groups][kLine], the sums of each distance;
// float scratch[Warps][kScratch], to sum a tile along its diagonals.
//
// Synchronisation: for each batch chunk a barrier, the copies, a barrier, two block-wide reductions of magnitudes (a
// barrier each) and, if values are split in place, one more barrier. A line is written by one warp only.
#pragma once

#include "kgen/primitives/mma.cuh"
#include "kgen/primitives/split_fp16.cuh"
#include "kgen/toeplitz/toeplitz.cuh"

namespace kgen {
namespace detail {

// The offsets of the K rows of a fragment: batch rows, each Fold times, 16 columns further each time. A gap after
// every tile of 16 columns avoids bank conflicts between the eight rows of an ldmatrix.
template <class T, int Fold>
struct FoldedRows {
    static constexpr int kGap = Fold == 1 ? 0 : 16 / static_cast<int>(sizeof(T));
    static constexpr int kTile = 16 + kGap;

    int stride;  // of batch rows

    KGEN_DEVICE int operator()(int row) const { return row / Fold * stride + row % Fold * kTile; }
};

// Operand policies: which mma a dtype uses and how fragments are loaded. A is 16 columns of g and B is 8 columns of
// x; both have kRows rows from `first` on. load_b loads the fragments of two adjacent tiles of 8 columns.
//
// This one: two TF32 terms, split in registers (3xTF32).
struct Tf32GradientPolicy {
    static constexpr int kRows = 8;
    static constexpr int kPasses = 3;
    static constexpr bool kCorrection = false;

    struct A {
        u32 hi[4], lo[4];
    };
    struct B {
        u32 hi[2], lo[2];
    };

    template <class Rows>
    static KGEN_DEVICE A load_a(const float* g, Rows rows, int first) {
        const MmaLane lane = mma_lane();
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split_tf32(g[rows(first + lane.q + i / 2 * 4) + lane.g + i % 2 * 8], a.hi[i], a.lo[i]);
        return a;
    }

    template <class Rows>
    static KGEN_DEVICE void load_b(const float* x, Rows rows, int first, B& left, B& right) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float* at = x + rows(first + lane.q + i * 4) + lane.g;
            split_tf32(at[0], left.hi[i], left.lo[i]);
            split_tf32(at[8], right.hi[i], right.lo[i]);
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const A& a, const B& b) {
        mma_tf32_m16n8k8(acc, Pass == 0 ? a.lo : a.hi, Pass == 1 ? b.lo : b.hi);
    }
};

// Loads an A fragment (16 columns of 16 rows) by ldmatrix. at(row, column) is the address of eight values of a row.
template <class At>
KGEN_DEVICE void load_gradient_a(u32 (&pairs)[4], At at) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    ldmatrix<4, true>(pairs, at(matrix / 2 * 8 + row, matrix % 2 * 8));
}

// Loads the B fragments of two adjacent tiles of 8 columns by ldmatrix.
template <class At>
KGEN_DEVICE void load_gradient_b(u32 (&left)[2], u32 (&right)[2], At at) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    u32 pairs[4];
    ldmatrix<4, true>(pairs, at(matrix % 2 * 8 + row, matrix / 2 * 8));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        left[i] = pairs[i];
        right[i] = pairs[2 + i];
    }
}

// Two fp16 terms, split in place: of every eight values the hi terms, then the lo terms.
struct SplitFp16GradientPolicy {
    static constexpr int kRows = 16;
    static constexpr int kPasses = 3;
    // A second accumulator for the products that carry the factor 2^-11.
    static constexpr bool kCorrection = true;

    struct A {
        u32 hi[4], lo[4];
    };
    struct B {
        u32 hi[2], lo[2];
    };

    template <class Rows>
    static KGEN_DEVICE A load_a(const float* g, Rows rows, int first) {
        A a;
        load_gradient_a(a.hi,
                        [=](int row, int column) { return g + rows(first + row) + column; });
        load_gradient_a(a.lo,
                        [=](int row, int column) { return g + rows(first + row) + column + 4; });
        return a;
    }

    template <class Rows>
    static KGEN_DEVICE void load_b(const float* x, Rows rows, int first, B& left, B& right) {
        load_gradient_b(left.hi, right.hi,
                        [=](int row, int column) { return x + rows(first + row) + column; });
        load_gradient_b(left.lo, right.lo,
                        [=](int row, int column) { return x + rows(first + row) + column + 4; });
    }

    // Splits a row of `columns` (a multiple of 8) values in place, with a gap after every 16. Called by a whole warp.
    template <int Gap>
    static KGEN_DEVICE void split_row(float* row, int columns, float scale) {
        for (int column = lane_id() * 8; column < columns; column += kWarpSize * 8) {
            const int i = column + column / 16 * Gap;
            const Vec<float, 4> low = *reinterpret_cast<const Vec<float, 4>*>(row + i);
            const Vec<float, 4> high = *reinterpret_cast<const Vec<float, 4>*>(row + i + 4);
            Vec<u32, 4> hi, lo;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                split_fp16(low[2 * j] * scale, low[2 * j + 1] * scale, hi[j], lo[j]);
                split_fp16(high[2 * j] * scale, high[2 * j + 1] * scale, hi[2 + j], lo[2 + j]);
            }
            *reinterpret_cast<Vec<u32, 4>*>(row + i) = hi;
            *reinterpret_cast<Vec<u32, 4>*>(row + i + 4) = lo;
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&correction)[4], const A& a,
                                     const B& b) {
        mma_m16n8k16<fp16>(Pass == 2 ? acc : correction, Pass == 0 ? a.lo : a.hi,
                          Pass == 1 ? b.lo : b.hi);
    }
};

// 16-bit values, multiplied directly.
template <class T>
struct HalfGradientPolicy {
    static constexpr int kRows = 16;
    static constexpr int kPasses = 1;
    static constexpr bool kCorrection = false;

    struct A {
        u32 pair[4];
    };
    struct B {
        u32 pair[2];
    };

    template <class Rows>
    static KGEN_DEVICE A load_a(const T* g, Rows rows, int first) {
        A a;
        load_gradient_a(a.pair,
                        [=](int row, int column) { return g + rows(first + row) + column; });
        return a;
    }

    template <class Rows>
    static KGEN_DEVICE void load_b(const T* x, Rows rows, int first, B& left, B& right) {
        load_gradient_b(left.pair, right.pair,
                        [=](int row, int column) { return x + rows(first + row) + column; });
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&)[4], const A& a, const B& b) {
        mma_m16n8k16<T>(acc, a.pair, b.pair);
    }
};

// The policy for values in T. fp32 uses it only where the exponents fit two fp16 terms.
template <class T>
struct GradientPolicyFor {
    using type = HalfGradientPolicy<T>;
};
template <>
struct GradientPolicyFor<float> {
    using type = SplitFp16GradientPolicy;
};

// The products of one warp: `Diagonals` distances from staged rows of g and x.
template <class Policy, class T, int Diagonals, int KRows, int Fold, bool Promote>
class TapGradientWarp {
    using A = typename Policy::A;
    using B = typename Policy::B;
    using Rows = FoldedRows<T, Fold>;

    static constexpr int kFragments = KRows / Policy::kRows;  // fragments along K
    static constexpr int kUnroll = Diagonals / 2;  // tiles of g until the window of x wraps around
    // Pairs of x fragments loaded per tile of g. With Fold > 1 nothing is reused.
    static constexpr int kNewPairs = Fold == 1 ? 1 : Diagonals / 2;
    static constexpr int kTileStride = 9;      // row stride of a tile in scratch

    static_assert(Diagonals % 2 == 0, "a tile of g is as wide as two tiles of x");
    static_assert(KRows % Policy::kRows == 0, "fragments have 8 or 16 rows");

    using Main = float[Diagonals][4];
    struct Sums {
        Main main;
        float correction[Policy::kCorrection ? Diagonals : 1][4];
    };

public:
    // first_row: the first of the `KRows` rows along K, Fold per batch row.
    KGEN_DEVICE TapGradientWarp(const T* gs, const T* xs, int stride, int first_row, int tiles)
        : gs_(gs), xs_(xs), rows_{stride}, first_row_(first_row), tiles_(tiles) {}

    // Adds the sums of the group, times 2^exponent, to its line. line[8 i + j] is the distance
    // t - u = 16 * first_tile - 8 + 8 * i + (j - 7). The same warp adds in the same order every time.
    KGEN_DEVICE void operator()(int first_tile, int exponent, float* line, float* scratch) {
        Sums sums = {};
        sum_group(sums, first_tile);
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < Diagonals; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float sum = sums.main[i][j];
                if constexpr (Policy::kCorrection)
                    sum = fma(sums.correction[i][j], 1.0f / 2048, sum);
                scratch[(7 + lane.g + j / 2 * 8) * kTileStride + 2 * lane.q + j % 2] = sum;
            }
            sync_warp();
            // Diagonal j begins j - 7 rows down. Scratch has zeros above and below the tile.
            if (lane_id() < 23) {
                const float* diagonal = scratch + lane_id() * kTileStride;
                float sum = 0.0f;
#pragma unroll
                for (int column = 0; column < 8; ++column)
                    sum += diagonal[column * (kTileStride + 1)];
                line[8 * i + lane_id()] += Policy::kCorrection ? scale_by(sum, exponent) : sum;
            }
            sync_warp();
        }
    }

private:
    // Computes main[i] and correction[i], the sums of tiles with t - u = 16 * first_tile - 8 + 8 * i.
    KGEN_DEVICE void sum_group(Sums& sums, int first_tile) {
        B window[Diagonals][kFragments] = {};
#pragma unroll 1
        for (int tile = first_tile; tile < tiles_; tile += kUnroll * Fold) {
            if constexpr (Promote) {
                Main partial = {};
                accumulate(partial, sums.correction, window, tile, first_tile);
#pragma unroll
                for (int i = 0; i < Diagonals; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums.main[i][j] += partial[i][j];
            } else {
                accumulate(sums.main, sums.correction, window, tile, first_tile);
            }
        }
    }

    // Multiplies kUnroll tiles of g, Fold apart. The window of x is then in the same registers as before.
    template <class Correction>
    KGEN_DEVICE void accumulate(Main& acc, Correction& correction,
                                B (&window)[Diagonals][kFragments], int tile, int first_tile) {
#pragma unroll
        for (int step = 0; step < kUnroll; ++step) {
            const int at = tile + step * Fold;
            if (at >= tiles_) break;
            const T* g = gs_ + Rows::kTile * at;
            const T* x = xs_ + Rows::kTile * (at - first_tile);
            A a[kFragments];
#pragma unroll
            for (int k = 0; k < kFragments; ++k) {
                const int first = first_row_ + k * Policy::kRows;
                a[k] = Policy::load_a(g, rows_, first);
#pragma unroll
                for (int back = 0; back < kNewPairs; ++back) {
                    const int left = (2 * (step - back) + Diagonals) % Diagonals;
                    Policy::load_b(x - Rows::kTile * back, rows_, first, window[left][k],
                                   window[left + 1][k]);
                }
            }
            if constexpr (Policy::kPasses == 3) {
                pass<0>(acc, correction, a, window, step);
                pass<1>(acc, correction, a, window, step);
            }
            pass<Policy::kPasses - 1>(acc, correction, a, window, step);
        }
    }

    template <int Pass, class Correction>
    static KGEN_DEVICE void pass(Main& acc, Correction& correction, const A (&a)[kFragments],
                                 const B (&window)[Diagonals][kFragments], int step) {
#pragma unroll
        for (int k = 0; k < kFragments; ++k)
#pragma unroll
            for (int i = 0; i < Diagonals; ++i)
                Policy::template multiply<Pass>(
                    acc[i], correction[Policy::kCorrection ? i : 0], a[k],
                    window[(2 * step + 1 - i + Diagonals) % Diagonals][k]);
    }

    const T* gs_;
    const T* xs_;
    Rows rows_;
    int first_row_, tiles_;
};

}  // namespace detail

// gw[columns - 1 - d] = sum over b and t of g[b][t] * x[b][t - d]. A block computes one channel, with all batch rows.
//
//   Diagonals  distances t - u, in steps of 8, whose accumulators a warp holds at a time
//   KRows      K of the products that a warp adds up at a time
//   Fold       for small batches: Fold adjacent tiles of a batch row are K rows like those of other batch rows. x
//              fragments are then loaded for each tile of g.
template <class T, class W, int Diagonals, int KRows, int Fold, int Warps>
class TapGradientMma {
    using Preferred = typename detail::GradientPolicyFor<T>::type;
    static constexpr bool kSplit = Preferred::kCorrection;

    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kLine = 8 * Diagonals + 16;  // sums of a group by d; the last is unused
    static constexpr int kScratch = 272;  // a tile with seven rows of zeros before and after it
    static constexpr bool kPromote = sizeof(W) == 4;  // an fp32 gw, see mma.cuh
    using Rows = detail::FoldedRows<T, Fold>;
    static constexpr int kStaged = KRows / Fold;  // batch rows in shared memory
    static constexpr int kFront = Fold == 1 ? 0 : Diagonals / 2;  // tiles of zeros before a row
    static constexpr int kBack = Fold - 1;                        // and after it

    static_assert(KRows % Fold == 0, "products sum over whole batch rows");

public:
    KGEN_DEVICE void operator()(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                int columns) {
        const i64 channel = blockIdx.x;
        const i64 stride = channels * columns;
        tiles_ = (columns + 15) / 16;
        const int padded = 16 * tiles_;
        // The row stride avoids bank conflicts between the eight rows of an ldmatrix.
        constexpr int kSize = static_cast<int>(sizeof(T));
        const int stored = Rows::kTile * (kFront + tiles_ + kBack);
        stride_ = ((stored * kSize + 127) / 128 * 128 + 16 * min(Fold, 4)) / kSize;
        groups_ = (2 * tiles_ + Diagonals - 1) / Diagonals;

        T* staged = dynamic_smem<T>();
        gs_ = staged + Rows::kTile * kFront;
        xs_ = gs_ + kStaged * stride_;
        lines_ = reinterpret_cast<float*>(staged + 2 * kStaged * stride_);
        for (int i = thread_rank(); i < groups_ * kLine + Warps * kScratch; i += kThreads)
            lines_[i] = 0.0f;
        if constexpr (Fold > 1)
            for (int i = thread_rank(); i < 2 * kStaged * stride_; i += kThreads)
                staged[i] = from_float<T>(0.0f);

        g += channel * columns;
        x += channel * columns;
        bool finite = true;
        for (i64 first = 0; first < batch; first += kStaged) {
            // 1. Stage. Rows beyond the batch are zeros.
            sync_block();
            const int rows = static_cast<int>(min(batch - first, static_cast<i64>(kStaged)));
            stage_rows<T, 16, Rows::kGap>(gs_, stride_, g + first * stride, stride, rows, columns,
                                          padded, kThreads);
            stage_rows<T, 16, Rows::kGap>(xs_, stride_, x + first * stride, stride, rows, columns,
                                          padded, kThreads);
            cp_async_commit();
            for (int row = rows; row < kStaged; ++row) {
                for (int i = thread_rank(); i < Rows::kTile * tiles_; i += kThreads) {
                    gs_[row * stride_ + i] = from_float<T>(0.0f);
                    xs_[row * stride_ + i] = from_float<T>(0.0f);
                }
            }
            cp_async_wait_all();
            sync_block();

            // 2. Groups of distances.
            const Magnitudes of_g = magnitudes(gs_, rows, 0);
            const Magnitudes of_x = magnitudes(xs_, rows, 1);
            finite = finite && of_g.finite() && of_x.finite();
            if (!finite) break;  // uniform over the block
            if constexpr (!kSplit) {
                sum_groups<Preferred, KRows>(channel, 0, 0);
            } else if (of_g.fits_split_fp16() && of_x.fits_split_fp16()) {
                for (int row = thread_rank() / kWarpSize; row < rows; row += Warps) {
                    Preferred::template split_row<Rows::kGap>(gs_ + row * stride_, padded,
                                                         power_of_two(of_g.exponent()));
                    Preferred::template split_row<Rows::kGap>(xs_ + row * stride_, padded,
                                                         power_of_two(of_x.exponent()));
                }
                sync_block();
                sum_groups<Preferred, KRows>(channel, 0, -(of_g.exponent() + of_x.exponent()));
            } else {  // eight K rows at a time, which need no more registers than 3xfp16
#pragma unroll 1
                for (int row = 0; row < rows * Fold; row += 8)
                    sum_groups<detail::Tf32GradientPolicy, 8>(channel, row, 0);
            }
        }

        // 3. Store. A distance is in the lines of at most two groups.
        sync_block();
        for (int d = thread_rank(); d < columns; d += kThreads) {
            const int group = (d + 15) / (8 * Diagonals), place = (d + 15) % (8 * Diagonals);
            float sum = group < groups_ ? lines_[group * kLine + place] : 0.0f;
            if (group > 0 && place < 15) sum += lines_[(group - 1) * kLine + place + 8 * Diagonals];
            if (!finite)  // a zero beyond the diagonal may have been multiplied by NaN or Inf
                sum = tap_gradient_naive(g, x, batch, stride, columns, d);
            gw[channel * columns + columns - 1 - d] = from_float<W>(sum);
        }
    }

private:
    // Returns the magnitudes of staged values, to all threads; contains a block barrier. Consecutive calls use
    // different `which`.
    KGEN_DEVICE Magnitudes magnitudes(const T* values, int rows, int which) const {
        __shared__ u32 found[2][Warps][2];
        const int warp = thread_rank() / kWarpSize;
        Magnitudes mine;
        for (int row = warp; row < rows; row += Warps)
            mine.add_row(values + row * stride_, Rows::kTile * tiles_);  // the gaps hold zeros
        mine.combine();
        if (lane_id() == 0) mine.write(found[which][warp]);
        sync_block();
        Magnitudes all;
#pragma unroll
        for (int i = 0; i < Warps; ++i) all.add(Magnitudes::read(found[which][i]));
        return all;
    }

    // Adds this warp's pairs of groups, with `Count` K rows from `row` on. The warp that takes a left-over pair
    // rotates with the channel.
    template <class Policy, int Count>
    KGEN_DEVICE void sum_groups(i64 channel, int row, int exponent) {
        const int warp = thread_rank() / kWarpSize;
        const int worker = (warp + static_cast<int>(channel % Warps)) % Warps;
        float* scratch = lines_ + groups_ * kLine + warp * kScratch;
        detail::TapGradientWarp<Policy, T, Diagonals, Count, Fold, kPromote> sum(
            gs_, xs_, stride_, row, tiles_);
        distribute<true>(groups_, worker, Warps, [&](int group) {
            sum(group * (Diagonals / 2), exponent, lines_ + group * kLine, scratch);
        });
    }

    int tiles_, stride_, groups_;
    T* gs_;
    T* xs_;
    float* lines_;
};

}  // namespace kgen
