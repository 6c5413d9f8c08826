/* The weighted sum of the signed pieces of a tensor and its sum of squares, in one pass over its memory.
 *
 * Both are summed in double, in sixteen lanes that are joined in a fixed order: the result does not depend on the
 * instruction set. Squares of floats are exact in double, so it makes no difference whether a processor rounds between
 * multiplication and addition. The library does not use Python, so any interpreter can load it.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef struct {
    double sum[LANES], square[LANES];
} lanes;

/* Sums `count` elements, a multiple of LANES. `signs`: one bit per element, from the lowest bit of the first byte. */
typedef void kernel(const void *data, const uint8_t *signs, size_t count, lanes *result);

/* One page ahead: the hardware prefetcher stops at the page boundary. Prefetching past the end is harmless. */
#define PREFETCH_BYTES 4096
#define PREFETCH(data, at, type) __builtin_prefetch((const char *)(data) + (at) * SIZE_OF_##type + PREFETCH_BYTES)
#define SIZE_OF_float32 4
#define SIZE_OF_bfloat16 2

/* For each byte of sign bits, the masks that flip the signs of eight floats: a set bit keeps the sign. */
typedef uint32_t words __attribute__((vector_size(32)));
static words sign_masks[256];

static void fill_sign_masks(void)
{
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0; bit < 8; bit++)
            sign_masks[byte][bit] = byte >> bit & 1 ? 0 : UINT32_C(0x80000000);
}

/* Any processor: vector types of the compiler. */

typedef uint16_t halves __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(16)));
typedef double doubles __attribute__((vector_size(32)));

static inline words words_of_float32(const void *data, size_t at)
{
    words result;
    memcpy(&result, (const float *)data + at, sizeof result);
    return result;
}

/* A bfloat16 is the upper half of a float. */
static inline words words_of_bfloat16(const void *data, size_t at)
{
    halves upper;
    memcpy(&upper, (const uint16_t *)data + at, sizeof upper);
    return __builtin_convertvector(upper, words) << 16;
}

#define FOR_ANY(type)                                                                                  \
    static void any_##type(const void *data, const uint8_t *signs, size_t count, lanes *result)        \
    {                                                                                                  \
        doubles sum[4] = {{0}}, square[4] = {{0}};                                                     \
        for (size_t at = 0; at < count; at += LANES) {                                                 \
            floats part[4];                                                                            \
            PREFETCH(data, at, type);                                                                  \
            const words low = words_of_##type(data, at) ^ sign_masks[signs[at / 8]];                   \
            const words high = words_of_##type(data, at + 8) ^ sign_masks[signs[at / 8 + 1]];          \
            memcpy(part, &low, sizeof low);                                                            \
            memcpy(part + 2, &high, sizeof high);                                                      \
            for (int four = 0; four < 4; four++) {                                                     \
                const doubles wide = __builtin_convertvector(part[four], doubles);                     \
                sum[four] += wide;                                                                     \
                square[four] += wide * wide;                                                           \
            }                                                                                          \
        }                                                                                              \
        memcpy(result->sum, sum, sizeof sum);                                                          \
        memcpy(result->square, square, sizeof square);                                                 \
    }

FOR_ANY(float32)
FOR_ANY(bfloat16)

#if defined(__x86_64__) && defined(__GNUC__)

/* The same with intrinsics: the compiler's own conversion to double is half as fast. */

#include <immintrin.h>

#define WITH_AVX2 __attribute__((target("avx2,fma")))
#define WITH_AVX512 __attribute__((target("avx512f,avx2,fma")))

WITH_AVX2 static inline __m256 eight_of_float32(const void *data, size_t at)
{
    return _mm256_loadu_ps((const float *)data + at);
}

WITH_AVX2 static inline __m256 eight_of_bfloat16(const void *data, size_t at)
{
    const __m128i upper = _mm_loadu_si128((const __m128i *)((const uint16_t *)data + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16));
}

#define FOR_AVX2(type)                                                                                 \
    WITH_AVX2 static void avx2_##type(const void *data, const uint8_t *signs, size_t count,            \
                                      lanes *result)                                                   \
    {                                                                                                  \
        __m256d sum[4], square[4];                                                                     \
        for (int four = 0; four < 4; four++)                                                           \
            sum[four] = square[four] = _mm256_setzero_pd();                                            \
        for (size_t at = 0; at < count; at += LANES) {                                                 \
            PREFETCH(data, at, type);                                                                  \
            for (int half = 0; half < 2; half++) {                                                     \
                const __m256 turn = _mm256_load_ps((const float *)&sign_masks[signs[at / 8 + half]]);  \
                const __m256 eight = _mm256_xor_ps(eight_of_##type(data, at + 8 * half), turn);        \
                const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(eight));                    \
                const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(eight, 1));                 \
                sum[2 * half] = _mm256_add_pd(sum[2 * half], low);                                     \
                sum[2 * half + 1] = _mm256_add_pd(sum[2 * half + 1], high);                            \
                square[2 * half] = _mm256_fmadd_pd(low, low, square[2 * half]);                        \
                square[2 * half + 1] = _mm256_fmadd_pd(high, high, square[2 * half + 1]);              \
            }                                                                                          \
        }                                                                                              \
        for (int four = 0; four < 4; four++) {                                                         \
            _mm256_storeu_pd(result->sum + 4 * four, sum[four]);                                       \
            _mm256_storeu_pd(result->square + 4 * four, square[four]);                                 \
        }                                                                                              \
    }

