// Embedding, cross-entropy, sums over rows.

__device__ __forceinline__ u64 position_of(u64 row, u64 seq, const int *starts) {
    long long position = (long long)(row % seq) - max(starts[row], 0);
    return (u64)max(position, 0ll);
}

// y[i] = table[tokens[i]] (+ positions[..]); one block for each row.
extern "C" __global__ void embedding_forward(const int *tokens, const int *starts, const T *table, const T *positions, T *y,
                                             u64 seq, u64 width, u64 vocabulary, Fault *fault) {
    const u64 row = blockIdx.x;
    const int token = tokens[row];
    if (token < 0 || (u64)token >= vocabulary) {
        if (threadIdx.x == 0)
            report(fault, TOKEN_FAULT, row, token);
        return;
    }
    const T *from = table + token * width;
    const T *place = positions ? positions + position_of(row, seq, starts) * width : 0;
    T *to = y + row * width;
    constexpr int N = WIDE<T>;
    typedef Pack<T, N> P;
    u64 packs = 0;
    if (aligned16((u64)from | (u64)place | (u64)to)) {
        packs = width / N;
        for (u64 j = threadIdx.x; j < packs; j += blockDim.x) {
            P a = ((const P *)from)[j];
            if (place) {
                P b = ((const P *)place)[j];
#pragma unroll
                for (int k = 0; k < N; k++)
                    a.v[k] = narrow<T>(widen(a.v[k]) + widen(b.v[k]));
            }
            ((P *)to)[j] = a;
        }
    }
    for (u64 j = packs * N + threadIdx.x; j < width; j += blockDim.x)
        to[j] = place ? narrow<T>(widen(from[j]) + widen(place[j])) : from[j];
}

// Rows of one key, in order: threads look at as many rows at a time as there are threads, and those that match are listed in
// order. Then f(list, count) is called by all threads.
template <class M, class F> __device__ void matching_rows(u64 first, u64 rows, M matches, F f) {
    __shared__ u32 list[256];
    __shared__ u32 counts[8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u64 start = first; start < rows; start += 256) {
        const u64 row = start + threadIdx.x;
        const bool match = row < rows && matches(row);
        const u32 ballot = __ballot_sync(0xffffffff, match);
        if (lane == 0)
            counts[warp] = __popc(ballot);
        __syncthreads();
        u32 before = 0, count = 0;
        for (u32 w = 0; w < 8; w++) {
            before += w < warp ? counts[w] : 0;
            count += counts[w];
        }
        if (match)
            list[before + __popc(ballot & ((1u << lane) - 1))] = (u32)row;
        __syncthreads();
        if (count > 0)
            f(list, count);
        __syncthreads();
    }
}

// Adds the listed rows of dy to one row of a table, in order.
__device__ void add_rows(const T *dy, float *to, u64 width, const u32 *list, u32 count) {
    for (u64 j = threadIdx.x; j < width; j += blockDim.x) {
        float sum = to[j];
#pragma unroll 4
        for (u32 i = 0; i < count; i++)
            sum += widen(dy[list[i] * width + j]);
        to[j] = sum;
    }
}

// Blocks of 256 threads. Block i adds the gradients of all rows with row i's token, if row i is the first of them.
extern "C" __global__ void embedding_backward(const int *tokens, const T *dy, float *table, u64 rows, u64 width,
                                              u64 vocabulary, Fault *fault) {
    const u64 mine = blockIdx.x;
    const int token = tokens[mine];
    if (token < 0 || (u64)token >= vocabulary) {
        if (threadIdx.x == 0)
            report(fault, TOKEN_FAULT, mine, token);
        return;
    }
    for (u64 start = 0; start < mine; start += 1024) {
        bool earlier = false;
#pragma unroll
        for (u64 k = 0; k < 4; k++) {
            const u64 row = start + k * 256 + threadIdx.x;
            earlier |= row < mine && tokens[row] == token;
        }
        if (__syncthreads_or(earlier))
            return;
    }
    matching_rows(
        mine, rows, [=](u64 row) { return tokens[row] == token; },
        [=](const u32 *list, u32 count) { add_rows(dy, table + token * width, width, list, count); });
}

