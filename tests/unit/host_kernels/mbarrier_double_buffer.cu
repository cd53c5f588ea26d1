// Rows from producer warps to consumer warps through a double buffer: out = 2 * in. All variants but `none` have one
// planted fault.
#include <kgen/primitives/block.cuh>
#include <kgen/primitives/mbarrier_double_buffer.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 900

namespace {

constexpr int kColumns = 64;  // producer threads, and as many consumer threads

enum class Fault {
    none,
    no_acquire,     // write a slot that may still be read
    no_wait,        // read a slot that may not have been written
    no_release,     // never release a slot
    one_releases,   // only one of two warps releases
    early_release,  // read a slot after its release
};

template <Fault F>
KGEN_DEVICE void pass_rows(const float* in, float* out, int items) {
    __shared__ kgen::MbarrierDoubleBuffer pipe;
    __shared__ float rows[2][kColumns];
    const int thread = kgen::thread_rank();
    if (thread == 0) {
        pipe.init(kColumns, kColumns / kgen::kWarpSize);
        kgen::mbarrier_init_fence();
    }
    kgen::sync_block();
    const bool produces = thread < kColumns;
    const int column = thread % kColumns;
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
        float* row = rows[item % 2];
        if (produces) {
            if constexpr (F != Fault::no_acquire) pipe.producer_acquire(item);
            row[column] = 2.0f * in[item * kColumns + column];
            pipe.producer_commit(item);
        } else {
            if constexpr (F != Fault::no_wait) pipe.consumer_wait(item);
            if constexpr (F == Fault::early_release) {
                pipe.consumer_release(item);
                kgen::sync_warp();  // on the host: lets other threads run
            }
            const int other = kColumns - 1 - column;  // a value of another warp's
            out[item * kColumns + other] = row[other];
            if (F != Fault::no_release && F != Fault::early_release &&
                (F != Fault::one_releases || column < kgen::kWarpSize))
                pipe.consumer_release(item);
        }
    }
}

}  // namespace

#define DEFINE(fault)                                                                    \
    extern "C" __global__ void pass_rows_##fault(const float* in, float* out, int items) { \
        pass_rows<Fault::fault>(in, out, items);                                         \
    }                                                                                    \
    KGEN_EXPORT(pass_rows_##fault)

DEFINE(none);
DEFINE(no_acquire);
DEFINE(no_wait);
DEFINE(no_release);
DEFINE(one_releases);
DEFINE(early_release);

#endif
