// A linear recurrence over the steps of one sequence, chunk by chunk on tensor cores.
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// Forward linear attention is the walk with a, b, v = q, k, v. Its gradients are the same walk:
// gq with gout, v, k, and backwards in time gk with v, gout, q and gv with k, q, gout. `Keys` and
// `Values` are the features of a and b, and of v and out.
//
// A block walks one sequence, or a segment of one, for a slice of the value features. See
// chunk_mma.cuh for the products, and chunk_decay.cuh for a state that decays.
//
// Each chunk costs one barrier. Between two of them a warp does, for chunk c: carried and inner
// products and the update; the scores of chunk c + 1, which the next barrier shows to all; and the
// outputs of chunk c - 1, where other warps have part of the sums. Warps thus need not wait for
// scores, and drift apart by as much as two of these pieces. With decays a chunk costs two barriers:
// rows are factored between one and the other, and all products but the inner one come behind it.
#pragma once

#include "block.cuh"
#include "chunk_decay.cuh"
#include "chunk_mma.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_stage.cuh"
#include "chunk_write.cuh"
#include "math.cuh"

namespace kgen {

// Chunk: steps of a chunk; MTiles, MWarps: fragments of 16 value features per warp, and warps side by
// side; KeyWarps: warps that share those features' keys, whose sums meet in shared memory; Stages:
// chunks in shared memory; CopyBytes: of one copy, of which pointers and strides are multiples.
// KeySums: z_t = z_{t-1} + b_t is there; Normalised: out is divided by out_factor * a_t z_t + eps.
// Scaled: v is multiplied by value_factor. Decay: NoDecayRows, or DecayRows, where a step reads the
// state before it, and itself by the bonus.
template <class T, class Product, int Keys, int Values, int Chunk, int MTiles, int MWarps,
          int KeyWarps, int Stages, int CopyBytes, bool KeySums = false, bool Normalised = false,
          bool Scaled = false, class Decay = NoDecayRows>
class ChunkWalk {
    static constexpr bool kDecaying = kDecays<Decay>;
    using Products = WalkProducts<T, Product, kDecaying>;
    using Steps = typename Products::Steps;
    using Scorer = typename Products::Scorer;
    using Updater = typename Products::Updater;
    using Carry = typename Products::Carry;
    using Inside = typename Products::Inside;
    using Score = typename Inside::Score;

    static constexpr int kWarps = MWarps * KeyWarps;
    static constexpr int kStateTiles = Carry::kStep / 8;  // in one fragment
    static constexpr int kUnit = max(8 * KeyWarps * kStateTiles, Scorer::kStep);
    static constexpr int kPadded = (Keys + kUnit - 1) / kUnit * kUnit;
    static constexpr int kTiles = kPadded / (8 * KeyWarps);  // of 8 keys, per warp
    static constexpr int kStepTiles = Chunk / 8;             // of 8 steps
    static constexpr int kOwn = kStepTiles / KeyWarps;       // tiles of outputs a warp finishes
    static constexpr int kDeep = 4;  // steps of a sum whose fragments are held at once, at most
    static constexpr int kGroup = Steps::kPasses == 1 ? 4 : 1;  // sums whose operands B are held
    static constexpr bool kLate = KeyWarps > 1 || Normalised;   // outputs wait for a barrier

    // Rows a and b as they came, or with their decays, are kFactorStride apart.
    using Factors = ChunkDecay<Decay, T, Keys, kPadded, Chunk, kWarps, Stages, CopyBytes,
                               Updater::kPasses != 1>;
    static constexpr int kKeyStride = chunk_row_stride<T>(kPadded);
    static constexpr int kSliceValues = 16 * MTiles * MWarps;
    static constexpr int kValueStride = chunk_row_stride<T>(kSliceValues);
    static constexpr int kScoreStride = Chunk + Inside::kOffset;
    static constexpr int kPlane = Chunk * kScoreStride;
    static constexpr int kScores = Inside::kPlanes * kPlane;
    static constexpr int kAllScores = (kDecaying ? 1 : 2) * kScores;  // of as many chunks
    static constexpr int kKeyTile = Chunk * kKeyStride;
    static constexpr int kStage = 2 * kKeyTile + Chunk * kValueStride;
    static constexpr int kFactorStride = Factors::kStride, kUpdateStride = Factors::kUpdateStride;
    static constexpr int kRowSums = Normalised ? Chunk * kStepTiles : 0;
    static constexpr int kExchange = (KeyWarps - 1) * kSliceValues * Chunk;  // floats

