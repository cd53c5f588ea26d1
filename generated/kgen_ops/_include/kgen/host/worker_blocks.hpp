// How a worker runs blocks, alone or in clusters, on fibers. Part of worker.hpp.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <string>
#include <utility>

#include "worker.hpp"

namespace kgen {
namespace host {

// Runs blocks of `job` until none is left or one failed.
inline void Worker::work(Job& job) {
    job_ = &job;
    if (!prepare()) {
        job.fail(0, no_stacks());
        return;
    }
    const ModuleTls tls = ModuleTls::of_this_os_thread();
    while (!job.stop.load(std::memory_order_relaxed)) {
        const u64 turn = job.next_block.fetch_add(1, std::memory_order_relaxed);
        if (turn >= job.blocks) break;
        const u64 block = job.block_of_turn(turn, 1);
        tls.fill_unwritten(job.launch->seed);
        std::string problem = run_block(block);
        if (!problem.empty()) job.fail(block, std::move(problem));
    }
    current_thread = nullptr;
}

// Prepares to run the blocks with `rank` in their clusters, among `peers`.
inline bool Worker::join(Job& job, Worker* const* peers, u32 rank) {
    job_ = &job;
    peers_ = peers;
    cluster_rank_ = rank;
    if (prepare()) return true;
    job.fail(0, no_stacks());
    return false;
}

// Runs a block until it has ended or waits for its cluster. Returns a fault, or nothing.
inline std::string Worker::begin(u64 block) {
    in_cluster_ = 0;
    passed_cluster_barrier_ = rests_ = false;
    at_counter_.clear();
    if (!start_block(block)) return no_smem();
    return after_turn();
}

// Continues a block that waited for other blocks.
inline std::string Worker::resume() {
    if (!waits_at_barrier()) {
        rests_ = false;
        std::vector<Thread*> waiting;
        waiting.swap(at_counter_);
        for (Thread* thread : waiting) {
            const bool reached = *thread->counter >= thread->awaited;
            if (reached) thread->state = State::ready;
            reached ? ready_.push_back(thread) : at_counter_.push_back(thread);
        }
        Thread* next = ready_.pop();
        current_thread = next;
        if (next->state == State::fresh)
            start(*next, main_);
        else
            switch_context(main_, next->context, false);
        return after_turn();
    }
    const u32 count = job_->block_threads;
    in_cluster_ = 0;
    passed_cluster_barrier_ = true;
    for (u32 rank = 0; rank < count; ++rank) order_[rank] = &threads_[rank];
    if (job_->launch->seed) random_.order(job_->launch->seed, order_, count);
    for (u32 i = 0; i < count; ++i) {
        order_[i]->state = State::ready;
        ready_.push_back(order_[i]);
    }
    Thread* next = ready_.pop();
    current_thread = next;
    switch_context(main_, next->context, false);
    return after_turn();
}

// Allocates the stacks and thread records for the blocks of the job, and sets the fields that are the same for all
// blocks.
inline bool Worker::prepare() {
    const Launch& launch = *job_->launch;
    const u32 count = job_->block_threads;
    if (!stacks_.reserve(count)) return false;
    if (threads_.size() < count) threads_.resize(count);
    for (u32 rank = 0; rank < count; ++rank) {
        Thread& t = threads_[rank];
        t.rank = rank;
        t.thread_idx = {rank % launch.block[0], rank / launch.block[0] % launch.block[1],
                        rank / launch.block[0] / launch.block[1]};
        t.block_dim = {launch.block[0], launch.block[1], launch.block[2]};
        t.grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
        t.worker = this;
    }
    return true;
}

inline std::string Worker::run_block(u64 block) {
    if (!start_block(block)) return no_smem();
    return end_block();
}

// Runs the threads of a block until none can continue; false if there is no memory.
inline bool Worker::start_block(u64 block) {
    const Launch& launch = *job_->launch;
    const u32 count = job_->block_threads;
    const Dim3 block_idx = {static_cast<u32>(block % launch.grid[0]),
                            static_cast<u32>(block / launch.grid[0] % launch.grid[1]),
                            static_cast<u32>(block / launch.grid[0] / launch.grid[1])};
    if (!memory_.make(launch.smem_bytes, unwritten())) return false;
    for (u32 rank = 0; rank < count; ++rank) {
        Thread& t = threads_[rank];
        t.block_idx = block_idx;
        t.dynamic_smem = memory_.begin();
        t.state = State::fresh;
        t.open_group = 0;
        t.copies.clear();
        t.open_work_group = 0;
        t.work_fenced = false;
        t.work.clear();
        t.arguments.clear();
        t.open_bulk_group = 0;
        t.stores.clear();
        order_[rank] = &t;
    }
    mbarriers_.clear();
    if (launch.seed) {
        // Depends on the block, not on the worker, so that a seed gives the same order every time.
        random_.seed(launch.seed * 0xd1342543de82ef95ull + block);
        random_.order(launch.seed, order_, count);
    }
    memset(barriers_, 0, sizeof(barriers_));
    memset(waiting_, 0, sizeof(waiting_));
    problem_.clear();
    waited_for_grid_ = false;
    ready_.clear();
    for (u32 i = 1; i < count; ++i) ready_.push_back(order_[i]);
    main_.stack_low = nullptr;  // set by the first fiber
    start(*order_[0], main_);
    return true;
}

// Called when no thread of a block can continue. Returns the block's fault, or nothing.
inline std::string Worker::end_block() {
    if (ends_at_wait()) {
        end_early_block();
        return "";
    }
    const Dim3& block_idx = threads_[0].block_idx;
    if (problem_.empty()) problem_ = describe_stuck(block_idx);
    if (problem_.empty()) problem_ = describe_left_behind(block_idx);
    if (problem_.empty() && job_->launch->pdl == kMustWait && !waited_for_grid_) problem_ = describe_early(block_idx);
    if (!problem_.empty()) stacks_.take_all_back();
    std::string overrun = memory_.describe_overrun(block_idx);
    if (problem_.empty()) problem_ = std::move(overrun);
    return problem_;
}

inline void Worker::end_early_block() {
    for (u32 rank = 0; rank < job_->block_threads; ++rank)
        for (const BulkStore& store : threads_[rank].stores)
            memcpy(store.target, store.content.data(), store.content.size());
    stacks_.take_all_back();
}

// As end_block, for a block that may wait for its cluster. The shared memory of a block that has ended is filled
// with NaN, for other blocks that still read it.
inline std::string Worker::after_turn() {
    if (problem_.empty() && waits_for_cluster()) return "";
    std::string problem = end_block();
    memory_.mark_unwritten();
    return problem;
}

KGEN_FIBER_ROOT inline void Worker::fiber_main() {
#if defined(KGEN_ASAN)
    {
        const void* low;
        size_t bytes;
        __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
        Context& main = self()->worker->main_;
        if (!main.stack_low) {  // only the first fiber comes from the main stack
            main.stack_low = const_cast<char*>(static_cast<const char*>(low));
            main.stack_bytes = bytes;
        }
    }
#endif
    self()->worker->run_threads();
}

// Runs the current thread, and then threads that have not started, on one stack.
KGEN_FIBER_ROOT inline void Worker::run_threads() {
    for (;;) {
        Thread* me = self();
        job_->invoke(job_->kernel, job_->args);
        if (ends_at_wait()) end_thread();
        if (!me->stores.empty())
            fault("returned before %zu of its bulk stores had read shared memory",
                  me->stores.size());
        if (!me->work.empty())
            fault("returned before it had waited for %zu of its products", me->work.size());
        me->state = State::returned;
        Thread* next = ready_.pop();
        if (next && next->state == State::fresh) {
            next->context = me->context;  // the same stack
            next->state = State::ready;
            current_thread = next;
            continue;
        }
        stacks_.give(me->context.stack_low);
        if (next) current_thread = next;
        leave(*me, next ? next->context : main_);
    }
}

// The thread's stack is not given back before the block ends, because a thread that starts here could get it.
inline void Worker::end_thread() {
    Thread& me = *self();
    me.state = State::returned;
    Thread* next = ready_.pop();
    if (next && next->state == State::fresh) {
        start(*next, me.context);
        abort();  // not reached
    }
    if (next) current_thread = next;
    leave(me, next ? next->context : main_);
}

// Switches away for the last time.
KGEN_FIBER_ROOT inline void Worker::leave(Thread& me, Context& to) {
    switch_context(me.context, to, true);
    abort();  // not reached
}

// Gives a fresh thread a stack and switches to it.
inline void Worker::start(Thread& thread, Context& from) {
    char* low;
    size_t bytes;
    stacks_.take(low, bytes);
    make_context(thread.context, low, bytes, &Worker::fiber_main);
    thread.state = State::ready;
    current_thread = &thread;
    switch_context(from, thread.context, false);
}

// Runs other threads until the calling thread is popped from the ready queue.
inline void Worker::suspend() {
    Thread* me = self();
    Thread* next = ready_.pop();
    if (next == me) return;
    if (!next) {
        switch_context(me->context, main_, false);
    } else if (next->state == State::fresh) {
        start(*next, me->context);
    } else {
        current_thread = next;
        switch_context(me->context, next->context, false);
    }
}

}  // namespace host
}  // namespace kgen
