// mbarriers and bulk copies of a block. Part of worker.hpp.
#pragma once

#include <string.h>

#include <string>
#include <vector>

#include "worker.hpp"

namespace kgen {
namespace host {

inline void Worker::mbarrier_init(void* address, u32 arrivals) {
    check_aligned(address, 8, "mbarrier");
    if (arrivals == 0 || arrivals >= 1u << 20)
        fault("an mbarrier of %u arrivals: want 1 to 2^20 - 1", arrivals);
    for (const Mbarrier& known : mbarriers_)
        if (known.address == address) fault("%s made twice", mbarrier_name(address).c_str());
    mbarriers_.push_back(Mbarrier{address, arrivals, 0, 0, false, 0, 0, {}, {}});
}

inline void Worker::mbarrier_init_fence() {
    for (Mbarrier& known : mbarriers_) known.fenced = true;
}

inline void Worker::mbarrier_arrive(void* address, u32 expected_bytes) {
    Mbarrier& barrier = mbarrier_at(address);
    if (barrier.arrived == barrier.arrivals)
        fault("%s: arrival at phase %u, which has all of its %u arrivals and nobody has waited "
              "for",
              mbarrier_name(address).c_str(), barrier.phase, barrier.arrivals);
    if (barrier.expected + expected_bytes >= 1u << 20)
        fault("%s: phase %u expects %llu bytes, the most are 2^20 - 1",
              mbarrier_name(address).c_str(), barrier.phase, barrier.expected + expected_bytes);
    ++barrier.arrived;
    barrier.expected += expected_bytes;
    check_bytes(barrier);
    if (barrier.complete() && (barrier.loads.empty() || !barrier.waiting.empty()))
        end_phase(barrier);
}

inline void Worker::mbarrier_wait(void* address, u32 parity) {
    if (parity > 1) fault("%s: parity %u", mbarrier_name(address).c_str(), parity);
    Mbarrier& barrier = mbarrier_at(address);
    if ((barrier.phase & 1) != parity) return;  // that phase has ended
    if (barrier.complete()) return end_phase(barrier);
    Thread* me = self();
    me->state = State::at_mbarrier;
    me->mbarrier = address;
    barrier.waiting.push_back(me);
    suspend();
}

inline void Worker::bulk_load(void* target, const void* source, u32 bytes, void* address) {
    check_bulk(target, source, bytes, "bulk_load");
    Mbarrier& barrier = mbarrier_at(address);
    if (!barrier.fenced)
        fault("bulk_load to %s without an mbarrier_init_fence after its mbarrier_init",
              mbarrier_name(address).c_str());
    barrier.issued += bytes;
    check_bytes(barrier);
    // Read here, so that AddressSanitizer reports the line that issued the copy.
    const char* from = static_cast<const char*>(source);
    barrier.loads.push_back(BulkLoad{target, std::vector<char>(from, from + bytes)});
    memset(target, unwritten(), bytes);
    memory_.show_to_async_proxy(target, bytes);
    if (barrier.complete() && !barrier.waiting.empty()) end_phase(barrier);
}

inline void Worker::bulk_store(void* target, const void* source, u32 bytes) {
    check_bulk(source, target, bytes, "bulk_store");
    const char* from = static_cast<const char*>(source);
    if (memory_.has(source) && memcmp(from, memory_.async_proxy_view(source), bytes) != 0)
        fault("bulk_store of %u bytes of shared memory, some of them written after the last "
              "fence_proxy_async",
              bytes);
    Thread& me = *self();
    me.stores.push_back(
        BulkStore{target, source, me.open_bulk_group, std::vector<char>(from, from + bytes)});
}

inline void Worker::bulk_wait(u32 pending) {
    Thread& me = *self();
    const u32 end = me.open_bulk_group > pending ? me.open_bulk_group - pending : 0;
    size_t done = 0;
    for (; done < me.stores.size() && me.stores[done].group < end; ++done) {
        const BulkStore& store = me.stores[done];
        const size_t bytes = store.content.size();
        if (memcmp(store.source, store.content.data(), bytes) != 0)
            fault("shared memory was overwritten before a bulk_store of %zu bytes had read it",
                  bytes);
        memcpy(store.target, store.source, bytes);
    }
    me.stores.erase(me.stores.begin(), me.stores.begin() + static_cast<ptrdiff_t>(done));
}

inline void Worker::check_bulk(const void* shared, const void* global, u32 bytes, const char* what) {
    check_aligned(shared, 16, what);
    check_aligned(global, 16, what);
    if (bytes == 0 || bytes % 16 != 0)
        fault("%s of %u bytes: want a multiple of 16", what, bytes);
}

inline Mbarrier& Worker::mbarrier_at(const void* address) {
    for (Mbarrier& known : mbarriers_)
        if (known.address == address) return known;
    fault("%s was not made by mbarrier_init", mbarrier_name(address).c_str());
}

// Reports copies of more bytes than the phase expects. Once all arrivals are in, no thread can add to the expected
// bytes.
inline void Worker::check_bytes(const Mbarrier& barrier) {
    if (barrier.arrived == barrier.arrivals && barrier.issued > barrier.expected)
        fault("%s: phase %u expects %llu bytes, its copies bring %llu",
              mbarrier_name(barrier.address).c_str(), barrier.phase, barrier.expected,
              barrier.issued);
}

// Completes a phase: writes the data of its loads and resumes the waiting threads.
inline void Worker::end_phase(Mbarrier& barrier) {
    for (const BulkLoad& load : barrier.loads) {
        memcpy(load.target, load.content.data(), load.content.size());
        memory_.show_to_async_proxy(load.target, load.content.size());
    }
    barrier.loads.clear();
    ++barrier.phase;
    barrier.arrived = 0;
    barrier.expected = barrier.issued = 0;
    const auto n = static_cast<u32>(barrier.waiting.size());
    if (job_->launch->seed && n > 1) random_.order(job_->launch->seed, barrier.waiting.data(), n);
    for (Thread* thread : barrier.waiting) {
        thread->state = State::ready;
        ready_.push_back(thread);
    }
    barrier.waiting.clear();
}

}  // namespace host
}  // namespace kgen
