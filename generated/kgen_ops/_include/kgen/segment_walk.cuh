// Outputs of a linear recurrence by a group of blocks, which have a segment of the steps each.
//
//     S_t = S_{t-1} + b_t v_t^T,  out_t = factor * a_t S_t
//
// No block walks: it sums its segment's b v^T, and the group exchanges the sums while each block makes
// what its steps read of the same segment. Then each block has the state before its segment, and rows of
// outputs are finished as they lie in registers. What a block has of a segment and how it multiplies is
// its Segment's affair: warp_segment.cuh, group_segment.cuh.
//
//     sums, in fp32      to global memory, where each block scans its part of a state over the segments
//     states, as T       from there through global memory to the block whose segment they are before
//
// A sequence that is longer than the group's segments takes several rounds. What is not finite is noticed
// by its effect on outputs, and then a block does its segment again step by step.
//
// Barriers of the group, two a round: the sums are written; the states are. A block reads its state behind
// the second one, and the next round's are written only behind the first one of the next round, at which
// it arrives with its products done. Sums of the next round are written behind the second barrier, to which
// all come with theirs read.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_outputs.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "math.cuh"
#include "meeting.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "state_tile.cuh"
#include "state_walk.cuh"

namespace kgen {

// Segment: WarpSegment or GroupSegment; Blocks: of a group; Begins, Ends: whether there are states to begin
// with and to hand out.
template <class Segment, int Blocks, bool Begins, bool Ends>
class SegmentWalk {
    using T = typename Segment::Element;
    using Outputs = typename Segment::Outputs;
    static constexpr int kKeys = Segment::kKeys, kSlice = Segment::kSlice;
    static constexpr int kFeatures = Segment::kFeatures, kValues = Segment::kValues;
    static constexpr int kWarps = Segment::kWorkers / kWarpSize;  // that work
    static constexpr int kAlong = kSlice / 16;  // units of a row of them
    // Whether registers have room for what is carried from round to round.
    static constexpr bool kManyRegisters = Segment::kManyRegisters;
    static constexpr bool kServed = Segment::kThreads > Segment::kWorkers;

public:
    static constexpr int kThreads = Segment::kThreads;
    static constexpr int kBlocks = Blocks;
    static constexpr int kSlices = (kValues + kSlice - 1) / kSlice;
    static constexpr int kSum = kKeys * kSlice;  // values
    static constexpr int kUnits = kSum / 256;
    using Exchange = typename Segment::template Exchange<Blocks>;

private:
    // A unit of the scan is 16 x 16 values of a sum: eight per lane.
    static constexpr int kScanWarps = kServed ? (kThreads - Segment::kWorkers) / kWarpSize : kWarps;
    static constexpr int kUnitsOfBlock = (kUnits + kBlocks - 1) / kBlocks;
    static constexpr int kUnitsPerWarp = (kUnitsOfBlock + kScanWarps - 1) / kScanWarps;
    static constexpr int kKept = 176;                // bytes, see below
    static constexpr int kAtOnce = min(kBlocks, 8);  // sums that a scan reads at once

    // Where the state before the segment is for a walk step by step: behind that walk's own.
    static constexpr int kPlainStride = chunk_row_stride<T>(kSlice);
    static constexpr int kPlainBegin = (plain_walk_bytes(kFeatures, kSlice) + 15) / 16 * 16;
    static_assert(kPlainBegin + kKeys * kPlainStride * static_cast<int>(sizeof(T)) <=
                      Segment::kBytes,
                  "a walk step by step takes the place of the segment");

public:
    static constexpr int kSmemBytes =
        Segment::kBytes + (kManyRegisters ? 0 : 32 * kThreads * kUnitsPerWarp) + kKept;

