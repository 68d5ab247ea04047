// Causal attention within documents on the tensor cores (after Dao 2023), for bf16 and fp16 and heads of a multiple of 8
// elements. Query i sees keys starts[i]..i. Backward goes over tiles of queries for dq and over tiles of keys for dk and dv, so
// that every sum has a fixed order. Rows are packed: query heads, key heads, value heads.
//
// A fragment of an m16n8k16 product: of the result, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. Packed
// in pairs, a result is the left operand of the next product without leaving registers.

constexpr int DIM = HEAD_DIM;
constexpr int D = (DIM + 15) / 16 * 16; // padded with zeros
constexpr int LD = D + 8;               // an odd number of 16-byte units: no two of eight rows in one bank
constexpr int WARPS = 4, THREADS = 32 * WARPS;

// 16-row tiles of a warp, and rows of the tiles that a block streams.
constexpr int FORWARD_M = D <= 64 ? 2 : 1, FORWARD_KEYS = 64;
constexpr int QUERIES_M = D <= 64 ? 2 : 1, QUERIES_KEYS = 32;
constexpr int KEYS_QUERIES = D <= 64 ? 64 : 32;
constexpr int FORWARD_ROWS = 16 * WARPS * FORWARD_M, QUERIES_ROWS = 16 * WARPS * QUERIES_M, KEYS_ROWS = 16 * WARPS;

constexpr float LOG2E = 1.4426950408889634f;

struct Shape {
    int batch, seq, heads, kv_heads;
    float scale;
    int wide; // every row starts at a multiple of 16 bytes
    __device__ u64 packed() const { return (u64)(heads + 2 * kv_heads) * DIM; }
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pair(float low, float high, bf16) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ u32 pair(float low, float high, f16) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const T *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32 (&r)[4], const T *p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

// ---- copies into shared memory, which run while the block computes ----

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void arrive() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Rows first..first + ROWS of one head; what lies outside is zero.
template <int ROWS> __device__ __forceinline__ void fetch(T *tile, const T *from, u64 stride, int first, const Shape &s) {
#pragma unroll
    for (int n = threadIdx.x; n < ROWS * (D / 8); n += THREADS) {
        const int r = n / (D / 8), e = n % (D / 8) * 8;
        T *to = tile + r * LD + e;
        if (first + r >= s.seq || e >= DIM) {
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
            continue;
        }
        const T *p = from + (u64)(first + r) * stride + e;
        if (s.wide) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(p) : "memory");
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                to[k] = p[k];
        }
    }
}

// One word each for the rows of a tile; zero past the end.
template <int ROWS> __device__ __forceinline__ void fetch_words(void *to, const void *from, int first, int seq) {
    const int r = threadIdx.x;
    if (r >= ROWS)
        return;
    if (first + r < seq)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address((u32 *)to + r)), "l"((const u32 *)from + first + r) : "memory");
    else
        ((u32 *)to)[r] = 0;
}

// ---- products of tiles ----

template <int N> __device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[n][e] = 0.0f;
}

// c += rows of `left` (16 M, from `row`) . rows of `right` (N): D elements a row.
template <int M, int N> __device__ __forceinline__ void dot_rows(float (&c)[M][N / 8][4], const T *left, int row, const T *right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        u32 a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices(a[m], left + (row + m * 16 + lane % 16) * LD + k + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            load_matrices(b, right + (n + lane / 16 * 8 + lane % 8) * LD + k + lane / 8 % 2 * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(c[m][n / 8], a[m], b[0], b[1], T());
                mma(c[m][n / 8 + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// c += p . rows of `right`: p is a result of N columns, rounded to the storage type; `right` has N rows.
template <int M, int N> __device__ __forceinline__ void add_rows(float (&c)[M][D / 8][4], const float (&p)[M][N / 8][4], const T *right) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        u32 a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                a[m][2 * h] = pair(p[m][k / 8 + h][0], p[m][k / 8 + h][1], T());
                a[m][2 * h + 1] = pair(p[m][k / 8 + h][2], p[m][k / 8 + h][3], T());
            }
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            load_matrices_turned(b, right + (k + lane % 16) * LD + n + lane / 16 * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(c[m][n / 8], a[m], b[0], b[1], T());
                mma(c[m][n / 8 + 1], a[m], b[2], b[3], T());
            }
        }
    }
}

// Writes half a fragment: rows `row` of a head, whose elements start at `to`.
__device__ __forceinline__ void store_row(T *to, const float (&c)[D / 8][4], int half, float factor, int wide) {
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
        T *p = to + n * 8 + threadIdx.x % 4 * 2;
        const float x = c[n][half * 2] * factor, y = c[n][half * 2 + 1] * factor;
        if (wide) {
            *(u32 *)p = pair(x, y, T());
        } else {
            p[0] = narrow<T>(x);
            p[1] = narrow<T>(y);
        }
    }
}

