// Outputs of a linear recurrence by a group of blocks, which have a segment of the steps each.
//
//     S_t = S_{t-1} + b_t v_t^T,  out_t = factor * a_t S_t
//
// No block walks: it sums its segment's b v^T, and the group exchanges the sums while each block makes
// what its steps read of the same half of the segment. Then each block has the state before its segment,
// and rows of outputs are finished as they lie in registers. What half a segment adds is a state for the
// other half, so that no step looks back farther than half a segment.
//
//     warps              two fragments of 16 steps of one half (paired_rows.cuh), the long one, which looks
//                        back far, and the short one: all warps look back as often, at each barrier, too
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
#include "chunk_stage.cuh"
#include "math.cuh"
#include "meeting.cuh"
#include "paired_rows.cuh"
#include "registers.cuh"
#include "state_tile.cuh"
#include "state_walk.cuh"

namespace kgen {

// Where a block's state lies in its shared memory, in units of 16 x 16 values: [Keys][Stride].
template <class T, int Keys, int Slice, int Stride, int Threads>
struct UnitsOfState {
    using Element = T;
    static constexpr int kStride = Stride, kThreads = Threads;
    static constexpr int kAlong = Slice / 16;
    static constexpr int kUnits = Keys / 16 * kAlong;

    static KGEN_DEVICE int offset(int unit) {
        return unit / kAlong * 16 * Stride + unit % kAlong * 16;
    }
};

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block; Blocks: of a
// group; Segment: steps of a block, for 32 of which it has a warp; Batch: steps per group of copies, and per
// barrier of the sums; CopyBytes: of one copy; ScoreParts: of PairedRows; Begins, Ends: whether there are
// states to begin with and to hand out. T has 16 bits and the range of fp32 (bf16).
template <class T, int Keys, int Values, int Slice, int Blocks, int Segment, int Batch, int CopyBytes,
          int ScoreParts, bool Begins, bool Ends>
class SegmentWalk {
    static constexpr int kWarps = Segment / 32;
    static constexpr int kHalf = Segment / 2;
    static constexpr int kBatches = Segment / Batch;
    static constexpr int kKeys = whole_fragments(Keys);
    using Rows = PairedRows<T, Keys, Values, Slice, CopyBytes, ScoreParts>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    // Warps along the features of a sum, and their fragments of 16.
    static constexpr int kValueWarps = kWarps >= 16 ? 4 : kWarps >= 4 ? 2 : 1;
    static constexpr int kKeyWarps = kWarps / kValueWarps;
    static constexpr int kAcross = kKeys / 16, kAlong = Slice / 16;  // of a whole sum
    static constexpr int kKeyTiles = (kAcross + kKeyWarps - 1) / kKeyWarps;
    static constexpr int kValuePairs = (kAlong + kValueWarps - 1) / kValueWarps;
    using Sums = StateTile<T, kKeyTiles, kValuePairs, Batch>;

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    using Exchange = StateExchange<UnitsOfState<T, kKeys, Slice, kValueStride, kThreads>, Blocks>;
    static constexpr int kBlocks = Blocks;
    static constexpr int kSlices = (Values + Slice - 1) / Slice;
    static constexpr int kSum = kKeys * Slice;  // values

private:
    // A unit of the scan is 16 x 16 values of a sum: eight per lane.
    static constexpr int kUnits = kAcross * kAlong;
    static constexpr int kUnitsPerWarp = (kUnits + kBlocks * kWarps - 1) / (kBlocks * kWarps);
    // Elements of shared memory.
    static constexpr int kRows = Segment * (kKeyStride + kValueStride);
    static constexpr int kState = kKeys * kValueStride;
    static constexpr int kKept = 160;                         // bytes, see below
    static constexpr int kAtOnce = min(kBlocks, 8);           // sums that a scan reads at once

    static_assert(is_power_of_two(kWarps) && kWarps >= 2, "warps are rows and columns of a sum");
    static_assert(kHalf % Batch == 0 && Batch % 16 == 0, "half a segment is whole batches");
    static_assert((kRows + kState) * static_cast<int>(sizeof(T)) >= plain_walk_bytes(Keys, Slice),
                  "a walk step by step must leave the state before it alone");

public:
    static constexpr int kSmemBytes =
        (kRows + 2 * kState) * static_cast<int>(sizeof(T)) + 32 * kThreads * kUnitsPerWarp + kKept;

