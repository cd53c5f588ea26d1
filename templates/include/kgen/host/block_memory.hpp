// Dynamic shared memory of a block, and the async proxy's view of it. Part of runtime.cpp.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "runtime.hpp"
#include "sanitizer.hpp"
#include "thread.hpp"

namespace kgen {
namespace host {

// The dynamic shared memory of the block that runs.
class BlockMemory {
public:
    // Provides `bytes` bytes to the next block, all with the value `unwritten`. Returns false if the system refuses
    // memory.
    bool make(u64 bytes, int unwritten) {
        begin_ = allocate(bytes);
        if (!begin_) return false;
        bytes_ = bytes;
        unwritten_ = unwritten;
        async_view_.clear();
        mark_unwritten();
        return true;
    }

    char* begin() const { return begin_; }

    u64 bytes() const { return bytes_; }

    void mark_unwritten() { memset(begin_, unwritten_, bytes_); }

    bool has(const void* address) const {
        const char* byte = static_cast<const char*>(address);
        return byte >= begin_ && byte < begin_ + bytes_;
    }

    u64 offset_of(const void* address) const {
        return static_cast<u64>(static_cast<const char*>(address) - begin_);
    }

    // --- the async proxy ---
    // The async proxy's view is a second copy of the memory, which ordinary writes reach at a fence. (On a GPU a fence
    // covers the writes of its own thread; here it covers the writes of the whole block.)

    char* async_proxy_view(const void* address) {
        if (async_view_.empty()) async_view_.assign(bytes_, char(unwritten_));
        return async_view_.data() + offset_of(address);
    }

    void show_to_async_proxy(const void* address, u64 bytes) {
        if (has(address)) memcpy(async_proxy_view(address), address, bytes);
    }

    void show_all_to_async_proxy() {
        if (bytes_) show_to_async_proxy(begin_, bytes_);
    }

#if defined(KGEN_ASAN)
    ~BlockMemory() { free(heap_); }

    // AddressSanitizer reports an overrun where it happens.
    std::string describe_overrun(const Dim3&) const { return ""; }

private:
    // A heap allocation of the exact size for each block, so that AddressSanitizer reports any overrun.
    char* allocate(u64 bytes) {
        free(heap_);
        heap_ = nullptr;
        if (posix_memalign(&heap_, kSmemAlignment, bytes ? bytes : 1) != 0) return nullptr;
        return static_cast<char*>(heap_);
    }

    void* heap_ = nullptr;
#else
    // The first write past the end that block `block` made; empty if it made none.
    std::string describe_overrun(const Dim3& block) const {
        for (u32 i = 0; i < kCanaryBytes; ++i)
            if (begin_[bytes_ + i] != static_cast<char>(kCanary))
                return text("block (%u, %u, %u): write to byte %llu of %llu bytes of dynamic "
                            "shared memory",
                            block.x, block.y, block.z, bytes_ + i, bytes_);
        return "";
    }

private:
    // The memory is kept between blocks; a canary after it detects writes past the end.
    char* allocate(u64 bytes) {
        kept_.resize(bytes + kSmemAlignment + kCanaryBytes);
        const auto address = reinterpret_cast<__UINTPTR_TYPE__>(kept_.data());
        char* smem = kept_.data() + (kSmemAlignment - address % kSmemAlignment) % kSmemAlignment;
        memset(smem + bytes, kCanary, kCanaryBytes);
        return smem;
    }

    std::vector<char> kept_;
#endif

    char* begin_ = nullptr;
    u64 bytes_ = 0;
    int unwritten_ = 0;
    std::vector<char> async_view_;  // empty until first used
};

}  // namespace host
}  // namespace kgen
