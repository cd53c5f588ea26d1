// The record of a CUDA thread, and the barriers and queues that schedule the threads of a block. Part of runtime.cpp.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "deferred.hpp"
#include "fiber.hpp"
#include "runtime.hpp"

namespace kgen {
namespace host {

constexpr u32 kWarpSize = 32;
constexpr u32 kMaxThreadsPerBlock = 1024;
constexpr u32 kMaxBarriers = 16;
constexpr u64 kMaxSmemBytes = 228 * 1024;  // per SM, of GPUs up to sm_120
constexpr u64 kSmemAlignment = 128;        // as dynamic_smem() promises
constexpr int kNanByte = 0xff;             // fp32, fp16 and bf16 values of these bytes are NaN

// The byte that fills memory which nobody has written, or which a copy in flight has not reached yet. In half of the
// thread orders values of these bytes are NaN. In the others they are ordinary numbers, because some kernels take
// another path where a value is NaN: 0.75 or -1.5 in fp32 and bf16, 1.8 or -1.9 in fp16.
inline int unwritten_byte(u64 seed) {
    const int bytes[4] = {kNanByte, 0x3f, kNanByte, 0xbf};
    return bytes[seed % 4];
}

constexpr u32 kCanaryBytes = 64;
constexpr int kCanary = 0xa5;  // not kNanByte, which a stray store of NaN would leave unchanged

// An asynchronous copy (cp.async) in flight.
struct Copy {
    void* target;
    u32 bytes;
    u32 group;
    bool repeated;  // an earlier copy of the thread to the same target was in flight
    alignas(16) unsigned char content[16];

    // Whether another write has reached the target: it no longer holds the bytes that copy_async filled it with. On a
    // GPU the copy may land before that write or after it.
    bool overwritten(int unwritten) const {
        if (repeated) return false;
        unsigned char filled[sizeof(content)];
        memset(filled, unwritten, sizeof(filled));
        return memcmp(target, filled, bytes) != 0;
    }
};

// A piece of the arguments of asynchronous operations, which are allocated together.
struct alignas(16) DeferredArguments {
    char bytes[16];
};

// An asynchronous operation (wgmma) in flight.
struct DeferredWork {
    Deferred run;
    u32 group;
    size_t what;         // place of its arguments in Thread::arguments
    const float* sums;  // accumulators
    u32 count;
    bool fenced;        // whether a fence has followed
};

// A bulk load in flight.
struct BulkLoad {
    void* target;
    std::vector<char> content;
};

// A bulk store in flight.
struct BulkStore {
    void* target;
    const void* source;
    u32 group;
    std::vector<char> content;  // of the source when the store was issued
};

// What a thread waits for.
enum class State : u32 {
    fresh,
    ready,
    at_barrier,
    in_exchange,
    at_mbarrier,
    at_cluster,
    at_counter,
    returned
};

class Worker;

// A CUDA thread.
struct Thread : ThreadView {
    Context context;
    Worker* worker;
    State state;

    u32 barrier_id, barrier_count;
    Thread* next_waiter;

    const int* counter;  // of a thread in state at_counter
    int awaited;

    Exchange operation;
    u32 mask;
    u32 source;
    u64 value;
    u64 result;

    u32 open_group;  // number of the group that the next commit closes
    std::vector<Copy> copies;

    u32 open_work_group;
    bool work_fenced;
    std::vector<DeferredWork> work;
    std::vector<DeferredArguments> arguments;  // of the work; kept until all of it is done

    const void* mbarrier;  // of a thread in state at_mbarrier
    u32 open_bulk_group;
    std::vector<BulkStore> stores;
};

// A block barrier or a named barrier.
struct Barrier {
    u32 arrived;
    u32 expected;
    Thread* first;
    Thread* last;
};

// The current phase of an mbarrier. A phase with bulk loads completes only when a thread waits for it, which is as
// late as a GPU could complete it.
struct Mbarrier {
    const void* address;
    u32 arrivals;  // per phase
    u32 arrived;
    u32 phase;     // number of completed phases
    bool fenced;   // whether bulk loads see that it was initialised
    u64 expected;  // bytes
    u64 issued;
    std::vector<BulkLoad> loads;
    std::vector<Thread*> waiting;

    bool complete() const { return arrived == arrivals && expected == issued; }
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

    // Puts threads into the order in which they run: by descending rank for seed 1, shuffled for other seeds. With seed
    // 0, which is not shuffled, and seed 1 each of two threads runs first once, however the other seeds order them.
    void order(u64 launch_seed, Thread** items, u32 count) {
        if (launch_seed == 1) {
            std::sort(items, items + count,
                      [](const Thread* a, const Thread* b) { return a->rank > b->rank; });
            return;
        }
        for (u32 i = count; i > 1; --i)
            std::swap(items[i - 1], items[((next() >> 32) * i) >> 32]);
    }

private:
    u64 state_ = 0;
};

// The fibers that can run. New ones are added at the back; a released warp may be added at the front.
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

// --- text for reports ---------------------------------------------------------------------------

__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
    char buffer[512];
    va_list list;
    va_start(list, format);
    vsnprintf(buffer, sizeof(buffer), format, list);
    va_end(list);
    return buffer;
}

inline std::string lanes_text(u32 lanes) {
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

inline const char* name_of(Exchange operation) {
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

}  // namespace host
}  // namespace kgen
