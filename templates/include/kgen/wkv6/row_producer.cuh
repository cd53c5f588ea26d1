// Rows scaled by decays, and scores, of chunks of 16 steps of wkv5 and wkv6, for all value features of a head; bf16
// operands (mma, sm_80), any decay from 0 to 1: no exponent is above 0, and nothing branches on values.
//
//     R_t = r_t d_0 ... d_{t-1}     K_s = k_s d_{s+1} ... d_15     P = d_0 ... d_15
//     scores[t][s] = sum_k r_t d_{s+1} ... d_{t-1} k_s, s < t      scores[t][t] = sum_k r_t u k_t
//
// All decays are running products. Scores are computed by halving (kgen/chunked/halving_decay.cuh): blocks of 16, 8, 4
// and 2 steps have a late half and an early half, and a late step t reads an early step s by
//
//     (r_t * d from the middle to before t) (k_s * d after s to the middle)
//
// where every factor is at most 1. A pair s < t belongs to the level of the highest bit in which s and t differ.
//
// Each warp takes every Warps-th chunk, and has Warps intervals between block barriers for it: in each interval it
// computes a part of the keys, kPerPart tiles of 16. So no sum is over warps, and the warps finish their chunks in
// turn, one chunk per interval.
//
// Each lane has four keys of two steps, `early` (0 to 7) and 15 - early: at each level one of the two steps is in a
// late half, the other one in an early half. The eight lanes that hold the rows of a fragment thus have all late steps
// as operand A, and all early steps as operand B: one product per 16 keys and level, from registers. Late rows are rows
// 0 to 7 of A for blocks of 2 and 8 steps, rows 8 to 15 otherwise, and the other rows are zero, so that two levels
// share the sums of a product. Products of decays over blocks of 1, 2, 4 and 8 steps come by shuffles; with one decay
// per head (!PerStep) they are powers of the lane's own decay. With Powers they come from a table: at a level with
// halves of n steps the lane's late step t and its early step have the same factor, d to the power t % n, and rows have
// d to the powers `early` and 15 - early.
//
// Layout in shared memory (struct ChunkBuffers), each tile swizzled (swizzled_tile.cuh):
//
//     bf16 rows[Warps + 1][kRows][16][kRow]   slot, tensor R K, or R K and the low terms of R; kRow: 16, or K padded to
//                                         a multiple of 64
//     bf16 scores[2][2][16][16]           chunk % 2, high and low terms; scores of steps with later steps stay zero
//     float decay[Warps + 1, or 1][kRow]  P
//     float bonus[kRow]                   u
//     float step_decay[kRow, or 0]        d of all steps, with one decay per head; with Powers [16][kRow + 16], its
//                                         powers 0 to 15 (power_place)
//     bf16 r, k and W w [Warps][Stages][kPerPart]: copies of the inputs of a part (part_copier.cuh); with RowCopies
//                                         bf16 r, k and W w [Warps][2][16][kRow], of a chunk (row_copier.cuh)
//
// Rows beyond the last step are zero. Decays beyond it are not 1, but nothing reads a state after that step.
//
// Synchronisation: the caller ends each interval by a block barrier. Chunk n is read in the Warps-th interval after the
// one of its first part, so there are Warps + 1 slots. The constructor has a barrier of the producers (2). Each warp
// copies its own inputs, Stages - 1 parts ahead, or with RowCopies one of its chunks ahead.
//
// Precision: rows are rounded to bf16 once, with two exceptions: late rows of blocks of 8 and 16 steps have two terms
// for scores, and rows R have two terms for products with the state if RTerms is 2. Scores are summed in fp32 and
// stored in two terms; the bonus is fp32.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/split_bf16.cuh"
#include "kgen/wkv6/part_copier.cuh"
#include "kgen/wkv6/row_copier.cuh"

