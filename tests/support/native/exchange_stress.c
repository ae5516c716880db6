/* Drives native_exchange.c or, with OVER_TCP, native_tcp.c as ranks do, with threads for ranks, so that sanitizers see
 * everything.
 *
 *     exchange_stress RANKS ROUNDS SEED
 *
 * Every rank plays the same random script of rounds, gatherings and messages over links, of random sizes (also empty, odd
 * and longer than an area), with pauses of its own, and compares each element with what arithmetic says it must be. Waits
 * spin and yield so shortly that most end in sleep. Then one rank ends the exchange while the others wait. Exit status: 0
 * if all was right, 1 for a wrong element, 2 for a wait that nobody ended in PATIENCE.
 */
#define _GNU_SOURCE
#include "native_exchange.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifdef OVER_TCP
enum { MAX_RANKS = 8, MAX_ELEMENTS = 8000 };
static const uint64_t PATIENCE_NS = UINT64_C(30000000000); /* the kernel asks for a closed window after up to 3 s */
#else
enum { MAX_RANKS = 8, AREA_BYTES = 256, MAX_ELEMENTS = 1500 };
static const uint64_t PATIENCE_NS = UINT64_C(5000000000);
#endif

#ifdef OVER_TCP
typedef hx_tcp_rank any_rank;
typedef hx_tcp_group any_group;
typedef hx_tcp_link any_link;
#define SHARE hx_tcp_share
#define GATHER hx_tcp_gather
#define SEND hx_tcp_send
#define RECEIVE hx_tcp_receive
#define END hx_tcp_end
#else
typedef hx_rank any_rank;
typedef hx_group any_group;
typedef hx_link any_link;
#define SHARE hx_share
#define GATHER hx_gather
#define SEND hx_send
#define RECEIVE hx_receive
#define END hx_end
#endif

typedef struct {
    any_rank rank;
    any_group world, pair; /* pair: the last two ranks */
    any_link out, back;    /* from rank 0 to all others, from the last rank to rank 0 */
} ends;

static uint64_t num_ranks, num_rounds, seed;

