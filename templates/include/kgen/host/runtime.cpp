// The scheduler of the host layer: fibers, barriers, warp exchanges, asynchronous copies, launches.
//
// A block runs on one OS thread (a worker). Its CUDA threads are fibers that switch only where they
// must wait, straight from one to the next. A thread gets a stack when it first runs; when it
// returns, a thread that has not started yet runs on the same stack, so a kernel without barriers
// needs a single stack and no switch at all.
//
// Nothing has to be known about deadlock: when no fiber can run and some have not returned, the
// block is stuck, and the report says what each thread waits for.
#include "runtime.hpp"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <link.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define KGEN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KGEN_ASAN 1
#endif
#endif
#if defined(KGEN_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(KGEN_HOST_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KGEN_HOST_UCONTEXT 1
#endif
#if defined(KGEN_HOST_UCONTEXT)
#include <ucontext.h>
#endif

namespace kgen {
namespace host {

__thread ThreadView* current_thread = nullptr;

namespace {

constexpr u32 kWarpSize = 32;
constexpr u32 kMaxThreadsPerBlock = 1024;
constexpr u32 kMaxBarriers = 16;
constexpr u64 kMaxSmemBytes = 228 * 1024;  // the most any GPU up to sm_120 has per SM
constexpr u64 kSmemAlignment = 128;        // as dynamic_smem() promises
constexpr int kPoison = 0xff;              // floats, halves and bfloats made of it are NaN
constexpr u32 kCanaryBytes = 64;
constexpr int kCanary = 0xa5;  // not kPoison, which a stray store of NaN would leave unchanged

// Room for large per-thread arrays; only touched pages cost memory. AddressSanitizer's frames are
// several times larger.
#if defined(KGEN_ASAN)
constexpr size_t kStackBytes = 512 * 1024;
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif

// Guarded stacks split a mapping in two each, and Linux allows a process 65530 mappings.
constexpr u32 kMaxGuardedStacks = 24000;

// --- switching between stacks -------------------------------------------------------------------

using FiberMain = void (*)();

struct Context {
#if defined(KGEN_HOST_UCONTEXT)
    ucontext_t state;
#else
    void* sp;  // the callee-saved registers lie on the stack itself
#endif
    char* stack_low;  // for AddressSanitizer
    size_t stack_bytes;
    void* fake_stack;
};

#if defined(KGEN_HOST_UCONTEXT)

void make_context(Context& context, char* low, size_t bytes, FiberMain entry) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = low;
    context.state.uc_stack.ss_size = bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
    context.stack_low = low;
    context.stack_bytes = bytes;
    context.fake_stack = nullptr;
}

inline void swap_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#else

extern "C" void kgen_host_switch(void** save_sp, void* load_sp);

// Saves what the calling convention says a callee must keep, and nothing else: no signal mask (a
// system call in swapcontext) and no floating-point control words, which kernels do not change.
#if defined(__x86_64__)
constexpr size_t kSavedWords = 8;  // six registers, the return address, an end of the call chain
constexpr size_t kEntryWord = 6;
asm(R"(
    .text
    .p2align 4
    .globl kgen_host_switch
    .hidden kgen_host_switch
    .type kgen_host_switch, @function
kgen_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size kgen_host_switch, . - kgen_host_switch
)");
#else
constexpr size_t kSavedWords = 20;  // x19-x30, d8-d15
constexpr size_t kEntryWord = 11;   // x30, where `ret` goes
asm(R"(
    .text
    .p2align 4
    .globl kgen_host_switch
    .hidden kgen_host_switch
    .type kgen_host_switch, %function
kgen_host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size kgen_host_switch, . - kgen_host_switch
)");
#endif

void make_context(Context& context, char* low, size_t bytes, FiberMain entry) {
    void** frame = reinterpret_cast<void**>(low + bytes) - kSavedWords;
    memset(frame, 0, kSavedWords * sizeof(void*));  // a zero frame pointer ends a backtrace
    frame[kEntryWord] = reinterpret_cast<void*>(entry);
    context.sp = frame;
    context.stack_low = low;
    context.stack_bytes = bytes;
    context.fake_stack = nullptr;
}

inline void swap_context(Context& from, Context& to) { kgen_host_switch(&from.sp, to.sp); }

#endif

// AddressSanitizer keeps the bounds of the current stack; it must be told before and after.
inline void switch_context(Context& from, Context& to, bool from_ends) {
#if defined(KGEN_ASAN)
    __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.stack_low,
                                   to.stack_bytes);
#else
    (void)from_ends;
#endif
    swap_context(from, to);
#if defined(KGEN_ASAN)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The stacks of one worker, in one mapping. A page without access lies below each.
class Stacks {
public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks() { release(); }

