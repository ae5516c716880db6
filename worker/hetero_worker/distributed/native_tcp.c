/* Rounds and links over TCP; native_exchange.h says what the functions promise. How they keep it:
 *
 * Rounds. Every contributor sends its bytes to every other rank of the group, and every rank adds them as native_exchange.c
 * does. All ranks know the length of a message before it begins, so connections carry nothing but bytes. A call goes over
 * all connections that are not done, sends and receives what the kernel takes and has, and adds what all contributors have
 * brought, until everything is done. What came from a contributor waits in a ring. A part of the sum replaces a rank's own
 * bytes once these are sent to all. The rank that has added least always goes on: it has room for what others send, and the
 * others have room for what it sends. So no length of message blocks the group.
 *
 * Lanes. A message of split_bytes or more is cut into one part for each lane; each lane has connections of its own.
 *
 * Ends. A rank's death ends its connections, which whoever waits for it sees at once. A rank that ends the exchange first
 * says why, in a word over its controls, then shuts its connections. Whoever finds a connection shut looks for that word.
 * So all ranks learn of the same lost rank, or that nobody was lost.
 */
#define _GNU_SOURCE
#include "native_exchange.h"
#include "native_waits.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

enum { MOST_WATCHED = 1024 };
#define UNWATCHED_NS 1000000u      /* longest sleep if there are more connections than that */
#define LAST_WORD_NS 1000000000u   /* longest wait for the word of a rank whose connection is shut */

/* Connections that a pass over a call's work left undone. */
typedef struct {
    struct pollfd wires[MOST_WATCHED];
    uint64_t count;
    int moved;     /* 1 if the pass moved any byte */
    uint64_t lost; /* 1 + number of the rank whose connection is at its end */
} pass;

/* Does what can be done now. Returns 1 when everything is. */
typedef int (*work)(void *call, pass *now);

static const uint64_t ELEMENT_BYTES[HX_NUM_DTYPES] = {4, 2, 2};

/* ---- Ends ----------------------------------------------------------------------------------------------------- */

static inline int ended(hx_tcp_rank *rank)
{
    return atomic_load_explicit(&rank->closed, memory_order_acquire) != 0 ||
           atomic_load_explicit(&rank->word, memory_order_acquire) != 0;
}

static void shut_wires(const hx_tcp_rank *rank)
{
    for (uint64_t i = 0; i < rank->num_wires; i++)
        shutdown(rank->wires[i], SHUT_RDWR);
}

EXPORT void hx_tcp_end(hx_tcp_rank *rank, uint64_t word)
{
    uint64_t open = 0;
    if (!atomic_compare_exchange_strong(&rank->word, &open, word))
        return;
    for (uint64_t peer = 0; peer < rank->world_size; peer++)
        if (peer != rank->rank)
            (void)!send(rank->controls[peer], &word, sizeof word, MSG_NOSIGNAL | MSG_DONTWAIT);
    shut_wires(rank);
}

EXPORT void hx_tcp_leave(hx_tcp_rank *rank)
{
    atomic_store(&rank->closed, 1);
    shut_wires(rank);
    for (uint64_t peer = 0; peer < rank->world_size; peer++)
        if (peer != rank->rank)
            shutdown(rank->controls[peer], SHUT_RDWR);
}

static inline int would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS || errno == ENOMEM;
}

/* Takes a word off a control that has something. */
static void hear(hx_tcp_rank *rank, uint64_t peer)
{
    uint64_t word = 0;
    ssize_t bytes = recv(rank->controls[peer], &word, sizeof word, MSG_DONTWAIT);
    if (bytes == sizeof word && word >= HX_ABORTED && word < HX_FIRST_LOST + rank->world_size)
        hx_tcp_end(rank, word);
    else if (bytes >= 0 || !would_block())
        rank->deaf |= UINT64_C(1) << peer;
}

static inline struct timespec timespec_of(uint64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
}

