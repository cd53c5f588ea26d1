// Rendered by kgen from templates/rmsnorm/forward_bulk_rows.cu.jinja
// config: bulk_rows(lanes_per_row=256, groups_per_block=1, rows_per_group=1, stages=4, store=direct, resident_weight=true, load_policy=evict_first, store_cache=normal, min_blocks=3)
// problem: N=4096, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, persistent blocks fed by the bulk copy engine: whole rows, and runs of rows,
// move between global and shared memory as single copies that one elected thread asks for. The
// bytes in flight cost no registers and no instructions, and DRAM sees few long bursts.
#include "kgen/block.cuh"
#include "kgen/bulk.cuh"
#include "kgen/forget.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;

// How y is written: from registers, or into the stage that held x and from there by a bulk copy.
enum class Store { direct, bulk };

constexpr int kN = 4096;
constexpr int kLanes = 256;          // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kRows = 1;          // rows of a stage that a group takes
constexpr int kStages = 4;                // tiles of a team in shared memory
constexpr bool kResidentWeight = true;  // w stays in registers
constexpr Store kStore = Store::direct;
constexpr kgen::Cache kStoreCache = kgen::Cache::normal;
constexpr kgen::BulkCache kLoadPolicy = kgen::BulkCache::evict_first;
constexpr int kMinBlocks = 3;         // blocks per SM: sets the grid as well

constexpr int kThreads = kLanes * kGroups;
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements per access
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row
constexpr int kWeightParts = static_cast<int>(sizeof(W) / sizeof(T));  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;
constexpr kgen::BulkCache kStorePolicy = kStoreCache == kgen::Cache::normal
                                             ? kgen::BulkCache::normal
                                             : kgen::BulkCache::evict_first;

// A team is the threads that share a ring: a warp if rows do not cross warps, so that no block
// barrier is needed, else the block. It takes a tile of consecutive rows at a time.
constexpr bool kTeamIsWarp = kLanes <= kgen::kWarpSize;
constexpr int kTeamThreads = kTeamIsWarp ? kgen::kWarpSize : kThreads;
constexpr int kTeams = kThreads / kTeamThreads;
constexpr int kTeamGroups = kTeamThreads / kLanes;
constexpr int kTileRows = kTeamGroups * kRows;
constexpr int kRowVectors = kN / kVec;
constexpr int kTileVectors = kTileRows * kRowVectors;
constexpr kgen::u32 kRowBytes = kN * sizeof(T);

static_assert(kRowBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
static_assert(kTileRows * kRowBytes < 1u << 20, "an mbarrier's phase counts up to 2^20 - 1 bytes");
static_assert(kThreads >= 32 && kThreads <= 1024 && kThreads % kTeamThreads == 0,
              "a block is 32 to 1024 threads, whole teams");
static_assert(kStages >= (kStore == Store::bulk ? 3 : 2),
              "one tile is worked on, and two bulk stores are under way, while another arrives");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// Whether step `step` of this thread lies in the row; known to the compiler but for the last step.
KGEN_DEVICE bool inside(int step, int first) {
    return (step + 1) * kSweep <= kN || step * kSweep + first < kN;
}

KGEN_DEVICE Weight load_weight(const W* w, int step, int first) {
    Weight weight{};
    if (inside(step, first)) {
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part)
            weight.part[part] =
                kgen::load_vec<kWeightVec>(w + step * kSweep + first + part * kWeightVec);
    }
    return weight;
}

// How many rows of the tile at `row0` < M exist.
KGEN_DEVICE int rows_of_tile(kgen::i64 row0, kgen::i64 M) {
    return static_cast<int>(kgen::min<kgen::i64>(kTileRows, M - row0));
}

