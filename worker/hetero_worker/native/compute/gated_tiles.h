/* What tiles make of sums of gates and of ups, without writing these. */
#ifndef HETERO_GATED_TILES_H
#define HETERO_GATED_TILES_H

#include "gate.h"
#include "linear.h"
#include "tiles.h"

/* Panels that are multiplied together: of gates and of their ups. */
static inline uint64_t hc_sides(const hc_gated_op *gated) { return gated ? 2 : 1; }

/* A product that writes where the result goes: its own, or if `gated` is not NULL the gated one. */
static inline hc_linear_op hc_result_of(const hc_linear_op *op, const hc_gated_op *gated) {
    hc_linear_op result = *op;
    if (gated) {
        result.y = gated->y;
        result.y_stride = gated->columns;
    }
    return result;
}

/* Writes a corner of the result, of sums [rows, HC_PANEL]. Gates and ups are rounded first, as if they had been written. */
static inline void hc_write_gated(const hc_linear_op *op, const hc_gated_op *gated, const hc_corner *corner, uint64_t rows,
                                  const float *gates, const float *ups) {
    const float *sums[2] = {gates, ups};
    _Alignas(64) float rounded[2][HC_HIGH_ROWS * HC_PANEL];
    hc_gate_rows made = {.rows = rows < corner->rows ? rows : corner->rows, .columns = HC_PANEL, .y_stride = gated->columns,
                         .gates = rounded[0], .ups = rounded[1], .gates_stride = HC_PANEL, .ups_stride = HC_PANEL};
    for (uint64_t side = 0; side < 2; side++) {
        hc_linear_op one = *op;
        one.y = rounded[side];
        one.y_stride = HC_PANEL;
        one.bias = op->bias ? hc_at(op->bias, side * gated->columns + corner->column, op->type) : NULL;
        hc_corner here = {.op = &one, .rows = made.rows, .columns = HC_PANEL};
        hc_write_tile(&here, rows, HC_PANEL, sums[side], 1, 1);
    }
    made.y = hc_to(gated->y, corner->row * gated->columns + corner->column, gated->type);
    HC_BASE_NAME(gate_rows)(gated, &made);
}

#endif