/* Whether a control says something soon. A signal ends no wait. */
static int has_last_word(int control)
{
    struct pollfd polled = {.fd = control, .events = POLLIN};
    uint64_t time_ns = now_ns(), until_ns = time_ns + LAST_WORD_NS;
    int found;
    do {
        struct timespec time = timespec_of(until_ns - time_ns);
        found = ppoll(&polled, 1, &time, NULL);
    } while (found < 0 && errno == EINTR && (time_ns = now_ns()) < until_ns);
    return found > 0;
}

/* Ends the exchange because a connection to this rank is at its end: with its last word, if it left one. */
static int lose(hx_tcp_rank *rank, uint64_t peer)
{
    if (!ended(rank) && !(rank->deaf >> peer & 1) && has_last_word(rank->controls[peer]))
        hear(rank, peer);
    if (!ended(rank))
        hx_tcp_end(rank, HX_FIRST_LOST + peer);
    return HX_ENDED;
}

/* ---- Bytes ---------------------------------------------------------------------------------------------------- */

static inline void watch(pass *now, int fd, short events)
{
    if (now->count < MOST_WATCHED)
        now->wires[now->count] = (struct pollfd){.fd = fd, .events = events};
    now->count++;
}

/* Sends what the kernel takes of the bytes from `done` on. Returns how many those are. */
static uint64_t push(pass *now, uint64_t peer, int fd, const uint8_t *from, uint64_t bytes)
{
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t taken = send(fd, from + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (taken < 0 && !would_block())
            now->lost = 1 + peer;
        if (taken < 0) {
            watch(now, fd, POLLOUT);
            break;
        }
        done += (uint64_t)taken;
    }
    now->moved |= done > 0;
    return done;
}

/* Receives up to this many bytes, one or more if there are any. */
static uint64_t pull(pass *now, uint64_t peer, int fd, uint8_t *to, uint64_t bytes)
{
    ssize_t brought = recv(fd, to, bytes, MSG_DONTWAIT);
    if (brought > 0) {
        now->moved = 1;
        return (uint64_t)brought;
    }
    if (brought == 0 || !would_block())
        now->lost = 1 + peer;
    else
        watch(now, fd, POLLIN);
    return 0;
}

/* Takes what has come over links into their rings, as far as these have room. Returns how many bytes those are. */
static uint64_t take_in(hx_tcp_rank *rank)
{
    uint64_t bytes = 0;
    for (hx_tcp_link *link = rank->incoming; link; link = link->next) {
        while (!link->broken && link->filled - link->emptied < link->ring_bytes) {
            uint64_t at = link->filled % link->ring_bytes;
            uint64_t room = lesser(link->ring_bytes - at, link->ring_bytes - (link->filled - link->emptied));
            ssize_t brought = recv(link->wires[0], link->ring + at, room, MSG_DONTWAIT);
            if (brought < 0 && would_block())
                break;
            link->broken = brought <= 0;
            link->filled += brought > 0 ? (uint64_t)brought : 0;
            bytes += brought > 0 ? (uint64_t)brought : 0;
        }
    }
    return bytes;
}

/* ---- Waits ---------------------------------------------------------------------------------------------------- */

/* Sleeps until a connection of the pass can go on, anything comes over a link, or a control says something. */
static void doze(hx_tcp_rank *rank, pass *now, uint64_t for_ns)
{
    uint64_t first = now->count;
    for (uint64_t peer = 0; peer < rank->world_size; peer++)
        if (peer != rank->rank && !(rank->deaf >> peer & 1))
            watch(now, rank->controls[peer], POLLIN);
    uint64_t controls_end = now->count;
    for (hx_tcp_link *link = rank->incoming; link; link = link->next)
        if (!link->broken && link->filled - link->emptied < link->ring_bytes)
            watch(now, link->wires[0], POLLIN);
    struct timespec time = timespec_of(now->count > MOST_WATCHED ? lesser(for_ns, UNWATCHED_NS) : for_ns);
    if (ppoll(now->wires, lesser(now->count, MOST_WATCHED), &time, NULL) <= 0 || controls_end > MOST_WATCHED)
        return;
    uint64_t peer = 0;
    for (uint64_t i = first; i < controls_end; i++, peer++) {
        while (now->wires[i].fd != rank->controls[peer] || peer == rank->rank)
            peer++;
        if (now->wires[i].revents)
            hear(rank, peer);
    }
}

