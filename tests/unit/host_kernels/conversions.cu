// 16-bit storage types to fp32 and back, one by one and in pairs; vector access with every hint.
#include <kgen/primitives/memory.cuh>

using kgen::Cache;
using kgen::i64;

template <class T>
KGEN_DEVICE void widen(const T* in, float* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (2 * i >= n) return;
    const kgen::Vec<T, 2> pair = kgen::load_vec<2, Cache::read_only>(in + 2 * i);
    out[4 * i] = kgen::to_float(pair[0]);
    out[4 * i + 1] = kgen::to_float(pair[1]);
    const kgen::f32x2 packed = kgen::unpack2<T>(kgen::bit_cast<kgen::u32>(pair));
    out[4 * i + 2] = packed.x;
    out[4 * i + 3] = packed.y;
}

template <class T>
KGEN_DEVICE void narrow(const float* in, T* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (2 * i >= n) return;
    const float values[2] = {in[2 * i], in[2 * i + 1]};
    out[4 * i] = kgen::from_float<T>(values[0]);
    out[4 * i + 1] = kgen::from_float<T>(values[1]);
    kgen::store_vec<Cache::streaming>(out + 4 * i + 2, kgen::from_floats<T>(values));
}

extern "C" __global__ void widen_fp16(const kgen::fp16* in, float* out, i64 n) {
    widen(in, out, n);
}
KGEN_EXPORT(widen_fp16);
extern "C" __global__ void widen_bf16(const kgen::bf16* in, float* out, i64 n) {
    widen(in, out, n);
}
KGEN_EXPORT(widen_bf16);
extern "C" __global__ void narrow_fp16(const float* in, kgen::fp16* out, i64 n) {
    narrow(in, out, n);
}
KGEN_EXPORT(narrow_fp16);
extern "C" __global__ void narrow_bf16(const float* in, kgen::bf16* out, i64 n) {
    narrow(in, out, n);
}
KGEN_EXPORT(narrow_bf16);

template <int Bytes, Cache L, Cache S>
KGEN_DEVICE void move(const kgen::u8* in, kgen::u8* out, int& at) {
    for (int i = kgen::thread_rank(); i < 64 / Bytes; i += blockDim.x)
        kgen::store_vec<S>(out + at + i * Bytes, kgen::load_vec<Bytes, L>(in + at + i * Bytes));
    at += 64;
}

template <Cache L, Cache S>
KGEN_DEVICE void move_all_sizes(const kgen::u8* in, kgen::u8* out, int& at) {
    move<1, L, S>(in, out, at);
    move<2, L, S>(in, out, at);
    move<4, L, S>(in, out, at);
    move<8, L, S>(in, out, at);
    move<16, L, S>(in, out, at);
}

// Copies 20 * 64 bytes, 64 at a time, each with another size and hint.
extern "C" __global__ void copy_with_hints(const kgen::u8* in, kgen::u8* out) {
    int at = 0;
    move_all_sizes<Cache::normal, Cache::write_through>(in, out, at);
    move_all_sizes<Cache::streaming, Cache::streaming>(in, out, at);
    move_all_sizes<Cache::read_only, Cache::no_l1>(in, out, at);
    move_all_sizes<Cache::no_l1, Cache::normal>(in, out, at);
}
KGEN_EXPORT(copy_with_hints);

extern "C" __global__ void misaligned_load(const float* in, float* out) {
    out[0] = kgen::load_vec<4>(in + 1)[0];
}
KGEN_EXPORT(misaligned_load);

// What a kernel author may write without kgen::load; the sanitized build must refuse it.
extern "C" __global__ void misaligned_dereference(const float* in, float* out) {
    out[0] = (*reinterpret_cast<const kgen::Vec<float, 4>*>(in + 1))[2];
}
KGEN_EXPORT(misaligned_dereference);
