// What a block can know of the multiprocessors (SMs) that it and others run on.
#pragma once

#include "core.cuh"

namespace kgen {

// Multiprocessors of the GPU, or a few more; the host has one.
KGEN_DEVICE int multiprocessors() {
#if KGEN_HOST
    return 1;
#else
    u32 count;
    asm("mov.u32 %0, %%nsmid;" : "=r"(count));
    return static_cast<int>(count);
#endif
}

// Let some clock cycles pass, to be out of step with a block that began at the same time. The host
// has no clock to pass.
KGEN_DEVICE void let_cycles_pass([[maybe_unused]] int cycles) {
#if !KGEN_HOST
    const i64 begin = clock64();
    while (clock64() - begin < cycles) __nanosleep(100);
#endif
}

}  // namespace kgen
