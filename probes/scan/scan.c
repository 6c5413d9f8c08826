/* Reads the tensors of a table, each once: its digest (xxh3-128), its sketch, its count of non-finite values.
 *
 * One call reads a whole model, so that nothing is done per tensor in Python. The hash is that of the xxhash package, which
 * exports its functions; their addresses come from Python. Like the kernels, this file does not use Python's own interface.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    double value, lost, square;
} totals;

typedef void sketch_add(const void *data, size_t count, size_t size, const uint8_t *signs, size_t first, size_t known,
                        const double *weights, totals *all);

extern sketch_add ddpcheck_sketch_add_float32, ddpcheck_sketch_add_bfloat16;

/* What to do with a row. COUNT is the part of SKETCH that counts values that are not finite, and faster. */
enum { DIGEST = 1, SKETCH = 2, COUNT = 4 };

/* No tensor is stored below: an address there is the offset of a view into a storage that was freed. */
#define LOWEST_ADDRESS 65536

#define MOST_DIMS 8

/* The order of the elements of a tensor that is not row-major; strides in elements. */
typedef struct {
    uint64_t dims, sizes[MOST_DIMS], strides[MOST_DIMS];
} order;

typedef struct {
    uint64_t bytes, seed, dtype;
    const order *order;
} row;

typedef struct {
    uint64_t low, high;
} hash;

/* Set by Python. `reset`, `update` and `finish` hash a tensor piece by piece; `state` is theirs. */
typedef struct {
    hash (*at_once)(const void *data, size_t bytes, uint64_t seed);
    int (*reset)(void *state, uint64_t seed);
    int (*update)(void *state, const void *data, size_t bytes);
    hash (*finish)(const void *state);
    void *state;
    const uint8_t *signs;
    const double *weights;
    uint64_t piece, block;
} constants;

typedef struct {
    sketch_add *add;
    size_t size;
    /* Mask of the exponent in an element, whose bits are all set if the element is not finite. */
    uint32_t exponent;
} element;

static const element elements[] = {
    {0, 0, 0},
    {ddpcheck_sketch_add_float32, 4, UINT32_C(0x7f800000)},
    {ddpcheck_sketch_add_bfloat16, 2, UINT32_C(0x7f80)},
};

static void store(hash result, uint8_t *digest)
{
    for (int byte = 0; byte < 8; byte++) {
        digest[byte] = (uint8_t)(result.high >> (56 - 8 * byte));
        digest[8 + byte] = (uint8_t)(result.low >> (56 - 8 * byte));
    }
}

static uint64_t count_nonfinite(const void *data, const element *kind, size_t count)
{
    uint64_t found = 0;
    const uint32_t mask = kind->exponent;
    if (kind->size == 4)
        for (size_t at = 0; at < count; at++)
            found += (((const uint32_t *)data)[at] & mask) == mask;
    else
        for (size_t at = 0; at < count; at++)
            found += (((const uint16_t *)data)[at] & mask) == mask;
    return found;
}

/* Copies `count` elements from index `start` on, in row-major order. */
static void gather(const row *from, const element *kind, const char *data, size_t start, size_t count, char *to)
{
    const order *by = from->order;
    const int last = (int)by->dims - 1;
    uint64_t index[MOST_DIMS], offset = 0, rest = start;
    for (int dim = last; dim >= 0; dim--) {
        index[dim] = rest % by->sizes[dim];
        rest /= by->sizes[dim];
        offset += index[dim] * by->strides[dim];
    }
    while (count) {
        const uint64_t left = by->sizes[last] - index[last], stride = by->strides[last];
        const size_t run = left < count ? left : count;
        if (kind->size == 4)
            for (size_t at = 0; at < run; at++)
                memcpy(to + 4 * at, data + 4 * (offset + at * stride), 4);
        else
            for (size_t at = 0; at < run; at++)
                memcpy(to + 2 * at, data + 2 * (offset + at * stride), 2);
        to += run * kind->size;
        count -= run;
        index[last] += run;
        offset += run * stride;
        for (int dim = last; dim > 0 && index[dim] == by->sizes[dim]; dim--) {
            offset -= by->sizes[dim] * by->strides[dim];
            index[dim] = 0;
            index[dim - 1]++;
            offset += by->strides[dim - 1];
        }
    }
}

