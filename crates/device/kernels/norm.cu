// Layer norm and RMS norm. A block works on one row at a time; a thread always has the same columns of it.

// Runs f(first of N columns) over a row's columns that are this thread's.
template <int N, class F> __device__ __forceinline__ void columns(u64 width, F f) {
    for (u64 j = threadIdx.x * N; j < width; j += blockDim.x * N)
        f(j);
}

template <int N>
__device__ void forward(const T *x, const T *residual, T *sum, const T *weight, const T *bias, T *y, float *mean,
                        float *rstd, u64 width, float eps, int layer) {
    typedef Pack<T, N> P;
    const u64 row = blockIdx.x, at = row * width;
    const T *in = residual ? sum : x;
    float total = 0;
    columns<N>(width, [&](u64 j) {
        P a = *(const P *)(x + at + j);
        if (residual) {
            P b = *(const P *)(residual + at + j);
#pragma unroll
            for (int k = 0; k < N; k++)
                a.v[k] = narrow<T>(widen(a.v[k]) + widen(b.v[k]));
            // What later readers see is the rounded sum; statistics are taken of that.
            *(P *)(sum + at + j) = a;
        }
#pragma unroll
        for (int k = 0; k < N; k++)
            total += layer ? widen(a.v[k]) : widen(a.v[k]) * widen(a.v[k]);
    });
    total = block_sum(total) / (float)width;
    float m = 0, variance = total;
    if (layer) {
        m = total;
        float squares = 0;
        columns<N>(width, [&](u64 j) {
            P a = *(const P *)(in + at + j);
#pragma unroll
            for (int k = 0; k < N; k++)
                squares += (widen(a.v[k]) - m) * (widen(a.v[k]) - m);
        });
        variance = block_sum(squares) / (float)width;
    }
    const float r = 1.0f / sqrtf(variance + eps);
    columns<N>(width, [&](u64 j) {
        P a = *(const P *)(in + at + j), w = *(const P *)(weight + j), out;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float v = (widen(a.v[k]) - m) * r * widen(w.v[k]);
            if (bias)
                v += widen(bias[j + k]);
            out.v[k] = narrow<T>(v);
        }
        *(P *)(y + at + j) = out;
    });
    if (threadIdx.x == 0) {
        rstd[row] = r;
        if (mean)
            mean[row] = m;
    }
}

// One block for each row; residual, sum, bias and mean may be null.
extern "C" __global__ void norm_forward(const T *x, const T *residual, T *sum, const T *weight, const T *bias, T *y,
                                        float *mean, float *rstd, u64 width, float eps, int layer) {
    const u64 all = (u64)x | (u64)residual | (u64)sum | (u64)weight | (u64)y;
    if (width % WIDE<T> == 0 && aligned16(all))
        forward<WIDE<T>>(x, residual, sum, weight, bias, y, mean, rstd, width, eps, layer);
    else
        forward<1>(x, residual, sum, weight, bias, y, mean, rstd, width, eps, layer);
}

template <int N>
__device__ void backward(const T *x, const T *weight, const float *mean, const float *rstd, const T *dy, const T *carry,
                         T *dx, float *partials, u64 rows, u64 width, int layer, float *sums) {
    typedef Pack<T, N> P;
    float *dweight = sums, *dbias = sums + width;
    columns<N>(width, [&](u64 j) {
        for (int k = 0; k < N; k++)
            dweight[j + k] = dbias[j + k] = 0;
    });
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 at = row * width;
        const float m = mean ? mean[row] : 0.0f, r = rstd[row];
        float plain = 0, weighted = 0;
        columns<N>(width, [&](u64 j) {
            P a = *(const P *)(x + at + j), w = *(const P *)(weight + j), d = *(const P *)(dy + at + j);
#pragma unroll
            for (int k = 0; k < N; k++) {
                float scaled = widen(d.v[k]) * widen(w.v[k]);
                plain += scaled;
                weighted += scaled * ((widen(a.v[k]) - m) * r);
            }
        });
        plain = layer ? block_sum(plain) / (float)width : 0.0f;
        weighted = block_sum(weighted) / (float)width;
        columns<N>(width, [&](u64 j) {
            P a = *(const P *)(x + at + j), w = *(const P *)(weight + j), d = *(const P *)(dy + at + j), c, out;
            if (carry)
                c = *(const P *)(carry + at + j);
#pragma unroll
            for (int k = 0; k < N; k++) {
                float xhat = (widen(a.v[k]) - m) * r, grad = widen(d.v[k]);
                dweight[j + k] += grad * xhat;
                dbias[j + k] += grad;
                float v = (grad * widen(w.v[k]) - plain - xhat * weighted) * r;
                out.v[k] = narrow<T>(carry ? v + widen(c.v[k]) : v);
            }
            *(P *)(dx + at + j) = out;
        });
    }
    float *mine = partials + blockIdx.x * 2 * width;
    if (mine != sums)
        columns<N>(width, [&](u64 j) {
            for (int k = 0; k < N; k++) {
                mine[j + k] = dweight[j + k];
                mine[width + j + k] = dbias[j + k];
            }
        });
}

// Blocks take rows in turn and leave their sums over them in partials: [blocks, 2, width]. They are kept in shared memory
// when shared is not 0. mean and carry may be null; dx may be dy or carry.
extern "C" __global__ void norm_backward(const T *x, const T *weight, const float *mean, const float *rstd, const T *dy,
                                         const T *carry, T *dx, float *partials, u64 rows, u64 width, int layer,
                                         int shared) {
    extern __shared__ float room[];
    float *sums = shared ? room : partials + blockIdx.x * 2 * width;
    const u64 all = (u64)x | (u64)weight | (u64)dy | (u64)carry | (u64)dx;
    if (width % WIDE<T> == 0 && aligned16(all))
        backward<WIDE<T>>(x, weight, mean, rstd, dy, carry, dx, partials, rows, width, layer, sums);
    else
        backward<1>(x, weight, mean, rstd, dy, carry, dx, partials, rows, width, layer, sums);
}
