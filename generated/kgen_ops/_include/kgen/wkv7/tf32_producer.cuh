// Rows scaled by decays, scores and the triangular inverse of a chunk of 16 steps of wkv7 in fp32, for all value
// features of a head; TF32 operands (mma, sm_80), any decay from 0 to 1: no exponent is above 0, and nothing branches
// on values.
//
//     rows         A_i = a_i P_{i-1}     R_i = r_i P_i     K_j = k_j P_15 / P_j     B_j = b_j P_15 / P_j
//     decay        P_15, per key
//     scores       A K^T  j < i        R K^T  j <= i        R B^T  j <= i
//     inverse      (I - A B^T)^-1      j < i
//
// P_i is the product of the chunk's decays up to step i; the products of K and B run over the steps after j. Scores are
// computed by halving (kgen/chunked/halving_decay.cuh): blocks of 16, 8, 4 and 2 steps have a late half and an early
// half, and a late step t reads an early step s by
//
//     r_t k_s:  (r_t * d from the middle to t) (k_s * d after s to the middle)          likewise r_t b_s
//     a_t k_s:  (a_t * d from the middle to before t) (k_s * d after s to the middle)   likewise a_t b_s
//
// A pair s < t belongs to the level of the highest bit in which s and t differ. The diagonals of R K^T and R B^T have
// no decays: they are products of the inputs. At the level of adjacent steps a, k and b have no decays, and inputs of
// 16 bits are exact as TF32.
//
// Each lane has four keys of two steps, `early` (0 to 7) and 15 - early: at each level one of the two steps is in a
// late half, the other one in an early half. The eight lanes that hold the rows of a fragment thus have all late steps,
// with r in rows 0 to 7 and a in rows 8 to 15 of operand A, and all early steps of k, and of b, as operand B, from
// registers. Products of decays over blocks come by shuffles. Each level computes 8 x 8 products for each of k and b
// with each of r and a, of which only those within a block count: 64 for blocks of 16 steps, then 32, 16 and 8. The
// last three and the 8 of the diagonal fill one fragment, `near`; the products of blocks of 16 fill the other fragment,
// `far`. The diagonal of r has 16 steps: the first eight lie in r's rows of `near`, the other eight in a's rows, as a
// has no diagonal.
//
// Layout in shared memory (struct Tf32Buffers), Keys padded to a multiple of 16:
//
//     float reads[3][2][16][Keys + 4]    slot, tensor A R; rows are steps
//     float updates[3][2][Keys][16]      slot, tensor K B; rows are keys (StepTile)
//     float scores[3][3][16][16]         slot, matrix (StepTile)
//     float inverse[2][16][16]           (StepTile)
//     float triangle[2][16][16]          A B^T
//     float decay[3][Keys]               keys of a tile: 0 4 1 5 2 6 3 7, as the state's accumulators
//     float sums[warps with keys][4][32][4]                    fragment, lane: a warp's keys' part of the scores; with
//                                                              inputs in fp32 it replaces the inputs instead
//     W w and r, k, a, b [warps][tiles of a warp][Stages]      copies of the inputs, 16 keys each (tile_copier.cuh)
//
// Scores of a step with later steps are zero from the beginning where nothing writes them. Rows beyond the last step
// are zero, and decays there are 1.
//
// Precision: with kSplit operands have two terms (3xTF32), and decays are within 2 to 4 ulp. Rows are stored in fp32;
// rows that are read as one term are rounded to TF32 before.
//
// Synchronisation: put_rows, a barrier of the producers, put_scores; put_inverse in a later interval between block
// barriers; the reader in an interval after that. Each warp copies its own inputs, Stages - 1 chunks ahead of put_rows.
#pragma once

#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/wkv7/decay.cuh"
#include "kgen/wkv7/tile_copier.cuh"
#include "kgen/wkv7/triangular_inverse.cuh"