// Block i of 256 threads adds the gradients of all rows at position i of their document.
extern "C" __global__ void positions_backward(const int *starts, const T *dy, float *positions, u64 rows, u64 seq,
                                              u64 width) {
    const u64 mine = blockIdx.x;
    matching_rows(
        0, rows, [=](u64 row) { return position_of(row, seq, starts) == mine; },
        [=](const u32 *list, u32 count) { add_rows(dy, positions + mine * width, width, list, count); });
}

// partials[part, j] = sum over the part's rows of dy[i, j]. Blocks of 32 x 8 threads: 32 groups of N columns, and eight
// threads that take the part's rows in turn and are added in order.
template <int N> __device__ void column_sums(const T *dy, float *partials, u64 rows, u64 columns, u64 rows_per_part) {
    __shared__ float room[8][32 * N];
    const u64 j = (blockIdx.x * 32ull + threadIdx.x) * N, part = blockIdx.y;
    const u64 end = min(rows, (part + 1) * rows_per_part);
    float sums[N] = {};
    if (j < columns)
        for (u64 i = part * rows_per_part + threadIdx.y; i < end; i += 8) {
            Pack<T, N> d = *(const Pack<T, N> *)(dy + i * columns + j);
#pragma unroll
            for (int k = 0; k < N; k++)
                sums[k] += widen(d.v[k]);
        }
#pragma unroll
    for (int k = 0; k < N; k++)
        room[threadIdx.y][threadIdx.x * N + k] = sums[k];
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * N; c += 256) {
        const u64 column = blockIdx.x * 32ull * N + c;
        if (column >= columns)
            continue;
        float sum = 0;
        for (int r = 0; r < 8; r++)
            sum += room[r][c];
        partials[part * columns + column] = sum;
    }
}
extern "C" __global__ void column_sums_single(const T *dy, float *partials, u64 rows, u64 columns, u64 rows_per_part) {
    column_sums<1>(dy, partials, rows, columns, rows_per_part);
}
// columns must be a multiple of the elements in 16 bytes, and dy must be aligned to them.
extern "C" __global__ void column_sums_wide(const T *dy, float *partials, u64 rows, u64 columns, u64 rows_per_part) {
    column_sums<WIDE<T>>(dy, partials, rows, columns, rows_per_part);
}

// total[j] += sum over parts, in order, of partials[part * stride + j]. Blocks of 32 x 8 threads: each of eight threads adds a
// run of parts, and the runs are added in order.
extern "C" __global__ void add_parts(const float *partials, float *total, u64 parts, u64 stride, u64 columns) {
    __shared__ float room[8][32];
    const u64 j = blockIdx.x * 32ull + threadIdx.x, run = (parts + 7) / 8;
    const u64 end = min(parts, (threadIdx.y + 1) * run);
    float sum = 0;
    if (j < columns) {
#pragma unroll 4
        for (u64 part = threadIdx.y * run; part < end; part++)
            sum += partials[part * stride + j];
    }
    room[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && j < columns) {
        float value = total[j];
        for (int r = 0; r < 8; r++)
            value += room[r][threadIdx.x];
        total[j] = value;
    }
}

// Largest element and sum of e^(x - largest) of a part of a row.
struct Softmax {
    float highest, sum;
    __device__ void add(float x) {
        if (x > highest) {
            sum = sum * expf(highest - x) + 1.0f;
            highest = x;
        } else {
            sum += expf(x - highest);
        }
    }
    __device__ void merge(Softmax other) {
        const float most = fmaxf(highest, other.highest);
        sum = sum * expf(highest - most) + other.sum * expf(other.highest - most);
        highest = most;
    }
};

__device__ Softmax block_softmax(Softmax mine) {
    __shared__ Softmax parts[32];
    for (int offset = 16; offset > 0; offset /= 2) {
        Softmax other = {__shfl_down_sync(0xffffffff, mine.highest, offset), __shfl_down_sync(0xffffffff, mine.sum, offset)};
        mine.merge(other);
    }
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = mine;
    __syncthreads();
    Softmax all = parts[0];
    for (int i = 1; i < blockDim.x / 32; i++)
        all.merge(parts[i]);
    return all;
}

