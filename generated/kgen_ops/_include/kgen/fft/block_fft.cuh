// A Fourier transform of real fp32 rows by the threads of a block, for convolutions without wrap-around.
//
//     X[f] = sum over n < Points of x[n] * q^n * exp(-2 pi i f n / Points)        q = exp(-i pi / (2 Points))
//
// The factors q^n are the twist. The product of two such spectra, transformed back and divided by Points, is z[n] q^n,
//
//     z[n] = y[n] - i * y[n + Points]         y: the convolution of the rows, of 2 Points - 1 values
//
// because q^Points = -i. So the real part is the convolution, and the imaginary part what would have gone around
// (Nussbaumer's right-angle convolution). The spectrum of one row with the conjugate of the other's gives a
// correlation in the same way. A transform padded to 2 * Points would take twice the shared memory, and a complex row
// of two real ones would need a second, negacyclic transform.
//
// Data layout. A thread holds PerThread points in registers, real and imaginary parts apart. Before `forward` and
// after `inverse` its point r is x[point(r)]; consecutive threads hold consecutive points. Spectra are in the order
// in which `forward` leaves them. It is the same for all spectra, so that products of spectra need no reordering.
//
// Algorithm. Decimation in frequency by passes of radix up to PerThread: a pass with blocks of `length` points
// transforms the points j, j + stride, j + 2 stride, ... of a block (length = radix * stride), multiplies result i by
// exp(-2 pi i (i j) / length), and leaves `radix` blocks of `stride` points. The inverse runs the passes backwards.
//
// Shared memory, kSmemBytes: f32x2 kept[Points], a spectrum that a thread puts aside, in the order [r][thread]; f32x2
// roots[Points / 4], at root_place; float line[kLine] for exchanges. A line has a gap after every 32 points, so that
// the strides of a pass meet different banks. Real and imaginary parts take turns on one line.
//
// Synchronisation: an exchange has four barriers, the first of which protects the line's readers before it. They are
// barriers of the block in the first pass. In later ones, where the points of a warp stay within it, they are barriers
// of the warp, so that warps drift apart and one computes while another waits for memory. All threads of the block
// call all functions together. `init` ends with a barrier.
#pragma once

#include "kgen/fft/roots.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/registers.cuh"

namespace kgen {

namespace detail {

// Transforms R values in registers; Forward decides the sign of the exponent.
template <int R, bool Forward>
KGEN_DEVICE void small_dft(float (&re)[R], float (&im)[R]) {
    if constexpr (R == 2) {
        const float a = re[0], b = im[0];
        re[0] = a + re[1];
        im[0] = b + im[1];
        re[1] = a - re[1];
        im[1] = b - im[1];
    } else if constexpr (R > 2) {
        constexpr int kHalf = R / 2;
        float even_re[kHalf], even_im[kHalf], odd_re[kHalf], odd_im[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            even_re[i] = re[2 * i];
            even_im[i] = im[2 * i];
            odd_re[i] = re[2 * i + 1];
            odd_im[i] = im[2 * i + 1];
        }
        small_dft<kHalf, Forward>(even_re, even_im);
        small_dft<kHalf, Forward>(odd_re, odd_im);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            float x = odd_re[i], y = odd_im[i];
            if (i == R / 4) {  // times -i, or i
                const float turned = Forward ? y : -y;
                y = Forward ? -x : x;
                x = turned;
            } else if (i != 0) {
                const f32x2 root = root_of_128(i * (128 / R));
                const float sine = Forward ? root.y : -root.y;
                const float turned = x * root.x - y * sine;
                y = x * sine + y * root.x;
                x = turned;
            }
            re[i] = even_re[i] + x;
            im[i] = even_im[i] + y;
            re[i + kHalf] = even_re[i] - x;
            im[i + kHalf] = even_im[i] - y;
        }
    }
}

}  // namespace detail

template <int N>
KGEN_DEVICE void square(float (&values)[N]) {
#pragma unroll
    for (int r = 0; r < N; ++r) values[r] *= values[r];
}

// Returns the largest of a thread's |X|^2.
template <int N>
KGEN_DEVICE float largest_square(const float (&re)[N], const float (&im)[N]) {
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < N; ++r) largest = max(largest, re[r] * re[r] + im[r] * im[r]);
    return largest;
}