namespace kgen::wkv7 {

// Rows of 16 fp32 words in chunks of 4 words, two rows in 128 bytes. ldmatrix reads a chunk of rows 8i to 8i + 7
// without bank conflicts. A warp stores words of steps 0 to 7, or 8 to 15, of four rows that are 4 apart, without bank
// conflicts too.
struct StepTile {
    static KGEN_DEVICE int place(int row, int column) {
        return row / 2 * 32 + ((row % 2 * 4 + column / 4) ^ (row / 2 % 8)) * 4 + column % 4;
    }
    // The offset of the element 8 * tile rows below the element at offset `place`, which is in rows 0 to 7.
    static KGEN_DEVICE int below(int place, int tile) { return (place ^ tile % 2 * 16) + 128 * tile; }
    static constexpr int kSquare = 256;  // words of 16 rows
};

// Which of eight steps, or keys, column `column` of an accumulator stands for: columns 2q and 2q + 1, which become
// k = q and q + 4 of an operand A, stand for q and q + 4.
KGEN_DEVICE int of_column(int column) { return column / 2 + column % 2 * 4; }

// The tiles in shared memory. Keys: number of keys of a head; Warps: number of producer warps; Sums: whether the warps'
// parts of the scores have a place of their own.
template <int Keys, int Warps, bool Sums>
struct Tf32Buffers {
    enum { kReadA, kReadR };
    enum { kUpdateK, kUpdateB };
    enum { kScoreAK, kScoreRK, kScoreRB };
    static constexpr int kSlots = 3, kTiles = ceil_div(Keys, 16), kKeys = 16 * kTiles;
    static constexpr int kReadStride = kKeys + 4;  // ldmatrix of eight rows has no bank conflicts
    static constexpr int kReads = 16 * kReadStride, kUpdates = 16 * kKeys;
    static constexpr int kSquare = StepTile::kSquare;
    static constexpr int kWithKeys = min(Warps, kTiles);  // producer warps
    static constexpr int kOfUpdates = kSlots * 2 * kReads;
    static constexpr int kOfScores = kOfUpdates + kSlots * 2 * kUpdates;
    static constexpr int kOfInverse = kOfScores + kSlots * 3 * kSquare;
    static constexpr int kOfDecay = kOfInverse + 4 * kSquare;
    static constexpr int kOfSums = kOfDecay + kSlots * kKeys, kSums = 4 * 128;  // of a warp
    static constexpr int kBytes = 4 * (kOfSums + (Sums ? kWithKeys * kSums : 0));

    float* first;

    // Where tiles begin, in words.
    static KGEN_DEVICE int of_updates(int slot, int which) {
        return kOfUpdates + (2 * slot + which) * kUpdates;
    }
    static KGEN_DEVICE int of_scores(int slot, int which) {
        return kOfScores + (3 * slot + which) * kSquare;
    }
    static KGEN_DEVICE int of_inverse(int chunk) { return kOfInverse + (chunk & 1) * kSquare; }

    KGEN_DEVICE float* reads(int slot, int which) const { return first + (2 * slot + which) * kReads; }
    KGEN_DEVICE float* scores(int slot, int which) const { return first + of_scores(slot, which); }
    KGEN_DEVICE float* inverse(int chunk) const { return first + of_inverse(chunk); }
    KGEN_DEVICE float* triangle(int chunk) const { return inverse(chunk) + 2 * kSquare; }
    KGEN_DEVICE float* decay(int slot) const { return first + kOfDecay + slot * kKeys; }
};

// Runs on kRowWarps warps; `warp` is the caller's number among them. Config: that of Tf32Loop (tf32_loop.cuh).
template <class Config>
class Tf32Producer {
    using T = typename Config::Value;
    using W = typename Config::W;
    static constexpr DecayForm kForm = Config::kForm;
    static constexpr bool kSplit = Config::kSplit, kWide = sizeof(T) == 4;
    static_assert(kSplit || !kWide, "inputs in fp32 have low terms");
    static constexpr int kWarps = Config::kRowWarps, kStages = Config::kStages;
    static constexpr bool kRowCopies = Config::kRowCopies;
    using Tile = TileCopier<T, Config::kVec>;
    using TileW = TileCopier<W, Config::kVec>;
    using InputTile = SwizzledTile<T, 16>;
    using Half = HalfOperands<T>;
    using Ops = Tf32Operands<kSplit>;
    // Offsets of k, a, b and w from r.
    static constexpr int kOfK = Tile::kElements, kOfA = 2 * kOfK, kOfB = 3 * kOfK, kOfW = 4 * kOfK;
    static constexpr int kFragments = ceil_div(4, kWarps);     // of a warp
    static_assert(kStages == 2 || kStages == 4, "slots are found by the low bits of a chunk's number");
    static_assert((kWarps & (kWarps - 1)) == 0, "the inverses of chunks go around the warps");

public:
    using Buffers = Tf32Buffers<Config::kK, kWarps, !kWide>;
    static constexpr int kTiles = Buffers::kTiles, kPerWarp = ceil_div(kTiles, kWarps);
    // 16-bit values of a tile of keys, and of a warp. The 16 values more per tile and per warp are shifts for
    // WholeRowCopier.
    static constexpr int kInputs = kOfW + TileW::kElements + (kRowCopies ? 16 * kWarps : 0);
    static constexpr int kWarpInputs = kPerWarp * kStages * kInputs + (kRowCopies ? 16 : 0);
    static constexpr int kBytes = Buffers::kBytes + 2 * kWarps * kWarpInputs;
    static_assert(!kWide || 2 * kInputs >= 4 * Buffers::kSums, "the sums replace a tile of inputs");

