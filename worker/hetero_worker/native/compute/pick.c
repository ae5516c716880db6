/* Copies of chosen rows. */
#include "isa.h"

void HC_NAME(pick)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_pick_op *op = (const hc_pick_op *)header;
    uint64_t begin, end;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++)
        memcpy(op->y + row * op->width, op->x + (uint64_t)op->index[row] * op->width, op->width * sizeof *op->y);
}
