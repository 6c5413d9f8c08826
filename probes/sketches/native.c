/* The signed sum and the sum of squares of one piece of a tensor, in one pass over its memory.
 *
 * Both are added in double, in four vectors of four lanes that are joined in a fixed order: the result does not depend
 * on what the processor can do. Squares of floats are exact in double. Nothing of Python is used, so that the library
 * can be loaded into whatever interpreter a job runs under.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(16)));
typedef double lanes __attribute__((vector_size(32)));

/* The same source for several kinds of processors; the loader takes the one that fits. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_ANY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_ANY_PROCESSOR
#endif

#define SIZE_OF_float32 4
#define SIZE_OF_bfloat16 2

/* For each byte of sign bits, what turns the signs of eight floats: a bit that is set leaves its float alone. */
static words turned[256];

__attribute__((constructor)) static void fill(void)
{
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0; bit < 8; bit++)
            turned[byte][bit] = byte >> bit & 1 ? 0 : UINT32_C(0x80000000);
}

static inline void read_float32(const void *data, size_t at, words *found)
{
    memcpy(found, (const float *)data + at, sizeof *found);
}

/* A bfloat16 is the upper half of a float. */
static inline void read_bfloat16(const void *data, size_t at, words *found)
{
    halves upper;
    memcpy(&upper, (const uint16_t *)data + at, sizeof upper);
    *found = __builtin_convertvector(upper, words) << 16;
}

static inline double as_double(uint32_t word)
{
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline double one_float32(const void *data, size_t at)
{
    return ((const float *)data)[at];
}

static inline double one_bfloat16(const void *data, size_t at)
{
    return as_double((uint32_t)((const uint16_t *)data)[at] << 16);
}

/* A page ahead: the processor's own foresight ends at the page. Reading beyond the end this way does no harm. */
#define FORESIGHT 4096

#define ADD(number, part)                                         \
    do {                                                          \
        const lanes wide = __builtin_convertvector(part, lanes);  \
        sum[number] += wide;                                      \
        square[number] += wide * wide;                            \
    } while (0)

/* `signs`: one bit an element, from the lowest of the first byte on. `result`: the signed sum, the sum of squares. */
#define SKETCH(type)                                                                                       \
    FOR_ANY_PROCESSOR                                                                                      \
    void ddpcheck_sketch_##type(const void *data, const uint8_t *signs, size_t count, double *result)      \
    {                                                                                                      \
        lanes sum[4] = {{0}}, square[4] = {{0}};                                                           \
        size_t at = 0;                                                                                     \
        for (; at + 16 <= count; at += 16) {                                                               \
            words low, high;                                                                               \
            floats part[4];                                                                                \
            __builtin_prefetch((const char *)data + at * SIZE_OF_##type + FORESIGHT);                      \
            read_##type(data, at, &low);                                                                   \
            read_##type(data, at + 8, &high);                                                              \
            low ^= turned[signs[at / 8]];                                                                  \
            high ^= turned[signs[at / 8 + 1]];                                                             \
            memcpy(part, &low, sizeof low);                                                                \
            memcpy(part + 2, &high, sizeof high);                                                          \
            ADD(0, part[0]);                                                                               \
            ADD(1, part[1]);                                                                               \
            ADD(2, part[2]);                                                                               \
            ADD(3, part[3]);                                                                               \
        }                                                                                                  \
        const lanes sums = (sum[0] + sum[1]) + (sum[2] + sum[3]);                                          \
        const lanes squares = (square[0] + square[1]) + (square[2] + square[3]);                           \
        double total = (sums[0] + sums[1]) + (sums[2] + sums[3]);                                          \
        double total_of_squares = (squares[0] + squares[1]) + (squares[2] + squares[3]);                   \
        for (; at < count; at++) {                                                                         \
            const double value = one_##type(data, at);                                                     \
            total += signs[at / 8] >> at % 8 & 1 ? value : -value;                                         \
            total_of_squares += value * value;                                                             \
        }                                                                                                  \
        result[0] = total;                                                                                 \
        result[1] = total_of_squares;                                                                      \
    }

SKETCH(float32)
SKETCH(bfloat16)
