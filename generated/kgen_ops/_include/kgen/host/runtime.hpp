// Declarations of the host layer for a kernel that is compiled for the host.
//
// Each CUDA thread is a fiber. The fibers of a block run on one OS thread; blocks are distributed over OS threads.
// The scheduler (worker.hpp) is compiled once, by runtime.cpp, and linked into every module. This header therefore
// includes nothing, and a small kernel compiles in a tenth of a second.
#pragma once

namespace kgen {
namespace host {

using u32 = unsigned int;
using u64 = unsigned long long;

// Memory that a kernel with programmatic dependent launch shares with an earlier kernel. The kernel's arguments point
// to `shown`, which does not contain the earlier kernel's results; griddepcontrol_wait replaces a pointer into `shown`
// by the pointer into `actual`. A kernel that does not wait, or waits too late, therefore computes with wrong numbers.
// Mirrored by `_Early` in kgen/runtime/host.py.
struct Early {
    char* shown;
    char* actual;
    u64 bytes;
};

// The arguments of a launch. Mirrored field by field by `_Launch` in kgen/runtime/host.py.
struct Launch {
    u32 grid[3];
    u32 block[3];
    u64 smem_bytes;   // dynamic shared memory of a block
    u64 seed;         // 0: by rank; 1: in reverse; else the order of threads and blocks is shuffled
    u32 threads;      // OS threads; 0: as many as this process may use
    u32 reserved;     // 0
    char* error;      // receives a NUL-terminated message when the launch fails; may be null
    u64 error_bytes;  // capacity of `error`
    const Early* early;  // of a kernel with pdl: memory that it may use only after griddepcontrol_wait
    u32 early_count;
    u32 pdl;  // one of Pdl
};

// How a launch treats griddepcontrol_wait. `kEndAtWait`: the launch executes only the part of a kernel that may run
// before the earlier kernels have ended. Each thread ends at its wait; a thread that waits for threads that have ended
// ends, too; no fault is reported. The caller compares memory before and after. Mirrored by kgen/runtime/host.py.
enum Pdl : u32 {
    kNoPdl = 0,
    kMustWait = 1,  // a block in which no thread waits is a fault
    kEndAtWait = 2,
};

// The result of a launch.
enum Status : int {
    kDone = 0,
    kBadLaunch = 1,  // refused before any thread ran
    kFault = 2,      // a thread did something that is undefined on a GPU
};

struct Dim3 {
    u32 x, y, z;
};

// The built-in variables of a running thread. The scheduler's record of a thread derives from it.
struct ThreadView {
    Dim3 thread_idx;
    Dim3 block_idx;
    Dim3 block_dim;
    Dim3 grid_dim;
    u32 rank;  // linear index in the block
    void* dynamic_smem;
};

// The running thread; set by the scheduler before a fiber runs. A fiber never moves to another OS thread, so that a
// compiler may keep the address of this variable across a switch. It is `__thread` because `thread_local` adds a
// wrapper function that checks for dynamic initialisation.
extern __thread ThreadView* current_thread;

// The warp-wide operations. Fault messages name them.
enum class Exchange : u32 { sync_warp, shfl, shfl_up, shfl_down, shfl_xor, ballot };

// Waits until `count` threads (0: all threads of the block) have arrived at barrier `id`.
void barrier(u32 id, u32 count);
// Arrives at barrier `id` without waiting.
void barrier_arrive(u32 id, u32 count);

// Waits until all lanes of `mask` that exist in the block have arrived with the same operation and mask, and returns
// the value of lane `source`. A source outside `mask`, which is undefined on a GPU, returns all bits one (a NaN). For
// `ballot`, returns the set of lanes whose value is not 0.
u64 exchange(Exchange operation, u32 mask, u32 source, u64 value);

// Starts an asynchronous copy of `source_bytes` bytes, zero-filled to `bytes`. It fills `target` with 0xFF at once
// and writes the data in copy_wait, so that a thread that reads too early, or still needs the old content, gets NaN.
void copy_async(void* target, const void* source, u32 bytes, u32 source_bytes);
// Closes the group of the copies since the last commit.
void copy_commit();
// Completes all of this thread's groups but the newest `pending`.
void copy_wait(u32 pending);
// Completes all copies, committed or not.
void copy_wait_all();

// mbarriers, bulk loads and bulk stores (bulk_copy.cuh). A load fills its target with 0xFF at once and writes the
// data when its phase is waited for; a store reads its source in bulk_wait.
void mbarrier_init(void* barrier, u32 arrivals);
// Makes the mbarriers that the block has initialised visible to bulk loads.
void mbarrier_init_fence();
void mbarrier_arrive(void* barrier, u32 expected_bytes);
void mbarrier_wait(void* barrier, u32 parity);
void bulk_load(void* target, const void* source, u32 bytes, void* barrier);
void bulk_store(void* target, const void* source, u32 bytes);
// Declares, before any launch, that the module's kernels call bulk_store. Returns true.
bool announce_bulk_stores();
void bulk_commit();
// Completes all of this thread's groups but the newest `pending`.
void bulk_wait(u32 pending);
// Makes the block's writes to shared memory visible to bulk copies and wgmma.
void fence_proxy_async();

// griddepcontrol_wait of the running thread; and the pointer that replaces `pointer` after it (see Early).
void grid_wait();
void* after_grid_wait(void* pointer);

// Ends the launch with a message that names the block and the thread.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A kernel, its type erased.
using AnyKernel = void (*)();
using Invoke = void (*)(AnyKernel kernel, void** args);
// Runs `invoke(kernel, args)` once per CUDA thread.
int run(const Launch* launch, Invoke invoke, AnyKernel kernel, void** args);

// Reports a misaligned vector access, on which a GPU traps and x86 does not.
inline void check_aligned(const void* address, u32 bytes, const char* what) {
    if (__builtin_expect((reinterpret_cast<__UINTPTR_TYPE__>(address) & (bytes - 1)) != 0, 0))
        fault("misaligned %s: address %p is not a multiple of %u bytes", what, address, bytes);
}

// --- from `void** args` to a typed call -------------------------------------------------------

// The indices 0 .. N - 1 as a type. std::index_sequence would need <utility>.
template <u32... I>
struct Indices {};
template <u32 N, u32... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <u32... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

// Calls a kernel with its arguments, given by address.
template <class... P, u32... I>
inline void call_kernel(void (*kernel)(P...), void** args, Indices<I...>) {
    (void)args;  // unused by a kernel without parameters
    kernel(*static_cast<P*>(args[I])...);
}

// Writes the sizes of a kernel's parameters to the place of the launch's message, as "8 8 4". A caller compares them
// with its arguments, because a launch with too few arguments would read beyond the list.
int list_parameters(const Launch* launch, const u32* bytes, u32 count);

// Restores the type of a kernel and calls it.
template <class... P>
void invoke_kernel(AnyKernel kernel, void** args) {
    call_kernel(reinterpret_cast<void (*)(P...)>(kernel), args,
                typename MakeIndices<sizeof...(P)>::type());
}

// Runs a launch of a kernel. A launch without threads and arguments lists the sizes of its parameters instead.
template <class... P>
inline int launch_kernel(void (*kernel)(P...), const Launch* launch, void** args) {
    if (!args && launch->block[0] == 0) {
        const u32 bytes[] = {sizeof(P)..., 0};  // 0: an array needs at least one element
        return list_parameters(launch, bytes, sizeof...(P));
    }
    return run(launch, &invoke_kernel<P...>, reinterpret_cast<AnyKernel>(kernel), args);
}

}  // namespace host
}  // namespace kgen
