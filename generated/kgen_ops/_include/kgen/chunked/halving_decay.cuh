// Decays and a bonus within a chunk, with no exponent above 0 and no branch on their values.
//
//     out_t = factor * a_t (S_{t-1} + diag(u) b_t v_t^T)     S_t = diag(d_t) S_{t-1} + b_t v_t^T
//
// The products are those of chunk_decay.cuh, except for the scores P_ts = sum_k a_t b_s (d of the steps between s and
// t). The scores of a chunk are computed by halving: steps of the late half with steps of the early half, then the same
// within each half, down to adjacent steps. At the level of halves of L steps
//
//     P_ts = sum_k x_t x_s     x_t = a_t * (d from the middle to t)     of a step of a late half
//                              x_s = b_s * (d from s to the middle)     of a step of an early half
//
// so each factor is an input row times a running product of decays, which is at most 1. Every pair s < t belongs to one
// level, that of the highest bit in which s and t differ. Every step is in one half at each level, so a level is one
// array of Chunk rows. Level 1 has no decays: its products are of a and b as copied.
//
// Within 16 steps a level has 8 late and 8 early steps: one product of 16 x 8 with half of its rows unused. Of its 64
// scores only those of steps in the same block count. A chunk of 32 steps has one more level, of two whole products.
//
// Precision: rows are fp32. For bf16 inputs they are rounded to TF32 when they are stored. For fp32, and for fp16,
// whose error bound is below what four roundings to TF32 lose, products with the state and scores are 3xTF32. b' of the
// state is rounded to TF32, or has two terms if the state is returned.
//
// Layout: within 16 steps, the rows of a level of at most 8 steps are stored with early steps first, then late steps,
// so that both operands of a product are eight consecutive rows. Of eight keys the even ones come first (row_column).
// b' of the state is stored by keys: row `key % 8` has eight steps of every eighth key, row `8 + key % 8` the other
// eight (update_step).
//
// With pairs the lanes, and the order of rows and keys, are those of halving_pairs.cuh.
//
// Shared memory: W ring[Stages][Chunk][kWStride], if w has a row per step; float u[Padded]; float w[Padded], if it has
// one row; then Buffers times: float carried[Chunk][kStride], levels[kLevels][Chunk][kStride], update[Chunk][kStride],
// all[Padded], bonus[groups][Chunk].
//
// Synchronisation: none here; see chunk_halving.cuh.
#pragma once

#include "kgen/chunked/halving_operands.cuh"
#include "kgen/chunked/halving_pairs.cuh"

