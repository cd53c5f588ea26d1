// The gradients of chunk_rows.cuh by blocks that compute several chunks of a head, one after the other.
//
// While a block computes a chunk, the next chunk's inputs are being copied: r, k, a, b and w to the second buffer of
// each warp, the rows of gy, gsa, v and sa to a buffer that every thread reads before it starts the next copies, and
// the states to L2. Addresses advance by additions. The warps copy whole rows for each other (WholeRowCopier).
//
// Shared memory: that of ChunkRows without its inputs; Value inputs[warps][2][5][16][16] and 32 bytes per warp; 16-byte
// pieces of gy and v, then of gsa and sa, in the order of the threads that copy them.
//
// Synchronisation: that of ChunkRows per chunk. Its first barrier lies between the wait for a chunk's copies and their
// first reader, and between the last reader of a buffer and the next copies to it. A thread reads only staged pieces
// that it copied itself. One vote at the end: if a result is not finite, the block computes all steps of its chunks one
// by one.
//
// Config: that of RowGradients, plus kRowChunks: chunks of a block; kVec is 8.
#pragma once

#include "kgen/wkv7/chunk_rows.cuh"

namespace kgen::wkv7 {

template <class Config, class State = float>
class ChunkRowsLoop : public ChunkRows<Config, State> {
    using Rows = ChunkRows<Config, State>;
    using Value = typename Config::Value;
    using W = typename Config::W;
    using typename Rows::Buffers, typename Rows::Four, typename Rows::Scores;
    using Rows::a, Rows::b, Rows::first_key, Rows::gradient, Rows::gsa, Rows::gy, Rows::k, Rows::kGroup, Rows::kK,
        Rows::kTile, Rows::kV, Rows::kWarps, Rows::r, Rows::sa, Rows::state, Rows::steps, Rows::v, Rows::w;
    static_assert(Config::kVec == 8, "a piece of 16 bits is one copy");

    static constexpr int kPieces = 2 * Buffers::kBlocks;   // pieces of eight value features in a row
    static constexpr int kStaged = 16 * 8 * kPieces;       // elements of a staged tensor
    static constexpr int kInputs = 2 * 5 * kTile + 16;     // 16-bit values of a warp's buffers
    template <class T>
    using Copier = WholeRowCopier<T, 8, kWarps, 1, kInputs, 0>;
    // Whether every warp has 16 keys, and rows of states end with a block of 16 value features.
    static constexpr bool kWhole = kK % Rows::kKeys == 0 && kV % 16 == 0;

public:
    using Rows::kThreads;
    static constexpr int kBytes = Buffers::kBytes + kWarps * 2 * kInputs + 12 * kStaged;

    // Computes `count` chunks of a sequence that has `left` steps from the first of them on. Returns NaN if a result is
    // not finite.
    KGEN_DEVICE float walk(int count, i64 left) {
        const int warp = thread_rank() / kWarpSize, key = first_key + 16 * warp;
        const Buffers buffers{dynamic_smem<float>()};
        u16* const tiles = first_inputs() + warp * kInputs;
        const Scores scores{buffers, warp};
        float nonfinite = 0.0f;
        steps = steps_of(left);
        sync_block();  // all warps have read the buffers of an earlier walk
        start<0>(0, steps);
#pragma unroll 1
        for (int chunk = 0; chunk < count; ++chunk) {
            u16* const inputs = tiles + chunk % 2 * (5 * kTile);
            Vec<float, 4> rows_s[kGroup][2], rows_g[kGroup][2];
            load_states(rows_s, state, key);
            load_states(rows_g, gradient, key);
            cp_async_wait<0>();
            put_values(scores);
            left -= 16;
            sync_block();
            if (chunk + 1 < count) {
                start<16>((chunk + 1) % 2, steps_of(left));
                prefetch_state(state + kK * kV);
                prefetch_state(gradient + kK * kV);
            }
            nonfinite += Rows::compute(scores, inputs, rows_s, rows_g, key);
            advance();
            steps = steps_of(left);
        }
        return nonfinite;
    }

private:
    static KGEN_DEVICE int steps_of(i64 left) { return static_cast<int>(min(left, i64{16})); }

