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

template <class T, class W, int Points, int PerThread>
class TapGradientFft {
public:
    using Fft = BlockFft<Points, PerThread>;
    static constexpr int kThreads = Fft::kThreads;

    KGEN_DEVICE TapGradientFft(const T* g, const T* x, W* gw, i64 batch, i64 stride, int columns)
        : fft_(dynamic_smem<float>(), reinterpret_cast<f32x2*>(dynamic_smem<float>() + Fft::kLine)),
          g_(g),
          x_(x),
          gw_(gw),
          batch_(batch),
          stride_(stride),
          columns_(columns) {}

    KGEN_DEVICE void run() {
        __shared__ int count;
        fft_.init();
        find_scales();

        // 1. The gradient, by transforms.
        float sums[PerThread];
        const float energy = correlate(sums, false);
        const int exponent = g_scale_.exponent + x_scale_.exponent;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int d = Fft::point(r);
            if (d < columns_)
                gw_[columns_ - 1 - d] = from_float<W>(times_power_of_two(sums[r], exponent));
        }

        // 2. Which taps are accurate.
        const FftAccuracy<W> accuracy(operands_, energy, 2.0f * Points, columns_);
        if constexpr (sizeof(W) == 4) {
            correlate(sums, true);
        } else {
#pragma unroll
            for (int r = 0; r < PerThread; ++r) sums[r] = 0.0f;
        }
        DirectOutputs direct(dynamic_smem<float>(), &count);
        direct.clear();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int d = Fft::point(r);
            if (d >= columns_) continue;
            const float y = times_power_of_two(to_float(gw_[columns_ - 1 - d]), -exponent);
            if (!g_scale_.finite || !x_scale_.finite || !accuracy.is_accurate(y, sums[r]))
                direct.add(d);
        }

        // 3. The others, directly.
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
    KGEN_DEVICE void find_scales() {
        float largest[2] = {};
        for (i64 b = 0; b < batch_; ++b)
            for (int t = thread_rank(); t < columns_; t += kThreads) {
                largest[0] = Max::apply(largest[0], abs(to_float(g_[b * stride_ + t])));
                largest[1] = Max::apply(largest[1], abs(to_float(x_[b * stride_ + t])));
            }
        using Largest = GroupReduce<Max, kThreads, 1, 2>;
        __shared__ typename Largest::Scratch scratch;
        Largest reduce(scratch);
        reduce(largest);
        g_scale_ = RowScale::of_largest(largest[0]);
        x_scale_ = RowScale::of_largest(largest[1]);

        float sums[2] = {};
        for (i64 b = 0; b < batch_; ++b)
            for (int t = thread_rank(); t < columns_; t += kThreads) {
                const float g = g_scale_.apply(g_[b * stride_ + t]);
                const float x = x_scale_.apply(x_[b * stride_ + t]);
                sums[0] += g * g;
                sums[1] += x * x;
            }
        using Sums = GroupSum<kThreads, 1, 2>;
        __shared__ typename Sums::Scratch more_scratch;
        Sums add(more_scratch);
        add(sums);
        g_scale_.normalise(sums[0]);
        x_scale_.normalise(sums[1]);
    }

    // Two batch rows, scaled, as a complex row.
    KGEN_DEVICE void load(float (&re)[PerThread], float (&im)[PerThread], const T* rows, bool is_pair,
                          const RowScale& scale, bool squared) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const int t = Fft::point(r);
            re[r] = t < columns_ ? scale.apply(rows[t]) : 0.0f;
            im[r] = t < columns_ && is_pair ? scale.apply(rows[stride_ + t]) : 0.0f;
            if (squared) {
                re[r] *= re[r];
                im[r] *= im[r];
            }
        }
    }

    // Sum of the squares of a thread's values.
    static KGEN_DEVICE float squares_of(const float (&re)[PerThread], const float (&im)[PerThread]) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) sum += re[r] * re[r] + im[r] * im[r];
        return sum;
    }

    // The scaled gradient of tap d of each point, or with `squared` the sum of the squares of its terms. Returns the
    // sum of the squares of all 2 Points complex outputs. Errors of the rows' products are independent, so that the
    // products of their squares add up to `operands_`.
    KGEN_DEVICE float correlate(float (&sums)[PerThread], bool squared) {
        using Sums = GroupSum<kThreads, 1>;
        using PairSums = GroupSum<kThreads, 1, 2>;
        __shared__ typename Sums::Scratch scratch;
        __shared__ typename PairSums::Scratch pair_scratch;
        Sums add(scratch);
        PairSums add_pair(pair_scratch);
        float energy[1] = {};
#pragma unroll
        for (int r = 0; r < PerThread; ++r) sums[r] = 0.0f;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
            float re[PerThread] = {}, im[PerThread] = {};
#pragma unroll 1
            for (i64 b = 0; b < batch_; b += 2) {
                const bool is_pair = b + 1 < batch_;
                float g_re[PerThread], g_im[PerThread], x_re[PerThread], x_im[PerThread];
                load(g_re, g_im, g_ + b * stride_, is_pair, g_scale_, squared);
                float pair[2] = {squares_of(g_re, g_im)};
                fft_.forward(g_re, g_im, half);
                load(x_re, x_im, x_ + b * stride_, is_pair, x_scale_, squared);
                if (half == 0 && !squared) {
                    pair[1] = squares_of(x_re, x_im);
                    add_pair(pair);
                    operands_ += pair[0] * pair[1];
                }
                fft_.forward(x_re, x_im, half);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    re[r] += g_re[r] * x_re[r] + g_im[r] * x_im[r];
                    im[r] += g_im[r] * x_re[r] - g_re[r] * x_im[r];
                }
            }
            fft_.inverse(re, im, half);
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                const float c = re[r] * (0.5f / Points), d = im[r] * (0.5f / Points);
                sums[r] += c;
                energy[0] += c * c + d * d;
            }
        }
        if (squared) return 0.0f;
        add(energy);
        return 2.0f * energy[0];  // see ToeplitzFft::convolve
    }

    Fft fft_;
    const T* g_;
    const T* x_;
    W* gw_;
    i64 batch_, stride_;
    int columns_;
    RowScale g_scale_, x_scale_;
    float operands_ = 0.0f;
};

}  // namespace detail

// The gradient of the taps of a block's channel.
template <class T, class W, int Points, int PerThread>
KGEN_DEVICE void tap_gradient_fft(const T* g, const T* x, W* gw, i64 batch, i64 channels,
                                  i64 columns) {
    const i64 offset = static_cast<i64>(blockIdx.x) * columns;
    detail::TapGradientFft<T, W, Points, PerThread> gradient(
        g + offset, x + offset, gw + offset, batch, channels * columns, static_cast<int>(columns));
    gradient.run();
}

}  // namespace kgen
