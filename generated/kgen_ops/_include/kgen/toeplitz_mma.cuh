// Triangular Toeplitz products on tensor cores (sm_80).
//
// See toeplitz.cuh for the band. All of a block's rows and the band lie in shared memory, so that its
// warps share nothing but reads and never wait for each other after staging.
//
// fp32 values are split into two fp16 numbers each, once, in shared memory; three products for one,
// summed in chains of a few steps from zero: that keeps fp32's accuracy. Blocks whose values lie too
// far apart for fp16's exponent take two TF32 numbers instead, at half the speed. 16-bit values that
// meet fp32 taps are TF32 numbers as they are. 16-bit values with 16-bit taps multiply directly.
#pragma once

#include "toeplitz.cuh"
#include "toeplitz_engines.cuh"

namespace kgen {
namespace detail {

// The tiles of rows that one warp sums, of what a block has staged.
//
// Fragment p of a warp's tile has the rows 8 p .. and 8 (p + Tiles) .., so that it is, 8 columns on,
// fragment p + 1 of before: a step of columns loads kNew new fragments, and `Tiles` of them are held.
template <class Engine, Triangle Side, class X, int Tiles, int Columns, int Fold, int Gap,
          int Chains, bool Promote>
class ToeplitzWarp {
    using Band = typename Engine::Band;
    using Tile = typename Engine::Tile;
    using Column = typename Engine::Column;

    static constexpr bool kLower = Side == Triangle::lower;
    static constexpr int kRows = 16 * Tiles;
    static constexpr int kStep = Engine::kStep;
    static constexpr int kNew = kStep / 8;  // fragments that a step loads
    static constexpr int kChunk = kRows / Chains;
    static constexpr int kSteps = kChunk / kStep;

    static_assert(kChunk % kStep == 0 && kNew * kSteps % Tiles == 0,
                  "a chunk is whole steps, after which the fragments are where they were");

    using Main = float[Tiles][Columns][4];
    struct Sums {
        Main main;
        float small[Engine::kSmall ? Tiles : 1][Engine::kSmall ? Columns : 1][4];
    };

public:
    // band: from Engine::put, element (row, row) at `front`; xs: rows of x, x_stride apart.
    KGEN_DEVICE ToeplitzWarp(const Band* band, int copy, int front, const X* xs, int x_stride,
                             int rows, int padded)
        : copy_(copy), padded_(padded) {
        const MmaLane lane = mma_lane();
        band_ = Engine::origin(band, copy, front - lane.g);
#pragma unroll
        for (int n = 0; n < Columns; ++n) {  // a row that does not exist repeats the last one
            const int column = 8 * n + lane.g;
            rows_[n] = xs + min(column / Fold, rows - 1) * x_stride + place(column % Fold * kRows);
        }
    }

    // store(column, row, sum): column of B, row of the tile, in which the sum is.
    template <class Store>
    KGEN_DEVICE void operator()(int row, Store store) {
        Sums sums = {};
        sum_tile(sums, row);
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < Columns; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int p = 0; p < 2 * Tiles; ++p) {
                    const int at = p / Tiles * 2 + i;
                    float sum = sums.main[p % Tiles][n][at];
                    if constexpr (Engine::kSmall)
                        sum = fma(sums.small[p % Tiles][n][at], 1.0f / 2048, sum);
                    store(8 * n + 2 * lane.q + i, 8 * p + lane.g, sum);
                }
            }
        }
    }

