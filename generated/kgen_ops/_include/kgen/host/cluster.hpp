// Declarations of the host layer for kernels with thread block clusters, or with groups of CTAs that synchronise.
#pragma once

#include "runtime.hpp"

namespace kgen {
namespace host {

// The largest group of blocks that run in turns: 16 for groups that synchronise through a grid barrier
// (grid_barrier.cuh). Clusters have at most 8 (KGEN_EXPORT_CLUSTERS).
constexpr u32 kMaxClusterBlocks = 16;

// Returns the rank of the calling block in its cluster.
u32 cluster_rank();
// Returns the number of blocks of the cluster.
u32 cluster_size();

// Waits until all threads of the cluster have arrived.
void cluster_barrier();

// Adds one to a counter in global memory that the blocks of a group share. In two of the four thread orders the block
// then pauses until each other block of the group has had a turn: on a GPU the other blocks may run that long, too.
void counter_arrive(int* counter);
// Waits until a counter has reached `value`.
void counter_wait(const int* counter, int value);

// Returns the address in block `rank` of the cluster that corresponds to `shared`, an address in the calling block's
// dynamic shared memory. Allowed after the first cluster barrier: before it a block may not have started.
void* map_shared_rank(const void* shared, u32 rank);

// As launch_kernel, in clusters of `blocks` blocks that are adjacent in x. Launch::reserved holds the number; 0 means
// that the kernel has no clusters.
template <class... P>
inline int launch_clusters(u32 blocks, void (*kernel)(P...), const Launch* launch, void** args) {
    Launch clustered = *launch;
    clustered.reserved = blocks;
    return launch_kernel(kernel, &clustered, args);
}

}  // namespace host
}  // namespace kgen
