// The gradient of the taps of a Toeplitz product on tensor cores (sm_80).
//
// fp32 values are split into two TF32 numbers in registers, three products for one (3xTF32); 16-bit
// values multiply directly. Chains of products are short wherever the result is fp32 (see mma.cuh).
#pragma once

#include "mma.cuh"
#include "toeplitz.cuh"

namespace kgen {
namespace detail {

// Fragments of sums over batch rows: A is 16 columns of g, B is 8 columns of x, kRows rows of each.
template <class T>
struct GradientEngine;

template <>
struct GradientEngine<float> {
    static constexpr int kRows = 8;
    static constexpr int kPasses = 3;
    static constexpr int kStrideBytes = 32;  // modulo 128: rows 8 banks apart, see `load`

    struct A {
        u32 hi[4], lo[4];
    };
    struct B {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE A load_a(const float* g, int stride) {
        const MmaLane lane = mma_lane();
        const float* at = g + lane.q * stride + lane.g;
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split_tf32(at[i / 2 * 4 * stride + i % 2 * 8], a.hi[i], a.lo[i]);
        return a;
    }

    // Two neighbouring tiles of columns.
    static KGEN_DEVICE void load_b(const float* x, int stride, B& first, B& second) {
        const MmaLane lane = mma_lane();
        const float* at = x + lane.q * stride + lane.g;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            split_tf32(at[i * 4 * stride], first.hi[i], first.lo[i]);
            split_tf32(at[i * 4 * stride + 8], second.hi[i], second.lo[i]);
        }
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], const A& a, const B& b) {
        mma_tf32_16x8x8(acc, Pass == 0 ? a.lo : a.hi, Pass == 1 ? b.lo : b.hi);
    }
};

template <class T>
struct HalfGradientEngine {
    static constexpr int kRows = 16;
    static constexpr int kPasses = 1;
    static constexpr int kStrideBytes = 16;  // the eight rows of a matrix meet no bank twice

    struct A {
        u32 pair[4];
    };
    struct B {
        u32 pair[2];
    };

    static KGEN_DEVICE A load_a(const T* g, int stride) {
        const int matrix = lane_id() / 8, row = lane_id() % 8;
        A a;
        ldmatrix<4, true>(a.pair, g + (matrix / 2 * 8 + row) * stride + matrix % 2 * 8);
        return a;
    }

    static KGEN_DEVICE void load_b(const T* x, int stride, B& first, B& second) {
        const int matrix = lane_id() / 8, row = lane_id() % 8;
        u32 pairs[4];
        ldmatrix<4, true>(pairs, x + (matrix % 2 * 8 + row) * stride + matrix / 2 * 8);
        first = B{{pairs[0], pairs[1]}};
        second = B{{pairs[2], pairs[3]}};
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], const A& a, const B& b) {
        mma_16x8x16<T>(acc, a.pair, b.pair);
    }
};

template <>
struct GradientEngine<fp16> : HalfGradientEngine<fp16> {};
template <>
struct GradientEngine<bf16> : HalfGradientEngine<bf16> {};

}  // namespace detail

// gw[columns - 1 - d] = sum over b and t of g[b][t] * x[b][t - d]. A block has one channel and all
// batch rows, `Batch` of them in shared memory at a time.
//
// P[t][u] = sum over b of g[b][t] * x[b][u] is a product of matrices, summed along its diagonals.
// Tiles of P (16 x 8) at one distance t - u have one accumulator between them, for all their t. A
// warp holds `Group` distances in steps of 8 and walks down t: a fragment of x meets the first
// distance at one tile of g, the third at the next, and stays in registers until it has met all.
template <class T, class W, int Group, int Batch, int Warps>
class TapGradientMma {
    using Engine = detail::GradientEngine<T>;
    using A = typename Engine::A;
    using B = typename Engine::B;

    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kParts = Batch / Engine::kRows;  // fragments that cover the batch rows
    static constexpr int kUnroll = Group / 2;  // tiles of g until the window of x is renewed
    static constexpr int kLine = 8 * Group + 16;  // sums by d of a group; the last one is not used
    static constexpr int kTileStride = 9;         // of a tile in scratch
    static constexpr int kScratch = 272;          // a tile, seven rows of zeros before and after it
    static constexpr bool kPromote = sizeof(W) == 4;  // an fp32 gw, see mma.cuh

    static_assert(Group % 2 == 0, "a tile of g is two tiles of x further");
    static_assert(Batch % Engine::kRows == 0, "a fragment has 8 rows in fp32, 16 in 16 bits");

