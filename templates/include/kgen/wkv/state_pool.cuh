// A pool of states, and the slot of each sequence, which decoding reads and updates in place.
//
//     index          the sequence's y    states
//     0 .. S - 1     computed            the slot's state is updated
//     negative       0                   no state is touched: the sequence is skipped
//     S or more      NaN                 no state is touched: the index is refused, on the device
//
// Two sequences of a call must not name one slot.
//
// Layout: pool [S, H, K, V] with any strides; indices [N] of 4 or 8 bytes, or null: sequence n has slot n.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

namespace kgen::wkv {

struct Slot {
    i64 place;
    bool used;
    float y;  // y of a sequence whose slot is not used
};

// Slot of sequence n; indices of 0 bytes: none are given.
KGEN_DEVICE Slot slot_of(const void* indices, i64 bytes, i64 n, i64 slots) {
    const i64 place = bytes == 0   ? n
                      : bytes == 4 ? i64{static_cast<const i32*>(indices)[n]}
                                   : static_cast<const i64*>(indices)[n];
    const float nan = bit_cast<float>(0x7fc00000u);
    return Slot{place, place >= 0 && place < slots, place < 0 ? 0.0f : nan};
}

// The same for indices of a type known at compile time; `none`: none are given.
template <class Index>
KGEN_DEVICE Slot slot_of(const Index* indices, i64 n, i64 slots) {
    if constexpr (kPresent<Index>) return slot_of(indices, sizeof(Index), n, slots);
    return slot_of(nullptr, 0, n, slots);
}

// The states of a pool, or of one head.
struct StatePool {
    float* first;
    i64 stride_s, stride_h, stride_k, stride_v;

    KGEN_DEVICE StatePool head(i64 slot, i64 h) const {
        return StatePool{first + slot * stride_s + h * stride_h, 0, 0, stride_k, stride_v};
    }
    KGEN_DEVICE float* at(i64 key, i64 value) const {
        return first + key * stride_k + value * stride_v;
    }
};

}  // namespace kgen::wkv
