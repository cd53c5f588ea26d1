// The chunk loop: a linear recurrence over the steps of one head, on tensor cores (mma, sm_80).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// Forward linear attention has a, b, v = q, k, v. Its gradients are the same recurrence: gq with gout, v, k; gk with
// v, gout, q and gv with k, q, gout, both backward in time. With decays (chunk_halving.cuh) S_t = decay_t S_{t-1} +
// b_t v_t^T and a step reads the state before it; here such a loop only sums segments. With a norm (NormKeyRows) the
// gradients have one more key and a weight and a factor per step, see chunk_norm_key.cuh.
//
// A CTA loops over the chunks of one head, or of a segment of its steps, for kBlockV value features. The state stays
// in registers. chunk_mma.cuh has the four products of a chunk. If any output is NaN or infinite, the CTA computes
// its steps again, one at a time (step_by_step.cuh).
//
// Layout: rows in shared memory are kKeyStride and kValueStride elements apart (chunk_row_stride). Accumulators of
// states and outputs are transposed: their rows are value features.
//
// Shared memory: T ring[Stages][a, b: Chunk x kKeyStride; v: Chunk x kValueStride]; Score scores[2, or 1 with
// decays][planes][Chunk][kScoreStride]; float exchange[2][kExchange], partial outputs between warps; float
// key_sums[2][kPadded], norms[2][Chunk], row_sums[2][kStepTiles][Chunk], or what chunk_decay.cuh or chunk_norm_key.cuh
// needs.
//
// Synchronisation: one cp.async group and one block barrier per chunk. Between the barriers of chunks c and c + 1 a
// warp computes the outputs of chunk c - 1 (other warps' partial sums are visible now), the scores of chunk c + 1, and
// the other products of chunk c. So no warp waits for scores.
#pragma once

#include "kgen/chunked/chunk_decay.cuh"
#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/chunk_norm_key.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/mma.cuh"

namespace kgen {

// Writes the outputs of one warp, chunk after chunk: Tiles x MTiles tiles of 8 steps x 16 value features, transposed
// (accumulator rows are features).
//
// A store of a warp covers runs of 8 features. With 16-bit outputs and EvenRows (all rows begin at even elements) it
// stores pairs: neighbouring lanes swap a step, after which the even lane has two features of the first step and the
// odd lane two of the second.
template <class T, int Chunk, int MTiles, int Tiles, int BlockV, bool EvenRows>
class ChunkWriter {
    static constexpr bool kPaired = sizeof(T) == 2 && EvenRows;

public:
    // This warp's first output of a chunk is (step0, value0); the first chunk begins at step `first`.
    KGEN_DEVICE void begin(StepRows<T> out, i64 first, int step0, int value0) {
        const MmaLane lane = mma_lane();
        const int swap = kPaired ? lane.g % 2 : 0;
        step_ = step0 + 2 * lane.q + swap;
        value_ = value0 + lane.g - swap;
        stride_ = out.stride;
        next_ = out.at(first + step_) + value_;
    }

    // Writes the next chunk; `left` of its steps and `values` of the CTA's value features exist.
    KGEN_DEVICE void write(float (&tiles)[MTiles][Tiles][4], int left, int values) {
        if constexpr (kPaired) pair_up(tiles);
        if (left == Chunk && values == BlockV) {
            store<true>(tiles, left, values);
        } else {
            store<false>(tiles, left, values);
        }
        next_ += Chunk * stride_;
    }

private:
    static KGEN_DEVICE void pair_up(float (&tiles)[MTiles][Tiles][4]) {
        const bool odd = mma_lane().g % 2 != 0;
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& early = tiles[m][tile][2 * half];
                    float& late = tiles[m][tile][2 * half + 1];
                    const float got = shfl_xor(odd ? early : late, 4);
                    const float first = odd ? got : early, second = odd ? late : got;
                    early = first;
                    late = second;
                }
    }