namespace kgen::wkv6 {

enum Row { kRowR, kRowK, kRowRLow };

// The copier of a tensor's rows: of whole rows, or of parts of them.
template <class T, int CopyVec, int Keys, bool RowCopies>
struct InputCopier {
    using Type = RowCopier<T, Keys>;
};
template <class T, int CopyVec, int Keys>
struct InputCopier<T, CopyVec, Keys, false> {
    using Type = PartCopier<T, CopyVec>;
};

// The tiles in shared memory. Keys: number of keys of a head; Warps: number of producer warps; Powers: whether there is
// a table of powers; RTerms: terms of rows R, 1 or 2.
template <int Keys, int Warps, bool PerStep, bool Powers = false, int RTerms = 1>
struct ChunkBuffers {
    static constexpr int kSlots = Warps + 1, kDecaySlots = PerStep ? kSlots : 1;
    static constexpr int kRows = 1 + RTerms;
    static constexpr int kRow = Keys <= 16 ? 16 : ceil_div(Keys, 64) * 64;
    using RowTile = SwizzledTile<bf16, kRow>;
    using ScoreTile = SwizzledTile<bf16, 16>;
    static constexpr int kTerm = ScoreTile::kElements;  // from the high to the low term
    static constexpr int kRowElements = kSlots * kRows * RowTile::kElements;
    static constexpr int kScoreElements = 2 * 2 * kTerm;
    static constexpr int kFloats =
        (kDecaySlots + (PerStep || Powers ? 1 : 2)) * kRow + (Powers ? 16 * (kRow + 16) : 0);
    static constexpr int kBytes = 2 * (kRowElements + kScoreElements) + 4 * kFloats;

    bf16* first;

    KGEN_DEVICE bf16* rows(int slot, int which) const {
        return first + (slot * kRows + which) * RowTile::kElements;
    }
    KGEN_DEVICE bf16* scores(int chunk) const {
        return first + kRowElements + (chunk & 1) * 2 * kTerm;
    }
    KGEN_DEVICE float* decay(int slot) const {
        return floats() + (PerStep ? slot * kRow : 0);
    }
    KGEN_DEVICE float* bonus() const { return floats() + kDecaySlots * kRow; }
    KGEN_DEVICE float* step_decay() const { return bonus() + kRow; }
    // Offset of a power for the first key. The eight lanes that read at once have two powers, which differ by 1 or 2,
    // and the same keys; rows of such powers are 64 bytes apart in the banks.
    static KGEN_DEVICE int power_place(int power) {
        return power * (kRow + 16) + (power & 2) * 8;
    }

private:
    KGEN_DEVICE float* floats() const {
        return reinterpret_cast<float*>(first + kRowElements + kScoreElements);
    }
};

// `warp` is the caller's number among Warps. W, U: dtypes of w and u; PerStep: whether w has a row per step, else one
// per head; CopyVec: elements per copy; Stages: parts of inputs in shared memory, one of them in use; Powers: factors
// come from a table, with one decay per head; FixedParts: the caller unrolls the parts of a chunk, so that the
// addresses of inputs and tiles of keys are constants; RTerms: bf16 terms of rows R; RowCopies: whole rows are copied.
template <class W, class U, DecayForm Form, bool PerStep, int Keys, int Warps, int CopyVec, int Stages,
          bool Powers = false, bool FixedParts = false, int RTerms = 1, bool RowCopies = false>
class RowProducer {
    static_assert(!(PerStep && Powers), "decays of steps are not powers of one");
    static_assert(!FixedParts || Warps % Stages == 0, "a part has the same stage in all chunks");
    using Buffers = ChunkBuffers<Keys, Warps, PerStep, Powers, RTerms>;
    using RowTile = typename Buffers::RowTile;
    using ScoreTile = typename Buffers::ScoreTile;
    using Half = HalfOperands<bf16>;
    using Tile = wkv7::TileCopier<bf16, CopyVec>;
    using TileW = wkv7::TileCopier<W, CopyVec>;
    using RowInput = InputTile<bf16, Keys>;
    using RowInputW = InputTile<W, Keys>;
    // Offsets of k and w from r.
    static constexpr int kOfK = RowCopies ? RowInput::kElements : Tile::kElements, kOfW = 2 * kOfK;
    static_assert(Stages == 2 || Stages == 4, "stages are found by the low bits of a part's number");
    static_assert(RowInput::kElements == RowTile::kElements, "places of inputs are those of rows");
    static_assert(!RowCopies || CopyVec == 8, "whole rows are copied in pieces of 16 bytes");

public:
    static constexpr int kTiles = ceil_div(Keys, 16), kPerPart = ceil_div(kTiles, Warps);
    // 16-bit values of a tile of keys, or with RowCopies of all keys; number of such tiles of a warp.
    static constexpr int kInputs =
        kOfW + (!PerStep ? 0 : RowCopies ? RowInputW::kElements : TileW::kElements);
    static constexpr int kInputTiles = RowCopies ? 2 : Stages * kPerPart;
    static constexpr int kBytes = Buffers::kBytes + 2 * Warps * kInputTiles * kInputs;

