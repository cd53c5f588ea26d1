// Vectors of storage values, and vectorised global loads and stores with a cache hint.
//
// Data layout: Vec<T, N> is N contiguous values that one instruction moves: 1, 2, 4, 8 or 16 bytes. (32-byte
// accesses need sm_100 and are left out.) Addresses must be multiples of the size; the host layer reports one that is
// not, as a GPU does. Vectors in shared memory are accessed by dereferencing a pointer.
#pragma once

#include "kgen/primitives/types.cuh"

namespace kgen {

// N values of type T that one instruction moves.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
    static_assert(is_power_of_two(N) && is_power_of_two(sizeof(T)) && sizeof(T) * N <= 16,
                  "one access moves 1, 2, 4, 8 or 16 bytes");
    T data[N];

    KGEN_DEVICE T& operator[](int i) { return data[i]; }
    KGEN_DEVICE const T& operator[](int i) const { return data[i]; }
};

// Cache hints of loads and stores.
//
//     load   normal         through L1
//            prefetch_256   normal, and L2 fetches 256 bytes at a time      (ld.global.L2::256B)
//            streaming      for data that is read once: evicted first       (ld.global.cs)
//            read_only      non-coherent path; the compiler may hoist it    (ld.global.nc)
//            evict_first    for the last read of data: L1 and L2 evict its
//                           lines first, so that written lines stay longer  (.L2::cache_hint; sm_80+)
//            evict_last     for data that is read again: evicted last       (.L2::cache_hint; sm_80+)
//            no_l1          read_only, not allocated in L1: for a stream
//                           that would evict data that is read again        (.nc.L1::no_allocate)
//     store  normal         write back
//            streaming      not read again soon: evicted first              (st.global.cs)
//            evict_first    no_l1, first to be evicted from L2              (.L2::cache_hint; sm_80+)
//            evict_last     no_l1, last to be evicted from L2               (.L2::cache_hint; sm_80+)
//            no_l1          not allocated in L1                             (st.global.L1::no_allocate)
//            write_through  through L2 to memory                            (st.global.wt)
//
// read_only and no_l1 loads need memory that no thread of the kernel writes: the non-coherent path may return stale
// data, and the compiler may move the load across a store or a barrier.
enum class Cache {
    normal,
    prefetch_256,
    streaming,
    read_only,
    no_l1,
    evict_first,
    evict_last,
    write_through
};

