// Two places in shared memory that some warps fill and others use, in turns: turn t has place t % 2.
//
//     places.wait_free(turn);     // by those who fill
//     ...
//     fence_proxy_async();        // each of them, if it is for products by warpgroups or the copy engine
//     places.fill(turn);
//
//     places.wait_full(turn);     // by those who use what is there
//     ...
//     places.release(turn);       // each of their warps, as a whole
#pragma once

#include "bulk.cuh"
#include "warp.cuh"

namespace kgen {

// Its functions are templates for bulk.cuh's reason: they fail where one is used, not where this is included.
class TwoPlaces {
public:
    // By one thread, before all others: threads that fill, warps that use. mbarrier_init_fence follows.
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void begin(int fillers, int warps) {
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            mbarrier_init<Arch>(full_[place], static_cast<u32>(fillers));
            mbarrier_init<Arch>(free_[place], static_cast<u32>(warps));
        }
    }

    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void wait_free(int turn) {
        if (turn >= 2) mbarrier_wait<Arch>(free_[turn % 2], static_cast<u32>(turn / 2 - 1) % 2);
    }
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void fill(int turn) {
        mbarrier_arrive<Arch>(full_[turn % 2]);
    }

    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void wait_full(int turn) {
        mbarrier_wait<Arch>(full_[turn % 2], static_cast<u32>(turn / 2) % 2);
    }
    template <int Arch = KGEN_ARCH>
    KGEN_DEVICE void release(int turn) {
        sync_warp();
        if (lane_id() == 0) mbarrier_arrive<Arch>(free_[turn % 2]);
    }

private:
    Mbarrier full_[2], free_[2];
};

}  // namespace kgen
