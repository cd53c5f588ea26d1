// digest: 5cb2ca1cc699
// Rendered by kgen from templates/wkv4/backward_anchored.cu.jinja
// config: anchored(lanes=32, vec=2, segments=8, steps=8, prefetch=false, min_blocks=2, splits=22)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, decay_form=log
// wkv4 backward by segments of time whose weights are relative to one anchor; see anchored_gradients.cuh. k and v are
// read twice, gy once, and one state per channel is stored for each round of kSegments * kSteps steps.
//
//   wkv4_round_states     the state before each round, the first round first
//   wkv4_part_gradients   the gradient by the state before each part of T but the first, of the part's outputs only
//   wkv4_backward         gk, gv, and parts of gw and gu for each batch row and part
//   wkv4_backward_reduce  gw and gu
//
// Where there are few channels, T is cut into kSplits parts, each of which has its own blocks. States of rounds are
// then sums from the beginning of their part. A block adds up the sums of the parts before its own, and the gradients
// of the parts after it. wkv4_part_gradients is used only in this case; it reads k, v and gy once more.
//
// A block has kColumns channels of a batch row. A block of wkv4_backward takes the last round first. In a round:
//
//   1. a thread sums its segment from 0, and puts the sum in its slot: barrier A;
//   2. one thread for each channel goes through the segments' sums and replaces each by the state before it: barrier B;
//   3. a thread computes the outputs of its segment, and the sum of the gradients by the state before it: barrier C;
//   4. one thread for each channel goes through these sums, the last segment first, and replaces each by the gradient
//      after that segment: barrier D;
//   5. a thread computes gk and gv, last step first, and adds up gw and gu.
//
// wkv4_round_states does only steps 1 and 2, the first round first, with one barrier per round; wkv4_part_gradients
// does steps 1 to 4.
//
// Shared memory (dynamic) of wkv4_backward:
//
//     Value [kStages][3][kRound][kColumns]    tiles of k, v and gy; rounds use the stages in turn
//     float [kSteps][kThreads][2 * kVec]      the states before steps
//     float [kSegments + 1][kColumns][4]      slots of states; the last slot is for the exponent after the round
//     float [kSegments][kColumns][4]          slots of gradients
//     float [3][kColumns][4]                  the gradient after the round with the exponent of the state there; the
//                                             decay of a segment; the state before the part
//
// Shared memory (dynamic) of wkv4_round_states: kStateStages tiles of k and v, then two sets of slots of sums, between
// which rounds alternate.
//
// Synchronisation of tiles: after A, copies begin into the tile of the round visited before; A follows the last use of
// that tile. Copies have arrived for their own thread before E, and for all threads after E, of the round visited
// before the round that they are for; E is a barrier at the end of a round. In wkv4_round_states, which only has A, A
// takes the place of E.
//
// Synchronisation of slots: a thread uses only its own slots, except that between B and C it reads the exponent of the
// next segment's state. The channels' threads use all slots of states between A and B, and all slots of gradients
// between C and D. In wkv4_round_states a thread that writes a slot in round r + 2 has passed A of round r + 1, which
// the channel's thread reaches after its reads of round r.
//
// With kOverlap there are three barriers per round. Step 5 of the round visited before runs between D and B, at the
// same time as step 2; step 1 of the round visited next runs between C and D, at the same time as step 4. Copies into
// the tile of the round visited before begin after B; they have arrived before C of the next round.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv4/anchored_gradients.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;
using kgen::wkv4::WholeDecay;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kLanes = 32;        // threads side by side along the channels
constexpr int kVec = 2;            // adjacent channels of a thread
constexpr int kSegments = 8;  // segments of a round, a row of threads each
constexpr int kSteps = 8;        // of a segment
constexpr bool kOverlap = false;  // the channels' threads scan while other threads compute another round
constexpr int kStages = kOverlap ? 3 : 2;     // tiles of k, v and gy
constexpr int kStateStages = kStages + 1;     // of wkv4_round_states, which has one barrier a round
constexpr int kSplits = 22;      // parts of T, at most
constexpr int kMinBlocks = 2;
constexpr int kThreads = kLanes * kSegments;
constexpr int kColumns = kLanes * kVec;
constexpr int kRound = kSegments * kSteps;
constexpr int kReduceThreads = 128;

