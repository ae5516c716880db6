/* Rounds and links between ranks: through memory that the ranks of one host share (hx_...), and over TCP (hx_tcp_...).
 *
 * The caller lays out the memory and says where counters and areas lie, or makes the connections. This library moves
 * bytes, adds, waits and wakes. It allocates nothing: the structs hold a rank's state, and the caller owns them.
 *
 * Python reads this file with cffi, without its preprocessor lines, and declares void pointers as integers. So limits
 * are enumerators, and nothing else may depend on a macro.
 *
 * One thread of a rank makes all calls; only hx_end, hx_tcp_end and hx_tcp_leave may come from another.
 *
 * A call that can block returns HX_WAITING after nap_ns. The caller may then check whether the ranks in `late` are alive,
 * handle signals, give up, or repeat the call with the same arguments, which continues where it was. HX_ENDED means that
 * the end word or `closed` is set: no later call succeeds.
 */
#ifndef HETERO_EXCHANGE_H
#define HETERO_EXCHANGE_H

#include <stdatomic.h>
#include <stdint.h>

enum hx_limits {
    HX_MAX_SEATS = 64, /* ranks of a group: a set of them is a mask */
    HX_LINK_DEPTH = 8, /* messages that a link holds */
    HX_LINE_BYTES = 128,
    HX_MAX_LANES = 4 /* connections of a pair of ranks in a group */
};
enum hx_result { HX_DONE = 0, HX_WAITING = 1, HX_ENDED = 2 };
enum hx_end { HX_ABORTED = 1, HX_FIRST_LOST = 2 }; /* end words; the second plus the number of the rank that was lost */
enum hx_dtype { HX_FLOAT32 = 0, HX_BFLOAT16 = 1, HX_FLOAT16 = 2, HX_NUM_DTYPES = 3 };

/* Line 0 of the memory begins with the end word: 0 while the exchange lives. */

/* Line 1 + rank of the memory. */
typedef struct {
    _Atomic uint32_t bell;   /* futex that this rank sleeps on; a peer that wakes it adds one */
    _Atomic uint32_t asleep; /* 1 if a bell has to be rung */
    uint64_t mark;           /* for the caller */
} hx_seat;

/* One rank's attachment. */
typedef struct {
    uint8_t *memory;
    uint64_t rank;
    uint64_t world_size;
    uint64_t area_bytes; /* most bytes of one round or message: a multiple of 64, the same on every rank */
    uint64_t spin_ns;    /* a wait spins until spin_ns after its begin, */
    uint64_t yield_ns;   /* yields its core until yield_ns, then sleeps, */
    uint64_t nap_ns;     /* and returns HX_WAITING at nap_ns */
    _Atomic uint64_t closed;
    uint64_t published_bytes, rounds, messages; /* traffic, counted here */
    uint64_t busy_ns; /* that calls took: bytes moved, sums, and waits */
} hx_rank;

/* Rounds of a group or subgroup. A seat is a rank's place among `ranks`, which ascend. */
typedef struct {
    hx_rank *rank;
    uint64_t size;
    uint64_t own;                        /* this rank's seat */
    uint64_t ranks[HX_MAX_SEATS];        /* numbers in the whole group */
    uint64_t counters[HX_MAX_SEATS];     /* offsets in bytes */
    uint64_t areas[HX_MAX_SEATS][2];     /* offsets, for even and odd rounds */
    uint64_t round;                      /* state, zero at first: last round that this rank published */
    uint64_t settled;                    /* last round that all peers are known to have reached */
    uint64_t offset;                     /* finished bytes of the current message */
    uint64_t published;                  /* 1 if the current slice is published */
    uint64_t late;                       /* seats that did not come in time */
} hx_group;

/* Message of a round. */
typedef struct {
    uint64_t bytes;
    uint64_t dtype;
    uint64_t contributors; /* mask of the seats that send; not empty */
} hx_route;

/* Message of a gathering. */
typedef struct {
    uint64_t bytes[HX_MAX_SEATS]; /* by seat; `out` holds all parts, one after another */
    uint64_t longest;
} hx_gathering;

/* One end of a link. Receivers ascend. */
typedef struct {
    hx_rank *rank;
    uint64_t source;                  /* numbers in the whole group */
    uint64_t size;                    /* number of receivers */
    uint64_t own;                     /* this rank's place among the receivers */
    uint64_t receivers[HX_MAX_SEATS];
    uint64_t sent;                    /* offset of the source's counter */
    uint64_t taken[HX_MAX_SEATS];     /* offsets of the receivers' counters */
    uint64_t areas[HX_LINK_DEPTH];
    uint64_t number;                  /* state: messages that this end has sent or taken */
    uint64_t offset;                  /* finished bytes of the current tensor */
    uint64_t late;                    /* receivers, or bit 0 for the source, that did not come in time */
} hx_link;

/* Returns the first 16 hex digits of the sha256 of the sources, as the build passed them. */
const char *hx_source(void);

/* Replaces data by the sum of the contributors' data: fp32, ascending seats, rounded once. With one contributor, by its
 * bytes, of any type. Every rank of the group calls with the same bytes, dtype and contributors. */
