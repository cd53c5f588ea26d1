// Which segment of a sequence a block has, for inputs with few heads, where segments of T run at the same time.
//
// All segments of a sequence but the last have the same number of whole chunks. The last segments of a short sequence
// may have no steps, and the segment before them may have a part of a chunk.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// Block `block` of a grid [heads, Launched, Columns], for segments 0 to Launched - 1 of `Segments`. Chunk: steps of a
// chunk.
template <int Segments, int Launched, int Columns, int Chunk = 16>
struct SegmentBlock {
    i64 head;  // counted over sequences and heads
    int segment, columns;

    KGEN_DEVICE explicit SegmentBlock(int block)
        : head(block / (Launched * Columns)),
          segment(block / Columns % Launched),
          columns(block % Columns) {}

    // The steps of the segment, the steps of the sequence before it, and those after it.
    KGEN_DEVICE Span own(const Span& sequence) const {
        const i64 first = begin(sequence.steps);
        return {sequence.b, sequence.first + first,
                min(length(sequence.steps), sequence.steps - first)};
    }
    KGEN_DEVICE Span earlier(const Span& sequence) const {
        return {sequence.b, sequence.first, begin(sequence.steps)};
    }
    KGEN_DEVICE Span later(const Span& sequence) const {
        const i64 end = min(begin(sequence.steps) + length(sequence.steps), sequence.steps);
        return {sequence.b, sequence.first + end, sequence.steps - end};
    }

    // The place in workspaces of a segment that is not the last one. The state before a segment has the place of the
    // segment before it.
    KGEN_DEVICE i64 place() const { return head * (Segments - 1) + segment; }

private:
    static KGEN_DEVICE i64 length(i64 steps) {
        return ceil_div(steps, i64{Chunk * Segments}) * Chunk;
    }
    KGEN_DEVICE i64 begin(i64 steps) const { return min(segment * length(steps), steps); }
};

// The cut of every sequence into the same number of segments, for kernels that work with other cuts as well
// (packed_segments.cuh). Sums: number of a sequence's segments, from the first one on, that a first kernel sums up.
template <int Segments, int Sums, int Chunk>
struct EqualSegments {
    static constexpr bool kLeavesOut = false;  // whether blocks without work return
    template <int Columns>
    using Block = SegmentBlock<Segments, Segments, Columns, Chunk>;

    // The block with an index in a launch of Columns blocks per segment; sum_block: of the first kernel.
    template <int Columns>
    KGEN_DEVICE SegmentBlock<Segments, Sums, Columns, Chunk> sum_block(int index) const {
        return SegmentBlock<Segments, Sums, Columns, Chunk>(index);
    }
    template <int Columns>
    KGEN_DEVICE Block<Columns> block(int index) const {
        return Block<Columns>(index);
    }
    // Places in a workspace with sums of segments, for `heads` heads of all sequences.
    static KGEN_DEVICE i64 places(i64 heads) { return heads * Sums; }
    // The place in workspaces of the first segment of a block's sequence and head; its other segments follow.
    template <class Block>
    KGEN_DEVICE i64 first_place(const Block& block) const {
        return block.head * Sums;
    }
    // The place of the gradient after a block's segment, behind the places of all sums.
    template <class Block>
    KGEN_DEVICE i64 gradient_place(const Block& block, i64 heads) const {
        return (heads + block.head) * Sums + block.segment;
    }
    // Number of segments after the block's.
    template <class Block>
    KGEN_DEVICE int later_segments(const Block& block, const Span&) const {
        return Segments - 1 - block.segment;
    }
    // Whether the block serves its sequence if that has no steps.
    template <class Block>
    KGEN_DEVICE bool serves_no_steps(const Block& block) const {
        return block.segment == Segments - 1;
    }
};

}  // namespace kgen::wkv