// Runs f(pointer to N elements, first column) over a row that may start anywhere: single elements up to the first address that
// is a multiple of 16, packs of N, single elements to the end.
template <class One, class Many> __device__ void over_row(T *row, u64 n, One one, Many many) {
    constexpr int N = WIDE<T>;
    const u64 lead = min(n, (u64)((16 - (u64)row % 16) % 16 / sizeof(T)));
    const u64 packs = (n - lead) / N;
    for (u64 j = threadIdx.x; j < lead; j += blockDim.x)
        one(row + j, j);
    for (u64 i = threadIdx.x; i < packs; i += blockDim.x)
        many((Pack<T, N> *)(row + lead) + i, lead + i * N);
    for (u64 j = lead + packs * N + threadIdx.x; j < n; j += blockDim.x)
        one(row + j, j);
}

// One block for each row: its loss, and with `backward` its gradient over the logits.
extern "C" __global__ void cross_entropy(T *logits, const int *targets, float *row_losses, const float *scale, float factor,
                                         u64 vocabulary, int backward, Fault *fault) {
    constexpr int N = WIDE<T>;
    const u64 row = blockIdx.x;
    const int target = targets[row];
    T *x = logits + row * vocabulary;
    if (target < 0 || (u64)target >= vocabulary) {
        if (threadIdx.x == 0) {
            row_losses[row] = 0.0f;
            if (target >= 0)
                report(fault, TARGET_FAULT, row, target);
        }
        if (backward) {
            const T zero = narrow<T>(0.0f);
            over_row(
                x, vocabulary, [=](T *at, u64) { *at = zero; },
                [=](Pack<T, N> *at, u64) {
                    Pack<T, N> out;
#pragma unroll
                    for (int k = 0; k < N; k++)
                        out.v[k] = zero;
                    *at = out;
                });
        }
        return;
    }
    // The lowest finite number, not minus infinity: a difference of infinities would be no number.
    Softmax mine = {-3.402823466e38f, 0.0f};
    over_row(
        x, vocabulary, [&](T *at, u64) { mine.add(widen(*at)); },
        [&](Pack<T, N> *at, u64) {
            Pack<T, N> a = *at;
#pragma unroll
            for (int k = 0; k < N; k++)
                mine.add(widen(a.v[k]));
        });
    const float at_target = widen(x[target]);
    const Softmax all = block_softmax(mine);
    if (threadIdx.x == 0)
        row_losses[row] = logf(all.sum) + all.highest - at_target;
    if (!backward)
        return;
    const float whole = factor * *scale, each = whole / all.sum;
    auto gradient = [=](float x, u64 j) {
        float p = expf(x - all.highest) * each;
        return narrow<T>(j == (u64)target ? p - whole : p);
    };
    // No thread may write the target before all have read it.
    __syncthreads();
    over_row(
        x, vocabulary, [=](T *at, u64 j) { *at = gradient(widen(*at), j); },
        [=](Pack<T, N> *at, u64 j) {
            Pack<T, N> a = *at;
#pragma unroll
            for (int k = 0; k < N; k++)
                a.v[k] = gradient(widen(a.v[k]), j + k);
            *at = a;
        });
}

// loss += the rows' losses, in row order. One block; one of its threads adds what all have fetched.
extern "C" __global__ void add_losses(const float *row_losses, u64 rows, double *loss) {
    __shared__ float fetched[1024];
    double sum = 0;
    for (u64 first = 0; first < rows; first += 1024) {
        __syncthreads();
        if (first + threadIdx.x < rows)
            fetched[threadIdx.x] = row_losses[first + threadIdx.x];
        __syncthreads();
        const u64 count = min((u64)1024, rows - first);
        if (threadIdx.x == 0)
            for (u64 i = 0; i < count; i++)
                sum += (double)fetched[i];
    }
    if (threadIdx.x == 0)
        *loss += sum;
}
