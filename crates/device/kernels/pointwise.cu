// Element by element: sums, gelu, swiglu, rotary embedding.

// Runs f over n elements: y[i] = f(a[i], b[i]). Outputs may be inputs: each element is read before it is written.
template <class F> __device__ __forceinline__ void each(const T *a, const T *b, T *y, u64 n, F f) {
    constexpr int N = WIDE<T>;
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u64 packs = 0;
    if (aligned16((u64)a | (u64)b | (u64)y)) {
        packs = n / N;
        for (u64 i = first; i < packs; i += step) {
            Pack<T, N> left = ((const Pack<T, N> *)a)[i], right = ((const Pack<T, N> *)b)[i], out;
#pragma unroll
            for (int j = 0; j < N; j++)
                out.v[j] = narrow<T>(f(widen(left.v[j]), widen(right.v[j])));
            ((Pack<T, N> *)y)[i] = out;
        }
    }
    for (u64 i = packs * N + first; i < n; i += step)
        y[i] = narrow<T>(f(widen(a[i]), widen(b[i])));
}

extern "C" __global__ void add_assign(const T *src, T *dst, u64 n) {
    each(src, dst, dst, n, [](float s, float d) { return d + s; });
}

#define GELU_A 0.7978845608f // sqrt(2 / pi)
#define GELU_B 0.044715f

// x (1 + tanh u) / 2 = x / (1 + e^-2u)
extern "C" __global__ void gelu_forward(const T *x, T *y, u64 n) {
    each(x, x, y, n, [](float x, float) {
        float u = GELU_A * (x + GELU_B * x * x * x);
        return x / (1.0f + expf(-2.0f * u));
    });
}

// With s = 1 / (1 + e^-2u): dx = dy (s + 2 x s (1 - s) u')
extern "C" __global__ void gelu_backward(const T *x, const T *dy, T *dx, u64 n) {
    each(x, dy, dx, n, [](float x, float dy) {
        float s = 1.0f / (1.0f + expf(-2.0f * GELU_A * (x + GELU_B * x * x * x)));
        float du = GELU_A * (1.0f + 3.0f * GELU_B * x * x);
        return dy * (s + 2.0f * x * s * (1.0f - s) * du);
    });
}

// Runs f(row, first element of N of it) over rows of width elements.
template <int N, class F> __device__ __forceinline__ void each_in_rows(u64 rows, u64 width, F f) {
    const u64 packs = width / N;
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y)
        for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < packs; i += (u64)gridDim.x * blockDim.x)
            f(row, i * N);
}

template <int N> __device__ void swiglu(const T *x, T *y, u64 rows, u64 width) {
    typedef Pack<T, N> P;
    each_in_rows<N>(rows, width, [=](u64 row, u64 j) {
        P gate = *(const P *)(x + 2 * row * width + j), up = *(const P *)(x + (2 * row + 1) * width + j), out;
#pragma unroll
        for (int k = 0; k < N; k++) {
            float g = widen(gate.v[k]);
            out.v[k] = narrow<T>(g / (1.0f + expf(-g)) * widen(up.v[k]));
        }
        *(P *)(y + row * width + j) = out;
    });
}

extern "C" __global__ void swiglu_forward(const T *x, T *y, u64 rows, u64 width) {
    if (width % WIDE<T> == 0 && aligned16((u64)x | (u64)y))
        swiglu<WIDE<T>>(x, y, rows, width);
    else
        swiglu<1>(x, y, rows, width);
}

template <int N> __device__ void swiglu_grad(const T *x, const T *dy, T *dx, u64 rows, u64 width) {
    typedef Pack<T, N> P;
    each_in_rows<N>(rows, width, [=](u64 row, u64 j) {
        const u64 at = 2 * row * width + j;
        P gate = *(const P *)(x + at), up = *(const P *)(x + at + width), grad = *(const P *)(dy + row * width + j);
#pragma unroll
        for (int k = 0; k < N; k++) {
            float g = widen(gate.v[k]), u = widen(up.v[k]), d = widen(grad.v[k]);
            float s = 1.0f / (1.0f + expf(-g));
            gate.v[k] = narrow<T>(d * u * s * (1.0f + g * (1.0f - s)));
            up.v[k] = narrow<T>(d * g * s);
        }
        *(P *)(dx + at) = gate;
        *(P *)(dx + at + width) = up;
    });
}

extern "C" __global__ void swiglu_backward(const T *x, const T *dy, T *dx, u64 rows, u64 width) {
    if (width % WIDE<T> == 0 && aligned16((u64)x | (u64)dy | (u64)dx))
        swiglu_grad<WIDE<T>>(x, dy, dx, rows, width);
    else
        swiglu_grad<1>(x, dy, dx, rows, width);
}

// d[i, j] += bias[j]
template <class D> __device__ void bias_add(D *d, const T *bias, u64 rows, u64 columns) {
    each_in_rows<1>(rows, columns, [=](u64 row, u64 j) {
        D *at = d + row * columns + j;
        *at = narrow<D>(widen(*at) + widen(bias[j]));
    });
}
extern "C" __global__ void bias_add_same(T *d, const T *bias, u64 rows, u64 columns) { bias_add(d, bias, rows, columns); }
extern "C" __global__ void bias_add_wide(float *d, const T *bias, u64 rows, u64 columns) {
    bias_add(d, bias, rows, columns);
}

// Radians per token of each pair of elements.
struct Frequencies {
    double of[256];
};

// Rotates pairs (j, j + half) of the leading heads of each row. The angle is taken in fp64 and brought into one turn, so
// that its sine in fp32 is exact enough at any position. One thread serves one pair of all heads.
extern "C" __global__ void rope(T *x, const int *starts, u64 rows, u64 seq, u64 heads, u64 head_dim, u64 stride,
                                int inverse, Frequencies frequencies) {
    const u64 half = head_dim / 2, pairs = rows * half;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < pairs; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / half, pair = i % half;
        long long position = (long long)(row % seq) - max(starts[row], 0);
        double angle = (double)max(position, 0ll) * frequencies.of[pair];
        const double turn = 6.283185307179586;
        angle -= turn * rint(angle * (1.0 / turn));
        float sin, cos;
        sincosf((float)angle, &sin, &cos);
        if (inverse)
            sin = -sin;
        T *at = x + row * stride + pair;
        for (u64 head = 0; head < heads; head++, at += head_dim) {
            float a = widen(at[0]), b = widen(at[half]);
            at[0] = narrow<T>(a * cos - b * sin);
            at[half] = narrow<T>(b * cos + a * sin);
        }
    }
}
