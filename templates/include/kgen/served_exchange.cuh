// Blocks that meet at counters (meeting.cuh) and have a warp for it: the others never stand still for those
// of other blocks, but where they need what they wait for.
//
// The serving warp arrives and waits for its block, and has the copy engine bring the block's state once it is
// there. States lie in global memory as in shared memory, in panels (wgmma.cuh), so that one copy does.
#pragma once

#include "block.cuh"
#include "bulk.cuh"
#include "meeting.cuh"
#include "wgmma.cuh"

namespace kgen {

// Keys, Slice: of a state; Workers: threads of a block but for those that serve them.
template <class T, int Keys, int Slice, int Workers, int Blocks>
class ServedExchange {
    static constexpr int kState = Keys * Slice;
    static constexpr int kAll = Workers + kWarpSize;
    static constexpr int kWritten = 1, kThere = 3;  // named barriers: of the block for the server; back

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

    // By the workers. The sums are written; they are there; the states are written.
    KGEN_DEVICE void sums_written() const { written(); }
    KGEN_DEVICE void wait_for_sums() const { there(); }
    KGEN_DEVICE void states_written() const { written(); }
    // The states are there, for a server that does not bring the own one; or that one is, in round `round`.
    KGEN_DEVICE void wait_for_states() const { there(); }
    KGEN_DEVICE void take(i64 round) {
#if KGEN_HOST
        host::cluster_barrier();
#endif
        mbarrier_wait(taken_, static_cast<u32>(round % 2));
    }

    // By the other threads, of which one warp does it. Of one round: with Brings, the own state comes to `target`.
    template <bool Brings>
    KGEN_DEVICE void serve([[maybe_unused]] T* target) {
        if (thread_rank() / kWarpSize != Workers / kWarpSize) return idle();
        meet();
        pass_named<kAll>(kThere);
        meet();
        if constexpr (Brings) {
            if (lane_id() == 0) {
#if !KGEN_HOST
                asm volatile("fence.proxy.async;" ::: "memory");  // others' writes, for the copy engine
#endif
                constexpr u32 kBytes = kState * static_cast<u32>(sizeof(T));
                mbarrier_arrive_expect(taken_, kBytes);
                bulk_load(target, state(rank_), kBytes, taken_);
            }
            sync_warp();
        } else {
            pass_named<kAll>(kThere);
        }
    }

    // Of block `rank`; once all states are there the own one is whole.
    KGEN_DEVICE T* state(int rank) const { return states_ + rank * kState; }

private:
    static KGEN_DEVICE void idle() {
#if KGEN_HOST  // where all threads of all blocks meet
        host::cluster_barrier();
        host::cluster_barrier();
#endif
    }

    KGEN_DEVICE void written() const {
        wait_for_earlier_kernel();  // who cleared the counters; at once but the first time
        pass_named<kAll>(kWritten);
    }
    KGEN_DEVICE void there() const {
#if KGEN_HOST
        host::cluster_barrier();
#else
        sync_named(kThere, kAll);
#endif
    }

    // With the servers of the group's other blocks, once the workers have written.
    KGEN_DEVICE void meet() {
#if KGEN_HOST
        host::cluster_barrier();
#else
        wait_for_earlier_kernel();
        sync_named(kWritten, kAll);
        if (lane_id() == 0) {
            counter_.arrive();
            counter_.wait();
        }
        sync_warp();
#endif
    }

    GroupCounter<Blocks> counter_;
    T* states_;
    int rank_;
    Mbarrier taken_;
};

}  // namespace kgen
