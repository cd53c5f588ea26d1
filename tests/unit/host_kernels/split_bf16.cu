// fp32 as sums of bf16: parts of pairs, sums of their products, and the order of these.
#include <kgen/primitives/block.cuh>
#include <kgen/primitives/split_bf16.cuh>

namespace {

// A thread per pair of numbers: words[thread][part].
template <int Parts>
KGEN_DEVICE void split(const float* x, kgen::u32* words) {
    const int thread = kgen::thread_rank();
    kgen::u32 parts[Parts];
    kgen::split_bf16(x[2 * thread], x[2 * thread + 1], parts);
    for (int part = 0; part < Parts; ++part) words[Parts * thread + part] = parts[part];
}

// All (i, j), one behind the other.
template <int Parts>
KGEN_DEVICE void list_products(int* pairs) {
    kgen::for_term_products<Parts>([&](int i, int j) {
        *pairs++ = i;
        *pairs++ = j;
    });
}

}  // namespace

extern "C" __global__ void split_2(const float* x, kgen::u32* words) { split<2>(x, words); }
KGEN_EXPORT(split_2);
extern "C" __global__ void split_3(const float* x, kgen::u32* words) { split<3>(x, words); }
KGEN_EXPORT(split_3);

extern "C" __global__ void products_2(int* pairs) { list_products<2>(pairs); }
KGEN_EXPORT(products_2);
extern "C" __global__ void products_3(int* pairs) { list_products<3>(pairs); }
KGEN_EXPORT(products_3);
