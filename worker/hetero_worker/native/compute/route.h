/* What routing takes for scratch; for the kernel and what is compiled once. */
#ifndef HETERO_ROUTE_H
#define HETERO_ROUTE_H

#include "kernel.h"
#include "packing.h"

#define HC_SUM_BLOCK 256u /* products that are added up before they are added to earlier ones */
#define HC_ROUTED_ROWS 256u /* routed at a time */

/* Floats of scratch that all members share, as offsets; rows have their places there. */
typedef struct {
    uint64_t rows;         /* at a time */
    uint64_t width, experts; /* floats of a row, filled up */
    uint64_t normed, factors, logits, scores, preferred;
    uint64_t bytes;
} hc_route_room;

static inline hc_route_room hc_route_room_of(const hc_route_op *op) {
    hc_route_room room = {.rows = op->op.rows < HC_ROUTED_ROWS ? op->op.rows : HC_ROUTED_ROWS,
                          .width = hc_round_up(op->width, HC_SUM_BLOCK),
                          .experts = hc_round_up(op->experts, HC_SUM_BLOCK)};
    uint64_t matrix = room.rows * room.experts;
    room.factors = room.rows * room.width;
    room.logits = room.factors + hc_round_up(room.rows, 16);
    room.scores = room.logits + matrix;
    room.preferred = room.scores + matrix;
    room.bytes = (room.preferred + matrix) * sizeof(float);
    return room;
}

/* A member's own: a row of weights, or what of a row is added up. */
static inline uint64_t hc_route_member_bytes(const hc_route_op *op) {
    uint64_t longest = op->width > op->experts ? op->width : op->experts;
    return hc_round_up(longest, HC_SUM_BLOCK) * sizeof(float);
}

#endif