FOR_AVX2(float32)
FOR_AVX2(bfloat16)

WITH_AVX512 static inline __m512i sixteen_of_float32(const void *data, size_t at)
{
    return _mm512_loadu_si512((const float *)data + at);
}

WITH_AVX512 static inline __m512i sixteen_of_bfloat16(const void *data, size_t at)
{
    const __m256i upper = _mm256_loadu_si256((const __m256i *)((const uint16_t *)data + at));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16);
}

#define FOR_AVX512(type)                                                                               \
    WITH_AVX512 static void avx512_##type(const void *data, const uint8_t *signs, size_t count,        \
                                          lanes *result)                                               \
    {                                                                                                  \
        const __m512i sign = _mm512_set1_epi32((int)UINT32_C(0x80000000));                             \
        __m512d sum[2], square[2];                                                                     \
        for (int half = 0; half < 2; half++)                                                           \
            sum[half] = square[half] = _mm512_setzero_pd();                                            \
        for (size_t at = 0; at < count; at += LANES) {                                                 \
            uint16_t keep_sign;                                                                        \
            PREFETCH(data, at, type);                                                                  \
            memcpy(&keep_sign, signs + at / 8, sizeof keep_sign);                                      \
            __m512i all = sixteen_of_##type(data, at);                                                 \
            all = _mm512_mask_xor_epi32(all, (__mmask16)~keep_sign, all, sign);                        \
            const __m256i upper = _mm512_extracti64x4_epi64(all, 1);                                   \
            const __m512d low = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(all)));     \
            const __m512d high = _mm512_cvtps_pd(_mm256_castsi256_ps(upper));                          \
            sum[0] = _mm512_add_pd(sum[0], low);                                                       \
            sum[1] = _mm512_add_pd(sum[1], high);                                                      \
            square[0] = _mm512_fmadd_pd(low, low, square[0]);                                          \
            square[1] = _mm512_fmadd_pd(high, high, square[1]);                                        \
        }                                                                                              \
        for (int half = 0; half < 2; half++) {                                                         \
            _mm512_storeu_pd(result->sum + 8 * half, sum[half]);                                       \
            _mm512_storeu_pd(result->square + 8 * half, square[half]);                                 \
        }                                                                                              \
    }

FOR_AVX512(float32)
FOR_AVX512(bfloat16)

#define SUPPORTED(what) __builtin_cpu_supports(what)
#define BY_LEVEL(type) any_##type, avx2_##type, avx512_##type
static int best_level(void)
{
    __builtin_cpu_init();
    if (!SUPPORTED("avx2") || !SUPPORTED("fma"))
        return 0;
    return SUPPORTED("avx512f") ? 2 : 1;
}

#else

#define BY_LEVEL(type) any_##type, any_##type, any_##type
static int best_level(void)
{
    return 0;
}

#endif

static int level;

__attribute__((constructor)) static void prepare(void)
{
    fill_sign_masks();
    level = best_level();
}

/* For tests: limits the instruction set from now on. Returns the level in use. */
int ddpcheck_sketch_level(int most)
{
    level = most < best_level() ? most : best_level();
    return level;
}

static double joined(const double *lane)
{
    double four[4];
    for (int at = 0; at < 4; at++)
        four[at] = (lane[at] + lane[at + 4]) + (lane[at + 8] + lane[at + 12]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

static inline double one_of_float32(const void *data, size_t at)
{
    return ((const float *)data)[at];
}

static inline double one_of_bfloat16(const void *data, size_t at)
{
    const uint32_t word = (uint32_t)((const uint16_t *)data)[at] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* The running totals: weighted signed sum, its rounding error, sum of squares. */
typedef struct {
    double value, lost, square;
} totals;

/* Neumaier summation: the rounding error is computed from the larger of the two numbers. */
static void add(totals *all, double value, double square)
{
    const double sum = all->value + value;
    if (fabs(all->value) >= fabs(value))
        all->lost += (all->value - sum) + value;
    else
        all->lost += (value - sum) + all->value;
    all->value = sum;
    all->square += square;
}

/* Adds the sums of `count` elements in pieces of `size` elements; the last piece may be shorter. `first` is the index
 * of the first element in its tensor, a multiple of `size`, which is a multiple of 8. `signs` holds the signs of
 * `known` elements and then repeats; each repetition has its own entry in `weights`.
 */
#define SKETCH(type)                                                                                   \
    void ddpcheck_sketch_add_##type(const void *data, size_t count, size_t size, const uint8_t *signs, \
                                    size_t first, size_t known, const double *weights, totals *all)    \
    {                                                                                                  \
        static kernel *const kernels[] = {BY_LEVEL(type)};                                             \
        for (size_t start = 0; start < count; start += size) {                                         \
            const char *piece = (const char *)data + start * SIZE_OF_##type;                           \
            const uint8_t *turns = signs + (first + start) % known / 8;                                \
            const size_t here = count - start < size ? count - start : size;                           \
            size_t at = here / LANES * LANES;                                                          \
            lanes result;                                                                              \
            kernels[level](piece, turns, at, &result);                                                 \
            double sum = joined(result.sum), square = joined(result.square);                           \
            for (; at < here; at++) {                                                                  \
                const double value = one_of_##type(piece, at);                                         \
                sum += turns[at / 8] >> at % 8 & 1 ? value : -value;                                   \
                square += value * value;                                                               \
            }                                                                                          \
            add(all, sum * weights[(first + start) / known], square);                                  \
        }                                                                                              \
    }

SKETCH(float32)
SKETCH(bfloat16)