    KGEN_DEVICE Tf32Producer(const Buffers& buffers, int warp, i64 steps, const StepPointer<T>& r,
                             const StepPointer<T>& k, const StepPointer<T>& a,
                             const StepPointer<T>& b, const StepPointer<W>& w)
        : buffers_(buffers),
          warp_(warp),
          steps_(steps),
          inputs_(reinterpret_cast<u16*>(buffers.first) + Buffers::kBytes / 2 + warp * kWarpInputs),
          r_(copier(r, warp)),
          k_(copier(k, warp)),
          a_(copier(a, warp)),
          b_(copier(b, warp)),
          w_(copier(w, warp)) {
        for (int i = kWarpSize * warp + lane_id(); i < Buffers::kSlots * 3 * Buffers::kSquare;
             i += kWarpSize * kWarps)
            buffers_.scores(0, 0)[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x)
                places_[n][x] =
                    place_of(warp + n * kWarps, x) | place_of(warp + n * kWarps, 2 + x) << 16;
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
        if constexpr (kRowCopies) {
            await_inputs();
            named_barrier_sync(2, kWarpSize * kWarps);
        }
    }

    // With kRowCopies, at the end of an interval: waits for the thread's copies that the next put_rows reads.
    KGEN_DEVICE void await_inputs() const {
        if constexpr (kRowCopies) cp_async_wait<kStages - 2>();
    }

    // Computes the rows and decays of a chunk, and the warp's keys' part of its scores. Call it once per chunk, from
    // chunk 0 on.
    KGEN_DEVICE void put_rows(int chunk, int slot) {
        if constexpr (!kRowCopies) {
            cp_async_wait<kStages - 2>();
            sync_warp();  // the inputs of the chunk are there, and all lanes have read those of the one before
        }
        copy(chunk + kStages - 1);
        if (kTiles < kWarps && warp_ >= kTiles) return;
        Scores sums = {};
#pragma unroll 1  // two tiles at a time would spill
        for (int n = 0; n < kPerWarp; ++n) {
            const int tile = warp_ + n * kWarps;
            if (kTiles % kWarps != 0 && tile >= kTiles) break;
            const u16* inputs = inputs_of(chunk, n);
            put_tile(slot, tile, inputs, left_of(chunk), sums);
        }
        if constexpr (kWide) sync_warp();  // all lanes have read the inputs
#pragma unroll
        for (int fragment = 0; fragment < 4; ++fragment) {
            const auto& found = fragment < 2 ? sums.far[fragment] : sums.near[fragment - 2];
            *sums_of(chunk, warp_, fragment) = {{found[0], found[1], found[2], found[3]}};
        }
    }

    // Stores the scores of a chunk; each warp sums up one fragment after the other.
    KGEN_DEVICE void put_scores(int chunk, int slot) const {
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            const int fragment = warp_ + n * kWarps;
            if (kWarps > 4 && fragment >= 4) break;
            put_fragment(chunk, slot, fragment, places_[n]);
        }
    }

