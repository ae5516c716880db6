/* Copies of rows, or of parts of them. */
#include "isa.h"

extern hc_kernel HC_NAME(pick);

void HC_NAME(pick)(const hc_op *header, hc_crew *crew, uint64_t member) {
    const hc_pick_op *op = (const hc_pick_op *)header;
    uint64_t begin, end, bytes = op->row_bytes;
    uint64_t from = op->x_stride ? op->x_stride : bytes, to = op->y_stride ? op->y_stride : bytes;
    hc_share_of(header->rows, crew->size, member, &begin, &end);
    for (uint64_t row = begin; row < end; row++) {
        char *y = (char *)op->y + row * to;
        if (op->x)
            memcpy(y, (const char *)op->x + (op->index ? (uint64_t)op->index[row] : row) * from, bytes);
        else
            memset(y, 0, bytes);
    }
}
