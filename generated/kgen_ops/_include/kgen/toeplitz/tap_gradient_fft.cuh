// The gradient of the taps of triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     gw[columns - 1 - d] = sum over b and t >= d of g[b][t] * x[b][t - d]
//
// A block computes the gradient of a channel. The spectrum of g times the conjugate of the spectrum of x is the
// spectrum of their correlation. These products are added over the batch, in the order of the rows, and the sum is
// transformed back once.
//
// NaN, Inf, accuracy and shared memory: as in toeplitz_fft.cuh. All rows of a channel have one scale.
#pragma once

#include "kgen/fft/parking.cuh"
#include "kgen/toeplitz/toeplitz_fft.cuh"

namespace kgen {

namespace detail {

template <class T, class W, int Points, int PerThread, bool Wide, bool Parked>
class TapGradientFft {
public:
    using Fft = BlockFft<Points, PerThread, Wide>;
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
        direct.start();
        FftAccuracy<W> accuracy;
        bool finite = false;
        if (columns_ <= kShortRow) {
            sync_block();
            direct.template add<1>(thread_rank() < columns_ ? 1u : 0u, [](int) { return thread_rank(); });
        } else {
            accuracy = transform(direct);
            finite = g_scale_.is_finite() && x_scale_.is_finite();
        }
        direct.template for_each<kThreads, kWarpSize>(
            // 16-bit outputs: see ToeplitzFft::sum_directly.
            [&](int d, int lane) {
                if (kSquares || !finite) return false;
                float squares = 0.0f;
                for (i64 b = 0; b < min(batch_, i64{4}); ++b) {
                    float term = 0.0f;
                    if (d + lane < columns_)
                        term = g_scale_.apply(to_float(g_[b * stride_ + d + lane])) *
                               x_scale_.apply(to_float(x_[b * stride_ + lane]));
                    squares += term * term;
                }
                return accuracy.is_accurate_by_terms(lanes_sum<kWarpSize>(squares));
            },
            [&](int d, int lane) {
                float sum = 0.0f;
                for (i64 b = 0; b < batch_; ++b)
                    sum += partial_dot<kWarpSize, 1>(g_ + b * stride_ + d, x_ + b * stride_, columns_ - d, lane);
                return sum;
            },
            [&](int d, float sum) { gw_[columns_ - 1 - d] = from_float<W>(sum); });
    }

private:
    using Sums = GroupSum<kThreads, 1, 2>;
    using Maxima = GroupMax<kThreads, 1, 2>;

    // Stores all taps' gradients, and lists those that may not be accurate.
    KGEN_DEVICE FftAccuracy<W> transform(DirectOutputs& direct) {
        __shared__ typename Sums::Scratch sums_scratch;
        __shared__ typename Maxima::Scratch maxima_scratch;
        Sums totals(sums_scratch);
        Maxima maxima(maxima_scratch);
        fft_.init();
        find_scales(maxima);

        // 1. The gradient; and for fp32 the sums of its terms' squares.
        const int exponent = g_scale_.exponent() + x_scale_.exponent();
        float sums[PerThread];
        FftAccuracy<W> accuracy;
        u32 doubtful = 0;
#pragma unroll 1
        for (int round = opaque(0); round < (kSquares ? 2 : 1); round = opaque(round + 1)) {
            const bool squared = kSquares && round == 1;
            const Magnitudes found = correlate(sums, squared, totals);
            if (!squared) {
                accuracy = accuracy_of(found, totals, maxima);
                const int left = opaque(columns_) - thread_rank();
                const float half = power_of_two(exponent / 2), other = power_of_two(exponent - exponent / 2);
                W* gw = gw_ + (left - 1);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) {
                    if (r * kThreads < left) {
                        gw[-r * kThreads] = from_float<W>(sums[r] * half * other);
                        if (!accuracy.is_accurate(sums[r])) doubtful |= 1u << r;
                    }
                }
            } else {
#pragma unroll
                for (int r = 0; r < PerThread; ++r)
                    if (accuracy.is_accurate_by_squares(sums[r])) doubtful &= ~(1u << r);
            }
        }

        // 2. List the taps that may not be accurate, in the line. Other threads may still read the line before.
        sync_block();
        if (!g_scale_.is_finite() || !x_scale_.is_finite()) {
#pragma unroll
            for (int r = 0; r < PerThread; ++r)
                if (Fft::point(r) < columns_) doubtful |= 1u << r;
        }
        direct.template add<PerThread>(doubtful, [](int r) { return Fft::point(r); });
        return accuracy;
    }

