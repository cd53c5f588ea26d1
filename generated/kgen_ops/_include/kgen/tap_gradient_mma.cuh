// The gradient of the taps of a Toeplitz product on tensor cores (sm_80).
//
// fp32 values are split into two fp16 numbers each, once, in shared memory, three products for one;
// where they lie too far apart for fp16's exponent, into two TF32 numbers in registers, at half the
// speed. 16-bit values multiply directly. Chains of products are short wherever the result is fp32
// (see mma.cuh).
#pragma once

#include "mma.cuh"
#include "split_half.cuh"
#include "toeplitz.cuh"

namespace kgen {
namespace detail {

// Where the rows lie that a fragment sums over: batch rows, each Fold times, a tile of 16 columns further
// on each time. Every tile is followed by a gap, so that eight rows of a matrix meet no bank twice.
template <class T, int Fold>
struct GradientRows {
    static constexpr int kGap = Fold == 1 ? 0 : 16 / static_cast<int>(sizeof(T));
    static constexpr int kTile = 16 + kGap;

    int stride;  // of batch rows

    KGEN_DEVICE int operator()(int row) const { return row / Fold * stride + row % Fold * kTile; }
};

// Fragments of sums over rows: A is 16 columns of g, B is 8 columns of x, kRows rows of each from `first`
// on. load_b brings two neighbouring tiles of columns.
struct Tf32GradientEngine {
    static constexpr int kRows = 8;
    static constexpr int kPasses = 3;
    static constexpr bool kSmall = false;

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
        mma_tf32_16x8x8(acc, Pass == 0 ? a.lo : a.hi, Pass == 1 ? b.lo : b.hi);
    }
};

// 16 columns of 16 rows, and two tiles of 8, as they lie in memory; `at(row, column)` is where eight
// neighbours of a row begin.
template <class At>
KGEN_DEVICE void load_gradient_a(u32 (&pairs)[4], At at) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    ldmatrix<4, true>(pairs, at(matrix / 2 * 8 + row, matrix % 2 * 8));
}

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

// fp32 as pairs of fp16, split in place: of eight neighbours hi, then lo.
struct SplitGradientEngine {
    static constexpr int kRows = 16;
    static constexpr int kPasses = 3;
    static constexpr bool kSmall = true;  // the sum of what is 2^11 times smaller

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

    // Split a row of `columns` (a multiple of 8) numbers where they lie, a gap behind every 16 of them;
    // by a whole warp.
    template <int Gap>
    static KGEN_DEVICE void split_row(float* row, int columns, float scale) {
        for (int column = lane_id() * 8; column < columns; column += kWarpSize * 8) {
            const int i = column + column / 16 * Gap;
            const Vec<float, 4> early = *reinterpret_cast<const Vec<float, 4>*>(row + i);
            const Vec<float, 4> late = *reinterpret_cast<const Vec<float, 4>*>(row + i + 4);
            Vec<u32, 4> hi, lo;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                split_half(early[2 * j] * scale, early[2 * j + 1] * scale, hi[j], lo[j]);
                split_half(late[2 * j] * scale, late[2 * j + 1] * scale, hi[2 + j], lo[2 + j]);
            }
            *reinterpret_cast<Vec<u32, 4>*>(row + i) = hi;
            *reinterpret_cast<Vec<u32, 4>*>(row + i + 4) = lo;
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], float (&small)[4], const A& a, const B& b) {
        mma_16x8x16<fp16>(Pass == 2 ? acc : small, Pass == 0 ? a.lo : a.hi,
                          Pass == 1 ? b.lo : b.hi);
    }
};

template <class T>
struct HalfGradientEngine {
    static constexpr int kRows = 16;
    static constexpr int kPasses = 1;
    static constexpr bool kSmall = false;

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
        mma_16x8x16<T>(acc, a.pair, b.pair);
    }
};

template <class T>
struct GradientEngineOf {
    using type = HalfGradientEngine<T>;
};
template <>
struct GradientEngineOf<float> {
    using type = SplitGradientEngine;
};

// The groups of distances that one warp sums, of what a block has staged.
template <class Engine, class T, int Group, int Batch, int Fold, bool Promote>
class TapGradientWarp {
    using A = typename Engine::A;
    using B = typename Engine::B;
    using Rows = GradientRows<T, Fold>;

    static constexpr int kParts = Batch / Engine::kRows;  // fragments that cover the rows
    static constexpr int kUnroll = Group / 2;  // tiles of g until the window of x is renewed
    // Pairs of fragments of x that are new to a tile of g. The tiles that a fold skips are rows.
    static constexpr int kNew = Fold == 1 ? 1 : Group / 2;
    static constexpr int kTileStride = 9;      // of a tile in scratch

    static_assert(Group % 2 == 0, "a tile of g is two tiles of x further");
    static_assert(Batch % Engine::kRows == 0, "fragments have 8 or 16 rows");

