// Products with triangular Toeplitz matrices: staging in shared memory, and kernels that use FMAs.
//
//     y[row] = sum over col of tap(|row - col|) * x[col],  col <= row (lower) or col >= row (upper)
//     tap(d) = w[columns - 1 - d]
//
// Data layout: the matrix is not stored. Its element depends only on col - row, so a one-dimensional array, the
// band, holds it: band[front + col - row] is the element at (row, col). The band includes zeros beyond the
// diagonal, so that inner loops compare no indices.
//
// NaN and Inf: 0 * NaN is NaN. Where x holds NaN or Inf, the zeros of a tile on the diagonal would spread it to
// rows that do not depend on it. A kernel therefore recomputes outputs that are not finite (or all outputs of a
// block whose inputs are not finite), element by element and inside the triangle.
//
// Shared memory and synchronisation: each kernel body below states its own map. A block stages, passes a block
// barrier and computes; the bodies that loop over chunks have one barrier before and one after staging.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace kgen {

// Which triangle of the matrix is not zero.
enum class Triangle { lower, upper };

// Whether x is neither NaN nor Inf.
KGEN_DEVICE bool is_finite(float x) { return (bit_cast<u32>(x) & 0x7fffffffu) < 0x7f800000u; }

// Returns the index of element (row, row) in a band for rows and columns below `extent` in tiles of `Rows` rows. Such
// a band has extent + Rows elements.
template <Triangle Side, int Rows>
KGEN_DEVICE constexpr int band_front(int extent) {
    return Side == Triangle::lower ? extent : Rows;
}

// Returns element `index` of a band whose diagonal is at `front`; tap(d) = w[taps - 1 - d].
template <Triangle Side, class W>
KGEN_DEVICE W band_element(const W* w, int taps, int front, int index) {
    const int d = Side == Triangle::lower ? front - index : index - front;
    return d >= 0 && d < taps ? w[taps - 1 - d] : from_float<W>(0.0f);
}

// Writes a band of `elements` elements in fp32. Called by the whole block; a barrier must follow.
template <Triangle Side, class W>
KGEN_DEVICE void stage_band(float* band, int elements, int front, const W* w, int taps,
                            int threads) {
    for (int i = thread_rank(); i < elements; i += threads)
        band[i] = to_float(band_element<Side>(w, taps, front, i));
}

// Copies rows of `columns` values and fills them with zeros up to `padded`. Called by the whole block;
// cp_async_wait_all and a barrier must follow. Copies 16 bytes at a time if all rows are multiples of 16 bytes;
// `source` must be aligned to 16 bytes. `Gap` elements after every `Block` values (a multiple of 16) are not written.
template <class T, int Block = 16, int Gap = 0>
KGEN_DEVICE void stage_rows(T* target, int target_stride, const T* source, i64 source_stride,
                            int rows, int columns, int padded, int threads) {
    constexpr int kVec = 16 / static_cast<int>(sizeof(T));
    constexpr int kWord = 4 / static_cast<int>(sizeof(T));
    const int warps = threads / kWarpSize, lane = lane_id();
    for (int row = thread_rank() / kWarpSize; row < rows; row += warps) {
        const T* from = source + row * source_stride;
        T* to = target + row * target_stride;
        if (columns % kVec == 0) {
            for (int i = lane * kVec; i < columns; i += kWarpSize * kVec)
                cp_async<16>(to + i + i / Block * Gap, from + i);
        } else if (columns % kWord == 0) {
            for (int i = lane * kWord; i < columns; i += kWarpSize * kWord)
                cp_async<4>(to + i + i / Block * Gap, from + i);
        } else {
            for (int i = lane; i < columns; i += kWarpSize) to[i + i / Block * Gap] = from[i];
        }
        for (int i = columns + lane; i < padded; i += kWarpSize)
            to[i + i / Block * Gap] = from_float<T>(0.0f);
    }
}

// As stage_rows, converted to fp32, with ordinary loads.
template <class T>
KGEN_DEVICE void stage_floats(float* target, int target_stride, const T* source, i64 source_stride,
                              int rows, int columns, int padded, int threads) {
    const int warps = threads / kWarpSize;
    for (int row = thread_rank() / kWarpSize; row < rows; row += warps) {
        const T* from = source + row * source_stride;
        for (int i = lane_id(); i < padded; i += kWarpSize)
            target[row * target_stride + i] = i < columns ? to_float(from[i]) : 0.0f;
    }
}

// Returns the minimum of `mine` over the block; contains a block barrier. All lanes of a warp pass the same value.
// `values` has an entry per warp and must not be reused before the next barrier.
template <int Warps>
KGEN_DEVICE int block_min(int mine, int* values) {
    if (lane_id() == 0) values[thread_rank() / kWarpSize] = mine;
    sync_block();
    int least = values[0];
#pragma unroll
    for (int i = 1; i < Warps; ++i) least = min(least, values[i]);
    return least;
}

