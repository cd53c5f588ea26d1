// What a block of wkv5's and wkv6's backward pass in chunks computes, for sequences that are packed or batch rows. The
// kernels in templates/wkv/backward_chunk_*.cu.jinja:
//
//     states     loops over the steps, forward with the state and backward with its gradient, and writes both at the
//                ends of chunks
//     gradients  all gradients of a chunk from these; one block per chunk, or, if C::kSequential, one block per head
//                that loops backward over its chunks and passes the state's gradient on itself
//     reduce     gu, and wkv5's gw
//
// Workspaces are [B, H, chunks, slices, ...]; of packed sequences [H, chunk_slots, slices, ...] (chunk_memory.cuh),
// where some slots have no steps. There is one slice unless C is a SliceOf.
//
// Shared memory and barriers: state_loop.cuh, chunk_memory.cuh.
#pragma once

#include "kgen/primitives/sm.cuh"
#include "kgen/wkv/chunk_gradients.cuh"
#include "kgen/wkv/reduce.cuh"
#include "kgen/wkv/state_loop.cuh"

namespace kgen::wkv {

// Where the chunks of a sequence and head are. Offset: type of the offsets of packed sequences, or none.
template <class Offset, int Chunk>
struct SequenceChunks {
    Span span;
    i64 chunks;  // of the sequence
    i64 first;   // number of its first chunk in a workspace
    i64 end;     // after its last slot there, which may have no steps

    KGEN_DEVICE SequenceChunks(const Offset* offsets, i64 n, i64 h, i64 N, i64 H, i64 T)
        : span(span_of(offsets, n, T)), chunks(ceil_div(span.steps, i64{Chunk})) {
        if constexpr (kPresent<Offset>) {
            const i64 of_head = h * chunk_slots(N, T);
            first = of_head + first_chunk_slot<Chunk>(span.first, n);
            end = of_head + first_chunk_slot<Chunk>(span.first + span.steps, n + 1);
        } else {
            first = (n * H + h) * chunks;
            end = first + chunks;
        }
    }

    static KGEN_DEVICE i64 chunk_slots(i64 N, i64 T) { return T / Chunk + N; }
};

// C: a BackwardConfig. Offset: its type if C::kPacked, else none.
template <class C, class U, class Offset, int StaggerKcycles>
struct ChunkedBackward {
    using T = typename C::T;
    using W = typename C::W;
    using Gradients = ChunkGradients<C, U>;
    using Passing = StatePassing<C>;
    using Tile = typename Passing::Tile;
    using Index = typename ChunkMemory<C>::Index;
    using Tensors = ChunkTensors<C, U>;
    using Chunks = SequenceChunks<Offset, C::kChunk>;
    static_assert(C::kPacked == kPresent<Offset>, "offsets are of packed sequences");
    static constexpr int kK = C::kK, kV = C::kV, kChunk = C::kChunk, kThreads = C::kThreads;
    static constexpr int kValueBlocks = ceil_div(kV, C::kBlockV);
    static constexpr int kDirections = C::kSequential ? 1 : 2;
    static constexpr int kSlices = C::kKeySlices * C::kValueSlices;
    static constexpr int kSums = C::kValueSlices * C::kHeadKeys;  // of gu, per chunk and head

