// Where words of rows of 16 lie.
#include <kgen/primitives/block.cuh>
#include <kgen/wkv7/tf32_producer.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

// out[0][row][column] = place; out[1] likewise, by way of the first eight rows.
extern "C" __global__ void places(int* out, int rows) {
    using Tile = kgen::wkv7::StepTile;
    for (int i = kgen::thread_rank(); i < 16 * rows; i += 32) {
        const int row = i / 16, column = i % 16;
        out[i] = Tile::place(row, column);
        out[16 * rows + i] = Tile::below(Tile::place(row % 8, column), row / 8);
    }
}

KGEN_EXPORT(places);

#endif