// Returns one output, summed inside the triangle only, so that no zero of the band is multiplied.
template <Triangle Side, class Band, class X>
KGEN_DEVICE float toeplitz_exact(const Band* diagonal, const X* x, int row, int columns) {
    const int begin = Side == Triangle::lower ? 0 : row;
    const int end = Side == Triangle::lower ? row + 1 : columns;
    float sum = 0.0f;
    for (int col = begin; col < end; ++col)
        sum = fma(to_float(diagonal[col - row]), to_float(x[col]), sum);
    return sum;
}

// acc[b][v] += sum over col in [begin, end) of x[b][col] * band[col - v], four columns at a time. `begin` and `end`
// are multiples of 4. With Outputs > 1 the band's values are held in a sliding window of registers, and band and x
// must be aligned to 16 bytes.
template <int Outputs, int Batch>
KGEN_DEVICE void sliding_fma(float (&acc)[Batch][Outputs], const float* x, int x_stride,
                       const float* band, int begin, int end) {
    static_assert(Outputs == 1 || Outputs % 4 == 0, "the window moves by vectors of four");
    constexpr int kKept = Outputs == 1 ? 0 : Outputs;
    float window[kKept + 4];
#pragma unroll
    for (int i = 0; i < kKept; i += 4) {
        const Vec<float, 4> four = load_vec<4>(band + begin - kKept + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) window[i + j] = four[j];
    }
    for (int col = begin; col < end; col += 4) {
        if constexpr (Outputs == 1) {
#pragma unroll
            for (int j = 0; j < 4; ++j) window[j] = band[col + j];
        } else {
            const Vec<float, 4> four = load_vec<4>(band + col);
#pragma unroll
            for (int j = 0; j < 4; ++j) window[kKept + j] = four[j];
        }
#pragma unroll
        for (int b = 0; b < Batch; ++b) {
            const Vec<float, 4> four = load_vec<4>(x + b * x_stride + col);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int v = 0; v < Outputs; ++v)
                    acc[b][v] = fma(four[j], window[kKept + j - v], acc[b][v]);
        }
#pragma unroll
        for (int i = 0; i < kKept; ++i) window[i] = window[i + 4];
    }
}

// Calls work(i) for the items among 0 .. items - 1 that belong to `worker` of `workers`. Item i costs about i + c, or
// items - i + c. Balanced: items are dealt in pairs of equal cost, i and items - 1 - i. Otherwise: one by one.
template <bool Balanced, class Work>
KGEN_DEVICE void distribute(int items, int worker, int workers, Work work) {
    if constexpr (Balanced) {
        // A single call of work(), which is inlined and long.
#pragma unroll 1
        for (int i = 2 * worker; i < items; i += i % 2 == 0 ? 1 : 2 * workers - 1)
            work(i % 2 == 0 ? items - 1 - i / 2 : i / 2);
    } else {
        for (int i = worker; i < items; i += workers) work(i);
    }
}

// --- kernel bodies ---------------------------------------------------------------------------------

// Returns one output, element by element. place(col) is the index of a column in x.
template <Triangle Side, class T, class W, class Index, class Place>
KGEN_DEVICE float toeplitz_naive(const W* w, const T* x, Index row, Index columns, Place place) {
    const Index begin = Side == Triangle::lower ? 0 : row;
    const Index end = Side == Triangle::lower ? row + 1 : columns;
    float sum = 0.0f;
    for (Index col = begin; col < end; ++col) {
        const Index d = Side == Triangle::lower ? row - col : col - row;
        sum = fma(to_float(w[columns - 1 - d]), to_float(x[place(col)]), sum);
    }
    return sum;
}

// As above, for x whose columns are contiguous.
template <Triangle Side, class T, class W>
KGEN_DEVICE float toeplitz_naive(const W* w, const T* x, i64 row, i64 columns) {
    return toeplitz_naive<Side>(w, x, row, columns, [](i64 column) { return column; });
}

