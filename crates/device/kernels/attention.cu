// Causal attention within documents. Tiles of 32 queries and 32 keys in shared memory, sums in fp32 registers: eight threads
// serve one row of a tile, each with every eighth element of it.

constexpr int D = HEAD_DIM;
constexpr int TILE = 32;
constexpr int STRIDE = D + 1; // no two rows of a column in one bank
constexpr int EACH = D / 8;

struct Shape {
    int seq, heads, kv_heads, packed;
    float scale;
};

// Rows [first, first + TILE) of one head as fp32; rows past the end are zero.
__device__ void fetch(float (*to)[STRIDE], const T *from, u64 stride, int first, int seq) {
    for (int i = threadIdx.x; i < TILE * D; i += 256) {
        const int r = i / D, e = i % D;
        to[r][e] = first + r < seq ? widen(from[(u64)(first + r) * stride + e]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float *a, const float *b) {
    float sum = 0;
#pragma unroll 8
    for (int e = 0; e < D; e++)
        sum += a[e] * b[e];
    return sum;
}

// Sum and largest over the eight threads of a row.
__device__ __forceinline__ float row_sum(float x) {
    for (int offset = 4; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}
__device__ __forceinline__ float row_max(float x) {
    for (int offset = 4; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

// First key that any query of the tile sees.
__device__ int first_key(const int *starts, int first, int seq) {
    __shared__ int lowest;
    __syncthreads();
    if (threadIdx.x < 32) {
        const int i = first + threadIdx.x;
        const int start = i < seq ? min(max(starts[i], 0), i) : first;
        const int least = __reduce_min_sync(0xffffffff, start);
        if (threadIdx.x == 0)
            lowest = least;
    }
    __syncthreads();
    return lowest;
}

// Grid: tiles of queries, query heads, sequences.
extern "C" __global__ void __launch_bounds__(256)
    attention_forward(const T *qkv, const int *starts, T *out, float *lse, Shape s) {
    extern __shared__ float room[];
    float(*q)[STRIDE] = (float(*)[STRIDE])room, (*k)[STRIDE] = q + TILE, (*v)[STRIDE] = k + TILE;
    __shared__ float p[TILE][TILE + 1];
    const int head = blockIdx.y, kv = head / (s.heads / s.kv_heads), r = threadIdx.x / 8, lane = threadIdx.x % 8;
    // The longest rows first: the last blocks to run are then short.
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, i = first + r;
    qkv += (u64)blockIdx.z * s.seq * s.packed;
    starts += (u64)blockIdx.z * s.seq;
    const T *keys = qkv + (s.heads + kv) * D, *values = keys + s.kv_heads * D;
    fetch(q, qkv + head * D, s.packed, first, s.seq);
    const int start = i < s.seq ? min(max(starts[i], 0), i) : 0;
    float sums[EACH] = {}, highest = -INFINITY, total = 0;
    const int end = min(first + TILE, s.seq);
    for (int key = first_key(starts, first, s.seq) / TILE * TILE; key < end; key += TILE) {
        __syncthreads();
        fetch(k, keys, s.packed, key, s.seq);
        fetch(v, values, s.packed, key, s.seq);
        __syncthreads();
        float score[4], most = highest;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int j = key + lane + 8 * c;
            score[c] = i < s.seq && j <= i && j >= start ? dot(q[r], k[lane + 8 * c]) * s.scale : -INFINITY;
            most = fmaxf(most, score[c]);
        }
        most = row_max(most);
        // A row that has seen nothing yet keeps its zeros.
        const float shift = most == -INFINITY ? 0.0f : most, old = expf(highest - shift);
        float sum = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float e = expf(score[c] - shift);
            p[r][lane + 8 * c] = e;
            sum += e;
        }
        total = total * old + row_sum(sum);
        highest = most;
        __syncwarp();
#pragma unroll
        for (int e = 0; e < EACH; e++)
            sums[e] *= old;
        for (int j = 0; j < TILE; j++) {
            const float weight = p[r][j];
#pragma unroll
            for (int e = 0; e < EACH; e++)
                sums[e] += weight * v[j][lane + 8 * e];
        }
        __syncwarp();
    }
    if (i >= s.seq)
        return;
    T *to = out + (((u64)blockIdx.z * s.seq + i) * s.heads + head) * D;
#pragma unroll
    for (int e = 0; e < EACH; e++)
        to[lane + 8 * e] = narrow<T>(sums[e] / total);
    if (lane == 0)
        lse[((u64)blockIdx.z * s.heads + head) * s.seq + i] = highest + logf(total);
}

// deltas[b, head, i] = sum over elements of out * dout. One warp for each row of each head.
extern "C" __global__ void attention_deltas(const T *out, const T *dout, float *deltas, u64 rows, int heads, int seq) {
    const u64 n = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32;
    if (n >= rows * heads)
        return;
    float sum = 0;
    for (int e = threadIdx.x % 32; e < D; e += 32)
        sum += widen(out[n * D + e]) * widen(dout[n * D + e]);
    sum = warp_sum(sum);
    const u64 row = n / heads, head = n % heads;
    if (threadIdx.x % 32 == 0)
        deltas[(row / seq * heads + head) * seq + row % seq] = sum;
}

// Gradient of the queries. Grid: tiles of queries, query heads, sequences.
extern "C" __global__ void __launch_bounds__(256)
    attention_queries(const T *qkv, const int *starts, const float *lse, const float *deltas, const T *dout, T *dqkv, Shape s) {
    extern __shared__ float room[];
    float(*q)[STRIDE] = (float(*)[STRIDE])room, (*k)[STRIDE] = q + TILE, (*v)[STRIDE] = k + TILE, (*d)[STRIDE] = v + TILE;
    __shared__ float ds[TILE][TILE + 1];
    const int head = blockIdx.y, kv = head / (s.heads / s.kv_heads), r = threadIdx.x / 8, lane = threadIdx.x % 8;
    const int first = (gridDim.x - 1 - blockIdx.x) * TILE, i = first + r;
    qkv += (u64)blockIdx.z * s.seq * s.packed;
    starts += (u64)blockIdx.z * s.seq;
    const T *keys = qkv + (s.heads + kv) * D, *values = keys + s.kv_heads * D;
    fetch(q, qkv + head * D, s.packed, first, s.seq);
    fetch(d, dout + ((u64)blockIdx.z * s.seq * s.heads + head) * D, (u64)s.heads * D, first, s.seq);
    const int start = i < s.seq ? min(max(starts[i], 0), i) : 0;
    const u64 at = ((u64)blockIdx.z * s.heads + head) * s.seq + min(i, s.seq - 1);
    const float log_sum = lse[at], delta = deltas[at];
    float sums[EACH] = {};
    const int end = min(first + TILE, s.seq);
    for (int key = first_key(starts, first, s.seq) / TILE * TILE; key < end; key += TILE) {
        __syncthreads();
        fetch(k, keys, s.packed, key, s.seq);
        fetch(v, values, s.packed, key, s.seq);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int j = key + lane + 8 * c;
            float grad = 0;
            if (i < s.seq && j <= i && j >= start) {
                const float p = expf(dot(q[r], k[lane + 8 * c]) * s.scale - log_sum);
                grad = p * (dot(d[r], v[lane + 8 * c]) - delta) * s.scale;
            }
            ds[r][lane + 8 * c] = grad;
        }
        __syncwarp();
        for (int j = 0; j < TILE; j++) {
            const float weight = ds[r][j];
#pragma unroll
            for (int e = 0; e < EACH; e++)
                sums[e] += weight * k[j][lane + 8 * e];
        }
        __syncwarp();
    }
    if (i >= s.seq)
        return;
    T *to = dqkv + ((u64)blockIdx.z * s.seq + i) * s.packed + head * D;
#pragma unroll
    for (int e = 0; e < EACH; e++)
        to[lane + 8 * e] = narrow<T>(sums[e]);
}

// Gradients of keys and values, summed over the query heads of their group in order. Grid: tiles of keys, key/value heads,
// sequences.
extern "C" __global__ void __launch_bounds__(256)
    attention_keys(const T *qkv, const int *starts, const float *lse, const float *deltas, const T *dout, T *dqkv, Shape s) {
    extern __shared__ float room[];
    float(*q)[STRIDE] = (float(*)[STRIDE])room, (*k)[STRIDE] = q + TILE, (*v)[STRIDE] = k + TILE, (*d)[STRIDE] = v + TILE;
    __shared__ float p[TILE][TILE + 1], ds[TILE][TILE + 1];
    __shared__ float log_sums[TILE], delta[TILE];
    __shared__ int seen_from[TILE];
    const int kv = blockIdx.y, group = s.heads / s.kv_heads, r = threadIdx.x / 8, lane = threadIdx.x % 8;
    const int first = blockIdx.x * TILE, j = first + r, last = min(first + TILE, s.seq) - 1;
    qkv += (u64)blockIdx.z * s.seq * s.packed;
    starts += (u64)blockIdx.z * s.seq;
    const int key_column = (s.heads + kv) * D, value_column = key_column + s.kv_heads * D;
    fetch(k, qkv + key_column, s.packed, first, s.seq);
    fetch(v, qkv + value_column, s.packed, first, s.seq);
    float dk[EACH] = {}, dv[EACH] = {};
    for (int head = kv * group; head < (kv + 1) * group; head++) {
        const u64 row = ((u64)blockIdx.z * s.heads + head) * s.seq;
        for (int query = first; query < s.seq; query += TILE) {
            // Queries of documents that begin after these keys see none of them.
            if (first_key(starts, query, s.seq) > last)
                continue;
            fetch(q, qkv + head * D, s.packed, query, s.seq);
            fetch(d, dout + ((u64)blockIdx.z * s.seq * s.heads + head) * D, (u64)s.heads * D, query, s.seq);
            if (threadIdx.x < TILE) {
                const int i = query + threadIdx.x;
                log_sums[threadIdx.x] = i < s.seq ? lse[row + i] : 0.0f;
                delta[threadIdx.x] = i < s.seq ? deltas[row + i] : 0.0f;
                seen_from[threadIdx.x] = i < s.seq ? min(max(starts[i], 0), i) : s.seq;
            }
            __syncthreads();
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int n = lane + 8 * c;
                float weight = 0, grad = 0;
                if (j < s.seq && j <= query + n && j >= seen_from[n]) {
                    weight = expf(dot(q[n], k[r]) * s.scale - log_sums[n]);
                    grad = weight * (dot(d[n], v[r]) - delta[n]) * s.scale;
                }
                p[r][n] = weight;
                ds[r][n] = grad;
            }
            __syncwarp();
            for (int n = 0; n < TILE; n++) {
                const float weight = p[r][n], grad = ds[r][n];
#pragma unroll
                for (int e = 0; e < EACH; e++) {
                    dv[e] += weight * d[n][lane + 8 * e];
                    dk[e] += grad * q[n][lane + 8 * e];
                }
            }
        }
    }
    if (j >= s.seq)
        return;
    T *to = dqkv + ((u64)blockIdx.z * s.seq + j) * s.packed;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        to[key_column + lane + 8 * e] = narrow<T>(dk[e]);
        to[value_column + lane + 8 * e] = narrow<T>(dv[e]);
    }
}