    template <bool Whole>
    KGEN_DEVICE void store(const float (&tiles)[MTiles][Tiles][4], int left, int values) const {
#pragma unroll
        for (int tile = 0; tile < Tiles; ++tile) {
            T* target = next_ + 8 * tile * stride_;
            const int step = step_ + 8 * tile;
#pragma unroll
            for (int m = 0; m < MTiles; ++m) {
                const float(&four)[4] = tiles[m][tile];
                const int value = value_ + 16 * m;
                if constexpr (kPaired) {
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (Whole || (step < left && value + 8 * half < values))
                            *reinterpret_cast<u32*>(target + 16 * m + 8 * half) =
                                pack2<T>(four[2 * half], four[2 * half + 1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (Whole || (step + i % 2 < left && value + i / 2 * 8 < values))
                            target[i % 2 * stride_ + 16 * m + i / 2 * 8] = from_float<T>(four[i]);
                }
            }
        }
    }

    T* next_;
    i64 stride_;
    int step_, value_;
};

// Keys, Values: features of a and b, and of v and out. Chunk: steps of a chunk. MTiles: fragments of 16 value features
// per warp; MWarps: warps along the value features; KeyWarps: warps along the keys, whose partial outputs are added in
// shared memory. Stages: chunks in shared memory. CopyBytes: bytes of one cp.async; pointers and strides are multiples.
// KeySums: the loop also computes z_t = z_{t-1} + b_t. Normalised: out is divided by out_factor * a_t z_t + eps.
// Scaled: value_factor multiplies sums of b v^T and scores, in fp32; value_factor * v would be rounded to T. Decay:
// NoDecayRows, or HalvingRows of HalvingLoop. NormKey: NoNormKey, NoNormSplitState or NormKeyRows. ExactState: each
// chunk's sum of b v^T is added to the state in fp32, as a returned state needs: tensor cores truncate what they add
// to, and over thousands of steps that shows.
template <class T, class Product, int Keys, int Values, int Chunk, int MTiles, int MWarps,
          int KeyWarps, int Stages, int CopyBytes, bool KeySums = false, bool Normalised = false,
          bool Scaled = false, class Decay = NoDecayRows, class NormKey = NoNormKey,
          bool ExactState = false>
class ChunkLoop {
protected:  // chunk_halving.cuh has another order of the same phases
    static constexpr bool kDecaying = kDecays<Decay>;
    static constexpr bool kNormKey = kHasNormKey<NormKey>;
    using NormKeys = ChunkNormKey<NormKey, T, Product, Chunk, 16 * MTiles * MWarps,
                                  MWarps * KeyWarps * kWarpSize, Stages>;
    using Products = typename NormKeys::template Operands<LoopOperands<T, Product, kDecaying>>;
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
    static constexpr int kOwn = kStepTiles / KeyWarps;       // tiles of outputs that a warp writes
    static constexpr int kDeep = 4;  // at most so many steps of a sum have their fragments in registers
    static constexpr int kGroup = Steps::kPasses == 1 ? 4 : 1;  // sums with operands B in registers
    static constexpr bool kLate = KeyWarps > 1 || Normalised;   // outputs need the next barrier

    // Rows of a and b, as copied or multiplied by their decays, are kFactorStride apart.
    using Factors = ChunkDecay<Decay, T, Keys, kPadded, Chunk, kWarps, Stages, CopyBytes,
                               Updater::kPasses != 1>;
    static constexpr int kKeyStride = chunk_row_stride<T>(kPadded);

public:
    static constexpr int kBlockV = 16 * MTiles * MWarps;  // value features of a CTA

protected:
    static constexpr int kValueStride = chunk_row_stride<T>(kBlockV);
    static constexpr int kScoreStride = Chunk + Inside::kOffset;
    static constexpr int kPlane = Chunk * kScoreStride;
    static constexpr int kScores = Inside::kPlanes * kPlane;
    static constexpr int kAllScores = (kDecaying ? 1 : 2) * kScores;  // of one chunk, or two
    static constexpr int kKeyTile = Chunk * kKeyStride;
    static constexpr int kStage = 2 * kKeyTile + Chunk * kValueStride;
    static constexpr int kFactorStride = Factors::kStride, kUpdateStride = Factors::kUpdateStride;
    static constexpr int kRowSums = Normalised ? Chunk * kStepTiles : 0;
    static constexpr int kExchange = (KeyWarps - 1) * kBlockV * Chunk;  // floats

    static_assert(KeyWarps == 1 || KeyWarps == 2 || KeyWarps == 4, "1, 2 or 4 warps share keys");
    static_assert(Chunk % 16 == 0 && kStepTiles % KeyWarps == 0,
                  "a chunk is whole fragments, and every warp writes some of its steps");
    static_assert(Keys * sizeof(T) % CopyBytes == 0 && Values * sizeof(T) % CopyBytes == 0,
                  "a copy would reach into the next row");
    static_assert(!kDecaying || (!KeySums && !Normalised), "key sums do not decay");
    static_assert(!Scaled || !(kDecaying || KeySums || Normalised),
                  "values of other loops have no factor");
    static_assert(!kNormKey || !(kDecaying || KeySums || Normalised || Scaled),
                  "a norm key has sums and factors of its own");
    static_assert(Stages >= 3, "two chunks are in use while others are being copied");

    using Row = typename Factors::Row;
    using KeyCopier = ChunkCopier<T, Chunk, Keys, CopyBytes, kWarps * kWarpSize>;
    using State = float[MTiles][kTiles][4];
    using Outputs = float[MTiles][kStepTiles][4];

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kSmemBytes =
        max(Stages * kStage * static_cast<int>(sizeof(T)) +
                kAllScores * static_cast<int>(sizeof(Score)) + 8 * kExchange +
                (KeySums ? 8 * (kPadded + Chunk + kRowSums) : 0) + Factors::kSmemBytes +
                NormKeys::kSmemBytes,
            step_by_step_bytes(Keys, kBlockV) + NormKeys::kStepByStepBytes);

    KGEN_DEVICE ChunkLoop(const RecurrenceRows<T>& rows, const RecurrenceStates& states,
                          const Decay& decay = {}, const NormKey& norm_key = {})
        : rows_(rows),
          states_(states),
          decay_(decay),
          norm_key_rows_(norm_key),
          factors_(decay, rows.first),
          norm_key_(norm_key_rows_, rows.first),
          copy_a_(rows.a, rows.first, Keys),
          copy_b_(rows.b, rows.first, Keys),
          copy_v_(rows.v, rows.first, rows.values) {
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

    // Computes the outputs of the CTA's steps and the state after them.
    KGEN_DEVICE void run() {
        State state;
        load_state(state);
        if constexpr (kNormKey) norm_key_.begin(exchange_ + 2 * kExchange, true, rows_.values);
        fill_ring<true>();
        if constexpr (KeySums) {
            for (int key = thread_rank(); key < kPadded; key += kThreads)
                key_sums_[key] = key < Keys ? states_.initial_key_sum_at(key, Keys) : 0.0f;
        }
        cp_async_wait<Stages - 2>();
        if constexpr (kNormKey) finish_norm_key(0);
        sync_block();
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        float own[MTiles][kOwn][4] = {};
        run_chunks(state, own, nonfinite);
        cp_async_wait_all();
        if constexpr (kLate) {
            sync_block();
            if (chunks_ > 0) write_outputs(own, chunks_ - 1, nonfinite);
        }
        if (states_.final_state != nullptr) store_state(state, states_.final_factor, nonfinite);
        if constexpr (kNormKey) norm_key_.store_sums(chunks_, rows_.values, nonfinite);
        if constexpr (KeySums) {
            if (states_.final_key_sum != nullptr)
                for (int key = thread_rank(); key < Keys; key += kThreads)
                    states_.final_key_sum[key] = key_sums_[chunks_ % 2 * kPadded + key];
        }
        if (block_any_nonfinite(nonfinite))
            run_step_by_step<T, Keys, Values, kBlockV, kThreads, KeySums, Normalised, Scaled, true>(
                rows_, states_, decay_, norm_key_rows_);
    }

    // Computes only the sum of b v^T over the CTA's steps, and the key sum or the product of the decays.
    KGEN_DEVICE void sum_segment() {
        State state = {};
        if constexpr (kNormKey) norm_key_.begin(exchange_ + 2 * kExchange, false, rows_.values);
        fill_ring<false>();
        float key_sum[(Keys + kThreads - 1) / kThreads] = {};
        if constexpr (kDecaying)
            for (float& product : key_sum) product = 1.0f;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            cp_async_wait<Stages - 2>();
            if constexpr (kNormKey) finish_norm_key(chunk);
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
            Outputs unused;
            update<false>(unused, state, tile, nullptr, norm_key_weights(chunk));
            if constexpr (kNormKey)
                norm_key_.add_chunk(chunk, chunk % Stages, tile + 2 * kKeyTile, kValueStride);
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
        float nonfinite = 0.0f;
        store_state(state, 1.0f, nonfinite);
        if constexpr (kNormKey) norm_key_.store_sums(chunks_, rows_.values, nonfinite);
        if constexpr (KeySums || kDecaying) {
#pragma unroll
            for (int i = 0; i < (Keys + kThreads - 1) / kThreads; ++i) {
                const int key = thread_rank() + i * kThreads;
                if (key < Keys && states_.final_key_sum != nullptr)
                    states_.final_key_sum[key] = key_sum[i];
            }
        }
        if (block_any_nonfinite(nonfinite))
            run_step_by_step<T, Keys, Values, kBlockV, kThreads, KeySums, Normalised, Scaled, false>(
                rows_, states_, decay_, norm_key_rows_);
    }

protected:
    KGEN_DEVICE void run_chunks(State& state, float (&own)[MTiles][kOwn][4], float& nonfinite) {
        if (chunks_ > 0) scores(0);

#pragma unroll 1
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            cp_async_wait<Stages - 3>();
            if constexpr (kNormKey) finish_norm_key(chunk + 1);
            sync_block();
            // 1. Rows of chunk + 1 and scores of `chunk` are visible to all; the slot of chunk - 1 is free.
            stage<true>();
            if (kLate && chunk > 0) write_outputs(own, chunk - 1, nonfinite);
            if (chunk + 1 < chunks_) scores(chunk + 1);
            if constexpr (KeySums) update_key_sums(chunk);
            if constexpr (kNormKey)
                norm_key_.add_chunk(chunk, chunk % Stages,
                                    ring_ + chunk % Stages * kStage + 2 * kKeyTile, kValueStride);

            // 2. The products of `chunk`, for this warp's keys.
            Outputs sums = {};
            const T* tile = ring_ + chunk % Stages * kStage;
            carry(sums, state, tile);
            update<true>(sums, state, tile, scores_ + chunk % 2 * kScores, norm_key_weights(chunk));
            if constexpr (kNormKey)
                norm_key_.apply(sums, chunk, chunk % Stages, values0_, key_warp_ == 0);

            // 3. Keep the outputs of the steps that this warp writes; pass the other ones to their warps.
            exchange_outputs(own, sums, chunk % 2);
            if constexpr (!kLate) write_outputs(own, chunk, nonfinite);
        }
    }

    KGEN_DEVICE void factor(int chunk) {
        const int slot = chunk % Stages;
        const T* a = ring_ + slot * kStage;
        factors_.factor(slot, a, a + kKeyTile);
    }

    // Computes the norm key's numbers of a chunk, once this thread's copies of them have arrived.
    KGEN_DEVICE void finish_norm_key(int chunk) {
        if (chunk < chunks_) norm_key_.finish(chunk % Stages, chunk < whole_ ? Chunk : last_);
    }

    KGEN_DEVICE const float* norm_key_weights(int chunk) const {
        if constexpr (kNormKey) return norm_key_.weights(chunk % Stages);
        return nullptr;
    }

    KGEN_DEVICE void decay_state(State& state) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const float* all;
            if constexpr (kRowsInKeyOrder<Decay>) {  // one address, eight offsets
                all = factors_.all(state_key(lane, 0, 0)) + 8 * tile;
            } else {
                all = factors_.all(state_key(lane, tile, 0));
            }
            const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(all);
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) state[m][tile][i] *= two[i % 2];
        }
    }

    // Starts the copies of the next chunk, if there is one, and commits a cp.async group.
    template <bool WithA>
    KGEN_DEVICE void stage() {
        if (staged_ < chunks_) {
            T* tile = ring_ + stage_slot_ * kStage;
            if constexpr (kNormKey) norm_key_.start(stage_slot_, staged_ < whole_ ? Chunk : last_);
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

    // Starts the first chunks. Padding features are zeroed once; copies do not touch them.
    template <bool WithA>
    KGEN_DEVICE void fill_ring() {
        if (kPadded > Keys || rows_.values < kBlockV) {
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
#pragma unroll
        for (int chunk = 0; chunk < Stages - 1; ++chunk) stage<WithA>();
    }

    // P = A B^T of a chunk, tiles of 16 x 8 distributed over the warps. Tiles beyond the causal mask are not computed.
    KGEN_DEVICE void scores(int chunk) {
        constexpr int kRowTiles = Chunk / 16, kAll = kRowTiles * (kRowTiles + 1);
        constexpr int kSteps = kPadded / Scorer::kStep;
        const T* tile_a = ring_ + chunk % Stages * kStage;
        const T* tile_b = tile_a + kKeyTile;
        Score* out = scores_ + chunk % 2 * kScores;
        const MmaLane lane = mma_lane();
#pragma unroll 1
        for (int tile = thread_rank() / kWarpSize; tile < kAll; tile += kWarps) {
            int row = 0, before = 0;
#pragma unroll
            for (int i = 1; i < kRowTiles; ++i)
                if (tile >= i * (i + 1)) row = 16 * i, before = i * (i + 1);
            const int column = 8 * (tile - before);
            // Two independent chains of products, to hide their latency.
            float sums[1][2][4] = {};
#pragma unroll
            for (int step = 0; step < kSteps; step += kDeep) {
                typename Scorer::A rows[1][kDeep];
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
                    if (step + k < kSteps)
                        rows[0][k] = Scorer::a_rows(
                            tile_a + row * kFactorStride + (step + k) * Scorer::kStep,
                            kFactorStride);
                multiply_group<Scorer, 1, 2, kDeep>(
                    sums, 0, rows, [&](int n, int k, typename Scorer::B& to) {
                        if (step + k >= kSteps || k % 2 != n) return false;
                        to = Scorer::b_rows(
                            tile_b + column * kFactorStride + (step + k) * Scorer::kStep,
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
                if constexpr (Scaled) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) two[i] *= rows_.value_factor;
                }
                if constexpr (kNormKey) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (s + i <= t) two[i] = norm_key_.score(chunk % Stages, t, s + i, two[i]);
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

    // O += A S for all steps of the chunk and this warp's keys.
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

    // S += B^T V over the chunk, and O += P V; each fragment of V is loaded once for both. Warps of the same value
    // features divide the steps of P V among them.
    template <bool WithOutputs>
    KGEN_DEVICE void update(Outputs& sums, State& state, const T* tile, const Score* p,
                            const float* weights = nullptr) {
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
                    if (step + k < kSteps) {
                        const int first = (step + k) * Updater::kStep;
                        if constexpr (kNormKey) {
                            values[m][k] = Updater::a_columns(v + first * kValueStride + 16 * m,
                                                              kValueStride, weights + first);
                        } else {
                            values[m][k] = Updater::a_columns(v + first * kValueStride + 16 * m,
                                                              kValueStride);
                        }
                    }
#pragma unroll
            for (int n = 0; n < kTiles; n += kGroup)
                multiply_group<Updater, MTiles, kGroup, kDeep, Scaled || ExactState>(
                    state, n, values,
                    [&](int i, int k, typename Updater::B& to) {
                        if (step + k >= kSteps || n + i >= kTiles) return false;
                        to = Updater::b_columns(
                            b + (step + k) * Updater::kStep * kUpdateStride + 8 * (n + i),
                            kUpdateStride);
                        return true;
                    },
                    Scaled ? rows_.value_factor : 1.0f);
            if constexpr (WithOutputs) {
#pragma unroll
                for (int k = 0; k < kDeep; ++k)
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
                        if (step + k < kSteps && multiplies_step((step + k) * kHalves + half))
                            intra_chunk(sums, values, k, half,
                                        ((step + k) * kHalves + half) * Inside::kStep, p);
            }
        }
    }

    // O += P V only.
    KGEN_DEVICE void intra_chunk_only(Outputs& sums, const T* tile, const Score* p) {
        constexpr int kSteps = Chunk / Steps::kStep;
        constexpr int kHalves = Steps::kStep / Inside::kStep;
        const T* v = tile + 2 * kKeyTile + values0_;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            typename Steps::A values[MTiles][kDeep];
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
                values[m][0] = Steps::a_columns(v + step * Steps::kStep * kValueStride + 16 * m,
                                                kValueStride);
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                if (multiplies_step(step * kHalves + half))
                    intra_chunk(sums, values, 0, half, (step * kHalves + half) * Inside::kStep, p);
        }
    }

    // Whether this warp multiplies the scores of `step`. Earlier steps contribute to more outputs, so the order of the
    // warps alternates.
    KGEN_DEVICE bool multiplies_step(int step) const {
        const int turn = step % (2 * KeyWarps);
        return KeyWarps == 1 || key_warp_ == (turn < KeyWarps ? turn : 2 * KeyWarps - 1 - turn);
    }

    template <class Fragment>
    KGEN_DEVICE void intra_chunk(Outputs& sums, const Fragment (&values)[MTiles][kDeep], int k,
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

    // Where the warp with key rank `from` stores partial outputs for the warp with key rank `to`.
    KGEN_DEVICE Vec<float, 4>* slot(int parity, int to, int from, int m, int tile) const {
        const int warp = values0_ / (16 * MTiles);
        const int index = ((to * (KeyWarps - 1) + from) * MWarps + warp) * (MTiles * kOwn) +
                          m * kOwn + tile;
        return reinterpret_cast<Vec<float, 4>*>(exchange_ + parity * kExchange) +
               index * kWarpSize + lane_id();
    }

    // Keeps this warp's own partial outputs and stores those of the other warps for them.
    KGEN_DEVICE void exchange_outputs(float (&own)[MTiles][kOwn][4], const Outputs& sums, int parity) {
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

    // Adds the other warps' partial outputs, scales, writes. Called for one chunk after the other.
    KGEN_DEVICE void write_outputs(float (&own)[MTiles][kOwn][4], int chunk, float& nonfinite) {
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
                    nonfinite = fma(four[i], 0.0f, nonfinite);
                }
            }
        }
        writer_.write(own, chunk < whole_ ? Chunk : last_, rows_.values);
    }

    // The key sums z and the norms of a chunk; eight lanes per step.
    KGEN_DEVICE void update_key_sums(int chunk) {
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
                if (lane == 0) {  // a padding step must not divide by zero
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

    // The key of column 2 * lane.q + `odd` of a tile of the state.
    KGEN_DEVICE int state_key(const MmaLane& lane, int tile, int odd) const {
        return keys0_ + 8 * tile +
               (kRowsInKeyOrder<Decay> ? lane.q + 4 * odd : 2 * lane.q + odd);
    }

    // Calls body(m, tile, i, key, value) for the accumulators of this lane that are not padding.
    template <class Body>
    KGEN_DEVICE void for_state(Body body) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = state_key(lane, tile, i % 2);
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
        if (states_.initial_state == nullptr && states_.segments == 0) return;
        for_state([&](int m, int tile, int i, int key, int value) {
            state[m][tile][i] = states_.template initial_at<kDecaying>(key, value, Keys, Values);
        });
    }

    KGEN_DEVICE void store_state(const State& state, float factor, float& nonfinite) const {
        for_state([&](int m, int tile, int i, int key, int value) {
            nonfinite = fma(state[m][tile][i], 0.0f, nonfinite);
            states_.store_final(key, value, state[m][tile][i] * factor);
        });
    }

    // Whether any thread passes a value other than zero (NaN). Contains a block barrier.
    static KGEN_DEVICE bool block_any_nonfinite(float nonfinite) {
        __shared__ int flags[kWarps];
        const bool of_warp = any(!(nonfinite == 0.0f));
        if (lane_id() == 0) flags[thread_rank() / kWarpSize] = of_warp ? 1 : 0;
        sync_block();
        bool found = false;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) found = found || flags[i] != 0;
        return found;
    }

    const RecurrenceRows<T>& rows_;
    const RecurrenceStates& states_;
    const Decay decay_;
    const NormKey norm_key_rows_;
    Factors factors_;
    NormKeys norm_key_;
    KeyCopier copy_a_, copy_b_;
    ChunkCopier<T, Chunk, kBlockV, CopyBytes, kWarps * kWarpSize> copy_v_;
    T* ring_;
    ChunkWriter<T, Chunk, MTiles, kOwn, kBlockV, Values % 2 == 0> writer_;
    Score* scores_;
    float* exchange_;
    float* key_sums_;
    float* norms_;
    float* row_sums_;
    int chunks_, whole_, last_;  // all chunks; those with all their steps; steps of a partial last chunk, or 0
    int staged_, stage_slot_;
    int key_warp_, values0_, keys0_;
};

}  // namespace kgen
