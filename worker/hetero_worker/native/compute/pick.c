/* Copies of chosen rows. */
#include "isa.h"

extern hc_kernel HC_NAME(pick);

void HC_NAME(pick)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_pick_op *op = (const hc_pick_op *)header;
    uint64_t begin, end, bytes = op->row_bytes;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++)
        memcpy((char *)op->y + row * bytes, (const char *)op->x + (uint64_t)op->index[row] * bytes, bytes);
}
