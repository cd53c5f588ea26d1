// Relaxed atomic additions on global or shared memory, and memory fences.
//
// The order of floating-point additions is not fixed: results of two runs may differ in the last bits, also on the
// host if several OS threads run the blocks.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// Adds `value` to `*target` and returns the old value.
KGEN_DEVICE float atomic_add(float* target, float value) {
#if KGEN_HOST
    u32* bits = reinterpret_cast<u32*>(target);
    u32 seen = __atomic_load_n(bits, __ATOMIC_RELAXED);
    // A failed exchange refreshes `seen`.
    while (!__atomic_compare_exchange_n(bits, &seen, bit_cast<u32>(bit_cast<float>(seen) + value),
                                        true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return bit_cast<float>(seen);
#else
    return atomicAdd(target, value);
#endif
}

KGEN_DEVICE i32 atomic_add(i32* target, i32 value) {
#if KGEN_HOST
    return __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
#else
    return atomicAdd(target, value);
#endif
}

KGEN_DEVICE u32 atomic_add(u32* target, u32 value) {
#if KGEN_HOST
    return __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
#else
    return atomicAdd(target, value);
#endif
}

// Orders this thread's earlier writes before its later ones, as other threads of the block see them.
KGEN_DEVICE void fence_block() {
#if KGEN_HOST
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#else
    __threadfence_block();
#endif
}

// Orders this thread's earlier writes before its later ones, as other threads of the GPU see them.
KGEN_DEVICE void fence_device() {
#if KGEN_HOST
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#else
    __threadfence();
#endif
}

}  // namespace kgen
