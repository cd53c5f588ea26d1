// The exchange of split_t (split_t_loop.cuh) by a reducer warpgroup of each CTA: every CTA gathers its own state.
//
// Computes, per round, the state before the segment of each CTA of a head from the sums of all segments:
//
//     1. The consumer warpgroups write the sum of their segment, as T (bf16), to global memory.
//     2. The reducer warps of each CTA load the sums of the CTAs before theirs and the carry (the state before
//        the round), add them in fp32, and store the state as T in shared memory.
//     3. Each CTA's reducer warps compute their share of the next round's carry, or of the final state.
//
// The consumers wait for other CTAs only where they need the state. A state has the bf16 rounding error of each sum.
//
// Layout: sums, carries and states are SwizzledPanels (wgmma.cuh), so an element has one offset in all of them.
// A carry must be exact, and so must the sums that enter it: they are fp32 numbers in two planes. The first plane
// holds the number rounded to bf16, the second the remainder: the 16-bit difference between the bits of the fp32
// number and the bits of the rounded number.
//
// Synchronisation:
//     - kSumsWritten (named barrier): the consumers arrive, the first reducer warp waits.
//     - The grid barrier (GridBarrierCounter): lane 0 of the first reducer warp arrives and waits, once a round.
//     - kSumsVisible (named barrier): all reducer warps wait for the first one.
//     - state_ready_ (mbarrier): the reducer warps arrive, the consumers wait in wait_for_state().
// One grid barrier per round is enough because sums and carries have two buffers, for even and odd rounds: a CTA
// writes a buffer of round n again (in round n + 2, or for it) only after the barrier of round n + 1, where all
// CTAs arrive after their last read of round n.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/grid_barrier.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/chunked/segment_ends.cuh"
#include "kgen/primitives/wgmma.cuh"

namespace kgen {

namespace detail {

// Loads 16 bytes that another CTA has written if `there`, else leaves `piece` as it is. The load is predicated:
// with branches around loads the compiler keeps few of them in flight at once.
KGEN_DEVICE void load_vec_if(bool there, Vec<u32, 4>& vec, const Vec<u32, 4>* from) {
#if KGEN_HOST
    if (there) vec = load(from);
#else
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "setp.ne.b32 there, %5, 0;\n"
        "@there ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(vec[0]), "+r"(vec[1]), "+r"(vec[2]), "+r"(vec[3])
        : "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(there)));
#endif
}

}  // namespace detail

// Keys, Values: features of the tensors; BlockV: value features of a CTA; Consumers, Reducers: threads of a CTA,
// the consumers first; Ctas: CTAs of a head.
template <class T, int Keys, int Values, int BlockV, int Consumers, int Reducers, int Ctas,
          bool HasInitialState, bool HasFinalState>
class GatherExchange {
    using States = SegmentEnds<Keys, Values>;
    static constexpr int kKeys = (Keys + 63) / 64 * 64;
    using Layout = SwizzledPanels<kKeys>;
    static constexpr int kSum = kKeys * BlockV;
    static constexpr int kVec = 8;                   // elements per 16 bytes
    static constexpr int kStripe = Reducers * kVec;  // elements of one vector of each reducer thread
    static constexpr int kVectors = kSum / kStripe;  // of a reducer thread
    static constexpr int kEightRows = 8 * 64;        // elements of a panel
    static constexpr int kRing = 21;                 // vectors in flight per reducer thread
    // Named barriers.
    static constexpr int kSumsWritten = 1, kSumsVisible = 3;

    static_assert(detail::kIsBf16<T>, "the upper half of fp32");
    static_assert(BlockV % 64 == 0 && kSum % kStripe == 0, "a state is whole panels and whole stripes");

public:
    static constexpr int kScratchBytes = 0;

    // Offset of an element of a state or a sum.
    static KGEN_DEVICE int offset(int key, int value) {
        return Layout::offset(key, value / 8) + value % 8;
    }

