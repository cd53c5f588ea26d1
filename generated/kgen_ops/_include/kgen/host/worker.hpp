// The scheduler of one OS thread: runs blocks one after the other and switches between the fibers of a block. Part of
// runtime.cpp.
//
// CUDA threads switch only where they wait, directly from one to the next. A thread gets a stack when it first runs.
// When it returns, a thread that has not started runs on the same stack, so that a kernel without barriers needs one
// stack and no switch.
//
// Deadlock: if no fiber can run and some have not returned, the block is stuck, and the report says what each thread
// waits for.
#pragma once

#include <stdarg.h>

#include <string>
#include <vector>

#include "block_memory.hpp"
#include "fiber.hpp"
#include "job.hpp"
#include "runtime.hpp"
#include "thread.hpp"

namespace kgen {
namespace host {

// Whether a kernel of this module calls bulk_store.
inline bool has_bulk_stores = false;

// Runs the blocks that one OS thread takes.
class Worker {
public:
    // Runs blocks of `job` until none is left or one failed.
    void work(Job& job);

    // --- clusters: blocks that cluster_turns.hpp schedules ---

    // Prepares to run the blocks with `rank` in their clusters, among `peers`.
    bool join(Job& job, Worker* const* peers, u32 rank);

    void leave_cluster() { peers_ = nullptr; }

    // Runs a block until it has ended or waits for its cluster. Returns a fault, or nothing.
    std::string begin(u64 block);

    // Continues a block after the cluster barrier, or after other blocks had their turn. Returns a fault, or nothing.
    std::string resume();

    bool waits_at_barrier() const { return in_cluster_ == job_->block_threads; }
    // Whether the block continues after other blocks had their turn.
    bool waits_for_cluster() const { return waits_at_barrier() || rests_ || !at_counter_.empty(); }
    // Whether the block can continue after an arrival at a counter, or because a counter has its value. A block at the
    // cluster barrier can continue when all blocks are there, which the caller checks.
    bool can_resume() const;

    // Drops threads that will not continue.
    void abandon() { stacks_.take_all_back(); }

    // Ends a block whose threads stop at griddepcontrol_wait. Carries out their pending bulk stores, as a GPU may do.
    void end_early_block();

    std::string describe_left_alone() const;

    // --- operations of the running thread ---

    const Launch* launch() const { return job_->launch; }
    int unwritten() const { return unwritten_byte(job_->launch->seed); }
    u32 cluster_rank() const { return peers_ ? cluster_rank_ : 0; }
    void cluster_barrier();
    void counter_arrive(int* counter);
    void counter_wait(const int* counter, int value);
    void* map_shared_rank(const void* shared, u32 rank);
    void barrier(u32 id, u32 count);
    void barrier_arrive(u32 id, u32 count);
    u64 exchange(Exchange operation, u32 mask, u32 source, u64 value);

    void mbarrier_init(void* address, u32 arrivals);
    void mbarrier_init_fence();
    void mbarrier_arrive(void* address, u32 expected_bytes);
    void mbarrier_wait(void* address, u32 parity);
    void bulk_load(void* target, const void* source, u32 bytes, void* address);
    void bulk_store(void* target, const void* source, u32 bytes);
    void bulk_wait(u32 pending);
    const void* operand_of_deferred(const void* shared) {
        const bool viewed = job_->launch->seed % 2 == 1 && memory_.has(shared);
        return viewed ? memory_.async_proxy_view(shared) : shared;
    }
    void grid_wait() {
        waited_for_grid_ = true;
        if (ends_at_wait()) end_thread();
    }
    // Nothing reads the async proxy's view in a module without bulk stores, in an order of threads in which deferred
    // work reads the memory itself: then the fence copies nothing.
    void fence_proxy_async() {
        if (has_bulk_stores || job_->launch->seed % 2 == 1) memory_.show_all_to_async_proxy();
    }

    // Ends the block with a report that names the running thread.
    [[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 2, 3)));
    [[noreturn]] void fault_with(const char* format, va_list list);

private:
    static Thread* self() { return static_cast<Thread*>(current_thread); }