// Start the copies of a tile, if it exists. By one thread.
KGEN_DEVICE void start_tile(Vector* tile, kgen::Mbarrier& full, const T* x, kgen::i64 row0,
                            kgen::i64 M, kgen::i64 x_stride_M) {
    if (row0 >= M) return;
    const kgen::u32 bytes = rows_of_tile(row0, M) * kRowBytes;
    kgen::mbarrier_arrive_expect(full, bytes);
    const T* source = x + row0 * x_stride_M;
    if (kTileRows == 1 || x_stride_M == kN) {
        kgen::bulk_load<kLoadPolicy>(tile, source, bytes, full);
    } else {  // rows apart: a copy each
#pragma unroll 1
        for (kgen::u32 offset = 0; offset < bytes; offset += kRowBytes) {
            kgen::bulk_load<kLoadPolicy>(tile, source, kRowBytes, full);
            tile += kRowVectors;
            source += x_stride_M;
        }
    }
}

// Start the copy of a finished tile to y, a group of its own. By one thread.
KGEN_DEVICE void store_tile(T* y, const Vector* tile, kgen::i64 row0, kgen::i64 M) {
    kgen::bulk_store<kStorePolicy>(y + row0 * kN, tile, rows_of_tile(row0, M) * kRowBytes);
    kgen::bulk_commit();
}

// `back` stages before `stage`, around the ring.
KGEN_DEVICE int stage_before(int stage, int back) {
    return stage >= back ? stage - back : stage + kStages - back;
}

