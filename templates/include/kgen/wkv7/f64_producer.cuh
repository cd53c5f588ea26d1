// Rows scaled by decays, scores and the inverse of a chunk of 16 steps of wkv7 in fp64, any decay; by producer warps.
//
// With D(i, j) the product of the decays of steps i to j, per key, the rows that consumers multiply are
//
//     A_t = a_t D(0, t-1)     R_t = r_t D(0, t)     K_s = k_s D(s+1, 15)     B_s = b_s D(s+1, 15)
//
// and the scores are sums over keys, for s < t (with r also for s = t, where D is 1):
//
//     ab, ak: a_t D(s+1, t-1) b_s, k_s      rb, rk: r_t D(s+1, t) b_s, k_s
//
// The chunk is halved down to adjacent steps. In a block of 2, 4, 8 or 16 steps with the middle m, D(s+1, t) of an
// early step s and a late step t is D(s+1, m-1) D(m, t): no quotient is formed, and any decay is exact, 0 and 1 as
// well. The product of a level has all early steps as rows and all late steps as columns; elements whose two steps lie
// in different blocks are not read.
//
// The inverse is that of the unit triangular matrix I - ab, by substitution in blocks of eight steps.
//
// Layout: a producer warp has 16 keys at a time. Lane (g, q) has steps g and 15 - g, one of which is early and the
// other one late at every level, and keys 4q to 4q + 3: the operands of all products are the lane's own values.
//
// Shared memory (F64Tiles): two slots of what consumers read of a chunk
//
//     double read[kReads][16][keys + 8]    forward A, backward B and K; keys padded to 16
//     double update[2][16][keys + 2]       forward K and B, backward R and A
//     double decay[keys]                   D(0, 15)
//     double matrix[kMatrices][16][16]     [step of the result][step of the operand], halves of odd rows exchanged: the
//                                          inverse; forward ak, backward rb, rk, ak
//
// and arrays that only producers read
//
//     double partial[key tiles][4 levels][readers][2][32][2]    scores of 16 keys, as accumulators
//     double diagonal[key tiles][2][16]    of rk and rb
//     double lower[16][18]                 ab
//
// Bank conflicts: the loads of consumers have none.
//
// Synchronisation: the producers pass named barrier 1 twice per chunk: when the partial scores of all keys are stored,
// and when their sums are stored. The caller's block barrier ends the chunk.
//
// Config: Value and W; kK; kForm; kRowWarps: number of producer warps; kVec: elements per load.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/mma_f64.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/column_tensors.cuh"
#include "kgen/wkv7/existing_rows.cuh"
#include "kgen/wkv7/prepared_rows.cuh"

namespace kgen::wkv7 {

struct alignas(16) DoublePair {
    double x, y;
};

// Back: whether the loop goes backward in time.
template <int Keys, bool Back>
struct F64Tiles {
    static constexpr int kKeyTiles = ceil_div(Keys, 16), kKeys = 16 * kKeyTiles;
    static constexpr int kReads = Back ? 2 : 1, kMatrices = Back ? 4 : 2, kReaders = Back ? 2 : 1;
    static constexpr int kReadPitch = kKeys + 8, kUpdatePitch = kKeys + 2;
    static constexpr int kRead = 16 * kReadPitch, kUpdate = 16 * kUpdatePitch, kMatrix = 256;
    static constexpr int kSlot = kReads * kRead + 2 * kUpdate + kKeys + kMatrices * kMatrix;
    static constexpr int kLowerPitch = 18;
    static constexpr int kPartial = 4 * kReaders * 128;  // of 16 keys
    static constexpr int kDoubles = 2 * kSlot + kKeyTiles * (kPartial + 32) + 16 * kLowerPitch;
    static constexpr int kBytes = 8 * kDoubles;
    enum Matrix { kInverse, kFirstOfC, kSecondOfC, kSecondOfFirst };

    static KGEN_DEVICE double* slot(int number) { return dynamic_smem<double>() + number * kSlot; }
    static KGEN_DEVICE double* read(int number, int which) { return slot(number) + which * kRead; }
    static KGEN_DEVICE double* update(int number, int which) { return read(number, kReads) + which * kUpdate; }
    static KGEN_DEVICE double* decay(int number) { return update(number, 2); }
    static KGEN_DEVICE double* matrix(int number, int which) { return decay(number) + kKeys + which * kMatrix; }
    // The offset of the element for a step of the result and a step of the operand.
    static KGEN_DEVICE int place(int result, int operand) { return 16 * result + (operand ^ 8 * (result & 1)); }