// The first key that each of ROWS queries sees, and the least and the greatest of them. Queries past the end see none.
template <int ROWS> __device__ __forceinline__ void fetch_starts(int *seen, int *bounds, const int *starts, int first, int seq) {
    const int i = first + threadIdx.x;
    int start = 0x7fffffff;
    if (threadIdx.x < ROWS) {
        if (i < seq)
            start = min(max(starts[i], 0), i);
        seen[threadIdx.x] = start;
    }
    if (threadIdx.x == 0)
        bounds[0] = 0x7fffffff, bounds[1] = 0;
    __syncthreads();
    if (threadIdx.x < ROWS && i < seq) {
        atomicMin(&bounds[0], start);
        atomicMax(&bounds[1], start);
    }
    __syncthreads();
}

// ---- forward: a block for each tile of queries, query head and sequence ----

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_forward(const T *qkv, const int *starts, T *out, float *lse, Shape s) {
    constexpr int M = FORWARD_M, KEYS = FORWARD_KEYS, ROWS = FORWARD_ROWS;
    extern __shared__ __align__(16) u16 room[];
    __shared__ int seen[ROWS], bounds[2];
    T *query = (T *)room, *keys = query + ROWS * LD, *values = keys + 2 * KEYS * LD;
    const int lanes = s.batch * s.heads, batch = blockIdx.x % lanes / s.heads, head = blockIdx.x % s.heads;
    // The longest rows first: the last blocks to run are then short.
    const int q0 = ((s.seq + ROWS - 1) / ROWS - 1 - (int)blockIdx.x / lanes) * ROWS;
    const int kv = head / (s.heads / s.kv_heads), lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * M;
    const u64 stride = s.packed();
    qkv += (u64)batch * s.seq * stride;
    const T *key = qkv + (s.heads + kv) * DIM, *value = key + s.kv_heads * DIM;
    fetch_starts<ROWS>(seen, bounds, starts + (u64)batch * s.seq, q0, s.seq);
    const int first = bounds[0] / KEYS * KEYS, end = min(q0 + ROWS, s.seq), highest = bounds[1];
    fetch<ROWS>(query, qkv + head * DIM, stride, q0, s);
    fetch<KEYS>(keys, key, stride, first, s);
    fetch<KEYS>(values, value, stride, first, s);
    commit();
    float sums[M][D / 8][4], most[M][2], total[M][2];
    const float scale = s.scale * LOG2E;
#pragma unroll
    for (int m = 0; m < M; m++) {
        clear(sums[m]);
        most[m][0] = most[m][1] = -infinity();
        total[m][0] = total[m][1] = 0.0f;
    }
    int stage = 0;
    for (int k0 = first; k0 < end; k0 += KEYS, stage ^= 1) {
        arrive();
        // The tile is there, and nobody still reads the one before, whose place the next takes.
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<KEYS>(keys + (stage ^ 1) * KEYS * LD, key, stride, k0 + KEYS, s);
            fetch<KEYS>(values + (stage ^ 1) * KEYS * LD, value, stride, k0 + KEYS, s);
        }
        commit();
        float p[M][KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            clear(p[m]);
        dot_rows<M, KEYS>(p, query, row, keys + stage * KEYS * LD);
        if (k0 + KEYS > q0 || k0 < highest) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = row + m * 16 + h * 8 + lane / 4, start = seen[r];
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int j = k0 + n * 8 + lane % 4 * 2 + e;
                            if (j > q0 + r || j < start)
                                p[m][n][h * 2 + e] = -infinity();
                        }
                }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float now = most[m][h], sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
                    now = fmaxf(now, fmaxf(p[m][n][h * 2], p[m][n][h * 2 + 1]));
                now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffff, now, 2));
                // A row that has seen nothing yet: the difference of two infinities would be no number.
                const float shift = now == -infinity() ? 0.0f : now * scale, old = exp2_fast(most[m][h] * scale - shift);
                most[m][h] = now;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; e++) {
                        p[m][n][e] = exp2_fast(p[m][n][e] * scale - shift);
                        sum += p[m][n][e];
                    }
                total[m][h] = total[m][h] * old + sum;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    sums[m][n][h * 2] *= old;
                    sums[m][n][h * 2 + 1] *= old;
                }
            }
        add_rows<M, KEYS>(sums, p, values + stage * KEYS * LD);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = total[m][h];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            const int i = q0 + row + m * 16 + h * 8 + lane / 4;
            if (i >= s.seq)
                continue;
            if (lane % 4 == 0)
                lse[((u64)batch * s.heads + head) * s.seq + i] = most[m][h] * s.scale + logf(sum);
            store_row(out + (((u64)batch * s.seq + i) * s.heads + head) * DIM, sums[m], h, 1.0f / sum, s.wide);
        }
}

