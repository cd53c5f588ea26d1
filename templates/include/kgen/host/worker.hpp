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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <link.h>
#endif

#include "fiber.hpp"
#include "runtime.hpp"
#include "thread.hpp"

namespace kgen {
namespace host {

// A launch, shared by its workers.
struct Job {
    const Launch* launch;
    Invoke invoke;
    AnyKernel kernel;
    void** args;
    u32 block_threads;
    u64 blocks;
    std::atomic<u64> next_block{0};
    std::atomic<bool> stop{false};
    std::mutex fault_lock;
    u64 fault_block = ~0ull;  // the lowest block that failed, so that reports are reproducible
    std::string fault_message;

    // The block, or the first of a cluster of `cluster` blocks, that runs after so many. In order for seed 0, in reverse
    // for seed 1; in another order for each other seed: a GPU promises none.
    u64 block_of_turn(u64 turn, u64 cluster) const {
        const u64 count = blocks / cluster, index = turn / cluster, seed = launch->seed;
        if (seed == 0 || index >= count) return turn;
        if (seed == 1) return (count - 1 - index) * cluster;
        u64 step = count / 3 * 2 + seed;  // as far apart as may be, and coprime to the count
        while (std::gcd(step, count) != 1) ++step;
        return (index * step + seed) % count * cluster;
    }

    void fail(u64 block, std::string message) {
        std::lock_guard<std::mutex> hold(fault_lock);
        if (block < fault_block) {
            fault_block = block;
            fault_message = std::move(message);
        }
        stop.store(true, std::memory_order_relaxed);
    }
};

// The module's thread-local storage on the calling OS thread: the static __shared__ arrays and `current_thread`. It
// contains nothing else, because a module has only kernels and this file (and must therefore not be linked statically
// with a C library).
struct ModuleTls {
    char* begin = nullptr;
    size_t bytes = 0;

    static ModuleTls of_this_os_thread() {
        ModuleTls found;
#if defined(__linux__) && !defined(KGEN_ASAN)
        current_thread = nullptr;  // a first access makes the loader allocate the storage
        asm volatile("" ::: "memory");
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t size, void* result) {
                const auto here = reinterpret_cast<ElfW(Addr)>(&name_of);
                bool mine = false;
                const ElfW(Phdr)* tls = nullptr;
                for (int i = 0; i < info->dlpi_phnum; ++i) {
                    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
                    const ElfW(Addr) start = info->dlpi_addr + segment.p_vaddr;
                    if (segment.p_type == PT_LOAD && here - start < segment.p_memsz) mine = true;
                    if (segment.p_type == PT_TLS) tls = &segment;
                }
                if (!mine) return 0;
                if (tls && size >= sizeof(dl_phdr_info) && info->dlpi_tls_data) {
                    auto* out = static_cast<ModuleTls*>(result);
                    out->begin = static_cast<char*>(info->dlpi_tls_data);
                    out->bytes = tls->p_memsz;
                }
                return 1;
            },
            &found);
#endif
        return found;
    }

    // Fills static shared memory with what nobody has written.
    void fill_unwritten(u64 seed) const {
        if (!begin) return;
        ThreadView* const kept = current_thread;
        memset(begin, unwritten_byte(seed), bytes);
        current_thread = kept;
    }

    void save(std::vector<char>& to) const {
        if (begin) to.assign(begin, begin + bytes);
    }

    void restore(const std::vector<char>& from) const {
        if (!begin) return;
        ThreadView* const kept = current_thread;
        memcpy(begin, from.data(), bytes);
        current_thread = kept;
    }
};

