/* Rows of gates and ups that are gated together: pieces of a gated operation. */
#ifndef HETERO_GATE_H
#define HETERO_GATE_H

#include "isa.h"

/* Strides are elements from row to row; all are of the operation's type. */
typedef struct {
    uint64_t rows, columns;
    const void *gates, *ups;
    uint64_t gates_stride, ups_stride;
    void *y;
    uint64_t y_stride;
} hc_gate_rows;

typedef void hc_gate_function(const hc_gated_op *op, const hc_gate_rows *rows);

extern hc_gate_function HC_BASE_NAME(gate_rows);

#endif