static int complete_untimed(hx_tcp_rank *rank, work advance, void *call)
{
    pass now;
    uint64_t began_ns = 0, idle_ns = 0;
    for (;;) {
        if (ended(rank))
            return HX_ENDED;
        now.count = now.lost = 0;
        now.moved = 0;
        if (advance(call, &now))
            return HX_DONE;
        if (now.lost)
            return ended(rank) ? HX_ENDED : lose(rank, now.lost - 1);
        uint64_t time_ns = now_ns();
        began_ns = began_ns ? began_ns : time_ns;
        idle_ns = now.moved || !idle_ns ? time_ns : idle_ns;
        uint64_t waited_ns = time_ns - idle_ns;
        if (time_ns - began_ns >= rank->nap_ns)
            return HX_WAITING;
        if (waited_ns < rank->spin_ns) {
            relax();
            continue;
        }
        if (take_in(rank))
            continue; /* it may be what this call waits for, which no connection would say again */
        if (waited_ns < rank->yield_ns)
            sched_yield();
        else
            doze(rank, &now, rank->nap_ns - (time_ns - began_ns));
    }
}

static int complete(hx_tcp_rank *rank, work advance, void *call)
{
    uint64_t began_ns = now_ns();
    int result = complete_untimed(rank, advance, call);
    rank->busy_ns += now_ns() - began_ns;
    return result;
}

/* ---- Rounds --------------------------------------------------------------------------------------------------- */

typedef struct {
    hx_tcp_group *group;
    const hx_route *route;
    uint8_t *data;
} sharing;

typedef struct {
    hx_tcp_group *group;
    const hx_gathering *gathering;
    const uint8_t *mine;
    uint8_t *out;
} collecting;

static void begin(hx_tcp_group *group)
{
    if (group->begun)
        return;
    memset(group->sent, 0, sizeof group->sent);
    memset(group->got, 0, sizeof group->got);
    memset(group->added, 0, sizeof group->added);
    group->begun = 1;
    group->round++;
}

static int end(hx_tcp_group *group, int result, uint64_t published_bytes)
{
    if (result == HX_DONE) {
        group->begun = 0;
        group->rank->rounds++;
        group->rank->published_bytes += published_bytes;
    }
    return result;
}

static int push_to(hx_tcp_group *group, pass *now, uint64_t lane, uint64_t seat, const uint8_t *from, uint64_t bytes)
{
    uint64_t *sent = &group->sent[lane][seat];
    if (*sent < bytes) {
        uint64_t done = push(now, group->ranks[seat], group->wires[lane][seat], from + *sent, bytes - *sent);
        *sent += done;
        group->moved += done;
    }
    group->late |= (uint64_t)(*sent < bytes) << seat;
    return *sent == bytes;
}

/* Receives a seat's bytes where they belong. */
static int pull_from(hx_tcp_group *group, pass *now, uint64_t lane, uint64_t seat, uint8_t *to, uint64_t bytes)
{
    uint64_t *got = &group->got[lane][seat];
    if (*got < bytes) {
        uint64_t done = pull(now, group->ranks[seat], group->wires[lane][seat], to + *got, bytes - *got);
        *got += done;
        group->moved += done;
    }
    group->late |= (uint64_t)(*got < bytes) << seat;
    return *got == bytes;
}

static inline uint8_t *ring_of(const hx_tcp_group *group, uint64_t lane, uint64_t seat)
{
    return group->rings + (lane * group->size + seat) * group->rank->ring_bytes;
}

