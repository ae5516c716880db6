/* What the gated delta rule takes for scratch; for the kernel and what is compiled once. */
#ifndef HETERO_DELTA_H
#define HETERO_DELTA_H

#include "kernel.h"
#include "packing.h"

#define HC_DELTA_UNIT 16 /* floats that a vector of scratch is filled up to a multiple of */

/* A member's own: keys and queries of two tokens, and of one its value, update and sums. */
static inline uint64_t hc_delta_member_bytes(const hc_delta_op *op) {
    uint64_t keys = hc_round_up(op->key_dim, HC_DELTA_UNIT), values = hc_round_up(op->value_dim, HC_DELTA_UNIT);
    return (4 * keys + 4 * values) * sizeof(float);
}

#endif
