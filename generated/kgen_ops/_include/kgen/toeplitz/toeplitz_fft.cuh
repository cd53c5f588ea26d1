// Products with triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     lower:  y[b][t] = bias + sum over u <= t of tap(t - u) * x[b][u]        tap(d) = w[columns - 1 - d]
//     upper:  y[b][u] = bias + sum over t >= u of tap(t - u) * x[b][t]
//
// A block computes two batch rows of a channel. They are the real and the imaginary part of one complex row: the taps
// are real, so that a product with their spectrum (lower), or with its conjugate (upper), keeps the two apart.
//
// NaN, Inf and accuracy: a transform would spread a NaN over the whole row, and it rounds relative to the row's norm.
// Outputs of a row with NaN or Inf, or with taps that have them, and outputs that are not accurate enough
// (fft_accuracy.cuh) are summed directly, each by a warp, inside the triangle only. A row of ordinary numbers has a
// few such outputs, next to the tip of the triangle; a row with a NaN takes time that grows with columns^2. Trained
// filters decay until their taps are 0: such terms are left out, unless the row is not finite.
//
// Shared memory: the map of BlockFft. In the end its line holds the list of outputs that are summed directly.
#pragma once

#include "kgen/fft/block_fft.cuh"
#include "kgen/fft/fft_accuracy.cuh"
#include "kgen/fft/parking.cuh"
#include "kgen/primitives/atomic.cuh"
#include "kgen/toeplitz/toeplitz.cuh"

namespace kgen {

// Rows of at most so many values are summed directly: hardly any of their outputs would be accurate.
constexpr int kShortRow = 32;

// A list of outputs in shared memory: any thread adds to it, and warps share its entries. Its order does not matter to
// results. `outputs` is how many there may be, at most 65536.
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

    // Calls sum(output, lane) for each output, in all lanes of a warp, after a block barrier.
    template <int Threads, class Sum>
    KGEN_DEVICE void for_each(Sum sum) const {
        sync_block();
        const int count = *count_;
        for (int i = thread_rank() / kWarpSize; i < count; i += Threads / kWarpSize)
            sum(static_cast<int>(outputs_[i]), lane_id());
    }

private:
    u16* outputs_;
    int* count_;
};

namespace detail {

// One channel and two batch rows.
template <Triangle Side, class T, class W, int Points, int PerThread, bool Parked>
class ToeplitzFft {
public:
    using Fft = BlockFft<Points, PerThread>;
    static constexpr int kThreads = Fft::kThreads;
    using FirstHalf = Parking<2 * PerThread, kThreads, Parked>;
    static constexpr bool kSquares = sizeof(T) == 4;  // whether |y| alone does not decide

    KGEN_DEVICE ToeplitzFft(const W* w, const T* x, T* y, float* workspace, int rows, i64 stride,
                            int columns)
        : fft_(dynamic_smem<f32x2>()),
          first_half_(workspace),
          w_(w),
          x_(x),
          y_(y),
          rows_(rows),
          columns_(columns),
          lags_(columns),
          stride_(stride) {}

    KGEN_DEVICE void run(float bias) {
        __shared__ int count;
        DirectOutputs direct(fft_.line(), &count);
        if (columns_ <= kShortRow) {
            direct.clear();
            for (int i = thread_rank(); i < rows_ * columns_; i += kThreads)
                direct.add(i / columns_ * Points + i % columns_);
        } else {
            transform(direct, bias);
        }
        direct.template for_each<kThreads>([&](int output, int lane) {
            const int t = output % Points;
            const int row = output / Points;
            const i64 offset = row * stride_;
            const int lags = is_finite(row) ? lags_ : columns_;
            const float sum = lanes_sum<kWarpSize>(partial_sum(x_ + offset, t, lags, lane));
            if (lane == 0) y_[offset + t] = from_float<T>(sum + bias);
        });
    }

private:
    // Stores all outputs, and lists those that are not accurate.
    KGEN_DEVICE void transform(DirectOutputs& direct, float bias) {
        fft_.init();
        find_scales();

        // 1. The outputs; and for fp32 the sums of their terms' squares.
        float re[PerThread], im[PerThread], energy = 0.0f, peaks = 0.0f;
#pragma unroll 1
        for (int squared = 0; squared <= (kSquares ? 1 : 0); ++squared) {
            convolve(re, im, squared == 1);
            if (squared == 0) {
                find_magnitudes(energy, peaks);
                store(re, 0, bias);
                if (rows_ > 1) store(im, 1, bias);
            }
        }

        // 2. Which outputs are accurate.
        const FftAccuracy<T> accuracy(operands_, energy, peaks, 2.0f * Points, columns_);
        direct.clear();
        list_inaccurate(direct, accuracy, 0, re);
        if (rows_ > 1) list_inaccurate(direct, accuracy, 1, im);
    }

