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

#define PASS_ON(name, blocks)                                                               \
    extern "C" __global__ void name(float* values, kgen::i32* counters, float* out) {       \
        pass_on<blocks>(values, counters, out);                                             \
    }                                                                                       \
    KGEN_EXPORT_CTA_GROUPS(name, blocks)

PASS_ON(pass_on_4, 4);
PASS_ON(pass_on_16, 16);
