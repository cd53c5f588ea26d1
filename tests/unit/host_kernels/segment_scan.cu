// Sums of segments scanned in place: several numbers of segments and widths of a thread.
#include <kgen/primitives/block.cuh>
#include <kgen/chunked/segment_scan.cuh>

namespace {

constexpr int kSize = 12;  // values of a state
constexpr int kThreads = 32;

template <int Parts, int Width>
KGEN_DEVICE void scan(float* parts, const float* initial, long long states, long long first) {
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kThreads + kgen::thread_rank();
    kgen::states_before_segments<Parts, Width, kSize>(parts, initial, states, index - first);
}

// Where the state before each segment begins; -1: nowhere, it is zero; `size` on: in `initial`.
template <int Parts>
KGEN_DEVICE void find(const float* parts, const float* initial, int* found, int size) {
    const int segment = kgen::thread_rank() % (Parts + 1), which = kgen::thread_rank() / (Parts + 1);
    const float* state = kgen::state_before_segment<Parts, kSize>(parts, initial, which, segment);
    int& place = found[kgen::thread_rank()];
    place = -1;
    if (state != nullptr && segment == 0) place = size + static_cast<int>(state - initial);
    if (state != nullptr && segment > 0) place = static_cast<int>(state - parts);
}

}  // namespace

// parts [states, N, kSize] for each number N of sums; threads from `first` on take part.
#define SCAN(name, parts_, width)                                                             \
    extern "C" __global__ void name(float* parts, const float* initial, long long states,   \
                                    long long first) {                                      \
        scan<parts_, width>(parts, initial, states, first);                                 \
    }                                                                                       \
    KGEN_EXPORT(name)

SCAN(scan_1_by_1, 1, 1);
SCAN(scan_3_by_4, 3, 4);
SCAN(scan_33_by_4, 33, 4);
SCAN(scan_33_by_2, 33, 2);
SCAN(scan_127_by_1, 127, 1);

extern "C" __global__ void find_states(const float* parts, const float* initial, int* found,
                                       int size) {
    find<3>(parts, initial, found, size);
}

KGEN_EXPORT(find_states);
