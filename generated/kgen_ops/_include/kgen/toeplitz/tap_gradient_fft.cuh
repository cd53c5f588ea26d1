// The gradient of the taps of triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     gw[columns - 1 - d] = sum over b and t >= d of g[b][t] * x[b][t - d]
//
// A block computes the gradient of a channel. Two batch rows are the real and the imaginary part of one complex row:
//
//     sum over t of (g0 + i g1)[t] * conj(x0 + i x1)[t - d]  has the real part  sum of g0 x0 + g1 x1
//
// The products of spectra are added over the batch in registers, in the order of the rows, and the sum is transformed
// back once.
//
// NaN, Inf, accuracy and shared memory: as in toeplitz_fft.cuh. All rows of a channel have one scale.
#pragma once

#include "kgen/toeplitz/toeplitz_fft.cuh"

namespace kgen {

namespace detail {

template <class T, class W, int Points, int PerThread, bool Parked>
class TapGradientFft {
public:
    using Fft = BlockFft<Points, PerThread>;
    static constexpr int kThreads = Fft::kThreads;
    static constexpr bool kSquares = sizeof(W) == 4;  // whether |y| alone does not decide

    using FirstHalf = Parking<PerThread, kThreads, Parked>;
    using Spectrum = Parking<2 * PerThread, kThreads, Parked>;

    KGEN_DEVICE TapGradientFft(const T* g, const T* x, W* gw, float* workspace, i64 batch,
                               i64 stride, int columns)
        : fft_(dynamic_smem<f32x2>()),
          first_half_(workspace),
          spectrum_(workspace + FirstHalf::kFloats),
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
        direct.template for_each<kThreads>([&](int d, int lane) {
            float sum = 0.0f;
            for (i64 b = 0; b < batch_; ++b) {
                const T* g = g_ + b * stride_;
                const T* x = x_ + b * stride_ - d;
                for (int t = d + lane; t < columns_; t += kWarpSize)
                    sum = fma(to_float(g[t]), to_float(x[t]), sum);
            }
            sum = lanes_sum<kWarpSize>(sum);
            if (lane == 0) gw_[columns_ - 1 - d] = from_float<W>(sum);
        });
    }

private:
    // Stores all taps' gradients, and lists those that are not accurate.
    KGEN_DEVICE void transform(DirectOutputs& direct) {
        fft_.init();
        find_scales();

        // 1. The gradient; and for fp32 the sums of its terms' squares.
        const int exponent = g_scale_.exponent() + x_scale_.exponent();
        float sums[PerThread], energy = 0.0f, peaks = 0.0f;
#pragma unroll 1
        for (int squared = 0; squared <= (kSquares ? 1 : 0); ++squared) {
            correlate(sums, squared == 1);
            if (squared == 0) {
                find_magnitudes(energy, peaks);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    const int d = Fft::point(r);
                    if (d < columns_)
                        gw_[columns_ - 1 - d] = from_float<W>(times_power_of_two(sums[r], exponent));
                }
            }
        }

        // 2. Which taps are accurate.
        const FftAccuracy<W> accuracy(operands_, energy, peaks, 2.0f * Points, columns_);
        direct.clear();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int d = Fft::point(r);
            if (d >= columns_) continue;
            const float y = times_power_of_two(to_float(gw_[columns_ - 1 - d]), -exponent);
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
        using Largest = GroupReduce<Max, kThreads, 1, 2>;
        Largest reduce(fft_.template scratch<typename Largest::Scratch>(0));
        reduce(largest);
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
        using Sums = GroupSum<kThreads, 1, 2>;
        Sums add(fft_.template scratch<typename Sums::Scratch>(1));
        add(sums);
        g_scale_.normalise(sums[0]);
        x_scale_.normalise(sums[1]);
    }

    // Two batch rows, scaled, as a complex row.
    KGEN_DEVICE void load(float (&re)[PerThread], float (&im)[PerThread], const T* rows, bool is_pair,
                          RowScale scale) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = scale.load(rows + t, t < columns_);
            im[r] = scale.load(rows + stride_ + t, is_pair && t < columns_);
        }
    }

    // Sum of the squares of a thread's values.
    static KGEN_DEVICE float squares_of(const float (&re)[PerThread], const float (&im)[PerThread]) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) sum += re[r] * re[r] + im[r] * im[r];
        return sum;
    }

    // The scaled gradient of tap d of each point, or with `squared` the sum of the squares of its terms. Errors of the
    // rows' products are independent, so that the products of their squares add up to `operands_`.
    KGEN_DEVICE void correlate(float (&sums)[PerThread], bool squared) {
        using PairSums = GroupSum<kThreads, 1, 2>;
        __shared__ typename PairSums::Scratch scratch;
        PairSums add(scratch);
        energy_ = g_peak_ = x_peak_ = 0.0f;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) first_half_.put(r, 0.0f);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            float re[PerThread], im[PerThread];