    // sums: T [heads and blocks of value features][even, odd round][bf16, remainder][Ctas][kSum]; carries: the
    // same without Ctas.
    KGEN_DEVICE GatherExchange(const CtaGroup& cta, i32* counters, float* sums, T* carries)
        : counter_(counters, cta.group),
          sums_(reinterpret_cast<T*>(sums) + cta.group * 4 * Ctas * kSum),
          carries_(carries + cta.group * 4 * kSum),
          rank_(cta.rank) {}

    KGEN_DEVICE void init_mbarrier() {  // by one thread; a block barrier follows
        mbarrier_init(state_ready_, Reducers / kWarpSize);
        mbarrier_init_fence();
    }
    KGEN_DEVICE int rank() const { return rank_; }

    // Whether the round's sums are needed exactly.
    static KGEN_DEVICE bool needs_remainders(bool is_last) { return HasFinalState || !is_last; }

    // Called by the consumers: writes 16 x 16 elements of the sum, two tiles of accumulators of a warp. After the
    // exchange between lanes (quad_of_row) a lane writes four elements from (key, value) on and four from
    // (key + 8, value) on. If needs_remainders(), the elements have passed round_half_up().
    KGEN_DEVICE void put(int round, int key, int value, const float (&left)[4],
                         const float (&right)[4]) const {
        T* there = sum(round, false, rank_) + offset(key, value);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store<Cache::evict_last>(reinterpret_cast<Vec<u32, 2>*>(there + half * kEightRows),
                                     quad_of_row<T>(left, right, half));
    }
    // Called by the consumers: writes the remainders of one tile, two from (key, value) on, two from (key + 8, value).
    KGEN_DEVICE void put_remainders(int round, int key, int value, const float (&tile)[4]) const {
        T* there = sum(round, true, rank_) + offset(key, value);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store<Cache::evict_last>(reinterpret_cast<Vec<u32, 1>*>(there + half * kEightRows),
                                     {{remainders(tile[2 * half], tile[2 * half + 1])}});
    }
    // Moves a number halfway between two bf16 numbers a little away from zero, so that rounding goes up and every
    // remainder fits 16 bits.
    static KGEN_DEVICE float round_half_up(float x) {
        const u32 bits = bit_cast<u32>(x);
        return bit_cast<float>((bits & 0xffffu) == 0x8000u ? bits | 1u : bits);
    }
    // Called by the consumers when the sum is written. Does not wait for other threads.
    KGEN_DEVICE void sums_written() const {
        griddepcontrol_wait();  // for the kernel that clears the counters; returns at once after the first time
        named_barrier_arrive<Consumers + Reducers>(kSumsWritten);
    }
    // Called by the consumers: waits until the state before the segment lies in shared memory.
    KGEN_DEVICE void wait_for_state(int round) {
        mbarrier_wait(state_ready_, static_cast<u32>(round % 2));
    }

    // Called by the reducer warps before the first round: writes the carry of round 0.
    KGEN_DEVICE void load_initial_state(const States& states) const {
        if constexpr (HasInitialState)
            for_own_vectors([&](int at) {
                float vec[kVec];
                const int key = key_of(at), value = value_of(at);
#pragma unroll
                for (int i = 0; i < kVec; ++i) vec[i] = states.first(key, value + i);
                store_carry(0, at, vec);
            });
    }

    // Called by the reducer warps once a round: writes the state before the segment to `state`, and the next carry.
    KGEN_DEVICE void reduce(T* state, int round, bool is_last, const States& states) {
        griddepcontrol_wait();
        const bool has_state = carries(round) || rank_ > 0;
        if (!has_state) signal_consumers();
        // The state is the carry, if there is one, plus the sums of the CTAs before this one.
        const int at = kVec * reducer_thread();
        const T* cta_sums = sum(round, false, 0) + at;
        const T* first = carries(round) ? carry(round, false) + at : cta_sums;
        const int others = carries(round) ? rank_ : rank_ - 1;
        if (!carries(round)) cta_sums += kSum;
        state += at;
        wait_for_all_sums();
        if (has_state) {
            // cp.async brings the first term to `state` without registers; each thread adds to the elements
            // that it copied itself. The loads of the other terms are in flight at the same time.
#pragma unroll
            for (int i = 0; i < kVectors; ++i) cp_async<16>(state + i * kStripe, first + i * kStripe);
            add<Ctas - 1>(state, cta_sums, others);
            signal_consumers();
        }
        if (needs_remainders(is_last)) reduce_carry(round, is_last, states);
    }

private:
    // sum: a CTA's sum of a round; carry: the carry of a round. With `rest` they return the plane of remainders instead
    // of the plane of bf16 numbers. carries: whether the round has a carry.
    KGEN_DEVICE T* sum(int round, bool rest, int cta) const {
        return sums_ + ((round % 2 * 2 + rest) * Ctas + cta) * kSum;
    }
    KGEN_DEVICE T* carry(int round, bool rest) const {
        return carries_ + (round % 2 * 2 + rest) * kSum;
    }
    static KGEN_DEVICE bool carries(int round) { return HasInitialState || round > 0; }