int hx_share(hx_group *group, const hx_route *route, void *data);
/* Fills out with every seat's part. Every rank of the group calls with the same gathering. */
int hx_gather(hx_group *group, const hx_gathering *gathering, const void *mine, void *out);

/* Returns when the link has taken the bytes. */
int hx_send(hx_link *link, const void *data, uint64_t bytes);
int hx_receive(hx_link *link, void *out, uint64_t bytes);

/* hx_free, hx_arrived and hx_pass are for a caller that writes or reads the areas itself, as a device does. No other call
 * for the link may come between those for one tensor. */
/* Returns 1 if the areas up to message `last`, counted from 1 over the link's life, may be written. Does not wait. */
int hx_free(const hx_link *link, uint64_t last);
/* Returns when the next areas hold this many bytes of the next tensor. */
int hx_arrived(hx_link *link, uint64_t bytes);
/* Tells the other end that this many bytes were written to, or read from, the next areas. */
int hx_pass(hx_link *link, uint64_t bytes);

/* Sets the end word unless it is set, and wakes all ranks. Any thread may call. */
void hx_end(hx_rank *rank, uint64_t word);

/* out = terms[0] + terms[1] + …, as hx_share adds. out must not be one of the terms. */
void hx_sum(uint64_t dtype, void *out, const void *const *terms, uint64_t num_terms, uint64_t elements);

/* Over TCP. The caller makes the connections, and closes them after the last call.
 *
 * Nothing stays in this process when a call has succeeded: what it sent is the kernel's. A rank that waits also takes in
 * what came over its links, as much as their rings hold. So two ranks that send to each other do not block each other. */

typedef struct hx_tcp_link hx_tcp_link;

/* One rank's connections. */
typedef struct {
    uint64_t rank;
    uint64_t world_size;
    int32_t controls[HX_MAX_SEATS]; /* by rank: a connection that carries an end word and nothing else; not its own */
    const int32_t *wires;           /* all other connections */
    uint64_t num_wires;
    hx_tcp_link *incoming;          /* links that this rank receives over, a list */
    uint64_t ring_bytes;            /* room for one seat and lane: a multiple of 256 */
    uint64_t split_bytes;           /* a sum of so many bytes goes over all lanes */
    uint64_t spin_ns, yield_ns, nap_ns; /* as in hx_rank; a wait that sleeps wakes when anything arrives */
    _Atomic uint64_t word;          /* end word of this rank: its own, or one that came over a control */
    _Atomic uint64_t closed;
    uint64_t deaf;                  /* state: ranks whose controls are at their end */
    uint64_t published_bytes, rounds, messages, busy_ns;
} hx_tcp_rank;

/* Rounds of a group or subgroup, as hx_group. */
typedef struct {
    hx_tcp_rank *rank;
    uint64_t size;
    uint64_t own;
    uint64_t ranks[HX_MAX_SEATS];
    uint64_t num_lanes;
    int32_t wires[HX_MAX_LANES][HX_MAX_SEATS]; /* connections by lane and seat; not its own */
    uint8_t *rings;                            /* num_lanes * size rings */
    uint64_t sent[HX_MAX_LANES][HX_MAX_SEATS]; /* state, zero at first: bytes of the current message, by lane and seat, */
    uint64_t got[HX_MAX_LANES][HX_MAX_SEATS];
    uint64_t added[HX_MAX_LANES];              /* and those that are done */
    uint64_t begun;                            /* 1 within a message */
    uint64_t round;                            /* messages that this rank has begun */
    uint64_t moved;                            /* bytes that were sent and received */
    uint64_t late;                             /* seats that did not come in time */
} hx_tcp_group;

/* One end of a link, as hx_link. */
struct hx_tcp_link {
    hx_tcp_rank *rank;
    hx_tcp_link *next;                 /* another link that this rank receives over */
    uint64_t source;
    uint64_t size;                     /* number of receivers; 1 at a receiving end */
    uint64_t receivers[HX_MAX_SEATS];
    int32_t wires[HX_MAX_SEATS];       /* by receiver; at a receiving end the first is the source's */
    uint8_t *ring;                     /* receiving end: bytes that came before they were asked for */
    uint64_t ring_bytes;
    uint64_t filled, emptied;          /* state: bytes that went into the ring, and out of it; */
    uint64_t broken;                   /* 1 if the connection is at its end; */
    uint64_t done[HX_MAX_SEATS];       /* bytes of the current tensor, by receiver; */
    uint64_t number;                   /* tensors that this end has sent or taken; */
    uint64_t moved;
    uint64_t late;                     /* as in hx_link */
};

/* As hx_share, hx_gather, hx_send and hx_receive. */
int hx_tcp_share(hx_tcp_group *group, const hx_route *route, void *data);
int hx_tcp_gather(hx_tcp_group *group, const hx_gathering *gathering, const void *mine, void *out);
int hx_tcp_send(hx_tcp_link *link, const void *data, uint64_t bytes);
int hx_tcp_receive(hx_tcp_link *link, void *out, uint64_t bytes);

/* Ends the exchange for all ranks, unless it has ended: every rank that this one reaches learns the word. Any thread. */
void hx_tcp_end(hx_tcp_rank *rank, uint64_t word);
/* Ends it for this rank: others that wait for it find it gone. Any thread. */
void hx_tcp_leave(hx_tcp_rank *rank);

#endif
