/* Faults of the host, played inside every process that loads this library by LD_PRELOAD.

   HETERO_CHAOS_CONTROL names a file that holds a `struct control`; whoever writes to it strikes all these processes at
   once. Reads and maps of files below `folder` fail with `read_errno`, writes with `write_errno`, as those of a broken or
   full disk do. The wall clock is off by `clock_offset_ns`; waits until a time of that clock are corrected, because the
   kernel keeps the right time. The monotonic clock is never touched: no jump of a real machine's clock touches it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FOLDER_BYTES 496
#define NANOSECONDS 1000000000LL
#define YEAR_S (366LL * 24 * 3600)

struct control {
    int64_t clock_offset_ns;
    int32_t read_errno;
    int32_t write_errno;
    char folder[FOLDER_BYTES];
};

static const volatile struct control no_fault;
static const volatile struct control *control = &no_fault;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("HETERO_CHAOS_CONTROL");
    int fd = path == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = (void *)syscall(SYS_mmap, NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    syscall(SYS_close, fd);
}

/* The next definition of a function, looked up once. */
#define NEXT(name)                                                   \
    static __typeof__(&name) next;                                   \
    if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int is_below(int fd) {
    char link[32], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    size_t folder = strnlen((const char *)control->folder, FOLDER_BYTES);
    return folder > 0 && strncmp(path, (const char *)control->folder, folder) == 0;
}

static int fails(int number, int fd) {
    if (number == 0 || !is_below(fd)) return 0;
    errno = number;
    return 1;
}

#define READS(result, name, parameters, ...)                                    \
    result name parameters {                                                    \
        NEXT(name);                                                             \
        return fails(control->read_errno, fd) ? (result)-1 : next(__VA_ARGS__); \
    }
#define WRITES(name, parameters, ...)                                             \
    ssize_t name parameters {                                                     \
        NEXT(name);                                                               \
        return fails(control->write_errno, fd) ? (ssize_t)-1 : next(__VA_ARGS__); \
    }

READS(ssize_t, read, (int fd, void *to, size_t count), fd, to, count)
READS(ssize_t, pread, (int fd, void *to, size_t count, off_t at), fd, to, count, at)
READS(ssize_t, pread64, (int fd, void *to, size_t count, off64_t at), fd, to, count, at)
READS(ssize_t, readv, (int fd, const struct iovec *to, int count), fd, to, count)
READS(ssize_t, preadv, (int fd, const struct iovec *to, int count, off_t at), fd, to, count, at)
READS(ssize_t, preadv64, (int fd, const struct iovec *to, int count, off64_t at), fd, to, count, at)
WRITES(write, (int fd, const void *from, size_t count), fd, from, count)
WRITES(pwrite, (int fd, const void *from, size_t count, off_t at), fd, from, count, at)
WRITES(pwrite64, (int fd, const void *from, size_t count, off64_t at), fd, from, count, at)
WRITES(writev, (int fd, const struct iovec *from, int count), fd, from, count)

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t at) {
    if (fd >= 0 && fails(control->read_errno, fd)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, at);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t at) {
    return mmap(address, length, protection, flags, fd, at);
}

/* --- the wall clock -------------------------------------------------------------------------------------------- */

static struct timespec moved(struct timespec time, int64_t by_ns) {
    int64_t ns = (int64_t)time.tv_nsec + by_ns % NANOSECONDS;
    time.tv_sec += by_ns / NANOSECONDS + (ns < 0 ? -1 : ns / NANOSECONDS);
    time.tv_nsec = ns < 0 ? ns + NANOSECONDS : ns % NANOSECONDS;
    return time;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    NEXT(clock_gettime);
    int result = next(clock, found);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *found = moved(*found, control->clock_offset_ns);
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) *found = now.tv_sec;
    return now.tv_sec;
}

/* A deadline as the kernel understands it. One that is years from the wall clock's time is of another clock. */
static struct timespec kept(const struct timespec *deadline) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (llabs((long long)deadline->tv_sec - (long long)now.tv_sec) > YEAR_S) return *deadline;
    return moved(*deadline, -control->clock_offset_ns);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static __typeof__(&pthread_cond_timedwait) next;
    if (next == NULL) next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (next == NULL) next = (__typeof__(next))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec until = kept(deadline);
    return next(condition, mutex, &until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    NEXT(sem_timedwait);
    struct timespec until = kept(deadline);
    return next(semaphore, &until);
}

long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (next == NULL) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    struct timespec until;
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME) && d != 0) {
        until = kept((const struct timespec *)d);
        d = (long)&until;
    }
    return next(number, a, b, c, d, e, f);
}
