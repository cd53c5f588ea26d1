// Products with triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     lower:  y[b][t] = bias + sum over u <= t of tap(t - u) * x[b][u]        tap(d) = w[columns - 1 - d]
//     upper:  y[b][u] = bias + sum over t >= u of tap(t - u) * x[b][t]
//
// A block computes up to `Rows` batch rows of a channel, one after the other, with the spectrum of the channel's taps
// (lower), or its conjugate (upper).
//
// NaN, Inf and accuracy: a transform would spread a NaN over the whole row, and it rounds relative to the row's norm.
// Outputs of a row with NaN or Inf, or with taps that have them, and outputs that are not accurate enough
// (fft_accuracy.cuh) are summed directly, inside the triangle only. A row of ordinary numbers has a few such outputs,
// next to the tip of the triangle; a row with a NaN takes time that grows with columns^2. Trained filters decay until
// their taps are 0: such terms are left out, unless the row is not finite.
//
// Shared memory: the map of BlockFft. After a row's transforms its line holds the list of outputs that are summed
// directly.
#pragma once

#include "kgen/fft/block_fft.cuh"
#include "kgen/fft/fft_accuracy.cuh"
#include "kgen/primitives/atomic.cuh"
#include "kgen/toeplitz/toeplitz.cuh"

namespace kgen {

// Rows of at most so many values are summed directly: hardly any of their outputs would be accurate.
constexpr int kShortRow = 32;

// A list of outputs in shared memory: any thread adds to it, and groups of lanes share its entries. Its order does not
// matter to results. There may be at most 65536 outputs.
class DirectOutputs {
public:
    KGEN_DEVICE DirectOutputs(float* memory, int* count)
        : outputs_(reinterpret_cast<u16*>(memory)), count_(count) {}

    // Called by all threads of the block, before and after additions.
    KGEN_DEVICE void clear() {
        sync_block();
        if (thread_rank() == 0) *count_ = 0;
        sync_block();
    }

    KGEN_DEVICE void add(int output) { outputs_[atomic_add(count_, 1)] = static_cast<u16>(output); }

    // For each output, after a block barrier: Lanes lanes call terms(output, lane) for their part of the sum, and one
    // calls store(output, sum). Many lanes suit long sums, and few lanes have more outputs at work.
    template <int Threads, int Lanes, class Terms, class Store>
    KGEN_DEVICE void for_each(Terms terms, Store store) const {
        sync_block();
        const int count = *count_, lane = thread_rank() % Lanes;
        // All lanes of a warp take part in its sums, also those without an output.
        for (int first = thread_rank() / kWarpSize * (kWarpSize / Lanes); first < count;
             first += Threads / Lanes) {
            const int i = first + lane_id() / Lanes;
            const int output = i < count ? static_cast<int>(outputs_[i]) : -1;
            const float sum = lanes_sum<Lanes>(output >= 0 ? terms(output, lane) : 0.0f);
            if (output >= 0 && lane == 0) store(output, sum);
        }
    }

private:
    u16* outputs_;
    int* count_;
};

namespace detail {

// One channel and up to Rows batch rows.
template <Triangle Side, class T, class W, int Points, int PerThread, int Rows>
class ToeplitzFft {
public:
    using Fft = BlockFft<Points, PerThread>;
    static constexpr int kThreads = Fft::kThreads;
    static constexpr bool kSquares = sizeof(T) == 4;  // whether |y| alone does not decide

    KGEN_DEVICE ToeplitzFft(const W* w, const T* x, T* y, int rows, i64 stride, int columns, float bias)
        : fft_(dynamic_smem<f32x2>()),
          w_(w),
          x_(x),
          y_(y),
          rows_(rows),
          columns_(columns),
          lags_(columns),
          stride_(stride),
          bias_(bias) {}

    KGEN_DEVICE void run() {
        __shared__ int count;
        DirectOutputs direct(fft_.line(), &count);
        if (columns_ <= kShortRow) {
            for (int row = 0; row < rows_; ++row) {
                direct.clear();
                for (int t = thread_rank(); t < columns_; t += kThreads) direct.add(t);
                sum_directly(direct, row, columns_);
            }
        } else {
            transform(direct);
        }
    }

private:
    // What is known of a row after its first transforms.
    struct Row {
        RowScale scale;
        FftAccuracy<T> accuracy;
    };