// Four chains, so that the additions of a long row do not wait for each other.
KGEN_DEVICE float sum_of_squares(const Vector (&held)[kSteps]) {
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float values[kVec];
        kgen::to_floats(held[step], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[i % 4] = kgen::fma(values[i], values[i], sum[i % 4]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

KGEN_DEVICE Vector scaled(const Vector& held, const Weight& weight, float scale, float offset) {
    float values[kVec];
    kgen::to_floats(held, values);
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part) {
        float factors[kWeightVec];
        kgen::to_floats(weight.part[part], factors);
#pragma unroll
        for (int i = 0; i < kWeightVec; ++i) {
            float& value = values[part * kWeightVec + i];
            value = value * scale * (offset + factors[i]);
        }
    }
    return kgen::from_floats<T>(values);
}

}  // namespace

// Why nobody waits for ever. Tiles k = 0, 1, ... of a team sit in stage k % kStages, so phase k /
// kStages of full[stage] is tile k's: its parity flips with each round of the ring. The elected
// thread arms that phase (its only arrival, and all of its bytes) exactly when the tile exists, and
// always an iteration or more before the team waits for it: in phase 1, or in phase 5 of iteration
// k - kStages (direct) or k - kStages + 2 <= k - 1 (bulk). It arms a phase only after the team,
// itself included, has waited for the one before it. It waits for nothing else but the reading of
// its own stores, which needs no thread. The other waits are the team's barrier, which all of the
// team reach once per iteration: the loop's condition is the same for the whole team.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N]
                T* __restrict__ y,        // [M, N]
                kgen::i64 M, kgen::i64 x_stride_M, float eps, float offset) {
    using RowSums = kgen::GroupSum<kLanes, kGroups, kRows>;
    __shared__ typename RowSums::Scratch scratch;
    __shared__ kgen::Mbarrier barriers[kTeams][kStages];
    RowSums row_sums(scratch);

    // Shared memory: Vector ring[kTeams][kStages][kTileRows][kRowVectors]. Neighbouring lanes read
    // neighbouring vectors, eight or more in a run: no bank conflicts, and no padding.
    const int team = static_cast<int>(threadIdx.x) / kTeamThreads;
    Vector* ring = kgen::dynamic_smem<Vector>() + team * (kStages * kTileVectors);
    kgen::Mbarrier(&full)[kStages] = barriers[team];

    const bool elected = threadIdx.x % kTeamThreads == 0;
    const int group = static_cast<int>(threadIdx.x) % kTeamThreads / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int first = lane * kVec;  // this thread's column in step 0
    const kgen::i64 stride = static_cast<kgen::i64>(gridDim.x) * (kTeams * kTileRows);
    kgen::i64 row0 = (static_cast<kgen::i64>(blockIdx.x) * kTeams + team) * kTileRows;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);

    // 1. Fill the ring, before anybody looks at it; each team's thread makes the team's barriers.
    if (elected) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) kgen::mbarrier_init(full[stage], 1);
        kgen::mbarrier_init_fence();
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage)
            start_tile(ring + stage * kTileVectors, full[stage], x, row0 + stage * stride, M,
                       x_stride_M);
    }
    Weight weight[kSteps];
    if constexpr (kResidentWeight) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weight[step] = load_weight(w, step, first);
    }
    kgen::sync_block();

    int stage = 0;
    kgen::u32 parity = 0;
    int finished = 0;  // tiles
    for (; row0 < M; row0 += stride) {
        Vector* tile = ring + stage * kTileVectors;
        const int rows = kTileRows == 1 ? 1 : rows_of_tile(row0, M);

        // 2. Read this thread's part of the tile into registers.
        kgen::mbarrier_wait(full[stage], parity);
        Vector held[kRows][kSteps];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int row = r * kTeamGroups + group;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                held[r][step] = Vector{};
                if (row < rows && inside(step, first))
                    held[r][step] = tile[row * kRowVectors + step * kLanes + lane];
            }
        }

        // 3. Mean squares of all rows.
        float scale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = sum_of_squares(held[r]);
        row_sums(scale);  // with the block's barrier, if the team is the block
        if constexpr (kTeamIsWarp) kgen::sync_warp();
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = kgen::rsqrt(scale[r] * (1.0f / kN) + eps);

        // 4. Behind the barrier the whole team has done with the previous tile, and has read this
        // one.
        if (elected) {
            if constexpr (kStore == Store::direct) {
                // 5. This stage is free: the results go out from registers.
                start_tile(tile, full[stage], x, row0 + kStages * stride, M, x_stride_M);
            } else {
                if (finished > 0)
                    store_tile(y, ring + stage_before(stage, 1) * kTileVectors, row0 - stride, M);
                // 5. Free is the stage whose store was issued one iteration ago and has by now read
                // it: waiting for the store just issued would expose its latency.
                if (finished > 1) {
                    kgen::bulk_wait_read<1>();
                    const int free_stage = stage_before(stage, 2);
                    start_tile(ring + free_stage * kTileVectors, full[free_stage], x,
                               row0 + (kStages - 2) * stride, M, x_stride_M);
                }
            }
        }

        // 6. Scale and write. The address of a weight from L1 depends on the sum, or on a result
        // two steps before: that keeps its loads down here, and few at a time, which saves
        // registers.
        T* target = y + (row0 + group) * kN + first;
        kgen::u32 earlier[2] = {kgen::bit_cast<kgen::u32>(scale[0]) & zero,
                                kgen::bit_cast<kgen::u32>(scale[0]) & zero};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if constexpr (!kResidentWeight)
                weight[step] = load_weight(w + earlier[step % 2], step, first);
            if constexpr (sizeof(W) == 2) kgen::forget(weight[step], zero);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int row = r * kTeamGroups + group;
                if (row >= rows || !inside(step, first)) continue;
                if constexpr (sizeof(T) == 2) kgen::forget(held[r][step], zero);
                const Vector result = scaled(held[r][step], weight[step], scale[r], offset);
                if constexpr (kStore == Store::direct) {
                    kgen::store_vec<kStoreCache>(target + (r * kTeamGroups * kN + step * kSweep),
                                                 result);
                } else {  // in place: no other thread touches these bytes
                    tile[row * kRowVectors + step * kLanes + lane] = result;
                }
                earlier[step % 2] = kgen::bit_cast<kgen::u32>(kgen::to_float(result[0])) & zero;
            }
        }
        if constexpr (kStore == Store::bulk) kgen::fence_proxy_async();

        // 7. Move on.
        ++finished;
        stage = stage == kStages - 1 ? 0 : stage + 1;
        if (stage == 0) parity ^= 1;
    }

    // 8. The last tile is still to be stored, and a block must not end while its shared memory is
    // being read. No load is under way: each was of a tile that exists, and was waited for.
    if constexpr (kStore == Store::bulk) {
        if constexpr (kTeamIsWarp) {
            kgen::sync_warp();
        } else {
            kgen::sync_block();
        }
        if (elected && finished > 0) {
            store_tile(y, ring + stage_before(stage, 1) * kTileVectors, row0 - stride, M);
            kgen::bulk_wait_read<0>();
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