    // Rows of all steps; of v, out and the states from the slice's first feature on. States that the walk
    // does not begin with, or that nobody asks for, are null. sums: of the group, [kBlocks][kSum].
    KGEN_DEVICE SegmentWalk(const WalkRows<T>& rows, const float* initial, float* end, float* sums,
                            const Exchange& exchange)
        : kept_(kept({rows, initial, end, exchange})),
          rows_(kept_.rows),
          exchange_(kept_.exchange),
          sums_(sums) {
        // Shared memory: the segment; Vec<float, 4> [kUnitsPerWarp][2][kThreads], which the threads carry
        // from one scan to the next, or have in registers; Kept.
        if (kServed && thread_rank() < Segment::kWorkers) return;
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                const bool there = Begins && key < kFeatures && value < rows_.values;
                carried(i, j / 4)[j % 4] = there ? kept_.initial[key * kValues + value] : 0.0f;
            }
        });
    }

    KGEN_DEVICE void walk() {
        if constexpr (!kServed) {
            walk_rounds<true>();
        } else if (thread_rank() < Segment::kWorkers) {
            if constexpr (Segment::kSharesRegisters) take_registers<Segment::kWorkerRegisters>();
            walk_rounds<true>();
        } else {
            if constexpr (Segment::kSharesRegisters) leave_registers<Segment::kServerRegisters>();
            walk_rounds<false>();
        }
    }

