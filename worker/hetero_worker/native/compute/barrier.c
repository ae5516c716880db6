/* Waiting, and the barrier that kernels meet at. It knows neither teams nor kernels. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "wait.h"

#define SPINS_BETWEEN_LOOKS 64 /* at the clock */
#define MEET_SPIN_NS 200000u   /* how long members who meet spin before they sleep */

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void sleep_on(hc_word *word, uint32_t seen) {
    atomic_fetch_add(&word->sleepers, 1);
    syscall(SYS_futex, &word->number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&word->sleepers, 1);
}

void hc_count_up(hc_word *word) {
    atomic_fetch_add(&word->number, 1);
    if (atomic_load(&word->sleepers))
        syscall(SYS_futex, &word->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void hc_wait_for(hc_word *word, uint32_t seen, uint64_t spin_ns) {
    uint64_t began_ns = 0;
    for (uint64_t spins = 1;; spins++) {
        if (atomic_load_explicit(&word->number, memory_order_acquire) != seen)
            return;
        relax();
        if (spins % SPINS_BETWEEN_LOOKS)
            continue;
        uint64_t now = now_ns();
        if (!began_ns)
            began_ns = now;
        else if (now - began_ns > spin_ns)
            sleep_on(word, seen);
    }
}

void hc_meet(hc_crew *crew) {
    if (crew->size == 1)
        return;
    struct hc_barrier *barrier = crew->barrier;
    uint32_t seen = atomic_load_explicit(&barrier->met.number, memory_order_acquire);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) + 1 == crew->size) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        hc_count_up(&barrier->met);
    } else {
        hc_wait_for(&barrier->met, seen, MEET_SPIN_NS);
    }
}
