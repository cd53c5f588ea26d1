// States before the segments of a group's blocks (segment_walk.cuh), by warps of each block that do nothing
// else, with one barrier of the group a round (meeting.cuh). The others never stand still for other blocks,
// but where they need the state before their segment.
//
// Each block writes its sum as T to global memory. Behind the barrier its serving warps gather the state
// before the segment: they add what the blocks before it wrote, in fp32, and leave it as T in shared
// memory. All of it lies in the order of panels (wgmma.cuh), so that places in memory are all that has to
// agree. A state errs by a rounding of each sum.
//
// What goes on to the next round, or is handed out, must not: it is fp32 in two planes, T and the rest. T
// is bf16, the upper half of fp32, and a rest what it takes from there to the number itself, as 16 bits of
// an integer. All blocks make a part each of the next round's carry, and states are sums of its upper half.
//
// Sums and carries have two places, for even rounds and for odd ones. One barrier a round is enough then:
// what a block writes in round n + 2, and what it makes of round n + 1 for round n + 2, it writes behind
// the barrier of round n + 1; and there the others arrive with all of what they read in round n read.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "bulk.cuh"
#include "chunk_rows.cuh"
#include "dependent_launch.cuh"
#include "math.cuh"
#include "meeting.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "segment_ends.cuh"
#include "wgmma.cuh"

namespace kgen {

namespace detail {

// Read 16 bytes that another block has written, or leave `piece` as it is. A condition as part of the
// instruction: with jumps around loads the compiler puts few of them on their way together.
KGEN_DEVICE void load_piece_if(bool there, Vec<u32, 4>& piece, const Vec<u32, 4>* from) {
#if KGEN_HOST
    if (there) piece = load(from);
#else
    asm volatile(
        "{\n"
        ".reg .pred there;\n"
        "setp.ne.b32 there, %5, 0;\n"
        "@there ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(piece[0]), "+r"(piece[1]), "+r"(piece[2]), "+r"(piece[3])
        : "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(there)));
#endif
}

}  // namespace detail

// Keys, Values: the tensors' features; Slice: value features of a block; Workers, Servers: threads of a
// block, the workers first. Begins, Ends: whether there are states to begin with and to hand out.
template <class T, int Keys, int Values, int Slice, int Workers, int Servers, int Blocks, bool Begins,
          bool Ends>
class GatheredExchange {
    using States = SegmentEnds<Keys, Values>;
    static constexpr int kKeys = (Keys + 63) / 64 * 64;
    using Layout = Panels<kKeys>;
    static constexpr int kSum = kKeys * Slice;
    static constexpr int kPiece = 8;                         // values, 16 bytes
    static constexpr int kSweep = Servers * kPiece;          // values of one piece of each server
    static constexpr int kPieces = kSum / kSweep;            // of a server
    static constexpr int kEightRows = 8 * 64;                // values, of a panel
    static constexpr int kRing = 21;                         // pieces of a server that are on their way
    // Named barriers: all but the first server's warp pass the one, and all servers wait at the other.
    static constexpr int kWritten = 1, kMet = 3;

    static_assert(detail::kIsBf16<T>, "the upper half of fp32");
    static_assert(Slice % 64 == 0 && kSum % kSweep == 0, "a state is whole panels and whole sweeps");

public:
    static constexpr int kRoomBytes = 0;

    // Where a value of a state or sum is.
    static KGEN_DEVICE int offset(int key, int value) {
        return Layout::offset(key, value / 8) + value % 8;
    }

    // sums: T [groups][even rounds, odd ones][T, rests][Blocks][kSum]; carries: the same without Blocks.
    KGEN_DEVICE GatheredExchange(const GroupPlace& place, i32* counters, float* sums, T* carries)
        : counter_(counters, place.group),
          sums_(reinterpret_cast<T*>(sums) + place.group * 4 * Blocks * kSum),
          carries_(carries + place.group * 4 * kSum),
          rank_(place.rank) {}

    KGEN_DEVICE void make_barrier() {  // by one thread, before the others
        mbarrier_init(taken_, Servers / kWarpSize);
        mbarrier_init_fence();
    }
    KGEN_DEVICE int rank() const { return rank_; }

    // Whether rests are wanted.
    static KGEN_DEVICE bool goes_on(bool is_last) { return Ends || !is_last; }