/* The row-major elements from `start` on, at most `count`: in place, or gathered into `buffer`. */
static const void *elements_at(const row *from, const element *kind, const char *data, size_t start, size_t count,
                               char *buffer)
{
    if (!from->order)
        return data + start * kind->size;
    gather(from, kind, data, start, count, buffer);
    return buffer;
}

/* Hashes and sketches piece by piece: the second reader finds each piece in the processor's cache. */
static void read_row(const row *from, const char *data, unsigned work, const constants *with, char *buffer,
                     uint8_t *digest, double *sketch)
{
    const element *kind = &elements[from->dtype];
    const size_t count = work & SKETCH ? from->bytes / kind->size : 0, piece = with->piece;
    /* A gathered tensor is not read in the order of its memory, in which the hash goes. */
    const int together = work & DIGEST && count > piece && !from->order;
    totals all = {0, 0, 0};

    if (work & DIGEST && !together)
        store(with->at_once(data, from->bytes, from->seed), digest);
    if (together)
        with->reset(with->state, from->seed);
    for (size_t start = 0; start < count; start += piece) {
        const size_t here = count - start < piece ? count - start : piece;
        const void *at = elements_at(from, kind, data, start, here, buffer);
        if (together)
            with->update(with->state, at, here * kind->size);
        kind->add(at, here, piece, with->signs, start, with->block, with->weights, &all);
    }
    if (together)
        store(with->finish(with->state), digest);
    if (work & COUNT && !(work & SKETCH))
        sketch[2] = (double)count_nonfinite(data, kind, from->bytes / kind->size);
    if (!(work & SKETCH))
        return;
    /* After an overflow the rounding error has no meaning. */
    sketch[0] = isfinite(all.value) ? all.value + all.lost : all.value;
    sketch[1] = sqrt(all.square);
    sketch[2] = 0;
    if (!isfinite(sketch[0]) || !isfinite(sketch[1]))
        for (size_t start = 0; start < count; start += piece) {
            const size_t here = count - start < piece ? count - start : piece;
            const void *at = elements_at(from, kind, data, start, here, buffer);
            sketch[2] += (double)count_nonfinite(at, kind, here);
        }
}

/* Reads the rows for which `work` asks something. Per row, `digests` has 16 bytes and `sketches` three numbers: signed
 * sum, norm, count of non-finite values. Returns the number of rows that it did not read, since their memory
 * was freed or there is no memory for a buffer.
 */
size_t ddpcheck_scan(const uint64_t *addresses, const row *rows, const uint8_t *work, size_t count,
                     const constants *with, uint8_t *digests, double *sketches)
{
    size_t unread = 0;
    char *buffer = 0;
    for (size_t at = 0; at < count; at++) {
        if (!work[at])
            continue;
        if (rows[at].bytes && addresses[at] < LOWEST_ADDRESS) {
            unread++;
            continue;
        }
        if (rows[at].order && work[at] & SKETCH && !buffer && !(buffer = malloc(4 * with->piece))) {
            unread++;
            continue;
        }
        read_row(&rows[at], (const char *)(uintptr_t)addresses[at], work[at], with, buffer, digests + 16 * at,
                 sketches + 3 * at);
    }
    free(buffer);
    return unread;
}

/* Bytes that show writes to a tensor. Per tensor: up to `first` bytes from its start, preceded by their number, and the
 * `middle` bytes after its centre if it has twice `first` bytes or more. Returns the length of `starts`.
 */