    static KGEN_DEVICE double* partial(int tile) { return slot(2) + tile * kPartial; }
    static KGEN_DEVICE double* diagonal(int tile) { return partial(kKeyTiles) + 32 * tile; }
    static KGEN_DEVICE double* lower() { return diagonal(kKeyTiles); }
};

template <class Config, bool Back>
class F64Producer {
    using Value = typename Config::Value;
    using W = typename Config::W;
    using Tiles = F64Tiles<Config::kK, Back>;
    using Both = double[2][4];  // of a lane: [step g or 15 - g][key]
    static constexpr int kRowWarps = Config::kRowWarps, kThreads = kRowWarps * kWarpSize;
    static constexpr int kPerWarp = ceil_div(Tiles::kKeyTiles, kRowWarps);  // tiles of 16 keys
    static constexpr int kReaders = Tiles::kReaders;
    // A lane's inputs as they are in memory, so that their loads can be in flight.
    template <class T>
    struct Raw {
        Vec<T, 4> of[2];

        // Where a step or a key does not exist, loads the last of `steps` steps, or of the keys.
        KGEN_DEVICE void load(const StepPointer<T>& rows, i64 begin, i64 steps, int key) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of[i] = load_existing<Config::kVec, Config::kK>(
                    rows.first + min(begin + own_step(i), steps - 1) * rows.stride, key);
        }
        // Converts to double; steps and keys that do not exist become zero.
        KGEN_DEVICE void widen(Both& to, const bool (&there)[2], int key) const {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                to[i / 4][i % 4] =
                    there[i / 4] && is_key(key + i % 4) ? to_float(of[i / 4][i % 4]) : 0.0f;
        }
    };
    struct RawTile {
        Raw<Value> r, k, a, b;
        Raw<W> w;
    };

public:
    // warp: number among the producers.
    KGEN_DEVICE explicit F64Producer(int warp) : warp_(warp) {}

    // Starts the loads of a chunk.
    template <class Tensors>
    KGEN_DEVICE void load(const Tensors& x, i64 begin) {
        left_ = x.steps - begin;
#pragma unroll
        for (int n = 0; n < kPerWarp; ++n) {
            const int key = 16 * (warp_ + n * kRowWarps) + 4 * mma_lane().q;
            if constexpr (Back) raw_[n].r.load(x.r, begin, x.steps, key);
            raw_[n].k.load(x.k, begin, x.steps, key);
            raw_[n].a.load(x.a, begin, x.steps, key);
            raw_[n].b.load(x.b, begin, x.steps, key);
            raw_[n].w.load(x.w, begin, x.steps, key);
        }
    }

    // Stores the results of the chunk that was loaded in a slot, and starts the loads of the next chunk.
    template <class Tensors>
    KGEN_DEVICE void put(const Tensors& x, int slot, i64 next) {
        const i64 left = left_;
#pragma unroll
        for (int n = 0; n < kPerWarp; ++n) {
            const int tile = warp_ + n * kRowWarps;
            if (tile < Tiles::kKeyTiles) put_tile(raw_[n], tile, slot, left);
        }
        load(x, next);
        named_barrier_sync(1, kThreads);
        put_scores(slot);
        named_barrier_sync(1, kThreads);
        if (warp_ == 0) put_inverse(slot);
    }

private:
    static KGEN_DEVICE int own_step(int i) { return i == 0 ? mma_lane().g : 15 - mma_lane().g; }
    static KGEN_DEVICE bool is_key(int key) { return Config::kK % 16 == 0 || key < Config::kK; }
    // Whether step g is late in blocks of 2 << level steps; step 15 - g is early if step g is late.
    static KGEN_DEVICE bool is_late(int level) { return (mma_lane().g >> level & 1) != 0; }