    // Rows of all steps; of v, out and the states from the slice's first feature on. States that the walk
    // does not begin with, or that nobody asks for, are null. sums: of the group, [kBlocks][kSum].
    KGEN_DEVICE SegmentWalk(const WalkRows<T>& rows, const float* initial, float* end, float* sums,
                            const Exchange& exchange)
        : kept_(kept({rows, initial, end, exchange})),
          rows_(kept_.rows),
          exchange_(kept_.exchange),
          sums_(sums) {
        // Shared memory: T b[Segment][kKeyStride], v[Segment][kValueStride], and [kKeys][kValueStride]
        // what the segment's first half adds, and the state before the segment; float
        // [kUnitsPerWarp][2][kThreads][4], which the threads carry from one scan to the next; Kept.
        b_ = dynamic_smem<T>();
        v_ = b_ + Segment * kKeyStride;
        middle_ = b_ + kRows;
        before_ = middle_ + kState;
        warp_ = thread_rank() / kWarpSize;
        carried_ = reinterpret_cast<float*>(before_ + kState) + 4 * thread_rank();
        for_my_units([&](int i, int unit) {
            Vec<float, 4> state[2];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                const bool there = Begins && key < Keys && value < rows_.values;
                state[j / 4][j % 4] = there ? kept_.initial[key * Values + value] : 0.0f;
            }
            carry_on(i, state);
        });
    }

    KGEN_DEVICE void walk() {
        while (take_round())
            if (!go_to_next_round()) return hand_out_end();
        // What is not finite stays so. In a function that is called, registers of the loop hold nothing of it.
        go_on_step_by_step(*this);
    }

private:
    static KGEN_CALLED_DEVICE void go_on_step_by_step(SegmentWalk walk) { walk.walk_segments(); }

    KGEN_DEVICE void walk_segments() {
        walk_segment();
        while (go_to_next_round()) {
            stage();
            sum([] {});
            exchange_.arrive(kSumWaiter);
            exchange_.wait(kSumWaiter);
            scan();
            exchange_.arrive(kStateWaiter);
            exchange_.begin_to_take(before_, kStateWaiter);
            exchange_.take();
            walk_segment();
        }
        hand_out_end();
    }

