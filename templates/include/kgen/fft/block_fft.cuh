// A Fourier transform of real fp32 rows by the threads of a block, for convolutions without wrap-around.
//
//     X[f] = sum over n < Points of x[n] * q^n * exp(-2 pi i f n / Points)        q = exp(-i pi / (2 Points))
//
// The factors q^n are the twist. The product of two such spectra, transformed back and divided by Points, is z[n] q^n,
//
//     z[n] = y[n] - i * y[n + Points]         y: the convolution of the rows, of 2 Points - 1 values
//
// because q^Points = -i. So the real part holds the outputs below Points, and the imaginary part the negated outputs
// that would have wrapped around (Nussbaumer's right-angle convolution). The product of one row's spectrum and the
// conjugate of the other's gives a correlation in the same way. A transform padded to 2 * Points would take twice the
// shared memory, and a complex row of two real rows would need a second, negacyclic transform.
//
// Data layout. A thread holds PerThread points in registers, real and imaginary parts apart. Before `forward` and
// after `inverse` its point r is x[point(r)]; consecutive threads hold consecutive points. Spectra are in the order
// in which `forward` leaves them. It is the same for all spectra, so that products of spectra need no reordering.
//
// Algorithm. Decimation in frequency by passes of radix up to PerThread: a pass with blocks of `length` points
// transforms the points j, j + stride, j + 2 stride, ... of a block (length = radix * stride), multiplies result i by
// exp(-2 pi i (i j) / length), and leaves `radix` blocks of `stride` points. The inverse runs the passes backwards.
// The factors are applied in the layers of the next pass's butterfly, where a + w b and a - w b take six FMAs. A last
// pass of radix 2 has its two points in neighbouring lanes, and uses a shuffle instead of an exchange.
//
// Point r of thread j is n = j + r * kThreads. Its twist is the product of q^(r kThreads), a constant, and q^j, which
// is the same for all points of a thread. q^j therefore commutes with the first butterfly, and is part of the factors
// of later butterflies.
//
// Shared memory, kSmemBytes: f32x2 kept[Points], a spectrum that a thread puts aside, in the order [r][thread]; f32x2
// roots[kRoots], see first_root; a line of kLine values for exchanges. With Wide a value is f32x2, else a float, and
// real and imaginary parts take turns. A line has gaps, so that the strides of a pass meet different banks.
//
// Synchronisation. In an exchange a thread writes the places that it read in the previous exchange, so that no barrier
// is needed between two exchanges. There is one exception: before a `forward` that follows a `forward`, or before
// another use of the line, the caller needs a block barrier. An exchange thus has one barrier, or three where real and
// imaginary parts take turns. These are block barriers in the first pass. In a later pass they are warp barriers if the
// points of a warp stay within the warp; warps then drift apart, and one warp computes while another waits for memory.
// All threads of the block call all functions together. `init` ends with a block barrier.
#pragma once

#include "kgen/fft/roots.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
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

// Returns i with its log2(Count) bits in reverse.
template <int Count>
KGEN_DEVICE constexpr int reversed_bits(int i) {
    int result = 0;
    for (int bit = 1; bit < Count; bit *= 2) result = 2 * result + (i / bit & 1);
    return result;
}

// Butterflies of Size and more points: a + w b and a - w b of every block of Size values, w = root(Size, i), or its
// conjugate. 2 a - (a + w b) takes two instructions less than a - w b.
template <int R, int Size, bool Forward, class Root>
KGEN_DEVICE void layers(float (&re)[R], float (&im)[R], const Root& root) {
    constexpr int kQuarter = Size > 4 ? Size / 4 : 1;
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
        const f32x2 w = root.template at<Size>(i);
        const float sine = Forward ? w.y : -w.y;
#pragma unroll
        for (int turned = 0; turned < (Size > 2 ? 2 : 1); ++turned) {
            // The root, and a quarter turn further -i w, or i times the conjugate of w.
            const float c = turned == 0 ? w.x : Forward ? sine : -sine;
            const float s = turned == 0 ? sine : Forward ? -w.x : w.x;
#pragma unroll
            for (int block = 0; block < R; block += Size) {
                const int a = block + i + turned * kQuarter, b = a + Size / 2;
                const float x = fma(-s, im[b], fma(c, re[b], re[a]));
                const float y = fma(s, re[b], fma(c, im[b], im[a]));
                re[b] = fma(2.0f, re[a], -x);
                im[b] = fma(2.0f, im[a], -y);
                re[a] = x;
                im[a] = y;
            }
        }
    }
    if constexpr (Size < R) layers<R, 2 * Size, Forward>(re, im, root);
}

