// Rows through a ring of bulk copies: out = 2 * in, each row a copy in and a copy out. The variants
// have one step planted wrongly.
#include <kgen/primitives/bulk_copy.cuh>
#include <kgen/primitives/warp.cuh>
#include <kgen/primitives/block.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 900

constexpr int kThreads = 64;
constexpr int kColumns = 256;
constexpr int kStages = 3;
constexpr kgen::u32 kBytes = kColumns * sizeof(float);

enum class Fault {
    none,
    no_wait,           // read a row that may not have landed
    too_many_bytes,    // expect more than the copy brings
    too_few_bytes,     // expect less
    wrong_parity,      // wait for the phase before
    no_arrival,        // copy without arming the phase
    no_init,
    no_init_fence,     // mbarriers that the copy engine may not see
    no_fence,          // store what the copy engine may not see
    early_store,       // store before all threads have written
    overwrite,         // refill a stage that is still being stored
    scribble,          // write over a stage that is still being stored
    no_wait_at_end,    // end while shared memory is being read
    abandoned_load,    // end while a load is under way
};

template <Fault F>
KGEN_DEVICE void double_rows(const float* in, float* out, int rows) {
    float* ring = kgen::dynamic_smem<float>();
    __shared__ kgen::Mbarrier full[kStages];
    const int t = kgen::thread_rank();
    const bool elected = t == 0;

    const auto fetch = [&](int row) {
        if (row >= rows) return;
        const kgen::u32 expected = F == Fault::too_many_bytes  ? kBytes + 16
                                   : F == Fault::too_few_bytes ? kBytes - 16
                                                               : kBytes;
        kgen::Mbarrier& barrier = full[row % kStages];
        if constexpr (F != Fault::no_arrival) kgen::mbarrier_arrive_expect_tx(barrier, expected);
        kgen::bulk_load<kgen::BulkCache::evict_first>(ring + row % kStages * kColumns,
                                                      in + row * kColumns, kBytes, barrier);
    };
    if (elected) {
        if constexpr (F != Fault::no_init)
            for (int i = 0; i < kStages; ++i) kgen::mbarrier_init(full[i], 1);
        if constexpr (F != Fault::no_init_fence) kgen::mbarrier_init_fence();
        for (int row = 0; row < kStages; ++row) fetch(row);
    }
    kgen::sync_block();

    const int rows_to_do = F == Fault::abandoned_load ? 0 : rows;
    for (int row = 0; row < rows_to_do; ++row) {
        const kgen::u32 parity = static_cast<kgen::u32>(row / kStages % 2);
        if constexpr (F != Fault::no_wait)
            kgen::mbarrier_wait(full[row % kStages],
                                F == Fault::wrong_parity ? parity ^ 1 : parity);
        float* tile = ring + row % kStages * kColumns;
        for (int i = t; i < kColumns; i += kThreads) tile[i] *= 2.0f;
        if constexpr (F != Fault::no_fence) kgen::fence_proxy_async();
        if constexpr (F != Fault::early_store) kgen::sync_block();
        if (!elected) continue;
        kgen::bulk_store(out + row * kColumns, tile, kBytes);
        kgen::bulk_commit();
        if constexpr (F == Fault::scribble) tile[5] = 0.0f;
        // The store before this one has read its stage; refill that.
        if constexpr (F == Fault::overwrite) {
            fetch(row + kStages);
        } else {
            kgen::bulk_wait_read<1>();
            if (row > 0) fetch(row - 1 + kStages);
        }
    }
    if constexpr (F != Fault::no_wait_at_end) {
        if (elected) kgen::bulk_wait_read<0>();
    }
}

#define DEFINE(fault)                                                                         \
    extern "C" __global__ void double_rows_##fault(const float* in, float* out, int rows) {   \
        double_rows<Fault::fault>(in, out, rows);                                             \
    }                                                                                         \
    KGEN_EXPORT(double_rows_##fault)

DEFINE(none);
DEFINE(no_wait);
DEFINE(too_many_bytes);
DEFINE(too_few_bytes);
DEFINE(wrong_parity);
DEFINE(no_arrival);
DEFINE(no_init);
DEFINE(no_init_fence);
DEFINE(no_fence);
DEFINE(early_store);
DEFINE(overwrite);
DEFINE(scribble);
DEFINE(no_wait_at_end);
DEFINE(abandoned_load);

// A producer warp and a consumer warp around a ring with `full` and `empty` barriers; the copy back
// is of untouched data, which needs no fence, and the kernel waits until it is written.
extern "C" __global__ void copy_rows(const float* in, float* out, int rows) {
    float* ring = kgen::dynamic_smem<float>();
    __shared__ kgen::Mbarrier full[kStages];
    __shared__ kgen::Mbarrier empty[kStages];
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            kgen::mbarrier_init(full[i], 1);
            kgen::mbarrier_init(empty[i], 2);  // two consumers
        }
        kgen::mbarrier_init_fence();
    }
    kgen::sync_block();
    for (int row = 0; row < rows; ++row) {
        const int stage = row % kStages;
        const kgen::u32 parity = static_cast<kgen::u32>(row / kStages % 2);
        if (threadIdx.x == 0) {
            kgen::mbarrier_wait(empty[stage], parity ^ 1);  // at once in the first round
            kgen::mbarrier_arrive_expect_tx(full[stage], kBytes);
            for (int half = 0; half < 2; ++half)
                kgen::bulk_load(ring + stage * kColumns + half * (kColumns / 2),
                                in + row * kColumns + half * (kColumns / 2), kBytes / 2,
                                full[stage]);
        } else if (threadIdx.x == 32 || threadIdx.x == 33) {  // half a row each
            const int half = static_cast<int>(threadIdx.x - 32) * (kColumns / 2);
            kgen::mbarrier_wait(full[stage], parity);
            kgen::bulk_store<kgen::BulkCache::evict_first>(
                out + row * kColumns + half, ring + stage * kColumns + half, kBytes / 2);
            kgen::bulk_commit();
            kgen::bulk_wait<0>();
            kgen::mbarrier_arrive(empty[stage]);
        }
    }
}
KGEN_EXPORT(copy_rows);

// One load of `bytes` bytes, `shift` floats into the source.
extern "C" __global__ void load_some(const float* in, float* out, int shift, int bytes) {
    __shared__ kgen::Mbarrier full;
    float* tile = kgen::dynamic_smem<float>();
    kgen::mbarrier_init(full, 1);
    kgen::mbarrier_init_fence();
    kgen::mbarrier_arrive_expect_tx(full, static_cast<kgen::u32>(bytes));
    kgen::bulk_load(tile, in + shift, static_cast<kgen::u32>(bytes), full);
    kgen::mbarrier_wait(full, 0);
    out[0] = tile[0];
}
KGEN_EXPORT(load_some);

#endif