    // Computes the inverse. One warp does, and the warps take turns from chunk to chunk.
    KGEN_DEVICE void put_inverse(int chunk) const {
        if (warp_ != (chunk & (kWarps - 1))) return;
        const int column = lane_id() % 16;
        float found[16];
        inverse_column<false>(buffers_.triangle(chunk), 16, column, found);
        float* inverse = buffers_.inverse(chunk);
        if (lane_id() < 16)
#pragma unroll
            for (int i = 0; i < 16; ++i)
                inverse[StepTile::place(i, column)] = kSplit ? found[i] : rounded(found[i]);
    }

private:
    using Quad = Select<kWide, Vec<float, 4>, Vec<u32, 2>>;  // values of four keys
    using Factors = float[2][4];  // of the lane's two steps, by key
    // Products with k and with b.
    struct Scores {
        float far[2][4], near[2][4];
    };
    struct Inputs {
        Quad r[2], k[2], a[2], b[2];
    };

    static KGEN_DEVICE float rounded(float x) { return bit_cast<float>(near_tf32(x)); }

    // The early step of the lanes that hold row g of a fragment. In this order, lanes that read four keys, or store
    // four words of rows, have no bank conflicts.
    static KGEN_DEVICE int early_of(int g) { return g % 2 * 4 + g / 2 % 2 * 2 + g / 4; }
    static KGEN_DEVICE int early() { return early_of(mma_lane().g); }
    static KGEN_DEVICE int step(int which) { return which == 0 ? early() : 15 - early(); }
    static KGEN_DEVICE int key() { return 4 * mma_lane().q; }

    // The inputs of a chunk, of tile n of the warp: r, k, a, b, w.
    KGEN_DEVICE u16* inputs_of(int chunk, int n) const {
        return inputs_ + ((chunk & (kStages - 1)) * kPerWarp + n) * kInputs;
    }

    // The lane's sums of a fragment of the scores, over a warp's keys. With inputs in fp32, shared memory has no room
    // for these sums if two blocks share an SM; they replace the chunk's inputs, which the warp has read.
    KGEN_DEVICE Vec<float, 4>* sums_of(int chunk, int warp, int fragment) const {
        float* of_warp = buffers_.first + Buffers::kOfSums + warp * Buffers::kSums;
        if constexpr (kWide) of_warp = reinterpret_cast<float*>(inputs_of(chunk, 0) + (warp - warp_) * kWarpInputs);
        return reinterpret_cast<Vec<float, 4>*>(of_warp + 128 * fragment) + lane_id();
    }

    template <class Element>
    using CopierOf = Select<kRowCopies, WholeRowCopier<Element, Config::kVec, kWarps, kPerWarp, kWarpInputs, kInputs>,
                            TileCopier<Element, Config::kVec>>;
    template <class Element>
    static KGEN_DEVICE CopierOf<Element> copier(const StepPointer<Element>& rows, int warp) {
        if constexpr (kRowCopies) {
            return {rows, 0, 0, kWarpSize * warp + lane_id()};
        } else {
            return {rows, 16 * warp};
        }
    }

    // How many steps of a chunk exist.
    KGEN_DEVICE int left_of(int chunk) const {
        return static_cast<int>(max(min(steps_ - i64{chunk} * 16, i64{16}), i64{0}));
    }

    // Starts the copies of a chunk's inputs; one group.
    KGEN_DEVICE void copy(int chunk) {
        const int left = left_of(chunk);
        if constexpr (kRowCopies) {
            u16* to = inputs_of(chunk, 0) - warp_ * kWarpInputs;
            r_.start(to, left, Config::kK);
            k_.start(to + kOfK, left, Config::kK);
            a_.start(to + kOfA, left, Config::kK);
            b_.start(to + kOfB, left, Config::kK);
            w_.start(to + kOfW, left, Config::kK);
        } else {
#pragma unroll
            for (int n = 0; n < kPerWarp; ++n) {
                const int first = 16 * n * kWarps, width = Config::kK - 16 * warp_ - first;
                u16* to = inputs_of(chunk, n);
                r_.start(to, left, width, first);
                k_.start(to + kOfK, left, width, first);
                a_.start(to + kOfA, left, width, first);
                b_.start(to + kOfB, left, width, first);
                w_.start(to + kOfW, left, width, first);
            }
        }
        cp_async_commit();
        r_.advance();
        k_.advance();
        a_.advance();
        b_.advance();
        w_.advance();
    }