using Sum = kgen::wkv4::WholeSum<false>;
using Gradient = kgen::wkv4::StateGradient;
using Slots = kgen::wkv4::QuadSlots<kColumns>;
using Rows = kgen::wkv4::ByteRows<Value>;
using Tile = kgen::wkv4::StepTile<Value, kVec, kColumns>;
template <bool Keep>
using Kept = kgen::wkv4::KeptStates<kVec, kThreads, Keep>;
using Segment = kgen::wkv4::AnchoredSegment<Value, kVec, kSteps, Tile>;
using Separate = kgen::wkv4::SeparateSteps<kSteps>;

// Copies to shared memory, 16 bytes each: a thread copies kCopies rows' pieces of a tensor, at the same channels.
constexpr int kPiece = 16 / static_cast<int>(sizeof(Value));
constexpr int kRowPieces = kColumns / kPiece;
constexpr int kCopyRows = kThreads / kRowPieces;
constexpr int kCopies = kRound / kCopyRows;
constexpr int kTile = kRound * kColumns;  // elements of one tensor

static_assert(kThreads <= 1024 && kThreads % kgen::kWarpSize == 0, "whole warps, one block");
static_assert(kVec <= kSegments, "a thread for each channel");
static_assert(kColumns % kPiece == 0 && kThreads % kRowPieces == 0 && kRound % kCopyRows == 0,
              "all threads copy as much");
static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "no states from or to memory");

// The place of a thread's channels, or of a column of shared memory: channel column / kLanes of lane column % kLanes.
// Also the rounds of the block's part of T.
struct Place {
    i64 c, b, split;
    i64 first = 0, end;  // rounds

    // `skipped`: parts of a batch row that have no block.
    KGEN_DEVICE Place(i64 C, i64 rounds, i64 split_steps, i64 split_count, int skipped) {
        const kgen::u32 tiles =
            static_cast<kgen::u32>(kgen::ceil_div(C, static_cast<i64>(kColumns)));
        const kgen::u32 row = blockIdx.x / tiles;
        c = static_cast<i64>(blockIdx.x % tiles) * kColumns;
        b = row, split = 0, end = rounds;
        if constexpr (kSplits > 1) {
            const kgen::u32 blocks = static_cast<kgen::u32>(split_count) - skipped;
            b = row / blocks;
            split = row % blocks + skipped;
            first = split * (split_steps / kRound);
            end = kgen::min(rounds, first + split_steps / kRound);
        }
    }
    KGEN_DEVICE i64 of_lane(int lane) const { return c + lane * kVec; }
    KGEN_DEVICE i64 of_column(int column) const {
        return c + column % kLanes * kVec + column / kLanes;
    }
};

// The place of a thread's copies in a tile.
struct CopyPlace {
    int row, column;
    i64 c;
    bool inside;

    KGEN_DEVICE CopyPlace(const Place& place, i64 C)
        : row(static_cast<int>(threadIdx.x) / kRowPieces),
          column(static_cast<int>(threadIdx.x) % kRowPieces * kPiece),
          c(place.c + column),
          inside(c < C) {
        if (!inside) c = 0;  // a thread outside has addresses that exist
    }
};

// A thread's copies of a tensor, from its row of one round on.
struct Copies {
    kgen::wkv4::ByteRows<const Value> rows;

    KGEN_DEVICE Copies(const Value* tensor, i64 b, i64 stride_b, i64 stride_t,
                       const CopyPlace& place, i64 round)
        : rows(tensor + b * stride_b + place.c, round * kRound + place.row, stride_t) {}
    // Starts the copies of a round's first `count` steps; the others are 0.
    KGEN_DEVICE void start(Value* tile, const CopyPlace& place, int count) const {
#pragma unroll
        for (int n = 0; n < kCopies; ++n) {
            const int row = n * kCopyRows;
            kgen::cp_async_or_zero<16>(tile + (place.row + row) * kColumns + place.column,
                                       rows.at(row), place.inside && place.row + row < count);
        }
    }
};

