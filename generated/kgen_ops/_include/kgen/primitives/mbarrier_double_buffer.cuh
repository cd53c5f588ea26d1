// The mbarriers of a double buffer in shared memory between producer threads and consumer warps (sm_90).
//
// Item i (0, 1, 2, ...) lies in slot i % 2 of a buffer that the caller owns. Every producer thread and every
// consumer warp goes through all items in this order:
//
//     pipe.producer_acquire(i);     // wait until the consumers have released the slot's previous item, i - 2
//     ...                           // write the slot
//     fence_proxy_async();          // only if wgmma or a bulk copy reads the slot
//     pipe.producer_commit(i);
//
//     pipe.consumer_wait(i);        // wait until all producers have committed item i
//     ...                           // read the slot
//     pipe.consumer_release(i);     // called by the whole warp
//
// Synchronisation: each slot has a `full` mbarrier, which counts producer threads, and an `empty` mbarrier, which
// counts consumer warps. Phase i / 2 of a slot's mbarriers belongs to item i, so its parity is (i / 2) % 2.
#pragma once

#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// The object lies in shared memory. Its functions are templates so that the check for sm_90 fails where one of them is
// used, not where this header is included.
class MbarrierDoubleBuffer {
public:
    // Initialises the mbarriers for `producers` threads and `consumer_warps` warps. Called by one thread, before all
    // other calls; mbarrier_init_fence and a block barrier follow.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void init(int producers, int consumer_warps) {
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
            mbarrier_init<Arch>(full_[slot], static_cast<u32>(producers));
            mbarrier_init<Arch>(empty_[slot], static_cast<u32>(consumer_warps));
        }
    }

    // Waits until the slot of `item` may be written.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void producer_acquire(int item) {
        if (item >= 2) mbarrier_wait<Arch>(empty_[item % 2], static_cast<u32>(item / 2 - 1) % 2);
    }
    // Announces that this thread has written its share of `item`.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void producer_commit(int item) {
        mbarrier_arrive<Arch>(full_[item % 2]);
    }

    // Waits until all producers have committed `item`.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void consumer_wait(int item) {
        mbarrier_wait<Arch>(full_[item % 2], static_cast<u32>(item / 2) % 2);
    }
    // Releases the slot of `item`. Called by all lanes of a consumer warp.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void consumer_release(int item) {
        sync_warp();
        if (lane_id() == 0) mbarrier_arrive<Arch>(empty_[item % 2]);
    }

private:
    Mbarrier full_[2], empty_[2];
};

}  // namespace kgen
