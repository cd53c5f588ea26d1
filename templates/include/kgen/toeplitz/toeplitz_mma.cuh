// Triangular Toeplitz products on tensor cores (sm_80): y[b][row] = bias + sum over col of tap(|row - col|) *
// x[b][col].
//
// Data layout: A (M x K) is the Toeplitz matrix [T x T], made from the band (toeplitz.cuh) in registers; B (K x N) is
// x, whose N columns are batch rows.
//
// Precision. fp32 values are split into two fp16 terms once, in shared memory, and multiplied by three mma
// (3xfp16); partial sums of a few k-steps are promoted to fp32 registers, which keeps fp32's accuracy
// (mma.cuh). A block whose values exceed the exponent range of two fp16 terms uses 3xTF32, at half the speed.
// 16-bit x with fp32 taps uses TF32. 16-bit x with 16-bit taps is multiplied directly.
//
// Shared memory: W band[round_up(2 * elements, 128) + 64], in the layout of the policy (toeplitz_mma_policies.cuh);
// T xs[rows][x_stride].
//
// Synchronisation: stage, block barrier, a block-wide minimum (one barrier) that decides the precision, then, if
// values are split in place, one more barrier. Warps only read shared memory after that and do not wait for each
// other.
#pragma once

#include "kgen/toeplitz/toeplitz.cuh"
#include "kgen/toeplitz/toeplitz_mma_policies.cuh"

namespace kgen {
namespace detail {

// The number of taps up to the last one that is not 0, if zeros are skipped.
template <bool SkipZeros>
struct Lags {
    int lags;
    // Returns the first column, of a whole chunk, that has a tap for the lower tile that begins at `row`.
    template <int Chunk>
    KGEN_DEVICE int first_column(int row) const {
        return max(row - lags + 1, 0) / Chunk * Chunk;
    }
    // Returns the column from which on no row of the upper tile of `Rows` rows that begins at `row` has a tap.
    template <int Rows>
    KGEN_DEVICE int end_column(int row, int padded) const {
        return min(row + Rows - 1 + lags, padded);
    }
};
template <>
struct Lags<false> {
    template <int>
    KGEN_DEVICE int first_column(int) const { return 0; }
    template <int>
    KGEN_DEVICE int end_column(int, int padded) const { return padded; }
};

// The products of one warp: tiles of 16 * MTiles rows of y from a staged band and staged rows of x.
//
// A fragments are reused along diagonals. Fragment p of the warp's tile has the rows 8 p .. 8 p + 7 and 8 (p +
// MTiles) .. 8 (p + MTiles) + 7. Because the matrix is Toeplitz, fragment p of one step is fragment p + 1 of the step
// 8 columns later. A step therefore loads kNewFragments fragments and holds `MTiles` of them in registers.
template <class Policy, Triangle Side, class X, int MTiles, int NTiles, int Fold, int Gap,
          int Promotions, bool Promote, bool SkipZeros>
class ToeplitzWarp : Lags<SkipZeros> {
    using Band = typename Policy::Band;
    using FragmentA = typename Policy::FragmentA;
    using FragmentB = typename Policy::FragmentB;

    static constexpr bool kLower = Side == Triangle::lower;
    static constexpr int kRows = 16 * MTiles;
    static constexpr int kMmaK = Policy::kMmaK;
    static constexpr int kNewFragments = kMmaK / 8;  // fragments that a k-step loads
    static constexpr int kChunk = kRows / Promotions;
    static constexpr int kSteps = kChunk / kMmaK;

    static_assert(kChunk % kMmaK == 0 && kNewFragments * kSteps % MTiles == 0,
                  "after a chunk the fragments are in the same registers as before it");