    // Starts the copies of the chunk that begins kAhead steps further on and has `there` steps, to buffer 0 or 1.
    template <int kAhead>
    KGEN_DEVICE void start(int buffer, int there) const {
        const int width = kK - first_key, rank = thread_rank();
        u16* const inputs = first_inputs() + buffer * (5 * kTile);
        Copier<Value>(r, first_key, kAhead, rank).start(inputs, there, width);
        Copier<Value>(k, first_key, kAhead, rank).start(inputs + kTile, there, width);
        Copier<Value>(a, first_key, kAhead, rank).start(inputs + 2 * kTile, there, width);
        Copier<Value>(b, first_key, kAhead, rank).start(inputs + 3 * kTile, there, width);
        Copier<W>(w, first_key, kAhead, rank).start(inputs + 4 * kTile, there, width);
#pragma unroll
        for (int n = 0; n < ceil_div(16 * kPieces, kThreads); ++n) {
            const int i = rank + n * kThreads, piece = i % kPieces, step = slot_step(i / kPieces);
            if (16 * kPieces % kThreads != 0 && i >= 16 * kPieces) break;
            const bool inside = step < there && 8 * piece < kV;
            const i64 t = inside ? step + kAhead : 0;
            cp_async_or_zero<16>(staged_gy() + 8 * i, gy.first + t * gy.stride + 8 * piece, inside);
            cp_async_or_zero<16>(staged_v() + 8 * i, v.first + t * v.stride + 8 * piece, inside);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 4 * (piece + half * kPieces);
                const bool exists = step < there && column < kV;
                const i64 row = exists ? step + kAhead : 0;
                cp_async_or_zero<16>(staged_gsa() + quad(i, half), gsa.first + row * gsa.stride + column, exists);
                cp_async_or_zero<16>(staged_sa() + quad(i, half), sa.first + row * sa.stride + column, exists);
            }
        }
        cp_async_commit();
    }
    // The offset at which the first or second four floats of piece i are staged.
    static KGEN_DEVICE int quad(int i, int half) { return half * (kStaged / 2) + 4 * i; }

    // Stores the rows of value features, from the pieces that this thread copied.
    KGEN_DEVICE void put_values(const Scores& scores) const {
#pragma unroll
        for (int n = 0; n < ceil_div(16 * kPieces, kThreads); ++n) {
            const int i = thread_rank() + n * kThreads, piece = i % kPieces;
            if (16 * kPieces % kThreads != 0 && i >= 16 * kPieces) break;
            const int row = i / kPieces * Buffers::kPitch;
            float of_gy[8], of_v[8];
            to_floats(*reinterpret_cast<const Vec<Value, 8>*>(staged_gy() + 8 * i), of_gy);
            to_floats(*reinterpret_cast<const Vec<Value, 8>*>(staged_v() + 8 * i), of_v);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = row + 4 * (piece + half * kPieces);
                scores.template put<kRowGy>(row + 8 * piece + 4 * half, four(of_gy + 4 * half));
                scores.template put<kRowV>(row + 8 * piece + 4 * half, four(of_v + 4 * half));
                scores.template put<kRowGsa>(column, *reinterpret_cast<const Four*>(staged_gsa() + quad(i, half)));
                scores.template put<kRowSa>(column, *reinterpret_cast<const Four*>(staged_sa() + quad(i, half)));
            }
        }
    }
    static KGEN_DEVICE Four four(const float* x) { return {{x[0], x[1], x[2], x[3]}}; }

    KGEN_DEVICE void load_states(Vec<float, 4> (&rows)[kGroup][2], const State* of, int key) const {
        if constexpr (kWhole) {
            const MmaLane lane = mma_lane();
            const State* from = of + i64{key + lane.g} * kV + 4 * lane.q;
#pragma unroll
            for (int n = 0; n < kGroup; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) rows[n][half] = load_four<4>(from + 8 * half * kV + 16 * n, 4);
        } else {
            Rows::load_group(rows, of, key, 0);
        }
    }

    // Prefetches to L2 the rows of a state that the block reads.
    KGEN_DEVICE void prefetch_state(const State* of) const {
        constexpr int kLine = 128 / sizeof(State);
        const int elements = min(Rows::kKeys, kK - first_key) * kV;
        const State* const from = of + i64{first_key} * kV;
#pragma unroll
        for (int n = 0; n < ceil_div(Rows::kKeys * kV, kThreads * kLine); ++n) {
            const int i = (thread_rank() + n * kThreads) * kLine;
            if (i < elements) prefetch_to_l2(from + i);
        }
    }

    KGEN_DEVICE void advance() {
        gy.first += 16 * gy.stride;
        r.first += 16 * r.stride;
        k.first += 16 * k.stride;
        v.first += 16 * v.stride;
        a.first += 16 * a.stride;
        b.first += 16 * b.stride;
        w.first += 16 * w.stride;
        sa.first += 16 * sa.stride;
        gsa.first += 16 * gsa.stride;
        state += kK * kV;
        gradient += kK * kV;
        this->gr.first += 16 * this->gr.stride_t;
        this->gk.first += 16 * this->gk.stride_t;
        this->ga.first += 16 * this->ga.stride_t;
        this->gb.first += 16 * this->gb.stride_t;
        this->gw.first += 16 * this->gw.stride_t;
    }

    static KGEN_DEVICE u16* first_inputs() { return dynamic_smem<u16>() + Buffers::kBytes / 2; }
    static KGEN_DEVICE Value* staged_gy() { return reinterpret_cast<Value*>(first_inputs() + kWarps * kInputs); }
    static KGEN_DEVICE Value* staged_v() { return staged_gy() + kStaged; }
    static KGEN_DEVICE float* staged_gsa() { return reinterpret_cast<float*>(staged_v() + kStaged); }
    static KGEN_DEVICE float* staged_sa() { return staged_gsa() + kStaged; }
};

