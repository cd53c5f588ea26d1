// Chunk loops over one sequence, small enough to be followed by hand: 3 blocks of warps, ragged
// features, a last chunk that is not whole. Layout of the test: a, b [T, 20], v [T, 36].
#include <kgen/chunked/chunk_loop.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

namespace {

constexpr int kKeys = 20, kValues = 36;

template <class T, class Product, int CopyBytes>
using Loop = kgen::ChunkLoop<T, Product, kKeys, kValues, 16, 1, 1, 2, 3, CopyBytes>;

// Blocks are slices of the value features. `parts` null: outputs of all steps, and the last state;
// else `cut` steps are summed by block y = 0, and block y = 1 goes on from there. Backwards in time
// if `backwards`.
template <class T, class Product, int CopyBytes>
KGEN_DEVICE void run_rows(const T* a, const T* b, const T* v, const float* parts, float* end,
                           T* out, kgen::i64 steps, kgen::i64 cut, kgen::i64 backwards) {
    using Its = Loop<T, Product, CopyBytes>;
    const int value = static_cast<int>(blockIdx.x) * Its::kBlockV;
    kgen::RecurrenceRows<T> rows{};
    rows.a = {a, kKeys};
    rows.b = {b, kKeys};
    rows.v = kgen::StepRows<const T>{v, kValues}.from(value);
    rows.out = kgen::StepRows<T>{out, kValues}.from(value);
    if (backwards != 0) {
        rows.a = rows.a.reversed(steps);
        rows.b = rows.b.reversed(steps);
        rows.v = rows.v.reversed(steps);
        rows.out = rows.out.reversed(steps);
    }
    rows.first = out == nullptr ? 0 : cut;
    rows.end = out == nullptr ? cut : steps;
    rows.values = kgen::min(kValues - value, Its::kBlockV);
    rows.out_factor = 0.5f;
    rows.value_factor = 1.0f;

    kgen::RecurrenceStates states{};
    states.segment_sums = parts == nullptr ? nullptr : parts + value;
    states.segments = parts == nullptr ? 0 : 1;
    states.final_state = end + value;
    states.final_key_stride = kValues;
    states.final_value_stride = 1;
    states.final_factor = 1.0f;
    Its loop(rows, states);
    if (out == nullptr) {
        loop.sum_segment();
    } else {
        loop.run();
    }
}

// Copies of 7 chunks' worth of steps, ending within one: target[chunk][16][24].
template <int CopyBytes, int Width>
KGEN_DEVICE void copy_chunks(const float* source, float* target, kgen::i64 steps, int width) {
    kgen::ChunkCopier<float, 16, Width, CopyBytes, 64> copier({source, Width}, 0, width);
    float* tile = kgen::dynamic_smem<float>();
    for (int chunk = 0; chunk * 16 < steps; ++chunk) {
        for (int i = kgen::thread_rank(); i < 16 * 24; i += 64) tile[i] = -1.0f;
        kgen::sync_block();
        const int left = static_cast<int>(steps) - 16 * chunk;
        if (left >= 16) {
            copier.template start<true>(tile, 24, 16);
        } else {
            copier.template start<false>(tile, 24, left);
        }
        kgen::cp_async_wait_all();
        kgen::sync_block();
        for (int i = kgen::thread_rank(); i < 16 * 24; i += 64)
            target[chunk * 16 * 24 + i] = tile[i];
        kgen::sync_block();
    }
}

}  // namespace

#define CHUNK_LOOP(name, T, Product, CopyBytes)                                                    \
    extern "C" __global__ void __launch_bounds__(64) name(                                         \
        const T* a, const T* b, const T* v, const float* parts, float* end, T* out,               \
        kgen::i64 steps, kgen::i64 cut, kgen::i64 backwards) {                                     \
        run_rows<T, Product, CopyBytes>(a, b, v, parts, end, out, steps, cut, backwards);         \
    }                                                                                              \
    KGEN_EXPORT(name)

CHUNK_LOOP(run_fp32, float, float, 16);
CHUNK_LOOP(run_tf32, float, kgen::tf32, 4);
CHUNK_LOOP(run_fp16, kgen::fp16, kgen::fp16, 8);
CHUNK_LOOP(run_bf16, kgen::bf16, kgen::bf16, 2);

#define COPY(name, CopyBytes, Width)                                                               \
    extern "C" __global__ void __launch_bounds__(64) name(const float* source, float* target,      \
                                                          kgen::i64 steps, int width) {            \
        copy_chunks<CopyBytes, Width>(source, target, steps, width);                               \
    }                                                                                              \
    KGEN_EXPORT(name)

COPY(copy_16, 16, 20);
COPY(copy_8, 8, 14);
COPY(copy_4, 4, 21);

#endif