    // One block writes the state before each chunk and, unless kSequential, the gradient of the state after it, each
    // [B * H, chunks, K / 16, V / 8, 32, 4] for padded K and V. The states of sequences are [N, H, K, V] or null.
    static KGEN_DEVICE void write_states(const Offset* offsets, i64 N, i64 H, i64 steps,
                                         const Tensors& tensors, const float* initial_state,
                                         const float* gfinal_state, float* ginitial_state,
                                         float* states, float* gradients, float scale) {
        // 1. The block's sequence, head, direction and value features.
        const i64 block = C::block_of_slice(), head = block / (kDirections * kValueBlocks), h = head % H;
        const bool backward = block / kValueBlocks % kDirections != 0;
        const int value = static_cast<int>(block % kValueBlocks) * C::kBlockV;
        const int width = min(kV - value, C::kBlockV);
        const Chunks its(offsets, head / H, h, N, H, steps);
        const i64 state = head_state(head) + value;
        const i64 checkpoint = workspace_state(its.first) + value / 8 * kWarpSize * 4;
        const i64 stride = C::state_offset(0, 1, kSlices) - C::state_offset(0, 1, 0);
        const int block_tiles = min(C::kTiles - value / 8, C::kBlockV / 8);
        const StepRows<const W> w = step_rows(tensors.w, its.span, h);

        // 2. 32 steps at a time: S = diag(d) S + k^T v, or G = diag(d) G + scale r^T gy.
        using Loop = StateLoop<C>;
        if (!C::kSequential && backward) {
            Loop{step_rows(tensors.r, its.span, h),
                 step_rows(tensors.gy, its.span, h).from(value), w, its.span.steps, width, scale}
                .template run<true>(gfinal_state != nullptr ? gfinal_state + state : nullptr,
                                    gradients + checkpoint, stride, block_tiles,
                                    ginitial_state != nullptr ? ginitial_state + state : nullptr);
        } else {
            Loop{step_rows(tensors.k, its.span, h),
                 step_rows(tensors.v, its.span, h).from(value), w, its.span.steps, width, 1.0f}
                .template run<false>(initial_state != nullptr ? initial_state + state : nullptr,
                                     states + checkpoint, stride, block_tiles, nullptr);
        }
    }

    // One block writes all gradients of a chunk, or of all chunks of a head. shared_index: in shared memory.
    static KGEN_DEVICE void write_gradients(const Offset* offsets, i64 N, i64 H, i64 steps,
                                            const Tensors& tensors, const float* gfinal_state,
                                            float* ginitial_state, const float* states,
                                            float* gradients, float* gu_parts, float* gw_parts,
                                            float scale, Index* shared_index) {
        // 1. The block's sequence, head and chunk (the last chunk if kSequential). A slot without steps has no
        // gradients, but its parts of gu and gw are summed, so they must be zero.
        const i64 head = sequence_and_head(offsets, N, H, steps), n = head / H, h = head % H;
        const Chunks its(offsets, n, h, N, H, steps);
        const i64 part = C::kSequential ? its.first + its.chunks - 1 : i64{C::block_of_slice()};
        const i64 number = part - its.first;
        if constexpr (C::kPacked) {
            const i64 unused = its.first + its.chunks;
            if (C::kSequential ? unused < its.end : number >= its.chunks)
                for (int key = thread_rank(); key < kK; key += kThreads) {
                    const i64 sum = unused * kSums + C::template first<Features::key_terms>() + key;
                    gu_parts[sum] = 0.0f;
                    if constexpr (!C::kPerStep) gw_parts[sum] = 0.0f;
                }
        }
        if (!C::kSequential && number >= its.chunks) {
            if constexpr (C::kPdl) griddepcontrol_wait();  // as all threads must, see pdl.cuh
            return;
        }
        Index index = index_of(its, n, h, number, part);

        // 2. The chunk, or all chunks of the head.
        const ChunkBlock block{tensors, shared_index, gu_parts, gw_parts, scale};
        if constexpr (C::kSequential) {
            block.all_chunks(index, head, gfinal_state, ginitial_state, states, gradients);
        } else {
            const Gradients chunk{tensors, shared_index, scale};
            chunk.clear_padding();
            const i64 offset = workspace_state(part);
            write_chunk_gradients(chunk, index, states + offset, gradients + offset, gu_parts,
                                  gw_parts);
        }
    }

    // One block of Threads computes gu; blocks after those of gu compute gw if w has no steps. gw, gw_parts: null if w
    // has steps.
    template <int Threads, class G>
    static KGEN_DEVICE void reduce(i64 N, i64 B, i64 H, i64 steps, const float* gu_parts, U* gu,
                                   const float* gw_parts, G* gw) {
        const i64 chunks =
            C::kPacked ? Chunks::chunk_slots(N, steps) : ceil_div(steps, i64{kChunk});
        const i64 parts = chunks * C::kValueSlices;
        const i64 blocks = C::kPerStep ? gridDim.x : gridDim.x / 2, block = blockIdx.x;
        if (C::kPerStep || block < blocks) {
            sum_chunks<Threads, C::kPdl>(block, gu_parts, B, H, i64{C::kHeadKeys}, parts, gu);
        } else if constexpr (!C::kPerStep) {
            sum_chunks<Threads, C::kPdl>(block - blocks, gw_parts, B, H, i64{C::kHeadKeys}, parts,
                                         gw);
        }
    }

private:
    // What a block of the second kernel holds in registers throughout.
    struct ChunkBlock {
        const Tensors& tensors;
        Index* shared_index;
        float *gu_parts, *gw_parts;
        float scale;

