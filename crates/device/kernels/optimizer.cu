// Norms of gradients, the decisions of a step, AdamW. Compiled without contraction: every operation is rounded by itself, as
// on the host.

// Runs whose squares are summed: in pieces of 4096 elements, counted over all runs of a launch.
struct NormRun {
    const float *src;
    double *partial;
    u64 len, first_piece;
};
constexpr int NORM_RUNS = 120;
struct NormRuns {
    NormRun run[NORM_RUNS];
    u64 count, pieces;
};

// A warp sums a piece: thread t has elements t, t + 32, ... in order. Then the upper half of the threads' sums is added onto
// the lower one, until one is left.
extern "C" __global__ void norm_pieces(const __grid_constant__ NormRuns runs, double *sums) {
    const u64 piece = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32;
    if (piece >= runs.pieces)
        return;
    u64 low = 0, high = runs.count;
    while (high - low > 1) {
        const u64 middle = (low + high) / 2;
        (runs.run[middle].first_piece <= piece ? low : high) = middle;
    }
    const float *src = runs.run[low].src;
    const u64 first = (piece - runs.run[low].first_piece) * 4096, end = min(runs.run[low].len, first + 4096);
    double sum = 0;
#pragma unroll 16
    for (u64 i = first + threadIdx.x % 32; i < end; i += 32) {
        double v = src[i];
        sum += v * v;
    }
    for (int width = 16; width > 0; width /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, width);
    if (threadIdx.x % 32 == 0)
        sums[piece] = sum;
}

// A block of 256 threads adds up a run's pieces: thread t has pieces t, t + 256, ... in order; then halves as above.
extern "C" __global__ void norm_totals(const __grid_constant__ NormRuns runs, const double *sums) {
    __shared__ double totals[256];
    const NormRun &run = runs.run[blockIdx.x];
    const u64 pieces = (run.len + 4095) / 4096;
    double sum = 0;
    for (u64 i = threadIdx.x; i < pieces; i += 256)
        sum += sums[run.first_piece + i];
    totals[threadIdx.x] = sum;
    for (int width = 128; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width)
            totals[threadIdx.x] += totals[threadIdx.x + width];
    }
    if (threadIdx.x == 0)
        *run.partial = totals[0];
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

// A run of parameters; its tiles are counted over all runs of a launch.
struct AdamRun {
    float *master;
    void *m, *v;
    const void *grad;
    void *weight;
    u64 len, stream, first;
    u32 first_tile;
    float decay;
};
constexpr int ADAM_RUNS = 48;
struct AdamRuns {
    AdamRun run[ADAM_RUNS];
    u64 count;
};

// Threads of a block, elements that a thread has at once, how many such packs are loaded before the first is worked on, and
// elements of a block.
constexpr int ADAM_THREADS = 256, ADAM_PACK = 4, ADAM_DEPTH = 2, ADAM_TILE = 4096;

struct Adam {
    float factor, lr, r1, r2, beta1, beta2, rest1, rest2, eps, decay;
    u32 low, high;
    bool skip;
};