// deltas[batch, head, i] = dout . out of one row of one head: a warp for each.
extern "C" __global__ void __launch_bounds__(256) flash_deltas(const T *out, const T *dout, float *deltas, Shape s) {
    const u64 n = (blockIdx.x * 256ull + threadIdx.x) / 32;
    if (n >= (u64)s.batch * s.seq * s.heads)
        return;
    float sum = 0.0f;
    for (int e = threadIdx.x % 32; e < DIM; e += 32)
        sum += widen(out[n * DIM + e]) * widen(dout[n * DIM + e]);
    sum = warp_sum(sum);
    const u64 row = n / s.heads, head = n % s.heads;
    if (threadIdx.x % 32 == 0)
        deltas[(row / s.seq * s.heads + head) * s.seq + row % s.seq] = sum;
}

// ---- dq: a block for each tile of queries, query head and sequence ----

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_queries(const T *qkv, const int *starts, const float *lse, const float *deltas, const T *dout, T *dqkv, Shape s) {
    constexpr int M = QUERIES_M, KEYS = QUERIES_KEYS, ROWS = QUERIES_ROWS;
    extern __shared__ __align__(16) u16 room[];
    __shared__ int seen[ROWS], bounds[2];
    T *query = (T *)room, *grad = query + ROWS * LD, *keys = grad + ROWS * LD, *values = keys + 2 * KEYS * LD;
    const int lanes = s.batch * s.heads, batch = blockIdx.x % lanes / s.heads, head = blockIdx.x % s.heads;
    const int q0 = ((s.seq + ROWS - 1) / ROWS - 1 - (int)blockIdx.x / lanes) * ROWS;
    const int kv = head / (s.heads / s.kv_heads), lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * M;
    const u64 stride = s.packed(), flat = (u64)s.heads * DIM;
    qkv += (u64)batch * s.seq * stride;
    const T *key = qkv + (s.heads + kv) * DIM, *value = key + s.kv_heads * DIM;
    fetch_starts<ROWS>(seen, bounds, starts + (u64)batch * s.seq, q0, s.seq);
    const int first = bounds[0] / KEYS * KEYS, end = min(q0 + ROWS, s.seq), highest = bounds[1];
    fetch<ROWS>(query, qkv + head * DIM, stride, q0, s);
    fetch<ROWS>(grad, dout + (u64)batch * s.seq * flat + head * DIM, flat, q0, s);
    fetch<KEYS>(keys, key, stride, first, s);
    fetch<KEYS>(values, value, stride, first, s);
    commit();
    float sums[M][D / 8][4], log_sum[M][2], delta[M][2];
    const float scale = s.scale * LOG2E;
#pragma unroll
    for (int m = 0; m < M; m++) {
        clear(sums[m]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = q0 + row + m * 16 + h * 8 + lane / 4;
            const u64 at = ((u64)batch * s.heads + head) * s.seq + i;
            log_sum[m][h] = i < s.seq ? lse[at] * LOG2E : 0.0f;
            delta[m][h] = i < s.seq ? deltas[at] : 0.0f;
        }
    }
    int stage = 0;
    for (int k0 = first; k0 < end; k0 += KEYS, stage ^= 1) {
        arrive();
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<KEYS>(keys + (stage ^ 1) * KEYS * LD, key, stride, k0 + KEYS, s);
            fetch<KEYS>(values + (stage ^ 1) * KEYS * LD, value, stride, k0 + KEYS, s);
        }
        commit();
        float p[M][KEYS / 8][4], dp[M][KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            clear(p[m]);
            clear(dp[m]);
        }
        dot_rows<M, KEYS>(p, query, row, keys + stage * KEYS * LD);
        dot_rows<M, KEYS>(dp, grad, row, values + stage * KEYS * LD);
        const bool masked = k0 + KEYS > q0 || k0 < highest;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = row + m * 16 + h * 8 + lane / 4, start = seen[r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int e = h * 2; e < h * 2 + 2; e++) {
                        const int j = k0 + n * 8 + lane % 4 * 2 + e % 2;
                        float weight = exp2_fast(p[m][n][e] * scale - log_sum[m][h]);
                        if (masked && (j > q0 + r || j < start))
                            weight = 0.0f;
                        p[m][n][e] = weight * (dp[m][n][e] - delta[m][h]) * s.scale;
                    }
            }
        add_rows<M, KEYS>(sums, p, keys + stage * KEYS * LD);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = q0 + row + m * 16 + h * 8 + lane / 4;
            if (i < s.seq)
                store_row(dqkv + ((u64)batch * s.seq + i) * stride + head * DIM, sums[m], h, 1.0f, s.wide);
        }
}