static uint64_t next(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = (*state ^ (*state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

/* Small whole numbers, so that sums are exact in every type. */
static float value(uint64_t round, uint64_t rank, uint64_t i)
{
    return (float)((round * 7 + rank * 5 + i * 3) % 13);
}

static void fail(const char *what, uint64_t round, uint64_t rank, uint64_t i, float is, float must)
{
    fprintf(stderr, "%s: round %llu rank %llu element %llu is %g instead of %g\n", what, (unsigned long long)round,
            (unsigned long long)rank, (unsigned long long)i, (double)is, (double)must);
    _Exit(1);
}

static void expect_done(int code, const char *what, uint64_t round)
{
    if (code != HX_DONE) {
        fprintf(stderr, "%s: round %llu answered %d\n", what, (unsigned long long)round, code);
        _Exit(2);
    }
}

#ifdef OVER_TCP
enum { CONTROL, WORLD, PAIR = WORLD + HX_MAX_LANES, OUT = PAIR + HX_MAX_LANES, BACK, PURPOSES, RING_BYTES = 512,
       LINK_BYTES = 2048, SPLIT_BYTES = 1024, SOCKET_BYTES = 4096 };
static int32_t wires[MAX_RANKS][MAX_RANKS][PURPOSES]; /* by rank, other rank and purpose */

static int socket_of(int number)
{
    int on = 1, bytes = SOCKET_BYTES;
    if (number < 0 || setsockopt(number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) ||
        setsockopt(number, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) ||
        setsockopt(number, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes)) {
        perror("socket");
        _Exit(64);
    }
    return number;
}

static void connect_all(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket_of(socket(AF_INET, SOCK_STREAM, 0));
    if (bind(listener, (void *)&address, size) || listen(listener, 1) || getsockname(listener, (void *)&address, &size))
        _Exit(64);
    for (uint64_t a = 0; a < num_ranks; a++)
        for (uint64_t b = a + 1; b < num_ranks; b++)
            for (int purpose = 0; purpose < PURPOSES; purpose++) {
                wires[a][b][purpose] = socket_of(socket(AF_INET, SOCK_STREAM, 0));
                if (connect(wires[a][b][purpose], (void *)&address, sizeof address))
                    _Exit(64);
                wires[b][a][purpose] = socket_of(accept(listener, NULL, NULL));
            }
    close(listener);
}

static void disconnect_all(void)
{
    for (uint64_t a = 0; a < num_ranks; a++)
        for (uint64_t b = 0; b < num_ranks; b++)
            for (int purpose = 0; a != b && purpose < PURPOSES; purpose++)
                close(wires[a][b][purpose]);
}

static void make_group(hx_tcp_group *group, ends *mine, uint64_t first, int purpose, uint8_t *rings)
{
    group->rank = &mine->rank;
    group->size = num_ranks - first;
    group->own = mine->rank.rank - first;
    group->num_lanes = HX_MAX_LANES;
    group->rings = rings;
    for (uint64_t seat = 0; seat < group->size; seat++) {
        group->ranks[seat] = first + seat;
        for (int lane = 0; lane < HX_MAX_LANES; lane++)
            group->wires[lane][seat] = wires[mine->rank.rank][first + seat][purpose + lane];
    }
}

static void make_link(hx_tcp_link *link, ends *mine, uint64_t source, uint64_t first, uint64_t last, int purpose)
{
    static _Thread_local uint8_t ring[LINK_BYTES]; /* a rank receives over one link at most */
    uint64_t self = mine->rank.rank;
    link->rank = &mine->rank;
    link->source = source;
    if (self == source) {
        for (uint64_t rank = first; rank <= last; rank++) {
            link->wires[link->size] = wires[self][rank][purpose];
            link->receivers[link->size++] = rank;
        }
    } else if (self >= first && self <= last) {
        link->size = 1;
        link->wires[0] = wires[self][source][purpose];
        link->ring = ring;
        link->ring_bytes = sizeof ring;
        link->next = mine->rank.incoming;
        mine->rank.incoming = link;
    }
}

static void prepare(ends *mine, uint64_t rank)
{
    static _Thread_local uint8_t rings[2][HX_MAX_LANES * MAX_RANKS * RING_BYTES];
    static _Thread_local int32_t all[MAX_RANKS * PURPOSES];
    memset(mine, 0, sizeof *mine);
    mine->rank = (hx_tcp_rank){.rank = rank, .world_size = num_ranks, .wires = all, .ring_bytes = RING_BYTES,
                               .split_bytes = SPLIT_BYTES, .spin_ns = 2000, .yield_ns = 20000, .nap_ns = PATIENCE_NS};
    for (uint64_t peer = 0; peer < num_ranks; peer++) {
        mine->rank.controls[peer] = wires[rank][peer][CONTROL];
        for (int purpose = WORLD; peer != rank && purpose < PURPOSES; purpose++)
            all[mine->rank.num_wires++] = wires[rank][peer][purpose];
    }
    make_group(&mine->world, mine, 0, WORLD, rings[0]);
    if (rank + 2 >= num_ranks)
        make_group(&mine->pair, mine, num_ranks - 2, PAIR, rings[1]);
    mine->pair.size = 2;
    make_link(&mine->out, mine, 0, 1, num_ranks - 1, OUT);
    make_link(&mine->back, mine, num_ranks - 1, 0, 0, BACK);
}

static int allocate(void)
{
    connect_all();
    return 1;
}

static void release(void)
{
    disconnect_all();
}
#else
static uint8_t *memory;

static void lay_out_group(hx_group *group, uint64_t first, uint64_t *line, uint64_t *area)
{
    group->size = num_ranks - first;
    for (uint64_t seat = 0; seat < group->size; seat++) {
        group->ranks[seat] = first + seat;
        group->counters[seat] = (*line)++ * HX_LINE_BYTES;
        for (int parity = 0; parity < 2; parity++, *area += AREA_BYTES)
            group->areas[seat][parity] = *area;
    }
}

static void lay_out_link(hx_link *link, uint64_t source, uint64_t first, uint64_t end, uint64_t *line, uint64_t *area)
{
    link->source = source;
    link->sent = (*line)++ * HX_LINE_BYTES;
    for (uint64_t rank = first; rank < end; rank++) {
        link->receivers[link->size] = rank;
        link->taken[link->size++] = (*line)++ * HX_LINE_BYTES;
    }
    for (int i = 0; i < HX_LINK_DEPTH; i++, *area += AREA_BYTES)
        link->areas[i] = *area;
}

/* Returns the bytes of memory that it takes. */
static uint64_t lay_out(ends *mine, uint64_t rank)
{
    uint64_t line = 1 + num_ranks, area = 64 * HX_LINE_BYTES;
    memset(mine, 0, sizeof *mine);
    lay_out_group(&mine->world, 0, &line, &area);
    lay_out_group(&mine->pair, num_ranks - 2, &line, &area);
    lay_out_link(&mine->out, 0, 1, num_ranks, &line, &area);
    lay_out_link(&mine->back, num_ranks - 1, 0, 1, &line, &area);
    mine->rank = (hx_rank){.memory = memory, .rank = rank, .world_size = num_ranks, .area_bytes = AREA_BYTES,
                           .spin_ns = 2000, .yield_ns = 20000, .nap_ns = PATIENCE_NS};
    mine->world.own = rank;
    mine->pair.own = rank - (num_ranks - 2);
    mine->out.own = rank - 1;
    mine->world.rank = mine->pair.rank = mine->out.rank = mine->back.rank = &mine->rank;
    return area;
}

static void prepare(ends *mine, uint64_t rank)
{
    lay_out(mine, rank);
}

static int allocate(void)
{
    ends measured;
    uint64_t total_bytes = lay_out(&measured, 0);
    memory = aligned_alloc(4096, (total_bytes + 4095) / 4096 * 4096);
    if (memory != NULL)
        memset(memory, 0, total_bytes);
    return memory != NULL;
}

static void release(void)
{
    free(memory);
}
#endif

static uint64_t random_size(uint64_t *script)
{
    static const uint64_t SIZES[] = {0, 1, 3, 63, 64, 65, 255, 256, 257, MAX_ELEMENTS};
    return SIZES[next(script) % (sizeof SIZES / sizeof *SIZES)];
}

static void play_share(any_group *group, uint64_t *script, uint64_t round, int takes_part)
{
    float data[MAX_ELEMENTS];
    uint16_t halves[MAX_ELEMENTS];
    uint64_t elements = random_size(script), is_half = next(script) & 1;
    uint64_t contributors = 1 + next(script) % ((UINT64_C(1) << group->size) - 1);
    if (!takes_part)
        return;
    for (uint64_t i = 0; i < elements; i++) {
        data[i] = contributors >> group->own & 1 ? value(round, group->ranks[group->own], i) : -1.0f;
        uint32_t bits;
        memcpy(&bits, &data[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16); /* bfloat16 */
    }
    hx_route route = {.bytes = elements * (is_half ? 2 : 4), .dtype = is_half ? HX_BFLOAT16 : HX_FLOAT32,
                      .contributors = contributors};
    expect_done(SHARE(group, &route, is_half ? (void *)halves : (void *)data), "share", round);
    for (uint64_t i = 0; i < elements; i++) {
        float must = 0, is = data[i];
        for (uint64_t seat = 0; seat < group->size; seat++)
            must += contributors >> seat & 1 ? value(round, group->ranks[seat], i) : 0;
        uint32_t bits = (uint32_t)halves[i] << 16;
        if (is_half)
            memcpy(&is, &bits, sizeof is);
        if (is != must)
            fail("share", round, group->ranks[group->own], i, is, must);
    }
}

static void play_gather(any_group *group, uint64_t *script, uint64_t round)
{
    static _Thread_local float out[MAX_RANKS * MAX_ELEMENTS];
    float mine[MAX_ELEMENTS];
    hx_gathering gathering = {.longest = 0};
    uint64_t counts[MAX_RANKS], own = group->own, at = 0;
    for (uint64_t seat = 0; seat < group->size; seat++) {
        counts[seat] = random_size(script);
        gathering.bytes[seat] = 4 * counts[seat];
        gathering.longest = gathering.longest > 4 * counts[seat] ? gathering.longest : 4 * counts[seat];
    }
    for (uint64_t i = 0; i < counts[own]; i++)
        mine[i] = value(round, own, i);
    expect_done(GATHER(group, &gathering, mine, out), "gather", round);
    for (uint64_t seat = 0; seat < group->size; seat++)
        for (uint64_t i = 0; i < counts[seat]; i++, at++)
            if (out[at] != value(round, seat, i))
                fail("gather", round, own, i, out[at], value(round, seat, i));
}

#ifdef OVER_TCP
#define send_directly SEND
#define receive_directly RECEIVE
#else
static inline uint64_t message_bytes(uint64_t left)
{
    return left < AREA_BYTES ? left : AREA_BYTES;
}

static uint8_t *message_area(const hx_link *link, uint64_t number)
{
    return link->rank->memory + link->areas[number % HX_LINK_DEPTH];
}

/* As a device does which writes to the areas by itself, if there is room. */
static int send_directly(hx_link *link, const void *data, uint64_t bytes)
{
    if (!hx_free(link, link->number + (bytes + AREA_BYTES - 1) / AREA_BYTES))
        return hx_send(link, data, bytes);
    for (uint64_t at = 0; at < bytes; at += AREA_BYTES)
        memcpy(message_area(link, link->number + 1 + at / AREA_BYTES), (const uint8_t *)data + at,
               message_bytes(bytes - at));
    return hx_pass(link, bytes);
}

/* As a device does which reads the areas by itself. */
static int receive_directly(hx_link *link, void *out, uint64_t bytes)
{
    int result = HX_DONE;
    for (uint64_t at = 0; at < bytes && result == HX_DONE; at += AREA_BYTES) {
        uint64_t part = message_bytes(bytes - at);
        if ((result = hx_arrived(link, part)) != HX_DONE)
            break;
        memcpy((uint8_t *)out + at, message_area(link, link->number + 1), part);
        result = hx_pass(link, part);
    }
    return result;
}

#endif

static void play_link(any_link *link, uint64_t rank, uint64_t *script, uint64_t round)
{
    float data[MAX_ELEMENTS];
    for (uint64_t tensors = 1 + next(script) % 6; tensors; tensors--) {
        uint64_t elements = random_size(script);
        if (rank == link->source) {
            for (uint64_t i = 0; i < elements; i++)
                data[i] = value(round + tensors, rank, i);
            expect_done((round % 2 ? SEND : send_directly)(link, data, 4 * elements), "send", round);
        } else if (rank == 0 || link->source == 0) {
            expect_done((round % 3 ? RECEIVE : receive_directly)(link, data, 4 * elements), "receive", round);
            for (uint64_t i = 0; i < elements; i++)
                if (data[i] != value(round + tensors, link->source, i))
                    fail("receive", round, rank, i, data[i], value(round + tensors, link->source, i));
        }
    }
}

static void pause_sometimes(uint64_t *pauses)
{
    struct timespec time = {.tv_nsec = (long)(next(pauses) % 200000)};
    uint64_t drawn = next(pauses) % 256;
    if (drawn == 0)
        nanosleep(&time, NULL);
    else if (drawn < 8)
        sched_yield();
}

/* All but rank 0 wait for a round that it never comes to. */
static void play_end(ends *mine)
{
    float number = 1;
    hx_route route = {.bytes = 4, .dtype = HX_FLOAT32, .contributors = (UINT64_C(1) << num_ranks) - 1};
    struct timespec time = {.tv_nsec = 20000000};
    if (mine->rank.rank == 0) {
        nanosleep(&time, NULL);
        END(&mine->rank, 1);
    } else if (SHARE(&mine->world, &route, &number) != HX_ENDED) {
        fprintf(stderr, "a wait did not end with the exchange\n");
        _Exit(2);
    }
}

static void *play(void *rank_number)
{
    uint64_t rank = (uint64_t)(uintptr_t)rank_number, script = seed, pauses = seed * 1000 + rank;
    ends mine;
    prepare(&mine, rank);
    for (uint64_t round = 0; round < num_rounds; round++) {
        pause_sometimes(&pauses);
        switch (next(&script) % 8) {
        case 0:
            play_gather(&mine.world, &script, round);
            break;
        case 1:
            play_link(&mine.out, rank, &script, round);
            break;
        case 2:
            play_link(&mine.back, rank, &script, round);
            break;
        case 3:
        case 4:
            play_share(&mine.pair, &script, round, rank + 2 >= num_ranks);
            break;
        default:
            play_share(&mine.world, &script, round, 1);
        }
    }
    play_end(&mine);
    return NULL;
}

int main(int count, char **arguments)
{
    pthread_t threads[MAX_RANKS];
    num_ranks = count == 4 ? strtoull(arguments[1], NULL, 10) : 0;
    if (num_ranks < 2 || num_ranks > MAX_RANKS)
        return fprintf(stderr, "usage: exchange_stress RANKS(2-8) ROUNDS SEED\n"), 64;
    num_rounds = strtoull(arguments[2], NULL, 10);
    seed = strtoull(arguments[3], NULL, 10);
    if (!allocate())
        return 64;
    for (uint64_t rank = 0; rank < num_ranks; rank++)
        if (pthread_create(&threads[rank], NULL, play, (void *)(uintptr_t)rank))
            return 64;
    for (uint64_t rank = 0; rank < num_ranks; rank++)
        pthread_join(threads[rank], NULL);
    release();
    return 0;
}