namespace detail {

#if !KGEN_HOST

// An access with an L2 policy is three instructions in their own scope; the compiler creates the policy once per
// kernel.
#define KGEN_POLICY(priority)                                                                     \
    "{ .reg .b64 policy; createpolicy.fractional.L2::" priority ".b64 policy, 1.0; "

// One load per size. Non-coherent loads read constant data, so they are not volatile and may be merged and moved; the
// others are ordered by the memory clobber.
#define KGEN_DEFINE_LOAD(name, pre, op, post, ...)                                                \
    template <int Bytes>                                                                          \
    struct name;                                                                                  \
    template <>                                                                                   \
    struct name<1> {                                                                              \
        static __device__ __forceinline__ void run(const void* p, u32* w) {                       \
            asm __VA_ARGS__(pre op ".u8 %0, [%1]" post : "=r"(w[0]) : "l"(p) KGEN_CLOBBER);       \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<2> {                                                                              \
        static __device__ __forceinline__ void run(const void* p, u32* w) {                       \
            asm __VA_ARGS__(pre op ".u16 %0, [%1]" post : "=r"(w[0]) : "l"(p) KGEN_CLOBBER);      \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<4> {                                                                              \
        static __device__ __forceinline__ void run(const void* p, u32* w) {                       \
            asm __VA_ARGS__(pre op ".b32 %0, [%1]" post : "=r"(w[0]) : "l"(p) KGEN_CLOBBER);      \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<8> {                                                                              \
        static __device__ __forceinline__ void run(const void* p, u32* w) {                       \
            asm __VA_ARGS__(pre op ".v2.b32 {%0, %1}, [%2]" post                                  \
                            : "=r"(w[0]), "=r"(w[1])                                              \
                            : "l"(p) KGEN_CLOBBER);                                               \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<16> {                                                                             \
        static __device__ __forceinline__ void run(const void* p, u32* w) {                       \
            asm __VA_ARGS__(pre op ".v4.b32 {%0, %1, %2, %3}, [%4]" post                          \
                            : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])                      \
                            : "l"(p) KGEN_CLOBBER);                                               \
        }                                                                                         \
    }

#define KGEN_CLOBBER
KGEN_DEFINE_LOAD(LoadReadOnly, "", "ld.global.nc", ";");
KGEN_DEFINE_LOAD(LoadNoL1, "", "ld.global.nc.L1::no_allocate", ";");
#undef KGEN_CLOBBER
#define KGEN_CLOBBER : "memory"
KGEN_DEFINE_LOAD(LoadStreaming, "", "ld.global.cs", ";", volatile);
KGEN_DEFINE_LOAD(LoadPrefetch256, "", "ld.global.L2::256B", ";", volatile);
#if KGEN_ARCH >= 800
KGEN_DEFINE_LOAD(LoadEvictFirst, KGEN_POLICY("evict_first"),
                 "ld.global.L1::evict_first.L2::cache_hint", ", policy; }", volatile);
KGEN_DEFINE_LOAD(LoadEvictLast, KGEN_POLICY("evict_last"),
                 "ld.global.L1::evict_last.L2::cache_hint", ", policy; }", volatile);
#endif
#undef KGEN_CLOBBER
#undef KGEN_DEFINE_LOAD

#define KGEN_DEFINE_STORE(name, pre, op, post)                                                    \
    template <int Bytes>                                                                          \
    struct name;                                                                                  \
    template <>                                                                                   \
    struct name<1> {                                                                              \
        static __device__ __forceinline__ void run(void* p, const u32* w) {                       \
            asm volatile(pre op ".u8 [%0], %1" post ::"l"(p), "r"(w[0]) : "memory");              \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<2> {                                                                              \
        static __device__ __forceinline__ void run(void* p, const u32* w) {                       \
            asm volatile(pre op ".u16 [%0], %1" post ::"l"(p), "r"(w[0]) : "memory");             \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<4> {                                                                              \
        static __device__ __forceinline__ void run(void* p, const u32* w) {                       \
            asm volatile(pre op ".b32 [%0], %1" post ::"l"(p), "r"(w[0]) : "memory");             \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<8> {                                                                              \
        static __device__ __forceinline__ void run(void* p, const u32* w) {                       \
            asm volatile(pre op ".v2.b32 [%0], {%1, %2}" post ::"l"(p), "r"(w[0]), "r"(w[1])      \
                         : "memory");                                                             \
        }                                                                                         \
    };                                                                                            \
    template <>                                                                                   \
    struct name<16> {                                                                             \
        static __device__ __forceinline__ void run(void* p, const u32* w) {                       \
            asm volatile(pre op ".v4.b32 [%0], {%1, %2, %3, %4}" post ::"l"(p), "r"(w[0]), "r"(w[1]), \
                         "r"(w[2]), "r"(w[3])                                                     \
                         : "memory");                                                             \
        }                                                                                         \
    }

KGEN_DEFINE_STORE(StoreStreaming, "", "st.global.cs", ";");
KGEN_DEFINE_STORE(StoreNoL1, "", "st.global.L1::no_allocate", ";");
KGEN_DEFINE_STORE(StoreWriteThrough, "", "st.global.wt", ";");
#if KGEN_ARCH >= 800
KGEN_DEFINE_STORE(StoreEvictFirst, KGEN_POLICY("evict_first"),
                  "st.global.L1::no_allocate.L2::cache_hint", ", policy; }");
KGEN_DEFINE_STORE(StoreEvictLast, KGEN_POLICY("evict_last"),
                  "st.global.L1::no_allocate.L2::cache_hint", ", policy; }");
#endif
#undef KGEN_POLICY
#undef KGEN_DEFINE_STORE

template <template <int> class Operation, class V>
KGEN_DEVICE V load_with(const V* source) {
    constexpr int kWords = sizeof(V) < 4 ? 1 : sizeof(V) / 4;
    u32 words[kWords];
    Operation<sizeof(V)>::run(source, words);
    V value;
    copy_bytes<sizeof(V)>(&value, words);
    return value;
}

template <template <int> class Operation, class V>
KGEN_DEVICE void store_with(V* target, const V& value) {
    constexpr int kWords = sizeof(V) < 4 ? 1 : sizeof(V) / 4;
    u32 words[kWords] = {};
    copy_bytes<sizeof(V)>(words, &value);
    Operation<sizeof(V)>::run(target, words);
}

#endif

}  // namespace detail

// Loads one vector from global memory.
template <Cache C = Cache::normal, class T, int N>
KGEN_DEVICE Vec<T, N> load(const Vec<T, N>* source) {
    static_assert(C != Cache::write_through, "write_through is a hint for stores");
#if KGEN_HOST
    host::check_aligned(source, sizeof(Vec<T, N>), "load");
    return *source;
#else
    if constexpr (C == Cache::streaming) {
        return detail::load_with<detail::LoadStreaming>(source);
    } else if constexpr (C == Cache::prefetch_256) {
        return detail::load_with<detail::LoadPrefetch256>(source);
    } else if constexpr (C == Cache::read_only) {
        return detail::load_with<detail::LoadReadOnly>(source);
#if KGEN_ARCH >= 800
    } else if constexpr (C == Cache::evict_first) {
        return detail::load_with<detail::LoadEvictFirst>(source);
    } else if constexpr (C == Cache::evict_last) {
        return detail::load_with<detail::LoadEvictLast>(source);
#endif
    } else if constexpr (C == Cache::no_l1) {
        return detail::load_with<detail::LoadNoL1>(source);
    } else {
        return *source;
    }
#endif
}

// Stores one vector to global memory.
template <Cache C = Cache::normal, class T, int N>
KGEN_DEVICE void store(Vec<T, N>* target, const Vec<T, N>& value) {
    static_assert(C != Cache::read_only && C != Cache::prefetch_256, "a hint for loads only");
#if KGEN_HOST
    host::check_aligned(target, sizeof(Vec<T, N>), "store");
    *target = value;
#else
    if constexpr (C == Cache::streaming) {
        detail::store_with<detail::StoreStreaming>(target, value);
#if KGEN_ARCH >= 800
    } else if constexpr (C == Cache::evict_first) {
        detail::store_with<detail::StoreEvictFirst>(target, value);
    } else if constexpr (C == Cache::evict_last) {
        detail::store_with<detail::StoreEvictLast>(target, value);
#endif
    } else if constexpr (C == Cache::no_l1) {
        detail::store_with<detail::StoreNoL1>(target, value);
    } else if constexpr (C == Cache::write_through) {
        detail::store_with<detail::StoreWriteThrough>(target, value);
    } else {
        *target = value;
    }
#endif
}

// Loads N values from `source`, which must be aligned to their total size.
template <int N, Cache C = Cache::normal, class T>
KGEN_DEVICE Vec<T, N> load_vec(const T* source) {
    return load<C>(reinterpret_cast<const Vec<T, N>*>(source));
}

// Stores N values to `target`, which must be aligned to their total size.
template <Cache C = Cache::normal, class T, int N>
KGEN_DEVICE void store_vec(T* target, const Vec<T, N>& value) {
    store<C>(reinterpret_cast<Vec<T, N>*>(target), value);
}

// Converts all elements of a vector to fp32. Pairs of 16-bit values use the packed conversions.
template <class T, int N>
KGEN_DEVICE void to_floats(const Vec<T, N>& values, float (&out)[N]) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        u32 pairs[N / 2];
        copy_bytes<sizeof(values)>(pairs, &values);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const f32x2 pair = unpack2<T>(pairs[i]);
            out[2 * i] = pair.x;
            out[2 * i + 1] = pair.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = to_float(values[i]);
    }
}

// Prefetches the 128-byte cache line of an address in global memory to L2. Returns no value.
KGEN_DEVICE void prefetch_to_l2(const void* global) {
#if !KGEN_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(global)));
#else
    (void)global;
#endif
}

// Rounds N fp32 values to T. Pairs of 16-bit values use the packed conversions.
template <class T, int N>
KGEN_DEVICE Vec<T, N> from_floats(const float (&values)[N]) {
    Vec<T, N> out;
    if constexpr (sizeof(T) == 2 && N > 1) {
        u32 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) pairs[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
        copy_bytes<sizeof(out)>(&out, pairs);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] = from_float<T>(values[i]);
    }
    return out;
}

}  // namespace kgen
