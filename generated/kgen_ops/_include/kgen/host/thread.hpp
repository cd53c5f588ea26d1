// The record of one CUDA thread, and what schedules a block's threads. Part of runtime.cpp.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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
constexpr u64 kMaxSmemBytes = 228 * 1024;  // the most any GPU up to sm_120 has per SM
constexpr u64 kSmemAlignment = 128;        // as dynamic_smem() promises
constexpr int kPoison = 0xff;              // floats, halves and bfloats made of it are NaN
constexpr u32 kCanaryBytes = 64;
constexpr int kCanary = 0xa5;  // not kPoison, which a stray store of NaN would leave unchanged

struct Copy {
    void* target;
    u32 bytes;
    u32 group;
    alignas(16) unsigned char content[16];
};

struct DeferredWork {
    Deferred run;
    u32 group;
    std::vector<char> what;
};

// What the copy engine has been asked for and has not done yet.
struct BulkLoad {
    void* target;
    std::vector<char> content;
};

struct BulkStore {
    void* target;
    const void* source;
    u32 group;
    std::vector<char> content;  // of the source when the store was issued
};

enum class State : u32 {
    fresh,
    ready,
    at_barrier,
    in_exchange,
    at_mbarrier,
    at_cluster,
    returned
};

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

    u32 open_work_group;
    std::vector<DeferredWork> work;

    const void* mbarrier;  // the one that a thread at_mbarrier waits for
    u32 open_bulk_group;
    std::vector<BulkStore> stores;
};

struct Barrier {
    u32 arrived;
    u32 expected;
    Thread* first;
    Thread* last;
};

// The present phase of an mbarrier. A phase that has brought bytes ends only when somebody waits
// for it, as late as any GPU might end it.
struct Mbarrier {
    const void* address;
    u32 arrivals;  // that a phase takes
    u32 arrived;
    u32 phase;     // number of phases that have ended
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