KGEN_DEVICE int steps_of_round(i64 round, i64 T) {
    return kgen::wkv4::steps_before<kRound>(round * kRound, T);
}

KGEN_DEVICE float decay_of(const W* w, i64 c) {
    return kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c]));
}

struct Arguments {
    const Value *gy, *k, *v;
    const W* w;
    const U* u;
    float *round_states, *part_states, *part_gradients;
    Value *gk, *gv;
    float *gw_parts, *gu_parts;
    i64 T, C, gy_stride_B, gy_stride_T, k_stride_B, k_stride_T, v_stride_B, v_stride_T, gk_stride_B, gk_stride_T,
        gv_stride_B, gv_stride_T, rounds, split_steps, split_count;
};

// Computes what a channel's thread carries into the part: the state before the part, and with `Stores` the gradient
// after the part.
template <bool Stores>
KGEN_DEVICE void carry_parts(const Arguments& x, const Place& place, const Slots& carried,
                             float log_decay, int own, i64 own_c) {
    Gradient after;
    float exponent = 0.0f;  // of the state where `after` is
    if constexpr (kSplits > 1) {
        const WholeDecay decay = WholeDecay::of(log_decay, x.split_steps);
        const kgen::wkv4::WholeRows<> states{x.part_states, x.C}, gradients{x.part_gradients, x.C};
        const i64 row = place.b * x.split_count;
        Sum before;
#pragma unroll 4
        for (i64 i = 0; i < place.split; ++i) {
            before.append(decay, states.get(row + i, own_c));
            before.normalise(before.b);
        }
        carried.put(2, own, before);
        if constexpr (Stores) {
#pragma unroll 4
            for (i64 i = x.split_count - 1; i > place.split; --i) {
                const Sum found = gradients.get(row + i, own_c);
                after.prepend(decay, found.exponent - exponent, {found.a, found.b});
                exponent = found.exponent;
            }
        }
    }
    carried.put(0, own, after, exponent);
}

