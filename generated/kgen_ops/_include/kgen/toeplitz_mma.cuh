// Triangular Toeplitz products on tensor cores (sm_80).
//
// See toeplitz.cuh for the band. All of a block's rows and the band lie in shared memory, so that its
// warps share nothing but reads and never wait for each other after staging.
//
// fp32 values are split into two TF32 numbers in registers, three products for one (3xTF32), summed
// in chains of a few steps from zero: that keeps fp32's accuracy. 16-bit values that meet fp32 taps
// are TF32 numbers as they are. 16-bit values with 16-bit taps multiply directly.
#pragma once

#include "mma.cuh"
#include "toeplitz.cuh"

namespace kgen {
namespace detail {

// What a warp multiplies: Tf32 for fp32 taps, Half for 16-bit ones.
//
// `Tile` is a fragment of A: eight rows of the matrix, and the eight that lie `apart` rows below. The
// columns of a step are numbered so that a lane's are neighbours: kStep / 4 consecutive ones from
// q * kStep / 4 on. `Column` is a fragment of B in the same numbering.
template <class T>
struct Tf32Engine {
    static constexpr int kStep = 8;
    static constexpr bool kSplitX = sizeof(T) == 4;
    static constexpr int kPasses = kSplitX ? 3 : 2;

    using Band = u32;  // two copies: the high parts of all elements, then the low parts
    struct Tile {
        u32 hi[4], lo[4];
    };
    struct Column {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void put(Band* band, int copy, int index, float element) {
        split_tf32(element, band[index], band[copy + index]);
    }

    // Where a lane finds its elements, given where they begin.
    static KGEN_DEVICE const Band* origin(const Band* band, int, int start) { return band + start; }

    static KGEN_DEVICE Tile load_tile(const Band* band, int copy, int apart) {
        Tile tile;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tile.hi[i] = band[i / 2 - i % 2 * apart];
            tile.lo[i] = band[copy + i / 2 - i % 2 * apart];
        }
        return tile;
    }

    static KGEN_DEVICE Column load_column(const T* x) {
        const Vec<T, 2> two = *reinterpret_cast<const Vec<T, 2>*>(x);
        Column column = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kSplitX) {
                split_tf32(two[i], column.hi[i], column.lo[i]);
            } else {
                column.hi[i] = bit_cast<u32>(to_float(two[i]));
            }
        }
        return column;
    }

    // The passes in the order of their size, small first.
    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], const Tile& tile, const Column& x) {
        mma_tf32_16x8x8(acc, Pass == 0 ? tile.lo : tile.hi, Pass == 1 && kSplitX ? x.lo : x.hi);
    }
};

template <class T>
struct HalfEngine {
    static constexpr int kStep = 16;
    static constexpr int kPasses = 1;

    using Band = T;  // two copies, the second one element ahead: pairs start at odd elements too
    struct Tile {
        u32 pair[4];
    };
    struct Column {
        u32 pair[2];
    };

    static KGEN_DEVICE void put(Band* band, int copy, int index, T element) {
        band[index] = element;
        if (index > 0) band[copy + index - 1] = element;
    }

    static KGEN_DEVICE const Band* origin(const Band* band, int copy, int start) {
        return band + start + (start % 2 != 0 ? copy - 1 : 0);
    }

    static KGEN_DEVICE Tile load_tile(const Band* band, int, int apart) {
        Tile tile;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            tile.pair[i] = *reinterpret_cast<const u32*>(band + i / 2 * 2 - i % 2 * apart);
        return tile;
    }

    static KGEN_DEVICE Column load_column(const T* x) {
        const Vec<u32, 2> two = *reinterpret_cast<const Vec<u32, 2>*>(x);
        return Column{{two[0], two[1]}};
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&acc)[4], const Tile& tile, const Column& x) {
        mma_16x8x16<T>(acc, tile.pair, x.pair);
    }
};

template <class T, class W>
struct EngineOf {
    using type = Tf32Engine<T>;
};
template <>
struct EngineOf<fp16, fp16> {
    using type = HalfEngine<fp16>;
};
template <>
struct EngineOf<bf16, bf16> {
    using type = HalfEngine<bf16>;
};

}  // namespace detail

// y[b][row] = bias + sum over col of tap(|row - col|) * x[b][col]. A block has one channel and
// 8 * Columns batch rows; a warp takes tiles of 16 * Tiles rows in pairs of equal work.
//
// Fragment p of a warp's tile has the rows 8 p .. and 8 (p + Tiles) .., so that it is, 8 columns on,
// fragment p + 1 of before: a step of columns loads one new fragment, and `Tiles` of them are held.
//
// Chains: chunks that the tile's diagonal is cut into, Parts: blocks that share a channel's rows.
// Promote: each chunk is a chain of its own (see mma.cuh).
//
// Fold, for small batches: Fold neighbouring tiles of a batch row are as many columns of B. The matrix
// being Toeplitz, a tile's product with x is the product of the tile `Fold` rows of tiles further
// down with x moved by as much; x that is not there is zeros, before its begin or behind its end.
template <Triangle Side, class T, class W, int Tiles, int Columns, int Fold, int Chains,
          bool Promote, int Warps, int Parts>