        // Loops backward over the head's chunks. Between two chunks the gradient of the state lies in `gradients`,
        // because the scores take all registers. A thread reads only what it wrote itself, which needs no barrier.
        KGEN_DEVICE void all_chunks(Index index, i64 head, const float* gfinal_state,
                                    float* ginitial_state, const float* states,
                                    float* gradients) const {
            const auto gradient = [&] { return gradients + C::state_offset(blockIdx.x, 1, 0); };
            const auto key0 = [] { return read_thread_rank() / kWarpSize * 16; };
            {
                const int first_key = key0();
                Tile last;
                last.clear();
                if (gfinal_state != nullptr)
                    last.load_rows(
                        gfinal_state + head_state(head) + i64{first_key} * C::kHeadValues,
                        C::kHeadValues, kK - first_key, kV);
                last.store_fragments(gradient(), C::kTiles);
            }
            Gradients{tensors, shared_index, scale}.clear_padding();
            if (index.chunk >= 0) Gradients{tensors, shared_index, scale}.copy_keys(index);
            if constexpr (C::kPdl) griddepcontrol_wait(states);
            // Two blocks of an SM go through the same phases, which use different units. If they ran in step, they
            // would compete for one unit after the other.
            if constexpr (StaggerKcycles > 0)
                if (static_cast<int>(blockIdx.x) >= sm_count())
                    sleep_cycles(1000 * StaggerKcycles);
#pragma unroll 1
            while (index.chunk >= 0) {
                const Gradients chunk{tensors, shared_index, scale};
                write_chunk_gradients(chunk, index, states + workspace_state(index.part), gradient(),
                                      gu_parts, gw_parts);
                index = shared_index->previous(kChunk);
                sync_block();  // before the next chunk's index and copies overwrite this one's
            }
            if (ginitial_state != nullptr) {
                const int first_key = key0();
                Tile first;
                first.load_fragments(gradient());
                first.store_rows(
                    ginitial_state + head_state(head) + i64{first_key} * C::kHeadValues,
                    C::kHeadValues, kK - first_key, kV);
            }
        }
    };

    // Floats from the start of the states to the block's first key and value of a head's state.
    static KGEN_DEVICE i64 head_state(i64 head) {
        return (head * C::kHeadKeys + C::template first<Features::keys>()) * C::kHeadValues +
               C::template first<Features::values>();
    }

    // Floats from the start of the workspace to this warp's tile of a chunk's state.
    static KGEN_DEVICE i64 workspace_state(i64 part) {
        return C::state_offset(0, 0, part * kSlices + C::slice());
    }

    // n * H + h of the block.
    static KGEN_DEVICE i64 sequence_and_head(const Offset* offsets, i64 N, i64 H, i64 steps) {
        const i64 block = C::block_of_slice();
        if constexpr (C::kSequential) {
            return block;
        } else if constexpr (C::kPacked) {
            const i64 slots = Chunks::chunk_slots(N, steps);
            return sequence_of_slot<kChunk>(offsets, N, block % slots) * H + block / slots;
        } else {
            return block / ceil_div(steps, i64{kChunk});
        }
    }

    static KGEN_DEVICE Index index_of(const Chunks& its, i64 n, i64 h, i64 number, i64 part) {
        const int left =
            static_cast<int>(min(its.span.steps - number * kChunk, i64{kChunk}));
        const ChunkIndex index{static_cast<int>(its.span.b), static_cast<int>(h),
                               static_cast<int>(number), left, static_cast<int>(part)};
        if constexpr (C::kPacked) {
            return {index, its.span.first};
        } else {
            return index;
        }
    }
};

}  // namespace kgen::wkv