    static_assert(KeyWarps == 1 || KeyWarps == 2 || KeyWarps == 4, "1, 2 or 4 warps share keys");
    static_assert(Chunk % 16 == 0 && kStepTiles % KeyWarps == 0,
                  "a chunk is whole fragments, and every warp finishes some of its steps");
    static_assert(Keys * sizeof(T) % CopyBytes == 0 && Values * sizeof(T) % CopyBytes == 0,
                  "a copy would reach into the next row");
    static_assert(!kDecaying || (!KeySums && !Normalised), "key sums do not decay");
    static_assert(Stages >= 3, "two chunks are in use while others are on the way");

    using Row = typename Factors::Row;
    using KeyCopier = ChunkCopier<T, Chunk, Keys, CopyBytes, kWarps * kWarpSize>;
    using State = float[MTiles][kTiles][4];
    using Outputs = float[MTiles][kStepTiles][4];

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kSlice = kSliceValues;  // value features of a block
    static constexpr int kSmemBytes =
        max(Stages * kStage * static_cast<int>(sizeof(T)) +
                kAllScores * static_cast<int>(sizeof(Score)) + 8 * kExchange +
                (KeySums ? 8 * (kPadded + Chunk + kRowSums) : 0) + Factors::kSmemBytes,
            plain_walk_bytes(Keys, kSlice));

    KGEN_DEVICE ChunkWalk(const WalkRows<T>& rows, const WalkStates& states,
                          const Decay& decay = {})
        : rows_(rows),
          states_(states),
          decay_(decay),
          factors_(decay, rows.first),
          copy_a_(rows.a, rows.first, Keys),
          copy_b_(rows.b, rows.first, Keys),
          copy_v_(rows.v, rows.first, rows.values) {
        // Shared memory: T ring[Stages][a, b: Chunk x kKeyStride; v: Chunk x kValueStride];
        // Score scores[2, or 1 with decays][planes][Chunk][kScoreStride]; float exchange[2][kExchange];
        // float key_sums[2][kPadded], norms[2][Chunk], row_sums[2][kStepTiles][Chunk]; or what
        // decays need.
        ring_ = dynamic_smem<T>();
        scores_ = reinterpret_cast<Score*>(ring_ + Stages * kStage);
        exchange_ = reinterpret_cast<float*>(scores_ + kAllScores);
        key_sums_ = exchange_ + 2 * kExchange;
        norms_ = key_sums_ + 2 * kPadded;
        row_sums_ = norms_ + 2 * Chunk;
        if constexpr (kDecaying) factors_.begin(exchange_ + 2 * kExchange);
        const i64 steps = max(rows.end - rows.first, i64{0});
        whole_ = static_cast<int>(steps / Chunk);
        last_ = static_cast<int>(steps % Chunk);
        chunks_ = whole_ + (last_ > 0 ? 1 : 0);
        const int warp = thread_rank() / kWarpSize;
        key_warp_ = warp / MWarps;
        values0_ = warp % MWarps * 16 * MTiles;
        keys0_ = key_warp_ * 8 * kTiles;
        staged_ = stage_slot_ = 0;
        writer_.begin(rows.out, rows.first, 8 * key_warp_ * kOwn, values0_);
    }

