// Values that a thread puts aside while it transforms other values: in registers, or in a workspace if the transform
// needs the registers.
//
// Data layout of the workspace: float [value][thread], so that a warp accesses 128 consecutive bytes. A thread reads
// only values that it wrote itself, so that no barrier is needed.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

template <int Values, int Threads, bool InWorkspace>
class Parking {
public:
    static constexpr int kFloats = InWorkspace ? Values * Threads : 0;  // of the workspace

    KGEN_DEVICE explicit Parking(float* workspace) : workspace_(workspace + thread_rank()) {}

    // `i` is a compile-time constant where values are in registers.
    KGEN_DEVICE void put(int i, float value) {
        if constexpr (InWorkspace) {
            workspace_[i * Threads] = value;
        } else {
            values_[i] = value;
        }
    }
    KGEN_DEVICE float get(int i) const {
        if constexpr (InWorkspace) {
            return workspace_[i * Threads];
        } else {
            return values_[i];
        }
    }

private:
    float* workspace_;
    float values_[InWorkspace ? 1 : Values];
};

}  // namespace kgen
