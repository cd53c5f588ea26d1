// Tiles written element by element, and products of their operands.
#include <kgen/chunked/swizzled_tile.cuh>
#include <kgen/primitives/block.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

namespace {

using kgen::bf16;

// out[row][chunk] = offset, then below[row][chunk], the same place by way of row row / 4 * 4.
template <int Columns>
KGEN_DEVICE void dump_offsets(int* out) {
    using Tile = kgen::SwizzledTile<bf16, Columns>;
    constexpr int kChunks = Columns / 8;
    for (int i = kgen::thread_rank(); i < 16 * kChunks; i += 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        out[i] = Tile::offset(row, chunk);
        out[16 * kChunks + i] = Tile::below(Tile::offset(row / 4 * 4, chunk), row % 4);
    }
}

// out[0] = x y^T and out[1] = x^T y of square `square` of x, y [16][Columns].
template <int Columns>
KGEN_DEVICE void multiply(const bf16* x, const bf16* y, float* out, int square) {
    using Tile = kgen::SwizzledTile<bf16, Columns>;
    __shared__ __attribute__((aligned(16))) bf16 tiles[2][Tile::kElements];
    for (int i = kgen::thread_rank(); i < 16 * Columns; i += 32) {
        const int row = i / Columns, column = i % Columns;
        const int place = Tile::offset(row, column / 8) + column % 8;
        tiles[0][place] = x[i];
        tiles[1][place] = y[i];
    }
    kgen::sync_warp();
    typename Tile::B rows[2], columns[2];
    Tile::two_rows(rows, tiles[1], square);
    Tile::two_columns(columns, tiles[1], square);
    const auto a_rows = Tile::a_rows(tiles[0], square), a_columns = Tile::a_columns(tiles[0], square);
    const kgen::MmaLane at = kgen::mma_lane();
    for (int which = 0; which < 2; ++which)
        for (int n = 0; n < 2; ++n) {
            float sums[4] = {};
            Tile::Half::template multiply<0>(sums, which == 0 ? a_rows : a_columns,
                                             which == 0 ? rows[n] : columns[n]);
            for (int i = 0; i < 4; ++i)
                out[which * 256 + (at.g + i / 2 * 8) * 16 + 8 * n + 2 * at.q + i % 2] = sums[i];
        }
}

}  // namespace

#define KGEN_TEST_TILE(columns)                                                                    \
    extern "C" __global__ void offsets_##columns(int* out) { dump_offsets<columns>(out); }         \
    KGEN_EXPORT(offsets_##columns);                                                                \
    extern "C" __global__ void multiply_##columns(const bf16* x, const bf16* y, float* out,        \
                                                  int square) {                                    \
        multiply<columns>(x, y, out, square);                                                      \
    }                                                                                              \
    KGEN_EXPORT(multiply_##columns)

KGEN_TEST_TILE(16);
KGEN_TEST_TILE(64);
KGEN_TEST_TILE(128);
KGEN_TEST_TILE(192);
KGEN_TEST_TILE(320);

#endif
