// Storage types, loads and stores of several elements at once, and sums over a block.
// No header of CUDA's is included: none need be installed where this is compiled.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY __int_as_float(0x7f800000)

struct alignas(2) bf16 {
    u16 bits;
};
struct alignas(2) f16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest even.
template <class E> __device__ __forceinline__ E narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// What is stored: float, bf16 or f16. (As a macro, T would change the compiler's own templates.)
typedef ELEMENT T;

// N elements that are loaded and stored at once; the address must be a multiple of their size.
template <class E, int N> struct alignas(N * sizeof(E)) Pack {
    E v[N];
};

// Elements in 16 bytes.
template <class E> constexpr int WIDE = 16 / sizeof(E);

__device__ __forceinline__ bool aligned16(u64 bits) { return bits % 16 == 0; }

// What kernels report of inputs that are out of range: which, at which row, which value. The first one stays.
struct Fault {
    int kind, row, value, pad;
};
enum { TOKEN_FAULT = 1, TARGET_FAULT = 2 };

__device__ inline void report(Fault *fault, int kind, u64 row, int value) {
    if (atomicCAS(&fault->kind, 0, kind) == 0) {
        fault->row = (int)row;
        fault->value = value;
        __threadfence_system();
    }
}

// Sum over a warp, the same on all lanes, in a fixed order.
__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

// Sum over a block of whole warps, the same on all threads, in a fixed order.
__device__ inline float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    const int warps = blockDim.x / 32;
    if (warps == 1)
        return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < warps; i++)
        sum += parts[i];
    return sum;
}
