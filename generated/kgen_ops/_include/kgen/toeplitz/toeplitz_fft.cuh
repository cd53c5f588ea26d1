// Products with triangular Toeplitz matrices by Fourier transforms, for rows of up to `Points` values.
//
//     lower:  y[b][t] = bias + sum over u <= t of tap(t - u) * x[b][u]        tap(d) = w[columns - 1 - d]
//     upper:  y[b][u] = bias + sum over t >= u of tap(t - u) * x[b][t]
//
// A block computes up to `Rows` batch rows of a channel, one after the other, with the spectrum of the channel's taps
// (lower), or its conjugate (upper).
//
// NaN, Inf and accuracy: a transform would spread a NaN over the whole row, and it rounds relative to the row's norm.
// All outputs of a row are summed directly, inside the triangle only, if the row or the taps contain NaN or Inf.
// Outputs that are not accurate enough (fft_accuracy.cuh) are summed directly, too. A row of ordinary numbers has a few
// such outputs, next to the tip of the triangle; a row with a NaN takes time that grows with columns^2. Trained filters
// decay until their taps are 0: terms with these taps are left out, unless the row or the taps are not finite.
//
// Shared memory: the map of BlockFft, and u32 doubtful[Rows][threads]. After a row's transforms the line holds the list
// of outputs that are summed directly.
#pragma once

#include "kgen/fft/block_fft.cuh"
#include "kgen/fft/fft_accuracy.cuh"
#include "kgen/primitives/atomic.cuh"
#include "kgen/toeplitz/toeplitz.cuh"

namespace kgen {

// Rows of at most so many values are summed directly: hardly any of their outputs would be accurate.
constexpr int kShortRow = 32;

// Returns how many lanes a set has.
KGEN_DEVICE int count_lanes(u32 lanes) {
#if KGEN_HOST
    return __builtin_popcount(lanes);
#else
    return __popc(lanes);
#endif
}

// A list of outputs in shared memory: threads add outputs, and groups of lanes then divide them among themselves. The
// order in which warps add outputs does not affect results. There may be at most 65536 outputs.
//
// Synchronisation: the caller needs a block barrier between `start` and the first `add`. `for_each` begins with a block
// barrier. `finish` also begins with one and then empties the list; after it the memory may have another use.
class DirectOutputs {
public:
    KGEN_DEVICE DirectOutputs(float* memory, int* count)
        : outputs_(reinterpret_cast<u16*>(memory)), count_(count) {}

    KGEN_DEVICE void start() {
        if (thread_rank() == 0) *count_ = 0;
    }

    // Called by all lanes of a warp: adds output(r) for the bits r of `wanted`. Entries of adjacent lanes are adjacent,
    // so that their sums read the same cache lines.
    template <int Bits, class Output>
    KGEN_DEVICE void add(u32 wanted, Output output) {
        if (!any(wanted != 0)) return;
        int total = 0;
#pragma unroll
        for (int r = 0; r < Bits; ++r) total += count_lanes(ballot((wanted >> r & 1) != 0));
        int place = 0;
        if (lane_id() == 0) place = atomic_add(count_, total);
        place = shfl(place, 0);
        const u32 earlier = (1u << lane_id()) - 1u;
#pragma unroll
        for (int r = 0; r < Bits; ++r) {
            const bool wants = (wanted >> r & 1) != 0;
            const u32 lanes = ballot(wants);
            if (wants) outputs_[place + count_lanes(lanes & earlier)] = static_cast<u16>(output(r));
            place += count_lanes(lanes);
        }
    }

    // For each output: Lanes lanes call terms(output, lane) for their part of the sum, and one lane calls store(output,
    // sum). Many lanes suit long sums; with few lanes, more outputs are computed at once. An output for which
    // settled(output, lane) is true is left as it is. settled must return the same value in all lanes of an output, and
    // may use shuffles only if Lanes is 32.
    template <int Threads, int Lanes, class Settled, class Terms, class Store>
    KGEN_DEVICE void for_each(Settled settled, Terms terms, Store store) const {
        sync_block();
        const int count = *count_, lane = thread_rank() % Lanes;
        // All lanes of a warp take part in its sums, also those without an output.
        for (int first = thread_rank() / kWarpSize * (kWarpSize / Lanes); first < count;
             first += Threads / Lanes) {
            const int i = first + lane_id() / Lanes;
            int output = i < count ? static_cast<int>(outputs_[i]) : -1;
            if (output >= 0 && settled(output, lane)) output = -1;
            const float sum = lanes_sum<Lanes>(output >= 0 ? terms(output, lane) : 0.0f);
            if (output >= 0 && lane == 0) store(output, sum);
        }
    }