    using Main = float[Group][4];
    struct Sums {
        Main main;
        float small[Engine::kSmall ? Group : 1][4];
    };

public:
    // first_row: of `Batch` rows that are summed over, Fold to a batch row.
    KGEN_DEVICE TapGradientWarp(const T* gs, const T* xs, int stride, int first_row, int tiles)
        : gs_(gs), xs_(xs), rows_{stride}, first_row_(first_row), tiles_(tiles) {}

    // Add the group's sums, times 2^exponent, to its line: line[8 i + j] is the distance
    // t - u = 16 * first_tile - 8 + 8 * i + (j - 7). Always by the same warp, in the same order.
    KGEN_DEVICE void operator()(int first_tile, int exponent, float* line, float* scratch) {
        Sums sums = {};
        sum_group(sums, first_tile);
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < Group; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float sum = sums.main[i][j];
                if constexpr (Engine::kSmall) sum = fma(sums.small[i][j], 1.0f / 2048, sum);
                scratch[(7 + lane.g + j / 2 * 8) * kTileStride + 2 * lane.q + j % 2] = sum;
            }
            sync_warp();
            // Diagonal j begins j - 7 rows down; what it has outside of the tile is zeros.
            if (lane_id() < 23) {
                const float* diagonal = scratch + lane_id() * kTileStride;
                float sum = 0.0f;
#pragma unroll
                for (int column = 0; column < 8; ++column)
                    sum += diagonal[column * (kTileStride + 1)];
                line[8 * i + lane_id()] += Engine::kSmall ? scale_by(sum, exponent) : sum;
            }
            sync_warp();
        }
    }

private:
    // main[i], small[i]: of tiles whose t - u is 16 * first_tile - 8 + 8 * i.
    KGEN_DEVICE void sum_group(Sums& sums, int first_tile) {
        B window[Group][kParts] = {};
#pragma unroll 1
        for (int tile = first_tile; tile < tiles_; tile += kUnroll * Fold) {
            if constexpr (Promote) {
                Main chain = {};
                walk(chain, sums.small, window, tile, first_tile);
#pragma unroll
                for (int i = 0; i < Group; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums.main[i][j] += chain[i][j];
            } else {
                walk(sums.main, sums.small, window, tile, first_tile);
            }
        }
    }

    // kUnroll tiles of g, Fold apart, after which the window is where it was.
    template <class Small>
    KGEN_DEVICE void walk(Main& acc, Small& small, B (&window)[Group][kParts], int tile,
                          int first_tile) {
#pragma unroll
        for (int ahead = 0; ahead < kUnroll; ++ahead) {
            const int at = tile + ahead * Fold;
            if (at >= tiles_) break;
            const T* g = gs_ + Rows::kTile * at;
            const T* x = xs_ + Rows::kTile * (at - first_tile);
            A a[kParts];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int first = first_row_ + part * Engine::kRows;
                a[part] = Engine::load_a(g, rows_, first);
#pragma unroll
                for (int back = 0; back < kNew; ++back) {
                    const int left = (2 * (ahead - back) + Group) % Group;
                    Engine::load_b(x - Rows::kTile * back, rows_, first, window[left][part],
                                   window[left + 1][part]);
                }
            }
            if constexpr (Engine::kPasses == 3) {
                pass<0>(acc, small, a, window, ahead);
                pass<1>(acc, small, a, window, ahead);
            }
            pass<Engine::kPasses - 1>(acc, small, a, window, ahead);
        }
    }

    template <int Pass, class Small>
    static KGEN_DEVICE void pass(Main& acc, Small& small, const A (&a)[kParts],
                                 const B (&window)[Group][kParts], int ahead) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < Group; ++i)
                Engine::template multiply<Pass>(
                    acc[i], small[Engine::kSmall ? i : 0], a[part],
                    window[(2 * ahead + 1 - i + Group) % Group][part]);
    }

    const T* gs_;
    const T* xs_;
    Rows rows_;
    int first_row_, tiles_;
};

}  // namespace detail

// gw[columns - 1 - d] = sum over b and t of g[b][t] * x[b][t - d]. A block has one channel and all
// batch rows, `Batch` of them in a product at a time.
//
// P[t][u] = sum over b of g[b][t] * x[b][u] is a product of matrices, summed along its diagonals.
// Tiles of P (16 x 8) at one distance t - u have one accumulator between them, for all their t. A
// warp holds `Group` distances in steps of 8 and walks down t: a fragment of x meets the first
// distance at one tile of g, the third at the next, and stays in registers until it has met all.
//
// Fold, for small batches: at one distance, Fold neighbouring tiles of g and theirs of x are summed over
// like as many batch rows. Fragments of x are then loaded anew for each tile of g.
template <class T, class W, int Group, int Batch, int Fold, int Warps>
class TapGradientMma {
    using Best = typename detail::GradientEngineOf<T>::type;
    static constexpr bool kSplit = Best::kSmall;

    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kLine = 8 * Group + 16;  // sums by d of a group; the last one is not used
    static constexpr int kScratch = 272;          // a tile, seven rows of zeros before and after it
    static constexpr bool kPromote = sizeof(W) == 4;  // an fp32 gw, see mma.cuh
    using Rows = detail::GradientRows<T, Fold>;
    static constexpr int kStaged = Batch / Fold;  // batch rows in shared memory
    static constexpr int kFront = Fold == 1 ? 0 : Group / 2;  // tiles of zeros before a row ...
    static constexpr int kBack = Fold - 1;                    // ... and behind it