    // By the workers: a warp's part of the sum, 16 x 16 features as two tiles of accumulators. Of them the
    // lane has, once its neighbours have swapped (quad_of_row), four from `key` and `value` on, and four of
    // eight keys further on. If rests are wanted, of what past_half() leaves.
    KGEN_DEVICE void put(int round, int key, int value, const float (&left)[4],
                         const float (&right)[4]) const {
        T* there = sum(round, false, rank_) + offset(key, value);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store<Cache::evict_last>(reinterpret_cast<Vec<u32, 2>*>(there + half * kEightRows),
                                     quad_of_row<T>(left, right, half));
    }
    // The rests: of one tile, two from `key` and `value` on, and two of eight keys further on.
    KGEN_DEVICE void put_rests(int round, int key, int value, const float (&tile)[4]) const {
        T* there = sum(round, true, rank_) + offset(key, value);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store<Cache::evict_last>(reinterpret_cast<Vec<u32, 1>*>(there + half * kEightRows),
                                     {{rests(tile[2 * half], tile[2 * half + 1])}});
    }
    // A number that is halfway between two of T, a little further from zero: T is rounded up.
    static KGEN_DEVICE float past_half(float x) {
        const u32 bits = bit_cast<u32>(x);
        return bit_cast<float>((bits & 0xffffu) == 0x8000u ? bits | 1u : bits);
    }
    // All of it is written. Nobody waits.
    KGEN_DEVICE void sums_written() const {
        wait_for_earlier_kernel();  // who cleared the counters; at once but the first time
        pass_named<Workers + Servers>(kWritten);
    }
    // The state before the segment is there.
    KGEN_DEVICE void take(int round) {
#if KGEN_HOST
        host::cluster_barrier();
#endif
        mbarrier_wait(taken_, static_cast<u32>(round % 2));
    }

    // By the servers, before the first round.
    KGEN_DEVICE void begin(const States& states) const {
        if constexpr (Begins)
            for_my_pieces([&](int at) {
                float piece[kPiece];
                const int key = key_of(at), value = value_of(at);
#pragma unroll
                for (int i = 0; i < kPiece; ++i) piece[i] = states.first(key, value + i);
                store_carry(0, at, piece);
            });
    }

    // By the servers, once a round: leave the state before the segment in `state`, and what goes on.
    KGEN_DEVICE void serve(T* state, int round, bool is_last, const States& states) {
        wait_for_earlier_kernel();
        const bool has_state = carries(round) || rank_ > 0;
        if (!has_state) tell_workers();
        // The state is a sum of the carry and the sums of the blocks before this one, or of those alone.
        const int at = kPiece * server();
        const T* blocks = sum(round, false, 0) + at;
        const T* first = carries(round) ? carry(round, false) + at : blocks;
        const int others = carries(round) ? rank_ : rank_ - 1;
        if (!carries(round)) blocks += kSum;
        state += at;
        meet();
        if (has_state) {
            // The first term comes to its place by copies, which need no registers. A server adds to what
            // it has copied itself. Those that come after are on their way together with it.
#pragma unroll
            for (int i = 0; i < kPieces; ++i) cp_async<16>(state + i * kSweep, first + i * kSweep);
            add<Blocks - 1>(state, blocks, others);
            tell_workers();
        }
        if (goes_on(is_last)) pass_on(round, is_last, states);
    }

private:
    // Of round `round`: a block's sum, and the state before the round, as T or what that leaves; and
    // whether there is such a state.
    KGEN_DEVICE T* sum(int round, bool rest, int block) const {
        return sums_ + ((round % 2 * 2 + rest) * Blocks + block) * kSum;
    }
    KGEN_DEVICE T* carry(int round, bool rest) const {
        return carries_ + (round % 2 * 2 + rest) * kSum;
    }
    static KGEN_DEVICE bool carries(int round) { return Begins || round > 0; }

    // Of two numbers, what it takes from T to them, once those are rounded up that are halfway: to both
    // sides there would be one number too many.
    static KGEN_DEVICE u32 rests(float first, float second) {
        const u32 upper = pack2<T>(past_half(first), past_half(second));
        const u32 to_first = bit_cast<u32>(first) - (upper << 16);
        const u32 to_second = bit_cast<u32>(second) - (upper & 0xffff0000u);
        return (to_first & 0xffffu) | to_second << 16;
    }

    // Computed anew: registers are for the ring.
    static KGEN_DEVICE int server() { return computed_here(thread_rank()) - Workers; }

    // Wait for the sums of all blocks. The first server's warp does it for the block: it sees what the
    // workers have written, and what servers have made of the round before, and shows it to the others.
    KGEN_DEVICE void meet() {
#if KGEN_HOST
        host::cluster_barrier();
#else
        if (server() < kWarpSize) {
            sync_named(kWritten, Workers + Servers);
            if (lane_id() == 0) {
                counter_.arrive();
                counter_.wait();
            }
            sync_warp();
        } else {
            pass_named<Workers + Servers>(kWritten);
        }
        sync_named(kMet, Servers);
#endif
    }

    KGEN_DEVICE void tell_workers() {
        fence_proxy_async();
        sync_warp();
        if (lane_id() == 0) mbarrier_arrive(taken_);
    }