    KGEN_DEVICE void finish() {
        sync_block();
        start();
    }

private:
    u16* outputs_;
    int* count_;
};

namespace detail {

// A lane's part of the sum of a[i] * b[i * Step] over 0 <= i < terms: every Lanes-th product from `lane` on. Four
// chains of additions have a smaller error than a long one, and more loads in flight.
template <int Lanes, int Step, class A, class B>
KGEN_DEVICE float partial_dot(const A* a, const B* b, int terms, int lane) {
    float sum[4] = {};
    a += lane;
    b += lane * Step;
    int left = terms - lane;
#pragma unroll 2
    for (; left > 3 * Lanes; left -= 4 * Lanes, a += 4 * Lanes, b += 4 * Lanes * Step) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = fma(to_float(a[k * Lanes]), to_float(b[k * Lanes * Step]), sum[k]);
    }
#pragma unroll
    for (int k = 0; k < 3; ++k)
        if (left > k * Lanes) sum[k] = fma(to_float(a[k * Lanes]), to_float(b[k * Lanes * Step]), sum[k]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One channel and up to Rows batch rows.
template <Triangle Side, class T, class W, int Points, int PerThread, bool Wide, int Rows>
class ToeplitzFft {
public:
    using Fft = BlockFft<Points, PerThread, Wide>;
    static constexpr int kThreads = Fft::kThreads;
    static constexpr bool kSquares = sizeof(T) == 4;  // whether |y| alone does not decide

    KGEN_DEVICE ToeplitzFft(const W* w, const T* x, T* y, int rows, i64 stride, int columns, float bias)
        : fft_(dynamic_smem<f32x2>()),
          doubtful_(reinterpret_cast<u32*>(dynamic_smem<char>() + Fft::kSmemBytes)),
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
        direct.start();
        if (columns_ <= kShortRow) {
            sync_block();
            for (int row = 0; row < rows_; ++row) {
                direct.template add<1>(thread_rank() < columns_ ? 1u : 0u, [](int) { return thread_rank(); });
                sum_directly(direct, row, columns_, RowScale{}, FftAccuracy<T>{}, false);
                direct.finish();
                sync_block();
            }
        } else {
            transform(direct);
        }
    }

private:
    using Sums = GroupSum<kThreads, 1, 2>;
    using Maxima = GroupMax<kThreads, 1, 2>;

    KGEN_DEVICE void transform(DirectOutputs& direct) {
        __shared__ RowScale scales[Rows];
        __shared__ FftAccuracy<T> accuracies[Rows];
        __shared__ typename Sums::Scratch sums_scratch;
        __shared__ typename Maxima::Scratch maxima_scratch;
        Sums sums(sums_scratch);
        Maxima maxima(maxima_scratch);
        fft_.init();

        // Round 0 computes the outputs; for fp32, round 1 computes the sums of their terms' squares. Row -1 stands for
        // the taps: the transforms of taps and of rows share one place in the code, which would otherwise exceed an
        // SM's instruction cache. The counters are opaque, or the compiler would copy the body for the first
        // iterations. If registers suffice, the values of the next iteration are loaded before the last transform of an
        // iteration, which hides the latency of the loads.
        constexpr bool kAhead = PerThread <= 16;
        float re[PerThread], im[PerThread], values[PerThread], taps = 0.0f, taps_peak = 0.0f;
        if (kAhead) load(values, -1);
#pragma unroll 1
        for (int round = opaque(0); round < (kSquares ? 2 : 1); round = opaque(round + 1)) {
            const bool squared = kSquares && round == 1;
#pragma unroll 1
            for (int next = -1; next < rows_; ++next) {
                const int row = opaque(next);
                RowScale scale = taps_;
                FftAccuracy<T> accuracy{};
                float total[2] = {}, largest[2] = {};
                if (!kAhead) load(values, row);
#pragma unroll
                for (int r = 0; r < PerThread; ++r) re[r] = values[r];
                if (!squared) {
                    find_largest(re, largest);
                    maxima(largest);
                    scale = RowScale::of_largest(largest[0]);
                } else if (row >= 0) {
                    scale = scales[row];
                }
#pragma unroll
                for (int r = 0; r < PerThread; ++r) re[r] = scale.apply(re[r]);
                if (!squared) {
#pragma unroll
                    for (int r = 0; r < PerThread; ++r) total[0] += re[r] * re[r];
                } else {
                    square(re);
                }
                fft_.forward(re, im);
                float peak[2] = {largest_square(re, im), 0.0f};
                if (kAhead) load(values, row + 1 < rows_ ? row + 1 : -1);
                if (row < 0) {
                    fft_.keep(re, im);
                    // Before the next `forward`.
                    sync_block();
                } else {
                    multiply(re, im);
                    fft_.inverse(re, im);
                    // The sum of the squares of all 2 Points outputs, including those that wrapped around.
#pragma unroll
                    for (int r = 0; r < PerThread; ++r) total[1] += re[r] * re[r] + im[r] * im[r];
                }
                if (!squared) {
                    sums(total);
                    maxima(peak);
                    if (row < 0) {
                        taps_ = scale;
                        lags_ = static_cast<int>(largest[1]);
                        taps = total[0];
                        taps_peak = peak[0];
                    } else {
                        accuracy = FftAccuracy<T>(taps * total[0], total[1], taps_peak * peak[0], Points,
                                                  columns_);
                    }
                }
                if (row < 0) continue;
                fft_.untwist(re, im);
                u32 doubtful = 0;
                if (!squared) {
                    // Other threads read them after the barriers of the next transform.
                    if (kSquares && thread_rank() == 0) {
                        scales[row] = scale;
                        accuracies[row] = accuracy;
                    }
                    store(re, row, scale);
                    doubtful = in_doubt(accuracy, re);
                    if (kSquares) doubtful_[row * kThreads + thread_rank()] = doubtful;
                } else {
                    doubtful = doubtful_[row * kThreads + thread_rank()] &
                               squares_in_doubt(accuracies[row], re);
                }
                if (squared == kSquares) {
                    // Other threads may still read the line.
                    sync_block();
                    const bool finite = taps_.is_finite() && scale.is_finite();
                    direct.template add<PerThread>(
                        finite ? doubtful : inside(), [](int r) { return Fft::point(r); });
                    sum_directly(direct, row, finite ? lags_ : columns_, scale, accuracy, finite);
                    direct.finish();
                }
            }
        }
    }

    // Loads the values of a row, or the taps for row -1. `columns_` is opaque: otherwise values that depend on it would
    // stay in registers from one transform to the next.
    KGEN_DEVICE void load(float (&re)[PerThread], int row) const {
        const int left = opaque(columns_) - thread_rank();
        if (row < 0) {
            const W* w = w_ + (left - 1);
#pragma unroll
            for (int r = 0; r < PerThread; ++r)
                re[r] = r * kThreads < left ? to_float(w[-r * kThreads]) : 0.0f;
        } else {
            const T* x = x_ + (row * stride_ + thread_rank());
#pragma unroll
            for (int r = 0; r < PerThread; ++r)
                re[r] = r * kThreads < left ? to_float(x[r * kThreads]) : 0.0f;
        }
    }

    // Finds this thread's largest magnitude, and one more than its last point that is not 0.
    KGEN_DEVICE void find_largest(const float (&re)[PerThread], float (&largest)[2]) const {
        int points = 0;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            largest[0] = Max::apply(largest[0], abs(re[r]));
            points = re[r] != 0.0f ? Fft::point(r) + 1 : points;
        }
        largest[1] = static_cast<float>(points);
    }

