/* Where the numbers of a packed matrix lie. Known to whoever packs, multiplies and looks up, and to nobody else.
 *
 * HC_PANEL output rows are a panel, two vectors of 16 lanes for each input: what one thread reads for one row of x is a
 * single stream, at the memory's speed; with panels of 16, four of which are multiplied at once, it was a quarter slower.
 * Panels follow one another, the last is filled up with zeros, and so is each row to the format's unit of inputs:
 *
 *     F32, F16  [panel][input][32]
 *     BF16    [panel][input / 2][32][2]: pairs, the first input in the upper half of 32 bits; filled up to HC_PAIRED_INPUTS
 *     I8      [panel][input / 4][32][4]: v + 128, as dot products of bytes want one side without a sign
 *     F8      [panel][input][32]
 *     I4, F4  [panel][input / 8][32][4]: the low four bits of the bytes are inputs 0..3 of eight, the high ones 4..7
 *     scales, minima  [panel][group][32], float16 */
#ifndef HETERO_PACKING_H
#define HETERO_PACKING_H

#include "compute.h"

#define HC_I8_ZERO 128 /* what an I8 byte is that stands for 0 */
#define HC_I4_ZERO 8   /* the same of I4 without minima */
#define HC_F4_ZERO 12  /* what twice a 4-bit float is more than itself, once it is looked up */

#define HC_TILE_ROWS 16     /* of amx.h */
#define HC_PAIRED_INPUTS 32 /* what a tile takes of bfloat16 inputs at once */

static inline uint64_t hc_round_up(uint64_t count, uint64_t unit) { return (count + unit - 1) / unit * unit; }

/* Terms of bfloat16 that a number of a row is the sum of, where tiles multiply. */
static inline uint64_t hc_terms(uint64_t type) { return type == HC_F32 ? 3 : 1; }

/* Rows as they are put together for tiles: all of one, or whole ones. */
static inline uint64_t hc_tile_rows(uint64_t rows) {
    return rows <= HC_TILE_ROWS ? rows : hc_round_up(rows, HC_TILE_ROWS);
}

static inline uint64_t hc_panels(const hc_weight *weight) { return (weight->out + HC_PANEL - 1) / HC_PANEL; }

/* Whether rows are made whole numbers beside it. */
static inline int hc_is_quantized(const hc_weight *weight) {
    return weight->format >= HC_I8 && weight->format != HC_F8;
}

/* What a stored value is that stands for 0, floats of 4 bits looked up. */
static inline uint8_t hc_stored_zero(const hc_weight *weight) {
    if (weight->format == HC_I8)
        return HC_I8_ZERO;
    if (weight->format == HC_F4)
        return HC_F4_ZERO;
    return weight->minima ? 0 : HC_I4_ZERO;
}

static inline int hc_has_scales(const hc_weight *weight) { return weight->format >= HC_I8; }

/* Whether two values lie in a byte. */
static inline int hc_has_nibbles(const hc_weight *weight) {
    return weight->format == HC_I4 || weight->format == HC_F4;
}

/* Inputs of a row as they are stored. */
static inline uint64_t hc_stored_inputs(const hc_weight *weight) {
    static const uint64_t units[HC_FORMATS] = {1, HC_PAIRED_INPUTS, 1, 4, 8, 1, 8};
    return hc_round_up(weight->in, units[weight->format]);
}

static inline uint64_t hc_groups(const hc_weight *weight) {
    return weight->group ? (weight->in + weight->group - 1) / weight->group : weight->in > 0;
}

/* Bytes of a panel's values. */
static inline uint64_t hc_panel_bytes(const hc_weight *weight) {
    static const uint64_t halves[HC_FORMATS] = {8, 4, 4, 2, 1, 2, 1}; /* of a byte, for a number */
    return hc_stored_inputs(weight) * HC_PANEL * halves[weight->format] / 2;
}

static inline const void *hc_panel(const hc_weight *weight, uint64_t panel) {
    return (const char *)weight->values + panel * hc_panel_bytes(weight);
}

/* Of `numbers`, which are a weight's scales or minima: those of a panel. */
static inline const uint16_t *hc_panel_numbers(const hc_weight *weight, const void *numbers, uint64_t panel) {
    return (const uint16_t *)numbers + panel * hc_groups(weight) * HC_PANEL;
}

#endif
