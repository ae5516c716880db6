/* x = factor * (x + deltas). All rows are one piece of memory, which members share. */
#include "vectors.h"

extern hc_kernel HC_NAME(add);

V_INLINE void add_all(const hc_add_op *op, uint64_t begin, uint64_t end, const uint64_t type) {
    for (uint64_t i = begin; i < end; i += HC_W) {
        vf sum = v_load_up_to_as(hc_at(op->x, i, type), end - i, type);
        for (uint64_t k = 0; k < op->num_deltas; k++)
            sum += v_load_up_to_as(hc_at(op->deltas[k], i, type), end - i, type);
        v_store_up_to_as(hc_to(op->x, i, type), sum * op->factor, end - i, type);
    }
}

void HC_NAME(add)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_add_op *op = (const hc_add_op *)header;
    uint64_t count = header->rows * op->width, begin, end;
    hc_share_of((count + HC_LANES - 1) / HC_LANES, crew->size, member, &begin, &end);
    begin *= HC_LANES;
    end = end * HC_LANES < count ? end * HC_LANES : count;
    V_TYPED(op->type, add_all, op, begin, end);
}
