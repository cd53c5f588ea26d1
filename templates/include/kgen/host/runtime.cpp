// The host layer: launches, and the operations that a running kernel calls.
//
// Compiled once per compiler and linked into every module, so that standard headers cost nothing per kernel.
#include "runtime.hpp"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cluster.hpp"
#include "cluster_turns.hpp"
#include "thread.hpp"
#include "worker.hpp"

namespace kgen {
namespace host {

__thread ThreadView* current_thread = nullptr;

namespace {

// Workers are kept between launches, to reuse their stacks, until the module is closed.
class IdleWorkers {
public:
    std::unique_ptr<Worker> take() {
        std::lock_guard<std::mutex> hold(lock_);
        if (idle_.empty()) return std::make_unique<Worker>();
        std::unique_ptr<Worker> worker = std::move(idle_.back());
        idle_.pop_back();
        return worker;
    }

    void give(std::unique_ptr<Worker> worker) {
        std::lock_guard<std::mutex> hold(lock_);
        idle_.push_back(std::move(worker));
    }

    // Frees the idle workers; those of a running launch are not among them.
    void release() {
        std::vector<std::unique_ptr<Worker>> unused;
        std::lock_guard<std::mutex> hold(lock_);
        idle_.swap(unused);
    }

private:
    std::mutex lock_;
    std::vector<std::unique_ptr<Worker>> idle_;
};

IdleWorkers idle_workers;

// Returns the number of blocks of a cluster; 1 without clusters.
u32 blocks_at_once(const Launch& launch) { return launch.reserved > 1 ? launch.reserved : 1; }

// Runs blocks, or clusters, of a job on the calling OS thread until none is left.
void work_on(Job& job) {
    const u32 blocks = blocks_at_once(*job.launch);
    if (blocks > 1) {
        std::vector<std::unique_ptr<Worker>> workers;
        for (u32 i = 0; i < blocks; ++i) workers.push_back(idle_workers.take());
        ClusterTurns turns(std::move(workers));
        turns.work(job);
        for (std::unique_ptr<Worker>& worker : turns.give_back())
            idle_workers.give(std::move(worker));
        return;
    }
    std::unique_ptr<Worker> worker = idle_workers.take();
    worker->work(job);
    idle_workers.give(std::move(worker));
}

// Returns the reason why a GPU would refuse the launch; empty if it would not.
std::string refuse(const Launch& launch) {
    const u32 grid_limit[3] = {0x7fffffffu, 65535, 65535};
    const u32 block_limit[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; ++i) {
        if (launch.grid[i] == 0 || launch.grid[i] > grid_limit[i])
            return text("grid.%c is %u, allowed are 1 to %u", "xyz"[i], launch.grid[i],
                        grid_limit[i]);
        if (launch.block[i] == 0 || launch.block[i] > block_limit[i])
            return text("block.%c is %u, allowed are 1 to %u", "xyz"[i], launch.block[i],
                        block_limit[i]);
    }
    const u64 threads = u64{launch.block[0]} * launch.block[1] * launch.block[2];
    if (threads > kMaxThreadsPerBlock)
        return text("a block of %llu threads, allowed are %u", threads, kMaxThreadsPerBlock);
    if (launch.smem_bytes > kMaxSmemBytes)
        return text("%llu bytes of dynamic shared memory, no GPU has more than %llu",
                    launch.smem_bytes, kMaxSmemBytes);
    const u32 cluster = blocks_at_once(launch);
    if (cluster > kMaxClusterBlocks)
        return text("clusters of %u blocks, allowed are %u", cluster, kMaxClusterBlocks);
    if (launch.grid[0] % cluster != 0)
        return text("grid.x is %u, want a multiple of the cluster's %u blocks", launch.grid[0],
                    cluster);
    return "";
}

// Returns the number of OS threads for a launch.
u32 worker_count(const Launch& launch, const Job& job) {
#if defined(KGEN_ASAN)
    (void)launch, (void)job;
    return 1;  // static __shared__ arrays are not thread-local in this build
#else
    u64 count = launch.threads ? launch.threads : std::thread::hardware_concurrency();
    const u32 blocks = blocks_at_once(launch);
    if (count > job.blocks / blocks) count = job.blocks / blocks;
    if (count > kMaxGuardedStacks / (blocks * job.block_threads))
        count = kMaxGuardedStacks / (blocks * job.block_threads);
    return count ? static_cast<u32>(count) : 1;
#endif
}

// Writes the message of a launch and returns its status.
int report(const Launch& launch, Status status, const std::string& message) {
    if (launch.error && launch.error_bytes)
        snprintf(launch.error, launch.error_bytes, "%s", message.c_str());
    return status;
}

Thread& running_thread() { return *static_cast<Thread*>(current_thread); }

}  // namespace

void barrier(u32 id, u32 count) { running_thread().worker->barrier(id, count); }

void barrier_arrive(u32 id, u32 count) { running_thread().worker->barrier_arrive(id, count); }

u64 exchange(Exchange operation, u32 mask, u32 source, u64 value) {
    return running_thread().worker->exchange(operation, mask, source, value);
}

void copy_async(void* target, const void* source, u32 bytes, u32 source_bytes) {
    Thread& me = running_thread();
    bool repeated = false;
    for (const Copy& earlier : me.copies) repeated = repeated || earlier.target == target;
    me.copies.emplace_back();
    Copy& copy = me.copies.back();
    copy.repeated = repeated;
    copy.target = target;
    copy.bytes = bytes;
    copy.group = me.open_group;
    memset(copy.content, 0, sizeof(copy.content));
    // Read here, so that AddressSanitizer reports the line that issued the copy.
    if (source_bytes) memcpy(copy.content, source, source_bytes);
    memset(target, me.worker->unwritten(), bytes);
}

u32 cluster_rank() { return running_thread().worker->cluster_rank(); }

u32 cluster_size() { return blocks_at_once(*running_thread().worker->launch()); }

void cluster_barrier() { running_thread().worker->cluster_barrier(); }

void counter_arrive(int* counter) { running_thread().worker->counter_arrive(counter); }

void counter_wait(const int* counter, int value) {
    running_thread().worker->counter_wait(counter, value);
}

void* map_shared_rank(const void* shared, u32 rank) {
    return running_thread().worker->map_shared_rank(shared, rank);
}

void grid_wait() { running_thread().worker->grid_wait(); }

void* after_grid_wait(void* pointer) {
    const Launch& launch = *running_thread().worker->launch();
    char* const place = static_cast<char*>(pointer);
    for (u32 i = 0; i < launch.early_count; ++i) {
        const Early& early = launch.early[i];
        if (place >= early.shown && place < early.shown + early.bytes)
            return early.actual + (place - early.shown);
    }
    return pointer;
}

void copy_commit() { ++running_thread().open_group; }

namespace {

// Completes the copies of all groups before `end`.
void land_groups_before(u32 end) {
    std::vector<Copy>& copies = running_thread().copies;  // in order of issue, hence of group
    size_t landed = 0;
    while (landed < copies.size() && copies[landed].group < end) {
        if (copies[landed].overwritten(running_thread().worker->unwritten()))
            fault("shared memory was written while an asynchronous copy to it was in flight");
        memcpy(copies[landed].target, copies[landed].content, copies[landed].bytes);
        ++landed;
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

}  // namespace

void copy_wait(u32 pending) {
    const u32 closed = running_thread().open_group;
    land_groups_before(closed > pending ? closed - pending : 0);
}

void copy_wait_all() { land_groups_before(running_thread().open_group + 1); }

void defer(Deferred run, const void* what, u32 bytes, const float* sums, u32 count) {
    Thread& me = running_thread();
    if (!me.work_fenced) fault("a product without a wgmma_fence since the last wgmma_wait");
    for (const DeferredWork& other : me.work)
        if (!other.fenced && other.count != count && sums < other.sums + other.count && other.sums < sums + count)
            fault("a product adds to accumulators of a product of another shape without a wgmma_fence between them");
    const size_t place = me.arguments.size();
    me.arguments.resize(place + (bytes + sizeof(DeferredArguments) - 1) / sizeof(DeferredArguments));
    memcpy(me.arguments.data() + place, what, bytes);
    me.work.push_back({run, me.open_work_group, place, sums, count, false});
}

void defer_fence() {
    running_thread().work_fenced = true;
    for (DeferredWork& work : running_thread().work) work.fenced = true;
}

const void* operand_of_deferred(const void* shared) {
    return running_thread().worker->operand_of_deferred(shared);
}

void defer_commit() { ++running_thread().open_work_group; }

void defer_wait(u32 pending) {
    Thread& me = running_thread();
    size_t done = 0;
    while (done < me.work.size() && me.work[done].group + pending < me.open_work_group) {
        me.work[done].run(me.arguments.data() + me.work[done].what);
        ++done;
    }
    me.work.erase(me.work.begin(), me.work.begin() + static_cast<std::ptrdiff_t>(done));
    const size_t unused = me.work.empty() ? me.arguments.size() : me.work.front().what;
    me.arguments.erase(me.arguments.begin(), me.arguments.begin() + static_cast<std::ptrdiff_t>(unused));
    for (DeferredWork& work : me.work) work.what -= unused;
    if (done > 0) me.work_fenced = false;  // from here on the thread may change the accumulators
}

void mbarrier_init(void* barrier, u32 arrivals) {
    running_thread().worker->mbarrier_init(barrier, arrivals);
}

void mbarrier_init_fence() { running_thread().worker->mbarrier_init_fence(); }

void mbarrier_arrive(void* barrier, u32 expected_bytes) {
    running_thread().worker->mbarrier_arrive(barrier, expected_bytes);
}

void mbarrier_wait(void* barrier, u32 parity) {
    running_thread().worker->mbarrier_wait(barrier, parity);
}

void bulk_load(void* target, const void* source, u32 bytes, void* barrier) {
    running_thread().worker->bulk_load(target, source, bytes, barrier);
}

void bulk_store(void* target, const void* source, u32 bytes) {
    running_thread().worker->bulk_store(target, source, bytes);
}

bool announce_bulk_stores() { return has_bulk_stores = true; }

void bulk_commit() { ++running_thread().open_bulk_group; }

void bulk_wait(u32 pending) { running_thread().worker->bulk_wait(pending); }

void fence_proxy_async() { running_thread().worker->fence_proxy_async(); }

void fault(const char* format, ...) {
    va_list list;
    va_start(list, format);
    if (!current_thread) {
        vfprintf(stderr, format, list);
        abort();
    }
    running_thread().worker->fault_with(format, list);
}

int list_parameters(const Launch* launch, const u32* bytes, u32 count) {
    std::string listed;
    for (u32 i = 0; i < count; ++i) listed += text("%u ", bytes[i]);
    return report(*launch, kDone, listed);
}

int run(const Launch* launch, Invoke invoke, AnyKernel kernel, void** args) {
    const std::string refusal = refuse(*launch);
    if (!refusal.empty()) return report(*launch, kBadLaunch, refusal);
    Job job;
    job.launch = launch;
    job.invoke = invoke;
    job.kernel = kernel;
    job.args = args;
    job.block_threads = launch->block[0] * launch->block[1] * launch->block[2];
    job.blocks = u64{launch->grid[0]} * launch->grid[1] * launch->grid[2];
    std::vector<std::thread> helpers;
    try {
        for (u32 i = worker_count(*launch, job); i > 1; --i)
            helpers.emplace_back(work_on, std::ref(job));
    } catch (const std::system_error&) {
        // The system has no more OS threads; those that started run all blocks.
    }
    work_on(job);
    for (std::thread& helper : helpers) helper.join();
    if (!job.fault_message.empty()) return report(*launch, kFault, job.fault_message);
    return kDone;
}

// Returns the stacks to the system; a later launch allocates new ones. Exported for `HostModule.close` in
// kgen/runtime/host.py; no header declares it.
extern "C" __attribute__((visibility("default"))) void kgen_host_release_stacks() {
    idle_workers.release();
}

}  // namespace host
}  // namespace kgen