    static_assert(Batch % Fold == 0, "products sum over whole batch rows");

public:
    KGEN_DEVICE void operator()(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                int columns) {
        const i64 channel = blockIdx.x;
        const i64 stride = channels * columns;
        tiles_ = (columns + 15) / 16;
        const int padded = 16 * tiles_;
        // The eight rows of a matrix meet no bank twice.
        constexpr int kSize = static_cast<int>(sizeof(T));
        const int stored = Rows::kTile * (kFront + tiles_ + kBack);
        stride_ = ((stored * kSize + 127) / 128 * 128 + 16 * min(Fold, 4)) / kSize;
        groups_ = (2 * tiles_ + Group - 1) / Group;

        // Shared memory: T gs[kStaged][stride]; T xs[kStaged][stride]; float lines[groups][kLine];
        // float scratch[Warps][kScratch].
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
        bool tame = true;
        for (i64 first = 0; first < batch; first += kStaged) {
            // 1. Stage; rows that do not exist are zeros.
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
            tame = tame && of_g.tame() && of_x.tame();
            if (!tame) break;  // all threads know the same
            if constexpr (!kSplit) {
                sum_groups<Best, Batch>(channel, 0, 0);
            } else if (of_g.splits() && of_x.splits()) {
                for (int row = thread_rank() / kWarpSize; row < rows; row += Warps) {
                    Best::template split_row<Rows::kGap>(gs_ + row * stride_, padded,
                                                         power_of_two(of_g.exponent()));
                    Best::template split_row<Rows::kGap>(xs_ + row * stride_, padded,
                                                         power_of_two(of_x.exponent()));
                }
                sync_block();
                sum_groups<Best, Batch>(channel, 0, -(of_g.exponent() + of_x.exponent()));
            } else {  // eight rows at a time, not to need more registers than the usual way does
#pragma unroll 1
                for (int row = 0; row < rows * Fold; row += 8)
                    sum_groups<detail::Tf32GradientEngine, 8>(channel, row, 0);
            }
        }

        // 3. A distance belongs to at most two groups, the later one first.
        sync_block();
        for (int d = thread_rank(); d < columns; d += kThreads) {
            const int group = (d + 15) / (8 * Group), place = (d + 15) % (8 * Group);
            float sum = group < groups_ ? lines_[group * kLine + place] : 0.0f;
            if (group > 0 && place < 15) sum += lines_[(group - 1) * kLine + place + 8 * Group];
            if (!tame)  // or a zero beyond the diagonal might have met a NaN
                sum = tap_gradient_naive(g, x, batch, stride, columns, d);
            gw[channel * columns + columns - 1 - d] = from_float<W>(sum);
        }
    }

private:
    // Of what is staged, for all threads; a block barrier. `which` call it is between two others.
    KGEN_DEVICE Magnitudes magnitudes(const T* values, int rows, int which) const {
        __shared__ u32 found[2][Warps][2];
        const int warp = thread_rank() / kWarpSize;
        Magnitudes mine;
        for (int row = warp; row < rows; row += Warps)
            mine.add_row(values + row * stride_, Rows::kTile * tiles_);  // gaps are zeros
        mine.combine();
        if (lane_id() == 0) mine.write(found[which][warp]);
        sync_block();
        Magnitudes all;
#pragma unroll
        for (int i = 0; i < Warps; ++i) all.add(Magnitudes::read(found[which][i]));
        return all;
    }

    // This warp's pairs of groups, `Count` rows from `row` on; left-over pairs rotate over the warps.
    template <class Engine, int Count>
    KGEN_DEVICE void sum_groups(i64 channel, int row, int exponent) {
        const int warp = thread_rank() / kWarpSize;
        const int worker = (warp + static_cast<int>(channel % Warps)) % Warps;
        float* scratch = lines_ + groups_ * kLine + warp * kScratch;
        detail::TapGradientWarp<Engine, T, Group, Count, Fold, kPromote> sum(gs_, xs_, stride_, row,
                                                                             tiles_);
        share_out<true>(groups_, worker, Warps, [&](int group) {
            sum(group * (Group / 2), exponent, lines_ + group * kLine, scratch);
        });
    }

    int tiles_, stride_, groups_;
    T* gs_;
    T* xs_;
    float* lines_;
};

}  // namespace kgen