    KGEN_DEVICE void hand_out_end() const {
        if constexpr (!Ends) return;
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int key = key_of(unit, j), value = value_of(unit, j);
                if (key < Keys && value < rows_.values)
                    kept_.end[key * Values + value] = carried(i, j / 4)[j % 4];
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

    // Where one warp arrives and waits for its block: one of each half, while sums and states are on their
    // way. And half of the looks, as a long fragment has at least: the others wait for no sums, either.
    static constexpr int kSumWaiter = 0, kStateWaiter = kWarps - 1;
    static constexpr int kFirstLooks = kWarps / 2 + 1;

    static KGEN_DEVICE Kept& kept(const Kept& given) {
        static_assert(sizeof(Kept) <= kKept && alignof(Kept) <= 16, "see kSmemBytes");
        Kept& of_block = *reinterpret_cast<Kept*>(dynamic_smem<char>() + kSmemBytes - kKept);
        if (thread_rank() == 0) of_block = given;
        sync_block();
        return of_block;
    }

    // Whether there is one.
    KGEN_DEVICE bool go_to_next_round() {
        warp_ = computed_here(warp_);
        sync_block();  // shared memory is free, too
        if (thread_rank() == 0) rows_.first += kBlocks * Segment;
        sync_block();
        return rows_.first < rows_.end;
    }

    // The block's first step of the round, and how many of its segment exist. Steps behind the last one are
    // zeros, as are their sums: a block that has no others does what all do.
    KGEN_DEVICE i64 first_step() const { return rows_.first + rank() * Segment; }
    KGEN_DEVICE int steps_left() const {
        return static_cast<int>(min(max(rows_.end - first_step(), i64{0}), i64{Segment}));
    }
    KGEN_DEVICE int rank() const { return exchange_.rank(); }
    KGEN_DEVICE bool has_state() const { return Begins || first_step() > 0; }

    // The warp's half of the segment, and its fragments among those of it: the long one, then the short one.
    // Over both all warps have kWarps + 1 looks. Halves are of neighbouring warps, so that each of an SM's
    // four schedulers has as many warps of either.
    KGEN_DEVICE int half() const { return warp_ / (kWarps / 2); }
    template <int Which>
    KGEN_DEVICE int fragment() const {
        const int of_half = warp_ % (kWarps / 2);
        return Which == 0 ? kWarps - 1 - of_half : of_half;
    }
    template <int Which>
    KGEN_DEVICE int step_of() const {  // in the segment
        return half() * kHalf + 16 * fragment<Which>();
    }

    template <int Which>
    KGEN_DEVICE void read(Rows& outputs) const {
        outputs.template read<Which>(rows_.a, first_step() + step_of<Which>(),
                                     steps_left() - step_of<Which>());
    }

    // Looks `from` to `to` of a fragment, of fragment() + 1.
    template <int Which>
    KGEN_DEVICE void look_back(Rows& outputs, int from, int to) const {
        outputs.template look_back<Which>(b_ + half() * kHalf * kKeyStride,
                                          v_ + half() * kHalf * kValueStride, fragment<Which>(),
                                          from, to);
    }

    template <int Which>
    KGEN_DEVICE float write(Rows& outputs) const {
        return outputs.template write<Which>(rows_, first_step() + step_of<Which>(),
                                             steps_left() - step_of<Which>());
    }

    // The next kBlocks segments. Returns whether the block's outputs are finite.
    KGEN_DEVICE bool take_round() const {
        stage();
        Rows outputs;
        sum([&] { read<0>(outputs); });
        exchange_.arrive(kSumWaiter);
        outputs.template arrange<0>();
        look_back<0>(outputs, 0, kFirstLooks);
        exchange_.wait(kSumWaiter);
        scan();
        exchange_.arrive(kStateWaiter);  // before the rows, for which its warp would wait
        read<1>(outputs);
        look_back<0>(outputs, kFirstLooks, fragment<0>() + 1);
        outputs.template arrange<1>();
        look_back<1>(outputs, 0, fragment<1>() + 1);
        exchange_.begin_to_take(before_, kStateWaiter);
        if (half() == 1) outputs.carry(middle_);
        exchange_.take();
        if (has_state()) outputs.carry(before_);
        float poison = write<0>(outputs);
        poison += write<1>(outputs);
        return !block_has<kWarps>(poison);
    }

    // meanwhile(): before the sum is written.
    template <class Body>
    KGEN_DEVICE void sum(Body meanwhile) const {
        Sums sums;
        add_batches<0>(sums);
        meanwhile();
        hand_out(sums);
    }

    // The block's segment of the round, step by step.
    KGEN_DEVICE void walk_segment() const {
        WalkRows<T> segment = rows_;
        segment.first = first_step();
        segment.end = segment.first + steps_left();
        StoredState<T> state{};
        state.stored = has_state() ? before_ : nullptr;
        state.row_stride = kValueStride;
        walk_plainly<T, Keys, Values, Slice, kThreads, false, false, false, true>(segment, state,
                                                                                  NoDecayRows{});
    }

    // Start all copies of the segment's rows, a group for each batch.
    KGEN_DEVICE void stage() const {
        const i64 first = first_step();
        const int left = steps_left();
        const bool ragged = kKeys > Keys || rows_.values < Slice;
        if (ragged) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kRows; i += kThreads) b_[i] = from_float<T>(0.0f);
            sync_block();
        }
        ChunkCopier<T, Batch, Keys, CopyBytes, kThreads> copy_b(rows_.b, first, Keys);
        ChunkCopier<T, Batch, Slice, CopyBytes, kThreads> copy_v(rows_.v, first, rows_.values);
#pragma unroll
        for (int batch = 0; batch < kBatches; ++batch) {
            const int there = left - batch * Batch;
            T* b = b_ + batch * Batch * kKeyStride;
            T* v = v_ + batch * Batch * kValueStride;
            if (there >= Batch) {
                copy_b.template start<true>(b, kKeyStride, Batch);
                copy_v.template start<true>(v, kValueStride, Batch);
            } else {
                copy_b.template start<false>(b, kKeyStride, there);
                copy_v.template start<false>(v, kValueStride, there);
            }
            cp_async_commit();
        }
    }

    // Have L2 fetch a fragment's rows of `a`.
    template <int Which>
    KGEN_DEVICE void ask_for_rows() const {
        ask_for<Keys, 16, kWarpSize>(rows_.a, first_step() + step_of<Which>(),
                                     steps_left() - step_of<Which>(), Keys);
    }

    // By groups of `Threads` threads: `Count` rows of `width` <= Width values, from step `first` on; `left`
    // of them exist.
    template <int Width, int Count, int Threads>
    static KGEN_DEVICE void ask_for(const StepRows<const T>& all, i64 first, int left, int width) {
        constexpr int kLine = 128 / static_cast<int>(sizeof(T));
        constexpr int kLines = (Width + kLine - 1) / kLine;  // of a row
        const StepRows<const T> rows{all.at(first), all.stride};
#pragma unroll
        for (int i = thread_rank() % Threads; i < Count * kLines; i += Threads)
            if (i / kLines < left && i % kLines * kLine < width)
                prefetch_line(rows.at(i / kLines) + i % kLines * kLine);
    }

    // Add batches as they arrive, from this one on. What the first half of them adds is kept for the other.
    template <int Number>
    KGEN_DEVICE void add_batches(Sums& sums) const {
        if constexpr (Number < kBatches) {
            cp_async_wait<kBatches - 1 - Number>();
            sync_block();
            if (has_sums())
                sums.add(b_ + Number * Batch * kKeyStride + 16 * first_across(), kKeyStride,
                         v_ + Number * Batch * kValueStride + 16 * first_along(), kValueStride);
            if (Number == kBatches / 2 - 1) {
                keep_middle(sums);
                // Not before, for b and v are wanted first; and loads would wait behind all their copies.
                ask_for_rows<0>();
                ask_for_rows<1>();
            }
            add_batches<Number + 1>(sums);
        }
    }

    // The warp's first fragments of a sum, and whether they exist.
    KGEN_DEVICE int first_across() const { return warp_ / kValueWarps * kKeyTiles; }
    KGEN_DEVICE int first_along() const { return warp_ % kValueWarps * kValuePairs; }
    KGEN_DEVICE bool has_sums() const {
        return (kAcross % kKeyWarps == 0 || first_across() < kAcross) &&
               (kAlong % kValueWarps == 0 || first_along() < kAlong);
    }

    KGEN_DEVICE void keep_middle(const Sums& sums) const {
        if (!has_sums()) return;
        const int key = 16 * first_across(), value = 16 * first_along();
        sums.store(
            middle_ + key * kValueStride + value, kValueStride,
            [&](int m, int n, int i) { return sums.at(m, n, i); },
            [&](int of_key, int of_value) {
                return (kAcross % kKeyWarps == 0 || key + of_key < kKeys) &&
                       (kAlong % kValueWarps == 0 || value + of_value < Slice);
            });
    }

    // The segment's sum to global memory: [kUnits][two tiles][lanes][four accumulators].
    KGEN_DEVICE void hand_out(const Sums& sums) const {
        if (!has_sums()) return;
        float* target = sums_ + rank() * kSum + 4 * lane_id();
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2 * kValuePairs; ++n) {
                const int across = first_across() + m, along = first_along() + n / 2;
                if (kAcross % kKeyWarps != 0 && across >= kAcross) continue;
                if (kAlong % kValueWarps != 0 && along >= kAlong) continue;
                Vec<float, 4> tile;
#pragma unroll
                for (int i = 0; i < 4; ++i) tile[i] = sums.at(m, n, i);
                store_vec(target + (across * kAlong + along) * 256 + n % 2 * 128, tile);
            }
    }

    // body(i, unit) for the units that the warp scans.
    template <class Body>
    KGEN_DEVICE void for_my_units(Body body) const {
#pragma unroll
        for (int i = 0; i < kUnitsPerWarp; ++i) {
            const int unit = rank() + kBlocks * (warp_ + i * kWarps);
            if (kUnits % (kBlocks * kWarps) == 0 || unit < kUnits) body(i, unit);
        }
    }

    // Features of value j of a lane: of four accumulators of one tile, then of its neighbour.
    static KGEN_DEVICE int key_of(int unit, int j) {
        return unit / kAlong * 16 + Sums::key_of(0, j % 4);
    }
    static KGEN_DEVICE int value_of(int unit, int j) {
        return unit % kAlong * 16 + Sums::value_of(j / 4, j % 4);
    }

    // Add the segments' sums in order, and give each segment the state before it.
    KGEN_DEVICE void scan() const {
        for_my_units([&](int i, int unit) {
            Vec<float, 4> state[2] = {carried(i, 0), carried(i, 1)};
            const auto states = exchange_.places(unit, mma_lane().g, column_of_quad());
#pragma unroll
            for (int first = 0; first < kBlocks; first += kAtOnce) {
                Vec<float, 4> parts[kAtOnce][2];  // all on their way at once
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block)
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile)
                        parts[block][tile] = load_vec<4>(sums_ + (first + block) * kSum +
                                                         unit * 256 + tile * 128 + 4 * lane_id());
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block) {
                    T* there = states.of(first + block);
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        *reinterpret_cast<Vec<u32, 2>*>(there + 8 * half * Exchange::kUnitStride) =
                            quad_of_row<T>(state[0].data, state[1].data, half);
#pragma unroll
                    for (int j = 0; j < 8; ++j) state[j / 4][j % 4] += parts[block][j / 4][j % 4];
                }
            }
            carry_on(i, state);
        });
    }

    // The state before the next segment to be added, of the lane's part of the warp's unit i.
    KGEN_DEVICE const Vec<float, 4>& carried(int i, int tile) const {
        return *reinterpret_cast<const Vec<float, 4>*>(carried_ + (2 * i + tile) * 4 * kThreads);
    }
    KGEN_DEVICE void carry_on(int i, const Vec<float, 4> (&state)[2]) const {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
            *reinterpret_cast<Vec<float, 4>*>(carried_ + (2 * i + tile) * 4 * kThreads) =
                state[tile];
    }

    Kept& kept_;
    WalkRows<T>& rows_;
    Exchange& exchange_;
    float* sums_;  // of the group, [kBlocks][kSum]
    int warp_;
    T *b_, *v_, *middle_, *before_;
    float* carried_;
};

}  // namespace kgen