// ---- dk and dv: a block for each tile of keys, key/value head and sequence, over the query heads of the group in order ----
//
// Scores are held turned, a row for each key, so that they are left operands of both sums.

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_keys(const T *qkv, const int *starts, const float *lse, const float *deltas, const T *dout, T *dqkv, Shape s) {
    constexpr int QUERIES = KEYS_QUERIES, ROWS = KEYS_ROWS;
    extern __shared__ __align__(16) u16 room[];
    __shared__ int seen[2][QUERIES], last;
    __shared__ float log_sums[2][QUERIES], delta[2][QUERIES];
    T *keys = (T *)room, *values = keys + ROWS * LD, *queries = values + ROWS * LD, *grads = queries + 2 * QUERIES * LD;
    const int lanes = s.batch * s.kv_heads, group = s.heads / s.kv_heads;
    const int k0 = (int)blockIdx.x / lanes * ROWS, batch = blockIdx.x % lanes / s.kv_heads, kv = blockIdx.x % s.kv_heads;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
    const u64 stride = s.packed(), flat = (u64)s.heads * DIM;
    qkv += (u64)batch * s.seq * stride;
    dout += (u64)batch * s.seq * flat;
    starts += (u64)batch * s.seq;
    const u64 key_column = (u64)(s.heads + kv) * DIM, value_column = key_column + (u64)s.kv_heads * DIM;
    // The last query that sees any of these keys.
    if (threadIdx.x == 0)
        last = k0;
    __syncthreads();
    int mine = k0;
    for (int i = k0 + threadIdx.x; i < s.seq; i += THREADS)
        if (min(starts[i], i) < k0 + ROWS)
            mine = i;
    atomicMax(&last, mine);
    fetch<ROWS>(keys, qkv + key_column, stride, k0, s);
    fetch<ROWS>(values, qkv + value_column, stride, k0, s);
    __syncthreads();
    const int tiles = (last - k0) / QUERIES + 1, rounds = group * tiles;
    auto start_copies = [&](int round, int stage) {
        const int head = kv * group + round / tiles, q0 = k0 + round % tiles * QUERIES;
        const u64 at = ((u64)batch * s.heads + head) * s.seq;
        fetch<QUERIES>(queries + stage * QUERIES * LD, qkv + head * DIM, stride, q0, s);
        fetch<QUERIES>(grads + stage * QUERIES * LD, dout + head * DIM, flat, q0, s);
        fetch_words<QUERIES>(seen[stage], starts, q0, s.seq);
        fetch_words<QUERIES>(log_sums[stage], lse + at, q0, s.seq);
        fetch_words<QUERIES>(delta[stage], deltas + at, q0, s.seq);
    };
    start_copies(0, 0);
    commit();
    float dk[1][D / 8][4], dv[1][D / 8][4];
    clear(dk[0]);
    clear(dv[0]);
    const float scale = s.scale * LOG2E;
    for (int round = 0; round < rounds; round++) {
        const int stage = round % 2, q0 = k0 + round % tiles * QUERIES;
        arrive();
        // Each thread asks for the row that it copied itself; then all have all.
        const bool later = threadIdx.x < QUERIES && seen[stage][threadIdx.x] > k0;
        const bool masked = __syncthreads_or(later) || q0 < k0 + ROWS;
        if (round + 1 < rounds)
            start_copies(round + 1, stage ^ 1);
        commit();
        float p[1][QUERIES / 8][4], dp[1][QUERIES / 8][4];
        clear(p[0]);
        clear(dp[0]);
        dot_rows<1, QUERIES>(p, keys, row, queries + stage * QUERIES * LD);
        dot_rows<1, QUERIES>(dp, values, row, grads + stage * QUERIES * LD);
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int r = n * 8 + lane % 4 * 2 + e, i = q0 + r, start = min(seen[stage][r], i);
                const float log_sum = log_sums[stage][r] * LOG2E, shift = delta[stage][r];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int j = k0 + row + h * 8 + lane / 4, c = h * 2 + e;
                    float weight = exp2_fast(p[0][n][c] * scale - log_sum);
                    if (masked && (j > i || j < start))
                        weight = 0.0f;
                    p[0][n][c] = weight;
                    dp[0][n][c] = weight * (dp[0][n][c] - shift) * s.scale;
                }
            }
        add_rows<1, QUERIES>(dv, p, grads + stage * QUERIES * LD);
        add_rows<1, QUERIES>(dk, dp, queries + stage * QUERIES * LD);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int j = k0 + row + h * 8 + lane / 4;
        if (j >= s.seq)
            continue;
        T *to = dqkv + ((u64)batch * s.seq + j) * stride;
        store_row(to + key_column, dk[0], h, 1.0f, s.wide);
        store_row(to + value_column, dv[0], h, 1.0f, s.wide);
    }
}