    // The remainders of two numbers as 16-bit integers. Halfway numbers are rounded up: with rounding to even the
    // remainders would have 2^16 + 1 values.
    static KGEN_DEVICE u32 remainders(float first, float second) {
        const u32 upper = pack2<T>(round_half_up(first), round_half_up(second));
        const u32 to_first = bit_cast<u32>(first) - (upper << 16);
        const u32 to_second = bit_cast<u32>(second) - (upper & 0xffff0000u);
        return (to_first & 0xffffu) | to_second << 16;
    }

    // Computed anew instead of kept in a register: the ring needs the registers.
    static KGEN_DEVICE int reducer_thread() { return opaque(thread_rank()) - Consumers; }

    // Waits for the sums of all CTAs: the grid barrier. The first reducer warp does it for the CTA. Its named
    // barriers make the consumers' sums, and the carry of the round before, visible to the other CTAs.
    KGEN_DEVICE void wait_for_all_sums() {
        if (reducer_thread() < kWarpSize) {
            named_barrier_sync(kSumsWritten, Consumers + Reducers);
            if (lane_id() == 0) {
                counter_.arrive();
                counter_.wait();
            }
            sync_warp();
        } else {
            named_barrier_arrive<Consumers + Reducers>(kSumsWritten);
        }
        named_barrier_sync(kSumsVisible, Reducers);
    }

    KGEN_DEVICE void signal_consumers() {
        fence_proxy_async();
        sync_warp();
        if (lane_id() == 0) mbarrier_arrive(state_ready_);
    }

    // Adds the sums of `count` CTAs to the term that cp.async brings to `state`, and writes the state. `count` is 0,
    // or more than Most / 2. Loads are issued kSlots vectors ahead into a ring of registers, CTA by CTA; kLap
    // vectors of each CTA are a whole number of turns of the ring.
    template <int Most>
    KGEN_DEVICE void add(T* state, const T* cta_sums, int count) const {
        if constexpr (Most > 1)
            if (count <= Most / 2) return add<Most / 2>(state, cta_sums, count);
        constexpr int kLap = Most > kRing / 2 ? 4 : min(kRing / Most, kVectors);
        constexpr int kTurns = (kLap * Most + kRing - 1) / kRing;
        constexpr int kSlots = kLap * Most / kTurns;
        static_assert(kLap * Most % kTurns == 0, "every turn begins at the same slot");
        Vec<u32, 4> ring[kSlots] = {};
        const auto start = [&](int first, int step) {
            const int cta = step % Most, vec = step / Most;
            Vec<u32, 4>& slot = ring[step % kSlots];
            if (cta > Most / 2) slot = {};  // if this CTA's sum does not exist, zeros are added
            detail::load_vec_if(
                first + vec < kVectors && (cta <= Most / 2 || cta < count), slot,
                reinterpret_cast<const Vec<u32, 4>*>(cta_sums + cta * kSum + vec * kStripe));
        };
        if (count > 0)  // untested: two rounds of the exchange are too much work for the host
#pragma unroll
            for (int step = 0; step < kSlots; ++step) start(0, step);
        cp_async_wait_all();
        if (count == 0) return;  // untested: as above
#pragma unroll 1
        for (int first = 0; first < kVectors; first += kLap) {
#pragma unroll
            for (int vec = 0; vec < kLap; ++vec) {
                if (kVectors % kLap != 0 && first + vec >= kVectors) break;
                auto* there = reinterpret_cast<Vec<u32, 4>*>(state + vec * kStripe);
                const Vec<u32, 4> first_term = *there;
                float sums[kVec] = {};
                add_vec(sums, first_term);
#pragma unroll
                for (int cta = 0; cta < Most; ++cta) {
                    const int step = vec * Most + cta;
                    add_vec(sums, ring[step % kSlots]);
                    start(first, step + kSlots);
                }
                *there = packed(sums);
            }
            state += kLap * kStripe;
            cta_sums += kLap * kStripe;
        }
    }

