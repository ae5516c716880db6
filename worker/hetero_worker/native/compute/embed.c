/* Looks rows of a packed table up. A row lies in one lane of its panel, so HC_PANEL rows' bytes are read for one; members
 * share the inputs of each row, for a step may have one row only. */
#include "small_floats.h"

extern hc_kernel HC_NAME(embed);

#define PIECE 64 /* inputs that one member looks up at a time; a multiple of all units */

/* Values of the panel's lane, for inputs [begin, end), to y. */
static void floats(const hc_weight *table, const void *panel, uint64_t lane, uint64_t begin, uint64_t end, float *y) {
    for (uint64_t i = begin; i < end; i++, y++) {
        uint64_t at = i * HC_PANEL + lane;
        if (table->format == HC_F32) {
            *y = ((const float *)panel)[at];
        } else if (table->format == HC_F16) {
            *y = hc_half_to_float(((const uint16_t *)panel)[at]);
        } else if (table->format == HC_F8) {
            *y = hc_half_to_float(hc_half_of_f8(((const uint8_t *)panel)[at]));
        } else {
            uint32_t bits = (uint32_t)((const uint16_t *)panel)[(i / 2 * HC_PANEL + lane) * 2 + 1 - i % 2] << 16;
            memcpy(y, &bits, sizeof bits);
        }
    }
}

static void whole_numbers(const hc_weight *table, const uint8_t *panel, uint64_t lane, uint64_t begin, uint64_t end,
                          float *y) {
    static const uint8_t floats_of[16] = {HC_F4_TABLE};
    int is_float = table->format == HC_F4, zero = hc_stored_zero(table);
    for (uint64_t i = begin; i < end; i++) {
        int value;
        if (table->format == HC_I8)
            value = panel[(i / 4 * HC_PANEL + lane) * 4 + i % 4];
        else
            value = panel[(i / 8 * HC_PANEL + lane) * 4 + i % 4] >> i % 8 / 4 * 4 & 15;
        *y++ = (float)((is_float ? floats_of[value] : value) - zero);
    }
}

static void scale_by_group(const hc_weight *table, uint64_t row, uint64_t begin, uint64_t end, float *y) {
    const uint16_t *scales = hc_panel_numbers(table, table->scales, row / HC_PANEL) + row % HC_PANEL;
    const uint16_t *minima =
        table->minima ? hc_panel_numbers(table, table->minima, row / HC_PANEL) + row % HC_PANEL : NULL;
    for (uint64_t i = begin; i < end; i++, y++) {
        uint64_t at = (table->group ? i / table->group : 0) * HC_PANEL;
        *y = *y * hc_half_to_float(scales[at]) + (minima ? hc_half_to_float(minima[at]) : 0.0f);
    }
}

static void look_up(const hc_weight *table, uint64_t row, uint64_t begin, uint64_t end, float *y) {
    const void *panel = hc_panel(table, row / HC_PANEL);
    if (hc_is_quantized(table))
        whole_numbers(table, panel, row % HC_PANEL, begin, end, y);
    else
        floats(table, panel, row % HC_PANEL, begin, end, y);
    if (hc_has_scales(table))
        scale_by_group(table, row, begin, end, y);
}

void HC_NAME(embed)(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_embed_op *op = (const hc_embed_op *)any;
    const hc_weight *table = op->table;
    uint64_t pieces = (table->in + PIECE - 1) / PIECE, first, behind;
    float scale = (float)op->scale;
    hc_share_of(op->op.rows * pieces, crew->size, member, &first, &behind);
    for (uint64_t at = first; at < behind; at++) {
        uint64_t begin = at % pieces * PIECE, end = begin + PIECE < table->in ? begin + PIECE : table->in;
        uint64_t row = (uint64_t)(op->ids[at / pieces] - op->first);
        void *y = hc_to(op->y, at / pieces * table->in + begin, op->type);
        if (row >= table->out) { /* the difference wraps where it is negative */
            memset(y, 0, (end - begin) * hc_width_of(op->type));
            continue;
        }
        float found[PIECE];
        look_up(table, row, begin, end, found);
        for (uint64_t i = 0, count = end - begin; i < count; i += HC_W)
            v_store_up_to_as(hc_to(y, i, op->type), v_load_up_to(found + i, count - i) * scale, count - i, op->type);
    }
}