// Computes a block's part of T. With `Stores` it stores gk, gv and the parts of gw and gu; otherwise it stores the
// gradient before the part, of the part's outputs only.
template <bool Stores>
KGEN_DEVICE void take_part(const Arguments& x) {
    const int own = static_cast<int>(threadIdx.x);
    const int lane = own % kLanes, segment = own / kLanes;
    const Place place(x.C, x.rounds, x.split_steps, x.split_count, Stores ? 0 : 1);
    const i64 c = place.of_lane(lane);
    const bool inside = c < x.C;          // C is a multiple of kVec
    const i64 column = inside ? c : 0;  // a thread outside reads channels that exist
    Value* const tiles = kgen::dynamic_smem<Value>();
    float* const floats = reinterpret_cast<float*>(tiles + kStages * 3 * kTile);
    const Kept<Stores> kept(floats);
    const Slots slots{floats + kSteps * Kept<true>::kFloats};
    const Slots gradient_slots{slots.memory + (kSegments + 1) * Slots::kFloats};
    kgen::wkv4::AnchoredChannel channel[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) channel[j].set(decay_of(x.w, column + j), kgen::to_float(x.u[column + j]));
    const auto exponents = [&](int j) {  // of a channel whose keys are apart
        kgen::wkv4::ChannelExponents found;
        found.set(decay_of(x.w, column + j), kgen::to_float(x.u[column + j]));
        return found;
    };
    // Rounds are visited from the last to the first.
    const i64 first_step = (place.end - 1) * kRound + segment * kSteps;
    Rows gk_rows(x.gk + place.b * x.gk_stride_B + column, first_step, x.gk_stride_T);
    Rows gv_rows(x.gv + place.b * x.gv_stride_B + column, first_step, x.gv_stride_T);
    const CopyPlace copy_place(place, x.C);
    Copies k_copies(x.k, place.b, x.k_stride_B, x.k_stride_T, copy_place, place.end - 1);
    Copies v_copies(x.v, place.b, x.v_stride_B, x.v_stride_T, copy_place, place.end - 1);
    Copies gy_copies(x.gy, place.b, x.gy_stride_B, x.gy_stride_T, copy_place, place.end - 1);
    const auto copy_round = [&](i64 round, int stage, int count) {
        if (round >= place.first) {
            Value* const tile = tiles + stage * 3 * kTile;
            k_copies.start(tile, copy_place, count);
            v_copies.start(tile + kTile, copy_place, count);
            gy_copies.start(tile + 2 * kTile, copy_place, count);
            k_copies.rows.move(-kRound);
            v_copies.rows.move(-kRound);
            gy_copies.rows.move(-kRound);
        }
        kgen::cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i)
        copy_round(place.end - 1 - i, i, i == 0 ? steps_of_round(place.end - 1, x.T) : kRound);

    const i64 own_c = place.of_column(own);
    const bool scans = own < kColumns && own_c < x.C;
    const kgen::wkv4::WholeRows<> states{x.round_states, x.C};
    const i64 first_row = place.b * x.rounds;
    const Slots carried{gradient_slots.memory + kSegments * Slots::kFloats};
    Sum loaded;  // the state before the round, of the thread's column, from the part's beginning on
    if (scans && place.end > place.first) {
        const float log_decay = decay_of(x.w, own_c);
        const WholeDecay decay = WholeDecay::of(log_decay, kSteps);
        carried.put(1, own, decay.whole, decay.factor, log_decay);
        carry_parts<Stores>(x, place, carried, log_decay, own, own_c);
        loaded = states.get(first_row + place.end - 1, own_c);
    }
    const auto decay_of_segment = [&] {
        const Gradient found = carried.gradient(1, own);
        return WholeDecay{found.a, found.b};
    };
    kgen::cp_async_wait<kStages - 2>();
    kgen::sync_block();

    double gw[kVec] = {}, gu[kVec] = {};  // of the thread's segments
    Separate separate[kVec];
    float next[kVec];  // the exponent of the state after the segment
    const auto tile_of = [&](int stage, int tensor) {
        return Tile{tiles + (stage * 3 + tensor) * kTile + segment * kSteps * kColumns + lane * kVec};
    };
    // 1. The segment's sums.
    const auto put_sums = [&](Segment& steps, int stage, int count) {
        const Tile k_tile = tile_of(stage, 0), v_tile = tile_of(stage, 1);
        Sum sums[kVec];
        steps.weigh(sums, channel, k_tile, v_tile);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            if (steps.apart[j])
                sums[j] = Separate::sums(decay_of(x.w, column + j), k_tile, v_tile, j, count);
            slots.put(segment, j * kLanes + lane, sums[j]);
        }
    };
    // 2. The states before the segments.
    const auto scan_states = [&](int round) {
        if (!scans) return;
        Sum state = loaded;
        if constexpr (kSplits > 1) {
            state = carried.sum(2, own);
            const i64 before = (round - place.first) * kRound;
            state.append(WholeDecay::of(carried.at(1, own)[2], before), loaded);
            state.normalise(state.b);
        }
        const float exponent = state.exponent;
        slots.go_on<kSegments, true>(state, decay_of_segment(), 0, own);
        slots.at(kSegments, own)[0] = carried.at(0, own)[2];
        carried.at(0, own)[2] = exponent;
        if (round > place.first) loaded = states.get(first_row + round - 1, own_c);
    };
    // 3. Outputs, and the sums of their gradients.
    const auto put_outputs = [&](Segment& steps, int stage) {
        const Tile gy_tile = tile_of(stage, 2);
        Sum sums[kVec];
        Gradient gradients[kVec];
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            sums[j] = slots.sum(segment, j * kLanes + lane);
            next[j] = slots.exponent(segment + 1, j * kLanes + lane);
        }
        steps.outputs(gradients, sums, channel, gy_tile, kept);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            if (steps.apart[j])
                gradients[j] = separate[j].outputs(sums[j], exponents(j), tile_of(stage, 0),
                                                   tile_of(stage, 1), gy_tile, j);
            gradient_slots.put(segment, j * kLanes + lane, gradients[j], sums[j].exponent - next[j]);
        }
    };
    // 4. The gradients after the segments.
    const auto scan_gradients = [&] {
        if (!scans) return;
        Gradient after = carried.gradient(0, own);
        gradient_slots.go_back<kSegments>(after, decay_of_segment(), own);
        carried.put_gradient(0, own, after);
    };
    // 5. Gradients, last step first.
    const auto put_gradients = [&](const Segment& steps, int stage, int count) {
        if constexpr (Stores) {
            const Tile v_tile = tile_of(stage, 1);
            float gw_round[kVec], gu_round[kVec];
            bool finite[kVec];
            const auto after = [&](int j) {  // read where it is used, so that it takes no registers
                return gradient_slots.gradient(kgen::opaque(segment), j * kLanes + lane);
            };
            if (inside) {
                if (count == kSteps)
                    steps.template gradients<true>(gw_round, gu_round, finite, after, next, channel,
                                                   v_tile, kept, gk_rows, gv_rows, kSteps);
                else
                    steps.template gradients<false>(gw_round, gu_round, finite, after, next, channel,
                                                    v_tile, kept, gk_rows, gv_rows, count);
#pragma unroll
                for (int j = 0; j < kVec; ++j) {
                    const bool overflows = !finite[j] && !steps.apart[j];
                    if (overflows)
                        separate[j].outputs(steps.before(kept, j), exponents(j), tile_of(stage, 0),
                                            v_tile, tile_of(stage, 2), j);
                    if (overflows || steps.apart[j])
                        separate[j].gradients(gw_round[j], gu_round[j], after(j), next[j], v_tile,
                                              gk_rows, gv_rows, j, count);
                    gw[j] += static_cast<double>(gw_round[j]);
                    gu[j] += static_cast<double>(gu_round[j]);
                }
            }
            gk_rows.move(-kRound);
            gv_rows.move(-kRound);
        }
    };
    int stage = 0;
    int count = kgen::wkv4::steps_before<kSteps>(first_step, x.T);  // all rounds but the last are whole
    if constexpr (!kOverlap) {
#pragma unroll 1
        for (int round = static_cast<int>(place.end) - 1; round >= place.first; --round) {
            Segment steps;
            put_sums(steps, stage, count);
            kgen::sync_block();  // A
            copy_round(round - (kStages - 1), stage == 0 ? kStages - 1 : stage - 1, kRound);
            scan_states(round);
            kgen::sync_block();  // B
            put_outputs(steps, stage);
            kgen::sync_block();  // C
            scan_gradients();
            kgen::sync_block();  // D
            put_gradients(steps, stage, count);
            kgen::cp_async_wait<kStages - 2>();
            kgen::sync_block();  // E
            stage = stage + 1 == kStages ? 0 : stage + 1;
            count = kSteps;
        }
    } else {
        const int last = static_cast<int>(place.end) - 1;
        Segment steps, later;  // of the round, and of the round visited before
        if (place.end > place.first) put_sums(steps, 0, count);
        kgen::sync_block();  // D
#pragma unroll 1
        for (int round = last; round >= place.first; --round) {
            const int behind = stage == 0 ? kStages - 1 : stage - 1;
            const int following = stage + 1 == kStages ? 0 : stage + 1;
            scan_states(round);
            if (round < last) put_gradients(later, behind, round + 1 == last ? count : kSteps);
            kgen::sync_block();  // B
            copy_round(round - (kStages - 1), behind, kRound);
            put_outputs(steps, stage);
            kgen::cp_async_wait<kStages - 2>();
            kgen::sync_block();  // C
            scan_gradients();
            later = steps;
            if (round > place.first) put_sums(steps, following, kSteps);
            kgen::sync_block();  // D
            stage = following;
        }
        if (place.end > place.first)
            put_gradients(later, stage == 0 ? kStages - 1 : stage - 1,
                          place.end - place.first == 1 ? count : kSteps);
    }

    if constexpr (!Stores) {
        if (scans) {
            const Gradient after = carried.gradient(0, own);
            const Sum found{carried.at(0, own)[2], after.a, after.b};
            kgen::wkv4::WholeRows<>{x.part_gradients, x.C}.put(
                place.b * x.split_count + place.split, own_c, found);
        }
        return;
    }
    // The parts of gw and gu: the segments' sums, in order.
