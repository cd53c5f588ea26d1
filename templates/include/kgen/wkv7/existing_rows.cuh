// Loads of rows whose end may lie within a vector, without conditions.
#pragma once

#include "kgen/primitives/memory.cuh"

namespace kgen::wkv7 {

// Loads elements `column` to column + 3 of a row of `Count`, and the row's last elements in place of those beyond its
// end. There are no conditions: a load under one is followed by a move that waits for it, so that the loads of a loop
// would wait for each other.
template <int CopyVec, int Count, class T>
KGEN_DEVICE Vec<T, 4> load_existing(const T* row, int column) {
    constexpr int kEach = min(CopyVec, min(4, static_cast<int>(16 / sizeof(T))));
    if constexpr (kEach == 4) {
        return load_vec<4>(row + min(column, Count - 4));
    } else {
        Vec<T, 4> found;
#pragma unroll
        for (int x = 0; x < 4; x += kEach) {
            const auto some = load_vec<kEach>(row + min(column + x, Count - kEach));
#pragma unroll
            for (int y = 0; y < kEach; ++y) found[x + y] = some[y];
        }
        return found;
    }
}

}  // namespace kgen::wkv7
