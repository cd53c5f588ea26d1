// Transposition through static shared memory, in a function template, and through dynamic.
#include <kgen/primitives/block.cuh>

constexpr int kTile = 16;

template <class T>
KGEN_DEVICE void transpose_tile(const T* in, T* out, int rows, int columns) {
    __shared__ T tile[kTile][kTile + 1];  // a column more, so that columns do not share a bank
    int column = blockIdx.x * kTile + threadIdx.x;
    int row = blockIdx.y * kTile + threadIdx.y;
    if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = in[row * columns + column];
    kgen::sync_block();
    column = blockIdx.y * kTile + threadIdx.x;
    row = blockIdx.x * kTile + threadIdx.y;
    if (row < columns && column < rows) out[row * rows + column] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void transpose_static(const float* in, float* out, int rows, int columns) {
    transpose_tile(in, out, rows, columns);
}
KGEN_EXPORT(transpose_static);

extern "C" __global__ void transpose_dynamic(const float* in, float* out, int rows, int columns) {
    float* tile = kgen::dynamic_smem<float>();
    int column = blockIdx.x * kTile + threadIdx.x;
    int row = blockIdx.y * kTile + threadIdx.y;
    if (row < rows && column < columns)
        tile[threadIdx.y * (kTile + 1) + threadIdx.x] = in[row * columns + column];
    kgen::sync_block();
    column = blockIdx.y * kTile + threadIdx.x;
    row = blockIdx.x * kTile + threadIdx.y;
    if (row < columns && column < rows)
        out[row * rows + column] = tile[threadIdx.x * (kTile + 1) + threadIdx.y];
}
KGEN_EXPORT(transpose_dynamic);
