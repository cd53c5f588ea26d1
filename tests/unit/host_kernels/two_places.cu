// Rows from some warps to others through two places in turns: out = 2 * in. The variants have one step
// planted wrongly.
#include <kgen/block.cuh>
#include <kgen/two_places.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 900

namespace {

constexpr int kColumns = 64;  // threads that fill, and threads that use

enum class Fault {
    none,
    no_wait_free,   // fill what may still be read
    no_wait_full,   // read what may not be there
    no_release,     // keep a place
    one_releases,   // of two warps
    early_release,  // read what has been given back
};

template <Fault F>
KGEN_DEVICE void pass_rows(const float* in, float* out, int turns) {
    __shared__ kgen::TwoPlaces places;
    __shared__ float rows[2][kColumns];
    const int thread = kgen::thread_rank();
    if (thread == 0) {
        places.begin(kColumns, kColumns / kgen::kWarpSize);
        kgen::mbarrier_init_fence();
    }
    kgen::sync_block();
    const bool fills = thread < kColumns;
    const int column = thread % kColumns;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        float* row = rows[turn % 2];
        if (fills) {
            if constexpr (F != Fault::no_wait_free) places.wait_free(turn);
            row[column] = 2.0f * in[turn * kColumns + column];
            places.fill(turn);
        } else {
            if constexpr (F != Fault::no_wait_full) places.wait_full(turn);
            if constexpr (F == Fault::early_release) {
                places.release(turn);
                kgen::sync_warp();  // on the host others' turn
            }
            const int other = kColumns - 1 - column;  // a value of another warp's
            out[turn * kColumns + other] = row[other];
            if (F != Fault::no_release && F != Fault::early_release &&
                (F != Fault::one_releases || column < kgen::kWarpSize))
                places.release(turn);
        }
    }
}

}  // namespace

#define DEFINE(fault)                                                                    \
    extern "C" __global__ void pass_rows_##fault(const float* in, float* out, int turns) { \
        pass_rows<Fault::fault>(in, out, turns);                                         \
    }                                                                                    \
    KGEN_EXPORT(pass_rows_##fault)

DEFINE(none);
DEFINE(no_wait_free);
DEFINE(no_wait_full);
DEFINE(no_release);
DEFINE(one_releases);
DEFINE(early_release);

#endif
