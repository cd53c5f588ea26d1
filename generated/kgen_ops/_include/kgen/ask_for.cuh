// Rows that a block wants soon: L2 fetches them, and nobody waits.
#pragma once

#include "chunk_stage.cuh"
#include "memory.cuh"
#include "state_walk.cuh"

namespace kgen {

// By threads `rank` of `Threads`: `count` rows of Width values, from step `first` on; `left` of them exist.
template <int Width, int Threads, class T>
KGEN_DEVICE void ask_for(const StepRows<const T>& rows, i64 first, int left, int rank, int count) {
    constexpr int kLine = 128 / static_cast<int>(sizeof(T));
    constexpr int kLines = (Width + kLine - 1) / kLine;  // of a row
    const StepRows<const T> there{rows.at(first), rows.stride};
#pragma unroll
    for (int i = rank; i < count * kLines; i += Threads)
        if (i / kLines < left) prefetch_line(there.at(i / kLines) + i % kLines * kLine);
}

}  // namespace kgen
