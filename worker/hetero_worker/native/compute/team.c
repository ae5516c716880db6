/* The team: its threads, and how they go through a run of operations.
 *
 * The thread that calls hc_run is member 0. The others look for work for a while, then sleep. Within a run nobody sleeps
 * soon, since members meet every few microseconds. A member that waits for longer sleeps: another member has lost its core
 * to another process, or member 0 waits for another rank in an HC_CALL. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "kernel.h"
#include "library.h"
#include "wait.h"

struct hc_team {
    struct hc_barrier barrier;
    hc_word work; /* a run, or the end, is announced */
    hc_crew crew;
    uint64_t spin_ns;
    const hc_op *const *ops; /* of the run in hand */
    uint64_t begin, end;
    const hc_isa_table *isa;
    uint64_t num_runs;
    uint64_t stopped_at[2]; /* index of an HC_CALL that returned not 0; else end: of the runs with even and odd numbers */
    int status;
    int is_ending;
    uint64_t num_threads;
    pthread_t threads[HC_MAX_MEMBERS];
};

typedef struct {
    hc_team *team;
    uint64_t member;
} hc_seat;

static void call(hc_team *team, const hc_call_op *op, uint64_t index) {
    int status = op->function(op->first, op->second, op->third);
    if (status) {
        team->stopped_at[team->num_runs & 1] = index;
        team->status = status;
    }
}

/* What every member does of a run. Behind the last meeting member 0 may announce the next run, which does not end without
 * the others. What a member reads of a run behind a meeting has therefore a place of its own in every second run. */
static void work(hc_team *team, uint64_t member) {
    hc_crew *crew = &team->crew;
    const hc_op *const *ops = team->ops;
    const hc_isa_table *isa = team->isa;
    const uint64_t *stopped_at = &team->stopped_at[team->num_runs & 1];
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
        if (*stopped_at == i)
            return;
    }
}

static void *live(void *argument) {
    hc_seat seat = *(hc_seat *)argument;
    free(argument);
    hc_team *team = seat.team;
    for (uint32_t seen = 0;; seen++) {
        hc_wait_for(&team->work, seen, team->spin_ns);
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
    int error = posix_memalign((void **)&team, HC_LINE_BYTES, sizeof *team);
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
    hc_count_up(&team->work);
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
    team->num_runs++;
    uint64_t *stopped_at = &team->stopped_at[team->num_runs & 1];
    *stopped_at = end;
    team->status = 0;
    if (team->crew.size > 1)
        hc_count_up(&team->work);
    work(team, 0);
    if (status)
        *status = team->status;
    return *stopped_at;
}