    // Make room for `count` stacks; false when the system refuses. None may be in use.
    bool reserve(u32 count) {
        if (count <= capacity_) return true;
        release();
        page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        void* memory = mmap(nullptr, count * stride(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return false;
        memory_ = static_cast<char*>(memory);
        capacity_ = count;
        return true;
    }

    void take(char*& low, size_t& bytes) {
        u32 index;
        if (!free_.empty()) {
            index = free_.back();
            free_.pop_back();
        } else {
            index = guarded_++;
            // Refused only when the process is out of mappings; the stack works without.
            (void)mprotect(memory_ + index * stride(), page_, PROT_NONE);
        }
        low = memory_ + index * stride() + page_;
        // Tops at one offset of their page would all compete for the same few cache sets.
        bytes = kStackBytes - index % 31 * 128;
    }

    void give(const char* low) { free_.push_back(static_cast<u32>((low - memory_) / stride())); }

    // After a fault the abandoned threads still hold theirs.
    void take_all_back() {
        free_.clear();
        for (u32 i = guarded_; i-- > 0;) free_.push_back(i);
    }

private:
    size_t stride() const { return kStackBytes + page_; }

    void release() {
        if (memory_) munmap(memory_, capacity_ * stride());
        memory_ = nullptr;
        capacity_ = guarded_ = 0;
        free_.clear();
    }

    char* memory_ = nullptr;
    size_t page_ = 0;
    u32 capacity_ = 0;
    u32 guarded_ = 0;  // stacks handed out at least once
    std::vector<u32> free_;
};

// --- one CUDA thread ----------------------------------------------------------------------------

struct Copy {
    void* target;
    u32 bytes;
    u32 group;
    alignas(16) unsigned char content[16];
};

enum class State : u32 { fresh, ready, at_barrier, in_exchange, returned };

class Worker;

struct Thread : ThreadView {
    Context context;
    Worker* worker;
    State state;

    u32 barrier_id, barrier_count;
    Thread* next_waiter;

    Exchange operation;
    u32 mask;
    u32 source;
    u64 value;
    u64 result;

    u32 open_group;  // number of the group that the next commit closes
    std::vector<Copy> copies;
};

struct Barrier {
    u32 arrived;
    u32 expected;
    Thread* first;
    Thread* last;
};

// splitmix64: any seed gives a usable sequence at once.
class Random {
public:
    void seed(u64 value) { state_ = value; }

    u64 next() {
        u64 z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    void shuffle(Thread** items, u32 count) {
        for (u32 i = count; i > 1; --i)
            std::swap(items[i - 1], items[((next() >> 32) * i) >> 32]);
    }

private:
    u64 state_ = 0;
};

// The fibers that can run. New work goes to the back, except a released warp, which may go first.
class ReadyQueue {
public:
    void clear() { head_ = count_ = 0; }
    void push_back(Thread* thread) { ring_[(head_ + count_++) % kMaxThreadsPerBlock] = thread; }
    void push_front(Thread* thread) {
        head_ = (head_ + kMaxThreadsPerBlock - 1) % kMaxThreadsPerBlock;
        ring_[head_] = thread;
        ++count_;
    }
    Thread* pop() {
        if (count_ == 0) return nullptr;
        Thread* thread = ring_[head_];
        head_ = (head_ + 1) % kMaxThreadsPerBlock;
        --count_;
        return thread;
    }

private:
    u32 head_ = 0;
    u32 count_ = 0;
    Thread* ring_[kMaxThreadsPerBlock];
};

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
    u64 fault_block = ~0ull;  // the lowest block that failed, so that the report varies less
    std::string fault_message;

    void fail(u64 block, std::string message) {
        std::lock_guard<std::mutex> hold(fault_lock);
        if (block < fault_block) {
            fault_block = block;
            fault_message = std::move(message);
        }
        stop.store(true, std::memory_order_relaxed);
    }
};

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
    char buffer[512];
    va_list list;
    va_start(list, format);
    vsnprintf(buffer, sizeof(buffer), format, list);
    va_end(list);
    return buffer;
}

std::string lanes_text(u32 lanes) {
    std::string result;
    for (u32 i = 0; i < kWarpSize; ++i) {
        if (!(lanes >> i & 1)) continue;
        u32 last = i;
        while (last + 1 < kWarpSize && (lanes >> (last + 1) & 1)) ++last;
        if (!result.empty()) result += ", ";
        result += i == last ? text("%u", i) : text("%u-%u", i, last);
        i = last;
    }
    return result;
}

const char* name_of(Exchange operation) {
    switch (operation) {
        case Exchange::sync_warp: return "sync_warp";
        case Exchange::shfl: return "shfl";
        case Exchange::shfl_up: return "shfl_up";
        case Exchange::shfl_down: return "shfl_down";
        case Exchange::shfl_xor: return "shfl_xor";
        case Exchange::ballot: return "ballot";
    }
    return "exchange";
}

// The module's thread-local storage as seen by the calling OS thread: the static __shared__ arrays
// and `current_thread`. Nothing else lives there, because a module holds only kernels and this file.
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

