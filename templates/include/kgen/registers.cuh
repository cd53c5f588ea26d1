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

}  // namespace kgen
