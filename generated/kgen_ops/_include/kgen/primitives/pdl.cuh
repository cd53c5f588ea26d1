// Programmatic dependent launch (sm_90): a kernel of a plan may start while the kernel before it still runs.
//
//     kgen::griddepcontrol_launch_dependents();  // primary kernel: at its start, if blocks of both fit an SM
//
//     ...                                        // secondary kernel: work that does not need the primary's results
//     kgen::griddepcontrol_wait(states);         // then its results
//
// The launch of the secondary kernel has `pdl: true` in the search space. Without `pdl`, below sm_90 and on the host,
// the secondary kernel starts when the primary has ended, and the wait returns at once. The host makes a missing wait
// visible: arguments that are workspaces of earlier kernels point to other memory until the wait replaces them.
//
// Synchronisation: every thread of every kernel with pdl must wait, even if it needs no results of the primary. The
// wait covers the primary only; that the kernels before the primary have ended follows from the primary's own wait.
// Before its wait, a kernel must not write memory that its primary may still read.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

#if !KGEN_HOST && KGEN_ARCH >= 900
namespace detail {

// Makes a pointer opaque; the compiler still knows that it points to global memory.
template <class Pointer>
KGEN_DEVICE void opaque_pointer(Pointer& pointer) {
    u64 address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address)::"memory");
    pointer = static_cast<Pointer>(__cvta_global_to_generic(address));
}

}  // namespace detail
#endif

// Allows blocks of the next kernel to start once every block of this kernel has called it or has ended.
KGEN_DEVICE void griddepcontrol_launch_dependents() {
#if !KGEN_HOST && KGEN_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the primary kernel has ended and its writes are visible. `pointers`: the pointers through which this
// kernel reads the primary's results. They become opaque: otherwise the compiler could move a load through a
// const __restrict__ argument before the wait.
template <class... Pointers>
KGEN_DEVICE void griddepcontrol_wait([[maybe_unused]] Pointers&... pointers) {
#if KGEN_HOST
    host::grid_wait();
    (..., void(pointers = static_cast<Pointers>(host::after_grid_wait(const_cast<void*>(
              static_cast<const void*>(pointers))))));
#elif KGEN_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    (..., detail::opaque_pointer(pointers));
#endif
}

}  // namespace kgen