    KGEN_DEVICE void find_scales(Maxima& maxima) {
        float largest[2] = {};
#pragma unroll 1
        for (i64 b = 0; b < batch_; ++b) {
#pragma unroll 1
            for (int operand = 0; operand < 2; ++operand) {
                float values[PerThread];
                load(values, (operand == 0 ? g_ : x_) + b * stride_);
                float most = 0.0f;
#pragma unroll
                for (int r = 0; r < PerThread; ++r) most = Max::apply(most, abs(values[r]));
                if (operand == 0) {
                    largest[0] = Max::apply(largest[0], most);
                } else {
                    largest[1] = Max::apply(largest[1], most);
                }
            }
        }
        maxima(largest);
        g_scale_ = RowScale::of_largest(largest[0]);
        x_scale_ = RowScale::of_largest(largest[1]);
    }

    // `operands`: the sum over the batch of the products of the sums of squares of two rows. `energy`: this thread's
    // part of the sum of the squares of all outputs. The peaks: the largest |X|^2 of this thread's points.
    struct Magnitudes {
        float operands, energy, g_peak, x_peak;
    };

    KGEN_DEVICE void load(float (&re)[PerThread], const T* row) const {
        const int left = opaque(columns_) - thread_rank();
        row += thread_rank();
#pragma unroll
        for (int r = 0; r < PerThread; ++r)
            re[r] = r * kThreads < left ? to_float(row[r * kThreads]) : 0.0f;
    }

    // Computes the scaled gradient of the tap d of each point, or with `squared` the sum of the squares of its terms.
    // The errors of different batch rows are independent, so that their squares add up in `operands`.
    KGEN_DEVICE Magnitudes correlate(float (&re)[PerThread], bool squared, Sums& totals) {
        Magnitudes found{};
        float im[PerThread];
#pragma unroll
        for (int i = 0; i < 2 * PerThread; ++i) spectrum_.put(i, 0.0f);
#pragma unroll 1
        for (i64 b = 0; b < batch_; ++b) {
            float squares[2] = {};
#pragma unroll 1
            for (int operand = 0; operand < 2; ++operand) {
                const RowScale scale = operand == 0 ? g_scale_ : x_scale_;
                load(re, (operand == 0 ? g_ : x_) + b * stride_);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) re[r] = scale.apply(re[r]);
                if (squared) square(re);
                squares[0] = squares[1];
                squares[1] = 0.0f;
#pragma unroll
                for (int r = 0; r < PerThread; ++r) squares[1] += re[r] * re[r];
                // Other threads may still read the line in the previous transform.
                sync_block();
                fft_.forward(re, im);
                if (operand == 0) {
                    found.g_peak = max(found.g_peak, largest_square(re, im));
                    fft_.keep(re, im);
                }
            }
            found.x_peak = max(found.x_peak, largest_square(re, im));
            if (!squared) {
                totals(squares);
                found.operands += squares[0] * squares[1];
            }
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
    KGEN_DEVICE FftAccuracy<W> accuracy_of(const Magnitudes& found, Sums& totals, Maxima& maxima) const {
        float energy[2] = {found.energy, 0.0f}, peaks[2] = {found.g_peak, found.x_peak};
        totals(energy);
        maxima(peaks);
        const float rows = static_cast<float>(batch_);
        return FftAccuracy<W>(found.operands, energy[0], peaks[0] * peaks[1] * rows * rows, Points, columns_);
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

// The gradient of the taps of a block's channel. With `Parked` the sum of spectra is kept in `workspace`, 2 * Points
// floats per block, instead of registers.
template <class T, class W, int Points, int PerThread, bool Wide, bool Parked>
KGEN_DEVICE void tap_gradient_fft(const T* g, const T* x, W* gw, float* workspace, i64 batch,
                                  i64 channels, i64 columns) {
    const i64 offset = static_cast<i64>(blockIdx.x) * columns;
    using Gradient = detail::TapGradientFft<T, W, Points, PerThread, Wide, Parked>;
    Gradient gradient(g + offset, x + offset, gw + offset,
                      workspace + static_cast<i64>(blockIdx.x) * Gradient::Spectrum::kFloats, batch,
                      channels * columns, static_cast<int>(columns));
    gradient.run();
}

}  // namespace kgen