// One block computes kKeys keys of a head and kRowChunks chunks in the order of their numbers (checkpoints.cuh).
template <class Config, class State, bool StepByStep = false, class Offset>
KGEN_DEVICE void backward_chunk_rows_loop(
    const Offset* cu_seqlens, i64 N, i64 T, i64 H,
    const KeyRowsTensors<typename Config::Value, typename Config::W, State>& x, float scale) {
    using Block = ChunkRowsLoop<Config, State>;
    constexpr int kSteps = Block::kSteps, kKeyBlocks = ceil_div(Config::kK, Block::kKeys);
    // Opaque, so that the repetition computes its addresses anew instead of keeping others in registers.
    const u32 zero = static_cast<u32>(H >> 63);
    u32 block = blockIdx.x;
    if constexpr (StepByStep) opaque(block, zero);
    const u32 heads = static_cast<u32>(H);
    const i64 h = block / kKeyBlocks % heads, count = head_chunks<kSteps, kPresent<Offset>>(N, T);
    i64 index = i64{block / kKeyBlocks / heads} * Config::kRowChunks;
    const i64 end = min(index + Config::kRowChunks, count);
    float nonfinite = 0.0f;
    while (index < end) {
        const Chunk chunk = chunk_at<kSteps>(cu_seqlens, static_cast<u32>(index), N, T);
        if (chunk.steps == 0) {  // untested: only packed sequences leave numbers of chunks unused
            ++index;
            continue;
        }
        Block rows = block_rows<Block, kSteps, kPresent<Offset>>(
            x, chunk, N, T, H, h, index, static_cast<int>(block % kKeyBlocks) * Block::kKeys, scale);
        if constexpr (StepByStep) {
            rows.step_by_step();
            ++index;
        } else {
            const i64 left = chunk.span.steps - chunk.first;
            const i64 here = min(end - index, ceil_div(left, i64{kSteps}));
            nonfinite += rows.walk(static_cast<int>(here), left);
            index += here;
        }
    }
    if constexpr (!StepByStep) {
        if (block_any_nonfinite<Config::kRowWarps>(nonfinite)) {
            opaque(N, zero);
            opaque(T, zero);
            opaque(H, zero);
            backward_chunk_rows_loop<Config, State, true>(cu_seqlens, N, T, H, x, scale);
        }
    }
}

// One block computes kKeys keys of a head and one chunk, or kRowChunks chunks.
template <class Config, class State = float, class Offset>
KGEN_DEVICE void backward_chunk_rows(
    const Offset* cu_seqlens, i64 N, i64 T, i64 H,
    const KeyRowsTensors<typename Config::Value, typename Config::W, State>& x, float scale) {
    if constexpr (Config::kRowChunks > 1) {
        backward_chunk_rows_loop<Config, State>(cu_seqlens, N, T, H, x, scale);
    } else {
        backward_rows<ChunkRows<Config, State>>(cu_seqlens, N, T, H, x, scale);
    }
}

}  // namespace kgen::wkv7
