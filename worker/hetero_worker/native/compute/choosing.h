/* How the best of several is found, by columns and by shards. */
#ifndef HETERO_CHOOSING_H
#define HETERO_CHOOSING_H

#include <stdint.h>

typedef struct {
    float score;
    uint32_t column;
} hc_found;

/* Whether a score beats one that comes before it: of equals the first stays, and of those that are no number. */
static inline int hc_beats(float score, float best) {
    return score > best || (score != score && best == best);
}

#endif
