// Blocks that meet at counters in global memory: places, barriers, and several groups.
#include <kgen/primitives/block.cuh>
#include <kgen/primitives/grid_barrier.cuh>

namespace {

constexpr int kThreads = 64;

// A place's numbers go once around its group, a place further at each barrier.
template <int Blocks>
KGEN_DEVICE void pass_on(float* values, kgen::i32* counters, float* out) {
    const kgen::CtaGroup place = kgen::cta_group<Blocks>();
    auto& barrier = *kgen::dynamic_smem<kgen::GridBarrier<Blocks>>();
    if (kgen::thread_rank() == 0) barrier = kgen::GridBarrier<Blocks>(counters, place.group);
    kgen::sync_block();
    const int thread = kgen::thread_rank();
    float* group = values + place.group * Blocks * kThreads;
    float* mine = group + place.rank * kThreads + thread;
    float* next = group + (place.rank + 1) % Blocks * kThreads + thread;
    *mine = static_cast<float>((place.group * Blocks + place.rank) * kThreads + thread);
    barrier.template arrive<kThreads>(0);
    barrier.wait(0);
#pragma unroll 1
    for (int step = 0; step < Blocks; ++step) {
        const float x = *mine;
        barrier.template arrive<kThreads>(1);
        barrier.wait(1);
        *next = x + 0.5f;
        barrier.template arrive<kThreads>(0);
        barrier.wait(0);
    }
    out[mine - values] = *mine;
}

}  // namespace

extern "C" __global__ void clear(kgen::i32* counters, kgen::i64 groups) {
    kgen::clear_grid_barriers(counters, groups);
}
KGEN_EXPORT(clear);

// Each block announces its number before it writes it: wrong, whoever runs first.
extern "C" __global__ void announces_early(float* values, kgen::i32* counters, float* out) {
    const kgen::CtaGroup place = kgen::cta_group<4>();
    kgen::GridBarrier<4> barrier(counters, place.group);
    barrier.arrive<kThreads>(0);
    const int thread = kgen::thread_rank();
    values[blockIdx.x * kThreads + thread] = static_cast<float>(blockIdx.x);
    barrier.wait(0);
    const unsigned next = place.group * 4 + (place.rank + 1) % 4;
    out[blockIdx.x * kThreads + thread] = values[next * kThreads + thread];
}
KGEN_EXPORT_CTA_GROUPS(announces_early, 4);

// Waits for one arrival more than there are.
extern "C" __global__ void waits_for_more(float*, kgen::i32* counters, float*) {
    kgen::GridBarrierCounter<4> counter(counters, 0);
    if (kgen::thread_rank() == 0) {
        if (blockIdx.x != 2) counter.arrive();
        counter.wait();
    }
}
KGEN_EXPORT_CTA_GROUPS(waits_for_more, 4);

#define PASS_ON(name, blocks)                                                               \
    extern "C" __global__ void name(float* values, kgen::i32* counters, float* out) {       \
        pass_on<blocks>(values, counters, out);                                             \
    }                                                                                       \
    KGEN_EXPORT_CTA_GROUPS(name, blocks)

PASS_ON(pass_on_4, 4);
PASS_ON(pass_on_16, 16);
