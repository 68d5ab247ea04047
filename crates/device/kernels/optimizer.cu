// Norms of gradients, the decisions of a step, AdamW. Compiled without contraction: every operation is rounded by itself, as
// on the host.

// Sums of squares of runs of 4096 elements. Eight threads serve a run: thread t of them has elements t, t + 8, ... in order.
extern "C" __global__ void norm_runs(const float *src, u64 n, double *sums) {
    const u64 run = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 8;
    const u64 first = run * 4096, lane = threadIdx.x % 8;
    const u64 end = min(n, first + 4096);
    double sum = 0;
#pragma unroll 8
    for (u64 i = first + lane; i < end; i += 8) {
        double v = src[i];
        sum += v * v;
    }
    // ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))
    sum += __shfl_xor_sync(0xffffffff, sum, 4);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    if (lane == 0 && first < n)
        sums[run] = sum;
}

// Adds the runs in order, from zero. One block; one of its threads adds what all have fetched.
extern "C" __global__ void norm_total(const double *sums, u64 runs, double *total) {
    __shared__ double fetched[1024];
    double sum = 0;
    for (u64 first = 0; first < runs; first += 1024) {
        __syncthreads();
        if (first + threadIdx.x < runs)
            fetched[threadIdx.x] = sums[first + threadIdx.x];
        __syncthreads();
        const u64 count = min((u64)1024, runs - first);
        if (threadIdx.x == 0)
            for (u64 i = 0; i < count; i++)
                sum += fetched[i];
    }
    if (threadIdx.x == 0)
        *total = sum;
}

// Slots of the scalar state, as in `ScalarSlot`.
enum {
    LOSS_SCALE,
    GOOD_STEPS,
    ADAM_STEPS,
    SKIPPED_STEPS,
    SKIP,
    GRAD_FACTOR,
    GRAD_NORM,
    LEARNING_RATE,
    BIAS_CORRECTION_1,
    BIAS_CORRECTION_2_SQRT,
    SKIPPED_IN_A_ROW,
    USED_LOSS_SCALE
};

// base^exponent by repeated squaring: the same multiplications as on the host.
__device__ double power(double base, u32 exponent) {
    double result = 1.0, square = base;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1)
            result *= square;
        square *= square;
    }
    return result;
}

extern "C" __global__ void step_scalars(const double *partials, u64 shards, u64 row, u64 units, float *s,
                                        const float *learning_rate, float clip, float beta1, float beta2, int scaling,
                                        float growth, float backoff, u32 interval, float most, float least) {
    double total = 0;
    for (u64 unit = 0; unit < units; unit++) {
        double sum = 0;
        for (u64 shard = 0; shard < shards; shard++)
            sum += partials[shard * row + unit];
        total += sum;
    }
    const float scale = s[LOSS_SCALE];
    const double norm = sqrt(total) / (double)scale;
    const bool skip = !isfinite(norm);
    s[USED_LOSS_SCALE] = scale;
    s[GRAD_NORM] = (float)norm;
    s[SKIP] = skip ? 1.0f : 0.0f;
    s[LEARNING_RATE] = *learning_rate;
    s[GRAD_FACTOR] = (float)(fmin((double)clip / (norm + 1e-6), 1.0) / (double)scale);
    if (skip) {
        s[SKIPPED_STEPS] += 1.0f;
        s[SKIPPED_IN_A_ROW] += 1.0f;
        s[GOOD_STEPS] = 0.0f;
        if (scaling)
            s[LOSS_SCALE] = fmaxf(scale * backoff, least);
        return;
    }
    s[SKIPPED_IN_A_ROW] = 0.0f;
    const float steps = s[ADAM_STEPS] + 1.0f;
    s[ADAM_STEPS] = steps;
    s[BIAS_CORRECTION_1] = (float)(1.0 - power((double)beta1, (u32)steps));
    s[BIAS_CORRECTION_2_SQRT] = (float)sqrt(1.0 - power((double)beta2, (u32)steps));
    const float good = s[GOOD_STEPS] + 1.0f;
    s[GOOD_STEPS] = good;
    if (scaling && good >= (float)interval) {
        s[LOSS_SCALE] = fminf(scale * growth, most);
        s[GOOD_STEPS] = 0.0f;
    }
}

struct Adam {
    float factor, lr, c1, c2, beta1, beta2, rest1, rest2, eps, decay;
    bool skip;
};

__device__ __forceinline__ void update(const Adam &a, float g, float &w, float &m, float &v) {
    if (a.skip)
        return;
    g = g * a.factor;
    m = a.beta1 * m + a.rest1 * g;
    v = a.beta2 * v + a.rest2 * (g * g);
    float u = (m / a.c1) / (sqrtf(v) / a.c2 + a.eps);
    w = w - a.lr * (u + a.decay * w);
}

template <class G, class W>
__device__ void adamw(float *master, float *m, float *v, const G *grad, W *weight, const float *s, u64 n, float beta1,
                      float beta2, float eps, float decay) {
    constexpr int N = 4;
    typedef Pack<float, N> F;
    const Adam a = {s[GRAD_FACTOR], s[LEARNING_RATE], s[BIAS_CORRECTION_1], s[BIAS_CORRECTION_2_SQRT], beta1, beta2,
                    1.0f - beta1,   1.0f - beta2,     eps,                  decay,                     s[SKIP] == 1.0f};
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u64 packs = 0;
    if (aligned16((u64)master | (u64)m | (u64)v) && (u64)grad % sizeof(Pack<G, N>) == 0 &&
        (u64)weight % sizeof(Pack<W, N>) == 0) {
        packs = n / N;
        for (u64 i = first; i < packs; i += step) {
            F w = ((F *)master)[i];
            if (!a.skip) {
                F m4 = ((F *)m)[i], v4 = ((F *)v)[i];
                Pack<G, N> g = ((const Pack<G, N> *)grad)[i];
#pragma unroll
                for (int j = 0; j < N; j++)
                    update(a, widen(g.v[j]), w.v[j], m4.v[j], v4.v[j]);
                ((F *)master)[i] = w;
                ((F *)m)[i] = m4;
                ((F *)v)[i] = v4;
            }
            if (weight) {
                Pack<W, N> out;
#pragma unroll
                for (int j = 0; j < N; j++)
                    out.v[j] = narrow<W>(w.v[j]);
                ((Pack<W, N> *)weight)[i] = out;
            }
        }
    }
    for (u64 i = packs * N + first; i < n; i += step) {
        if (!a.skip)
            update(a, widen(grad[i]), master[i], m[i], v[i]);
        if (weight)
            weight[i] = narrow<W>(master[i]);
    }
}

#define ADAMW(G, W)                                                                                                    \
    extern "C" __global__ void adamw_##G##_##W(float *master, float *m, float *v, const G *grad, W *weight,            \
                                               const float *s, u64 n, float beta1, float beta2, float eps,             \
                                               float decay) {                                                          \
        adamw<G, W>(master, m, v, grad, weight, s, n, beta1, beta2, eps, decay);                                       \
    }
ADAMW(float, float)
ADAMW(float, bf16)
ADAMW(float, f16)
ADAMW(bf16, float)
ADAMW(bf16, bf16)
ADAMW(bf16, f16)
ADAMW(f16, float)
ADAMW(f16, bf16)
ADAMW(f16, f16)
