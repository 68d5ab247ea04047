// Fill and conversions.

template <class E> __device__ void fill(E *dst, u64 n, E value) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        dst[i] = value;
}
extern "C" __global__ void fill16(u16 *dst, u64 n, u32 value) { fill(dst, n, (u16)value); }
extern "C" __global__ void fill32(u32 *dst, u64 n, u32 value) { fill(dst, n, value); }
extern "C" __global__ void fill64(double *dst, u64 n, double value) { fill(dst, n, value); }

template <class S, class D> __device__ void cast(const S *__restrict__ src, D *__restrict__ dst, u64 n) {
    constexpr int N = 4;
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u64 packs = 0;
    if ((u64)src % sizeof(Pack<S, N>) == 0 && (u64)dst % sizeof(Pack<D, N>) == 0) {
        packs = n / N;
        for (u64 i = first; i < packs; i += step) {
            Pack<S, N> from = ((const Pack<S, N> *)src)[i];
            Pack<D, N> to;
#pragma unroll
            for (int j = 0; j < N; j++)
                to.v[j] = narrow<D>(widen(from.v[j]));
            ((Pack<D, N> *)dst)[i] = to;
        }
    }
    for (u64 i = packs * N + first; i < n; i += step)
        dst[i] = narrow<D>(widen(src[i]));
}

#define CAST(S, D)                                                                                                     \
    extern "C" __global__ void cast_##S##_##D(const S *src, D *dst, u64 n) { cast<S, D>(src, dst, n); }
CAST(float, float)
CAST(float, bf16)
CAST(float, f16)
CAST(bf16, float)
CAST(bf16, bf16)
CAST(bf16, f16)
CAST(f16, float)
CAST(f16, bf16)
CAST(f16, f16)
