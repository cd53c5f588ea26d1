// c = a + b, one element per thread, ragged end.
#include <kgen/primitives/core.cuh>

using kgen::i64;

extern "C" __global__ void __launch_bounds__(256)
    vector_add(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
               i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
KGEN_EXPORT(vector_add);

// Every thread writes its coordinates: 3-d grids and blocks.
extern "C" __global__ void coordinates(int* out) {
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int rank = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int* mine = out + 2 * (block * (blockDim.x * blockDim.y * blockDim.z) + rank);
    mine[0] = 100 * threadIdx.x + 10 * threadIdx.y + threadIdx.z;
    mine[1] = kgen::thread_rank();
}
KGEN_EXPORT(coordinates);

// Arguments of every width, and none of them in the place of another.
struct Pair {
    short first;
    double second;
};
extern "C" __global__ void arguments(double* out, signed char a, short b, int c, i64 d, float e,
                                     double f, Pair g) {
    const double values[] = {double(a), double(b), double(c), double(d), double(e),
                             f,         double(g.first), g.second};
    for (int i = 0; i < 8; ++i) out[i] = values[i];
}
KGEN_EXPORT(arguments);

extern "C" __global__ void no_arguments() {}
KGEN_EXPORT(no_arguments);
