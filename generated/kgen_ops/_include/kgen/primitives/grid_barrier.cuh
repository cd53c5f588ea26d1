// A grid barrier between the CTAs of a group, through counters in global memory. Groups of `Blocks` CTAs that are
// adjacent in blockIdx.x synchronise without a cluster.
//
//     kgen::clear_grid_barriers(counters, groups);        // in an earlier kernel
//
//     const kgen::CtaGroup cta = kgen::cta_group<8>();    // in the kernel with the barrier
//     kgen::GridBarrier<8> barrier(counters, cta.group);
//     barrier.arrive<Threads>(warp);                      // all threads of the CTA
//     barrier.wait(warp);                                 // then they see the writes of all CTAs of the group
//
// Data layout: counters are i32 [groups][kGridBarrierStride], a cache line each. Their content does not have to be
// kept between launches. The kernel with the barrier may start before the kernel that clears the counters has ended
// (pdl.cuh): each CTA waits for the clearing kernel before it arrives.
//
// Forward progress. A kernel that exports itself with KGEN_EXPORT_CTA_GROUPS is launched as a cooperative kernel: no
// CTA starts before the GPU has room for all of them, whatever other kernels run, in whatever order CTAs start. The
// launch is refused if the device that the process sees (such as a MIG instance, an MPS share or a smaller GPU) can
// never have that room; another kernel is then used.
//
// On the host a group is a cluster (KGEN_EXPORT_CTA_GROUPS): its CTAs run in turns, and a turn ends where a CTA waits
// for the counter. In two of the four thread orders of a verification a turn also ends at an arrival.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/cluster.cuh"
#include "kgen/primitives/pdl.cuh"

#if KGEN_HOST
// Instead of KGEN_EXPORT, for a kernel whose CTAs synchronise in groups of `blocks`, at most 16.
#define KGEN_EXPORT_CTA_GROUPS(kernel, blocks) KGEN_EXPORT_COSCHEDULED(kernel, blocks)
#else
#define KGEN_EXPORT_CTA_GROUPS(kernel, blocks) KGEN_EXPORT(kernel)
#endif

namespace kgen {

// Elements between counters: a cache line of 128 bytes.
constexpr int kGridBarrierStride = 32;

// Sets all counters to zero. Called by the threads of a one-dimensional grid of at least `groups` threads.
KGEN_DEVICE void clear_grid_barriers(i32* counters, i64 groups) {
    const i64 counter = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (counter < groups) counters[counter * kGridBarrierStride] = 0;
}

// The group of a CTA and its rank in the group.
struct CtaGroup {
    i64 group;
    int rank;
};

// Returns the group and rank of the calling CTA.
template <int Blocks>
KGEN_DEVICE CtaGroup cta_group() {
    return {static_cast<i64>(blockIdx.x / Blocks), static_cast<int>(blockIdx.x % Blocks)};
}

// The counter of a group, used by one thread of each CTA. The object may be kept in shared memory to save a register.
// On the host it does nothing; host::cluster_barrier is used instead.
template <int Blocks>
class GridBarrierCounter {
public:
    KGEN_DEVICE GridBarrierCounter(i32* counters, i64 group)
        : counter_(counters + group * kGridBarrierStride), awaited_(0) {}

    // Increments the counter (release): what this thread has seen is visible to threads that wait for it.
    KGEN_DEVICE void arrive() const {
#if KGEN_HOST
        host::counter_arrive(counter_);
#else
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(
                         __cvta_generic_to_global(counter_))
                     : "memory");
#endif
    }

    // Waits until all CTAs of the group have arrived once more (acquire).
    KGEN_DEVICE void wait() {
#if KGEN_HOST
        host::counter_wait(counter_, awaited_ += Blocks);
#else
        const u64 counter = __cvta_generic_to_global(counter_);
        const i32 all = awaited_ + Blocks;
        awaited_ = all;
        i32 arrived;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                         : "=r"(arrived)
                         : "l"(counter)
                         : "memory");
        } while (arrived < all);
#endif
    }

private:
    i32* counter_;
    i32 awaited_;  // the counter's value that the last wait waited for
};

// A barrier of all threads of the CTAs of a group, split into arrive and wait. After its wait a thread sees what all
// these threads wrote before they arrived. One warp arrives and waits for its CTA: a release at GPU scope stalls until
// all writes are in L2, and so only that warp stalls. Every arrival must be followed by a wait before the next arrival.
template <int Blocks>
class GridBarrier {
public:
    KGEN_DEVICE GridBarrier(i32* counters, i64 group) : counter_(counters, group) {}

    // Called by all `Threads` threads of the CTA. `warp` is the warp that arrives for the CTA.
    template <int Threads>
    KGEN_DEVICE void arrive(int warp) const {
        griddepcontrol_wait();  // for the kernel that cleared the counter
        // Named barrier 1 makes the writes of the other warps visible to this warp; the other warps do not wait. A
        // release covers all writes that its thread has seen.
        if (thread_rank() / kWarpSize != warp) return named_barrier_arrive<Threads>(1);
        named_barrier_sync(1, Threads);
        if (lane_id() == 0) counter_.arrive();
    }

    // Called by all threads of the CTA.
    KGEN_DEVICE void wait(int warp) {
        if (thread_rank() == warp * kWarpSize) counter_.wait();
        sync_block();
    }

private:
    GridBarrierCounter<Blocks> counter_;
};

}  // namespace kgen
