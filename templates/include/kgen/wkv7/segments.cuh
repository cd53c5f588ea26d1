// A head's sequence in segments of T that run at the same time, for inputs with few heads.
//
// Value columns of the state are independent, and each step is linear in the state before it. A segment of steps
// therefore has a transition matrix P [K, K], the product of diag(d_t) + b_t a_t^T with late steps on the left, and a
// state L [K, V], which its steps compute from a state of zero. With S_s the state before segment s:
//
//     S_{s+1} = P_s S_s + L_s
//
// P has the recurrence of L for K further columns, where v is zero and the state begins as the identity matrix.
//
// The gradient of the state passes the same steps from the last to the first. With G_s the gradient after segment s,
// and M_s the gradient before segment s that its steps compute from a gradient of zero after it:
//
//     G_{s-1} = P_s^T G_s + M_s
//
// M of the last segment begins with the gradient of the final state, so that it already is G before that segment; P of
// this segment is not read.
//
//     SegmentColumns     initial state and stores of a consumer warp of specialized_loop.cuh: 16 columns of L or P
//     GradientColumns    the same for 16 columns of M
//     scan_segments      S of all segments but the first, or G of all but the last, in fp32
//
// Layout: states L, later S of the next segment [segments - 1][K][V]; gradients M, later G of the segment before
// [segments - 1][K][V]; transitions, transposed, [segments - 1][K][K].
//
// Shared memory of scan_segments: float state[2][K][20].
//
// Synchronisation: scan_segments is called by a whole block, and has one block barrier per segment.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/mma.cuh"
#include "kgen/wkv/segment_block.cuh"
#include "kgen/wkv7/decay.cuh"

namespace kgen::wkv7 {

using kgen::wkv::SegmentBlock;

// Tile `tile` of 16 columns: tiles of value features come first, then tiles of columns of P.
template <int Keys, int Values>
struct SegmentColumns {
    static constexpr int kValueTiles = ceil_div(Values, 16), kTiles = kValueTiles + ceil_div(Keys, 16);
    int tile;
    float* state;       // L [K, V]
    float* transition;  // P [K, K], transposed

    KGEN_DEVICE bool of_values() const { return tile < kValueTiles; }
    // The tile's first column of v, and how many columns of v exist from there on; none for P.
    KGEN_DEVICE int first_value() const { return of_values() ? 16 * tile : 0; }
    KGEN_DEVICE int values() const { return of_values() ? Values - 16 * tile : 0; }

    // The state before the segment's first step.
    template <int Tiles>
    KGEN_DEVICE void begin(float (&at)[Tiles][4]) const {
        const MmaLane lane = mma_lane();
        const int first = 16 * (tile - kValueTiles) + lane.g;  // below zero for value features
#pragma unroll
        for (int key_tile = 0; key_tile < Tiles; ++key_tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * key_tile + 2 * lane.q + i % 2, column = first + i / 2 * 8;
                at[key_tile][i] = !of_values() && key == column && key < Keys ? 1.0f : 0.0f;
            }
    }

    // Stores the state after the segment's last step.
    template <int Tiles>
    KGEN_DEVICE void end(const float (&at)[Tiles][4]) const {
        const MmaLane lane = mma_lane();
        const int first = 16 * (of_values() ? tile : tile - kValueTiles) + lane.g;
        const int columns = of_values() ? Values : Keys;
        float* to = of_values() ? state + first : transition + first * Keys;
        const int pitch = of_values() ? Values : 1, eighth = of_values() ? 8 : 8 * Keys;
#pragma unroll
        for (int key_tile = 0; key_tile < Tiles; ++key_tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = 8 * key_tile + 2 * lane.q + i % 2;
                if (key < Keys && first + i / 2 * 8 < columns)
                    to[key * pitch + i / 2 * eighth] = at[key_tile][i];
            }
    }
};

// Tile `tile` of 16 value features of the gradient of the state.
template <int Keys, int Values>
struct GradientColumns {
    int tile;
    const float* behind;  // the gradient after the segment's last step [K, V], or null: zeros
    float* gradient;      // the gradient before its first step [K, V]

    KGEN_DEVICE int first_value() const { return 16 * tile; }
    KGEN_DEVICE int values() const { return Values - 16 * tile; }