// The roots of `layers` for a transform of values i times ratio^i, given the ratio's powers 1, 2, 4, .. R / 2.
template <int R>
struct GeometricRoots {
    f32x2 power[6];

    template <int Size>
    KGEN_DEVICE f32x2 at(int i) const {
        constexpr int kPower = log2_of(R / Size);
        return i == 0 ? power[kPower] : complex_mul(power[kPower], root_of_128(i * (128 / Size)));
    }
    static KGEN_DEVICE constexpr int log2_of(int x) { return x < 2 ? 0 : 1 + log2_of(x / 2); }
};

// The same for the ratio exp(-2 pi i / (2 R)) in odd lanes, and 1 in even lanes.
template <int R>
struct NeighbourRoots {
    bool is_odd;

    template <int Size>
    KGEN_DEVICE f32x2 at(int i) const {
        const f32x2 even = root_of_128(i * (128 / Size)), odd = root_of_128(i * (128 / Size) + 64 / Size);
        return is_odd ? odd : even;
    }
};

// The value at a place of a line: a complex number, or its real or imaginary part.
template <bool Wide>
struct LineValue {
    using Type = f32x2;
};
template <>
struct LineValue<false> {
    using Type = float;
};

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
template <int Points, int PerThread, bool Wide>
class BlockFft {
    static_assert(is_power_of_two(Points) && is_power_of_two(PerThread), "powers of two");
    static_assert(PerThread >= 4 && PerThread <= 32, "root_of_128 serves a radix of 4 to 32");
    static_assert(Points >= 32 * PerThread && Points / PerThread <= 1024, "1 to 32 warps");

    using Value = typename detail::LineValue<Wide>::Type;

    // A root of a pass has log2(PerThread) - 1 powers in the table.
    static constexpr int kLog = PerThread == 4 ? 2 : PerThread == 8 ? 3 : PerThread == 16 ? 4 : 5;
    static constexpr int kGap = Wide ? 16 : 32;  // values, after which a line has a gap of one

public:
    static constexpr int kThreads = Points / PerThread;
    static constexpr int kLine = Points + Points / kGap;
    static constexpr int kRoots = kLog * kThreads + Points / 32 + 256;
    static constexpr int kSmemBytes = 8 * (Points + kRoots) + static_cast<int>(sizeof(Value)) * kLine;

    // `smem`: the start of the shared-memory map above.
    KGEN_DEVICE explicit BlockFft(f32x2* smem)
        : kept_(smem), roots_(smem + Points), line_(reinterpret_cast<Value*>(roots_ + kRoots)) {}

    // The line, for other uses between transforms.
    KGEN_DEVICE float* line() const { return reinterpret_cast<float*>(line_); }

