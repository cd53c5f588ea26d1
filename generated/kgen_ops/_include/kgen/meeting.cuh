// Blocks of a kernel that meet through counters in global memory: groups of blocks with a barrier of their
// own, which need no cluster and no launch that holds all blocks at once.
//
//     kgen::clear_counters(counters, groups);                   // an earlier kernel
//
//     const kgen::GroupPlace place = kgen::place_in_group<8>();  // in the kernel whose blocks meet
//     kgen::GroupBarrier<8> barrier(counters, place.group);
//
// Why nobody waits for ever. A GPU starts blocks in the order of blockIdx.x. So those that have begun are
// 0, 1, 2, ... without a gap: of all groups that have begun, each but the last has all of its blocks running,
// or ended. Such a group waits for nobody else: it ends, and its blocks make room. The last one lacks blocks
// only while the GPU has no room for them; and what takes that room are blocks of complete groups and of
// other kernels, which end, and at most Blocks - 1 of this kernel that wait. So the kernel ends wherever
// Blocks of its blocks have room at once, whatever else runs on the GPU and ends. Of n such kernels in flight
// on several streams each may have Blocks - 1 blocks that wait: n * (Blocks - 1) + 1 must have room.
//
// That order is what GPUs do and no document promises; scans over whole devices rest on it, too, NVIDIA's
// CUB among them. A number taken from a counter would not: but it is known 3 us after the kernel has begun,
// and a block whose place it is can load nothing before.
//
// Counters: i32 [groups][kCounterStride], a line each, so that groups do not queue for each other's.
// Nothing has to be left in them from one launch to the next. The kernel may begin before the one that clears
// them has ended: a block waits for that when it first arrives.
//
// On the host a group is a cluster (KGEN_EXPORT_GROUPS): its blocks take turns at the barrier.
#pragma once

#include "block.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"

#if KGEN_HOST
// In place of KGEN_EXPORT, for a kernel whose blocks meet in groups of `blocks`, 16 at most.
#define KGEN_EXPORT_GROUPS(kernel, blocks) KGEN_EXPORT_TURNS(kernel, blocks)
#else
#define KGEN_EXPORT_GROUPS(kernel, blocks) KGEN_EXPORT(kernel)
#endif

namespace kgen {

constexpr int kCounterStride = 32;  // elements: a line of 128 bytes

// By the threads of a grid in x, one per counter or more.
KGEN_DEVICE void clear_counters(i32* counters, i64 groups) {
    const i64 counter = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (counter < groups) counters[counter * kCounterStride] = 0;
}

// A group, and a block's place in it.
struct GroupPlace {
    i64 group;
    int rank;
};

template <int Blocks>
KGEN_DEVICE GroupPlace place_in_group() {
    return {static_cast<i64>(blockIdx.x / Blocks), static_cast<int>(blockIdx.x % Blocks)};
}

// How often the blocks of a group have arrived, by one thread of each block. Lies in shared memory, where
// the number costs no register. On the host blocks take turns elsewhere (host::cluster_barrier).
template <int Blocks>
class GroupCounter {
public:
    KGEN_DEVICE GroupCounter(i32* counters, i64 group)
        : counter_(counters + group * kCounterStride), awaited_(0) {}

    // What the thread has seen, others see behind their wait.
    KGEN_DEVICE void arrive() const {
#if !KGEN_HOST
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(
                         __cvta_generic_to_global(counter_))
                     : "memory");
#endif
    }

    // Until all blocks have arrived once more.
    KGEN_DEVICE void wait() {
#if !KGEN_HOST
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
    i32 awaited_;  // arrivals, of all times waited so far
};

// Arrive at barrier `id` of the block for `Threads` threads in all, and go on: what the caller wrote, those
// see that wait there (sync_named). Nothing on the host.
template <int Threads>
KGEN_DEVICE void pass_named([[maybe_unused]] int id) {
#if !KGEN_HOST
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
#endif
}

// A barrier of all threads of a group's blocks, in two halves. What they wrote before they arrived, a
// thread sees behind its wait. One warp arrives and waits for its block: a release of GPU scope stands still
// until all writes are in L2, and so only that warp does. Every arrival has its wait, and the next arrival
// comes behind it. On the host an arrival does nothing, and a wait is the whole barrier.
template <int Blocks>
class GroupBarrier {
public:
    KGEN_DEVICE GroupBarrier(i32* counters, i64 group) : counter_(counters, group) {}

    // By all of the block's `Threads` threads, as is wait(); `warp` is the one for all.
    template <int Threads>
    KGEN_DEVICE void arrive([[maybe_unused]] int warp) const {
#if !KGEN_HOST
        wait_for_earlier_kernel();  // who cleared the counter; at once but the first time
        // Named barrier 1 shows this warp the others' writes, and they do not wait for it. A release is of
        // all that its thread has seen.
        if (thread_rank() / kWarpSize != warp) return pass_named<Threads>(1);
        sync_named(1, Threads);
        if (lane_id() == 0) counter_.arrive();
#endif
    }

    KGEN_DEVICE void wait([[maybe_unused]] int warp) {
#if KGEN_HOST
        host::cluster_barrier();
#else
        if (thread_rank() == warp * kWarpSize) counter_.wait();
        sync_block();
#endif
    }

private:
    GroupCounter<Blocks> counter_;
};

}  // namespace kgen
