// Bulk copies between global and shared memory (sm_90): one thread moves a whole row.
//
//     if (thread_rank() == 0) { mbarrier_init(full, 1); mbarrier_init_fence(); }
//     sync_block();                                    // the barrier exists for all
//     if (thread_rank() == 0) {
//         mbarrier_arrive_expect(full, bytes);         // the phase ends when they have landed
//         bulk_load(tile, source, bytes, full);
//     }
//     mbarrier_wait(full, 0);                          // every thread that reads the tile
//     ...                                              // overwrite the tile with results
//     fence_proxy_async();                             // every thread that wrote
//     sync_block();
//     if (thread_rank() == 0) {
//         bulk_store(target, tile, bytes);
//         bulk_commit();
//         bulk_wait_read<0>();                         // the tile may be overwritten, or given up
//     }
//
// An mbarrier goes through phases; a phase ends when its arrivals and all expected bytes are in,
// and mbarrier_wait names the parity of the phase it waits for: 0 for the first, then 1, 0, 1, ...
//
// Addresses and sizes are multiples of 16 bytes. The copy engine sees shared memory through a proxy
// of its own, the async proxy: what ordinary stores wrote, it sees only after fence_proxy_async and
// a barrier. Ordinary reads that precede a barrier need no fence to be safe from a later bulk load.
//
// On the host a load fills its target with NaN when issued and lands when its phase is waited for;
// a store reads shared memory when it is waited for. The host reports: bytes that do not add up to
// what was expected, a phase that never ends, shared memory stored without a fence or changed
// before the store had read it, and copies still on the way when their threads return. Its async
// proxy sees all of the block's writes at any thread's fence: a fence missing in SOME of the
// writing threads can pass.
#pragma once

#include "core.cuh"

namespace kgen {

// 8 bytes of shared memory, opaque.
struct alignas(8) Mbarrier {
    u64 state;
};

// normal        L2 decides
// evict_first   used once: leaves L2 before anything else
// evict_last    leaves L2 after everything else
enum class BulkCache { normal, evict_first, evict_last };

// All functions are templates for one reason: the assertion then fails where one is used, not where
// this header is included.
#define KGEN_NEEDS_BULK(Arch) \
    static_assert(Arch == 0 || Arch >= 900, "bulk copies and mbarriers with bytes need sm_90")

namespace detail {

#if !KGEN_HOST && KGEN_ARCH >= 900

KGEN_DEVICE u32 shared_address(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Not volatile: the compiler may make the policy once, outside of loops.
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

// Make a barrier whose phases take `arrivals` arrivals. By one thread; no other may touch it before
// that thread's mbarrier_init_fence and a block barrier.
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

// Show new barriers to the copy engine. By the thread that made them, once, after the last.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_init_fence() {
    KGEN_NEEDS_BULK(Arch);
#if !KGEN_HOST && KGEN_ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrive at the current phase.
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

// Arrive at the current phase and make it wait for `bytes` more bytes (at most 2^20 - 1 per phase).
// Before the loads that bring them.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void mbarrier_arrive_expect(Mbarrier& barrier, u32 bytes) {
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

// Wait for the end of the phase with this parity: the current one, or the one before it. Whoever
// waits sees what the phase's loads brought and what its arriving threads did before.
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

// Start a copy from global to shared memory, whose bytes count towards the barrier's current phase.
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

// Start a copy from shared to global memory, in the calling thread's open group.
template <BulkCache C = BulkCache::normal, int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
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

// Close the group of the stores this thread issued since the last commit.
template <int Arch = KGEN_ARCH>
KGEN_DEVICE void bulk_commit() {
    KGEN_NEEDS_BULK(Arch);
#if KGEN_HOST
    host::bulk_commit();
#elif KGEN_ARCH >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Wait until at most `Pending` of this thread's groups have still to READ shared memory. A block
// must not end before its stores have read theirs.
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

// Wait until at most `Pending` of this thread's groups are under way; the others have been WRITTEN,
// as far as this thread can see. Needed only by a kernel that reads what it stored.
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

// Show this thread's writes to shared memory to the copy engine; a barrier must follow before
// another thread issues the store.
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