    // Reads four keys of the lane's two steps.
    static KGEN_DEVICE void read(Quad (&quads)[2], const u16* tile) {
#pragma unroll
        for (int which = 0; which < 2; ++which)
            quads[which] = *reinterpret_cast<const Quad*>(tile + Tile::place(step(which), key()));
    }
    static KGEN_DEVICE void read_decays(Factors& decay, const u16* tiles, int left) {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const u16* from = tiles + TileW::place(step(which), key());
            Vec<float, 4> w;
            if constexpr (sizeof(W) == 2) {
                const auto words = *reinterpret_cast<const Vec<u32, 2>*>(from);
                const f32x2 low = unpack2<W>(words[0]), high = unpack2<W>(words[1]);
                w = {{low.x, low.y, high.x, high.y}};
            } else {
                w = *reinterpret_cast<const Vec<float, 4>*>(from);
            }
            // A copied zero beyond the last step is a decay of 1 in the form log alone.
            const bool there = kForm == DecayForm::log || step(which) < left;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float d = kSplit ? near_decay_of(w[x]) : fast_decay_of<kForm>(w[x]);
                decay[which][x] = there ? d : 1.0f;
            }
        }
    }

    // Like decay_of, without its division, which is a function call while the registers of a tile are in use: the
    // sigmoid is within 2 ulp, or 0 where it is below 2^-126.
    static KGEN_DEVICE float near_decay_of(float w) {
        if constexpr (kForm == DecayForm::clamp) {
            return exp(-kClamp * fast_reciprocal(1.0f + exp(-w)));
        } else {
            return decay_of<kForm>(w);
        }
    }

    static KGEN_DEVICE float value(const Quad& quad, int x) {
        if constexpr (kWide) {
            return quad[x];
        } else {
            const f32x2 two = unpack2<T>(quad[x / 2]);
            return x % 2 == 0 ? two.x : two.y;
        }
    }

    // sums += a b^T over eight keys. Exact: b has no low terms.
    template <bool Exact>
    static KGEN_DEVICE void multiply(float (&sums)[4], const typename Ops::A& a,
                                     const typename Ops::B& b) {
        if constexpr (kSplit) {
            Ops::template multiply<0>(sums, a, b);
            if constexpr (!Exact) Ops::template multiply<1>(sums, a, b);
        }
        Ops::template multiply<Ops::kPasses - 1>(sums, a, b);
    }

    // The products of blocks of 2 * kHalf steps. before: product of the decays from the middle to before the late step;
    // behind: from after the early step to the middle. flip: whether step(0), not step(1), is in a late half.
    template <int kHalf>
    static KGEN_DEVICE void multiply_level(float (&of_k)[4], float (&of_b)[4], const Inputs& in,
                                           const Factors& decay, const Factors& before,
                                           const Factors& behind, bool flip) {
        constexpr bool kNext = kHalf == 1;  // r has the decay of its own step, the others have none
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // operands of both parts would spill
            typename Ops::A readers;
            typename Ops::B k, b;
#pragma unroll
            for (int at = 0; at < 2; ++at) {
                const int x = 2 * part + at;
                const float late = flip ? before[0][x] : before[1][x];
                const float early = flip ? behind[1][x] : behind[0][x];
                const float own = flip ? decay[0][x] : decay[1][x];
                const float r = flip ? value(in.r[0], x) : value(in.r[1], x);
                const float a = flip ? value(in.a[0], x) : value(in.a[1], x);
                const float of = flip ? value(in.k[1], x) : value(in.k[0], x);
                const float to = flip ? value(in.b[1], x) : value(in.b[0], x);
                Ops::put(readers, 2 * at, r * (kNext ? own : late * own));
                Ops::put(readers, 2 * at + 1, kNext ? a : a * late);
                Ops::put(k, at, kNext ? of : of * early);
                Ops::put(b, at, kNext ? to : to * early);
            }
            multiply<kNext && !kWide>(of_k, readers, k);
            multiply<kNext && !kWide>(of_b, readers, b);
        }
    }

    // r_t k_t and r_t b_t of steps g and g + 8, stored where a lane has the diagonal.
    static KGEN_DEVICE void put_diagonal(float (&near)[2][4], const Inputs& in, const u16* inputs) {
        if constexpr (kWide) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                // The four lanes of a step have four keys each.
                float sums[2] = {};
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    sums[0] = fma(value(in.r[which], x), value(in.k[which], x), sums[0]);
                    sums[1] = fma(value(in.r[which], x), value(in.b[which], x), sums[1]);
                }
                const int early = early_of(mma_lane().g), row = which == 0 ? early : 7 - early;