    KGEN_DEVICE void list_inaccurate(DirectOutputs& direct, const FftAccuracy<T>& accuracy, int row,
                                     const float (&squares)[PerThread]) const {
        const bool finite = is_finite(row);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            if (t >= columns_) continue;
            const float y = times_power_of_two(to_float(y_[row * stride_ + t]), -exponent(row));
            if (!finite || !accuracy.is_accurate(y, kSquares ? squares[r] : 0.0f))
                direct.add(row * Points + t);
        }
    }

    KGEN_DEVICE void find_scales() {
        float largest[4] = {};
        for (int t = thread_rank(); t < columns_; t += kThreads) {
            const float tap = abs(to_float(w_[t]));
            largest[0] = Max::apply(largest[0], tap);
            largest[1] = Max::apply(largest[1], abs(to_float(x_[t])));
            if (rows_ > 1) largest[2] = Max::apply(largest[2], abs(to_float(x_[stride_ + t])));
            if (tap > 0.0f) largest[3] = Max::apply(largest[3], static_cast<float>(columns_ - t));
        }
        using Largest = GroupReduce<Max, kThreads, 1, 4>;
        Largest reduce(fft_.template scratch<typename Largest::Scratch>(0));
        reduce(largest);
        lags_ = static_cast<int>(largest[3]);
        taps_ = RowScale::of_largest(largest[0]);
        row_[0] = RowScale::of_largest(largest[1]);
        // A row that is not there counts as zeros, which are not loaded.
        if (rows_ > 1) row_[1] = RowScale::of_largest(largest[2]);

        float sums[3] = {};
        for (int t = thread_rank(); t < columns_; t += kThreads) {
            const float a = taps_.load(w_ + t, true), b = row_[0].load(x_ + t, true),
                        c = row_[1].load(x_ + stride_ + t, true);
            sums[0] += a * a;
            sums[1] += b * b;
            sums[2] += c * c;
        }
        using Sums = GroupSum<kThreads, 1, 3>;
        Sums add(fft_.template scratch<typename Sums::Scratch>(1));
        add(sums);
        operands_ = taps_.normalise(sums[0]) *
                    (row_[0].normalise(sums[1]) + row_[1].normalise(sums[2]));
    }

