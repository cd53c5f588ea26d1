// What a kernel whose registers are all in use tells its compiler.
#pragma once

#include "core.cuh"

// A function that is called, not built in: what is rarely done takes no registers of what is always done.
#if KGEN_HOST
#define KGEN_CALLED_DEVICE inline
#else
#define KGEN_CALLED_DEVICE __device__ __noinline__
#endif

namespace kgen {

// The same number, of which the compiler knows nothing. What follows from it is computed behind this place,
// not before the loop around it, from where it would take a register each.
KGEN_DEVICE int computed_here(int x) {
#if !KGEN_HOST
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// Warpgroups of a block with different work (sm_90a): those that need few registers leave the others theirs.
// By all of a warpgroup, once, before everything else of its branch of the kernel; Count is a multiple of 8.
// The kernel's launch bounds say how many it begins with.
template <int Count>
KGEN_DEVICE void leave_registers() {
#if !KGEN_HOST
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count>
KGEN_DEVICE void take_registers() {
#if !KGEN_HOST
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

}  // namespace kgen