class ToeplitzMma {
    using Engine = typename detail::EngineOf<T, W>::type;
    using Band = typename Engine::Band;
    using Tile = typename Engine::Tile;
    using Column = typename Engine::Column;

    static constexpr bool kLower = Side == Triangle::lower;
    static constexpr int kRows = 16 * Tiles;
    static constexpr int kStep = Engine::kStep;
    static constexpr int kNew = kStep / 8;  // fragments that a step loads
    static constexpr int kChunk = kRows / Chains;
    static constexpr int kSteps = kChunk / kStep;
    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kBatch = 8 * Columns / Fold;  // batch rows of a block
    static constexpr int kSpan = Fold * kRows;         // outputs of a batch row that a warp sums
    // Folded columns lie kRows apart: gaps keep their loads 8 banks apart, as batch rows are.
    static constexpr int kGap = Fold > 1 ? 32 / static_cast<int>(sizeof(T)) : 0;

    static_assert(8 % Fold == 0, "a fragment of B has 8 columns");
    static_assert(kChunk % kStep == 0 && kNew * kSteps % Tiles == 0,
                  "a chunk is whole steps, after which the fragments are where they were");

    using Sums = float[Tiles][Columns][4];

public:
    KGEN_DEVICE void operator()(const W* w, const T* x, T* y, i64 batch, i64 channels, int columns,
                                float bias) {
        const i64 block = blockIdx.x / Parts;
        const int part = static_cast<int>(blockIdx.x % Parts);
        const i64 channel = block % channels;
        const i64 first = block / channels * kBatch;
        const int rows = static_cast<int>(min(batch - first, static_cast<i64>(kBatch)));
        const i64 stride = channels * columns;
        const i64 offset = first * stride + channel * columns;

        // Shared memory: Band band[2][copy]; T xs[rows][x_stride]. Rows start 8 banks apart, so that
        // the eight batch rows of a load meet no bank twice; the copies 16 banks.
        columns_ = columns;
        padded_ = (columns + kSpan - 1) / kSpan * kSpan;
        front_ = band_front<Side, kRows>(padded_);
        const int stored = place(padded_ + kSpan - kRows);  // with the zeros
        x_stride_ = ((stored * static_cast<int>(sizeof(T)) + 127) / 128 * 128 + 32) /
                    static_cast<int>(sizeof(T));
        const int elements = padded_ + kRows;
        copy_ = ((elements * static_cast<int>(sizeof(Band)) + 127) / 128 * 128 + 64) /
                static_cast<int>(sizeof(Band));
        band_ = dynamic_smem<Band>();
        T* xs = reinterpret_cast<T*>(band_ + 2 * copy_);

        // 1. Stage.
        const W* taps = w + channel * columns;
        T* begin = xs + (kLower ? place(kSpan - kRows) : 0);
        if constexpr (Fold > 1) {
            for (int row = 0; row < rows; ++row)
                for (int i = thread_rank(); i < stored; i += kThreads) {
                    const int from = i - static_cast<int>(begin - xs);
                    if (from < 0 || from >= place(columns) || from % (kRows + kGap) >= kRows)
                        xs[row * x_stride_ + i] = from_float<T>(0.0f);
                }
        }
        stage_rows<T, kRows, kGap>(begin, x_stride_, x + offset, stride, rows, columns,
                                   Fold > 1 ? columns : padded_, kThreads);
        cp_async_commit();
        bool tame = true;
        for (int i = thread_rank(); i < elements; i += kThreads) {
            const W element = band_element<Side>(taps, columns, front_, i);
            Engine::put(band_, copy_, i, element);
            tame = tame && is_tame(to_float(element));
        }
        cp_async_wait_all();
        sync_block();
        __shared__ int flags[Warps];
        tame = tame && share_is_tame(xs, x_stride_, rows, stored, kThreads);
        if (!all_of_block<Warps>(tame, flags)) {
            sum_plainly(taps, begin, rows, part, y + offset, stride, bias);
            return;
        }

        const MmaLane lane = mma_lane();
        tiles_ = Engine::origin(band_, copy_, front_ + kStep / 4 * lane.q - lane.g);
#pragma unroll
        for (int n = 0; n < Columns; ++n) {  // a row that does not exist repeats the last one
            const int column = 8 * n + lane.g;
            rows_[n] = xs + min(column / Fold, rows - 1) * x_stride_ +
                       place(column % Fold * kRows) + kStep / 4 * lane.q;
        }

        // 2. Tiles of rows, this warp's pairs. If pairs are left over, another warp has them in the
        // next block: a warp's number decides its scheduler.
        const int warp = (thread_rank() / kWarpSize + static_cast<int>(block % Warps)) % Warps;
        share_out<true>(padded_ / kSpan, part * Warps + warp, Parts * Warps, [&](int tile) {
            Sums sums = {};
            const int row = tile * kSpan;
            sum_tile(sums, kLower ? row + kSpan - kRows : row);
            store_tile(sums, row, rows, y + offset, stride, bias);
        });
    }

private:
    // Where a step that is a multiple of 16 (or a count of steps) lies in a row in shared memory.
    static KGEN_DEVICE constexpr int place(int step) { return step + step / kRows * kGap; }