    // Puts a spectrum aside. A thread reads only what it wrote itself, so that no barrier is needed.
    KGEN_DEVICE void keep(const float (&re)[PerThread], const float (&im)[PerThread]) {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) kept_[r * kThreads + thread_rank()] = {re[r], im[r]};
    }
    KGEN_DEVICE f32x2 kept(int r) const { return kept_[r * kThreads + thread_rank()]; }

    // Fills the table of roots.
    KGEN_DEVICE void init() {
        roots_[(kLog - 1) * kThreads + thread_rank()] =
            unit_root(static_cast<float>(thread_rank()) * (-0.5f / Points));
        static_assert(first_forward_root(kPasses) <= kRoots, "the table has room");
        fill_roots<0>();
        sync_block();
    }

    // Returns the index of this thread's point r, before `forward` and after `inverse`.
    static KGEN_DEVICE int point(int r) {
        return thread_rank() + r * kThreads;
    }

    // `re` holds a row; `re` and `im` become its spectrum.
    KGEN_DEVICE void forward(float (&re)[PerThread], float (&im)[PerThread]) {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 factor = twist(r);
            im[r] = re[r] * factor.y;
            re[r] *= factor.x;
        }
        down<0>(re, im);
    }

    // Returns a row, times Points, whose point r has the factor q^(r kThreads).
    KGEN_DEVICE void inverse(float (&re)[PerThread], float (&im)[PerThread]) { up<kPasses - 1>(re, im); }

    // Removes the factors q^(r kThreads) from the result of `inverse`.
    static KGEN_DEVICE void untwist(float (&re)[PerThread], float (&im)[PerThread]) {
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            const f32x2 factor = twist(r);
            const float x = re[r];
            re[r] = x * factor.x + im[r] * factor.y;
            im[r] = im[r] * factor.x - x * factor.y;
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
    static KGEN_DEVICE constexpr int stride(int pass) { return length(pass) / radix(pass); }
    static KGEN_DEVICE constexpr int passes() {
        int count = 0;
        for (int points = 1; points < Points; points *= PerThread) ++count;
        return count;
    }
    static constexpr int kPasses = passes();

    // Whether pass `pass` is the last one, of radix 2, between neighbouring lanes.
    static KGEN_DEVICE constexpr bool of_lanes(int pass) {
        return pass + 1 == kPasses && radix(pass) == 2;
    }

    static KGEN_DEVICE constexpr int log2_of(int x) { return x < 2 ? 0 : 1 + log2_of(x / 2); }

    // The index in the table of the first root of a pass of the inverse; roots are [log2 of the power][j]. The values
    // q^j follow the roots of pass 0.
    static KGEN_DEVICE constexpr int first_root(int pass) {
        int first = 0;
        for (int i = 0; i < pass; ++i)
            if (in_table(i)) first += (i == 0 ? kLog : kLog - 1) * stride(i);
        return first;
    }
    // Whether the roots of a pass of the inverse are in the table. They are constants if the next pass is between
    // lanes.
    static KGEN_DEVICE constexpr bool in_table(int pass) {
        return pass + 1 < kPasses && !of_lanes(pass + 1);
    }

    // The index in the table of the first root of a pass of `forward`; roots are [digit][value of the digit][log2 of
    // the power]. A block's number consists of the digits of the frequency so far, in reverse, and its ratio is the
    // product of one root per digit. The pass before a pass between lanes also has the power 1/2.
    static KGEN_DEVICE constexpr int first_forward_root(int pass) {
        int first = first_root(kPasses);
        for (int i = 1; i < pass; ++i) first += i * PerThread * forward_rows(i);
        return first;
    }
    static KGEN_DEVICE constexpr int forward_rows(int pass) {
        return of_lanes(pass) ? 0 : log2_of(radix(pass)) - 1 + (of_lanes(pass + 1) ? 1 : 0);
    }
    // Returns digit `digit` of the frequency of a block of a pass, the lowest first.
    template <int Pass>
    static KGEN_DEVICE int digit_of(int block, int digit) {
        return block >> (kLog * (Pass - 1 - digit)) & (PerThread - 1);
    }

    template <int Pass>
    KGEN_DEVICE void fill_roots() {
        if constexpr (in_table(Pass)) {
            constexpr int kStride = stride(Pass);
            for (int k = thread_rank(); k < (kLog - 1) * kStride; k += kThreads) {
                const float turns = static_cast<float>((k % kStride) << (k / kStride));
                roots_[first_root(Pass) + k] = unit_root(turns * (-2.0f / length(Pass)));
            }
        }
        if constexpr (Pass > 0 && !of_lanes(Pass)) {
            constexpr int kRows = forward_rows(Pass);
            for (int k = thread_rank(); k < Pass * PerThread * kRows; k += kThreads) {
                const int digit = k / (PerThread * kRows), value = k / kRows % PerThread;
                // In turns, times the points of the passes so far: digit d has the weight PerThread^d.
                const float frequency = static_cast<float>(value << (kLog * digit)) + (digit == 0 ? 0.25f : 0.0f);
                const float power = power_of_root(k % kRows - (of_lanes(Pass + 1) ? 1 : 0));
                roots_[first_forward_root(Pass) + k] =
                    unit_root(-2.0f * frequency * power * (static_cast<float>(stride(Pass)) / Points));
            }
        }
        if constexpr (Pass + 1 < kPasses) fill_roots<Pass + 1>();
    }
    static KGEN_DEVICE float power_of_root(int log2) {
        return log2 < 0 ? 0.5f : static_cast<float>(1 << log2);
    }

    // Returns the constant part of the factor of point r.
    static KGEN_DEVICE constexpr f32x2 twist(int r) { return root_of_128(r * (32 / PerThread)); }

    // Multiplies by a root, or by its conjugate.
    template <bool Forward>
    static KGEN_DEVICE void rotate(float& re, float& im, f32x2 root) {
        const float sine = Forward ? root.y : -root.y, x = re;
        re = x * root.x - im * sine;
        im = x * sine + im * root.x;
    }

    template <int Pass>
    KGEN_DEVICE void down(float (&re)[PerThread], float (&im)[PerThread]) {
        if constexpr (of_lanes(Pass)) {
            rotate_for_neighbours(re, im);
            add_neighbours(re, im);
        } else {
            if constexpr (Pass == 0) {
                detail::small_dft<PerThread, true>(re, im);
            } else {
                constexpr int kRadix = radix(Pass), kButterflies = PerThread / kRadix;
#pragma unroll
                for (int m = 0; m < kButterflies; ++m)
                    twiddled_forward<Pass>(re, im, m, opaque(thread_rank()) / stride(Pass) * kButterflies + m);
            }
            if constexpr (Pass + 1 < kPasses) {
                if constexpr (!of_lanes(Pass + 1)) exchange<Pass, Pass + 1>(re, im);
                down<Pass + 1>(re, im);
            }
        }
    }

    template <int Pass>
    KGEN_DEVICE void up(float (&re)[PerThread], float (&im)[PerThread]) {
        if constexpr (of_lanes(Pass)) {
            add_neighbours(re, im);
        } else {
            if constexpr (Pass + 1 < kPasses) {
                twiddled_inverse<Pass>(re, im);
            } else {
                butterflies<Pass>(re, im);
            }
        }
        if constexpr (Pass > 0) {
            if constexpr (!of_lanes(Pass)) exchange<Pass, Pass - 1>(re, im);
            up<Pass - 1>(re, im);
        }
    }

    // Butterflies of radix 2 between neighbouring lanes: the even one gets the sum.
    static KGEN_DEVICE void add_neighbours(float (&re)[PerThread], float (&im)[PerThread]) {
        const float sign = thread_rank() % 2 == 0 ? 1.0f : -1.0f;
#pragma unroll
        for (int r = 0; r < PerThread; ++r) {
            re[r] = fma(sign, re[r], shfl_xor(re[r], 1));
            im[r] = fma(sign, im[r], shfl_xor(im[r], 1));
        }
    }

    // Butterflies of the inverse without factors.
    template <int Pass>
    static KGEN_DEVICE void butterflies(float (&re)[PerThread], float (&im)[PerThread]) {
        constexpr int kRadix = radix(Pass);
#pragma unroll
        for (int m = 0; m < PerThread; m += kRadix) {
            float x[kRadix], y[kRadix];
#pragma unroll
            for (int i = 0; i < kRadix; ++i) {
                x[i] = re[m + i];
                y[i] = im[m + i];
            }
            detail::small_dft<kRadix, false>(x, y);
#pragma unroll
            for (int i = 0; i < kRadix; ++i) {
                re[m + i] = x[i];
                im[m + i] = y[i];
            }
        }
    }

    // Butterfly m of pass Pass of `forward`, of block `block`, with the factors ratio^r. Factors that all values of a
    // thread have in common are applied in later passes, where they are a power of a ratio.
    template <int Pass>
    KGEN_DEVICE void twiddled_forward(float (&re)[PerThread], float (&im)[PerThread], int m, int block) const {
        constexpr int kRadix = radix(Pass), kRows = forward_rows(Pass);
        constexpr bool kHasBase = kRows > log2_of(kRadix) - 1;
        f32x2 power[kRows];
#pragma unroll
        for (int digit = 0; digit < Pass; ++digit) {
            const f32x2* roots = roots_ + first_forward_root(Pass) +
                                 (digit * PerThread + digit_of<Pass>(block, digit)) * kRows;
#pragma unroll
            for (int i = 0; i < kRows; ++i) power[i] = digit == 0 ? roots[i] : complex_mul(power[i], roots[i]);
        }
        if constexpr (kHasBase) {
            // Only odd lanes have this factor; see rotate_for_neighbours.
            if (thread_rank() % 2 == 0) power[0] = {1.0f, 0.0f};
        }
        twiddled<Pass, kHasBase, true>(re, im, m, power[0], power + (kHasBase ? 1 : 0));
    }

    // The butterfly of pass Pass of `inverse`. Value i is multiplied by the conjugate of root^(i j), where root =
    // exp(-2 pi i / length), and in pass 0 also by the conjugate of q^j.
    template <int Pass>
    KGEN_DEVICE void twiddled_inverse(float (&re)[PerThread], float (&im)[PerThread]) const {
        constexpr int kStride = stride(Pass);
        const int j = opaque(thread_rank()) % kStride;
        if constexpr (!in_table(Pass)) {
            float x[PerThread], y[PerThread];
            reverse_bits<PerThread>(re, im, 0, x, y);
            detail::layers<PerThread, 2, false>(x, y, detail::NeighbourRoots<PerThread>{j != 0});
            put_back<PerThread>(x, y, re, im, 0);
        } else {
            const f32x2* roots = roots_ + first_root(Pass) + j;
            f32x2 power[kLog - 1], base = {1.0f, 0.0f};
#pragma unroll
            for (int i = 0; i + 1 < kLog; ++i) power[i] = roots[i * kStride];
            if constexpr (Pass == 0) base = roots[(kLog - 1) * kStride];
            twiddled<Pass, Pass == 0, false>(re, im, 0, base, power);
        }
    }

    // A butterfly of values r times base * ratio^r, given the ratio's powers 1, 2, 4, .. R / 4. Only the power R / 2 is
    // computed as a square, because a chain of squares would multiply the error of its first root. Factors in the
    // layers of the butterfly take fewer instructions than factors applied before it.
    template <int Pass, bool HasBase, bool Forward>
    static KGEN_DEVICE void twiddled(float (&re)[PerThread], float (&im)[PerThread], int m, f32x2 base,
                                     const f32x2* power) {
        constexpr int kRadix = radix(Pass), kLast = log2_of(kRadix) - 1;
        float x[kRadix], y[kRadix];
        reverse_bits<kRadix>(re, im, m, x, y);
        detail::GeometricRoots<kRadix> ratio;
#pragma unroll
        for (int i = 0; i < kLast; ++i) ratio.power[i] = power[i];
        ratio.power[kLast] = complex_mul(power[kLast - 1], power[kLast - 1]);
        if constexpr (HasBase) {
#pragma unroll
            for (int i = 0; i < kRadix; i += 2) rotate<Forward>(x[i], y[i], base);
            ratio.power[kLast] = complex_mul(base, ratio.power[kLast]);
        }
        detail::layers<kRadix, 2, Forward>(x, y, ratio);
        put_back<kRadix>(x, y, re, im, m);
    }

    template <int R>
    static KGEN_DEVICE void reverse_bits(const float (&re)[PerThread], const float (&im)[PerThread], int m,
                                         float (&x)[R], float (&y)[R]) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
            x[i] = re[m * R + detail::reversed_bits<R>(i)];
            y[i] = im[m * R + detail::reversed_bits<R>(i)];
        }
    }
    template <int R>
    static KGEN_DEVICE void put_back(const float (&x)[R], const float (&y)[R], float (&re)[PerThread],
                                     float (&im)[PerThread], int m) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
            re[m * R + i] = x[i];
            im[m * R + i] = y[i];
        }
    }

    // Applies the part of the factors that depends on the value, before a last pass of radix 2 of `forward`.
    static KGEN_DEVICE void rotate_for_neighbours(float (&re)[PerThread], float (&im)[PerThread]) {
        const bool is_odd = thread_rank() % 2 != 0;
#pragma unroll
        for (int i = 1; i < PerThread; ++i) {
            const f32x2 root = root_of_128(i * (64 / PerThread));
            rotate<true>(re[i], im[i], is_odd ? root : f32x2{1.0f, 0.0f});
        }
    }

    // The place on the line of a thread's value r in a pass. In the last pass, whose radix may be smaller, the
    // butterflies of a thread are adjacent.
    template <int Pass>
    static KGEN_DEVICE int place(int r) {
        constexpr int kStride = stride(Pass);
        if constexpr (kStride == 1) {
            const int first = thread_rank() * PerThread + r;
            return first + first / kGap;
        } else {
            const int first = thread_rank() / kStride * length(Pass) + thread_rank() % kStride;
            const int offset = r * kStride;
            // `offset` and `first` have no common bits, so that the gaps of both may be counted separately.
            return first + first / kGap + offset + offset / kGap;
        }
    }

    // An exchange moves values within a block of points of the earlier of two passes.
    template <int From, int To>
    KGEN_DEVICE void exchange(float (&re)[PerThread], float (&im)[PerThread]) {
        constexpr bool kInWarp = length(From < To ? From : To) <= kWarpSize * PerThread;
        if constexpr (Wide) {
#pragma unroll
            for (int r = 0; r < PerThread; ++r) line_[place<From>(r)] = {re[r], im[r]};
            barrier<kInWarp>();
#pragma unroll
            for (int r = 0; r < PerThread; ++r) {
                const f32x2 value = line_[place<To>(r)];
                re[r] = value.x;
                im[r] = value.y;
            }
        } else {
            exchange_part<From, To, kInWarp>(re);
            barrier<kInWarp>();
            exchange_part<From, To, kInWarp>(im);
        }
    }

    template <int From, int To, bool InWarp>
    KGEN_DEVICE void exchange_part(float (&part)[PerThread]) {
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
    Value* line_;
};

}  // namespace kgen