    using Main = float[MTiles][NTiles][4];
    struct Sums {
        Main main;
        float correction[Policy::kCorrection ? MTiles : 1][Policy::kCorrection ? NTiles : 1][4];
    };

public:
    // band: written by Policy::store, element (row, row) at `front`. xs: rows of x, x_stride apart. lags: the taps
    // from this one on are 0 (SkipZeros).
    KGEN_DEVICE ToeplitzWarp(const Band* band, int copy, int front, const X* xs, int x_stride,
                             int rows, int padded, const Lags<SkipZeros>& lags)
        : Lags<SkipZeros>(lags), copy_(copy), padded_(padded) {
        const MmaLane lane = mma_lane();
        band_ = Policy::lane_base(band, copy, front - lane.g);
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {  // columns of B beyond the batch repeat the last row
            const int column = 8 * n + lane.g;
            rows_[n] =
                xs + min(column / Fold, rows - 1) * x_stride + padded_index(column % Fold * kRows);
        }
    }

    // Computes one tile and calls store(column of B, row in the tile, sum) for each element.
    template <class Store>
    KGEN_DEVICE void operator()(int row, Store store) {
        Sums sums = {};
        sum_tile(sums, row);
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int p = 0; p < 2 * MTiles; ++p) {
                    const int at = p / MTiles * 2 + i;
                    float sum = sums.main[p % MTiles][n][at];
                    if constexpr (Policy::kCorrection)
                        sum = fma(sums.correction[p % MTiles][n][at], 1.0f / 2048, sum);
                    store(8 * n + 2 * lane.q + i, 8 * p + lane.g, sum);
                }
            }
        }
    }

private:
    // Returns the index in a staged row of column `step`, a multiple of 16.
    static KGEN_DEVICE constexpr int padded_index(int step) { return step + step / kRows * Gap; }

    // Loads the fragment that is `index` blocks of 8 columns to the right of (row, column).
    KGEN_DEVICE FragmentA load_fragment_a(int row, int column, int index) const {
        return Policy::load_a(band_ + column - row + 8 * index, copy_, 8 * MTiles);
    }

    // Returns the register slot of a fragment.
    static KGEN_DEVICE constexpr int slot(int index) { return (index + 4 * MTiles) % MTiles; }

    // Multiplies one chunk of columns. With First >= 0 the chunk is on the diagonal, First k-steps from its begin,
    // and fragments that are all zero are skipped.
    template <int First, class Correction>
    KGEN_DEVICE void chunk(Main& acc, Correction& correction, FragmentA (&tiles)[MTiles], int row,
                           int column) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = max(1 - kNewFragments, 1 - MTiles); i <= 0; ++i)
                tiles[slot(kNewFragments * step + i)] =
                    load_fragment_a(row, column, kNewFragments * step + i);
            FragmentB x[NTiles];