// y of one channel and `Batch` batch rows per block. A thread computes `Outputs` consecutive outputs of each row.
template <Triangle Side, class T, class W, int Outputs, int Batch, bool Balanced, int Threads>
KGEN_DEVICE void toeplitz_tiles(const W* w, const T* x, T* y, i64 batch, i64 channels, int columns,
                                float bias) {
    constexpr int kRound = Outputs < 4 ? 4 : Outputs;
    constexpr int kMargin = 16;  // zeros beyond the diagonal, which a window and a vector may read
    const i64 channel = static_cast<i64>(blockIdx.x) % channels;
    const i64 first = static_cast<i64>(blockIdx.x) / channels * Batch;
    const int rows = static_cast<int>(min(batch - first, static_cast<i64>(Batch)));
    const int padded = (columns + kRound - 1) / kRound * kRound;
    const int front = Side == Triangle::lower ? padded : kMargin;
    const i64 stride = channels * columns;
    const i64 offset = first * stride + channel * columns;

    // Shared memory: float band[padded + kMargin]; float xs[Batch][padded].
    float* band = dynamic_smem<float>();
    float* xs = band + padded + kMargin;

    // 1. Stage. Rows beyond the batch are zeros; their sums are not stored.
    stage_band<Side>(band, padded + kMargin, front, w + channel * columns, columns, Threads);
    stage_floats(xs, padded, x + offset, stride, rows, columns, padded, Threads);
    for (int i = rows * padded + thread_rank(); i < Batch * padded; i += Threads) xs[i] = 0.0f;
    sync_block();

    // 2. Sum and store.
    distribute<Balanced>(padded / Outputs, thread_rank(), Threads, [&](int group) {
        const int row = group * Outputs;
        const float* from_row = band + front - row;
        const int begin = Side == Triangle::lower ? 0 : row / 4 * 4;
        const int end = Side == Triangle::lower ? (row + Outputs + 3) / 4 * 4 : padded;
        float acc[Batch][Outputs] = {};
        sliding_fma(acc, xs, padded, from_row, begin, end);
#pragma unroll
        for (int b = 0; b < Batch; ++b) {
            if (b >= rows) break;
            T* target = y + offset + b * stride + row;
#pragma unroll
            for (int v = 0; v < Outputs; ++v) {
                if (row + v >= columns) break;
                float sum = acc[b][v];
                if (!is_finite(sum))
                    sum = toeplitz_exact<Side>(band + front, xs + b * padded, row + v, columns);
                target[v] = from_float<T>(sum + bias);
            }
        }
    });
}

// Returns the gradient of tap d, element by element: sum over b and t of g[b][t] * x[b][t - d].
template <class T>
KGEN_DEVICE float tap_gradient_naive(const T* g, const T* x, i64 batch, i64 stride, i64 columns,
                                     i64 d) {
    float total = 0.0f;
    for (i64 b = 0; b < batch; ++b) {
        float sum = 0.0f;  // per batch row, which rounds less than one long sum
        for (i64 t = d; t < columns; ++t)
            sum = fma(to_float(g[b * stride + t]), to_float(x[b * stride + t - d]), sum);
        total += sum;
    }
    return total;
}

// gw[columns - 1 - d] = sum over b and t of g[b][t] * x[b][t - d] for one channel per block. A thread computes `Taps`
// consecutive d; the block stages one batch row at a time.
template <class T, class W, int Taps, bool Balanced, int Threads>
KGEN_DEVICE void tap_gradient_tiles(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                    int columns) {
    constexpr int kRound = Taps < 4 ? 4 : Taps;
    constexpr int kMargin = 16;
    const i64 channel = blockIdx.x;
    const int padded = (columns + kRound - 1) / kRound * kRound;
    const i64 stride = channels * columns;

    // Shared memory: float gs[padded]; float xs[kMargin + padded], the margin zeros;
    // float total[padded].
    float* gs = dynamic_smem<float>();
    float* xs = gs + padded + kMargin;
    float* total = xs + padded;
    for (int i = thread_rank(); i < padded; i += Threads) total[i] = 0.0f;
    for (int i = thread_rank(); i < kMargin; i += Threads) xs[i - kMargin] = 0.0f;

    for (i64 b = 0; b < batch; ++b) {
        sync_block();
        const i64 offset = b * stride + channel * columns;
        stage_floats(gs, padded, g + offset, stride, 1, columns, padded, Threads);
        for (int i = thread_rank(); i < padded; i += Threads)
            xs[i] = i < columns ? to_float(x[offset + i]) : 0.0f;
        sync_block();
        distribute<Balanced>(padded / Taps, thread_rank(), Threads, [&](int group) {
            const int d = group * Taps;
            float acc[1][Taps] = {};
            sliding_fma(acc, gs, 0, xs - d, d / 4 * 4, padded);
#pragma unroll
            for (int v = 0; v < Taps; ++v) total[d + v] += acc[0][v];  // only this thread adds to it
        });
    }
    sync_block();
    for (int d = thread_rank(); d < columns; d += Threads) {
        float sum = total[d];
        if (!is_finite(sum))
            sum = tap_gradient_naive(g + channel * columns, x + channel * columns, batch, stride,
                                     columns, d);
        gw[channel * columns + columns - 1 - d] = from_float<W>(sum);
    }
}

