// A block sums its row tile by tile, the next tile under way while one is added up. The variants
// have one wait or barrier planted wrongly.
#include <kgen/primitives/cp_async.cuh>
#include <kgen/primitives/block.cuh>

constexpr int kThreads = 64;
constexpr int kValues = 4;  // per thread and tile: 16 bytes
constexpr int kTile = kThreads * kValues;

enum class Fault { none, no_wait, no_barrier, overwrite };

template <Fault F>
KGEN_DEVICE void sum_row(const float* in, float* out, int columns) {
    float* tiles = kgen::dynamic_smem<float>();
    __shared__ kgen::GroupSum<kThreads, 1>::Scratch scratch;
    const int t = kgen::thread_rank();
    const float* row = in + static_cast<kgen::i64>(blockIdx.x) * columns;
    const int count = kgen::ceil_div(columns, kTile);

    const auto fetch = [=](int tile) {
        const int column = tile * kTile + t * kValues;
        const bool inside = column < columns;
        kgen::cp_async_or_zero<16>(tiles + tile % 2 * kTile + t * kValues,
                                   inside ? row + column : nullptr, inside);
        kgen::cp_async_commit();
    };
    float sum = 0.0f;
    fetch(0);
    for (int tile = 0; tile < count; ++tile) {
        fetch(tile + 1);
        if constexpr (F == Fault::no_wait) {
            kgen::cp_async_wait<2>();
        } else {
            kgen::cp_async_wait<1>();
        }
        if constexpr (F != Fault::no_barrier) kgen::sync_block();
        // Each thread adds what others fetched; 61 is odd, so every element is read exactly once.
        for (int i = 0; i < kValues; ++i)
            sum += tiles[tile % 2 * kTile + (t * kValues + i * 61 + 17) % kTile];
        if constexpr (F != Fault::overwrite) kgen::sync_block();
    }
    sum = kgen::GroupSum<kThreads, 1>(scratch)(sum);
    if (t == 0) out[blockIdx.x] = sum;
}

#define DEFINE(fault)                                                                          \
    extern "C" __global__ void sum_row_##fault(const float* in, float* out, int columns) {     \
        sum_row<Fault::fault>(in, out, columns);                                               \
    }                                                                                          \
    KGEN_EXPORT(sum_row_##fault)

DEFINE(none);
DEFINE(no_wait);
DEFINE(no_barrier);
DEFINE(overwrite);