    // Outputs of the segment, and the state behind it.
    KGEN_DEVICE void walk() {
        State state;
        load_state(state);
        fill_ring<true>();
        if constexpr (KeySums) {
            for (int key = thread_rank(); key < kPadded; key += kThreads)
                key_sums_[key] = key < Keys ? states_.first_key_sum(key, Keys) : 0.0f;
        }
        cp_async_wait<Stages - 2>();
        sync_block();
        float poison = 0.0f;  // becomes NaN once an output is not finite
        float own[MTiles][kOwn][4] = {};
        if constexpr (kDecaying) {
            walk_decaying(state, own, poison);
        } else {
            walk_chunks(state, own, poison);
        }
        cp_async_wait_all();
        if constexpr (kLate) {
            sync_block();
            if (chunks_ > 0) finish(own, chunks_ - 1, poison);
        }
        if (states_.end != nullptr) store_state(state, states_.end_factor, poison);
        if constexpr (KeySums) {
            if (states_.end_key_sum != nullptr)
                for (int key = thread_rank(); key < Keys; key += kThreads)
                    states_.end_key_sum[key] = key_sums_[chunks_ % 2 * kPadded + key];
        }
        if (block_has(poison))
            walk_plainly<T, Keys, Values, kSlice, kThreads, KeySums, Normalised, Scaled, true>(
                rows_, states_, decay_);
    }

