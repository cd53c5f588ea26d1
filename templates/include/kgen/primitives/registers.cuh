// Registers: barriers to the optimiser (`opaque`), register budgets of warpgroups (setmaxnreg, sm_90a), and
// functions that are called instead of inlined.
//
// An `opaque` value is the same number, but the compiler can no longer derive it from anything before that point.
// The compiler therefore computes expressions of the value after that point, and does not hoist them out of a
// surrounding loop, where every result would occupy a register through the whole loop.
#pragma once

#include "kgen/primitives/core.cuh"

// A device function that is called, not inlined: its registers do not add to those of the caller's main path.
#if KGEN_HOST
#define KGEN_DEVICE_NOINLINE inline
#else
#define KGEN_DEVICE_NOINLINE __device__ __noinline__
#endif

namespace kgen {

// Returns `x`, opaque to the optimiser. Costs no instruction.
KGEN_DEVICE int opaque(int x) {
#if !KGEN_HOST
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Makes `values` opaque to the optimiser in place, at one prmt.b32 per 4 bytes. `zero` must be 0 at run time and
// unknown to the compiler, such as `M >> 63`. The compiler would otherwise keep the unpacked fp32 copies of 16-bit
// values from their first use to their last (twice the registers), or move loads past the point where they stand.
// A value of fewer than 4 bytes is left as it is.
template <class Values>
KGEN_DEVICE void opaque(Values& values, u32 zero) {
#if KGEN_HOST
    (void)values, (void)zero;
#else
    if constexpr (sizeof(Values) >= 4) {
        struct Words {
            u32 word[sizeof(Values) / 4];
        };
        Words words = bit_cast<Words>(values);
#pragma unroll
        for (u32& word : words.word)
            asm volatile("prmt.b32 %0, %0, %1, 0x3210;" : "+r"(word) : "r"(zero));
        values = bit_cast<Values>(words);
    }
#endif
}

// Lowers the register limit of every thread of the calling warpgroup to `Count` (setmaxnreg.dec, sm_90a), for
// producer warps of a warp-specialised kernel. The launch bounds set the limit that the kernel starts with.
// All threads of the warpgroup call it once, first in their branch of the kernel. `Count` is a multiple of 8.
template <int Count>
KGEN_DEVICE void setmaxnreg_dec() {
#if !KGEN_HOST
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

// Raises the register limit of every thread of the calling warpgroup to `Count` (setmaxnreg.inc, sm_90a). Waits
// until other warpgroups have given up enough registers. Called as setmaxnreg_dec is.
template <int Count>
KGEN_DEVICE void setmaxnreg_inc() {
#if !KGEN_HOST
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

}  // namespace kgen
