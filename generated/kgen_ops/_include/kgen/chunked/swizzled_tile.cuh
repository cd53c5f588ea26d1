// Tiles of 16 rows of 16-bit values in shared memory, read by ldmatrix without bank conflicts and without padding.
//
// Layout: a row has Columns elements in chunks of 8 (16 bytes); Columns is 16 or a multiple of 64. In groups of 8
// chunks (128 bytes, all banks), chunk c of row i lies at place
//
//     Columns 16: c ^ swizzle(i) of group i % 4
//     others:     c ^ swizzle(i), in the row's own groups
//     swizzle(i) = 4 * (i / 4 % 2) + 2 * (i / 8 ^ i / 2 % 2) + i % 2
//
// Bank conflicts: none where a warp reads one chunk of rows 0-7 or 8-15 (ldmatrix), none where it accesses words
// (g, 2q) of an accumulator, none where it accesses a pair of chunks (2c, 2c + 1) of rows i, i + 4, i + 8, i + 12, or
// of i, i + 2, i + 4, i + 6.
//
// Operands of products with k = 16, from a square of 16 x 16 elements; the names are those of HalfOperands:
//
//     a_rows       rows are m, columns k        two_rows       two operands B: rows are n, columns k
//     a_columns    columns are m, rows k        two_columns    two operands B: columns are n, rows k
#pragma once

#include "kgen/chunked/chunk_mma.cuh"

namespace kgen {

template <class T, int Columns>
struct SwizzledTile {
    static_assert(sizeof(T) == 2 && (Columns == 16 || Columns % 64 == 0),
                  "the swizzle permutes 2 or 8 chunks of 16 bytes");
    using Half = HalfOperands<T>;
    using A = typename Half::A;
    using B = typename Half::B;
    static constexpr int kElements = 16 * Columns;

    // The element at which a chunk of a row begins.
    static KGEN_DEVICE int offset(int row, int chunk) {
        const int swizzle = 4 * (row / 4 % 2) + 2 * ((row / 8) ^ (row / 2 % 2)) + row % 2;
        return (Columns == 16 ? row % 4 * 64 : row * Columns) + 8 * (chunk ^ swizzle);
    }

    // The element `rows` (0 to 3) rows below an element of row 0, 4, 8 or 12, in the same column.
    static KGEN_DEVICE int below(int element, int rows) {
        return (element ^ 8 * rows) + rows * max(Columns, 64);
    }

    // The element `square` squares to the right of an element of the first square, in the same row.
    static KGEN_DEVICE int beside(int element, int square) {
        // Rows of a power of two of elements begin where the bits of all squares are clear. Others do not: there only
        // the four squares of a group of 128 bytes differ by bits alone.
        if constexpr ((Columns & (Columns - 1)) == 0) {
            return element ^ 16 * square;
        } else {
            return (element ^ 16 * (square % 4)) + 64 * (square / 4);
        }
    }

    // `square`: which of the squares side by side in the tile.
    static KGEN_DEVICE A a_rows(const T* tile, int square = 0) {
        A a;
        ldmatrix<4>(a.pair, tile + beside(rows_first(), square));
        return a;
    }
    static KGEN_DEVICE A a_columns(const T* tile, int square = 0) {
        A a;
        ldmatrix<4, true>(a.pair, tile + beside(columns_first(), square));
        return a;
    }
    static KGEN_DEVICE void two_rows(B (&b)[2], const T* tile, int square = 0) {
        u32 words[4];
        ldmatrix<4>(words, tile + beside(columns_first(), square));
        Half::split(b, words);
    }
    static KGEN_DEVICE void two_columns(B (&b)[2], const T* tile, int square = 0) {
        u32 words[4];
        ldmatrix<4, true>(words, tile + beside(rows_first(), square));
        Half::split(b, words);
    }

    // The row of 8 elements whose address a lane passes to ldmatrix: matrices of rows 0-7, 8-15 of the first 8 columns,
    // then of the others; or of the first and the others of rows 0-7, then of rows 8-15.
    static KGEN_DEVICE int rows_first() {
        const int lane = lane_id();
        return offset(lane % 16, lane / 16);
    }
    static KGEN_DEVICE int columns_first() {
        const int lane = lane_id();
        return offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }
};

}  // namespace kgen