namespace kgen {

// Selects ChunkDecay by halving, with 1 or 2 buffers for rows with decays. PerStep: w has a row per step, else one row.
// Pairs: a lane decays two keys of 4 steps (halving_pairs.cuh), else one key of 16 steps.
template <class W, class U, DecayForm Form, int Buffers, bool PerStep, bool Pairs = false>
struct HalvingRows : DecayRows<W, U, Form> {
    static constexpr int kBuffers = Buffers;
    static constexpr bool kPairs = Pairs;
};

template <class W, class U, DecayForm Form, int Buffers, bool PerStep>
constexpr bool kRowsInKeyOrder<HalvingRows<W, U, Form, Buffers, PerStep, true>> = true;

template <class W, class U, DecayForm Form, int Buffers, bool PerStep, bool Pairs, class T, int Keys,
          int Padded, int Chunk, int Warps, int Stages, int CopyBytes, bool Precise>
class ChunkDecay<HalvingRows<W, U, Form, Buffers, PerStep, Pairs>, T, Keys, Padded, Chunk, Warps,
                 Stages, CopyBytes, Precise> {
    using Given = HalvingRows<W, U, Form, Buffers, PerStep, Pairs>;
    static constexpr int kSub = 16;  // steps of a unit
    static constexpr int kSubs = Chunk / kSub;
    static constexpr int kGroupKeys = Pairs ? 16 : kWarpSize;  // keys that a warp decays at a time
    static constexpr int kGroups = (Padded + kGroupKeys - 1) / kGroupKeys;
    static constexpr int kThreads = Warps * kWarpSize;
    static constexpr int kRowStride = chunk_row_stride<T>(Padded);  // of the ring's rows a and b
    // Stride of the ring's rows w; with pairs, four rows are 16 banks more than a multiple of all 32 banks.
    static constexpr int kWStride = Pairs ? Padded + 16 / static_cast<int>(sizeof(W)) : Padded;
    static constexpr int kStage = PerStep ? Chunk * kWStride : 0;  // w of a chunk
    static constexpr int kCopy = max(CopyBytes, static_cast<int>(sizeof(W)));
    static constexpr bool kRounded = detail::kIsBf16<T>;  // rows are stored as TF32
    static constexpr float kRound = kRounded ? kNearTf32 : 1.0f;
    static constexpr float kRoundUpdate = Precise ? 1.0f : kNearTf32;

    static_assert(Chunk == 16 || (Chunk == 32 && !Pairs), "lanes have the decays of 16 steps");
    static_assert(Keys * sizeof(W) % kCopy == 0, "a copy would reach into the next row");
    static_assert(Padded % 16 == 0, "ldmatrix reads 16 keys");

public:
    using Row = float;
    static constexpr int kStride = Padded + 4;  // eight rows of 16 bytes lie in 32 different banks
    using Lanes = KeyPairs<T, Form, PerStep, kRounded, Precise, kRowStride, kWStride, kStride>;
    static constexpr int kLaneGroups = (kGroups + Warps - 1) / Warps;  // of keys, per warp
    static constexpr int kUpdateStride = kStride;

private:
    static constexpr int kTile = Chunk * kStride;
    static constexpr int kLevels = kSubs > 1 ? 4 : 3;  // of 16 (only in chunks of 32), 8, 4 and 2 steps
    static constexpr int kNarrow = kLevels - 3;        // index of the level of 8 steps
    static constexpr int kBuffer = (2 + kLevels) * kTile + Padded + kGroups * Chunk;

public:
    static constexpr int kSmemBytes =
        Stages * kStage * static_cast<int>(sizeof(W)) +
        4 * ((PerStep ? 1 : 2) * Padded + Buffers * kBuffer);

    KGEN_DEVICE ChunkDecay(const Given& rows, i64 first)
        : row_u_(rows.u), row_w_(rows.w.rows), copy_(rows.w, first, Keys) {}

    // Uses `smem`, kSmemBytes that begin at a multiple of 16 bytes. Padding is written here once, and stays. The
    // caller's next barrier comes before copies into this memory and before `factor`.
    KGEN_DEVICE void begin(void* smem) {
        ring_ = static_cast<W*>(smem);
        u_ = reinterpret_cast<float*>(ring_ + Stages * kStage);
        buffers_ = u_ + (PerStep ? 1 : 2) * Padded;
        partial_slot_ = -1;
        select(0);
        for (int key = thread_rank(); key < Padded; key += kThreads)
            u_[key] = key < Keys && row_u_ != nullptr ? to_float(row_u_[key]) : 0.0f;
        if constexpr (!PerStep)
            for (int key = thread_rank(); key < Padded; key += kThreads)
                u_[Padded + key] = key < Keys ? to_float(row_w_[key]) : w_of_no_decay<Form>();
        if constexpr (PerStep && Padded > Keys)
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<W>(w_of_no_decay<Form>());
    }

    // Starts the copies of the next chunk's w, like ChunkCopier::start; steps after the last one get a decay of 1.
    template <bool Whole>
    KGEN_DEVICE void start(int slot, int left) {
        if constexpr (!Whole) partial_slot_ = slot, partial_left_ = left;
        if constexpr (!PerStep) return;
        constexpr bool kZerosKeep = Form == DecayForm::log;
        W* stage = ring_ + slot * kStage;
        copy_.template start<Whole, kZerosKeep>(stage, kWStride, left);
        if constexpr (!Whole && !kZerosKeep)
            for (int i = left * kWStride + thread_rank(); i < kStage; i += kThreads)
                stage[i] = from_float<W>(w_of_no_decay<Form>());
    }

    // Selects the buffer that the members below read.
    KGEN_DEVICE void select(int buffer) { selected_ = buffers_ + buffer * kBuffer; }

    KGEN_DEVICE const float* carried() const { return selected_; }
    KGEN_DEVICE const float* update() const { return selected_ + (1 + kLevels) * kTile; }

    // The chunk's product of all decays, for a key and the next one.
    KGEN_DEVICE const float* all(int key) const {
        return update() + kTile + (Pairs ? Lanes::all_place(key) : key);
    }

    // Computes the rows with decays and the bonus of the chunk in `slot`, from its rows a and b, into `buffer`. Called
    // by the whole block: a unit of work is 16 steps of one tensor and 32 keys.
    KGEN_DEVICE void factor(int slot, const T* a, const T* b, int buffer = 0) {
        const W* w = ring_ + slot * kStage;
        const int left = slot == partial_slot_ ? partial_left_ : Chunk;
        float* to = buffers_ + buffer * kBuffer;
        if constexpr (Pairs) {
            Lanes rows[kLaneGroups];
            load_pairs(rows, slot, a, b);
            store_pairs(rows, slot, buffer);
        } else {
#pragma unroll 1
            for (int unit = thread_rank() / kWarpSize; unit < 2 * kSubs * kGroups; unit += Warps) {
                const int group = unit / 2 % kGroups, sub = unit / 2 / kGroups;
                if (unit % 2 == 0) {
                    factor_rows<true>(group, sub, left, w, a, b, to);
                } else {
                    factor_rows<false>(group, sub, left, w, b, a, to);
                }
            }
        }
    }

    // With pairs, factor() in two parts: load_pairs loads the rows as copied, store_pairs does all the rest.
    KGEN_DEVICE void load_pairs(Lanes (&rows)[kLaneGroups], int slot, const T* a, const T* b) const {
        for_groups([&](int i, int group) {
            const int key = group * kGroupKeys;
            if constexpr (PerStep) {
                rows[i].load(ring_ + slot * kStage + key, a + key, b + key);
            } else {
                rows[i].load(u_ + Padded + key, a + key, b + key);
            }
        });
    }

    KGEN_DEVICE void store_pairs(const Lanes (&rows)[kLaneGroups], int slot, int buffer) {
        const int left = slot == partial_slot_ ? partial_left_ : Chunk;
        float* carried = buffers_ + buffer * kBuffer;
        float* update = carried + (1 + kLevels) * kTile;
        for_groups([&](int i, int group) {
            const int key = group * kGroupKeys;
            rows[i].store(u_ + key, left, carried + key, carried + kTile + key, kTile, update + key,
                          update + kTile + key, update + kTile + Padded + group * Chunk);
        });
    }

    // Computes the scores of the selected chunk, with zeros beyond the diagonal. a, b: the chunk's rows as copied.
    template <class Scorer, class Inside>
    KGEN_DEVICE void scores(const T* a, const T* b, typename Inside::Score* out, int out_stride,
                            int plane) const {
        if constexpr (Pairs) {
#pragma unroll
            for (int i = 0; i < (4 + Warps - 1) / Warps; ++i) {
                const int task = thread_rank() / kWarpSize + i * Warps;
                if (task < 3) {
                    paired_scores<Scorer, Inside>(task, out, out_stride, plane);
                } else if (task == 3) {
                    neighbour_scores<Scorer, Inside>(a, b, 0, out, out_stride, plane);
                }
            }
            return;
        }
        constexpr int kWide = kSubs > 1 ? 2 : 0;  // tiles of 16 x 8 of the level of 16 steps
        constexpr int kTasks = kWide + 4 * kSubs;
#pragma unroll 1
        for (int task = thread_rank() / kWarpSize; task < kTasks; task += Warps) {
            if (kWide > 0 && task < kWide) {
                wide_scores<Scorer, Inside>(8 * task, out, out_stride, plane);
                continue;
            }
            // Levels of 8, 4, 2 and 1 steps, the last one at the end: it takes the least time.
            const int level = (task - kWide) / kSubs, sub = (task - kWide) % kSubs;
            typename Inside::Score* corner = out + kSub * sub * (out_stride + 1);
            if (level < 3) {
                narrow_scores<Scorer, Inside>(level, sub, corner, out_stride, plane);
            } else {
                neighbour_scores<Scorer, Inside>(a, b, sub, corner, out_stride, plane);
            }
        }
    }

private:
    // Calls body(i, group) for each group of keys of this warp.
    template <class Body>
    static KGEN_DEVICE void for_groups(Body body) {
#pragma unroll
        for (int i = 0; i < kLaneGroups; ++i) {
            const int group = thread_rank() / kWarpSize + i * Warps;
            if (kGroups % Warps == 0 || group < kGroups) body(i, group);
        }
    }

    // One key per lane, 16 steps. Reads: x is a, whose decays run from the first step on; otherwise x is b, and
    // everything here runs from the last step to the first.
    template <bool Reads>
    KGEN_DEVICE void factor_rows(int group, int sub, int left, const W* w, const T* x_rows,
                                 const T* y_rows, float* to) const {
        const int key = group * kWarpSize + lane_id();
        const bool there = Padded % kWarpSize == 0 || key < Padded;
        const int column = there ? key : Padded - 1;
        const int base = kSub * sub;
        const auto step_of = [](int i) { return Reads ? i : kSub - 1 - i; };
        w += base * Padded + column;
        x_rows += base * kRowStride + column;
        y_rows += base * kRowStride + column;

        // 1. All rows that are read. A load after a store to shared memory would wait for the store, and the warp with
        // it.
        float x[kSub], decays[kSub], bonus[kSub];
        const float u = Reads && there ? u_[column] : 0.0f;
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
            if constexpr (PerStep) decays[i] = to_float(w[step_of(i) * Padded]);
            x[i] = to_float(x_rows[step_of(i) * kRowStride]);
            if constexpr (Reads) bonus[i] = x[i] * u * to_float(y_rows[step_of(i) * kRowStride]);
        }
        const bool inner = kSubs > 1 && sub == (Reads ? 1 : 0);  // 16 steps lie between these and the state

        // 2. Decays, the product of those between these steps and the state, and that of all steps of the chunk.
        DecayProduct<Form, Precise, sizeof(T) == 4> own, other;
        const int other_base = inner ? (Reads ? 0 : kSub) : Chunk;  // of the steps in between; Chunk: none
        if constexpr (PerStep) {
            if (inner) {
                const W* others = w + (other_base - base) * Padded;
#pragma unroll
                for (int i = 0; i < kSub; ++i) other.times(to_float(others[i * Padded]));
            }
#pragma unroll
            for (int i = 0; i < kSub; ++i) {
                if constexpr (!Reads) own.times(decays[i]);
                decays[i] = decay_of<Form, Precise>(decays[i]);
            }
        } else {
            const float of_step = u_[Padded + column], decay = decay_of<Form, Precise>(of_step);
#pragma unroll
            for (int i = 0; i < kSub; ++i) decays[i] = decay;
            if (left == Chunk) {
#pragma unroll
                for (int i = 0; i < kSub; ++i) own.times(of_step);
                if (inner) other = own;
            } else {  // steps that do not exist keep the state
#pragma unroll
                for (int i = 0; i < kSub; ++i) {
                    if (base + step_of(i) >= left) decays[i] = 1.0f;
                    if (base + i < left) own.times(of_step);
                    if (inner && other_base + i < left) other.times(of_step);
                }
            }
        }

        float* all = to + (2 + kLevels) * kTile;
        if constexpr (Reads) {
            const float sum = fold_lanes<kSub>(bonus);
            if (lane_id() % 2 == 0) all[Padded + group * Chunk + base + lane_id() / 2] = sum;
        } else {
            own.times(other);
            if (sub == 0 && there) all[key] = own.value();
        }

        // 3. Rows with decays: of the state, and of all levels in which these steps are in the half that x belongs to.
        constexpr float kFarRound = Reads ? kRound : kRoundUpdate;
        float* carried = to + base * kStride + row_column(column);
        float* levels = carried + kTile;
        const float beyond = kSubs > 1 && inner ? other.value() : 1.0f;
        float product = 1.0f, near[3] = {1.0f, 1.0f, 1.0f}, far[kSub];
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
            const int t = step_of(i);
            const float decay = decays[i], rounded = x[i] * kRound;
            const float decayed = rounded * product;
            far[i] = (kFarRound == kRound ? decayed : x[i] * kFarRound * product) *
                     (kSubs > 1 ? beyond : 1.0f);
            if (kSubs > 1 && inner && there) levels[t * kStride] = decayed;
            if (Reads && there) carried[t * kStride] = far[i];
            product *= decay;
#pragma unroll
            for (int level = 0; level < 3; ++level) {
                const int half = 8 >> level;
                if ((i & half) == 0) continue;
                const bool first = i % half == 0;
                if (there)
                    levels[(kNarrow + level) * kTile + place<Reads>(t, half) * kStride] =
                        first ? rounded : rounded * near[level];
                near[level] = first ? decay : near[level] * decay;
            }
        }
        if constexpr (!Reads) {
            float* update =
                to + (1 + kLevels) * kTile + (base + column % 8) * kStride + column / 8 * 8;
#pragma unroll
            for (int i = 0; i < kSub; i += 4) {
                Vec<float, 4> four;
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = far[kSub - 1 - update_step(i + j)];
                float* place_of_four = update + i / 8 * 8 * kStride + i % 8;
                if (there) *reinterpret_cast<Vec<float, 4>*>(place_of_four) = four;
            }
        }
    }

    // The column of a key in `carried` and the levels: WordOperands reads it as k = q or q + 4 of accumulators.
    static KGEN_DEVICE int row_column(int key) {
        return (key & ~7) | (key & 7) >> 1 | (key & 1) << 2;
    }

    // The step of 16 that comes at place `index` of a key in `update`: KeyMajorOperands has even steps first.
    static KGEN_DEVICE constexpr int update_step(int index) {
        return sizeof(T) == 2 ? index % 8 * 2 + index / 8 : index;
    }

    // Where step t of 16 is stored at the level of `half` steps.
    template <bool Late>
    static KGEN_DEVICE constexpr int place(int t, int half) {
        return (Late ? 8 : 0) + t / (2 * half) * half + t % half;
    }

    // The step of 16 that is number `index` of the early ones at the level of `half` steps.
    static KGEN_DEVICE int early_step(int index, int half) {
        return (index & -half) + index;
    }

    KGEN_DEVICE const float* level_rows(int level, int step) const {
        return selected_ + (1 + level) * kTile + step * kStride;
    }

    // sum_k a u b of a step: the score of the step itself.
    KGEN_DEVICE float bonus(int step) const {
        const float* sums = all(Padded);
        float sum = sums[step];
#pragma unroll
        for (int group = 1; group < kGroups; ++group) sum += sums[group * Chunk + step];
        return sum;
    }

    // Sums over all keys of the products of A and B, which load(step, a, b) reads; two chains of products hide their
    // latency.
    template <class Operands, class Load>
    static KGEN_DEVICE void multiply_rows(float (&sum)[4], Load load) {
        constexpr int kSteps = Padded / Operands::kStep, kDeep = 2;
        float sums[1][2][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; step += kDeep) {
            typename Operands::A a[1][kDeep];
            typename Operands::B b[kDeep];
#pragma unroll
            for (int k = 0; k < kDeep; ++k)
                if (step + k < kSteps) load((step + k) * Operands::kStep, a[0][k], b[k]);
            multiply_group<Operands, 1, 2, kDeep>(
                sums, 0, a, [&](int n, int k, typename Operands::B& to) {
                    if (step + k >= kSteps || k != n) return false;
                    to = b[k];
                    return true;
                });
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = sums[0][0][i] + sums[0][1][i];
    }

    // Scores of the late 16 steps with eight of the early steps.
    template <class Scorer, class Inside>
    KGEN_DEVICE void wide_scores(int column, typename Inside::Score* out, int out_stride,
                                 int plane) const {
        const float *late = level_rows(0, kSub), *early = level_rows(0, column);
        float sum[4];
        multiply_rows<Scorer>(
            sum, [&](int key, typename Scorer::A& a, typename Scorer::B& b) {
                a = Scorer::a_rows(late + key, kStride);
                b = Scorer::b_rows(early + key, kStride);
            });
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float two[2] = {sum[2 * half], sum[2 * half + 1]};
            Inside::store(out + (kSub + lane.g + 8 * half) * out_stride + column + 2 * lane.q, plane,
                          two);
        }
    }

    // Scores of the level of 8 >> level steps within 16 steps; these scores begin at `corner`.
    template <class Scorer, class Inside>
    KGEN_DEVICE void narrow_scores(int level, int sub, typename Inside::Score* corner,
                                   int out_stride, int plane) const {
        const float* early = level_rows(kNarrow + level, kSub * sub);
        float sum[4];
        multiply_rows<Scorer>(
            sum, [&](int key, typename Scorer::A& a, typename Scorer::B& b) {
                a = Scorer::a_rows_twice(early + 8 * kStride + key, kStride);
                b = Scorer::b_rows(early + key, kStride);
            });
        const MmaLane lane = mma_lane();
        const int half = 8 >> level;
        if ((lane.g ^ 2 * lane.q) >= half) return;  // steps of different blocks
        const int t = early_step(lane.g, half), s = early_step(2 * lane.q, half);
        const float two[2] = {sum[0], sum[1]}, none[2] = {};
        Inside::store(corner + (t + half) * out_stride + s, plane, two);
        Inside::store(corner + t * out_stride + s + half, plane, none);
    }

    // With pairs: scores of the level of 8 >> level steps. Scores of a step with later steps keep the zeros that the
    // loop wrote once.
    //
    // Operand A holds eight late rows in both halves of its rows, with different keys: k 0 to 3 and 8 to 11 of 16 keys
    // in rows 0 to 7, the other keys in rows 8 to 15. So one ldmatrix reads 16 keys of A, and each of two products has
    // half of its sum in one half of its rows.
    template <class Scorer, class Inside>
    KGEN_DEVICE void paired_scores(int level, typename Inside::Score* out, int out_stride,
                                   int plane) const {
        using Words = WordOperands<Scorer::kPasses == 3, 1>;
        const int row = lane_id() % 8, matrix = lane_id() / 8;
        const float* tile = level_rows(level, 0);
        const float* late = tile + PairedRows::late(level, row) * kStride + 4 * matrix;
        const float* early = tile + PairedRows::early(level, row) * kStride +
                             4 * (matrix % 2 * 2 + matrix / 2);
        float sums[1][2][4] = {};
#pragma unroll
        for (int key = 0; key < Padded; key += 16) {
            typename Words::A a[1][1];
            typename Words::B b[2];
            u32 words[4];
            ldmatrix<4>(words, late + key);
#pragma unroll
            for (int i = 0; i < 4; ++i) Words::put(a[0][0], 0, i, words[i]);
            ldmatrix<4>(words, early + key);
#pragma unroll
            for (int i = 0; i < 4; ++i) Words::put(b[i / 2], 0, i % 2, words[i]);
            multiply_group<Words, 1, 2, 1>(sums, 0, a, [&](int n, int, typename Words::B& to) {
                to = b[n];
                return true;
            });
        }
        const MmaLane lane = mma_lane();
        const int half = 8 >> level;
        if ((lane.g ^ 2 * lane.q) >= half) return;  // steps of different blocks
        const int t = PairedRows::early_step(level, lane.g) + half;
        const int s = PairedRows::early_step(level, 2 * lane.q);
        const float two[2] = {sums[0][0][0] + sums[0][1][2], sums[0][0][1] + sums[0][1][3]};
        Inside::store(out + t * out_stride + s, plane, two);
    }

    // The scores of adjacent steps, which have no decay between them, and of steps with themselves.
    template <class Scorer, class Inside>
    KGEN_DEVICE void neighbour_scores(const T* a_rows, const T* b_rows, int sub,
                                      typename Inside::Score* corner, int out_stride,
                                      int plane) const {
        const T *early = b_rows + kSub * sub * kRowStride,
                *late = a_rows + (kSub * sub + 1) * kRowStride;
        float sum[4];
        using Raw = typename CopiedRows<T, Scorer>::Type;
        multiply_rows<Raw>(sum, [&](int key, typename Raw::A& a, typename Raw::B& b) {
            a = Raw::a_rows_twice(late + key, 2 * kRowStride);
            b = Raw::b_rows(early + key, 2 * kRowStride);
        });
        const MmaLane lane = mma_lane();
        if (lane.g / 2 != lane.q) return;
        const int s = 2 * lane.g;
        const float first[2] = {bonus(kSub * sub + s), 0.0f};
        const float second[2] = {lane.g % 2 == 0 ? sum[0] : sum[1], bonus(kSub * sub + s + 1)};
        Inside::store(corner + s * out_stride + s, plane, first);
        Inside::store(corner + (s + 1) * out_stride + s, plane, second);
    }

    const U* row_u_;
    const W* row_w_;
    ChunkCopier<W, Chunk, Keys, kCopy, kThreads> copy_;
    W* ring_;
    float *u_, *buffers_, *selected_;  // after u_ is w, if it has one row
    int partial_slot_, partial_left_;  // the slot of a chunk with fewer steps, and how many it has
};

}  // namespace kgen