private:
    // Works: not of those warps that serve the others.
    template <bool Works>
    KGEN_DEVICE void walk_rounds() {
        while (take_round<Works>())
            if (!go_to_next_round()) return hand_out_end<Works>();
        // What is not finite stays so. In a function that is called, registers of the loop hold nothing of it;
        // but a kernel that calls any has its wgmma done one by one.
        if constexpr (kManyRegisters) {
            walk_segments<Works>();
        } else {
            go_on_step_by_step(*this);
        }
    }

    static KGEN_CALLED_DEVICE void go_on_step_by_step(SegmentWalk walk) {
        walk.template walk_segments<true>();
    }

    template <bool Works>
    KGEN_DEVICE void walk_segments() {
        walk_segment();
        while (go_to_next_round()) {
            if constexpr (!Works) {
                exchange_.serve(segment_.before(), [&] { scan(); });
            } else {
                segment_.stage(rows_, first_step(), steps_left());
                sum([] {});
                exchange_.sums_written();
                if constexpr (kServed) {
                    exchange_.take(round());
                } else {
                    exchange_.wait_for_sums();
                    scan();
                    exchange_.states_written();
                    exchange_.wait_for_states();
                }
            }
            walk_segment();
        }
        hand_out_end<Works>();
    }

    template <bool Works>
    KGEN_DEVICE void hand_out_end() {
        if constexpr (!Ends || Works == kServed) return;
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                if (key < kFeatures && value < rows_.values)
                    kept_.end[key * kValues + value] = carried(i, j / 4)[j % 4];
            }
        });
    }

    // What lies in shared memory: registers have room for what one tensor needs at a time, and for no
    // addresses that a compiler would carry from round to round.
    struct Kept {
        WalkRows<T> rows;      // first: of the round
        const float* initial;  // [Keys][Values], the state before the first step and behind the last one
        float* end;
        Exchange exchange;
    };

    static KGEN_DEVICE Kept& kept(const Kept& given) {
        static_assert(sizeof(Kept) <= kKept && alignof(Kept) <= 16, "see kSmemBytes");
        Kept& of_block = *reinterpret_cast<Kept*>(dynamic_smem<char>() + kSmemBytes - kKept);
        if (thread_rank() == 0) {
            of_block = given;
            of_block.exchange.begin();
        }
        sync_block();
        return of_block;
    }

    // Whether there is one.
    KGEN_DEVICE bool go_to_next_round() {
        segment_.begin_again();
        sync_block();  // shared memory is free, too
        if (thread_rank() == 0) rows_.first += kBlocks * Segment::kSegment;
        sync_block();
        return rows_.first < rows_.end;
    }

    // The block's first step of the round, and how many of its segment exist. Steps behind the last one are
    // zeros, as are their sums: a block that has no others does what all do.
    KGEN_DEVICE i64 first_step() const { return rows_.first + rank() * Segment::kSegment; }
    KGEN_DEVICE int steps_left() const {
        return static_cast<int>(
            min(max(rows_.end - first_step(), i64{0}), i64{Segment::kSegment}));
    }
    KGEN_DEVICE int rank() const { return exchange_.rank(); }
    KGEN_DEVICE i64 round() const { return rows_.first / (kBlocks * Segment::kSegment); }
    KGEN_DEVICE bool has_state() const { return Begins || first_step() > 0; }

    // The next kBlocks segments. Returns whether the block's outputs are finite.
    template <bool Works>
    KGEN_DEVICE bool take_round() {
        float poison = 0.0f;
        if constexpr (!Works) {
            exchange_.serve(segment_.before(), [&] { scan(); });
        } else {
            Outputs outputs;
            segment_.stage(rows_, first_step(), steps_left());
            sum([&] { segment_.begin(outputs, rows_, first_step(), steps_left()); });
            exchange_.sums_written();
            segment_.look(outputs);
            if constexpr (kServed) {
                exchange_.take(round());
            } else {
                exchange_.wait_for_sums();
                scan();
                exchange_.states_written();
                segment_.look_on(outputs, rows_, first_step(), steps_left());
                segment_.take(exchange_, outputs);
            }
            poison = segment_.finish(outputs, has_state(), rows_, first_step(), steps_left());
        }
        return !block_has<kThreads / kWarpSize>(poison);
    }

    // The sum of a segment that is on its way, to global memory: [kUnits][two tiles][lanes][four
    // accumulators]. meanwhile(): once it is there.
    template <class Body>
    KGEN_DEVICE void sum(Body meanwhile) const {
        typename Segment::Sums sums;
        segment_.sum(sums, rows_, first_step(), steps_left());
        meanwhile();
        float* target = sums_ + rank() * kSum + 4 * lane_id();
        segment_.for_sums(sums, [&](int across, int along, int tile, const Vec<float, 4>& four) {
            store_vec<Cache::evict_last>(target + (across * kAlong + along) * 256 + tile * 128, four);
        });
    }

    // The block's segment of the round, step by step, from the state that the group has left for it.
    KGEN_DEVICE void walk_segment() const {
        T* before = reinterpret_cast<T*>(dynamic_smem<char>() + kPlainBegin);
        const T* own = exchange_.state(rank());
        sync_block();  // shared memory is free
        for (int i = thread_rank(); i < kSum; i += kThreads)
            before[i / kSlice * kPlainStride + i % kSlice] =
                own[Exchange::offset(i / kSlice, i % kSlice)];
        sync_block();
        WalkRows<T> segment = rows_;
        segment.first = first_step();
        segment.end = segment.first + steps_left();
        StoredState<T> state{};
        state.stored = has_state() ? before : nullptr;
        state.row_stride = kPlainStride;
        walk_plainly<T, kFeatures, kValues, kSlice, kThreads, false, false, false, true>(
            segment, state, NoDecayRows{});
    }

    KGEN_DEVICE int scan_warp() const {
        return (thread_rank() - (kServed ? Segment::kWorkers : 0)) / kWarpSize;
    }

    // body(i, unit) for the units that the warp scans.
    template <class Body>
    KGEN_DEVICE void for_my_units(Body body) const {
#pragma unroll
        for (int i = 0; i < kUnitsPerWarp; ++i) {
            const int unit = rank() + kBlocks * (scan_warp() + i * kScanWarps);
            if (kUnits % (kBlocks * kScanWarps) == 0 || unit < kUnits) body(i, unit);
        }
    }

    // Features of value j of a lane: of four accumulators of one tile, then of its neighbour.
    using Unit = StateTile<T, 1, 1, 16>;
    static KGEN_DEVICE int key_of(int unit, int j) {
        return unit / kAlong * 16 + Unit::key_of(0, j % 4);
    }
    static KGEN_DEVICE int value_of(int unit, int j) {
        return unit % kAlong * 16 + Unit::value_of(j / 4, j % 4);
    }

    // Add the segments' sums in order, and give each segment the state before it.
    KGEN_DEVICE void scan() {
        if constexpr (kServed) {
            scan_through_room();
        } else {
            scan_in_registers();
        }
    }

    KGEN_DEVICE void scan_in_registers() {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int first = 0; first < kBlocks; first += kAtOnce) {
                Vec<float, 4> parts[kAtOnce][2];  // all on their way at once
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block)
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile)
                        parts[block][tile] = load_vec<4>(part_of(first + block, unit, tile));
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block)
                    pass_on(i, unit, first + block, parts[block]);
            }
        });
    }

    // By few warps, with all sums on their way at once: those of one half of the segments to where the state
    // before the segment will be, the others to registers. A thread reads what it has copied itself.
    KGEN_DEVICE void scan_through_room() {
        constexpr int kHalf = kBlocks / 2;
        constexpr int kSlot = kUnitsOfBlock * 256;  // floats of a sum
        static_assert(kHalf * kSlot * 4 <= kSum * static_cast<int>(sizeof(T)), "no room");
        float* room = reinterpret_cast<float*>(segment_.before()) + 4 * lane_id();
        const auto place = [&](int block, int i, int tile) {
            return room + block * kSlot + (scan_warp() + i * kScanWarps) * 256 + tile * 128;
        };
        Vec<float, 4> held[kHalf][kUnitsPerWarp][2];
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int block = 0; block < kHalf; ++block)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    cp_async<16>(place(block, i, tile), part_of(block, unit, tile));
                    held[block][i][tile] = load_vec<4>(part_of(kHalf + block, unit, tile));
                }
        });
        cp_async_wait_all();
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int block = 0; block < kHalf; ++block) {
                const Vec<float, 4> part[2] = {load_vec<4>(place(block, i, 0)),
                                               load_vec<4>(place(block, i, 1))};
                pass_on(i, unit, block, part);
            }
