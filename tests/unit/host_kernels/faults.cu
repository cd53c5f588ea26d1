// Kernels that are wrong, each in one way.
#include <kgen/primitives/cp_async.cuh>
#include <kgen/primitives/block.cuh>

extern "C" __global__ void divergent_shuffle(float* out) {
    float value = 1.0f;
    if (kgen::lane_id() < 16) value += kgen::shfl_xor(value, 1);
    out[kgen::thread_rank()] = value;
}
KGEN_EXPORT(divergent_shuffle);

// Half of a warp sits in a shuffle, the other half at the barrier.
extern "C" __global__ void shuffle_against_barrier(float* out) {
    float value = 1.0f;
    if (kgen::lane_id() < 16) value += kgen::shfl_xor(value, 1);
    kgen::sync_block();
    out[kgen::thread_rank()] = value;
}
KGEN_EXPORT(shuffle_against_barrier);

extern "C" __global__ void divergent_barrier(float* out) {
    if (threadIdx.x >= 32) return;
    kgen::sync_block();
    out[threadIdx.x] = 1.0f;
}
KGEN_EXPORT(divergent_barrier);

extern "C" __global__ void different_masks(float* out) {
    const kgen::u32 mask = kgen::lane_id() < 16 ? 0xffffffffu : 0xffff0000u;
    out[kgen::thread_rank()] = kgen::shfl_xor(1.0f, 1, mask);
}
KGEN_EXPORT(different_masks);

extern "C" __global__ void mask_without_self(float* out) {
    out[kgen::thread_rank()] = kgen::shfl(1.0f, 0, 0x0000ffffu);
}
KGEN_EXPORT(mask_without_self);

// Legal, but lanes 0-15 read from lanes that take no part: they get NaN.
extern "C" __global__ void source_outside_mask(float* out) {
    float value = 1.0f;
    if (kgen::lane_id() < 16) value = kgen::shfl_xor(1.0f, 16, 0x0000ffffu);
    out[kgen::thread_rank()] = value;
}
KGEN_EXPORT(source_outside_mask);

extern "C" __global__ void bad_width(float* out) {
    out[kgen::thread_rank()] = kgen::shfl_xor(1.0f, 1, kgen::kFullMask, 12);
}
KGEN_EXPORT(bad_width);

extern "C" __global__ void named_barrier_count(float* out) {
    kgen::named_barrier_sync(1, threadIdx.x < 32 ? 64 : 96);
    out[kgen::thread_rank()] = 1.0f;
}
KGEN_EXPORT(named_barrier_count);

// Reverse a block through shared memory; `sync` 0 leaves the barrier out.
extern "C" __global__ void reverse(const float* in, float* out, int sync) {
    __shared__ float values[64];
    values[threadIdx.x] = in[threadIdx.x];
    if (sync) kgen::sync_block();
    out[threadIdx.x] = values[63 - threadIdx.x];
}
KGEN_EXPORT(reverse);

// Each thread uses what the thread one lower wrote: right in rank order even without a barrier.
extern "C" __global__ void from_lower_neighbour(const float* in, float* out, int sync) {
    __shared__ float values[64];
    values[threadIdx.x] = in[threadIdx.x];
    if (sync) kgen::sync_block();
    out[threadIdx.x] = values[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}
KGEN_EXPORT(from_lower_neighbour);

template <class T>
KGEN_DEVICE T* shared_of_template() {
    __shared__ T values[8];
    return values;
}

// out: static, static of a template, dynamic shared memory, none of it written before.
// Block 0 writes all of it afterwards, which block 1 must not see.
extern "C" __global__ void uninitialised(float* out) {
    __shared__ float values[8];
    float* places[3] = {values, shared_of_template<float>(), kgen::dynamic_smem<float>()};
    for (int i = 0; i < 3; ++i) {
        out[3 * blockIdx.x + i] = places[i][3];
        for (int j = 0; j < 8; ++j) places[i][j] = 1.0f;
    }
}
KGEN_EXPORT(uninitialised);

extern "C" __global__ void write_past_smem(int index) {
    kgen::dynamic_smem<float>()[index] = 1.0f;
}
KGEN_EXPORT(write_past_smem);

extern "C" __global__ void read_past_smem(float* out, int index) {
    *out = kgen::dynamic_smem<float>()[index];
}
KGEN_EXPORT(read_past_smem);

extern "C" __global__ void write_past_static(float* out, int index) {
    __shared__ float values[8];
    values[index] = 1.0f;
    kgen::sync_block();
    *out = values[0];
}
KGEN_EXPORT(write_past_static);

extern "C" __global__ void write_at(float* out, int index) { out[index] = 1.0f; }
KGEN_EXPORT(write_at);

extern "C" __global__ void read_at(const float* in, float* out, int index) {
    kgen::sync_block();
    out[0] = in[index];
}
KGEN_EXPORT(read_at);

extern "C" __global__ void copy_past_end(const float* in, float* out, int index) {
    __shared__ float value;
    kgen::cp_async<4>(&value, in + index);
    kgen::cp_async_wait_all();
    *out = value;
}
KGEN_EXPORT(copy_past_end);

// A copy that is waited for before another thread writes to its target (0), behind that (1), or never (2).
extern "C" __global__ void write_over_copy(const float* in, float* out, int when) {
    float* value = kgen::dynamic_smem<float>();
    if (threadIdx.x == 0) {
        kgen::cp_async<4>(value, in);
        kgen::cp_async_commit();
        if (when == 0) kgen::cp_async_wait_all();
    }
    kgen::sync_block();
    if (threadIdx.x == 1) *value = 2.0f;
    kgen::sync_block();
    if (threadIdx.x == 0 && when == 1) kgen::cp_async_wait_all();
    if (threadIdx.x == 1) *out = *value;
}
KGEN_EXPORT(write_over_copy);

extern "C" __global__ void write_past_local(float* out, int index) {
    volatile float values[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    kgen::sync_block();
    values[index] = 5.0f;
    out[threadIdx.x] = values[0];
}
KGEN_EXPORT(write_past_local);

// Much stack per thread, alive over barriers.
extern "C" __global__ void use_stack(float* out, int rounds) {
    volatile float values[4096];
    for (int i = 0; i < 4096; ++i) values[i] = static_cast<float>(threadIdx.x);
    for (int i = 0; i < rounds; ++i) kgen::sync_block();
    float sum = 0.0f;
    for (int i = 0; i < 4096; ++i) sum += values[i];
    out[threadIdx.x] = sum;
}
KGEN_EXPORT(use_stack);

extern "C" __global__ void never_ends() {
    for (;;) kgen::sync_block();
}
KGEN_EXPORT(never_ends);
