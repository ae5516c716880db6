/* How the best of several is found, by columns and by shards; and what a kernel takes for scratch to choose it. */
#ifndef HETERO_CHOOSING_H
#define HETERO_CHOOSING_H

#include <stdatomic.h>

#include "kernel.h"

#define HC_LISTED 2048       /* columns that a list has room for */
#define HC_WANTED 512        /* columns of a nucleus, of which nearly all have less */
#define HC_GROUP_STRIPS 16   /* strips that lie side by side, as lanes do */
#define HC_GROUP_COLUMNS 256 /* of a group of strips, 16 columns each */

typedef struct {
    float score;
    uint32_t column;
} hc_found;

/* Whether a score beats one that comes before it: of equals the first stays, and of those that are no number. */
static inline int hc_beats(float score, float best) {
    return score > best || (score != score && best == best);
}

/* What filters know of a row; its list and its strips follow. */
typedef struct {
    _Atomic uint64_t weight; /* of all columns, where that is asked for */
    _Atomic uint32_t listed; /* more than HC_LISTED: not all of them are */
    float floor;             /* values below it are not listed */
} hc_filtered;

static inline uint64_t hc_strips_of(uint64_t columns) {
    return (columns + HC_GROUP_COLUMNS - 1) / HC_GROUP_COLUMNS * HC_GROUP_STRIPS;
}

static inline uint64_t hc_filter_bytes(uint64_t columns) {
    return sizeof(hc_filtered) + HC_LISTED * (sizeof(float) + sizeof(int32_t)) + hc_strips_of(columns) * sizeof(float);
}

/* What each member has found of each row, then filters' rows. */
static inline uint64_t hc_choose_scratch(const hc_choose_op *op, uint64_t team_size) {
    return op->op.rows * (team_size * sizeof(hc_found) + (op->top_k ? hc_filter_bytes(op->columns) : 0));
}

#endif
