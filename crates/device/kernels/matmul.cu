// d = op(a) op(b) (+ c), for sizes and alignments that the library does not take. Blocks of 16 x 16 threads make tiles of
// 16 x 16 elements.

template <class D>
__device__ void product(const T *a, const T *b, const D *c, D *d, u64 m, u64 n, u64 k, int transpose_a, int transpose_b) {
    __shared__ float left[16][17], right[16][17];
    const u64 x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16ull + y, column = blockIdx.x * 16ull + x;
    float sum = 0;
    for (u64 start = 0; start < k; start += 16) {
        const u64 la = start + x, lb = start + y;
        left[y][x] = row < m && la < k ? widen(transpose_a ? a[la * m + row] : a[row * k + la]) : 0.0f;
        right[y][x] = column < n && lb < k ? widen(transpose_b ? b[column * k + lb] : b[lb * n + column]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int l = 0; l < 16; l++)
            sum += left[y][l] * right[l][x];
        __syncthreads();
    }
    if (row < m && column < n) {
        const u64 at = row * n + column;
        d[at] = narrow<D>(c ? sum + widen(c[at]) : sum);
    }
}

extern "C" __global__ void matmul_same(const T *a, const T *b, const T *c, T *d, u64 m, u64 n, u64 k, int transpose_a,
                                       int transpose_b) {
    product(a, b, c, d, m, n, k, transpose_a, transpose_b);
}
extern "C" __global__ void matmul_wide(const T *a, const T *b, const float *c, float *d, u64 m, u64 n, u64 k,
                                       int transpose_a, int transpose_b) {
    product(a, b, c, d, m, n, k, transpose_a, transpose_b);
}