    KGEN_DEVICE RowProducer(const Buffers& buffers, int warp, i64 steps, const StepPointer<bf16>& r,
                            const StepPointer<bf16>& k, const StepPointer<W>& w, const U* u)
        : buffers_(buffers),
          slot_(warp),
          chunk_(warp),
          steps_(steps),
          lengths_(steps),
          inputs_(reinterpret_cast<u16*>(buffers.first) + Buffers::kBytes / 2 +
                  warp * kInputTiles * kInputs),
          r_(from_chunk(r, warp)),
          k_(from_chunk(k, warp)),
          w_(from_chunk(w, warp)) {
        if constexpr (!RowCopies) begin_copies(warp);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            if constexpr (!RowCopies) places_[which] = opaque(Tile::place(step(which), key()));
            if constexpr (PerStep && !RowCopies) places_w_[which] = opaque(TileW::place(step(which), key()));
            if constexpr (PerStep && RowCopies && sizeof(W) > 2)
                places_w_[which] = opaque(RowInputW::place(step(which), key()));
            places_of_rows_[which] = opaque(RowTile::offset(step(which), key() / 8) + key() % 8);
        }
        if constexpr (Powers) {
#pragma unroll
            for (int level = 1; level < 4; ++level) {
                const int half = 1 << level, late = early() & half ? early() : 15 - early();
                places_of_powers_[level - 1] = opaque(Buffers::power_place(late % half) + key());
            }
#pragma unroll
            for (int which = 0; which < 2; ++which)
                places_of_powers_[3 + which] = opaque(Buffers::power_place(step(which)) + key());
        }
        if constexpr (RowCopies) {
            copy_rows(inputs_, warp);
        } else {
#pragma unroll
            for (int part = 0; part < Stages - 1; ++part) copy(part);
        }
        fill(warp, w.first, u);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const int row = early(), column = early_of(2 * mma_lane().q + x), other = row ^ column;
            const int half = other & 4 ? 4 : other & 2 ? 2 : 1;
            far_[x] = score_place(15 - row, column);
            near_[x] = other == 0   ? score_place(row, row)
                       : row & half ? score_place(row, column)
                                    : score_place(15 - row, 15 - column);
        }
        named_barrier_sync(2, kWarpSize * Warps);
    }

    // Computes part 0 to Warps - 1 of the warp's chunk, in consecutive intervals. After the last part the warp goes on
    // to its next chunk, which is Warps chunks later.
    KGEN_DEVICE void put_part(int part) {
        if constexpr (!RowCopies) {
            cp_async_wait<Stages - 2>();
            sync_warp();  // the inputs of the part are there, and all lanes have read those of the one before
            copy(part + Stages - 1);
        } else if (part == 0) {
            cp_async_wait<0>();
            sync_warp();  // the inputs of the chunk are there, and all lanes have read those of the one before
            copy_rows(inputs_ + to_next_, chunk_ + Warps);
        }
#pragma unroll 1
        for (int n = 0; n < kPerPart; ++n) {
            const int tile = part * kPerPart + n;
            if (kTiles % (Warps * kPerPart) != 0 && tile >= kTiles) break;
            put_tile(tile, RowCopies ? inputs_
                                     : inputs_of(FixedParts ? part : part_) + n * kInputs);
        }
        if constexpr (!FixedParts && !RowCopies) ++part_;
        if (part == Warps - 1) {
            if constexpr (RowCopies) {
                inputs_ += to_next_;
                to_next_ = -to_next_;
            }
            put_scores();
            chunk_ += Warps;
            slot_ = slot_ == 0 ? Warps : slot_ - 1;  // (slot + Warps) % (Warps + 1)
        }
    }

