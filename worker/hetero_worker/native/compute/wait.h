/* Words that threads wait for. A waiting thread looks for a change for a while, then sleeps. Nobody yields: a thread that
 * yields to another process gets its core back when that one's turn is over; one that is woken gets it at once.
 *
 * No wake is lost: a thread that goes to sleep counts itself as a sleeper, then looks at the word again within the futex
 * call. Whoever changes the word then looks at the number of sleepers. All of it is sequentially consistent. */
#ifndef HETERO_WAIT_H
#define HETERO_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

#define HC_LINE_BYTES 64

/* A word that only counts up. */
typedef struct {
    _Alignas(HC_LINE_BYTES) _Atomic uint32_t number;
    _Atomic uint32_t sleepers;
} hc_word;

/* Where the members of a team meet. */
struct hc_barrier {
    _Alignas(HC_LINE_BYTES) _Atomic uint64_t arrived;
    hc_word met;
};

void hc_count_up(hc_word *word);
/* Returns when the word differs from what was seen. */
void hc_wait_for(hc_word *word, uint32_t seen, uint64_t spin_ns);

#endif