#pragma unroll
    for (int j = 0; j < kVec; ++j)
        slots.put(segment, j * kLanes + lane, 0.0f, static_cast<float>(gw[j]),
                  static_cast<float>(gu[j]));
    kgen::sync_block();
    if (scans) {
        kgen::CompensatedSum gw_sum, gu_sum;
        for (int i = 0; i < kSegments; ++i) {
            const Sum part = slots.sum(i, own);
            gw_sum.add(part.a);
            gu_sum.add(part.b);
        }
        const i64 row = place.b * x.split_count + place.split;
        x.gw_parts[row * x.C + own_c] = gw_sum.value();
        x.gu_parts[row * x.C + own_c] = gu_sum.value();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_round_states(const Value* __restrict__ k,       // [B, T, C]
                  const Value* __restrict__ v,       // [B, T, C]
                  const W* __restrict__ w,           // [C]
                  const U* __restrict__ u,           // [C]
                  float* __restrict__ round_states,  // [B, rounds, 3, C]
                  float* __restrict__ part_states,   // [B, split_count, 3, C]: the parts' sums
                  i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
                  i64 rounds, i64 split_steps, i64 split_count) {
    const int own = static_cast<int>(threadIdx.x);
    const int lane = own % kLanes, segment = own / kLanes;
    const Place place(C, rounds, split_steps, split_count, 0);
    const i64 c = place.of_lane(lane), column = c < C ? c : 0;
    Value* const tiles = kgen::dynamic_smem<Value>();
    const Slots slots{reinterpret_cast<float*>(tiles + kStateStages * 2 * kTile)};
    kgen::wkv4::AnchoredChannel channel[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) channel[j].set(decay_of(w, column + j), kgen::to_float(u[column + j]));

    const CopyPlace copy_place(place, C);
    Copies k_copies(k, place.b, k_stride_B, k_stride_T, copy_place, place.first);
    Copies v_copies(v, place.b, v_stride_B, v_stride_T, copy_place, place.first);
    const auto copy_round = [&](i64 round, int stage) {
        if (round < place.end) {
            Value* const tile = tiles + stage * 2 * kTile;
            const int count = steps_of_round(round, T);
            k_copies.start(tile, copy_place, count);
            v_copies.start(tile + kTile, copy_place, count);
            k_copies.rows.move(kRound);
            v_copies.rows.move(kRound);
        }
        kgen::cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStateStages - 1; ++i) copy_round(place.first + i, i);

    const i64 own_c = place.of_column(own);
    const bool scans = own < kColumns && own_c < C;
    const kgen::wkv4::WholeRows<> states{round_states, C};
    Sum state;
    WholeDecay decay;
    if (scans) decay = WholeDecay::of(decay_of(w, own_c), kSteps);
    kgen::cp_async_wait<kStateStages - 2>();
    kgen::sync_block();

    int stage = 0, parity = 0;
#pragma unroll 1
    for (i64 round = place.first; round < place.end; ++round, parity ^= 1) {
        const Value* const tile = tiles + stage * 2 * kTile + segment * kSteps * kColumns + lane * kVec;
        const Tile k_tile{tile}, v_tile{tile + kTile};
        const int slot = parity * kSegments;
        Segment steps;
        Sum sums[kVec];
        steps.weigh(sums, channel, k_tile, v_tile);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
            if (steps.apart[j])
                sums[j] = Separate::sums(decay_of(w, column + j), k_tile, v_tile, j, kSteps);
            slots.put(slot + segment, j * kLanes + lane, sums[j]);
        }
        kgen::cp_async_wait<kStateStages - 3>();
        kgen::sync_block();  // A
        copy_round(round + kStateStages - 1, stage == 0 ? kStateStages - 1 : stage - 1);
        if (scans) {
            states.put(place.b * rounds + round, own_c, state);
            slots.go_on<kSegments, false>(state, decay, slot, own);
            state.normalise(state.b);
        }
        stage = stage + 1 == kStateStages ? 0 : stage + 1;
    }
    if (kSplits > 1 && scans)
        kgen::wkv4::WholeRows<>{part_states, C}.put(place.b * split_count + place.split, own_c, state);
}