// The mixing function of SplitMix64, with its increment.
__device__ u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Random bits of element i of a buffer, as on the host.
__device__ __forceinline__ u32 random_bits(const Adam &a, u64 i) {
    u32 x = (u32)i + 0x85ebca6bu * (u32)(i >> 32) + a.low;
    x = ((x ^ (x >> 16)) * 0x7feb352du) ^ a.high;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// A moment in its storage type: as it is, or rounded stochastically by 16 random bits.
template <class M> __device__ __forceinline__ M settle(float x, u32 random);
template <> __device__ __forceinline__ float settle<float>(float x, u32) { return x; }
template <> __device__ __forceinline__ bf16 settle<bf16>(float x, u32 random) {
    const u32 bits = __float_as_uint(x);
    bf16 y;
    y.bits = (u16)(x != x ? (bits >> 16) | 0x40 : (bits + random) >> 16);
    return y;
}

template <class M> constexpr bool RANDOM = sizeof(M) == 2;

template <class M, class G> __device__ __forceinline__ void update(const Adam &a, u64 at, G grad, float &w, M &m, M &v) {
    const float g = widen(grad) * a.factor;
    const float m1 = a.beta1 * widen(m) + a.rest1 * g;
    const float v1 = a.beta2 * widen(v) + a.rest2 * (g * g);
    const float u = (m1 * a.r1) / (sqrtf(v1) * a.r2 + a.eps);
    w = w - a.lr * (u + a.decay * w);
    const u32 random = RANDOM<M> ? random_bits(a, at) : 0;
    m = settle<M>(m1, random & 0xffff);
    v = settle<M>(v1, random >> 16);
}

template <class G, class M, class W>
__device__ void adamw(const AdamRuns &runs, const float *s, float beta1, float beta2, float eps) {
    constexpr int N = ADAM_PACK;
    u64 low = 0, high = runs.count;
    while (high - low > 1) {
        const u64 middle = (low + high) / 2;
        (runs.run[middle].first_tile <= blockIdx.x ? low : high) = middle;
    }
    const AdamRun &run = runs.run[low];
    const u64 key = mix(run.stream + (u64)s[ADAM_STEPS] * 0x9e3779b97f4a7c15ull);
    const Adam a = {s[GRAD_FACTOR],
                    s[LEARNING_RATE],
                    1.0f / s[BIAS_CORRECTION_1],
                    1.0f / s[BIAS_CORRECTION_2_SQRT],
                    beta1,
                    beta2,
                    1.0f - beta1,
                    1.0f - beta2,
                    eps,
                    run.decay,
                    (u32)key,
                    (u32)(key >> 32),
                    s[SKIP] == 1.0f};
    // The tile's own elements.
    const u64 begin = (u64)(blockIdx.x - run.first_tile) * ADAM_TILE, n = min(run.len - begin, (u64)ADAM_TILE);
    const u64 at = run.first + begin;
    float *master = run.master + begin;
    M *m = (M *)run.m + begin, *v = (M *)run.v + begin;
    const G *grad = (const G *)run.grad + begin;
    W *weight = run.weight ? (W *)run.weight + begin : nullptr;
    u64 packs = 0;
    if (aligned16((u64)master) && ((u64)m | (u64)v) % sizeof(Pack<M, N>) == 0 && (u64)grad % sizeof(Pack<G, N>) == 0 &&
        (u64)weight % sizeof(Pack<W, N>) == 0)
        packs = n / N;
    for (u64 first = threadIdx.x; first < packs; first += ADAM_THREADS * ADAM_DEPTH) {
        Pack<float, N> w[ADAM_DEPTH];
        Pack<M, N> m4[ADAM_DEPTH], v4[ADAM_DEPTH];
        Pack<G, N> g4[ADAM_DEPTH];
#pragma unroll
        for (int d = 0; d < ADAM_DEPTH; d++) {
            const u64 i = first + d * ADAM_THREADS;
            if (i >= packs)
                continue;
            w[d] = ((const Pack<float, N> *)master)[i];
            if (!a.skip) {
                m4[d] = ((const Pack<M, N> *)m)[i];
                v4[d] = ((const Pack<M, N> *)v)[i];
                g4[d] = ((const Pack<G, N> *)grad)[i];
            }
        }
#pragma unroll
        for (int d = 0; d < ADAM_DEPTH; d++) {
            const u64 i = first + d * ADAM_THREADS;
            if (i >= packs)
                continue;
            if (!a.skip) {
#pragma unroll
                for (int j = 0; j < N; j++)
                    update(a, at + i * N + j, g4[d].v[j], w[d].v[j], m4[d].v[j], v4[d].v[j]);
                ((Pack<float, N> *)master)[i] = w[d];
                ((Pack<M, N> *)m)[i] = m4[d];
                ((Pack<M, N> *)v)[i] = v4[d];
            }
            if (weight) {
                Pack<W, N> out;
#pragma unroll
                for (int j = 0; j < N; j++)
                    out.v[j] = narrow<W>(w[d].v[j]);
                ((Pack<W, N> *)weight)[i] = out;
            }
        }
    }
    for (u64 i = packs * N + threadIdx.x; i < n; i += ADAM_THREADS) {
        if (!a.skip)
            update(a, at + i, grad[i], master[i], m[i], v[i]);
        if (weight)
            weight[i] = narrow<W>(master[i]);
    }
}

#define ADAMW(G, M, W)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(ADAM_THREADS)                                                         \
        adamw_##G##_##M##_##W(const __grid_constant__ AdamRuns runs, const float *s, float beta1, float beta2,         \
                              float eps) {                                                                             \
        adamw<G, M, W>(runs, s, beta1, beta2, eps);                                                                    \
    }
#define ADAMW_WEIGHTS(G, M) ADAMW(G, M, float) ADAMW(G, M, bf16) ADAMW(G, M, f16)
#define ADAMW_MOMENTS(G) ADAMW_WEIGHTS(G, float) ADAMW_WEIGHTS(G, bf16)
ADAMW_MOMENTS(float)
ADAMW_MOMENTS(bf16)
ADAMW_MOMENTS(f16)
