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

#include "async.cuh"
#include "block.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "memory.cuh"
#include "registers.cuh"

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

// A barrier of all threads of a group's blocks, in two halves. What they wrote before they arrived, a
// thread sees behind its wait. One warp arrives and waits for its block: a release of GPU scope stands still
// until all writes are in L2, and so only that warp does. Every arrival has its wait, and the next arrival
// comes behind it. On the host an arrival does nothing, and a wait is the whole barrier.
//
// Lies in shared memory, where the number of arrivals costs no register.
template <int Blocks>
class GroupBarrier {
public:
    KGEN_DEVICE GroupBarrier(i32* counters, i64 group)
        : counter_(counters + group * kCounterStride), awaited_(0) {}

    // By all of the block's `Threads` threads, as is wait(); `warp` is the one for all.
    template <int Threads>
    KGEN_DEVICE void arrive([[maybe_unused]] int warp) const {
#if !KGEN_HOST
        wait_for_earlier_kernel();  // who cleared the counter; at once but the first time
        // Named barrier 1 shows this warp the others' writes, and they do not wait for it. A release is of
        // all that its thread has seen.
        if (thread_rank() / kWarpSize != warp) {
            asm volatile("bar.arrive 1, %0;" ::"n"(Threads) : "memory");
            return;
        }
        sync_named(1, Threads);
        if (lane_id() == 0)
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(
                             __cvta_generic_to_global(counter_))
                         : "memory");
#endif
    }

    KGEN_DEVICE void wait([[maybe_unused]] int warp) {
#if KGEN_HOST
        host::cluster_barrier();
#else
        if (thread_rank() == warp * kWarpSize) {
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
        }
        sync_block();
#endif
    }

private:
    i32* counter_;
    i32 awaited_;  // arrivals, of all barriers waited at so far
};

// States that each block of a group has parts of, and each wants one of whole: they go through global
// memory, in units of 16 x 16 values, so that a warp writes whole lines, and each block copies its own from
// there to shared memory.
//
// Units: of a state, Along of them in a row of units; Threads: of a block.
template <class T, int Units, int Along, int Threads, int Blocks>
class StateExchange {
    static constexpr int kUnit = 256;  // elements
    static constexpr int kState = Units * kUnit;

public:
    static constexpr int kUnitStride = 16;  // elements between rows of a place

    // states: [groups][Blocks][kState].
    KGEN_DEVICE StateExchange(const GroupPlace& place, i32* counters, T* states)
        : barrier_(counters, place.group),
          states_(states + place.group * Blocks * kState),
          rank_(place.rank) {}

    KGEN_DEVICE int rank() const { return rank_; }

    KGEN_DEVICE void arrive(int warp) const { barrier_.template arrive<Threads>(warp); }
    KGEN_DEVICE void wait(int warp) { barrier_.wait(warp); }

    struct Places {
        T* first;
        KGEN_DEVICE T* of(int block) const { return first + block * kState; }
    };
    // Where a row and column of a unit of each block's state is left.
    KGEN_DEVICE Places places(int unit, int row, int column) const {
        return {states_ + unit * kUnit + row * kUnitStride + column};
    }

    // Once all states are written: have the own one in `target`, from take() on. Layout says where it
    // lies there: offset(unit, row, piece) of eight values of a row of a unit, and kRowOfUnits, from one
    // row of units to the next.
    template <class Layout>
    KGEN_DEVICE void begin_to_take(T* target) const {
        // A warp copies a unit at a time. Where warps are whole rows of units, a thread's next unit is a
        // constant away.
        constexpr int kWarps = Threads / kWarpSize, kVec = 8;
        constexpr bool kRows = kWarps % Along == 0;
        const int first = computed_here(thread_rank() / kWarpSize), lane = computed_here(lane_id());
        const T* own = states_ + rank_ * kState + first * kUnit + lane * kVec;
        T* there = target + Layout::offset(first, lane / 2, lane % 2);
#pragma unroll
        for (int i = 0; i < Units; i += kWarps) {
            if (Units % kWarps != 0 && first + i >= Units) break;
            if constexpr (!kRows) there = target + Layout::offset(first + i, lane / 2, lane % 2);
            cp_async<16>(there + (kRows ? i / Along * Layout::kRowOfUnits : 0), own + i * kUnit);
        }
    }

    // shown(): between the copies' landing and the block's barrier.
    template <class Body>
    KGEN_DEVICE void take(Body shown) const {
        cp_async_wait_all();
        shown();
        sync_block();
    }

private:
    GroupBarrier<Blocks> barrier_;
    T* states_;
    int rank_;
};

}  // namespace kgen