// See above.
template <int Points, int PerThread>
class BlockFft {
    static_assert(is_power_of_two(Points) && is_power_of_two(PerThread), "powers of two");
    static_assert(PerThread >= 4 && PerThread <= 32, "root_of_128 serves a radix of 4 to 32");
    static_assert(Points >= 32 * PerThread && Points / PerThread <= 1024, "1 to 32 warps");

public:
    static constexpr int kThreads = Points / PerThread;
    static constexpr int kLine = Points + Points / 32;  // floats
    static constexpr int kRoots = Points / 4;           // f32x2
    static constexpr int kSmemBytes = 8 * (Points + kRoots) + 4 * kLine;

    // `smem` is the begin of the map above.
    KGEN_DEVICE explicit BlockFft(f32x2* smem)
        : kept_(smem), roots_(smem + Points), line_(reinterpret_cast<float*>(roots_ + kRoots)) {}

    // The line, for other uses between transforms.
    KGEN_DEVICE float* line() const { return line_; }

    // Puts a spectrum aside. Only its thread reads it, so that no barrier is needed.
    KGEN_DEVICE void keep(const float (&re)[PerThread], const float (&im)[PerThread]) {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) kept_[r * kThreads + thread_rank()] = {re[r], im[r]};
    }
    KGEN_DEVICE f32x2 kept(int r) const { return kept_[r * kThreads + thread_rank()]; }

    // Fills the table of roots.
    KGEN_DEVICE void init() {
        twist_ = unit_root(static_cast<float>(thread_rank()) * (-0.5f / Points));
        for (int k = thread_rank(); k < kRoots; k += kThreads)
            roots_[root_place(k)] = unit_root(static_cast<float>(k) * (-2.0f / Points));
        sync_block();
    }

    // Returns the index of this thread's point r, before `forward` and after `inverse`.
    static KGEN_DEVICE int point(int r) {
        return thread_rank() + r * kThreads;
    }

    // `re` has a row, and becomes with `im` its spectrum.
    KGEN_DEVICE void forward(float (&re)[PerThread], float (&im)[PerThread]) {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 factor = twist(r);
            im[r] = re[r] * factor.y;
            re[r] *= factor.x;
        }
        down<0>(re, im);
    }

    // Returns a row with its twist, times Points.
    KGEN_DEVICE void inverse(float (&re)[PerThread], float (&im)[PerThread]) { up<kPasses - 1>(re, im); }

    // Replaces `re` by the real parts of a row, given the row with its twist.
    KGEN_DEVICE void untwist(float (&re)[PerThread], const float (&im)[PerThread]) const {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 factor = twist(r);
            re[r] = re[r] * factor.x + im[r] * factor.y;
        }
    }

