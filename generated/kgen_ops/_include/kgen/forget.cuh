// What keeps the compiler from being too clever with registers.
#pragma once

#include "kgen/core.cuh"

namespace kgen {

// Make the compiler forget what it knows of `values`. It would otherwise keep the unpacked fp32
// copies of 16-bit values from their first use to their last (twice the registers), or move loads
// past the point where they were written. `zero` must be 0 at run time and unknown to the compiler,
// such as `M >> 63`; a value of fewer than 4 bytes is left as it is.
template <class Values>
KGEN_DEVICE void forget(Values& values, u32 zero) {
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

}  // namespace kgen