private:
    // Where a step that is a multiple of 16 (or a count of steps) lies in a row in shared memory.
    static KGEN_DEVICE constexpr int place(int step) { return step + step / kRows * Gap; }

    // Fragment `index`, counted in 8 columns minus 8 rows from (row, column).
    KGEN_DEVICE Tile load_tile(int row, int column, int index) const {
        return Engine::load_tile(band_ + column - row + 8 * index, copy_, 8 * Tiles);
    }

    static KGEN_DEVICE constexpr int slot(int index) { return (index + 4 * Tiles) % Tiles; }

    // Multiply one chunk of columns. First < 0: all of it. Else it is the diagonal's, First steps
    // from its begin, and what lies beyond the triangle is left out.
    template <int First, class Small>
    KGEN_DEVICE void chunk(Main& acc, Small& small, Tile (&tiles)[Tiles], int row, int column) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = max(1 - kNew, 1 - Tiles); i <= 0; ++i)
                tiles[slot(kNew * step + i)] = load_tile(row, column, kNew * step + i);
            Column x[Columns];
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                x[n] = Engine::load_column(rows_[n] + place(column) + step * kStep);
            if constexpr (Engine::kPasses >= 2) pass<First, 0>(acc, small, tiles, x, step);
            if constexpr (Engine::kPasses >= 3) pass<First, 1>(acc, small, tiles, x, step);
            pass<First, Engine::kPasses - 1>(acc, small, tiles, x, step);
        }
    }

    template <int First, int Pass, class Small>
    static KGEN_DEVICE void pass(Main& acc, Small& small, const Tile (&tiles)[Tiles],
                                 const Column (&x)[Columns], int step) {
#pragma unroll
        for (int p = 0; p < Tiles; ++p) {
            const int begin = kStep * (First + step);  // of the step's columns, from the diagonal
            const bool beyond =
                kLower ? begin > 8 * (p + Tiles) + 7 : begin + kStep - 1 < 8 * p;
            if (First >= 0 && beyond) continue;
#pragma unroll
            for (int n = 0; n < Columns; ++n)
                Engine::template multiply<Pass>(
                    acc[p][n], small[Engine::kSmall ? p : 0][Engine::kSmall ? n : 0],
                    tiles[slot(kNew * step - p)], x[n]);
        }
    }

    // A chunk into the tile's sums, as a chain of its own if Promote.
    template <int First>
    KGEN_DEVICE void add_chunk(Sums& sums, Tile (&tiles)[Tiles], int row, int column) {
        if constexpr (Promote) {
            Main chain = {};
            chunk<First>(chain, sums.small, tiles, row, column);
#pragma unroll
            for (int p = 0; p < Tiles; ++p)
#pragma unroll
                for (int n = 0; n < Columns; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums.main[p][n][i] += chain[p][n][i];
        } else {
            chunk<First>(sums.main, sums.small, tiles, row, column);
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

    int copy_, padded_;
    const Band* band_;  // this lane's elements at column - row = 0
    const X* rows_[Columns];
};

}  // namespace detail

// y[b][row] = bias + sum over col of tap(|row - col|) * x[b][col]. A block has one channel and
// 8 * Columns batch rows; a warp takes tiles of 16 * Tiles rows in pairs of equal work.
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
    using Best = typename detail::EngineOf<T, W>::type;
    static constexpr bool kSplit = Best::kSmall;

    static constexpr bool kLower = Side == Triangle::lower;
    static constexpr int kRows = 16 * Tiles;
    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kBatch = 8 * Columns / Fold;  // batch rows of a block
    static constexpr int kSpan = Fold * kRows;         // outputs of a batch row that a warp sums
    // The eight rows of x that a fragment of B takes lie so that their loads meet no bank twice:
    // kSkew bytes apart, modulo 128. Where they are tiles of one batch row, gaps see to it.
    static constexpr int kSkew = sizeof(T) == 4 ? 64 : 32;
    static constexpr int kGap =
        Fold == 1 || (sizeof(T) == 4 && Tiles % 2 != 0) ? 0 : kSkew / static_cast<int>(sizeof(T));

    static_assert(8 % Fold == 0, "a fragment of B has 8 columns");

public:
    KGEN_DEVICE void operator()(const W* w, const T* x, T* y, i64 batch, i64 channels, int columns,
                                float bias) {
        const i64 block = blockIdx.x / Parts;
        const i64 channel = block % channels;
        const i64 first = block / channels * kBatch;
        stride_ = channels * columns;
        columns_ = columns;
        rows_ = static_cast<int>(min(batch - first, static_cast<i64>(kBatch)));
        padded_ = (columns + kSpan - 1) / kSpan * kSpan;
        front_ = band_front<Side, kRows>(padded_);
        bias_ = bias;
        taps_ = w + channel * columns;
        x += first * stride_ + channel * columns;
        y_ = y + first * stride_ + channel * columns;

        // Shared memory: W band[round_up(2 * elements, 128) + 64], which the engines fill as they
        // need it; T xs[rows][x_stride].
        const int stored = place(padded_ + kSpan - kRows);  // of a row, with the zeros
        const int elements = padded_ + kRows;
        const int band_bytes =
            static_cast<int>(sizeof(W)) * ((2 * elements + 127) / 128 * 128 + 64);
        x_stride_ = ((stored * static_cast<int>(sizeof(T)) + 127) / 128 * 128 + kSkew) /
                    static_cast<int>(sizeof(T));
        u8* memory = dynamic_smem<u8>();
        xs_ = reinterpret_cast<T*>(memory + band_bytes);
        begin_ = xs_ + (kLower ? place(kSpan - kRows) : 0);

        stage(x, stored);
        Magnitudes of_taps;
#pragma unroll 8
        for (int i = lane_id(); i < columns; i += kWarpSize) of_taps.add(to_float(taps_[i]));
        of_taps.combine();
        // While rows are on their way; of no use if this block turns out to need other numbers.
        put_band<Best>(elements, of_taps.exponent());
        cp_async_wait_all();
        sync_block();

        // All of a warp's rows; every warp knows the taps.
        __shared__ int exponents[kBatch];
        __shared__ int fates[Warps];
        const int warp = thread_rank() / kWarpSize;
        int fate = fate_of(of_taps);
        for (int row = warp; row < rows_; row += Warps) {
            Magnitudes of_row;
            of_row.add_row(xs_ + row * x_stride_, stored);
            of_row.combine();
            fate = min(fate, fate_of(of_row));
            if (lane_id() == 0) exponents[row] = of_row.exponent();
        }
        fate = least_of_block<Warps>(fate, fates);
        if (fate == kWild) {
            sum_plainly();
        } else if constexpr (!kSplit) {
            multiply<Best>(elements, 0, nullptr);
        } else if (fate == kSplits) {
            for (int row = warp; row < rows_; row += Warps)
                Best::split_row(xs_ + row * x_stride_, stored, power_of_two(exponents[row]));
            sync_block();
            multiply<Best>(elements, of_taps.exponent(), exponents);
        } else {
            put_band<detail::Tf32Engine<T>>(elements, 0);
            sync_block();
            multiply<detail::Tf32Engine<T>>(elements, 0, nullptr);
        }
    }

private:
    static constexpr int kWild = 0, kTame = 1, kSplits = 2;

    static KGEN_DEVICE int fate_of(const Magnitudes& values) {
        return !values.tame() ? kWild : values.splits() ? kSplits : kTame;
    }

    // Where a step that is a multiple of 16 (or a count of steps) lies in a row in shared memory.
    static KGEN_DEVICE constexpr int place(int step) { return step + step / kRows * kGap; }

    KGEN_DEVICE void stage(const T* x, int stored) {
        if constexpr (Fold > 1) {
            for (int row = 0; row < rows_; ++row)
                for (int i = thread_rank(); i < stored; i += kThreads) {
                    const int from = i - static_cast<int>(begin_ - xs_);
                    if (from < 0 || from >= place(columns_) || from % (kRows + kGap) >= kRows)
                        xs_[row * x_stride_ + i] = from_float<T>(0.0f);
                }
        }
        stage_rows<T, kRows, kGap>(begin_, x_stride_, x, stride_, rows_, columns_,
                                   Fold > 1 ? columns_ : padded_, kThreads);
        cp_async_commit();
    }

    // Elements of one copy of an engine's band.
    template <class Band>
    static KGEN_DEVICE int copy_of(int elements) {
        constexpr int kSize = static_cast<int>(sizeof(Band));
        return ((elements * kSize + 127) / 128 * 128 + 64) / kSize;
    }

    template <class Engine>
    KGEN_DEVICE void put_band(int elements, int taps_exponent) const {
        using Band = typename Engine::Band;
        Band* band = dynamic_smem<Band>();
        const int copy = copy_of<Band>(elements);
        const float scale = Engine::kSmall ? power_of_two(taps_exponent) : 1.0f;
        const auto element = [&](int i) {
            return to_float(band_element<Side>(taps_, columns_, front_, i)) * scale;
        };
#pragma unroll 2
        for (int i = 2 * thread_rank(); i < elements; i += 2 * kThreads)  // elements are even
            Engine::put(band, copy, i, element(i), element(i + 1), element(i + 2));
    }

    // The engine's band is in shared memory. exponents: of the batch rows, where the engine splits.
    template <class Engine>
    KGEN_DEVICE void multiply(int elements, int taps_exponent, const int* exponents) {
        using Band = typename Engine::Band;
        const Band* band = dynamic_smem<Band>();
        const int copy = copy_of<Band>(elements);
        // If pairs are left over, another warp has them in the next block: a warp's number decides
        // its scheduler.
        detail::ToeplitzWarp<Engine, Side, T, Tiles, Columns, Fold, kGap, Chains, Promote> sum(
            band, copy, front_, xs_, x_stride_, rows_, padded_);
        const i64 block = blockIdx.x / Parts;
        const int part = static_cast<int>(blockIdx.x % Parts);
        const int warp = (thread_rank() / kWarpSize + static_cast<int>(block % Warps)) % Warps;
        share_out<true>(padded_ / kSpan, part * Warps + warp, Parts * Warps, [&](int tile) {
            const int row = tile * kSpan;
            sum(kLower ? row + kSpan - kRows : row, [&](int column, int row_of_tile, float value) {
                const int b = column / Fold, t = row + column % Fold * kRows + row_of_tile;
                if (b >= rows_ || t >= columns_) return;
                if constexpr (Engine::kSmall)
                    value = scale_by(value, -(taps_exponent + exponents[b]));
                y_[b * stride_ + t] = from_float<T>(value + bias_);
            });
        });
    }

    // All outputs of a block whose x or w has NaN or Inf, one by one: no zero is multiplied.
    KGEN_DEVICE void sum_plainly() {
        const auto column = [](int step) { return place(step); };
        const int part = static_cast<int>(blockIdx.x % Parts);
        for (int t = part * kThreads + thread_rank(); t < columns_; t += Parts * kThreads)
#pragma unroll 1
            for (int b = 0; b < rows_; ++b)
                y_[b * stride_ + t] = from_float<T>(
                    toeplitz_naive<Side>(taps_, begin_ + b * x_stride_, t, columns_, column) +
                    bias_);
    }

    int columns_, padded_, front_, rows_, x_stride_;
    i64 stride_;
    float bias_;
    const W* taps_;
    T* xs_;     // what is staged ...
    T* begin_;  // ... and where column 0 is
    T* y_;
};

}  // namespace kgen