#pragma unroll
            for (int n = 0; n < NTiles; ++n)
                x[n] = Policy::load_b(rows_[n] + padded_index(column) + step * kMmaK);
            if constexpr (Policy::kPasses >= 2) pass<First, 0>(acc, correction, tiles, x, step);
            if constexpr (Policy::kPasses >= 3) pass<First, 1>(acc, correction, tiles, x, step);
            pass<First, Policy::kPasses - 1>(acc, correction, tiles, x, step);
        }
    }

    // One of the term products of a k-step, for all tiles.
    template <int First, int Pass, class Correction>
    static KGEN_DEVICE void pass(Main& acc, Correction& correction,
                                 const FragmentA (&tiles)[MTiles],
                                 const FragmentB (&x)[NTiles], int step) {
#pragma unroll
        for (int p = 0; p < MTiles; ++p) {
            const int begin = kMmaK * (First + step);  // first column, counted from the diagonal
            const bool is_zero =
                kLower ? begin > 8 * (p + MTiles) + 7 : begin + kMmaK - 1 < 8 * p;
            if (First >= 0 && is_zero) continue;
#pragma unroll
            for (int n = 0; n < NTiles; ++n)
                Policy::template multiply<Pass>(
                    acc[p][n], correction[Policy::kCorrection ? p : 0][Policy::kCorrection ? n : 0],
                    tiles[slot(kNewFragments * step - p)], x[n]);
        }
    }

    // Adds a chunk to the sums. Promote: the mma accumulate from zero, and fp32 additions add their result.
    template <int First>
    KGEN_DEVICE void add_chunk(Sums& sums, FragmentA (&tiles)[MTiles], int row, int column) {
        if constexpr (Promote) {
            Main partial = {};
            chunk<First>(partial, sums.correction, tiles, row, column);
#pragma unroll
            for (int p = 0; p < MTiles; ++p)
#pragma unroll
                for (int n = 0; n < NTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums.main[p][n][i] += partial[p][n][i];
        } else {
            chunk<First>(sums.main, sums.correction, tiles, row, column);
        }
    }

    // Adds the chunks on the diagonal.
    template <int First>
    KGEN_DEVICE void add_diagonal(Sums& sums, FragmentA (&tiles)[MTiles], int row) {
        if constexpr (First * kMmaK < kRows) {
            add_chunk<First>(sums, tiles, row, row + First * kMmaK);
            add_diagonal<First + kSteps>(sums, tiles, row);
        }
    }

    // Computes all columns of the tile that begins at `row`.
    KGEN_DEVICE void sum_tile(Sums& sums, int row) {
        FragmentA tiles[MTiles];
        const int begin = kLower ? this->template first_column<kChunk>(row) : row;
#pragma unroll
        for (int i = 1 - MTiles; i <= -kNewFragments; ++i)
            tiles[slot(i)] = load_fragment_a(row, begin, i);
        if constexpr (kLower) {
#pragma unroll 1
            for (int column = begin; column < row; column += kChunk)
                add_chunk<-1>(sums, tiles, row, column);
            add_diagonal<0>(sums, tiles, row);
        } else {
            add_diagonal<0>(sums, tiles, row);
#pragma unroll 1
            for (int column = row + kRows; column < this->template end_column<kRows>(row, padded_); column += kChunk)
                add_chunk<-1>(sums, tiles, row, column);
        }
    }

    int copy_, padded_;
    const Band* band_;  // this lane's elements at column == row
    const X* rows_[NTiles];
};

}  // namespace detail

// y[b][row] = bias + sum over col of tap(|row - col|) * x[b][col]. A block computes one channel and 8 * NTiles / Fold
// batch rows; a warp takes tiles of 16 * MTiles rows in pairs of equal work.
//
//   MTiles, NTiles   mma tiles of a warp in M (16 rows) and N (8 columns)
//   Fold             for small batches: Fold adjacent tiles of outputs of one batch row are columns of B. The
//                    matrix is Toeplitz, so that all of them use the same A, with x shifted by a tile for each. x is
//                    padded with zeros at one end.
//   Promotions       promotions of partial sums to fp32 per 16 * MTiles columns; only if Promote
//   TBlocks          blocks that share the rows of a channel
//   SkipZeros        leave out products with taps that are all 0, at the far end of the filter
template <Triangle Side, class T, class W, int MTiles, int NTiles, int Fold, int Promotions,
          bool Promote, int Warps, int TBlocks, bool SkipZeros>
class ToeplitzMma {
    using Preferred = typename detail::MmaPolicyFor<T, W>::type;
    static constexpr bool kSplit = Preferred::kCorrection;

    static constexpr bool kLower = Side == Triangle::lower;
    static constexpr int kRows = 16 * MTiles;
    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kBatch = 8 * NTiles / Fold;   // batch rows of a block
    static constexpr int kSpan = Fold * kRows;          // outputs of a batch row that a warp sums
    // The eight rows of x of a B fragment are kBankOffset bytes apart modulo 128, so that loads have no bank
    // conflict. Rows that are tiles of one batch row (Fold) have gaps between them for that.
    static constexpr int kBankOffset = sizeof(T) == 4 ? 64 : 32;
    static constexpr int kGap =
        Fold == 1 || (sizeof(T) == 4 && MTiles % 2 != 0)
            ? 0
            : kBankOffset / static_cast<int>(sizeof(T));

