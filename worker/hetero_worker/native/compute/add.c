/* x += delta: all rows are one piece of memory. */
#include "vectors.h"

void HC_NAME(add)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_add_op *op = (const hc_add_op *)header;
    uint64_t count = header->rows * op->width, begin, end;
    hc_share_of((count + HC_LANES - 1) / HC_LANES, crew->size, member, &begin, &end);
    begin *= HC_LANES;
    end = end * HC_LANES < count ? end * HC_LANES : count;
    uint64_t i = begin;
    for (; i + HC_W <= end; i += HC_W)
        v_store(op->x + i, v_load(op->x + i) + v_load(op->delta + i));
    for (; i < end; i++)
        op->x[i] += op->delta[i];
}