size_t ddpcheck_samples(const uint64_t *addresses, const uint64_t *bytes, size_t count, size_t first, size_t middle,
                        uint8_t *starts, uint8_t *middles)
{
    uint8_t *to = starts;
    for (size_t at = 0; at < count; at++) {
        const char *data = (const char *)(uintptr_t)addresses[at];
        const size_t size = addresses[at] < LOWEST_ADDRESS ? 0 : bytes[at];
        const size_t here = size < first ? size : first;
        *to++ = (uint8_t)here;
        memcpy(to, data, here);
        to += here;
        if (size >= 2 * first)
            memcpy(middles, data + size / 2, middle);
        else
            memset(middles, 0, middle);
        middles += middle;
    }
    return (size_t)(to - starts);
}

/* Evenly spaced windows of every tensor with more than `least` bytes, the first and the last bytes included. Returns
 * the number of such tensors.
 */
size_t ddpcheck_windows(const uint64_t *addresses, const uint64_t *bytes, size_t count, size_t least, size_t windows,
                        size_t window, uint8_t *result)
{
    size_t large = 0;
    for (size_t at = 0; at < count; at++) {
        if (bytes[at] <= least || addresses[at] < LOWEST_ADDRESS)
            continue;
        const char *data = (const char *)(uintptr_t)addresses[at];
        const uint64_t last = bytes[at] - window;
        for (size_t number = 0; number < windows; number++) {
            memcpy(result, data + last * number / (windows - 1), window);
            result += window;
        }
        large++;
    }
    return large;
}

/* The scales of packed sketches, in ascending order; `slack` covers the error of a norm. */
typedef struct {
    const double *scales;
    uint64_t count;
    double slack, steps;
} packing;

#define NO_NUMBER 255
#define ITEM 5

static void pack_item(const double *sketch, const packing *by, uint8_t *item)
{
    const double value = sketch[0], nonfinite = sketch[2];
    uint8_t code = NO_NUMBER;
    uint32_t bits = nonfinite < 4294967295.0 ? (uint32_t)nonfinite : UINT32_MAX;
    if (!nonfinite && isfinite(value)) {
        double norm = sketch[1];
        /* The square of a tiny float64 underflows to 0. */
        if (norm < 1e-150 && fabs(value) > norm)
            norm = fabs(value);
        norm *= by->slack;
        size_t low = 0, high = by->count;
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (by->scales[middle] < norm)
                low = middle + 1;
            else
                high = middle;
        }
        if (low < by->count) {
            const double scale = by->scales[low];
            const double steps = scale ? rint(value / scale * by->steps) : 0;
            if (fabs(steps) < 2147483648.0) {
                code = (uint8_t)low;
                bits = (uint32_t)(int32_t)steps;
            }
        }
    }
    item[0] = code;
    for (int byte = 0; byte < 4; byte++)
        item[1 + byte] = (uint8_t)(bits >> 8 * byte);
}

/* Packs sketches and writes them as base 85, like `pack` in records/codecs.py. `indices`: which ones; null: all.
 * `text` has room for 25 characters for every four sketches, and 10 more. Returns its length.
 */
size_t ddpcheck_sketch_text(const double *sketches, const uint32_t *indices, size_t count, const packing *by,
                            const char *alphabet, char *text)
{
    char *to = text;
    uint8_t items[4 * ITEM];
    for (size_t at = 0; at < count; at += 4) {
        const size_t here = count - at < 4 ? count - at : 4;
        memset(items, 0, sizeof items);
        for (size_t number = 0; number < here; number++)
            pack_item(sketches + 3 * (indices ? indices[at + number] : at + number), by, items + ITEM * number);
        for (size_t byte = 0; byte < here * ITEM; byte += 4) {
            uint32_t word = 0;
            for (int part = 0; part < 4; part++)
                word = word << 8 | items[byte + part];
            for (int digit = 4; digit >= 0; digit--) {
                to[digit] = alphabet[word % 85];
                word /= 85;
            }
            to += 5;
        }
    }
    /* The last word may have been filled up with zeros, which are not part of the text. */
    return (size_t)(to - text) - (4 - count * ITEM % 4) % 4;
}
