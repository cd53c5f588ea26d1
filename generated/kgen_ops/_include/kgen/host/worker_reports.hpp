// Faults of a thread, and reports of a block that cannot continue. Part of worker.hpp.
#pragma once

#include <stdarg.h>
#include <stdio.h>

#include <string>

#include "worker.hpp"

namespace kgen {
namespace host {

inline std::string Worker::describe_left_alone() const {
    const Dim3& block = threads_[0].block_idx;
    if (!at_counter_.empty())
        return text("block (%u, %u, %u), thread (%u, 0, 0): waits for a counter of %d, which is %d: blocks of "
                    "its group do not arrive",
                    block.x, block.y, block.z, at_counter_[0]->rank, at_counter_[0]->awaited,
                    *at_counter_[0]->counter);
    return text("block (%u, %u, %u): waits at the cluster barrier, and a block of its cluster "
                "has returned",
                block.x, block.y, block.z);
}

// Returns what each thread waits for; empty if all have returned.
inline std::string Worker::describe_stuck(const Dim3& block) const {
    const u32 count = job_->block_threads;
    u32 stuck = 0;
    bool in_exchange = false;
    bool at_mbarrier = false;
    bool at_cluster = false;
    for (u32 i = 0; i < count; ++i) {
        stuck += threads_[i].state != State::returned;
        in_exchange |= threads_[i].state == State::in_exchange;
        at_mbarrier |= threads_[i].state == State::at_mbarrier;
        at_cluster |= threads_[i].state == State::at_cluster;
    }
    if (stuck == 0) return "";
    std::string report = text(
        "block (%u, %u, %u): %s: %u of %u threads wait for %s that never come", block.x,
        block.y, block.z,
        at_mbarrier ? "mbarrier phase without end"
        : in_exchange ? "divergent warp exchange"
        : at_cluster  ? "divergent cluster barrier"
                      : "divergent barrier",
        stuck, count, at_mbarrier ? "threads or bytes" : "threads");
    constexpr u32 kMaxLines = 16;
    u32 lines = 0;
    for (u32 first = 0; first < count;) {
        u32 last = first;
        while (last + 1 < count && same_wait(threads_[first], threads_[last + 1])) ++last;
        if (lines++ == kMaxLines) {
            report += "\n  ...";
            break;
        }
        report += first == last ? text("\n  thread %u ", first)
                                : text("\n  threads %u-%u ", first, last);
        report += describe(threads_[first]);
        first = last + 1;
    }
    return report;
}

// Reports a block of a launch with pdl that has not waited for the previous kernel.
inline std::string Worker::describe_early(const Dim3& block) const {
    return text("block (%u, %u, %u): no thread called griddepcontrol_wait, although the launch has pdl; on a GPU the "
                "kernel before it may still run",
                block.x, block.y, block.z);
}

// Reports copies in flight after a block has returned: on a GPU they would write into shared memory that may belong to
// another block by then.
inline std::string Worker::describe_left_behind(const Dim3& block) const {
    for (const Mbarrier& barrier : mbarriers_)
        if (!barrier.loads.empty())
            return text("block (%u, %u, %u): returned with bulk loads under way: nobody waits "
                        "for phase %u of %s",
                        block.x, block.y, block.z, barrier.phase,
                        mbarrier_name(barrier.address).c_str());
    // A copy that nobody waits for does no harm unless its target has been written since.
    for (u32 rank = 0; rank < job_->block_threads; ++rank)
        for (const Copy& copy : threads_[rank].copies)
            if (memory_.has(copy.target) && copy.overwritten(unwritten()))
                return text("block (%u, %u, %u): byte %llu of dynamic shared memory was written "
                            "while an asynchronous copy of thread %u to it was in flight",
                            block.x, block.y, block.z,
                            memory_.offset_of(copy.target),
                            rank);
    return "";
}

inline bool Worker::same_wait(const Thread& a, const Thread& b) {
    if (a.state != b.state) return false;
    if (a.state == State::at_barrier) return a.barrier_id == b.barrier_id;
    if (a.state == State::at_mbarrier) return a.mbarrier == b.mbarrier;
    if (a.state != State::in_exchange) return true;
    return a.operation == b.operation && a.mask == b.mask &&
           a.rank / kWarpSize == b.rank / kWarpSize;
}

inline std::string Worker::describe(const Thread& t) const {
    switch (t.state) {
        case State::returned: return "returned from the kernel";
        case State::at_barrier:
            if (t.barrier_id == 0 && t.barrier_count == job_->block_threads)
                return "wait at the block barrier";
            return text("wait at barrier %u, which %u of %u threads have reached", t.barrier_id,
                        barriers_[t.barrier_id].arrived, t.barrier_count);
        case State::in_exchange: {
            const u32 warp = t.rank / kWarpSize;
            u32 missing = t.mask & lanes_of_warp(warp);
            for (u32 i = 0; i < kWarpSize; ++i) {
                if (!(missing >> i & 1)) continue;
                const Thread& other = threads_[warp * kWarpSize + i];
                if (other.state == State::in_exchange && other.mask == t.mask &&
                    other.operation == t.operation)
                    missing &= ~(1u << i);
            }
            return text("wait in %s with mask 0x%08x for lanes %s of warp %u",
                        name_of(t.operation), t.mask, lanes_text(missing).c_str(), warp);
        }
        case State::at_mbarrier:
            for (const Mbarrier& barrier : mbarriers_)
                if (barrier.address == t.mbarrier)
                    return text("wait for phase %u of %s: %u of %u arrivals, %llu of %llu "
                                "bytes",
                                barrier.phase, mbarrier_name(t.mbarrier).c_str(),
                                barrier.arrived, barrier.arrivals, barrier.issued,
                                barrier.expected);
            return "wait at an mbarrier";
        case State::at_cluster: return "wait at the cluster barrier";
        case State::at_counter: return "wait for a counter";
        default: return "can run";
    }
}

inline std::string Worker::mbarrier_name(const void* mbarrier) const {
    for (size_t i = 0; i < mbarriers_.size(); ++i)
        if (mbarriers_[i].address == mbarrier) return text("mbarrier %zu", i);
    return text("mbarrier at %p", mbarrier);
}

inline void Worker::fault(const char* format, ...) {
    va_list list;
    va_start(list, format);
    fault_with(format, list);
}

inline void Worker::fault_with(const char* format, va_list list) {
    if (ends_at_wait()) end_thread();
    Thread& me = *self();
    char buffer[512];
    vsnprintf(buffer, sizeof(buffer), format, list);
    problem_ = place(me) + ": " + buffer;
    leave(me, main_);
}

inline std::string Worker::place(const Thread& t) {
    return text("block (%u, %u, %u), thread (%u, %u, %u)", t.block_idx.x, t.block_idx.y,
                t.block_idx.z, t.thread_idx.x, t.thread_idx.y, t.thread_idx.z);
}

inline std::string Worker::no_stacks() const {
    return text("the system refused memory for %u fiber stacks of %zu bytes",
                job_->block_threads, kStackBytes);
}

}  // namespace host
}  // namespace kgen
