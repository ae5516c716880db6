/* Parts that both files of the exchange need: how a thread waits and reads the clock. Only they include this. */
#ifndef HETERO_EXCHANGE_WAITS_H
#define HETERO_EXCHANGE_WAITS_H

#include <stdint.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static inline uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline uint64_t lesser(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#endif
