// Bulk copies between global and shared memory (cp.async.bulk) and mbarriers (sm_90): one thread copies a whole row.
//
//     if (thread_rank() == 0) { mbarrier_init(full, 1); mbarrier_init_fence(); }
//     sync_block();                                    // all threads see the initialised mbarrier
//     if (thread_rank() == 0) {
//         mbarrier_arrive_expect_tx(full, bytes);      // the phase completes when the bytes have arrived
//         bulk_load(tile, source, bytes, full);
//     }
//     mbarrier_wait(full, 0);                          // every thread that reads the tile
//     ...                                              // write results to the tile
//     fence_proxy_async();                             // every thread that wrote to it
//     sync_block();
//     if (thread_rank() == 0) {
//         bulk_store(target, tile, bytes);
//         bulk_commit();
//         bulk_wait_read<0>();                         // the tile may be overwritten
//     }
//
// Synchronisation. An mbarrier has phases. A phase completes when all arrivals and all expected bytes are in.
// mbarrier_wait takes the parity of the phase: 0 for the first, then 1, 0, 1, ... Bulk copies access shared memory
// through the async proxy, which sees ordinary stores only after fence_proxy_async and a barrier. Ordinary reads
// before a barrier need no fence against a later bulk load.
//
// Addresses and sizes are multiples of 16 bytes.
//
// On the host a load fills its target with NaN when it is issued and writes the data when its phase is waited for; a
// store reads shared memory when it is waited for. The host reports byte counts that do not match, phases that never
// complete, shared memory that is stored without a fence or changed before the store has read it, and copies that are
// in flight when their threads return. A fence by any thread publishes all writes of the block to the host's async
// proxy, so the host does not report a fence that is missing in only some of the writing threads.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// An mbarrier object: 8 bytes of shared memory.
struct alignas(8) Mbarrier {
    u64 state;
};

// L2 eviction priority of a bulk load.
//
//     normal        the default policy
//     evict_first   for data that is read once: first to be evicted
//     evict_last    last to be evicted
enum class BulkCache { normal, evict_first, evict_last };

// The functions are templates so that this assertion fails where one of them is used, not where the header is
// included.
#define KGEN_NEEDS_BULK(Arch) \
    static_assert(Arch == 0 || Arch >= 900, "bulk copies and mbarriers with bytes need sm_90")

namespace detail {

#if !KGEN_HOST && KGEN_ARCH >= 900

KGEN_DEVICE u32 shared_address(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Not volatile, so that the compiler may create the policy once, outside loops.
template <BulkCache C>
KGEN_DEVICE u64 policy_of() {
    u64 policy;
    if constexpr (C == BulkCache::evict_first) {
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

#endif

}  // namespace detail

// Initialises an mbarrier whose phases take `arrivals` arrivals. Called by one thread. Other threads may use the
// mbarrier after that thread's mbarrier_init_fence and a block barrier.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_init(Mbarrier& barrier, u32 arrivals) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::mbarrier_init(&barrier, arrivals);
#elif KGEN_ARCH >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(&barrier)),
                 "r"(arrivals)
                 : "memory");
#endif
}

// Makes initialised mbarriers visible to the async proxy. Called once by the thread that initialised them.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_init_fence() {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::mbarrier_init_fence();
#elif KGEN_ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrives at the current phase.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_arrive(Mbarrier& barrier) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::mbarrier_arrive(&barrier, 0);
#elif KGEN_ARCH >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(&barrier))
                 : "memory");
#endif
}

// Arrives at the current phase and adds `bytes` to the bytes that it expects (at most 2^20 - 1 per phase). Called
// before the loads of those bytes.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_arrive_expect_tx(Mbarrier& barrier, u32 bytes) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::mbarrier_arrive(&barrier, bytes);
#elif KGEN_ARCH >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     detail::shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}

// Waits until the phase with this parity, the current or the previous one, has completed. The caller then sees the
// data of the phase's loads and all writes that the arriving threads made before they arrived.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_wait(Mbarrier& barrier, u32 parity) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::mbarrier_wait(&barrier, parity);
#elif KGEN_ARCH >= 900
    const u32 address = detail::shared_address(&barrier);
    u32 done;
    do {  // try_wait sleeps for a while before it gives up
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n"
            "}"
            : "=r"(done)
            : "r"(address), "r"(parity)
            : "memory");
    } while (!done);
#endif
}

// Starts a copy from global to shared memory. Its bytes count towards the current phase of the mbarrier.
template <BulkCache C = BulkCache::normal, int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_load(void* shared, const void* global, u32 bytes, Mbarrier& barrier) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::bulk_load(shared, global, bytes, &barrier);
#elif KGEN_ARCH >= 900
    // .shared::cluster: a block's own shared memory is part of its cluster's, even without one.
    if constexpr (C != BulkCache::normal) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1], %2, [%3], %4;" ::"r"(detail::shared_address(shared)),
            "l"(__cvta_generic_to_global(global)), "r"(bytes),
            "r"(detail::shared_address(&barrier)), "l"(detail::policy_of<C>())
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], %2, [%3];" ::"r"(detail::shared_address(shared)),
            "l"(__cvta_generic_to_global(global)), "r"(bytes),
            "r"(detail::shared_address(&barrier))
            : "memory");
    }
#endif
}

#if KGEN_HOST
namespace detail {

// Initialised when a module is loaded, if one of its kernels calls bulk_store.
template <BulkCache C>
inline const bool announced = host::announce_bulk_stores();

}  // namespace detail
#endif

// Starts a copy from shared to global memory, in the calling thread's open group.
template <BulkCache C = BulkCache::normal, int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    (void)detail::announced<C>;
    host::bulk_store(global, shared, bytes);
#elif KGEN_ARCH >= 900
    if constexpr (C != BulkCache::normal) {
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                __cvta_generic_to_global(global)),
            "r"(detail::shared_address(shared)), "r"(bytes), "l"(detail::policy_of<C>())
            : "memory");
    } else {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                         __cvta_generic_to_global(global)),
                     "r"(detail::shared_address(shared)), "r"(bytes)
                     : "memory");
    }
#endif
}

// Closes the group of the stores that this thread issued since the last commit.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_commit() {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::bulk_commit();
#elif KGEN_ARCH >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most `Pending` of this thread's groups have yet to read shared memory. A block must not end before
// its stores have read shared memory.
template <int Pending, int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_wait_read() {
    KGEN_NEEDS_BULK(Arch);
    static_assert(Pending >= 0, "the number of groups that may still be under way");
#if KGEN_HOST
    host::bulk_wait(Pending);
#elif KGEN_ARCH >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
#endif
}

// Waits until at most `Pending` of this thread's groups are in flight. The writes of the completed groups are visible
// to this thread. Only a kernel that reads back what it stored needs this wait.
template <int Pending, int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_wait() {
    KGEN_NEEDS_BULK(Arch);
    static_assert(Pending >= 0, "the number of groups that may still be under way");
#if KGEN_HOST
    host::bulk_wait(Pending);
#elif KGEN_ARCH >= 900
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// Makes this thread's writes to shared memory visible to the async proxy (bulk copies, wgmma). A barrier must follow
// before another thread issues the copy.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void fence_proxy_async() {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::fence_proxy_async();
#elif KGEN_ARCH >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#undef KGEN_NEEDS_BULK

}  // namespace kgen
