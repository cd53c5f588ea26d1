// Segments of packed sequences whose lengths differ much: each sequence is cut every `length` steps.
//
// Segments of one number per sequence would leave most SMs idle while the longest sequence is computed. Segments of one
// length take equally long, and short sequences are not cut at all.
//
// A head has a slot per segment. The slots of sequence n begin at first_n / length + n, so that each sequence has at
// least one, and [T / length + N] are enough. Slots that no segment has are left out.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// Offset: element of cu_seqlens.
template <class Offset>
struct PackedSegments {
    static constexpr bool kLeavesOut = true;

    const Offset* cu_seqlens;  // [N + 1]
    i64 N, T, H;               // T: below 2^31
    i64 length;                // of a segment, whole chunks

    // One segment of a head, as SegmentBlock.
    struct Segment {
        i64 head;  // counted over sequences and heads
        int segment, columns;
        i64 length, first;  // first: place of the sequence's first segment

        KGEN_DEVICE Span own(const Span& sequence) const {
            const i64 begins = begin(sequence);
            return {sequence.b, sequence.first + begins, min(length, sequence.steps - begins)};
        }
        KGEN_DEVICE Span earlier(const Span& sequence) const {
            return {sequence.b, sequence.first, begin(sequence)};
        }
        KGEN_DEVICE Span later(const Span& sequence) const {
            const i64 end = min(begin(sequence) + length, sequence.steps);
            return {sequence.b, sequence.first + end, sequence.steps - end};
        }

    private:
        KGEN_DEVICE i64 begin(const Span& sequence) const { return min(segment * length, sequence.steps); }
    };

    template <int>
    using Block = Segment;

    // Block `index` of a grid [slots, H, Columns]. All lanes of a warp call it together.
    template <int Columns>
    KGEN_DEVICE Segment block(int index) const {
        const u32 of_heads = static_cast<u32>(index) / Columns, heads = static_cast<u32>(H);
        const i64 slot = of_heads / heads, h = of_heads % heads;
        int begun = 0;  // sequences whose slots begin up to this one
        for (i64 i = lane_id(); i - lane_id() < N; i += kWarpSize)
            begun += set_bits(ballot(i < N && slot_of(i) <= slot));
        const i64 n = begun - 1, first_slot = slot_of(n);
        return {n * H + h, static_cast<int>(slot - first_slot), index % Columns, length,
                h * slots() + first_slot};
    }
    template <int Columns>
    KGEN_DEVICE Segment sum_block(int index) const {
        return block<Columns>(index);
    }
    KGEN_DEVICE i64 slots() const { return static_cast<u32>(T) / static_cast<u32>(length) + N; }
    KGEN_DEVICE i64 places(i64) const { return H * slots(); }
    KGEN_DEVICE i64 first_place(const Segment& block) const { return block.first; }
    KGEN_DEVICE i64 gradient_place(const Segment& block, i64 heads) const {
        return places(heads) + block.first + block.segment;
    }
    KGEN_DEVICE int later_segments(const Segment& block, const Span& sequence) const {
        return static_cast<int>(ceil_div(block.later(sequence).steps, length));
    }
    KGEN_DEVICE bool serves_no_steps(const Segment& block) const { return block.segment == 0; }

private:
    static KGEN_DEVICE int set_bits(u32 mask) {
#if KGEN_HOST
        return __builtin_popcount(mask);
#else
        return __popc(mask);
#endif
    }
    KGEN_DEVICE i64 slot_of(i64 n) const {
        return static_cast<u32>(cu_seqlens[n]) / static_cast<u32>(length) + n;
    }
};

}  // namespace kgen::wkv
