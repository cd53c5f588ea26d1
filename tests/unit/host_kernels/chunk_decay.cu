// Chunk loops with decays over one sequence: ragged features, a last chunk that is not whole. Layout
// of the test: a, b, w [T, 20], u [20], v [T, 36].
#include <kgen/chunked/chunk_halving.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

namespace {

constexpr int kKeys = 20, kValues = 36;

// Blocks are slices of the value features. Steps [first, last) are run; without `out` they are
// summed alone, and `key_end` gets the products of their decays. `parts` and `key_parts`: what such a
// sum gave for the steps before. Rows of w are `w_stride` elements apart.
template <class Loop, class Decay, class T, class W>
KGEN_DEVICE void run_rows(const T* a, const T* b, const T* v, const W* w, const float* u,
                           const float* parts, const float* key_parts, float* end, float* key_end,
                           T* out, kgen::i64 first, kgen::i64 last, kgen::i64 w_stride) {
    const int value = static_cast<int>(blockIdx.x) * Loop::kBlockV;
    kgen::RecurrenceRows<T> rows{};
    rows.a = {a, kKeys};
    rows.b = {b, kKeys};
    rows.v = kgen::StepRows<const T>{v, kValues}.from(value);
    rows.out = kgen::StepRows<T>{out, kValues}.from(value);
    rows.first = first;
    rows.end = last;
    rows.values = kgen::min(kValues - value, Loop::kBlockV);
    rows.out_factor = 0.5f;
    rows.value_factor = 1.0f;

    kgen::RecurrenceStates states{};
    states.segment_sums = parts == nullptr ? nullptr : parts + value;
    states.segment_key_sums = key_parts;
    states.segments = parts == nullptr ? 0 : 1;
    states.final_state = end + value;
    states.final_key_stride = kValues;
    states.final_value_stride = 1;
    states.final_factor = 1.0f;
    states.final_key_sum = key_end;
    Decay decay{};
    decay.w = {w, w_stride};
    decay.u = u;
    Loop loop(rows, states, decay);
    if (out == nullptr) {
        loop.sum_segment();
    } else {
        loop.run();
    }
}

}  // namespace

#define CHUNK_KERNEL(name, T, W, KeyWarps, Loop, Decay)                                            \
    extern "C" __global__ void __launch_bounds__(32 * KeyWarps)                                    \
        name(const T* a, const T* b, const T* v, const W* w, const float* u, const float* parts,   \
             const float* key_parts, float* end, float* key_end, T* out, kgen::i64 first,          \
             kgen::i64 last, kgen::i64 w_stride) {                                                 \
        run_rows<Loop, Decay>(a, b, v, w, u, parts, key_parts, end, key_end, out, first, last,     \
                              w_stride);                                                           \
    }                                                                                              \
    KGEN_EXPORT(name)

#define HALVING_LOOP(name, T, Returned, W, Chunk, KeyWarps, Buffers, CopyBytes, Pairs)             \
    using name##_decay = kgen::HalvingRows<W, float, kgen::DecayForm::log, Buffers, true, Pairs>;  \
    using name##_loop = kgen::HalvingLoop<T, Returned, kKeys, kValues, Chunk, 1, 1, KeyWarps,      \
                                          Buffers + 2, CopyBytes, name##_decay>;                   \
    CHUNK_KERNEL(name, T, W, KeyWarps, name##_loop, name##_decay)

HALVING_LOOP(run_halving_fp32, float, false, float, 32, 2, 1, 16, false);
HALVING_LOOP(run_halving_fp16, kgen::fp16, false, float, 32, 2, 1, 8, false);
HALVING_LOOP(run_halving_bf16, kgen::bf16, false, kgen::bf16, 16, 2, 2, 2, false);
HALVING_LOOP(run_halving_bf16_state, kgen::bf16, true, float, 32, 1, 2, 4, false);
HALVING_LOOP(run_pairs_fp32, float, false, float, 16, 2, 2, 16, true);
HALVING_LOOP(run_pairs_fp16, kgen::fp16, false, float, 16, 1, 1, 8, true);
HALVING_LOOP(run_pairs_bf16, kgen::bf16, false, float, 16, 2, 2, 8, true);
HALVING_LOOP(run_pairs_bf16_state, kgen::bf16, true, kgen::bf16, 16, 1, 2, 4, true);

#endif