    // The segment's sum of b v^T alone, and its key sum, or its product of decays.
    KGEN_DEVICE void sum() {
        State state = {};
        fill_ring<false>();
        float key_sum[(Keys + kThreads - 1) / kThreads] = {};
        if constexpr (kDecaying)
            for (float& product : key_sum) product = 1.0f;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            cp_async_wait<Stages - 2>();
            sync_block();
            stage<false>();
            const T* tile = ring_ + chunk % Stages * kStage;
            if constexpr (kDecaying) {
                factor(chunk);
                sync_block();
                decay_state(state);
#pragma unroll
                for (int i = 0; i < (Keys + kThreads - 1) / kThreads; ++i) {
                    const int key = thread_rank() + i * kThreads;
                    if (key < Keys) key_sum[i] *= *factors_.all(key);
                }
            }
            Outputs none_of_them;
            update<false>(none_of_them, state, tile, nullptr);
            if constexpr (KeySums) {
#pragma unroll
                for (int i = 0; i < (Keys + kThreads - 1) / kThreads; ++i) {
                    const int key = thread_rank() + i * kThreads;
                    if (key < Keys)
                        for (int step = 0; step < Chunk; ++step)
                            key_sum[i] += to_float(tile[kKeyTile + step * kKeyStride + key]);
                }
            }
        }
        cp_async_wait_all();
        float poison = 0.0f;
        store_state(state, 1.0f, poison);
        if constexpr (KeySums || kDecaying) {
#pragma unroll
            for (int i = 0; i < (Keys + kThreads - 1) / kThreads; ++i) {
                const int key = thread_rank() + i * kThreads;
                if (key < Keys && states_.end_key_sum != nullptr)
                    states_.end_key_sum[key] = key_sum[i];
            }
        }
        if (block_has(poison))
            walk_plainly<T, Keys, Values, kSlice, kThreads, KeySums, Normalised, Scaled, false>(
                rows_, states_, decay_);
    }

private:
    KGEN_DEVICE void walk_chunks(State& state, float (&own)[MTiles][kOwn][4], float& poison) {
        if (chunks_ > 0) scores(0);

#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            cp_async_wait<Stages - 3>();
            sync_block();
            // 1. Chunk + 1 and the scores of `chunk` are there for all, and chunk - 1 is free.
            stage<true>();
            if (kLate && chunk > 0) finish(own, chunk - 1, poison);
            if (chunk + 1 < chunks_) scores(chunk + 1);
            if constexpr (KeySums) add_keys(chunk);

            // 2. Sums of this warp's keys and steps.
            Outputs sums = {};
            const T* tile = ring_ + chunk % Stages * kStage;
            carry(sums, state, tile);
            update<true>(sums, state, tile, scores_ + chunk % 2 * kScores);

            // 3. Keep those of the steps that this warp finishes; hand out the others.
            hand_out(own, sums, chunk % 2);
            if constexpr (!kLate) finish(own, chunk, poison);
        }
    }

    // A chunk is factored while the one before it is finished; then come its scores, which wait for the
    // next barrier to be multiplied with v.
    KGEN_DEVICE void walk_decaying(State& state, float (&own)[MTiles][kOwn][4], float& poison) {
        if (chunks_ > 0) factor(0);

#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            sync_block();
            // 1. The factors of `chunk` are there for all, and chunk - 1 is free.
            stage<true>();
            if (kLate && chunk > 0) finish(own, chunk - 1, poison);
            const T* tile = ring_ + chunk % Stages * kStage;
            scores(chunk);
            Outputs sums = {};
            carry(sums, state, factors_.carried());
            decay_state(state);
            update<false>(sums, state, tile, nullptr);
            cp_async_wait<Stages - 2>();
            sync_block();

            // 2. Scores of `chunk` and all of chunk + 1 are there, and the factors are free.
            inside(sums, tile, scores_);
            hand_out(own, sums, chunk % 2);
            if constexpr (!kLate) finish(own, chunk, poison);
            if (chunk + 1 < chunks_) factor(chunk + 1);
        }
    }

    KGEN_DEVICE void factor(int chunk) {
        const int slot = chunk % Stages;
        const T* a = ring_ + slot * kStage;
        factors_.factor(slot, a, a + kKeyTile);
    }

    KGEN_DEVICE void decay_state(State& state) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(
                factors_.all(keys0_ + 8 * tile + 2 * lane.q));
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) state[m][tile][i] *= two[i % 2];
        }
    }

    // Start the copies of the next chunk into its place in the ring, and close their group; behind the
    // last chunk, close the group alone.
    template <bool WithA>
    KGEN_DEVICE void stage() {
        if (staged_ < chunks_) {
            T* tile = ring_ + stage_slot_ * kStage;
            if (staged_ < whole_) {
                stage_chunk<WithA, true>(tile, Chunk);
                if constexpr (kDecaying) factors_.template start<true>(stage_slot_, Chunk);
            } else {
                stage_chunk<WithA, false>(tile, last_);
                if constexpr (kDecaying) factors_.template start<false>(stage_slot_, last_);
            }
            stage_slot_ = stage_slot_ == Stages - 1 ? 0 : stage_slot_ + 1;
            ++staged_;
        }
        cp_async_commit();
    }

    template <bool WithA, bool Whole>
    KGEN_DEVICE void stage_chunk(T* tile, int left) {
        if constexpr (WithA) copy_a_.template start<Whole>(tile, kKeyStride, left);
        copy_b_.template start<Whole>(tile + kKeyTile, kKeyStride, left);
        copy_v_.template start<Whole>(tile + 2 * kKeyTile, kValueStride, left);
    }

    // Start the first chunks. Features that do not exist are zeros for good.
    template <bool WithA>
    KGEN_DEVICE void fill_ring() {
        if (kPadded > Keys || rows_.values < kSlice) {
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
#pragma unroll
        for (int chunk = 0; chunk < Stages - 1; ++chunk) stage<WithA>();
    }

    // P = A B^T of a chunk, tiles of 16 x 8 shared out over the warps; those beyond the diagonal are
    // not even written.
    KGEN_DEVICE void scores(int chunk) {
        constexpr int kRowTiles = Chunk / 16, kAll = kRowTiles * (kRowTiles + 1);
        constexpr int kSteps = kPadded / Scorer::kStep;
        const T* tile_a = ring_ + chunk % Stages * kStage;
        const T* tile_b = tile_a + kKeyTile;
        const Row *a, *b;
        Score* out = scores_ + (kDecaying ? 0 : chunk % 2) * kScores;
        if constexpr (kDecaying) {
            if (!factors_.is_mild()) {
                factors_.template exact_scores<Inside>(chunk % Stages, tile_a, tile_b, out,
                                                       kScoreStride, kPlane);
                return;
            }
            a = factors_.score_a();
            b = factors_.score_b();
        } else {
            a = tile_a;
            b = tile_b;
        }
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int tile = thread_rank() / kWarpSize; tile < kAll; tile += kWarps) {
            int row = 0, before = 0;
#pragma unroll
            for (int i = 1; i < kRowTiles; ++i)
                if (tile >= i * (i + 1)) row = 16 * i, before = i * (i + 1);
            const int column = 8 * (tile - before);
            // Two sums for two chains of products that do not wait for each other.
            float sums[1][2][4] = {};
#pragma unroll
            for (int step = 0; step < kSteps; step += kDeep) {
                typename Scorer::A rows[1][kDeep];
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
                    if (step + k < kSteps)
                        rows[0][k] = Scorer::a_rows(
                            a + row * kFactorStride + (step + k) * Scorer::kStep, kFactorStride);
                multiply_group<Scorer, 1, 2, kDeep>(
                    sums, 0, rows, [&](int n, int k, typename Scorer::B& to) {
                        if (step + k >= kSteps || k % 2 != n) return false;
                        to = Scorer::b_rows(b + column * kFactorStride + (step + k) * Scorer::kStep,
                                           kFactorStride);
                        return true;
                    });
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = row + lane.g + 8 * half, s = column + 2 * lane.q;
                float two[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    two[i] = s + i <= t ? sums[0][0][2 * half + i] + sums[0][1][2 * half + i]
                                        : 0.0f;
                if constexpr (kDecaying) {  // a step reads itself by the bonus
                    if (s == t) two[0] = factors_.bonus(t);
                    if (s + 1 == t) two[1] = factors_.bonus(t);
                }
                Inside::store(out + t * kScoreStride + s, kPlane, two);
                if constexpr (Normalised) {
                    const float sum = lanes_sum<4>(two[0] + two[1]);
                    if (lane.q == 0)
                        row_sums_[chunk % 2 * kRowSums + column / 8 * Chunk + t] = sum;
                }
            }
        }
    }

    // O += A S for all steps of the chunk, over this warp's keys.
    KGEN_DEVICE void carry(Outputs& sums, const State& state, const Row* a) {
        constexpr int kSteps = kTiles / kStateTiles;
#pragma unroll
        for (int step = 0; step < kSteps; step += kDeep) {
            typename Carry::A s[MTiles][kDeep];
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
                    if (step + k < kSteps)
                        s[m][k] = Carry::of_sums(state[m], (step + k) * kStateTiles);
#pragma unroll
            for (int n = 0; n < kStepTiles; n += kGroup)
                multiply_group<Carry, MTiles, kGroup, kDeep>(
                    sums, n, s, [&](int i, int k, typename Carry::B& to) {
                        if (step + k >= kSteps) return false;
                        to = Carry::b_rows(a + 8 * (n + i) * kFactorStride + keys0_ +
                                              (step + k) * Carry::kStep,
                                          kFactorStride);
                        return true;
                    });
        }
    }

    // S += B^T V over the chunk, and O += P V: each part of V is read once for both. Warps that share
    // value features take turns with the steps of P V.
    template <bool WithOutputs>
    KGEN_DEVICE void update(Outputs& sums, State& state, const T* tile, const Score* p) {
        constexpr int kSteps = Chunk / Updater::kStep;
        constexpr int kHalves = Updater::kStep / Inside::kStep;  // steps of P V per step of the update
        const Row* b;
        if constexpr (kDecaying) {
            b = factors_.update() + keys0_;
        } else {
            b = tile + kKeyTile + keys0_;
        }
        const T* v = tile + 2 * kKeyTile + values0_;
#pragma unroll
        for (int step = 0; step < kSteps; step += kDeep) {
            typename Updater::A values[MTiles][kDeep];
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
                    if (step + k < kSteps)
                        values[m][k] = Updater::template a_columns<Scaled>(
                            v + (step + k) * Updater::kStep * kValueStride + 16 * m, kValueStride,
                            rows_.value_factor);
#pragma unroll
            for (int n = 0; n < kTiles; n += kGroup)
                multiply_group<Updater, MTiles, kGroup, kDeep>(
                    state, n, values, [&](int i, int k, typename Updater::B& to) {
                        if (step + k >= kSteps || n + i >= kTiles) return false;
                        to = Updater::b_columns(
                            b + (step + k) * Updater::kStep * kUpdateStride + 8 * (n + i),
                            kUpdateStride);
                        return true;
                    });
            if constexpr (WithOutputs) {
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
                        if (step + k < kSteps && is_mine((step + k) * kHalves + half))
                            look_inside(sums, values, k, half,
                                        ((step + k) * kHalves + half) * Inside::kStep, p);
            }
        }
    }

    // O += P V alone.
    KGEN_DEVICE void inside(Outputs& sums, const T* tile, const Score* p) {
        constexpr int kSteps = Chunk / Steps::kStep;
        constexpr int kHalves = Steps::kStep / Inside::kStep;
        const T* v = tile + 2 * kKeyTile + values0_;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            typename Steps::A values[MTiles][kDeep];
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
                values[m][0] = Steps::template a_columns<Scaled>(
                    v + step * Steps::kStep * kValueStride + 16 * m, kValueStride,
                    rows_.value_factor);
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                if (is_mine(step * kHalves + half))
                    look_inside(sums, values, 0, half, (step * kHalves + half) * Inside::kStep, p);
        }
    }

    // Earlier steps meet more outputs: turns go back and forth.
    KGEN_DEVICE bool is_mine(int step) const {
        const int turn = step % (2 * KeyWarps);
        return KeyWarps == 1 || key_warp_ == (turn < KeyWarps ? turn : 2 * KeyWarps - 1 - turn);
    }

    KGEN_DEVICE void look_inside(Outputs& sums,
                                 const typename Steps::A (&values)[MTiles][kDeep], int k,
                                 int half, int column, const Score* p) {
        typename Inside::A one[MTiles][1];
#pragma unroll
        for (int m = 0; m < MTiles; ++m) one[m][0] = Inside::of_values(values[m][k], half);
#pragma unroll
        for (int n = 0; n < kStepTiles; n += kGroup)
            multiply_group<Inside, MTiles, kGroup, 1>(
                sums, n, one, [&](int i, int, typename Inside::B& to) {
                    if (column > 8 * (n + i) + 7 || n + i >= kStepTiles) return false;
                    to = Inside::b_scores(p + 8 * (n + i) * kScoreStride + column, kScoreStride,
                                          kPlane);
                    return true;
                });
    }

    KGEN_DEVICE Vec<float, 4>* slot(int parity, int to, int from, int m, int tile) const {
        const int warp = values0_ / (16 * MTiles);
        const int index = ((to * (KeyWarps - 1) + from) * MWarps + warp) * (MTiles * kOwn) +
                          m * kOwn + tile;
        return reinterpret_cast<Vec<float, 4>*>(exchange_ + parity * kExchange) +
               index * kWarpSize + lane_id();
    }

    KGEN_DEVICE void hand_out(float (&own)[MTiles][kOwn][4], const Outputs& sums, int parity) {
#pragma unroll
        for (int to = 0; to < KeyWarps; ++to) {
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int tile = 0; tile < kOwn; ++tile) {
                    const float(&four)[4] = sums[m][to * kOwn + tile];
                    if (KeyWarps == 1 || to == key_warp_) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) own[m][tile][i] = four[i];
                    } else {
                        const int from = key_warp_ < to ? key_warp_ : key_warp_ - 1;
                        *slot(parity, to, from, m, tile) = {{four[0], four[1], four[2], four[3]}};
                    }
                }
        }
    }

    // Add what other warps have, scale, write. Chunk after chunk.
    KGEN_DEVICE void finish(float (&own)[MTiles][kOwn][4], int chunk, float& poison) {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < kOwn; ++tile) {
            const int step = 8 * (key_warp_ * kOwn + tile) + 2 * lane.q;
            float factor[2] = {rows_.out_factor, rows_.out_factor};
            if constexpr (Normalised) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    factor[i] = rows_.out_factor / norms_[chunk % 2 * Chunk + step + i];
            }
