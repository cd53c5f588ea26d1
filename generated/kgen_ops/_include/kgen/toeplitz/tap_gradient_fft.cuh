// The gradient of the taps of triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     gw[columns - 1 - d] = sum over b and t >= d of g[b][t] * x[b][t - d]
//
// A block computes the gradient of a channel. The spectrum of g times the conjugate of that of x is the spectrum of
// their correlation. These products are added over the batch, in the order of the rows, and the sum is transformed
// back once.
//
// NaN, Inf, accuracy and shared memory: as in toeplitz_fft.cuh. All rows of a channel have one scale.
#pragma once

#include "kgen/fft/parking.cuh"
#include "kgen/toeplitz/toeplitz_fft.cuh"

namespace kgen {

namespace detail {

template <class T, class W, int Points, int PerThread, bool Parked>
class TapGradientFft {
public:
    using Fft = BlockFft<Points, PerThread>;
    static constexpr int kThreads = Fft::kThreads;
    static constexpr bool kSquares = sizeof(W) == 4;  // whether |y| alone does not decide

    using Spectrum = Parking<2 * PerThread, kThreads, Parked>;

    KGEN_DEVICE TapGradientFft(const T* g, const T* x, W* gw, float* workspace, i64 batch,
                               i64 stride, int columns)
        : fft_(dynamic_smem<f32x2>()),
          spectrum_(workspace),
          g_(g),
          x_(x),
          gw_(gw),
          batch_(batch),
          stride_(stride),
          columns_(columns) {}

    KGEN_DEVICE void run() {
        __shared__ int count;
        DirectOutputs direct(fft_.line(), &count);
        if (columns_ <= kShortRow) {
            direct.clear();
            for (int d = thread_rank(); d < columns_; d += kThreads) direct.add(d);
        } else {
            transform(direct);
        }
        direct.template for_each<kThreads, kWarpSize>(
            [&](int d, int lane) {
                float sum = 0.0f;
                for (i64 b = 0; b < batch_; ++b) {
                    const T* g = g_ + b * stride_;
                    const T* x = x_ + b * stride_ - d;
                    for (int t = d + lane; t < columns_; t += kWarpSize)
                        sum = fma(to_float(g[t]), to_float(x[t]), sum);
                }
                return sum;
            },
            [&](int d, float sum) { gw_[columns_ - 1 - d] = from_float<W>(sum); });
    }

private:
    // Stores all taps' gradients, and lists those that are not accurate.
    KGEN_DEVICE void transform(DirectOutputs& direct) {
        fft_.init();
        find_scales();

        // 1. The gradient; and for fp32 the sums of its terms' squares.
        const int exponent = g_scale_.exponent() + x_scale_.exponent();
        float sums[PerThread];
        FftAccuracy<W> accuracy;
#pragma unroll 1
        for (int squared = 0; squared <= (kSquares ? 1 : 0); ++squared) {
            const Magnitudes found = correlate(sums, squared == 1);
            if (squared == 0) {
                accuracy = accuracy_of(found);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    const int d = Fft::point(r);
                    if (d < columns_)
                        gw_[columns_ - 1 - d] = from_float<W>(times_power_of_two(sums[r], exponent));
                }
            }
        }

        // 2. Which taps are accurate.
        direct.clear();
        const int columns = opaque(columns_);  // else all addresses would wait in registers
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int d = Fft::point(r);
            if (d >= columns) continue;
            const float y = times_power_of_two(to_float(gw_[columns - 1 - d]), -exponent);
            const float squares = kSquares ? sums[r] : 0.0f;
            if (!g_scale_.is_finite() || !x_scale_.is_finite() || !accuracy.is_accurate(y, squares))
                direct.add(d);
        }
    }

    KGEN_DEVICE void find_scales() {
        float largest[2] = {};
        for (i64 b = 0; b < batch_; ++b)
            for (int t = thread_rank(); t < columns_; t += kThreads) {
                largest[0] = Max::apply(largest[0], abs(to_float(g_[b * stride_ + t])));
                largest[1] = Max::apply(largest[1], abs(to_float(x_[b * stride_ + t])));
            }
        largest[0] = group_max<kThreads, 1>(largest[0]);
        largest[1] = group_max<kThreads, 1>(largest[1]);
        g_scale_ = RowScale::of_largest(largest[0]);
        x_scale_ = RowScale::of_largest(largest[1]);

        float sums[2] = {};
        for (i64 b = 0; b < batch_; ++b)
            for (int t = thread_rank(); t < columns_; t += kThreads) {
                const float g = g_scale_.load(g_ + b * stride_ + t, true);
                const float x = x_scale_.load(x_ + b * stride_ + t, true);
                sums[0] += g * g;
                sums[1] += x * x;
            }
        g_scale_.normalise(group_sum<kThreads, 1>(sums[0]));
        x_scale_.normalise(group_sum<kThreads, 1>(sums[1]));
    }

