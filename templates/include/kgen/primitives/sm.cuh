// The number of SMs of the GPU (%nsmid), and a busy wait by the clock of an SM.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// Returns the number of SMs of the GPU, or a few more (%nsmid counts ids); 1 on the host.
KGEN_DEVICE int sm_count() {
#if KGEN_HOST
    return 1;
#else
    u32 count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return static_cast<int>(count);
#endif
}

// Waits for about `cycles` clock cycles (clock64), to desynchronise CTAs that started at the same time. Does nothing
// on the host.
KGEN_DEVICE void sleep_cycles([[maybe_unused]] int cycles) {
#if !KGEN_HOST
    const i64 begin = clock64();
    while (clock64() - begin < cycles) __nanosleep(100);
#endif
}

}  // namespace kgen