#pragma unroll
            for (int i = 0; i < 2 * PerThread; ++i) spectrum_.put(i, 0.0f);
#pragma unroll 1
            for (i64 b = 0; b < batch_; b += 2) {
                float g_squares = 0.0f, x_squares = 0.0f;
#pragma unroll 1
                for (int operand = 0; operand < 2; ++operand) {
                    const RowScale scale = operand == 0 ? g_scale_ : x_scale_;
                    const T* rows = (operand == 0 ? g_ : x_) + b * stride_;
                    load(re, im, rows, b + 1 < batch_, scale);
                    if (squared) square(re, im);
                    g_squares = x_squares;
                    x_squares = squares_of(re, im);
                    fft_.forward(re, im, half);
                    if (operand == 0) {
                        g_peak_ = largest_square(re, im, g_peak_);
                        fft_.keep(re, im);
                    }
                }
                x_peak_ = largest_square(re, im, x_peak_);
                if (half == 0 && !squared) {
                    float pair[2] = {g_squares, x_squares};
                    add(pair);
                    operands_ += pair[0] * pair[1];
                }
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    const f32x2 g = fft_.kept(r);
                    const float product_re = g.x * re[r] + g.y * im[r];
                    const float product_im = g.y * re[r] - g.x * im[r];
                    spectrum_.put(2 * r, spectrum_.get(2 * r) + product_re);
                    spectrum_.put(2 * r + 1, spectrum_.get(2 * r + 1) + product_im);
                }
            }
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                re[r] = spectrum_.get(2 * r);
                im[r] = spectrum_.get(2 * r + 1);
            }
            fft_.inverse(re, im, half);
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                const float c = re[r] * (0.5f / Points), d = im[r] * (0.5f / Points);
                energy_ += c * c + d * d;
                sums[r] = first_half_.get(r) + c;
                first_half_.put(r, c);
            }
        }
    }

    // Sum of the squares of all 2 Points complex outputs, after `correlate`; see ToeplitzFft. Peaks of all pairs may be
    // at one frequency, so that their errors add up.
    KGEN_DEVICE void find_magnitudes(float& energy, float& peaks) const {
        using Sums = GroupSum<kThreads, 1>;
        Sums add(fft_.template scratch<typename Sums::Scratch>(1));
        energy = 2.0f * add(energy_);
        using Largest = GroupReduce<Max, kThreads, 1, 2>;
        Largest reduce(fft_.template scratch<typename Largest::Scratch>(0));
        float largest[2] = {g_peak_, x_peak_};
        reduce(largest);
        const float pairs = 0.5f * static_cast<float>(batch_ + 1);
        peaks = largest[0] * largest[1] * pairs * pairs;
    }

    Fft fft_;
    FirstHalf first_half_;
    Spectrum spectrum_;  // the sum of the products so far
    const T* g_;
    const T* x_;
    W* gw_;
    i64 batch_, stride_;
    int columns_;
    RowScale g_scale_, x_scale_;
    float operands_ = 0.0f;
    float energy_, g_peak_, x_peak_;  // this thread's part, see find_magnitudes
};

}  // namespace detail

// The gradient of the taps of a block's channel. With `Parked` sums wait in `workspace`, 3 * Points floats of each
// block, and not in registers.
template <class T, class W, int Points, int PerThread, bool Parked>
KGEN_DEVICE void tap_gradient_fft(const T* g, const T* x, W* gw, float* workspace, i64 batch,
                                  i64 channels, i64 columns) {
    const i64 offset = static_cast<i64>(blockIdx.x) * columns;
    using Gradient = detail::TapGradientFft<T, W, Points, PerThread, Parked>;
    constexpr int kFloats = Gradient::FirstHalf::kFloats + Gradient::Spectrum::kFloats;
    Gradient gradient(g + offset, x + offset, gw + offset,
                      workspace + static_cast<i64>(blockIdx.x) * kFloats, batch,
                      channels * columns, static_cast<int>(columns));
    gradient.run();
}

}  // namespace kgen
