// CUDA source of products of small integers; integer_gpu.py runs it.
//
// The products read values of 8 bits, or of 2 bits four to the byte and keep the unpacked ones in
// registers. They run on the integer tensor cores, which multiply 8-bit integers and add into 32 bits
// without any rounding: each column of the factor becomes a fixed-point number of signed digits to the
// base 256, every digit is multiplied on its own (split, multiply), and the digits are put
// together again at the end (combine). Integer sums are exact, so the result is the same for any
// order of the blocks.
//
// A sum over k does not care for the order of k, so the digits are stored in the order in which a
// lane has the values: of packed ones, a shift and a mask of a 32-bit word make a register of four.
//
// The splitting into exact slices is that of Ozaki, Ogita, Oishi and Rump, Numerical Algorithms 59
// (2012), 95-118; on integer tensor cores it is used by Ootomo, Ozaki and Yokota, International
// Journal of High Performance Computing Applications 38 (2024), 297-313. The left operand, 0 to 255,
// is one slice by itself. Which lane holds what is from the PTX manual, "Matrix Fragments for
// mma.m16n8k32".
//
// PER_BYTE (values of a byte, 4 or 1), TILES (eight columns of digits each, that a block
// multiplies at once, 1 to 8) and ALIGNED (whether rows begin and end at multiples of 8 bytes) are
// set when the source is compiled. Four tiles of 16 rows by eight tiles of 8 columns are 128 of the
// 255 registers that a thread can have; two blocks of four warps fill a multiprocessor's registers,
// and while one waits the other computes.

// What only a GPU has; a test replaces it.
#ifndef EMULATED
typedef unsigned int u32;

// c (16 x 8) += a (16 x 32) b (32 x 8): 8 bits without sign, 8 bits with a sign, 32-bit sums
static __device__ __forceinline__ void mma(int (&c)[4], const u32 (&a)[4], uint2 b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

static __device__ __forceinline__ void copy_16_bytes(void* to_shared, const void* from) {
    u32 to = (u32)__cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}
#endif
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned char u8;

#if PER_BYTE == 4
#define STEPS 4            // of 32 terms, one mma each: 32 bytes of a row
#define BLOCK_BYTES 64     // 256 columns, that a block of the transposed product has
#else
#define STEPS 1
#define BLOCK_BYTES 256
#endif
#define CHUNK (32 * STEPS)
#define STAGE (STEPS * TILES * 32)
#define LOW_BITS 0x03030303u

// --- digits ---------------------------------------------------------------------------------

// The bits of floats that are not negative are ordered as the floats; NaN is above infinity.
extern "C" __global__ void column_max(const double* x, i64 n_rows, i64 columns, u64* top) {
    i64 n_threads = (i64)gridDim.x * blockDim.x / columns * columns;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n_threads) return;
    u64 most = 0;
    for (i64 i = at; i < n_rows * columns; i += n_threads) {
        u64 bits = (u64)__double_as_longlong(fabs(x[i]));
        most = bits > most ? bits : most;
    }
    atomicMax(top + at % columns, most);
}

// The largest power of two by which a column still fits its digits.
static __device__ int exponent(double top, i64 n_digits) {
    double most = 127.0 * (ldexp(1.0, (int)(8 * n_digits)) - 1) / 255;
    int e;
    if (!(top > 1e-290)) return 1000;  // what most / top can be
    frexp(most / top, &e);
    return e - 1;
}

// Writes digit d of column c as column c * n_digits + d, in the order in which lanes take them.
extern "C" __global__ void split(const double* x, i64 n_rows, i64 columns, const double* top,
                                 i64 n_digits, i64 n_chunks, signed char* digits) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n_rows * columns) return;
    i64 k = at / columns, c = at % columns;
    i64 q = (i64)rint(ldexp(x[at], exponent(top[c], n_digits)));
#if PER_BYTE == 4
    // k is, from its high bits: chunk, lane of the group, word, byte, half of a byte, pair.
    i64 lane = k >> 5 & 3, word = k >> 4 & 1, byte = k >> 2 & 3, half = k >> 1 & 1, pair = k & 1;
    i64 step = (k >> 7) * STEPS + 2 * word + half;
#else
    // k is, from its high bits: chunk, lane of the group, word, byte.
    i64 step = k >> 5, lane = k >> 3 & 3, pair = k >> 2 & 1, byte = k & 3;
#endif
    for (i64 d = 0; d < n_digits; ++d) {
        i64 digit = ((q + 128) & 255) - 128;
        q = (q - digit) >> 8;
        i64 w = c * n_digits + d, tile = w >> 3;
        i64 unit = (tile / TILES * n_chunks * STEPS + step) * TILES + tile % TILES;
        digits[(unit * 32 + (w & 7) * 4 + lane) * 8 + pair * 4 + byte] = (signed char)digit;
    }
}

