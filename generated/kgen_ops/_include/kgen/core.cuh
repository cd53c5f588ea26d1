// Platform split, integer names, thread coordinates, dynamic shared memory, kernel export.
//
// The same source is compiled three ways: by NVRTC and by nvcc for a GPU, and by a plain C++17
// compiler for the host layer (one fiber per CUDA thread). Nothing here includes a standard header:
// NVRTC has none, and including them is what makes a kernel slow to compile.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KGEN_HOST 0
#else
#define KGEN_HOST 1
#endif

// Compute capability times ten while device code is compiled (890 for 8.9), else 0. nvcc also
// parses device functions in its host pass, where the value is 0 and the oldest path is taken.
#if defined(__CUDA_ARCH__)
#define KGEN_ARCH __CUDA_ARCH__
#else
#define KGEN_ARCH 0
#endif

#if KGEN_HOST
#include "host/runtime.hpp"

#define KGEN_DEVICE inline
#define __global__
#define __device__
#define __forceinline__ inline
#define __constant__ static
#define __launch_bounds__(...)

// Shared by the fibers of a block, which all run on one OS thread; a block on another OS thread has
// its own copy. The runtime fills the module's thread-local storage with NaN before every block.
//
// AddressSanitizer puts no red zone around thread-local arrays, so its build (one OS thread) uses
// ordinary statics: an overrun is then reported, while the NaN fill is left to the plain build.
// (Gathering them in a named section to have both is not possible: GCC refuses to put a kernel's
// variables and those of inline functions or templates in one section.)
#if defined(__SANITIZE_ADDRESS__)
#define KGEN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KGEN_ASAN 1
#endif
#endif
#if defined(KGEN_ASAN)
#define __shared__ static
#else
#define __shared__ static __thread
#endif

#define threadIdx (::kgen::host::current_thread->thread_idx)
#define blockIdx (::kgen::host::current_thread->block_idx)
#define blockDim (::kgen::host::current_thread->block_dim)
#define gridDim (::kgen::host::current_thread->grid_dim)

// After a kernel, at file end: makes the kernel callable from outside a module.
#define KGEN_EXPORT(kernel)                                                                       \
    extern "C" __attribute__((visibility("default"))) int kernel##__host(                         \
        const ::kgen::host::Launch* launch, void** args) {                                        \
        return ::kgen::host::launch_kernel(&kernel, launch, args);                                \
    }                                                                                             \
    static_assert(true, "lets KGEN_EXPORT(kernel); end with a semicolon")

#else  // a GPU

#define KGEN_DEVICE __device__ __forceinline__
#define KGEN_EXPORT(kernel) \
    static_assert(true, "an extern \"C\" kernel needs no further export on a GPU")

#endif

namespace kgen {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "unexpected integer sizes");

constexpr int kWarpSize = 32;

// Smallest q with q * b >= a, for a >= 0 and b > 0; written so that it cannot overflow.
template <class A, class B>
KGEN_DEVICE constexpr auto ceil_div(A a, B b) -> decltype(a / b) {
    return a / b + (a % b != 0 ? 1 : 0);
}

template <class T>
KGEN_DEVICE constexpr T min(T a, T b) {
    return b < a ? b : a;
}

template <class T>
KGEN_DEVICE constexpr T max(T a, T b) {
    return a < b ? b : a;
}

KGEN_DEVICE constexpr bool is_power_of_two(i64 n) { return n > 0 && (n & (n - 1)) == 0; }

// memcpy of a constant size; compiles to register moves. The one way to look at a value as another
// type that every compiler defines. (NVRTC knows memcpy but not __builtin_memcpy; a host compiler
// knows the latter without an include.)
template <int Bytes>
KGEN_DEVICE void copy_bytes(void* target, const void* source) {
#if KGEN_HOST
    __builtin_memcpy(target, source, Bytes);
#else
    memcpy(target, source, Bytes);
#endif
}

// The same bits as another type.
template <class To, class From>
KGEN_DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
    To to;
    copy_bytes<sizeof(To)>(&to, &from);
    return to;
}

// Linear index of the calling thread in its block, the one warps are cut from.
KGEN_DEVICE int thread_rank() {
#if KGEN_HOST
    return static_cast<int>(host::current_thread->rank);
#else
    return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
#endif
}

KGEN_DEVICE int lane_id() { return thread_rank() & (kWarpSize - 1); }

// The block's dynamic shared memory, aligned to 128 bytes (what a bulk copy asks for).
// Every call returns the same address: a kernel carves its arrays out of it.
template <class T>
KGEN_DEVICE T* dynamic_smem() {
#if KGEN_HOST
    return static_cast<T*>(host::current_thread->dynamic_smem);
#else
    extern __shared__ __align__(128) unsigned char kgen_dynamic_smem[];
    return reinterpret_cast<T*>(kgen_dynamic_smem);
#endif
}

}  // namespace kgen