// y for rows of any length. A block computes Threads * Outputs outputs of one channel and `Batch` batch rows, and
// stages `Chunk` columns at a time. Blocks with the most columns have the lowest indices and start first.
template <Triangle Side, class T, class W, int Outputs, int Batch, int Chunk, int Threads>
KGEN_DEVICE void toeplitz_chunks(const W* w, const T* x, T* y, i64 batch, i64 channels,
                                 i64 columns, float bias) {
    constexpr bool kLower = Side == Triangle::lower;
    constexpr int kSpan = Threads * Outputs;
    const i64 groups = ceil_div(batch, static_cast<i64>(Batch));
    const i64 spans = ceil_div(columns, static_cast<i64>(kSpan));
    const i64 block = blockIdx.x, channel = block % channels;
    const i64 first = block / channels % groups * Batch, span = block / channels / groups;
    const i64 begin_row = (kLower ? spans - 1 - span : span) * kSpan;
    const i64 row = begin_row + thread_rank() * Outputs;
    const i64 stride = channels * columns;
    w += channel * columns;
    x += first * stride + channel * columns;
    y += first * stride + channel * columns;

    // Shared memory: float xs[Batch][Chunk]; float band[kSpan + Chunk].
    float* xs = dynamic_smem<float>();
    float* band = xs + Batch * Chunk;
    float acc[Batch][Outputs] = {};
    const i64 end = kLower ? min(columns, begin_row + kSpan) : columns;
    for (i64 column = kLower ? 0 : begin_row; column < end; column += Chunk) {
        sync_block();
        for (int i = thread_rank(); i < Batch * Chunk; i += Threads) {
            const i64 b = i / Chunk, from = column + i % Chunk;
            xs[i] = first + b < batch && from < columns ? to_float(x[b * stride + from]) : 0.0f;
        }
        for (int i = thread_rank(); i < kSpan + Chunk; i += Threads) {
            const i64 across = column - begin_row - kSpan + i;  // column - row
            const i64 d = kLower ? -across : across;
            band[i] = d >= 0 && d < columns ? to_float(w[columns - 1 - d]) : 0.0f;
        }
        sync_block();
        if (kLower ? column < row + Outputs : column + Chunk > row)
            sliding_fma(acc, xs, Chunk, band + kSpan - thread_rank() * Outputs, 0, Chunk);
    }
#pragma unroll
    for (int b = 0; b < Batch; ++b) {
        if (first + b >= batch) break;
#pragma unroll
        for (int v = 0; v < Outputs; ++v) {
            if (row + v >= columns) break;
            float sum = acc[b][v];
            if (!is_finite(sum)) sum = toeplitz_naive<Side>(w, x + b * stride, row + v, columns);
            y[b * stride + row + v] = from_float<T>(sum + bias);
        }
    }
}

// The gradient of Threads * Taps taps of one channel, with `Chunk` columns of one batch row staged at a time.
template <class T, class W, int Taps, int Chunk, int Threads>
KGEN_DEVICE void tap_gradient_chunks(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                     i64 columns) {
    constexpr int kSpan = Threads * Taps;
    const i64 channel = blockIdx.x % channels;
    const i64 begin_d = static_cast<i64>(blockIdx.x) / channels * kSpan;
    const i64 d = begin_d + thread_rank() * Taps;
    const i64 stride = channels * columns;
    g += channel * columns;
    x += channel * columns;

    // Shared memory: float gs[Chunk]; float xs[kSpan + Chunk].
    float* gs = dynamic_smem<float>();
    float* xs = gs + Chunk;
    float total[Taps] = {};
    for (i64 b = 0; b < batch; ++b) {
        float acc[1][Taps] = {};  // per batch row, which rounds less than one long sum
        for (i64 t = begin_d; t < columns; t += Chunk) {
            sync_block();
            for (int i = thread_rank(); i < Chunk; i += Threads)
                gs[i] = t + i < columns ? to_float(g[b * stride + t + i]) : 0.0f;
            for (int i = thread_rank(); i < kSpan + Chunk; i += Threads) {
                const i64 u = t - begin_d - kSpan + i;
                xs[i] = u >= 0 && u < columns ? to_float(x[b * stride + u]) : 0.0f;
            }
            sync_block();
            if (t + Chunk > d) sliding_fma(acc, gs, 0, xs + kSpan - thread_rank() * Taps, 0, Chunk);
        }
#pragma unroll
        for (int v = 0; v < Taps; ++v) total[v] += acc[0][v];
    }
#pragma unroll
    for (int v = 0; v < Taps; ++v) {
        if (d + v >= columns) break;
        float sum = total[v];
        if (!is_finite(sum)) sum = tap_gradient_naive(g, x, batch, stride, columns, d + v);
        gw[channel * columns + columns - 1 - d - v] = from_float<W>(sum);
    }
}

}  // namespace kgen
