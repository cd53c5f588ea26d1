// Thread block clusters: who is who, exchanges through distributed shared memory, and faults.
#include <kgen/primitives/block.cuh>
#include <kgen/primitives/cluster.cuh>

#if KGEN_HOST || KGEN_ARCH >= 900

namespace {

constexpr int kThreads = 64;

// A block's numbers go once around the cluster, a block further at each barrier.
template <int Blocks>
KGEN_DEVICE void pass_on(float* out) {
    float* mine = kgen::dynamic_smem<float>();
    const int rank = kgen::cluster_rank(), thread = kgen::thread_rank();
    mine[thread] = static_cast<float>(blockIdx.x * kThreads + thread);
    kgen::cluster_sync();
    float* next = kgen::map_shared_rank(mine, (rank + 1) % Blocks);
#pragma unroll 1
    for (int step = 0; step < Blocks; ++step) {
        const float x = mine[thread];
        kgen::cluster_sync();
        next[thread] = x + 0.5f;
        kgen::cluster_sync();
    }
    out[blockIdx.x * kThreads + thread] = mine[thread];
}

// As pass_on, by barriers whose two halves lie apart: what a block does between them nobody waits for.
template <int Blocks>
KGEN_DEVICE void pass_on_in_halves(float* out) {
    float* mine = kgen::dynamic_smem<float>();
    const int rank = kgen::cluster_rank(), thread = kgen::thread_rank();
    mine[thread] = static_cast<float>(blockIdx.x * kThreads + thread);
    kgen::cluster_arrive();
    float sum = 0.0f;
    for (int i = 0; i < 3; ++i) sum += static_cast<float>(i);
    kgen::cluster_wait();
    sum += kgen::map_shared_rank(mine, (rank + 1) % Blocks)[thread];
    kgen::cluster_arrive();
    out[blockIdx.x * kThreads + thread] = sum;
    kgen::cluster_wait();
}

}  // namespace

#define PASS_ON(name, blocks)                                                               \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) name(float* out) {            \
        pass_on<blocks>(out);                                                               \
    }                                                                                       \
    KGEN_EXPORT_CLUSTERS(name, blocks)

PASS_ON(pass_on_2, 2);
PASS_ON(pass_on_8, 8);

extern "C" __global__ void __cluster_dims__(4, 1, 1) pass_on_in_halves_4(float* out) {
    pass_on_in_halves<4>(out);
}
KGEN_EXPORT_CLUSTERS(pass_on_in_halves_4, 4);

// Rank and size of each block's cluster.
extern "C" __global__ void __cluster_dims__(4, 1, 1) places(int* out) {
    if (kgen::thread_rank() == 0) {
        out[2 * blockIdx.x] = kgen::cluster_rank();
        out[2 * blockIdx.x + 1] = kgen::cluster_size();
    }
}
KGEN_EXPORT_CLUSTERS(places, 4);

// Static shared memory is a block's own, over a cluster's barriers too.
extern "C" __global__ void __cluster_dims__(4, 1, 1) keep_static(float* out) {
    __shared__ float kept[kThreads];
    kept[kgen::thread_rank()] = static_cast<float>(kgen::cluster_rank());
    kgen::cluster_sync();
    kgen::cluster_sync();
    out[blockIdx.x * kThreads + kgen::thread_rank()] = kept[kgen::thread_rank()];
}
KGEN_EXPORT_CLUSTERS(keep_static, 4);

// --- planted faults ---

// Block 0 returns while others wait.
extern "C" __global__ void __cluster_dims__(2, 1, 1) one_block_leaves(float* out) {
    if (kgen::cluster_rank() == 0) return;
    kgen::cluster_sync();
    out[0] = 1.0f;
}
KGEN_EXPORT_CLUSTERS(one_block_leaves, 2);

// Half of a block does not arrive.
extern "C" __global__ void __cluster_dims__(2, 1, 1) one_warp_leaves(float* out) {
    if (kgen::thread_rank() < 32) kgen::cluster_sync();
    out[0] = 1.0f;
}
KGEN_EXPORT_CLUSTERS(one_warp_leaves, 2);

// Mapped before the other block need have begun.
extern "C" __global__ void __cluster_dims__(2, 1, 1) too_early(float* out) {
    float* other = kgen::map_shared_rank(kgen::dynamic_smem<float>(), 1);
    out[blockIdx.x] = *other;
}
KGEN_EXPORT_CLUSTERS(too_early, 2);

extern "C" __global__ void __cluster_dims__(2, 1, 1) no_such_block(float* out) {
    kgen::cluster_sync();
    out[blockIdx.x] = *kgen::map_shared_rank(kgen::dynamic_smem<float>(), 2);
}
KGEN_EXPORT_CLUSTERS(no_such_block, 2);

// Blocks read their neighbour's memory, which may have ended: no barrier behind it.
extern "C" __global__ void __cluster_dims__(2, 1, 1) too_late(float* out) {
    float* mine = kgen::dynamic_smem<float>();
    mine[kgen::thread_rank()] = 1.0f;
    kgen::cluster_sync();
    out[blockIdx.x * kThreads + kgen::thread_rank()] =
        kgen::map_shared_rank(mine, 1 - kgen::cluster_rank())[kgen::thread_rank()];
}
KGEN_EXPORT_CLUSTERS(too_late, 2);

// Blocks read what their neighbour has not written: no barrier between.
extern "C" __global__ void __cluster_dims__(2, 1, 1) no_barrier_between(float* out) {
    float* mine = kgen::dynamic_smem<float>();
    kgen::cluster_sync();
    mine[kgen::thread_rank()] = 1.0f;
    const float* other = kgen::map_shared_rank(mine, 1 - kgen::cluster_rank());
    out[blockIdx.x * kThreads + kgen::thread_rank()] = other[kgen::thread_rank()];
    kgen::cluster_sync();
}
KGEN_EXPORT_CLUSTERS(no_barrier_between, 2);

#endif
