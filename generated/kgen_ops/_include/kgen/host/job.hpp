// A launch that the workers share, and the static shared memory of a module. Part of runtime.cpp.
#pragma once

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

    // Returns the block, or the first block of a cluster of `cluster` blocks, that runs after `turn` others. Blocks run
    // in order for seed 0, in reverse for seed 1 and in another order for each other seed, because a GPU promises no
    // order.
    u64 block_of_turn(u64 turn, u64 cluster) const {
        const u64 count = blocks / cluster, index = turn / cluster, seed = launch->seed;
        if (seed == 0 || index >= count) return turn;
        if (seed == 1) return (count - 1 - index) * cluster;
        u64 step = count / 3 * 2 + seed;  // consecutive blocks are far apart; made coprime to the count
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
// contains nothing else, because a module has only kernels and the host layer (and must therefore not be linked
// statically with a C library).
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

    // Fills static shared memory with the byte for memory that nobody has written.
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

}  // namespace host
}  // namespace kgen
