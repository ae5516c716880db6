/* RMS norms of rows, with what is added to them first. A row is one member's: at the widths of models, to meet in the
 * middle of one takes longer than half of it. */
#include "vectors.h"

#define SUMS 4 /* side by side: an addition takes as long as several begin */

/* x[i] += delta[i], if there is a delta; returns the sum of squares, in an order that only the width decides. */
static float add_and_square(float *x, const float *delta, uint64_t width) {
    vf sums[SUMS] = {{0}};
    uint64_t i = 0;
    for (; i + SUMS * HC_W <= width; i += SUMS * HC_W)
        for (int k = 0; k < SUMS; k++) {
            vf v = v_load(x + i + k * HC_W);
            if (delta) {
                v += v_load(delta + i + k * HC_W);
                v_store(x + i + k * HC_W, v);
            }
            sums[k] = v_fma(v, v, sums[k]);
        }
    for (int k = 0; i < width; i += HC_W, k++) {
        vf v = v_load_up_to(x + i, width - i);
        if (delta) {
            v += v_load_up_to(delta + i, width - i);
            v_store_up_to(x + i, v, width - i);
        }
        sums[k] = v_fma(v, v, sums[k]);
    }
    return v_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static void normed(const float *x, const float *weight, double factor, uint64_t width, float *y) {
    vf by = v_all((float)factor);
    uint64_t i = 0;
    for (; i + HC_W <= width; i += HC_W)
        v_store(y + i, v_load(x + i) * by * v_load(weight + i));
    if (i < width)
        v_store_some(y + i, v_load_some(x + i, width - i) * by * v_load_some(weight + i, width - i), width - i);
}

void HC_NAME(norm)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_norm_op *op = (const hc_norm_op *)header;
    uint64_t begin, end, width = op->width;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++) {
        float *x = op->x + row * width;
        float squares = add_and_square(x, op->delta ? op->delta + row * width : NULL, width);
        normed(x, op->weight, 1.0 / sqrt((double)squares / (double)width + op->eps), width, op->y + row * width);
    }
}
