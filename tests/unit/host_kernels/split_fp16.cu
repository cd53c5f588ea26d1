// Pairs of fp16: what a warp finds out of a row, and the row split and put together again.
#include <kgen/primitives/split_fp16.cuh>

// A warp per row of 64 numbers. found[row] = tame, splits, exponent; out[row][i] = x again, from its pair.
extern "C" __global__ void split_rows(const float* x, int* found, float* out) {
    __shared__ kgen::Vec<float, 4> rows[4][16];
    const int warp = kgen::thread_rank() / 32, lane = kgen::lane_id();
    const kgen::i64 row = static_cast<kgen::i64>(blockIdx.x) * 4 + warp;
    float* mine = rows[warp][0].data;
    for (int i = lane; i < 64; i += 32) mine[i] = x[row * 64 + i];
    kgen::sync_warp();
    kgen::Magnitudes of_row;
    of_row.add_row(mine, 64);
    of_row.combine();
    kgen::u32 words[2];
    of_row.write(words);
    const kgen::Magnitudes again = kgen::Magnitudes::read(words);
    if (lane == 0) {
        found[row * 3] = again.finite();
        found[row * 3 + 1] = again.fits_split_fp16();
        found[row * 3 + 2] = again.exponent();
    }
    const float scale = kgen::power_of_two(again.exponent());
    kgen::u32 hi, lo;
    kgen::split_fp16(mine[2 * lane] * scale, mine[2 * lane + 1] * scale, hi, lo);
    const kgen::f32x2 high = kgen::unpack2<kgen::fp16>(hi), low = kgen::unpack2<kgen::fp16>(lo);
    const float sums[2] = {high.x + low.x / 2048.0f, high.y + low.y / 2048.0f};
    for (int i = 0; i < 2; ++i)
        out[row * 64 + 2 * lane + i] = kgen::scale_by(sums[i], -again.exponent());
}

KGEN_EXPORT(split_rows);

extern "C" __global__ void scale_all(const float* x, const int* exponents, float* out) {
    const int i = kgen::thread_rank();
    out[i] = kgen::scale_by(x[i], exponents[i]);
}

KGEN_EXPORT(scale_all);