    // The spectrum of a row becomes the spectrum of its outputs, divided by Points.
    KGEN_DEVICE void multiply(float (&re)[PerThread], float (&im)[PerThread]) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 taps = fft_.kept(r);
            const float sine = Side == Triangle::lower ? taps.y : -taps.y, x = re[r];
            re[r] = (x * taps.x - im[r] * sine) * (1.0f / Points);
            im[r] = (x * sine + im[r] * taps.x) * (1.0f / Points);
        }
    }

    // Bit r is set if point r is inside the row.
    KGEN_DEVICE u32 inside() const {
        const int points = ceil_div(max(columns_ - thread_rank(), 0), kThreads);
        // untested: the sets have no NaN in rows with fewer elements than threads
        return points == 0 ? 0u : 0xffffffffu >> (32 - points);
    }

    // Bit r is set unless |y| of point r shows that the output is accurate; in squares_in_doubt, unless the sum of its
    // terms' squares shows that.
    KGEN_DEVICE u32 in_doubt(FftAccuracy<T> accuracy, const float (&y)[PerThread]) const {
        u32 bits = 0;
#pragma unroll
        for (int r = 0; r < PerThread; ++r)
            if (!accuracy.is_accurate(y[r])) bits |= 1u << r;
        return bits & inside();
    }
    KGEN_DEVICE u32 squares_in_doubt(FftAccuracy<T> accuracy, const float (&squares)[PerThread]) const {
        u32 bits = 0;
#pragma unroll
        for (int r = 0; r < PerThread; ++r)
            if (!accuracy.is_accurate_by_squares(squares[r])) bits |= 1u << r;
        return bits;
    }

    // `accuracy` is used only for 16-bit outputs of a finite row.
    KGEN_DEVICE void sum_directly(const DirectOutputs& direct, int row, int lags, RowScale scale,
                                  FftAccuracy<T> accuracy, bool finite) const {
        const T* x = x_ + row * stride_;
        T* y = y_ + row * stride_;
        const auto store = [&](int t, float sum) { y[t] = from_float<T>(sum + bias_); };
        const auto unsettled = [](int, int) { return false; };
        if (lags <= kShortRow) {
            direct.template for_each<kThreads, 1>(
                unsettled, [&](int t, int) { return partial_sum<1>(x, t, lags, 0); }, store);
        } else if constexpr (kSquares) {
            // Many outputs, which lie next to the tip of the triangle and therefore have few terms.
            direct.template for_each<kThreads, 8>(
                unsettled, [&](int t, int lane) { return partial_sum<8>(x, t, lags, lane); }, store);
        } else {
            // A few outputs that have many terms and happen to be small. For most of them the squares of some terms are
            // enough to show that the output is accurate.
            direct.template for_each<kThreads, kWarpSize>(
                [&](int t, int lane) {
                    const int terms = Side == Triangle::lower ? t + 1 : columns_ - t;
                    float term = 0.0f;
                    if (lane < terms)
                        term = taps_.apply(to_float(w_[columns_ - 1 - lane])) *
                               scale.apply(to_float(x[Side == Triangle::lower ? t - lane : t + lane]));
                    return finite && accuracy.is_accurate_by_terms(lanes_sum<kWarpSize>(term * term));
                },
                [&](int t, int lane) { return partial_sum<kWarpSize>(x, t, lags, lane); }, store);
        }
    }

    KGEN_DEVICE void store(const float (&scaled)[PerThread], int row, RowScale scale) const {
        const int exponent = taps_.exponent() + scale.exponent();
        const float half = power_of_two(exponent / 2), other = power_of_two(exponent - exponent / 2);
        const int left = opaque(columns_) - thread_rank();
        T* y = y_ + (row * stride_ + thread_rank());
#pragma unroll
        for (int r = 0; r < PerThread; ++r)
            if (r * kThreads < left) y[r * kThreads] = from_float<T>(scaled[r] * half * other + bias_);
    }

    // A lane's part of output t, or u, of a row: its terms with the taps of the first `lags` lags.
    template <int Lanes>
    KGEN_DEVICE float partial_sum(const T* x, int t, int lags, int lane) const {
        if constexpr (Side == Triangle::lower) {
            const int begin = max(0, t + 1 - lags);
            return partial_dot<Lanes, 1>(x + begin, w_ + (columns_ - 1 - t + begin), t + 1 - begin, lane);
        } else {
            return partial_dot<Lanes, -1>(x + t, w_ + (columns_ - 1), min(columns_ - t, lags), lane);
        }
    }

    Fft fft_;
    u32* doubtful_;  // [row][thread], for fp32: the bits of in_doubt
    const W* w_;
    const T* x_;
    T* y_;
    int rows_, columns_;
    int lags_;  // taps of lags from this one on are 0
    i64 stride_;
    float bias_;
    RowScale taps_;
};

}  // namespace detail

// y of a block's channel and up to `Rows` batch rows; blocks of a channel are `channels` apart.
template <Triangle Side, class T, class W, int Points, int PerThread, bool Wide, int Rows>
KGEN_DEVICE void toeplitz_fft(const W* w, const T* x, T* y, i64 batch, i64 channels, i64 columns,
                              float bias) {
    const i64 channel = static_cast<i64>(blockIdx.x) % channels;
    const i64 first = static_cast<i64>(blockIdx.x) / channels * Rows;
    const i64 stride = channels * columns, offset = first * stride + channel * columns;
    detail::ToeplitzFft<Side, T, W, Points, PerThread, Wide, Rows> product(
        w + channel * columns, x + offset, y + offset,
        static_cast<int>(min(batch - first, static_cast<i64>(Rows))), stride,
        static_cast<int>(columns), bias);
    product.run();
}

}  // namespace kgen