    static KGEN_DEVICE void add_vec(float (&sums)[kVec], const Vec<u32, 4>& vec) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 two = unpack2<T>(vec[i]);
            sums[2 * i] += two.x;
            sums[2 * i + 1] += two.y;
        }
    }

    static KGEN_DEVICE Vec<u32, 4> packed(const float (&sums)[kVec]) {
        return {{pack2<T>(sums[0], sums[1]), pack2<T>(sums[2], sums[3]), pack2<T>(sums[4], sums[5]),
                 pack2<T>(sums[6], sums[7])}};
    }

    // The next round's carry, or the final state. Each CTA of the head computes its share.
    KGEN_DEVICE void reduce_carry(int round, bool is_last, const States& states) const {
        for_own_vectors([&](int at) {
            float sums[kVec] = {};
            if (carries(round)) add_whole(sums, carry(round, false) + at, carry(round, true) + at);
#pragma unroll
            for (int cta = 0; cta < Ctas; ++cta)
                add_whole(sums, sum(round, false, cta) + at, sum(round, true, cta) + at);
            if (!is_last) {  // untested: two rounds are too much work for the host
                store_carry(round + 1, at, sums);
            } else if constexpr (HasFinalState) {
#pragma unroll
                for (int i = 0; i < kVec; ++i)
                    states.store_last(key_of(at), value_of(at) + i, sums[i]);
            }
        });
    }

    static KGEN_DEVICE void add_whole(float (&sums)[kVec], const T* vec, const T* remainders) {
        const Vec<u32, 4> upper = load_vec16(vec), rest = load_vec16(remainders);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = static_cast<int>(rest[i] << 16) >> 16, second = static_cast<int>(rest[i]) >> 16;
            sums[2 * i] += bit_cast<float>((upper[i] << 16) + static_cast<u32>(first));
            sums[2 * i + 1] += bit_cast<float>((upper[i] & 0xffff0000u) + static_cast<u32>(second));
        }
    }

    // Calls body(offset) for this thread's vectors of a state. The vectors are divided among all CTAs of the head.
    template <class Body>
    KGEN_DEVICE void for_own_vectors(Body body) const {
#pragma unroll 1
        for (int at = rank_ * kStripe + kVec * reducer_thread(); at < kSum; at += Ctas * kStripe) body(at);
    }

    // Features of the elements from offset `at` on: the inverse of offset().
    static KGEN_DEVICE int key_of(int at) { return at % Layout::kPanel / 64; }
    static KGEN_DEVICE int value_of(int at) {
        return at / Layout::kPanel * 64 + (at / kVec % 8 ^ key_of(at) % 8) * kVec;
    }

    KGEN_DEVICE void store_carry(int round, int at, const float (&values)[kVec]) const {
        Vec<u32, 4> left;
        float rounded[kVec];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = remainders(values[2 * i], values[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) rounded[i] = round_half_up(values[i]);
        store_vec16(carry(round, false) + at, packed(rounded));
        store_vec16(carry(round, true) + at, left);
    }

    static KGEN_DEVICE Vec<u32, 4> load_vec16(const T* vec) {
        return load<Cache::evict_last>(reinterpret_cast<const Vec<u32, 4>*>(vec));
    }
    static KGEN_DEVICE void store_vec16(T* vec, const Vec<u32, 4>& values) {
        store<Cache::evict_last>(reinterpret_cast<Vec<u32, 4>*>(vec), values);
    }

    GridBarrierCounter<Ctas> counter_;
    T *sums_, *carries_;
    int rank_;
    Mbarrier state_ready_;
};

}  // namespace kgen
