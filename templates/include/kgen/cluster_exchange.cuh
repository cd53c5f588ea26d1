// How the blocks of a SegmentWalk meet if they are a cluster: at the cluster's barrier, and states before
// segments go straight to the shared memory of the blocks that they are for.
#pragma once

#include "cluster.cuh"

namespace kgen {

// State: UnitsOfState of the walk.
template <class State, int Blocks>
class ClusterExchange {
    using T = typename State::Element;

public:
    static constexpr int kBlocks = Blocks;
    static constexpr int kKeptBytes = 0;                   // of shared memory for the exchange itself
    static constexpr int kUnitStride = State::kStride;     // elements between rows of a place
    static constexpr bool kAllArrive = true;               // every warp for itself, with a fence
    static constexpr bool kCrowds = false;                 // takes registers that a walk must then save

    KGEN_DEVICE int rank() const { return cluster_rank(); }

    // The barrier's halves. There is no warp that waits for the others.
    KGEN_DEVICE void arrive(int) const { arrive_at_cluster(); }
    KGEN_DEVICE void wait(int) const { wait_for_cluster(); }

    // Where a row and column of a unit of the state before each segment is left; `before` is the block's own
    // state.
    struct Places {
        T* before;
        int offset;
        KGEN_DEVICE T* of(int block) const { return cluster_address(before, block) + offset; }
    };
    KGEN_DEVICE Places places(int unit, int row, int column, T* before) const {
        return {before, State::offset(unit) + row * kUnitStride + column};
    }

    // Behind the arrival with all states written: have the own one in `before`, from take() on.
    KGEN_DEVICE void begin_to_take(T*, int) const {}
    KGEN_DEVICE void take() const { wait_for_cluster(); }
};

}  // namespace kgen