private:
    // Points of a block of a pass.
    static KGEN_DEVICE constexpr int length(int pass) {
        int points = Points;
        for (int i = 0; i < pass; ++i) points /= PerThread;
        return points;
    }
    static KGEN_DEVICE constexpr int radix(int pass) {
        return length(pass) < PerThread ? length(pass) : PerThread;
    }
    static KGEN_DEVICE constexpr int passes() {
        int count = 0;
        for (int points = 1; points < Points; points *= PerThread) ++count;
        return count;
    }
    static constexpr int kPasses = passes();

    // Returns the factor of this thread's point r, exp(-i pi n / (2 Points)).
    KGEN_DEVICE f32x2 twist(int r) const {
        // Opaque: else all factors would stay in registers from one transform to the next.
        const f32x2 first = {bit_cast<float>(opaque(bit_cast<int>(twist_.x))),
                             bit_cast<float>(opaque(bit_cast<int>(twist_.y)))};
        return complex_mul(first, root_of_128(r * (32 / PerThread)));
    }

    // Multiplies by a root, or by its conjugate.
    template <bool Forward>
    static KGEN_DEVICE void rotate(float& re, float& im, f32x2 root) {
        const float sine = Forward ? root.y : -root.y, x = re;
        re = x * root.x - im * sine;
        im = x * sine + im * root.x;
    }

    template <int Pass>
    KGEN_DEVICE void down(float (&re)[PerThread], float (&im)[PerThread]) {
        constexpr int kRadix = radix(Pass);
#pragma unroll
        for (int m = 0; m < PerThread / kRadix; ++m) {
            butterfly<kRadix, true>(re + m * kRadix, im + m * kRadix);
            if constexpr (Pass + 1 < kPasses)
                twiddle<Pass, true>(re, im);
        }
        if constexpr (Pass + 1 < kPasses) {
            exchange<Pass, Pass + 1>(re, im);
            down<Pass + 1>(re, im);
        }
    }

    template <int Pass>
    KGEN_DEVICE void up(float (&re)[PerThread], float (&im)[PerThread]) {
        constexpr int kRadix = radix(Pass);
#pragma unroll
        for (int m = 0; m < PerThread / kRadix; ++m) {
            if constexpr (Pass + 1 < kPasses)
                twiddle<Pass, false>(re, im);
            butterfly<kRadix, false>(re + m * kRadix, im + m * kRadix);
        }
        if constexpr (Pass > 0) {
            exchange<Pass, Pass - 1>(re, im);
            up<Pass - 1>(re, im);
        }
    }

    template <int R, bool Forward>
    static KGEN_DEVICE void butterfly(float* re, float* im) {
        float x[R], y[R];
#pragma unroll
        for (int i = 0; i < R; ++i) {
            x[i] = re[i];
            y[i] = im[i];
        }
        detail::small_dft<R, Forward>(x, y);
#pragma unroll
        for (int i = 0; i < R; ++i) {
            re[i] = x[i];
            im[i] = y[i];
        }
    }

    // The place of exp(-2 pi i k / Points) in the table. Lanes of a warp that read every 16th root meet all banks.
    static KGEN_DEVICE int root_place(int k) { return k ^ (k >> 4 & 15); }

    // Multiplies value i by root^(i j), root = exp(-2 pi i / length). The table has the powers
    // 1, 2, 4, .. R / 4 of root^j, and the others are products of these: a chain of squares would multiply the
    // error of its first root.
    template <int Pass, bool Forward>
    KGEN_DEVICE void twiddle(float* re, float* im) const {
        constexpr int kRadix = radix(Pass), kStride = length(Pass) / kRadix;
        static_assert(kRadix == PerThread, "a thread has one butterfly of each pass but the last");
        const int j = opaque(thread_rank()) % kStride * (Points / length(Pass));
        f32x2 power[kRadix];
#pragma unroll
        for (int i = 1; i < kRadix; ++i) {
            const int rest = i & (i - 1);  // i without its lowest bit
            if (rest != 0) {
                power[i] = complex_mul(power[rest], power[i - rest]);
            } else if (i < kRadix / 2) {
                power[i] = roots_[root_place(i * j)];
            } else {
                power[i] = complex_mul(power[i / 2], power[i / 2]);
            }
            rotate<Forward>(re[i], im[i], power[i]);
        }
    }

    // The place of a thread's value r in a pass, on the line. The butterflies of a thread in the last pass, of a
    // smaller radix, are neighbours.
    template <int Pass>
    static KGEN_DEVICE int place(int r) {
        constexpr int kRadix = radix(Pass), kLength = length(Pass), kStride = kLength / kRadix;
        if constexpr (kStride == 1) {
            const int first = thread_rank() * PerThread + r;
            return first + first / 32;
        } else {
            const int first = thread_rank() / kStride * kLength + thread_rank() % kStride;
            const int offset = r * kStride;
            // No bit of `offset` is one of `first`, so that gaps may be counted apart.
            return first + first / 32 + offset + offset / 32;
        }
    }

    // An exchange moves values within a block of points of the earlier of two passes.
    template <int From, int To>
    KGEN_DEVICE void exchange(float (&re)[PerThread], float (&im)[PerThread]) {
        constexpr bool kInWarp = length(From < To ? From : To) <= kWarpSize * PerThread;
        exchange_part<From, To, kInWarp>(re);
        exchange_part<From, To, kInWarp>(im);
    }

    template <int From, int To, bool InWarp>
    KGEN_DEVICE void exchange_part(float (&part)[PerThread]) {
        barrier<InWarp>();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) line_[place<From>(r)] = part[r];
        barrier<InWarp>();
#pragma unroll
        for (int r = 0; r < PerThread; ++r) part[r] = line_[place<To>(r)];
    }

    template <bool OfWarp>
    static KGEN_DEVICE void barrier() {
        if constexpr (OfWarp) {
            sync_warp();
        } else {
            sync_block();
        }
    }

    f32x2* kept_;
    f32x2* roots_;
    float* line_;
    f32x2 twist_ = {};  // the factor of this thread's point 0
};

}  // namespace kgen
