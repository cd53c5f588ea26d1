// Thread block clusters (sm_90): blocks that run at the same time and reach each other's shared
// memory.
//
//     extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(...) {
//         float* mine = dynamic_smem<float>();
//         ...                                       // fill it
//         sync_cluster();                           // all blocks have begun, and have filled theirs
//         float x = cluster_address(mine, 2)[7];    // of block 2
//         sync_cluster();                           // nobody reads a block's memory that has ended
//     }
//     KGEN_EXPORT_CLUSTERS(kernel, 4);
//
// The grid's x is a multiple of the cluster's size, 8 at most; blocks of a cluster are neighbours
// in x. An ordinary launch does. For an older GPU a kernel that calls any of this does not
// assemble. On the host the blocks of a cluster take turns at its barriers, and `cluster_address`
// takes dynamic shared memory only.
#pragma once

#include "core.cuh"

#if KGEN_HOST
#include "host/cluster.hpp"

#define __cluster_dims__(...)

// In place of KGEN_EXPORT: `blocks` neighbours in x take turns at barriers of theirs.
#define KGEN_EXPORT_TURNS(kernel, blocks)                                                         \
    extern "C" __attribute__((visibility("default"))) int kernel##__host(                         \
        const ::kgen::host::Launch* launch, void** args) {                                        \
        static_assert((blocks) <= ::kgen::host::kMaxClusterBlocks, "more than take turns");       \
        return ::kgen::host::launch_clusters(blocks, &kernel, launch, args);                      \
    }                                                                                             \
    static_assert(true, "lets KGEN_EXPORT_TURNS(...); end with a semicolon")

// In place of KGEN_EXPORT, for a kernel with __cluster_dims__(blocks, 1, 1).
#define KGEN_EXPORT_CLUSTERS(kernel, blocks)                                                      \
    static_assert((blocks) <= 8, "the most blocks that every GPU with clusters takes");           \
    KGEN_EXPORT_TURNS(kernel, blocks)
#else
#define KGEN_EXPORT_CLUSTERS(kernel, blocks) KGEN_EXPORT(kernel)
#endif

namespace kgen {

// Of the calling block in its cluster, from 0.
KGEN_DEVICE int cluster_rank() {
#if KGEN_HOST
    return static_cast<int>(host::cluster_rank());
#else
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#endif
}

// Blocks of the cluster; 1 in a kernel without clusters.
KGEN_DEVICE int cluster_blocks() {
#if KGEN_HOST
    return static_cast<int>(host::cluster_blocks());
#else
    u32 blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return static_cast<int>(blocks);
#endif
}

// A barrier in two halves. What the cluster's threads wrote before they arrived, to shared memory of
// any block or to global memory, a thread sees behind its wait. Every arrival has its wait, and the
// next arrival comes behind it. On the host nobody goes on from a wait before all have come to it.
KGEN_DEVICE void arrive_at_cluster() {
#if !KGEN_HOST
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

KGEN_DEVICE void wait_for_cluster() {
#if KGEN_HOST
    host::cluster_barrier();
#else
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Wait for every thread of the cluster.
KGEN_DEVICE void sync_cluster() {
    arrive_at_cluster();
    wait_for_cluster();
}

// The same place in the shared memory of block `rank`: an address to read and write as any other,
// but not by asynchronous copies. Behind a barrier of the cluster, which shows that the block has begun; and
// before another one that all blocks wait at, since it must not have ended.
template <class T>
KGEN_DEVICE T* cluster_address(T* shared, int rank) {
#if KGEN_HOST
    return static_cast<T*>(host::cluster_address(shared, static_cast<u32>(rank)));
#else
    u64 address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
    return reinterpret_cast<T*>(address);
#endif
}

}  // namespace kgen