/* Receives as much of a seat's bytes as its ring has room for. */
static void fill(hx_tcp_group *group, pass *now, uint64_t lane, uint64_t seat, uint64_t bytes)
{
    uint64_t *got = &group->got[lane][seat], ring_bytes = group->rank->ring_bytes;
    for (;;) {
        uint64_t at = *got % ring_bytes, room = ring_bytes - (*got - group->added[lane]);
        uint64_t most = lesser(lesser(ring_bytes - at, room), bytes - *got);
        uint8_t *to = ring_of(group, lane, seat) + at;
        uint64_t done = most ? pull(now, group->ranks[seat], group->wires[lane][seat], to, most) : 0;
        *got += done;
        group->moved += done;
        if (!done)
            break;
    }
    group->late |= (uint64_t)(*got < bytes) << seat;
}

/* Adds what all contributors have brought and this rank, if it is one, has sent to all. */
static void add_up(hx_tcp_group *group, const hx_route *route, uint64_t lane, uint8_t *data, uint64_t bytes)
{
    uint64_t ring_bytes = group->rank->ring_bytes, ready = bytes, *added = &group->added[lane];
    int sends = route->contributors >> group->own & 1;
    for (uint64_t seat = 0; seat < group->size; seat++) {
        if (seat != group->own && route->contributors >> seat & 1)
            ready = lesser(ready, group->got[lane][seat]);
        if (seat != group->own && sends)
            ready = lesser(ready, group->sent[lane][seat]);
    }
    ready = ready < bytes ? ready / 64 * 64 : bytes;
    while (*added < ready && (ready == bytes || ready - *added >= ring_bytes / 4)) {
        const void *terms[HX_MAX_SEATS];
        uint64_t num_terms = 0, at = *added % ring_bytes, part = lesser(ready - *added, ring_bytes - at);
        if (sends)
            memcpy(ring_of(group, lane, group->own) + at, data + *added, part);
        for (uint64_t left = route->contributors; left; left &= left - 1)
            terms[num_terms++] = ring_of(group, lane, (uint64_t)__builtin_ctzll(left)) + at;
        hx_sum(route->dtype, data + *added, terms, num_terms, part / ELEMENT_BYTES[route->dtype]);
        *added += part;
    }
}

static int share_lane(const sharing *call, pass *now, uint64_t lane, uint8_t *data, uint64_t bytes)
{
    hx_tcp_group *group = call->group;
    uint64_t contributors = call->route->contributors, self = UINT64_C(1) << group->own, others = contributors & ~self;
    int is_done = 1;
    for (uint64_t seat = 0; contributors & self && seat < group->size; seat++)
        if (seat != group->own)
            is_done &= push_to(group, now, lane, seat, data, bytes);
    if (contributors == others && !(others & (others - 1)))
        return pull_from(group, now, lane, (uint64_t)__builtin_ctzll(others), data, bytes);
    for (uint64_t left = others; left; left &= left - 1)
        fill(group, now, lane, (uint64_t)__builtin_ctzll(left), bytes);
    if (others)
        add_up(group, call->route, lane, data, bytes);
    return is_done && (!others || group->added[lane] == bytes);
}

static int advance_share(void *what, pass *now)
{
    const sharing *call = what;
    uint64_t bytes = call->route->bytes, lanes = bytes < call->group->rank->split_bytes ? 1 : call->group->num_lanes;
    uint64_t part = (bytes + 64 * lanes - 1) / (64 * lanes) * 64;
    int is_done = 1;
    call->group->late = 0;
    for (uint64_t lane = 0; lane < lanes; lane++) {
        uint64_t first = lesser(lane * part, bytes);
        is_done &= share_lane(call, now, lane, call->data + first, lesser(part, bytes - first));
    }
    return is_done && !now->lost;
}

EXPORT int hx_tcp_share(hx_tcp_group *group, const hx_route *route, void *data)
{
    sharing call = {group, route, data};
    if (!route->bytes)
        return ended(group->rank) ? HX_ENDED : HX_DONE;
    begin(group);
    int result = complete(group->rank, advance_share, &call);
    return end(group, result, route->contributors >> group->own & 1 ? route->bytes : 0);
}