    template <int Tiles>
    KGEN_DEVICE void begin(float (&at)[Tiles][4]) const {
#pragma unroll
        for (int i = 0; i < 4 * Tiles; ++i)
            at[i / 4][i % 4] = behind != nullptr && is_there(i) ? behind[place(i)] : 0.0f;
    }
    template <int Tiles>
    KGEN_DEVICE void end(const float (&at)[Tiles][4]) const {
#pragma unroll
        for (int i = 0; i < 4 * Tiles; ++i)
            if (is_there(i)) gradient[place(i)] = at[i / 4][i % 4];
    }

private:
    // Key and column of the lane's element i.
    static KGEN_DEVICE int key(int i) { return 8 * (i / 4) + 2 * mma_lane().q + i % 2; }
    KGEN_DEVICE int column(int i) const { return 16 * tile + mma_lane().g + i % 4 / 2 * 8; }
    KGEN_DEVICE bool is_there(int i) const { return key(i) < Keys && column(i) < Values; }
    KGEN_DEVICE int place(int i) const { return key(i) * Values + column(i); }
};

// Adds up 2 * Half sums of two lanes that are Half / 4 apart. The lane keeps the first or the last Half of them, in
// their first places.
template <int Half>
KGEN_DEVICE void keep_half(float (&sums)[16], bool last) {
#pragma unroll
    for (int i = 0; i < Half; ++i) {
        const float given = last ? sums[i] : sums[Half + i];
        const float kept = last ? sums[Half + i] : sums[i];
        sums[i] = kept + shfl_xor(given, Half / 4);
    }
}

// Replaces L of each segment by the state before the next segment, for 16 value features. initial: the state before the
// first segment, or null, which means zeros; P of the first segment is then not read. initial and states begin with the
// block's first column; `width` of its columns exist. Four neighbouring lanes share a row, and each sums over every
// fourth key. Backward: the same with M, from the last segment on, without `initial`.
template <int Keys, int Values, int Sums, int Threads, Direction D = Direction::forward>
KGEN_DEVICE void scan_segments(const float* initial, const float* transitions, float* states,
                               int width) {
    using Quad = Vec<float, 4>;
    constexpr int kColumns = 16, kPitch = kColumns + 4;  // keys of neighbouring lanes lie in different banks
    constexpr bool kBack = D == Direction::backward;
    const int part = thread_rank() % 4;
    if constexpr (kBack) {
        states += (Sums - 1) * (Keys * Values);
        transitions += Sums * (Keys * Keys);  // P of the last segment has no place, and is not read
    }
    float* before = dynamic_smem<float>();
    float* behind = before + Keys * kPitch;
    if (initial != nullptr) {
        for (int i = thread_rank(); i < Keys * kColumns; i += Threads) {
            const int key = i / kColumns, column = i % kColumns;
            before[key * kPitch + column] = column < width ? initial[key * Values + column] : 0.0f;
        }
        sync_block();
    }
#pragma unroll 1
    for (int segment = 0; segment < Sums; ++segment) {
#pragma unroll 1
        for (int first = 0; first < 32 * ceil_div(Keys, 8); first += Threads) {  // the same for all lanes of a warp
            const int row = (first + thread_rank()) / 4;
            float sums[kColumns] = {};
            if (row < Keys && (segment > 0 || initial != nullptr)) {
#pragma unroll 16
                for (int key = part; key < Keys; key += 4) {
                    const float p = transitions[kBack ? row * Keys + key : key * Keys + row];
#pragma unroll
                    for (int quad = 0; quad < 4; ++quad) {
                        const Quad s = *reinterpret_cast<const Quad*>(before + key * kPitch + 4 * quad);
#pragma unroll
                        for (int x = 0; x < 4; ++x)
                            sums[4 * quad + x] = fma(p, s[x], sums[4 * quad + x]);
                    }
                }
            }
            keep_half<8>(sums, part & 2);
            keep_half<4>(sums, part & 1);
            if (row < Keys) {
                float* state = states + row * Values + 4 * part;
                Quad next;
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const bool there = 4 * part + x < width;
                    next[x] = sums[x] + (there ? state[x] : 0.0f);
                    if (there) state[x] = next[x];
                }
                *reinterpret_cast<Quad*>(behind + row * kPitch + 4 * part) = next;
            }
        }
        sync_block();  // the next segment reads `behind`, and writes what this one read
        float* read = before;
        before = behind;
        behind = read;
        states += (kBack ? -1 : 1) * Keys * Values;
        transitions += (kBack ? -1 : 1) * Keys * Keys;
    }
}

}  // namespace kgen::wkv7