#pragma unroll
                for (int tensor = 0; tensor < 2; ++tensor) {
                    float all = sums[tensor] + shfl_xor(sums[tensor], 1);
                    all += shfl_xor(all, 2);
                    near[tensor][2 * which] = near[tensor][2 * which + 1] = shfl(all, 4 * row);
                }
            }
        } else {
            const auto tile_at = [&](int i) { return reinterpret_cast<const T*>(inputs + i); };
            const typename Half::A r = InputTile::a_rows(tile_at(0));
#pragma unroll
            for (int tensor = 0; tensor < 2; ++tensor) {
                typename Half::B y[2];
                InputTile::two_rows(y, tile_at(tensor == 0 ? kOfK : kOfB));
                float own[2][4] = {};
#pragma unroll
                for (int n = 0; n < 2; ++n) Half::template multiply<0>(own[n], r, y[n]);
#pragma unroll
                for (int i = 0; i < 4; ++i) near[tensor][i] = own[i / 2][i];
            }
        }
    }

    // Stores the products of a level with halves below 8 steps in `near`; then extends `before`, `behind` and `all`
    // from blocks of kHalf steps to blocks of twice as many. all: the products of the decays over the blocks of both
    // steps.
    template <int kHalf>
    static KGEN_DEVICE void add_level(float (&near)[2][4], const Inputs& in, const Factors& decay,
                                      Factors& before, Factors& behind, Factors& all) {
        constexpr int kDistance = 16 / kHalf;  // of lanes, see early_of
        const bool flip = early() & kHalf;
        float found[2][4] = {};
        multiply_level<kHalf>(found[0], found[1], in, decay, before, behind, flip);
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // later, wider levels replace products that do not count
            const int other = early() ^ early_of(2 * mma_lane().q + i % 2);
            if (other & kHalf) near[i / 4][i % 4] = found[i / 4][i % 4];
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float others[2] = {shfl_xor(all[0][x], kDistance), shfl_xor(all[1][x], kDistance)};
            if (flip) {
                before[0][x] *= others[0];
                behind[1][x] *= others[1];
            } else {
                behind[0][x] *= others[0];
                before[1][x] *= others[1];
            }
            all[0][x] *= others[0];
            all[1][x] *= others[1];
        }
    }

    KGEN_DEVICE void put_tile(int slot, int tile, const u16* inputs, int left, Scores& sums) const {
        Inputs in;
        Factors decay, all, before, behind;
        read_decays(decay, inputs + kOfW, left);
        read(in.r, inputs);
        read(in.k, inputs + kOfK);
        read(in.a, inputs + kOfA);
        read(in.b, inputs + kOfB);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            all[i / 4][i % 4] = decay[i / 4][i % 4];
            before[i / 4][i % 4] = behind[i / 4][i % 4] = 1.0f;
        }
        // 1. Scores: the diagonal, from the inputs; then the levels, from adjacent steps to the halves of the chunk.
        float near[2][4];
        put_diagonal(near, in, inputs);
        add_level<1>(near, in, decay, before, behind, all);
        add_level<2>(near, in, decay, before, behind, all);
        add_level<4>(near, in, decay, before, behind, all);
        float far[2][4] = {};
        multiply_level<8>(far[0], far[1], in, decay, before, behind, false);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sums.near[i / 4][i % 4] += near[i / 4][i % 4];
            sums.far[i / 4][i % 4] += far[i / 4][i % 4];
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            before[1][x] *= all[0][x];
            behind[0][x] *= all[1][x];
            all[0][x] *= all[1][x];
        }
        // 2. Rows for products with the state.
        float* reads = buffers_.reads(slot, Buffers::kReadA) + 16 * tile + key();
        // The offsets of the lane's words differ from that of its first key and early step in a few bits only.
        const int first = Buffers::of_updates(slot, Buffers::kUpdateK) + 256 * tile +
                          StepTile::place(key(), early());
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            Vec<float, 4> of_a, of_r;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float through = before[which][x] * decay[which][x];
                of_a[x] = value(in.a[which], x) * before[which][x];
                of_r[x] = value(in.r[which], x) * through;
                if constexpr (!kSplit) of_a[x] = rounded(of_a[x]);
                if constexpr (!Config::kSplitOutput) of_r[x] = rounded(of_r[x]);
                float* place = buffers_.first + (first ^ x % 2 * 16 ^ x / 2 * 4 ^ which * 15) +
                               x / 2 * 32;
                const float of_k = value(in.k[which], x) * behind[which][x];
                const float of_b = value(in.b[which], x) * behind[which][x];
                place[0] = kSplit ? of_k : rounded(of_k);
                place[Buffers::kUpdates] = kSplit ? of_b : rounded(of_b);
            }
            float* row = reads + step(which) * Buffers::kReadStride;
            *reinterpret_cast<Vec<float, 4>*>(row) = of_a;
            *reinterpret_cast<Vec<float, 4>*>(row + Buffers::kReads) = of_r;
        }
        if (mma_lane().g == 0) {
            const int q = mma_lane().q;
            float* kept = buffers_.decay(slot) + 16 * tile + q / 2 * 8 + q % 2;
#pragma unroll
            for (int x = 0; x < 4; ++x) kept[2 * x] = all[0][x];
        }
    }

    // Where element i of the lane's four elements of a fragment belongs: its offset in the tile of a score, or in the
    // triangle. Elements 0 and 1 are r's, elements 2 and 3 are a's.
    static KGEN_DEVICE int place_of(int fragment, int i) {
        const int g = mma_lane().g, n = 2 * mma_lane().q + i % 2;
        if (is_diagonal(fragment, i)) return StepTile::place(g + i / 2 * 8, g + i / 2 * 8);
        const int row = early_of(g), column = early_of(n), other = row ^ column;
        const int half = fragment < 2 ? 8 : other & 4 ? 4 : other & 2 ? 2 : 1;
        const int late = row & half ? row : 15 - row;
        const int early = column & half ? 15 - column : column;
        return i >= 2 && fragment % 2 == 1 ? late * 16 + early : StepTile::place(late, early);
    }
    // Whether element i is on r's diagonal: step g if the element is in r's rows, step g + 8 if it is in a's rows.
    static KGEN_DEVICE bool is_diagonal(int fragment, int i) {
        return fragment >= 2 && mma_lane().g == 2 * mma_lane().q + i % 2;
    }

    // Adds up a fragment over the warps' keys, and stores the sums in their matrix. Fragments: far of k, far of b, near
    // of k, near of b.
    KGEN_DEVICE void put_fragment(int chunk, int slot, int fragment, const u32 (&places)[2]) const {
        Vec<float, 4> sums = *sums_of(chunk, 0, fragment);
#pragma unroll
        for (int warp = 1; warp < Buffers::kWithKeys; ++warp) {
            const Vec<float, 4> some = *sums_of(chunk, warp, fragment);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += some[i];
        }
        const bool of_k = fragment % 2 == 0;
        float* of_r = buffers_.scores(slot, of_k ? Buffers::kScoreRK : Buffers::kScoreRB);
        float* of_a = of_k ? buffers_.scores(slot, Buffers::kScoreAK) : buffers_.triangle(chunk);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            of_r[places[x] & 0xffff] = rounded_score<Config::kSplitOutput>(sums[x]);
            const bool diagonal = is_diagonal(fragment, x);
            const float late = sums[2 + x];
            float* place = (diagonal ? of_r : of_a) + (places[x] >> 16);
            if constexpr (kSplit && Config::kSplitOutput) {
                *place = late;
            } else {
                *place = diagonal ? rounded_score<Config::kSplitOutput>(late)
                         : of_k   ? rounded_score<kSplit>(late)
                                  : late;
            }
        }
    }

    template <bool Exact>
    static KGEN_DEVICE float rounded_score(float x) {
        return Exact ? x : rounded(x);
    }

    Buffers buffers_;
    int warp_;
    i64 steps_;
    u16* inputs_;
    CopierOf<T> r_, k_, a_, b_;
    CopierOf<W> w_;
    u32 places_[kFragments][2];  // place_of an element of r, and << 16 of the same one of a
};

}  // namespace kgen::wkv7