    // The two rows of scaled outputs, or with `squared` the sums of the squares of their terms.
    KGEN_DEVICE void convolve(float (&re)[PerThread], float (&im)[PerThread], bool squared) {
        energy_ = taps_peak_ = rows_peak_ = 0.0f;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
#pragma unroll 1
            for (int operand = 0; operand < 2; ++operand) {
                if (operand == 0) {
                    load_taps(re, im);
                } else {
                    load_rows(re, im);
                }
                if (squared) square(re, im);
                fft_.forward(re, im, half);
                if (operand == 0) {
                    taps_peak_ = largest_square(re, im, taps_peak_);
                    fft_.keep(re, im);
                }
            }
            rows_peak_ = largest_square(re, im, rows_peak_);
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                const f32x2 taps = fft_.kept(r);
                const float sine = Side == Triangle::lower ? taps.y : -taps.y, x = re[r];
                re[r] = x * taps.x - im[r] * sine;
                im[r] = x * sine + im[r] * taps.x;
            }
            fft_.inverse(re, im, half);
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                re[r] *= 0.5f / Points;
                im[r] *= 0.5f / Points;
                energy_ += re[r] * re[r] + im[r] * im[r];
            }
            if (half == 0) {
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    first_half_.put(2 * r, re[r]);
                    first_half_.put(2 * r + 1, im[r]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            re[r] += first_half_.get(2 * r);
            im[r] += first_half_.get(2 * r + 1);
        }
    }

    // Opaque: else what depends on `columns` would stay in registers from one transform to the next.
    KGEN_DEVICE void load_taps(float (&re)[PerThread], float (&im)[PerThread]) const {
        const int columns = opaque(columns_);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = taps_.load(w_ + (columns - 1 - t), t < columns);
            im[r] = 0.0f;
        }
    }

    KGEN_DEVICE void load_rows(float (&re)[PerThread], float (&im)[PerThread]) const {
        const int columns = opaque(columns_);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = row_[0].load(x_ + t, t < columns);
            im[r] = row_[1].load(x_ + stride_ + t, t < columns);
        }
    }

    // Sum of the squares of all 2 Points outputs, and max |A|^2 * max |B|^2 of the spectra, after `convolve`.
    KGEN_DEVICE void find_magnitudes(float& energy, float& peaks) const {
        using Sums = GroupSum<kThreads, 1>;
        Sums add(fft_.template scratch<typename Sums::Scratch>(1));
        energy = 2.0f * add(energy_);  // c^2 + d^2 = 2 (y[t]^2 + y[t + Points]^2), and both were halved
        using Largest = GroupReduce<Max, kThreads, 1, 2>;
        Largest reduce(fft_.template scratch<typename Largest::Scratch>(0));
        float largest[2] = {taps_peak_, rows_peak_};
        reduce(largest);
        peaks = largest[0] * largest[1];
    }

    KGEN_DEVICE bool is_finite(int row) const {
        return taps_.is_finite() && row_[row].is_finite();
    }

    KGEN_DEVICE int exponent(int row) const { return taps_.exponent() + row_[row].exponent(); }

    KGEN_DEVICE void store(const float (&scaled)[PerThread], int row, float bias) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            const float y = times_power_of_two(scaled[r], exponent(row));
            if (t < columns_) y_[row * stride_ + t] = from_float<T>(y + bias);
        }
    }

    // A lane's part of output t, or u, of a row: its terms with the taps of the first `lags` lags.
    KGEN_DEVICE float partial_sum(const T* x, int row, int lags, int lane) const {
        const int begin = Side == Triangle::lower ? max(0, row + 1 - lags) : row;
        const int end = Side == Triangle::lower ? row + 1 : min(columns_, row + lags);
        float sum = 0.0f;
        for (int col = begin + lane; col < end; col += kWarpSize) {
            const int d = Side == Triangle::lower ? row - col : col - row;
            sum = fma(to_float(w_[columns_ - 1 - d]), to_float(x[col]), sum);
        }
        return sum;
    }

    Fft fft_;
    FirstHalf first_half_;
    const W* w_;
    const T* x_;
    T* y_;
    int rows_, columns_;
    int lags_;  // whose taps are not all 0
    i64 stride_;
    RowScale taps_, row_[2];
    float operands_;  // see FftAccuracy
    float energy_, taps_peak_, rows_peak_;  // this thread's part, see find_magnitudes
};

}  // namespace detail

// y of a block's channel and two batch rows; blocks of a channel are `channels` apart. With `Parked` the outputs of the
// first half wait in `workspace`, 2 * Points floats of each block, and not in registers.
template <Triangle Side, class T, class W, int Points, int PerThread, bool Parked>
KGEN_DEVICE void toeplitz_fft(const W* w, const T* x, T* y, float* workspace, i64 batch,
                              i64 channels, i64 columns, float bias) {
    const i64 channel = static_cast<i64>(blockIdx.x) % channels;
    const i64 first = static_cast<i64>(blockIdx.x) / channels * 2;
    const i64 stride = channels * columns, offset = first * stride + channel * columns;
    using Product = detail::ToeplitzFft<Side, T, W, Points, PerThread, Parked>;
    Product product(w + channel * columns, x + offset, y + offset,
                    workspace + static_cast<i64>(blockIdx.x) * Product::FirstHalf::kFloats,
                    static_cast<int>(min(batch - first, static_cast<i64>(2))), stride,
                    static_cast<int>(columns));
    product.run(bias);
}

}  // namespace kgen
