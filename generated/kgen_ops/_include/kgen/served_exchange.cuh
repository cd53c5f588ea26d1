// Blocks that meet at counters (meeting.cuh) and have warps for it: those that work never stand still for
// other blocks, but where they need the state before their segment.
//
// The serving warps wait for the group's sums, scan them, wait for its states, and have the copy engine bring the
// block's own. States lie in global memory as in shared memory, in panels (wgmma.cuh), so that one copy does.
#pragma once

#include "block.cuh"
#include "bulk.cuh"
#include "meeting.cuh"
#include "wgmma.cuh"

namespace kgen {

// Keys, Slice: of a state; Workers, Servers: threads of a block, the workers first.
template <class T, int Keys, int Slice, int Workers, int Servers, int Blocks>
class ServedExchange {
    static constexpr int kState = Keys * Slice;
    // Named barriers: the workers' for the first server; of the servers, before and behind their scan.
    static constexpr int kWritten = 1, kBefore = 3, kBehind = 4;

public:
    static constexpr int kEightRows = 8 * 64;  // elements between rows of a panel that are eight apart

    // Where a value of a state is left.
    static KGEN_DEVICE int offset(int key, int value) {
        return Panels<Keys>::offset(key, value / 8) + value % 8;
    }

    // states: [groups][Blocks][kState].
    KGEN_DEVICE ServedExchange(const GroupPlace& place, i32* counters, T* states)
        : counter_(counters, place.group),
          states_(states + place.group * Blocks * kState),
          rank_(place.rank) {}

    KGEN_DEVICE void begin() {  // by one thread, before the others
        mbarrier_init(taken_, 1);
        mbarrier_init_fence();
    }
    KGEN_DEVICE int rank() const { return rank_; }

    // By the workers: the sums are written; and the own state is there, in round `round`.
    KGEN_DEVICE void sums_written() const {
        wait_for_earlier_kernel();  // who cleared the counters; at once but the first time
        pass_named<Workers + kWarpSize>(kWritten);
    }
    KGEN_DEVICE void take(i64 round) {
#if KGEN_HOST
        host::cluster_barrier();
        host::cluster_barrier();
#endif
        mbarrier_wait(taken_, static_cast<u32>(round % 2));
    }

    // By the servers, once a round: scan() the sums, by all of them, and have the own state come to `target`,
    // which the scan may have used.
    template <class Body>
    KGEN_DEVICE void serve(T* target, Body scan) {
        wait_for_earlier_kernel();
        const bool first = thread_rank() / kWarpSize == Workers / kWarpSize;
#if KGEN_HOST
        host::cluster_barrier();
#else
        if (first) {
            sync_named(kWritten, Workers + kWarpSize);
            meet();
        }
        sync_named(kBefore, Servers);
#endif
        scan();
        fence_proxy_async();
#if KGEN_HOST
        host::cluster_barrier();
#else
        if (!first) return pass_named<Servers>(kBehind);
        sync_named(kBehind, Servers);
        meet();
#endif
        if (first && lane_id() == 0) {
#if !KGEN_HOST
            asm volatile("fence.proxy.async;" ::: "memory");  // others' writes, for the copy engine
#endif
            constexpr u32 kBytes = kState * static_cast<u32>(sizeof(T));
            mbarrier_arrive_expect(taken_, kBytes);
            bulk_load(target, state(rank_), kBytes, taken_);
        }
        sync_warp();
    }

    // Of block `rank`; once all states are there the own one is whole.
    KGEN_DEVICE T* state(int rank) const { return states_ + rank * kState; }

private:
    // With the first servers of the group's other blocks.
    KGEN_DEVICE void meet() {
        if (lane_id() == 0) {
            counter_.arrive();
            counter_.wait();
        }
        sync_warp();
    }

    GroupCounter<Blocks> counter_;
    T* states_;
    int rank_;
    Mbarrier taken_;
};

}  // namespace kgen