KGEN_EXPORT(wkv4_round_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_part_gradients(const Value* __restrict__ gy,         // [B, T, C]
                    const Value* __restrict__ k,          // [B, T, C]
                    const Value* __restrict__ v,          // [B, T, C]
                    const W* __restrict__ w,              // [C]
                    const U* __restrict__ u,              // [C]
                    float* __restrict__ round_states,     // [B, rounds, 3, C]
                    float* __restrict__ part_states,      // [B, split_count, 3, C]
                    float* __restrict__ part_gradients,   // [B, split_count, 3, C]: exponent, a, b
                    i64 T, i64 C, i64 gy_stride_B, i64 gy_stride_T, i64 k_stride_B, i64 k_stride_T,
                    i64 v_stride_B, i64 v_stride_T, i64 rounds, i64 split_steps, i64 split_count) {
    take_part<false>({gy, k, v, w, u, round_states, part_states, part_gradients, nullptr, nullptr,
                      nullptr, nullptr, T, C, gy_stride_B, gy_stride_T, k_stride_B, k_stride_T,
                      v_stride_B, v_stride_T, 0, 0, 0, 0, rounds, split_steps, split_count});
}

KGEN_EXPORT(wkv4_part_gradients);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv4_backward(const Value* __restrict__ gy,         // [B, T, C]
              const Value* __restrict__ k,          // [B, T, C]
              const Value* __restrict__ v,          // [B, T, C]
              const W* __restrict__ w,              // [C]
              const U* __restrict__ u,              // [C]
              float* __restrict__ round_states,     // [B, rounds, 3, C]
              float* __restrict__ part_states,      // [B, split_count, 3, C]
              float* __restrict__ part_gradients,   // [B, split_count, 3, C]
              Value* __restrict__ gk,               // [B, T, C]
              Value* __restrict__ gv,               // [B, T, C]
              float* __restrict__ gw_parts,         // [B, split_count, C]
              float* __restrict__ gu_parts,         // [B, split_count, C]
              i64 T, i64 C, i64 gy_stride_B, i64 gy_stride_T, i64 k_stride_B, i64 k_stride_T,
              i64 v_stride_B, i64 v_stride_T, i64 gk_stride_B, i64 gk_stride_T, i64 gv_stride_B,
              i64 gv_stride_T, i64 rounds, i64 split_steps, i64 split_count) {
    take_part<true>({gy, k, v, w, u, round_states, part_states, part_gradients, gk, gv, gw_parts,
                     gu_parts, T, C, gy_stride_B, gy_stride_T, k_stride_B, k_stride_T, v_stride_B,
                     v_stride_T, gk_stride_B, gk_stride_T, gv_stride_B, gv_stride_T, rounds,
                     split_steps, split_count});
}

KGEN_EXPORT(wkv4_backward);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv4_backward_reduce(const W* __restrict__ w,             // [C]
                     const float* __restrict__ gw_parts,  // [B, split_count, C]
                     const float* __restrict__ gu_parts,  // [B, split_count, C]
                     W* __restrict__ gw,                  // [C]
                     U* __restrict__ gu,                  // [C]
                     i64 B, i64 C, i64 split_count) {
    kgen::wkv4::reduce_batch<kForm, kReduceThreads>(w, gw_parts, gu_parts, gw, gu, B * split_count,
                                                    C);
}

KGEN_EXPORT(wkv4_backward_reduce);
