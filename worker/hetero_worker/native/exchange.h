/* Rounds and links through memory that the ranks of one host share.
 *
 * The caller (Python, by ctypes; the stress test, in C) lays the memory out and tells where counters and areas lie; this
 * library moves bytes, adds, waits and wakes. It allocates nothing and keeps nothing: a rank's state is in the structs,
 * which the caller owns. They are of 64-bit fields only, so that any language can mirror them; HX_ABI changes with them.
 *
 * One thread of a rank calls; hx_end alone may come from any other.
 *
 * Every call that can block answers HX_WAITING when it has waited for nap_ns: the caller may then look whether the ranks
 * in `late` are alive, handle signals, give up, or make the same call with the same arguments again, which goes on where
 * it was. HX_ENDED: the end word is set, or `closed` is; nothing can be called with success any more.
 */
#ifndef HETERO_EXCHANGE_H
#define HETERO_EXCHANGE_H

#include <stdatomic.h>
#include <stdint.h>

#define HX_ABI 1
#define HX_MAX_SEATS 64  /* ranks of a group: sets of them are masks */
#define HX_LINK_DEPTH 8  /* messages that a link holds */
#define HX_LINE_BYTES 128

enum { HX_DONE = 0, HX_WAITING = 1, HX_ENDED = 2 };
enum { HX_FLOAT32 = 0, HX_BFLOAT16 = 1, HX_FLOAT16 = 2, HX_NUM_DTYPES = 3 };

/* Line 0 of the memory begins with the end word: 0 while the exchange lives. */

/* Line 1 + rank of the memory. */
typedef struct {
    _Atomic uint32_t bell;   /* the futex that this rank sleeps on; whoever wakes it adds one */
    _Atomic uint32_t asleep; /* whether a bell has to be rung */
    uint64_t mark;           /* the caller's */
} hx_seat;

/* One rank's attachment. */
typedef struct {
    uint8_t *memory;
    uint64_t rank;
    uint64_t world_size;
    uint64_t area_bytes; /* a multiple of 64, the same on every rank: most bytes of one round, or message */
    uint64_t spin_ns;    /* a wait spins so long, */
    uint64_t yield_ns;   /* gives its core to others until then, and sleeps; both since the wait began */
    uint64_t nap_ns;     /* HX_WAITING after this */
    _Atomic uint64_t closed;
    uint64_t published_bytes, rounds, messages; /* traffic, counted here */
} hx_rank;

/* The rounds of a group or subgroup. A seat is a rank's place among `ranks`, which ascend. */
typedef struct {
    hx_rank *rank;
    uint64_t size;
    uint64_t own;                        /* this rank's seat */
    uint64_t ranks[HX_MAX_SEATS];        /* numbers in the whole group */
    uint64_t counters[HX_MAX_SEATS];     /* offsets in bytes */
    uint64_t areas[HX_MAX_SEATS][2];     /* offsets, for even and odd rounds */
    uint64_t round;                      /* state, zero at first: published by this rank */
    uint64_t settled;                    /* all peers are known to have reached it */
    uint64_t offset;                     /* bytes of the message in hand that are done */
    uint64_t published;                  /* whether the slice in hand is */
    uint64_t late;                       /* seats that were waited for in vain */
} hx_group;

/* What a round shares; contributors are a mask of seats. */
typedef struct {
    uint64_t bytes;
    uint64_t dtype;
    uint64_t contributors; /* not empty; those not in it send nothing */
} hx_route;

/* What a gathering shares. */
typedef struct {
    uint64_t bytes[HX_MAX_SEATS]; /* by seat; `out` is all of them, one after another */
    uint64_t longest;
} hx_gathering;

/* One end of a link. Receivers ascend. */
typedef struct {
    hx_rank *rank;
    uint64_t source;                  /* numbers in the whole group */
    uint64_t size;                    /* of receivers */
    uint64_t own;                     /* this rank's place among them */
    uint64_t receivers[HX_MAX_SEATS];
    uint64_t sent;                    /* offset of the source's counter */
    uint64_t taken[HX_MAX_SEATS];     /* of the receivers' */
    uint64_t areas[HX_LINK_DEPTH];
    uint64_t number;                  /* state: messages that this end has sent, or taken */
    uint64_t offset;                  /* bytes of the tensor in hand that are done */
    uint64_t late;                    /* receivers, or bit 0 for the source, that were waited for in vain */
} hx_link;

uint64_t hx_abi(void);
/* First 16 hex digits of the sha256 of the sources it was built from, as they were told at build. */
const char *hx_source(void);
/* Bytes of hx_rank, hx_group, hx_route, hx_gathering, hx_link: 0 to 4. */
uint64_t hx_size(uint64_t which);

/* data becomes the sum of the contributors' data, in ascending order of seats, in fp32, rounded once. One contributor:
 * its bytes, whatever they are. Every rank of the group calls, with the same bytes, dtype and contributors. */
int hx_share(hx_group *group, const hx_route *route, void *data);
/* out: every seat's part. Every rank of the group calls, with the same gathering. */
int hx_gather(hx_group *group, const hx_gathering *gathering, const void *mine, void *out);

/* Returns when the link has taken it. */
int hx_send(hx_link *link, const void *data, uint64_t bytes);
int hx_receive(hx_link *link, void *out, uint64_t bytes);

/* The same in parts, for whoever reads or writes the areas by other means, as a device does. No other call for the link
 * may come between those for one tensor. */
/* Whether the areas up to message `last`, counted from 1 over the link's life, may be written. Does not wait. */
int hx_free(const hx_link *link, uint64_t last);
/* Returns when so many bytes of the tensor to come lie in the next areas. */
int hx_arrived(hx_link *link, uint64_t bytes);
/* Tells the other end that so many bytes were written to, or read from, the next areas. */
int hx_pass(hx_link *link, uint64_t bytes);

/* Sets the end word, if it is not set, and wakes all. From any thread. */
void hx_end(hx_rank *rank, uint64_t word);

/* out = terms[0] + terms[1] + …; the sum that hx_share takes. out is none of the terms. */
void hx_sum(uint64_t dtype, void *out, const void *const *terms, uint64_t num_terms, uint64_t elements);

#endif
