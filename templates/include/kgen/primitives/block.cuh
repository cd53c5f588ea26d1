// Block barriers, named barriers, and reductions over groups of consecutive threads.
//
// Shared memory: a reduction over more than a warp uses a Scratch of 2 * GroupsPerBlock * Values * (warps of a group)
// floats.
//
// Synchronisation: such a reduction contains one block barrier (group_reduce: two); all threads of the block must call
// it.
#pragma once

#include "kgen/primitives/warp.cuh"

namespace kgen {

// Waits for all threads of the block. A thread that has returned never arrives: hardware lets the others pass, CUDA
// leaves it undefined, and the host layer reports it.
KGEN_DEVICE void sync_block() {
#if KGEN_HOST
    host::barrier(0, 0);
#else
    __syncthreads();
#endif
}

// bar.sync on a named barrier: waits until `threads` threads (a multiple of 32) have arrived at barrier `id`. Ids are
// 1 to 15; 0 is used by sync_block. For warps with different roles.
KGEN_DEVICE void named_barrier_sync(int id, int threads) {
#if KGEN_HOST
    host::barrier(static_cast<u32>(id), static_cast<u32>(threads));
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// bar.arrive on a named barrier: arrives without waiting. The threads that wait in named_barrier_sync for the same
// `id` and `Threads` see what the caller wrote before.
template <int Threads>
KGEN_DEVICE void named_barrier_arrive(int id) {
#if KGEN_HOST
    host::barrier_arrive(static_cast<u32>(id), Threads);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
#endif
}

// How a thread combines the partial results of its group's warps: by shuffles, or by reading all of them from shared
// memory, 16 bytes at a time. Reading has less latency for up to kMostRead warps. For more warps it would cost
// registers and bandwidth, so that shuffles are used there.
enum class Partials { shuffled, read };

// Reduces `Values` floats over each group of `ThreadsPerGroup` consecutive threads. All threads of a group get the
// same bits. The order of operations depends only on the group size.
//
//     __shared__ GroupSum<256, 2>::Scratch scratch;
//     GroupSum<256, 2> sum(scratch);
//     for (...) total = sum(partial);
//
// Groups within a warp use shuffles: no barrier, no scratch. Larger groups need one block barrier per call, so that
// all threads of the block must make the call. One barrier is sufficient because consecutive calls alternate between
// two halves of the scratch: a thread that writes a half in call k + 2 has passed the barrier of call k + 1, which
// every thread reaches after its reads of call k. Therefore each object needs its own scratch.
template <class Op, int ThreadsPerGroup, int GroupsPerBlock, int Values = 1,
          Partials Gather = Partials::shuffled>
class GroupReduce {
    static_assert(is_power_of_two(ThreadsPerGroup), "a group is a power of two threads");
    static_assert(GroupsPerBlock >= 1 && ThreadsPerGroup * GroupsPerBlock <= 1024,
                  "a block has at most 1024 threads");

    static constexpr int kLanes = ThreadsPerGroup < kWarpSize ? ThreadsPerGroup : kWarpSize;
    static constexpr int kWarps = ThreadsPerGroup / kLanes;  // per group
    static constexpr bool kCrossesWarps = kWarps > 1;
    static constexpr int kMostRead = 8;
    static constexpr bool kReads = Gather == Partials::read && kWarps <= kMostRead;
    static constexpr int kTogether = kWarps < 4 ? kWarps : 4;  // floats per access

public:
    struct alignas(kReads ? kTogether * sizeof(float) : sizeof(float)) Scratch {
        float partial[kCrossesWarps ? 2 : 1][kCrossesWarps ? GroupsPerBlock * Values * kWarps : 1];
    };

    KGEN_DEVICE explicit GroupReduce(Scratch& scratch) : scratch_(scratch), half_(0) {}

    KGEN_DEVICE float operator()(float value) {
        static_assert(Values == 1, "pass an array of `Values` floats");
        float values[1] = {value};
        combine(values);
        return values[0];
    }

    KGEN_DEVICE void operator()(float (&values)[Values]) { combine(values); }

private:
    KGEN_DEVICE void combine(float (&values)[Values]) {
#pragma unroll
        for (int i = 0; i < Values; ++i) values[i] = lanes_reduce<kLanes, Op>(values[i]);
        if constexpr (kCrossesWarps) {
            const int rank = thread_rank();
            float* partial = scratch_.partial[half_] + rank / ThreadsPerGroup * (Values * kWarps);
            half_ ^= 1;
            if (rank % kWarpSize == 0) {
#pragma unroll
                for (int i = 0; i < Values; ++i)
                    partial[i * kWarps + rank % ThreadsPerGroup / kWarpSize] = values[i];
            }
            sync_block();
            // Every warp combines the partial results for itself, which saves the second barrier
            // that handing out one warp's result would need.
#pragma unroll
            for (int i = 0; i < Values; ++i) {
                if constexpr (kReads)
                    values[i] = warps_reduce(partial + i * kWarps);
                else
                    values[i] = lanes_reduce<kWarps, Op>(partial[i * kWarps + rank % kWarps]);
            }
        }
    }

    // Reduces the partial results of a group's warps, pairs first.
    static KGEN_DEVICE float warps_reduce(const float* partial) {
        float each[kWarps];
#pragma unroll
        for (int i = 0; i < kWarps; i += kTogether)
            copy_bytes<kTogether * sizeof(float)>(each + i, partial + i);
#pragma unroll
        for (int width = kWarps / 2; width > 0; width /= 2)
#pragma unroll
            for (int i = 0; i < width; ++i) each[i] = Op::apply(each[2 * i], each[2 * i + 1]);
        return each[0];
    }

    Scratch& scratch_;
    int half_;
};

// GroupReduce with the sum, and with the maximum.
template <int ThreadsPerGroup, int GroupsPerBlock, int Values = 1>
using GroupSum = GroupReduce<Sum, ThreadsPerGroup, GroupsPerBlock, Values>;
template <int ThreadsPerGroup, int GroupsPerBlock, int Values = 1>
using GroupMax = GroupReduce<Max, ThreadsPerGroup, GroupsPerBlock, Values>;

// A single reduction with its own static scratch. It keeps no state between calls, so that groups larger than a warp
// need two block barriers: the second one keeps the next call from overwriting values that slower warps still read.
template <class Op, int ThreadsPerGroup, int GroupsPerBlock>
KGEN_DEVICE float group_reduce(float value) {
    if constexpr (ThreadsPerGroup <= kWarpSize) {
        return lanes_reduce<ThreadsPerGroup, Op>(value);
    } else {
        using Reduce = GroupReduce<Op, ThreadsPerGroup, GroupsPerBlock>;
        __shared__ typename Reduce::Scratch scratch;
        Reduce reduce(scratch);
        value = reduce(value);
        sync_block();
        return value;
    }
}

// Returns the sum over each group; see group_reduce.
template <int ThreadsPerGroup, int GroupsPerBlock>
KGEN_DEVICE float group_sum(float value) {
    return group_reduce<Sum, ThreadsPerGroup, GroupsPerBlock>(value);
}

// Returns the maximum over each group; see group_reduce.
template <int ThreadsPerGroup, int GroupsPerBlock>
KGEN_DEVICE float group_max(float value) {
    return group_reduce<Max, ThreadsPerGroup, GroupsPerBlock>(value);
}

}  // namespace kgen
