// Fibers: switchable execution contexts and their stacks. Part of runtime.cpp.
//
// The switch is written in assembly for x86-64 and AArch64 (about 5 ns). Other platforms, and builds with
// KGEN_HOST_UCONTEXT, use ucontext (two system calls, about 230 ns).
#pragma once

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "sanitizer.hpp"

#if defined(KGEN_ASAN)
#include <sanitizer/common_interface_defs.h>
// For functions from which a fiber never returns. With instrumentation they would leave red zones on a stack that is
// used again, and clear the shadow of the whole stack before every call that does not return.
#define KGEN_FIBER_ROOT __attribute__((no_sanitize_address))
#else
#define KGEN_FIBER_ROOT
#endif

#if !defined(KGEN_HOST_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define KGEN_HOST_UCONTEXT 1
#endif
#if defined(KGEN_HOST_UCONTEXT)
#include <ucontext.h>
#endif

namespace kgen {
namespace host {

using u32 = unsigned int;

// Large enough for large per-thread arrays; only touched pages take memory. Frames of AddressSanitizer builds are
// several times larger.
#if defined(KGEN_ASAN)
constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kRootBytes = 8192;  // more than the frames below a kernel's
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif

// The largest number of stacks with guard pages. Without guard markers each guard page splits a mapping in two, and
// Linux allows a process 65530 mappings.
constexpr u32 kMaxGuardedStacks = 24000;

#if defined(__linux__)
// MADV_GUARD_INSTALL (Linux 6.13) and MADV_POPULATE_READ (5.14), which older headers do not define.
constexpr int kInstallGuard = 102;
constexpr int kPopulateRead = 22;
#endif

using FiberMain = void (*)();

// A suspended execution context.
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

inline void make_context(Context& context, char* low, size_t bytes, FiberMain entry) {
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

// Saves the callee-saved registers of the calling convention only: no signal mask (a system call in swapcontext) and
// no floating-point control words, which kernels do not change.
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

inline void make_context(Context& context, char* low, size_t bytes, FiberMain entry) {
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

// Switches contexts. AddressSanitizer tracks the bounds of the current stack and is told before and after.
KGEN_FIBER_ROOT inline void switch_context(Context& from, Context& to, bool from_ends) {
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

// The stacks of one worker, in one mapping, each with an inaccessible guard page below it.
class Stacks {
public:
    Stacks() = default;
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;
    ~Stacks() { release(); }

    // Allocates `count` stacks; false if the system refuses. No stack may be in use.
    bool reserve(u32 count) {
        if (count <= capacity_) return true;
        release();
        page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        void* memory = mmap(nullptr, count * stride(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return false;
#if defined(__linux__)
        // A huge page would make sixteen stacks resident if each has touched one or two pages.
        (void)madvise(memory, count * stride(), MADV_NOHUGEPAGE);
#endif
        memory_ = static_cast<char*>(memory);
        capacity_ = count;
        return true;
    }

    // Takes a free stack.
    void take(char*& low, size_t& bytes) {
        u32 index;
        if (!free_.empty()) {
            index = free_.back();
            free_.pop_back();
        } else {
            index = guarded_++;
            guard(index);
        }
        low = memory_ + index * stride() + page_;
#if defined(KGEN_ASAN)
        // The last fiber left poisoned memory at the top when it switched away for the last time.
        ASAN_UNPOISON_MEMORY_REGION(low + kStackBytes - kRootBytes, kRootBytes);
#endif
        // Stack tops at the same page offset would compete for the same few cache sets.
        bytes = kStackBytes - index % 31 * 128;
    }

    // Returns a stack.
    void give(const char* low) { free_.push_back(static_cast<u32>((low - memory_) / stride())); }

    // Returns all stacks. After a fault the abandoned threads still have theirs.
    void take_all_back() {
        free_.clear();
        for (u32 i = guarded_; i-- > 0;) free_.push_back(i);
    }

private:
    size_t stride() const { return kStackBytes + page_; }

    // Makes the page below stack `index` inaccessible.
    void guard(u32 index) {
        char* page = memory_ + index * stride();
        if (index == 0 || markers_) markers_ = install_marker(page, index == 0);
        // Fails only if the process is out of mappings; the stack works without a guard.
        if (!markers_) (void)mprotect(page, page_, PROT_NONE);
    }

    // Installs a guard marker, which does not split the mapping; false if the system has none.
    bool install_marker(char* page, bool check) const {
#if defined(__linux__)
        if (madvise(page, page_, kInstallGuard) != 0) return false;
        // Emulators accept any advice and ignore it; a page that can be read is not a guard.
        return !check || (madvise(page, page_, kPopulateRead) != 0 && errno == EFAULT);
#else
        (void)page, (void)check;
        return false;
#endif
    }

    void release() {
        if (memory_) munmap(memory_, capacity_ * stride());
        memory_ = nullptr;
        capacity_ = guarded_ = 0;
        free_.clear();
    }

    char* memory_ = nullptr;
    size_t page_ = 0;
    u32 capacity_ = 0;
    u32 guarded_ = 0;  // stacks that were taken at least once
    bool markers_ = false;
    std::vector<u32> free_;
};

}  // namespace host
}  // namespace kgen
