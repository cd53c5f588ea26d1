// Kernels of one plan that overlap: a kernel may begin while the one before it still runs
// (programmatic dependent launch, sm_90 and later).
//
//     kgen::let_next_kernel_start();           // the earlier kernel: at its top, if blocks of both fit an SM
//
//     ...                                      // the later one: all that needs nothing of the earlier one
//     kgen::wait_for_earlier_kernel(states);   // then what the earlier one wrote
//
// The later kernel's launch says that it `overlaps`; without that it begins when the earlier one has
// ended, and the wait returns at once. So it does on the host, and below sm_90.
//
// Every thread of every kernel that overlaps waits, be it for nothing: that the kernel before the
// earlier one has ended is known because the earlier one waited for it. A kernel writes nothing that
// the earlier one may still read before its wait.
#pragma once

#include "core.cuh"

namespace kgen {

#if !KGEN_HOST && KGEN_ARCH >= 900
namespace detail {

// The compiler goes on knowing that it is global memory, and so how to read it.
template <class Pointer>
KGEN_DEVICE void forget_origin(Pointer& pointer) {
    u64 address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address)::"memory");
    pointer = static_cast<Pointer>(__cvta_global_to_generic(address));
}

}  // namespace detail
#endif

// From where each block of this kernel has come here, or has ended, blocks of the next may begin.
KGEN_DEVICE void let_next_kernel_start() {
#if !KGEN_HOST && KGEN_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the kernel before has ended and what it wrote can be read: through `pointers`, which the
// compiler knows nothing of from here on. Else it might take a kernel's const __restrict__ argument for
// memory that nobody writes while the kernel runs, and read it before the wait.
template <class... Pointers>
KGEN_DEVICE void wait_for_earlier_kernel([[maybe_unused]] Pointers&... pointers) {
#if !KGEN_HOST && KGEN_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    (..., detail::forget_origin(pointers));
#endif
}

}  // namespace kgen