    // Fragment `index`, counted in 8 columns minus 8 rows from (row, column).
    KGEN_DEVICE Tile load_tile(int row, int column, int index) const {
        return Engine::load_tile(tiles_ + column - row + 8 * index, copy_, 8 * Tiles);
    }

    static KGEN_DEVICE constexpr int slot(int index) { return (index + 4 * Tiles) % Tiles; }

    // Multiply one chunk of columns. First < 0: all of it. Else it is the diagonal's, First steps
    // from its begin, and what lies beyond the triangle is left out.
    template <int First>
    KGEN_DEVICE void chunk(Sums& acc, Tile (&tiles)[Tiles], int row, int column) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 1 - kNew; i <= 0; ++i)
                tiles[slot(kNew * step + i)] = load_tile(row, column, kNew * step + i);
            Column x[Columns];
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                x[n] = Engine::load_column(rows_[n] + place(column) + step * kStep);
            if constexpr (Engine::kPasses >= 2) pass<First, 0>(acc, tiles, x, step);
            if constexpr (Engine::kPasses >= 3) pass<First, 1>(acc, tiles, x, step);
            pass<First, Engine::kPasses - 1>(acc, tiles, x, step);
        }
    }

    template <int First, int Pass>
    static KGEN_DEVICE void pass(Sums& acc, const Tile (&tiles)[Tiles], const Column (&x)[Columns],
                                 int step) {
#pragma unroll
        for (int p = 0; p < Tiles; ++p) {
            const int begin = kStep * (First + step);  // of the step's columns, from the diagonal
            const bool beyond =
                kLower ? begin > 8 * (p + Tiles) + 7 : begin + kStep - 1 < 8 * p;
            if (First >= 0 && beyond) continue;
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                Engine::template multiply<Pass>(acc[p][n], tiles[slot(kNew * step - p)], x[n]);
        }
    }

    // A chunk into the tile's sums, as a chain of its own if Promote.
    template <int First>
    KGEN_DEVICE void add_chunk(Sums& sums, Tile (&tiles)[Tiles], int row, int column) {
        if constexpr (Promote) {
            Sums chain = {};
            chunk<First>(chain, tiles, row, column);
#pragma unroll
            for (int p = 0; p < Tiles; ++p)
#pragma unroll
                for (int n = 0; n < Columns; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[p][n][i] += chain[p][n][i];
        } else {
            chunk<First>(sums, tiles, row, column);
        }
    }

    template <int First>
    KGEN_DEVICE void add_diagonal(Sums& sums, Tile (&tiles)[Tiles], int row) {
        if constexpr (First * kStep < kRows) {
            add_chunk<First>(sums, tiles, row, row + First * kStep);
            add_diagonal<First + kSteps>(sums, tiles, row);
        }
    }

    KGEN_DEVICE void sum_tile(Sums& sums, int row) {
        Tile tiles[Tiles];
        const int begin = kLower ? 0 : row;
#pragma unroll
        for (int i = 1 - Tiles; i <= -kNew; ++i) tiles[slot(i)] = load_tile(row, begin, i);
        if constexpr (kLower) {
#pragma unroll 1
            for (int column = 0; column < row; column += kChunk)
                add_chunk<-1>(sums, tiles, row, column);
            add_diagonal<0>(sums, tiles, row);
        } else {
            add_diagonal<0>(sums, tiles, row);
#pragma unroll 1
            for (int column = row + kRows; column < padded_; column += kChunk)
                add_chunk<-1>(sums, tiles, row, column);
        }
    }

    KGEN_DEVICE void store_tile(const Sums& sums, int row, int rows, T* y, i64 stride, float bias) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < Columns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = 8 * n + 2 * lane.q + i, b = column / Fold;
                if (b >= rows) continue;
                const int t = row + column % Fold * kRows + lane.g;
                T* target = y + b * stride + t;
#pragma unroll
                for (int p = 0; p < 2 * Tiles; ++p)
                    if (t + 8 * p < columns_)
                        target[8 * p] =
                            from_float<T>(sums[p % Tiles][n][p / Tiles * 2 + i] + bias);
            }
        }
    }

    // All outputs of a block whose x or w has NaN or Inf, one by one: no zero is multiplied.
    KGEN_DEVICE void sum_plainly(const W* taps, const T* xs, int rows, int part, T* y, i64 stride,
                                 float bias) {
        const auto column = [](int step) { return place(step); };
        for (int t = part * kThreads + thread_rank(); t < columns_; t += Parts * kThreads)
#pragma unroll 1
            for (int b = 0; b < rows; ++b)
                y[b * stride + t] = from_float<T>(
                    toeplitz_naive<Side>(taps, xs + b * x_stride_, t, columns_, column) + bias);
    }

    int columns_, padded_, front_, x_stride_, copy_;
    Band* band_;
    const Band* tiles_;  // this lane's elements at column - row = 0
    const T* rows_[Columns];
};

}  // namespace kgen
