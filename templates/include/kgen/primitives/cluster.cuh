// Thread block clusters (sm_90): blocks that are co-scheduled and can access each other's shared memory.
//
//     extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(...) {
//         float* mine = dynamic_smem<float>();
//         ...                                       // fill it
//         cluster_sync();                           // all blocks have started and filled their memory
//         float x = map_shared_rank(mine, 2)[7];    // of block 2
//         cluster_sync();                           // no block ends while others read its memory
//     }
//     KGEN_EXPORT_CLUSTERS(kernel, 4);
//
// gridDim.x must be a multiple of the cluster size, which is at most 8. Blocks of a cluster are adjacent in x. An
// ordinary launch is sufficient. For GPUs before sm_90 a kernel that uses these functions does not assemble. On the
// host the blocks of a cluster run in turns that end at the cluster barrier, and map_shared_rank accepts only
// addresses in dynamic shared memory.
#pragma once

#include "kgen/primitives/core.cuh"

#if KGEN_HOST
#include "kgen/host/cluster.hpp"

#define __cluster_dims__(...)

// Instead of KGEN_EXPORT: groups of `blocks` blocks that are adjacent in x run in turns on the host.
#define KGEN_EXPORT_COSCHEDULED(kernel, blocks)                                                   \
    extern "C" __attribute__((visibility("default"))) int kernel##__host(                         \
        const ::kgen::host::Launch* launch, void** args) {                                        \
        static_assert((blocks) <= ::kgen::host::kMaxClusterBlocks, "too many blocks");       \
        return ::kgen::host::launch_clusters(blocks, &kernel, launch, args);                      \
    }                                                                                             \
    static_assert(true, "lets KGEN_EXPORT_COSCHEDULED(...); end with a semicolon")

// Instead of KGEN_EXPORT, for a kernel with __cluster_dims__(blocks, 1, 1).
#define KGEN_EXPORT_CLUSTERS(kernel, blocks)                                                      \
    static_assert((blocks) <= 8, "the largest portable cluster size");           \
    KGEN_EXPORT_COSCHEDULED(kernel, blocks)
#else
#define KGEN_EXPORT_CLUSTERS(kernel, blocks) KGEN_EXPORT(kernel)
#endif

namespace kgen {

// Returns the rank of the calling block in its cluster, from 0.
KGEN_DEVICE int cluster_rank() {
#if KGEN_HOST
    return static_cast<int>(host::cluster_rank());
#else
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#endif
}

// Returns the number of blocks of the cluster; 1 in a kernel without clusters.
KGEN_DEVICE int cluster_size() {
#if KGEN_HOST
    return static_cast<int>(host::cluster_size());
#else
    u32 blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return static_cast<int>(blocks);
#endif
}

// Arrives at the cluster barrier (release). cluster_wait must follow before the next arrival. On the host it does
// nothing.
KGEN_DEVICE void cluster_arrive() {
#if !KGEN_HOST
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

// Waits until all threads of the cluster have arrived (acquire). The caller then sees what they wrote before, to
// shared memory of any block or to global memory.
KGEN_DEVICE void cluster_wait() {
#if KGEN_HOST
    host::cluster_barrier();
#else
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Waits for all threads of the cluster: arrive and wait.
KGEN_DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Returns the address of `shared` in the shared memory of block `rank`, for ordinary loads and stores (not for
// asynchronous copies). It may be used after a cluster barrier, which ensures that the block has started, and before
// another one, which keeps the block from ending.
template <class T>
KGEN_DEVICE T* map_shared_rank(T* shared, int rank) {
#if KGEN_HOST
    return static_cast<T*>(host::map_shared_rank(shared, static_cast<u32>(rank)));
#else
    u64 address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
    return reinterpret_cast<T*>(address);
#endif
}

}  // namespace kgen
