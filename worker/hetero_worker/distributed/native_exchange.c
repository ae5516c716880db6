/* Rounds and links through shared memory; native_exchange.h says what the functions promise. How they keep it:
 *
 * Rounds. A rank writes into its area of the round's parity, raises its counter to the round's number, waits until the
 * contributors' counters reach that number, and adds their areas. Two areas per rank are enough: a counter at n says that
 * its rank has read everything before round n, and an area is written again (round n + 2) only when all counters have
 * reached n + 1. A message longer than an area takes several rounds.
 *
 * Links. The source writes message n into area n mod HX_LINK_DEPTH once every receiver has taken message
 * n - HX_LINK_DEPTH, then raises its counter; a receiver waits for that, reads, and raises its own.
 *
 * Memory order. A rank writes bytes before it raises their counter (release), and reads them after it has seen the
 * counter (acquire). Nothing else orders them. Sleep needs more: a rank that raises a counter then checks whether a peer
 * sleeps; a rank that goes to sleep says so and then checks the counter. All four operations are sequentially consistent,
 * so at least one of the two sees the other, and no wake is lost. The end word is treated like a counter.
 */
#define _GNU_SOURCE
#include "native_exchange.h"
#include "native_waits.h"

#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef HX_SOURCE
#define HX_SOURCE "unknown"
#endif
#define SPINS_BETWEEN_LOOKS 32 /* at the clock and the end word */

/* On x86-64 the loops over elements are compiled for three vector widths, and the loader chooses one. Not under
 * sanitizers: their runtime does not exist yet when the loader chooses. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(HX_ONE_VERSION)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

/* ---- Counters, sleeping and waking ---------------------------------------------------------------------------- */

static inline _Atomic uint64_t *word_at(const hx_rank *rank, uint64_t offset)
{
    return (_Atomic uint64_t *)(void *)(rank->memory + offset);
}

static inline hx_seat *seat_of(const hx_rank *rank, uint64_t number)
{
    return (hx_seat *)(void *)(rank->memory + (1 + number) * HX_LINE_BYTES);
}

static inline int reached(const hx_rank *rank, uint64_t offset, uint64_t number)
{
    return atomic_load_explicit(word_at(rank, offset), memory_order_acquire) >= number;
}

static inline int ended(hx_rank *rank)
{
    return atomic_load_explicit(&rank->closed, memory_order_relaxed) != 0 ||
           atomic_load_explicit(word_at(rank, 0), memory_order_acquire) != 0;
}

