// States before the segments of a group's blocks (segment_walk.cuh), by warps of each block that do nothing
// else, with one barrier of the group a round (meeting.cuh). The others never stand still for other blocks, but
// where they need the state before their segment.
//
// Each block writes its sum as T to global memory. Behind the barrier its serving warps gather the state before
// the segment: they add what the blocks before it wrote, in fp32, and leave it as T in shared memory. All of it
// lies in the order of panels (wgmma.cuh), so that places in memory are all that has to agree. A state errs by
// a rounding of each sum.
//
// What goes on to the next round, or is handed out, must not: errors of many rounds would add up. So there is a
// low part for each number of T that goes on, which is what T does not hold of it, and all blocks make a part
// each of the next round's carry, of high and low parts alike. States are of its high part.
//
// Sums and carries have two places, for even rounds and for odd ones. One barrier a round is enough then: what
// a block writes in round n + 2, and what it makes of round n + 1 for round n + 2, it writes behind the barrier of
// round n + 1; and there the others arrive with all of what they read in round n read.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "bulk.cuh"
#include "chunk_rows.cuh"
#include "dependent_launch.cuh"
#include "math.cuh"
#include "meeting.cuh"
#include "memory.cuh"
#include "segment_ends.cuh"
#include "wgmma.cuh"

namespace kgen {

// Keys, Values: the tensors' features; Slice: value features of a block; Workers, Servers: threads of a block, the
// workers first. Begins, Ends: whether there are states to begin with and to hand out.
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
    static constexpr int kRing = 21;                         // pieces of a server that are on their way
    // Named barriers: all but the first server's warp pass the one, and all servers wait at the other.
    static constexpr int kWritten = 1, kMet = 3;

    static_assert(Slice % 64 == 0 && kSum % kSweep == 0, "a state is whole panels and whole sweeps");

public:
    static constexpr int kRoomBytes = 0;

    // Where a value of a state or sum is.
    static KGEN_DEVICE int offset(int key, int value) {
        return Layout::offset(key, value / 8) + value % 8;
    }

    // sums: T [groups][even rounds, odd ones][high parts, low ones][Blocks][kSum]; carries: the same without Blocks.
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

    // Whether low parts are wanted.
    static KGEN_DEVICE bool goes_on(bool is_last) { return Ends || !is_last; }

    // By the workers: a warp's part of the sum, 16 x 16 features as two tiles of accumulators. Of them the lane
    // has, once its neighbours have swapped (quad_of_row), four from `key` and `value` on, and four of eight keys
    // further on. Rest: what T does not hold of them.
    template <bool Rest>
    KGEN_DEVICE void put(int round, int key, int value, const float (&left)[4],
                         const float (&right)[4]) const {
        constexpr int kEightRows = 8 * 64;
        T* there = sum(round, Rest, rank_) + offset(key, value);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Vec<u32, 2> quad;
            if constexpr (Rest) {
                float left_rest[4], right_rest[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    left_rest[i] = rest(left[i]);
                    right_rest[i] = rest(right[i]);
                }
                quad = quad_of_row<T>(left_rest, right_rest, half);
            } else {
                quad = quad_of_row<T>(left, right, half);
            }
            store<Cache::evict_last>(reinterpret_cast<Vec<u32, 2>*>(there + half * kEightRows), quad);
        }
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
        meet();
        if (has_state) {
            gather(state, round);
            tell_workers();
        }
        if (goes_on(is_last)) pass_on(round, is_last, states);
    }

private:
    // Of round `round`: the high or low parts of a block's sum, and of the state before the round; and whether
    // that is not zero.
    KGEN_DEVICE T* sum(int round, bool low, int block) const {
        return sums_ + ((round % 2 * 2 + low) * Blocks + block) * kSum;
    }
    KGEN_DEVICE T* carry(int round, bool low) const {
        return carries_ + (round % 2 * 2 + low) * kSum;
    }
    static KGEN_DEVICE bool carries(int round) { return Begins || round > 0; }

    // What T does not hold of x; 0 if that is nothing finite.
    static KGEN_DEVICE float rest(float x) {
        const float high = to_float(from_float<T>(x));
        return high - high == 0.0f ? x - high : 0.0f;
    }

    static KGEN_DEVICE int server() { return thread_rank() - Workers; }

    // Wait for the sums of all blocks. The first server's warp does it for the block: it sees what the workers have
    // written, and what servers have made of the round before, and shows it to the others.
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

    // The state before the segment. The first of what it is the sum of comes to its place by asynchronous copies,
    // for which no registers are needed; a server reads what it has copied itself.
    KGEN_DEVICE void gather(T* state, int round) const {
        const int at = kPiece * server();
        const T* blocks = sum(round, false, 0) + at;
        const T* first = carries(round) ? carry(round, false) + at : blocks;
        state += at;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) cp_async<16>(state + i * kSweep, first + i * kSweep);
        const bool apart = carries(round);  // else the first block's is there
        add<Blocks - 1>(state, apart ? blocks : blocks + kSum, apart ? rank_ : rank_ - 1);
    }

    // Add the sums of `count` blocks, of which there are more than half of `Most` if there are any, and write the
    // state. Pieces are on their way long before they are added, as many as there are registers for: a ring of
    // them, taken block by block, and kLap pieces of each block are whole turns of it.
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
            if (first + piece < kPieces && (block <= Most / 2 || block < count))
                slot = load_piece(blocks + block * kSum + piece * kSweep);
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
                Vec<u32, 4>& there = *reinterpret_cast<Vec<u32, 4>*>(state + piece * kSweep);
                float sums[kPiece] = {};
                add_piece(sums, there);
#pragma unroll
                for (int block = 0; block < Most; ++block) {
                    const int step = piece * Most + block;
                    if (block <= Most / 2 || block < count) add_piece(sums, ring[step % kSlots]);
                    start(first, step + kSlots);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) there[i] = pack2<T>(sums[2 * i], sums[2 * i + 1]);
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

    // What goes on from a round, by all blocks a part each: the next round's carry, or the state behind the last step.
    KGEN_DEVICE void pass_on(int round, bool is_last, const States& states) const {
        for_my_pieces([&](int at) {
            float sums[kPiece] = {};
            const auto add_parts = [&](const T* high, const T* low) {
                const Vec<u32, 4> two[2] = {load_piece(high + at), load_piece(low + at)};
                add_piece(sums, two[0]);
                add_piece(sums, two[1]);
            };
            if (carries(round)) add_parts(carry(round, false), carry(round, true));
#pragma unroll
            for (int block = 0; block < Blocks; ++block)
                add_parts(sum(round, false, block), sum(round, true, block));
            if (!is_last) {
                store_carry(round + 1, at, sums);
            } else if constexpr (Ends) {
#pragma unroll
                for (int i = 0; i < kPiece; ++i)
                    states.store_last(key_of(at), value_of(at) + i, sums[i]);
            }
        });
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
        Vec<u32, 4> high, low;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            high[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
            low[i] = pack2<T>(rest(values[2 * i]), rest(values[2 * i + 1]));
        }
        store_piece(carry(round, false) + at, high);
        store_piece(carry(round, true) + at, low);
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