    KGEN_DEVICE void transform(DirectOutputs& direct) {
        __shared__ Row known[Rows];
        fft_.init();
        const float taps = find_taps_scale();

        // First the outputs, then for fp32 the sums of their terms' squares. Row -1 are the taps: their transform and
        // those of rows share one place in the code, which would else exceed an SM's instruction cache.
        float re[PerThread], im[PerThread], taps_peak = 0.0f;
#pragma unroll 1
        for (int squared = 0; squared <= (kSquares ? 1 : 0); ++squared) {
#pragma unroll 1
            for (int row = -1; row < rows_; ++row) {
                Row found;
                float operands = 0.0f;
                if (row < 0) {
                    load_taps(re);
                } else {
                    if (squared == 1) {
                        found = known[row];
                    } else {
                        operands = taps * find_scale(x_ + row * stride_, found.scale);
                    }
                    load_row(re, row, found.scale);
                }
                if (squared == 1) square(re);
                fft_.forward(re, im);
                const float peak = largest_square(re, im);
                if (row < 0) {
                    if (squared == 0) taps_peak = group_max<kThreads, 1>(peak);
                    fft_.keep(re, im);
                    continue;
                }
                multiply(re, im);
                fft_.inverse(re, im);
                if (squared == 0) {
                    // Of the squares of all 2 Points outputs, with those that went around.
                    float energy = 0.0f;
#pragma unroll
                    for (int r = 0; r < PerThread; ++r) energy += re[r] * re[r] + im[r] * im[r];
                    energy = group_sum<kThreads, 1>(energy);
                    const float peaks = taps_peak * group_max<kThreads, 1>(peak);
                    found.accuracy = FftAccuracy<T>(operands, energy, peaks, Points, columns_);
                    // Read after barriers, those of the next transform.
                    if (kSquares && thread_rank() == 0) known[row] = found;
                }
                fft_.untwist(re, im);
                if (squared == 0) store(re, row, found.scale);
                if (squared == (kSquares ? 1 : 0)) {
                    direct.clear();
                    list_inaccurate(direct, row, found, re);
                    const bool finite = taps_.is_finite() && found.scale.is_finite();
                    sum_directly(direct, row, finite ? lags_ : columns_);
                }
            }
        }
    }

    // The spectrum of a row becomes that of its outputs, divided by Points.
    KGEN_DEVICE void multiply(float (&re)[PerThread], float (&im)[PerThread]) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 taps = fft_.kept(r);
            const float sine = Side == Triangle::lower ? taps.y : -taps.y, x = re[r];
            re[r] = (x * taps.x - im[r] * sine) * (1.0f / Points);
            im[r] = (x * sine + im[r] * taps.x) * (1.0f / Points);
        }
    }