    KGEN_DEVICE void put_tile(const RawTile& raw, int tile, int slot, i64 left) const {
        const int key = 16 * tile + 4 * mma_lane().q;
        const bool there[2] = {own_step(0) < left, own_step(1) < left};
        Both a, r = {}, k, b, product, other;
        raw.a.widen(a, there, key);
        raw.k.widen(k, there, key);
        raw.b.widen(b, there, key);
        if constexpr (Back) {
            raw.r.widen(r, there, key);
            put_diagonal(r, k, b, tile);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                // Without a condition: under one, decays would be computed one after the other.
                const float decay = decay_of<Config::kForm>(to_float(raw.w.of[i][x]));
                const float d = there[i] && is_key(key + x) ? decay : 1.0f;
                if constexpr (Back) r[i][x] *= d;
                other[i][x] = shfl_xor(d, 4);
                product[i][x] = d;
            }
        put_level(a, r, k, b, tile, 0);
        apply(a, r, k, b, other, 0);
        put_level(a, r, k, b, tile, 1);
        extend(product, other, 8);
        apply(a, r, k, b, other, 1);
        put_level(a, r, k, b, tile, 2);
        extend(product, other, 16);
        apply(a, r, k, b, other, 2);
        put_level(a, r, k, b, tile, 3);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            product[0][x] *= other[0][x];
            product[1][x] *= other[1][x];
            a[1][x] *= product[0][x];
            r[1][x] *= product[0][x];
            k[0][x] *= product[1][x];
            b[0][x] *= product[1][x];
        }
        if (mma_lane().g == 0) {
            double all[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) all[x] = product[0][x] * product[1][x];
            put_four(Tiles::decay(slot) + key, all);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int of_read = own_step(i) * Tiles::kReadPitch + key;
            const int of_update = own_step(i) * Tiles::kUpdatePitch + key;
            if constexpr (Back) {
                put_four(Tiles::read(slot, 0) + of_read, b[i]);
                put_four(Tiles::read(slot, 1) + of_read, k[i]);
                put_four(Tiles::update(slot, 0) + of_update, r[i]);
                put_four(Tiles::update(slot, 1) + of_update, a[i]);
            } else {
                put_four(Tiles::read(slot, 0) + of_read, a[i]);
                put_four(Tiles::update(slot, 0) + of_update, k[i]);
                put_four(Tiles::update(slot, 1) + of_update, b[i]);
            }
        }
    }
    static KGEN_DEVICE void put_four(double* to, const double (&x)[4]) {
        reinterpret_cast<DoublePair*>(to)[0] = {x[0], x[1]};
        reinterpret_cast<DoublePair*>(to)[1] = {x[2], x[3]};
    }

    // Doubles the blocks: `product` becomes the decays of a step's block of 2 or 4 steps, `other` the decays of the
    // block beside it, with which it forms a block of 4 or 8.
    static KGEN_DEVICE void extend(Both& product, Both& other, int lanes) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            double& all = product[i / 4][i % 4];
            all *= other[i / 4][i % 4];
            other[i / 4][i % 4] = shfl_xor(all, lanes);
        }
    }
    // Multiplies by the decays of the other half of a block: readers (a, r) in the late half, writers (k, b) in the
    // early half.
    static KGEN_DEVICE void apply(Both& a, Both& r, Both& k, Both& b, const Both& other, int level) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const bool late = is_late(level) == (i == 0);
                const double of_readers = late ? other[i][x] : 1.0, of_writers = late ? 1.0 : other[i][x];
                a[i][x] *= of_readers;
                if constexpr (Back) r[i][x] *= of_readers;
                k[i][x] *= of_writers;
                b[i][x] *= of_writers;
            }
    }

    // Scores of a level, over 16 keys: rows g of the product are writers b, rows g + 8 writers k.
    static KGEN_DEVICE void put_level(const Both& a, const Both& r, const Both& k, const Both& b, int tile,
                                      int level) {
        const bool late = is_late(level);
        double writers[8], readers[kReaders][4];
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            writers[2 * x] = late ? b[1][x] : b[0][x];
            writers[2 * x + 1] = late ? k[1][x] : k[0][x];
            readers[0][x] = late ? a[0][x] : a[1][x];
            if constexpr (Back) readers[kReaders - 1][x] = late ? r[0][x] : r[1][x];
        }
