// What a kernel of thread block clusters sees of the host layer beyond runtime.hpp: declarations
// only.
#pragma once

#include "runtime.hpp"

namespace kgen {
namespace host {

// The most blocks that take turns. A cluster has half of them, see KGEN_EXPORT_CLUSTERS; the others are of
// groups that are no cluster on a GPU (meeting.cuh).
constexpr u32 kMaxClusterBlocks = 16;

// The calling thread's block among those of its cluster, and their number.
u32 cluster_rank();
u32 cluster_blocks();

// Wait until every thread of the cluster has arrived.
void cluster_barrier();

// Where `shared`, an address in the calling block's dynamic shared memory, lies in block `rank` of
// the cluster. Only behind a cluster barrier: before it a block need not have begun.
void* cluster_address(const void* shared, u32 rank);

// As launch_kernel, in clusters of `blocks` blocks that are neighbours in x. Launch::reserved
// carries the number; 0 is a kernel without clusters.
template <class... P>
inline int launch_clusters(u32 blocks, void (*kernel)(P...), const Launch* launch, void** args) {
    Launch clustered = *launch;
    clustered.reserved = blocks;
    return launch_kernel(kernel, &clustered, args);
}

}  // namespace host
}  // namespace kgen
