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

}  // namespace kgen::wkv
