/* Preloaded into the processes of the campaign. Without its variables it changes nothing.
 *
 * CHAOS_FOLDER: files below it are the subject of the next two.
 * CHAOS_WRITE_MS: each write to them takes this much longer, as on a busy network file system.
 * CHAOS_QUOTA_FILE: once this file exists, each write to them fails with EDQUOT.
 * CHAOS_CLOCK_FILE: once this file exists, the wall clock is CHAOS_CLOCK_SECONDS ahead.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_below(const char *folder, int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Whether the write is refused; waits first if writes are late. */
static int is_refused(int descriptor) {
    const char *folder = getenv("CHAOS_FOLDER");
    if (!folder || !is_below(folder, descriptor))
        return 0;
    const char *ms = getenv("CHAOS_WRITE_MS"), *quota = getenv("CHAOS_QUOTA_FILE");
    if (ms)
        usleep(1000u * (unsigned)atoi(ms));
    if (quota && access(quota, F_OK) == 0) {
        errno = EDQUOT;
        return 1;
    }
    return 0;
}

ssize_t write(int descriptor, const void *bytes, size_t count) {
    static ssize_t (*original)(int, const void *, size_t);
    if (!original)
        original = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return is_refused(descriptor) ? -1 : original(descriptor, bytes, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    static ssize_t (*original)(int, const struct iovec *, int);
    if (!original)
        original = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    return is_refused(descriptor) ? -1 : original(descriptor, parts, count);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
    static ssize_t (*original)(int, const void *, size_t, off64_t);
    if (!original)
        original = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    return is_refused(descriptor) ? -1 : original(descriptor, bytes, count, offset);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original)
        original = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = original(clock, now);
    if (clock != CLOCK_REALTIME)
        return status;
    const char *file = getenv("CHAOS_CLOCK_FILE"), *seconds = getenv("CHAOS_CLOCK_SECONDS");
    if (file && seconds && access(file, F_OK) == 0)
        now->tv_sec += atoi(seconds);
    return status;
}
