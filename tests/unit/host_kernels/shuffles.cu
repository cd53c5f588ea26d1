// Every shuffle, every width; and the groups of a warp that go their own ways.
#include <kgen/primitives/warp.cuh>

// out[thread][0..3]: shfl, shfl_up, shfl_down, shfl_xor of the lane number.
extern "C" __global__ void shuffle_all(int width, int amount, int* out) {
    const int lane = kgen::lane_id();
    int* mine = out + 4 * kgen::thread_rank();
    mine[0] = kgen::shfl(lane, amount, kgen::kFullMask, width);
    mine[1] = kgen::shfl_up(lane, amount, kgen::kFullMask, width);
    mine[2] = kgen::shfl_down(lane, amount, kgen::kFullMask, width);
    mine[3] = kgen::shfl_xor(lane, amount, kgen::kFullMask, width);
}
KGEN_EXPORT(shuffle_all);

// Groups of eight lanes loop a different number of times, each with its own mask.
extern "C" __global__ void independent_groups(float* out) {
    const int lane = kgen::lane_id();
    const kgen::u32 mask = kgen::warp_mask<8>();
    float value = 1.0f;
    for (int i = 0; i <= lane / 8; ++i) {
        value = kgen::lanes_sum<8>(value, mask);
        kgen::sync_warp(mask);
    }
    out[kgen::thread_rank()] = value;
}
KGEN_EXPORT(independent_groups);

// 64-bit and 16-bit values; votes.
extern "C" __global__ void widths_and_votes(double* out, kgen::u32* votes) {
    const int lane = kgen::lane_id();
    const double wide = kgen::shfl_xor(1e300 + lane * 1e290, 5);
    const short narrow = kgen::shfl(static_cast<short>(-lane), 7);
    out[2 * lane] = wide;
    out[2 * lane + 1] = narrow;
    votes[3 * lane] = kgen::ballot(lane % 3 == 0);
    votes[3 * lane + 1] = kgen::any(lane == 31);
    votes[3 * lane + 2] = kgen::all(lane < 31);
}
KGEN_EXPORT(widths_and_votes);