    // Add the sums of `count` blocks, of which there are more than half of `Most` if there are any, to what
    // comes to `state`, and write the state. Pieces are on their way long before they are added, as many as
    // there are registers for: a ring of them, taken block by block, and kLap pieces of each block are
    // whole turns of it.
    template <int Most>
    KGEN_DEVICE void add(T* state, const T* blocks, int count) const {
        if constexpr (Most > 1)
            if (count <= Most / 2) return add<Most / 2>(state, blocks, count);
        constexpr int kLap = Most > kRing / 2 ? 4 : min(kRing / Most, kPieces);
        constexpr int kTurns = (kLap * Most + kRing - 1) / kRing;
        constexpr int kSlots = kLap * Most / kTurns;
        static_assert(kLap * Most % kTurns == 0, "every turn begins at the same slot");
        Vec<u32, 4> ring[kSlots] = {};
        const auto start = [&](int first, int step) {
            const int block = step % Most, piece = step / Most;
            Vec<u32, 4>& slot = ring[step % kSlots];
            if (block > Most / 2) slot = {};  // it may not be there, and is added all the same
            detail::load_piece_if(
                first + piece < kPieces && (block <= Most / 2 || block < count), slot,
                reinterpret_cast<const Vec<u32, 4>*>(blocks + block * kSum + piece * kSweep));
        };
        if (count > 0)
#pragma unroll
            for (int step = 0; step < kSlots; ++step) start(0, step);
        cp_async_wait_all();
        if (count == 0) return;
#pragma unroll 1
        for (int first = 0; first < kPieces; first += kLap) {
#pragma unroll
            for (int piece = 0; piece < kLap; ++piece) {
                if (kPieces % kLap != 0 && first + piece >= kPieces) break;
                auto* there = reinterpret_cast<Vec<u32, 4>*>(state + piece * kSweep);
                const Vec<u32, 4> first_term = *there;
                float sums[kPiece] = {};
                add_piece(sums, first_term);
#pragma unroll
                for (int block = 0; block < Most; ++block) {
                    const int step = piece * Most + block;
                    add_piece(sums, ring[step % kSlots]);
                    start(first, step + kSlots);
                }
                *there = packed(sums);
            }
            state += kLap * kSweep;
            blocks += kLap * kSweep;
        }
    }

    static KGEN_DEVICE void add_piece(float (&sums)[kPiece], const Vec<u32, 4>& piece) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 two = unpack2<T>(piece[i]);
            sums[2 * i] += two.x;
            sums[2 * i + 1] += two.y;
        }
    }

    static KGEN_DEVICE Vec<u32, 4> packed(const float (&sums)[kPiece]) {
        return {{pack2<T>(sums[0], sums[1]), pack2<T>(sums[2], sums[3]), pack2<T>(sums[4], sums[5]),
                 pack2<T>(sums[6], sums[7])}};
    }

    // What goes on from a round, by all blocks a part each: the next round's carry, or the state behind the
    // last step.
    KGEN_DEVICE void pass_on(int round, bool is_last, const States& states) const {
        for_my_pieces([&](int at) {
            float sums[kPiece] = {};
            if (carries(round)) add_whole(sums, carry(round, false) + at, carry(round, true) + at);
#pragma unroll
            for (int block = 0; block < Blocks; ++block)
                add_whole(sums, sum(round, false, block) + at, sum(round, true, block) + at);
            if (!is_last) {
                store_carry(round + 1, at, sums);
            } else if constexpr (Ends) {
#pragma unroll
                for (int i = 0; i < kPiece; ++i)
                    states.store_last(key_of(at), value_of(at) + i, sums[i]);
            }
        });
    }

    static KGEN_DEVICE void add_whole(float (&sums)[kPiece], const T* piece, const T* rests) {
        const Vec<u32, 4> upper = load_piece(piece), rest = load_piece(rests);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = static_cast<int>(rest[i] << 16) >> 16, second = static_cast<int>(rest[i]) >> 16;
            sums[2 * i] += bit_cast<float>((upper[i] << 16) + static_cast<u32>(first));
            sums[2 * i + 1] += bit_cast<float>((upper[i] & 0xffff0000u) + static_cast<u32>(second));
        }
    }

    // body(where it begins) for the server's pieces of a state that all blocks have parts of.
    template <class Body>
    KGEN_DEVICE void for_my_pieces(Body body) const {
#pragma unroll 1
        for (int at = rank_ * kSweep + kPiece * server(); at < kSum; at += Blocks * kSweep) body(at);
    }

    // Features of the values from `at` on, the other way round than offset().
    static KGEN_DEVICE int key_of(int at) { return at % Layout::kPanel / 64; }
    static KGEN_DEVICE int value_of(int at) {
        return at / Layout::kPanel * 64 + (at / kPiece % 8 ^ key_of(at) % 8) * kPiece;
    }

    KGEN_DEVICE void store_carry(int round, int at, const float (&values)[kPiece]) const {
        Vec<u32, 4> left;
        float rounded[kPiece];
#pragma unroll
        for (int i = 0; i < 4; ++i) left[i] = rests(values[2 * i], values[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < kPiece; ++i) rounded[i] = past_half(values[i]);
        store_piece(carry(round, false) + at, packed(rounded));
        store_piece(carry(round, true) + at, left);
    }

    static KGEN_DEVICE Vec<u32, 4> load_piece(const T* piece) {
        return load<Cache::evict_last>(reinterpret_cast<const Vec<u32, 4>*>(piece));
    }
    static KGEN_DEVICE void store_piece(T* piece, const Vec<u32, 4>& values) {
        store<Cache::evict_last>(reinterpret_cast<Vec<u32, 4>*>(piece), values);
    }

    GroupCounter<Blocks> counter_;
    T *sums_, *carries_;
    int rank_;
    Mbarrier taken_;
};

}  // namespace kgen