extern "C" __global__ void combine(const int* sums, i64 width, const double* top, i64 n_rows,
                                   i64 columns, i64 n_digits, double* out) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n_rows * columns) return;
    i64 c = at % columns;
    const int* from = sums + at / columns * width + c * n_digits;
    double sum = 0;
    for (i64 d = n_digits - 1; d >= 0; --d) sum = sum * 256 + from[d];
    bool finite = top[c] - top[c] == 0;
    out[at] += ldexp(finite ? sum : top[c] - top[c], -exponent(top[c], n_digits));
}

// --- products -------------------------------------------------------------------------------

// Bytes at, ..., at + 7 of a row. What lies behind the row may come along: its digits are zero.
static __device__ __forceinline__ uint2 load(const u8* row, i64 at, i64 row_bytes) {
    uint2 word = {0, 0};
    if (at >= row_bytes) return word;
#if ALIGNED
    word = *(const uint2*)(row + at);
#else
    // An aligned word with one byte of the array in it is in the array's allocation.
    // Two words of 64 bits instead of these three make the products up to half as slow again.
    u64 first = (u64)(row + at), end = (u64)(row + row_bytes);
    const u32* from = (const u32*)(first & ~3ull);
    u32 a = from[0], b = 0, c = 0, shift = 8 * (u32)(first & 3);
    if ((u64)(from + 1) < end) b = from[1];
    if ((u64)(from + 2) < end) c = from[2];
    word.x = __funnelshift_r(a, b, shift);
    word.y = __funnelshift_r(b, c, shift);
#endif
    return word;
}

static __device__ __forceinline__ void stage_digits(uint2* to, const uint2* digits, i64 chunk) {
    const uint2* from = digits + chunk * STAGE;
    for (int i = 2 * threadIdx.x; i < STAGE; i += 2 * blockDim.x) copy_16_bytes(to + i, from + i);
}

// Eight bytes of each of eight rows, a step apart.
static __device__ __forceinline__ void fetch(uint2 (&to)[8], const u8* x, i64 stride, i64 row,
                                             int step, i64 n_rows, i64 at, i64 row_bytes) {
#pragma unroll
    for (int r = 0; r < 8; ++r, row += step)
        to[r] = load(x + row * stride, at, row < n_rows ? row_bytes : 0);
}

// Each lane has two words of eight rows in registers. out: (n_rows, groups * TILES * 8).
extern "C" __global__ void __launch_bounds__(128, 2)
multiply(const u8* x, i64 stride, i64 n_rows, i64 row_bytes, const uint2* digits,
         i64 n_chunks, i64 groups, int* out) {
    __shared__ __align__(16) uint2 stage[2][STAGE];
    const int lane = threadIdx.x & 31, g = lane >> 2, j = lane & 3;
    const i64 group = blockIdx.x % groups;
    const i64 row = blockIdx.x / groups * 256 + (threadIdx.x >> 5) * 64 + g;
    int acc[4][TILES][4] = {};
    uint2 words[8], next[8];
    digits += group * n_chunks * STAGE;
    stage_digits(stage[0], digits, 0);
    fetch(next, x, stride, row, 8, n_rows, 8 * j, row_bytes);
    for (i64 chunk = 0; chunk < n_chunks; ++chunk) {
        wait_for_copies();
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 8; ++r) words[r] = next[r];
        if (chunk + 1 < n_chunks) {
            stage_digits(stage[(chunk + 1) & 1], digits, chunk + 1);
            fetch(next, x, stride, row, 8, n_rows, (chunk + 1) * 32 + 8 * j, row_bytes);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 a[4][4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
#if PER_BYTE == 4
                u32 upper = (step < 2 ? words[2 * t].x : words[2 * t].y) >> 4 * (step & 1);
                u32 lower = (step < 2 ? words[2 * t + 1].x : words[2 * t + 1].y) >> 4 * (step & 1);
                a[t][0] = upper & LOW_BITS;
                a[t][1] = lower & LOW_BITS;
                a[t][2] = upper >> 2 & LOW_BITS;
                a[t][3] = lower >> 2 & LOW_BITS;
#else
                a[t][0] = words[2 * t].x;
                a[t][1] = words[2 * t + 1].x;
                a[t][2] = words[2 * t].y;
                a[t][3] = words[2 * t + 1].y;
#endif
            }
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                uint2 b = stage[chunk & 1][(step * TILES + n) * 32 + lane];
#pragma unroll
                for (int t = 0; t < 4; ++t) mma(acc[t][n], a[t], b);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        if (row + 8 * r >= n_rows) continue;
        int* to = out + ((row + 8 * r) * groups + group) * (TILES * 8) + 2 * j;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            to[8 * n] = acc[r >> 1][n][2 * (r & 1)];
            to[8 * n + 1] = acc[r >> 1][n][2 * (r & 1) + 1];
        }
    }
}