// Runs the blocks that one OS thread takes.
class Worker {
public:
    // Runs blocks of `job` until none is left or one failed.
    void work(Job& job) {
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

    // --- clusters: blocks that cluster_turns.hpp schedules ---

    // Prepares to run the blocks with `rank` in their clusters, among `peers`.
    bool join(Job& job, Worker* const* peers, u32 rank) {
        job_ = &job;
        peers_ = peers;
        cluster_rank_ = rank;
        if (prepare()) return true;
        job.fail(0, no_stacks());
        return false;
    }

    void leave_cluster() { peers_ = nullptr; }

    // Runs a block until it has ended or waits for its cluster. Returns a fault, or nothing.
    std::string begin(u64 block) {
        in_cluster_ = 0;
        passed_cluster_barrier_ = false;
        if (!start_block(block)) return no_smem();
        return after_turn();
    }

    // Continues a block after the cluster barrier.
    std::string resume() {
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

    bool waits_for_cluster() const { return in_cluster_ == job_->block_threads; }

    // Drops threads that will not continue.
    void abandon() { stacks_.take_all_back(); }

    std::string describe_left_alone() const {
        const Dim3& block = threads_[0].block_idx;
        return text("block (%u, %u, %u): waits at the cluster barrier, and a block of its cluster "
                    "has returned",
                    block.x, block.y, block.z);
    }

    const Launch* launch() const { return job_->launch; }

    int unwritten() const { return unwritten_byte(job_->launch->seed); }

    u32 cluster_rank() const { return peers_ ? cluster_rank_ : 0; }

    void cluster_barrier() {
        if (!peers_) return;
        self()->state = State::at_cluster;
        ++in_cluster_;
        suspend();
    }

    void* map_shared_rank(const void* shared, u32 rank) {
        const u32 blocks = peers_ ? job_->launch->reserved : 1;
        if (rank >= blocks) fault("block %u of a cluster that has %u", rank, blocks);
        if (!in_smem(shared))
            fault("an address that is not in the block's dynamic shared memory: the host layer "
                  "maps no other to the cluster's blocks");
        if (peers_ && !passed_cluster_barrier_)
            fault("shared memory of block %u of the cluster before a cluster barrier: the block "
                  "need not have begun",
                  rank);
        char* there = peers_ ? peers_[rank]->smem_now_ : smem_now_;
        return there + (static_cast<const char*>(shared) - smem_now_);
    }

    void barrier(u32 id, u32 count) {
        Thread* me = self();
        const u32 all = job_->block_threads;
        if (id >= kMaxBarriers) fault("barrier %u: there are %u", id, kMaxBarriers);
        if (count == 0) {
            count = all;
        } else if (count % kWarpSize != 0 || count >= all + kWarpSize) {
            fault("barrier %u for %u threads: want a multiple of %u up to the block's %u", id,
                  count, kWarpSize, all);
        }
        if (count > all) count = all;  // the last warp of the block is not full
        Barrier& barrier = barriers_[id];
        if (barrier.arrived != 0 && barrier.expected != count)
            fault("barrier %u: this thread expects %u threads, an earlier one %u", id, count,
                  barrier.expected);
        barrier.expected = count;
        me->state = State::at_barrier;
        me->barrier_id = id;
        me->barrier_count = count;
        me->next_waiter = nullptr;
        (barrier.arrived == 0 ? barrier.first : barrier.last->next_waiter) = me;
        barrier.last = me;
        if (++barrier.arrived == count) {
            u32 n = 0;
            for (Thread* t = barrier.first; t; t = t->next_waiter) order_[n++] = t;
            barrier.arrived = 0;
            if (job_->launch->seed) random_.order(job_->launch->seed, order_, n);
            for (u32 i = 0; i < n; ++i) {
                order_[i]->state = State::ready;
                ready_.push_back(order_[i]);
            }
        }
        suspend();
    }

    u64 exchange(Exchange operation, u32 mask, u32 source, u64 value) {
        Thread* me = self();
        const u32 warp = me->rank / kWarpSize;
        const u32 lane = me->rank % kWarpSize;
        if (!(mask >> lane & 1))
            fault("%s with mask 0x%08x, which does not name the calling lane %u",
                  name_of(operation), mask, lane);
        me->state = State::in_exchange;
        me->operation = operation;
        me->mask = mask;
        me->source = source;
        me->value = value;
        waiting_[warp] |= 1u << lane;

        const u32 wanted = mask & lanes_of_warp(warp);
        if ((waiting_[warp] & wanted) != wanted || !agree(warp, wanted, *me)) {
            suspend();
            return me->result;
        }
        complete(warp, wanted);
        waiting_[warp] &= ~wanted;
        Thread* lanes = &threads_[warp * kWarpSize];
        if (job_->launch->seed == 0) {
            // Continue this warp first: its stacks are in the cache.
            for (u32 i = kWarpSize; i-- > 0;)
                if ((wanted >> i & 1) && i != lane) ready_.push_front(&lanes[i]);
            return me->result;
        }
        Thread* released[kWarpSize];
        u32 n = 0;
        for (u32 i = 0; i < kWarpSize; ++i)
            if (wanted >> i & 1) released[n++] = &lanes[i];
        random_.order(job_->launch->seed, released, n);
        if (job_->launch->seed == 1) {  // this warp first, as in the order by rank
            for (u32 i = n; i-- > 0;) ready_.push_front(released[i]);
            suspend();
            return me->result;
        }
        const bool first = random_.next() >> 63;
        for (u32 i = 0; i < n; ++i) {
            if (first)
                ready_.push_front(released[i]);
            else
                ready_.push_back(released[i]);
        }
        suspend();
        return me->result;
    }

    // --- mbarriers and bulk copies ---

    void mbarrier_init(void* address, u32 arrivals) {
        check_aligned(address, 8, "mbarrier");
        if (arrivals == 0 || arrivals >= 1u << 20)
            fault("an mbarrier of %u arrivals: want 1 to 2^20 - 1", arrivals);
        for (const Mbarrier& known : mbarriers_)
            if (known.address == address) fault("%s made twice", mbarrier_name(address).c_str());
        mbarriers_.push_back(Mbarrier{address, arrivals, 0, 0, 0, 0, {}, {}});
    }

    void mbarrier_arrive(void* address, u32 expected_bytes) {
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

    void mbarrier_wait(void* address, u32 parity) {
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

    void bulk_load(void* target, const void* source, u32 bytes, void* address) {
        check_bulk(target, source, bytes, "bulk_load");
        Mbarrier& barrier = mbarrier_at(address);
        barrier.issued += bytes;
        check_bytes(barrier);
        // Read here, so that AddressSanitizer reports the line that issued the copy.
        const char* from = static_cast<const char*>(source);
        barrier.loads.push_back(BulkLoad{target, std::vector<char>(from, from + bytes)});
        memset(target, unwritten(), bytes);
        show_to_async_proxy(target, bytes);
        if (barrier.complete() && !barrier.waiting.empty()) end_phase(barrier);
    }

    void bulk_store(void* target, const void* source, u32 bytes) {
        check_bulk(source, target, bytes, "bulk_store");
        const char* from = static_cast<const char*>(source);
        if (in_smem(source) && memcmp(from, async_proxy_view(source), bytes) != 0)
            fault("bulk_store of %u bytes of shared memory, some of them written after the last "
                  "fence_proxy_async",
                  bytes);
        Thread& me = *self();
        me.stores.push_back(
            BulkStore{target, source, me.open_bulk_group, std::vector<char>(from, from + bytes)});
    }

    void bulk_wait(u32 pending) {
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

    void fence_proxy_async() {
        if (job_->launch->smem_bytes) show_to_async_proxy(smem_now_, job_->launch->smem_bytes);
    }

    [[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 2, 3))) {
        va_list list;
        va_start(list, format);
        fault_with(format, list);
    }

    [[noreturn]] void fault_with(const char* format, va_list list) {
        Thread& me = *self();
        char buffer[512];
        vsnprintf(buffer, sizeof(buffer), format, list);
        problem_ = place(me) + ": " + buffer;
        leave(me, main_);
    }

private:
    static Thread* self() { return static_cast<Thread*>(current_thread); }

    Mbarrier& mbarrier_at(const void* address) {
        for (Mbarrier& known : mbarriers_)
            if (known.address == address) return known;
        fault("%s was not made by mbarrier_init", mbarrier_name(address).c_str());
    }

    std::string mbarrier_name(const void* mbarrier) const {
        for (size_t i = 0; i < mbarriers_.size(); ++i)
            if (mbarriers_[i].address == mbarrier) return text("mbarrier %zu", i);
        return text("mbarrier at %p", mbarrier);
    }

    void check_bulk(const void* shared, const void* global, u32 bytes, const char* what) {
        check_aligned(shared, 16, what);
        check_aligned(global, 16, what);
        if (bytes == 0 || bytes % 16 != 0)
            fault("%s of %u bytes: want a multiple of 16", what, bytes);
    }

    // Once all arrivals are in, no thread can expect more bytes.
    void check_bytes(const Mbarrier& barrier) {
        if (barrier.arrived == barrier.arrivals && barrier.issued > barrier.expected)
            fault("%s: phase %u expects %llu bytes, its copies bring %llu",
                  mbarrier_name(barrier.address).c_str(), barrier.phase, barrier.expected,
                  barrier.issued);
    }

    // Completes a phase: writes the data of its loads and resumes the waiting threads.
    void end_phase(Mbarrier& barrier) {
        for (const BulkLoad& load : barrier.loads) {
            memcpy(load.target, load.content.data(), load.content.size());
            show_to_async_proxy(load.target, load.content.size());
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

    // The async proxy's view of dynamic shared memory is a second copy of it, which ordinary writes reach at a fence.
    // (On a GPU a fence covers the writes of its own thread; here it covers those of the whole block.)
    bool in_smem(const void* address) const {
        const char* p = static_cast<const char*>(address);
        return p >= smem_now_ && p < smem_now_ + job_->launch->smem_bytes;
    }

    char* async_proxy_view(const void* address) {
        if (async_view_.empty()) async_view_.assign(job_->launch->smem_bytes, char(unwritten()));
        return async_view_.data() + (static_cast<const char*>(address) - smem_now_);
    }

    void show_to_async_proxy(const void* address, u64 bytes) {
        if (in_smem(address)) memcpy(async_proxy_view(address), address, bytes);
    }

    u32 lanes_of_warp(u32 warp) const {
        const u32 rest = job_->block_threads - warp * kWarpSize;
        return rest >= kWarpSize ? 0xffffffffu : (1u << rest) - 1;
    }

    static std::string place(const Thread& t) {
        return text("block (%u, %u, %u), thread (%u, %u, %u)", t.block_idx.x, t.block_idx.y,
                    t.block_idx.z, t.thread_idx.x, t.thread_idx.y, t.thread_idx.z);
    }

    // Allocates for the blocks of the job and sets what is the same for all of them.
    bool prepare() {
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

    std::string no_stacks() const {
        return text("the system refused memory for %u fiber stacks of %zu bytes",
                    job_->block_threads, kStackBytes);
    }

    static std::string no_smem() {
        return "the system refused memory for dynamic shared memory";
    }

    std::string run_block(u64 block) {
        if (!start_block(block)) return no_smem();
        return end_block();
    }

    // Runs the threads of a block until none can continue; false if there is no memory.
    bool start_block(u64 block) {
        const Launch& launch = *job_->launch;
        const u32 count = job_->block_threads;
        const Dim3 block_idx = {static_cast<u32>(block % launch.grid[0]),
                                static_cast<u32>(block / launch.grid[0] % launch.grid[1]),
                                static_cast<u32>(block / launch.grid[0] / launch.grid[1])};
        char* smem = make_smem();
        if (!smem) return false;
        for (u32 rank = 0; rank < count; ++rank) {
            Thread& t = threads_[rank];
            t.block_idx = block_idx;
            t.dynamic_smem = smem;
            t.state = State::fresh;
            t.open_group = 0;
            t.copies.clear();
            t.open_work_group = 0;
            t.work.clear();
            t.open_bulk_group = 0;
            t.stores.clear();
            order_[rank] = &t;
        }
        smem_now_ = smem;
        async_view_.clear();
        mbarriers_.clear();
        if (launch.seed) {
            // Depends on the block, not on the worker, so that a seed gives the same order every time.
            random_.seed(launch.seed * 0xd1342543de82ef95ull + block);
            random_.order(launch.seed, order_, count);
        }
        memset(barriers_, 0, sizeof(barriers_));
        memset(waiting_, 0, sizeof(waiting_));
        problem_.clear();
        ready_.clear();
        for (u32 i = 1; i < count; ++i) ready_.push_back(order_[i]);
        main_.stack_low = nullptr;  // learnt by the first fiber
        start(*order_[0], main_);
        return true;
    }

    // Returns the fault of a block of which no thread can continue, or nothing.
    std::string end_block() {
        const Dim3& block_idx = threads_[0].block_idx;
        if (problem_.empty()) problem_ = describe_stuck(block_idx);
        if (problem_.empty()) problem_ = describe_left_behind(block_idx);
        if (!problem_.empty()) stacks_.take_all_back();
        std::string overrun = check_smem(smem_now_, block_idx);
        if (problem_.empty()) problem_ = std::move(overrun);
        return problem_;
    }

    // As end_block, for a block that may wait for its cluster. The shared memory of a block that has ended is filled
    // with NaN, for other blocks that still read it.
    std::string after_turn() {
        if (problem_.empty() && waits_for_cluster()) return "";
        std::string problem = end_block();
        memset(smem_now_, unwritten(), job_->launch->smem_bytes);
        return problem;
    }

    // --- dynamic shared memory ---

#if defined(KGEN_ASAN)
    // A heap allocation of the exact size for each block, so that AddressSanitizer reports any overrun.
    char* make_smem() {
        free(heap_smem_);
        heap_smem_ = nullptr;
        const u64 bytes = job_->launch->smem_bytes;
        if (posix_memalign(&heap_smem_, kSmemAlignment, bytes ? bytes : 1) != 0) return nullptr;
        memset(heap_smem_, unwritten(), bytes ? bytes : 1);
        return static_cast<char*>(heap_smem_);
    }

    std::string check_smem(const char*, const Dim3&) { return ""; }

    void* heap_smem_ = nullptr;

public:
    ~Worker() { free(heap_smem_); }

private:
#else
    // Kept between blocks; a canary after it detects writes past the end.
    char* make_smem() {
        const u64 bytes = job_->launch->smem_bytes;
        smem_.resize(bytes + kSmemAlignment + kCanaryBytes);
        const auto address = reinterpret_cast<__UINTPTR_TYPE__>(smem_.data());
        char* smem = smem_.data() + (kSmemAlignment - address % kSmemAlignment) % kSmemAlignment;
        memset(smem, unwritten(), bytes);
        memset(smem + bytes, kCanary, kCanaryBytes);
        return smem;
    }

    std::string check_smem(const char* smem, const Dim3& block) {
        const u64 bytes = job_->launch->smem_bytes;
        for (u32 i = 0; i < kCanaryBytes; ++i)
            if (smem[bytes + i] != static_cast<char>(kCanary))
                return text("block (%u, %u, %u): write to byte %llu of %llu bytes of dynamic "
                            "shared memory",
                            block.x, block.y, block.z, bytes + i, bytes);
        return "";
    }

    std::vector<char> smem_;
#endif

    // --- fibers ---

    KGEN_FIBER_ROOT static void fiber_main() {
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
    [[noreturn]] KGEN_FIBER_ROOT void run_threads() {
        for (;;) {
            Thread* me = self();
            job_->invoke(job_->kernel, job_->args);
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

    // Switches away for the last time.
    [[noreturn]] KGEN_FIBER_ROOT void leave(Thread& me, Context& to) {
        switch_context(me.context, to, true);
        abort();  // not reached
    }

    // Gives a fresh thread a stack and switches to it.
    void start(Thread& thread, Context& from) {
        char* low;
        size_t bytes;
        stacks_.take(low, bytes);
        make_context(thread.context, low, bytes, &Worker::fiber_main);
        thread.state = State::ready;
        current_thread = &thread;
        switch_context(from, thread.context, false);
    }

    // Runs other threads until the calling thread is popped from the ready queue.
    void suspend() {
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

    // --- warp exchanges ---

    // Whether all lanes of `wanted`, which wait in some exchange, wait in the same one.
    bool agree(u32 warp, u32 wanted, const Thread& me) const {
        const Thread* lanes = &threads_[warp * kWarpSize];
        for (u32 i = 0; i < kWarpSize; ++i)
            if ((wanted >> i & 1) &&
                (lanes[i].operation != me.operation || lanes[i].mask != me.mask))
                return false;
        return true;
    }

    void complete(u32 warp, u32 wanted) {
        Thread* lanes = &threads_[warp * kWarpSize];
        u32 set = 0;
        for (u32 i = 0; i < kWarpSize; ++i)
            if ((wanted >> i & 1) && lanes[i].value) set |= 1u << i;
        for (u32 i = 0; i < kWarpSize; ++i) {
            if (!(wanted >> i & 1)) continue;
            Thread& t = lanes[i];
            if (t.operation == Exchange::ballot)
                t.result = set;
            else
                t.result = wanted >> t.source & 1 ? lanes[t.source].value : ~0ull;
            t.state = State::ready;
        }
    }

    // --- reports ---

    // Returns what each thread waits for; empty if all have returned.
    std::string describe_stuck(const Dim3& block) const {
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

    // Reports bulk loads in flight: they would write into shared memory that another block has by then.
    std::string describe_left_behind(const Dim3& block) const {
        for (const Mbarrier& barrier : mbarriers_)
            if (!barrier.loads.empty())
                return text("block (%u, %u, %u): returned with bulk loads under way: nobody waits "
                            "for phase %u of %s",
                            block.x, block.y, block.z, barrier.phase,
                            mbarrier_name(barrier.address).c_str());
        // Copies that nobody waits for do no harm, unless other data lies there by now.
        for (u32 rank = 0; rank < job_->block_threads; ++rank)
            for (const Copy& copy : threads_[rank].copies)
                if (in_dynamic_smem(copy.target) && copy.overwritten(unwritten()))
                    return text("block (%u, %u, %u): byte %llu of dynamic shared memory was written "
                                "while an asynchronous copy of thread %u to it was in flight",
                                block.x, block.y, block.z,
                                static_cast<u64>(static_cast<const char*>(copy.target) - smem_now_),
                                rank);
        return "";
    }

    bool in_dynamic_smem(const void* address) const {
        const char* byte = static_cast<const char*>(address);
        return byte >= smem_now_ && byte < smem_now_ + job_->launch->smem_bytes;
    }

    static bool same_wait(const Thread& a, const Thread& b) {
        if (a.state != b.state) return false;
        if (a.state == State::at_barrier) return a.barrier_id == b.barrier_id;
        if (a.state == State::at_mbarrier) return a.mbarrier == b.mbarrier;
        if (a.state != State::in_exchange) return true;
        return a.operation == b.operation && a.mask == b.mask &&
               a.rank / kWarpSize == b.rank / kWarpSize;
    }

    std::string describe(const Thread& t) const {
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
            default: return "can run";
        }
    }

    Job* job_ = nullptr;
    std::vector<Thread> threads_;
    Stacks stacks_;
    Context main_{};
    ReadyQueue ready_;
    Thread* order_[kMaxThreadsPerBlock];  // scratch, too large for the stack of a fiber
    Barrier barriers_[kMaxBarriers];
    u32 waiting_[kMaxThreadsPerBlock / kWarpSize];  // lanes in some exchange, by warp
    std::vector<Mbarrier> mbarriers_;  // of the block, in the order in which they were made
    char* smem_now_ = nullptr;         // the block's dynamic shared memory
    std::vector<char> async_view_;    // the async proxy's view; empty until first used
    Random random_;
    std::string problem_;

    Worker* const* peers_ = nullptr;  // the blocks of the cluster by rank; null without clusters
    u32 cluster_rank_ = 0;
    u32 in_cluster_ = 0;        // threads at the cluster barrier
    bool passed_cluster_barrier_ = false;
};

}  // namespace host
}  // namespace kgen
