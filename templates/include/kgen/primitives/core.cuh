// The platform layer: integer types, thread coordinates, dynamic shared memory, kernel export.
//
// A kernel is compiled in three ways: by NVRTC and by nvcc for a GPU, and by a C++17 compiler for the host layer,
// which runs each CUDA thread as a fiber. No standard header is included: NVRTC has none, and they take most of the
// compile time of a small kernel.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KGEN_HOST 0
#else
#define KGEN_HOST 1
#endif

// Compute capability times ten while device code is compiled (890 for 8.9), else 0. In nvcc's host pass, which also
// parses device functions, the value is 0 and the branch for the oldest GPUs is taken.
#if defined(__CUDA_ARCH__)
#define KGEN_ARCH __CUDA_ARCH__
#else
#define KGEN_ARCH 0
#endif

#if KGEN_HOST
#include "kgen/host/runtime.hpp"

#define KGEN_DEVICE inline
#define __global__
#define __device__
#define __forceinline__ inline
#define __constant__ static
#define __launch_bounds__(...)

// Static shared memory is thread-local: the fibers of a block run on one OS thread, and blocks on other OS threads
// have their own copy. The runtime fills the module's thread-local storage with NaN before every block.
//
// AddressSanitizer puts no red zone around thread-local arrays. Its build runs on one OS thread and uses ordinary
// statics, so that an overrun is reported; that build has no NaN fill. (A named section would allow both, but GCC
// does not put a kernel's variables and those of inline functions or templates in one section.)
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
// `used`: without it the compiler assumes that an array which the module never writes is 0, but the host layer fills
// the memory.
#define __shared__ static __thread __attribute__((used))
#endif

#define threadIdx (::kgen::host::current_thread->thread_idx)
#define blockIdx (::kgen::host::current_thread->block_idx)
#define blockDim (::kgen::host::current_thread->block_dim)
#define gridDim (::kgen::host::current_thread->grid_dim)

// KGEN_EXPORT(kernel); at the end of the file exports a kernel from its module.
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

// Integers of fixed width.
using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "unexpected integer sizes");

// Threads of a warp.
constexpr int kWarpSize = 32;

// Returns the smallest q with q * b >= a, for a >= 0 and b > 0. Does not overflow.
template <class A, class B>
KGEN_DEVICE constexpr auto ceil_div(A a, B b) -> decltype(a / b) {
    return a / b + (a % b != 0 ? 1 : 0);
}

// Returns the smaller value; a if they are equal.
template <class T>
KGEN_DEVICE constexpr T min(T a, T b) {
    return b < a ? b : a;
}

// Returns the larger value; a if they are equal.
template <class T>
KGEN_DEVICE constexpr T max(T a, T b) {
    return a < b ? b : a;
}

// Whether n is 1, 2, 4, 8, ...
KGEN_DEVICE constexpr bool is_power_of_two(i64 n) { return n > 0 && (n & (n - 1)) == 0; }

// memcpy of a compile-time size; compiles to register moves. All compilers define the result of this kind of type
// punning. (NVRTC has memcpy but not __builtin_memcpy; a host compiler has the latter without an include.)
template <int Bytes>
KGEN_DEVICE void copy_bytes(void* target, const void* source) {
#if KGEN_HOST
    __builtin_memcpy(target, source, Bytes);
#else
    memcpy(target, source, Bytes);
#endif
}

// Returns the same bits as another type of the same size.
template <class To, class From>
KGEN_DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
    To to;
    copy_bytes<sizeof(To)>(&to, &from);
    return to;
}

// Returns the linear index of the calling thread in its block, which determines its warp.
KGEN_DEVICE int thread_rank() {
#if KGEN_HOST
    return static_cast<int>(host::current_thread->rank);
#else
    return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
#endif
}

// Returns the index of the calling thread in its warp.
KGEN_DEVICE int lane_id() { return thread_rank() & (kWarpSize - 1); }

// Returns the block's dynamic shared memory, aligned to 128 bytes (bulk copies need 16, swizzled panels 1024). Every
// call returns the same address; a kernel places its arrays there by its own map.
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