#pragma unroll
            for (int m = 0; m < MTiles; ++m) {
                float(&four)[4] = own[m][tile];
                if constexpr (KeyWarps > 1) {
#pragma unroll
                    for (int from = 0; from < KeyWarps - 1; ++from) {
                        const Vec<float, 4> other = *slot(chunk % 2, key_warp_, from, m, tile);
#pragma unroll
                        for (int i = 0; i < 4; ++i) four[i] += other[i];
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    four[i] *= factor[i % 2];
                    if (states_.bias != nullptr) {
                        const int value = values0_ + 16 * m + lane.g + i / 2 * 8;
                        if (value < rows_.values) four[i] += states_.bias[value];
                    }
                    poison = fma(four[i], 0.0f, poison);
                }
            }
        }
        writer_.write(own, chunk < whole_ ? Chunk : last_, rows_.values);
    }

    // z and the norms of a chunk: eight lanes per step.
    KGEN_DEVICE void add_keys(int chunk) {
        const T* a = ring_ + chunk % Stages * kStage;
        const T* b = a + kKeyTile;
        const float* z = key_sums_ + chunk % 2 * kPadded;
        if constexpr (Normalised) {
            const float* row_sums = row_sums_ + chunk % 2 * kRowSums;
            const int lane = lane_id() % 8;
#pragma unroll 1
            for (int step = thread_rank() / 8; step < Chunk; step += kThreads / 8) {
                float sum = 0.0f;
                for (int key = lane; key < Keys; key += 8)
                    sum = fma(to_float(a[step * kKeyStride + key]), z[key], sum);
                for (int column = lane; 8 * column <= step; column += 8)
                    sum += row_sums[column * Chunk + step];
                sum = fma(rows_.out_factor, lanes_sum<8>(sum, warp_mask<8>()), states_.eps);
                const i64 t = rows_.first + static_cast<i64>(chunk) * Chunk + step;
                if (lane == 0) {  // steps that do not exist must not look like a division by zero
                    norms_[chunk % 2 * Chunk + step] = t < rows_.end ? sum : 1.0f;
                    if (states_.norm != nullptr && t < rows_.end) states_.norm[t] = sum;
                }
            }
        }
        for (int key = thread_rank(); key < Keys; key += kThreads) {
            float sum = 0.0f;
            for (int step = 0; step < Chunk; ++step)
                sum += to_float(b[step * kKeyStride + key]);
            key_sums_[(chunk + 1) % 2 * kPadded + key] = z[key] + sum;
        }
    }

    // body(element of the accumulators, key, value) for those of this lane that exist.
    template <class Body>
    KGEN_DEVICE void for_state(Body body) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = keys0_ + 8 * tile + 2 * lane.q + i % 2;
                    const int value = values0_ + 16 * m + lane.g + i / 2 * 8;
                    if (key < Keys && value < rows_.values) body(m, tile, i, key, value);
                }
    }

    KGEN_DEVICE void load_state(State& state) const {
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) state[m][tile][i] = 0.0f;
        if (states_.state == nullptr && states_.count == 0) return;
        for_state([&](int m, int tile, int i, int key, int value) {
            state[m][tile][i] = states_.template first<kDecaying>(key, value, Keys, Values);
        });
    }

    KGEN_DEVICE void store_state(const State& state, float factor, float& poison) const {
        for_state([&](int m, int tile, int i, int key, int value) {
            poison = fma(state[m][tile][i], 0.0f, poison);
            states_.store_end(key, value, state[m][tile][i] * factor);
        });
    }

    // Whether any thread's is not zero.
    static KGEN_DEVICE bool block_has(float poison) {
        __shared__ int flags[kWarps];
        const bool of_warp = any(!(poison == 0.0f));
        if (lane_id() == 0) flags[thread_rank() / kWarpSize] = of_warp ? 1 : 0;
        sync_block();
        bool found = false;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) found = found || flags[i] != 0;
        return found;
    }

    const WalkRows<T>& rows_;
    const WalkStates& states_;
    const Decay decay_;
    Factors factors_;
    KeyCopier copy_a_, copy_b_;
    ChunkCopier<T, Chunk, kSliceValues, CopyBytes, kWarps * kWarpSize> copy_v_;
    T* ring_;
    ChunkWriter<T, Chunk, MTiles, kOwn, kSliceValues, Values % 2 == 0> writer_;
    Score* scores_;
    float* exchange_;
    float* key_sums_;
    float* norms_;
    float* row_sums_;
    int chunks_, whole_, last_;  // chunks, those with all steps, steps of the one that has not
    int staged_, stage_slot_;
    int key_warp_, values0_, keys0_;
};

}  // namespace kgen
