// Gradients and scores of 16 steps of wkv, one warp: a lane has a key. r, k, d, read, back: [16][32]; u, inner: [32];
// n: [16][16].
#include <kgen/wkv/scores.cuh>

namespace {

template <class Real>
KGEN_DEVICE void gradients(const float* r, const float* k, const float* d, const float* read,
                      const float* back, const float* u, const float* inner, const float* n,
                      float* gr, float* gk, float* gw, float* gu, float* sums, float* crosses) {
    using Products = kgen::wkv::ValueProducts<Real>;
    const int lane = kgen::lane_id();
    const Products products{kgen::dynamic_smem<char>()};
    kgen::wkv::KeySteps x;
    for (int t = 0; t < 16; ++t) {
        x.r[t] = r[t * 32 + lane];
        x.k[t] = k[t * 32 + lane];
        x.d[t] = d[t * 32 + lane];
        x.state_g[t] = read[t * 32 + lane];
        x.gradient_v[t] = back[t * 32 + lane];
        if (lane < 16) {
            products.row(t)[lane] = n[t * 16 + lane];
            products.short_row(t)[lane] = n[t * 16 + lane];
        }
    }
    x.u = x.gradient_u = u[lane];
    x.inner = inner[lane];
    kgen::sync_warp();
    gu[lane] = kgen::wkv::step_gradients<false>(
        x, products, sums,
        [&](int t, float of_r, float of_k, Real of_d, Real by_decay) {
            gr[t * 32 + lane] = of_r;
            gk[t * 32 + lane] = of_k;
            gw[t * 32 + lane] = static_cast<float>(of_d * by_decay);
        },
        [&](int, int t, float of_key) { crosses[t * 32 + lane] = of_key; },
        [](kgen::wkv::KeySteps&) {});
}

}  // namespace

#define SCORES(name, Real)                                                                          \
    extern "C" __global__ void __launch_bounds__(32) name(                                         \
        const float* r, const float* k, const float* d, const float* read, const float* back,      \
        const float* u, const float* inner, const float* n, float* gr, float* gk, float* gw,       \
        float* gu, float* sums, float* crosses) {                                                  \
        gradients<Real>(r, k, d, read, back, u, inner, n, gr, gk, gw, gu, sums, crosses);               \
    }                                                                                              \
    KGEN_EXPORT(name)

SCORES(scores_fp32, float);
SCORES(scores_fp64, double);