    KGEN_DEVICE void list_inaccurate(DirectOutputs& direct, int row, const Row& found,
                                     const float (&squares)[PerThread]) const {
        const bool finite = taps_.is_finite() && found.scale.is_finite();
        const int exponent = taps_.exponent() + found.scale.exponent();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            if (t >= columns_) continue;
            const float y = times_power_of_two(to_float(y_[row * stride_ + t]), -exponent);
            if (!finite || !found.accuracy.is_accurate(y, kSquares ? squares[r] : 0.0f)) direct.add(t);
        }
    }

    KGEN_DEVICE void sum_directly(const DirectOutputs& direct, int row, int lags) const {
        const T* x = x_ + row * stride_;
        T* y = y_ + row * stride_;
        const auto store = [&](int t, float sum) { y[t] = from_float<T>(sum + bias_); };
        if (lags <= kShortRow) {
            direct.template for_each<kThreads, 1>(
                [&](int t, int) { return partial_sum<1>(x, t, lags, 0); }, store);
        } else {
            // fp32: many outputs, next to the tip of the triangle and so of few terms. 16 bits: a few outputs that
            // happen to be small, of many terms.
            constexpr int kLanes = kSquares ? 8 : kWarpSize;
            direct.template for_each<kThreads, kLanes>(
                [&](int t, int lane) { return partial_sum<kLanes>(x, t, lags, lane); }, store);
        }
    }

    // Finds the scale of the taps, and their largest lag. Returns the sum of the squares of the scaled taps.
    KGEN_DEVICE float find_taps_scale() {
        float lags = 0.0f;
        for (int t = thread_rank(); t < columns_; t += kThreads)
            if (abs(to_float(w_[t])) > 0.0f) lags = Max::apply(lags, static_cast<float>(columns_ - t));
        lags_ = static_cast<int>(group_max<kThreads, 1>(lags));
        return find_scale(w_, taps_);
    }

    // Finds the scale of `values`. Returns the sum of the squares of the scaled values.
    template <class Value>
    KGEN_DEVICE float find_scale(const Value* values, RowScale& scale) const {
        float largest = 0.0f, squares = 0.0f;
        for (int t = thread_rank(); t < columns_; t += kThreads)
            largest = Max::apply(largest, abs(to_float(values[t])));
        scale = RowScale::of_largest(group_max<kThreads, 1>(largest));
        for (int t = thread_rank(); t < columns_; t += kThreads) {
            const float value = scale.load(values + t, true);
            squares += value * value;
        }
        return scale.normalise(group_sum<kThreads, 1>(squares));
    }

    // Opaque: else what depends on `columns` would stay in registers from one transform to the next.
    KGEN_DEVICE void load_taps(float (&re)[PerThread]) const {
        const int columns = opaque(columns_);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = taps_.load(w_ + (columns - 1 - t), t < columns);
        }
    }

    KGEN_DEVICE void load_row(float (&re)[PerThread], int row, RowScale scale) const {
        const int columns = opaque(columns_);
        const T* x = x_ + row * stride_;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = scale.load(x + t, t < columns);
        }
    }

    KGEN_DEVICE void store(const float (&scaled)[PerThread], int row, RowScale scale) const {
        const int exponent = taps_.exponent() + scale.exponent();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            const float y = times_power_of_two(scaled[r], exponent);
            if (t < columns_) y_[row * stride_ + t] = from_float<T>(y + bias_);
        }
    }

    // A lane's part of output t, or u, of a row: its terms with the taps of the first `lags` lags.
    template <int Lanes>
    KGEN_DEVICE float partial_sum(const T* x, int t, int lags, int lane) const {
        const int begin = Side == Triangle::lower ? max(0, t + 1 - lags) : t;
        const int end = Side == Triangle::lower ? t + 1 : min(columns_, t + lags);
        float sum[4] = {};
        if constexpr (kSquares) {
            // Four chains, because a long one loses more, and to have more loads under way.
            for (int first = begin + lane; first < end; first += 4 * Lanes) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int col = first + i * Lanes;
                    if (col >= end) continue;
                    const int d = Side == Triangle::lower ? t - col : col - t;
                    sum[i] = fma(to_float(w_[columns_ - 1 - d]), to_float(x[col]), sum[i]);
                }
            }
        } else {
            // No condition inside the loop, so that the loads of several terms are under way.
            for (int col = begin + lane; col < end; col += Lanes) {
                const int d = Side == Triangle::lower ? t - col : col - t;
                sum[0] = fma(to_float(w_[columns_ - 1 - d]), to_float(x[col]), sum[0]);
            }
        }
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    Fft fft_;
    const W* w_;
    const T* x_;
    T* y_;
    int rows_, columns_;
    int lags_;  // whose taps are not all 0
    i64 stride_;
    float bias_;
    RowScale taps_;
};

}  // namespace detail

// y of a block's channel and up to `Rows` batch rows; blocks of a channel are `channels` apart.
template <Triangle Side, class T, class W, int Points, int PerThread, int Rows>
KGEN_DEVICE void toeplitz_fft(const W* w, const T* x, T* y, i64 batch, i64 channels, i64 columns,
                              float bias) {
    const i64 channel = static_cast<i64>(blockIdx.x) % channels;
    const i64 first = static_cast<i64>(blockIdx.x) / channels * Rows;
    const i64 stride = channels * columns, offset = first * stride + channel * columns;
    detail::ToeplitzFft<Side, T, W, Points, PerThread, Rows> product(
        w + channel * columns, x + offset, y + offset,
        static_cast<int>(min(batch - first, static_cast<i64>(Rows))), stride,
        static_cast<int>(columns), bias);
    product.run();
}

}  // namespace kgen