// Shared memory of CHUNK rows; some bytes more now and then put the rows that the four lanes of a
// group read at once into different banks.
#if PER_BYTE == 4
#define TILE_AT(row, byte) ((row) * 64 + ((row) >> 5) * 16 + (byte))
#else
#define TILE_AT(row, byte) ((row) * 256 + ((row) >> 3) * 32 + (byte))
#endif

// Turns four rows of four bytes into four columns.
static __device__ __forceinline__ void turn_bytes(u32* to, u32 a, u32 b, u32 c, u32 d) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    to[0] = __byte_perm(ab, cd, 0x5410);
    to[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    to[2] = __byte_perm(ab, cd, 0x5410);
    to[3] = __byte_perm(ab, cd, 0x7632);
}

// Each lane has eight columns, and each chunk CHUNK rows. Blocks that share columns add to the same
// sums: out, (n_columns, groups * TILES * 8), starts as zeros.
extern "C" __global__ void __launch_bounds__(128, 2)
multiply_transposed(const u8* x, i64 stride, i64 n_rows, i64 row_bytes, i64 n_columns,
                    const uint2* digits, i64 n_chunks, i64 chunks_per_block, i64 groups, int* out) {
    __shared__ __align__(16) uint2 stage[2][STAGE];
    __shared__ __align__(16) u8 tile[2][TILE_AT(CHUNK, 0)];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
    const i64 group = blockIdx.x % groups, first_byte = blockIdx.x / groups * BLOCK_BYTES;
    const i64 begin = blockIdx.y * chunks_per_block;
    const i64 end = begin + chunks_per_block < n_chunks ? begin + chunks_per_block : n_chunks;
    const int tile_row = threadIdx.x / (BLOCK_BYTES / 8), tile_step = CHUNK / 8;
    const int tile_byte = threadIdx.x % (BLOCK_BYTES / 8) * 8;
    const i64 at = first_byte + tile_byte;
    int acc[4][TILES][4] = {};
    uint2 next[8];
    digits += group * n_chunks * STAGE;
    stage_digits(stage[begin & 1], digits, begin);
    fetch(next, x, stride, begin * CHUNK + tile_row, tile_step, n_rows, at, row_bytes);
    for (i64 chunk = begin; chunk < end; ++chunk) {
        u8* rows = tile[chunk & 1];
#pragma unroll
        for (int r = 0; r < 8; ++r)
            *(uint2*)(rows + TILE_AT(tile_row + tile_step * r, tile_byte)) = next[r];
        wait_for_copies();
        __syncthreads();
        if (chunk + 1 < end) {
            stage_digits(stage[(chunk + 1) & 1], digits, chunk + 1);
            fetch(next, x, stride, (chunk + 1) * CHUNK + tile_row, tile_step, n_rows, at,
                  row_bytes);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 a[4][4];
#if PER_BYTE == 4
            u32 of[2][2];  // of each byte and pair: four rows
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                u32 h[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    int row = 32 * j + 16 * (step >> 1) + 4 * b + 2 * (step & 1) + pair;
                    h[b] = *(const unsigned short*)(rows + TILE_AT(row, 16 * warp + 2 * g));
                }
                u32 h01 = h[0] | h[1] << 16, h23 = h[2] | h[3] << 16;
                of[0][pair] = __byte_perm(h01, h23, 0x6420);
                of[1][pair] = __byte_perm(h01, h23, 0x7531);
            }
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                a[t][0] = of[0][0] >> 2 * t & LOW_BITS;
                a[t][1] = of[1][0] >> 2 * t & LOW_BITS;
                a[t][2] = of[0][1] >> 2 * t & LOW_BITS;
                a[t][3] = of[1][1] >> 2 * t & LOW_BITS;
            }
#else
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                uint2 h[4];
                u32 columns[8];
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    h[b] = *(const uint2*)(rows + TILE_AT(8 * j + 4 * pair + b, 64 * warp + 8 * g));
                turn_bytes(columns, h[0].x, h[1].x, h[2].x, h[3].x);
                turn_bytes(columns + 4, h[0].y, h[1].y, h[2].y, h[3].y);
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    a[t][2 * pair] = columns[2 * t];
                    a[t][2 * pair + 1] = columns[2 * t + 1];
                }
            }
#endif
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                uint2 b = stage[chunk & 1][(step * TILES + n) * 32 + lane];
#pragma unroll
                for (int t = 0; t < 4; ++t) mma(acc[t][n], a[t], b);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#if PER_BYTE == 4
        i64 column = 4 * (first_byte + 16 * warp + 2 * g + (r & 1)) + (r >> 1);
#else
        i64 column = first_byte + 64 * warp + 8 * g + r;
#endif
        if (column >= n_columns) continue;
        int* to = out + (column * groups + group) * (TILES * 8) + 2 * j;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            atomicAdd(to + 8 * n, acc[r >> 1][n][2 * (r & 1)]);
            atomicAdd(to + 8 * n + 1, acc[r >> 1][n][2 * (r & 1) + 1]);
        }
    }
}