private:
    using Copier = typename InputCopier<bf16, CopyVec, Keys, RowCopies>::Type;
    using CopierW = typename InputCopier<W, CopyVec, Keys, RowCopies>::Type;
    using Quad = Vec<u32, 2>;     // bf16 of four keys
    using Floats = float[2][4];  // of the lane's two steps, by key

    // The early step of the lanes that hold row g of a fragment. In this order, 16 lanes that read or write four keys
    // of one of their steps have no bank conflicts.
    static KGEN_DEVICE int early_of(int g) { return g % 4 * 2 + g / 4; }
    static KGEN_DEVICE int early() { return early_of(mma_lane().g); }
    static KGEN_DEVICE int step(int which) { return which == 0 ? early() : 15 - early(); }
    static KGEN_DEVICE int key() { return 4 * mma_lane().q; }
    static KGEN_DEVICE int score_place(int row, int column) {
        return ScoreTile::offset(row, column / 8) + column % 8;
    }

    template <class T>
    static KGEN_DEVICE StepPointer<T> from_chunk(const StepPointer<T>& rows, int chunk) {
        return {rows.first + 16 * chunk * rows.stride, rows.stride};
    }

    // Stores the scores that stay zero, the bonus, and the decays if they are constant per head.
    KGEN_DEVICE void fill(int warp, const W* w, const U* u) const {
        const int rank = kWarpSize * warp + lane_id();
        u32* words = reinterpret_cast<u32*>(buffers_.scores(0));
        for (int i = rank; i < Buffers::kScoreElements / 2; i += kWarpSize * Warps) words[i] = 0;
        for (int i = rank; i < Buffers::kRow; i += kWarpSize * Warps) {
            buffers_.bonus()[i] = i < Keys ? to_float(u[i]) : 0.0f;
            if constexpr (!PerStep) {
                float power = i < Keys ? decay_of<Form>(to_float(w[i])) : 1.0f;
                if constexpr (Powers) {
                    const float decay = power;
                    power = 1.0f;
#pragma unroll 1
                    for (int n = 0; n < 16; ++n, power *= decay)
                        buffers_.step_decay()[Buffers::power_place(n) + i] = power;
                } else {
                    buffers_.step_decay()[i] = power;
#pragma unroll
                    for (int n = 0; n < 4; ++n) power *= power;
                }
                buffers_.decay(0)[i] = power;
            }
        }
    }

    // The address of the inputs of a part.
    KGEN_DEVICE u16* inputs_of(int part) const {
        return inputs_ + (part & (Stages - 1)) * kPerPart * kInputs;
    }

    KGEN_DEVICE void begin_copies(int chunk) {
        copied_chunk_ = chunk;
        copied_part_ = 0;
        left_ = static_cast<int>(max(min(steps_ - i64{chunk} * 16, i64{16}), i64{0}));
    }

    // Starts the copies of the inputs of the next part to copy, as one group. With FixedParts this is part `fixed`,
    // counted from the beginning of the warp's chunk.
    KGEN_DEVICE void copy(int fixed) {
        if constexpr (FixedParts) {
            if (fixed == Warps) {
                begin_copies(copied_chunk_ + Warps);
                advance(0, 16 * Warps);
            }
            const int part = fixed % Warps;
            start_copies(inputs_of(part), part, 16 * kPerPart * part);
            cp_async_commit();
            return;
        }
        start_copies(inputs_of(copied_), copied_part_, 0);
        cp_async_commit();
        ++copied_;
        constexpr int kColumns = 16 * kPerPart;
        advance(kColumns, 0);
        if (++copied_part_ < Warps) return;
        begin_copies(copied_chunk_ + Warps);
        advance(-kColumns * Warps, 16 * Warps);
    }

    // Starts the copies of the inputs of the warp's next chunk, as one group.
    KGEN_DEVICE void copy_rows(u16* to, int chunk) {
        const int left = lengths_.of(chunk);
        int places[Copier::kCopies];
        r_.find(places);
        r_.start(to, places, left);
        k_.start(to + kOfK, places, left);
        if constexpr (PerStep && sizeof(W) == 2) w_.start(to + kOfW, places, left);
        if constexpr (PerStep && sizeof(W) > 2) w_.start(to + kOfW, left);
        cp_async_commit();
        advance(0, 16 * Warps);
    }

    KGEN_DEVICE void start_copies(u16* to, int part, int first) const {
#pragma unroll
        for (int n = 0; n < kPerPart; ++n, to += kInputs) {
            const int tile = part * kPerPart + n;
            if (kTiles % (Warps * kPerPart) != 0 && tile >= kTiles) break;
            const int width = Keys % 16 == 0 ? 16 : Keys - 16 * tile;
            r_.start(to, left_, width, first + 16 * n);
            k_.start(to + kOfK, left_, width, first + 16 * n);
            if constexpr (PerStep) w_.start(to + kOfW, left_, width, first + 16 * n);
        }
    }

    KGEN_DEVICE void advance(int columns, int steps) {
        r_.advance(columns, steps);
        k_.advance(columns, steps);
        if constexpr (PerStep) w_.advance(columns, steps);
    }

    // Reads four keys of the lane's two steps.
    KGEN_DEVICE void read(Quad (&quads)[2], const u16* inputs, const int (&places)[2]) const {
#pragma unroll
        for (int which = 0; which < 2; ++which)
            quads[which] = *reinterpret_cast<const Quad*>(inputs + places[which]);
    }
    static KGEN_DEVICE Vec<float, 4> unpack(const Quad& words) {
        const f32x2 low = unpack2<bf16>(words[0]), high = unpack2<bf16>(words[1]);
        return {{low.x, low.y, high.x, high.y}};
    }
    static KGEN_DEVICE Quad pack(const float (&x)[4]) {
        return {{pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3])}};
    }

    // Reads the decays of the lane's steps and keys.
    KGEN_DEVICE void read_decays(Floats& decay, const u16* tiles, const int (&places)[2], int tile) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            Vec<float, 4> d;
            if constexpr (!PerStep) {
                d = *reinterpret_cast<const Vec<float, 4>*>(buffers_.step_decay() + 16 * tile + key());
            } else if constexpr (sizeof(W) == 2) {
                const Quad words = *reinterpret_cast<const Quad*>(tiles + places[which]);
                const f32x2 low = unpack2<W>(words[0]), high = unpack2<W>(words[1]);
                d = {{low.x, low.y, high.x, high.y}};
            } else {
                d = *reinterpret_cast<const Vec<float, 4>*>(tiles + places[which]);
            }