#pragma unroll
            for (int block = 0; block < kHalf; ++block)
                pass_on(i, unit, kHalf + block, held[block][i]);
        });
    }

    // The lane's part of a tile of a segment's sum.
    KGEN_DEVICE const float* part_of(int block, int unit, int tile) const {
        return sums_ + block * kSum + unit * 256 + tile * 128 + 4 * lane_id();
    }

    // Leave the state before a segment, and add the segment's sum.
    KGEN_DEVICE void pass_on(int i, int unit, int block, const Vec<float, 4> (&part)[2]) {
        Vec<float, 4>& left = carried(i, 0);
        Vec<float, 4>& right = carried(i, 1);
        T* there = exchange_.state(block) +
                   Exchange::offset(unit / kAlong * 16 + mma_lane().g,
                                    unit % kAlong * 16 + column_of_quad());
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<Vec<u32, 2>*>(there + half * Exchange::kEightRows) =
                quad_of_row<T>(left.data, right.data, half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            left[j] += part[0][j];
            right[j] += part[1][j];
        }
    }

    // The state before the next segment to be added, of the lane's part of the warp's unit i.
    KGEN_DEVICE Vec<float, 4>& carried(int i, int tile) {
        if constexpr (kManyRegisters) {
            return carried_[i][tile];
        } else {
            return reinterpret_cast<Vec<float, 4>*>(dynamic_smem<char>() + Segment::kBytes)
                [(2 * i + tile) * kThreads + thread_rank()];
        }
    }

    Kept& kept_;
    WalkRows<T>& rows_;
    Exchange& exchange_;
    float* sums_;  // of the group, [kBlocks][kSum]
    Vec<float, 4> carried_[kManyRegisters ? kUnitsPerWarp : 1][2];
    Segment segment_;
};

}  // namespace kgen
