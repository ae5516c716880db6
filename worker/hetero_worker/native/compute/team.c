/* The team: who waits for whom, and how.
 *
 * The thread that calls hc_run is member 0. The others look for work for a while, then sleep; within a run nobody sleeps
 * soon, since members meet every few microseconds. Whoever waits longer than that sleeps: another has lost its core to
 * somebody else, or member 0 waits for another rank in an HC_CALL. Nobody yields: a thread that yields to another process
 * gets its core back when that one's turn is over, one that is woken gets it at once.
 *
 * Sleep. Who goes to sleep on a word says so (sleepers) and then looks at the word again, within the futex call; who
 * changes the word then looks whether anybody sleeps. All are sequentially consistent, so no wake is lost. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "library.h"

#define LINE 64
#define SPINS_BETWEEN_LOOKS 64 /* at the clock */
#define MEET_SPIN_NS 200000u   /* how long members who meet spin before they sleep */

/* A word that is waited for: it only counts up. */
typedef struct {
    _Alignas(LINE) _Atomic uint32_t number;
    _Atomic uint32_t sleepers;
} hc_word;

struct hc_barrier {
    _Alignas(LINE) _Atomic uint64_t arrived;
    hc_word met;
};

struct hc_team {
    struct hc_barrier barrier;
    hc_word work; /* a run, or the end, is announced */
    hc_crew crew;
    uint64_t spin_ns;
    const hc_op *const *ops; /* of the run in hand */
    uint64_t begin, end;
    const hc_isa_table *isa;
    uint64_t stopped_at; /* index of an HC_CALL that returned not 0; else end */
    int status;
    int is_ending;
    uint64_t num_threads;
    pthread_t threads[HC_MAX_MEMBERS];
};

typedef struct {
    hc_team *team;
    uint64_t member;
} hc_seat;

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

static void count_up(hc_word *word) {
    atomic_fetch_add(&word->number, 1);
    if (atomic_load(&word->sleepers))
        syscall(SYS_futex, &word->number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* Returns when the word is no more what was seen. */
static void wait_for(hc_word *word, uint32_t seen, uint64_t spin_ns) {
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
        count_up(&barrier->met);
    } else {
        wait_for(&barrier->met, seen, MEET_SPIN_NS);
    }
}

static void call(hc_team *team, const hc_call_op *op, uint64_t index) {
    int status = op->function(op->first, op->second, op->third);
    if (status) {
        team->stopped_at = index;
        team->status = status;
    }
}

/* What every member does of a run. Behind the last meeting member 0 may announce the next one: what is said of this one is
 * read before. */
static void work(hc_team *team, uint64_t member) {
    hc_crew *crew = &team->crew;
    const hc_op *const *ops = team->ops;
    const hc_isa_table *isa = team->isa;
    for (uint64_t i = team->begin, end = team->end; i < end; i++) {
        const hc_op *op = ops[i];
        if (op->kind != HC_CALL) {
            isa->kernels[op->kind](op, crew, member);
            hc_meet(crew);
            continue;
        }
        if (!member)
            call(team, (const hc_call_op *)op, i);
        hc_meet(crew);
        if (team->stopped_at == i) {
            hc_meet(crew); /* nobody reads stopped_at any more */
            return;
        }
    }
}

static void *live(void *argument) {
    hc_seat seat = *(hc_seat *)argument;
    free(argument);
    hc_team *team = seat.team;
    for (uint32_t seen = 0;; seen++) {
        wait_for(&team->work, seen, team->spin_ns);
        if (team->is_ending)
            return NULL;
        work(team, seat.member);
    }
}

static int pin(pthread_attr_t *attributes, int32_t cpu) {
    cpu_set_t *set = CPU_ALLOC((size_t)cpu + 1);
    if (!set)
        return ENOMEM;
    size_t bytes = CPU_ALLOC_SIZE((size_t)cpu + 1);
    CPU_ZERO_S(bytes, set);
    CPU_SET_S((size_t)cpu, bytes, set);
    int error = pthread_attr_setaffinity_np(attributes, bytes, set);
    CPU_FREE(set);
    return error;
}

static int start(hc_team *team, uint64_t member, const int32_t *cpus) {
    hc_seat *seat = malloc(sizeof *seat);
    if (!seat)
        return ENOMEM;
    *seat = (hc_seat){team, member};
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    if (!error) {
        error = cpus ? pin(&attributes, cpus[member - 1]) : 0;
        if (!error)
            error = pthread_create(&team->threads[member - 1], &attributes, live, seat);
        pthread_attr_destroy(&attributes);
    }
    if (error)
        free(seat);
    return error;
}

hc_team *hc_team_new(uint64_t size, const int32_t *cpus, uint64_t spin_ns) {
    if (!size || size > HC_MAX_MEMBERS) {
        errno = EINVAL;
        return NULL;
    }
    hc_team *team = NULL;
    int error = posix_memalign((void **)&team, LINE, sizeof *team);
    if (error) {
        errno = error;
        return NULL;
    }
    *team = (hc_team){.spin_ns = spin_ns};
    team->crew = (hc_crew){size, &team->barrier};
    for (uint64_t member = 1; member < size && !error; member++) {
        error = start(team, member, cpus);
        team->num_threads += !error;
    }
    if (error) {
        hc_team_free(team);
        errno = error;
        return NULL;
    }
    return team;
}

void hc_team_free(hc_team *team) {
    if (!team)
        return;
    team->is_ending = 1;
    count_up(&team->work);
    for (uint64_t i = 0; i < team->num_threads; i++)
        pthread_join(team->threads[i], NULL);
    free(team);
}

uint64_t hc_team_size(const hc_team *team) { return team->crew.size; }

uint64_t hc_run(hc_team *team, const hc_op *const *ops, uint64_t begin, uint64_t end, int *status) {
    if (status)
        *status = 0;
    if (begin >= end)
        return end;
    team->ops = ops;
    team->begin = begin;
    team->end = end;
    team->isa = hc_isa_in_use();
    team->stopped_at = end;
    team->status = 0;
    if (team->crew.size > 1)
        count_up(&team->work);
    work(team, 0);
    if (status)
        *status = team->status;
    return team->stopped_at;
}
