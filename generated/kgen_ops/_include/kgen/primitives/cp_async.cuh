// Asynchronous copies from global to shared memory (cp.async).
//
//     cp_async<16>(tile, source);   // any number of copies
//     cp_async_commit();            // the copies since the last commit form a group
//     cp_async_wait<1>();           // all groups but the newest have arrived, for this thread
//     sync_block();                 // and for the other threads
//
// Below sm_80 a copy is an ordinary load and store, and commit and wait do nothing. On the host a copy fills its
// target with NaN when it is issued and writes the data when it is waited for. A missing wait, or a target that is
// still read, therefore gives a wrong result every time.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

namespace detail {

template <int Bytes>
KGEN_DEVICE void cp_async_partial(void* shared, const void* global, u32 source_bytes) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "a copy moves 4, 8 or 16 bytes");
#if KGEN_HOST
    host::check_aligned(shared, Bytes, "cp_async target");
    if (source_bytes > 0)  // otherwise the source is not read, and an H200 accepts any address
        host::check_aligned(global, Bytes, "cp_async source");
    host::copy_async(shared, global, Bytes, source_bytes);
#elif KGEN_ARCH >= 800
    const u32 target = static_cast<u32>(__cvta_generic_to_shared(shared));
    if constexpr (Bytes == 16) {
        // .cg: not allocated in L1, which would duplicate shared memory
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
                     "r"(source_bytes)
                     : "memory");
    } else {  // .cg exists for 16 bytes only
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(global),
                     "n"(Bytes), "r"(source_bytes)
                     : "memory");
    }
#else
    struct alignas(Bytes) Block {
        u8 bytes[Bytes];
    };
    if (source_bytes == Bytes) {
        *static_cast<Block*>(shared) = *static_cast<const Block*>(global);
    } else {
        Block block = {};
        for (u32 i = 0; i < source_bytes; ++i) block.bytes[i] = static_cast<const u8*>(global)[i];
        *static_cast<Block*>(shared) = block;
    }
#endif
}

}  // namespace detail

// Starts a copy of `Bytes` (4, 8 or 16) bytes. Both addresses must be multiples of `Bytes`.
template <int Bytes>
KGEN_DEVICE void cp_async(void* shared, const void* global) {
    detail::cp_async_partial<Bytes>(shared, global, Bytes);
}

// Starts a copy, or writes zeros if not `inside`; `global` is then not read and may be invalid. For partial tiles.
template <int Bytes>
KGEN_DEVICE void cp_async_or_zero(void* shared, const void* global, bool inside) {
    detail::cp_async_partial<Bytes>(shared, global, inside ? Bytes : 0);
}

// Closes the group of the copies that this thread issued since the last commit.
KGEN_DEVICE void cp_async_commit() {
#if KGEN_HOST
    host::copy_commit();
#elif KGEN_ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `Pending` of this thread's groups are in flight.
template <int Pending>
KGEN_DEVICE void cp_async_wait() {
    static_assert(Pending >= 0, "the number of groups that may be in flight");
#if KGEN_HOST
    host::copy_wait(Pending);
#elif KGEN_ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Waits for all of this thread's copies, committed or not.
KGEN_DEVICE void cp_async_wait_all() {
#if KGEN_HOST
    host::copy_wait_all();
#elif KGEN_ARCH >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace kgen
