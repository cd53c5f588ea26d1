// Sums over groups of every size, called in a loop so that scratch is reused.
#include <kgen/primitives/block.cuh>

constexpr int kBlock = 1024;
constexpr int kRounds = 3;

template <int Threads>
KGEN_DEVICE void reduce(const float* in, float* out) {
    constexpr int kGroups = kBlock / Threads;
    __shared__ typename kgen::GroupSum<Threads, kGroups>::Scratch sum_scratch;
    __shared__ typename kgen::GroupMax<Threads, kGroups, 2>::Scratch max_scratch;
    kgen::GroupSum<Threads, kGroups> sum(sum_scratch);
    kgen::GroupMax<Threads, kGroups, 2> most(max_scratch);
    for (int round = 0; round < kRounds; ++round) {
        const int i = round * kBlock + kgen::thread_rank();
        float extremes[2] = {in[i], -in[i]};
        most(extremes);
        out[4 * i] = sum(in[i]);
        out[4 * i + 1] = kgen::group_sum<Threads, kGroups>(in[i]);
        out[4 * i + 2] = extremes[0];
        out[4 * i + 3] = -extremes[1];
    }
}

#define DEFINE(threads)                                                                        \
    extern "C" __global__ void __launch_bounds__(kBlock)                                       \
        reduce_##threads(const float* in, float* out) {                                        \
        reduce<threads>(in, out);                                                              \
    }                                                                                          \
    KGEN_EXPORT(reduce_##threads)

DEFINE(1);
DEFINE(2);
DEFINE(4);
DEFINE(8);
DEFINE(16);
DEFINE(32);
DEFINE(64);
DEFINE(128);
DEFINE(256);
DEFINE(512);
DEFINE(1024);

// Warps 0-1 and 2-3 exchange values at barriers of their own, a different number of times.
extern "C" __global__ void named_barriers(float* out) {
    __shared__ float values[2][64];
    const int half = threadIdx.x / 64;
    const int i = threadIdx.x % 64;
    float value = static_cast<float>(i);
    for (int round = 0; round < 3 + 2 * half; ++round) {
        values[half][i] = value;
        kgen::named_barrier_sync(1 + half, 64);
        value = values[half][63 - i];
        kgen::named_barrier_sync(1 + half, 64);
    }
    out[threadIdx.x] = value;
}
KGEN_EXPORT(named_barriers);