#pragma unroll
            for (int x = 0; x < 4; ++x)
                decay[which][x] = PerStep ? decay_of<Form, false>(d[x]) : d[x];
        }
    }

    // Adds late rows of r times early rows of k to the sums of a level, 0 to 3.
    template <int kLevel>
    KGEN_DEVICE void multiply(const Quad& r, const Quad& k) {
        typename Half::A late = {};
        late.pair[kLevel % 2] = r[0];
        late.pair[kLevel % 2 + 2] = r[1];
        Half::template multiply<0>(sums_[kLevel / 2], late, typename Half::B{{k[0], k[1]}});
    }

    // The rounding error of pack(x).
    static KGEN_DEVICE Quad pack_rest(const float (&x)[4], const Quad& packed) {
        const Vec<float, 4> rounded = unpack(packed);
        float lost[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) lost[i] = x[i] - rounded[i];
        return pack(lost);
    }

    // The same for rows in fp32; r has two terms, and the low one is multiplied first.
    template <int kLevel>
    KGEN_DEVICE void multiply(const float (&r)[4], const float (&k)[4]) {
        const Quad high = pack(r), early = pack(k);
        multiply<kLevel>(pack_rest(r, high), early);
        multiply<kLevel>(high, early);
    }

    // Adds the products of blocks of 2 << kLevel steps; r and k are already multiplied by the decays to the middle.
    template <int kLevel>
    KGEN_DEVICE void add_level(const Floats& r, const Floats& k) {
        const bool flip = early() & 1 << kLevel;  // whether step(0), not step(1), is in a late half
        float late[4], soon[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            late[x] = flip ? r[0][x] : r[1][x];
            soon[x] = flip ? k[1][x] : k[0][x];
        }
        if constexpr (kLevel == 1) {
            multiply<kLevel>(pack(late), pack(soon));
        } else {
            multiply<kLevel>(late, soon);
        }
    }

    // Extends r, k and all from blocks of kHalf steps to blocks of twice as many. all: the products of the decays over
    // the blocks of both steps.
    template <int kHalf>
    static KGEN_DEVICE void widen(Floats& r, Floats& k, Floats& all) {
        constexpr int kDistance = kHalf == 1 ? 16 : kHalf == 2 ? 4 : 8;  // of lanes, see early_of
        const bool flip = early() & kHalf;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float others[2] = {PerStep ? shfl_xor(all[0][x], kDistance) : all[0][x],
                                     PerStep ? shfl_xor(all[1][x], kDistance) : all[1][x]};
            if (flip) {
                r[0][x] *= others[0];
                k[1][x] *= others[1];
            } else {
                k[0][x] *= others[0];
                r[1][x] *= others[1];
            }
            all[0][x] *= others[0];
            all[1][x] *= others[1];
        }
    }

    // The factors of a level, n = 1 to 3, or of rows, n = 4 + which.
    KGEN_DEVICE Vec<float, 4> powers(int n, int tile) const {
        return *reinterpret_cast<const Vec<float, 4>*>(buffers_.step_decay() +
                                                       places_of_powers_[n - 1] + 16 * tile);
    }

    // Adds the products of blocks of 2 << kLevel steps; r and k are rows without decays.
    template <int kLevel>
    KGEN_DEVICE void add_level_by_powers(const Floats& r, const Floats& k, int tile) {
        const bool flip = early() & 1 << kLevel;
        const Vec<float, 4> factor = powers(kLevel, tile);
        float late[4], soon[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            late[x] = (flip ? r[0][x] : r[1][x]) * factor[x];
            soon[x] = (flip ? k[1][x] : k[0][x]) * factor[x];
        }
        if constexpr (kLevel == 1) {
            multiply<kLevel>(pack(late), pack(soon));
        } else {
            multiply<kLevel>(late, soon);
        }
    }

    KGEN_DEVICE void put_tile(int tile, const u16* inputs) {
        Quad copied_r[2], copied_k[2];
        // With RowCopies, offsets for tile `tile` of rows. Opaque: otherwise offsets of all tiles stay in registers in
        // the loop.
        int places[2], places_w[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            places[which] = RowCopies ? RowTile::beside(opaque(places_of_rows_[which]), tile) : places_[which];
            if constexpr (PerStep)
                places_w[which] = !RowCopies       ? places_w_[which]
                                  : sizeof(W) == 2 ? places[which]
                                                   : RowInputW::beside(opaque(places_w_[which]), tile);
        }
        Floats r, k, all;
        read(copied_r, inputs, places);
        read(copied_k, inputs + kOfK, places);
        if constexpr (!Powers) read_decays(all, inputs + kOfW, places_w, tile);
        const auto bonus =
            *reinterpret_cast<const Vec<float, 4>*>(buffers_.bonus() + 16 * tile + key());
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const Vec<float, 4> own_r = unpack(copied_r[which]), own_k = unpack(copied_k[which]);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                r[which][x] = own_r[x];
                k[which][x] = own_k[x];
                own_[which] = fma(own_r[x] * bonus[x], own_k[x], own_[which]);
            }
        }
        // 1. Scores: levels from adjacent steps, whose rows have no decays, to the halves of the chunk.
        const bool odd = early() & 1;
        Quad late, soon;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            late[i] = odd ? copied_r[0][i] : copied_r[1][i];
            soon[i] = odd ? copied_k[1][i] : copied_k[0][i];
        }
        multiply<0>(late, soon);
        if constexpr (Powers) {
            add_level_by_powers<1>(r, k, tile);
            add_level_by_powers<2>(r, k, tile);
            add_level_by_powers<3>(r, k, tile);
        } else {
            widen<1>(r, k, all);
            add_level<1>(r, k);
            widen<2>(r, k, all);
            add_level<2>(r, k);
            widen<4>(r, k, all);
            multiply<3>(r[1], k[0]);
        }
        // 2. Rows for products with the state.
        if constexpr (Powers) {
            const Vec<float, 4> soon_power = powers(4, tile), late_power = powers(5, tile);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                r[0][x] *= soon_power[x];
                k[0][x] *= late_power[x];
                r[1][x] *= late_power[x];
                k[1][x] *= soon_power[x];
            }
        } else {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                r[1][x] *= all[0][x];
                k[0][x] *= all[1][x];
            }
        }
        bf16* rows = buffers_.rows(slot_, 0);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            bf16* place = rows + (RowCopies ? places[which] : RowTile::beside(places_of_rows_[which], tile));
            const Quad high = pack(r[which]);
            *reinterpret_cast<Quad*>(place + kRowR * RowTile::kElements) = high;
            if constexpr (RTerms == 2)
                *reinterpret_cast<Quad*>(place + kRowRLow * RowTile::kElements) =
                    pack_rest(r[which], high);
            *reinterpret_cast<Quad*>(place + kRowK * RowTile::kElements) = pack(k[which]);
        }
        if (PerStep && mma_lane().g == 0)
            *reinterpret_cast<Vec<float, 4>*>(buffers_.decay(slot_) + 16 * tile + key()) = {
                {all[0][0] * all[1][0], all[0][1] * all[1][1], all[0][2] * all[1][2],
                 all[0][3] * all[1][3]}};
    }

    // Sums the chunk's scores over all its keys, and stores each at its place.
    KGEN_DEVICE void put_scores() {
        bf16* scores = buffers_.scores(chunk_);
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int bits = 1; bits < 4; bits *= 2)
                own_[which] += shfl_xor(own_[which], bits);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const int other = early() ^ early_of(2 * mma_lane().q + x);
            const float near = other & 4   ? sums_[1][x]
                               : other & 2 ? sums_[0][2 + x]
                               : other & 1 ? sums_[0][x]
                                           : own_[0];
            u32 terms[2];
            split_bf16(sums_[1][2 + x], near, terms);
            put_score(scores + far_[x], terms[0], terms[1]);
            put_score(scores + near_[x], terms[0] >> 16, terms[1] >> 16);
        }
        u32 terms[2];
        split_bf16(own_[1], 0.0f, terms);
        if (mma_lane().q == 0)
            put_score(scores + score_place(15 - early(), 15 - early()), terms[0], terms[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums_[i / 4][i % 4] = 0.0f;
        own_[0] = own_[1] = 0.0f;
    }

    static KGEN_DEVICE void put_score(bf16* place, u32 high, u32 low) {
        u16* target = reinterpret_cast<u16*>(place);
        target[0] = static_cast<u16>(high);
        target[Buffers::kTerm] = static_cast<u16>(low);
    }

    Buffers buffers_;
    int slot_, chunk_, part_ = 0;
    int copied_ = 0, copied_chunk_, copied_part_, left_;  // the next part to copy; how many of its steps exist
    int places_[2], places_w_[2], places_of_rows_[2];     // offsets of the lane's steps in tiles of r and k, w, rows
    int far_[2], near_[2];                                // offsets of the lane's scores
    float sums_[2][4] = {};                               // scores, two of each level
    float own_[2] = {};                                   // sums of r u k of the lane's steps
    i64 steps_;
    u16* inputs_;
    ChunkLengths lengths_;
    int to_next_ = kInputs;  // with RowCopies: from the inputs of the warp's chunk to those of its next
    Copier r_, k_;
    CopierW w_;
    int places_of_powers_[5];  // of levels 1 to 3, and of the lane's steps
};

}  // namespace kgen::wkv6