    static_assert(8 % Fold == 0, "a fragment of B has 8 columns");

public:
    KGEN_DEVICE void operator()(const W* w, const T* x, T* y, i64 batch, i64 channels, int columns,
                                float bias) {
        const i64 block = blockIdx.x / TBlocks;
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

        const int stored = padded_index(padded_ + kSpan - kRows);  // of a row, zeros included
        const int elements = padded_ + kRows;
        const int band_bytes =
            static_cast<int>(sizeof(W)) * ((2 * elements + 127) / 128 * 128 + 64);
        x_stride_ = ((stored * static_cast<int>(sizeof(T)) + 127) / 128 * 128 + kBankOffset) /
                    static_cast<int>(sizeof(T));
        u8* memory = dynamic_smem<u8>();
        xs_ = reinterpret_cast<T*>(memory + band_bytes);
        begin_ = xs_ + (kLower ? padded_index(kSpan - kRows) : 0);

        stage(x, stored);
        Magnitudes of_taps;
#pragma unroll 8
        for (int i = lane_id(); i < columns; i += kWarpSize) of_taps.add(to_float(taps_[i]));
        of_taps.combine();
        if constexpr (SkipZeros) lags_.lags = count_lags();
        // Overlaps with the copies of x. The result is not used if the block needs another policy.
        store_policy_band<Preferred>(elements, of_taps.exponent());
        cp_async_wait_all();
        sync_block();

        // The range of the rows of this warp. Every warp has the range of the taps.
        __shared__ int exponents[kBatch];
        __shared__ int ranges[Warps];
        const int warp = thread_rank() / kWarpSize;
        int range = range_of(of_taps);
        for (int row = warp; row < rows_; row += Warps) {
            Magnitudes of_row;
            of_row.add_row(xs_ + row * x_stride_, stored);
            of_row.combine();
            range = min(range, range_of(of_row));
            if (lane_id() == 0) exponents[row] = of_row.exponent();
        }
        range = block_min<Warps>(range, ranges);
        if (range == kNonfinite) {
            sum_by_fma();
        } else if constexpr (!kSplit) {
            multiply<Preferred>(elements, 0, nullptr);
        } else if (range == kNarrowRange) {
            for (int row = warp; row < rows_; row += Warps)
                Preferred::split_row(xs_ + row * x_stride_, stored, power_of_two(exponents[row]));
            sync_block();
            multiply<Preferred>(elements, of_taps.exponent(), exponents);
        } else {
            store_policy_band<detail::Tf32MmaPolicy<T>>(elements, 0);
            sync_block();
            multiply<detail::Tf32MmaPolicy<T>>(elements, 0, nullptr);
        }
    }

private:
    static constexpr int kNonfinite = 0, kWideRange = 1, kNarrowRange = 2;

    // Returns the number of taps up to the last one that is not 0. All lanes of a warp count.
    KGEN_DEVICE int count_lags() const {
        int lags = 0;
#pragma unroll 8
        for (int i = lane_id(); i < columns_; i += kWarpSize)
            if (to_float(taps_[i]) != 0.0f) lags = max(lags, columns_ - i);
        return static_cast<int>(lanes_max<kWarpSize>(static_cast<float>(lags)));
    }

    // Returns which precision a set of values allows.
    static KGEN_DEVICE int range_of(const Magnitudes& values) {
        return !values.finite() ? kNonfinite : values.fits_split_fp16() ? kNarrowRange : kWideRange;
    }

    // Returns the index in a staged row of column `step`, a multiple of 16.
    static KGEN_DEVICE constexpr int padded_index(int step) { return step + step / kRows * kGap; }

