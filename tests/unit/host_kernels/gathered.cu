// States before the segments of a group's blocks, gathered by warps of each block: the exchange alone, with
// sums that are given.
#include <kgen/primitives/block.cuh>
#include <kgen/linear_attention/split_t_exchange_gather.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH == 900

namespace {

constexpr int kConsumers = 128, kServers = 128;

// given, states: [groups][rounds][Blocks][keys][slice], of whole panels; initial, end: [groups][Keys][Values].
// A state that does not exist is not written.
template <int Keys, int Values, int Ctas, bool HasInitialState, bool HasFinalState>
KGEN_DEVICE void gather(const float* given, const float* initial, float* states, float* end,
                        float* sums, kgen::bf16* carries, kgen::i32* counters, int rounds) {
    using T = kgen::bf16;
    constexpr int kKeys = (Keys + 63) / 64 * 64, kSlice = (Values + 63) / 64 * 64;
    constexpr int kSum = kKeys * kSlice;
    using Exchange = kgen::GatherExchange<T, Keys, Values, kSlice, kConsumers, kServers, Ctas,
                                            HasInitialState, HasFinalState>;
    const kgen::CtaGroup place = kgen::cta_group<Ctas>();
    T* state = reinterpret_cast<T*>(kgen::align_panels(kgen::dynamic_smem<char>()));
    Exchange& exchange = *reinterpret_cast<Exchange*>(state + kSum);
    const int thread = kgen::thread_rank();
    if (thread == 0) {
        exchange = Exchange(place, counters, sums, carries);
        exchange.init_mbarrier();
    }
    kgen::sync_block();
    const kgen::i64 at = place.group * Keys * Values;
    const kgen::SegmentEnds<Keys, Values> ends{initial + at, end + at, Values};
    if (thread >= kConsumers) exchange.load_initial_state(ends);

    const kgen::MmaLane lane = kgen::mma_lane();
    const int row = 16 * kgen::warp_in_warpgroup() + lane.g;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        const bool is_last = round == rounds - 1;
        const kgen::i64 own = ((place.group * rounds + round) * Ctas + place.rank) * kSum;
        if (thread >= kConsumers) {
            exchange.reduce(state, round, is_last, ends);
        } else {
            for (int key = row; key < kKeys; key += 64)
                for (int value = 0; value < kSlice; value += 16) {
                    float tiles[2][4];
                    for (int i = 0; i < 8; ++i)
                        tiles[i / 4][i % 4] = given[own + (key + i % 4 / 2 * 8) * kSlice + value +
                                                    i / 4 * 8 + 2 * lane.q + i % 2];
                    for (int i = 0; i < 8 && exchange.needs_remainders(is_last); ++i) {
                        float& x = tiles[i / 4][i % 4];
                        if (i % 4 == 0)
                            exchange.put_remainders(round, key, value + 2 * i + 2 * lane.q, tiles[i / 4]);
                        x = Exchange::round_half_up(x);
                    }
                    exchange.put(round, key, value + kgen::column_of_quad(), tiles[0], tiles[1]);
                }
            exchange.sums_written();
            exchange.wait_for_state(round);
            // At once: the servers have told that it is there.
            if (HasInitialState || round > 0 || place.rank > 0)
                for (int i = thread; i < kSum; i += kConsumers)
                    states[own + i] =
                        kgen::to_float(state[Exchange::offset(i / kSlice, i % kSlice)]);
        }
        kgen::sync_block();
    }
}

}  // namespace

extern "C" __global__ void clear(kgen::i32* counters, kgen::i64 groups) {
    kgen::clear_grid_barriers(counters, groups);
}
KGEN_EXPORT(clear);

#define GATHER(name, keys, values, blocks, begins, ends)                                           \
    extern "C" __global__ void __launch_bounds__(kConsumers + kServers)                              \
        name(const float* given, const float* initial, float* states, float* end, float* sums,     \
             kgen::bf16* carries, kgen::i32* counters, int rounds) {                               \
        gather<keys, values, blocks, begins, ends>(given, initial, states, end, sums, carries,     \
                                                   counters, rounds);                              \
    }                                                                                              \
    KGEN_EXPORT_CTA_GROUPS(name, blocks)

// Names: keys, values, blocks; whether there is a state to begin with, and one to hand out.
GATHER(gather_64_64_4_00, 64, 64, 4, false, false);
GATHER(gather_48_64_4_11, 48, 64, 4, true, true);
GATHER(gather_128_88_8_01, 128, 88, 8, false, true);
GATHER(gather_64_128_8_10, 64, 128, 8, true, false);
GATHER(gather_128_128_8_00, 128, 128, 8, false, false);
GATHER(gather_64_64_16_11, 64, 64, 16, true, true);
GATHER(gather_64_64_16_00, 64, 64, 16, false, false);

#endif