    void poison() const {
        if (!begin) return;
        ThreadView* const kept = current_thread;
        memset(begin, kPoison, bytes);
        current_thread = kept;
    }
};

// --- one OS thread, running one block at a time -------------------------------------------------

class Worker {
public:
    // Run blocks of `job` until none is left or one failed.
    void work(Job& job) {
        job_ = &job;
        if (!prepare()) {
            job.fail(0, text("the system refused memory for %u fiber stacks of %zu bytes",
                             job.block_threads, kStackBytes));
            return;
        }
        const ModuleTls tls = ModuleTls::of_this_os_thread();
        while (!job.stop.load(std::memory_order_relaxed)) {
            const u64 block = job.next_block.fetch_add(1, std::memory_order_relaxed);
            if (block >= job.blocks) break;
            tls.poison();
            std::string problem = run_block(block);
            if (!problem.empty()) job.fail(block, std::move(problem));
        }
        current_thread = nullptr;
    }

    void barrier(u32 id, u32 count) {
        Thread* me = self();
        const u32 all = job_->block_threads;
        if (id >= kMaxBarriers) fault("barrier %u: there are %u", id, kMaxBarriers);
        if (count == 0) {
            count = all;
        } else if (count % kWarpSize != 0 || count > (all + kWarpSize - 1) / kWarpSize * kWarpSize) {
            fault("barrier %u for %u threads: want a multiple of %u up to the block's %u", id, count,
                  kWarpSize, all);
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
            if (job_->launch->seed) random_.shuffle(order_, n);
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
            // Continue this warp before others: its stacks are in the cache.
            for (u32 i = kWarpSize; i-- > 0;)
                if ((wanted >> i & 1) && i != lane) ready_.push_front(&lanes[i]);
            return me->result;
        }
        Thread* released[kWarpSize];
        u32 n = 0;
        for (u32 i = 0; i < kWarpSize; ++i)
            if (wanted >> i & 1) released[n++] = &lanes[i];
        random_.shuffle(released, n);
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

    u32 lanes_of_warp(u32 warp) const {
        const u32 rest = job_->block_threads - warp * kWarpSize;
        return rest >= kWarpSize ? 0xffffffffu : (1u << rest) - 1;
    }

    static std::string place(const Thread& t) {
        return text("block (%u, %u, %u), thread (%u, %u, %u)", t.block_idx.x, t.block_idx.y,
                    t.block_idx.z, t.thread_idx.x, t.thread_idx.y, t.thread_idx.z);
    }

    // Size everything for the job's blocks; what does not change from block to block is set here.
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

    std::string run_block(u64 block) {
        const Launch& launch = *job_->launch;
        const u32 count = job_->block_threads;
        const Dim3 block_idx = {static_cast<u32>(block % launch.grid[0]),
                                static_cast<u32>(block / launch.grid[0] % launch.grid[1]),
                                static_cast<u32>(block / launch.grid[0] / launch.grid[1])};
        char* smem = make_smem();
        if (!smem) return "the system refused memory for dynamic shared memory";
        for (u32 rank = 0; rank < count; ++rank) {
            Thread& t = threads_[rank];
            t.block_idx = block_idx;
            t.dynamic_smem = smem;
            t.state = State::fresh;
            t.open_group = 0;
            t.copies.clear();
            order_[rank] = &t;
        }
        if (launch.seed) {
            // The block decides, not the worker, so that a seed gives the same order every time.
            random_.seed(launch.seed * 0xd1342543de82ef95ull + block);
            random_.shuffle(order_, count);
        }
        memset(barriers_, 0, sizeof(barriers_));
        memset(waiting_, 0, sizeof(waiting_));
        problem_.clear();
        ready_.clear();
        for (u32 i = 1; i < count; ++i) ready_.push_back(order_[i]);
        main_.stack_low = nullptr;  // learnt by the first fiber
        start(*order_[0], main_);

        if (problem_.empty()) problem_ = describe_stuck(block_idx);
        if (!problem_.empty()) stacks_.take_all_back();
        std::string overrun = check_smem(smem, block_idx);
        if (problem_.empty()) problem_ = std::move(overrun);
        return problem_;
    }

    // --- dynamic shared memory ---

#if defined(KGEN_ASAN)
    // A heap block of the exact size per block: AddressSanitizer then sees any overrun.
    char* make_smem() {
        free(heap_smem_);
        heap_smem_ = nullptr;
        const u64 bytes = job_->launch->smem_bytes;
        if (posix_memalign(&heap_smem_, kSmemAlignment, bytes ? bytes : 1) != 0) return nullptr;
        memset(heap_smem_, kPoison, bytes ? bytes : 1);
        return static_cast<char*>(heap_smem_);
    }

    std::string check_smem(const char*, const Dim3&) { return ""; }

    void* heap_smem_ = nullptr;

public:
    ~Worker() { free(heap_smem_); }

private:
#else
    // Kept over blocks; a canary behind it catches writes past the end.
    char* make_smem() {
        const u64 bytes = job_->launch->smem_bytes;
        smem_.resize(bytes + kSmemAlignment + kCanaryBytes);
        const auto address = reinterpret_cast<__UINTPTR_TYPE__>(smem_.data());
        char* smem = smem_.data() + (kSmemAlignment - address % kSmemAlignment) % kSmemAlignment;
        memset(smem, kPoison, bytes);
        memset(smem + bytes, kCanary, kCanaryBytes);
        return smem;
    }

    std::string check_smem(const char* smem, const Dim3& block) {
        const u64 bytes = job_->launch->smem_bytes;
        for (u32 i = 0; i < kCanaryBytes; ++i)
            if (smem[bytes + i] != static_cast<char>(kCanary))
                return text("block (%u, %u, %u): write to byte %llu of %llu bytes of dynamic shared "
                            "memory",
                            block.x, block.y, block.z, bytes + i, bytes);
        return "";
    }

    std::vector<char> smem_;
#endif

    // --- fibers ---

    static void fiber_main() {
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

    // Run the current thread, and after it those that have not started, on one stack.
    [[noreturn]] void run_threads() {
        for (;;) {
            Thread* me = self();
            job_->invoke(job_->kernel, job_->args);
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

    // Switch away for good.
    [[noreturn]] void leave(Thread& me, Context& to) {
        switch_context(me.context, to, true);
        abort();  // nobody switches back
    }

    // Give a fresh thread a stack and switch to it.
    void start(Thread& thread, Context& from) {
        char* low;
        size_t bytes;
        stacks_.take(low, bytes);
        make_context(thread.context, low, bytes, &Worker::fiber_main);
        thread.state = State::ready;
        current_thread = &thread;
        switch_context(from, thread.context, false);
    }

    // Let others run until the calling thread is popped from the ready queue.
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

    // Whether all of `wanted`, which wait in some exchange, wait in this one.
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

    // Empty if every thread has returned; else what each one waits for.
    std::string describe_stuck(const Dim3& block) const {
        const u32 count = job_->block_threads;
        u32 stuck = 0;
        bool in_exchange = false;
        for (u32 i = 0; i < count; ++i) {
            stuck += threads_[i].state != State::returned;
            in_exchange |= threads_[i].state == State::in_exchange;
        }
        if (stuck == 0) return "";
        std::string report =
            text("block (%u, %u, %u): divergent %s: %u of %u threads wait for threads that never "
                 "come",
                 block.x, block.y, block.z, in_exchange ? "warp exchange" : "barrier", stuck, count);
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

    static bool same_wait(const Thread& a, const Thread& b) {
        if (a.state != b.state) return false;
        if (a.state == State::at_barrier) return a.barrier_id == b.barrier_id;
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
            default: return "can run";
        }
    }

    Job* job_ = nullptr;
    std::vector<Thread> threads_;
    Stacks stacks_;
    Context main_{};
    ReadyQueue ready_;
    Thread* order_[kMaxThreadsPerBlock];  // scratch; too large for the stack of a fiber
    Barrier barriers_[kMaxBarriers];
    u32 waiting_[kMaxThreadsPerBlock / kWarpSize];  // lanes in some exchange, by warp
    Random random_;
    std::string problem_;
};

// Workers outlive a launch, for their stacks.
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

private:
    std::mutex lock_;
    std::vector<std::unique_ptr<Worker>> idle_;
};

IdleWorkers idle_workers;

void work_on(Job& job) {
    std::unique_ptr<Worker> worker = idle_workers.take();
    worker->work(job);
    idle_workers.give(std::move(worker));
}

// Why a GPU would refuse the launch; empty if it would not.
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
    return "";
}

u32 worker_count(const Launch& launch, const Job& job) {
#if defined(KGEN_ASAN)
    (void)launch, (void)job;
    return 1;  // static __shared__ arrays are not thread-local in this build
#else
    u64 count = launch.threads ? launch.threads : std::thread::hardware_concurrency();
    if (count > job.blocks) count = job.blocks;
    if (count > kMaxGuardedStacks / job.block_threads)
        count = kMaxGuardedStacks / job.block_threads;
    return count ? static_cast<u32>(count) : 1;
#endif
}

int report(const Launch& launch, Status status, const std::string& message) {
    if (launch.error && launch.error_bytes)
        snprintf(launch.error, launch.error_bytes, "%s", message.c_str());
    return status;
}

Thread& running_thread() { return *static_cast<Thread*>(current_thread); }

}  // namespace

void barrier(u32 id, u32 count) { running_thread().worker->barrier(id, count); }

u64 exchange(Exchange operation, u32 mask, u32 source, u64 value) {
    return running_thread().worker->exchange(operation, mask, source, value);
}

void copy_async(void* target, const void* source, u32 bytes, u32 source_bytes) {
    Thread& me = running_thread();
    me.copies.emplace_back();
    Copy& copy = me.copies.back();
    copy.target = target;
    copy.bytes = bytes;
    copy.group = me.open_group;
    memset(copy.content, 0, sizeof(copy.content));
    // Read now, so that AddressSanitizer blames the line that issued the copy.
    if (source_bytes) memcpy(copy.content, source, source_bytes);
    memset(target, kPoison, bytes);
}

void copy_commit() { ++running_thread().open_group; }

namespace {

void land_groups_before(u32 end) {
    std::vector<Copy>& copies = running_thread().copies;  // in order of issue, hence of group
    size_t landed = 0;
    while (landed < copies.size() && copies[landed].group < end) {
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

void fault(const char* format, ...) {
    va_list list;
    va_start(list, format);
    if (!current_thread) {
        vfprintf(stderr, format, list);
        abort();
    }
    running_thread().worker->fault_with(format, list);
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
    for (u32 i = worker_count(*launch, job); i > 1; --i) helpers.emplace_back(work_on, std::ref(job));
    work_on(job);
    for (std::thread& helper : helpers) helper.join();
    if (!job.fault_message.empty()) return report(*launch, kFault, job.fault_message);
    return kDone;
}

}  // namespace host
}  // namespace kgen