    // --- blocks and fibers: worker_blocks.hpp ---

    // Allocates the stacks and thread records for the blocks of the job, and sets the fields that are the same for all
    // blocks.
    bool prepare();
    std::string run_block(u64 block);
    // Runs the threads of a block until none can continue; false if there is no memory.
    bool start_block(u64 block);
    bool ends_at_wait() const { return job_->launch->pdl == kEndAtWait; }
    // Ends the running thread in the middle of the kernel.
    [[noreturn]] void end_thread();
    // Called when no thread of a block can continue. Returns the block's fault, or nothing.
    std::string end_block();
    // As end_block, for a block that may wait for its cluster.
    std::string after_turn();
    KGEN_FIBER_ROOT static void fiber_main();
    // Runs the current thread, and then threads that have not started, on one stack.
    [[noreturn]] KGEN_FIBER_ROOT void run_threads();
    // Switches away for the last time.
    [[noreturn]] KGEN_FIBER_ROOT void leave(Thread& me, Context& to);
    // Gives a fresh thread a stack and switches to it.
    void start(Thread& thread, Context& from);
    // Runs other threads until the calling thread is popped from the ready queue.
    void suspend();

    // --- barriers and warp exchanges: worker_waits.hpp ---

    // Returns the barrier at which a thread is about to arrive; and counts one arrival.
    Barrier& barrier_at(u32 id, u32& count);
    void arrive(Barrier& barrier);

    u32 lanes_of_warp(u32 warp) const {
        const u32 rest = job_->block_threads - warp * kWarpSize;
        return rest >= kWarpSize ? 0xffffffffu : (1u << rest) - 1;
    }
    // Whether all lanes of `wanted`, which wait in some exchange, wait in the same one.
    bool agree(u32 warp, u32 wanted, const Thread& me) const;
    void complete(u32 warp, u32 wanted);

    // --- mbarriers and bulk copies: worker_copies.hpp ---

    Mbarrier& mbarrier_at(const void* address);
    void check_bulk(const void* shared, const void* global, u32 bytes, const char* what);
    void check_bytes(const Mbarrier& barrier);
    // Completes a phase: writes the data of its loads and resumes the waiting threads.
    void end_phase(Mbarrier& barrier);

    // --- reports: worker_reports.hpp ---

    // Returns what each thread waits for; empty if all have returned.
    std::string describe_stuck(const Dim3& block) const;
    std::string describe_left_behind(const Dim3& block) const;
    std::string describe_early(const Dim3& block) const;
    static bool same_wait(const Thread& a, const Thread& b);
    std::string describe(const Thread& t) const;
    std::string mbarrier_name(const void* mbarrier) const;
    static std::string place(const Thread& t);
    std::string no_stacks() const;
    static std::string no_smem() { return "the system refused memory for dynamic shared memory"; }

    Job* job_ = nullptr;
    std::vector<Thread> threads_;
    Stacks stacks_;
    Context main_{};
    ReadyQueue ready_;
    Thread* order_[kMaxThreadsPerBlock];  // scratch, too large for the stack of a fiber
    Barrier barriers_[kMaxBarriers];
    u32 waiting_[kMaxThreadsPerBlock / kWarpSize];  // lanes in some exchange, by warp
    std::vector<Mbarrier> mbarriers_;  // of the block, in the order in which they were made
    BlockMemory memory_;
    Random random_;
    std::string problem_;
    bool waited_for_grid_ = false;  // whether a thread of the block has called griddepcontrol_wait

    Worker* const* peers_ = nullptr;  // the blocks of the cluster by rank; null without clusters
    u32 cluster_rank_ = 0;
    u32 in_cluster_ = 0;        // threads at the cluster barrier
    bool passed_cluster_barrier_ = false;
    bool rests_ = false;               // pauses after an arrival at a counter
    std::vector<Thread*> at_counter_;  // threads that wait for a counter
};

}  // namespace host
}  // namespace kgen

// Definitions of the members.
#include "worker_blocks.hpp"
#include "worker_copies.hpp"
#include "worker_reports.hpp"
#include "worker_waits.hpp"
