/* What linear kernels have in common with what is compiled once: how much scratch they take. */
#ifndef HETERO_LINEAR_H
#define HETERO_LINEAR_H

#include "kernel.h"
#include "packing.h"

#define HC_FEW_ROWS 16 /* up to so many each member prepares for itself; more are prepared together, and met for */
#define HC_ROW_UNIT 16  /* floats of a row of x are filled up to a multiple of it */
#define HC_BLOCK 256u  /* inputs whose products are summed before they are added to earlier ones; a multiple of 16 */
#define HC_X_UNIT 64   /* bytes and inputs of quantised rows are multiples of it */
#define HC_X_GROUP 32  /* inputs of x that share a scale, at most: one large one makes few others coarse */

/* Inputs of a row of x that share a scale when it is quantised: none reaches over a group of the weight's. */
static inline uint64_t hc_x_group(const hc_weight *weight) {
    uint64_t group = HC_X_GROUP;
    while (weight->group % group)
        group /= 2;
    return group;
}

static inline uint64_t hc_x_groups(const hc_weight *weight) {
    return (weight->in + hc_x_group(weight) - 1) / hc_x_group(weight);
}

/* Bytes of a row of x as kernels put it: floats, or quantised with three numbers a group. */
static inline uint64_t hc_row_bytes(const hc_weight *weight) {
    if (!hc_is_quantized(weight))
        return hc_round_up(weight->in, HC_ROW_UNIT) * sizeof(float);
    return hc_round_up(weight->in, HC_X_UNIT) + hc_x_groups(weight) * 3 * sizeof(float);
}

/* Bytes of all rows; there may be one more than there are. */
static inline uint64_t hc_rows_bytes(const hc_linear_op *op) {
    uint64_t rows = op->op.rows == 1 ? 1 : hc_round_up(op->op.rows, 2);
    return hc_round_up(rows * hc_row_bytes(op->weight), 64);
}

/* Bytes of all rows as tiles read them; a tile's rows lie apart as those of a whole one. */
static inline uint64_t hc_tile_rows_bytes(const hc_linear_op *op) {
    return hc_round_up(op->op.rows, HC_TILE_ROWS) * hc_stored_inputs(op->weight) * hc_terms(op->type) * sizeof(uint16_t);
}

#define HC_HIGH_ROWS (2 * HC_TILE_ROWS) /* that tiles multiply at once, with a panel */
#define HC_KEPT_SUMS 64u /* of so many rows and a panel, that are kept from one block of inputs to the next, at most */

/* Bytes of sums that a member keeps, where there are more rows. */
static inline uint64_t hc_kept_bytes(const hc_linear_op *op) {
    uint64_t most = (op->op.rows + HC_HIGH_ROWS - 1) / HC_HIGH_ROWS * hc_panels(op->weight);
    uint64_t sums = op->op.rows <= HC_HIGH_ROWS ? 0 : most < HC_KEPT_SUMS ? most : HC_KEPT_SUMS;
    return sums * HC_HIGH_ROWS * HC_PANEL * sizeof(float);
}

/* Whether kernels copy rows of x before they multiply: all but a single one that is as they want it. */
static inline int hc_copies_rows(const hc_linear_op *op) {
    return op->op.rows > 1 || op->type != HC_F32 || hc_is_quantized(op->weight);
}

/* Bytes of sums that y, of a narrower type, cannot keep from block to block. */
static inline uint64_t hc_sums_bytes(const hc_linear_op *op) {
    int has_one_block = hc_is_quantized(op->weight) || op->weight->in <= HC_BLOCK;
    return op->y_type == HC_F32 || has_one_block ? 0 : op->op.rows * op->weight->out * sizeof(float);
}

/* Whether tiles multiply quantised rows: many, with scales for as many inputs as a tile takes. */
static inline int hc_takes_int_tiles(const hc_linear_op *op) {
    return hc_is_quantized(op->weight) && op->op.rows > HC_FEW_ROWS && hc_x_group(op->weight) == HC_X_GROUP;
}

/* Bytes of a panel's values as signed bytes, for tiles. */
static inline uint64_t hc_panel_spread(const hc_weight *weight) { return hc_round_up(weight->in, HC_X_UNIT) * HC_PANEL; }

/* Bytes of panels that a member spreads at a time: of gates and of ups. */
static inline uint64_t hc_spread_bytes(const hc_linear_op *op) {
    return hc_takes_int_tiles(op) ? 2 * hc_panel_spread(op->weight) : 0;
}

/* Bytes of a panel's 4-bit values, one a byte. */
static inline uint64_t hc_unpacked_bytes(const hc_weight *weight) {
    return hc_has_nibbles(weight) ? hc_stored_inputs(weight) * HC_PANEL : 0;
}

/* What a member takes for products of heads, of up to HC_FEW_ROWS rows. */
static inline uint64_t hc_heads_member_bytes(const hc_heads_op *op) {
    uint64_t rows = op->op.rows < HC_FEW_ROWS ? op->op.rows : HC_FEW_ROWS;
    hc_linear_op one = {.op = {HC_LINEAR, rows}, .weight = op->weights[0], .type = op->type, .y_type = op->type};
    return hc_round_up(hc_linear_scratch(&one, 1), 64);
}

#endif
