// What a kernel compiled for the host sees of the host layer: declarations only.
//
// One CUDA thread is one fiber; the fibers of a block share one OS thread, and blocks are spread
// over OS threads. The scheduler (worker.hpp) is compiled once, by runtime.cpp, and linked into
// every module, so this header includes nothing: a small kernel compiles in a tenth of a second.
#pragma once

namespace kgen {
namespace host {

using u32 = unsigned int;
using u64 = unsigned long long;

// One launch. Mirrored field by field by `_Launch` in kgen/runtime/host.py.
struct Launch {
    u32 grid[3];
    u32 block[3];
    u64 smem_bytes;   // dynamic shared memory of a block
    u64 seed;         // 0: threads start in rank order; else the order of the fibers is shuffled
    u32 threads;      // OS threads; 0: as many as this process may use
    u32 reserved;     // 0
    char* error;      // receives a NUL-terminated message when the launch fails; may be null
    u64 error_bytes;  // capacity of `error`
};

// Results of a launch.
enum Status : int {
    kDone = 0,
    kBadLaunch = 1,  // refused before any thread ran
    kFault = 2,      // a thread did something undefined on a GPU
};

struct Dim3 {
    u32 x, y, z;
};

// What a running thread may know of itself. The scheduler's own record derives from it.
struct ThreadView {
    Dim3 thread_idx;
    Dim3 block_idx;
    Dim3 block_dim;
    Dim3 grid_dim;
    u32 rank;  // linear index in the block
    void* dynamic_smem;
};

// Set by the scheduler before a fiber runs. A fiber never moves to another OS thread, so a compiler
// may keep the address of this variable over a switch. `__thread`, not `thread_local`: the latter
// goes through a wrapper function that checks for dynamic initialisation.
extern __thread ThreadView* current_thread;

// The warp-wide operations; named in fault messages.
enum class Exchange : u32 { sync_warp, shfl, shfl_up, shfl_down, shfl_xor, ballot };

// Wait until `count` threads (0: every thread of the block) have arrived at barrier `id`.
void barrier(u32 id, u32 count);

// Wait until every lane of `mask` that the block has arrived with the same operation and mask;
// returns the value lane `source` brought. A source outside `mask` is undefined on a GPU and
// returns all bits one (a NaN). For `ballot`, returns the set of lanes whose value is not 0.
u64 exchange(Exchange operation, u32 mask, u32 source, u64 value);

// An asynchronous copy of `source_bytes` bytes, zero-filled to `bytes`. It fills `target` with 0xFF
// at once and lands only in copy_wait, so whoever reads too early, or still needed the old content,
// computes with NaN.
void copy_async(void* target, const void* source, u32 bytes, u32 source_bytes);
void copy_commit();
// Land all of this thread's groups but the newest `pending`.
void copy_wait(u32 pending);
// Land everything, committed or not.
void copy_wait_all();

// The copy engine: mbarriers, bulk loads and bulk stores (see bulk.cuh). A load fills its target
// with 0xFF at once and lands when its phase is waited for; a store reads its source in bulk_wait.
void mbarrier_init(void* barrier, u32 arrivals);
void mbarrier_arrive(void* barrier, u32 expected_bytes);
void mbarrier_wait(void* barrier, u32 parity);
void bulk_load(void* target, const void* source, u32 bytes, void* barrier);
void bulk_store(void* target, const void* source, u32 bytes);
void bulk_commit();
// Finish all of this thread's groups but the newest `pending`.
void bulk_wait(u32 pending);
void fence_proxy_async();

// End the launch with a message that names block and thread.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Run `invoke(kernel, args)` once per CUDA thread.
using AnyKernel = void (*)();
using Invoke = void (*)(AnyKernel kernel, void** args);
int run(const Launch* launch, Invoke invoke, AnyKernel kernel, void** args);

// A GPU traps on a misaligned vector access; x86 would let it pass.
inline void check_aligned(const void* address, u32 bytes, const char* what) {
    if (__builtin_expect((reinterpret_cast<__UINTPTR_TYPE__>(address) & (bytes - 1)) != 0, 0))
        fault("misaligned %s: address %p is not a multiple of %u bytes", what, address, bytes);
}

// --- from `void** args` to a typed call -------------------------------------------------------

// A list of indices 0..N-1; std::index_sequence would cost an include of <utility>.
template <u32... I>
struct Indices {};
template <u32 N, u32... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <u32... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

template <class... P, u32... I>
inline void call_kernel(void (*kernel)(P...), void** args, Indices<I...>) {
    (void)args;  // unused by a kernel without parameters
    kernel(*static_cast<P*>(args[I])...);
}

template <class... P>
void invoke_kernel(AnyKernel kernel, void** args) {
    call_kernel(reinterpret_cast<void (*)(P...)>(kernel), args,
                typename MakeIndices<sizeof...(P)>::type());
}

template <class... P>
inline int launch_kernel(void (*kernel)(P...), const Launch* launch, void** args) {
    return run(launch, &invoke_kernel<P...>, reinterpret_cast<AnyKernel>(kernel), args);
}

}  // namespace host
}  // namespace kgen