    using Sums = float[Group][4];

public:
    KGEN_DEVICE void operator()(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                int columns) {
        const i64 channel = blockIdx.x;
        const i64 stride = channels * columns;
        tiles_ = (columns + 15) / 16;
        const int padded = 16 * tiles_;
        stride_ = ((padded * static_cast<int>(sizeof(T)) + 127) / 128 * 128 +
                   Engine::kStrideBytes) /
                  static_cast<int>(sizeof(T));
        const int groups = (2 * tiles_ + Group - 1) / Group;

        // Shared memory: T gs[Batch][stride]; T xs[Batch][stride]; float lines[groups][kLine];
        // float scratch[Warps][kScratch].
        gs_ = dynamic_smem<T>();
        xs_ = gs_ + Batch * stride_;
        lines_ = reinterpret_cast<float*>(xs_ + Batch * stride_);
        const int warp = thread_rank() / kWarpSize;
        scratch_ = lines_ + groups * kLine + warp * kScratch;
        for (int i = thread_rank(); i < groups * kLine + Warps * kScratch; i += kThreads)
            lines_[i] = 0.0f;

        g += channel * columns;
        x += channel * columns;
        bool tame = true;
        for (i64 first = 0; first < batch; first += Batch) {
            // 1. Stage; rows that do not exist are zeros.
            sync_block();
            const int rows = static_cast<int>(min(batch - first, static_cast<i64>(Batch)));
            stage_rows(gs_, stride_, g + first * stride, stride, rows, columns, padded, kThreads);
            stage_rows(xs_, stride_, x + first * stride, stride, rows, columns, padded, kThreads);
            cp_async_commit();
            for (int i = rows * stride_ + thread_rank(); i < Batch * stride_; i += kThreads) {
                gs_[i] = from_float<T>(0.0f);
                xs_[i] = from_float<T>(0.0f);
            }
            cp_async_wait_all();
            sync_block();
            tame = tame && share_is_tame(gs_, stride_, rows, padded, kThreads) &&
                   share_is_tame(xs_, stride_, rows, padded, kThreads);

            // 2. Groups of distances, this warp's pairs; left-over pairs rotate over the warps.
            const int worker = (warp + static_cast<int>(channel % Warps)) % Warps;
            share_out<true>(groups, worker, Warps, [&](int group) {
                Sums sums = {};
                sum_group(sums, group * kUnroll);
                add_diagonals(sums, lines_ + group * kLine);
            });
        }

        // 3. A distance belongs to at most two groups, the later one first.
        __shared__ int flags[Warps];
        tame = all_of_block<Warps>(tame, flags);
        for (int d = thread_rank(); d < columns; d += kThreads) {
            const int group = (d + 15) / (8 * Group), place = (d + 15) % (8 * Group);
            float sum = group < groups ? lines_[group * kLine + place] : 0.0f;
            if (group > 0 && place < 15) sum += lines_[(group - 1) * kLine + place + 8 * Group];
            if (!tame)  // or a zero beyond the diagonal might have met a NaN
                sum = tap_gradient_naive(g, x, batch, stride, columns, d);
            gw[channel * columns + columns - 1 - d] = from_float<W>(sum);
        }
    }

private:
    // sums[i]: of tiles whose t - u is 16 * first_tile - 8 + 8 * i.
    KGEN_DEVICE void sum_group(Sums& sums, int first_tile) {
        B window[Group][kParts] = {};
#pragma unroll 1
        for (int tile = first_tile; tile < tiles_; tile += kUnroll) {
            if constexpr (kPromote) {
                Sums chain = {};
                walk(chain, window, tile, first_tile);
#pragma unroll
                for (int i = 0; i < Group; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i][j] += chain[i][j];
            } else {
                walk(sums, window, tile, first_tile);
            }
        }
    }

    // kUnroll tiles of g, after which the window is where it was.
    KGEN_DEVICE void walk(Sums& acc, B (&window)[Group][kParts], int tile, int first_tile) {
#pragma unroll
        for (int ahead = 0; ahead < kUnroll; ++ahead) {
            if (tile + ahead >= tiles_) break;
            const T* g = gs_ + 16 * (tile + ahead);
            const T* x = xs_ + 16 * (tile + ahead - first_tile);
            A a[kParts];
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int rows = part * Engine::kRows * stride_;
                a[part] = Engine::load_a(g + rows, stride_);
                Engine::load_b(x + rows, stride_, window[2 * ahead][part],
                               window[2 * ahead + 1][part]);
            }
            if constexpr (Engine::kPasses == 3) {
                pass<0>(acc, a, window, ahead);
                pass<1>(acc, a, window, ahead);
            }
            pass<Engine::kPasses - 1>(acc, a, window, ahead);
        }
    }

    template <int Pass>
    static KGEN_DEVICE void pass(Sums& acc, const A (&a)[kParts], const B (&window)[Group][kParts],
                                 int ahead) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < Group; ++i)
                Engine::template multiply<Pass>(
                    acc[i], a[part], window[(2 * ahead + 1 - i + Group) % Group][part]);
    }

    // Sum each tile along its diagonals into the group's line: line[8 i + j] is the distance
    // t - u = 16 * first_tile - 8 + 8 * i + (j - 7). Always by the same warp, in the same order.
    KGEN_DEVICE void add_diagonals(const Sums& sums, float* line) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < Group; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                scratch_[(7 + lane.g + j / 2 * 8) * kTileStride + 2 * lane.q + j % 2] = sums[i][j];
            sync_warp();
            // Diagonal j begins j - 7 rows down; what it has outside of the tile is zeros.
            if (lane_id() < 23) {
                const float* diagonal = scratch_ + lane_id() * kTileStride;
                float sum = 0.0f;
#pragma unroll
                for (int column = 0; column < 8; ++column)
                    sum += diagonal[column * (kTileStride + 1)];
                line[8 * i + lane_id()] += sum;
            }
            sync_warp();
        }
    }

    int tiles_, stride_;
    T* gs_;
    T* xs_;
    float* lines_;
    float* scratch_;
};

}  // namespace kgen