    // Starts the copies of x and writes the zeros around it.
    KGEN_DEVICE void stage(const T* x, int stored) {
        if constexpr (Fold > 1) {
            for (int row = 0; row < rows_; ++row)
                for (int i = thread_rank(); i < stored; i += kThreads) {
                    const int from = i - static_cast<int>(begin_ - xs_);
                    if (from < 0 || from >= padded_index(columns_) ||
                        from % (kRows + kGap) >= kRows)
                        xs_[row * x_stride_ + i] = from_float<T>(0.0f);
                }
        }
        stage_rows<T, kRows, kGap>(begin_, x_stride_, x, stride_, rows_, columns_,
                                   Fold > 1 ? columns_ : padded_, kThreads);
        cp_async_commit();
    }

    // Elements of one copy of the band.
    template <class Band>
    static KGEN_DEVICE int copy_of(int elements) {
        constexpr int kSize = static_cast<int>(sizeof(Band));
        return ((elements * kSize + 127) / 128 * 128 + 64) / kSize;
    }

    // Writes the band in the layout of a policy.
    template <class Policy>
    KGEN_DEVICE void store_policy_band(int elements, int taps_exponent) const {
        using Band = typename Policy::Band;
        Band* band = dynamic_smem<Band>();
        const int copy = copy_of<Band>(elements);
        const float scale = Policy::kCorrection ? power_of_two(taps_exponent) : 1.0f;
        const auto element = [&](int i) {
            return to_float(band_element<Side>(taps_, columns_, front_, i)) * scale;
        };
#pragma unroll 2
        for (int i = 2 * thread_rank(); i < elements; i += 2 * kThreads)  // elements are even
            Policy::store(band, copy, i, element(i), element(i + 1), element(i + 2));
    }

    // Computes and stores the outputs of this warp. exponents: of the batch rows, if the policy scales them.
    template <class Policy>
    KGEN_DEVICE void multiply(int elements, int taps_exponent, const int* exponents) {
        using Band = typename Policy::Band;
        const Band* band = dynamic_smem<Band>();
        const int copy = copy_of<Band>(elements);
        // The warp that takes a left-over pair rotates with the block, to load all four schedulers of an SM.
        detail::ToeplitzWarp<Policy, Side, T, MTiles, NTiles, Fold, kGap, Promotions, Promote,
                             SkipZeros>
            sum(band, copy, front_, xs_, x_stride_, rows_, padded_, lags_);
        const i64 block = blockIdx.x / TBlocks;
        const int t_block = static_cast<int>(blockIdx.x % TBlocks);
        const int warp = (thread_rank() / kWarpSize + static_cast<int>(block % Warps)) % Warps;
        distribute<true>(padded_ / kSpan, t_block * Warps + warp, TBlocks * Warps, [&](int tile) {
            const int row = tile * kSpan;
            sum(kLower ? row + kSpan - kRows : row, [&](int column, int row_of_tile, float value) {
                const int b = column / Fold, t = row + column % Fold * kRows + row_of_tile;
                if (b >= rows_ || t >= columns_) return;
                if constexpr (Policy::kCorrection)
                    value = scale_by(value, -(taps_exponent + exponents[b]));
                y_[b * stride_ + t] = from_float<T>(value + bias_);
            });
        });
    }

    // Computes a block whose x or w has NaN or Inf, element by element, so that no zero is multiplied.
    KGEN_DEVICE void sum_by_fma() {
        const auto column = [](int step) { return padded_index(step); };
        const int t_block = static_cast<int>(blockIdx.x % TBlocks);
        for (int t = t_block * kThreads + thread_rank(); t < columns_; t += TBlocks * kThreads)
#pragma unroll 1
            for (int b = 0; b < rows_; ++b)
                y_[b * stride_ + t] = from_float<T>(
                    toeplitz_naive<Side>(taps_, begin_ + b * x_stride_, t, columns_, column) +
                    bias_);
    }

    int columns_, padded_, front_, rows_, x_stride_;
    detail::Lags<SkipZeros> lags_;
    i64 stride_;
    float bias_;
    const W* taps_;
    T* xs_;     // staged rows
    T* begin_;  // column 0 of the first one
    T* y_;
};

}  // namespace kgen