    // This thread's part: of the products of the sums of squares of two rows, of the sum of the squares of all outputs,
    // and of the peaks of spectra.
    struct Magnitudes {
        float operands, energy, g_peak, x_peak;
    };

    KGEN_DEVICE void load(float (&re)[PerThread], const T* row, RowScale scale) const {
        const int columns = opaque(columns_);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = scale.load(row + t, t < columns);
        }
    }

    // The scaled gradient of tap d of each point, or with `squared` the sum of the squares of its terms. Errors of the
    // rows' products are independent, so that the products of their squares add up.
    KGEN_DEVICE Magnitudes correlate(float (&re)[PerThread], bool squared) {
        Magnitudes found{};
        float im[PerThread];
#pragma unroll
        for (int i = 0; i < 2 * PerThread; ++i) spectrum_.put(i, 0.0f);
#pragma unroll 1
        for (i64 b = 0; b < batch_; ++b) {
            float g_squares = 0.0f, x_squares = 0.0f;
#pragma unroll 1
            for (int operand = 0; operand < 2; ++operand) {
                load(re, (operand == 0 ? g_ : x_) + b * stride_, operand == 0 ? g_scale_ : x_scale_);
                if (squared) square(re);
                g_squares = x_squares;
                x_squares = 0.0f;
#pragma unroll
                for (int r = 0; r < PerThread; ++r) x_squares += re[r] * re[r];
                fft_.forward(re, im);
                if (operand == 0) {
                    found.g_peak = max(found.g_peak, largest_square(re, im));
                    fft_.keep(re, im);
                }
            }
            found.x_peak = max(found.x_peak, largest_square(re, im));
            if (!squared)
                found.operands +=
                    group_sum<kThreads, 1>(g_squares) * group_sum<kThreads, 1>(x_squares);
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                const f32x2 g = fft_.kept(r);
                spectrum_.put(2 * r, spectrum_.get(2 * r) + (g.x * re[r] + g.y * im[r]));
                spectrum_.put(2 * r + 1, spectrum_.get(2 * r + 1) + (g.y * re[r] - g.x * im[r]));
            }
        }
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            re[r] = spectrum_.get(2 * r) * (1.0f / Points);
            im[r] = spectrum_.get(2 * r + 1) * (1.0f / Points);
        }
        fft_.inverse(re, im);
#pragma unroll
        for (int r = 0; r < PerThread; ++r) found.energy += re[r] * re[r] + im[r] * im[r];
        fft_.untwist(re, im);
        return found;
    }

    // Peaks of all rows may be at one frequency, so that their errors add up.
    KGEN_DEVICE FftAccuracy<W> accuracy_of(const Magnitudes& found) const {
        const float energy = group_sum<kThreads, 1>(found.energy);
        const float rows = static_cast<float>(batch_);
        const float peaks = group_max<kThreads, 1>(found.g_peak) *
                            group_max<kThreads, 1>(found.x_peak) * rows * rows;
        return FftAccuracy<W>(found.operands, energy, peaks, Points, columns_);
    }

    Fft fft_;
    Spectrum spectrum_;  // the sum of the products so far
    const T* g_;
    const T* x_;
    W* gw_;
    i64 batch_, stride_;
    int columns_;
    RowScale g_scale_, x_scale_;
};

}  // namespace detail

// The gradient of the taps of a block's channel. With `Parked` the sum of spectra waits in `workspace`, 2 * Points
// floats of each block, and not in registers.
template <class T, class W, int Points, int PerThread, bool Parked>
KGEN_DEVICE void tap_gradient_fft(const T* g, const T* x, W* gw, float* workspace, i64 batch,
                                  i64 channels, i64 columns) {
    const i64 offset = static_cast<i64>(blockIdx.x) * columns;
    using Gradient = detail::TapGradientFft<T, W, Points, PerThread, Parked>;
    Gradient gradient(g + offset, x + offset, gw + offset,
                      workspace + static_cast<i64>(blockIdx.x) * Gradient::Spectrum::kFloats, batch,
                      channels * columns, static_cast<int>(columns));
    gradient.run();
}

}  // namespace kgen