#pragma unroll
        for (int n = 0; n < kReaders; ++n) {
            double sums[4] = {};
            mma_f64(sums, writers, readers[n]);
            DoublePair* to =
                reinterpret_cast<DoublePair*>(Tiles::partial(tile)) + (level * kReaders + n) * 64 + lane_id();
            to[0] = {sums[0], sums[1]};
            to[32] = {sums[2], sums[3]};
        }
    }
    static KGEN_DEVICE void put_diagonal(const Both& r, const Both& k, const Both& b, int tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            double rk = 0.0, rb = 0.0;
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                rk += r[i][x] * k[i][x];
                rb += r[i][x] * b[i][x];
            }
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) {
                rk += shfl_xor(rk, lanes);
                rb += shfl_xor(rb, lanes);
            }
            if (mma_lane().q == 0) {
                Tiles::diagonal(tile)[own_step(i)] = rb;
                Tiles::diagonal(tile)[16 + own_step(i)] = rk;
            }
        }
    }

    // Sums of the scores over all keys; zero for pairs of steps that nothing reads.
    KGEN_DEVICE void put_scores(int slot) const {
#pragma unroll
        for (int n = 0; n < ceil_div(256, kThreads); ++n) {
            const int i = n * kThreads + warp_ * kWarpSize + lane_id();
            if (256 % kThreads != 0 && i >= 256) break;
            // 16 lanes have eight columns of two adjacent rows, which lie in different banks.
            const int t = (i & 7) + (i >> 1 & 8), s = (i >> 3 & 1) + (i >> 4 & 14), apart = t ^ s;
            const int level = apart >= 8 ? 3 : apart >= 4 ? 2 : apart >= 2 ? 1 : 0;
            const int row = min(s, 15 - s), column = min(t, 15 - t);
            const double* from = Tiles::partial(0) + level * kReaders * 128 + (4 * row + column / 2) * 2 + column % 2;
            const double* from_r = s == t ? Tiles::diagonal(0) + t : from + 128;
            const int to_rk = s == t ? 16 : 64, tile_of_r = s == t ? 32 : Tiles::kPartial;
            double ab = 0.0, ak = 0.0, rb = 0.0, rk = 0.0;
#pragma unroll
            for (int tile = 0; tile < Tiles::kKeyTiles; ++tile, from += Tiles::kPartial) {
                ab += from[0];
                ak += from[64];
                if constexpr (Back) {
                    rb += from_r[tile * tile_of_r];
                    rk += from_r[tile * tile_of_r + to_rk];
                }
            }
            // Selected, not under conditions: this way the loads of all scores are in flight together.
            ab = s < t ? ab : 0.0;
            ak = s < t ? ak : 0.0;
            rb = s <= t ? rb : 0.0;
            rk = s <= t ? rk : 0.0;
            Tiles::lower()[Tiles::kLowerPitch * t + s] = ab;
            if constexpr (Back) {
                Tiles::matrix(slot, Tiles::kFirstOfC)[Tiles::place(s, t)] = rb;
                Tiles::matrix(slot, Tiles::kSecondOfC)[Tiles::place(s, t)] = rk;
                Tiles::matrix(slot, Tiles::kSecondOfFirst)[Tiles::place(s, t)] = ak;
            } else {
                Tiles::matrix(slot, Tiles::kFirstOfC)[Tiles::place(t, s)] = ak;
            }
        }
    }

    // The inverse N in blocks of eight steps: the two diagonal blocks by substitution, with a column per lane of the
    // first 16 lanes, and then N22 ab21 N11.
    static KGEN_DEVICE void put_inverse(int slot) {
        // Opaque: otherwise addresses would stay in registers throughout the loop, and other values would be spilled.
        const int number = opaque(lane_id());
        const int g = number / 4, q = number % 4, column = number % 16, block = column & 8;
        const double *const lower = Tiles::lower(), *const own = lower + (Tiles::kLowerPitch + 1) * block;
        double* const found_in = inverse(slot, block, column);
        double found[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) found[i] = own[Tiles::kLowerPitch * i + column % 8];
        // Once an element is complete, its products are added to all later ones.
#pragma unroll
        for (int j = 1; j < 7; ++j)
#pragma unroll
            for (int i = j + 1; i < 8; ++i) found[i] += own[Tiles::kLowerPitch * i + j] * found[j];
        const int odd = kNextRow + (Back ? 0 : 8 - 2 * block);  // from an even row to the next one
        if (number < 16)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                found_in[i / 2 * 2 * kNextRow + i % 2 * odd] = block + i == column ? 1.0 : found[i];
        sync_warp();
        // (ab21 N11)^T; steps 2q and 2q + 1 of the accumulator are numbers q and q + 4 of an operand B.
        const double *const early = inverse(slot, q, g), *const late = inverse(slot, 8 + g, 8 + 2 * q);
        const double* const between_both = lower + Tiles::kLowerPitch * (8 + g) + q;
        double* const to = inverse(slot, 8 + g, 2 * q);
        double between[4] = {}, sums[4] = {};
        mma_f64(between, {early[0], 0.0, early[4 * kNextRow], 0.0}, {between_both[0], between_both[4]});
        mma_f64(sums, {late[0], 0.0, late[kNextColumn], 0.0}, {between[0], between[1]});
        to[0] = sums[0];
        to[kNextColumn] = sums[1];
    }
    // An element of the inverse. From an even row or column, the next one is kNextRow or kNextColumn elements further.
    static constexpr int kNextRow = Back ? 1 : 16, kNextColumn = Back ? 8 : 1;
    static KGEN_DEVICE double* inverse(int slot, int row, int column) {
        return Tiles::matrix(slot, Tiles::kInverse) + (Back ? Tiles::place(column, row) : Tiles::place(row, column));
    }

    int warp_;
    i64 left_;
    RawTile raw_[kPerWarp];
};

}  // namespace kgen::wkv7
