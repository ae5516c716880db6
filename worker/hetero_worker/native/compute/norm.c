/* RMS norms of rows, after an addition to them. One member computes a row: at the widths of models, a meeting in the
 * middle of a row takes longer than half of it. */
#include "vectors.h"

extern hc_kernel HC_NAME(norm);

#define SUMS 4 /* independent sums hide the latency of additions */

/* v, or the number stored at x after delta is added to it; the store rounds to the type. */
V_INLINE vf added(void *x, const void *delta, uint64_t count, const uint64_t type) {
    vf v = v_load_up_to_as(x, count, type);
    if (!delta)
        return v;
    v += v_load_up_to_as(delta, count, type);
    v_store_up_to_as(x, v, count, type);
    return type == HC_F32 ? v : v_widen(v_narrow(v));
}

V_INLINE vf added_at(void *x, const void *delta, uint64_t i, uint64_t count, const uint64_t type) {
    return added(hc_to(x, i, type), delta ? hc_at(delta, i, type) : NULL, count, type);
}

/* x[i] += delta[i], if there is a delta; returns the sum of squares, in an order that only the width decides. */
V_INLINE float add_and_square(void *x, const void *delta, uint64_t width, const uint64_t type) {
    vf sums[SUMS] = {{0}};
    uint64_t i = 0;
    for (; i + SUMS * HC_W <= width; i += SUMS * HC_W)
        for (int k = 0; k < SUMS; k++) {
            vf v = added_at(x, delta, i + (uint64_t)k * HC_W, HC_W, type);
            sums[k] = v_fma(v, v, sums[k]);
        }
    for (int k = 0; i < width; i += HC_W, k++) {
        vf v = added_at(x, delta, i, width - i, type);
        sums[k] = v_fma(v, v, sums[k]);
    }
    return v_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

V_INLINE void scale(const void *x, const hc_norm_op *op, double factor, void *y, const uint64_t type,
                    const uint64_t weight_type) {
    vf by = v_all((float)factor);
    uint64_t width = op->width, i = 0;
    for (; i + HC_W <= width; i += HC_W)
        v_store_as(hc_to(y, i, type),
                   v_load_as(hc_at(x, i, type), type) * by * v_load_as(hc_at(op->weight, i, weight_type), weight_type),
                   type);
    if (i < width)
        v_store_up_to_as(hc_to(y, i, type),
                         v_load_up_to_as(hc_at(x, i, type), width - i, type) * by *
                             v_load_up_to_as(hc_at(op->weight, i, weight_type), width - i, weight_type),
                         width - i, type);
}

V_INLINE void norm_rows(const hc_norm_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    uint64_t width = op->width;
    for (uint64_t row = begin; row < end; row++) {
        void *x = hc_to(op->x, row * width, type), *y = hc_to(op->y, row * width, type);
        float squares = add_and_square(x, op->delta ? hc_at(op->delta, row * width, type) : NULL, width, type);
        double factor = 1.0 / sqrt((double)squares / (double)width + op->eps);
        if (op->weight_type == HC_BF16)
            scale(x, op, factor, y, type, HC_BF16);
        else
            scale(x, op, factor, y, type, HC_F32);
    }
}

void HC_NAME(norm)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_norm_op *op = (const hc_norm_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    V_TYPED(op->type, norm_rows, op, begin, end);
}
