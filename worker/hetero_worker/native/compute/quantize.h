/* Rows of x as whole numbers: x = q * scale, q in -127..127, with a scale for each group of hc_x_group inputs.
 *
 * A tile's rows lie together, as they are multiplied: q [inputs / 64][rows][64], then for each group and row where its
 * sums start, its scale, and its scale times the sum of its q: [groups][rows] each. */
#ifndef HETERO_QUANTIZE_H
#define HETERO_QUANTIZE_H

#include "bytes.h"
#include "linear.h"

typedef struct {
    int8_t *q;
    int32_t *starts; /* what sums begin with, so that zeros of weights are taken off */
    float *scales;
    float *sums;
} hc_quantized;

/* Where a tile's numbers are that has its place at `at`. */
static inline hc_quantized hc_quantized_at(const hc_weight *weight, void *at, uint64_t rows) {
    int8_t *q = at;
    int32_t *starts = (int32_t *)(q + hc_round_up(weight->in, HC_X_UNIT) * rows);
    float *scales = (float *)(starts + hc_x_groups(weight) * rows);
    return (hc_quantized){q, starts, scales, scales + hc_x_groups(weight) * rows};
}

/* What a weight's numbers are more than they stand for, as v_dot sees them. */
static inline int32_t hc_zero_of(const hc_weight *weight) {
    return weight->format == HC_I8 && HC_DOT_TAKES_ZERO ? 0 : hc_stored_zero(weight);
}

/* A group of up to 32 inputs; writes them up to a multiple of 16. A group with an infinite number, or none, has no number
 * for scale, and so has what is multiplied with it. */
static inline void hc_quantize_group(const void *x, uint64_t type, uint64_t count, int8_t *q, float *scale,
                                     int32_t *sum) {
    vf v[HC_X_GROUP / HC_W];
    uint64_t vectors = hc_round_up(count, HC_LANES) / HC_W;
    vi largest = v_all_of(0), total = v_all_of(0);
    for (uint64_t i = 0; i < vectors; i++) {
        uint64_t begin = i * HC_W;
        v[i] = count > begin ? v_load_up_to_as(hc_at(x, begin, type), count - begin, type) : v_all(0);
        largest = v_greater(largest, (vi)v[i] & 0x7fffffff); /* magnitudes are in order as whole numbers */
    }
    int32_t bits = v_greatest(largest);
    float magnitude, inverse;
    memcpy(&magnitude, &bits, sizeof bits);
    int is_number = bits < 0x7f800000;
    inverse = is_number && magnitude > 1e-30f ? 127.0f / magnitude : 0.0f;
    *scale = is_number ? magnitude > 1e-30f ? magnitude / 127.0f : 0.0f : NAN;
    for (uint64_t i = 0; i < vectors; i++) {
        vi rounded = is_number ? v_round(v[i] * inverse) : v_all_of(0);
        total += rounded;
        v_store_as_bytes(q + i * HC_W, rounded);
    }
    *sum = v_sum_ints(total);
}

/* A row of x as row `r` of a tile of `rows`; zeros if x has no such row. */
static inline void hc_quantize_row(const hc_linear_op *op, uint64_t row, uint64_t r, uint64_t rows,
                                   const hc_quantized *out) {
    const hc_weight *weight = op->weight;
    uint64_t in = weight->in, group = hc_x_group(weight);
    const void *x = row < op->op.rows ? hc_at(op->x, row * op->x_stride, op->type) : NULL;
    int32_t zero = hc_zero_of(weight);
    if (in % HC_X_UNIT)
        memset(out->q + (in / HC_X_UNIT * rows + r) * HC_X_UNIT, 0, HC_X_UNIT);
    for (uint64_t begin = 0, g = r; begin < in; begin += group, g += rows) {
        int8_t *q = out->q + (begin / HC_X_UNIT * rows + r) * HC_X_UNIT + begin % HC_X_UNIT;
        uint64_t count = in - begin < group ? in - begin : group;
        int32_t sum = 0;
        if (x) {
            hc_quantize_group(hc_at(x, begin, op->type), op->type, count, q, &out->scales[g], &sum);
        } else {
            memset(q, 0, group);
            out->scales[g] = 0;
        }
        out->starts[g] = -zero * sum;
        out->sums[g] = out->scales[g] * (float)sum;
    }
}

#endif
