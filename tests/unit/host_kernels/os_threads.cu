// Which OS thread runs each block of a launch on the host.
#include <kgen/primitives/block.cuh>

// Block b writes an address in the storage of its OS thread to place[b], and counts to `count`.
extern "C" __global__ void os_threads(long long* place, int count) {
    __shared__ int of_this_os_thread;
    place[blockIdx.x] = reinterpret_cast<long long>(&of_this_os_thread);
    for (volatile int i = 0; i < count; i = i + 1) {
    }
}
KGEN_EXPORT(os_threads);
