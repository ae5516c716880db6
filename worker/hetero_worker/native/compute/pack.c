/* Puts matrices in the order of packing.h. Members write contiguous panels, those that they will multiply with. */
#include <string.h>

#include "linear.h"

#define PIECE 256u /* inputs of all of a panel's rows that are packed before the next ones: what is written stays in cache */

extern hc_kernel hc_pack;

uint64_t hc_packed_bytes(const hc_weight *weight, uint64_t which) {
    if (which == 0)
        return hc_panels(weight) * hc_panel_bytes(weight);
    if (!hc_has_scales(weight) || (which == 2 && !weight->minima))
        return 0;
    return hc_panels(weight) * hc_groups(weight) * HC_PANEL * sizeof(uint16_t);
}

/* Rounded to nearest, ties to even; what is too large becomes infinite. */
static uint16_t to_half(float value) {
    uint32_t bits, magnitude;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return sign | 0x7e00u;
    if (magnitude >= 0x47800000u)
        return sign | 0x7c00u;
    if (magnitude < 0x38800000u) { /* subnormal: counts in 2^-24, and adding 0.5 rounds at that place */
        float sum, half = 0.5f;
        memcpy(&value, &magnitude, sizeof value);
        sum = value + half;
        memcpy(&bits, &sum, sizeof bits);
        return sign | (uint16_t)(bits & 0x7ffu);
    }
    return sign | (uint16_t)((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

/* Numbers [begin, end) of one output row, `row`, to its lane of a panel. */
static void pack_words(const uint32_t *row, uint32_t *lane, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i++)
        lane[i * HC_PANEL] = row[i];
}

static void pack_halves(const uint16_t *row, uint16_t *lane, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i++)
        lane[i * HC_PANEL] = row[i];
}

/* Behind `in` there are values that stand for 0, as far as they are stored. */
static void pack_pairs(const uint16_t *row, uint16_t *lane, uint64_t begin, uint64_t end, uint64_t in) {
    for (uint64_t i = begin; i < end; i++)
        lane[i / 2 * 2 * HC_PANEL + 1 - i % 2] = i < in ? row[i] : 0;
}

static void pack_bytes(const uint8_t *row, uint8_t *lane, uint64_t begin, uint64_t end, uint64_t in) {
    for (uint64_t i = begin; i < end; i++)
        lane[i / 4 * 4 * HC_PANEL + i % 4] = (uint8_t)((i < in ? row[i] : 0) + HC_I8_ZERO);
}

static void pack_floats(const uint8_t *row, uint8_t *lane, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i++)
        lane[i * HC_PANEL] = row[i];
}

static void pack_nibbles(const uint8_t *row, uint8_t *lane, uint64_t begin, uint64_t end, uint64_t in) {
    for (uint64_t i = begin; i < end; i += 8)
        for (uint64_t j = 0; j < 4; j++) {
            uint8_t low = i + j < in ? row[i + j] & 15 : 0, high = i + j + 4 < in ? row[i + j + 4] & 15 : 0;
            lane[i / 8 * 4 * HC_PANEL + j] = (uint8_t)(low | high << 4);
        }
}

static void pack_some(const hc_pack_op *op, uint64_t row, uint64_t begin, uint64_t end) {
    static const uint64_t widths[HC_FORMATS] = {4, 2, 2, 1, 1, 1, 1}, lanes[HC_FORMATS] = {4, 4, 2, 4, 4, 1, 4};
    const hc_weight *weight = op->weight;
    uint64_t width = widths[weight->format];
    const void *from = (const char *)op->values + row * op->stride * width;
    void *lane = (char *)hc_panel(weight, row / HC_PANEL) + row % HC_PANEL * lanes[weight->format];
    if (weight->format == HC_I8)
        pack_bytes(from, lane, begin, end, weight->in);
    else if (weight->format == HC_F8)
        pack_floats(from, lane, begin, end);
    else if (hc_has_nibbles(weight))
        pack_nibbles(from, lane, begin, end, weight->in);
    else if (weight->format == HC_BF16)
        pack_pairs(from, lane, begin, end, weight->in);
    else if (width == sizeof(uint32_t))
        pack_words(from, lane, begin, end);
    else
        pack_halves(from, lane, begin, end);
}

static void pack_numbers(const hc_pack_op *op, const float *numbers, const void *packed, uint64_t row) {
    uint64_t groups = hc_groups(op->weight);
    uint16_t *out = (uint16_t *)packed + row / HC_PANEL * groups * HC_PANEL + row % HC_PANEL;
    for (uint64_t group = 0; group < groups; group++)
        out[group * HC_PANEL] = to_half(numbers[row * groups + group]);
}

/* Rows [first, behind), of one panel. */
static void pack_panel(const hc_pack_op *op, uint64_t first, uint64_t behind) {
    uint64_t stored = hc_stored_inputs(op->weight);
    for (uint64_t begin = 0; begin < stored; begin += PIECE)
        for (uint64_t row = first; row < behind; row++)
            pack_some(op, row, begin, begin + PIECE < stored ? begin + PIECE : stored);
    for (uint64_t row = first; row < behind; row++) {
        if (op->scales)
            pack_numbers(op, op->scales, op->weight->scales, row);
        if (op->minima)
            pack_numbers(op, op->minima, op->weight->minima, row);
    }
}

void hc_pack(const hc_op *any, hc_crew *crew, uint64_t member) {
    const hc_pack_op *op = (const hc_pack_op *)any;
    const hc_weight *weight = op->weight;
    uint64_t begin, end, numbers = hc_groups(weight) * HC_PANEL * sizeof(uint16_t);
    hc_share_of(hc_panels(weight), crew->size, member, &begin, &end);
    for (uint64_t panel = begin; panel < end; panel++) {
        uint64_t first = panel * HC_PANEL, behind = first + HC_PANEL;
        if (behind > weight->out) { /* rows that do not exist */
            behind = weight->out;
            memset((char *)hc_panel(weight, panel), 0, hc_panel_bytes(weight));
            if (op->scales)
                memset((char *)weight->scales + panel * numbers, 0, numbers);
            if (op->minima)
                memset((char *)weight->minima + panel * numbers, 0, numbers);
        }
        pack_panel(op, first, behind);
    }
}

uint64_t hc_linear_scratch(const hc_linear_op *op, uint64_t team_size) {
    const hc_weight *weight = op->weight;
    uint64_t rows = op->op.rows;
    uint64_t of_rows = rows <= HC_FEW_ROWS ? team_size : 1;
    uint64_t bytes = (hc_copies_rows(op) ? of_rows * hc_rows_bytes(op) : 0) + hc_sums_bytes(op);
    uint64_t tiles = 0;
    bytes += team_size * hc_unpacked_bytes(weight);
    if (weight->format == HC_BF16)
        tiles = of_rows * hc_tile_rows_bytes(op) + team_size * hc_kept_bytes(op);
    else if (hc_takes_int_tiles(op))
        tiles = hc_tile_rows(rows) * hc_row_bytes(weight) + team_size * hc_spread_bytes(op);
    return bytes > tiles ? bytes : tiles;
}