static void ring(hx_seat *seat)
{
    atomic_fetch_add_explicit(&seat->bell, 1, memory_order_seq_cst);
    syscall(SYS_futex, &seat->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Raises a counter of this rank. A peer that sees the number also sees all earlier writes. */
static void publish(hx_rank *rank, uint64_t offset, uint64_t number, const uint64_t *peers, uint64_t num_peers)
{
    atomic_store_explicit(word_at(rank, offset), number, memory_order_seq_cst);
    for (uint64_t i = 0; i < num_peers; i++) {
        hx_seat *seat = seat_of(rank, peers[i]);
        if (peers[i] != rank->rank && atomic_load_explicit(&seat->asleep, memory_order_seq_cst))
            ring(seat);
    }
}

/* Sleeps until the bell rings or for_ns have passed; returns at once if there is nothing to wait for. */
static void doze(hx_rank *rank, uint64_t offset, uint64_t number, uint64_t for_ns)
{
    hx_seat *seat = seat_of(rank, rank->rank);
    uint32_t bell = atomic_load_explicit(&seat->bell, memory_order_seq_cst);
    atomic_store_explicit(&seat->asleep, 1, memory_order_seq_cst);
    if (atomic_load_explicit(word_at(rank, offset), memory_order_seq_cst) < number &&
        atomic_load_explicit(word_at(rank, 0), memory_order_seq_cst) == 0) {
        struct timespec time = {.tv_sec = (time_t)(for_ns / 1000000000u), .tv_nsec = (long)(for_ns % 1000000000u)};
        syscall(SYS_futex, &seat->bell, FUTEX_WAIT, bell, &time, NULL, 0);
    }
    atomic_store_explicit(&seat->asleep, 0, memory_order_seq_cst);
}

static int await_patiently(hx_rank *rank, uint64_t offset, uint64_t number)
{
    uint64_t began_ns = now_ns();
    for (;;) {
        for (int spin = 0; spin < SPINS_BETWEEN_LOOKS; spin++) {
            if (reached(rank, offset, number))
                return HX_DONE;
            relax();
        }
        if (ended(rank))
            return HX_ENDED;
        uint64_t waited_ns = now_ns() - began_ns;
        if (waited_ns < rank->spin_ns)
            continue;
        if (waited_ns < rank->yield_ns)
            sched_yield();
        else if (waited_ns < rank->nap_ns)
            doze(rank, offset, number, rank->nap_ns - waited_ns);
        else
            return HX_WAITING;
    }
}

/* Waits until the counters of these seats reach the number. After HX_WAITING, `late` holds those that have not. */
static int await_seats(hx_rank *rank, const uint64_t *counters, uint64_t seats, uint64_t number, uint64_t *late)
{
    int result = HX_DONE;
    for (uint64_t left = seats; left && result == HX_DONE; left &= left - 1) {
        uint64_t counter = counters[__builtin_ctzll(left)];
        if (!reached(rank, counter, number))
            result = await_patiently(rank, counter, number);
    }
    *late = 0;
    for (uint64_t left = result == HX_WAITING ? seats : 0; left; left &= left - 1) {
        int seat = __builtin_ctzll(left);
        if (!reached(rank, counters[seat], number))
            *late |= UINT64_C(1) << seat;
    }
    return result;
}

EXPORT void hx_end(hx_rank *rank, uint64_t word)
{
    uint64_t open = 0;
    atomic_compare_exchange_strong(word_at(rank, 0), &open, word);
    for (uint64_t number = 0; number < rank->world_size; number++)
        ring(seat_of(rank, number));
}

/* ---- Numbers -------------------------------------------------------------------------------------------------- */

static inline float as_float(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t as_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float widen_bf16(uint16_t half)
{
    return as_float((uint32_t)half << 16);
}

/* Rounds to nearest, ties to even; a NaN becomes the one that torch makes of it. */
static inline uint16_t narrow_bf16(float number)
{
    uint32_t bits = as_bits(number);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* A subnormal half is 2^-14 * 0.fraction: the exact difference of two normal floats, even on a processor that flushes
 * subnormals. */
static inline float widen_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t fraction = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t normal = fraction + (112u << 23);
    uint32_t subnormal = as_bits(as_float(fraction + (113u << 23)) - as_float(113u << 23));
    uint32_t special = fraction | 0x7f800000u;
    uint32_t bits = fraction < (1u << 23) ? subnormal : normal;
    return as_float(sign | (fraction >= (31u << 23) ? special : bits));
}

/* Below 2^-14, halves are multiples of 2^-24, as floats near 0.5 are: adding 0.5 rounds to them. */
static inline uint16_t narrow_f16(float number)
{
    uint32_t bits = as_bits(number);
    uint32_t size = bits & 0x7fffffffu;
    uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    uint32_t subnormal = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    uint32_t finite = size < (113u << 23) ? subnormal : normal;
    uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)((bits >> 16 & 0x8000u) | (size >= (143u << 23) ? special : finite));
}

#define BLOCK 1024 /* elements summed at a time: they stay in the first-level cache */

VECTORISED static void sum_float32(void *restrict out, const void *const *terms, uint64_t num_terms, uint64_t elements)
{
    for (uint64_t begin = 0; begin < elements; begin += BLOCK) {
        uint64_t count = elements - begin < BLOCK ? elements - begin : BLOCK;
        float *restrict sum = (float *)out + begin;
        const float *first = (const float *)terms[0] + begin, *second = (const float *)terms[1] + begin;
        for (uint64_t i = 0; i < count; i++)
            sum[i] = first[i] + second[i];
        for (uint64_t term = 2; term < num_terms; term++) {
            const float *next = (const float *)terms[term] + begin;
            for (uint64_t i = 0; i < count; i++)
                sum[i] += next[i];
        }
    }
}

/* Two terms, the usual case, need no fp32 sums in memory. */
#define DEFINE_SUM(NAME, WIDEN, NARROW)                                                                                \
    VECTORISED static void NAME(void *restrict out, const void *const *terms, uint64_t num_terms, uint64_t elements)   \
    {                                                                                                                  \
        float sum[BLOCK];                                                                                              \
        for (uint64_t begin = 0; begin < elements; begin += BLOCK) {                                                   \
            uint64_t count = elements - begin < BLOCK ? elements - begin : BLOCK;                                      \
            uint16_t *restrict to = (uint16_t *)out + begin;                                                           \
            const uint16_t *a = (const uint16_t *)terms[0] + begin, *b = (const uint16_t *)terms[1] + begin;           \
            if (num_terms == 2) {                                                                                      \
                for (uint64_t i = 0; i < count; i++)                                                                   \
                    to[i] = NARROW(WIDEN(a[i]) + WIDEN(b[i]));                                                         \
                continue;                                                                                              \
            }                                                                                                          \
            for (uint64_t i = 0; i < count; i++)                                                                       \
                sum[i] = WIDEN(a[i]) + WIDEN(b[i]);                                                                    \
            for (uint64_t term = 2; term < num_terms; term++) {                                                        \
                const uint16_t *next = (const uint16_t *)terms[term] + begin;                                          \
                for (uint64_t i = 0; i < count; i++)                                                                   \
                    sum[i] += WIDEN(next[i]);                                                                          \
            }                                                                                                          \
            for (uint64_t i = 0; i < count; i++)                                                                       \
                to[i] = NARROW(sum[i]);                                                                                \
        }                                                                                                              \
    }

DEFINE_SUM(sum_bfloat16, widen_bf16, narrow_bf16)
DEFINE_SUM(sum_float16, widen_f16, narrow_f16)

static const uint64_t ELEMENT_BYTES[HX_NUM_DTYPES] = {4, 2, 2};

EXPORT void hx_sum(uint64_t dtype, void *out, const void *const *terms, uint64_t num_terms, uint64_t elements)
{
    if (num_terms == 1)
        memcpy(out, terms[0], elements * ELEMENT_BYTES[dtype]);
    else if (dtype == HX_FLOAT32)
        sum_float32(out, terms, num_terms, elements);
    else if (dtype == HX_BFLOAT16)
        sum_bfloat16(out, terms, num_terms, elements);
    else
        sum_float16(out, terms, num_terms, elements);
}

/* ---- Rounds --------------------------------------------------------------------------------------------------- */

static inline uint64_t peers_of(const hx_group *group)
{
    uint64_t all = group->size == 64 ? ~UINT64_C(0) : (UINT64_C(1) << group->size) - 1;
    return all & ~(UINT64_C(1) << group->own);
}

static inline uint8_t *area(const hx_group *group, uint64_t seat, uint64_t round)
{
    return group->rank->memory + group->areas[seat][round & 1];
}

/* Writes this rank's part of a round, if it has one, and raises the counter. Peers may be up to one round behind. */
static int publish_round(hx_group *group, const void *mine, uint64_t bytes)
{
    hx_rank *rank = group->rank;
    uint64_t number = group->round + 1;
    if (bytes) {
        if (group->settled < number - 1) {
            int result = await_seats(rank, group->counters, peers_of(group), number - 1, &group->late);
            if (result != HX_DONE)
                return result;
            group->settled = number - 1;
        }
        memcpy(area(group, group->own, number), mine, bytes);
        rank->published_bytes += bytes;
    }
    publish(rank, group->counters[group->own], number, group->ranks, group->size);
    group->round = number;
    group->published = 1;
    return HX_DONE;
}

static int await_round(hx_group *group, uint64_t seats)
{
    uint64_t awaited = seats & peers_of(group);
    int result = await_seats(group->rank, group->counters, awaited, group->round, &group->late);
    if (result == HX_DONE && awaited == peers_of(group))
        group->settled = group->round;
    return result;
}

static int end_message(hx_group *group)
{
    group->rank->rounds += group->offset > 0;
    group->offset = 0;
    return HX_DONE;
}

static void add_up(const hx_group *group, const hx_route *route, uint8_t *out, uint64_t bytes)
{
    const void *terms[HX_MAX_SEATS];
    uint64_t num_terms = 0;
    for (uint64_t left = route->contributors; left; left &= left - 1)
        terms[num_terms++] = area(group, (uint64_t)__builtin_ctzll(left), group->round);
    if (num_terms == 1)
        memcpy(out, terms[0], bytes);
    else
        hx_sum(route->dtype, out, terms, num_terms, bytes / ELEMENT_BYTES[route->dtype]);
}

static int share(hx_group *group, const hx_route *route, void *data)
{
    uint64_t self = UINT64_C(1) << group->own;
    if (ended(group->rank))
        return HX_ENDED;
    while (group->offset < route->bytes) {
        uint8_t *here = (uint8_t *)data + group->offset;
        uint64_t bytes = lesser(route->bytes - group->offset, group->rank->area_bytes);
        if (!group->published) {
            int result = publish_round(group, here, route->contributors & self ? bytes : 0);
            if (result != HX_DONE)
                return result;
        }
        if (route->contributors != self) {
            int result = await_round(group, route->contributors);
            if (result != HX_DONE)
                return result;
            add_up(group, route, here, bytes);
        }
        group->published = 0;
        group->offset += bytes;
    }
    return end_message(group);
}

/* Counts the time of a call of this rank that began at `began_ns`, and returns the call's result. */
static inline int timed(hx_rank *rank, uint64_t began_ns, int result)
{
    rank->busy_ns += now_ns() - began_ns;
    return result;
}

EXPORT int hx_share(hx_group *group, const hx_route *route, void *data)
{
    uint64_t began_ns = now_ns();
    return timed(group->rank, began_ns, share(group, route, data));
}

/* Returns how many bytes of a seat's part lie in the current slice. */
static inline uint64_t in_slice(const hx_group *group, uint64_t part_bytes)
{
    return part_bytes > group->offset ? lesser(part_bytes - group->offset, group->rank->area_bytes) : 0;
}

static int read_parts(hx_group *group, const hx_gathering *gathering, uint8_t *out)
{
    uint64_t seats = 0;
    for (uint64_t seat = 0; seat < group->size; seat++)
        if (in_slice(group, gathering->bytes[seat]))
            seats |= UINT64_C(1) << seat;
    int result = await_round(group, seats);
    if (result != HX_DONE)
        return result;
    for (uint64_t seat = 0; seat < group->size; out += gathering->bytes[seat++]) {
        uint64_t bytes = in_slice(group, gathering->bytes[seat]);
        if (bytes)
            memcpy(out + group->offset, area(group, seat, group->round), bytes);
    }
    return HX_DONE;
}

static int gather(hx_group *group, const hx_gathering *gathering, const void *mine, void *out)
{
    if (ended(group->rank))
        return HX_ENDED;
    while (group->offset < gathering->longest) {
        if (!group->published) {
            uint64_t bytes = in_slice(group, gathering->bytes[group->own]);
            int result = publish_round(group, bytes ? (const uint8_t *)mine + group->offset : NULL, bytes);
            if (result != HX_DONE)
                return result;
        }
        int result = read_parts(group, gathering, out);
        if (result != HX_DONE)
            return result;
        group->published = 0;
        group->offset += group->rank->area_bytes;
    }
    return end_message(group);
}

EXPORT int hx_gather(hx_group *group, const hx_gathering *gathering, const void *mine, void *out)
{
    uint64_t began_ns = now_ns();
    return timed(group->rank, began_ns, gather(group, gathering, mine, out));
}

/* ---- Links ---------------------------------------------------------------------------------------------------- */

static inline uint8_t *message_area(const hx_link *link, uint64_t number)
{
    return link->rank->memory + link->areas[number % HX_LINK_DEPTH];
}

/* Returns all receivers of a link as a mask. */
static inline uint64_t receivers_of(const hx_link *link)
{
    return link->size == 64 ? ~UINT64_C(0) : (UINT64_C(1) << link->size) - 1;
}

/* Returns how many messages this many bytes take. */
static inline uint64_t messages_of(const hx_link *link, uint64_t bytes)
{
    return (bytes + link->rank->area_bytes - 1) / link->rank->area_bytes;
}

static int send_tensor(hx_link *link, const void *data, uint64_t bytes)
{
    hx_rank *rank = link->rank;
    uint64_t receivers = receivers_of(link);
    if (ended(rank))
        return HX_ENDED;
    while (link->offset < bytes) {
        uint64_t number = link->number + 1, part = lesser(bytes - link->offset, rank->area_bytes);
        uint64_t needed = number > HX_LINK_DEPTH ? number - HX_LINK_DEPTH : 0;
        int result = await_seats(rank, link->taken, receivers, needed, &link->late);
        if (result != HX_DONE)
            return result;
        memcpy(message_area(link, number), (const uint8_t *)data + link->offset, part);
        publish(rank, link->sent, number, link->receivers, link->size);
        link->number = number;
        link->offset += part;
        rank->published_bytes += part;
    }
    rank->messages += bytes > 0;
    link->offset = 0;
    return HX_DONE;
}

EXPORT int hx_send(hx_link *link, const void *data, uint64_t bytes)
{
    uint64_t began_ns = now_ns();
    return timed(link->rank, began_ns, send_tensor(link, data, bytes));
}

static int receive_tensor(hx_link *link, void *out, uint64_t bytes)
{
    hx_rank *rank = link->rank;
    if (ended(rank))
        return HX_ENDED;
    while (link->offset < bytes) {
        uint64_t number = link->number + 1, part = lesser(bytes - link->offset, rank->area_bytes);
        int result = await_seats(rank, &link->sent, 1, number, &link->late);
        if (result != HX_DONE)
            return result;
        memcpy((uint8_t *)out + link->offset, message_area(link, number), part);
        publish(rank, link->taken[link->own], number, &link->source, 1);
        link->number = number;
        link->offset += part;
    }
    link->offset = 0;
    return HX_DONE;
}

EXPORT int hx_receive(hx_link *link, void *out, uint64_t bytes)
{
    uint64_t began_ns = now_ns();
    return timed(link->rank, began_ns, receive_tensor(link, out, bytes));
}

EXPORT int hx_free(const hx_link *link, uint64_t last)
{
    uint64_t needed = last > HX_LINK_DEPTH ? last - HX_LINK_DEPTH : 0;
    for (uint64_t i = 0; i < link->size; i++)
        if (!reached(link->rank, link->taken[i], needed))
            return 0;
    return 1;
}

EXPORT int hx_arrived(hx_link *link, uint64_t bytes)
{
    if (ended(link->rank))
        return HX_ENDED;
    uint64_t began_ns = now_ns(), last = link->number + messages_of(link, bytes);
    return timed(link->rank, began_ns, await_seats(link->rank, &link->sent, 1, last, &link->late));
}

EXPORT int hx_pass(hx_link *link, uint64_t bytes)
{
    hx_rank *rank = link->rank;
    if (ended(rank))
        return HX_ENDED;
    link->number += messages_of(link, bytes);
    if (rank->rank == link->source) {
        publish(rank, link->sent, link->number, link->receivers, link->size);
        rank->published_bytes += bytes;
        rank->messages += bytes > 0;
    } else {
        publish(rank, link->taken[link->own], link->number, &link->source, 1);
    }
    return HX_DONE;
}

/* ---- Build identity ------------------------------------------------------------------------------------------- */

EXPORT const char *hx_source(void)
{
    return HX_SOURCE;
}
