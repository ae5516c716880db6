/* Memory that low-rank products compute in; alike for all instruction sets. */
#ifndef HETERO_LOW_RANK_H
#define HETERO_LOW_RANK_H

#include "compute.h"

#define HC_LOW_RANK_ROWS 64 /* rows that are computed between two meetings */

/* Bytes for the products with the first factors: float32 [rows, parts, HC_MAX_RANK]. */
static inline uint64_t hc_low_rank_bytes(const hc_low_rank_op *op) {
    uint64_t rows = op->op.rows < HC_LOW_RANK_ROWS ? op->op.rows : HC_LOW_RANK_ROWS;
    return rows * op->parts * HC_MAX_RANK * sizeof(float);
}

#endif