static int advance_gather(void *what, pass *now)
{
    const collecting *call = what;
    hx_tcp_group *group = call->group;
    uint8_t *out = call->out;
    int is_done = 1;
    group->late = 0;
    for (uint64_t seat = 0; seat < group->size; out += call->gathering->bytes[seat++]) {
        if (seat == group->own)
            continue;
        is_done &= push_to(group, now, 0, seat, call->mine, call->gathering->bytes[group->own]);
        is_done &= pull_from(group, now, 0, seat, out, call->gathering->bytes[seat]);
    }
    return is_done && !now->lost;
}

EXPORT int hx_tcp_gather(hx_tcp_group *group, const hx_gathering *gathering, const void *mine, void *out)
{
    collecting call = {group, gathering, mine, out};
    uint64_t own_bytes = gathering->bytes[group->own], before = 0;
    if (!gathering->longest)
        return ended(group->rank) ? HX_ENDED : HX_DONE;
    begin(group);
    for (uint64_t seat = 0; seat < group->own; seat++)
        before += gathering->bytes[seat];
    if (own_bytes)
        memcpy(call.out + before, mine, own_bytes);
    return end(group, complete(group->rank, advance_gather, &call), own_bytes);
}

/* ---- Links ---------------------------------------------------------------------------------------------------- */

typedef struct {
    hx_tcp_link *link;
    uint8_t *data;
    uint64_t bytes;
} message;

static int end_tensor(hx_tcp_link *link, int result)
{
    if (result == HX_DONE) {
        memset(link->done, 0, sizeof link->done);
        link->number++;
    }
    return result;
}

static int advance_send(void *what, pass *now)
{
    const message *call = what;
    hx_tcp_link *link = call->link;
    link->late = 0;
    for (uint64_t i = 0; i < link->size; i++) {
        uint64_t left = call->bytes - link->done[i];
        uint64_t done = left ? push(now, link->receivers[i], link->wires[i], call->data + link->done[i], left) : 0;
        link->done[i] += done;
        link->moved += done;
        link->late |= (uint64_t)(done < left) << i;
    }
    return !link->late && !now->lost;
}

EXPORT int hx_tcp_send(hx_tcp_link *link, const void *data, uint64_t bytes)
{
    message call = {link, (uint8_t *)(uintptr_t)data, bytes};
    if (!bytes)
        return ended(link->rank) ? HX_ENDED : HX_DONE;
    int result = end_tensor(link, complete(link->rank, advance_send, &call));
    link->rank->published_bytes += result == HX_DONE ? bytes : 0;
    link->rank->messages += result == HX_DONE;
    return result;
}

/* Reads bytes off the ring, in one or two pieces. */
static void empty_ring(hx_tcp_link *link, uint8_t *data, uint64_t bytes)
{
    while (link->done[0] < bytes && link->emptied < link->filled) {
        uint64_t at = link->emptied % link->ring_bytes;
        uint64_t part = lesser(lesser(link->filled - link->emptied, link->ring_bytes - at), bytes - link->done[0]);
        memcpy(data + link->done[0], link->ring + at, part);
        link->emptied += part;
        link->done[0] += part;
        link->moved += part;
    }
}

static int advance_receive(void *what, pass *now)
{
    const message *call = what;
    hx_tcp_link *link = call->link;
    empty_ring(link, call->data, call->bytes);
    while (link->done[0] < call->bytes) {
        uint8_t *to = call->data + link->done[0];
        uint64_t done = pull(now, link->source, link->wires[0], to, call->bytes - link->done[0]);
        link->done[0] += done;
        link->moved += done;
        if (!done)
            break;
    }
    link->late = link->done[0] < call->bytes;
    return !link->late;
}

EXPORT int hx_tcp_receive(hx_tcp_link *link, void *out, uint64_t bytes)
{
    message call = {link, out, bytes};
    if (!bytes)
        return ended(link->rank) ? HX_ENDED : HX_DONE;
    return end_tensor(link, complete(link->rank, advance_receive, &call));
}
